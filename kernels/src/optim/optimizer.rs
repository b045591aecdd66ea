//! What every optimizer shares: its parameters, gradients and errors, and the trait.

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
    /// The tensor, in float32, or in bfloat16 (see [`super::with_stochastic_rounding`]).
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
pub(super) struct OptimizerSpec {
    /// The value of `train.optimizer`.
    pub(super) name: OptimizerName,
    /// The tensors to train.
    pub(super) params: Vec<Param>,
    /// `train.optimizer_params`, validated.
    pub(super) options: OptimizerParams,
    /// `train.lr` after [`base_lr`](super::base_lr).
    pub(super) lr: f64,
}

/// The mean of the values, `None` without values.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Checks that `grads` has one entry per parameter.
pub(super) fn check_grad_count(grads: &Grads, params: &[Param]) -> Result<(), OptimError> {
    if grads.len() == params.len() {
        return Ok(());
    }
    Err(OptimError::State(format!(
        "{} gradients for {} parameters",
        grads.len(),
        params.len()
    )))
}
