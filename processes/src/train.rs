//! The training process: `sd_trainer`, `diffusion_trainer`.
//!
//! Run folder, names and resuming are ai-toolkit's (docs/run-folder.md), with these differences: saves are atomic, the resume
//! point is chosen by step, and an optimizer's state is used only with its weights. Exact states are in `<run
//! folder>/.aitk/checkpoints`.

mod adapter_options;
mod checkpoint;
mod controls;
mod data;
mod decorator;
mod embedding;
mod event_artifact;
mod features;
mod fingerprints;
mod image_adapter;
mod image_batches;
mod image_requests;
mod images_ahead;
mod latents;
mod learned_snr;
mod loss_plot;
mod lr_factors;
mod merging;
mod objective;
mod options;
mod paired_images;
mod preservation;
mod preview;
mod prompts;
mod resume;
mod run;
mod samples;
mod saving;
mod settings_check;
mod size_check;
mod sliders;
mod step;
mod switched_loras;
mod target;
mod text;
mod validation;
mod validation_loss;
mod write;

pub use controls::check_control_generator;
pub use features::check_feature_extractor;
pub(super) use image_batches::image_batches;
pub use preview::{TrainingPreview, preview};
pub use settings_check::{check_image_adapter, check_settings};

use super::context::{Context, LoadedModel};
use super::non_finite::{MAX_NON_FINITE_STEPS, NON_FINITE_STEPS_BEFORE_SAVING_STOPS};
use super::rate::Progress;
use super::run_folder::RunFolder;
use super::step_recorder::{StepMeasurements, StepRecorder};
use super::tensorboard;
use crate::adapters::{is_of_text, is_text_lora, load_lora};
use crate::checkpointing::Checkpointing;
use crate::device;
use crate::device::allocator::FreedMemory;
use crate::error::{EngineError, Result};
use crate::families::TextEmbeddings;
use crate::training::{ConditioningCache, LossMasks, SharedLearnedSnr};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::job::dtype::DType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::step_metrics::LOG_FILE;
use checkpoint::NON_FINITE_CAUSES;
use data::TrainingData;
use images_ahead::ImagesAhead;
use run::{Run, trainer};
use sliders::slider::Slider;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switched_loras::SwitchedLoras;
use target::TrainedParameters;
use validation::Validation;

fn not_saved_message(step: u64, non_finite: u64) -> String {
    format!("step {step} is not saved: {non_finite} steps in a row had a loss or gradients that are not finite numbers")
}

/// Runs one trainer process to its end, to a stop, or to a failure.
pub(super) fn run(process: &TrainerProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    match Run::prepare(process, cx)? {
        Some(mut run) => run.train(cx),
        None => Ok(Outcome::stopped()),
    }
}

