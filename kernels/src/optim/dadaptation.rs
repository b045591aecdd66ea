//! D-Adaptation (Defazio and Mishchenko, arXiv 2301.07733) as in the package dadaptation 3.2: Adam or Lion that
//! estimate their own learning rate, `d`. Prodigy is its successor.
//!
//! In ai-toolkit `dadaptationadam` and `dadaptationlion` stop with an error (both pass an `eps` to Lion, which has
//! none). Here they are D-Adaptation with Adam and with Lion.

use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `dadaptation`, `dadaptationadam`, `dadaptationlion`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let lion = matches!(spec.name, OptimizerName::DAdaptationLion);
    let betas = options.pair("betas", if lion { (0.9, 0.99) } else { (0.9, 0.999) });
    let settings = Settings {
        lion,
        betas,
        eps: options.number("eps", 1e-6),
        weight_decay: options.number("weight_decay", 0.0),
        decouple: lion || options.flag("decouple", false),
        use_bias_correction: options.flag("use_bias_correction", false),
        growth_rate: options.optional("growth_rate").unwrap_or(f64::INFINITY),
    };
    let estimate = Estimate {
        d: options.number("d0", 1e-6),
        numerator: 0.0,
        steps: 0,
    };
    let state = |param: &Param| {
        let zero = || Tensor::zeros(param.var.shape(), DType::F32, param.var.device());
        Ok::<_, OptimError>(State {
            exp_avg: zero()?,
            exp_avg_sq: (!lion).then(zero).transpose()?,
            s: zero()?,
        })
    };
    let states = spec.params.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Box::new(DAdaptation {
        settings,
        estimate,
        params: spec.params,
        states,
    }))
}

struct Settings {
    lion: bool,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    decouple: bool,
    use_bias_correction: bool,
    growth_rate: f64,
}

/// The estimate of `d`, shared by all parameters.
#[derive(Clone, Copy)]
struct Estimate {
    d: f64,
    numerator: f64,
    steps: u64,
}

struct State {
    exp_avg: Tensor,
    /// Only with Adam.
    exp_avg_sq: Option<Tensor>,
    /// The running mean of the gradients (Adam) or of the update directions (Lion).
    s: Tensor,
}

/// ```text
/// b <- sqrt(beta2)                                                with dlr = d * lr
/// Adam: r <- sum(dlr * g.s / (sqrt(v) + eps))    m <- m * beta1 + g * dlr * (1 - beta1)    v <- v * beta2 + g^2 * (1 - beta2)
///       s <- s * b + g * dlr * (1 - b)           p <- p - m / (sqrt(v) + eps)
/// Lion: u <- sign(m * beta1 + g * (1 - beta1))   p <- p - dlr * u    m <- m * beta2 + g * dlr * (1 - beta2)
///       r <- sum(dlr * u.s)                      s <- s * b + u * dlr * (1 - b)
/// n <- n * b + r * (1 - b)                       d <- max(d, n / ((1 - b) * sum(|s|)))
/// ```
struct DAdaptation {
    settings: Settings,
    estimate: Estimate,
    params: Vec<Param>,
    states: Vec<State>,
}

fn sum_all(t: &Tensor) -> Result<f64, OptimError> {
    Ok(f64::from(t.sum_all()?.to_scalar::<f32>()?))
}

impl State {
    fn running_mean(old: &Tensor, new: &Tensor, beta: f64, weight: f64) -> Result<Tensor, OptimError> {
        Ok(((old * beta)? + (new * weight)?)?)
    }

    /// Updates the moments and `s`, and for Lion also the parameter. Returns the addition to the numerator and the sum
    /// of |s|.
    fn update_state(&mut self, param: &Param, grad: &Tensor, s: &Settings, dlr: f64) -> Result<[f64; 2], OptimError> {
        let (beta1, beta2) = s.betas;
        let sqrt_beta2 = beta2.sqrt();
        let p = param.value()?;
        let mut grad = grad.to_dtype(DType::F32)?.detach();
        let (direction, product) = match &mut self.exp_avg_sq {
            None => {
                let direction = Self::running_mean(&self.exp_avg, &grad, beta1, 1.0 - beta1)?.sign()?;
                let decayed = (p * (1.0 - dlr * s.weight_decay))?;
                param.set(&(decayed - (&direction * dlr)?)?)?;
                self.exp_avg = Self::running_mean(&self.exp_avg, &grad, beta2, (1.0 - beta2) * dlr)?;
                let product = (&direction * &self.s)?;
                (direction, product)
            }
            Some(exp_avg_sq) => {
                if !s.decouple && s.weight_decay != 0.0 {
                    grad = (grad + (p * s.weight_decay)?)?;
                }
                let product = (&grad * (&self.s / (exp_avg_sq.sqrt()? + s.eps)?)?)?;
                self.exp_avg = Self::running_mean(&self.exp_avg, &grad, beta1, dlr * (1.0 - beta1))?;
                *exp_avg_sq = Self::running_mean(exp_avg_sq, &grad.sqr()?, beta2, 1.0 - beta2)?;
                (grad, product)
            }
        };
        self.s = Self::running_mean(&self.s, &direction, sqrt_beta2, dlr * (1.0 - sqrt_beta2))?;
        Ok([dlr * sum_all(&product)?, sum_all(&self.s.abs()?)?])
    }

