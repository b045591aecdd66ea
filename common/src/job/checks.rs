//! Checks for combinations of keys that can never work, in this or a later release.

use super::arch::ArchName;
use super::dataset::DatasetConfig;
use super::limits::MAX_DATASETS;
use super::process::{ProcessType, TrainerProcess};
use super::schema::ReadContext;

/// Checks the keys of a training process against each other.
pub(crate) fn check_trainer(process: &TrainerProcess, cx: &mut ReadContext) {
    let train = &process.train;
    let model = &process.model;
    let has_trigger =
        process.trigger_word.is_some() || process.datasets.iter().any(|dataset| dataset.trigger_word.is_some());
    if model.use_flux_cfg && train.bypass_guidance_embedding && train.do_guidance_loss {
        cx.error_at(
            "model.use_flux_cfg",
            "cannot be used together with `train.bypass_guidance_embedding`",
        );
    }
    if train.unload_text_encoder && matches!(model.arch.name, ArchName::QwenImageEdit | ArchName::BooguImageEdit) {
        cx.error_at(
            "train.unload_text_encoder",
            format!(
                "cannot be used with `{}`, whose text encoder sees each control image",
                model.arch.name
            ),
        );
    }
    if train.diff_output_preservation {
        if !has_trigger {
            cx.error_at("train.diff_output_preservation", "needs a `trigger_word`");
        }
        if process.network.is_none() {
            cx.error_at("train.diff_output_preservation", "needs a `network`");
        }
    }
    if model.lora_path.is_some() && process.network.is_none() {
        cx.error_at(
            "model.lora_path",
            "needs a `network`: a full fine-tune would not save this LoRA; merge it into the model first",
        );
    }
    if train.blank_prompt_preservation && process.network.is_none() {
        cx.error_at("train.blank_prompt_preservation", "needs a `network`");
    }
    let cached = process
        .datasets
        .iter()
        .filter(|dataset| dataset.cache_text_embeddings)
        .count();
    if !train.cache_text_embeddings && cached != 0 && cached != process.datasets.len() {
        cx.error_at(
            "datasets",
            "`cache_text_embeddings` must be on for all data sets or for none",
        );
    }
    if cached != 0 && train.train_text_encoder {
        cx.error_at(
            "train.train_text_encoder",
            "cannot be used together with `cache_text_embeddings`",
        );
    }
    let bucketed = process.datasets.iter().filter(|dataset| dataset.buckets).count();
    if bucketed != 0 && bucketed != process.datasets.len() {
        cx.error_at("datasets", "`buckets` must be on for all data sets or for none");
    }
    let needs_data = matches!(
        process.kind,
        ProcessType::SdTrainer
            | ProcessType::DiffusionTrainer
            | ProcessType::UiTrainer
            | ProcessType::TextualInversionTrainer
            | ProcessType::ConceptSlider
    );
    let path = super::schema::join(cx.path(), "datasets");
    let is_reported = cx.errors.iter().any(|error| error.key.starts_with(&path));
    if needs_data && process.datasets.is_empty() && !is_reported {
        cx.error_at(
            "datasets",
            "a training needs at least one data set (`- folder_path: …`)",
        );
    }
    if needs_data {
        check_datasets(&process.datasets, cx);
    }
}

/// Checks that every data set has a path.
pub(crate) fn check_datasets(datasets: &[DatasetConfig], cx: &mut ReadContext) {
    cx.check_item_count("datasets", datasets.len(), MAX_DATASETS);
    for (index, dataset) in datasets.iter().enumerate() {
        if dataset.path().is_none() {
            cx.error_at(
                &format!("datasets[{index}]"),
                "a data set needs `folder_path` or `dataset_path`",
            );
        }
    }
}
