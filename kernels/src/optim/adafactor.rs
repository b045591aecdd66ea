//! Adafactor as in transformers and ai-toolkit. `relative_step`, with which it chooses the learning rate itself, is off by default, and
//! so are `warmup_init` and `scale_parameter`.

use super::blockwise::QuantMap;
use super::factored::{SecondMoment, rms};
use super::fused;
use super::kernels::multiversion;
use super::moment::{Moment, Precision};
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `adafactor`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let settings = Settings {
        eps: options.pair("eps", (1e-30, 1e-3)),
        clip_threshold: options.number("clip_threshold", 1.0),
        decay_rate: options.number("decay_rate", -0.8),
        beta1: options.optional("beta1"),
        weight_decay: options.number("weight_decay", 0.0),
        scale_parameter: options.flag("scale_parameter", false),
        relative_step: options.flag("relative_step", false),
        warmup_init: options.flag("warmup_init", false),
    };
    let states = spec.params.iter().map(|p| State::new(p, &settings));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Adafactor {
        settings,
        params: spec.params,
        states,
    }))
}

struct Settings {
    /// The constant added to squared gradients, and the minimum scale of a parameter.
    eps: (f64, f64),
    clip_threshold: f64,
    decay_rate: f64,
    beta1: Option<f64>,
    weight_decay: f64,
    scale_parameter: bool,
    /// The learning rate depends on the step, and not on the config.
    relative_step: bool,
    /// The learning rate rises from 1e-6.
    warmup_init: bool,
}

impl Settings {
    /// The learning rate of a parameter's step, before it is scaled; `lr` is that of the config.
    fn rate(&self, step: u64, lr: f64) -> f64 {
        if !self.relative_step {
            return lr;
        }
        let max = if self.warmup_init { 1e-6 * step as f64 } else { 1e-2 };
        max.min(1.0 / (step as f64).sqrt())
    }
}

struct State {
    step: u64,
    second_moment: SecondMoment,
    exp_avg: Option<Moment>,
}

impl State {
    fn new(param: &Param, settings: &Settings) -> Result<Self, OptimError> {
        let zeros = |_| Moment::zeros(param, Precision::Float32, QuantMap::signed());
        Ok(Self {
            step: 0,
            second_moment: SecondMoment::zeros(param)?,
            exp_avg: settings.beta1.map(zeros).transpose()?,
        })
    }
}

/// ```text
/// lr    <- min(1e-6 * t (warmup_init), else 1e-2, 1 / sqrt(t))    (relative_step)
/// decay = 1 - t^decay_rate
/// u  <- g / sqrt(second moment with that decay), at most clip_threshold large (root mean square)
/// lr <- lr * max(eps2, root mean square of p)            (scale_parameter)
/// m  <- m * beta1 + lr * u * (1 - beta1),  u <- m        (beta1)
/// p  <- p * (1 - lr * weight_decay) - lr * u
/// ```
struct Adafactor {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

multiversion! {
    fn apply_update(p: &mut [f32], update: &[f32], param_scale: f32, lr: f32) {
        for (p, u) in p.iter_mut().zip(update) {
            *p = *p * param_scale - *u * lr;
        }
    }
}

multiversion! {
    /// `betas`: beta1 and 1 - beta1.
    fn apply_moment(p: &mut [f32], update: &[f32], moment: &mut [f32], param_scale: f32, lr: f32, betas: [f32; 2]) {
        for ((p, u), m) in p.iter_mut().zip(update).zip(moment) {
            *m = *m * betas[0] + *u * lr * betas[1];
            *p = *p * param_scale - *m;
        }
    }
}

impl Optimizer for Adafactor {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let s = &self.settings;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let mut p = param.value()?;
            state.step += 1;
            let lr = s.rate(state.step, lr);
            let lr = if s.scale_parameter {
                lr * rms(&p)?.max(s.eps.1)
            } else {
                lr
            };
            let decay = 1.0 - (state.step as f64).powf(s.decay_rate);
            let update = state.second_moment.update(&grad, decay, s.eps.0, s.clip_threshold)?;
            let param_scale = 1.0 - lr * s.weight_decay;
            let moment = s.beta1.zip(state.exp_avg.as_mut());
            if fused::is_supported(param) {
                let (param_scale, lr) = (param_scale as f32, lr as f32);
                match moment {
                    None => fused::update(param, &update, [], |p, u, []| apply_update(p, u, param_scale, lr))?,
                    Some((beta1, exp_avg)) => {
                        let betas = [beta1 as f32, (1.0 - beta1) as f32];
                        fused::update(param, &update, [exp_avg], |p, u, [m]| {
                            apply_moment(p, u, m, param_scale, lr, betas)
                        })?;
                    }
                }
                continue;
            }
            let mut update = (update * lr)?;
            if let Some((beta1, exp_avg)) = moment {
                let mean = ((exp_avg.to_f32()? * beta1)? + (update * (1.0 - beta1))?)?;
                exp_avg.set(mean.clone())?;
                update = mean;
            }
            if s.weight_decay != 0.0 {
                p = (p * param_scale)?;
            }
            param.set(&(p - update)?)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            out.insert(format!("{}.step", param.name), saved::count(state.step)?);
            state.second_moment.save(param, &mut out);
            if let Some(exp_avg) = &state.exp_avg {
                exp_avg.save(&format!("{}.exp_avg", param.name), &mut out);
            }
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            let exp_avg = match self.settings.beta1 {
                Some(_) => Some(Moment::load(
                    &mut saved,
                    &name("exp_avg"),
                    param,
                    Precision::Float32,
                    QuantMap::signed(),
                )?),
                None => None,
            };
            states.push(State {
                step: saved.count(&name("step"))?,
                second_moment: SecondMoment::load(&mut saved, param)?,
                exp_avg,
            });
        }
        saved.finish()?;
        self.states = states;
        Ok(())
    }

    /// The optimizer bounds its updates itself, and ai-toolkit does not clip its gradients either.
    fn uses_gradient_clipping(&self) -> bool {
        false
    }
}
