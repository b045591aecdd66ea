//! The whole transformer (diffusers' `SD3Transformer2DModel`): embeddings, joint blocks, output.

use super::blocks::{BlockKind, JointTransformerBlock, Sd3Sizes};
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::mmdit::{AdaLayerNormContinuous, Embedder, SINUSOIDS};
use crate::nn::{self, Conv2d, LayerMut, Linear, VisitLayers, join, to_tokens};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::Deserialize;
use std::sync::Arc;

/// The largest size in a config. Products of sizes do not overflow.
const LARGEST_SIZE: usize = 1 << 14;

/// `transformer/config.json`. Missing keys have the values of diffusers' class.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Sd3Config {
    /// Rows and columns of the latents that the model was trained on.
    pub sample_size: usize,
    /// Rows and columns of latents that make one token.
    pub patch_size: usize,
    /// Latent channels.
    pub in_channels: usize,
    /// Predicted channels; `None`: as many.
    pub out_channels: Option<usize>,
    /// Joint blocks.
    pub num_layers: usize,
    /// Features of a head.
    pub attention_head_dim: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Features of an encoded text token (T5; CLIP's are padded with zeros).
    pub joint_attention_dim: usize,
    /// Features of a text token in the blocks: must be those of an image token.
    pub caption_projection_dim: usize,
    /// Features of the pooled text (both CLIPs).
    pub pooled_projection_dim: usize,
    /// Rows and columns of the table of positions, in tokens.
    pub pos_embed_max_size: usize,
    /// The blocks with a second attention between image tokens.
    pub dual_attention_layers: Vec<usize>,
    /// `rms_norm`: queries and keys are normalised. `None`: they are not (Stable Diffusion 3).
    pub qk_norm: Option<String>,
}

impl Default for Sd3Config {
    fn default() -> Self {
        Self {
            sample_size: 128,
            patch_size: 2,
            in_channels: 16,
            out_channels: Some(16),
            num_layers: 18,
            attention_head_dim: 64,
            num_attention_heads: 18,
            joint_attention_dim: 4096,
            caption_projection_dim: 1152,
            pooled_projection_dim: 2048,
            pos_embed_max_size: 96,
            dual_attention_layers: Vec::new(),
            qk_norm: None,
        }
    }
}

impl Sd3Config {
    /// The sizes of a block.
    ///
    /// # Errors
    /// What is not supported.
    fn sizes(&self) -> std::result::Result<Sd3Sizes, String> {
        let sizes = Sd3Sizes {
            heads: self.num_attention_heads,
            head_width: self.attention_head_dim,
            qk_norm: self.qk_norm.is_some(),
        };
        if let Some(norm) = self.qk_norm.as_deref().filter(|norm| *norm != "rms_norm") {
            return Err(format!("qk_norm is `{norm}`, expected `rms_norm` or null"));
        }
        for (key, value) in [
            ("num_attention_heads", self.num_attention_heads),
            ("attention_head_dim", self.attention_head_dim),
            ("num_layers", self.num_layers),
            ("patch_size", self.patch_size),
            ("in_channels", self.in_channels),
            ("pos_embed_max_size", self.pos_embed_max_size),
            ("joint_attention_dim", self.joint_attention_dim),
            ("pooled_projection_dim", self.pooled_projection_dim),
            ("sample_size", self.sample_size),
        ] {
            if value == 0 || value > LARGEST_SIZE {
                return Err(format!("{key} is {value}, expected 1 to {LARGEST_SIZE}"));
            }
        }
        if self.caption_projection_dim != sizes.width() {
            return Err(format!(
                "caption_projection_dim is {}, but num_attention_heads times attention_head_dim is {}: they must be equal",
                self.caption_projection_dim,
                sizes.width()
            ));
        }
        if self.out_channels.is_some_and(|channels| channels != self.in_channels) {
            return Err(format!(
                "in_channels is {} and out_channels {}: only models that predict as many channels as they read are supported",
                self.in_channels,
                self.out_channels.unwrap_or_default()
            ));
        }
        Ok(sizes)
    }
}

