//! Adam and AdamW as in `torch.optim`, and with 8-bit state as in bitsandbytes.

use super::blockwise::QuantMap;
use super::fused;
use super::inplace;
use super::kernels::multiversion;
use super::moment::Moment;
use super::moment::Precision;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use crate::cuda_kernels::{self, AdamFactors as Factors, Moments8};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Device, Tensor};
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
    /// The number format of the moments.
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
            precision: Precision::Float32,
        }
    }
}

/// `adam`, `adamw`, `adam8bit`, `adamw8bit`, `adam8`, `adamw8`.
///
/// The last two are ai-toolkit's own (its `toolkit/optimizers/adam8bit.py`), with each state tensor in int8: equal
/// steps and one scale. Here they use the blockwise state of `adam8bit` and `adamw8bit`, which is as small, and whose
/// results are close to float32.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let is_ai_toolkits_own = matches!(spec.name, OptimizerName::Adam8 | OptimizerName::AdamW8);
    let is_eight_bit = is_ai_toolkits_own || matches!(spec.name, OptimizerName::Adam8Bit | OptimizerName::AdamW8Bit);
    let defaults = AdamParams::new(matches!(spec.name, OptimizerName::AdamW | OptimizerName::AdamW8Bit));
    let (beta1, beta2) = options.pair("betas", (defaults.beta1, defaults.beta2));
    let settings = AdamParams {
        beta1,
        beta2,
        eps: options.number("eps", defaults.eps),
        weight_decay: options.number("weight_decay", defaults.weight_decay),
        // bitsandbytes' Adam and AdamW differ only in the default of the weight decay.
        decoupled: if is_ai_toolkits_own {
            options.flag("decouple", true)
        } else {
            defaults.decoupled || is_eight_bit
        },
        precision: if is_eight_bit {
            Precision::eight_bit(options)
        } else {
            Precision::Float32
        },
    };
    Ok(Box::new(Adam::new(spec.params, settings)?))
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
/// With 8-bit state, `m` and `v` are quantised after each step, and `p` is updated with their values before that. On
/// the CPU a step is one pass over memory.
pub struct Adam {
    settings: AdamParams,
    params: Vec<Param>,
    moments: Vec<Moments>,
}

impl Adam {
    /// Creates an optimizer with moments of zero.
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
                    exp_avg: Moment::zeros(p, precision, QuantMap::signed())?,
                    exp_avg_sq: Moment::zeros(p, precision, QuantMap::unsigned())?,
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

impl AdamParams {
    fn factors(&self, lr: f64, step: u64) -> Factors {
        let t = step as f64;
        let decoupled = if self.decoupled { self.weight_decay } else { 0.0 };
        Factors {
            param_scale: 1.0 - lr * decoupled,
            l2_decay: self.weight_decay - decoupled,
            beta2: self.beta2,
            one_minus_betas: (1.0 - self.beta1, 1.0 - self.beta2),
            bias_correction: 1.0 / (1.0 - self.beta2.powf(t)).sqrt(),
            eps: self.eps,
            step_size: -lr / (1.0 - self.beta1.powf(t)),
        }
    }
}

multiversion! {
    /// Has the order of operations of `torch.optim.AdamW(fused=True)`, except for the bias correction of `v`.
    fn kernel(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], factors: Factors) {
        let (param_scale, l2_decay) = (factors.param_scale as f32, factors.l2_decay as f32);
        let (rest1, rest2) = (factors.one_minus_betas.0 as f32, factors.one_minus_betas.1 as f32);
        let (beta2, bias_correction) = (factors.beta2 as f32, factors.bias_correction as f32);
        let (eps, step_size) = (factors.eps as f32, factors.step_size as f32);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g + *p * l2_decay;
            *m += (g - *m) * rest1;
            *v = *v * beta2 + g * rest2 * g;
            *p = *p * param_scale + *m * step_size / (v.sqrt() * bias_correction + eps);
        }
    }
}

