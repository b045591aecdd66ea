//! Prodigy (Mishchenko and Defazio, arXiv 2306.06101) as prodigyopt 1.1.2 computes it: Adam that estimates its own
//! learning rate, `d`, from how far the weights have moved.

use super::saved::{self, Saved};
use super::{Build, Grads, OptimError, Optimizer, Param, one_each};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `prodigy` and every name that begins so.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let (beta1, beta2) = of.pair("betas", (0.9, 0.999));
    let settings = Settings {
        beta1,
        beta2,
        beta3: of.optional("beta3").unwrap_or(beta2.sqrt()),
        eps: of.number("eps", 1e-6),
        weight_decay: of.number("weight_decay", 0.0),
        decouple: of.flag("decouple", true),
        use_bias_correction: of.flag("use_bias_correction", false),
        safeguard_warmup: of.flag("safeguard_warmup", false),
        d0: of.number("d0", 1e-6),
        d_coef: of.number("d_coef", 1.0),
        growth_rate: of.optional("growth_rate").unwrap_or(f64::INFINITY),
        slice: usize::try_from(of.whole("slice_p", 1)).unwrap_or(usize::MAX),
    };
    let estimate = Estimate {
        d: settings.d0,
        d_max: settings.d0,
        numerator: 0.0,
        steps: 0,
    };
    let states = input.params.iter().map(|p| State::new(p, &settings));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Prodigy {
        settings,
        estimate,
        params: input.params,
        states,
    }))
}

struct Settings {
    beta1: f64,
    beta2: f64,
    /// Decay of what `d` is estimated from.
    beta3: f64,
    eps: f64,
    weight_decay: f64,
    decouple: bool,
    use_bias_correction: bool,
    safeguard_warmup: bool,
    d0: f64,
    d_coef: f64,
    growth_rate: f64,
    /// `d` is estimated from every so-manyth element.
    slice: usize,
}

/// What all parameters share.
#[derive(Clone, Copy)]
struct Estimate {
    d: f64,
    d_max: f64,
    numerator: f64,
    steps: u64,
}

struct State {
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    /// Running sum of gradients; flat, sliced.
    s: Tensor,
    /// The weights before the first update; flat, sliced.
    p0: Tensor,
}

/// Every `slice`-th element of a tensor.
fn sliced(t: &Tensor, slice: usize) -> Result<Tensor, OptimError> {
    let flat = t.flatten_all()?;
    if slice == 1 {
        return Ok(flat);
    }
    let index: Vec<u32> = (0..flat.elem_count()).step_by(slice).map(|i| i as u32).collect();
    let count = index.len();
    Ok(flat.index_select(&Tensor::from_vec(index, count, flat.device())?, 0)?)
}

fn sum(t: &Tensor) -> Result<f64, OptimError> {
    Ok(f64::from(t.sum_all()?.to_scalar::<f32>()?))
}

impl State {
    fn new(param: &Param, settings: &Settings) -> Result<Self, OptimError> {
        let zero = Tensor::zeros(param.var.shape(), DType::F32, param.var.device())?;
        let p0 = sliced(&param.var.as_tensor().detach().copy()?, settings.slice)?;
        Ok(Self {
            exp_avg: zero.clone(),
            exp_avg_sq: zero,
            s: p0.zeros_like()?,
            p0,
        })
    }
}

/// ```text
/// m <- m * beta1 + g * d * (1 - beta1)          v <- v * beta2 + g^2 * d^2 * (1 - beta2)
/// r <- r * beta3 + sum(d / d0 * dlr * g.(p0 - p))     s <- s * beta3 + g * d / d0 * dlr        with dlr = d * lr
/// d <- max(d, d_coef * r / sum(|s|))
/// p <- p - dlr * m / (sqrt(v) + d * eps)
/// ```
struct Prodigy {
    settings: Settings,
    estimate: Estimate,
    params: Vec<Param>,
    states: Vec<State>,
}

impl Prodigy {
    /// Takes in the gradients. What the numerator of `d` grows by, and its denominator.
    fn learn(&mut self, grads: &[Option<Tensor>], lr: f64, dlr: f64) -> Result<(f64, f64), OptimError> {
        let s = &self.settings;
        let d = self.estimate.d;
        let (mut numerator, mut denominator) = (0.0, 0.0);
        if lr <= 0.0 {
            return Ok((numerator, denominator));
        }
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let p = param.var.as_tensor().detach();
            let few = sliced(grad, s.slice)?;
            numerator += d / s.d0 * dlr * sum(&(&few * (&state.p0 - sliced(&p, s.slice)?)?)?)?;
            if s.beta1 > 0.0 {
                state.exp_avg = ((&state.exp_avg * s.beta1)? + (grad * (d * (1.0 - s.beta1)))?)?;
            }
            state.exp_avg_sq = ((&state.exp_avg_sq * s.beta2)? + (grad.sqr()? * (d * d * (1.0 - s.beta2)))?)?;
            let weight = d / s.d0 * if s.safeguard_warmup { d } else { dlr };
            state.s = ((&state.s * s.beta3)? + (few * weight)?)?;
            denominator += sum(&state.s.abs()?)?;
        }
        Ok((numerator, denominator))
    }
}

