//! The whole transformer (diffusers' `ZImageTransformer2DModel`): embeddings, blocks of the image alone and of the caption alone,
//! blocks of both, output.

use super::block::{Sizes, ZImageTransformerBlock};
use super::sequence::{Axes, Layout, MULTIPLE};
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::config::check_sizes;
use crate::nn::{self, LayerMut, LayerNorm, Linear, RmsNorm, VisitLayers, silu, sinusoids};
use crate::weights::{Init, Weights};
use candle_core::{DType, Tensor};
use serde::Deserialize;
use std::sync::Arc;

/// Sinusoids of a timestep.
pub(super) const SINUSOIDS: usize = 256;
/// Features of the hidden layer of the timestep's embedding.
pub(super) const TIME_HIDDEN: usize = 1024;
/// Rows and columns of latents that make one token.
pub(super) const PATCH: usize = 2;
/// The epsilon of the norm before the output.
const OUTPUT_NORM_EPS: f64 = 1e-6;
/// Training timesteps: the timestep at which there is only noise.
const TIME_STEPS: f64 = 1000.0;

/// `transformer/config.json`. Missing keys have the values of diffusers' class.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ZImageConfig {
    /// Rows and columns of latents that make one token, for each kind of input; must be one: 2.
    pub all_patch_size: Vec<usize>,
    /// Frames that make one token, for each kind of input; must be one: 1.
    pub all_f_patch_size: Vec<usize>,
    /// Channels of the latents.
    pub in_channels: usize,
    /// Features of a token.
    pub dim: usize,
    /// Blocks of image and caption.
    pub n_layers: usize,
    /// Blocks of the image alone, and as many of the caption alone.
    pub n_refiner_layers: usize,
    /// Attention heads.
    pub n_heads: usize,
    /// The epsilon of the norms of tokens.
    pub norm_eps: f64,
    /// Whether queries and keys are normalised; must be true.
    pub qk_norm: bool,
    /// Features of a caption token.
    pub cap_feat_dim: usize,
    /// Features of image embeddings (Z-Image Omni); not supported.
    pub siglip_feat_dim: Option<usize>,
    /// The base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// The factor of the timestep from 0 to 1.
    pub t_scale: f64,
    /// Features of a head that are rotated by the place in the sequence, the row and the column.
    pub axes_dims: Vec<usize>,
    /// The number of positions of each axis.
    pub axes_lens: Vec<usize>,
}

impl Default for ZImageConfig {
    fn default() -> Self {
        Self {
            all_patch_size: vec![PATCH],
            all_f_patch_size: vec![1],
            in_channels: 16,
            dim: 3840,
            n_layers: 30,
            n_refiner_layers: 2,
            n_heads: 30,
            norm_eps: 1e-5,
            qk_norm: true,
            cap_feat_dim: 2560,
            siglip_feat_dim: None,
            rope_theta: 256.0,
            t_scale: 1000.0,
            axes_dims: vec![32, 48, 48],
            axes_lens: vec![1024, 512, 512],
        }
    }
}

impl ZImageConfig {
    /// The most tokens of a caption: padded, they have positions before those of the image.
    #[must_use]
    pub fn max_caption_tokens(&self) -> usize {
        let positions = self.axes_lens.first().copied().unwrap_or(0).saturating_sub(2);
        positions / MULTIPLE * MULTIPLE
    }

