//! The state of a training run.

use super::super::events::StopSignal;
use super::super::run_folder::RunFolder;
use super::super::step_recorder::StepRecorder;
use super::data::TrainingData;
use super::images_ahead::ImagesAhead;
use super::lr_factors::check_lr_factors;
use super::sliders::slider::Slider;
use super::switched_loras::SwitchedLoras;
use super::target::TrainedParameters;
use super::validation::Validation;
use crate::device::Compute;
use crate::error::Result;
use crate::families::Model;
use crate::optim::{Ema, Schedule, ScheduleParams};
use crate::training::{
    ConditioningCache, FeatureLoss, LatentOptions, LatentStore, LossMasks, LossOptions, Objective, PixelOptions,
    SharedLearnedSnr, SwappedParameters, Trainer, TrainerOptions,
};
use aitk_common::job::lr_factor::lr_factor;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::memory_options::MemoryOptions;
use candle_core::DType;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A training run.
pub(super) struct Run<'a> {
    pub(super) process: &'a TrainerProcess,
    pub(super) seed: u64,
    pub(super) folder: RunFolder,
    pub(super) compute: Compute,
    pub(super) model: Box<dyn Model>,
    pub(super) target: TrainedParameters,
    pub(super) trainer: Trainer,
    pub(super) memory_options: MemoryOptions,
    pub(super) objective: Box<dyn Objective>,
    pub(super) loss: LossOptions,
    pub(super) latent_options: LatentOptions,
    pub(super) pixel_options: PixelOptions,
    pub(super) data: TrainingData,
    pub(super) latents: LatentStore,
    pub(super) images_ahead: ImagesAhead,
    pub(super) masks: LossMasks,
    pub(super) encoded_captions: ConditioningCache,
    /// The negative prompts of `do_cfg`, from which those of each item are drawn. Empty: the empty prompt.
    pub(super) negative_prompts: Vec<String>,
    pub(super) switched_loras: SwitchedLoras,
    /// The slider that is trained. `None`: the training has one direction.
    pub(super) slider: Option<Arc<Slider>>,
    /// The step at which this attempt starts: the number of finished steps.
    pub(super) start_step: u64,
    /// The `train.start_step` of the run that wrote the checkpoint from which this one resumes.
    pub(super) configured_start_step: Option<u64>,
    /// The step of the newest checkpoint on disk.
    pub(super) last_checkpoint: Option<u64>,
    /// Steps at which earlier attempts were interrupted. Their step saves are removed after the next save.
    pub(super) interrupted_saves: Vec<u64>,
    /// Steps, also of earlier attempts, that were saved because of the config or because the user asked for it. Without those
    /// whose saves retention has removed.
    pub(super) kept_saves: Vec<u64>,
    /// The images of `first_sample` that this attempt made. Those of `sample` at step 0 do not replace them.
    pub(super) first_samples: Vec<PathBuf>,
    /// How many of the last steps in a row, also of earlier attempts, had no finite loss or gradients.
    pub(super) non_finite_steps: u64,
    /// The images on which the loss is measured now and then.
    pub(super) validation: Option<Arc<Validation>>,
    /// The network whose features of the predicted and of the true image are compared.
    pub(super) features: Option<FeatureLoss>,
    /// The learned weights of the loss (`train.learnable_snr_gos`).
    pub(super) learned_snr: Option<SharedLearnedSnr>,
    /// The run was told to stop before it measured the validation loss of its last step; the resumed run does.
    pub(super) validation_is_pending: bool,
    /// The network was merged into the model, in this or in an earlier attempt.
    pub(super) has_merged: bool,
    /// How long this step has waited for images, read and encoded them.
    pub(super) data_time: Duration,
    pub(super) metrics: StepRecorder,
    /// Tells the run to stop.
    pub(super) stop: StopSignal,
}

/// Makes a trainer with a new optimizer, for a model that computes in `dtype`.
pub(super) fn trainer(
    process: &TrainerProcess,
    target: &TrainedParameters,
    memory_options: &MemoryOptions,
    dtype: DType,
    seed: u64,
) -> Result<Trainer> {
    let train = &process.train;
    let params = target.params();
    let error = crate::training::optim_error;
    let names: Vec<&str> = params.iter().map(|param| &*param.name).collect();
    check_lr_factors(&train.lr_factors, &names)?;
    let factors: Vec<f64> = params
        .iter()
        .map(|param| lr_factor(&train.lr_factors, &param.name))
        .collect();
    let (name, options) = (train.optimizer, &train.optimizer_params);
    let optimizer = crate::optim::build_with_factors(name, params.clone(), &factors, options, process.learning_rate())
        .map_err(error)?;
    let schedule = Schedule::new(ScheduleParams {
        name: train.lr_scheduler.name(),
        params: &train.lr_scheduler_params,
        lr: crate::optim::base_lr(train.optimizer, process.learning_rate()),
        steps: train.steps,
    })
    .map_err(error)?;
    let ema = &train.ema_config;
    let ema = if ema.use_ema {
        Some(Ema::new(params.clone(), ema.ema_decay, ema.use_feedback, ema.param_multiplier).map_err(error)?)
    } else {
        None
    };
    let swapped = match train.do_paramiter_swapping {
        true => {
            let sizes = params.iter().map(|param| param.var.elem_count()).collect();
            Some(SwappedParameters::new(sizes, train.paramiter_swapping_factor, seed)?)
        }
        false => None,
    };
    let max_grad_norm = Some(train.max_grad_norm).filter(|n| *n > 0.0);
    let trainer = Trainer::new(TrainerOptions {
        params,
        optimizer,
        schedule,
        max_grad_norm,
        ema,
        // The gradients of a LoRA are small, so it needs no fused backward pass.
        fused_backward: memory_options.fused_backward && matches!(target, TrainedParameters::Model(_)),
    });
    let trainer = match swapped {
        Some(swapped) => trainer.with_swapped_parameters(swapped),
        None => trainer,
    };
    Ok(match (dtype, target) {
        (DType::F16, _) => trainer.with_loss_scaling(),
        (DType::BF16, TrainedParameters::Model(_)) => trainer.with_stochastic_rounding(seed),
        _ => trainer,
    })
}
