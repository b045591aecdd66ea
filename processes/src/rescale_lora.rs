//! The `rescale_lora` process (docs/extract.md): changes the strength that a LoRA file has by itself.

use super::context::Context;
use super::job_metadata::{job_metadata, software};
use super::rate::Progress;
use super::result_file::ResultFile;
use super::save_dtype::save_dtype;
use crate::adapters::{Rescaling, Underflow, copied_lora_file_bytes, rescale_lora};
use crate::error::Result;
use aitk_common::attempt::Outcome;
use aitk_common::job::ProcessKind;
use aitk_common::job::arch::ArchName;
use aitk_common::job::extract::RescaleLoraProcess;
use std::collections::BTreeMap;

/// Rescales the LoRA of the process.
///
/// # Errors
/// When the file is damaged or no LoRA, or the result cannot be written.
pub(super) fn run(process: &RescaleLoraProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let is_own =
        |kind: &ProcessKind| matches!(kind, ProcessKind::RescaleLora(own) if std::ptr::eq(&raw const **own, process));
    let result = ResultFile::new(cx, is_own)?;
    let path = cx.local_path(&process.input_path)?;
    let rescaling = Rescaling {
        factor: process.current_weight / process.target_weight,
        target: process.scale_target,
        dtype: save_dtype(process.save_dtype, "save_dtype")?,
    };
    cx.phase("rescaling");
    let stop = cx.stop.clone();
    let mut progress = Progress::new();
    let rescaled = rescale_lora(&path, rescaling, &mut |done, total| {
        progress.step(cx, done, total);
        !stop.is_set()
    })?;
    let Some(rescaled) = rescaled else {
        return Ok(Outcome::stopped());
    };
    if let Some(first) = rescaled.unknown.first() {
        cx.log(
            "warn",
            format!(
                "{}: {} tensors belong to no LoRA layer and are copied as they are, such as `{first}`",
                path.display(),
                rescaled.unknown.len()
            ),
        );
    }
    if let Some(underflow) = &rescaled.underflow {
        // A few numbers among many that are much larger change nothing that could be seen.
        let level = if underflow.share >= NOTABLE_SHARE {
            "warn"
        } else {
            "info"
        };
        cx.log(level, underflow_message(underflow));
    }
    let metadata = match process.replace_meta {
        true => {
            let mut metadata = replaced_metadata(process, cx);
            // Without the alphas of peft the LoRA would have another strength.
            let of_file = rescaled.metadata.into_iter();
            metadata.extend(of_file.filter(|(key, _)| key == "lora_adapter_metadata"));
            metadata
        }
        false => rescaled.metadata,
    };
    cx.phase("saving");
    let bytes = copied_lora_file_bytes(&rescaled.tensors, &rescaled.copied, metadata)?;
    result.write(&bytes, cx)?;
    let total = (rescaled.tensors.len() + rescaled.copied.len()) as u64;
    progress.report(cx, total, total);
    cx.log(
        "info",
        format!("{}: the LoRA times {}", result.name(), rescaling.factor),
    );
    Ok(Outcome::Completed)
}

/// From this share of a tensor's numbers on it is a warning that they became zero.
const NOTABLE_SHARE: f64 = 0.01;

/// What became zero, and what to do about it.
fn underflow_message(underflow: &Underflow) -> String {
    format!(
        "{} numbers are too small for {} and became 0, most of them in `{}` ({:.1} % of its numbers): set `save_dtype: float32` to keep them",
        underflow.numbers,
        underflow.format,
        underflow.worst,
        underflow.share * 100.0
    )
}

/// The metadata of `replace_meta: true`.
fn replaced_metadata(process: &RescaleLoraProcess, cx: &Context<'_>) -> BTreeMap<String, String> {
    let mut metadata = job_metadata(cx.job);
    let arch = match (process.is_v2, process.is_xl) {
        (true, _) => ArchName::Sd2,
        (false, true) => ArchName::Sdxl,
        (false, false) => ArchName::Sd1,
    };
    let mut put = |key: &str, value: &str| metadata.insert(key.to_owned(), value.to_owned());
    put("ss_base_model_version", arch.base_model_version());
    if process.is_v2 {
        put("ss_v2", "True");
    }
    put("ss_output_name", &cx.job.name);
    put("software", &software());
    put("format", "pt");
    metadata
}
