//! Automagic3 as ai-toolkit computes it (its `toolkit/optimizers/automagic3.py`): Adafactor's update with one learning rate
//! for all, about which every element votes. Who moved the same way all through its last few updates votes for more, who
//! turned round every time for less, everybody else not at all; a vote weighs as much as the update is large.
//!
//! With `fused: true`, the default, ai-toolkit updates a parameter as soon as its gradient is there, in the backward pass, so
//! that nothing can clip it; gradients are accumulated here all the same.

use super::factored::SecondMoment;
use super::fused;
use super::kernels::for_every_unit;
use super::saved::{self, Saved};
use super::state_tensor::StateTensor;
use super::{Build, Grads, OptimError, Optimizer, Param, one_each};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `automagic3`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let range = of.lr_range(input.name);
    let settings = Settings {
        range,
        beta2: of.number("beta2", 0.999),
        eps: of.number("eps", 1e-30),
        clip_threshold: of.number("clip_threshold", 1.0),
        weight_decay: of.number("weight_decay", 0.0),
        history: of.whole("polarity_history", 8).clamp(2, 8),
        fused: of.flag("fused", true),
    };
    let states = input.params.iter().map(State::new).collect::<Result<_, _>>()?;
    Ok(Box::new(Automagic3 {
        settings,
        lr: input.lr.max(range.0).min(range.1),
        params: input.params,
        states,
    }))
}

struct Settings {
    /// Least and greatest learning rate.
    range: (f64, f64),
    beta2: f64,
    eps: f64,
    clip_threshold: f64,
    weight_decay: f64,
    /// How many updates a vote looks back at.
    history: u64,
    /// Only whether the trainer clips: nothing is updated in a backward pass here.
    fused: bool,
}

struct State {
    step: u64,
    second: SecondMoment,
    /// The last eight signs of every element, the last one in the lowest bit; however many are looked at.
    signs: StateTensor,
}

impl State {
    fn new(param: &Param) -> Result<Self, OptimError> {
        let var = &param.var;
        Ok(Self {
            step: 0,
            second: SecondMoment::zeros(param)?,
            signs: StateTensor::new(Tensor::zeros(var.shape(), DType::U8, var.device())?),
        })
    }
}

/// ```text
/// u    <- g / sqrt(second moment), at most clip_threshold large (root mean square, then each element)
/// p    <- p * (1 - lr * weight_decay) - lr * u
/// vote <- (sum of |u| over those whose last signs are all alike - over those whose signs alternate) / sum of |u|
/// lr   <- lr * e^vote, from min_lr to max_lr                     (vote over all parameters with a full history)
/// ```
struct Automagic3 {
    settings: Settings,
    lr: f64,
    params: Vec<Param>,
    states: Vec<State>,
}

/// What a step multiplies with.
#[derive(Clone, Copy)]
struct Factors {
    /// Of the parameter.
    keep: f64,
    lr: f64,
    /// Greatest update.
    most: f64,
    /// Bits of the history.
    mask: u8,
    /// Whether it is full.
    votes: bool,
}

impl Factors {
    /// The histories of those who vote for more, and for less.
    fn patterns(&self) -> [[u8; 2]; 2] {
        let turns = 0b0101_0101 & self.mask;
        [[0, self.mask], [turns, self.mask ^ turns]]
    }
}

for_every_unit! {
    /// The sum of votes and the sum of their weights.
    fn kernel(p: &mut [f32], u: &[f32], signs: &mut [u8], by: Factors) -> [f64; 2] {
        let (keep, lr, most) = (by.keep as f32, by.lr as f32, by.most as f32);
        let [[none, all], [one, other]] = by.patterns();
        let mut sums = [[0f32; 32]; 2];
        for ((p, u), signs) in p.chunks_mut(32).zip(u.chunks(32)).zip(signs.chunks_mut(32)) {
            let [votes, weights] = &mut sums;
            let sums = votes.iter_mut().zip(weights);
            for (((p, u), signs), (vote, weight)) in p.iter_mut().zip(u).zip(signs).zip(sums) {
                let u = u.max(-most).min(most);
                *p = *p * keep - u * lr;
                *signs = *signs << 1 | u8::from(u > 0.0);
                let last = *signs & by.mask;
                let size = u.abs();
                let up = if (last == none) | (last == all) { size } else { 0.0 };
                let down = if (last == one) | (last == other) { size } else { 0.0 };
                *vote += up - down;
                *weight += size;
            }
        }
        sums.map(|sums| sums.iter().map(|sum| f64::from(*sum)).sum())
    }
}