impl<'a> Run<'a> {
    /// `None`: the run should stop.
    fn prepare(process: &'a TrainerProcess, cx: &mut Context<'_>) -> Result<Option<Self>> {
        options::check_supported(process, &cx.job.name)?;
        let folder = RunFolder::open(process, cx)?;
        cx.log_file.open(&folder.path.join(LOG_FILE))?;
        cx.log_file.set_total(process.train.steps);
        // A seed that the config does not set is chosen once: a resumed run keeps the seed that it started with.
        let seed = process
            .training_seed
            .map(|s| s as u64)
            .or_else(|| resume::resumed_seed(cx.spec, &folder))
            .unwrap_or(cx.spec.seed);
        cx.artifact("config", &folder.root, &folder.config, None, None);

        // The data sets are opened first, so that errors in them are reported within a second.
        if !controls::generate(process, cx)? {
            return Ok(None);
        }
        let mut data = TrainingData::open(process, seed, cx)?;
        samples::check_control_images(process, cx)?;
        let negative_prompts = prompts::negative_prompts(process, cx)?;
        let mut validation = Validation::open(process, cx)?;

        // A model's own weights are trained in float32 on a GPU too, so that small updates are not rounded away, or in bfloat16
        // with stochastic rounding.
        let is_finetune_on_gpu = process.trains_whole_model() && cx.spec.device.kind != DeviceKind::Cpu;
        let dtype = if is_finetune_on_gpu && process.train.dtype != DType::BF16 {
            "float32"
        } else {
            process.train.dtype.name()
        };
        let compute = device::open_with_dtype(cx.spec.device, dtype)?;
        if is_finetune_on_gpu && process.train.dtype.name() != dtype {
            let configured = process.train.dtype.name();
            cx.log(
                "info",
                format!("computing in {dtype} (the config asks for {configured}): the model's own weights are trained"),
            );
        }
        for note in &compute.notes {
            cx.log("info", note.clone());
        }
        let mut prompts: Option<Arc<dyn TextEmbeddings>> = None;
        if text::frees_text_encoders(process) {
            let Some(encoded) = text::encode(process, seed, &data, &compute, cx)? else {
                return Ok(None);
            };
            prompts = Some(Arc::new(encoded));
        }
        let has_no_text_encoders = prompts.is_some();
        let latents = match latents::are_cached(&data) && !resume::has_all_steps(cx.spec, &folder, process.train.steps)
        {
            true => match latents::encode(process, &data, &compute, cx)? {
                None => return Ok(None),
                encoded => encoded,
            },
            false => None,
        };
        cx.phase("loading model");
        let LoadedModel {
            mut model,
            vae_path,
            memory_options,
        } = cx.load_model(&process.model, &compute, target::weight_changes(process), prompts)?;
        if let Some(lora) = &process.model.lora_path {
            let path = cx.local_path(lora)?;
            // The prompts were encoded with its layers of the text encoders.
            if has_no_text_encoders && is_text_lora(&path)? {
                cx.log(
                    "info",
                    format!(
                        "{}: a LoRA of text encoders alone; the prompts were encoded with it",
                        path.display()
                    ),
                );
            } else {
                let mut loaded = load_lora(&mut model.parts(), &path, 1.0)?;
                loaded
                    .unknown
                    .retain(|name| !(has_no_text_encoders && is_of_text(name)));
                cx.log_loaded_lora(&path, &loaded);
            }
        }

        let switched_loras = SwitchedLoras::load(process, &mut *model, cx)?;

        let checkpointing =
            Checkpointing::each_block(process.train.gradient_checkpointing || memory_options.gradient_checkpointing);
        model.set_checkpointing(checkpointing);
        let device = (&compute.device, checkpointing);
        let features = features::load(process, &*model, device, cx)?;
        let target = TrainedParameters::new(process, &mut *model, (seed, checkpointing), cx)?;
        let trainer = trainer(process, &target, &memory_options, compute.dtype, seed)?;
        let configured = process.learning_rate();
        let lr = crate::optim::base_lr(process.train.optimizer, configured);
        if lr != configured {
            cx.log(
                "info",
                format!(
                    "`{}` finds its own learning rate: `lr` {} is replaced by {lr}, as in ai-toolkit",
                    process.train.optimizer, configured
                ),
            );
        }
        let latents = match latents {
            Some(latents) => latents,
            None => latents::store(process, &vae_path, model.codec())?,
        };
        samples::check_samplers(process, &*model)?;
        size_check::check_sizes(process, &*model)?;
        if let Some(validation) = &mut validation {
            size_check::check_validation(validation, &*model)?;
            validation.encode(model.codec())?;
        }
        let events = tensorboard::event_log(process, &folder.path, cx);
        let metrics = StepRecorder::new(&folder.path, events);
        let images_ahead = ImagesAhead::for_device(&compute.device);
        if features
            .as_ref()
            .is_some_and(|features| features.extractor.sees_pixels())
        {
            data.keep_pixels();
        }
        let mut run = Self {
            process,
            seed,
            folder,
            compute,
            target,
            trainer,
            memory_options,
            loss: options::loss_options(process),
            latent_options: options::latent_options(process),
            pixel_options: options::pixel_options(process),
            objective: objective::objective(process, &*model)?,
            data,
            latents,
            images_ahead,
            masks: LossMasks::default(),
            encoded_captions: ConditioningCache::default(),
            negative_prompts,
            switched_loras,
            slider: Slider::of(process, seed).map(Arc::new),
            model,
            start_step: 0,
            configured_start_step: None,
            last_checkpoint: None,
            interrupted_saves: Vec::new(),
            kept_saves: Vec::new(),
            first_samples: Vec::new(),
            non_finite_steps: 0,
            validation: validation.map(Arc::new),
            features,
            learned_snr: options::learns_snr(process).then(SharedLearnedSnr::default),
            validation_is_pending: false,
            has_merged: false,
            data_time: Duration::ZERO,
            metrics,
            stop: cx.stop.clone(),
        };
        run.resume(cx)?;
        run.metrics.open(run.start_step)?;
        Ok(Some(run))
    }

