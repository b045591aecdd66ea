//! D-Adaptation (Defazio and Mishchenko, arXiv 2301.07733) as the package dadaptation 3.2 computes it: Adam or Lion that
//! estimate their own learning rate, `d`, as Prodigy does after them.
//!
//! In ai-toolkit `dadaptationadam` and `dadaptationlion` stop with an error (both give Lion an `eps`, which it does not have);
//! here they are what they are called.

use super::saved::{self, Saved};
use super::{Build, Grads, OptimError, Optimizer, Param, one_each};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `dadaptation`, `dadaptationadam`, `dadaptationlion`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let lion = matches!(input.name, OptimizerName::DAdaptationLion);
    let betas = of.pair("betas", if lion { (0.9, 0.99) } else { (0.9, 0.999) });
    let settings = Settings {
        lion,
        betas,
        eps: of.number("eps", 1e-6),
        weight_decay: of.number("weight_decay", 0.0),
        decouple: lion || of.flag("decouple", false),
        use_bias_correction: of.flag("use_bias_correction", false),
        growth_rate: of.optional("growth_rate").unwrap_or(f64::INFINITY),
    };
    let estimate = Estimate {
        d: of.number("d0", 1e-6),
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
    let states = input.params.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Box::new(DAdaptation {
        settings,
        estimate,
        params: input.params,
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

/// What all parameters share.
#[derive(Clone, Copy)]
struct Estimate {
    d: f64,
    numerator: f64,
    steps: u64,
}

struct State {
    exp_avg: Tensor,
    /// Adam's.
    exp_avg_sq: Option<Tensor>,
    /// Running mean of gradients, or of Lion's directions.
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

fn sum(t: &Tensor) -> Result<f64, OptimError> {
    Ok(f64::from(t.sum_all()?.to_scalar::<f32>()?))
}

impl State {
    fn mean(old: &Tensor, new: &Tensor, beta: f64, weight: f64) -> Result<Tensor, OptimError> {
        Ok(((old * beta)? + (new * weight)?)?)
    }

    /// Takes in a gradient, and for Lion moves the parameter. What the numerator grows by, and the size of `s`.
    fn learn(&mut self, param: &Param, grad: &Tensor, s: &Settings, dlr: f64) -> Result<[f64; 2], OptimError> {
        let (beta1, beta2) = s.betas;
        let root = beta2.sqrt();
        let p = param.var.as_tensor().detach();
        let mut grad = grad.to_dtype(DType::F32)?.detach();
        let (along, product) = match &mut self.exp_avg_sq {
            None => {
                let along = Self::mean(&self.exp_avg, &grad, beta1, 1.0 - beta1)?.sign()?;
                let kept = (p * (1.0 - dlr * s.weight_decay))?;
                param.var.set(&(kept - (&along * dlr)?)?)?;
                self.exp_avg = Self::mean(&self.exp_avg, &grad, beta2, (1.0 - beta2) * dlr)?;
                let product = (&along * &self.s)?;
                (along, product)
            }
            Some(square) => {
                if !s.decouple && s.weight_decay != 0.0 {
                    grad = (grad + (p * s.weight_decay)?)?;
                }
                let product = (&grad * (&self.s / (square.sqrt()? + s.eps)?)?)?;
                self.exp_avg = Self::mean(&self.exp_avg, &grad, beta1, dlr * (1.0 - beta1))?;
                *square = Self::mean(square, &grad.sqr()?, beta2, 1.0 - beta2)?;
                (grad, product)
            }
        };
        self.s = Self::mean(&self.s, &along, root, dlr * (1.0 - root))?;
        Ok([dlr * sum(&product)?, sum(&self.s.abs()?)?])
    }

    /// Moves the parameter, for Adam.
    fn go(&self, param: &Param, s: &Settings, dlr: f64) -> Result<(), OptimError> {
        let Some(square) = &self.exp_avg_sq else { return Ok(()) };
        let decay = if s.decouple { s.weight_decay * dlr } else { 0.0 };
        let p = (param.var.as_tensor().detach() * (1.0 - decay))?;
        let update = (&self.exp_avg / (square.sqrt()? + s.eps)?)?;
        param.var.set(&(p - update)?)?;
        Ok(())
    }
}

impl Optimizer for DAdaptation {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        // As Prodigy: with a learning rate of 0 nothing moves, and nothing is counted.
        if lr <= 0.0 {
            return Ok(());
        }
        let (s, Estimate { d, numerator, steps }) = (&self.settings, self.estimate);
        let (root, t) = (s.betas.1.sqrt(), steps as f64 + 1.0);
        let mut dlr = d * lr;
        if s.use_bias_correction {
            dlr *= (1.0 - s.betas.1.powf(t)).sqrt() / (1.0 - s.betas.0.powf(t));
        }
        let (mut grown, mut size) = (0.0, 0.0);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let [more, part] = state.learn(param, grad, s, dlr)?;
            grown += more;
            size += part;
        }
        if size == 0.0 {
            return Ok(());
        }
        let numerator = numerator * root + grown * (1.0 - root);
        let hat = numerator / ((1.0 - root) * size);
        self.estimate = Estimate {
            d: d.max(hat.min(d * s.growth_rate)),
            numerator,
            steps: steps + 1,
        };
        for ((param, state), grad) in self.params.iter().zip(&self.states).zip(grads) {
            if grad.is_some() {
                state.go(param, s, dlr)?;
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
            let name = |part: &str| format!("{}.{part}", param.name);
            out.insert(name("exp_avg"), state.exp_avg.clone());
            out.insert(name("s"), state.s.clone());
            if let Some(square) = &state.exp_avg_sq {
                out.insert(name("exp_avg_sq"), square.clone());
            }
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let estimate = Estimate {
            d: saved.number("d")?,
            numerator: saved.number("d_numerator")?,
            steps: saved.count("steps")?,
        };
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let (dims, device) = (param.var.dims(), param.var.device());
            let mut get = |part: &str| saved.tensor(&format!("{}.{part}", param.name), DType::F32, dims, device);
            states.push(State {
                exp_avg: get("exp_avg")?,
                s: get("s")?,
                exp_avg_sq: (!self.settings.lion).then(|| get("exp_avg_sq")).transpose()?,
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