    /// The features and the number of positions of the axes.
    fn axes(&self) -> std::result::Result<([usize; 3], [usize; 3]), String> {
        let (Ok(widths), Ok(lengths)) = (
            <[usize; 3]>::try_from(self.axes_dims.as_slice()),
            <[usize; 3]>::try_from(self.axes_lens.as_slice()),
        ) else {
            return Err("axes_dims and axes_lens must have three numbers".into());
        };
        // Checked, so that no sum wraps around to the right one: the widths become tables.
        let of_head = widths.iter().try_fold(0_usize, |sum, width| sum.checked_add(*width));
        let dim = of_head.and_then(|width| width.checked_mul(self.n_heads));
        if self.n_heads == 0 || dim != Some(self.dim) || widths.iter().any(|width| width % 2 != 0) {
            return Err(format!(
                "axes_dims {widths:?} must be even and add up to the features of a head: dim {} has {} heads",
                self.dim, self.n_heads
            ));
        }
        if self.max_caption_tokens() == 0 {
            return Err(format!(
                "axes_lens {lengths:?} has no positions for a caption: the first one must be at least {}",
                MULTIPLE + 2
            ));
        }
        check_sizes(lengths.map(|length| ("axes_lens", length)).into_iter().chain([
            ("dim", self.dim),
            ("in_channels", self.in_channels),
            ("cap_feat_dim", self.cap_feat_dim),
        ]))?;
        Ok((widths, lengths))
    }

    /// What of this config is not supported.
    fn unsupported(&self) -> Option<&'static str> {
        if self.siglip_feat_dim.is_some() {
            return Some("siglip_feat_dim: models with image conditions (Z-Image Omni) are not supported yet");
        }
        if self.all_patch_size != [PATCH] || self.all_f_patch_size != [1] {
            return Some("all_patch_size and all_f_patch_size must be [2] and [1]");
        }
        (!self.qk_norm).then_some("qk_norm: false is not supported")
    }
}

/// Z-Image's transformer.
#[derive(Clone, Debug)]
pub struct ZImageTransformer2DModel {
    x_embedder: Linear,
    caption_norm: RmsNorm,
    caption_embedder: Linear,
    time_embedder: [Linear; 2],
    /// [1, width]: the padding tokens of images and of captions.
    pad_tokens: [Tensor; 2],
    noise_refiner: Vec<Arc<ZImageTransformerBlock>>,
    context_refiner: Vec<Arc<ZImageTransformerBlock>>,
    layers: Vec<Arc<ZImageTransformerBlock>>,
    modulation_out: Linear,
    proj_out: Linear,
    plain_norm: LayerNorm,
    axes: Axes,
    positions: [usize; 3],
    channels: usize,
    t_scale: f64,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl ZImageTransformer2DModel {
    /// Loads the transformer.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &ZImageConfig) -> Result<Self> {
        if let Some(reason) = config.unsupported() {
            return Err(weights.config_error(reason.into()));
        }
        let (widths, positions) = config.axes().map_err(|reason| weights.config_error(reason))?;
        let (token, width) = (config.in_channels * PATCH * PATCH, config.dim);
        let sizes = Sizes {
            width,
            heads: config.n_heads,
            eps: config.norm_eps,
        };
        let blocks = |name: &str, count: usize, is_modulated: bool| -> Result<Vec<_>> {
            let list = weights.pp(name);
            let block = |i| ZImageTransformerBlock::new(&list.pp(i), sizes, is_modulated).map(Arc::new);
            (0..count).map(block).collect()
        };
        let (time, output) = (weights.pp("t_embedder.mlp"), weights.pp("all_final_layer.2-1"));
        let proj_out = Linear::new(&output.pp("linear"), width, token, true)?;
        let pad_token = |name: &str| weights.get_with((1, width), name, Init::Zeros);
        Ok(Self {
            x_embedder: Linear::new(&weights.pp("all_x_embedder.2-1"), token, width, true)?,
            caption_norm: RmsNorm::new(&weights.pp("cap_embedder.0"), config.cap_feat_dim, config.norm_eps)?,
            caption_embedder: Linear::new(&weights.pp("cap_embedder.1"), config.cap_feat_dim, width, true)?,
            time_embedder: [
                Linear::new(&time.pp(0), SINUSOIDS, TIME_HIDDEN, true)?,
                Linear::new(&time.pp(2), TIME_HIDDEN, sizes.time_features(), true)?,
            ],
            pad_tokens: [pad_token("x_pad_token")?, pad_token("cap_pad_token")?],
            noise_refiner: blocks("noise_refiner", config.n_refiner_layers, true)?,
            context_refiner: blocks("context_refiner", config.n_refiner_layers, false)?,
            layers: blocks("layers", config.n_layers, true)?,
            modulation_out: Linear::new(&output.pp("adaLN_modulation.1"), sizes.time_features(), width, true)?,
            plain_norm: LayerNorm::plain(
                width,
                OUTPUT_NORM_EPS,
                proj_out.weight.dtype(),
                proj_out.weight.device(),
            )?,
            proj_out,
            axes: Axes {
                widths,
                theta: config.rope_theta,
            },
            positions,
            channels: config.in_channels,
            t_scale: config.t_scale,
            checkpointing: Checkpointing::default(),
        })
    }

