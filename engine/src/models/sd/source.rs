//! The source of a model, for saving it: tensor names, configs and open files, but no weights.

use super::default_configs;
use super::sd_config::SdConfig;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::weights::{Index, Weights};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// A component with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ComponentKind {
    TextEncoder,
    Unet,
    Vae,
}

impl ComponentKind {
    pub(super) const ALL: [Self; 3] = [Self::TextEncoder, Self::Unet, Self::Vae];

    /// The name of its folder in a diffusers model.
    pub(super) fn folder(self) -> &'static str {
        match self {
            Self::TextEncoder => "text_encoder",
            Self::Unet => "unet",
            Self::Vae => "vae",
        }
    }

    /// Its library and class in `model_index.json`.
    pub(super) fn class(self) -> [&'static str; 2] {
        match self {
            Self::TextEncoder => ["transformers", "CLIPTextModel"],
            Self::Unet => ["diffusers", "UNet2DConditionModel"],
            Self::Vae => ["diffusers", "AutoencoderKL"],
        }
    }

    /// The name of the file with its weights.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::TextEncoder => "model.safetensors",
            Self::Unet | Self::Vae => "diffusion_pytorch_model.safetensors",
        }
    }
}

/// The tensors and the `config.json` of a component.
#[derive(Clone, Debug)]
pub(super) struct Component {
    /// The tensors of the component, with diffusers' current names, and with the prefix `text_model.` in the text
    /// encoder.
    pub(super) index: Index,
    pub(super) config: String,
}

impl Component {
    /// From the weights that the component was built from.
    pub(super) fn new(kind: ComponentKind, weights: &Weights, config: String) -> Result<Self> {
        let index = weights.requested_tensors();
        let index = index
            .ok_or_else(|| EngineError::Internal("a model that was not loaded from files cannot be saved".into()))?;
        let index = match kind {
            ComponentKind::TextEncoder => index.renamed(|name, shape| Some((prefixed_name(name), shape.to_vec()))),
            ComponentKind::Unet | ComponentKind::Vae => index,
        };
        Ok(Self { index, config })
    }
}

/// The name of a text encoder's tensor with the prefix of transformers up to version 4, which all versions can read.
pub(super) fn prefixed_name(name: &str) -> String {
    const PREFIX: &str = "text_model.";
    match name.starts_with(PREFIX) {
        true => name.to_owned(),
        false => format!("{PREFIX}{name}"),
    }
}

/// The configs and the tokenizer of a diffusers model.
#[derive(Clone, Debug)]
pub(super) struct ConfigFiles {
    /// The `config.json` of each of [`ComponentKind::ALL`].
    pub(super) configs: [String; 3],
    /// `scheduler_config.json`.
    pub(super) scheduler: String,
    /// `model_index.json`, if the model has one.
    pub(super) model_index: Option<Map<String, Value>>,
    /// The folder of the tokenizer; `None` for OpenAI's.
    pub(super) tokenizer: Option<PathBuf>,
}

impl ConfigFiles {
    /// Reads the files of a diffusers folder. `model_index.json` may be missing.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let read = |file: &str| {
            let path = folder.join(file);
            config::read_text(&path).map_err(|e| EngineError::io(&path, e))
        };
        let model_index = folder.join("model_index.json");
        let model_index = match model_index.is_file() {
            true => config::read_json(&model_index)?.as_object().cloned(),
            false => None,
        };
        Ok(Self {
            configs: [
                read("text_encoder/config.json")?,
                read("unet/config.json")?,
                read("vae/config.json")?,
            ],
            scheduler: read("scheduler/scheduler_config.json")?,
            model_index,
            tokenizer: Some(folder.join("tokenizer")),
        })
    }

    /// The files of Stable Diffusion 1.x.
    pub(super) fn defaults() -> Self {
        let mut scheduler = SdConfig::default().scheduler;
        if let Some(keys) = scheduler.as_object_mut() {
            keys.insert("_diffusers_version".into(), default_configs::DIFFUSERS.into());
        }
        Self {
            configs: [
                default_configs::TEXT_ENCODER,
                default_configs::UNET,
                default_configs::VAE,
            ]
            .map(str::to_owned),
            scheduler: pretty_json(&scheduler),
            model_index: None,
            tokenizer: None,
        }
    }
}

