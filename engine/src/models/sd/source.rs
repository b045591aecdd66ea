//! What a model was loaded from, kept so that it can be written whole again: names, small texts and open files, no weights.

use super::{SdConfig, stock};
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::weights::{Index, Weights};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// What has weights of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    TextEncoder,
    Unet,
    Vae,
}

impl Part {
    pub(super) const ALL: [Self; 3] = [Self::TextEncoder, Self::Unet, Self::Vae];

    /// Its folder in diffusers' layout.
    pub(super) fn folder(self) -> &'static str {
        match self {
            Self::TextEncoder => "text_encoder",
            Self::Unet => "unet",
            Self::Vae => "vae",
        }
    }

    /// Its library, and its class there.
    pub(super) fn class(self) -> [&'static str; 2] {
        match self {
            Self::TextEncoder => ["transformers", "CLIPTextModel"],
            Self::Unet => ["diffusers", "UNet2DConditionModel"],
            Self::Vae => ["diffusers", "AutoencoderKL"],
        }
    }

    /// Its weights, in its folder.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::TextEncoder => "model.safetensors",
            Self::Unet | Self::Vae => "diffusion_pytorch_model.safetensors",
        }
    }
}

/// The tensors of a part, and what its `config.json` says.
#[derive(Clone, Debug)]
pub(super) struct Component {
    /// Of just the tensors that the part is made of: diffusers' names today; `text_model.…` in the text encoder.
    pub(super) index: Index,
    pub(super) config: String,
}

impl Component {
    /// Of weights that a model was built from.
    pub(super) fn new(part: Part, weights: &Weights, config: String) -> Result<Self> {
        let index = weights.requested_tensors();
        let index = index.ok_or_else(|| EngineError::Internal("a model without files has no source".into()))?;
        let index = match part {
            Part::TextEncoder => index.renamed(|name, shape| Some((text_name(name), shape.to_vec()))),
            Part::Unet | Part::Vae => index,
        };
        Ok(Self { index, config })
    }
}

/// As transformers has named the text encoder's tensors up to version 4; all versions read these names.
pub(super) fn text_name(name: &str) -> String {
    const PREFIX: &str = "text_model.";
    match name.starts_with(PREFIX) {
        true => name.to_owned(),
        false => format!("{PREFIX}{name}"),
    }
}

/// The small files of a model in diffusers' layout.
#[derive(Clone, Debug)]
pub(super) struct SmallFiles {
    /// The `config.json` of each of [`Part::ALL`].
    pub(super) configs: [String; 3],
    /// `scheduler_config.json`.
    pub(super) scheduler: String,
    /// `model_index.json`, where there was one.
    pub(super) model_index: Option<Map<String, Value>>,
    /// The folder of the tokenizer; OpenAI's where there is none.
    pub(super) tokenizer: Option<PathBuf>,
}

impl SmallFiles {
    /// Of a diffusers folder, which may have no `model_index.json`.
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

    /// Of Stable Diffusion 1.x.
    pub(super) fn stock() -> Self {
        let mut scheduler = SdConfig::default().scheduler;
        if let Some(keys) = scheduler.as_object_mut() {
            keys.insert("_diffusers_version".into(), stock::DIFFUSERS.into());
        }
        Self {
            configs: [stock::TEXT_ENCODER, stock::UNET, stock::VAE].map(str::to_owned),
            scheduler: pretty(&scheduler),
            model_index: None,
            tokenizer: None,
        }
    }
}

/// Where a model came from.
#[derive(Clone, Debug)]
pub struct SdSource {
    path: PathBuf,
    components: [Component; 3],
    scheduler: String,
    model_index: Option<Map<String, Value>>,
    tokenizer: Option<PathBuf>,
}

impl SdSource {
    /// `weights` are those that [`Part::ALL`] were built from.
    pub(super) fn new(path: &Path, files: SmallFiles, weights: [&Weights; 3]) -> Result<Self> {
        let [text_encoder, unet, vae] = files.configs;
        let [text_weights, unet_weights, vae_weights] = weights;
        Ok(Self {
            path: path.to_path_buf(),
            components: [
                Component::new(Part::TextEncoder, text_weights, text_encoder)?,
                Component::new(Part::Unet, unet_weights, unet)?,
                Component::new(Part::Vae, vae_weights, vae)?,
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

    pub(super) fn component(&self, part: Part) -> &Component {
        let [text_encoder, unet, vae] = &self.components;
        match part {
            Part::TextEncoder => text_encoder,
            Part::Unet => unet,
            Part::Vae => vae,
        }
    }

    /// Another VAE than the one of the folder or file.
    pub(super) fn replace_vae(&mut self, vae: Component) {
        self.components[2] = vae;
    }

    /// The folder of the tokenizer; none where it is OpenAI's.
    pub(super) fn tokenizer(&self) -> Option<&Path> {
        self.tokenizer.as_deref()
    }

    /// `scheduler_config.json`.
    pub(super) fn scheduler(&self) -> &str {
        &self.scheduler
    }

    /// `model_index.json`: of the parts that there are, and no other.
    pub(super) fn model_index(&self) -> Value {
        let mut index = self.model_index.clone().unwrap_or_else(|| {
            let none = json!([null, null]);
            let mut index = Map::new();
            index.insert("_diffusers_version".into(), stock::DIFFUSERS.into());
            index.insert("safety_checker".into(), none.clone());
            index.insert("feature_extractor".into(), none);
            index
        });
        // A scheduler or a tokenizer may be of one of several classes.
        let of_base = |key: &str, class: &str| {
            let pair = index.get(key)?.as_array()?;
            let named = pair.get(1)?.as_str()?.starts_with(class);
            named.then(|| Value::Array(pair.clone()))
        };
        let tokenizer = of_base("tokenizer", "CLIPTokenizer");
        let scheduler = of_base("scheduler", "");
        for entry in index.values_mut().filter(|entry| entry.is_array()) {
            *entry = json!([null, null]);
        }
        for part in Part::ALL {
            index.insert(part.folder().into(), json!(part.class()));
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

/// JSON for people, as a file.
pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
