//! AdEMAMix (Pagliardini et al., arXiv 2409.03137) with 8-bit state as in bitsandbytes: Adam with a second, slow mean
//! of the gradients that covers tens of thousands of steps.

use super::blockwise::QuantMap;
use super::fused;
use super::kernels::multiversion;
use super::moment::Moment;
use super::moment::Precision;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `ademamix8bit`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let settings = Settings {
        betas: options.three("betas", [0.9, 0.999, 0.9999]),
        alpha: options.number("alpha", 5.0),
        t_alpha: options.optional("t_alpha"),
        t_beta3: options.optional("t_beta3"),
        eps: options.number("eps", 1e-6),
        weight_decay: options.number("weight_decay", 0.01),
        precision: Precision::eight_bit(options),
    };
    let state = |param: &Param| {
        let zeros = |map| Moment::zeros(param, settings.precision, map);
        Ok::<_, OptimError>(State {
            step: 0,
            exp_avg: zeros(QuantMap::signed())?,
            exp_avg_slow: zeros(QuantMap::signed())?,
            exp_avg_sq: zeros(QuantMap::unsigned())?,
        })
    };
    let states = spec.params.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Box::new(AdEmaMix {
        settings,
        params: spec.params,
        states,
    }))
}

struct Settings {
    betas: [f64; 3],
    /// The weight of the slow mean.
    alpha: f64,
    /// The number of steps in which the weight grows from 0 to `alpha`.
    t_alpha: Option<f64>,
    /// The number of steps in which beta3 grows from beta1 to its configured value.
    t_beta3: Option<f64>,
    eps: f64,
    weight_decay: f64,
    precision: Precision,
}

struct State {
    step: u64,
    exp_avg: Moment,
    exp_avg_slow: Moment,
    exp_avg_sq: Moment,
}

/// ```text
/// p  <- p * (1 - lr * weight_decay)
/// m1 <- m1 * beta1 + g * (1 - beta1)      m2 <- m2 * beta3 + g * (1 - beta3)      v <- v * beta2 + g * g * (1 - beta2)
/// p  <- p - lr * (m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// In 8 bits the means are quantised after each step, and `p` is updated with their values before that.
struct AdEmaMix {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

/// The factors of a step.
#[derive(Clone, Copy)]
struct Factors {
    param_scale: f64,
    betas: [f64; 3],
    one_minus_betas: [f64; 3],
    /// 1 - beta1^t and sqrt(1 - beta2^t).
    corrections: [f64; 2],
    alpha: f64,
    eps: f64,
    lr: f64,
}

impl Settings {
    fn factors(&self, lr: f64, step: u64) -> Factors {
        let t = step as f64;
        let [beta1, beta2, last] = self.betas;
        let beta3 = self.t_beta3.map_or(last, |steps| {
            // Starts with beta1; then the half-life grows linearly.
            let (fast, slow, fraction) = (beta1.ln(), last.ln(), t / steps);
            last.min((fast * slow / ((1.0 - fraction) * slow + fraction * fast)).exp())
        });
        let betas = [beta1, beta2, beta3];
        Factors {
            param_scale: 1.0 - lr * self.weight_decay,
            betas,
            one_minus_betas: betas.map(|beta| 1.0 - beta),
            corrections: [1.0 - beta1.powf(t), (1.0 - beta2.powf(t)).sqrt()],
            alpha: self
                .t_alpha
                .map_or(self.alpha, |steps| self.alpha * (t / steps).min(1.0)),
            eps: self.eps,
            lr,
        }
    }
}

multiversion! {
    fn kernel(p: &mut [f32], g: &[f32], moments: [&mut [f32]; 3], factors: Factors) {
        let [exp_avg, exp_avg_slow, exp_avg_sq] = moments;
        let [beta1, beta2, beta3] = factors.betas.map(|x| x as f32);
        let [rest1, rest2, rest3] = factors.one_minus_betas.map(|x| x as f32);
        let [first, second] = factors.corrections.map(|x| x as f32);
        let (param_scale, alpha) = (factors.param_scale as f32, factors.alpha as f32);
        let (eps, lr) = (factors.eps as f32, factors.lr as f32);
        let moments = exp_avg.iter_mut().zip(exp_avg_slow).zip(exp_avg_sq);
        for ((p, g), ((exp_avg, exp_avg_slow), exp_avg_sq)) in p.iter_mut().zip(g).zip(moments) {
            *exp_avg = *exp_avg * beta1 + g * rest1;
            *exp_avg_slow = *exp_avg_slow * beta3 + g * rest3;
            *exp_avg_sq = *exp_avg_sq * beta2 + g * rest2 * g;
            let numerator = *exp_avg / first + *exp_avg_slow * alpha;
            *p = *p * param_scale - numerator / (exp_avg_sq.sqrt() / second + eps) * lr;
        }
    }
}

impl State {
    /// The same update with candle's operations, for other devices.
    fn update_with_tensor_ops(&mut self, param: &Param, grad: &Tensor, factors: Factors) -> Result<(), OptimError> {
        let p = param.value()?;
        let grad = grad.to_dtype(DType::F32)?.detach();
        let next_mean = |old: &Moment, new: &Tensor, at: usize| -> Result<Tensor, OptimError> {
            Ok(((old.to_f32()? * factors.betas[at])? + (new * factors.one_minus_betas[at])?)?)
        };
        let exp_avg = next_mean(&self.exp_avg, &grad, 0)?;
        let exp_avg_slow = next_mean(&self.exp_avg_slow, &grad, 2)?;
        let exp_avg_sq =
            ((self.exp_avg_sq.to_f32()? * factors.betas[1])? + ((&grad * factors.one_minus_betas[1])? * &grad)?)?;
        let div_exact = |t: &Tensor, divisor: f64| t.broadcast_div(&Tensor::new(divisor as f32, t.device())?);
        let numerator = (div_exact(&exp_avg, factors.corrections[0])? + (&exp_avg_slow * factors.alpha)?)?;
        let update = (numerator / (div_exact(&exp_avg_sq.sqrt()?, factors.corrections[1])? + factors.eps)?)?;
        param.set(&((p * factors.param_scale)? - (update * factors.lr)?)?)?;
        self.exp_avg.set(exp_avg)?;
        self.exp_avg_slow.set(exp_avg_slow)?;
        self.exp_avg_sq.set(exp_avg_sq)
    }
}

impl Optimizer for AdEmaMix {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            state.step += 1;
            let factors = self.settings.factors(lr, state.step);
            if fused::is_supported(param) {
                let moments = [&mut state.exp_avg, &mut state.exp_avg_slow, &mut state.exp_avg_sq];
                fused::update(param, grad, moments, |p, g, moments| kernel(p, g, moments, factors))?;
            } else {
                state.update_with_tensor_ops(param, grad, factors)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            out.insert(name("step"), saved::count(state.step)?);
            state.exp_avg.save(&name("exp_avg"), &mut out);
            state.exp_avg_slow.save(&name("exp_avg_slow"), &mut out);
            state.exp_avg_sq.save(&name("exp_avg_sq"), &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            let step = saved.count(&name("step"))?;
            let mut moment =
                |suffix: &str, map| Moment::load(&mut saved, &name(suffix), param, self.settings.precision, map);
            states.push(State {
                step,
                exp_avg: moment("exp_avg", QuantMap::signed())?,
                exp_avg_slow: moment("exp_avg_slow", QuantMap::signed())?,
                exp_avg_sq: moment("exp_avg_sq", QuantMap::unsigned())?,
            });
        }
        saved.finish()?;
        self.states = states;
        Ok(())
    }
}
