//! Textual inversion: the word that a training learns (`embedding`), after ai-toolkit's `toolkit/embedding.py`.
//!
//! ai-toolkit trains the whole table of a text encoder and restores all other rows after each step. Here the vectors of the word
//! are the only variables, so `max_grad_norm` limits the norm of their gradients alone.

use super::super::context::Context;
use crate::error::{EngineError, Result};
use crate::families::{LearnedEmbedding, Model, embedding_names};
use crate::models::clip::{has_word, replace_word};
use crate::optim::Param;
use crate::weights::write_tensors;
use aitk_common::fsutil;
use aitk_common::job::embedding::EmbeddingConfig;
use aitk_common::job::process::TrainerProcess;
use candle_core::{Tensor, Var};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// The trained vectors of a word.
pub(super) struct TrainedEmbedding {
    config: EmbeddingConfig,
    /// [vectors, width] in float32, for each text encoder.
    params: Vec<Param>,
}

impl TrainedEmbedding {
    /// Adds the word to a model that was just loaded.
    pub(super) fn new(config: &EmbeddingConfig, model: &mut dyn Model, cx: &mut Context<'_>) -> Result<Self> {
        let initial = model.initial_embedding(&config.init_words, config.tokens as usize)?;
        let params = embedding_names(initial.len())
            .iter()
            .zip(&initial)
            .map(|(name, vectors)| {
                Ok(Param {
                    name: (*name).to_owned(),
                    var: Var::from_tensor(vectors)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let vectors: Vec<Tensor> = params.iter().map(|param| param.var.as_tensor().clone()).collect();
        let added = model.add_embedding(&config.trigger, &vectors);
        added.map_err(|error| EngineError::bad_input(format!("embedding.trigger: {error}")))?;
        cx.log(
            "info",
            format!(
                "textual inversion: the word `{}` of {} vectors, which begin as those of \"{}\"",
                config.trigger, config.tokens, config.init_words
            ),
        );
        Ok(Self {
            config: config.clone(),
            params,
        })
    }

    /// The trained parameters.
    pub(super) fn params(&self) -> &[Param] {
        &self.params
    }

    /// Writes the vectors to a file, in float32, with the metadata that ai-toolkit and AUTOMATIC1111 read.
    pub(super) fn write(&self, path: &Path, mut metadata: BTreeMap<String, String>, step: u64) -> Result<()> {
        let own = [
            ("string_to_token", json!({"*": 265}).to_string()),
            ("string_to_param", json!({"*": "emb_params"}).to_string()),
            ("name", json!(self.config.trigger).to_string()),
            ("step", step.to_string()),
            ("sd_checkpoint", "null".to_owned()),
            ("sd_checkpoint_name", "null".to_owned()),
            ("notes", "null".to_owned()),
        ];
        metadata.extend(own.map(|(key, value)| (key.to_owned(), value)));
        let tensors: BTreeMap<String, Tensor> = self
            .params
            .iter()
            .map(|param| (param.name.clone(), param.var.as_detached_tensor()))
            .collect();
        Ok(fsutil::write_atomic(path, |out| {
            write_tensors(out, &tensors, &metadata)
        })?)
    }

    /// Reads the vectors of a save.
    pub(super) fn load(&self, path: &Path) -> Result<()> {
        let saved = LearnedEmbedding::read(path)?.vectors;
        let fits = |(param, tensor): (&Param, &Tensor)| param.var.dims() == tensor.dims();
        if saved.len() != self.params.len() || !self.params.iter().zip(&saved).all(fits) {
            let shapes = |tensors: Vec<&Tensor>| format!("{:?}", tensors.iter().map(|t| t.dims()).collect::<Vec<_>>());
            return Err(EngineError::bad_input(format!(
                "{}: its vectors have the shapes {}, and this training has {}: it is of another model, or has another number of \
                 `tokens`. It is the newest save of the run folder: move it away, or give the word another `trigger`",
                path.display(),
                shapes(saved.iter().collect()),
                shapes(self.params.iter().map(|param| param.var.as_tensor()).collect())
            )));
        }
        for (param, tensor) in self.params.iter().zip(saved) {
            param.var.set(&tensor.to_device(param.var.device())?)?;
        }
        Ok(())
    }

    /// The step in the metadata of a save.
    pub(super) fn saved_step(path: &Path) -> Result<Option<u64>> {
        Ok(LearnedEmbedding::read(path)?.step)
    }
}

/// A caption of a training with a word: placeholders become the word, and one without the word gets it at the beginning,
/// except captions of regularisation sets.
pub(super) fn caption_with_word(caption: &str, config: &EmbeddingConfig, regularisation: bool) -> String {
    let trigger = &config.trigger;
    let caption = with_placeholders(caption, trigger);
    match regularisation || has_word(&caption, trigger, config.tokens) {
        true => caption,
        false => format!("{trigger} {caption}"),
    }
}

/// The prompt of a prior prediction: the class instead of the word.
pub(super) fn caption_with_class(caption: &str, config: &EmbeddingConfig) -> String {
    let class = config.trigger_class_name.as_deref().unwrap_or_default();
    replace_word(caption, &config.trigger, config.tokens, class)
}

fn with_placeholders(caption: &str, trigger: &str) -> String {
    caption.replace("[name]", trigger).replace("[trigger]", trigger)
}

/// Adds the word to the captions of a batch, if the training has one.
pub(super) fn add_word_to(captions: &mut [String], process: &TrainerProcess, regularisation: bool) {
    if let Some(config) = &process.embedding {
        for caption in captions {
            *caption = caption_with_word(caption, config, regularisation);
        }
    }
}
