//! The context that a process runs in: its spec, its events, its paths and its model.

use super::events::{EventSink, OutputRequests, StopSignal};
use super::log_file::LogFile;
use crate::adapters::{LoadedAdapter, adapted_layers, is_of_text, load_denoiser_lora};
use crate::device::Compute;
use crate::device::allocator::FreedMemory;
use crate::error::{EngineError, Result};
use crate::families::{
    self, LearnedEmbedding, LoadOptions, LoadedCodec, Model, PartRole, TextEmbeddings, TextEncoders, WeightChanges,
};
use aitk_common::attempt::{AttemptSpec, ChildEvent};
use aitk_common::job::JobSpec;
use aitk_common::job::model::ModelConfig;
use aitk_common::job::paths::not_an_input_message;
use aitk_common::job::prompt::ImageRequest;
use aitk_common::model_files::PartPaths;
use aitk_common::plan::memory_options::MemoryOptions;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The log message about a `compile` key.
pub(super) const COMPILE_NOTE: &str = "`compile` has no effect: nothing is compiled when a job starts, because the operations that it would \
                            fuse are fused already (attention, a norm with its activation, a LoRA with its layer)";

/// A loaded model and how it was loaded.
pub(super) struct LoadedModel {
    pub(super) model: Box<dyn Model>,
    /// The folder or file of its VAE: the model's own, or `model.vae_path`.
    pub(super) vae_path: PathBuf,
    /// What the memory profile chose.
    pub(super) memory_options: MemoryOptions,
}

/// The context that a process runs in.
pub struct Context<'a> {
    /// The attempt's spec.
    pub spec: &'a AttemptSpec,
    /// The attempt's job.
    pub job: &'a JobSpec,
    /// Receives the events.
    pub events: &'a mut dyn EventSink,
    /// Tells the process to stop.
    pub stop: &'a StopSignal,
    /// The outputs that a training is asked for.
    pub requests: &'a OutputRequests,
    /// The log file, which is written once the run folder is open.
    pub log_file: LogFile,
}