/// The tables of the 8-bit state as the kernels for GPUs read them: values and bounds of the map of `exp_avg`, then of `exp_avg_sq`.
fn kernel_tables(device: &Device) -> candle_core::Result<Tensor> {
    let maps = [QuantMap::signed(), QuantMap::unsigned()];
    let tables: Vec<f32> = maps.iter().flat_map(|map| map.tables()).flatten().collect();
    let count = tables.len();
    Tensor::from_vec(tables, count, device)
}

impl Moments {
    /// The same update in one kernel of a GPU, if there is one; says whether it was done.
    fn update_with_kernel(
        &mut self,
        param: &Param,
        grad: &Tensor,
        factors: Factors,
        tables: &mut Option<Tensor>,
    ) -> Result<bool, OptimError> {
        let p = param.var.as_tensor().detach();
        if !cuda_kernels::are_available(p.device()) {
            return Ok(false);
        }
        let grad = inplace::readable_gradient(grad, &p)?;
        Ok(match (&mut self.exp_avg, &mut self.exp_avg_sq) {
            (Moment::Float32(m), Moment::Float32(v)) => {
                cuda_kernels::adam_f32(&p, &grad, [m.make_mut()?, v.make_mut()?], &factors)?
            }
            (Moment::EightBit(m), Moment::EightBit(v)) => {
                let tables = match tables {
                    Some(tables) => tables,
                    None => tables.insert(kernel_tables(p.device())?),
                };
                let moments = Moments8 {
                    codes: [m.codes.make_mut()?, v.codes.make_mut()?],
                    absmax: [m.absmax.make_mut()?, v.absmax.make_mut()?],
                    tables,
                };
                cuda_kernels::adam_8bit(&p, &grad, &moments, &factors)?
            }
            _ => false,
        })
    }

    /// The same update with candle's operations, for other devices.
    fn update_with_tensor_ops(&mut self, param: &Param, grad: &Tensor, factors: Factors) -> Result<(), OptimError> {
        let p = param.value()?;
        let mut grad = grad.to_dtype(DType::F32)?.detach();
        if factors.l2_decay != 0.0 {
            grad = (grad + (&p * factors.l2_decay)?)?;
        }
        let m = self.exp_avg.to_f32()?;
        let m = (&m + ((&grad - &m)? * factors.one_minus_betas.0)?)?;
        let v = ((self.exp_avg_sq.to_f32()? * factors.beta2)? + ((&grad * factors.one_minus_betas.1)? * &grad)?)?;
        let denominator = ((v.sqrt()? * factors.bias_correction)? + factors.eps)?;
        let update = ((&m * factors.step_size)? / denominator)?;
        param.set(&((p * factors.param_scale)? + update)?)?;
        self.exp_avg.set(m)?;
        self.exp_avg_sq.set(v)
    }
}

impl Optimizer for Adam {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let mut tables = None;
        for ((param, state), grad) in self.params.iter().zip(&mut self.moments).zip(grads) {
            let Some(grad) = grad else { continue };
            state.step += 1;
            let factors = self.settings.factors(lr, state.step);
            if fused::is_supported(param) {
                let moments = [&mut state.exp_avg, &mut state.exp_avg_sq];
                fused::update(param, grad, moments, |p, g, [m, v]| kernel(p, g, m, v, factors))?;
            } else if !state.update_with_kernel(param, grad, factors, &mut tables)? {
                state.update_with_tensor_ops(param, grad, factors)?;
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
        let mut saved = SavedState::new(state);
        let precision = self.settings.precision;
        let mut moments = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            moments.push(Moments {
                step: saved.count(&name("step"))?,
                exp_avg: Moment::load(&mut saved, &name("exp_avg"), param, precision, QuantMap::signed())?,
                exp_avg_sq: Moment::load(&mut saved, &name("exp_avg_sq"), param, precision, QuantMap::unsigned())?,
            });
        }
        saved.finish()?;
        self.moments = moments;
        Ok(())
    }
}
