//! The `locon` and `lora` processes (docs/extract.md): a LoRA from the difference of two models.
//!
//! The formulas are those of ai-toolkit's `locon`; its `lora` never ran. The weights stay in their files: one layer of both models is
//! in memory at a time, and of the result only the factors.

mod layer;
mod models;
mod ranks;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use super::context::Context;
use super::job_metadata::{job_metadata, software};
use super::rate::Progress;
use super::result_file::ResultFile;
use super::save_dtype::save_dtype;
use crate::adapters::{is_finite, lora_file_bytes, python_json};
use crate::error::{EngineError, Result};
use crate::families::SelectedParts;
use aitk_common::attempt::Outcome;
use aitk_common::job::ProcessKind;
use aitk_common::job::arch::ArchName;
use aitk_common::job::dtype::DType as SaveDType;
use aitk_common::job::extract::ExtractProcess;
use candle_core::{DType, Device, Tensor};
use layer::{Extracted, LayerSettings, difference, extract};
use models::{LayerPair, ModelPair};
use ranks::RankRule;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Extracts the LoRA of the process.
///
/// # Errors
/// When the models cannot be read or do not fit together, nothing differs, or the result cannot be written.
pub(super) fn run(process: &ExtractProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let is_own =
        |kind: &ProcessKind| matches!(kind, ProcessKind::Extract(own) if std::ptr::eq(&raw const **own, process));
    let result = ResultFile::new(cx, is_own)?;
    let dtype = save_dtype(process.dtype.unwrap_or(SaveDType::F16), "dtype")?;
    let selected = SelectedParts {
        denoiser: process.extract_unet.unwrap_or(true),
        text_encoders: process.extract_text_encoder.unwrap_or(true),
    };
    cx.phase("opening models");
    let model = |key: &str, path: Option<&String>| match path {
        Some(path) => cx.local_path(path),
        None => Err(EngineError::bad_input(format!("`config.{key}` is missing"))),
    };
    let base = model("base_model", cx.job.config.base_model.as_ref())?;
    let tuned = model("extract_model", cx.job.config.extract_model.as_ref())?;
    let ModelPair { arch, layers, left_out } = models::open(&base, &tuned, selected)?;
    if !left_out.is_empty() {
        cx.log(
            "info",
            format!(
                "{} has no {}: it counts as unchanged",
                tuned.display(),
                left_out.join(" and no ")
            ),
        );
    }
    let total = layers.len() as u64;
    let mut lora = ExtractedLora::new(dtype);
    let mut progress = Progress::new();
    cx.phase("extracting");
    for (done, pair) in (0..).zip(&layers) {
        if cx.stop.is_set() {
            return Ok(Outcome::stopped());
        }
        progress.keep_alive(cx, done, total);
        if let Some(settings) = LayerSettings::of(process, &pair.base) {
            lora.add(pair, settings, [base.as_path(), tuned.as_path()])?;
        }
        progress.step(cx, done + 1, total);
    }
    if lora.tensors.is_empty() {
        return Err(EngineError::bad_input(format!(
            "{} and {}: no layer that is extracted differs, so there is nothing to extract: check `base_model` and `extract_model`",
            base.display(),
            tuned.display()
        )));
    }
    cx.phase("saving");
    cx.log("info", lora.summary(total));
    let metadata = metadata(process, arch, cx);
    result.write(&lora_file_bytes(&lora.tensors, metadata)?, cx)?;
    Ok(Outcome::Completed)
}

/// The LoRA so far.
struct ExtractedLora {
    dtype: DType,
    tensors: BTreeMap<String, Tensor>,
    /// The rank of each layer with factors.
    ranks: Vec<usize>,
    whole: usize,
    /// The squares of the Frobenius norms of all differences, and of what of them is not in the LoRA.
    squares: [f64; 2],
}

impl ExtractedLora {
    fn new(dtype: DType) -> Self {
        Self {
            dtype,
            tensors: BTreeMap::new(),
            ranks: Vec::new(),
            whole: 0,
            squares: [0.0; 2],
        }
    }

    /// Adds a layer, unless it is the same in both models.
    fn add(&mut self, pair: &LayerPair, settings: LayerSettings, models: [&Path; 2]) -> Result<()> {
        let Some(delta) = difference(pair, models)? else {
            return Ok(());
        };
        let name = &pair.base.saved_name;
        let extracted = extract(&delta, settings)?;
        let square = layer::square(&delta)?;
        self.squares[0] += square;
        match extracted {
            Extracted::Whole => {
                self.whole += 1;
                self.insert(format!("{name}.diff"), &delta)?;
            }
            Extracted::Factors(factors) => {
                self.squares[1] += factors.residual(&delta)?;
                self.ranks.push(factors.rank());
                let [down, up] = pair.base.names.matrices();
                self.insert(format!("{name}.{down}"), &factors.down)?;
                self.insert(format!("{name}.{up}"), &factors.up)?;
                if let Some(mid) = &factors.mid {
                    self.insert(format!("{name}.lora_mid.weight"), mid)?;
                }
                if pair.base.has_alpha() {
                    // In float32: bfloat16 has no exact number for every rank above 256.
                    let alpha = Tensor::new(&[factors.rank() as f32], &Device::Cpu)?;
                    self.tensors.insert(format!("{name}.alpha"), alpha);
                }
            }
        }
        Ok(())
    }

    fn insert(&mut self, name: String, tensor: &Tensor) -> Result<()> {
        let saved = tensor.to_dtype(self.dtype)?.contiguous()?;
        if !is_finite(&saved)? {
            return Err(EngineError::bad_input(format!(
                "`{name}` has numbers that {} cannot hold: set `dtype: float32`",
                self.dtype.as_str()
            )));
        }
        self.tensors.insert(name, saved);
        Ok(())
    }

    /// What was extracted, for the log.
    fn summary(&self, layers: u64) -> String {
        let ranks = match (self.ranks.iter().min(), self.ranks.iter().max()) {
            (Some(min), Some(max)) if min == max => format!(" of rank {min}"),
            (Some(min), Some(max)) => format!(" of ranks {min} to {max}"),
            _ => String::new(),
        };
        let whole = match self.whole {
            0 => String::new(),
            count => format!(", {count} layers kept whole"),
        };
        let extracted = self.ranks.len() + self.whole;
        let unchanged = layers.saturating_sub(extracted as u64);
        let [all, rest] = self.squares;
        format!(
            "{} layers{ranks}{whole}; {unchanged} layers are unchanged or left out; the LoRA differs from the difference of the models by \
             {:.2} % of it",
            self.ranks.len(),
            100.0 * (rest / all).sqrt()
        )
    }
}

/// The metadata of the file.
fn metadata(process: &ExtractProcess, arch: ArchName, cx: &Context<'_>) -> BTreeMap<String, String> {
    let mut metadata = job_metadata(cx.job);
    let rule = RankRule::of(process);
    let mut put = |key: &str, value: String| metadata.insert(key.to_owned(), value);
    put("ss_base_model_version", arch.base_model_version().to_owned());
    put("ss_output_name", cx.job.name.clone());
    let extraction = json!({
        "type": process.kind.name(),
        "mode": process.mode.name(),
        "linear": rule.parameter(false),
        "conv": rule.parameter(true),
    });
    put("extraction", python_json(&extraction, false));
    put("software", software());
    put("format", "pt".to_owned());
    metadata
}
