//! The steps of FLUX.1's transformer, as `engine/src/models/flux`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::conditions::Conditions;
use super::layers::Layer;
use super::meter::MetaTensor;
use super::mmdit::{AdaNorm, Embedder, FeedForward, Projections, SINUSOIDS, gated_feed_forward};
use super::tape::Walk;
use super::tensors::{Activation, AttentionOptions};
use super::tokens::Rotary;
use crate::plan::shapes::TransformerShapes;
use std::rc::Rc;

/// The layers of one stream, text or image, of a double block, without those that make its modulation.
struct Stream {
    attention: Projections,
    to_out: Layer,
    ff: FeedForward,
}

impl Stream {
    /// `vectors`: the gate of attention, shift, scale and gate of the feed-forward.
    fn after_attention(
        &self,
        walk: &Walk,
        x: &MetaTensor,
        attended: &MetaTensor,
        vectors: &[MetaTensor],
    ) -> MetaTensor {
        let [gate_attention, shift, scale, gate] = vectors else {
            return x.clone();
        };
        let x = walk.gated_residual(x, gate_attention, &walk.linear(&self.to_out, attended));
        gated_feed_forward(walk, &self.ff, &x, [shift, scale, gate])
    }
}

/// What double blocks of FLUX.1 and Chroma have in common: all layers but those that make the modulation.
pub(super) struct DoubleStreams {
    image: Stream,
    text: Stream,
    options: AttentionOptions,
}

impl DoubleStreams {
    /// `modulation` makes the layers of a stream's modulation, if there are some, by the name of its norm.
    pub(super) fn new(
        b: &mut Builder,
        name: &str,
        sizes: Sizes,
        modulation: &mut dyn FnMut(&mut Builder, &str),
    ) -> Self {
        let (width, attn) = (sizes.width, format!("{name}.attn"));
        let mut stream = |b: &mut Builder, attention: Projections, norm: &str, out: &str, ff: &str| {
            modulation(b, &format!("{name}.{norm}"));
            Stream {
                attention,
                to_out: b.layer(&format!("{attn}.{out}"), LayerSizes::linear(width, width, true)),
                ff: FeedForward::new(b, &format!("{name}.{ff}"), width),
            }
        };
        let of_image = Projections::of_image(b, &attn, width, Some(sizes.head_width));
        let image = stream(b, of_image, "norm1", "to_out.0", "ff");
        let of_text = Projections::of_text(b, &attn, width, Some(sizes.head_width));
        let text = stream(b, of_text, "norm1_context", "to_add_out", "ff_context");
        Self {
            image,
            text,
            options: sizes.options,
        }
    }

    /// `modulated`: both, modulated for attention. `vectors`: those of both after the first two. `masked`: some of the text is masked.
    pub(super) fn forward(
        &self,
        walk: &Walk,
        [x, text]: [&MetaTensor; 2],
        [h, h_text]: [&MetaTensor; 2],
        [image_vectors, text_vectors]: [&[MetaTensor]; 2],
        (rotary, masked): (&Rotary, bool),
    ) -> Vec<MetaTensor> {
        let image_qkv = self.image.attention.forward(walk, h);
        let text_qkv = self.text.attention.forward(walk, h_text);
        let joined = [0, 1, 2].map(|i: usize| walk.cat(&text_qkv[i], &image_qkv[i]));
        let all = attend(walk, &joined, rotary, with_mask(self.options, masked));
        drop(joined);
        let attended = walk.narrow(&all, 1, x.dims[1]);
        let attended_text = walk.narrow(&all, 1, text.dims[1]);
        let text = self.text.after_attention(walk, text, &attended_text, text_vectors);
        drop(attended_text);
        let x = self.image.after_attention(walk, x, &attended, image_vectors);
        drop((image_qkv, text_qkv, all));
        vec![x, text]
    }
}

struct DoubleBlock {
    norms: Vec<AdaNorm<6>>,
    streams: DoubleStreams,
}

impl DoubleBlock {
    fn new(b: &mut Builder, name: &str, sizes: Sizes) -> Self {
        let mut norms = Vec::new();
        let streams = DoubleStreams::new(b, name, sizes, &mut |b, norm| {
            norms.push(AdaNorm::new(b, norm, sizes.width));
        });
        Self { norms, streams }
    }