impl Context<'_> {
    /// Whether the attempt may open only files that were staged for it. False if the job runs in place.
    #[must_use]
    pub fn has_staged_inputs(&self) -> bool {
        self.spec.output_root.is_some()
    }

    /// The path on this machine of a path in the config.
    ///
    /// # Errors
    /// When the path is not an input of the job, unless the job runs in place. The message is the same whether the file
    /// exists or not.
    pub fn local_path(&self, path: &str) -> Result<PathBuf> {
        match self.spec.inputs.get(path) {
            Some(here) => Ok(here.clone()),
            None if self.has_staged_inputs() => Err(EngineError::BadInput(not_an_input_message(path))),
            None => Ok(expand_home(path)),
        }
    }

    /// Where the control images of requests (`ctrl_img`) are on this machine, by their paths in the config.
    ///
    /// # Errors
    /// As [`Self::local_path`], or when there is no file.
    pub fn control_images(&self, requests: &[ImageRequest]) -> Result<BTreeMap<String, PathBuf>> {
        let paths = requests.iter().filter_map(|request| request.ctrl_img.as_deref());
        let mut images = BTreeMap::new();
        for path in paths.filter(|path| !path.is_empty()) {
            let here = self.local_path(path)?;
            if !here.is_file() {
                return Err(EngineError::bad_input(format!(
                    "the control image {path}: no such file"
                )));
            }
            images.insert(path.to_owned(), here);
        }
        Ok(images)
    }

    /// The folder of the results: the attempt's own, or else the one in the config.
    #[must_use]
    pub fn output_root(&self, configured: Option<&str>) -> PathBuf {
        match (&self.spec.output_root, configured) {
            (Some(root), _) => root.clone(),
            (None, Some(folder)) => expand_home(folder),
            (None, None) => PathBuf::from("output"),
        }
    }

    /// Emits a log message.
    pub fn log(&mut self, level: &str, message: impl Into<String>) {
        self.events.emit(ChildEvent::Log {
            level: level.into(),
            message: message.into(),
        });
    }

    /// Logs how many layers of a LoRA file were loaded, and how many names were ignored.
    pub(super) fn log_loaded_lora(&mut self, path: &Path, loaded: &LoadedAdapter) {
        self.log(
            "info",
            format!("{}: a LoRA on {} layers", path.display(), loaded.layers),
        );
        if loaded.alpha_is_unknown {
            self.log(
                "warn",
                format!(
                    "{}: nothing says what its alpha is, so it is taken to be the rank, which may be another strength than it was \
                     trained with: peft has it in adapter_config.json beside adapter_model.safetensors; give that folder, or save \
                     the LoRA with diffusers' save_lora_weights",
                    path.display()
                ),
            );
        }
        if let Some(first) = loaded.unknown.first() {
            let count = loaded.unknown.len();
            self.log(
                "warn",
                format!(
                    "{}: names that match no layer of this model and are ignored: {count}, such as `{first}`",
                    path.display()
                ),
            );
        }
    }

    /// As [`Self::log_loaded_lora`], of a LoRA file of which the denoiser alone has layers: those of text encoders, which are not used, no
    /// longer count as unknown.
    pub(super) fn log_loaded_denoiser_lora(&mut self, path: &Path, loaded: &mut LoadedAdapter) {
        let unknown = loaded.unknown.len();
        loaded.unknown.retain(|name| !is_of_text(name));
        self.log_loaded_lora(path, loaded);
        let of_text = unknown - loaded.unknown.len();
        if of_text > 0 {
            self.log(
                "warn",
                format!(
                    "{}: its {of_text} layers of text encoders are not used, as in ai-toolkit: `assistant_lora_path`, \
                     `inference_lora_path` and accuracy recovery adapters change the denoiser alone",
                    path.display()
                ),
            );
        }
    }

    /// Loads the model of a `model` section for the attempt's memory profile, with `vae_path` if it is set. Memory that
    /// is freed while loading, such as weights before quantisation, is returned to the system; afterwards freed memory
    /// is handled as the profile says. `changes`: what the job changes of the weights. `prompts`: prompts that were
    /// encoded before; then the text encoders are not loaded. An accuracy recovery adapter is attached.
    ///
    /// # Errors
    /// As [`families::load`] and [`Model::replace_codec`].
    pub(super) fn load_model(
        &mut self,
        config: &ModelConfig,
        compute: &Compute,
        changes: WeightChanges,
        prompts: Option<Arc<dyn TextEmbeddings>>,
    ) -> Result<LoadedModel> {
        let encodes_prompts = prompts.is_none();
        let mut options = LoadOptions {
            prompts,
            parts: self.part_paths(config)?,
            ..LoadOptions::of_job(config, self.spec.profile, compute.dtype, compute.device.clone())
        }
        .changing(changes);
        FreedMemory::Release.apply();
        let path = self.local_path(&config.name_or_path)?;
        let mut recovery = None;
        if let (Some(adapter), Some(quantization)) =
            (&config.accuracy_recovery_adapter, &mut options.denoiser_quantization)
        {
            let adapter = self.local_path(adapter)?;
            quantization.adapted = Some(adapted_layers(&adapter, &path, config.arch.name, &options.parts)?);
            recovery = Some(adapter);
        }
        let mut model = families::load(&path, config.arch.name, &options)?;
        if let Some(adapter) = recovery {
            // As ai-toolkit, which quantises the text encoders without it.
            let mut loaded = load_denoiser_lora(&mut *model, &adapter, 1.0)?;
            self.log_loaded_denoiser_lora(&adapter, &mut loaded);
        }
        for (role, kinds) in model.quantised_in_file() {
            let key_and_qtype = match role {
                PartRole::Denoiser => config.quantization().map(|qtype| ("qtype", qtype)),
                PartRole::TextEncoder => config.text_encoder_quantization().map(|qtype| ("qtype_te", qtype)),
                PartRole::Codec | PartRole::LanguageModel => None,
            };
            let rest = key_and_qtype.map_or(String::new(), |(key, qtype)| {
                format!("; `{key}` ({qtype}) applies only to layers that are not quantised in the file")
            });
            self.log(
                "info",
                format!(
                    "the file of the {role} holds {} weights, which are used as they are{rest}",
                    kinds.join(", ")
                ),
            );
        }
        // The prompts were encoded with the words.
        for (place, word) in self.words(config)?.iter().filter(|_| encodes_prompts) {
            let added = model.add_embedding(&word.trigger, &word.vectors);
            added.map_err(|error| EngineError::bad_input(format!("{place}: {error}")))?;
        }
        let vae_path = match &config.vae_path {
            Some(vae) => {
                let path = self.local_path(vae)?;
                model.replace_codec(&path, &options)?;
                path
            }
            None => model.codec_path().map_or(path, Path::to_path_buf),
        };
        if !options.memory_options.returns_freed_memory {
            FreedMemory::Retain.apply();
        }
        if config.compile || config.block_compile {
            self.log("info", COMPILE_NOTE);
        }
        Ok(LoadedModel {
            model,
            vae_path,
            memory_options: options.memory_options,
        })
    }

    /// Where parts come from that the model of a section does not have.
    ///
    /// # Errors
    /// When a path is not an input of the job.
    pub(super) fn part_paths(&self, config: &ModelConfig) -> Result<PartPaths> {
        let part = |path: &Option<String>| path.as_deref().map(|path| self.local_path(path)).transpose();
        Ok(PartPaths {
            extras: part(&config.extras_name_or_path)?,
            text_encoder: part(&config.te_name_or_path)?,
            vae: part(&config.vae_path)?,
        })
    }

    /// Loads the text encoders of a `model` section alone, where the family can.
    ///
    /// # Errors
    /// As [`families::load_text_encoders`].
    pub(super) fn load_text_encoders(
        &mut self,
        config: &ModelConfig,
        compute: &Compute,
    ) -> Result<Box<dyn TextEncoders>> {
        let options = LoadOptions {
            parts: self.part_paths(config)?,
            ..LoadOptions::of_job(config, self.spec.profile, compute.dtype, compute.device.clone())
        };
        // Their memory is returned to the system before the model is loaded.
        FreedMemory::Release.apply();
        let path = self.local_path(&config.name_or_path)?;
        let mut encoders = families::load_text_encoders(&path, config.arch.name, &options)?;
        for (place, word) in self.words(config)? {
            let added = encoders.add_embedding(&word.trigger, &word.vectors);
            added.map_err(|error| EngineError::bad_input(format!("{place}: {error}")))?;
        }
        Ok(encoders)
    }

    /// The files of `model.embedding_paths`.
    ///
    /// # Errors
    /// When a path is not an input of the job.
    pub(super) fn embedding_files(&self, config: &ModelConfig) -> Result<Vec<PathBuf>> {
        config
            .embedding_paths
            .iter()
            .map(|path| self.local_path(path))
            .collect()
    }

    /// Reads the words of `model.embedding_paths`, each with its key and its file for messages.
    fn words(&mut self, config: &ModelConfig) -> Result<Vec<(String, LearnedEmbedding)>> {
        let mut words = Vec::new();
        let files = self.embedding_files(config)?;
        for (number, path) in files.iter().enumerate() {
            let key = match files.len() {
                1 => "model.embedding_paths".to_owned(),
                _ => format!("model.embedding_paths[{number}]"),
            };
            let read = LearnedEmbedding::read(path);
            let word = read.map_err(|error| EngineError::bad_input(format!("{key}: {error}")))?;
            let vectors = word.vectors.first().map_or(0, |vectors| vectors.dims()[0]);
            self.log(
                "info",
                format!(
                    "{}: prompts can use the word `{}`, of {vectors} vectors",
                    path.display(),
                    word.trigger
                ),
            );
            words.push((format!("{key}: {}", path.display()), word));
        }
        Ok(words)
    }

    /// Loads the codec of a `model` section alone.
    ///
    /// # Errors
    /// As [`families::load_codec`].
    pub(super) fn load_codec(&mut self, config: &ModelConfig, compute: &Compute) -> Result<LoadedCodec> {
        let options = LoadOptions {
            parts: self.part_paths(config)?,
            ..LoadOptions::of_job(config, self.spec.profile, compute.dtype, compute.device.clone())
        };
        // Its memory is returned to the system before the model is loaded.
        FreedMemory::Release.apply();
        let path = self.local_path(&config.name_or_path)?;
        let vae = config.vae_path.as_ref().map(|vae| self.local_path(vae)).transpose()?;
        families::load_codec(&path, config.arch.name, vae.as_deref(), options)
    }

    /// Emits the beginning of a phase.
    pub fn phase(&mut self, name: &str) {
        self.events.emit(ChildEvent::Phase { name: name.into() });
    }

    /// Emits a finished file below the output root.
    pub fn artifact(&mut self, kind: &str, root: &Path, path: &Path, step: Option<u64>, index: Option<u64>) {
        let name = artifact_name(root, path);
        self.events.emit(ChildEvent::Artifact {
            kind: kind.into(),
            path: path.into(),
            name,
            step,
            index,
        });
    }
}

/// Replaces `~/` at the beginning of a path by the user's home folder, as `aitk submit` does. A path without it is
/// unchanged, and so is every path if `HOME` is not set.
#[must_use]
pub fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) if !home.is_empty() => PathBuf::from(home).join(rest),
        _ => PathBuf::from(path),
    }
}

/// The name of an artifact: its path below the output root, with `/` between folders.
#[must_use]
pub fn artifact_name(root: &Path, path: &Path) -> String {
    let below = path.strip_prefix(root).unwrap_or(path);
    below
        .components()
        .map(|c| c.as_os_str().to_string_lossy())
        .collect::<Vec<_>>()
        .join("/")
}
