//! A decoder: embeddings, blocks, a final norm and the output layer.

use super::attention_mask::AttentionMask;
use super::block::{Block, Norm};
use super::cache::KeyValueCache;
use super::config::{CausalLmConfig, PositionKind};
use super::gguf::GgufModel;
use super::layout::{Layout, Positions, check_positions};
use super::model_path::check_is_folder;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::stored_types::check_types_of_built;
use crate::nn::{Attention, Embedding, LayerMut, Linear, VisitLayers, join, linear_with_weight};
use crate::weights::{Index, QuantizationConfig, TrainableFilter, View, Weight, Weights};
use aitk_common::gguf::model_file;
use candle_core::{DType, Device, Tensor, Var};
use std::path::Path;
use std::sync::Arc;

/// The output layer, which is not quantised, as in transformers.
const OUTPUT: &str = "lm_head";
/// Numbers of two tables that are compared at a time.
const COMPARED_NUMBERS: usize = 4 << 20;

/// Options for loading a decoder.
#[derive(Clone, Debug)]
pub struct CausalLmOptions {
    /// The device.
    pub device: Device,
    /// The dtype of weights and activations.
    pub dtype: DType,
    /// Which tensors are trained, by transformers' names.
    pub trained: TrainableFilter,
    /// How the layers of the blocks are quantised when they are read. A trained model is not quantised.
    pub quantization: Option<QuantizationConfig>,
    /// The share of the elements of layers' weights that stay in their files and are read at each use (0 to 1).
    pub streamed: f64,
    /// Whether the table of embeddings, which may be the output layer too, stays as it is stored: to generate, where each token reads one of
    /// its rows and multiplies all of them with one vector. A training widens it, once.
    pub keeps_stored_table: bool,
    /// Whether all numbers are zero and take no memory: to check that a model can be loaded.
    pub shapes_only: bool,
}

impl CausalLmOptions {
    /// Options for f32 on the CPU, without training.
    #[must_use]
    pub fn cpu() -> Self {
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            trained: TrainableFilter::Nothing,
            quantization: None,
            streamed: 0.0,
            keeps_stored_table: false,
            shapes_only: false,
        }
    }
}

/// A decoder-only language model.
#[derive(Clone, Debug)]
pub struct CausalLm {
    config: Arc<CausalLmConfig>,
    embedding: Embedding,
    /// Learned positions.
    positions: Option<Embedding>,
    blocks: Vec<Arc<Block>>,
    final_norm: Norm,
    /// `None`: the table of embeddings is the output layer.
    output: Option<Linear>,
    weights: Weights,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl CausalLm {
    /// Loads a model from a Hugging Face folder (`config.json` and safetensors files with their index, or a single one), or from a GGUF file.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn load(folder: &Path, options: &CausalLmOptions) -> Result<Self> {
        let (config, index) = match model_file(folder) {
            Some(file) => {
                let GgufModel { config, index, .. } = GgufModel::open(&file)?;
                (config, index)
            }
            None => {
                check_is_folder(folder)?;
                let (mut config, index) = (CausalLmConfig::read(folder)?, Index::open(folder)?);
                index.check_scales()?;
                let index = with_prefix(index, &config);
                // As transformers 5, which ties only tables that are equal, or one of which is not in the files.
                config.ties_embeddings = config.ties_embeddings && !has_own_output(&index, &config)?;
                (config, index)
            }
        };
        let stored = with_prefix(index, &config);
        let index = match options.shapes_only {
            true => stored.shapes_only(),
            false => stored.clone(),
        };
        let quantization = options.quantization.clone().map(|mut quantization| {
            quantization.exclude.push(OUTPUT.to_owned());
            quantization
        });
        let is_frozen = options.trained == TrainableFilter::Nothing;
        let weights = Weights::from_index(index, options.dtype, &options.device)
            .streamed(if is_frozen { options.streamed } else { 0.0 })
            .quantize_on_load(quantization.filter(|_| is_frozen))
            .keeping_stored_tables(is_frozen && options.keeps_stored_table)
            .training(options.trained.clone());
        let model = Self::new(&weights, config)?;
        check_types_of_built(&stored, &weights)?;
        Ok(model)
    }