/// What the transformer is conditioned on besides the timestep.
#[derive(Clone, Copy, Debug)]
pub struct Sd3Conditions<'a> {
    /// The encoded text, [b, tokens, joint_attention_dim].
    pub text: &'a Tensor,
    /// The pooled text, [b, pooled_projection_dim].
    pub pooled: &'a Tensor,
}

/// The transformer of Stable Diffusion 3 and 3.5.
#[derive(Clone, Debug)]
pub struct SD3Transformer2DModel {
    patches: Conv2d,
    /// The table of positions, [rows, columns, c].
    positions: Tensor,
    timestep_embedder: Embedder,
    text_embedder: Embedder,
    context_embedder: Linear,
    blocks: Vec<Arc<JointTransformerBlock>>,
    norm_out: AdaLayerNormContinuous,
    proj_out: Linear,
    channels: usize,
    patch: usize,
    sample_size: usize,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl SD3Transformer2DModel {
    /// Loads the transformer.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &Sd3Config) -> Result<Self> {
        let sizes = config.sizes().map_err(|reason| weights.config_error(reason))?;
        let (width, patch, channels) = (sizes.width(), config.patch_size, config.in_channels);
        let (embed, pos_embed, blocks) = (
            weights.pp("time_text_embed"),
            weights.pp("pos_embed"),
            weights.pp("transformer_blocks"),
        );
        let table = config.pos_embed_max_size;
        let blocks = (0..config.num_layers).map(|index| {
            let kind = BlockKind {
                dual_attention: config.dual_attention_layers.contains(&index),
                last: index + 1 == config.num_layers,
            };
            JointTransformerBlock::new(&blocks.pp(index), sizes, kind).map(Arc::new)
        });
        Ok(Self {
            patches: Conv2d::new(&pos_embed.pp("proj"), channels, width, patch, patch, 0)?,
            // A table of sinusoids, which is in the files, and no parameter in diffusers.
            positions: pos_embed
                .get_frozen((1, table * table, width), "pos_embed")?
                .reshape((table, table, width))?,
            timestep_embedder: Embedder::new(&embed.pp("timestep_embedder"), SINUSOIDS, width)?,
            text_embedder: Embedder::new(&embed.pp("text_embedder"), config.pooled_projection_dim, width)?,
            context_embedder: Linear::new(&weights.pp("context_embedder"), config.joint_attention_dim, width, true)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm_out: AdaLayerNormContinuous::new(&weights.pp("norm_out"), width)?,
            proj_out: Linear::new(&weights.pp("proj_out"), width, patch * patch * channels, true)?,
            channels,
            patch,
            sample_size: config.sample_size,
            checkpointing: Checkpointing::default(),
        })
    }

    /// Channels of the latents: 16.
    #[must_use]
    pub fn latent_channels(&self) -> usize {
        self.channels
    }

    /// Rows and columns of latents that make one token: 2.
    #[must_use]
    pub fn patch_size(&self) -> usize {
        self.patch
    }

    /// Rows and columns of the latents that the model was trained on: 128.
    #[must_use]
    pub fn sample_size(&self) -> usize {
        self.sample_size
    }

    /// Rows and columns of tokens that an image can have: those of the table of positions.
    #[must_use]
    pub fn max_tokens(&self) -> (usize, usize) {
        match self.positions.dims() {
            [rows, columns, _] => (*rows, *columns),
            _ => (0, 0),
        }
    }

