//! The state of a run.

use super::super::context::Context;
use super::super::run_folder::RunFolder;
use super::super::step_recorder::StepRecorder;
use super::data::Data;
use super::fit::RunFit;
use super::target::TrainedParameters;
use crate::checkpointing::Checkpointing;
use crate::data::tokens::DocumentTokenizer;
use crate::device::Compute;
use crate::error::Result;
use crate::models::causal_lm::CausalLm;
use crate::optim::Schedule;
use crate::training::{Trainer, TrainerOptions, optim_error};
use aitk_common::job::lm_trainer::LmTrainerProcess;
use aitk_common::plan::memory_options::MemoryOptions;
use candle_core::DType;
use std::path::PathBuf;

/// A training run.
pub(super) struct Run<'a> {
    pub(super) process: &'a LmTrainerProcess,
    pub(super) seed: u64,
    pub(super) folder: RunFolder,
    pub(super) compute: Compute,
    /// The folder of the base model on this machine.
    pub(super) model_folder: PathBuf,
    /// `None`: the model's folder has none.
    pub(super) tokenizer: Option<DocumentTokenizer>,
    pub(super) model: CausalLm,
    /// The model for measuring and completing, where the weights of `model` are tracked.
    pub(super) eval_model: Option<CausalLm>,
    pub(super) target: TrainedParameters,
    pub(super) trainer: Trainer,
    pub(super) memory_options: MemoryOptions,
    pub(super) data: Data,
    /// The sizes of steps.
    pub(super) fit: RunFit,
    /// The total number of steps.
    pub(super) steps: u64,
    /// The step at which this attempt starts: the number of finished steps.
    pub(super) start_step: u64,
    /// The step of the newest checkpoint on disk.
    pub(super) last_checkpoint: Option<u64>,
    /// Steps that were saved, without those whose saves retention has removed.
    pub(super) kept_saves: Vec<u64>,
    /// How many of the last steps in a row had no finite loss or gradients.
    pub(super) non_finite_steps: u64,
    /// The run was told to stop before it measured the held-out loss of its last step; the resumed run does.
    pub(super) validation_is_pending: bool,
    pub(super) metrics: StepRecorder,
}

impl Run<'_> {
    /// Computes steps in the sizes that the config has, or that were chosen.
    pub(super) fn apply_fit(&mut self) {
        self.data.order.set_batch(self.fit.batch_size());
        self.model.checkpointing =
            Checkpointing::each_block(self.fit.gradient_checkpointing() || self.memory_options.gradient_checkpointing);
    }
}

/// A trainer with a new optimizer, for a model that computes in `dtype`.
pub(super) fn trainer(
    process: &LmTrainerProcess,
    target: &TrainedParameters,
    (dtype, steps, seed): (DType, u64, u64),
    memory_options: &MemoryOptions,
    cx: &mut Context<'_>,
) -> Result<Trainer> {
    let train = &process.train;
    let params = target.params();
    let optimizer = crate::optim::build(train.optimizer, params.clone(), &train.optimizer_params, train.lr);
    let lr = crate::optim::base_lr(train.optimizer, train.lr);
    if lr != train.lr {
        let message = format!(
            "`{}` finds its own learning rate: `lr` {} is replaced by {lr}",
            train.optimizer, train.lr
        );
        cx.log("info", message);
    }
    let trainer = Trainer::new(TrainerOptions {
        params,
        optimizer: optimizer.map_err(optim_error)?,
        schedule: Schedule::of_language_model(train, lr, steps),
        max_grad_norm: Some(train.max_grad_norm).filter(|norm| *norm > 0.0),
        ema: None,
        // The gradients of a LoRA are small, so it needs no fused backward pass.
        fused_backward: memory_options.fused_backward && matches!(target, TrainedParameters::Model(_)),
    });
    Ok(match (dtype, target) {
        (DType::F16, _) => trainer.with_loss_scaling(),
        (DType::BF16, TrainedParameters::Model(_)) => trainer.with_stochastic_rounding(seed),
        _ => trainer,
    })
}
