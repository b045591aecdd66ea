//! The down, middle and up blocks of the U-Net.

use super::config::{BlockParams, UNetConfig};
use super::resnet::{Downsample, ResnetBlock, ResnetSizes, Upsample, Visitor};
use super::transformer::{Transformer2d, TransformerSizes};
use crate::checkpointing::{BlockSequence, Value};
use crate::error::Result;
use crate::nn::{add, cat_channels, join};
use crate::weights::Weights;
use std::sync::Arc;

fn resnet(
    weights: &Weights,
    config: &UNetConfig,
    params: &BlockParams,
    inputs: usize,
    outputs: usize,
) -> Result<ResnetBlock> {
    let time = Some(4 * params.channels[0]);
    let sizes = ResnetSizes {
        inputs,
        outputs,
        time,
        groups: config.norm_num_groups,
        eps: config.norm_eps,
    };
    ResnetBlock::new(weights, sizes)
}

/// A transformer with the parameters of down block `down_index`.
fn transformer(
    weights: &Weights,
    config: &UNetConfig,
    params: &BlockParams,
    down_index: usize,
) -> Result<Transformer2d> {
    let sizes = TransformerSizes {
        channels: params.channels[down_index],
        heads: params.heads[down_index],
        context: params.context[down_index],
        layers: params.transformer_layers[down_index],
        groups: config.norm_num_groups,
        linear: config.use_linear_projection,
        upcast_attention: config.upcast_attention,
    };
    Transformer2d::new(weights, sizes)
}

/// Height and width.
pub(super) type Size = (usize, usize);

/// The inputs of every block besides the image.
#[derive(Clone, Copy)]
pub(super) struct Conditioning {
    /// The time embedding, [b, width].
    pub(super) time: Value,
    /// The text, [b, n, width].
    pub(super) context: Value,
}

/// Residual blocks, each followed by a transformer if the block has attention.
#[derive(Clone, Debug)]
struct Layers {
    resnets: Vec<Arc<ResnetBlock>>,
    attentions: Vec<Arc<Transformer2d>>,
}

impl Layers {
    fn new(
        weights: &Weights,
        resnets: impl Iterator<Item = Result<ResnetBlock>>,
        attention_count: usize,
        transformer: impl Fn(&Weights) -> Result<Transformer2d>,
    ) -> Result<Self> {
        let attentions = (0..attention_count).map(|j| Ok(Arc::new(transformer(&weights.pp("attentions").pp(j))?)));
        Ok(Self {
            resnets: resnets.map(|r| r.map(Arc::new)).collect::<Result<_>>()?,
            attentions: attentions.collect::<Result<_>>()?,
        })
    }

    /// Adds layer `i` to the sequence. If there is a skip connection, it is concatenated to the image first.
    fn add_blocks(
        &self,
        i: usize,
        path: &str,
        sequence: &mut BlockSequence,
        x: Value,
        skip: Option<Value>,
        c: Conditioning,
    ) -> Value {
        let (name, resnet) = (format!("{path}.resnets.{i}"), Arc::clone(&self.resnets[i]));
        let x = match skip {
            Some(skip) => sequence.add(name, [x, skip, c.time], move |[x, skip, time]| {
                resnet.forward(&cat_channels(x, skip)?, Some(time))
            }),
            None => sequence.add(name, [x, c.time], move |[x, time]| resnet.forward(x, Some(time))),
        };
        match self.attentions.get(i).cloned() {
            Some(attention) => attention.add_blocks(&format!("{path}.attentions.{i}"), sequence, x, c.context),
            None => x,
        }
    }

    fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        for (i, attention) in self.attentions.iter_mut().enumerate() {
            Arc::make_mut(attention).visit(&format!("{path}.attentions.{i}"), f)?;
        }
        for (i, resnet) in self.resnets.iter_mut().enumerate() {
            Arc::make_mut(resnet).visit(&format!("{path}.resnets.{i}"), f)?;
        }
        Ok(())
    }

    fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        for (i, attention) in self.attentions.iter_mut().enumerate() {
            Arc::make_mut(attention).visit_norms(&format!("{path}.attentions.{i}"), f)?;
        }
        for (i, resnet) in self.resnets.iter_mut().enumerate() {
            Arc::make_mut(resnet).visit_norms(&format!("{path}.resnets.{i}"), f)?;
        }
        Ok(())
    }
}

/// Adds what a network beside the U-Net adds to x.
fn add_residual(path: &str, sequence: &mut BlockSequence, x: Value, residual: Value) -> Value {
    sequence.add(format!("{path}.residual"), [x, residual], |[x, residual]| {
        add(x, residual)
    })
}

#[derive(Clone, Debug)]
pub(super) struct DownBlock {
    layers: Layers,
    downsampler: Option<Arc<Downsample>>,
}

impl DownBlock {
    pub(super) fn new(weights: &Weights, config: &UNetConfig, params: &BlockParams, i: usize) -> Result<Self> {
        let outputs = params.channels[i];
        let previous = if i == 0 {
            params.channels[0]
        } else {
            params.channels[i - 1]
        };
        let resnets = (0..params.layers[i]).map(|j| {
            let inputs = if j == 0 { previous } else { outputs };
            resnet(&weights.pp("resnets").pp(j), config, params, inputs, outputs)
        });
        let attention_count = if params.down_attention[i] { params.layers[i] } else { 0 };
        let last = i + 1 == params.channels.len();
        let sampler_weights = weights.pp("downsamplers.0");
        let downsampler = if last {
            None
        } else {
            Some(Arc::new(Downsample::new(
                &sampler_weights,
                outputs,
                config.downsample_padding,
            )?))
        };
        Ok(Self {
            layers: Layers::new(weights, resnets, attention_count, |w| transformer(w, config, params, i))?,
            downsampler,
        })
    }

