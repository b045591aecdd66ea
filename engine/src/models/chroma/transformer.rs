//! The whole transformer (diffusers' `ChromaTransformer2DModel`): embeddings, approximator, double blocks, single blocks, output.

use super::approximator::{Approximator, ApproximatorSizes};
use super::blocks::{
    ChromaSingleTransformerBlock, ChromaTransformerBlock, DoubleVectors, SINGLE_VECTORS, STREAM_VECTORS, plain_norm,
    rows,
};
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::config::check_sizes;
use crate::models::flux::{FluxSizes, PATCH, masked_text, pack, rotary, rotated_axes, unpack};
use crate::nn::{self, LayerMut, LayerNorm, Linear, VisitLayers};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::Deserialize;
use std::sync::Arc;

/// Vectors of the output: shift and scale.
const OUTPUT_VECTORS: usize = 2;
/// The name of the approximator.
pub(super) const APPROXIMATOR: &str = "distilled_guidance_layer";

/// `transformer/config.json`. Missing keys have the values of diffusers' class.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ChromaConfig {
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
    /// Features of a head that are rotated by the first axis, the row and the column.
    pub axes_dims_rope: Vec<usize>,
    /// Must be 1: tokens are made of 2 x 2 latents before the transformer.
    pub patch_size: usize,
    /// Features of the approximator's input.
    pub approximator_num_channels: usize,
    /// Features of the approximator's layers.
    pub approximator_hidden_dim: usize,
    /// Layers of the approximator.
    pub approximator_layers: usize,
}

impl Default for ChromaConfig {
    fn default() -> Self {
        Self {
            in_channels: 64,
            out_channels: None,
            num_layers: 19,
            num_single_layers: 38,
            attention_head_dim: 128,
            num_attention_heads: 24,
            joint_attention_dim: 4096,
            axes_dims_rope: vec![16, 56, 56],
            patch_size: 1,
            approximator_num_channels: 64,
            approximator_hidden_dim: 5120,
            approximator_layers: 5,
        }
    }
}

/// Chroma's transformer.
#[derive(Clone, Debug)]
pub struct ChromaTransformer2DModel {
    x_embedder: Linear,
    context_embedder: Linear,
    approximator: Approximator,
    double_blocks: Vec<Arc<ChromaTransformerBlock>>,
    single_blocks: Vec<Arc<ChromaSingleTransformerBlock>>,
    norm_out: LayerNorm,
    proj_out: Linear,
    /// The first vector of the output.
    output_vectors: usize,
    axes: [usize; 3],
    channels: usize,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl ChromaTransformer2DModel {
    /// Loads the transformer.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &ChromaConfig) -> Result<Self> {
        let sizes = FluxSizes {
            heads: config.num_attention_heads,
            head_width: config.attention_head_dim,
        };
        let out_channels = config.out_channels.unwrap_or(config.in_channels);
        let axes = rotated_axes(weights, &config.axes_dims_rope, sizes)?;
        if config.patch_size != 1
            || out_channels != config.in_channels
            || !config.in_channels.is_multiple_of(PATCH * PATCH)
            || !config.approximator_num_channels.is_multiple_of(4)
        {
            return Err(weights.config_error(format!(
                "in_channels {}, out_channels {out_channels}, patch_size {} and approximator_num_channels {} are those of another model than \
                 Chroma",
                config.in_channels, config.patch_size, config.approximator_num_channels
            )));
        }
        let width = sizes.heads.saturating_mul(sizes.head_width);
        check_sizes([
            ("in_channels", config.in_channels),
            ("joint_attention_dim", config.joint_attention_dim),
            ("approximator_num_channels", config.approximator_num_channels),
            ("approximator_hidden_dim", config.approximator_hidden_dim),
            ("num_attention_heads times attention_head_dim", width),
        ])
        .map_err(|message| weights.config_error(message))?;
        // The vectors are in this order: single blocks, images of double blocks, texts of double blocks, output. A number of blocks that is
        // too large is found when they are loaded.
        let images = config.num_single_layers.saturating_mul(SINGLE_VECTORS);
        let texts = images.saturating_add(config.num_layers.saturating_mul(STREAM_VECTORS));
        let output_vectors = texts.saturating_add(config.num_layers.saturating_mul(STREAM_VECTORS));
        let x_embedder = Linear::new(&weights.pp("x_embedder"), config.in_channels, width, true)?;
        let context_embedder = Linear::new(&weights.pp("context_embedder"), config.joint_attention_dim, width, true)?;
        let (double, single) = (
            weights.pp("transformer_blocks"),
            weights.pp("single_transformer_blocks"),
        );
        let double = (0..config.num_layers).map(|i| {
            let vectors = DoubleVectors {
                image: images.saturating_add(i * STREAM_VECTORS),
                text: texts.saturating_add(i * STREAM_VECTORS),
            };
            ChromaTransformerBlock::new(&double.pp(i), sizes, vectors).map(Arc::new)
        });
        let double_blocks = double.collect::<Result<_>>()?;
        let single = (0..config.num_single_layers)
            .map(|i| ChromaSingleTransformerBlock::new(&single.pp(i), sizes, i * SINGLE_VECTORS).map(Arc::new));
        let single_blocks = single.collect::<Result<_>>()?;
        let approximator = ApproximatorSizes {
            inputs: config.approximator_num_channels,
            hidden: config.approximator_hidden_dim,
            layers: config.approximator_layers,
            width,
            vectors: output_vectors.saturating_add(OUTPUT_VECTORS),
        };
        Ok(Self {
            x_embedder,
            context_embedder,
            approximator: Approximator::new(&weights.pp(APPROXIMATOR), approximator)?,
            double_blocks,
            single_blocks,
            norm_out: plain_norm(weights, width)?,
            proj_out: Linear::new(&weights.pp("proj_out"), width, out_channels, true)?,
            output_vectors,
            axes,
            channels: config.in_channels / (PATCH * PATCH),
            checkpointing: Checkpointing::default(),
        })
    }