    /// A model with these weights, by transformers' names with their prefix (`model.`, `transformer.`).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: CausalLmConfig) -> Result<Self> {
        let inner = weights.pp(config.family.prefix());
        let [embedding, blocks, norm] = config.family.outer_names();
        // Blocks are loaded one after another, so that a wrong number of them fails at the first missing tensor.
        let loaded = (0..config.layers).map(|i| Block::new(&inner.pp(blocks).pp(i), &config, i).map(Arc::new));
        Ok(Self {
            embedding: Embedding::new(&inner.pp(embedding), config.vocab_size, config.width)?,
            positions: match config.positions {
                PositionKind::Learned => Some(Embedding::new(
                    &inner.pp(POSITIONS),
                    config.max_positions,
                    config.width,
                )?),
                PositionKind::Rotary(_) => None,
            },
            blocks: loaded.collect::<Result<_>>()?,
            final_norm: Norm::new(&inner.pp(norm), &config)?,
            output: match config.ties_embeddings {
                true => None,
                false => Some(Linear::new(
                    &weights.pp(OUTPUT),
                    config.width,
                    config.vocab_size,
                    false,
                )?),
            },
            config: Arc::new(config),
            weights: weights.clone(),
            checkpointing: Checkpointing::default(),
        })
    }

    /// What the model consists of.
    #[must_use]
    pub fn config(&self) -> &CausalLmConfig {
        &self.config
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.weights.device()
    }

    /// The dtype of its arithmetic.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.weights.dtype()
    }

    /// The states after the final norm, [b, n, width], of tokens [b, n] (u32).
    ///
    /// # Errors
    /// When an id is not in the vocabulary, the mask does not fit, or the text is longer than a table of learned positions.
    pub fn hidden(&self, ids: &Tensor, mask: &AttentionMask) -> candle_core::Result<Tensor> {
        let (b, n) = ids.dims2()?;
        let layout = Layout::new(&self.config, mask, b, n, self.device())?;
        let mut sequence = BlockSequence::new();
        let mut x = sequence.input(self.embed(ids, &layout.position_ids)?);
        for (index, block) in self.blocks.iter().enumerate() {
            let (block, positions) = (Arc::clone(block), layout.positions.clone());
            let bias = layout.bias(block.window, n);
            x = sequence.add(format!("layer {index}"), [x], move |[x]| {
                block.forward(x, &positions, |settings, [q, k, v]| {
                    let settings = Attention {
                        bias: bias.as_ref(),
                        ..settings
                    };
                    settings.forward(q, k, v)
                })
            });
        }
        self.final_norm.forward(&sequence.run(self.checkpointing, x)?)
    }

    /// The states after the final norm, [b, n, width], of the next tokens [b, n] (u32) of `b` texts. Each text has its own cache, so that
    /// texts of unequal length do not change one another. Nothing is saved for a backward pass.
    ///
    /// # Errors
    /// As [`Self::hidden`], and when there are not as many caches as rows.
    pub fn next(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> candle_core::Result<Tensor> {
        let (b, n) = ids.dims2()?;
        if caches.len() != b {
            candle_core::bail!("{b} rows of tokens need as many caches, and there are {}", caches.len());
        }
        let mut position_ids = Vec::with_capacity(b * n);
        for cache in caches.iter() {
            let start = cache.len();
            position_ids.extend((start..start + n).map(|position| position as u32));
        }
        check_positions(&self.config, &position_ids)?;
        let lengths = caches.iter().map(|cache| cache.text_length(n));
        let texts: Vec<(&[u32], usize)> = position_ids.chunks(n.max(1)).zip(lengths).collect();
        // Each row has positions of its own, also where there is one token in each.
        let rotated = Positions::of_texts(&self.config, &texts, b != 1)?;
        let mut x = self.embed(ids, &position_ids)?.detach();
        for (index, block) in self.blocks.iter().enumerate() {
            let out = block.forward(&x, &rotated, |settings, operands| {
                let mut rows = Vec::with_capacity(b);
                for (row, cache) in caches.iter_mut().enumerate() {
                    let of_row = operands.map(|x| x.narrow(0, row, 1)?.contiguous());
                    let [q, k, v] = of_row;
                    rows.push(cache.attend(index, settings, [&q?, &k?, &v?])?);
                }
                Tensor::cat(&rows, 0)
            })?;
            x = out.detach();
        }
        for cache in caches.iter_mut() {
            cache.advance(n);
        }
        Ok(self.final_norm.forward(&x)?.detach())
    }

    /// States [b, n, width] -> logits [b, n, vocabulary].
    ///
    /// # Errors
    /// When the shape does not match.
    pub fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        match &self.output {
            Some(output) => output.forward(hidden),
            None => linear_with_weight(hidden, self.embedding.weight(), None),
        }
    }

    /// The weight of the output layer, [vocabulary, width]: the table of embeddings, if they are tied. It is tracked if it is trained.
    ///
    /// # Errors
    /// When a streamed weight cannot be read.
    pub fn output_weight(&self) -> candle_core::Result<Tensor> {
        match &self.output {
            Some(output) => output.weight.dense(),
            None => self.embedding.weight().dense(),
        }
    }

    /// An empty cache.
    #[must_use]
    pub fn new_cache(&self) -> KeyValueCache {
        KeyValueCache::new(&self.config)
    }

    /// Gives the model an output layer of its own with the numbers of the table of embeddings, so that the table can be changed alone. Returns
    /// whether the table was the output layer.
    pub fn untie_output(&mut self) -> bool {
        if self.output.is_some() {
            return false;
        }
        self.output = Some(Linear {
            weight: self.embedding.weight().clone(),
            bias: None,
            adapters: Vec::new(),
        });
        Arc::make_mut(&mut self.config).ties_embeddings = false;
        true
    }

    /// The name of the table of embeddings among [`Self::tensors`].
    #[must_use]
    pub fn embedding_name(&self) -> String {
        let family = self.config.family;
        format!("{}.{}.weight", family.prefix(), family.outer_names()[0])
    }

    /// The variables that are trained, by transformers' names, sorted.
    #[must_use]
    pub fn trained_variables(&self) -> Vec<(String, Var)> {
        self.weights.vars()
    }

    /// The same model for generation while it is trained: it shares the trained weights, but saves nothing for a backward pass. `None` if no
    /// tensor of the model itself is trained.
    ///
    /// # Errors
    /// None that a model that was loaded can have.
    pub fn detached(&self) -> Result<Option<Self>> {
        if self.weights.vars().is_empty() {
            return Ok(None);
        }
        Self::new(&self.weights.detached(), (*self.config).clone()).map(Some)
    }

    /// Every tensor of the model by transformers' names, each once: a folder with these tensors and the model's `config.json` loads in
    /// transformers. Adapters are not part of it.
    ///
    /// # Errors
    /// None that a model that was loaded can have.
    pub fn tensors(&self) -> Result<Vec<(String, Weight)>> {
        let prefix = self.config.family.prefix();
        let mut tensors = vec![(self.embedding_name(), self.embedding.weight().clone())];
        if let Some(positions) = &self.positions {
            tensors.push((format!("{prefix}.{POSITIONS}.weight"), positions.weight().clone()));
        }
        let mut add = |name: &str, layer: LayerMut<'_>| {
            tensors.push((format!("{name}.weight"), layer.weight().clone()));
            if let Some(bias) = layer.bias() {
                tensors.push((format!("{name}.bias"), Weight::Plain(bias.clone())));
            }
            Ok(())
        };
        // A visit may change layers, and a clone shares all tensors.
        let mut model = self.clone();
        model.visit_layers(&mut add)?;
        model.visit_norms(&mut add)?;
        if let Some(output) = &self.output {
            tensors.push((format!("{OUTPUT}.weight"), output.weight.clone()));
        }
        Ok(tensors)
    }

    /// The vectors of tokens [b, n], with those of their positions [b * n] if the model has learned ones.
    fn embed(&self, ids: &Tensor, position_ids: &[u32]) -> candle_core::Result<Tensor> {
        let (b, n) = ids.dims2()?;
        if b == 0 || n == 0 {
            candle_core::bail!("there are no tokens: the shape is [{b}, {n}]");
        }
        if ids.device().is_cpu() {
            let largest = ids.flatten_all()?.max(0)?.to_scalar::<u32>()?;
            if largest as usize >= self.config.vocab_size {
                candle_core::bail!(
                    "the token id {largest} is not in the vocabulary of {} tokens: the tokens are those of another model",
                    self.config.vocab_size
                );
            }
        }
        let x = self.detach_padding(self.embedding.forward(ids)?, ids)?;
        let Some(positions) = &self.positions else {
            return Ok(x);
        };
        let position_ids = Tensor::from_slice(position_ids, (b, n), &Device::Cpu)?;
        x + positions.forward(&position_ids)?
    }

    /// The vectors x [b, n, width] of tokens [b, n]: those of the padding token give their row of a trained table no gradient.
    fn detach_padding(&self, x: Tensor, ids: &Tensor) -> candle_core::Result<Tensor> {
        let Some(padding) = self.config.padding_id.filter(|_| x.track_op()) else {
            return Ok(x);
        };
        let is_padding: Vec<u8> = ids
            .flatten_all()?
            .to_vec1::<u32>()?
            .into_iter()
            .map(|id| u8::from(id == padding))
            .collect();
        if !is_padding.contains(&1) {
            return Ok(x);
        }
        let (b, n, _) = x.dims3()?;
        let is_padding = Tensor::from_vec(is_padding, (b, n, 1), x.device())?;
        is_padding
            .broadcast_as(x.shape())?
            .contiguous()?
            .where_cond(&x.detach(), &x)
    }
}

