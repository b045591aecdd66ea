//! The trainer process: `sd_trainer`, `diffusion_trainer`.
//!
//! Run folder, names and resume follow section 15 of the ai-toolkit config reference, with its suggestions: saves are
//! atomic, the resume point is chosen by step, an optimizer's state belongs to its weights. The exact state lies in
//! `<run folder>/.aitk/checkpoints`.

mod data;
mod folder;
mod options;
mod preview;
mod record;
mod resume;
mod samples;
mod saving;
mod target;
mod write;

pub use preview::{TrainingPreview, preview};

use super::rate::Progress;
use super::{Context, Loaded};
use crate::adapters::{Component, load_lora};
use crate::data::Dataset;
use crate::device;
use crate::error::{EngineError, Result};
use crate::models::sd::SdModel;
use crate::nn::VisitLayers;
use crate::optim::{Ema, Schedule, ScheduleParams};
use crate::residency::Residency;
use crate::samplers::{NoiseSchedule, PredictionType, SamplerParams};
use crate::training::{
    Contexts, Draw, Latents, LossOptions, Masks, MicroBatch, NoiseOptions, Trainer, TrainerOptions, batch_generator,
    draw, loss,
};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::memory_options::MemoryOptions;
use aitk_common::step_metrics::LOG_FILE;
use candle_core::Tensor;
use data::{Data, Turn};
use folder::RunFolder;
use record::StepRecord;
use std::collections::BTreeMap;
use std::time::Instant;
use target::Target;

/// Steps without a finite loss in a row after which a run gives up; ai-toolkit counts such a loss as zero and goes on.
const LOST_STEPS: u64 = 25;
/// Of so many in a row no state is saved any more, so that a good one stays.
const BAD_STEPS: u64 = 5;

fn not_saved(step: u64, lost: u64) -> String {
    format!("step {step} is not saved: {lost} steps in a row had a loss or gradients that are not finite numbers")
}

/// Runs one trainer process to its end, to a stop, or to a failure.
pub(super) fn run(process: &TrainerProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let mut run = Run::prepare(process, cx)?;
    run.train(cx)
}

/// Everything of a run that does not change while it trains, and the trainer.
struct Run<'a> {
    process: &'a TrainerProcess,
    seed: u64,
    folder: RunFolder,
    compute: device::Compute,
    model: SdModel,
    target: Target,
    trainer: Trainer,
    choices: MemoryOptions,
    schedule: NoiseSchedule,
    loss: LossOptions,
    noise: NoiseOptions,
    data: Data,
    latents: Latents,
    masks: Masks,
    contexts: Contexts,
    /// Steps done when the run began.
    start: u64,
    /// The newest checkpoint that is on disk.
    checkpointed: Option<u64>,
    /// Where attempts were interrupted whose step saves are there until another save is.
    interrupted: Vec<u64>,
    /// Steps in a row up to here, in attempts before this one too, without a finite loss or finite gradients.
    lost: u64,
    record: StepRecord,
}

