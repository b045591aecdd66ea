//! The encoder and the decoder of the autoencoder.

use super::vae_config::VaeConfig;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::Result;
use crate::models::unet::{Downsample, ResnetBlock, ResnetSizes, Upsample};
use crate::nn::{self, Attention, Conv2d, GroupNorm, Linear};
use crate::weights::Weights;
use candle_core::Tensor;
use std::sync::Arc;

const EPS: f64 = 1e-6;

fn resnet(weights: &Weights, config: &VaeConfig, inputs: usize, outputs: usize) -> Result<ResnetBlock> {
    ResnetBlock::new(
        weights,
        ResnetSizes {
            inputs,
            outputs,
            time: None,
            groups: config.norm_num_groups,
            eps: EPS,
        },
    )
}

#[derive(Clone, Debug)]
struct MidBlock {
    resnets: [ResnetBlock; 2],
    attention: Option<MidAttention>,
}

/// Self-attention over all pixels, with one head.
#[derive(Clone, Debug)]
struct MidAttention {
    group_norm: GroupNorm,
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
}

impl MidBlock {
    fn new(weights: &Weights, config: &VaeConfig, channels: usize) -> Result<Self> {
        let attention_weights = weights.pp("attentions.0");
        let linear = |name| Linear::new(&attention_weights.pp(name), channels, channels, true);
        let attention = if config.mid_block_add_attention {
            Some(MidAttention {
                group_norm: GroupNorm::new(
                    &attention_weights.pp("group_norm"),
                    config.norm_num_groups,
                    channels,
                    EPS,
                )?,
                to_q: linear("to_q")?,
                to_k: linear("to_k")?,
                to_v: linear("to_v")?,
                to_out: linear("to_out.0")?,
            })
        } else {
            None
        };
        let resnet = |i| resnet(&weights.pp("resnets").pp(i), config, channels, channels);
        Ok(Self {
            resnets: [resnet(0)?, resnet(1)?],
            attention,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.resnets[0].forward(x, None)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(&x)?;
        }
        self.resnets[1].forward(&x, None)
    }
}

impl MidAttention {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = nn::to_tokens(&self.group_norm.forward(x)?)?;
        let (q, k, v) = (self.to_q.forward(&h)?, self.to_k.forward(&h)?, self.to_v.forward(&h)?);
        let h = self.to_out.forward(&Attention::new(1).forward(&q, &k, &v)?)?;
        nn::add(&nn::to_image(&h, x.dims())?, x)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Encoder {
    conv_in: Conv2d,
    down_blocks: Vec<(Vec<ResnetBlock>, Option<Downsample>)>,
    mid_block: MidBlock,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
}

impl Encoder {
    pub(super) fn new(weights: &Weights, config: &VaeConfig) -> Result<Self> {
        let channels = &config.block_out_channels;
        let (first, last) = (channels[0], channels[channels.len() - 1]);
        let down_blocks = (0..channels.len()).map(|i| {
            let w = weights.pp("down_blocks").pp(i);
            let previous = channels[i.saturating_sub(1)];
            let resnets = (0..config.layers_per_block).map(|j| {
                let inputs = if j == 0 { previous } else { channels[i] };
                resnet(&w.pp("resnets").pp(j), config, inputs, channels[i])
            });
            let resnets = resnets.collect::<Result<Vec<_>>>()?;
            let is_last = i + 1 == channels.len();
            let down = if is_last {
                None
            } else {
                Some(Downsample::new(&w.pp("downsamplers.0"), channels[i], 0)?)
            };
            Ok((resnets, down))
        });
        Ok(Self {
            conv_in: Conv2d::new(&weights.pp("conv_in"), config.in_channels, first, 3, 1, 1)?,
            down_blocks: down_blocks.collect::<Result<_>>()?,
            mid_block: MidBlock::new(&weights.pp("mid_block"), config, last)?,
            conv_norm_out: GroupNorm::new(&weights.pp("conv_norm_out"), config.norm_num_groups, last, EPS)?,
            conv_out: Conv2d::new(&weights.pp("conv_out"), last, 2 * config.latent_channels, 3, 1, 1)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.conv_in.forward(x)?;
        for (resnets, down) in &self.down_blocks {
            for resnet in resnets {
                x = resnet.forward(&x, None)?;
            }
            if let Some(down) = down {
                x = down.forward(&x)?;
            }
        }
        let x = self.mid_block.forward(&x)?;
        self.conv_out.forward(&self.conv_norm_out.forward_silu(&x)?)
    }
}

type UpBlock = (Vec<ResnetBlock>, Option<Upsample>);

/// Its blocks are shared with the passes that run them again.
#[derive(Clone, Debug)]
pub(super) struct Decoder {
    first: Arc<(Conv2d, MidBlock)>,
    up_blocks: Vec<Arc<UpBlock>>,
    last: Arc<(GroupNorm, Conv2d)>,
}

impl Decoder {
    pub(super) fn new(weights: &Weights, config: &VaeConfig) -> Result<Self> {
        let channels: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        let (first, last) = (channels[0], channels[channels.len() - 1]);
        let up_blocks = (0..channels.len()).map(|i| {
            let w = weights.pp("up_blocks").pp(i);
            let previous = channels[i.saturating_sub(1)];
            let resnets = (0..=config.layers_per_block).map(|j| {
                let inputs = if j == 0 { previous } else { channels[i] };
                resnet(&w.pp("resnets").pp(j), config, inputs, channels[i])
            });
            let resnets = resnets.collect::<Result<Vec<_>>>()?;
            let is_last = i + 1 == channels.len();
            let up = if is_last {
                None
            } else {
                Some(Upsample::new(&w.pp("upsamplers.0"), channels[i])?)
            };
            Ok(Arc::new((resnets, up)))
        });
        let conv_in = Conv2d::new(&weights.pp("conv_in"), config.latent_channels, first, 3, 1, 1)?;
        let first = Arc::new((conv_in, MidBlock::new(&weights.pp("mid_block"), config, first)?));
        let up_blocks = up_blocks.collect::<Result<_>>()?;
        let norm_out = GroupNorm::new(&weights.pp("conv_norm_out"), config.norm_num_groups, last, EPS)?;
        let conv_out = Conv2d::new(&weights.pp("conv_out"), last, config.out_channels, 3, 1, 1)?;
        Ok(Self {
            first,
            up_blocks,
            last: Arc::new((norm_out, conv_out)),
        })
    }

    pub(super) fn forward(&self, x: Tensor, checkpointing: Checkpointing) -> candle_core::Result<Tensor> {
        if checkpointing == Checkpointing::Off {
            let mut x = into_middle(&self.first, &x)?;
            for block in &self.up_blocks {
                x = through_up_block(block, x)?;
            }
            return to_image(&self.last, &x);
        }
        let mut sequence = BlockSequence::new();
        let x = sequence.input(x);
        let first = Arc::clone(&self.first);
        let mut x = sequence.add("mid_block", [x], move |[x]| into_middle(&first, x));
        for (i, block) in self.up_blocks.iter().enumerate() {
            let block = Arc::clone(block);
            x = sequence.add(format!("up_blocks.{i}"), [x], move |[x]| {
                through_up_block(&block, x.clone())
            });
        }
        let last = Arc::clone(&self.last);
        let image = sequence.add("conv_out", [x], move |[x]| to_image(&last, x));
        sequence.run(checkpointing, image)
    }
}

fn into_middle((conv_in, mid_block): &(Conv2d, MidBlock), x: &Tensor) -> candle_core::Result<Tensor> {
    mid_block.forward(&conv_in.forward(x)?)
}

fn through_up_block((resnets, up): &UpBlock, mut x: Tensor) -> candle_core::Result<Tensor> {
    for resnet in resnets {
        x = resnet.forward(&x, None)?;
    }
    match up {
        Some(up) => {
            let size = (2 * x.dim(2)?, 2 * x.dim(3)?);
            up.forward(&x, size)
        }
        None => Ok(x),
    }
}

fn to_image((norm_out, conv_out): &(GroupNorm, Conv2d), x: &Tensor) -> candle_core::Result<Tensor> {
    conv_out.forward(&norm_out.forward_silu(x)?)
}