impl VisitLayers for CausalLm {
    /// The linear layers of all blocks by transformers' names (`model.layers.0.self_attn.q_proj`), without the output layer, which peft's
    /// `all-linear` leaves out too.
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let config = Arc::clone(&self.config);
        for (index, block) in self.blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_layers(&block_path(&config, index), f)?;
        }
        Ok(())
    }

    /// The tables of tokens and, if the model has one, of positions by transformers' names (`model.embed_tokens`, `transformer.wpe`). An adapter
    /// changes the vectors of tokens alone, also where the table is the output layer too, as in peft.
    fn visit_embeddings(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let family = self.config.family;
        f(
            &join(family.prefix(), family.outer_names()[0]),
            LayerMut::Embedding(&mut self.embedding),
        )?;
        match &mut self.positions {
            Some(positions) => f(&join(family.prefix(), POSITIONS), LayerMut::Embedding(positions)),
            None => Ok(()),
        }
    }

    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let config = Arc::clone(&self.config);
        for (index, block) in self.blocks.iter_mut().enumerate() {
            Arc::make_mut(block).visit_norms(&block_path(&config, index), f)?;
        }
        let norm = config.family.outer_names()[2];
        self.final_norm.visit(&format!("{}.{norm}", config.family.prefix()), f)
    }
}

