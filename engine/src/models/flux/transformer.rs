//! The whole transformer (diffusers' `FluxTransformer2DModel`): embeddings, double blocks, single blocks, output.

use super::blocks::{FluxSingleTransformerBlock, FluxSizes, FluxTransformerBlock, rotary_with_control};
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::config::check_sizes;
use crate::models::mmdit::{AdaLayerNormContinuous, Embedder, SINUSOIDS};
use crate::nn::{self, LayerMut, Linear, VisitLayers, join, padding_bias};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::Deserialize;
use std::sync::Arc;

/// Rows and columns of latents that make one token.
pub(in crate::models) const PATCH: usize = 2;

/// `transformer/config.json`. Missing keys have the values of diffusers' class.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct FluxConfig {
    /// Features of an image token: latent channels times four.
    pub in_channels: usize,
    /// Features of a predicted token; `None`: as many.
    pub out_channels: Option<usize>,
    /// Double blocks.
    pub num_layers: usize,
    /// Single blocks.
    pub num_single_layers: usize,
    /// Features of a head.
    pub attention_head_dim: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Features of an encoded text token (T5).
    pub joint_attention_dim: usize,
    /// Features of the pooled text (CLIP).
    pub pooled_projection_dim: usize,
    /// Whether the model is conditioned on a guidance scale (dev).
    pub guidance_embeds: bool,
    /// Features of a head that are rotated by the first axis, the row and the column.
    pub axes_dims_rope: Vec<usize>,
    /// Must be 1: tokens are made of 2 x 2 latents before the transformer.
    pub patch_size: usize,
}

impl Default for FluxConfig {
    fn default() -> Self {
        Self {
            in_channels: 64,
            out_channels: None,
            num_layers: 19,
            num_single_layers: 38,
            attention_head_dim: 128,
            num_attention_heads: 24,
            joint_attention_dim: 4096,
            pooled_projection_dim: 768,
            guidance_embeds: false,
            axes_dims_rope: vec![16, 56, 56],
            patch_size: 1,
        }
    }
}

/// What the transformer is conditioned on besides the timestep.
#[derive(Clone, Copy, Debug)]
pub struct FluxConditions<'a> {
    /// The encoded text, [b, tokens, joint_attention_dim].
    pub text: &'a Tensor,
    /// The tokens of each text, if no token attends to the padding behind them; else the padding is as the text.
    pub text_lengths: Option<&'a [usize]>,
    /// The pooled text, [b, pooled_projection_dim].
    pub pooled: &'a Tensor,
    /// The guidance scales, [b] f32. Models without a guidance embedding ignore them; without scales, its vector is left out.
    pub guidance: Option<&'a Tensor>,
    /// The latents of a control image (FLUX.1 Kontext), [b, channels, h, w] with even sides, which need not be those of the image.
    pub control: Option<&'a Tensor>,
}

/// FLUX.1's transformer.
#[derive(Clone, Debug)]
pub struct FluxTransformer2DModel {
    x_embedder: Linear,
    context_embedder: Linear,
    timestep_embedder: Embedder,
    guidance_embedder: Option<Embedder>,
    text_embedder: Embedder,
    double_blocks: Vec<Arc<FluxTransformerBlock>>,
    single_blocks: Vec<Arc<FluxSingleTransformerBlock>>,
    norm_out: AdaLayerNormContinuous,
    proj_out: Linear,
    axes: [usize; 3],
    channels: usize,
    text_width: usize,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl FluxTransformer2DModel {
    /// Features of the encoded text that it reads.
    #[must_use]
    pub fn text_width(&self) -> usize {
        self.text_width
    }

    /// Loads the transformer.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &FluxConfig) -> Result<Self> {
        let sizes = FluxSizes {
            heads: config.num_attention_heads,
            head_width: config.attention_head_dim,
        };
        let out_channels = config.out_channels.unwrap_or(config.in_channels);
        let axes = rotated_axes(weights, &config.axes_dims_rope, sizes)?;
        if config.patch_size != 1
            || out_channels != config.in_channels
            || !config.in_channels.is_multiple_of(PATCH * PATCH)
        {
            return Err(weights.config_error(format!(
                "in_channels {}, out_channels {out_channels} and patch_size {} are those of another model than FLUX.1",
                config.in_channels, config.patch_size
            )));
        }
        let width = sizes.heads.saturating_mul(sizes.head_width);
        check_sizes([
            ("in_channels", config.in_channels),
            ("joint_attention_dim", config.joint_attention_dim),
            ("pooled_projection_dim", config.pooled_projection_dim),
            ("num_attention_heads times attention_head_dim", width),
        ])
        .map_err(|message| weights.config_error(message))?;
        let embed = weights.pp("time_text_embed");
        let embedder = |name: &str, inputs| Embedder::new(&embed.pp(name), inputs, width);
        let double = weights.pp("transformer_blocks");
        let single = weights.pp("single_transformer_blocks");
        let double = (0..config.num_layers).map(|i| FluxTransformerBlock::new(&double.pp(i), sizes).map(Arc::new));
        let single =
            (0..config.num_single_layers).map(|i| FluxSingleTransformerBlock::new(&single.pp(i), sizes).map(Arc::new));
        Ok(Self {
            x_embedder: Linear::new(&weights.pp("x_embedder"), config.in_channels, width, true)?,
            context_embedder: Linear::new(&weights.pp("context_embedder"), config.joint_attention_dim, width, true)?,
            timestep_embedder: embedder("timestep_embedder", SINUSOIDS)?,
            guidance_embedder: match config.guidance_embeds {
                true => Some(embedder("guidance_embedder", SINUSOIDS)?),
                false => None,
            },
            text_embedder: embedder("text_embedder", config.pooled_projection_dim)?,
            double_blocks: double.collect::<Result<_>>()?,
            single_blocks: single.collect::<Result<_>>()?,
            norm_out: AdaLayerNormContinuous::new(&weights.pp("norm_out"), width)?,
            proj_out: Linear::new(&weights.pp("proj_out"), width, out_channels, true)?,
            axes,
            channels: config.in_channels / (PATCH * PATCH),
            text_width: config.joint_attention_dim,
            checkpointing: Checkpointing::default(),
        })
    }

