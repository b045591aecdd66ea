//! The steps of the U-Net, as `engine/src/models/unet`.

use super::block_sequence::{BlockSequence, Value};
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::{Activation, AttentionOptions, NormActivation};
use crate::plan::shapes::UNetShapes;
use std::rc::Rc;

/// A residual block.
pub(super) struct Resnet {
    norm1: Norm,
    conv1: Layer,
    time: Option<Layer>,
    norm2: Norm,
    conv2: Layer,
    shortcut: Option<Layer>,
}

impl Resnet {
    pub(super) fn new(b: &mut Builder, name: &str, inputs: f64, outputs: f64, time: Option<f64>) -> Self {
        Self {
            norm1: b.norm(&format!("{name}.norm1"), inputs),
            conv1: b.layer(&format!("{name}.conv1"), LayerSizes::conv(inputs, outputs, 3.0)),
            time: time.map(|width| {
                b.layer(
                    &format!("{name}.time_emb_proj"),
                    LayerSizes::linear(width, outputs, true),
                )
            }),
            norm2: b.norm(&format!("{name}.norm2"), outputs),
            conv2: b.layer(&format!("{name}.conv2"), LayerSizes::conv(outputs, outputs, 3.0)),
            shortcut: (inputs != outputs)
                .then(|| b.layer(&format!("{name}.conv_shortcut"), LayerSizes::conv(inputs, outputs, 1.0))),
        }
    }

    pub(super) fn forward(&self, walk: &Walk, x: &MetaTensor, time: Option<&MetaTensor>) -> MetaTensor {
        let mut h = walk.conv(&self.conv1, &norm_silu(walk, self.norm1, x));
        if let (Some(projection), Some(time)) = (&self.time, time) {
            let shift = walk.linear(projection, &walk.activation(time, Activation::Silu));
            h = walk.add_channels(&h, &shift);
        }
        // The first `h` lives as long as the second.
        let second = walk.conv(&self.conv2, &norm_silu(walk, self.norm2, &h));
        match &self.shortcut {
            Some(conv) => walk.add(&walk.conv(conv, x), &second),
            None => walk.add(x, &second),
        }
    }
}

pub(super) fn norm(walk: &Walk, norm: Norm, x: &MetaTensor) -> MetaTensor {
    walk.norm(x, norm, NormActivation::None)
}

/// SiLU of a norm, as one operation.
pub(super) fn norm_silu(walk: &Walk, norm: Norm, x: &MetaTensor) -> MetaTensor {
    walk.norm(x, norm, NormActivation::Silu)
}

struct Attention {
    to_q: Layer,
    to_k: Layer,
    to_v: Layer,
    to_out: Layer,
    options: AttentionOptions,
}