/// The name of the table of learned positions.
const POSITIONS: &str = "wpe";

/// The path of a block: `model.layers.0`.
fn block_path(config: &CausalLmConfig, index: usize) -> String {
    format!("{}.{}.{index}", config.family.prefix(), config.family.outer_names()[1])
}

/// Whether the files have an output layer that is not the table of embeddings.
fn has_own_output(index: &Index, config: &CausalLmConfig) -> Result<bool> {
    let (output, table) = (
        format!("{OUTPUT}.weight"),
        format!("{}.{}.weight", config.family.prefix(), config.family.outer_names()[0]),
    );
    let (Some(shape), Some(of_table)) = (index.shape(&output), index.shape(&table)) else {
        return Ok(false);
    };
    let [rows, width] = *shape else { return Ok(true) };
    if shape != of_table {
        return Ok(true);
    }
    // A part of the rows at a time: the tables may be the largest tensors of the model.
    let step = (COMPARED_NUMBERS / width.max(1)).max(1);
    for start in (0..rows).step_by(step) {
        let part = View::Rows {
            start,
            count: step.min(rows - start),
        };
        let parts = index.views(|name, _| match name == output || name == table {
            true => vec![(name.to_owned(), part)],
            false => Vec::new(),
        });
        let read = |name: &str| {
            parts
                .read(name, DType::F32, &Device::Cpu)?
                .flatten_all()?
                .to_vec1::<f32>()
                .map_err(EngineError::from)
        };
        if read(&output)? != read(&table)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The tensors with the prefix of their family: files of the model without its output layer (`AutoModel`) have none.
fn with_prefix(index: Index, config: &CausalLmConfig) -> Index {
    let prefix = config.family.prefix();
    let embedding = config.family.outer_names()[0];
    if index.contains(&format!("{prefix}.{embedding}.weight")) || !index.contains(&format!("{embedding}.weight")) {
        return index;
    }
    index.renamed(|name, shape| {
        let name = match name.starts_with(OUTPUT) {
            true => name.to_owned(),
            false => format!("{prefix}.{name}"),
        };
        Some((name, shape.to_vec()))
    })
}