/// Where a model was loaded from.
#[derive(Clone, Debug)]
pub struct SdSource {
    path: PathBuf,
    components: [Component; 3],
    scheduler: String,
    model_index: Option<Map<String, Value>>,
    tokenizer: Option<PathBuf>,
}

impl SdSource {
    /// `weights` are those of [`ComponentKind::ALL`], in this order.
    pub(super) fn new(path: &Path, files: ConfigFiles, weights: [&Weights; 3]) -> Result<Self> {
        let [text_encoder, unet, vae] = files.configs;
        let [text_weights, unet_weights, vae_weights] = weights;
        Ok(Self {
            path: path.to_path_buf(),
            components: [
                Component::new(ComponentKind::TextEncoder, text_weights, text_encoder)?,
                Component::new(ComponentKind::Unet, unet_weights, unet)?,
                Component::new(ComponentKind::Vae, vae_weights, vae)?,
            ],
            scheduler: files.scheduler,
            model_index: files.model_index,
            tokenizer: files.tokenizer,
        })
    }

    /// The folder or file that was loaded.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn component(&self, kind: ComponentKind) -> &Component {
        let [text_encoder, unet, vae] = &self.components;
        match kind {
            ComponentKind::TextEncoder => text_encoder,
            ComponentKind::Unet => unet,
            ComponentKind::Vae => vae,
        }
    }

    /// Replaces the VAE by one from another folder.
    pub(super) fn replace_vae(&mut self, vae: Component) {
        self.components[2] = vae;
    }

    /// The folder of the tokenizer; `None` for OpenAI's.
    pub(super) fn tokenizer(&self) -> Option<&Path> {
        self.tokenizer.as_deref()
    }

    /// `scheduler_config.json`.
    pub(super) fn scheduler(&self) -> &str {
        &self.scheduler
    }

    /// `model_index.json` with the components that are saved, and no others.
    pub(super) fn model_index(&self) -> Value {
        let mut index = self.model_index.clone().unwrap_or_else(|| {
            let none = json!([null, null]);
            let mut index = Map::new();
            index.insert("_diffusers_version".into(), default_configs::DIFFUSERS.into());
            index.insert("safety_checker".into(), none.clone());
            index.insert("feature_extractor".into(), none);
            index
        });
        // There are several classes of schedulers and tokenizers: the entry of the source is kept.
        let source_entry = |key: &str, class: &str| {
            let pair = index.get(key)?.as_array()?;
            let named = pair.get(1)?.as_str()?.starts_with(class);
            named.then(|| Value::Array(pair.clone()))
        };
        let tokenizer = source_entry("tokenizer", "CLIPTokenizer");
        let scheduler = source_entry("scheduler", "");
        for entry in index.values_mut().filter(|entry| entry.is_array()) {
            *entry = json!([null, null]);
        }
        for kind in ComponentKind::ALL {
            index.insert(kind.folder().into(), json!(kind.class()));
        }
        let class = config::parse_json(&self.scheduler).unwrap_or_default();
        let class = class.get("_class_name").and_then(Value::as_str);
        let class = class.unwrap_or("PNDMScheduler");
        let tokenizer = tokenizer.unwrap_or_else(|| json!(["transformers", "CLIPTokenizer"]));
        index.insert("tokenizer".into(), tokenizer);
        index.insert(
            "scheduler".into(),
            scheduler.unwrap_or_else(|| json!(["diffusers", class])),
        );
        index.insert("_class_name".into(), "StableDiffusionPipeline".into());
        index.insert("requires_safety_checker".into(), false.into());
        index.sort_keys();
        Value::Object(index)
    }
}

/// JSON with indentation and a newline at the end.
pub(super) fn pretty_json(value: &Value) -> String {
    format!("{value:#}\n")
}
