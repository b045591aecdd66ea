//! The U-Net of Stable Diffusion (diffusers' `UNet2DConditionModel`, as SD 1.x, 2.x and XL configure it).

mod additional;
mod blocks;
mod config;
pub(crate) mod original_names;
mod resnet;
mod transformer;

pub use additional::AdditionalConditions;
pub use config::{PerBlock, UNetConfig};
pub(crate) use original_names::OriginalNames;
pub use resnet::{Downsample, ResnetBlock, ResnetSizes, Upsample};
pub use transformer::{Transformer2d, TransformerSizes};

use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::nn::{Conv2d, GroupNorm, LayerMut, Linear, VisitLayers, silu, sinusoids};
use crate::weights::Weights;
use additional::AdditionalEmbedding;
use blocks::{Conditioning, DownBlock, MidBlock, UpBlock};
use candle_core::Tensor;

/// The U-Net.
#[derive(Clone, Debug)]
pub struct UNet2DConditionModel {
    config: UNetConfig,
    conv_in: Conv2d,
    time_linear_1: Linear,
    time_linear_2: Linear,
    /// SDXL: the embedding of pooled text and sizes, which is added to that of the timestep.
    additional: Option<AdditionalEmbedding>,
    down_blocks: Vec<DownBlock>,
    mid_block: Option<MidBlock>,
    up_blocks: Vec<UpBlock>,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl UNet2DConditionModel {
    /// Loads the model.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &UNetConfig) -> Result<Self> {
        let params = config.block_params().map_err(|message| weights.config_error(message))?;
        let additional = config
            .additional_embedding()
            .map_err(|message| weights.config_error(message))?;
        let first = params.channels[0];
        let time_width = 4 * first;
        let embedding = weights.pp("time_embedding");
        let conv = |name: &str, inputs: usize, outputs: usize, kernel: usize| {
            Conv2d::new(&weights.pp(name), inputs, outputs, kernel, 1, kernel / 2)
        };
        let down_blocks = (0..params.channels.len())
            .map(|i| DownBlock::new(&weights.pp("down_blocks").pp(i), config, &params, i))
            .collect::<Result<Vec<_>>>()?;
        let mid_block = if params.mid_block {
            Some(MidBlock::new(&weights.pp("mid_block"), config, &params)?)
        } else {
            None
        };
        let up_blocks = (0..params.channels.len())
            .map(|i| UpBlock::new(&weights.pp("up_blocks").pp(i), config, &params, i))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            conv_in: conv("conv_in", config.in_channels, first, config.conv_in_kernel)?,
            time_linear_1: Linear::new(&embedding.pp("linear_1"), first, time_width, true)?,
            time_linear_2: Linear::new(&embedding.pp("linear_2"), time_width, time_width, true)?,
            additional: additional
                .map(|widths| AdditionalEmbedding::new(&weights.pp("add_embedding"), widths, time_width))
                .transpose()?,
            down_blocks,
            mid_block,
            up_blocks,
            conv_norm_out: GroupNorm::new(
                &weights.pp("conv_norm_out"),
                config.norm_num_groups,
                first,
                config.norm_eps,
            )?,
            conv_out: conv("conv_out", first, config.out_channels, config.conv_out_kernel)?,
            config: config.clone(),
            checkpointing: Checkpointing::default(),
        })
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &UNetConfig {
        &self.config
    }

    /// sample [b, in, h, w], timesteps [b] (f32, may be fractional), context [b, n, cross attention width] -> the
    /// prediction [b, out, h, w]. Any h and w.
    ///
    /// # Errors
    /// When the shapes do not match, or the model needs [`AdditionalConditions`].
    pub fn forward(&self, sample: &Tensor, timesteps: &Tensor, context: &Tensor) -> Result<Tensor> {
        self.forward_with(sample, timesteps, context, None)
    }

    /// As [`Self::forward`], with the pooled text and the sizes that SDXL is conditioned on.
    ///
    /// # Errors
    /// When the shapes do not match, when the model needs the additional conditions and gets none, and when it gets some and needs none.
    pub fn forward_with(
        &self,
        sample: &Tensor,
        timesteps: &Tensor,
        context: &Tensor,
        conditions: Option<&AdditionalConditions<'_>>,
    ) -> Result<Tensor> {
        let mut time = self.time_embedding(timesteps)?;
        match (&self.additional, conditions) {
            (Some(additional), Some(conditions)) => time = (time + additional.forward(conditions, &self.config)?)?,
            (None, None) => {}
            (wants, _) => {
                return Err(EngineError::Internal(format!(
                    "the U-Net {} pooled text and sizes",
                    if wants.is_some() { "needs" } else { "takes no" }
                )));
            }
        }
        let time = time.to_dtype(sample.dtype())?;
        let x = self.conv_in.forward(sample)?;
        let size = (x.dim(2)?, x.dim(3)?);
        let mut sequence = BlockSequence::new();
        let mut skips = vec![(sequence.input(x), size)];
        let conditioning = Conditioning {
            time: sequence.input(time),
            context: sequence.input(context.clone()),
        };
        for (i, block) in self.down_blocks.iter().enumerate() {
            block.add_blocks(&format!("down_blocks.{i}"), &mut sequence, &mut skips, conditioning);
        }
        let mut x = skips[skips.len() - 1].0;
        if let Some(block) = &self.mid_block {
            x = block.add_blocks("mid_block", &mut sequence, x, conditioning);
        }
        for (i, block) in self.up_blocks.iter().enumerate() {
            x = block.add_blocks(&format!("up_blocks.{i}"), &mut sequence, x, &mut skips, conditioning);
        }
        let x = sequence.run(self.checkpointing, x)?;
        let x = self.conv_norm_out.forward_silu(&x)?;
        Ok(self.conv_out.forward(&x)?)
    }

    fn time_embedding(&self, timesteps: &Tensor) -> Result<Tensor> {
        let dtype = self.time_linear_1.weight.dtype();
        let width = self.time_linear_1.in_features();
        let x = sinusoids(timesteps, width, self.config.flip_sin_to_cos, self.config.freq_shift)?.to_dtype(dtype)?;
        let x = silu(&self.time_linear_1.forward(&x)?)?;
        Ok(self.time_linear_2.forward(&x)?)
    }
}

impl VisitLayers for UNet2DConditionModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        f("conv_in", LayerMut::Conv2d(&mut self.conv_in))?;
        f("time_embedding.linear_1", LayerMut::Linear(&mut self.time_linear_1))?;
        f("time_embedding.linear_2", LayerMut::Linear(&mut self.time_linear_2))?;
        if let Some(additional) = &mut self.additional {
            additional.visit("add_embedding", f)?;
        }
        for (i, block) in self.down_blocks.iter_mut().enumerate() {
            block.visit(&format!("down_blocks.{i}"), f)?;
        }
        if let Some(block) = &mut self.mid_block {
            block.visit("mid_block", f)?;
        }
        for (i, block) in self.up_blocks.iter_mut().enumerate() {
            block.visit(&format!("up_blocks.{i}"), f)?;
        }
        f("conv_out", LayerMut::Conv2d(&mut self.conv_out))
    }

    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (i, block) in self.down_blocks.iter_mut().enumerate() {
            block.visit_norms(&format!("down_blocks.{i}"), f)?;
        }
        if let Some(block) = &mut self.mid_block {
            block.visit_norms("mid_block", f)?;
        }
        for (i, block) in self.up_blocks.iter_mut().enumerate() {
            block.visit_norms(&format!("up_blocks.{i}"), f)?;
        }
        self.conv_norm_out.visit("conv_norm_out", f)
    }
}