    /// Adds the block to the sequence. Its input is the last entry of `skips`; every intermediate result is added to
    /// `skips`, with its size. `residual`: what a T2I-Adapter adds. As in diffusers it is added before the downsampling if the block has
    /// attention, else after it; the skip connection has it too.
    pub(super) fn add_blocks(
        &self,
        path: &str,
        sequence: &mut BlockSequence,
        skips: &mut Vec<(Value, Size)>,
        c: Conditioning,
        residual: Option<Value>,
    ) {
        let Some(&(mut x, size)) = skips.last() else { return };
        let mut residual = residual;
        let count = self.layers.resnets.len();
        for i in 0..count {
            x = self.layers.add_blocks(i, path, sequence, x, None, c);
            let is_last = i + 1 == count && (!self.layers.attentions.is_empty() || self.downsampler.is_none());
            if let Some(residual) = residual.take_if(|_| is_last) {
                x = add_residual(path, sequence, x, residual);
            }
            skips.push((x, size));
        }
        if let Some(downsampler) = self.downsampler.clone() {
            let size = downsampler.output_size(size);
            x = sequence.add(format!("{path}.downsamplers.0"), [x], move |[x]| downsampler.forward(x));
            if let Some(residual) = residual {
                x = add_residual(path, sequence, x, residual);
            }
            skips.push((x, size));
        }
    }

    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit_norms(path, f)
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)?;
        match &mut self.downsampler {
            Some(downsampler) => Arc::make_mut(downsampler).visit(&join(path, "downsamplers.0"), f),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct MidBlock {
    layers: Layers,
}

impl MidBlock {
    pub(super) fn new(weights: &Weights, config: &UNetConfig, params: &BlockParams) -> Result<Self> {
        let last = params.channels.len() - 1;
        let channels = params.channels[last];
        let resnets = (0..2).map(|j| resnet(&weights.pp("resnets").pp(j), config, params, channels, channels));
        Ok(Self {
            layers: Layers::new(weights, resnets, 1, |w| transformer(w, config, params, last))?,
        })
    }

    pub(super) fn add_blocks(&self, path: &str, sequence: &mut BlockSequence, x: Value, c: Conditioning) -> Value {
        let x = self.layers.add_blocks(0, path, sequence, x, None, c);
        self.layers.add_blocks(1, path, sequence, x, None, c)
    }

    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit_norms(path, f)
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)
    }
}

#[derive(Clone, Debug)]
pub(super) struct UpBlock {
    layers: Layers,
    upsampler: Option<Arc<Upsample>>,
}

impl UpBlock {
    /// Loads up block `i`. It has the parameters of down block `last - i`.
    pub(super) fn new(weights: &Weights, config: &UNetConfig, params: &BlockParams, i: usize) -> Result<Self> {
        let last = params.channels.len() - 1;
        let down_index = last - i;
        let outputs = params.channels[down_index];
        let previous = params.channels[(down_index + 1).min(last)];
        let deepest_skip = params.channels[down_index.saturating_sub(1)];
        let count = params.layers[down_index] + 1;
        let resnets = (0..count).map(|j| {
            let skip = if j + 1 == count { deepest_skip } else { outputs };
            let inputs = if j == 0 { previous } else { outputs };
            resnet(&weights.pp("resnets").pp(j), config, params, inputs + skip, outputs)
        });
        let attention_count = if params.up_attention[i] { count } else { 0 };
        let sampler_weights = weights.pp("upsamplers.0");
        let upsampler = if i == last {
            None
        } else {
            Some(Arc::new(Upsample::new(&sampler_weights, outputs)?))
        };
        Ok(Self {
            layers: Layers::new(weights, resnets, attention_count, |w| {
                transformer(w, config, params, down_index)
            })?,
            upsampler,
        })
    }

    /// Adds the block to the sequence. It takes its skip connections from the end of `skips`.
    pub(super) fn add_blocks(
        &self,
        path: &str,
        sequence: &mut BlockSequence,
        mut x: Value,
        skips: &mut Vec<(Value, Size)>,
        c: Conditioning,
    ) -> Value {
        for i in 0..self.layers.resnets.len() {
            let skip = skips.pop().map(|(skip, _)| skip);
            x = self.layers.add_blocks(i, path, sequence, x, skip, c);
        }
        match (self.upsampler.clone(), skips.last()) {
            // With odd sizes, the result has the size of the next skip connection, not twice the size.
            (Some(upsampler), Some(&(_, size))) => sequence.add(format!("{path}.upsamplers.0"), [x], move |[x]| {
                upsampler.forward(x, size)
            }),
            _ => x,
        }
    }

    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit_norms(path, f)
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)?;
        match &mut self.upsampler {
            Some(upsampler) => Arc::make_mut(upsampler).visit(&join(path, "upsamplers.0"), f),
            None => Ok(()),
        }
    }
}