    /// `masked`: some of the text is masked.
    fn forward(
        &self,
        walk: &Walk,
        [x, text, temb]: [&MetaTensor; 3],
        rotary: &Rotary,
        masked: bool,
    ) -> Vec<MetaTensor> {
        let [image_norm, text_norm] = self.norms.as_slice() else {
            return vec![x.clone(), text.clone()];
        };
        let (h, image_vectors) = image_norm.forward(walk, x, temb);
        let (h_text, text_vectors) = text_norm.forward(walk, text, temb);
        let vectors = [&image_vectors[2..], &text_vectors[2..]];
        let outputs = self
            .streams
            .forward(walk, [x, text], [&h, &h_text], vectors, (rotary, masked));
        drop((h, h_text));
        outputs
    }
}

/// The same attention, with a bias if some of the text is masked.
fn with_mask(options: AttentionOptions, masked: bool) -> AttentionOptions {
    AttentionOptions {
        has_bias: masked,
        ..options
    }
}

/// Attention between all tokens, with rotary embeddings.
fn attend(walk: &Walk, [q, k, v]: &[MetaTensor; 3], rotary: &Rotary, options: AttentionOptions) -> MetaTensor {
    let (q, k) = (walk.rotate(q, rotary), walk.rotate(k, rotary));
    walk.attention(&q, &k, v, options)
}

/// What single blocks of FLUX.1 and Chroma have in common: all layers but those that make the modulation.
pub(super) struct SingleStream {
    attention: Projections,
    proj_mlp: Layer,
    proj_out: Layer,
    options: AttentionOptions,
}

impl SingleStream {
    pub(super) fn new(b: &mut Builder, name: &str, sizes: Sizes) -> Self {
        let width = sizes.width;
        Self {
            attention: Projections::of_image(b, &format!("{name}.attn"), width, Some(sizes.head_width)),
            proj_mlp: b.layer(
                &format!("{name}.proj_mlp"),
                LayerSizes::linear(width, 4.0 * width, true),
            ),
            proj_out: b.layer(
                &format!("{name}.proj_out"),
                LayerSizes::linear(5.0 * width, width, true),
            ),
            options: sizes.options,
        }
    }

    /// `h`: x, modulated. `masked`: as of a double block.
    pub(super) fn forward(
        &self,
        walk: &Walk,
        [x, h, gate]: [&MetaTensor; 3],
        (rotary, masked): (&Rotary, bool),
    ) -> MetaTensor {
        let mlp = walk.activation(&walk.linear(&self.proj_mlp, h), Activation::GeluTanh);
        let qkv = self.attention.forward(walk, h);
        let attended = attend(walk, &qkv, rotary, with_mask(self.options, masked));
        drop(qkv);
        let both = walk.joined_features(&attended, &mlp);
        let y = walk.gated_residual(x, gate, &walk.linear(&self.proj_out, &both));
        drop((mlp, attended, both));
        y
    }
}

struct SingleBlock {
    norm: AdaNorm<3>,
    stream: SingleStream,
}

impl SingleBlock {
    fn new(b: &mut Builder, name: &str, sizes: Sizes) -> Self {
        Self {
            norm: AdaNorm::new(b, &format!("{name}.norm"), sizes.width),
            stream: SingleStream::new(b, name, sizes),
        }
    }

    /// `masked`: as of a double block.
    fn forward(&self, walk: &Walk, x: &MetaTensor, temb: &MetaTensor, rotary: &Rotary, masked: bool) -> MetaTensor {
        let (h, [_, _, gate]) = self.norm.forward(walk, x, temb);
        let y = self.stream.forward(walk, [x, &h, &gate], (rotary, masked));
        drop(h);
        y
    }
}

/// Sizes of a block.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) width: f64,
    pub(super) head_width: f64,
    options: AttentionOptions,
}

impl Sizes {
    pub(super) fn of(shapes: &TransformerShapes) -> Self {
        Self {
            width: shapes.width(),
            head_width: f64::from(shapes.head_width),
            options: AttentionOptions {
                heads: f64::from(shapes.heads),
                ..AttentionOptions::default()
            },
        }
    }
}

/// FLUX.1's transformer.
pub(in crate::plan) struct Flux {
    x_embedder: Layer,
    context_embedder: Layer,
    timestep: Embedder,
    guidance: Option<Embedder>,
    pooled: Embedder,
    double: Vec<Rc<DoubleBlock>>,
    single: Vec<Rc<SingleBlock>>,
    norm_out: AdaNorm<2>,
    proj_out: Layer,
    head_width: f64,
}

