//! The training process: `sd_trainer`, `diffusion_trainer`.
//!
//! Run folder, names and resuming are ai-toolkit's (docs/run-folder.md), with these differences: saves are atomic, the resume point is chosen by step, and an optimizer's state is used only with its weights. Exact states are
//! in `<run folder>/.aitk/checkpoints`.

mod data;
mod folder;
mod image_batches;
mod latents;
mod loss_plot;
mod objective;
mod options;
mod preservation;
mod preview;
mod record;
mod resume;
mod run;
mod samples;
mod save_files;
mod saving;
mod switched_loras;
mod target;
mod text;
mod write;

pub use image_batches::image_batches;
pub use preview::{TrainingPreview, preview};

use super::context::{Context, LoadedModel};
use super::rate::Progress;
use crate::adapters::{LoraHandle, LoraPass, is_of_text, load_lora};
use crate::data::TrainingImage;
use crate::device;
use crate::error::{EngineError, Result};
use crate::families::{Conditioning, EncodedPrompts, ItemSize, Model};
use crate::residency::Residency;
use crate::training::{
    ConditioningCache, LossMasks, MicroBatch, NoiseDraw, TrainingCfg, batch_generator, loss, step_to,
};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::job::dtype::DType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::step_metrics::LOG_FILE;
use candle_core::Tensor;
use data::{StepBatch, TrainingData};
use folder::RunFolder;
use preservation::Preservation;
use record::StepRecorder;
use resume::NON_FINITE_CAUSES;
use run::{Run, trainer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use switched_loras::SwitchedLoras;
use target::Target;

/// After this many steps in a row without a finite loss or finite gradients a run fails; ai-toolkit counts such a loss
/// as zero and continues.
const MAX_NON_FINITE_STEPS: u64 = 25;
/// After this many in a row no state is saved, so that the last good one is kept.
const MAX_SAVED_NON_FINITE_STEPS: u64 = 5;

/// What a micro-batch is made of.
#[derive(Clone)]
struct BatchInputs {
    /// The latents of its images, on the device.
    latents: Vec<Tensor>,
    /// The latents of its control images, on the device. `None`: it has none.
    control: Option<Tensor>,
}

/// How the preservation loss of a micro-batch is computed.
struct PreservationPass {
    preservation: Preservation,
    /// Without the adapter, and with it.
    passes: [LoraPass; 2],
    handle: Arc<LoraHandle>,
}

/// What the items of a batch are conditioned on besides their prompts.
struct ItemInputs {
    sizes: Vec<ItemSize>,
    /// The latents of their control images.
    control: Option<Tensor>,
    /// The scale of the guidance.
    scale: f64,
}

impl ItemInputs {
    fn add_to(&self, process: &TrainerProcess, model: &dyn Model, conditioning: Conditioning) -> Result<Conditioning> {
        let conditioning = model.with_sizes(conditioning, &self.sizes)?;
        let conditioning = with_guidance(process, model, conditioning, self.scale)?;
        match &self.control {
            Some(control) => model.with_control(conditioning, std::slice::from_ref(control)),
            None => Ok(conditioning),
        }
    }
}

/// Predicts from noisy latents and time steps, with guidance if there is an unconditional conditioning.
fn predict(
    model: &dyn Model,
    cfg: Option<TrainingCfg>,
    (latents, timesteps): (&[Tensor], &Tensor),
    (unconditional, conditional): (Option<&Conditioning>, &Conditioning),
) -> Result<Vec<Tensor>> {
    match (cfg, unconditional) {
        (Some(cfg), Some(unconditional)) => cfg.predict(model, latents, timesteps, [unconditional, conditional]),
        _ => model.predict(latents, timesteps, conditional),
    }
}

/// The sizes of an item that SDXL is conditioned on.
fn image_size(item: &TrainingImage) -> ItemSize {
    let flipped = |(width, height): (u32, u32)| (height, width);
    ItemSize {
        original: flipped(item.size),
        crop: flipped(item.plan.crop),
        target: flipped(item.plan.bucket),
    }
}

/// Adds the guidance scale that a distilled model is trained at, or removes it.
fn with_guidance(
    process: &TrainerProcess,
    model: &dyn Model,
    conditioning: Conditioning,
    scale: f64,
) -> Result<Conditioning> {
    let train = &process.train;
    match train.bypass_guidance_embedding {
        true => Ok(model.without_guidance(conditioning)),
        false => model.with_guidance(conditioning, scale),
    }
}

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
        let data = TrainingData::open(process, seed, cx)?;
        samples::check_control_images(process, cx)?;

        // A model's own weights are trained in float32 on a GPU too, so that small updates are not rounded away, or in bfloat16
        // with stochastic rounding.
        let full_finetune = process.network.is_none() && cx.spec.device.kind != DeviceKind::Cpu;
        let dtype = if full_finetune && process.train.dtype != DType::BF16 {
            "float32"
        } else {
            process.train.dtype.name()
        };
        let compute = device::open_with_dtype(cx.spec.device, dtype)?;
        if full_finetune && process.train.dtype.name() != dtype {
            let configured = process.train.dtype.name();
            cx.log(
                "info",
                format!("computing in {dtype} (the config asks for {configured}): the model's own weights are trained"),
            );
        }
        for note in &compute.notes {
            cx.log("info", note.clone());
        }
        let mut prompts: Option<Arc<dyn EncodedPrompts>> = None;
        if text::frees_text_encoders(process) {
            let Some(encoded) = text::encode(process, &data, &compute, cx)? else {
                return Ok(None);
            };
            prompts = Some(Arc::new(encoded));
        }
        let without_text = prompts.is_some();
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
        } = cx.load_model(&process.model, &compute, target::trained_tensors(process), prompts)?;
        if let Some(lora) = &process.model.lora_path {
            let path = cx.local_path(lora)?;
            let mut loaded = load_lora(&mut model.parts(), &path, 1.0)?;
            // The prompts were encoded with its layers of the text encoders.
            loaded.unknown.retain(|name| !(without_text && is_of_text(name)));
            cx.log_loaded_lora(&path, &loaded);
        }

        let switched_loras = SwitchedLoras::load(process, &mut *model, cx)?;

        let residency =
            Residency::checkpointing(process.train.gradient_checkpointing || memory_options.gradient_checkpointing);
        model.set_residency(residency);
        let target = Target::new(process, &mut *model, seed, cx)?;
        let trainer = trainer(process, &target, &memory_options, compute.dtype, seed)?;
        let lr = crate::optim::base_lr(process.train.optimizer, process.train.lr);
        if lr != process.train.lr {
            cx.log(
                "info",
                format!(
                    "`{}` finds its own learning rate: `lr` {} is replaced by {lr}, as in ai-toolkit",
                    process.train.optimizer, process.train.lr
                ),
            );
        }
        let latents = match latents {
            Some(latents) => latents,
            None => latents::store(process, &vae_path, model.codec())?,
        };
        let metrics = StepRecorder::new(&folder.path);
        let mut run = Self {
            process,
            seed,
            folder,
            compute,
            target,
            trainer,
            memory_options,
            loss_kind: options::loss_kind(process),
            objective: objective::objective(process, &*model)?,
            data,
            latents,
            masks: LossMasks::default(),
            captions: ConditioningCache::default(),
            switched_loras,
            model,
            start_step: 0,
            last_checkpoint: None,
            interrupted_saves: Vec::new(),
            non_finite_steps: 0,
            metrics,
        };
        run.resume(cx)?;
        run.metrics.open(run.start_step)?;
        Ok(Some(run))
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
        let baseline =
            (self.start_step == 0 && !self.process.train.skip_first_sample) || self.process.train.force_first_sample;
        if baseline && self.start_step < steps {
            self.sample(cx, self.start_step, true)?;
        } else if self.start_step > 0 && self.start_step < steps {
            self.finish_last_checkpoint(cx)?;
        }
        if self.start_step < steps {
            cx.phase("training");
        }
        let mut progress = Progress::new();
        self.metrics.begin(self.start_step);
        // The number of steps of all attempts together.
        let total_steps = steps.saturating_sub(self.process.train.start_step.unwrap_or(0));
        for step in self.start_step..steps {
            if cx.stop.is_set() {
                return match self.non_finite_steps >= MAX_SAVED_NON_FINITE_STEPS {
                    false => self.save_and_stop(cx, step),
                    true => {
                        cx.log("warn", not_saved_message(step, self.non_finite_steps));
                        Ok(Outcome::stopped())
                    }
                };
            }
            for micro in 0..self.process.train.gradient_accumulation.max(1) {
                self.micro_batch(step, micro)?;
            }
            let update = self.data.updates_weights(step, self.process);
            let report = self.trainer.finish_step(step, update)?;
            let done = step + 1;
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
                || (done == steps && (non_finite >= total_steps || non_finite >= MAX_SAVED_NON_FINITE_STEPS))
            {
                return Err(EngineError::bad_input(format!(
                    "{non_finite} steps in a row, up to step {done}, had a loss or gradients that are not finite numbers, so nothing \
                     was learned. {NON_FINITE_CAUSES}. Earlier saves are kept"
                )));
            }
            if let Some(warning) = self.metrics.step(done, &report) {
                cx.log("warn", warning);
            }
            if done.is_multiple_of(self.process.logging.every()) || done == steps {
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
                if let Some(seconds) = self.metrics.seconds_per_step(done) {
                    values.insert("seconds_per_step".into(), seconds);
                }
                #[allow(clippy::cast_precision_loss)]
                values.insert("steps".into(), steps as f64);
                cx.events.emit(ChildEvent::Metrics { step: done, values });
            }
            progress.step(cx, done, steps);
            if done < steps {
                let save = self.process.save.is_due(done);
                if save && non_finite >= MAX_SAVED_NON_FINITE_STEPS {
                    cx.log("warn", not_saved_message(done, non_finite));
                } else if save {
                    self.save(cx, done)?;
                }
                let sample = self.process.sample.is_due(done) && !self.process.train.disable_sampling;
                if sample {
                    let start = Instant::now();
                    self.sample(cx, done, false)?;
                    // Sampling has its own phase and rate.
                    progress.exclude(start.elapsed());
                }
                if save || sample {
                    cx.phase("training");
                }
                if sample {
                    progress.report(cx, done, steps);
                }
            }
        }
        self.finish(cx)
    }

    /// Computes the loss and the gradients of one micro-batch. All random numbers come from the generator of (seed,
    /// step, micro-batch).
    fn micro_batch(&mut self, step: u64, micro: u64) -> Result<()> {
        let process = self.process;
        let step_batch = self.data.batch_of_step(step, micro, process);
        let mut generator = batch_generator(self.seed, step, micro);
        let captions = self.data.captions(&step_batch.batch, process, &mut generator);
        let cfg = options::training_cfg(process, &mut generator);
        let latents = self
            .data
            .latents(&step_batch.batch, &mut self.latents, self.model.codec())?;
        let latents = vec![latents.to_device(&self.compute.device)?];
        let control = self
            .data
            .control_latents(&step_batch.batch, &mut self.latents, self.model.codec())?;
        let control = control
            .map(|control| control.to_device(&self.compute.device))
            .transpose()?;
        let inputs = BatchInputs { latents, control };
        let shapes: Vec<Vec<usize>> = inputs.latents.iter().map(|latent| latent.dims().to_vec()).collect();
        let image_tokens = shapes.first().map_or(0, |shape| self.model.image_tokens(shape));
        let drawn = self
            .objective
            .draw(&mut generator, &shapes, image_tokens, &self.compute.device)?;

        let Some(handle) = self.target.handle().cloned() else {
            return self
                .forward_backward(step, &step_batch, (&captions, cfg), inputs, drawn, image_tokens)
                .map(drop);
        };
        let (strength, seed) = (
            self.data.datasets[step_batch.batch.dataset].options.network_weight,
            self.seed,
        );
        let pass = |name: &str| LoraPass {
            strength,
            dropout_seed: Some(format!("{seed}/{name}/{step}/{micro}").into()),
        };
        let training = pass("dropout");
        let Some(preservation) = Preservation::of(process) else {
            let run = || self.forward_backward(step, &step_batch, (&captions, cfg), inputs, drawn, image_tokens);
            return handle.in_pass(training, run).map(drop);
        };
        let of_captions = inputs.clone();
        let drawn = handle.in_pass(training, || {
            self.forward_backward(step, &step_batch, (&captions, cfg), of_captions, drawn, image_tokens)
        })?;
        let kept = PreservationPass {
            preservation,
            passes: [
                LoraPass {
                    strength: 0.0,
                    dropout_seed: None,
                },
                pass("preservation-dropout"),
            ],
            handle,
        };
        self.preserve(&kept, &step_batch, (&captions, cfg), inputs, &drawn)
    }

    /// Adds the gradients of the preservation loss of these captions and latents.
    fn preserve(
        &mut self,
        kept: &PreservationPass,
        step_batch: &StepBatch,
        (captions, cfg): (&[String], Option<TrainingCfg>),
        BatchInputs { latents, control }: BatchInputs,
        drawn: &NoiseDraw,
    ) -> Result<()> {
        let rules = &self.data.datasets[step_batch.batch.dataset].options.captions;
        let prompts = captions
            .iter()
            .map(|caption| kept.preservation.prompt(caption, rules.trigger_word()));
        let prompts: Vec<String> = prompts.collect();
        let (conditional, unconditional) = (self.encode_frozen(&prompts)?, self.unconditional(cfg, captions.len())?);
        let (process, model) = (self.process, &*self.model);
        let inputs = self.item_inputs(step_batch, control, cfg);
        let conditional = inputs.add_to(process, model, conditional)?;
        let unconditional = unconditional
            .map(|empty| inputs.add_to(process, model, empty))
            .transpose()?;
        let noisy = self.objective.noisy(&latents, drawn)?;
        let times = Tensor::from_vec(drawn.timesteps.clone(), drawn.timesteps.len(), &self.compute.device)?;
        let predict = || predict(model, cfg, (&noisy, &times), (unconditional.as_ref(), &conditional));
        let [without, with] = kept.passes.clone();
        let base = kept.handle.in_pass(without, predict)?;
        let factor = kept.preservation.multiplier * step_batch.weight;
        let forward = || preservation::loss(&predict()?, &base, factor);
        kept.handle
            .in_pass(with, || self.trainer.accumulate_preservation(forward))
    }

    /// Encodes prompts without the graph of a text encoder that is trained.
    fn encode_frozen(&mut self, prompts: &[String]) -> Result<Conditioning> {
        let model = &*self.model;
        match self.target.covers_text_encoder() {
            true => ConditioningCache::encode(prompts, model)?.detached_as(model.dtype()),
            false => self.captions.get(prompts, model),
        }
    }

    /// The empty prompt for so many items, if the training uses guidance. It is no caption: no text encoder is trained on it.
    fn unconditional(&mut self, cfg: Option<TrainingCfg>, items: usize) -> Result<Option<Conditioning>> {
        let empty = || vec![String::new(); items];
        cfg.map(|_| self.encode_frozen(&empty())).transpose()
    }

    /// What the items of a batch are conditioned on besides their prompts.
    fn item_inputs(&self, step_batch: &StepBatch, control: Option<Tensor>, cfg: Option<TrainingCfg>) -> ItemInputs {
        ItemInputs {
            sizes: self.data.items_of(&step_batch.batch).map(image_size).collect(),
            control,
            scale: cfg.map_or(self.process.train.cfg_scale, |cfg| cfg.scale),
        }
    }

    /// Computes the loss of these captions and latents, and adds or applies the gradients. Returns the noise that was used.
    fn forward_backward(
        &mut self,
        step: u64,
        step_batch: &StepBatch,
        (captions, cfg): (&[String], Option<TrainingCfg>),
        BatchInputs { latents, control }: BatchInputs,
        mut drawn: NoiseDraw,
        image_tokens: usize,
    ) -> Result<NoiseDraw> {
        let cached = match self.target.covers_text_encoder() {
            true => None,
            false => Some(self.encode_frozen(captions)?),
        };
        let unconditional = self.unconditional(cfg, captions.len())?;
        let (process, model) = (self.process, &*self.model);
        let mask = self.masks.get(self.data.items_of(&step_batch.batch), model.codec())?;
        let mask = mask.map(|mask| mask.to_device(&self.compute.device)).transpose()?;
        let inputs = self.item_inputs(step_batch, control, cfg);
        let with_inputs = |conditioning: Conditioning| inputs.add_to(process, model, conditioning);
        let unconditional = unconditional.map(with_inputs).transpose()?;
        let predict = |latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning| {
            predict(model, cfg, (latents, timesteps), (unconditional.as_ref(), conditioning))
        };
        if let Some(next) = self.objective.next_timesteps(&drawn, image_tokens)? {
            let conditioning = match &cached {
                Some(conditioning) => conditioning.clone(),
                None => ConditioningCache::encode(captions, model)?.detached_as(model.dtype())?,
            };
            let conditioning = with_inputs(conditioning)?;
            let noisy = self.objective.noisy(&latents, &drawn)?;
            let times = Tensor::from_vec(drawn.timesteps.clone(), drawn.timesteps.len(), &self.compute.device)?;
            let predicted = predict(&noisy, &times, &conditioning)?;
            drawn = step_to(&latents, &noisy, &predicted, &drawn, next)?;
        }
        let forward = || {
            let conditioning = match &cached {
                Some(conditioning) => conditioning.clone(),
                None => ConditioningCache::encode(captions, model)?,
            };
            let micro_batch = MicroBatch {
                latents: latents.clone(),
                drawn: drawn.clone(),
                conditioning: with_inputs(conditioning)?,
                weights: vec![step_batch.weight; step_batch.batch.items.len()],
                mask: mask.clone(),
            };
            loss(&predict, &*self.objective, self.loss_kind, &micro_batch)
        };
        let train = &self.process.train;
        let one_micro_batch = train.gradient_accumulation <= 1 && train.gradient_accumulation_steps == 1;
        if one_micro_batch && self.trainer.uses_fused_backward() {
            self.trainer.fused_step(step, forward)?;
        } else {
            self.trainer.accumulate(forward)?;
        }
        Ok(drawn)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod bf16_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod data_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod eight_bit_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod example_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod families_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod flux_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod full_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod kontext_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod lycoris_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod memory_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod our_lora;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod portable_tests;
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
mod sd35_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod text_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod transformer_runs;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod zimage_tests;