impl<'a> Run<'a> {
    fn prepare(process: &'a TrainerProcess, cx: &mut Context<'_>) -> Result<Self> {
        options::check(process, &cx.job.name)?;
        let folder = RunFolder::open(process, cx)?;
        cx.log_file.open(&folder.path.join(LOG_FILE))?;
        cx.log_file.total(process.train.steps);
        // A seed that the config leaves open is chosen once: a run that goes on keeps the one it began with.
        let seed = process
            .training_seed
            .map(|s| s as u64)
            .or_else(|| resume::seed_so_far(cx.spec, &folder))
            .unwrap_or(cx.spec.seed);
        cx.artifact("config", &folder.root, &folder.config, None, None);

        // Data first: a mistake there shows within a second.
        let data = Data::open(process, seed, cx)?;

        cx.phase("loading model");
        // On a GPU too, a model's own weights are trained in float32, so that small changes are not rounded away.
        let whole = process.network.is_none() && cx.spec.device.kind != DeviceKind::Cpu;
        let dtype = if whole { "float32" } else { process.train.dtype.name() };
        let compute = device::compute(cx.spec.device, dtype)?;
        if whole && process.train.dtype.name() != dtype {
            let asked = process.train.dtype.name();
            cx.log(
                "info",
                format!("computing in {dtype} (the config asks for {asked}): the model's own weights are trained"),
            );
        }
        for note in &compute.notes {
            cx.log("info", note.clone());
        }
        let Loaded {
            mut model,
            vae_path,
            choices,
        } = cx.load_model(&process.model, &compute, target::of_the_model(process))?;
        if let Some(lora) = &process.model.lora_path {
            let path = cx.local(lora)?;
            let mut parts = parts(&mut model);
            let loaded = load_lora(&mut parts, &path, 1.0)?;
            cx.lora_loaded(&path, &loaded);
        }

        let residency =
            Residency::checkpointing(process.train.gradient_checkpointing || choices.gradient_checkpointing);
        (model.unet.residency, model.text_encoder.residency) = (residency, residency);
        let target = Target::of(process, &mut model, seed, cx)?;
        let trainer = trainer(process, &target, &choices)?;
        let lr = crate::optim::base_lr(process.train.optimizer, process.train.lr);
        if lr != process.train.lr {
            cx.log(
                "info",
                format!(
                    "`{}` finds its own learning rate: lr {} is read as {lr}, as ai-toolkit does",
                    process.train.optimizer, process.train.lr
                ),
            );
        }
        let params = SamplerParams::from_json(&model.scheduler_config)
            .map_err(|e| EngineError::bad_input(format!("scheduler_config.json: {e}")))?;
        let mut schedule =
            NoiseSchedule::new(&params).map_err(|e| EngineError::bad_input(format!("scheduler_config.json: {e}")))?;
        if process.model.is_v_pred {
            schedule.prediction_type = PredictionType::VPrediction;
        }
        let latents = Latents::new(
            &options::vae_fingerprint(&vae_path)?,
            &options::latent_space(process),
            &model.vae,
            model.unet.config().in_channels,
            compute.dtype,
            &compute.device,
        );
        let record = StepRecord::new(&folder.path);
        let mut run = Self {
            process,
            seed,
            folder,
            compute,
            target,
            trainer,
            choices,
            loss: options::loss(process),
            noise: options::noise(process, schedule.len()),
            schedule,
            data,
            latents,
            masks: Masks::default(),
            contexts: Contexts::default(),
            model,
            start: 0,
            checkpointed: None,
            interrupted: Vec::new(),
            lost: 0,
            record,
        };
        run.resume(cx)?;
        run.record.open(run.start)?;
        Ok(run)
    }

