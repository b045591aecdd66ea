//! Automagic3 as in ai-toolkit (its `toolkit/optimizers/automagic3.py`): Adafactor's update with one learning rate for
//! all parameters, on which every element votes. An element votes for a higher rate if its last few updates all had the
//! same sign, for a lower rate if the sign alternated every time, and otherwise not. A vote has the weight of the
//! update's magnitude.
//!
//! With `fused: true`, the default, ai-toolkit updates each parameter during the backward pass, so that it cannot clip
//! gradients. Here gradients are accumulated in both cases.

use super::factored::SecondMoment;
use super::fused;
use super::kernels::multiversion;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use super::state_tensor::StateTensor;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `automagic3`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let range = options.lr_range(spec.name);
    let settings = Settings {
        range,
        beta2: options.number("beta2", 0.999),
        eps: options.number("eps", 1e-30),
        clip_threshold: options.number("clip_threshold", 1.0),
        weight_decay: options.number("weight_decay", 0.0),
        history: options.whole("polarity_history", 8).clamp(2, 8),
        fused: options.flag("fused", true),
    };
    let states = spec.params.iter().map(State::new).collect::<Result<_, _>>()?;
    Ok(Box::new(Automagic3 {
        settings,
        lr: spec.lr.max(range.0).min(range.1),
        params: spec.params,
        states,
    }))
}

struct Settings {
    /// `min_lr` and `max_lr`.
    range: (f64, f64),
    beta2: f64,
    eps: f64,
    clip_threshold: f64,
    weight_decay: f64,
    /// The number of updates that a vote looks at (`polarity_history`).
    history: u64,
    /// Decides only whether the trainer clips gradients: no optimizer here updates in the backward pass by itself.
    fused: bool,
}

struct State {
    step: u64,
    second_moment: SecondMoment,
    /// The signs of the last eight updates of each element, the latest in the lowest bit; `u8`.
    signs: StateTensor,
}

impl State {
    fn new(param: &Param) -> Result<Self, OptimError> {
        let var = &param.var;
        Ok(Self {
            step: 0,
            second_moment: SecondMoment::zeros(param)?,
            signs: StateTensor::new(Tensor::zeros(var.shape(), DType::U8, var.device())?),
        })
    }
}

/// ```text
/// u    <- g / sqrt(second moment), at most clip_threshold large (root mean square, then each element)
/// p    <- p * (1 - lr * weight_decay) - lr * u
/// vote <- (sum of |u| over elements with equal signs - sum over elements with alternating signs) / sum of |u|
/// lr   <- lr * e^vote, from min_lr to max_lr                     (vote over all parameters with a full history)
/// ```
struct Automagic3 {
    settings: Settings,
    lr: f64,
    params: Vec<Param>,
    states: Vec<State>,
}

/// The factors of a step.
#[derive(Clone, Copy)]
struct Factors {
    /// Scale of the parameter: 1 - lr * weight_decay.
    param_scale: f64,
    lr: f64,
    /// The largest update of an element.
    max_update: f64,
    /// A mask of the `history` lowest bits.
    history_mask: u8,
    /// Whether the parameter had enough updates to vote.
    history_is_full: bool,
}

impl Factors {
    /// The histories that vote for a higher rate, and those that vote for a lower one.
    fn vote_patterns(&self) -> [[u8; 2]; 2] {
        let alternating = 0b0101_0101 & self.history_mask;
        [[0, self.history_mask], [alternating, self.history_mask ^ alternating]]
    }
}

multiversion! {
    /// Updates the parameter and the signs; returns the sum of the votes and the sum of their weights.
    fn kernel(p: &mut [f32], u: &[f32], signs: &mut [u8], factors: Factors) -> [f64; 2] {
        let (param_scale, lr, max_update) = (factors.param_scale as f32, factors.lr as f32, factors.max_update as f32);
        let [[none_positive, all_positive], [alternating, alternating_inverted]] = factors.vote_patterns();
        let mut sums = [[0f32; 32]; 2];
        for ((p, u), signs) in p.chunks_mut(32).zip(u.chunks(32)).zip(signs.chunks_mut(32)) {
            let [votes, weights] = &mut sums;
            let sums = votes.iter_mut().zip(weights);
            for (((p, u), signs), (vote, weight)) in p.iter_mut().zip(u).zip(signs).zip(sums) {
                let u = u.max(-max_update).min(max_update);
                *p = *p * param_scale - u * lr;
                *signs = *signs << 1 | u8::from(u > 0.0);
                let last = *signs & factors.history_mask;
                let magnitude = u.abs();
                let up = if (last == none_positive) | (last == all_positive) { magnitude } else { 0.0 };
                let down = if (last == alternating) | (last == alternating_inverted) { magnitude } else { 0.0 };
                *vote += up - down;
                *weight += magnitude;
            }
        }
        sums.map(|sums| sums.iter().map(|sum| f64::from(*sum)).sum())
    }
}

