//! Automagic as in ai-toolkit (its `toolkit/optimizers/automagic.py`): Adafactor's update with one learning rate per
//! element. The rate grows by `lr_bump` if the update keeps its sign, and otherwise shrinks by `lr_bump`.
//!
//! ai-toolkit stores the rates in 8 bits (equal steps, one scale per tensor) and the signs in one byte each. A bump is
//! then rounded away once the largest rate of a tensor is 254 bumps, a quarter of the default `max_lr`. Here a rate is
//! stored as a number of bumps in float16, which is exact up to 2048, with the sign of the last update: also two bytes.

use super::factored::SecondMoment;
use super::fused;
use super::kernels::multiversion;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use super::state_tensor::StateTensor;
use candle_core::{DType, Tensor};
use half::f16;
use std::collections::BTreeMap;

/// `automagic`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let (min_lr, max_lr) = options.lr_range(spec.name);
    let bump = options.number("lr_bump", 1e-6);
    let settings = Settings {
        bump,
        min_bumps: min_lr / bump,
        max_bumps: max_lr / bump,
        beta2: options.number("beta2", 0.999),
        eps: options.pair("eps", (1e-30, 1e-3)).0,
        clip_threshold: options.number("clip_threshold", 1.0),
        weight_decay: options.number("weight_decay", 0.0),
        dtype: if max_lr / bump <= 2048.0 {
            DType::F16
        } else {
            DType::F32
        },
    };
    let states = spec.params.iter().map(|p| State::new(p, &settings, spec.lr));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Automagic {
        settings,
        params: spec.params,
        states,
    }))
}

struct Settings {
    /// `lr_bump`, the unit of the stored rates.
    bump: f64,
    /// `min_lr` and `max_lr` in bumps.
    min_bumps: f64,
    max_bumps: f64,
    beta2: f64,
    eps: f64,
    clip_threshold: f64,
    weight_decay: f64,
    /// The dtype of the stored rates: float32 if `max_lr` has more bumps than float16 can count.
    dtype: DType,
}

struct State {
    second_moment: SecondMoment,
    /// The rate of each element in bumps; negative if the last update was not positive.
    rates: StateTensor,
    /// The mean learning rate.
    mean_lr: f64,
}

impl State {
    fn new(param: &Param, settings: &Settings, lr: f64) -> Result<Self, OptimError> {
        // Not 0, which could not store a sign.
        let bumps = (lr / settings.bump).max(f64::from(f16::MIN_POSITIVE));
        let var = &param.var;
        Ok(Self {
            second_moment: SecondMoment::zeros(param)?,
            rates: StateTensor::new(Tensor::full(-bumps as f32, var.shape(), var.device())?.to_dtype(settings.dtype)?),
            mean_lr: lr,
        })
    }
}

/// ```text
/// u  <- g / sqrt(second moment), at most clip_threshold large (root mean square)
/// lr <- lr + lr_bump where (u > 0) is as it was, else lr - lr_bump, from min_lr to max_lr      (of each element)
/// p  <- p * (1 - lr * weight_decay) - lr * u
/// ```
///
/// The signs before the first update count as not positive, as in ai-toolkit.
struct Automagic {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

/// 2^112: the difference of the exponent biases of float32 and float16 is 112.
const EXPONENT_GAP: f32 = (1u128 << 112) as f32;

multiversion! {
    /// Updates the parameter and the rates; returns the sum of the rates in bumps.
    fn kernel(p: &mut [f32], u: &[f32], rates: &mut [f16], factors: [f32; 4]) -> f64 {
        let [min_bumps, max_bumps, bump, decay] = factors;
        let mut sums = [0f32; 64];
        for ((p, u), rates) in p.chunks_mut(64).zip(u.chunks(64)).zip(rates.chunks_mut(64)) {
            for (((p, u), rate), sum) in p.iter_mut().zip(u).zip(rates).zip(&mut sums) {
                // Converts the bits, because `half`'s conversions are not vectorised.
                let bits = rate.to_bits();
                let bumps = f32::from_bits(u32::from(bits & 0x7fff) << 13) * EXPONENT_GAP;
                let sign = u16::from(*u <= 0.0) << 15;
                let direction = if sign == bits & 0x8000 { 1.0 } else { -1.0 };
                let bumps = (bumps + direction).max(min_bumps).min(max_bumps);
                let lr = bumps * bump;
                *p = *p * (1.0 - lr * decay) - u * lr;
                *sum += bumps;
                let scaled_bits = (bumps / EXPONENT_GAP).to_bits();
                // Rounds to nearest, ties to even.
                *rate = f16::from_bits(((scaled_bits + 0xfff + (scaled_bits >> 13 & 1)) >> 13) as u16 | sign);
            }
        }
        sums.iter().map(|sum| f64::from(*sum)).sum()
    }
}

impl State {
    /// Updates the parameter and the rates in one pass over memory.
    fn update_in_one_pass(&mut self, param: &Param, update: &Tensor, s: &Settings) -> Result<(), OptimError> {
        let factors = [s.min_bumps, s.max_bumps, s.bump, s.weight_decay].map(|x| x as f32);
        let rates = &mut self.rates;
        let sums = fused::map_with_state(
            param,
            update,
            rates,
            |elements| elements.f16(),
            |p, u, rates| kernel(p, u, rates, factors),
        )?;
        self.mean_lr = sums.iter().sum::<f64>() / param.var.elem_count().max(1) as f64 * s.bump;
        Ok(())
    }