    /// Rows and columns of tokens that an image can have.
    #[must_use]
    pub fn max_tokens(&self) -> (usize, usize) {
        (self.positions[1], self.positions[2])
    }

    /// Predicts the velocity of latents [b, channels, h, w] at the timesteps [b] (f32, 0 to 1000): the same shape. h and w are
    /// even. `context` [b, n, features]: the captions, whose first `lengths` tokens are used.
    ///
    /// # Errors
    /// When the shapes do not match, or an image or a caption has more positions than the model knows.
    pub fn forward(&self, latents: &Tensor, timesteps: &Tensor, context: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let (batch, channels, height, width) = latents.dims4()?;
        if channels != self.channels || height % PATCH != 0 || width % PATCH != 0 {
            return Err(EngineError::Internal(format!(
                "Z-Image takes latents of {} channels with even sides, not {channels} x {height} x {width}",
                self.channels
            )));
        }
        let longest = context.dim(1)?;
        if lengths.len() != batch || lengths.iter().any(|length| *length == 0 || *length > longest) {
            return Err(EngineError::Internal(format!(
                "captions of {lengths:?} tokens do not match {batch} images and a context of shape {:?}",
                context.dims()
            )));
        }
        let layout = Layout::new((height / PATCH, width / PATCH), lengths.to_vec());
        let caption = layout.padded_caption();
        let needed = [caption + 2, height / PATCH, width / PATCH];
        if needed.iter().zip(&self.positions).any(|(needed, known)| needed > known) {
            return Err(EngineError::BadInput(format!(
                "a prompt of {caption} tokens and an image of {} x {} pixels: this model knows at most {} tokens and {} x {} pixels",
                8 * width,
                8 * height,
                self.positions[0].saturating_sub(2),
                16 * self.positions[2],
                16 * self.positions[1]
            )));
        }

        let dtype = latents.dtype();
        let time = self.embed_time(timesteps, dtype)?;
        let [x_pad, caption_pad] = &self.pad_tokens;
        let x = self.x_embedder.forward(&pack(latents)?)?;
        let x = layout.with_image_padding(&x, x_pad)?;
        let kept = context.narrow(1, 0, caption.min(longest))?.contiguous()?;
        let text = self.caption_embedder.forward(&self.caption_norm.forward(&kept)?)?;
        let text = layout.with_caption_padding(&text, caption_pad)?;
        let [image_positions, caption_positions, positions] = layout.positions(self.axes)?;
        let [caption_bias, bias] = layout.biases(latents.device())?;

        let mut sequence = BlockSequence::new();
        let (mut x, mut text) = (sequence.input(x), sequence.input(text));
        let conditioning = sequence.input(time.clone());
        for (name, list, value, positions, bias) in [
            ("noise_refiner", &self.noise_refiner, &mut x, &image_positions, &None),
            (
                "context_refiner",
                &self.context_refiner,
                &mut text,
                &caption_positions,
                &caption_bias,
            ),
        ] {
            for (index, block) in list.iter().enumerate() {
                let (block, positions, bias) = (Arc::clone(block), positions.clone(), bias.clone());
                *value = sequence.add(format!("{name}.{index}"), [*value, conditioning], move |[x, time]| {
                    block.forward(x, time, &positions, bias.as_ref())
                });
            }
        }
        let mut x = sequence.add("concatenation", [x, text], |[x, text]| nn::cat_channels(x, text));
        for (index, block) in self.layers.iter().enumerate() {
            let (block, positions, bias) = (Arc::clone(block), positions.clone(), bias.clone());
            x = sequence.add(format!("layers.{index}"), [x, conditioning], move |[x, time]| {
                block.forward(x, time, &positions, bias.as_ref())
            });
        }
        let x = sequence.run(self.checkpointing, x)?;
        let x = x.narrow(1, 0, layout.image_tokens())?.contiguous()?;
        let scale = self.modulation_out.forward(&silu(&time)?)?;
        let no_shift = scale.zeros_like()?.detach();
        let x = nn::modulate(&self.plain_norm.forward(&x)?, &scale, &no_shift)?;
        // The model predicts the latents minus the noise.
        unpack(&self.proj_out.forward(&x)?.neg()?, height, width)
    }