    /// Channels of the latents: 16.
    #[must_use]
    pub fn latent_channels(&self) -> usize {
        self.channels
    }

    /// Whether the model is conditioned on a guidance scale.
    #[must_use]
    pub fn has_guidance(&self) -> bool {
        self.guidance_embedder.is_some()
    }

    /// Predicts the velocity of latents [b, channels, h, w] at the timesteps [b] (f32, 0 to 1000): the same shape.
    /// h and w are even.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, latents: &Tensor, timesteps: &Tensor, conditions: &FluxConditions<'_>) -> Result<Tensor> {
        let (_, channels, height, width) = latents.dims4()?;
        if channels != self.channels || height % PATCH != 0 || width % PATCH != 0 {
            return Err(EngineError::Internal(format!(
                "FLUX.1 takes latents of {} channels with even sides, not {channels} x {height} x {width}",
                self.channels
            )));
        }
        let dtype = latents.dtype();
        let mut temb = self.timestep_embedder.forward_numbers(timesteps, dtype)?;
        if let (Some(embedder), Some(guidance)) = (&self.guidance_embedder, conditions.guidance) {
            let guidance = (guidance * 1000.0)?;
            temb = nn::add(&temb, &embedder.forward_numbers(&guidance, dtype)?)?;
        }
        temb = nn::add(&temb, &self.text_embedder.forward(conditions.pooled)?)?;
        let mut tokens = pack(latents)?;
        let image_length = tokens.dim(1)?;
        let mut control_size = None;
        if let Some(control) = conditions.control {
            let (_, control_channels, rows, columns) = control.dims4()?;
            if control_channels != channels || rows % PATCH != 0 || columns % PATCH != 0 {
                return Err(EngineError::Internal(format!(
                    "FLUX.1 Kontext takes a control image of {channels} latent channels with even sides, not {control_channels} x {rows} x \
                     {columns}"
                )));
            }
            control_size = Some((rows / PATCH, columns / PATCH));
            tokens = Tensor::cat(&[&tokens, &pack(control)?], 1)?;
        }
        let tokens = self.x_embedder.forward(&tokens)?;
        let (text, bias) = masked_text(conditions.text, conditions.text_lengths, tokens.dim(1)?)?;
        let text = self.context_embedder.forward(&text)?;
        let text_length = text.dim(1)?;
        let size = (height / PATCH, width / PATCH);
        let positions = rotary_with_control(text_length, size, control_size, self.axes)?;

        let mut sequence = BlockSequence::new();
        let (mut x, mut text) = (sequence.input(tokens), sequence.input(text));
        let conditioning = sequence.input(temb.clone());
        for (index, block) in self.double_blocks.iter().enumerate() {
            let (block, positions, bias) = (Arc::clone(block), positions.clone(), bias.clone());
            [x, text] = sequence.add_with_outputs(
                format!("transformer_blocks.{index}"),
                [x, text, conditioning],
                move |[x, text, temb]| {
                    let (x, text) = block.forward(x, text, temb, &positions, bias.as_ref())?;
                    Ok([x, text])
                },
            );
        }
        let mut x = sequence.add("concatenation", [text, x], |[text, x]| nn::cat_channels(text, x));
        for (index, block) in self.single_blocks.iter().enumerate() {
            let (block, positions, bias) = (Arc::clone(block), positions.clone(), bias.clone());
            x = sequence.add(
                format!("single_transformer_blocks.{index}"),
                [x, conditioning],
                move |[x, temb]| block.forward(x, temb, &positions, bias.as_ref()),
            );
        }
        let x = sequence.run(self.checkpointing, x)?;
        // What is predicted for the control image is not used.
        let x = x.narrow(1, text_length, image_length)?;
        let x = self.norm_out.forward(&x.contiguous()?, &temb)?;
        unpack(&self.proj_out.forward(&x)?, height, width)
    }
}

