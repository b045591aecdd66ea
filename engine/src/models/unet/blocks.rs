//! The down, middle and up blocks of the U-Net, as steps of a stack.

use super::config::{Plan, UNetConfig};
use super::resnet::{Downsample, ResnetBlock, ResnetSizes, Upsample, Visitor};
use super::transformer::{Transformer2d, TransformerSizes};
use crate::error::Result;
use crate::nn::{cat_channels, join};
use crate::residency::{Stack, Value};
use crate::weights::Weights;
use std::sync::Arc;

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

/// Height and width.
pub(super) type Size = (usize, usize);

/// What every block reads beside the image.
#[derive(Clone, Copy)]
pub(super) struct Conditions {
    /// The time embedding, [b, width].
    pub(super) time: Value,
    /// The text, [b, n, width].
    pub(super) context: Value,
}

/// Residual blocks, each followed by its transformer, if the block has them.
#[derive(Clone, Debug)]
struct Layers {
    resnets: Vec<Arc<ResnetBlock>>,
    attentions: Vec<Arc<Transformer2d>>,
}

impl Layers {
    fn new(
        weights: &Weights,
        resnets: impl Iterator<Item = Result<ResnetBlock>>,
        attended: usize,
        transformer: impl Fn(&Weights) -> Result<Transformer2d>,
    ) -> Result<Self> {
        let attentions = (0..attended).map(|j| Ok(Arc::new(transformer(&weights.pp("attentions").pp(j))?)));
        Ok(Self {
            resnets: resnets.map(|r| r.map(Arc::new)).collect::<Result<_>>()?,
            attentions: attentions.collect::<Result<_>>()?,
        })
    }

    /// Layer `i`: of the image, to which a skip is joined first, if there is one.
    fn stack(&self, i: usize, path: &str, stack: &mut Stack, x: Value, skip: Option<Value>, c: Conditions) -> Value {
        let (name, resnet) = (format!("{path}.resnets.{i}"), Arc::clone(&self.resnets[i]));
        let x = match skip {
            Some(skip) => stack.step(name, [x, skip, c.time], move |[x, skip, time]| {
                resnet.forward(&cat_channels(x, skip)?, Some(time))
            }),
            None => stack.step(name, [x, c.time], move |[x, time]| resnet.forward(x, Some(time))),
        };
        match self.attentions.get(i).cloned() {
            Some(attention) => stack.step(format!("{path}.attentions.{i}"), [x, c.context], move |[x, context]| {
                attention.forward(x, context)
            }),
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
}

#[derive(Clone, Debug)]
pub(super) struct DownBlock {
    layers: Layers,
    downsampler: Option<Arc<Downsample>>,
}

impl DownBlock {
    pub(super) fn new(weights: &Weights, config: &UNetConfig, plan: &Plan, i: usize) -> Result<Self> {
        let outputs = plan.channels[i];
        let before = if i == 0 { plan.channels[0] } else { plan.channels[i - 1] };
        let resnets = (0..plan.layers[i]).map(|j| {
            let inputs = if j == 0 { before } else { outputs };
            resnet(&weights.pp("resnets").pp(j), config, plan, inputs, outputs)
        });
        let attended = if plan.down_attention[i] { plan.layers[i] } else { 0 };
        let last = i + 1 == plan.channels.len();
        let place = weights.pp("downsamplers.0");
        let downsampler = if last {
            None
        } else {
            Some(Arc::new(Downsample::new(&place, outputs, config.downsample_padding)?))
        };
        Ok(Self {
            layers: Layers::new(weights, resnets, attended, |w| transformer(w, config, plan, i))?,
            downsampler,
        })
    }

    /// Every intermediate image with its size goes to `skips`; the last one goes on.
    pub(super) fn stack(&self, path: &str, stack: &mut Stack, skips: &mut Vec<(Value, Size)>, c: Conditions) {
        let Some(&(mut x, size)) = skips.last() else { return };
        for i in 0..self.layers.resnets.len() {
            x = self.layers.stack(i, path, stack, x, None, c);
            skips.push((x, size));
        }
        if let Some(downsampler) = self.downsampler.clone() {
            let size = downsampler.size_after(size);
            x = stack.step(format!("{path}.downsamplers.0"), [x], move |[x]| downsampler.forward(x));
            skips.push((x, size));
        }
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
    pub(super) fn new(weights: &Weights, config: &UNetConfig, plan: &Plan) -> Result<Self> {
        let last = plan.channels.len() - 1;
        let channels = plan.channels[last];
        let resnets = (0..2).map(|j| resnet(&weights.pp("resnets").pp(j), config, plan, channels, channels));
        Ok(Self {
            layers: Layers::new(weights, resnets, 1, |w| transformer(w, config, plan, last))?,
        })
    }

    pub(super) fn stack(&self, path: &str, stack: &mut Stack, x: Value, c: Conditions) -> Value {
        let x = self.layers.stack(0, path, stack, x, None, c);
        self.layers.stack(1, path, stack, x, None, c)
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
        let attended = if plan.up_attention[i] { count } else { 0 };
        let place = weights.pp("upsamplers.0");
        let upsampler = if i == last {
            None
        } else {
            Some(Arc::new(Upsample::new(&place, outputs)?))
        };
        Ok(Self {
            layers: Layers::new(weights, resnets, attended, |w| transformer(w, config, plan, opposite))?,
            upsampler,
        })
    }

    /// Takes its skips from the end of `skips`.
    pub(super) fn stack(
        &self,
        path: &str,
        stack: &mut Stack,
        mut x: Value,
        skips: &mut Vec<(Value, Size)>,
        c: Conditions,
    ) -> Value {
        for i in 0..self.layers.resnets.len() {
            let skip = skips.pop().map(|(skip, _)| skip);
            x = self.layers.stack(i, path, stack, x, skip, c);
        }
        match (self.upsampler.clone(), skips.last()) {
            // Odd sizes: enlarge to what the next skip has, not to twice the size.
            (Some(upsampler), Some(&(_, size))) => stack.step(format!("{path}.upsamplers.0"), [x], move |[x]| {
                upsampler.forward(x, size)
            }),
            _ => x,
        }
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.layers.visit(path, f)?;
        match &mut self.upsampler {
            Some(upsampler) => Arc::make_mut(upsampler).visit(&join(path, "upsamplers.0"), f),
            None => Ok(()),
        }
    }
}