    /// The same update with candle's operations, for other devices.
    fn update_with_tensor_ops(&mut self, param: &Param, update: &Tensor, s: &Settings) -> Result<(), OptimError> {
        let rates = self.rates.get().to_dtype(DType::F32)?;
        // 1 for positive elements, otherwise -1.
        let sign = |t: &Tensor| (t.gt(0f64)?.to_dtype(DType::F32)? * 2.0)? - 1.0;
        let sign_of_update = sign(update)?;
        let bumps = ((rates.abs()? + (sign(&rates)? * &sign_of_update)?)?).clamp(s.min_bumps, s.max_bumps)?;
        let lr = (&bumps * s.bump)?;
        let p = param.value()?;
        let keep = ((&lr * -s.weight_decay)? + 1.0)?;
        param.set(&((p * keep)? - (update * &lr)?)?)?;
        self.rates.set((&bumps * sign_of_update)?.to_dtype(s.dtype)?);
        self.mean_lr = f64::from(lr.mean_all()?.to_scalar::<f32>()?);
        Ok(())
    }
}

impl Optimizer for Automagic {
    fn step(&mut self, grads: &Grads, _: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let s = &self.settings;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let update = state.second_moment.update(&grad, s.beta2, s.eps, s.clip_threshold)?;
            if fused::is_supported(param) && s.dtype == DType::F16 {
                state.update_in_one_pass(param, &update, s)?;
            } else {
                state.update_with_tensor_ops(param, &update, s)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::from([("lr_bump".to_owned(), saved::number(self.settings.bump)?)]);
        for (param, state) in self.params.iter().zip(&self.states) {
            state.second_moment.save(param, &mut out);
            out.insert(format!("{}.lr", param.name), state.rates.snapshot());
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let s = &self.settings;
        let mut saved = SavedState::new(state);
        // A changed `lr_bump` keeps the learned rates.
        let ratio = saved.number("lr_bump")? / s.bump;
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = format!("{}.lr", param.name);
            let mut rates = saved.state_tensor(&name, s.dtype, param.var.dims(), param.var.device())?;
            let mut bumps = rates.get().to_dtype(DType::F32)?;
            if ratio != 1.0 {
                bumps = (bumps * ratio)?;
                rates.set(bumps.to_dtype(s.dtype)?);
            }
            states.push(State {
                second_moment: SecondMoment::load(&mut saved, param)?,
                mean_lr: f64::from(bumps.abs()?.mean_all()?.to_scalar::<f32>()?) * s.bump,
                rates,
            });
        }
        saved.finish()?;
        self.states = states;
        Ok(())
    }

    /// The mean of the parameters' mean rates, as in ai-toolkit.
    fn effective_lr(&self, lr: f64) -> Result<f64, OptimError> {
        let mean_lrs: Vec<f64> = self.states.iter().map(|state| state.mean_lr).collect();
        Ok(super::optimizer::mean(&mean_lrs).unwrap_or(lr))
    }
}