impl State {
    /// Moves the parameter; gives the sum of votes and the sum of their weights.
    fn go(&mut self, param: &Param, update: &Tensor, by: Factors) -> Result<[f64; 2], OptimError> {
        if !fused::takes(param) {
            return self.composed(param, update, by);
        }
        let signs = &mut self.signs;
        let sums = fused::beside(
            param,
            update,
            signs,
            |part| part.u8(),
            |p, u, signs| kernel(p, u, signs, by),
        )?;
        Ok(sums.iter().fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]))
    }

    /// The same by the tensor library's operations, for other devices.
    fn composed(&mut self, param: &Param, update: &Tensor, by: Factors) -> Result<[f64; 2], OptimError> {
        let update = update.clamp(-by.most, by.most)?;
        let p = param.var.as_tensor().detach();
        param.var.set(&((p * by.keep)? - (&update * by.lr)?)?)?;
        let f32 = |t: Tensor| t.to_dtype(DType::F32);
        // There are no shifts: the highest bit is taken away, the others doubled.
        let old = f32(self.signs.get().clone())?;
        let kept = (&old - (f32(old.ge(128f64)?)? * 128.0)?)?;
        let signs = ((kept * 2.0)? + f32(update.gt(0f64)?)?)?;
        self.signs.set(signs.to_dtype(DType::U8)?);
        if !by.votes {
            return Ok([0.0; 2]);
        }
        let modulus = f64::from(by.mask) + 1.0;
        let last = (&signs - ((&signs / modulus)?.floor()? * modulus)?)?;
        let is = |[a, b]: [u8; 2]| f32(last.eq(f64::from(a))?)? + f32(last.eq(f64::from(b))?)?;
        let [up, down] = by.patterns();
        let size = update.abs()?;
        let votes = ((is(up)? - is(down)?)? * &size)?;
        let sum = |t: &Tensor| t.sum_all()?.to_scalar::<f32>().map(f64::from);
        Ok([sum(&votes)?, sum(&size)?])
    }
}

impl Optimizer for Automagic3 {
    fn step(&mut self, grads: &Grads, _: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        let s = &self.settings;
        let (mut votes, mut weights) = (0.0, 0.0);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let update = state.second.update(&grad, s.beta2, s.eps, s.clip_threshold)?;
            state.step += 1;
            let by = Factors {
                keep: 1.0 - self.lr * s.weight_decay,
                lr: self.lr,
                most: s.clip_threshold,
                mask: (u8::MAX) >> (8 - s.history),
                votes: state.step >= s.history,
            };
            let [vote, weight] = state.go(param, &update, by)?;
            if by.votes {
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
            let name = |part: &str| format!("{}.{part}", param.name);
            out.insert(name("step"), saved::count(state.step)?);
            out.insert(name("signs"), state.signs.lend());
            state.second.save(param, &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let lr = saved.number("lr")?;
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |part: &str| format!("{}.{part}", param.name);
            states.push(State {
                step: saved.count(&name("step"))?,
                signs: saved.kept(&name("signs"), DType::U8, param.var.dims(), param.var.device())?,
                second: SecondMoment::load(&mut saved, param)?,
            });
        }
        saved.done()?;
        (self.lr, self.states) = (lr, states);
        Ok(())
    }

    /// The rate that it found.
    fn shown_lr(&self, _: f64) -> Result<f64, OptimError> {
        Ok(self.lr)
    }

    /// As ai-toolkit's trainer, which comes too late for what is updated in the backward pass.
    fn wants_clipping(&self) -> bool {
        !self.settings.fused
    }
}
