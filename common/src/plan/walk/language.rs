//! The steps of T5's encoder and of Qwen3, as `engine/src/models/t5` and `engine/src/models/qwen3`. They are never trained.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::{Activation, AttentionOptions, NormActivation};
use super::tokens::Rotary;
use crate::plan::shapes::{LanguageKind, LanguageShapes};
use std::rc::Rc;

/// Buckets of distances between tokens.
const T5_BUCKETS: f64 = 32.0;

struct LanguageLayer {
    norms: [Norm; 2],
    /// q, k, v, out.
    attention: [Layer; 4],
    head_norms: Option<[Norm; 2]>,
    /// gate, up, down.
    feed_forward: [Layer; 3],
    activation: Activation,
    options: AttentionOptions,
}

/// A language model that encodes prompts.
pub(in crate::plan) struct LanguageEncoder {
    layers: Vec<Rc<LanguageLayer>>,
    final_norm: Option<Norm>,
    shapes: LanguageShapes,
}

impl LanguageEncoder {
    /// `is_f16`: the model computes in float16, in which one layer of each block of T5 overflows.
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &LanguageShapes, is_f16: bool) -> Self {
        let is_t5 = shapes.kind == LanguageKind::T5;
        let width = f64::from(shapes.width);
        let table = if is_t5 { "shared.weight" } else { "embed_tokens.weight" };
        b.table(table, f64::from(shapes.vocabulary), width, true);
        // The text is the state before the last layer of Qwen3.
        let count = if is_t5 {
            shapes.layers
        } else {
            shapes.layers.saturating_sub(1)
        };
        let layers = (0..count).map(|i| match is_t5 {
            true => Rc::new(LanguageLayer::t5(b, i, shapes, is_f16)),
            false => Rc::new(LanguageLayer::qwen3(b, i, shapes)),
        });
        let layers = layers.collect();
        let final_norm = is_t5.then(|| b.rms_norm("encoder.final_layer_norm", width));
        if is_t5 {
            b.buffer(T5_BUCKETS * f64::from(shapes.heads));
        }
        Self {
            layers,
            final_norm,
            shapes: *shapes,
        }
    }

    /// Encodes prompts of this many tokens. `masked`: no token attends to the padding of T5.
    pub(in crate::plan) fn forward(&self, walk: &Walk, batch: f64, tokens: f64, masked: bool) -> Option<MetaTensor> {
        let shapes = &self.shapes;
        let bias = (shapes.kind == LanguageKind::T5).then(|| {
            let elements = tokens * tokens * f64::from(shapes.heads);
            let ids = walk.floats(tokens * tokens);
            let bias = walk.floats(elements);
            drop(ids);
            match masked {
                // Each prompt has a bias of its own.
                true => walk.floats(batch * elements),
                false => bias,
            }
        });
        let rotary = bias
            .is_none()
            .then(|| walk.rotary(tokens, f64::from(shapes.head_width)));
        let mut sequence = BlockSequence::default();
        let mut at = sequence.input(walk.tensor([batch, tokens, f64::from(shapes.width), 1.0], false));
        for layer in &self.layers {
            let (layer, rotary) = (Rc::clone(layer), rotary.clone());
            at = sequence.add(&[at], move |walk, inputs| {
                layer.forward(walk, &inputs[0], rotary.as_ref())
            });
        }
        let x = sequence.run(walk, false, at)?;
        let x = match self.final_norm {
            Some(norm) => walk.norm(&x, norm, NormActivation::None),
            None => x,
        };
        drop((bias, rotary));
        Some(x)
    }
}

