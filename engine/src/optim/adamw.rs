//! Adam and AdamW as `torch.optim` computes them, and with 8-bit state as bitsandbytes does.

use super::blockwise::Map;
use super::fused;
use super::kernels::for_every_unit;
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

/// `adam`, `adamw`, `adam8bit`, `adamw8bit`, `adam8`, `adamw8`.
///
/// The last two are ai-toolkit's own (its `toolkit/optimizers/adam8bit.py`), which keeps each tensor in int8, in equal steps
/// with one scale. Here their state is that of the two before, which is as small and from which comes what float32 gives.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let own = matches!(input.name, OptimizerName::Adam8 | OptimizerName::AdamW8);
    let eight = own || matches!(input.name, OptimizerName::Adam8Bit | OptimizerName::AdamW8Bit);
    let usual = AdamParams::new(matches!(input.name, OptimizerName::AdamW | OptimizerName::AdamW8Bit));
    let (beta1, beta2) = of.pair("betas", (usual.beta1, usual.beta2));
    let settings = AdamParams {
        beta1,
        beta2,
        eps: of.number("eps", usual.eps),
        weight_decay: of.number("weight_decay", usual.weight_decay),
        // bitsandbytes' Adam differs from its AdamW in the default of the decay alone.
        decoupled: if own {
            of.flag("decouple", true)
        } else {
            usual.decoupled || eight
        },
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
/// With 8-bit state m and v are quantised after each step; p is changed with what they were before that. On the CPU
/// all of it happens in one pass over memory.
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

/// What a step multiplies with, one for all elements of a parameter.
#[derive(Clone, Copy)]
struct Factors {
    /// Of the parameter, for decoupled decay.
    keep: f64,
    /// Of the parameter, as a part of the gradient.
    decay: f64,
    beta2: f64,
    /// 1 - beta1 and 1 - beta2.
    rest: (f64, f64),
    /// 1 / sqrt(1 - beta2^t). torch divides; a division for every element is what an 8-bit step would wait for.
    correction: f64,
    eps: f64,
    /// -lr / (1 - beta1^t).
    step: f64,
}

impl AdamParams {
    fn factors(&self, lr: f64, step: u64) -> Factors {
        let t = step as f64;
        let decoupled = if self.decoupled { self.weight_decay } else { 0.0 };
        Factors {
            keep: 1.0 - lr * decoupled,
            decay: self.weight_decay - decoupled,
            beta2: self.beta2,
            rest: (1.0 - self.beta1, 1.0 - self.beta2),
            correction: 1.0 / (1.0 - self.beta2.powf(t)).sqrt(),
            eps: self.eps,
            step: -lr / (1.0 - self.beta1.powf(t)),
        }
    }
}

for_every_unit! {
    /// In the order of operations of `torch.optim.AdamW(fused=True)`, but for the correction.
    fn kernel(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], by: Factors) {
        let (keep, decay, beta2) = (by.keep as f32, by.decay as f32, by.beta2 as f32);
        let (rest1, rest2) = (by.rest.0 as f32, by.rest.1 as f32);
        let (correction, eps, step) = (by.correction as f32, by.eps as f32, by.step as f32);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g + *p * decay;
            *m += (g - *m) * rest1;
            *v = *v * beta2 + g * rest2 * g;
            *p = *p * keep + *m * step / (v.sqrt() * correction + eps);
        }
    }
}

impl Moments {
    /// The same by the tensor library's operations, for other devices.
    fn composed(&mut self, param: &Param, grad: &Tensor, by: Factors) -> Result<(), OptimError> {
        let p = param.var.as_tensor().detach();
        let mut grad = grad.to_dtype(DType::F32)?.detach();
        if by.decay != 0.0 {
            grad = (grad + (&p * by.decay)?)?;
        }
        let m = self.exp_avg.read()?;
        let m = (&m + ((&grad - &m)? * by.rest.0)?)?;
        let v = ((self.exp_avg_sq.read()? * by.beta2)? + ((&grad * by.rest.1)? * &grad)?)?;
        let denominator = ((v.sqrt()? * by.correction)? + by.eps)?;
        let update = ((&m * by.step)? / denominator)?;
        param.var.set(&((p * by.keep)? + update)?)?;
        self.exp_avg.write(m)?;
        self.exp_avg_sq.write(v)
    }
}

impl Optimizer for Adam {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        for ((param, state), grad) in self.params.iter().zip(&mut self.moments).zip(grads) {
            let Some(grad) = grad else { continue };
            state.step += 1;
            let by = self.settings.factors(lr, state.step);
            if fused::takes(param) {
                let means = [&mut state.exp_avg, &mut state.exp_avg_sq];
                fused::update(param, grad, means, |p, g, [m, v]| kernel(p, g, m, v, by))?;
            } else {
                state.composed(param, grad, by)?;
            }
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