    fn train(&mut self, cx: &mut Context<'_>) -> Result<Outcome> {
        let steps = self.process.train.steps;
        self.note_interruption(cx);
        if self.start >= steps && self.folder.final_save().exists() {
            cx.log(
                "info",
                format!(
                    "the run is already at step {} of {steps}: nothing is left to do",
                    self.start
                ),
            );
            self.announce_final(cx)?;
            return Ok(Outcome::Completed);
        }
        if self.start < steps && !self.cache_latents(cx)? {
            return Ok(Outcome::stopped());
        }
        let baseline =
            (self.start == 0 && !self.process.train.skip_first_sample) || self.process.train.force_first_sample;
        if baseline && self.start < steps {
            self.sample(cx, self.start, true)?;
        } else if self.start > 0 && self.start < steps {
            self.make_up(cx)?;
        }
        if self.start < steps {
            cx.phase("training");
        }
        let mut clock = Progress::new();
        self.record.begin(self.start);
        // The steps of all attempts.
        let all = steps.saturating_sub(self.process.train.start_step.unwrap_or(0));
        for step in self.start..steps {
            if cx.stop.is_set() {
                return match self.lost >= BAD_STEPS {
                    false => self.stopped(cx, step),
                    true => {
                        cx.log("warn", not_saved(step, self.lost));
                        Ok(Outcome::stopped())
                    }
                };
            }
            for micro in 0..self.process.train.gradient_accumulation.max(1) {
                self.micro_batch(step, micro)?;
            }
            let update = self.data.updates(step, self.process);
            let report = self.trainer.finish_step(step, update)?;
            let done = step + 1;
            self.lost = if report.warning.is_some() { self.lost + 1 } else { 0 };
            if let Some(warning) = report.warning.clone() {
                cx.log("warn", warning);
            }
            let lost = self.lost;
            if lost >= LOST_STEPS || (done == steps && (lost >= all || lost >= BAD_STEPS)) {
                return Err(EngineError::bad_input(format!(
                    "{lost} steps in a row, up to step {done}, had a loss or gradients that are not finite numbers, so nothing \
                     was learned: is the base model or the LoRA that it started from damaged, or `train.lr` too high? What was \
                     saved before stays"
                )));
            }
            if let Some(warning) = self.record.step(done, &report) {
                cx.log("warn", warning);
            }
            if done.is_multiple_of(self.process.logging.every()) || done == steps {
                let mut values = BTreeMap::from([("learning_rate".to_owned(), report.lr)]);
                // JSON has no other numbers; the warning says that there is none.
                if report.loss.is_finite() {
                    values.insert("loss/loss".into(), report.loss);
                }
                if let Some(norm) = report.grad_norm {
                    values.insert("grad_norm".into(), norm);
                }
                if let Some(seconds) = self.record.seconds_per_step(done) {
                    values.insert("seconds_per_step".into(), seconds);
                }
                #[allow(clippy::cast_precision_loss)]
                values.insert("steps".into(), steps as f64);
                cx.events.emit(ChildEvent::Metrics { step: done, values });
            }
            clock.step(cx, done, steps);
            if done < steps {
                let save = self.process.save.is_due(done);
                if save && lost >= BAD_STEPS {
                    cx.log("warn", not_saved(done, lost));
                } else if save {
                    self.save(cx, done)?;
                }
                let sample = self.process.sample.is_due(done) && !self.process.train.disable_sampling;
                if sample {
                    let begun = Instant::now();
                    self.sample(cx, done, false)?;
                    // It has a phase and a rate of its own.
                    clock.leave_out(begun.elapsed());
                }
                if save || sample {
                    cx.phase("training");
                }
                if sample {
                    clock.tell(cx, done, steps);
                }
            }
        }
        self.finish(cx)
    }

    /// The loss of one micro-batch and its gradients. Everything random comes from the generator of (seed, step,
    /// micro-batch).
    fn micro_batch(&mut self, step: u64, micro: u64) -> Result<()> {
        let process = self.process;
        let turn = self.data.turn(step, micro, process);
        let mut generator = batch_generator(self.seed, step, micro);
        let captions = self.data.captions(&turn.batch, process, &mut generator);
        let latents = self.data.latents(&turn.batch, &mut self.latents, &self.model.vae)?;
        let latents = latents.to_device(&self.compute.device)?;
        let drawn = draw(&self.noise, &mut generator, latents.dims4()?, &self.compute.device)?;

        let Some(handle) = self.target.handle().cloned() else {
            return self.learn(step, &turn, &captions, latents, drawn);
        };
        let strength = self.data.datasets[turn.batch.dataset].options.network_weight;
        handle.multiplier.set(strength);
        // Until the backward pass is done, which may run blocks again.
        let masks = format!("{}/dropout/{step}/{micro}", self.seed);
        handle.set_training(Some(&masks));
        let result = self.learn(step, &turn, &captions, latents, drawn);
        handle.set_training(None);
        result
    }