    /// Embeds the timesteps [b] (0 to 1000, 1000: only noise): [b, features]. The model counts the other way round.
    fn embed_time(&self, timesteps: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        let progress = timesteps.affine(-self.t_scale / TIME_STEPS, self.t_scale)?;
        let sinusoids = sinusoids(&progress, SINUSOIDS, true, 0.0)?;
        let [first, second] = &self.time_embedder;
        second.forward(&silu(&first.forward(&sinusoids.to_dtype(dtype)?)?)?)
    }
}

impl VisitLayers for ZImageTransformer2DModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let [time_1, time_2] = &mut self.time_embedder;
        for (name, layer) in [
            ("all_x_embedder.2-1", &mut self.x_embedder),
            ("cap_embedder.1", &mut self.caption_embedder),
            ("t_embedder.mlp.0", time_1),
            ("t_embedder.mlp.2", time_2),
        ] {
            f(name, LayerMut::Linear(layer))?;
        }
        for (name, list) in [
            ("noise_refiner", &mut self.noise_refiner),
            ("context_refiner", &mut self.context_refiner),
            ("layers", &mut self.layers),
        ] {
            for (index, block) in list.iter_mut().enumerate() {
                Arc::make_mut(block).visit(&format!("{name}.{index}"), f)?;
            }
        }
        f("all_final_layer.2-1.linear", LayerMut::Linear(&mut self.proj_out))?;
        f(
            "all_final_layer.2-1.adaLN_modulation.1",
            LayerMut::Linear(&mut self.modulation_out),
        )
    }

    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        self.caption_norm.visit("cap_embedder.0", f)?;
        for (name, list) in [
            ("noise_refiner", &mut self.noise_refiner),
            ("context_refiner", &mut self.context_refiner),
            ("layers", &mut self.layers),
        ] {
            for (index, block) in list.iter_mut().enumerate() {
                Arc::make_mut(block).visit_norms(&format!("{name}.{index}"), f)?;
            }
        }
        Ok(())
    }
}

/// Latents [b, c, h, w] -> tokens [b, h / 2 * w / 2, 4 c]: a token has the channels of each of the 2 x 2 places, place by place.
fn pack(latents: &Tensor) -> Result<Tensor> {
    let (batch, channels, height, width) = latents.dims4()?;
    let (rows, columns) = (height / PATCH, width / PATCH);
    let packed = latents
        .reshape((batch, channels, rows, PATCH, columns, PATCH))?
        .permute((0, 2, 4, 3, 5, 1))?
        .contiguous()?
        .reshape((batch, rows * columns, channels * PATCH * PATCH))?;
    Ok(packed)
}

/// The reverse of [`pack`].
fn unpack(tokens: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    let (batch, _, features) = tokens.dims3()?;
    let (rows, columns, channels) = (height / PATCH, width / PATCH, features / (PATCH * PATCH));
    let latents = tokens
        .reshape((batch, rows, columns, PATCH, PATCH, channels))?
        .permute((0, 5, 1, 3, 2, 4))?
        .contiguous()?
        .reshape((batch, channels, height, width))?;
    Ok(latents)
}
