//! CLIP's text encoder (transformers' `CLIPTextModel` and `CLIPTextModelWithProjection`).

use super::learned::LearnedVectors;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::config::{self, check_sizes};
use crate::nn::{self, Activation, Attention, Embedding, LayerMut, LayerNorm, Linear, VisitLayers, padding_bias};
use crate::weights::{Init, Weights};
use aitk_common::model_files::clip_text_config;
use candle_core::{DType, Tensor};
use serde::Deserialize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// `text_encoder/config.json`. Missing keys have the values of SD 1.x.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ClipTextConfig {
    /// The number of token ids.
    pub vocab_size: usize,
    /// Features per token.
    pub hidden_size: usize,
    /// Features of the MLP's hidden layer.
    pub intermediate_size: usize,
    /// The number of layers.
    pub num_hidden_layers: usize,
    /// Attention heads per layer.
    pub num_attention_heads: usize,
    /// The maximum of tokens per prompt.
    pub max_position_embeddings: usize,
    /// `quick_gelu` (CLIP) or `gelu` (OpenCLIP).
    pub hidden_act: String,
    /// The epsilon of the layer norms.
    pub layer_norm_eps: f64,
    /// Features of the pooled text, if the model has a projection.
    pub projection_dim: usize,
    /// The id of the end token, at which the text is pooled. 2, which old configs have, stands for the largest id of a
    /// prompt.
    pub eos_token_id: u32,
    /// Whether padding tokens are masked. Not supported: Stable Diffusion does not mask them.
    pub use_attention_mask: bool,
}

impl Default for ClipTextConfig {
    fn default() -> Self {
        Self {
            vocab_size: 49408,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            max_position_embeddings: 77,
            hidden_act: "quick_gelu".into(),
            layer_norm_eps: 1e-5,
            projection_dim: 512,
            eos_token_id: 49407,
            use_attention_mask: false,
        }
    }
}

impl ClipTextConfig {
    /// Reads `config.json` of a text encoder, or of a CLIP model that was saved whole.
    ///
    /// # Errors
    /// As [`config::read`].
    pub fn read(path: &Path) -> Result<Self> {
        let value = clip_text_config(config::read_json(path)?);
        config::from_value(value).map_err(|message| EngineError::model_config(path, message))
    }

    /// Checks the sizes that layers are made of.
    fn check_sizes(&self) -> std::result::Result<(), String> {
        check_sizes([
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            // Models without a projection may have any.
            ("projection_dim", self.projection_dim.max(1)),
        ])
    }
}

/// CLIP's text encoder.
#[derive(Clone, Debug)]
pub struct ClipTextModel {
    token_embedding: Embedding,
    learned: LearnedVectors,
    position_embedding: Tensor,
    layers: Vec<Arc<Layer>>,
    final_layer_norm: LayerNorm,
    pooled_text: PooledText,
    eos_token_id: u32,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

/// What [`ClipTextModel::penultimate_and_pooled`] gives as the pooled text.
#[derive(Clone, Debug)]
enum PooledText {
    /// Nothing.
    Unused,
    /// The state itself: the projection is the identity.
    State,
    /// The projected state (`CLIPTextModelWithProjection`).
    Projected(Linear),
}

#[derive(Clone, Debug)]
struct Layer {
    layer_norm1: LayerNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    layer_norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
    heads: usize,
    activation: Activation,
}

impl ClipTextModel {
    /// Loads the model. Tensor names may have the prefix `text_model.` (up to transformers 4) or not (from 5 on).
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &ClipTextConfig) -> Result<Self> {
        let activation = Activation::from_name(&config.hidden_act)
            .ok_or_else(|| weights.config_error(format!("hidden_act `{}` is unknown", config.hidden_act)))?;
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        config.check_sizes().map_err(|message| weights.config_error(message))?;
        if heads == 0 || width % heads != 0 {
            return Err(weights.config_error(format!("hidden_size {width} cannot be split into {heads} heads")));
        }
        if config.use_attention_mask {
            return Err(weights.config_error("`use_attention_mask` is not supported".into()));
        }
        let prefixed = weights.pp("text_model");
        let weights = if prefixed.contains("final_layer_norm.weight") {
            &prefixed
        } else {
            weights
        };
        let embeddings = weights.pp("embeddings");
        let layers = (0..config.num_hidden_layers).map(|i| {
            let w = weights.pp("encoder.layers").pp(i);
            let attention = w.pp("self_attn");
            let norm = |name| LayerNorm::new(&w.pp(name), width, config.layer_norm_eps);
            let square = |name| Linear::new(&attention.pp(name), width, width, true);
            Ok(Arc::new(Layer {
                layer_norm1: norm("layer_norm1")?,
                q_proj: square("q_proj")?,
                k_proj: square("k_proj")?,
                v_proj: square("v_proj")?,
                out_proj: square("out_proj")?,
                layer_norm2: norm("layer_norm2")?,
                fc1: Linear::new(&w.pp("mlp.fc1"), width, config.intermediate_size, true)?,
                fc2: Linear::new(&w.pp("mlp.fc2"), config.intermediate_size, width, true)?,
                heads,
                activation,
            }))
        });
        let positions = (config.max_position_embeddings, width);
        Ok(Self {
            token_embedding: Embedding::new(&embeddings.pp("token_embedding"), config.vocab_size, width)?,
            learned: LearnedVectors::default(),
            position_embedding: embeddings.pp("position_embedding").get_with(
                positions,
                "weight",
                Init::Normal(0.02),
            )?,
            layers: layers.collect::<Result<_>>()?,
            final_layer_norm: LayerNorm::new(&weights.pp("final_layer_norm"), width, config.layer_norm_eps)?,
            pooled_text: PooledText::Unused,
            eos_token_id: config.eos_token_id,
            checkpointing: Checkpointing::default(),
        })
    }

