//! Automagic2 as ai-toolkit computes it (its `toolkit/optimizers/automagic2.py`): Adafactor's update with a learning rate for
//! every parameter, which grows by `lr_bump` when enough of its elements keep the sign of their update, and shrinks by as
//! much when they do not.
//!
//! ai-toolkit updates a parameter as soon as its gradient is there, in the backward pass, so that nothing can clip it and
//! gradients are not accumulated; here they are.

use super::factored::SecondMoment;
use super::fused;
use super::kernels::for_every_unit;
use super::saved::{self, Saved};
use super::state_tensor::StateTensor;
use super::{Build, Grads, OptimError, Optimizer, Param, one_each};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `automagic2`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let settings = Settings {
        range: of.lr_range(input.name),
        bump: of.number("lr_bump", 1e-6),
        beta2: of.number("beta2", 0.999),
        eps: of.number("eps", 1e-30),
        clip_threshold: of.number("clip_threshold", 1.0),
        weight_decay: of.number("weight_decay", 0.0),
        agreement_threshold: of.number("agreement_threshold", 0.5),
    };
    let states = input.params.iter().map(|p| State::new(p, input.lr));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Automagic2 {
        settings,
        params: input.params,
        states,
    }))
}

struct Settings {
    /// Least and greatest learning rate.
    range: (f64, f64),
    bump: f64,
    beta2: f64,
    eps: f64,
    clip_threshold: f64,
    weight_decay: f64,
    /// Part of the elements that must keep their sign.
    agreement_threshold: f64,
}

struct State {
    step: u64,
    lr: f64,
    second: SecondMoment,
    /// 1 where the last update was positive; a byte each.
    signs: StateTensor,
}

impl State {
    fn new(param: &Param, lr: f64) -> Result<Self, OptimError> {
        let var = &param.var;
        Ok(Self {
            step: 0,
            lr,
            second: SecondMoment::zeros(param)?,
            signs: StateTensor::new(Tensor::zeros(var.shape(), DType::U8, var.device())?),
        })
    }
}

/// ```text
/// u  <- g / sqrt(second moment), at most clip_threshold large (root mean square)
/// a  <- the part of the elements whose (u > 0) is as it was
/// lr <- lr + lr_bump if a >= agreement_threshold, else lr - lr_bump, from min_lr to max_lr     (not at the first step)
/// p  <- p * (1 - lr * weight_decay) - lr * u
/// ```
struct Automagic2 {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

for_every_unit! {
    /// How many signs stay as they were.
    fn compare(u: &[f32], signs: &mut [u8]) -> u32 {
        let mut count = 0;
        for (u, sign) in u.iter().zip(signs) {
            let now = u8::from(*u > 0.0);
            count += u32::from(now == *sign);
            *sign = now;
        }
        count
    }
}

for_every_unit! {
    fn go(p: &mut [f32], u: &[f32], keep: f32, lr: f32) {
        for (p, u) in p.iter_mut().zip(u) {
            *p = *p * keep - u * lr;
        }
    }
}

impl State {
    /// The part of the elements whose update keeps its sign.
    fn agreement(&mut self, param: &Param, update: &Tensor) -> Result<f64, OptimError> {
        let count = if fused::takes(param) {
            let counts = fused::beside(
                param,
                update,
                &mut self.signs,
                |part| part.u8(),
                |_, u, s| compare(u, s),
            )?;
            counts.into_iter().map(f64::from).sum::<f64>()
        } else {
            let now = update.gt(0f64)?;
            let same = now.eq(self.signs.get())?.to_dtype(DType::F32)?;
            self.signs.set(now);
            f64::from(same.sum_all()?.to_scalar::<f32>()?)
        };
        Ok(count / update.elem_count().max(1) as f64)
    }

    fn go(&self, param: &Param, update: &Tensor, decay: f64) -> Result<(), OptimError> {
        let (lr, keep) = (self.lr, 1.0 - self.lr * decay);
        if fused::takes(param) {
            return fused::update(param, update, [], |p, u, []| go(p, u, keep as f32, lr as f32));
        }
        let p = param.var.as_tensor().detach();
        param.var.set(&((p * keep)? - (update * lr)?)?)?;
        Ok(())
    }
}

impl Optimizer for Automagic2 {
    fn step(&mut self, grads: &Grads, _: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        let s = &self.settings;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let update = state.second.update(&grad, s.beta2, s.eps, s.clip_threshold)?;
            let agreement = state.agreement(param, &update)?;
            if state.step > 0 {
                let enough = agreement >= s.agreement_threshold;
                let lr = state.lr + if enough { s.bump } else { -s.bump };
                state.lr = lr.max(s.range.0).min(s.range.1);
            }
            state.step += 1;
            state.go(param, &update, s.weight_decay)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |part: &str| format!("{}.{part}", param.name);
            out.insert(name("step"), saved::count(state.step)?);
            out.insert(name("lr"), saved::number(state.lr)?);
            out.insert(name("signs"), state.signs.lend());
            state.second.save(param, &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |part: &str| format!("{}.{part}", param.name);
            states.push(State {
                step: saved.count(&name("step"))?,
                lr: saved.number(&name("lr"))?,
                signs: saved.kept(&name("signs"), DType::U8, param.var.dims(), param.var.device())?,
                second: SecondMoment::load(&mut saved, param)?,
            });
        }
        saved.done()?;
        self.states = states;
        Ok(())
    }

    /// The mean of all parameters' rates, as ai-toolkit shows it.
    fn shown_lr(&self, lr: f64) -> Result<f64, OptimError> {
        let rates: Vec<f64> = self.states.iter().map(|state| state.lr).collect();
        Ok(super::mean(&rates).unwrap_or(lr))
    }

    /// Its updates are bounded, and ai-toolkit's trainer comes too late to clip them.
    fn wants_clipping(&self) -> bool {
        false
    }
}