    /// Updates the parameter with Adam's formula; does nothing for Lion.
    fn apply_adam_update(&self, param: &Param, s: &Settings, dlr: f64) -> Result<(), OptimError> {
        let Some(exp_avg_sq) = &self.exp_avg_sq else {
            return Ok(());
        };
        let decay = if s.decouple { s.weight_decay * dlr } else { 0.0 };
        let p = (param.value()? * (1.0 - decay))?;
        let update = (&self.exp_avg / (exp_avg_sq.sqrt()? + s.eps)?)?;
        param.set(&(p - update)?)?;
        Ok(())
    }
}

impl Optimizer for DAdaptation {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        // As in Prodigy: a learning rate of 0 changes neither the parameters nor the estimate.
        if lr <= 0.0 {
            return Ok(());
        }
        let (s, Estimate { d, numerator, steps }) = (&self.settings, self.estimate);
        let (sqrt_beta2, t) = (s.betas.1.sqrt(), steps as f64 + 1.0);
        let mut dlr = d * lr;
        if s.use_bias_correction {
            dlr *= (1.0 - s.betas.1.powf(t)).sqrt() / (1.0 - s.betas.0.powf(t));
        }
        let (mut numerator_delta, mut s_abs_sum) = (0.0, 0.0);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let [delta, abs_sum] = state.update_state(param, grad, s, dlr)?;
            numerator_delta += delta;
            s_abs_sum += abs_sum;
        }
        if s_abs_sum == 0.0 {
            return Ok(());
        }
        let numerator = numerator * sqrt_beta2 + numerator_delta * (1.0 - sqrt_beta2);
        let d_hat = numerator / ((1.0 - sqrt_beta2) * s_abs_sum);
        self.estimate = Estimate {
            d: d.max(d_hat.min(d * s.growth_rate)),
            numerator,
            steps: steps + 1,
        };
        for ((param, state), grad) in self.params.iter().zip(&self.states).zip(grads) {
            if grad.is_some() {
                state.apply_adam_update(param, s, dlr)?;
            }
        }
        Ok(())
    }

    fn separable(&self) -> bool {
        false
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let e = self.estimate;
        let mut out = BTreeMap::from([
            ("d".to_owned(), saved::number(e.d)?),
            ("d_numerator".to_owned(), saved::number(e.numerator)?),
            ("steps".to_owned(), saved::count(e.steps)?),
        ]);
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            out.insert(name("exp_avg"), state.exp_avg.clone());
            out.insert(name("s"), state.s.clone());
            if let Some(exp_avg_sq) = &state.exp_avg_sq {
                out.insert(name("exp_avg_sq"), exp_avg_sq.clone());
            }
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let estimate = Estimate {
            d: saved.number("d")?,
            numerator: saved.number("d_numerator")?,
            steps: saved.count("steps")?,
        };
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let (dims, device) = (param.var.dims(), param.var.device());
            let mut get = |suffix: &str| saved.tensor(&format!("{}.{suffix}", param.name), DType::F32, dims, device);
            states.push(State {
                exp_avg: get("exp_avg")?,
                s: get("s")?,
                exp_avg_sq: (!self.settings.lion).then(|| get("exp_avg_sq")).transpose()?,
            });
        }
        saved.finish()?;
        (self.estimate, self.states) = (estimate, states);
        Ok(())
    }

    /// `d * lr`, as in ai-toolkit.
    fn effective_lr(&self, lr: f64) -> Result<f64, OptimError> {
        Ok(self.estimate.d * lr)
    }
}