impl Optimizer for Prodigy {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        let Estimate {
            d,
            d_max,
            numerator,
            steps,
        } = self.estimate;
        let t = steps as f64 + 1.0;
        let mut dlr = d * lr;
        if self.settings.use_bias_correction {
            dlr *= (1.0 - self.settings.beta2.powf(t)).sqrt() / (1.0 - self.settings.beta1.powf(t));
        }
        let mut coupled = Grads::with_capacity(grads.len());
        for (param, grad) in self.params.iter().zip(grads) {
            let grad = grad
                .as_ref()
                .map(|g| Ok::<_, OptimError>(g.to_dtype(DType::F32)?.detach()));
            let mut grad = grad.transpose()?;
            if let Some(grad) = &mut grad
                && self.settings.weight_decay != 0.0
                && !self.settings.decouple
            {
                let decay = (param.var.as_tensor().detach() * self.settings.weight_decay)?;
                *grad = (&*grad + decay)?;
            }
            coupled.push(grad);
        }
        let (grown, denominator) = self.learn(&coupled, lr, dlr)?;
        // No gradient at all, or a learning rate of 0: nothing moves, and nothing is counted.
        if denominator == 0.0 {
            return Ok(());
        }
        let s = &self.settings;
        let numerator = numerator * s.beta3 + grown;
        let hat = s.d_coef * numerator / denominator;
        let first = if d == s.d0 { d.max(hat) } else { d };
        let d_max = d_max.max(hat);
        self.estimate = Estimate {
            d: d_max.min(first * s.growth_rate),
            d_max,
            numerator,
            steps: steps + 1,
        };
        for ((param, state), grad) in self.params.iter().zip(&self.states).zip(&coupled) {
            let Some(grad) = grad else { continue };
            let mut p = param.var.as_tensor().detach();
            let denominator = (state.exp_avg_sq.sqrt()? + self.estimate.d * s.eps)?;
            if s.weight_decay != 0.0 && s.decouple {
                p = (p * (1.0 - s.weight_decay * dlr))?;
            }
            let update = if s.beta1 > 0.0 {
                ((&state.exp_avg / denominator)? * dlr)?
            } else {
                ((grad / denominator)? * (dlr * self.estimate.d))?
            };
            param.var.set(&(p - update)?)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let e = self.estimate;
        let mut out = BTreeMap::from([
            ("d".to_owned(), saved::number(e.d)?),
            ("d_max".to_owned(), saved::number(e.d_max)?),
            ("d_numerator".to_owned(), saved::number(e.numerator)?),
            ("steps".to_owned(), saved::count(e.steps)?),
        ]);
        for (param, state) in self.params.iter().zip(&self.states) {
            for (part, tensor) in [
                ("exp_avg", &state.exp_avg),
                ("exp_avg_sq", &state.exp_avg_sq),
                ("s", &state.s),
                ("p0", &state.p0),
            ] {
                out.insert(format!("{}.{part}", param.name), tensor.clone());
            }
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let estimate = Estimate {
            d: saved.number("d")?,
            d_max: saved.number("d_max")?,
            numerator: saved.number("d_numerator")?,
            steps: saved.count("steps")?,
        };
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let dims = param.var.dims();
            let few = [param.var.elem_count().div_ceil(self.settings.slice)];
            let mut get = |part: &str, dims: &[usize]| {
                saved.tensor(&format!("{}.{part}", param.name), DType::F32, dims, param.var.device())
            };
            states.push(State {
                exp_avg: get("exp_avg", dims)?,
                exp_avg_sq: get("exp_avg_sq", dims)?,
                s: get("s", &few)?,
                p0: get("p0", &few)?,
            });
        }
        saved.done()?;
        (self.estimate, self.states) = (estimate, states);
        Ok(())
    }

    /// `d * lr`, as ai-toolkit shows it.
    fn shown_lr(&self, lr: f64) -> Result<f64, OptimError> {
        Ok(self.estimate.d * lr)
    }
}