    /// The number of joint blocks.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Predicts the velocity of latents [b, channels, h, w] at the timesteps [b] (f32, 0 to 1000): the same shape.
    /// h and w are multiples of the patch size. Blocks whose numbers are in `skipped` are left out (skip-layer guidance).
    ///
    /// # Errors
    /// When the shapes do not match, or the latents have more rows or columns than the table of positions.
    pub fn forward(
        &self,
        latents: &Tensor,
        timesteps: &Tensor,
        conditions: &Sd3Conditions<'_>,
        skipped: &[usize],
    ) -> Result<Tensor> {
        let (_, channels, height, width) = latents.dims4()?;
        if channels != self.channels || height % self.patch != 0 || width % self.patch != 0 {
            return Err(EngineError::Internal(format!(
                "the transformer takes latents of {} channels with sides that are multiples of {}, not {channels} x {height} x {width}",
                self.channels, self.patch
            )));
        }
        let (rows, columns) = (height / self.patch, width / self.patch);
        let positions = self.positions_of(rows, columns)?;
        let tokens = to_tokens(&self.patches.forward(latents)?)?.broadcast_add(&positions)?;
        let temb = self.timestep_embedder.forward_numbers(timesteps, latents.dtype())?;
        let temb = nn::add(&temb, &self.text_embedder.forward(conditions.pooled)?)?;

        let mut sequence = BlockSequence::new();
        let mut x = sequence.input(tokens);
        let mut text = sequence.input(self.context_embedder.forward(conditions.text)?);
        let conditioning = sequence.input(temb.clone());
        for (index, block) in self.blocks.iter().enumerate() {
            if skipped.contains(&index) {
                continue;
            }
            let block = Arc::clone(block);
            let name = format!("transformer_blocks.{index}");
            if index + 1 == self.blocks.len() {
                x = sequence.add(name, [x, text, conditioning], move |[x, text, temb]| {
                    Ok(block.forward(x, text, temb)?.0)
                });
            } else {
                [x, text] = sequence.add_with_outputs(name, [x, text, conditioning], move |[x, text, temb]| {
                    let (x, text) = block.forward(x, text, temb)?;
                    let text =
                        text.ok_or_else(|| candle_core::Error::Msg("a block before the last gives text".to_owned()))?;
                    Ok([x, text])
                });
            }
        }
        let x = sequence.run(self.checkpointing, x)?;
        let x = self.proj_out.forward(&self.norm_out.forward(&x, &temb)?)?;
        self.to_latents(&x, rows, columns)
    }

    /// The positions of an image of this many tokens: the middle of the table, [1, rows * columns, c].
    fn positions_of(&self, rows: usize, columns: usize) -> Result<Tensor> {
        let (all_rows, all_columns) = self.max_tokens();
        let width = self.positions.dim(2)?;
        if rows > all_rows || columns > all_columns {
            return Err(EngineError::bad_input(format!(
                "the image has {rows} x {columns} tokens, the model has positions for {all_rows} x {all_columns}: generate or train \
                 smaller images"
            )));
        }
        let cut = self.positions.narrow(0, (all_rows - rows) / 2, rows)?;
        let cut = cut.narrow(1, (all_columns - columns) / 2, columns)?;
        Ok(cut.contiguous()?.reshape((1, rows * columns, width))?)
    }

    /// Tokens [b, rows * columns, p * p * channels], pixel by pixel, to latents [b, channels, rows * p, columns * p].
    fn to_latents(&self, tokens: &Tensor, rows: usize, columns: usize) -> Result<Tensor> {
        let (batch, patch, channels) = (tokens.dim(0)?, self.patch, self.channels);
        let latents = tokens
            .reshape((batch, rows, columns, patch, patch, channels))?
            .permute((0, 5, 1, 3, 2, 4))?
            .contiguous()?
            .reshape((batch, channels, rows * patch, columns * patch))?;
        Ok(latents)
    }
}

impl VisitLayers for SD3Transformer2DModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        f("pos_embed.proj", LayerMut::Conv2d(&mut self.patches))?;
        let embed = "time_text_embed";
        self.timestep_embedder.visit(&join(embed, "timestep_embedder"), f)?;
        self.text_embedder.visit(&join(embed, "text_embedder"), f)?;
        f("context_embedder", LayerMut::Linear(&mut self.context_embedder))?;
        for (index, block) in self.blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit(&format!("transformer_blocks.{index}"), f)?;
        }
        f("norm_out.linear", LayerMut::Linear(&mut self.norm_out.linear))?;
        f("proj_out", LayerMut::Linear(&mut self.proj_out))
    }

    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_norms(&format!("transformer_blocks.{index}"), f)?;
        }
        Ok(())
    }
}
