//! The steps of Stable Diffusion 3.5's transformer, as `engine/src/models/sd3`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::conditions::Conditions;
use super::layers::Layer;
use super::meter::MetaTensor;
use super::mmdit::{AdaNorm, Embedder, FeedForward, Projections, SINUSOIDS, gated_feed_forward, plain_norm};
use super::tape::Walk;
use super::tensors::AttentionOptions;
use crate::plan::shapes::TransformerShapes;
use std::rc::Rc;

#[expect(clippy::large_enum_variant, reason = "a model has at most some dozens of them")]
enum ImageNorm {
    Single(AdaNorm<6>),
    /// With a second attention between image tokens.
    Dual {
        norm: AdaNorm<9>,
        attention: Projections,
        to_out: Layer,
    },
}

#[expect(clippy::large_enum_variant, reason = "a model has at most some dozens of them")]
enum TextStream {
    Full {
        norm: AdaNorm<6>,
        to_out: Layer,
        ff: FeedForward,
    },
    /// The last block: the text gives only keys and values.
    Last(AdaNorm<2>),
}

/// The vectors after the shift and the scale: the gate of attention, and shift, scale and gate of the feed-forward layers.
type Vectors = [MetaTensor; 4];

struct Block {
    image_norm: ImageNorm,
    to_out: Layer,
    text: TextStream,
    image_attention: Projections,
    ff: FeedForward,
    text_attention: Projections,
    options: AttentionOptions,
}

impl Block {
    fn new(b: &mut Builder, name: &str, shapes: &TransformerShapes, is_dual: bool, is_last: bool) -> Self {
        let width = shapes.width();
        let norm_width = shapes.qk_norm.then(|| f64::from(shapes.head_width));
        let (attn, attn2) = (format!("{name}.attn"), format!("{name}.attn2"));
        let square = LayerSizes::linear(width, width, true);
        let norm1 = format!("{name}.norm1");
        let image_norm = match is_dual {
            false => ImageNorm::Single(AdaNorm::new(b, &norm1, width)),
            true => ImageNorm::Dual {
                norm: AdaNorm::new(b, &norm1, width),
                attention: Projections::of_image(b, &attn2, width, norm_width),
                to_out: b.layer(&format!("{attn2}.to_out.0"), square),
            },
        };
        let to_out = b.layer(&format!("{attn}.to_out.0"), square);
        let norm1_context = format!("{name}.norm1_context");
        let text = match is_last {
            true => TextStream::Last(AdaNorm::new(b, &norm1_context, width)),
            false => TextStream::Full {
                norm: AdaNorm::new(b, &norm1_context, width),
                to_out: b.layer(&format!("{attn}.to_add_out"), square),
                ff: FeedForward::new(b, &format!("{name}.ff_context"), width),
            },
        };
        Self {
            image_norm,
            to_out,
            text,
            image_attention: Projections::of_image(b, &attn, width, norm_width),
            ff: FeedForward::new(b, &format!("{name}.ff"), width),
            text_attention: Projections::of_text(b, &attn, width, norm_width),
            options: AttentionOptions {
                heads: f64::from(shapes.heads),
                ..AttentionOptions::default()
            },
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor, text: &MetaTensor, temb: &MetaTensor) -> Vec<MetaTensor> {
        let (h, vectors, second) = self.normalised(walk, x, temb);
        let (h_text, text_vectors) = match &self.text {
            TextStream::Full { norm, .. } => {
                let (h, [_, _, gate, shift, scale, gate_mlp]) = norm.forward(walk, text, temb);
                (h, Some([gate, shift, scale, gate_mlp]))
            }
            TextStream::Last(norm) => (norm.forward(walk, text, temb).0, None),
        };
        let image_qkv = self.image_attention.forward(walk, &h);
        let text_qkv = self.text_attention.forward(walk, &h_text);
        let [q, k, v] = [0, 1, 2].map(|i: usize| walk.cat(&image_qkv[i], &text_qkv[i]));
        let all = walk.attention(&q, &k, &v, self.options);
        drop((q, k, v));

        let [gate, shift, scale, gate_mlp] = &vectors;
        let attended = walk.narrow(&all, 1, x.dims[1]);
        let mut x = walk.gated_residual(x, gate, &walk.linear(&self.to_out, &attended));
        if let Some((attended, gate)) = &second {
            x = walk.gated_residual(&x, gate, attended);
        }
        drop(second);
        let x = gated_feed_forward(walk, &self.ff, &x, [shift, scale, gate_mlp]);
        let (TextStream::Full { to_out, ff, .. }, Some([gate, shift, scale, gate_mlp])) = (&self.text, &text_vectors)
        else {
            return vec![x];
        };
        let attended_text = walk.narrow(&all, 1, text.dims[1]);
        let text = walk.gated_residual(text, gate, &walk.linear(to_out, &attended_text));
        let text = gated_feed_forward(walk, ff, &text, [shift, scale, gate_mlp]);
        drop((h, h_text, image_qkv, text_qkv, all, attended, attended_text));
        vec![x, text]
    }

    /// The normalised image tokens and the vectors of the stream; and the result of the second attention with its gate.
    fn normalised(
        &self,
        walk: &Walk,
        x: &MetaTensor,
        temb: &MetaTensor,
    ) -> (MetaTensor, Vectors, Option<(MetaTensor, MetaTensor)>) {
        match &self.image_norm {
            ImageNorm::Single(norm) => {
                let (h, [_, _, gate, shift, scale, gate_mlp]) = norm.forward(walk, x, temb);
                (h, [gate, shift, scale, gate_mlp], None)
            }
            ImageNorm::Dual {
                norm,
                attention,
                to_out,
            } => {
                let [
                    shift,
                    scale,
                    gate,
                    shift_mlp,
                    scale_mlp,
                    gate_mlp,
                    shift_2,
                    scale_2,
                    gate_2,
                ] = norm.vectors(walk, temb);
                let normalised = plain_norm(walk, x);
                let [q, k, v] = attention.forward(walk, &walk.modulate(&normalised, &scale_2, &shift_2));
                let attended = walk.attention(&q, &k, &v, self.options);
                let second = walk.linear(to_out, &attended);
                let h = walk.modulate(&normalised, &scale, &shift);
                (h, [gate, shift_mlp, scale_mlp, gate_mlp], Some((second, gate_2)))
            }
        }
    }
}

/// Stable Diffusion 3.5's transformer.
pub(in crate::plan) struct Sd3 {
    patches: Layer,
    timestep: Embedder,
    pooled: Embedder,
    context_embedder: Layer,
    blocks: Vec<Rc<Block>>,
    norm_out: AdaNorm<2>,
    proj_out: Layer,
}

impl Sd3 {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &TransformerShapes) -> Self {
        let (width, patch) = (shapes.width(), f64::from(shapes.patch));
        let table = f64::from(shapes.positions);
        let patches = LayerSizes {
            stride: patch,
            padding: 0.0,
            ..LayerSizes::conv(f64::from(shapes.in_channels), width, patch)
        };
        let patches = b.layer("pos_embed.proj", patches);
        b.buffer(table * table * width);
        let embedder = |b: &mut Builder, name: &str, inputs: f64| {
            Embedder::new(b, &format!("time_text_embed.{name}"), inputs, width)
        };
        Self {
            patches,
            timestep: embedder(b, "timestep_embedder", SINUSOIDS),
            pooled: embedder(b, "text_embedder", f64::from(shapes.pooled)),
            context_embedder: b.layer(
                "context_embedder",
                LayerSizes::linear(f64::from(shapes.context), width, true),
            ),
            blocks: (0..shapes.blocks)
                .map(|i| {
                    let (is_dual, is_last) = (i < shapes.dual_blocks, i + 1 == shapes.blocks);
                    let name = format!("transformer_blocks.{i}");
                    Rc::new(Block::new(b, &name, shapes, is_dual, is_last))
                })
                .collect(),
            norm_out: AdaNorm::new(b, "norm_out", width),
            proj_out: b.layer("proj_out", LayerSizes::linear(width, shapes.token(), true)),
        }
    }

