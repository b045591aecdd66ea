//! Optimizers whose whole state can be saved, learning-rate schedules, gradient clipping and EMA.
//!
//! Everything here follows torch 2.15 to the order of its operations, so that a run can be compared step by
//! step with the reference. Fixtures: `tests/reference/make_optim.py`.

mod adamw;
mod clip;
mod ema;
mod schedule;

pub use adamw::{Adam, AdamParams};
pub use clip::clip_grad_norm;
pub use ema::Ema;
pub use schedule::{Schedule, ScheduleParams};

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
    /// When a tensor is missing, is one too many, or has another shape.
    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError>;
}

/// Builds the optimizer that `train.optimizer` names.
///
/// # Errors
/// When the name or one of `optimizer_params` is not known.
pub fn build(
    name: &str,
    params: Vec<Param>,
    optimizer_params: &serde_json::Map<String, serde_json::Value>,
) -> Result<Box<dyn Optimizer>, OptimError> {
    let lower = name.to_lowercase();
    let decoupled = match lower.as_str() {
        "adamw" => true,
        "adam" => false,
        _ => {
            return Err(OptimError::Unknown {
                key: "optimizer",
                value: name.into(),
                known: "adamw, adam (the others are not supported yet)".into(),
            });
        }
    };
    Ok(Box::new(Adam::new(
        params,
        AdamParams::parse(decoupled, optimizer_params)?,
    )?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
