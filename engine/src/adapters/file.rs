//! Reads LoRA files of every supported dialect.

use super::control::control_lora;
use super::joined::split;
use super::keys::{ParsedKey, TensorRole, parse_key};
use super::names::{LayerIndex, LayerKey};
use super::origin::origin;
use super::tensors::{LoraModule, LoraTensors};
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A LoRA file that was read and checked. Its names are not matched to a model yet.
#[derive(Clone, Debug)]
pub struct LoraFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The layers, sorted by name.
    pub modules: Vec<LoraModule>,
    /// Keys that are not LoRA tensors.
    pub unknown: Vec<String>,
    /// The header's metadata.
    pub metadata: BTreeMap<String, String>,
}

#[derive(Default)]
struct LayerTensors {
    down: Option<Tensor>,
    up: Option<Tensor>,
    mid: Option<Tensor>,
    alpha: Option<f64>,
    scalar: Option<f64>,
}

impl LoraFile {
    /// Reads a `.safetensors` file, or the LoRA file in a folder (`pytorch_lora_weights.safetensors`,
    /// `adapter_model.safetensors`).
    ///
    /// # Errors
    /// When the file is not safetensors, is damaged, has another network type, or a layer lacks `down` or `up`.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(path, |index| index)
    }

    /// As [`Self::open`], but reads names and shapes only: every number is zero.
    pub(super) fn open_layout(path: &Path) -> Result<Self> {
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
        let mut layers: BTreeMap<String, LayerTensors> = BTreeMap::new();
        let mut unknown = Vec::new();
        for (key, shape) in keys {
            let (stem, role) = match parse_key(&key) {
                ParsedKey::Lora(stem, role) => (stem.to_owned(), role),
                ParsedKey::OtherNetwork(kind) => {
                    return Err(file_error(format!(
                        "tensor `{key}` belongs to {kind}; only LoRA and LoCon files can be used yet"
                    )));
                }
                ParsedKey::Unknown => {
                    unknown.push(key);
                    continue;
                }
            };
            let tensor = weights.get(shape, &key)?;
            let layer = layers.entry(stem).or_default();
            let scalar_of = |t: &Tensor| -> Result<f64> {
                match t.flatten_all()?.to_vec1::<f32>()?.as_slice() {
                    [v] => Ok(f64::from(*v)),
                    v => Err(file_error(format!(
                        "tensor `{key}` has {} numbers, expected one",
                        v.len()
                    ))),
                }
            };
            match role {
                TensorRole::Down => layer.down = Some(tensor),
                TensorRole::Up => layer.up = Some(tensor),
                TensorRole::Mid => layer.mid = Some(tensor),
                TensorRole::Alpha => layer.alpha = Some(scalar_of(&tensor)?),
                TensorRole::Scalar => layer.scalar = Some(scalar_of(&tensor)?),
            }
        }
        let mut modules = Vec::with_capacity(layers.len());
        for (stem, layer) in layers {
            let (down, up) = match (layer.down, layer.up) {
                (Some(down), Some(up)) => (down, up),
                (None, None) => {
                    unknown.push(format!("{stem}.alpha"));
                    continue;
                }
                (down, _) => {
                    let missing_half = if down.is_some() { "up (lora_B)" } else { "down (lora_A)" };
                    return Err(file_error(format!(
                        "layer `{stem}` has no {missing_half} matrix: the file is incomplete"
                    )));
                }
            };
            if down.rank() < 2 || up.rank() < 2 || down.dims()[0] != up.dims()[1] {
                return Err(file_error(format!(
                    "layer `{stem}`: down {:?} and up {:?} do not fit together",
                    down.dims(),
                    up.dims()
                )));
            }
            let scalar = layer.scalar.unwrap_or(1.0);
            modules.push(LoraModule {
                stem,
                tensors: LoraTensors {
                    down,
                    up,
                    mid: layer.mid,
                    alpha: layer.alpha,
                    scalar,
                },
            });
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
            metadata,
        })
    }

    /// Matches the file's names to the layers of a model. The second value is the names that match no layer. A missing
    /// alpha is read from peft's metadata; otherwise it is the rank. The LoRA of a layer that is several in the model is split.
    ///
    /// # Errors
    /// When such a layer has another size than those of the model.
    pub fn resolve(&self, index: &LayerIndex) -> Result<(BTreeMap<LayerKey, LoraTensors>, Vec<String>)> {
        let peft: Option<serde_json::Value> = self
            .metadata
            .get("lora_adapter_metadata")
            .and_then(|text| serde_json::from_str(text).ok());
        let mut resolved = BTreeMap::new();
        let mut unknown = self.unknown.clone();
        for module in &self.modules {
            let Some((named, (first, _))) = index.resolve(&module.stem).and_then(|n| Some((n, n.layers.first()?)))
            else {
                unknown.push(module.stem.clone());
                continue;
            };
            let mut tensors = module.tensors.clone();
            let rank = tensors.down.dims()[0] as f64;
            // In sd-scripts an alpha of 0 means the rank.
            let alpha = tensors
                .alpha
                .filter(|a| *a != 0.0 && a.is_finite())
                .or_else(|| peft_alpha(peft.as_ref()?, (named.part, first), rank))
                .unwrap_or(rank);
            tensors.alpha = Some(alpha);
            let (found, expected) = (tensors.up.dims()[0], named.rows());
            if named.is_converted() && found != expected {
                return Err(EngineError::WeightsFile {
                    path: self.path.clone(),
                    reason: format!(
                        "layer `{}`: the file's up matrix has {found} rows, the model's layers have {expected}{}",
                        module.stem,
                        self.origin()
                            .map_or_else(String::new, |origin| format!("; it was made for {origin}"))
                    ),
                });
            }
            for ((path, _), tensors) in named.layers.iter().zip(split(tensors, named)?) {
                resolved.insert((named.part, path.clone()), tensors);
            }
        }
        Ok((resolved, unknown))
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
            |module: &LoraModule| module.stem.starts_with("base_model.model.") && module.tensors.alpha.is_none();
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

/// Reads a layer's alpha from the metadata that diffusers writes (`unet.lora_alpha`, `unet.alpha_pattern`,
/// `unet.use_rslora`), or from peft's `adapter_config.json` (`lora_alpha`).
fn peft_alpha(peft: &serde_json::Value, (part, path): (&str, &str), rank: f64) -> Option<f64> {
    // `save_lora_adapter` of a model writes the keys without the part.
    let get = |key: &str| {
        let value = peft.get(format!("{part}.{key}")).or_else(|| peft.get(key));
        value.filter(|value| !value.is_null())
    };
    let by_pattern = get("alpha_pattern")
        .and_then(serde_json::Value::as_object)
        .and_then(|patterns| {
            patterns
                .iter()
                .find(|(p, _)| path == p.as_str() || path.ends_with(&format!(".{p}")))
                .and_then(|(_, v)| v.as_f64())
        });
    let alpha = by_pattern.or_else(|| get("lora_alpha")?.as_f64())?;
    let rslora = get("use_rslora").and_then(serde_json::Value::as_bool).unwrap_or(false);
    Some(if rslora { alpha * rank.sqrt() } else { alpha })
}
