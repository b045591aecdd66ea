//! Reads adapter files of every supported dialect.

use super::control::control_lora;
use super::file_layer::{AdapterModule, FileLayer, RoleTensors};
use super::file_readers::read_layer;
use super::keys::{ParsedKey, TensorRole, parse_key};
use super::names::{LayerIndex, LayerKey};
use super::origin::origin;
use super::whole_layer::WHOLE_LAYER;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::models::stored_types::check_stored_types;
use crate::weights::{Index, Weights};
use candle_core::{DType, Device};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a file holds for each layer.
pub(super) type FileLayers = BTreeMap<LayerKey, Arc<dyn FileLayer>>;

/// A LoRA file, or one of another type of adapter, that was read and checked. Its names are not matched to a model yet.
#[derive(Clone, Debug)]
pub struct AdapterFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The layers, sorted by name.
    pub modules: Vec<AdapterModule>,
    /// Keys that are not LoRA tensors.
    pub unknown: Vec<String>,
    /// The names of layers that the file has as a whole difference (`.diff`).
    pub differences: Vec<String>,
    /// The header's metadata.
    pub metadata: BTreeMap<String, String>,
    /// The layers whose weight in the base model peft saved too, with the shapes. These numbers are not read.
    pub(super) base_weights: Vec<(String, Vec<usize>)>,
}