impl State {
    /// Updates the parameter and the signs; returns the sum of the votes and the sum of their weights.
    fn update(&mut self, param: &Param, update: &Tensor, factors: Factors) -> Result<[f64; 2], OptimError> {
        if !fused::is_supported(param) {
            return self.update_with_tensor_ops(param, update, factors);
        }
        let signs = &mut self.signs;
        let sums = fused::map_with_state(
            param,
            update,
            signs,
            |elements| elements.u8(),
            |p, u, signs| kernel(p, u, signs, factors),
        )?;
        Ok(sums.iter().fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]))
    }

    /// The same update with candle's operations, for other devices.
    fn update_with_tensor_ops(
        &mut self,
        param: &Param,
        update: &Tensor,
        factors: Factors,
    ) -> Result<[f64; 2], OptimError> {
        let update = update.clamp(-factors.max_update, factors.max_update)?;
        let p = param.value()?;
        param.set(&((p * factors.param_scale)? - (&update * factors.lr)?)?)?;
        let f32 = |t: Tensor| t.to_dtype(DType::F32);
        // candle has no shifts: clear the highest bit, then double.
        let old = f32(self.signs.get().clone())?;
        let without_oldest = (&old - (f32(old.ge(128f64)?)? * 128.0)?)?;
        let signs = ((without_oldest * 2.0)? + f32(update.gt(0f64)?)?)?;
        self.signs.set(signs.to_dtype(DType::U8)?);
        if !factors.history_is_full {
            return Ok([0.0; 2]);
        }
        let modulus = f64::from(factors.history_mask) + 1.0;
        let last = (&signs - ((&signs / modulus)?.floor()? * modulus)?)?;
        let is = |[a, b]: [u8; 2]| f32(last.eq(f64::from(a))?)? + f32(last.eq(f64::from(b))?)?;
        let [up, down] = factors.vote_patterns();
        let magnitude = update.abs()?;
        let votes = ((is(up)? - is(down)?)? * &magnitude)?;
        let sum = |t: &Tensor| t.sum_all()?.to_scalar::<f32>().map(f64::from);
        Ok([sum(&votes)?, sum(&magnitude)?])
    }
}

impl Optimizer for Automagic3 {
    fn step(&mut self, grads: &Grads, _: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let s = &self.settings;
        let (mut votes, mut weights) = (0.0, 0.0);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let update = state.second_moment.update(&grad, s.beta2, s.eps, s.clip_threshold)?;
            state.step += 1;
            let factors = Factors {
                param_scale: 1.0 - self.lr * s.weight_decay,
                lr: self.lr,
                max_update: s.clip_threshold,
                history_mask: (u8::MAX) >> (8 - s.history),
                history_is_full: state.step >= s.history,
            };
            let [vote, weight] = state.update(param, &update, factors)?;
            if factors.history_is_full {
                votes += vote;
                weights += weight;
            }
        }
        if weights > 0.0 {
            let lr = self.lr * (votes / weights).exp();
            self.lr = lr.max(s.range.0).min(s.range.1);
        }
        Ok(())
    }

    fn separable(&self) -> bool {
        false
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::from([("lr".to_owned(), saved::number(self.lr)?)]);
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            out.insert(name("step"), saved::count(state.step)?);
            out.insert(name("signs"), state.signs.snapshot());
            state.second_moment.save(param, &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let lr = saved.number("lr")?;
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            states.push(State {
                step: saved.count(&name("step"))?,
                signs: saved.state_tensor(&name("signs"), DType::U8, param.var.dims(), param.var.device())?,
                second_moment: SecondMoment::load(&mut saved, param)?,
            });
        }
        saved.finish()?;
        (self.lr, self.states) = (lr, states);
        Ok(())
    }

    /// The current learning rate.
    fn effective_lr(&self, _: f64) -> Result<f64, OptimError> {
        Ok(self.lr)
    }

    /// As in ai-toolkit, which cannot clip gradients that are applied in the backward pass.
    fn uses_gradient_clipping(&self) -> bool {
        !self.settings.fused
    }
}
