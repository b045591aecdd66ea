//! The steps of Chroma's transformer, as `engine/src/models/chroma`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::conditions::Conditions;
use super::flux::{DoubleStreams, SingleStream, Sizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::mmdit::{Embedder, plain_norm};
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::NormActivation;
use super::tokens::Rotary;
use crate::plan::shapes::TransformerShapes;
use std::rc::Rc;

/// Features of the approximator's input.
const APPROXIMATOR_INPUTS: f64 = 64.0;
/// Modulation vectors of a double block, of a single block, of the output.
const VECTORS: [f64; 3] = [12.0, 3.0, 2.0];
/// Vectors of one stream of a double block.
const STREAM_VECTORS: usize = 6;

/// These many of the modulation vectors, each [batch, 1, features].
fn rows(walk: &Walk, vectors: &MetaTensor, count: usize) -> Vec<MetaTensor> {
    (0..count).map(|_| walk.narrow(vectors, 1, 1.0)).collect()
}

/// x, normalised and modulated.
fn modulated(walk: &Walk, x: &MetaTensor, vectors: &[MetaTensor]) -> MetaTensor {
    match vectors {
        [shift, scale, ..] => walk.modulate(&plain_norm(walk, x), scale, shift),
        _ => x.clone(),
    }
}

/// The network that makes all modulation vectors.
struct Approximator {
    in_proj: Layer,
    layers: Vec<Embedder>,
    norms: Vec<Norm>,
    out_proj: Layer,
    vectors: f64,
}

impl Approximator {
    fn new(b: &mut Builder, name: &str, shapes: &TransformerShapes) -> Self {
        let hidden = f64::from(shapes.approximator_width);
        let linear = |b: &mut Builder, part: &str, inputs: f64, outputs: f64| {
            b.layer(&format!("{name}.{part}"), LayerSizes::linear(inputs, outputs, true))
        };
        let [of_double, of_single, of_output] = VECTORS;
        Self {
            in_proj: linear(b, "in_proj", APPROXIMATOR_INPUTS, hidden),
            layers: (0..shapes.approximator_layers)
                .map(|i| Embedder::new(b, &format!("{name}.layers.{i}"), hidden, hidden))
                .collect(),
            norms: (0..shapes.approximator_layers)
                .map(|i| b.rms_norm(&format!("{name}.norms.{i}"), hidden))
                .collect(),
            out_proj: linear(b, "out_proj", hidden, shapes.width()),
            vectors: of_double * f64::from(shapes.blocks) + of_single * f64::from(shapes.single_blocks) + of_output,
        }
    }

    /// The vectors, [batch, vectors, features].
    fn forward(&self, walk: &Walk, batch: f64) -> MetaTensor {
        let inputs = walk.tensor([batch, self.vectors, APPROXIMATOR_INPUTS, 1.0], false);
        let mut x = walk.linear(&self.in_proj, &inputs);
        for (layer, norm) in self.layers.iter().zip(&self.norms) {
            let normed = walk.norm(&x, *norm, NormActivation::None);
            x = walk.add(&x, &layer.forward(walk, &normed));
        }
        walk.linear(&self.out_proj, &x)
    }
}

struct DoubleBlock(DoubleStreams);

impl DoubleBlock {
    fn forward(
        &self,
        walk: &Walk,
        [x, text, vectors]: [&MetaTensor; 3],
        (rotary, masked): (&Rotary, bool),
    ) -> Vec<MetaTensor> {
        let image_vectors = rows(walk, vectors, STREAM_VECTORS);
        let h = modulated(walk, x, &image_vectors);
        let text_vectors = rows(walk, vectors, STREAM_VECTORS);
        let h_text = modulated(walk, text, &text_vectors);
        let rest = [&image_vectors[2..], &text_vectors[2..]];
        let outputs = self.0.forward(walk, [x, text], [&h, &h_text], rest, (rotary, masked));
        drop((h, h_text));
        outputs
    }
}

struct SingleBlock(SingleStream);

impl SingleBlock {
    fn forward(
        &self,
        walk: &Walk,
        x: &MetaTensor,
        vectors: &MetaTensor,
        (rotary, masked): (&Rotary, bool),
    ) -> MetaTensor {
        let vectors = rows(walk, vectors, 3);
        let h = modulated(walk, x, &vectors);
        let y = match vectors.last() {
            Some(gate) => self.0.forward(walk, [x, &h, gate], (rotary, masked)),
            None => x.clone(),
        };
        drop(h);
        y
    }
}

/// Chroma's transformer.
pub(in crate::plan) struct Chroma {
    x_embedder: Layer,
    context_embedder: Layer,
    double: Vec<Rc<DoubleBlock>>,
    single: Vec<Rc<SingleBlock>>,
    approximator: Approximator,
    proj_out: Layer,
    head_width: f64,
}

impl Chroma {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &TransformerShapes) -> Self {
        let (sizes, token) = (Sizes::of(shapes), shapes.token());
        let width = sizes.width;
        let linear = |b: &mut Builder, name: &str, inputs: f64, outputs: f64| {
            b.layer(name, LayerSizes::linear(inputs, outputs, true))
        };
        let double = |b: &mut Builder, i: u32| {
            let name = format!("transformer_blocks.{i}");
            Rc::new(DoubleBlock(DoubleStreams::new(b, &name, sizes, &mut |_, _| {})))
        };
        let single = |b: &mut Builder, i: u32| {
            let name = format!("single_transformer_blocks.{i}");
            Rc::new(SingleBlock(SingleStream::new(b, &name, sizes)))
        };
        Self {
            x_embedder: linear(b, "x_embedder", token, width),
            context_embedder: linear(b, "context_embedder", f64::from(shapes.context), width),
            double: (0..shapes.blocks).map(|i| double(b, i)).collect(),
            single: (0..shapes.single_blocks).map(|i| single(b, i)).collect(),
            approximator: Approximator::new(b, "distilled_guidance_layer", shapes),
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
        let vectors = self.approximator.forward(walk, batch);
        let image_tokens = latents.dims[2] * latents.dims[3] / 4.0;
        let packed = walk.tensor([batch, image_tokens, latents.dims[1] * 4.0, 1.0], false);
        let tokens = walk.linear(&self.x_embedder, &packed);
        drop(packed);
        let attended = walk.narrow(&conditions.text, 1, conditions.prompt_tokens);
        let text = walk.linear(&self.context_embedder, &attended);
        let all = text.dims[1] + tokens.dims[1];
        let rotary = walk.rotary(all, self.head_width);
        // The padding of one text is cut, so that nothing is masked.
        let masked = batch > 1.0;

        let mut sequence = BlockSequence::default();
        let (mut x, mut text) = (sequence.input(tokens), sequence.input(text));
        let conditioning = sequence.input(vectors.clone());
        for block in &self.double {
            let (block, rotary) = (Rc::clone(block), rotary.clone());
            [x, text] = sequence.add_with_outputs(&[x, text, conditioning], move |walk, inputs| match inputs {
                [x, text, vectors] => block.forward(walk, [x, text, vectors], (&rotary, masked)),
                other => other.to_vec(),
            });
        }
        let mut x = sequence.add(&[text, x], move |walk, inputs| walk.cat(&inputs[0], &inputs[1]));
        for block in &self.single {
            let (block, rotary) = (Rc::clone(block), rotary.clone());
            x = sequence.add(&[x, conditioning], move |walk, inputs| {
                block.forward(walk, &inputs[0], &inputs[1], (&rotary, masked))
            });
        }
        let x = sequence.run(walk, checkpointed, x)?;
        let image = walk.narrow(&x, 1, image_tokens);
        let normed = modulated(walk, &image, &rows(walk, &vectors, 2));
        let predicted = walk.linear(&self.proj_out, &normed);
        let unpacked = walk.rearranged(&predicted, latents.dims);
        drop((rotary, attended));
        Some(unpacked)
    }
}
