//! The source of a model, for saving it: tensor names, configs and open files, but no weights.

use super::variant::{ComponentSpec, Variant};
use crate::error::{EngineError, Result};
use crate::families::saved::{parse_config, pretty_json};
use crate::models::config;
use crate::weights::{Index, Weights};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The version of diffusers whose format configs are written in.
const DIFFUSERS: &str = "0.42.1";

/// The tensors and the `config.json` of a component.
#[derive(Clone, Debug)]
pub(super) struct Component {
    pub(super) spec: ComponentSpec,
    /// The tensors of the component, with diffusers' current names, and with the prefix `text_model.` in text encoders.
    pub(super) index: Index,
    pub(super) config: String,
}

impl Component {
    /// From the weights that the component was built from.
    pub(super) fn new(variant: &Variant, spec: ComponentSpec, weights: &Weights, config: String) -> Result<Self> {
        let index = weights.requested_tensors();
        let index = index
            .ok_or_else(|| EngineError::Internal("a model that was not loaded from files cannot be saved".into()))?;
        let index = match variant.is_text_encoder(spec.folder) {
            true => index.renamed(|name, shape| Some((prefixed_name(name), shape.to_vec()))),
            false => index,
        };
        Ok(Self { spec, index, config })
    }
}

/// The name of a text encoder's tensor with the prefix of transformers up to version 4, which all versions can read.
pub(super) fn prefixed_name(name: &str) -> String {
    const PREFIX: &str = "text_model.";
    match name.starts_with(PREFIX) || name.starts_with("text_projection.") {
        true => name.to_owned(),
        false => format!("{PREFIX}{name}"),
    }
}

/// The configs and the tokenizers of a diffusers model.
#[derive(Clone, Debug)]
pub(super) struct ConfigFiles {
    /// The `config.json` of each of [`Variant::components`].
    pub(super) configs: Vec<String>,
    /// `scheduler_config.json`.
    pub(super) scheduler: String,
    /// `model_index.json`, if the model has one.
    pub(super) model_index: Option<Map<String, Value>>,
    /// The folder of each text encoder's tokenizer; `None` for OpenAI's.
    pub(super) tokenizers: Vec<Option<PathBuf>>,
}

impl ConfigFiles {
    /// Reads the files of a diffusers folder. `model_index.json` may be missing.
    pub(super) fn open(folder: &Path, variant: &Variant) -> Result<Self> {
        let read = |file: &str| {
            let path = folder.join(file);
            config::read_text(&path).map_err(|e| EngineError::io(&path, e))
        };
        let model_index = folder.join("model_index.json");
        let model_index = match model_index.is_file() {
            true => config::read_json(&model_index)?.as_object().cloned(),
            false => None,
        };
        let components = variant.components();
        let configs = components
            .iter()
            .map(|spec| read(&format!("{}/config.json", spec.folder)));
        let tokenizers = variant.text_encoders.iter();
        Ok(Self {
            configs: configs.collect::<Result<_>>()?,
            scheduler: read("scheduler/scheduler_config.json")?,
            model_index,
            tokenizers: tokenizers.map(|spec| Some(folder.join(spec.tokenizer))).collect(),
        })
    }

    /// The files of the family's published model, with this scheduler.
    pub(super) fn defaults(variant: &Variant, scheduler: &Value) -> Self {
        let defaults = &variant.defaults;
        let configs = defaults.text_encoders.iter().chain([&defaults.unet, &defaults.vae]);
        Self {
            configs: configs.map(|text| (*text).to_owned()).collect(),
            scheduler: pretty_json(scheduler),
            model_index: None,
            tokenizers: vec![None; variant.text_encoders.len()],
        }
    }
}

/// Where a model was loaded from.
#[derive(Clone, Debug)]
pub struct SdSource {
    pub(super) variant: &'static Variant,
    path: PathBuf,
    components: Vec<Component>,
    scheduler: String,
    model_index: Option<Map<String, Value>>,
    tokenizers: Vec<Option<PathBuf>>,
}

impl SdSource {
    /// `weights` are those of [`Variant::components`], in this order.
    pub(super) fn new(
        variant: &'static Variant,
        path: &Path,
        files: ConfigFiles,
        weights: &[&Weights],
    ) -> Result<Self> {
        let components = variant.components().into_iter().zip(files.configs).zip(weights);
        let components = components.map(|((spec, config), weights)| Component::new(variant, spec, weights, config));
        Ok(Self {
            variant,
            path: path.to_path_buf(),
            components: components.collect::<Result<_>>()?,
            scheduler: files.scheduler,
            model_index: files.model_index,
            tokenizers: files.tokenizers,
        })
    }