impl AdapterFile {
    /// Reads a `.safetensors` file, or the LoRA file in a folder (`pytorch_lora_weights.safetensors`,
    /// `adapter_model.safetensors`).
    ///
    /// # Errors
    /// When the file is not safetensors, is damaged, has an unsupported type of adapter, or a layer lacks a tensor.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(path, |index| index)
    }

    /// As [`Self::open`], but reads names and shapes only: every number is zero.
    pub fn open_layout(path: &Path) -> Result<Self> {
        Self::read(path, |index| index.shapes_only())
    }

    fn read(path: &Path, select: impl FnOnce(Index) -> Index) -> Result<Self> {
        let mut path = path.to_path_buf();
        if path.is_dir() {
            let names = ["pytorch_lora_weights.safetensors", "adapter_model.safetensors"];
            path = names
                .iter()
                .map(|n| path.join(n))
                .find(|p| p.is_file())
                .ok_or_else(|| {
                    EngineError::bad_input(format!(
                        "{}: no LoRA in this folder (looked for {})",
                        path.display(),
                        names.join(", ")
                    ))
                })?;
        }
        let index = Index::open(&path)?;
        let mut metadata: BTreeMap<String, String> = index.metadata().into_iter().collect();
        // peft's own files have their alpha in a file beside them.
        let beside = path.with_file_name("adapter_config.json");
        if path.file_name().is_some_and(|name| name == "adapter_model.safetensors") && beside.is_file() {
            let text = config::read_text(&beside).map_err(|error| EngineError::io(&beside, error))?;
            metadata.entry("lora_adapter_metadata".to_owned()).or_insert(text);
        }
        let mut keys: Vec<(String, Vec<usize>)> = index.tensors().map(|(n, s)| (n.to_owned(), s.to_vec())).collect();
        keys.sort();
        check_stored_types(&index, |name| matches!(parse_key(name), ParsedKey::Adapter(..)))?;
        let weights = Weights::from_index(select(index), DType::F32, &Device::Cpu);
        let file_error = |reason: String| EngineError::WeightsFile {
            path: path.clone(),
            reason,
        };

        if let Some(pattern) = find_regex_pattern(&metadata) {
            return Err(file_error(format!(
                "its alpha_pattern `{pattern}` is a regular expression, which is not supported yet; save the LoRA with an \
                 alpha for each layer (`.alpha` tensors, as sd-scripts does)"
            )));
        }

        if let Some(reason) = control_lora(&keys) {
            return Err(file_error(reason));
        }
        // The tensors of each layer, and the key of its first one.
        let mut layers: BTreeMap<String, (RoleTensors, String)> = BTreeMap::new();
        let (mut unknown, mut differences, mut base_weights) = (Vec::new(), Vec::new(), Vec::new());
        for (key, shape) in keys {
            let (stem, role) = match parse_key(&key) {
                ParsedKey::Adapter(stem, role) => (stem.to_owned(), role),
                ParsedKey::BaseWeight(stem) => {
                    base_weights.push((stem.to_owned(), shape));
                    continue;
                }
                ParsedKey::OtherNetwork(kind) => {
                    return Err(file_error(format!(
                        "tensor `{key}` belongs to {kind}, which is not supported: files of LoRA, LoCon, LoKr, LoHa, DoRA, OFT, BOFT and whole \
                         differences can be used"
                    )));
                }
                ParsedKey::Unknown => {
                    unknown.push(key);
                    continue;
                }
            };
            if role == TensorRole::Diff {
                differences.push(stem.clone());
            }
            let tensor = weights.get(shape, &key)?;
            let (layer, _) = layers
                .entry(stem)
                .or_insert_with(|| (RoleTensors::default(), key.clone()));
            if !role.is_number() {
                layer.tensors.insert(role, tensor);
                continue;
            }
            match tensor.flatten_all()?.to_vec1::<f32>()?.as_slice() {
                [number] => layer.numbers.insert(role, f64::from(*number)),
                numbers => {
                    return Err(file_error(format!(
                        "tensor `{key}` has {} numbers, expected one",
                        numbers.len()
                    )));
                }
            };
        }
        let mut modules = Vec::with_capacity(layers.len());
        let peft = peft_metadata(&metadata);
        for (stem, (mut layer, first_key)) in layers {
            layer.peft = peft.as_ref().and_then(|peft| product_scale(peft, &stem));
            match read_layer(&layer) {
                Some(Ok(tensors)) => modules.push(AdapterModule { stem, tensors }),
                Some(Err(reason)) => return Err(file_error(format!("layer `{stem}`: {reason}"))),
                None => unknown.push(first_key),
            }
        }
        if modules.is_empty() {
            return Err(file_error(
                "the file has no LoRA: none of its tensor names has a known LoRA suffix".to_owned(),
            ));
        }
        Ok(Self {
            path,
            modules,
            unknown,
            differences,
            metadata,
            base_weights,
        })
    }

    /// Matches the file's names to the layers of a model. The second value is the names that match no layer. A missing
    /// alpha is read from peft's metadata; otherwise it is the rank. The adapter of a layer that is several in the model is split.
    ///
    /// # Errors
    /// When such a layer has another size than those of the model.
    pub fn resolve(&self, index: &LayerIndex) -> Result<(FileLayers, Vec<String>)> {
        let peft = peft_metadata(&self.metadata);
        let mut resolved = BTreeMap::new();
        let mut unknown = self.unknown.clone();
        for module in &self.modules {
            let Some((named, (first, _))) = index.resolve(&module.stem).and_then(|n| Some((n, n.layers.first()?)))
            else {
                unknown.push(module.stem.clone());
                continue;
            };
            let (found, expected) = (module.tensors.outputs(), named.rows());
            if named.is_converted() && found != expected {
                return Err(EngineError::WeightsFile {
                    path: self.path.clone(),
                    reason: format!(
                        "layer `{}`: the file's {} has {found} rows, the model's layers have {expected}{}",
                        module.stem,
                        module.tensors.kind(),
                        self.origin()
                            .map_or_else(String::new, |origin| format!("; it was made for {origin}"))
                    ),
                });
            }
            let metadata_alpha = |rank| peft_alpha(peft.as_ref()?, (named.part, first), rank);
            let split = module.tensors.split(named, &metadata_alpha)?;
            for ((path, _), tensors) in named.layers.iter().zip(split) {
                let key = (named.part, path.clone());
                // ai-toolkit also saves the LoRA of such a layer, which changes nothing.
                let is_whole = |layer: &Arc<dyn FileLayer>| layer.kind() == WHOLE_LAYER;
                if resolved.get(&key).is_some_and(is_whole) && !is_whole(&tensors) {
                    continue;
                }
                let replaces = is_whole(&tensors);
                if resolved
                    .insert(key, tensors)
                    .is_some_and(|other| !replaces || is_whole(&other))
                {
                    return Err(EngineError::WeightsFile {
                        path: self.path.clone(),
                        reason: format!(
                            "layer `{path}` is in the file under two names, one of which is `{}`",
                            module.stem
                        ),
                    });
                }
            }
        }
        self.check_base_weights(index, &resolved, &mut unknown)?;
        Ok((resolved, unknown))
    }

    /// Checks the weights of the base model that peft saved beside the LoRA of an embedding layer. They are frozen, so the model has them. A name
    /// without an adapter is unknown.
    ///
    /// # Errors
    /// When the model has another number of rows: the vocabulary of the base model was changed.
    fn check_base_weights(&self, index: &LayerIndex, found: &FileLayers, unknown: &mut Vec<String>) -> Result<()> {
        for (stem, shape) in &self.base_weights {
            let named = index.resolve(stem).filter(|named| {
                let mut layers = named.layers.iter();
                layers.any(|(path, _)| found.contains_key(&(named.part, path.clone())))
            });
            let Some(named) = named else {
                unknown.push(format!("{stem}.base_layer.weight"));
                continue;
            };
            if shape.first() != Some(&named.rows()) {
                return Err(EngineError::WeightsFile {
                    path: self.path.clone(),
                    reason: format!(
                        "its `{stem}.base_layer.weight` has the shape {shape:?}, and the model has {} rows there: the vocabulary of the model \
                         that it was trained on was changed, so use that model",
                        named.rows()
                    ),
                });
            }
        }
        Ok(())
    }

    /// The family that the file was made for, and what shows it. `None`: nothing does.
    #[must_use]
    pub fn origin(&self) -> Option<String> {
        origin(&self.metadata, &self.modules)
    }

    /// Whether the file is one of peft's own, which have their alpha in `adapter_config.json`, and nothing says what it is.
    #[must_use]
    pub fn alpha_is_unknown(&self) -> bool {
        let without_alpha =
            |module: &AdapterModule| module.stem.starts_with("base_model.model.") && module.tensors.lacks_alpha();
        !self.metadata.contains_key("lora_adapter_metadata") && self.modules.iter().any(without_alpha)
    }

    /// The step and the epoch in `training_info`, if ai-toolkit or aitk wrote the file.
    #[must_use]
    pub fn training_info(&self) -> Option<(u64, u64)> {
        let info: serde_json::Value = serde_json::from_str(self.metadata.get("training_info")?).ok()?;
        Some((
            info.get("step")?.as_u64()?,
            info.get("epoch").and_then(serde_json::Value::as_u64).unwrap_or(0),
        ))
    }
}

