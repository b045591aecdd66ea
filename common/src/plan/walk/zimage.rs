//! The steps of Z-Image's transformer, as `engine/src/models/zimage`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::conditions::Conditions;
use super::layers::Layer;
use super::meter::MetaTensor;
use super::mmdit::{SINUSOIDS, plain_norm};
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::{Activation, AttentionOptions, NormActivation};
use super::tokens::Rotary;
use crate::plan::shapes::TransformerShapes;
use std::rc::Rc;

/// Tokens of images and of captions are padded to multiples of this number.
const MULTIPLE: f64 = 32.0;
/// Features of the hidden layer of the timestep's embedding.
const TIME_HIDDEN: f64 = 1024.0;
/// The most features of the embedded timestep.
const MAX_TIME_FEATURES: f64 = 256.0;

fn padded(tokens: f64) -> f64 {
    (tokens / MULTIPLE).ceil() * MULTIPLE
}

struct Block {
    qkv: [Layer; 3],
    to_out: Layer,
    head_norms: [Norm; 2],
    w1: Layer,
    w2: Layer,
    w3: Layer,
    attention_norms: [Norm; 2],
    feed_forward_norms: [Norm; 2],
    modulation: Option<Layer>,
    options: AttentionOptions,
}

impl Block {
    fn new(b: &mut Builder, name: &str, shapes: &TransformerShapes, is_modulated: bool) -> Self {
        let width = shapes.width();
        let hidden = (width / 3.0 * 8.0).floor();
        let linear = |b: &mut Builder, part: &str, inputs: f64, outputs: f64| {
            b.layer(&format!("{name}.{part}"), LayerSizes::linear(inputs, outputs, false))
        };
        let norm = |b: &mut Builder, part: &str, width: f64| b.rms_norm(&format!("{name}.{part}"), width);
        let head = f64::from(shapes.head_width);
        Self {
            qkv: ["to_q", "to_k", "to_v"].map(|part| linear(b, &format!("attention.{part}"), width, width)),
            to_out: linear(b, "attention.to_out.0", width, width),
            head_norms: ["norm_q", "norm_k"].map(|part| norm(b, &format!("attention.{part}"), head)),
            w1: linear(b, "feed_forward.w1", width, hidden),
            w2: linear(b, "feed_forward.w2", hidden, width),
            w3: linear(b, "feed_forward.w3", width, hidden),
            attention_norms: ["attention_norm1", "attention_norm2"].map(|part| norm(b, part, width)),
            feed_forward_norms: ["ffn_norm1", "ffn_norm2"].map(|part| norm(b, part, width)),
            modulation: is_modulated.then(|| {
                let sizes = LayerSizes::linear(width.min(MAX_TIME_FEATURES), 4.0 * width, true);
                b.layer(&format!("{name}.adaLN_modulation.0"), sizes)
            }),
            options: AttentionOptions {
                heads: f64::from(shapes.heads),
                ..AttentionOptions::default()
            },
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor, time: &MetaTensor, rotary: &Rotary) -> MetaTensor {
        let norm = |norm: Norm, x: &MetaTensor| walk.norm(x, norm, NormActivation::None);
        let [before_attention, after_attention] = self.attention_norms;
        let [before_feed_forward, after_feed_forward] = self.feed_forward_norms;
        let Some(modulation) = &self.modulation else {
            let normed = norm(before_attention, x);
            let attended = self.attend(walk, &normed, rotary);
            drop(normed);
            let first = walk.add(x, &norm(after_attention, &attended));
            let normed = norm(before_feed_forward, &first);
            let second = self.feed_forward(walk, &normed);
            drop(normed);
            let sum = walk.add(&first, &norm(after_feed_forward, &second));
            drop(attended);
            return sum;
        };
        let vectors: [MetaTensor; 4] = walk.chunks(&walk.linear(modulation, time));
        let [scale_attention, gate_attention, scale, gate] = &vectors;
        let no_shift = walk.tensor(scale.dims, false);
        let tanh = |gate: &MetaTensor| walk.activation(gate, Activation::Silu);
        let first = walk.modulate(&norm(before_attention, x), scale_attention, &no_shift);
        let attended = norm(after_attention, &self.attend(walk, &first, rotary));
        let x = walk.gated_residual(x, &tanh(gate_attention), &attended);
        let second = walk.modulate(&norm(before_feed_forward, &x), scale, &no_shift);
        let fed = norm(after_feed_forward, &self.feed_forward(walk, &second));
        let y = walk.gated_residual(&x, &tanh(gate), &fed);
        drop((first, attended, second));
        y
    }

    fn attend(&self, walk: &Walk, x: &MetaTensor, rotary: &Rotary) -> MetaTensor {
        let [to_q, to_k, to_v] = &self.qkv;
        let [norm_q, norm_k] = self.head_norms;
        let head = |layer: &Layer, norm: Norm| {
            let projected = walk.linear(layer, x);
            walk.rotate(&walk.norm(&projected, norm, NormActivation::None), rotary)
        };
        let (q, k) = (head(to_q, norm_q), head(to_k, norm_k));
        let attended = walk.attention(&q, &k, &walk.linear(to_v, x), self.options);
        walk.linear(&self.to_out, &attended)
    }

    fn feed_forward(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let gate = walk.activation(&walk.linear(&self.w1, x), Activation::Silu);
        let up = walk.linear(&self.w3, x);
        let product = walk.product(&gate, &up);
        drop((gate, up));
        walk.linear(&self.w2, &product)
    }
}

/// Z-Image's transformer.
pub(in crate::plan) struct ZImage {
    proj_out: Layer,
    x_embedder: Layer,
    caption_norm: Norm,
    caption_embedder: Layer,
    time: [Layer; 2],
    noise_refiner: Vec<Rc<Block>>,
    context_refiner: Vec<Rc<Block>>,
    layers: Vec<Rc<Block>>,
    modulation_out: Layer,
    head_width: f64,
}

impl ZImage {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &TransformerShapes) -> Self {
        let (width, token, context) = (shapes.width(), shapes.token(), f64::from(shapes.context));
        let linear = |b: &mut Builder, name: &str, inputs: f64, outputs: f64| {
            b.layer(name, LayerSizes::linear(inputs, outputs, true))
        };
        let blocks = |b: &mut Builder, name: &str, count: u32, is_modulated: bool| {
            let block = |i| Rc::new(Block::new(b, &format!("{name}.{i}"), shapes, is_modulated));
            (0..count).map(block).collect::<Vec<_>>()
        };
        let features = width.min(MAX_TIME_FEATURES);
        let proj_out = linear(b, "all_final_layer.2-1.linear", width, token);
        let x_embedder = linear(b, "all_x_embedder.2-1", token, width);
        let caption_norm = b.rms_norm("cap_embedder.0", context);
        let caption_embedder = linear(b, "cap_embedder.1", context, width);
        let time = [
            linear(b, "t_embedder.mlp.0", SINUSOIDS, TIME_HIDDEN),
            linear(b, "t_embedder.mlp.2", TIME_HIDDEN, features),
        ];
        for name in ["x_pad_token", "cap_pad_token"] {
            b.tensor(name, width);
        }
        Self {
            proj_out,
            x_embedder,
            caption_norm,
            caption_embedder,
            time,
            noise_refiner: blocks(b, "noise_refiner", shapes.single_blocks, true),
            context_refiner: blocks(b, "context_refiner", shapes.single_blocks, false),
            layers: blocks(b, "layers", shapes.blocks, true),
            modulation_out: linear(b, "all_final_layer.2-1.adaLN_modulation.1", features, width),
            head_width: f64::from(shapes.head_width),
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
        let [batch, channels, height, width] = latents.dims;
        let [time_1, time_2] = &self.time;
        let sinusoids = walk.tensor([batch, 1.0, SINUSOIDS, 1.0], false);
        let hidden = walk.activation(&walk.linear(time_1, &sinusoids), Activation::Silu);
        let time = walk.linear(time_2, &hidden);
        let image_tokens = height * width / 4.0;
        let packed = walk.tensor([batch, image_tokens, 4.0 * channels, 1.0], false);
        let mut x = walk.linear(&self.x_embedder, &packed);
        drop(packed);
        let mut dims = x.dims;
        let unpadded = x.clone();
        if padded(image_tokens) > image_tokens {
            dims[1] = padded(image_tokens);
            x = walk.rearranged(&x, dims);
        }
        let caption = padded(conditions.prompt_tokens);
        let kept = walk.narrow(&conditions.text, 1, caption);
        let normed = walk.norm(&kept, self.caption_norm, NormActivation::None);
        let text = walk.linear(&self.caption_embedder, &normed);
        drop(normed);
        let text = walk.rearranged(&text, text.dims);
        let [of_image, of_caption, of_both] =
            [dims[1], caption, dims[1] + caption].map(|tokens| walk.rotary(tokens, self.head_width));

        let mut sequence = BlockSequence::default();
        let (mut x, mut text) = (sequence.input(x), sequence.input(text));
        let conditioning = sequence.input(time.clone());
        let steps = |sequence: &mut BlockSequence, blocks: &[Rc<Block>], rotary: &Rotary, mut value| {
            for block in blocks {
                let (block, rotary) = (Rc::clone(block), rotary.clone());
                value = sequence.add(&[value, conditioning], move |walk, inputs| {
                    block.forward(walk, &inputs[0], &inputs[1], &rotary)
                });
            }
            value
        };
        x = steps(&mut sequence, &self.noise_refiner, &of_image, x);
        text = steps(&mut sequence, &self.context_refiner, &of_caption, text);
        let both = sequence.add(&[x, text], move |walk, inputs| walk.cat(&inputs[0], &inputs[1]));
        let both = steps(&mut sequence, &self.layers, &of_both, both);
        let all = sequence.run(walk, checkpointed, both)?;
        let image = walk.narrow(&all, 1, image_tokens);
        let scale = walk.linear(&self.modulation_out, &walk.activation(&time, Activation::Silu));
        let no_shift = walk.tensor(scale.dims, false);
        let normed = walk.modulate(&plain_norm(walk, &image), &scale, &no_shift);
        let predicted = walk.linear(&self.proj_out, &normed);
        let negated = walk.rearranged(&predicted, predicted.dims);
        drop((of_image, of_caption, of_both, unpadded, kept));
        Some(walk.rearranged(&negated, latents.dims))
    }
}