    /// The folder or file that was loaded.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors of the U-Net, and its `config.json`.
    ///
    /// # Errors
    /// When the config is not JSON.
    pub(super) fn denoiser(&self) -> Result<(&Index, Value)> {
        let unet = self.component("unet");
        let unet = unet.ok_or_else(|| EngineError::Internal("a Stable Diffusion model has a U-Net".into()))?;
        Ok((&unet.index, parse_config(&unet.config, self.path())?))
    }

    pub(super) fn components(&self) -> &[Component] {
        &self.components
    }

    /// The component with this folder name.
    pub(super) fn component(&self, folder: &str) -> Option<&Component> {
        self.components.iter().find(|component| component.spec.folder == folder)
    }

    /// Replaces the VAE by one from another folder.
    pub(super) fn replace_vae(&mut self, weights: &Weights, config: String) -> Result<()> {
        let vae = Component::new(self.variant, ComponentSpec::VAE, weights, config)?;
        self.components.retain(|component| component.spec != ComponentSpec::VAE);
        self.components.push(vae);
        Ok(())
    }

    /// The folder of each text encoder's tokenizer; `None` for OpenAI's.
    pub(super) fn tokenizers(&self) -> &[Option<PathBuf>] {
        &self.tokenizers
    }

    /// `scheduler_config.json`.
    pub(super) fn scheduler(&self) -> &str {
        &self.scheduler
    }

    /// Whether an empty negative prompt that was not given is encoded as zeros (SDXL's `force_zeros_for_empty_prompt`).
    pub(super) fn zeros_for_no_prompt(&self) -> bool {
        let key = self
            .model_index
            .as_ref()
            .and_then(|index| index.get("force_zeros_for_empty_prompt"));
        key.and_then(Value::as_bool).unwrap_or(true)
    }

    /// `model_index.json` with the components that are saved, and no others.
    pub(super) fn model_index(&self) -> Value {
        let mut index = self.model_index.clone().unwrap_or_else(|| {
            let none = json!([null, null]);
            let mut index = Map::new();
            index.insert("_diffusers_version".into(), DIFFUSERS.into());
            index.insert("feature_extractor".into(), none.clone());
            if self.has_safety_checker() {
                index.insert("safety_checker".into(), none);
            }
            index
        });
        // There are several classes of schedulers and tokenizers: the entry of the source is kept.
        let source_entry = |key: &str, class: &str| {
            let pair = index.get(key)?.as_array()?;
            let named = pair.get(1)?.as_str()?.starts_with(class);
            named.then(|| Value::Array(pair.clone()))
        };
        let encoders = self.variant.text_encoders.iter();
        let tokenizers = encoders.map(|spec| (spec.tokenizer, source_entry(spec.tokenizer, "CLIPTokenizer")));
        let tokenizers: Vec<_> = tokenizers.collect();
        let scheduler = source_entry("scheduler", "");
        for entry in index.values_mut().filter(|entry| entry.is_array()) {
            *entry = json!([null, null]);
        }
        for component in &self.components {
            index.insert(component.spec.folder.into(), json!(component.spec.class));
        }
        let class = config::parse_json(&self.scheduler).unwrap_or_default();
        let class = class.get("_class_name").and_then(Value::as_str);
        let class = class.unwrap_or("PNDMScheduler");
        for (folder, entry) in tokenizers {
            let entry = entry.unwrap_or_else(|| json!(["transformers", "CLIPTokenizer"]));
            index.insert(folder.into(), entry);
        }
        index.insert(
            "scheduler".into(),
            scheduler.unwrap_or_else(|| json!(["diffusers", class])),
        );
        index.insert("_class_name".into(), self.variant.pipeline_class.into());
        if self.has_safety_checker() {
            index.insert("requires_safety_checker".into(), false.into());
        } else {
            index
                .entry("force_zeros_for_empty_prompt")
                .or_insert_with(|| self.zeros_for_no_prompt().into());
        }
        index.sort_keys();
        Value::Object(index)
    }

    /// Whether the pipeline of the family has a place for a safety checker.
    fn has_safety_checker(&self) -> bool {
        self.variant.pipeline_class == "StableDiffusionPipeline"
    }
}
