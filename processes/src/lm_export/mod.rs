//! The `lm_export` process (docs/code-models.md): writes a language model as GGUF or as a Hugging Face folder, with LoRAs merged into it.
//!
//! Weights stay in their files: one tensor at a time is in memory.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod embedding_tests;
mod merged_model;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod peft_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use super::context::{Context, artifact_name};
use super::lm_train::model_folder::{is_model_file, write_model};
use super::rate::Progress;
use super::save_files::files_in_save;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::GgufExport;
use aitk_common::attempt::Outcome;
use aitk_common::fsutil::{self, TemporaryFolder};
use aitk_common::job::ProcessKind;
use aitk_common::job::lm_export::{LmExportFormat, LmExportProcess, LmExportType};
use candle_core::DType;
use merged_model::MergedModel;
use std::path::{Path, PathBuf};

/// Exports the model of the process.
///
/// # Errors
/// When the model or a LoRA cannot be used, or the result cannot be written.
pub(super) fn run(process: &LmExportProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    match export(process, cx) {
        Ok(()) => Ok(Outcome::Completed),
        Err(EngineError::Stopped) => Ok(Outcome::stopped()),
        Err(error) => Err(error),
    }
}

/// Checks the model, the LoRAs and the tokenizer by configs, names and shapes.
///
/// # Errors
/// The error with which [`run`] would end before it writes.
pub(super) fn check(process: &LmExportProcess, cx: &Context<'_>) -> Result<()> {
    let folder = model_folder(process, cx)?;
    let model = MergedModel::open(&folder, &loras(process, cx)?, true)?;
    if process.save.format == LmExportFormat::Gguf {
        GgufExport::new(&model.decoder, &folder, &cx.job.name, process.save.export_type())?;
    }
    Ok(())
}

fn export(process: &LmExportProcess, cx: &mut Context<'_>) -> Result<()> {
    cx.phase("opening model");
    let folder = model_folder(process, cx)?;
    let loras = loras(process, cx)?;
    let model = MergedModel::open(&folder, &loras, false)?;
    for ((path, _), loaded) in loras.iter().zip(&model.loras) {
        cx.log_loaded_lora(path, loaded);
    }
    if model.is_untied {
        let message = format!(
            "a LoRA changes the embedding layer, which is the output layer of this model too and stays as it is there: the result has an output \
             layer of its own, `lm_head.weight`, with the numbers of `{}`",
            model.decoder.embedding_name()
        );
        cx.log("warn", message);
    }
    let (root, path) = result_path(process, cx);
    if process.save.format == LmExportFormat::Hf {
        check_is_replaceable(&path, &folder, &loras)?;
    }
    fsutil::create_dir_all(fsutil::folder_of(&path))?;
    match process.save.format {
        LmExportFormat::Gguf => write_gguf(process, &model, &folder, &path, cx)?,
        LmExportFormat::Hf => write_folder(process, &model, &folder, &path, cx)?,
    }
    let files = match path.is_dir() {
        true => files_in_save(&path),
        false => vec![path.clone()],
    };
    let bytes: u64 = files
        .iter()
        .filter_map(|file| Some(std::fs::metadata(file).ok()?.len()))
        .sum();
    cx.log(
        "info",
        format!("{}: {:.1} MB", artifact_name(&root, &path), bytes as f64 / 1e6),
    );
    for file in files {
        cx.artifact("model", &root, &file, None, None);
    }
    Ok(())
}

/// The folder of the model.
fn model_folder(process: &LmExportProcess, cx: &Context<'_>) -> Result<PathBuf> {
    let folder = cx.local_path(&process.model.name_or_path)?;
    match folder.join("config.json").is_file() {
        true => Ok(folder),
        false => Err(EngineError::bad_input(format!(
            "{}: expected the folder of a language model, with config.json, tokenizer.json and .safetensors files",
            folder.display()
        ))),
    }
}

/// The LoRAs of the config, where they are on this machine, with their strengths.
fn loras(process: &LmExportProcess, cx: &Context<'_>) -> Result<Vec<(PathBuf, f64)>> {
    let loras = process.model.all_loras().into_iter();
    loras
        .map(|(path, strength)| Ok((cx.local_path(path)?, strength)))
        .collect()
}

