//! The U-Net of Stable Diffusion (diffusers' `UNet2DConditionModel`, as SD 1.x, 2.x and XL configure it).

mod additional;
mod blocks;
mod config;
mod control_net;
pub(crate) mod original_names;
mod residuals;
mod resnet;
mod time;
mod transformer;

pub use additional::AdditionalConditions;
pub use config::{PerBlock, UNetConfig};
pub use control_net::{ControlNetConfig, ControlNetModel, ControlNetWeights};
pub(crate) use original_names::OriginalNames;
pub use residuals::{UNetInputs, UNetResiduals};
pub use resnet::{Downsample, ResnetBlock, ResnetSizes, Upsample};
pub use transformer::{Transformer2d, TransformerSizes};

use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::nn::{Conv2d, GroupNorm, LayerMut, VisitLayers, add};
use crate::weights::Weights;
use additional::AdditionalEmbedding;
use blocks::{Conditioning, DownBlock, MidBlock, UpBlock};
use candle_core::Tensor;
use time::TimeEmbedding;

/// The U-Net.
#[derive(Clone, Debug)]
pub struct UNet2DConditionModel {
    config: UNetConfig,
    conv_in: Conv2d,
    time: TimeEmbedding,
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
            time: TimeEmbedding::new(&weights.pp("time_embedding"), first)?,
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
        let inputs = UNetInputs {
            sample,
            timesteps,
            context,
            conditions: conditions.copied(),
        };
        self.forward_adapted(&inputs, &UNetResiduals::default())
    }

    /// As [`Self::forward_with`], with what networks beside the U-Net add to its features.
    ///
    /// # Errors
    /// As there, and when there are more or other residuals than the U-Net has places for.
    pub fn forward_adapted(&self, inputs: &UNetInputs<'_>, residuals: &UNetResiduals) -> Result<Tensor> {
        let UNetInputs {
            sample,
            timesteps,
            context,
            conditions,
        } = *inputs;
        let mut time = self.time.forward(timesteps, &self.config)?;
        match (&self.additional, &conditions) {
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
        let mut in_blocks = Vec::with_capacity(residuals.in_blocks.len());
        for residual in &residuals.in_blocks {
            let dims = residual.dims().to_vec();
            in_blocks.push((sequence.input(residual.to_dtype(sample.dtype())?), dims));
        }
        let mut in_blocks = in_blocks.into_iter();
        for (i, block) in self.down_blocks.iter().enumerate() {
            let residual = in_blocks.next().map(|(residual, _)| residual);
            block.add_blocks(
                &format!("down_blocks.{i}"),
                &mut sequence,
                &mut skips,
                conditioning,
                residual,
            );
        }
        let (mut x, (height, width)) = skips[skips.len() - 1];
        for ((skip, _), residual) in with_residuals(&mut skips, &residuals.skips)? {
            let residual = sequence.input(residual.to_dtype(sample.dtype())?);
            *skip = sequence.add("skip residual", [*skip, residual], |[skip, residual]| {
                add(skip, residual)
            });
        }
        if let Some(block) = &self.mid_block {
            x = block.add_blocks("mid_block", &mut sequence, x, conditioning);
        }
        let channels = self.config.block_out_channels.last().copied().unwrap_or(0);
        for (residual, dims) in in_blocks {
            if dims != [sample.dim(0)?, channels, height, width] {
                return Err(EngineError::bad_input(format!(
                    "the adapter gives features {dims:?} more than the U-Net has down blocks, and its middle block has [{}, {channels}, \
                     {height}, {width}]: the adapter is for another model",
                    sample.dim(0)?
                )));
            }
            x = sequence.add("mid_block.residual", [x, residual], |[x, residual]| add(x, residual));
        }
        if let Some(residual) = &residuals.middle {
            let residual = sequence.input(residual.to_dtype(sample.dtype())?);
            x = sequence.add("mid_block.residual", [x, residual], |[x, residual]| add(x, residual));
        }
        for (i, block) in self.up_blocks.iter().enumerate() {
            x = block.add_blocks(&format!("up_blocks.{i}"), &mut sequence, x, &mut skips, conditioning);
        }
        let x = sequence.run(self.checkpointing, x)?;
        let x = self.conv_norm_out.forward_silu(&x)?;
        Ok(self.conv_out.forward(&x)?)
    }
}

/// The skip connections with the residuals that are added to them: none, or one for each.
fn with_residuals<'a, S>(
    skips: &'a mut [S],
    residuals: &'a [Tensor],
) -> Result<std::iter::Zip<std::slice::IterMut<'a, S>, std::slice::Iter<'a, Tensor>>> {
    let (found, expected) = (residuals.len(), skips.len());
    if found != 0 && found != expected {
        return Err(EngineError::bad_input(format!(
            "the ControlNet gives {found} features for {expected} skip connections of the U-Net: it is for another model"
        )));
    }
    Ok(skips.iter_mut().zip(residuals))
}

impl VisitLayers for UNet2DConditionModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        f("conv_in", LayerMut::Conv2d(&mut self.conv_in))?;
        self.time.visit(f)?;
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
