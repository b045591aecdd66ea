//! `train` of a training of a code model.

use crate::job::auto::{CountOrAuto, FlagOrAuto};
use crate::job::declare::{choices, section};
use crate::job::limits::{MAX_ACCUMULATION, MAX_BATCH, MAX_EPOCHS, MAX_FACTOR};
use crate::job::optimizer::OptimizerName;
use crate::job::optimizer_params::OptimizerParams;
use crate::job::schema::{PresentKeys, ReadContext, SupportLevel, SupportReport, join};
use crate::job::values::FreeMap;

choices! {
    /// How the learning rate changes over the steps, after `warmup_steps` in which it rises from 0. As in transformers.
    pub enum LmScheduler("learning rate scheduler") {
        /// `lr` until the end.
        Constant = "constant", Works;
        /// Down to `min_lr` in a line.
        Linear = "linear", Works;
        /// Down to `min_lr` along half a cosine.
        Cosine = "cosine", Works;
        /// Warm up, stay, decay: `lr`, and in the last `decay_steps` down to `min_lr` in a line.
        Wsd = "wsd", Works;
    }
}

section! {
    /// Steps, optimizer and the other settings of the training loop.
    pub struct LmTrainConfig("train") {
        /// Total number of steps, including the steps before a resume. Instead of `epochs`.
        steps: Option<u64> = None, Works, shown "1000 without `epochs`";
        /// How often the data is trained on. Instead of `steps`.
        epochs: Option<u32> = None, Works;
        /// Rows per batch. `auto`: a step has `gradient_accumulation` rows on every machine, and as many of them are computed at a time as fit in
        /// memory.
        batch_size: CountOrAuto = CountOrAuto::Fixed(1), Works;
        /// Batches per step; with `batch_size: auto`, rows per step. The loss is the mean over the tokens of all of them, as in transformers 5.
        gradient_accumulation: u32 = 1, Works;
        /// Learning rate.
        lr: f64 = 1e-4, Works;
        /// Optimizer, as in `train` of the trainers of images.
        optimizer: OptimizerName = OptimizerName::AdamW, Works;
        /// Parameters of the optimizer: `weight_decay`, `betas`, …; an unknown one is an error that lists the known ones.
        optimizer_params: FreeMap = FreeMap::new(), Works;
        /// How the learning rate changes.
        lr_scheduler: LmScheduler = LmScheduler::Cosine, Works;
        /// Steps in which the learning rate rises from 0 to `lr`.
        warmup_steps: u64 = 0, Works;
        /// The learning rate at the end of `cosine`, `linear` and `wsd`.
        min_lr: f64 = 0.0, Works;
        /// `wsd`: the steps at the end in which the learning rate falls.
        decay_steps: Option<u64> = None, Works, shown "a tenth of the steps";
        /// Gradients are clipped to this norm; 0: no clipping.
        max_grad_norm: f64 = 1.0, Works;
        /// Compute the blocks again in the backward pass instead of keeping what they computed. The profiles `gpu_poor` and `extreme` do it
        /// anyway. `auto`: only where memory is short.
        gradient_checkpointing: FlagOrAuto = FlagOrAuto::Fixed(true), Works;
    }
    finish = finish;
    check = check;
}

/// The steps of a training whose config has neither `steps` nor `epochs`.
const DEFAULT_STEPS: u64 = 1000;

impl LmTrainConfig {
    /// The total number of steps of a training with this many steps in an epoch.
    #[must_use]
    pub fn total_steps(&self, steps_per_epoch: u64) -> u64 {
        match self.epochs {
            Some(epochs) => u64::from(epochs).saturating_mul(steps_per_epoch),
            None => self.steps.unwrap_or(DEFAULT_STEPS),
        }
    }
}

fn finish(train: &mut LmTrainConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if train.steps.is_some() && train.epochs.is_some() {
        cx.error_at("epochs", "cannot be used together with `steps`: remove one of them");
    }
    if train.steps == Some(0) {
        cx.error_at("steps", "expected at least 1, found 0");
    }
    if let Some(epochs) = train.epochs {
        cx.check_not_zero("epochs", epochs);
        cx.check_at_most("epochs", epochs, MAX_EPOCHS);
    }
    if train.batch_size == CountOrAuto::Auto && train.gradient_accumulation == 1 {
        let message = "`auto` computes as many of a step's rows at a time as fit in memory, and a step has one row: set \
                       `gradient_accumulation` to the rows of a step, or `batch_size` to a number";
        cx.error_at("batch_size", message);
    }
    for (key, value, max) in [
        ("batch_size", train.batch_size.fixed().unwrap_or(1), MAX_BATCH),
        ("gradient_accumulation", train.gradient_accumulation, MAX_ACCUMULATION),
    ] {
        cx.check_not_zero(key, value);
        cx.check_at_most(key, value, max);
    }
    cx.check_in_range("lr", train.lr, 0.0..=MAX_FACTOR);
    cx.check_in_range("min_lr", train.min_lr, 0.0..=MAX_FACTOR);
    cx.check_in_range("max_grad_norm", train.max_grad_norm, 0.0..=MAX_FACTOR);
    if train.lr >= 0.0 && train.min_lr > train.lr {
        cx.error_at(
            "min_lr",
            format!("expected at most `lr`, which is {}, found {}", train.lr, train.min_lr),
        );
    }
    if train.min_lr > 0.0 && train.lr_scheduler == LmScheduler::Constant {
        cx.error_at("min_lr", "has no effect on `lr_scheduler: constant`: remove it");
    }
    if present.has("decay_steps") && train.lr_scheduler != LmScheduler::Wsd {
        cx.error_at("decay_steps", "is for `lr_scheduler: wsd`: remove it, or use that");
    }
    if train.decay_steps == Some(0) {
        cx.error_at(
            "decay_steps",
            "expected at least 1, found 0; for a constant rate use `lr_scheduler: constant`",
        );
    }
    if train.epochs.is_none() {
        let steps = train.steps.unwrap_or(DEFAULT_STEPS);
        let which = match train.steps {
            Some(_) => "`steps`, which is",
            None => "the steps of a training without `steps` and `epochs`,",
        };
        for (key, value) in [
            ("warmup_steps", train.warmup_steps),
            ("decay_steps", train.decay_steps.unwrap_or(0)),
        ] {
            if value > steps {
                cx.error_at(key, format!("expected at most {which} {steps}, found {value}"));
            }
        }
    }
}

fn check(train: &LmTrainConfig, path: &str, report: &mut SupportReport) {
    // The parameters of an unsupported optimizer are not known.
    if matches!(train.optimizer.status(), SupportLevel::Works) {
        let checked = OptimizerParams::new(train.optimizer, &train.optimizer_params);
        for (key, problem) in checked.err().unwrap_or_default() {
            report.error(join(path, &format!("optimizer_params.{key}")), problem);
        }
    }
}