/// Checks that a folder of this path may be replaced: it has the files of a model alone, as an earlier export wrote it, and nothing that this
/// export reads.
fn check_is_replaceable(path: &Path, model: &Path, loras: &[(PathBuf, f64)]) -> Result<()> {
    let refused = |found: &str| {
        Err(EngineError::bad_input(format!(
            "{}: the result would replace {found}: move it away, or choose another `output_folder`",
            path.display()
        )))
    };
    let Ok(existing) = path.canonicalize() else {
        return Ok(());
    };
    let is_replaced = |other: &Path| other.canonicalize().is_ok_and(|other| other.starts_with(&existing));
    if is_replaced(model) || loras.iter().any(|(lora, _)| is_replaced(lora)) {
        return refused("the model or the LoRA that is exported");
    }
    let Ok(entries) = std::fs::read_dir(path) else {
        return refused("what is there, which is no earlier export");
    };
    let are_of_model: Vec<bool> = entries
        .map(|entry| {
            let Ok(entry) = entry else { return false };
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            is_file && entry.file_name().to_str().is_some_and(is_model_file)
        })
        .collect();
    let is_export = !are_of_model.contains(&false) && path.join("config.json").is_file();
    match are_of_model.is_empty() || is_export {
        true => Ok(()),
        false => refused("what is there, which is no earlier export"),
    }
}

/// The folder in which the artifacts' names begin, and the path of the result. A second export of the same name goes into a folder of its
/// own.
fn result_path(process: &LmExportProcess, cx: &Context<'_>) -> (PathBuf, PathBuf) {
    let root = cx.output_root(Some(&process.output_folder));
    let name = process.result_name(&cx.job.name);
    let mut is_taken = false;
    for (index, other) in cx.job.process.iter().enumerate() {
        let ProcessKind::LmExport(other) = &other.kind else {
            continue;
        };
        if std::ptr::eq(&raw const **other, process) {
            let path = match is_taken {
                true => root.join(format!("process_{index}")).join(name),
                false => root.join(name),
            };
            return (root, path);
        }
        let has_same_folder = cx.has_staged_inputs() || other.output_folder == process.output_folder;
        is_taken |= has_same_folder && other.result_name(&cx.job.name) == name;
    }
    let path = root.join(name);
    (root, path)
}

fn write_gguf(
    process: &LmExportProcess,
    model: &MergedModel,
    folder: &Path,
    path: &Path,
    cx: &mut Context<'_>,
) -> Result<()> {
    let export = GgufExport::new(&model.decoder, folder, &cx.job.name, process.save.export_type())?;
    for note in &export.notes {
        cx.log("warn", note.clone());
    }
    let types: Vec<String> = export
        .types()
        .into_iter()
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    cx.log("info", format!("{} tensors: {}", export.len(), types.join(", ")));
    if path.is_dir() {
        return Err(EngineError::bad_input(format!(
            "{}: this is a folder, and the result is a file: move it away, or choose another `output_folder`",
            path.display()
        )));
    }
    cx.phase("exporting");
    let mut progress = Progress::new();
    let (mut done, total) = (0, export.len() as u64);
    let stop = cx.stop.clone();
    let tensor = |name: &str| {
        if stop.is_set() {
            return Err(EngineError::Stopped);
        }
        done += 1;
        progress.step(cx, done.min(total), total);
        model.tensor(name)
    };
    Ok(fsutil::write_atomic(path, |out| export.write(out, tensor))?)
}

fn write_folder(
    process: &LmExportProcess,
    model: &MergedModel,
    folder: &Path,
    path: &Path,
    cx: &mut Context<'_>,
) -> Result<()> {
    let dtype = match process.save.export_type() {
        LmExportType::F32 => DType::F32,
        LmExportType::F16 => DType::F16,
        _ => DType::BF16,
    };
    cx.phase("exporting");
    let mut progress = Progress::new();
    let (mut done, total) = (0, model.len() as u64);
    let stop = cx.stop.clone();
    let unfinished = TemporaryFolder::new(fsutil::folder_of(path), "export")?;
    let inner = unfinished.path().join("model");
    fsutil::create_dir_all(&inner)?;
    write_model(&inner, &model.decoder, folder, dtype, &mut |name, _| {
        if stop.is_set() {
            return Err(EngineError::Stopped);
        }
        done += 1;
        progress.step(cx, done.min(total), total);
        let tensor = model.tensor(name)?;
        merged_model::check_range(name, &tensor, dtype)?;
        Ok(tensor)
    })?;
    fsutil::remove(path)?;
    std::fs::rename(&inner, path).map_err(|error| EngineError::io(path, error))?;
    fsutil::sync_dir(fsutil::folder_of(path))?;
    Ok(())
}
