//! Checks for combinations of keys that can never work, in this or a later release.

use super::arch::ArchName;
use super::dataset::DatasetConfig;
use super::limits::MAX_DATASETS;
use super::process::{Img2ImgProcess, TrainerProcess};
use super::process_type::ProcessType;
use super::schema::{ReadContext, join};

impl TrainerProcess {
    /// Checks the keys of a training process against each other.
    pub(super) fn check_combinations(&self, cx: &mut ReadContext) {
        let train = &self.train;
        let model = &self.model;
        let has_trigger =
            self.trigger_word.is_some() || self.datasets.iter().any(|dataset| dataset.trigger_word.is_some());
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
            if self.network.is_none() {
                cx.error_at("train.diff_output_preservation", "needs a `network`");
            }
        }
        if model.lora_path.is_some() && self.network.is_none() {
            cx.error_at(
                "model.lora_path",
                "needs a `network`: a full fine-tune would not save this LoRA; merge it into the model first",
            );
        }
        if model.inference_lora_path.is_some() && self.network.is_none() {
            cx.error_at(
                "model.inference_lora_path",
                "needs a `network`: samples of a full fine-tune use the trained weights alone",
            );
        }
        if train.blank_prompt_preservation && self.network.is_none() {
            cx.error_at("train.blank_prompt_preservation", "needs a `network`");
        }
        let cached = self
            .datasets
            .iter()
            .filter(|dataset| dataset.cache_text_embeddings)
            .count();
        if !train.cache_text_embeddings && cached != 0 && cached != self.datasets.len() {
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
        let bucketed = self.datasets.iter().filter(|dataset| dataset.buckets).count();
        if bucketed != 0 && bucketed != self.datasets.len() {
            cx.error_at("datasets", "`buckets` must be on for all data sets or for none");
        }
        let needs_data = matches!(
            self.kind,
            ProcessType::SdTrainer
                | ProcessType::DiffusionTrainer
                | ProcessType::UiTrainer
                | ProcessType::TextualInversionTrainer
                | ProcessType::ConceptSlider
        );
        let path = join(cx.path(), "datasets");
        let is_reported = cx.errors.iter().any(|error| error.key.starts_with(&path));
        if needs_data && self.datasets.is_empty() && !is_reported {
            cx.error_at(
                "datasets",
                "a training needs at least one data set (`- folder_path: …`)",
            );
        }
        if needs_data {
            check_datasets(&self.datasets, cx);
        }
    }
}

impl Img2ImgProcess {
    /// Checks that every data set has a path.
    pub(super) fn check_dataset_paths(&self, cx: &mut ReadContext) {
        check_datasets(&self.datasets, cx);
    }
}

/// Checks that every data set has a path.
fn check_datasets(datasets: &[DatasetConfig], cx: &mut ReadContext) {
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