    /// Loads the model with the projection of the pooled text.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_projection(weights: &Weights, config: &ClipTextConfig) -> Result<Self> {
        config.check_sizes().map_err(|message| weights.config_error(message))?;
        let projection = weights.pp("text_projection");
        let projection = Linear::new(&projection, config.hidden_size, config.projection_dim, false)?;
        Ok(Self {
            pooled_text: PooledText::Projected(projection),
            ..Self::new(weights, config)?
        })
    }

    /// Loads the model with the projection of the pooled text that its files have; without one, it is the identity.
    ///
    /// # Errors
    /// As [`Self::new`], and when a projection that is not there would change the number of features.
    pub fn with_projection_if_stored(weights: &Weights, config: &ClipTextConfig) -> Result<Self> {
        if weights.contains("text_projection.weight") || config.projection_dim != config.hidden_size {
            return Self::with_projection(weights, config);
        }
        Ok(Self {
            pooled_text: PooledText::State,
            ..Self::new(weights, config)?
        })
    }

    /// The vectors of tokens, [ids, width], in float32.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    pub fn token_vectors(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = Tensor::new(ids, self.position_embedding.device())?;
        Ok(self.token_embedding.forward(&ids)?.detach().to_dtype(DType::F32)?)
    }

    /// Adds vectors of textual inversion, [vectors, width], which may be a variable, and returns their ids.
    ///
    /// # Errors
    /// When they have another width.
    pub fn add_vectors(&mut self, vectors: Tensor) -> Result<Range<u32>> {
        let vectors = vectors.to_device(self.position_embedding.device())?;
        Ok(self.learned.add(vectors, &self.token_embedding)?)
    }

    /// The numbers of a token's vector.
    #[must_use]
    pub fn vector_width(&self) -> usize {
        self.token_embedding.width()
    }

    /// Whether some of the added vectors are variables.
    #[must_use]
    pub fn trains_vectors(&self) -> bool {
        self.learned.has_variables()
    }

    /// Makes the added vectors ordinary tensors, with the same memory.
    pub fn detach_vectors(&mut self) {
        self.learned = self.learned.detached();
    }

    /// ids [b, n] (u32) -> the hidden state before the last layer, without the final norm, [b, n, hidden]; and, if the
    /// model was loaded with a projection, the projected pooled text, [b, projection]. The pooled text is the last hidden state
    /// after the final norm at the end token. `masks_padding`: no token attends to what follows the end token. As attention is causal, only
    /// the states of the padding are others.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn penultimate_and_pooled(&self, ids: &Tensor, masks_padding: bool) -> Result<(Tensor, Option<Tensor>)> {
        let last = self.layers.len().saturating_sub(1);
        let bias = match masks_padding {
            true => Some(self.padding_bias(ids)?),
            false => None,
        };
        let penultimate = self.hidden_states(ids, last, bias.as_ref())?;
        if matches!(self.pooled_text, PooledText::Unused) {
            return Ok((penultimate, None));
        }
        let hidden = self.run_layers(penultimate.clone(), last..self.layers.len(), bias.as_ref())?;
        let state = self.at_end(ids, &self.final_layer_norm.forward(&hidden)?)?;
        let pooled = match &self.pooled_text {
            PooledText::Projected(projection) => projection.forward(&state)?,
            _ => state,
        };
        Ok((penultimate, Some(pooled)))
    }

    /// ids [b, n] (u32) -> the pooled text without projection, [b, hidden]: the last hidden state after the final norm at the
    /// end token.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn pooled(&self, ids: &Tensor) -> Result<Tensor> {
        self.at_end(ids, &self.forward(ids)?)
    }

    /// The state of each prompt's end token: hidden [b, n, c] -> [b, c].
    fn at_end(&self, ids: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let mut rows = Vec::new();
        for (row, ids) in ids.to_dtype(DType::U32)?.to_vec2::<u32>()?.iter().enumerate() {
            rows.push(
                hidden
                    .narrow(0, row, 1)?
                    .narrow(1, self.end_position(ids), 1)?
                    .squeeze(1)?,
            );
        }
        Ok(Tensor::cat(&rows, 0)?)
    }

    /// The position of the end token in a prompt; the first one, as in transformers.
    fn end_position(&self, ids: &[u32]) -> usize {
        let end = match self.eos_token_id {
            // Ids of learned vectors are larger.
            2 => ids
                .iter()
                .filter(|id| (**id as usize) < self.token_embedding.count())
                .max()
                .copied()
                .unwrap_or(0),
            id => id,
        };
        ids.iter().position(|id| *id == end).unwrap_or(0)
    }

    /// ids [b, n] (u32, n at most 77) -> the last hidden state after the final norm, [b, n, hidden].
    ///
    /// # Errors
    /// When an id is not in the vocabulary, or there are more ids than positions.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.hidden_states(ids, self.layers.len(), None)?;
        Ok(self.final_layer_norm.forward(&x)?)
    }

    /// As [`Self::forward`], without the last `skip` layers (diffusers' `clip_skip`).
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_skipping(&self, ids: &Tensor, skip: usize) -> Result<Tensor> {
        let x = self.hidden_states(ids, self.layers.len().saturating_sub(skip), None)?;
        Ok(self.final_layer_norm.forward(&x)?)
    }

    /// The attention bias that masks what follows the end token of each prompt.
    fn padding_bias(&self, ids: &Tensor) -> Result<Tensor> {
        let lengths = ids.to_dtype(DType::U32)?.to_vec2::<u32>()?;
        let lengths: Vec<usize> = lengths.iter().map(|ids| self.end_position(ids) + 1).collect();
        Ok(padding_bias(&lengths, ids.dim(1)?, 0, ids.device())?)
    }

    fn hidden_states(&self, ids: &Tensor, layers: usize, bias: Option<&Tensor>) -> Result<Tensor> {
        let (_, length) = ids.dims2()?;
        let positions = self.position_embedding.narrow(0, 0, length)?;
        let x = self
            .learned
            .embed(&self.token_embedding, ids)?
            .broadcast_add(&positions)?;
        self.run_layers(x, 0..layers, bias)
    }

    fn run_layers(&self, x: Tensor, range: Range<usize>, bias: Option<&Tensor>) -> Result<Tensor> {
        let mut sequence = BlockSequence::new();
        let mut at = sequence.input(x);
        for (i, layer) in self.layers.iter().enumerate().take(range.end).skip(range.start) {
            let (layer, bias) = (Arc::clone(layer), bias.cloned());
            let name = format!("text_model.encoder.layers.{i}");
            at = sequence.add(name, [at], move |[x]| layer.forward(x, bias.as_ref()));
        }
        Ok(sequence.run(self.checkpointing, at)?)
    }
}