    /// Ends a run that was told to stop, after `step` steps.
    fn end_at(&mut self, cx: &mut Context<'_>, step: u64) -> Result<Outcome> {
        if self.non_finite_steps >= NON_FINITE_STEPS_BEFORE_SAVING_STOPS {
            cx.log("warn", not_saved_message(step, self.non_finite_steps));
            return Ok(Outcome::stopped());
        }
        self.save_and_stop(cx, step)
    }

    /// Whether the gradients of a step are returned to the operating system. On a CPU they are kept for the next step, but the save of a
    /// whole model after it reads tensors that are larger than the free memory between others.
    fn returns_gradients_after(&self, done: u64) -> bool {
        let saves = done == self.process.train.steps || self.process.save.is_due(done);
        let keeps = self.compute.device.is_cpu() && !self.memory_options.returns_freed_memory;
        saves && keeps && self.process.trains_whole_model()
    }

    fn train(&mut self, cx: &mut Context<'_>) -> Result<Outcome> {
        let steps = self.process.train.steps;
        self.record_interruption(cx);
        if self.start_step >= steps && self.folder.final_save().exists() {
            cx.log(
                "info",
                format!(
                    "the run is already at step {} of {steps}: nothing is left to do",
                    self.start_step
                ),
            );
            self.emit_final_save(cx)?;
            return Ok(Outcome::Completed);
        }
        if self.start_step < steps {
            self.sample_before_training(cx)?;
            if self.start_step > 0 {
                self.finish_last_checkpoint(cx)?;
            }
        }
        self.measure_missed_validation(cx)?;
        if self.start_step < steps {
            cx.phase("training");
        }
        let mut progress = Progress::new();
        self.metrics.begin(self.start_step);
        // The number of steps of all attempts together.
        let total_steps = steps.saturating_sub(self.process.train.start_step.unwrap_or(0));
        for step in self.start_step..steps {
            if cx.stop.is_set() {
                return self.end_at(cx, step);
            }
            let started = Instant::now();
            self.data_time = Duration::ZERO;
            self.trainer.begin_step(step);
            for micro in 0..self.process.train.gradient_accumulation.max(1) {
                match self.micro_batch(step, micro) {
                    Err(EngineError::Stopped) => return self.end_at(cx, step),
                    done => done?,
                }
            }
            let update = self.data.updates_weights(step, self.process);
            let done = step + 1;
            let returns_gradients = self.returns_gradients_after(done);
            if returns_gradients {
                FreedMemory::Release.apply();
            }
            let report = self.trainer.finish_step(step, update)?;
            if returns_gradients {
                FreedMemory::Retain.apply();
            }
            self.target.limit_norms(self.process)?;
            self.non_finite_steps = if report.warning.is_some() {
                self.non_finite_steps + 1
            } else {
                0
            };
            if let Some(warning) = report.warning.clone() {
                cx.log("warn", warning);
            }
            let non_finite = self.non_finite_steps;
            if non_finite >= MAX_NON_FINITE_STEPS
                || (done == steps && (non_finite >= total_steps || non_finite >= NON_FINITE_STEPS_BEFORE_SAVING_STOPS))
            {
                return Err(EngineError::bad_input(format!(
                    "{non_finite} steps in a row, up to step {done}, had a loss or gradients that are not finite numbers, so the model learned nothing from them. {NON_FINITE_CAUSES}. Earlier saves are kept"
                )));
            }
            let seconds = started.elapsed().as_secs_f64();
            let mut measured = StepMeasurements {
                validation: None,
                data_share: Some(self.data_time.as_secs_f64() / seconds).filter(|share| share.is_finite()),
                ..StepMeasurements::default()
            };
            if let Some(validation) = self.validation.clone().filter(|set| set.is_due(done, steps)) {
                let start = Instant::now();
                measured.validation = self.validation_loss(&validation, done, cx)?;
                self.validation_is_pending = measured.validation.is_none();
                progress.exclude(start.elapsed());
            }
            if let Some(warning) = self.metrics.step(done, &report, measured) {
                cx.log("warn", warning);
            }
            if done.is_multiple_of(self.process.logging.every()) || done == steps || measured.validation.is_some() {
                let mut values = BTreeMap::from([("learning_rate".to_owned(), report.lr)]);
                // JSON has only finite numbers; a warning was logged above.
                if report.loss.is_finite() {
                    values.insert("loss/loss".into(), report.loss);
                    if let Some(preservation) = report.preservation {
                        values.insert("loss/preservation".into(), preservation);
                        values.insert("loss/normal".into(), report.loss - preservation);
                    }
                }
                if let Some(norm) = report.grad_norm {
                    values.insert("grad_norm".into(), norm);
                }
                values.extend(measured.values().filter(|(_, value)| value.is_finite()));
                if let Some(seconds) = self.metrics.seconds_per_step(done) {
                    values.insert("seconds_per_step".into(), seconds);
                }
                #[allow(clippy::cast_precision_loss)]
                values.insert("steps".into(), steps as f64);
                cx.events.emit(ChildEvent::Metrics { step: done, values });
            }
            progress.step(cx, done, steps);
            if done < steps {
                let requested = self.take_requests(cx, done);
                let is_save_due = self.process.save.is_due(done) || requested.save;
                if is_save_due && non_finite >= NON_FINITE_STEPS_BEFORE_SAVING_STOPS {
                    cx.log("warn", not_saved_message(done, non_finite));
                } else if requested.save {
                    self.save_as_requested(cx, done)?;
                } else if is_save_due {
                    self.save(cx, done)?;
                }
                let is_sample_due =
                    (self.process.sample.is_due(done) || requested.samples) && !self.process.train.disable_sampling;
                if is_sample_due {
                    let start = Instant::now();
                    self.sample(cx, done, false)?;
                    // Sampling has its own phase and rate.
                    progress.exclude(start.elapsed());
                }
                if is_save_due || is_sample_due {
                    cx.phase("training");
                }
                if is_sample_due {
                    progress.report(cx, done, steps);
                }
            }
        }
        self.finish(cx)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod augmentation_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod bf16_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod controls_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod data_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod decorator_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod eight_bit_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod embedding_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod example_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod families_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod feature_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod flux_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod full_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod image_adapter_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod images_ahead_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod kontext_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod learned_snr_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod loss_target_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod lycoris_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod memory_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod merging_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod network_layer_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod our_lora_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod paired_image_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod portable_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod quantised_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod rate_and_norm_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod record_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod replay_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod request_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod resume_exactness;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod resume_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod sd35_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod short_caption_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod slider_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod swapping_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod text_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod transformer_test_runs;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod validation_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod zimage_tests;
