//! Adam and AdamW as `torch.optim` computes them.

use super::{Grads, OptimError, Optimizer, Param};
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Settings of [`Adam`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParams {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment, after bias correction. ai-toolkit uses 1e-6.
    pub eps: f64,
    /// Decoupled (AdamW) or L2 (Adam) decay.
    pub weight_decay: f64,
    /// `true` for AdamW.
    pub decoupled: bool,
}

impl AdamParams {
    /// ai-toolkit's defaults: torch's, with eps 1e-6.
    #[must_use]
    pub fn new(decoupled: bool) -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay: if decoupled { 0.01 } else { 0.0 },
            decoupled,
        }
    }

    /// Reads `train.optimizer_params`: `betas`, `eps`, `weight_decay`.
    ///
    /// # Errors
    /// On an unknown name, a wrong type or a value out of range.
    pub fn parse(decoupled: bool, params: &Map<String, Value>) -> Result<Self, OptimError> {
        let mut out = Self::new(decoupled);
        let bad = |name: &str, problem: &str| OptimError::Param {
            key: "optimizer_params",
            name: name.into(),
            problem: problem.into(),
        };
        for (name, value) in params {
            match name.as_str() {
                "betas" => {
                    let pair: Option<Vec<f64>> = value.as_array().map(|a| a.iter().filter_map(Value::as_f64).collect());
                    match pair.as_deref() {
                        Some(&[b1, b2]) if (0.0..1.0).contains(&b1) && (0.0..1.0).contains(&b2) => {
                            (out.beta1, out.beta2) = (b1, b2);
                        }
                        _ => return Err(bad(name, "expected two numbers from 0 up to, not including, 1")),
                    }
                }
                "eps" | "weight_decay" => {
                    let v = value.as_f64().filter(|v| v.is_finite() && *v >= 0.0);
                    let v = v.ok_or_else(|| bad(name, "expected a number that is not negative"))?;
                    if name == "eps" {
                        out.eps = v
                    } else {
                        out.weight_decay = v
                    }
                }
                // Torch's own switches that change nothing in the result.
                "foreach" | "fused" | "capturable" | "differentiable" => {}
                "amsgrad" | "maximize" if value.as_bool() == Some(false) => {}
                "amsgrad" | "maximize" => return Err(bad(name, "not supported yet")),
                _ => return Err(bad(name, "no such parameter; known: betas, eps, weight_decay")),
            }
        }
        Ok(out)
    }
}

struct Moments {
    step: u64,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
}

/// Adam (L2 decay) or AdamW (decoupled decay), the formula of `torch.optim.AdamW`:
///
/// ```text
/// p   <- p * (1 - lr * weight_decay)                      (AdamW)     g <- g + weight_decay * p   (Adam)
/// m   <- m + (g - m) * (1 - beta1)
/// v   <- v * beta2 + g * g * (1 - beta2)
/// p   <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
pub struct Adam {
    settings: AdamParams,
    params: Vec<Param>,
    moments: Vec<Moments>,
}

impl Adam {
    /// An optimizer with zero moments.
    ///
    /// # Errors
    /// When the device fails.
    pub fn new(params: Vec<Param>, settings: AdamParams) -> Result<Self, OptimError> {
        let moments = params
            .iter()
            .map(|p| {
                let zero = Tensor::zeros(p.var.shape(), DType::F32, p.var.device())?;
                Ok(Moments {
                    step: 0,
                    exp_avg: zero.clone(),
                    exp_avg_sq: zero,
                })
            })
            .collect::<Result<_, OptimError>>()?;
        Ok(Self {
            settings,
            params,
            moments,
        })
    }
}

impl Optimizer for Adam {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        if grads.len() != self.params.len() {
            return Err(OptimError::State(format!(
                "{} gradients for {} parameters",
                grads.len(),
                self.params.len()
            )));
        }
        let s = self.settings;
        for ((param, state), grad) in self.params.iter().zip(&mut self.moments).zip(grads) {
            let Some(grad) = grad else { continue };
            let mut grad = grad.to_dtype(DType::F32)?.detach();
            let mut p = param.var.as_tensor().detach();
            state.step += 1;
            if s.weight_decay != 0.0 {
                if s.decoupled {
                    p = (p * (1.0 - lr * s.weight_decay))?;
                } else {
                    grad = (grad + (&p * s.weight_decay)?)?;
                }
            }
            state.exp_avg = (&state.exp_avg + ((&grad - &state.exp_avg)? * (1.0 - s.beta1))?)?;
            state.exp_avg_sq = ((&state.exp_avg_sq * s.beta2)? + (grad.sqr()? * (1.0 - s.beta2))?)?;
            let t = state.step as f64;
            let correction1 = 1.0 - s.beta1.powf(t);
            let correction2 = (1.0 - s.beta2.powf(t)).sqrt();
            let denom = ((state.exp_avg_sq.sqrt()? / correction2)? + s.eps)?;
            let update = ((&state.exp_avg / denom)? * (lr / correction1))?;
            param.var.set(&(p - update)?)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, m) in self.params.iter().zip(&self.moments) {
            out.insert(format!("{}.exp_avg", param.name), m.exp_avg.clone());
            out.insert(format!("{}.exp_avg_sq", param.name), m.exp_avg_sq.clone());
            out.insert(
                format!("{}.step", param.name),
                Tensor::new(m.step as i64, &Device::Cpu)?,
            );
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let get = |name: String| {
            state
                .get(&name)
                .cloned()
                .ok_or_else(|| OptimError::State(format!("\"{name}\" is missing")))
        };
        let mut loaded = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let device = param.var.device();
            let step = get(format!("{}.step", param.name))?
                .to_dtype(DType::I64)?
                .flatten_all()?
                .to_vec1::<i64>()?;
            let step = match step.as_slice() {
                [step] if *step >= 0 => *step as u64,
                _ => {
                    return Err(OptimError::State(format!(
                        "\"{}.step\" is not a step count",
                        param.name
                    )));
                }
            };
            let moment = |part: &str| -> Result<Tensor, OptimError> {
                let name = format!("{}.{part}", param.name);
                let t = get(name.clone())?;
                if t.shape() != param.var.shape() {
                    return Err(OptimError::State(format!(
                        "\"{name}\" has shape {:?}, the parameter has {:?}",
                        t.dims(),
                        param.var.dims()
                    )));
                }
                Ok(t.to_dtype(DType::F32)?.to_device(device)?)
            };
            loaded.push(Moments {
                step,
                exp_avg: moment("exp_avg")?,
                exp_avg_sq: moment("exp_avg_sq")?,
            });
        }
        if state.len() != 3 * self.params.len() {
            return Err(OptimError::State(format!(
                "{} tensors, expected {}",
                state.len(),
                3 * self.params.len()
            )));
        }
        self.moments = loaded;
        Ok(())
    }
}