impl Flux {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &TransformerShapes) -> Self {
        let (width, token) = (shapes.width(), shapes.token());
        let sizes = Sizes::of(shapes);
        let linear = |b: &mut Builder, name: &str, inputs: f64, outputs: f64| {
            b.layer(name, LayerSizes::linear(inputs, outputs, true))
        };
        let embedder = |b: &mut Builder, name: &str, inputs: f64| {
            Embedder::new(b, &format!("time_text_embed.{name}"), inputs, width)
        };
        Self {
            x_embedder: linear(b, "x_embedder", token, width),
            context_embedder: linear(b, "context_embedder", f64::from(shapes.context), width),
            timestep: embedder(b, "timestep_embedder", SINUSOIDS),
            guidance: shapes.guidance.then(|| embedder(b, "guidance_embedder", SINUSOIDS)),
            pooled: embedder(b, "text_embedder", f64::from(shapes.pooled)),
            double: (0..shapes.blocks)
                .map(|i| Rc::new(DoubleBlock::new(b, &format!("transformer_blocks.{i}"), sizes)))
                .collect(),
            single: (0..shapes.single_blocks)
                .map(|i| Rc::new(SingleBlock::new(b, &format!("single_transformer_blocks.{i}"), sizes)))
                .collect(),
            norm_out: AdaNorm::new(b, "norm_out", width),
            proj_out: linear(b, "proj_out", width, token),
            head_width: sizes.head_width,
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
        let batch = latents.dims[0];
        let mut temb = self.timestep.forward_numbers(walk, batch);
        if let Some(guidance) = &self.guidance {
            temb = walk.add(&temb, &guidance.forward_numbers(walk, batch));
        }
        if let Some(pooled) = &conditions.pooled {
            temb = walk.add(&temb, &self.pooled.forward(walk, pooled));
        }
        let image_tokens = latents.dims[2] * latents.dims[3] / 4.0;
        let packed = [batch, image_tokens, latents.dims[1] * 4.0, 1.0];
        let mut tokens = walk.tensor(packed, false);
        if let Some(control) = conditions.control {
            let control = walk.tensor([batch, control, packed[2], 1.0], false);
            tokens = walk.cat(&tokens, &control);
        }
        let tokens_in = tokens;
        let tokens = walk.linear(&self.x_embedder, &tokens_in);
        let text = walk.linear(&self.context_embedder, &conditions.text);
        let (text_length, all) = (text.dims[1], text.dims[1] + tokens.dims[1]);
        let rotary = walk.rotary(all, self.head_width);
        // The padding of one text is cut, so that nothing is masked.
        let masked = conditions.masks_padding && batch > 1.0;

        let mut sequence = BlockSequence::default();
        let (mut x, mut text) = (sequence.input(tokens), sequence.input(text));
        let conditioning = sequence.input(temb.clone());
        for block in &self.double {
            let (block, rotary) = (Rc::clone(block), rotary.clone());
            [x, text] = sequence.add_with_outputs(&[x, text, conditioning], move |walk, inputs| match inputs {
                [x, text, temb] => block.forward(walk, [x, text, temb], &rotary, masked),
                other => other.to_vec(),
            });
        }
        let mut x = sequence.add(&[text, x], move |walk, inputs| walk.cat(&inputs[0], &inputs[1]));
        for block in &self.single {
            let (block, rotary) = (Rc::clone(block), rotary.clone());
            x = sequence.add(&[x, conditioning], move |walk, inputs| {
                block.forward(walk, &inputs[0], &inputs[1], &rotary, masked)
            });
        }
        let x = sequence.run(walk, checkpointed, x)?;
        debug_assert!(x.dims[1] >= text_length);
        let image = walk.narrow(&x, 1, image_tokens);
        let [scale, shift] = self.norm_out.vectors(walk, &temb);
        let normed = walk.modulate(&super::mmdit::plain_norm(walk, &image), &scale, &shift);
        let predicted = walk.linear(&self.proj_out, &normed);
        let unpacked = walk.rearranged(&predicted, latents.dims);
        drop((rotary, tokens_in));
        Some(unpacked)
    }
}
