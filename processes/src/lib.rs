//! What a job runs: the types of processes.
//!
//! [`run`] is the main function of an attempt: it runs the processes of the job in order. To add a process type, add a
//! file here and a line in `run_in_precision` of `run_job.rs`. The mathematics of a training step is in `aitk_engine::training`; here are its run folder, loop,
//! checkpoints, saved files and samples.

// The modules of the engine have the paths here that they have there, so that helpers of tests serve both crates.
use aitk_engine::{
    adapters, checkpointing, data, device, error, families, image_adapters, image_io, models, nn, optim, pipelines,
    rng, samplers, svd, training, weights,
};
#[cfg(test)]
use aitk_engine::{autograd, quant};

mod caption_rules;
mod context;
mod denoiser_lora;
mod events;
mod extension;
mod extract;
mod generate;
mod image_batches;
mod image_generator;
mod img2img;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod img2img_tests;
mod job_metadata;
mod language_model_check;
mod language_model_part;
mod lm_export;
mod lm_generate;
mod lm_train;
mod log_file;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod memory_tests;
mod non_finite;
mod preview_spec;
mod rate;
mod rescale_lora;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod rescale_lora_tests;
mod result_file;
mod run_folder;
mod run_job;
mod save_dtype;
mod save_files;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod shipped_example_tests;
mod step_recorder;
mod tensorboard;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
#[cfg(test)]
mod tests;
mod train;

pub use context::{Context, artifact_name, expand_home};
pub use events::{EventSink, OutputRequests, StopSignal};
pub use image_batches::image_batches;
pub use img2img::changed_image_sizes;
pub use language_model_check::check_language_model;
pub use log_file::LogFile;
pub use run_job::{run, run_with_requests};
pub use train::{
    TrainingPreview, check_control_generator, check_feature_extractor, check_image_adapter, check_settings, preview,
};