/// Returns a key of `alpha_pattern` in peft's metadata that is a regular expression, not a plain suffix of a layer's
/// name. peft matches each key as `(.*\.)?(pattern)$`.
fn find_regex_pattern(metadata: &BTreeMap<String, String>) -> Option<String> {
    let peft: serde_json::Value = serde_json::from_str(metadata.get("lora_adapter_metadata")?).ok()?;
    let patterns = peft
        .as_object()?
        .iter()
        .filter(|(key, _)| key.ends_with("alpha_pattern"));
    let mut names = patterns
        .filter_map(|(_, value)| value.as_object())
        .flat_map(|object| object.keys());
    names
        .find(|name| name.contains(|c: char| !(c.is_alphanumeric() || matches!(c, '.' | '_' | '-'))))
        .cloned()
}

/// The metadata of peft, or of diffusers about its LoRAs.
fn peft_metadata(metadata: &BTreeMap<String, String>) -> Option<serde_json::Value> {
    serde_json::from_str(metadata.get("lora_adapter_metadata")?).ok()
}

/// The number of the first pattern (`alpha_pattern`, `rank_pattern`) that is the end of a layer's name.
fn of_pattern(patterns: &serde_json::Value, name: &str) -> Option<f64> {
    let mut patterns = patterns.as_object()?.iter();
    let (_, number) = patterns.find(|(end, _)| name == end.as_str() || name.ends_with(&format!(".{end}")))?;
    number.as_f64()
}

/// The alpha and the rank of a layer in peft's `adapter_config.json` of a LoKr or LoHa. peft multiplies a LoKr with alpha / rank also if both
/// of its matrices are whole.
fn product_scale(peft: &serde_json::Value, stem: &str) -> Option<[f64; 2]> {
    let of = |key: &str, patterns: &str| {
        let by_pattern = peft.get(patterns).and_then(|patterns| of_pattern(patterns, stem));
        by_pattern.or_else(|| peft.get(key)?.as_f64())
    };
    let (alpha, rank) = (of("alpha", "alpha_pattern")?, of("r", "rank_pattern")?);
    (rank > 0.0).then_some([alpha, rank])
}

/// Reads a layer's alpha from the metadata that diffusers writes (`unet.lora_alpha`, `unet.alpha_pattern`,
/// `unet.use_rslora`), or from peft's `adapter_config.json` (`lora_alpha`).
fn peft_alpha(peft: &serde_json::Value, (part, path): (&str, &str), rank: f64) -> Option<f64> {
    // `save_lora_adapter` of a model writes the keys without the part.
    let get = |key: &str| {
        let value = peft.get(format!("{part}.{key}")).or_else(|| peft.get(key));
        value.filter(|value| !value.is_null())
    };
    let by_pattern = get("alpha_pattern").and_then(|patterns| of_pattern(patterns, path));
    let alpha = by_pattern.or_else(|| get("lora_alpha")?.as_f64())?;
    let rslora = get("use_rslora").and_then(serde_json::Value::as_bool).unwrap_or(false);
    Some(if rslora { alpha * rank.sqrt() } else { alpha })
}