    /// A pass over latents [batch, channels, height, width].
    pub(super) fn forward(
        &self,
        walk: &Walk,
        latents: &MetaTensor,
        conditions: &Conditions,
        checkpointed: bool,
    ) -> Option<MetaTensor> {
        let patched = walk.conv(&self.patches, latents);
        let [batch, width, rows, columns] = patched.dims;
        let tokens = [batch, rows * columns, width, 1.0];
        let positions = walk.tensor([1.0, rows * columns, width, 1.0], false);
        let x = walk.add(&walk.rearranged(&patched, tokens), &positions);
        drop(patched);
        let mut temb = self.timestep.forward_numbers(walk, batch);
        if let Some(pooled) = &conditions.pooled {
            temb = walk.add(&temb, &self.pooled.forward(walk, pooled));
        }
        let text = walk.linear(&self.context_embedder, &conditions.text);

        let mut sequence = BlockSequence::default();
        let (mut x, mut text) = (sequence.input(x), sequence.input(text));
        let conditioning = sequence.input(temb.clone());
        for (index, block) in self.blocks.iter().enumerate() {
            let block = Rc::clone(block);
            let forward = move |walk: &Walk, inputs: &[MetaTensor]| match inputs {
                [x, text, temb] => block.forward(walk, x, text, temb),
                other => other.to_vec(),
            };
            let inputs = [x, text, conditioning];
            if index + 1 == self.blocks.len() {
                [x] = sequence.add_with_outputs(&inputs, forward);
            } else {
                [x, text] = sequence.add_with_outputs(&inputs, forward);
            }
        }
        let x = sequence.run(walk, checkpointed, x)?;
        let [scale, shift] = self.norm_out.vectors(walk, &temb);
        let normed = walk.modulate(&plain_norm(walk, &x), &scale, &shift);
        let predicted = walk.linear(&self.proj_out, &normed);
        drop(positions);
        Some(walk.rearranged(&predicted, latents.dims))
    }
}
