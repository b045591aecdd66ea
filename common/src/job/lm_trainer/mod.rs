//! `type: lm_trainer`: trains a code model (a decoder-only language model) from token sequences, texts and code files.

mod dataset;
mod model;
mod network;
mod sample;
mod save;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod train;
mod validation;

pub use dataset::{LmDatasetConfig, LmDatasetKind};
pub use model::LmTrainerModelConfig;
pub use network::{LmNetworkConfig, LmNetworkType};
pub use sample::LmSampleConfig;
pub use save::LmSaveConfig;
pub use train::{LmScheduler, LmTrainConfig};
pub use validation::LmValidationConfig;

use super::auto::CountOrAuto;
use super::declare::section;
use super::limits::{MAX_BATCH_TOKENS, MAX_CONTEXT, MAX_DATASETS};
use super::logging::LoggingConfig;
use super::process_type::ProcessType;
use super::schema::{PresentKeys, ReadContext};

section! {
    /// A process that trains a code model.
    pub struct LmTrainerProcess("process") {
        /// `lm_trainer`.
        kind as "type": ProcessType = ProcessType::LmTrainer, Works, shown "required";
        /// Name of the run folder.
        name: Option<String> = None, Works, shown "`config.name`";
        /// The run folder is `training_folder/name`.
        training_folder: Option<String> = None, Works, shown "the job's";
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// Seed of everything random in the training. Absent: chosen once per job.
        training_seed: Option<i64> = None, Works;
        /// The base model.
        model [required]: LmTrainerModelConfig = LmTrainerModelConfig::default(), Works;
        /// The LoRA to train. Absent: the whole model is trained.
        network: Option<LmNetworkConfig> = None, Works;
        /// Training data.
        datasets [required]: Vec<LmDatasetConfig> = Vec::new(), Works;
        /// Tokens of a row: longer documents are split into documents of this length. `auto`: as many as fit in memory, up to the positions of the
        /// model and the longest document.
        context: CountOrAuto = CountOrAuto::Fixed(1024), Works;
        /// Put several documents into a row. A token attends only to its own document. False: a row for each document, padded to the longest
        /// one of its batch.
        packing: bool = true, Works;
        /// Share of the documents that are trained as fill-in-the-middle: prefix, suffix, middle.
        fim_rate: f64 = 0.0, Works;
        /// Share of these documents in the order suffix, prefix, middle (SPM).
        fim_spm_rate: f64 = 0.5, Works;
        /// Held-out documents on which the loss is measured. Absent: none.
        validation: Option<LmValidationConfig> = None, Works;
        /// The training loop.
        train: LmTrainConfig = LmTrainConfig::default(), Works;
        /// When and how to save.
        save: LmSaveConfig = LmSaveConfig::default(), Works;
        /// Completions of prompts during the training.
        sample: LmSampleConfig = LmSampleConfig::default(), Works;
        /// Logging.
        logging: LoggingConfig = LoggingConfig::default(), Works;
    }
    finish = finish;
}

fn finish(process: &mut LmTrainerProcess, present: &PresentKeys, cx: &mut ReadContext) {
    if present.has("datasets") && process.datasets.is_empty() {
        cx.missing_at("datasets", "needs at least one data set (`- path: …`)");
    }
    cx.check_item_count("datasets", process.datasets.len(), MAX_DATASETS);
    if let Some(context) = process.context.fixed() {
        check_context(process, context, cx);
    }
    cx.check_in_range("fim_rate", process.fim_rate, 0.0..=1.0);
    cx.check_in_range("fim_spm_rate", process.fim_spm_rate, 0.0..=1.0);
    // A job that was read before has every key.
    if process.fim_spm_rate != LmTrainerProcess::default().fim_spm_rate && process.fim_rate == 0.0 {
        cx.error_at(
            "fim_spm_rate",
            "has no effect without `fim_rate`: set it, or remove this key",
        );
    }
    if process.model.quantize && process.network.is_none() {
        let message = "only a frozen model is quantised, and without a `network` the whole model is trained: add one, or remove this key";
        cx.error_at("model.quantize", message);
    }
    if process.model.from_config && process.network.is_some() {
        let message = "a new model has nothing that a LoRA could change: remove `network`, or this key";
        cx.error_at("model.from_config", message);
    }
    if let Some(seed) = process.training_seed.filter(|seed| *seed < 0) {
        cx.error_at(
            "training_seed",
            format!("expected a whole number of at least 0, found {seed}"),
        );
    }
}

fn check_context(process: &LmTrainerProcess, context: u32, cx: &mut ReadContext) {
    if context < 2 {
        let message = format!("expected at least 2 tokens, found {context}: a token is predicted from those before it");
        cx.error_at("context", message);
    }
    cx.check_at_most("context", context, MAX_CONTEXT);
    let rows = process.train.batch_size.fixed().unwrap_or(1);
    if context <= MAX_CONTEXT && u64::from(context) * u64::from(rows) > MAX_BATCH_TOKENS {
        let message = format!(
            "expected at most {MAX_BATCH_TOKENS} tokens in a batch, found {rows} rows of {context}: use `gradient_accumulation`"
        );
        cx.error_at("train.batch_size", message);
    }
    if process.fim_rate > 0.0 && context < MIN_FIM_CONTEXT {
        let message = format!("needs a `context` of at least {MIN_FIM_CONTEXT} tokens: three of them mark the parts");
        cx.error_at("fim_rate", message);
    }
}

/// The shortest context of documents with parts that are marked.
pub const MIN_FIM_CONTEXT: u32 = 16;
