//! Adam and AdamW as `torch.optim` computes them, and with 8-bit state as bitsandbytes does.

use super::blockwise::Map;
use super::moment::Moment;
use super::saved::{self, Saved};
use super::{Build, Grads, OptimError, Optimizer, Param, Precision, one_each};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
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
    /// How the moments are kept.
    pub precision: Precision,
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
            precision: Precision::Full,
        }
    }
}

/// `adam`, `adamw`, `adam8bit`, `adamw8bit`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let eight = matches!(input.name, OptimizerName::Adam8Bit | OptimizerName::AdamW8Bit);
    let usual = AdamParams::new(matches!(input.name, OptimizerName::AdamW | OptimizerName::AdamW8Bit));
    let (beta1, beta2) = of.pair("betas", (usual.beta1, usual.beta2));
    let settings = AdamParams {
        beta1,
        beta2,
        eps: of.number("eps", usual.eps),
        weight_decay: of.number("weight_decay", usual.weight_decay),
        // bitsandbytes' Adam differs from its AdamW in the default of the decay alone.
        decoupled: usual.decoupled || eight,
        precision: if eight {
            Precision::eight_bits(of)
        } else {
            Precision::Full
        },
    };
    Ok(Box::new(Adam::new(input.params, settings)?))
}

struct Moments {
    step: u64,
    exp_avg: Moment,
    exp_avg_sq: Moment,
}

/// Adam (L2 decay) or AdamW (decoupled decay), the formula of `torch.optim.AdamW`:
///
/// ```text
/// p   <- p * (1 - lr * weight_decay)                      (AdamW)     g <- g + weight_decay * p   (Adam)
/// m   <- m + (g - m) * (1 - beta1)
/// v   <- v * beta2 + g * g * (1 - beta2)
/// p   <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// With 8-bit state m and v are quantised after each step; p is changed with what they were before that.
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
        let precision = settings.precision;
        let moments = params
            .iter()
            .map(|p| {
                Ok(Moments {
                    step: 0,
                    exp_avg: Moment::zeros(p, precision, Map::signed())?,
                    exp_avg_sq: Moment::zeros(p, precision, Map::unsigned())?,
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
        one_each(grads, &self.params)?;
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
            let m = state.exp_avg.read()?;
            let m = (&m + ((&grad - &m)? * (1.0 - s.beta1))?)?;
            let v = ((state.exp_avg_sq.read()? * s.beta2)? + (grad.sqr()? * (1.0 - s.beta2))?)?;
            let t = state.step as f64;
            let correction1 = 1.0 - s.beta1.powf(t);
            let correction2 = (1.0 - s.beta2.powf(t)).sqrt();
            let denom = ((v.sqrt()? / correction2)? + s.eps)?;
            let update = ((&m / denom)? * (lr / correction1))?;
            param.var.set(&(p - update)?)?;
            state.exp_avg.write(m)?;
            state.exp_avg_sq.write(v)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, m) in self.params.iter().zip(&self.moments) {
            m.exp_avg.save(&format!("{}.exp_avg", param.name), &mut out);
            m.exp_avg_sq.save(&format!("{}.exp_avg_sq", param.name), &mut out);
            out.insert(format!("{}.step", param.name), saved::count(m.step)?);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let precision = self.settings.precision;
        let mut moments = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |part: &str| format!("{}.{part}", param.name);
            moments.push(Moments {
                step: saved.count(&name("step"))?,
                exp_avg: Moment::load(&mut saved, &name("exp_avg"), param, precision, Map::signed())?,
                exp_avg_sq: Moment::load(&mut saved, &name("exp_avg_sq"), param, precision, Map::unsigned())?,
            });
        }
        saved.done()?;
        self.moments = moments;
        Ok(())
    }
}
