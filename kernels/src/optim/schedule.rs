//! Learning-rate schedules (`train.lr_scheduler`). Each is a pure function of the step, so that resuming needs no
//! state.

use super::optimizer::OptimError;
use aitk_common::job::lm_trainer::{LmScheduler, LmTrainConfig};
use serde_json::{Map, Value};
use std::f64::consts::PI;

/// A curve and its parameters, as torch and diffusers define them. Names that ai-toolkit lists but cannot run work here.
#[derive(Clone, Debug, PartialEq)]
enum Curve {
    /// `lr * factor` for all steps.
    Constant { factor: f64 },
    /// torch `LinearLR`: from `start_factor` to `end_factor` over `total` steps.
    Linear {
        start_factor: f64,
        end_factor: f64,
        total: f64,
    },
    /// torch `CosineAnnealingLR` in closed form: from `lr` to `eta_min` over `t_max` steps.
    Cosine { eta_min: f64, t_max: f64 },
    /// torch `CosineAnnealingWarmRestarts`.
    Restarts { eta_min: f64, t_0: f64, t_mult: f64 },
    /// diffusers `polynomial`: from `lr` to `lr_end` over `total` steps.
    Polynomial { lr_end: f64, power: f64, total: f64 },
    /// torch `StepLR`.
    Step { step_size: f64, gamma: f64 },
    /// transformers `warmup_stable_decay` with a linear decay: `lr`, and from step `start` on down to `min_lr` over `decay` steps.
    StableDecay { start: f64, decay: f64, min_lr: f64 },
}

/// The inputs of a schedule.
#[derive(Clone, Copy, Debug)]
pub struct ScheduleParams<'a> {
    /// `train.lr_scheduler`.
    pub name: &'a str,
    /// `train.lr_scheduler_params`.
    pub params: &'a Map<String, Value>,
    /// `train.lr`.
    pub lr: f64,
    /// `train.steps`.
    pub steps: u64,
}

/// A learning rate for every step.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    lr: f64,
    warmup: u64,
    curve: Curve,
}

