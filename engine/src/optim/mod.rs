//! Optimizers, learning-rate schedules, gradient clipping and EMA. The whole state of an optimizer can be saved.
//!
//! Every optimizer does its operations in the order of its reference (torch, bitsandbytes, lion-pytorch, prodigyopt,
//! ai-toolkit), so that a run can be compared step by step. Fixtures: `tests/reference/make_optim.py`,
//! `make_optim8.py`, `make_optim_toolkit.py`.
//!
//! On the CPU an update is one pass over memory, in place and on all threads (`fused`, `inplace`, `kernels`). Prodigy
//! needs two passes, because it must know `d` first. Other devices use candle's operations; tests compare both ways.
//! D-Adaptation uses candle's operations on every device. The second moment that Adafactor and the automagics share
//! (`factored`) has CPU kernels for tensors of two or more dimensions (`factored_kernels`).

mod adafactor;
mod adagrad;
mod adamw;
mod ademamix;
mod automagic;
mod automagic2;
mod automagic3;
mod blockwise;
mod clip;
mod dadaptation;
mod ema;
mod factored;
mod factored_kernels;
mod fused;
mod inplace;
mod kernels;
mod lion;
mod moment;
mod prodigy;
mod saved;
mod schedule;
mod state_tensor;

pub use adamw::{Adam, AdamParams};
pub use clip::{clip_factor, clip_grad_norm, global_norm, scale_gradient, sum_of_squares};
pub use ema::Ema;
pub use moment::Precision;
pub use schedule::{Schedule, ScheduleParams};

use aitk_common::job::optimizer::OptimizerName;
use aitk_common::job::optimizer_params::OptimizerParams;
use candle_core::{Tensor, Var};
use std::collections::BTreeMap;

/// What can go wrong in an optimizer or a schedule.
#[derive(Debug, thiserror::Error)]
pub enum OptimError {
    /// The config names something that does not exist.
    #[error("train.{key}: \"{value}\" is not known; known: {known}")]
    Unknown {
        /// `optimizer` or `lr_scheduler`.
        key: &'static str,
        /// The value in the config.
        value: String,
        /// The supported values.
        known: String,
    },
    /// A parameter of an optimizer or schedule is wrong.
    #[error("train.{key}.{name}: {problem}")]
    Param {
        /// `optimizer_params` or `lr_scheduler_params`.
        key: &'static str,
        /// The parameter.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A saved state does not fit the parameters.
    #[error("the saved optimizer state does not belong to these parameters: {0}")]
    State(String),
    /// The tensor library failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// A trainable tensor and its name. Sums over parameters are computed in the order of the parameter list.
#[derive(Clone, Debug)]
pub struct Param {
    /// The name under which its state is saved.
    pub name: String,
    /// The tensor, in float32.
    pub var: Var,
}

/// Gradients in the order of the parameters; `None` for a parameter that has no gradient in this step.
pub type Grads = Vec<Option<Tensor>>;

/// One update rule over a list of parameters.
pub trait Optimizer: Send {
    /// Applies one update. `grads` has one entry per parameter.
    ///
    /// # Errors
    /// When the number of gradients is wrong or the device fails.
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError>;

    /// Returns the whole state as named tensors; a checkpoint stores them next to the weights.
    ///
    /// # Errors
    /// When the device fails.
    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError>;

    /// Loads a state that [`Optimizer::state`] returned.
    ///
    /// # Errors
    /// When a tensor is missing or unexpected, or has another shape or dtype.
    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError>;

    /// The learning rate to report when the schedule gives `lr`. Optimizers that adapt the rate report their own.
    ///
    /// # Errors
    /// When the device fails.
    fn effective_lr(&self, lr: f64) -> Result<f64, OptimError> {
        Ok(lr)
    }

    /// Whether the trainer clips gradients by their global norm before it calls [`Optimizer::step`].
    fn uses_gradient_clipping(&self) -> bool {
        true
    }

    /// Whether one step over all parameters equals one step per parameter, in any order, with `None` for the gradients
    /// of the others. `false` for optimizers that compute a value over all parameters.
    fn separable(&self) -> bool {
        true
    }
}

/// The inputs of an optimizer's `build` function.
struct OptimizerSpec {
    /// The value of `train.optimizer`.
    name: OptimizerName,
    /// The tensors to train.
    params: Vec<Param>,
    /// `train.optimizer_params`, validated.
    options: OptimizerParams,
    /// `train.lr` after [`base_lr`].
    lr: f64,
}

/// Builds the optimizer that `train.optimizer` names.
///
/// # Errors
/// When the optimizer or one of its parameters is not known.
pub fn build(
    name: OptimizerName,
    params: Vec<Param>,
    optimizer_params: &serde_json::Map<String, serde_json::Value>,
    lr: f64,
) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = OptimizerParams::new(name, optimizer_params).map_err(|problems| {
        let (name, problem) = problems.into_iter().next().unwrap_or_default();
        OptimError::Param {
            key: "optimizer_params",
            name,
            problem,
        }
    })?;
    let spec = OptimizerSpec {
        name,
        params,
        options,
        lr: base_lr(name, lr),
    };
    match name {
        OptimizerName::Adam
        | OptimizerName::AdamW
        | OptimizerName::Adam8
        | OptimizerName::AdamW8
        | OptimizerName::Adam8Bit
        | OptimizerName::AdamW8Bit => adamw::build(spec),
        OptimizerName::Lion | OptimizerName::Lion8Bit => lion::build(spec),
        OptimizerName::Adafactor => adafactor::build(spec),
        OptimizerName::Adagrad => adagrad::build(spec),
        OptimizerName::AdemaMix8Bit => ademamix::build(spec),
        OptimizerName::Automagic => automagic::build(spec),
        OptimizerName::Automagic2 => automagic2::build(spec),
        OptimizerName::Automagic3 => automagic3::build(spec),
        OptimizerName::DAdaptation | OptimizerName::DAdaptationAdam | OptimizerName::DAdaptationLion => {
            dadaptation::build(spec)
        }
        OptimizerName::Prodigy | OptimizerName::Prodigy8Bit => prodigy::build(spec),
        other => Err(OptimError::Unknown {
            key: "optimizer",
            value: other.name().into(),
            known: "adam, adamw, adam8, adamw8, adam8bit, adamw8bit, ademamix8bit, lion, lion8bit, adagrad, \
                    adafactor, prodigy, prodigy8bit, automagic, automagic2, automagic3, dadaptation, dadaptationadam, \
                    dadaptationlion (the others are not supported yet)"
                .into(),
        }),
    }
}

/// Converts `train.lr` to the learning rate that the optimizer uses, as ai-toolkit does. For Prodigy and D-Adaptation
/// the rate is a factor near 1, so a value below 0.1 becomes 1. For Automagic and Automagic2 it is the initial rate, so
/// a value above 1e-3 becomes 1e-6.
#[must_use]
pub fn base_lr(name: OptimizerName, lr: f64) -> f64 {
    use OptimizerName::*;
    match name {
        Prodigy | Prodigy8Bit | DAdaptation | DAdaptationAdam | DAdaptationLion if lr < 0.1 => 1.0,
        Automagic | Automagic2 if lr > 1e-3 => 1e-6,
        _ => lr,
    }
}

/// The mean of the values, `None` without values.
fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Checks that `grads` has one entry per parameter.
fn check_grad_count(grads: &Grads, params: &[Param]) -> Result<(), OptimError> {
    if grads.len() == params.len() {
        return Ok(());
    }
    Err(OptimError::State(format!(
        "{} gradients for {} parameters",
        grads.len(),
        params.len()
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fused_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod reference_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