impl LanguageLayer {
    fn t5(b: &mut Builder, index: u32, shapes: &LanguageShapes, is_f16: bool) -> Self {
        let (width, wide) = (f64::from(shapes.width), f64::from(shapes.intermediate));
        let inner = f64::from(shapes.heads * shapes.head_width);
        let block = format!("encoder.block.{index}.layer");
        let (attention, dense) = (format!("{block}.0.SelfAttention"), format!("{block}.1.DenseReluDense"));
        let linear = |b: &mut Builder, name: String, inputs: f64, outputs: f64| {
            b.layer(&name, LayerSizes::linear(inputs, outputs, false))
        };
        let norm1 = b.rms_norm(&format!("{block}.0.layer_norm"), width);
        let qkv = ["q", "k", "v"].map(|part| linear(b, format!("{attention}.{part}"), width, inner));
        let out = linear(b, format!("{attention}.o"), inner, width);
        let norm2 = b.rms_norm(&format!("{block}.1.layer_norm"), width);
        let up = ["wi_0", "wi_1"].map(|part| linear(b, format!("{dense}.{part}"), width, wide));
        let down = b.with_width_of(is_f16.then_some(4.0), |b| linear(b, format!("{dense}.wo"), wide, width));
        let ([q, k, v], [gate, up]) = (qkv, up);
        Self {
            norms: [norm1, norm2],
            attention: [q, k, v, out],
            head_norms: None,
            feed_forward: [gate, up, down],
            activation: Activation::GeluTanh,
            options: AttentionOptions {
                heads: f64::from(shapes.heads),
                has_bias: true,
                ..AttentionOptions::default()
            },
        }
    }

    fn qwen3(b: &mut Builder, index: u32, shapes: &LanguageShapes) -> Self {
        let (width, wide) = (f64::from(shapes.width), f64::from(shapes.intermediate));
        let head = f64::from(shapes.head_width);
        let [queries, keys] = [shapes.heads, shapes.kv_heads].map(|heads| f64::from(heads) * head);
        let name = format!("layers.{index}");
        let linear = |b: &mut Builder, part: &str, inputs: f64, outputs: f64| {
            b.layer(&format!("{name}.{part}"), LayerSizes::linear(inputs, outputs, false))
        };
        let norm = |b: &mut Builder, part: &str, width: f64| b.rms_norm(&format!("{name}.{part}"), width);
        let norm1 = norm(b, "input_layernorm", width);
        let attention = [
            linear(b, "self_attn.q_proj", width, queries),
            linear(b, "self_attn.k_proj", width, keys),
            linear(b, "self_attn.v_proj", width, keys),
            linear(b, "self_attn.o_proj", queries, width),
        ];
        let head_norms = ["self_attn.q_norm", "self_attn.k_norm"].map(|part| norm(b, part, head));
        let norm2 = norm(b, "post_attention_layernorm", width);
        let feed_forward = [
            linear(b, "mlp.gate_proj", width, wide),
            linear(b, "mlp.up_proj", width, wide),
            linear(b, "mlp.down_proj", wide, width),
        ];
        Self {
            norms: [norm1, norm2],
            attention,
            head_norms: Some(head_norms),
            feed_forward,
            activation: Activation::Silu,
            options: AttentionOptions {
                heads: f64::from(shapes.heads),
                causal: true,
                ..AttentionOptions::default()
            },
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor, rotary: Option<&Rotary>) -> MetaTensor {
        let norm = |norm: Norm, x: &MetaTensor| walk.norm(x, norm, NormActivation::None);
        let [norm1, norm2] = self.norms;
        let [to_q, to_k, to_v, to_out] = &self.attention;
        let [to_gate, to_up, down] = &self.feed_forward;
        let h = norm(norm1, x);
        let head = |layer: &Layer, index: usize| {
            let projected = walk.linear(layer, &h);
            match (self.head_norms, rotary) {
                (Some(norms), Some(rotary)) => walk.rotate(&norm(norms[index], &projected), rotary),
                _ => projected,
            }
        };
        let (q, k) = (head(to_q, 0), head(to_k, 1));
        let v = walk.linear(to_v, &h);
        let attended = walk.attention(&q, &k, &v, self.options);
        drop(v);
        if self.head_norms.is_none() {
            // Of T5 these are temporaries of the call.
            drop((q, k));
        }
        let x = walk.add(x, &walk.linear(to_out, &attended));
        let normed = norm(norm2, &x);
        let inactive = walk.linear(to_gate, &normed);
        let gate = walk.activation(&inactive, self.activation);
        // Of Qwen3 it is a temporary of the statement that computes the product.
        let inactive = self.head_norms.is_some().then_some(inactive);
        let up = walk.linear(to_up, &normed);
        let product = walk.product(&gate, &up);
        drop((gate, up, inactive));
        let y = walk.add(&x, &walk.linear(down, &product));
        drop((h, attended, normed, product));
        y
    }
}