impl Attention {
    fn new(b: &mut Builder, name: &str, channels: f64, context: f64, options: AttentionOptions) -> Self {
        Self {
            to_q: b.layer(&format!("{name}.to_q"), LayerSizes::linear(channels, channels, false)),
            to_k: b.layer(&format!("{name}.to_k"), LayerSizes::linear(context, channels, false)),
            to_v: b.layer(&format!("{name}.to_v"), LayerSizes::linear(context, channels, false)),
            to_out: b.layer(
                &format!("{name}.to_out.0"),
                LayerSizes::linear(channels, channels, true),
            ),
            options,
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor, context: &MetaTensor) -> MetaTensor {
        let (q, k, v) = (
            walk.linear(&self.to_q, x),
            walk.linear(&self.to_k, context),
            walk.linear(&self.to_v, context),
        );
        walk.linear(&self.to_out, &walk.attention(&q, &k, &v, self.options))
    }
}

struct TransformerBlock {
    norms: [Norm; 3],
    attn1: Attention,
    attn2: Attention,
    ff_in: Layer,
    ff_out: Layer,
}

impl TransformerBlock {
    fn new(b: &mut Builder, name: &str, channels: f64, context: f64, options: AttentionOptions) -> Self {
        let norm1 = b.norm(&format!("{name}.norm1"), channels);
        let attn1 = Attention::new(b, &format!("{name}.attn1"), channels, channels, options);
        let norm2 = b.norm(&format!("{name}.norm2"), channels);
        let attn2 = Attention::new(b, &format!("{name}.attn2"), channels, context, options);
        let norm3 = b.norm(&format!("{name}.norm3"), channels);
        Self {
            norms: [norm1, norm2, norm3],
            attn1,
            attn2,
            ff_in: b.layer(
                &format!("{name}.ff.net.0.proj"),
                LayerSizes::linear(channels, 8.0 * channels, true),
            ),
            ff_out: b.layer(
                &format!("{name}.ff.net.2"),
                LayerSizes::linear(4.0 * channels, channels, true),
            ),
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor, context: &MetaTensor) -> MetaTensor {
        let [norm1, norm2, norm3] = self.norms;
        let h = norm(walk, norm1, x);
        let first = walk.add(&self.attn1.forward(walk, &h, &h), x);
        let second = walk.add(&self.attn2.forward(walk, &norm(walk, norm2, &first), context), &first);
        let gated = walk.activation(
            &walk.linear(&self.ff_in, &norm(walk, norm3, &second)),
            Activation::Geglu,
        );
        let result = walk.add(&walk.linear(&self.ff_out, &gated), &second);
        drop(h);
        result
    }
}

/// A transformer over the pixels of an image.
struct Transformer {
    norm: Norm,
    proj_in: Layer,
    blocks: Vec<TransformerBlock>,
    proj_out: Layer,
    is_linear: bool,
}

impl Transformer {
    fn new(b: &mut Builder, name: &str, shapes: &UNetShapes, at: usize) -> Self {
        let block = shapes.blocks[at];
        let channels = f64::from(block.channels);
        let options = AttentionOptions {
            heads: f64::from(block.heads),
            causal: false,
            upcast: shapes.upcast_attention,
            has_bias: false,
        };
        let projection = LayerSizes::linear(channels, channels, true);
        let proj_in = b.layer(&format!("{name}.proj_in"), projection);
        let blocks = (0..block.transformer_layers).map(|i| {
            let name = format!("{name}.transformer_blocks.{i}");
            TransformerBlock::new(b, &name, channels, f64::from(shapes.context), options)
        });
        let blocks = blocks.collect();
        Self {
            norm: b.norm(&format!("{name}.norm"), channels),
            proj_in,
            blocks,
            proj_out: b.layer(&format!("{name}.proj_out"), projection),
            is_linear: shapes.linear_projection,
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor, context: &MetaTensor) -> MetaTensor {
        let mut h = self.tokens(walk, x);
        for block in &self.blocks {
            h = block.forward(walk, &h, context);
        }
        self.image(walk, &h, x)
    }

    /// Appends the steps: one for each block if there are several, as `Transformer2d::add_blocks` of the engine.
    fn add_blocks(self: &Rc<Self>, sequence: &mut BlockSequence, x: Value, context: Value) -> Value {
        let this = Rc::clone(self);
        if self.blocks.len() < 2 {
            return sequence.add(&[x, context], move |walk, inputs| match inputs {
                [x, context] => this.forward(walk, x, context),
                other => other[0].clone(),
            });
        }
        let mut h = sequence.add(&[x], move |walk, inputs| this.tokens(walk, &inputs[0]));
        for index in 0..self.blocks.len() {
            let this = Rc::clone(self);
            h = sequence.add(&[h, context], move |walk, inputs| match inputs {
                [h, context] => this.blocks[index].forward(walk, h, context),
                other => other[0].clone(),
            });
        }
        let this = Rc::clone(self);
        sequence.add(&[h, x], move |walk, inputs| match inputs {
            [h, x] => this.image(walk, h, x),
            other => other[0].clone(),
        })
    }

    /// The tokens of an image.
    fn tokens(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let [batch, channels, height, width] = x.dims;
        let tokens = [batch, height * width, channels, 1.0];
        let first = norm(walk, self.norm, x);
        match self.is_linear {
            true => walk.linear(&self.proj_in, &walk.rearranged(&first, tokens)),
            false => walk.rearranged(&walk.conv(&self.proj_in, &first), tokens),
        }
    }

    /// The image of tokens h, plus x.
    fn image(&self, walk: &Walk, h: &MetaTensor, x: &MetaTensor) -> MetaTensor {
        let last = match self.is_linear {
            true => walk.rearranged(&walk.linear(&self.proj_out, h), x.dims),
            false => walk.conv(&self.proj_out, &walk.rearranged(h, x.dims)),
        };
        walk.add(&last, x)
    }
}

/// Residual blocks, each followed by a transformer if the block has attention.
struct Layers {
    resnets: Vec<Rc<Resnet>>,
    attentions: Vec<Rc<Transformer>>,
}

impl Layers {
    fn step(&self, i: usize, sequence: &mut BlockSequence, x: Value, skip: Option<Value>, c: Conditioning) -> Value {
        let resnet = Rc::clone(&self.resnets[i]);
        let x = match skip {
            Some(skip) => sequence.add(&[x, skip, c.time], move |walk, inputs| match inputs {
                [x, skip, time] => resnet.forward(walk, &walk.cat(x, skip), Some(time)),
                other => other[0].clone(),
            }),
            None => sequence.add(&[x, c.time], move |walk, inputs| {
                resnet.forward(walk, &inputs[0], inputs.get(1))
            }),
        };
        match self.attentions.get(i).cloned() {
            Some(attention) => attention.add_blocks(sequence, x, c.context),
            None => x,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Conditioning {
    pub(super) time: Value,
    pub(super) context: Value,
}

struct Block {
    layers: Layers,
    /// The convolution of the downsampling or upsampling.
    sampler: Option<Rc<Layer>>,
}

/// The down blocks and the middle block, which a ControlNet has too.
pub(super) struct Down {
    blocks: Vec<Block>,
    mid: Option<Layers>,
    padding: f64,
}

impl Down {
    pub(super) fn new(b: &mut Builder, shapes: &UNetShapes) -> Self {
        let blocks = shapes.blocks();
        let (last, first) = (blocks.len() - 1, f64::from(blocks[0].channels));
        let channels = |i: usize| f64::from(blocks[i.min(last)].channels);
        let time = 4.0 * first;
        let mut down = Vec::new();
        for (i, block) in blocks.iter().enumerate() {
            let name = format!("down_blocks.{i}");
            let outputs = channels(i);
            let padding = f64::from(shapes.downsample_padding);
            let sampler = (i < last).then(|| {
                let sizes = LayerSizes {
                    stride: 2.0,
                    padding,
                    ..LayerSizes::conv(outputs, outputs, 3.0)
                };
                Rc::new(b.layer(&format!("{name}.downsamplers.0.conv"), sizes))
            });
            let resnets = (0..block.layers as usize).map(|j| {
                let inputs = if j == 0 { channels(i.saturating_sub(1)) } else { outputs };
                Rc::new(Resnet::new(
                    b,
                    &format!("{name}.resnets.{j}"),
                    inputs,
                    outputs,
                    Some(time),
                ))
            });
            let resnets = resnets.collect();
            let count = if block.down_attention { block.layers as usize } else { 0 };
            let attentions =
                (0..count).map(|j| Rc::new(Transformer::new(b, &format!("{name}.attentions.{j}"), shapes, i)));
            let attentions = attentions.collect();
            down.push(Block {
                layers: Layers { resnets, attentions },
                sampler,
            });
        }
        let mid = shapes.mid_block.then(|| {
            let c = channels(last);
            let resnets = (0..2).map(|j| Rc::new(Resnet::new(b, &format!("mid_block.resnets.{j}"), c, c, Some(time))));
            let resnets = resnets.collect();
            let attentions = vec![Rc::new(Transformer::new(b, "mid_block.attentions.0", shapes, last))];
            Layers { resnets, attentions }
        });
        Self {
            blocks: down,
            mid,
            padding: f64::from(shapes.downsample_padding),
        }
    }

    /// Appends the down blocks: each intermediate result is added to `skips`, with its size. `residuals`: what a T2I-Adapter adds in each block.
    pub(super) fn add_blocks(
        &self,
        sequence: &mut BlockSequence,
        skips: &mut Vec<(Value, [f64; 2])>,
        c: Conditioning,
        residuals: &mut dyn Iterator<Item = Value>,
    ) -> Option<()> {
        for block in &self.blocks {
            let &(mut x, mut size) = skips.last()?;
            let mut residual = residuals.next();
            let count = block.layers.resnets.len();
            for i in 0..count {
                x = block.layers.step(i, sequence, x, None, c);
                let is_last = i + 1 == count && (!block.layers.attentions.is_empty() || block.sampler.is_none());
                if let Some(residual) = residual.take_if(|_| is_last) {
                    x = add_residual(sequence, x, residual);
                }
                skips.push((x, size));
            }
            if let Some(sampler) = block.sampler.clone() {
                let added = (2.0 * self.padding).max(1.0);
                size = size.map(|side| ((side + added - 3.0).max(0.0) / 2.0).floor() + 1.0);
                x = sequence.add(&[x], move |walk, inputs| downsample(walk, &sampler, &inputs[0]));
                if let Some(residual) = residual {
                    x = add_residual(sequence, x, residual);
                }
                skips.push((x, size));
            }
        }
        Some(())
    }

    /// Appends the middle block, if there is one.
    pub(super) fn add_middle(&self, sequence: &mut BlockSequence, x: Value, c: Conditioning) -> Value {
        let Some(mid) = &self.mid else { return x };
        let x = mid.step(0, sequence, x, None, c);
        let resnet = Rc::clone(&mid.resnets[1]);
        sequence.add(&[x, c.time], move |walk, inputs| {
            resnet.forward(walk, &inputs[0], inputs.get(1))
        })
    }
}

/// Appends the addition of what a network beside the U-Net adds.
fn add_residual(sequence: &mut BlockSequence, x: Value, residual: Value) -> Value {
    sequence.add(&[x, residual], |walk, inputs| match inputs {
        [x, residual] => walk.add(x, &converted(walk, residual, x.dims)),
        other => other[0].clone(),
    })
}

/// A residual in the dtype of the features to which it is added: networks beside the U-Net compute in float32.
fn converted(walk: &Walk, residual: &MetaTensor, dims: [f64; 4]) -> MetaTensor {
    match residual.dims == dims {
        true => residual.clone(),
        false => walk.rearranged(residual, dims),
    }
}

/// What networks beside the U-Net add to its features, as `UNetResiduals` of the engine.
#[derive(Clone, Default)]
pub(in crate::plan) struct Residuals {
    pub(super) in_blocks: Vec<MetaTensor>,
    pub(super) skips: Vec<MetaTensor>,
    pub(super) middle: Option<MetaTensor>,
}

/// The U-Net.
pub(in crate::plan) struct UNet {
    conv_in: Layer,
    time: [Layer; 2],
    additional: Option<[Layer; 2]>,
    down: Down,
    up: Vec<Block>,
    norm_out: Norm,
    conv_out: Layer,
}

impl UNet {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &UNetShapes) -> Self {
        let blocks = shapes.blocks();
        let (last, first) = (blocks.len() - 1, f64::from(blocks[0].channels));
        let channels = |i: usize| f64::from(blocks[i.min(last)].channels);
        let time = 4.0 * first;
        let down = Down::new(b, shapes);
        let mut up = Vec::new();
        for i in 0..blocks.len() {
            let (name, at) = (format!("up_blocks.{i}"), last - i);
            let outputs = channels(at);
            let sampler = (i < last).then(|| {
                Rc::new(b.layer(
                    &format!("{name}.upsamplers.0.conv"),
                    LayerSizes::conv(outputs, outputs, 3.0),
                ))
            });
            let count = blocks[at].layers as usize + 1;
            let resnets = (0..count).map(|j| {
                let skip = if j + 1 == count {
                    channels(at.saturating_sub(1))
                } else {
                    outputs
                };
                let inputs = if j == 0 { channels(at + 1) } else { outputs };
                Rc::new(Resnet::new(
                    b,
                    &format!("{name}.resnets.{j}"),
                    inputs + skip,
                    outputs,
                    Some(time),
                ))
            });
            let resnets = resnets.collect();
            let attended = if blocks[at].up_attention { count } else { 0 };
            let attentions =
                (0..attended).map(|j| Rc::new(Transformer::new(b, &format!("{name}.attentions.{j}"), shapes, at)));
            let attentions = attentions.collect();
            up.push(Block {
                layers: Layers { resnets, attentions },
                sampler,
            });
        }
        let ends = |inputs: u32, outputs: u32, kernel: u32| {
            LayerSizes::conv(f64::from(inputs), f64::from(outputs), f64::from(kernel))
        };
        Self {
            conv_in: b.layer(
                "conv_in",
                ends(shapes.in_channels, blocks[0].channels, shapes.conv_in_kernel),
            ),
            time: [
                b.layer("time_embedding.linear_1", LayerSizes::linear(first, time, true)),
                b.layer("time_embedding.linear_2", LayerSizes::linear(time, time, true)),
            ],
            additional: (shapes.additional > 0).then(|| {
                let inputs = f64::from(shapes.additional);
                [
                    b.layer("add_embedding.linear_1", LayerSizes::linear(inputs, time, true)),
                    b.layer("add_embedding.linear_2", LayerSizes::linear(time, time, true)),
                ]
            }),
            down,
            up,
            norm_out: b.norm("conv_norm_out", first),
            conv_out: b.layer(
                "conv_out",
                ends(blocks[0].channels, shapes.out_channels, shapes.conv_out_kernel),
            ),
        }
    }

    /// A pass over latents [batch, channels, height, width] and the encoded text, with what networks beside the U-Net add.
    pub(in crate::plan) fn forward(
        &self,
        walk: &Walk,
        sample: &MetaTensor,
        (context, residuals): (&MetaTensor, &Residuals),
        checkpointed: bool,
    ) -> Option<MetaTensor> {
        let batch = sample.dims[0];
        let mut time = embedded(walk, &self.time, batch);
        if let Some(additional) = &self.additional {
            time = walk.add(&time, &embedded(walk, additional, batch));
        }
        let x = walk.conv(&self.conv_in, sample);
        let size = [x.dims[2], x.dims[3]];
        let mut sequence = BlockSequence::default();
        let mut skips = vec![(sequence.input(x), size)];
        let c = Conditioning {
            time: sequence.input(time),
            context: sequence.input(context.clone()),
        };
        let in_blocks = residuals
            .in_blocks
            .iter()
            .map(|residual| sequence.input(residual.clone()));
        let mut in_blocks = in_blocks.collect::<Vec<_>>().into_iter();
        self.down.add_blocks(&mut sequence, &mut skips, c, &mut in_blocks)?;
        let mut x = skips.last()?.0;
        for ((skip, _), residual) in skips.iter_mut().zip(&residuals.skips) {
            let residual = sequence.input(residual.clone());
            *skip = add_residual(&mut sequence, *skip, residual);
        }
        x = self.down.add_middle(&mut sequence, x, c);
        for residual in in_blocks {
            x = add_residual(&mut sequence, x, residual);
        }
        if let Some(residual) = &residuals.middle {
            let residual = sequence.input(residual.clone());
            x = add_residual(&mut sequence, x, residual);
        }
        for block in &self.up {
            for i in 0..block.layers.resnets.len() {
                let skip = skips.pop().map(|(skip, _)| skip);
                x = block.layers.step(i, &mut sequence, x, skip, c);
            }
            if let (Some(sampler), Some(&(_, [height, width]))) = (block.sampler.clone(), skips.last()) {
                x = sequence.add(&[x], move |walk, inputs| {
                    let x = &inputs[0];
                    let large = walk.upsampled(x, [x.dims[0], x.dims[1], height, width]);
                    walk.conv(&sampler, &large)
                });
            }
        }
        let x = sequence.run(walk, checkpointed, x)?;
        let normed = norm_silu(walk, self.norm_out, &x);
        Some(walk.conv(&self.conv_out, &normed))
    }
}

/// The embedding of the timestep, or of the pooled text and the sizes.
pub(super) fn embedded(walk: &Walk, [first, second]: &[Layer; 2], batch: f64) -> MetaTensor {
    let inputs = walk.tensor([batch, 1.0, first.inputs, 1.0], false);
    walk.linear(second, &walk.activation(&walk.linear(first, &inputs), Activation::Silu))
}

/// Downsampling by a convolution. With a padding of 0, the input is padded first.
pub(super) fn downsample(walk: &Walk, conv: &Layer, x: &MetaTensor) -> MetaTensor {
    if conv.padding > 0.0 {
        return walk.conv(conv, x);
    }
    let [batch, channels, height, width] = x.dims;
    let below = walk.rearranged(x, [batch, channels, height + 1.0, width]);
    let both = walk.rearranged(&below, [batch, channels, height + 1.0, width + 1.0]);
    walk.conv(conv, &both)
}