    /// The loss of these captions and latents, and the gradients.
    fn learn(&mut self, step: u64, turn: &Turn, captions: &[String], latents: Tensor, drawn: Draw) -> Result<()> {
        let model = &self.model;
        let mask = self.masks.get(self.data.items_of(&turn.batch), &model.vae)?;
        let mask = mask.map(|mask| mask.to_device(&self.compute.device)).transpose()?;
        let known = if self.target.covers_text_encoder() {
            None
        } else {
            let contexts = &mut self.contexts;
            Some(contexts.get(captions, &model.tokenizer, &model.text_encoder, self.compute.dtype)?)
        };
        let (schedule, options, dtype) = (&self.schedule, &self.loss, self.compute.dtype);
        let forward = || {
            let context = match &known {
                Some(context) => context.clone(),
                None => Contexts::fresh(captions, &model.tokenizer, &model.text_encoder)?,
            };
            let micro_batch = MicroBatch {
                latents: latents.clone(),
                noise: drawn.noise.clone(),
                timesteps: drawn.timesteps.clone(),
                context,
                weights: vec![turn.weight; turn.batch.items.len()],
                mask: mask.clone(),
            };
            loss(&model.unet, schedule, options, &micro_batch, dtype)
        };
        let train = &self.process.train;
        let alone = train.gradient_accumulation <= 1 && train.gradient_accumulation_steps == 1;
        if alone && self.trainer.fused_backward() {
            self.trainer.apply(step, forward)
        } else {
            self.trainer.add(forward)
        }
    }

    /// Encodes all images ahead where they are cached. `false`: asked to stop.
    fn cache_latents(&mut self, cx: &mut Context<'_>) -> Result<bool> {
        let cached = |d: &Dataset| d.options.cache_latents || d.options.cache_latents_to_disk;
        let total: u64 = self
            .data
            .datasets
            .iter()
            .filter(|d| cached(d))
            .map(|d| d.items.len() as u64)
            .sum();
        if total == 0 {
            return Ok(true);
        }
        cx.phase("caching latents");
        let mut clock = Progress::new();
        let mut done = 0;
        for dataset in self.data.datasets.iter().filter(|d| cached(d)) {
            for item in &dataset.items {
                if cx.stop.is_set() {
                    return Ok(false);
                }
                let options = &dataset.options;
                self.latents.get(
                    item,
                    &self.model.vae,
                    options.cache_latents,
                    options.cache_latents_to_disk,
                )?;
                done += 1;
                clock.step(cx, done, total);
            }
        }
        Ok(true)
    }
}

fn parts(model: &mut SdModel) -> [(Component, &mut dyn VisitLayers); 2] {
    [
        (Component::TextEncoder, &mut model.text_encoder),
        (Component::Unet, &mut model.unet),
    ]
}

fn trainer(process: &TrainerProcess, target: &Target, choices: &MemoryOptions) -> Result<Trainer> {
    let train = &process.train;
    let params = target.params();
    let error = crate::training::optim_error;
    let optimizer =
        crate::optim::build(train.optimizer, params.clone(), &train.optimizer_params, train.lr).map_err(error)?;
    let schedule = Schedule::new(ScheduleParams {
        name: train.lr_scheduler.name(),
        params: &train.lr_scheduler_params,
        lr: crate::optim::base_lr(train.optimizer, train.lr),
        steps: train.steps,
    })
    .map_err(error)?;
    let ema = &train.ema_config;
    let ema = if ema.use_ema {
        Some(Ema::new(params.clone(), ema.ema_decay, false, 1.0).map_err(error)?)
    } else {
        None
    };
    let max_grad_norm = Some(train.max_grad_norm).filter(|n| *n > 0.0);
    Ok(Trainer::new(TrainerOptions {
        params,
        optimizer,
        schedule,
        max_grad_norm,
        ema,
        // The gradients of a LoRA are small.
        fused_backward: choices.fused_backward && matches!(target, Target::Model(_)),
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod data_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod eight_bit_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod full_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod memory_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod our_lora;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod quantised_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod record_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod replay;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
