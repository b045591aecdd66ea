//! The steps of CLIP's text encoder, as `engine/src/models/clip`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::{TRAINED, Walk};
use super::tensors::{Activation, AttentionOptions};
use super::unet::norm;
use crate::plan::shapes::TextShapes;
use std::rc::Rc;

struct TextLayer {
    norms: [Norm; 2],
    /// q, k, v, out.
    attention: [Layer; 4],
    mlp: [Layer; 2],
    attention_options: AttentionOptions,
}

/// CLIP's text encoder.
pub(in crate::plan) struct TextEncoder {
    layers: Vec<Rc<TextLayer>>,
    final_norm: Norm,
    projection: Option<Layer>,
    /// Elements of the table of tokens if it is trained, or of the vectors of a textual inversion, and their id.
    trained_table: Option<(f64, u64)>,
    width: f64,
    positions: f64,
}

impl TextEncoder {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &TextShapes) -> Self {
        let width = f64::from(shapes.width);
        let wide = f64::from(shapes.intermediate);
        let projection = (shapes.projection > 0).then(|| {
            let sizes = LayerSizes::linear(width, f64::from(shapes.projection), false);
            b.layer("text_projection", sizes)
        });
        let embeddings = "text_model.embeddings";
        let (vocabulary, positions) = (f64::from(shapes.vocabulary), f64::from(shapes.positions));
        let table = b.table(&format!("{embeddings}.token_embedding.weight"), vocabulary, width, true);
        let table = table.or_else(|| b.learned_vectors(width));
        b.table(
            &format!("{embeddings}.position_embedding.weight"),
            positions,
            width,
            false,
        );
        let layers = (0..shapes.layers).map(|i| {
            let name = format!("text_model.encoder.layers.{i}");
            let square = LayerSizes::linear(width, width, true);
            let norm1 = b.norm(&format!("{name}.layer_norm1"), width);
            let attention = ["q_proj", "k_proj", "v_proj", "out_proj"]
                .map(|part| b.layer(&format!("{name}.self_attn.{part}"), square));
            let norm2 = b.norm(&format!("{name}.layer_norm2"), width);
            let mlp = [
                b.layer(&format!("{name}.mlp.fc1"), LayerSizes::linear(width, wide, true)),
                b.layer(&format!("{name}.mlp.fc2"), LayerSizes::linear(wide, width, true)),
            ];
            Rc::new(TextLayer {
                norms: [norm1, norm2],
                attention,
                mlp,
                attention_options: AttentionOptions {
                    heads: f64::from(shapes.heads),
                    causal: true,
                    upcast: false,
                    has_bias: false,
                },
            })
        });
        let layers = layers.collect();
        Self {
            layers,
            final_norm: b.norm("text_model.final_layer_norm", width),
            projection,
            trained_table: table.map(|elements| (elements, TRAINED + 4 * b.last_index() + (1 << 40))),
            width,
            positions,
        }
    }

    /// Encodes this many prompts. `penultimate`: the text is the state before the last layer; the last one gives the pooled
    /// text.
    pub(in crate::plan) fn forward(
        &self,
        walk: &Walk,
        batch: f64,
        checkpointed: bool,
        penultimate: bool,
    ) -> Option<MetaTensor> {
        let dims = [batch, self.positions, self.width, 1.0];
        let x = walk.tensor(dims, self.trained_table.is_some() && walk.is_recording());
        if let Some((elements, id)) = self.trained_table.filter(|_| x.tracked) {
            // The backward pass of the lookup makes a table of zeros, and another with the gradients.
            walk.record_step(&x, move |walk, gradient| {
                let zeros = walk.floats(elements);
                let table = walk.floats(elements);
                drop((zeros, gradient));
                vec![(id, table)]
            });
        }
        let x = walk.rearranged(&x, dims);
        let mut sequence = BlockSequence::default();
        let mut at = sequence.input(x);
        let count = self.layers.len() - usize::from(penultimate && self.projection.is_none()).min(self.layers.len());
        for layer in &self.layers[..count] {
            let layer = Rc::clone(layer);
            at = sequence.add(&[at], move |walk, inputs| layer.forward(walk, &inputs[0]));
        }
        let x = sequence.run(walk, checkpointed, at)?;
        if penultimate {
            return Some(x);
        }
        Some(norm(walk, self.final_norm, &x))
    }
}

impl TextLayer {
    fn forward(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let [norm1, norm2] = self.norms;
        let [to_q, to_k, to_v, to_out] = &self.attention;
        let [fc1, fc2] = &self.mlp;
        let h = norm(walk, norm1, x);
        let (q, k, v) = (walk.linear(to_q, &h), walk.linear(to_k, &h), walk.linear(to_v, &h));
        let attended = walk.attention(&q, &k, &v, self.attention_options);
        let x = walk.add(x, &walk.linear(to_out, &attended));
        let wide = walk.linear(fc1, &norm(walk, norm2, &x));
        walk.add(&x, &walk.linear(fc2, &walk.activation(&wide, Activation::QuickGelu)))
    }
}