impl Schedule {
    /// Parses a schedule. Every schedule accepts `num_warmup_steps`: the rate rises linearly from 0, then the curve
    /// starts, and it ends with the last step. `constant_with_warmup` warms up for 1000 steps by default.
    ///
    /// # Errors
    /// When the schedule or a parameter is unknown, or a value is invalid.
    pub fn new(input: ScheduleParams<'_>) -> Result<Self, OptimError> {
        let ScheduleParams {
            name,
            params,
            lr,
            steps,
        } = input;
        let param_error = |name: &str, problem: String| OptimError::Param {
            key: "lr_scheduler_params",
            name: name.into(),
            problem,
        };
        let number = |key: &str, default: f64| match params.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(v) => v
                .as_f64()
                .filter(|v| v.is_finite())
                .ok_or_else(|| param_error(key, format!("expected a number, found {v}"))),
        };
        let positive = |key: &str, default: f64| match number(key, default)? {
            v if v > 0.0 => Ok(v),
            v => Err(param_error(key, format!("expected a number above 0, found {v}"))),
        };
        let lower = name.to_lowercase();
        let warmup_default = if lower == "constant_with_warmup" { 1000.0 } else { 0.0 };
        let warmup = number("num_warmup_steps", warmup_default)?.max(0.0).floor();
        let span = positive("max_iterations", positive("total_iters", (steps as f64).max(1.0))?)?;
        let decay_steps = (span - warmup).max(1.0);
        let (curve, known): (Curve, &[&str]) = match lower.as_str() {
            "constant" | "constant_with_warmup" => (
                Curve::Constant {
                    factor: number("factor", 1.0)?,
                },
                &["factor"],
            ),
            "linear" => (
                Curve::Linear {
                    start_factor: positive("start_factor", 1.0 / 3.0)?,
                    end_factor: number("end_factor", 1.0)?,
                    total: decay_steps,
                },
                &["start_factor", "end_factor"],
            ),
            "cosine" => (
                Curve::Cosine {
                    eta_min: number("eta_min", 0.0)?,
                    t_max: positive("T_max", decay_steps)?,
                },
                &["eta_min", "T_max"],
            ),
            "cosine_with_restarts" => (
                Curve::Restarts {
                    eta_min: number("eta_min", 0.0)?,
                    t_0: positive("T_0", decay_steps)?,
                    t_mult: number("T_mult", 1.0)?.max(1.0),
                },
                &["eta_min", "T_0", "T_mult"],
            ),
            "polynomial" => (
                Curve::Polynomial {
                    lr_end: number("lr_end", 1e-7)?,
                    power: positive("power", 1.0)?,
                    total: decay_steps,
                },
                &["lr_end", "power"],
            ),
            "step" => (
                Curve::Step {
                    step_size: positive("step_size", (decay_steps / 3.0).ceil())?,
                    gamma: number("gamma", 0.1)?,
                },
                &["step_size", "gamma"],
            ),
            _ => {
                return Err(OptimError::Unknown {
                    key: "lr_scheduler",
                    value: name.into(),
                    known: "constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial, step"
                        .into(),
                });
            }
        };
        const COMMON: [&str; 4] = ["num_warmup_steps", "max_iterations", "total_iters", "last_epoch"];
        for key in params.keys() {
            if !known.contains(&key.as_str()) && !COMMON.contains(&key.as_str()) {
                let known = [known, &COMMON[..1]].concat().join(", ");
                return Err(param_error(
                    key,
                    format!("no such parameter of \"{name}\"; known: {known}"),
                ));
            }
        }
        Ok(Self {
            lr,
            warmup: warmup as u64,
            curve,
        })
    }

    /// The schedule of a training of a language model with `steps` steps, as transformers defines it (`get_linear_schedule_with_warmup`,
    /// `get_cosine_with_min_lr_schedule_with_warmup`, `get_wsd_schedule` with linear decay), but the warm-up of `wsd` begins with 0 and not
    /// with `min_lr`, and `linear` may end above 0. `lr`: after [`super::base_lr`].
    #[must_use]
    pub fn of_language_model(train: &LmTrainConfig, lr: f64, steps: u64) -> Self {
        let warmup = train.warmup_steps.min(steps);
        let (total, min_lr) = ((steps - warmup).max(1) as f64, train.min_lr);
        let curve = match train.lr_scheduler {
            LmScheduler::Constant => Curve::Constant { factor: 1.0 },
            LmScheduler::Linear => Curve::Linear {
                start_factor: 1.0,
                end_factor: if lr > 0.0 { min_lr / lr } else { 0.0 },
                total,
            },
            LmScheduler::Cosine => Curve::Cosine {
                eta_min: min_lr,
                t_max: total,
            },
            LmScheduler::Wsd => {
                let decay = train.decay_steps.unwrap_or(steps / 10).clamp(1, steps.max(1)) as f64;
                Curve::StableDecay {
                    start: (total - decay).max(0.0),
                    decay,
                    min_lr,
                }
            }
        };
        Self { lr, warmup, curve }
    }

    /// The learning rate of the update from `step` to `step + 1`.
    #[must_use]
    pub fn lr_at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * step as f64 / self.warmup as f64;
        }
        let t = (step - self.warmup) as f64;
        match self.curve {
            Curve::Constant { factor } => self.lr * factor,
            Curve::Linear {
                start_factor,
                end_factor,
                total,
            } => self.lr * (start_factor + (end_factor - start_factor) * (t / total).min(1.0)),
            Curve::Cosine { eta_min, t_max } => eta_min + (self.lr - eta_min) * (1.0 + (PI * t / t_max).cos()) / 2.0,
            Curve::Restarts { eta_min, t_0, t_mult } => {
                let (mut t, mut period) = (t, t_0);
                if t_mult > 1.0 {
                    while t >= period {
                        t -= period;
                        period *= t_mult;
                    }
                } else {
                    // A period can be a fraction, whose multiples are rounded: without the small number, a restart that falls on a step
                    // would be the end of the period before.
                    let restarts = (t / period + 1e-9).floor();
                    t = (t - restarts * period).max(0.0);
                }
                eta_min + (self.lr - eta_min) * (1.0 + (PI * t / period).cos()) / 2.0
            }
            Curve::Polynomial { lr_end, power, total } => {
                if t >= total {
                    lr_end
                } else {
                    (self.lr - lr_end) * (1.0 - t / total).powf(power) + lr_end
                }
            }
            Curve::StableDecay { start, decay, min_lr } => {
                let progress = ((t - start) / decay).clamp(0.0, 1.0);
                self.lr + (min_lr - self.lr) * progress
            }
            Curve::Step { step_size, gamma } => self.lr * gamma.powf((t / step_size).floor()),
        }
    }
}
