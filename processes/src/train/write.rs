//! Writes saves: a LoRA, a word, an adapter of images, a decorator, a whole model as one file, or a whole model as a diffusers folder.

use super::super::context::Context;
use super::super::job_metadata::{job_metadata, software};
use super::super::save_dtype::save_dtype;
use super::super::save_files::{files_in_save, replace_folder};
use super::run::Run;
use super::target::TrainedParameters;
use crate::adapters::{python_json, write_lora_file};
use crate::error::Result;
use crate::families::SaveOptions;
use aitk_common::fsutil;
use aitk_common::job::JobSpec;
use aitk_common::job::process::TrainerProcess;
use candle_core::Tensor;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

impl Run<'_> {
    /// Writes the trained weights after `step` steps to a file or folder in `save.dtype`, with the metadata of
    /// ai-toolkit's files, and emits it. The bytes depend only on the weights, the config and the step.
    pub(super) fn write_save(&mut self, cx: &mut Context<'_>, path: &Path, step: u64) -> Result<()> {
        let epoch = self.data.epoch(step, self.process);
        let metadata = metadata(self.process, cx.job, step, epoch);
        self.with_ema_weights(|run| run.write(path, metadata, step))?;
        self.emit_save(cx, path, step);
        Ok(())
    }

    fn write(&mut self, path: &Path, metadata: BTreeMap<String, String>, step: u64) -> Result<()> {
        let dtype = save_dtype(self.process.save.dtype, "save.dtype")?;
        let merged = self.merged_tensors()?;
        let trained: BTreeMap<String, Tensor> = match (&self.target, merged) {
            (TrainedParameters::Adapter(_), Some(merged)) => merged,
            (TrainedParameters::Adapter(network), None) => {
                let tensors = network.tensors(dtype)?;
                return Ok(fsutil::write_atomic(path, |out| {
                    write_lora_file(out, &tensors, metadata)
                })?);
            }
            (TrainedParameters::Embedding(word), _) => return word.write(path, metadata, step),
            (TrainedParameters::ImageAdapter(adapter), _) => return adapter.write(path, dtype, &metadata),
            (TrainedParameters::Decorator(decorator), _) => return decorator.write(path, dtype, &metadata),
            (TrainedParameters::Model(params), _) => params
                .iter()
                .map(|p| (p.name.clone(), p.var.as_detached_tensor()))
                .collect(),
        };
        let model = self.model.writer(
            &trained,
            SaveOptions {
                dtype,
                metadata,
                v_prediction: self.process.model.is_v_pred,
            },
        )?;
        if !self.folder.saves_folders() {
            return Ok(fsutil::write_atomic(path, |out| model.write_file(out))?);
        }
        replace_folder(path, |folder| model.write_folder(folder))
    }

    /// Emits the files of a save.
    pub(super) fn emit_save(&self, cx: &mut Context<'_>, path: &Path, step: u64) {
        let kind = match &self.target {
            TrainedParameters::Adapter(_) if self.process.merges_network() => "model",
            TrainedParameters::Adapter(_) => "lora",
            TrainedParameters::Model(_) => "model",
            TrainedParameters::Embedding(_) => "embedding",
            TrainedParameters::ImageAdapter(_) => "adapter",
            TrainedParameters::Decorator(_) => "decorator",
        };
        for file in files_in_save(path) {
            cx.artifact(kind, &self.folder.root, &file, Some(step), None);
        }
    }
}

/// The metadata of a save.
fn metadata(process: &TrainerProcess, job: &JobSpec, step: u64, epoch: u64) -> BTreeMap<String, String> {
    let mut metadata = job_metadata(job);
    let mut put = |key: &str, value: Value| {
        let text = value.as_str().map_or_else(|| python_json(&value, false), str::to_owned);
        metadata.insert(key.to_owned(), text);
    };
    put("training_info", json!({"step": step, "epoch": epoch}));
    put(
        "ss_base_model_version",
        process.model.arch.name.base_model_version().into(),
    );
    put("ss_output_name", job.name.clone().into());
    if let Some(trigger) = &process.trigger_word {
        let tag = json!({format!("1_{trigger}"): {trigger.as_str(): 1}});
        put("ss_tag_frequency", tag);
    }
    put("software", software().into());
    put("format", "pt".into());
    metadata
}
