//! Changes the strength that a LoRA file has by itself.

use super::adapter_file::AdapterFile;
use super::keys::{ParsedKey, TensorRole, parse_key};
use super::lora::{LoraEmbeddingTensors, LoraTensors};
use super::save::is_finite;
use crate::error::{EngineError, Result};
use crate::weights::{Index, StoredBytes};
use aitk_common::job::extract::ScaleTarget;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How a LoRA is rescaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rescaling {
    /// What the effect of the LoRA is multiplied by. A negative factor reverses it.
    pub factor: f64,
    /// Which tensors are changed.
    pub target: ScaleTarget,
    /// The number format of the result: f32, f16 or bf16.
    pub dtype: DType,
}

/// A rescaled LoRA.
#[derive(Debug)]
pub struct RescaledLora {
    /// Its tensors, on the CPU.
    pub tensors: BTreeMap<String, Tensor>,
    /// The metadata of the file.
    pub metadata: BTreeMap<String, String>,
    /// Tensors that belong to no LoRA layer and have no floats, as they are stored.
    pub copied: BTreeMap<String, StoredBytes>,
    /// Tensors that belong to no LoRA layer. They are copied.
    pub unknown: Vec<String>,
    /// Numbers that are too small for the number format. `None`: there are none.
    pub underflow: Option<Underflow>,
}

/// Numbers that became zero because the number format of the result cannot hold numbers that small.
#[derive(Clone, Debug, PartialEq)]
pub struct Underflow {
    /// How many there are.
    pub numbers: u64,
    /// The tensor with the largest share of them.
    pub worst: String,
    /// Their share of the numbers of that tensor that were not zero, above 0 and at most 1.
    pub share: f64,
    /// The name of the number format.
    pub format: &'static str,
}

