//! AdEMAMix (Pagliardini et al., arXiv 2409.03137) with 8-bit state as bitsandbytes computes it: Adam with a second, slow mean
//! of gradients, which remembers tens of thousands of steps.

use super::blockwise::Map;
use super::fused;
use super::kernels::for_every_unit;
use super::moment::Moment;
use super::saved::{self, Saved};
use super::{Build, Grads, OptimError, Optimizer, Param, Precision, one_each};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `ademamix8bit`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let settings = Settings {
        betas: of.three("betas", [0.9, 0.999, 0.9999]),
        alpha: of.number("alpha", 5.0),
        t_alpha: of.optional("t_alpha"),
        t_beta3: of.optional("t_beta3"),
        eps: of.number("eps", 1e-6),
        weight_decay: of.number("weight_decay", 0.01),
        precision: Precision::eight_bits(of),
    };
    let state = |param: &Param| {
        let zeros = |map| Moment::zeros(param, settings.precision, map);
        Ok::<_, OptimError>(State {
            step: 0,
            fast: zeros(Map::signed())?,
            slow: zeros(Map::signed())?,
            square: zeros(Map::unsigned())?,
        })
    };
    let states = input.params.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Box::new(AdEmaMix {
        settings,
        params: input.params,
        states,
    }))
}

struct Settings {
    betas: [f64; 3],
    /// Weight of the slow mean.
    alpha: f64,
    /// Steps in which it grows up to that.
    t_alpha: Option<f64>,
    /// Steps in which the slow mean becomes as slow as it will be.
    t_beta3: Option<f64>,
    eps: f64,
    weight_decay: f64,
    precision: Precision,
}

struct State {
    step: u64,
    fast: Moment,
    slow: Moment,
    square: Moment,
}

/// ```text
/// p  <- p * (1 - lr * weight_decay)
/// m1 <- m1 * beta1 + g * (1 - beta1)      m2 <- m2 * beta3 + g * (1 - beta3)      v <- v * beta2 + g * g * (1 - beta2)
/// p  <- p - lr * (m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// In 8 bits the means are quantised after each step; p is changed with what they were before that.
struct AdEmaMix {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

/// What a step multiplies with.
#[derive(Clone, Copy)]
struct Factors {
    keep: f64,
    betas: [f64; 3],
    rests: [f64; 3],
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
            // As fast as the other at first; then its half-life grows evenly.
            let (fast, slow, part) = (beta1.ln(), last.ln(), t / steps);
            last.min((fast * slow / ((1.0 - part) * slow + part * fast)).exp())
        });
        let betas = [beta1, beta2, beta3];
        Factors {
            keep: 1.0 - lr * self.weight_decay,
            betas,
            rests: betas.map(|beta| 1.0 - beta),
            corrections: [1.0 - beta1.powf(t), (1.0 - beta2.powf(t)).sqrt()],
            alpha: self
                .t_alpha
                .map_or(self.alpha, |steps| self.alpha * (t / steps).min(1.0)),
            eps: self.eps,
            lr,
        }
    }
}

for_every_unit! {
    fn kernel(p: &mut [f32], g: &[f32], means: [&mut [f32]; 3], by: Factors) {
        let [fast, slow, square] = means;
        let ([beta1, beta2, beta3], [rest1, rest2, rest3]) = (by.betas.map(|x| x as f32), by.rests.map(|x| x as f32));
        let [first, second] = by.corrections.map(|x| x as f32);
        let (keep, alpha, eps, lr) = (by.keep as f32, by.alpha as f32, by.eps as f32, by.lr as f32);
        for ((((p, g), fast), slow), square) in p.iter_mut().zip(g).zip(fast).zip(slow).zip(square) {
            *fast = *fast * beta1 + g * rest1;
            *slow = *slow * beta3 + g * rest3;
            *square = *square * beta2 + g * rest2 * g;
            let along = *fast / first + *slow * alpha;
            *p = *p * keep - along / (square.sqrt() / second + eps) * lr;
        }
    }
}

impl State {
    /// The same by the tensor library's operations, for other devices.
    fn composed(&mut self, param: &Param, grad: &Tensor, by: Factors) -> Result<(), OptimError> {
        let p = param.var.as_tensor().detach();
        let grad = grad.to_dtype(DType::F32)?.detach();
        let mean = |old: &Moment, new: &Tensor, at: usize| -> Result<Tensor, OptimError> {
            Ok(((old.read()? * by.betas[at])? + (new * by.rests[at])?)?)
        };
        let fast = mean(&self.fast, &grad, 0)?;
        let slow = mean(&self.slow, &grad, 2)?;
        let square = ((self.square.read()? * by.betas[1])? + ((&grad * by.rests[1])? * &grad)?)?;
        let over = |t: &Tensor, by: f64| t.broadcast_div(&Tensor::new(by as f32, t.device())?);
        let along = (over(&fast, by.corrections[0])? + (&slow * by.alpha)?)?;
        let update = (along / (over(&square.sqrt()?, by.corrections[1])? + by.eps)?)?;
        param.var.set(&((p * by.keep)? - (update * by.lr)?)?)?;
        self.fast.write(fast)?;
        self.slow.write(slow)?;
        self.square.write(square)
    }
}

impl Optimizer for AdEmaMix {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            state.step += 1;
            let by = self.settings.factors(lr, state.step);
            if fused::takes(param) {
                let means = [&mut state.fast, &mut state.slow, &mut state.square];
                fused::update(param, grad, means, |p, g, means| kernel(p, g, means, by))?;
            } else {
                state.composed(param, grad, by)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |part: &str| format!("{}.{part}", param.name);
            out.insert(name("step"), saved::count(state.step)?);
            state.fast.save(&name("exp_avg"), &mut out);
            state.slow.save(&name("exp_avg_slow"), &mut out);
            state.square.save(&name("exp_avg_sq"), &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |part: &str| format!("{}.{part}", param.name);
            let step = saved.count(&name("step"))?;
            let mut moment =
                |part: &str, map| Moment::load(&mut saved, &name(part), param, self.settings.precision, map);
            states.push(State {
                step,
                fast: moment("exp_avg", Map::signed())?,
                slow: moment("exp_avg_slow", Map::signed())?,
                square: moment("exp_avg_sq", Map::unsigned())?,
            });
        }
        saved.done()?;
        self.states = states;
        Ok(())
    }
}
