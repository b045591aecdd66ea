//! Automagic2 as in ai-toolkit (its `toolkit/optimizers/automagic2.py`): Adafactor's update with one learning rate per
//! parameter. The rate grows by `lr_bump` if enough elements keep the sign of their update, and otherwise shrinks by
//! `lr_bump`.
//!
//! ai-toolkit updates each parameter during the backward pass, so that it neither clips nor accumulates gradients. Here
//! gradients are accumulated.

use super::factored::SecondMoment;
use super::fused;
use super::kernels::multiversion;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use super::state_tensor::StateTensor;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `automagic2`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let settings = Settings {
        range: options.lr_range(spec.name),
        bump: options.number("lr_bump", 1e-6),
        beta2: options.number("beta2", 0.999),
        eps: options.number("eps", 1e-30),
        clip_threshold: options.number("clip_threshold", 1.0),
        weight_decay: options.number("weight_decay", 0.0),
        agreement_threshold: options.number("agreement_threshold", 0.5),
    };
    let states = spec.params.iter().map(|p| State::new(p, spec.lr));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Automagic2 {
        settings,
        params: spec.params,
        states,
    }))
}

struct Settings {
    /// `min_lr` and `max_lr`.
    range: (f64, f64),
    bump: f64,
    beta2: f64,
    eps: f64,
    clip_threshold: f64,
    weight_decay: f64,
    /// The fraction of the elements that must keep their sign.
    agreement_threshold: f64,
}

struct State {
    step: u64,
    lr: f64,
    second_moment: SecondMoment,
    /// 1 for each element whose last update was positive, otherwise 0; `u8`.
    signs: StateTensor,
}

impl State {
    fn new(param: &Param, lr: f64) -> Result<Self, OptimError> {
        let var = &param.var;
        Ok(Self {
            step: 0,
            lr,
            second_moment: SecondMoment::zeros(param)?,
            signs: StateTensor::new(Tensor::zeros(var.shape(), DType::U8, var.device())?),
        })
    }
}

/// ```text
/// u  <- g / sqrt(second moment), at most clip_threshold large (root mean square)
/// a  <- the fraction of the elements whose (u > 0) is unchanged
/// lr <- lr + lr_bump if a >= agreement_threshold, else lr - lr_bump, from min_lr to max_lr     (not at the first step)
/// p  <- p * (1 - lr * weight_decay) - lr * u
/// ```
struct Automagic2 {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

multiversion! {
    /// Updates the signs; returns how many did not change.
    fn count_kept_signs(u: &[f32], signs: &mut [u8]) -> u32 {
        let mut count = 0;
        for (u, sign) in u.iter().zip(signs) {
            let is_positive = u8::from(*u > 0.0);
            count += u32::from(is_positive == *sign);
            *sign = is_positive;
        }
        count
    }
}

multiversion! {
    fn apply_update(p: &mut [f32], u: &[f32], param_scale: f32, lr: f32) {
        for (p, u) in p.iter_mut().zip(u) {
            *p = *p * param_scale - u * lr;
        }
    }
}

impl State {
    /// Updates the signs; returns the fraction of the elements whose update kept its sign.
    fn agreement(&mut self, param: &Param, update: &Tensor) -> Result<f64, OptimError> {
        let count = if fused::is_supported(param) {
            let counts = fused::map_with_state(
                param,
                update,
                &mut self.signs,
                |elements| elements.u8(),
                |_, u, s| count_kept_signs(u, s),
            )?;
            counts.into_iter().map(f64::from).sum::<f64>()
        } else {
            let is_positive = update.gt(0f64)?;
            let same = is_positive.eq(self.signs.get())?.to_dtype(DType::F32)?;
            self.signs.set(is_positive);
            f64::from(same.sum_all()?.to_scalar::<f32>()?)
        };
        Ok(count / update.elem_count().max(1) as f64)
    }

    fn apply_update(&self, param: &Param, update: &Tensor, decay: f64) -> Result<(), OptimError> {
        let (lr, param_scale) = (self.lr, 1.0 - self.lr * decay);
        if fused::is_supported(param) {
            return fused::update(param, update, [], |p, u, []| {
                apply_update(p, u, param_scale as f32, lr as f32)
            });
        }
        let p = param.value()?;
        param.set(&((p * param_scale)? - (update * lr)?)?)?;
        Ok(())
    }
}

impl Optimizer for Automagic2 {
    fn step(&mut self, grads: &Grads, _: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let s = &self.settings;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let update = state.second_moment.update(&grad, s.beta2, s.eps, s.clip_threshold)?;
            let agreement = state.agreement(param, &update)?;
            if state.step > 0 {
                let agrees = agreement >= s.agreement_threshold;
                let lr = state.lr + if agrees { s.bump } else { -s.bump };
                state.lr = lr.max(s.range.0).min(s.range.1);
            }
            state.step += 1;
            state.apply_update(param, &update, s.weight_decay)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            out.insert(name("step"), saved::count(state.step)?);
            out.insert(name("lr"), saved::number(state.lr)?);
            out.insert(name("signs"), state.signs.snapshot());
            state.second_moment.save(param, &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            states.push(State {
                step: saved.count(&name("step"))?,
                lr: saved.number(&name("lr"))?,
                signs: saved.state_tensor(&name("signs"), DType::U8, param.var.dims(), param.var.device())?,
                second_moment: SecondMoment::load(&mut saved, param)?,
            });
        }
        saved.finish()?;
        self.states = states;
        Ok(())
    }

    /// The mean of the parameters' rates, as in ai-toolkit.
    fn effective_lr(&self, lr: f64) -> Result<f64, OptimError> {
        let rates: Vec<f64> = self.states.iter().map(|state| state.lr).collect();
        Ok(super::optimizer::mean(&rates).unwrap_or(lr))
    }

    /// The updates are bounded, and ai-toolkit's trainer does not clip gradients that are applied in the backward pass.
    fn uses_gradient_clipping(&self) -> bool {
        false
    }
}
