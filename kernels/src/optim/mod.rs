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
mod groups;
mod inplace;
mod kernels;
mod lion;
mod moment;
mod optimizer;
mod prodigy;
mod rounding;
mod saved;
mod schedule;
mod state_tensor;

pub use adamw::{Adam, AdamParams};
pub use clip::{SquareSums, clip_factor, clip_grad_norm, global_norm, scale_gradient, sum_of_squares};
pub use ema::Ema;
pub use moment::Precision;
pub use optimizer::{Grads, OptimError, Optimizer, Param};
pub use rounding::with_stochastic_rounding;
pub use schedule::{Schedule, ScheduleParams};

use aitk_common::job::optimizer::OptimizerName;
use aitk_common::job::optimizer_params::OptimizerParams;
use aitk_common::job::schema::SupportLevel;
use optimizer::OptimizerSpec;

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
            known: known_optimizers(),
        }),
    }
}

/// The names of the optimizers that work.
fn known_optimizers() -> String {
    let works = |name: &&OptimizerName| matches!(name.status(), SupportLevel::Works);
    let names: Vec<&str> = OptimizerName::ALL
        .iter()
        .filter(works)
        .map(|name| name.name())
        .collect();
    names.join(", ")
}

/// As [`build`], for tensors whose learning rates are multiples of the schedule's. `factors`: one for each tensor.
///
/// # Errors
/// As [`build`].
pub fn build_with_factors(
    name: OptimizerName,
    params: Vec<Param>,
    factors: &[f64],
    optimizer_params: &serde_json::Map<String, serde_json::Value>,
    lr: f64,
) -> Result<Box<dyn Optimizer>, OptimError> {
    groups::build(params, factors, |params| build(name, params, optimizer_params, lr))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod adafactor_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fused_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod reference_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
