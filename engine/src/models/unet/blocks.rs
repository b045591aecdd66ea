//! The down, middle and up blocks of the U-Net.
//!
//! Inputs of every block: the picture, the time embedding, the context, and for up blocks the skips in the order in
//! which they are used.

use super::config::{Plan, UNetConfig};
use super::resnet::{Downsample, ResnetBlock, ResnetSizes, Upsample, Visitor};
use super::transformer::{Transformer2d, TransformerSizes};
use crate::error::Result;
use crate::nn::join;
use crate::weights::Weights;
use candle_core::Tensor;

fn resnet(weights: &Weights, config: &UNetConfig, plan: &Plan, inputs: usize, outputs: usize) -> Result<ResnetBlock> {
    let time = Some(4 * plan.channels[0]);
    let sizes = ResnetSizes {
        inputs,
        outputs,
        time,
        groups: config.norm_num_groups,
        eps: config.norm_eps,
    };
    ResnetBlock::new(weights, sizes)
}

/// `like`: the down block whose numbers hold.
fn transformer(weights: &Weights, config: &UNetConfig, plan: &Plan, like: usize) -> Result<Transformer2d> {
    let sizes = TransformerSizes {
        channels: plan.channels[like],
        heads: plan.heads[like],
        context: plan.context[like],
        layers: plan.transformer_layers[like],
        groups: config.norm_num_groups,
        linear: config.use_linear_projection,
    };
    Transformer2d::new(weights, sizes)
}

/// Residual blocks, each followed by its transformer, if the block has them.
#[derive(Clone, Debug)]
struct Layers {
    resnets: Vec<ResnetBlock>,
    attentions: Vec<Transformer2d>,
}

impl Layers {
    fn step(&self, i: usize, x: &Tensor, time: &Tensor, context: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.resnets[i].forward(x, Some(time))?;
        match self.attentions.get(i) {
            Some(attention) => attention.forward(&x, context),
            None => Ok(x),
        }
    }

    fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        for (i, attention) in self.attentions.iter_mut().enumerate() {
            attention.visit(&format!("{path}.attentions.{i}"), f)?;
        }
        for (i, resnet) in self.resnets.iter_mut().enumerate() {
            resnet.visit(&format!("{path}.resnets.{i}"), f)?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub(super) struct DownBlock {
    layers: Layers,
    downsampler: Option<Downsample>,
}

impl DownBlock {
    pub(super) fn new(weights: &Weights, config: &UNetConfig, plan: &Plan, i: usize) -> Result<Self> {
        let outputs = plan.channels[i];
        let before = if i == 0 { plan.channels[0] } else { plan.channels[i - 1] };
        let resnets = (0..plan.layers[i]).map(|j| {
            let inputs = if j == 0 { before } else { outputs };
            resnet(&weights.pp("resnets").pp(j), config, plan, inputs, outputs)
        });
        let resnets = resnets.collect::<Result<Vec<_>>>()?;
        let attended = if plan.down_attention[i] { plan.layers[i] } else { 0 };
        let attentions = (0..attended).map(|j| transformer(&weights.pp("attentions").pp(j), config, plan, i));
        let attentions = attentions.collect::<Result<Vec<_>>>()?;
        let last = i + 1 == plan.channels.len();
        let place = weights.pp("downsamplers.0");
        let downsampler = if last {
            None
        } else {
            Some(Downsample::new(&place, outputs, config.downsample_padding)?)
        };
        Ok(Self {
            layers: Layers { resnets, attentions },
            downsampler,
        })
    }

    /// Every intermediate picture, each of which is a skip; the last one goes on.
    pub(super) fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<Vec<Tensor>> {
        let [x, time, context] = inputs else {
            candle_core::bail!("a down block has 3 inputs")
        };
        let mut x = x.clone();
        let mut out = Vec::new();
        for i in 0..self.layers.resnets.len() {
            x = self.layers.step(i, &x, time, context)?;
            out.push(x.clone());
        }
        if let Some(downsampler) = &self.downsampler {
            out.push(downsampler.forward(&x)?);
        }
        Ok(out)
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)?;
        match &mut self.downsampler {
            Some(downsampler) => downsampler.visit(&join(path, "downsamplers.0"), f),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct MidBlock {
    layers: Layers,
}

impl MidBlock {
    pub(super) fn new(weights: &Weights, config: &UNetConfig, plan: &Plan) -> Result<Self> {
        let last = plan.channels.len() - 1;
        let channels = plan.channels[last];
        let resnets = (0..2).map(|j| resnet(&weights.pp("resnets").pp(j), config, plan, channels, channels));
        let resnets = resnets.collect::<Result<Vec<_>>>()?;
        let attentions = vec![transformer(&weights.pp("attentions.0"), config, plan, last)?];
        Ok(Self {
            layers: Layers { resnets, attentions },
        })
    }

    pub(super) fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let [x, time, context] = inputs else {
            candle_core::bail!("the middle block has 3 inputs")
        };
        let x = self.layers.step(0, x, time, context)?;
        self.layers.step(1, &x, time, context)
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)
    }
}

#[derive(Clone, Debug)]
pub(super) struct UpBlock {
    layers: Layers,
    upsampler: Option<Upsample>,
}

impl UpBlock {
    /// `i` counts the up blocks; the down block opposite has the number `last - i`.
    pub(super) fn new(weights: &Weights, config: &UNetConfig, plan: &Plan, i: usize) -> Result<Self> {
        let last = plan.channels.len() - 1;
        let opposite = last - i;
        let outputs = plan.channels[opposite];
        let before = plan.channels[(opposite + 1).min(last)];
        let deepest_skip = plan.channels[opposite.saturating_sub(1)];
        let count = plan.layers[opposite] + 1;
        let resnets = (0..count).map(|j| {
            let skip = if j + 1 == count { deepest_skip } else { outputs };
            let inputs = if j == 0 { before } else { outputs };
            resnet(&weights.pp("resnets").pp(j), config, plan, inputs + skip, outputs)
        });
        let resnets = resnets.collect::<Result<Vec<_>>>()?;
        let attended = if plan.up_attention[i] { count } else { 0 };
        let attentions = (0..attended).map(|j| transformer(&weights.pp("attentions").pp(j), config, plan, opposite));
        let attentions = attentions.collect::<Result<Vec<_>>>()?;
        let place = weights.pp("upsamplers.0");
        let upsampler = if i == last {
            None
        } else {
            Some(Upsample::new(&place, outputs)?)
        };
        Ok(Self {
            layers: Layers { resnets, attentions },
            upsampler,
        })
    }

    /// Skips that it takes.
    pub(super) fn skips(&self) -> usize {
        self.layers.resnets.len()
    }

    pub(super) fn forward(&self, inputs: &[Tensor], size: (usize, usize)) -> candle_core::Result<Tensor> {
        let [x, time, context, skips @ ..] = inputs else {
            candle_core::bail!("an up block has skips")
        };
        if skips.len() != self.skips() {
            candle_core::bail!("an up block got {} skips and needs {}", skips.len(), self.skips());
        }
        let mut x = x.clone();
        for (i, skip) in skips.iter().enumerate() {
            x = self.layers.step(i, &Tensor::cat(&[&x, skip], 1)?, time, context)?;
        }
        match &self.upsampler {
            Some(upsampler) => upsampler.forward(&x, size),
            None => Ok(x),
        }
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)?;
        match &mut self.upsampler {
            Some(upsampler) => upsampler.visit(&join(path, "upsamplers.0"), f),
            None => Ok(()),
        }
    }
}