impl Layer {
    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let h = self.layer_norm1.forward(x)?;
        let (q, k, v) = (
            self.q_proj.forward(&h)?,
            self.k_proj.forward(&h)?,
            self.v_proj.forward(&h)?,
        );
        let attention = Attention {
            causal: true,
            bias,
            ..Attention::new(self.heads)
        };
        let h = attention.forward(&q, &k, &v)?;
        let x = nn::add(x, &self.out_proj.forward(&h)?)?;
        let h = self.fc1.forward(&self.layer_norm2.forward(&x)?)?;
        nn::add(&x, &self.fc2.forward(&self.activation.forward(&h)?)?)
    }
}

impl VisitLayers for ClipTextModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let layer = Arc::make_mut(layer);
            let path = format!("text_model.encoder.layers.{i}");
            f(&format!("{path}.self_attn.q_proj"), LayerMut::Linear(&mut layer.q_proj))?;
            f(&format!("{path}.self_attn.k_proj"), LayerMut::Linear(&mut layer.k_proj))?;
            f(&format!("{path}.self_attn.v_proj"), LayerMut::Linear(&mut layer.v_proj))?;
            f(
                &format!("{path}.self_attn.out_proj"),
                LayerMut::Linear(&mut layer.out_proj),
            )?;
            f(&format!("{path}.mlp.fc1"), LayerMut::Linear(&mut layer.fc1))?;
            f(&format!("{path}.mlp.fc2"), LayerMut::Linear(&mut layer.fc2))?;
        }
        Ok(())
    }
}