    /// Predicts the velocity of latents [b, channels, h, w] at the timesteps [b] (f32, 0 to 1000): the same shape. h and w are even.
    /// `text` [b, tokens, joint_attention_dim]: the encoded text; `text_lengths`: the tokens of each text that others attend to.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(
        &self,
        latents: &Tensor,
        timesteps: &Tensor,
        text: &Tensor,
        text_lengths: &[usize],
    ) -> Result<Tensor> {
        let (_, channels, height, width) = latents.dims4()?;
        if channels != self.channels || height % PATCH != 0 || width % PATCH != 0 {
            return Err(EngineError::Internal(format!(
                "Chroma takes latents of {} channels with even sides, not {channels} x {height} x {width}",
                self.channels
            )));
        }
        let vectors = self.approximator.forward(timesteps, latents.dtype())?;
        let tokens = self.x_embedder.forward(&pack(latents)?)?;
        let image_length = tokens.dim(1)?;
        let (text, bias) = masked_text(text, Some(text_lengths), image_length)?;
        let text = self.context_embedder.forward(&text)?;
        let text_length = text.dim(1)?;
        let positions = rotary(text_length, (height / PATCH, width / PATCH), self.axes)?;

        let mut sequence = BlockSequence::new();
        let (mut x, mut text) = (sequence.input(tokens), sequence.input(text));
        let conditioning = sequence.input(vectors.clone());
        for (index, block) in self.double_blocks.iter().enumerate() {
            let (block, positions, bias) = (Arc::clone(block), positions.clone(), bias.clone());
            [x, text] = sequence.add_with_outputs(
                format!("transformer_blocks.{index}"),
                [x, text, conditioning],
                move |[x, text, vectors]| {
                    let (x, text) = block.forward([x, text], vectors, &positions, bias.as_ref())?;
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
                move |[x, vectors]| block.forward(x, vectors, &positions, bias.as_ref()),
            );
        }
        let x = sequence.run(self.checkpointing, x)?;
        let x = x.narrow(1, text_length, image_length)?;
        let output = rows(&vectors, self.output_vectors..self.output_vectors + OUTPUT_VECTORS)?;
        let [shift, scale] = output.as_slice() else {
            return Err(EngineError::Internal(format!(
                "the output has {} vectors",
                output.len()
            )));
        };
        let x = nn::modulate(&self.norm_out.forward(&x.contiguous()?)?, scale, shift)?;
        unpack(&self.proj_out.forward(&x)?, height, width)
    }
}

impl VisitLayers for ChromaTransformer2DModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        f("x_embedder", LayerMut::Linear(&mut self.x_embedder))?;
        f("context_embedder", LayerMut::Linear(&mut self.context_embedder))?;
        self.approximator.visit(APPROXIMATOR, f)?;
        for (index, block) in self.double_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit(&format!("transformer_blocks.{index}"), f)?;
        }
        for (index, block) in self.single_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit(&format!("single_transformer_blocks.{index}"), f)?;
        }
        f("proj_out", LayerMut::Linear(&mut self.proj_out))
    }

    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        self.approximator.visit_norms(APPROXIMATOR, f)?;
        for (index, block) in self.double_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_norms(&format!("transformer_blocks.{index}"), f)?;
        }
        for (index, block) in self.single_blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_norms(&format!("single_transformer_blocks.{index}"), f)?;
        }
        Ok(())
    }
}
