//! Optimizers whose whole state can be saved, learning-rate schedules, gradient clipping and EMA.
//!
//! Everything here follows its reference (torch, bitsandbytes, lion-pytorch, prodigyopt, ai-toolkit) to the order of its
//! operations, so that a run can be compared step by step. Fixtures: `tests/reference/make_optim.py`, `make_optim8.py`,
//! `make_optim_toolkit.py`.
//!
//! On the CPU an update is one pass over memory, in place and on all threads (`fused`, `inplace`, `kernels`; two
//! passes for Prodigy, which must know `d` first); on other devices it is composed of the tensor library's operations,
//! and so is everywhere what Adafactor and the automagics share (`factored`), and D-Adaptation. Tests compare the two.

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
mod factored_pass;
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
pub use clip::{clip_factor, clip_grad_norm, norm_of, scaled_by, sum_of_squares};
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
        /// What was written.
        value: String,
        /// What could have been written.
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

/// A trainable tensor under its name. The order of a parameter list decides the order of every sum over it.
#[derive(Clone, Debug)]
pub struct Param {
    /// The name under which its state is saved.
    pub name: String,
    /// The tensor, in float32.
    pub var: Var,
}

/// Gradients in the order of the parameters; `None` where a parameter took no part.
pub type Grads = Vec<Option<Tensor>>;

/// One update rule over a list of parameters.
pub trait Optimizer: Send {
    /// Applies one update. `grads` has one entry per parameter.
    ///
    /// # Errors
    /// When the number of gradients is wrong or the device fails.
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError>;

    /// The whole state as named tensors, to be saved beside the weights.
    ///
    /// # Errors
    /// When the device fails.
    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError>;

    /// Takes back what [`Optimizer::state`] gave.
    ///
    /// # Errors
    /// When a tensor is missing, is one too many, or has another shape or type.
    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError>;

    /// The learning rate to show, where the schedule asks for `lr`: optimizers that find their own tell it.
    ///
    /// # Errors
    /// When the device fails.
    fn shown_lr(&self, lr: f64) -> Result<f64, OptimError> {
        Ok(lr)
    }

    /// Whether gradients are clipped by their global norm before they come here.
    fn wants_clipping(&self) -> bool {
        true
    }

    /// Whether a step of all parameters may be taken as a step of each, in any order, where the others have no gradient.
    /// Not where something is found out over all of them.
    fn separable(&self) -> bool {
        true
    }
}

/// What an optimizer is built from.
struct Build {
    /// Which one.
    name: OptimizerName,
    /// What it trains.
    params: Vec<Param>,
    /// Its parameters, found to be in order.
    options: OptimizerParams,
    /// `train.lr`, as [`base_lr`] reads it.
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
    let input = Build {
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
        | OptimizerName::AdamW8Bit => adamw::build(input),
        OptimizerName::Lion | OptimizerName::Lion8Bit => lion::build(input),
        OptimizerName::Adafactor => adafactor::build(input),
        OptimizerName::Adagrad => adagrad::build(input),
        OptimizerName::AdemaMix8Bit => ademamix::build(input),
        OptimizerName::Automagic => automagic::build(input),
        OptimizerName::Automagic2 => automagic2::build(input),
        OptimizerName::Automagic3 => automagic3::build(input),
        OptimizerName::DAdaptation | OptimizerName::DAdaptationAdam | OptimizerName::DAdaptationLion => {
            dadaptation::build(input)
        }
        OptimizerName::Prodigy | OptimizerName::Prodigy8Bit => prodigy::build(input),
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

/// The learning rate that `train.lr` stands for, as in ai-toolkit. Prodigy and D-Adaptation want a factor about 1: what is
/// below 0.1 was meant for another optimizer and becomes 1. The first two automagics want to begin low: what is above 1e-3
/// becomes 1e-6.
#[must_use]
pub fn base_lr(name: OptimizerName, lr: f64) -> f64 {
    use OptimizerName::*;
    match name {
        Prodigy | Prodigy8Bit | DAdaptation | DAdaptationAdam | DAdaptationLion if lr < 0.1 => 1.0,
        Automagic | Automagic2 if lr > 1e-3 => 1e-6,
        _ => lr,
    }
}

/// The mean of a list that is not empty.
fn mean(of: &[f64]) -> Option<f64> {
    (!of.is_empty()).then(|| of.iter().sum::<f64>() / of.len() as f64)
}

/// One gradient (or none) per parameter.
fn one_each(grads: &Grads, params: &[Param]) -> Result<(), OptimError> {
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
mod pass_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod reference_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