/// Rescales a LoRA file of any dialect. `go_on` gets the number of tensors that are done and of all; if it returns `false`, the
/// result is `None`.
///
/// # Errors
/// When the file is damaged or no LoRA, or when a number does not fit into the number format.
pub fn rescale_lora(
    path: &Path,
    rescaling: Rescaling,
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Option<RescaledLora>> {
    let Rescaling { factor, target, dtype } = rescaling;
    if path.is_dir() {
        return Err(EngineError::bad_input(format!(
            "{}: this is a folder: give the LoRA's .safetensors file",
            path.display()
        )));
    }
    let file = AdapterFile::open_layout(path)?;
    let file_error = |reason: String| EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    };
    let index = Index::open(path)?;
    let names: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
    let stems_with = |role: TensorRole| -> BTreeSet<&str> {
        let stem = |name| match parse_key(name) {
            ParsedKey::Adapter(stem, found) if found == role => Some(stem),
            _ => None,
        };
        names.iter().map(String::as_str).filter_map(stem).collect()
    };
    let with_alpha = stems_with(TensorRole::Alpha);
    let without_alpha = file
        .modules
        .iter()
        .find(|module| !with_alpha.contains(module.stem.as_str()));
    if let (ScaleTarget::Alpha, Some(module)) = (target, without_alpha) {
        return Err(file_error(format!(
            "layer `{}` has no alpha that could be scaled: set `scale_target: up_down`",
            module.stem
        )));
    }
    let mut ranks = BTreeMap::new();
    for module in &file.modules {
        let tensors = module.tensors.as_any();
        let of_lora = tensors.downcast_ref().map(LoraTensors::rank);
        let rank = of_lora.or_else(|| tensors.downcast_ref().map(LoraEmbeddingTensors::rank));
        if let Some(rank) = rank {
            ranks.insert(module.stem.as_str(), rank);
            continue;
        }
        let kind = module.tensors.kind();
        // Two whole matrices of a LoKr have an alpha that means nothing.
        let can_scale = match target {
            ScaleTarget::UpDown => ["LoKr", "LoHa", "whole difference"].contains(&kind),
            ScaleTarget::Alpha => kind == "LoHa",
        };
        if !can_scale {
            let instead = match kind {
                "LoKr" => "set `scale_target: up_down`",
                _ => "use it with another strength instead",
            };
            return Err(file_error(format!(
                "layer `{}` has {} {kind}, whose strength is not in its {}: {instead}",
                module.stem,
                if kind == "OFT" { "an" } else { "a" },
                match target {
                    ScaleTarget::UpDown => "matrices",
                    ScaleTarget::Alpha => "alpha",
                }
            )));
        }
    }
    let [first_whole, second_whole] = [TensorRole::LokrW1, TensorRole::LokrW2].map(stems_with);
    let each = factor.abs().sqrt();
    let (mut tensors, mut copied) = (BTreeMap::new(), BTreeMap::new());
    let mut underflow: Option<Underflow> = None;
    for (done, name) in (0..).zip(&names) {
        if !go_on(done, names.len() as u64) {
            return Ok(None);
        }
        let parsed = match parse_key(name) {
            ParsedKey::Adapter(stem, role) => Some((stem, role)),
            _ => None,
        };
        let scale = match (parsed, target) {
            (Some((_, TensorRole::Down | TensorRole::EmbeddingDown)), ScaleTarget::UpDown) => each,
            (Some((_, TensorRole::Up | TensorRole::EmbeddingUp)), ScaleTarget::UpDown) => each.copysign(factor),
            // One factor of a product, or the whole difference.
            (
                Some((
                    _,
                    TensorRole::Diff
                    | TensorRole::DiffB
                    | TensorRole::LokrW2
                    | TensorRole::LokrW2B
                    | TensorRole::HadaW2B,
                )),
                ScaleTarget::UpDown,
            ) => factor,
            (Some((_, TensorRole::Alpha)), ScaleTarget::Alpha) => factor,
            _ => 1.0,
        };
        if parsed.is_none()
            && let Some(stored) = index.read_stored(name)?
        {
            copied.insert(name.clone(), stored);
            continue;
        }
        let stored = index.read(name, DType::F32, &Device::Cpu)?;
        let is_finite_before = is_finite(&stored)?;
        let scaled = match parsed {
            Some((stem, TensorRole::Alpha)) => {
                let alpha = one_number(&stored).ok_or_else(|| file_error(format!("`{name}` is not one number")))?;
                // In sd-scripts an alpha of 0 means the rank.
                let alpha = match (alpha == 0.0, ranks.get(stem)) {
                    (true, Some(rank)) => *rank as f32,
                    _ => alpha,
                };
                Tensor::full((f64::from(alpha) * scale) as f32, stored.shape(), &Device::Cpu)?
            }
            _ if scale == 1.0 => stored,
            _ => (stored * scale)?,
        };
        let saved = scaled.to_dtype(dtype)?;
        // An alpha that the number format would round is kept as it is: it scales the whole layer.
        let is_rounded = matches!(parsed, Some((_, TensorRole::Alpha)))
            && one_number(&saved.to_dtype(DType::F32)?) != one_number(&scaled);
        let saved = if is_rounded { scaled.clone() } else { saved };
        // That of two whole matrices of a LoKr: ai-toolkit writes 9999999999, which is infinite in float16.
        let has_no_effect = matches!(
            parsed,
            Some((stem, TensorRole::Alpha)) if first_whole.contains(stem) && second_whole.contains(stem)
        );
        if !has_no_effect && !is_finite(&saved)? {
            return Err(file_error(match is_finite_before {
                true => format!(
                    "tensor `{name}` has numbers that {} cannot hold once they are multiplied by {scale}: set {}a target weight nearer to the \
                     current one",
                    name_of(dtype),
                    if dtype == DType::F32 {
                        ""
                    } else {
                        "`save_dtype: float32`, or "
                    }
                ),
                false => format!(
                    "tensor `{name}` has numbers that are not finite (NaN or infinite): the file is damaged, or of a training that failed; use \
                     another one"
                ),
            }));
        }
        if let Some((numbers, share)) = zeroed(&scaled, &saved)? {
            let found = underflow.get_or_insert_with(|| Underflow {
                numbers: 0,
                worst: name.clone(),
                share,
                format: name_of(dtype),
            });
            found.numbers += numbers;
            if share > found.share {
                (found.worst, found.share) = (name.clone(), share);
            }
        }
        tensors.insert(name.clone(), saved);
    }
    Ok(Some(RescaledLora {
        tensors,
        copied,
        metadata: file.metadata,
        unknown: file.unknown,
        underflow,
    }))
}

/// How many numbers are zero in the number format of the result alone, and their share of those that are not zero before. `None`: none.
fn zeroed(scaled: &Tensor, saved: &Tensor) -> candle_core::Result<Option<(u64, f64)>> {
    if saved.dtype() == scaled.dtype() {
        return Ok(None);
    }
    let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (scaled, saved) = (numbers(scaled)?, numbers(saved)?);
    let of_number = scaled.iter().zip(&saved).filter(|(scaled, _)| **scaled != 0.0);
    let (mut nonzero, mut zeroed) = (0u64, 0u64);
    for (_, saved) in of_number {
        nonzero += 1;
        zeroed += u64::from(*saved == 0.0);
    }
    Ok((zeroed > 0).then(|| (zeroed, zeroed as f64 / nonzero as f64)))
}

/// The only number of a tensor.
fn one_number(tensor: &Tensor) -> Option<f32> {
    match tensor.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).as_deref() {
        Ok([number]) => Some(*number),
        _ => None,
    }
}

fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}