impl VisitLayers for FluxTransformer2DModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        f("x_embedder", LayerMut::Linear(&mut self.x_embedder))?;
        f("context_embedder", LayerMut::Linear(&mut self.context_embedder))?;
        let embedders = [
            ("timestep_embedder", Some(&mut self.timestep_embedder)),
            ("guidance_embedder", self.guidance_embedder.as_mut()),
            ("text_embedder", Some(&mut self.text_embedder)),
        ];
        for (name, embedder) in embedders {
            let Some(embedder) = embedder else { continue };
            embedder.visit(&join("time_text_embed", name), f)?;
        }
        for (index, block) in self.double_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit(&format!("transformer_blocks.{index}"), f)?;
        }
        for (index, block) in self.single_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit(&format!("single_transformer_blocks.{index}"), f)?;
        }
        f("norm_out.linear", LayerMut::Linear(&mut self.norm_out.linear))?;
        f("proj_out", LayerMut::Linear(&mut self.proj_out))
    }

    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (index, block) in self.double_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_norms(&format!("transformer_blocks.{index}"), f)?;
        }
        for (index, block) in self.single_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_norms(&format!("single_transformer_blocks.{index}"), f)?;
        }
        Ok(())
    }
}

/// The features of a head that are rotated by each axis, `axes_dims_rope` of a config.
///
/// # Errors
/// When there are not three of them, or they do not add up to the features of a head.
pub(in crate::models) fn rotated_axes(weights: &Weights, given: &[usize], sizes: FluxSizes) -> Result<[usize; 3]> {
    let &[first, rows, columns] = given else {
        return Err(weights.config_error("axes_dims_rope must have three numbers".into()));
    };
    let axes = [first, rows, columns];
    // Checked, so that no sum wraps around to the right one: the axes become tables.
    let sum = axes.iter().try_fold(0_usize, |sum, axis| sum.checked_add(*axis));
    if sizes.heads == 0 || sum != Some(sizes.head_width) || axes.iter().any(|axis| axis % 2 != 0) {
        return Err(weights.config_error(format!(
            "axes_dims_rope {axes:?} must be even and add up to attention_head_dim {}",
            sizes.head_width
        )));
    }
    Ok(axes)
}

/// The encoded text without the padding that no token of any item attends to, and the attention bias that masks the rest of the padding;
/// the keys are the text and `others`. All text is at the origin, so that shorter text changes no position.
pub(in crate::models) fn masked_text(
    text: &Tensor,
    lengths: Option<&[usize]>,
    others: usize,
) -> Result<(Tensor, Option<Tensor>)> {
    let Some(lengths) = lengths else {
        return Ok((text.clone(), None));
    };
    let (batch, places, _) = text.dims3()?;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if lengths.len() != batch || longest > places || lengths.contains(&0) {
        return Err(EngineError::Internal(format!(
            "{batch} texts of {places} tokens cannot have the lengths {lengths:?}"
        )));
    }
    let bias = match lengths.iter().all(|length| *length == longest) {
        true => None,
        false => Some(padding_bias(lengths, longest, others, text.device())?),
    };
    Ok((text.narrow(1, 0, longest)?.contiguous()?, bias))
}

/// Latents [b, c, h, w] -> tokens [b, h / 2 * w / 2, 4 c]: a token has the 2 x 2 values of each channel, channel by channel.
pub(in crate::models) fn pack(latents: &Tensor) -> Result<Tensor> {
    let (batch, channels, height, width) = latents.dims4()?;
    let (rows, columns) = (height / PATCH, width / PATCH);
    let packed = latents
        .reshape((batch, channels, rows, PATCH, columns, PATCH))?
        .permute((0, 2, 4, 1, 3, 5))?
        .contiguous()?
        .reshape((batch, rows * columns, channels * PATCH * PATCH))?;
    Ok(packed)
}

/// The reverse of [`pack`].
pub(in crate::models) fn unpack(tokens: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    let (batch, _, features) = tokens.dims3()?;
    let (rows, columns, channels) = (height / PATCH, width / PATCH, features / (PATCH * PATCH));
    let latents = tokens
        .reshape((batch, rows, columns, channels, PATCH, PATCH))?
        .permute((0, 3, 1, 4, 2, 5))?
        .contiguous()?
        .reshape((batch, channels, height, width))?;
    Ok(latents)
}

#[cfg(test)]
mod packing_tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn a_token_has_four_values_of_each_channel() {
        let latents = Tensor::arange(0f32, 2.0 * 4.0 * 6.0, &Device::Cpu).unwrap();
        let latents = latents.reshape((1, 2, 4, 6)).unwrap();
        let tokens = pack(&latents).unwrap();
        assert_eq!(tokens.dims(), [1, 6, 8]);
        let second: Vec<f32> = tokens.get(0).unwrap().get(1).unwrap().to_vec1().unwrap();
        assert_eq!(second, [2.0, 3.0, 8.0, 9.0, 26.0, 27.0, 32.0, 33.0]);
        let back = unpack(&tokens, 4, 6).unwrap();
        let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(flat(&back), flat(&latents));
    }
}
