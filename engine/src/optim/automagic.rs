//! Automagic as ai-toolkit computes it (its `toolkit/optimizers/automagic.py`): Adafactor's update with a learning rate for
//! every element, which grows by `lr_bump` where the update keeps its sign and shrinks by as much where it does not.
//!
//! ai-toolkit keeps the rates in 8 bits, in equal steps with one scale per tensor, and the signs in a byte each. There a bump
//! is lost as soon as the largest rate of a tensor is 254 bumps, which is a quarter of the default `max_lr`. Here a rate is
//! counted in bumps, in float16, where none is lost up to 2048, and its sign is that of the last update: two bytes as well.

use super::factored::SecondMoment;
use super::fused;
use super::kernels::for_every_unit;
use super::saved::{self, Saved};
use super::state_tensor::StateTensor;
use super::{Build, Grads, OptimError, Optimizer, Param, one_each};
use candle_core::{DType, Tensor};
use half::f16;
use std::collections::BTreeMap;

/// `automagic`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let (min_lr, max_lr) = of.lr_range(input.name);
    let bump = of.number("lr_bump", 1e-6);
    let settings = Settings {
        bump,
        low: min_lr / bump,
        high: max_lr / bump,
        beta2: of.number("beta2", 0.999),
        eps: of.pair("eps", (1e-30, 1e-3)).0,
        clip_threshold: of.number("clip_threshold", 1.0),
        weight_decay: of.number("weight_decay", 0.0),
        dtype: if max_lr / bump <= 2048.0 {
            DType::F16
        } else {
            DType::F32
        },
    };
    let states = input.params.iter().map(|p| State::new(p, &settings, input.lr));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Automagic {
        settings,
        params: input.params,
        states,
    }))
}

struct Settings {
    /// The unit of all rates.
    bump: f64,
    /// Least and greatest rate, in bumps.
    low: f64,
    high: f64,
    beta2: f64,
    eps: f64,
    clip_threshold: f64,
    weight_decay: f64,
    /// Of what keeps the rates: float32 where float16 has gaps of more than a bump.
    dtype: DType,
}

struct State {
    second: SecondMoment,
    /// In bumps; negative where the last update was not positive.
    rates: StateTensor,
    /// Mean learning rate.
    mean: f64,
}

impl State {
    fn new(param: &Param, settings: &Settings, lr: f64) -> Result<Self, OptimError> {
        // Zero would have no sign to keep.
        let bumps = (lr / settings.bump).max(f64::from(f16::MIN_POSITIVE));
        let var = &param.var;
        Ok(Self {
            second: SecondMoment::zeros(param)?,
            rates: StateTensor::new(Tensor::full(-bumps as f32, var.shape(), var.device())?.to_dtype(settings.dtype)?),
            mean: lr,
        })
    }
}

/// ```text
/// u  <- g / sqrt(second moment), at most clip_threshold large (root mean square)
/// lr <- lr + lr_bump where (u > 0) is as it was, else lr - lr_bump, from min_lr to max_lr      (of each element)
/// p  <- p * (1 - lr * weight_decay) - lr * u
/// ```
///
/// Before the first update no sign is positive, as in ai-toolkit.
struct Automagic {
    settings: Settings,
    params: Vec<Param>,
    states: Vec<State>,
}

/// 2^112, the distance of the exponents of float32 and float16.
const APART: f32 = (1u128 << 112) as f32;

for_every_unit! {
    /// The sum of all rates, in bumps.
    fn kernel(p: &mut [f32], u: &[f32], rates: &mut [f16], by: [f32; 4]) -> f64 {
        let [low, high, bump, decay] = by;
        let mut sums = [0f32; 64];
        for ((p, u), rates) in p.chunks_mut(64).zip(u.chunks(64)).zip(rates.chunks_mut(64)) {
            for (((p, u), rate), sum) in p.iter_mut().zip(u).zip(rates).zip(&mut sums) {
                // By bits, because the library's conversions do not become vectors.
                let bits = rate.to_bits();
                let units = f32::from_bits(u32::from(bits & 0x7fff) << 13) * APART;
                let sign = u16::from(*u <= 0.0) << 15;
                let way = if sign == bits & 0x8000 { 1.0 } else { -1.0 };
                let units = (units + way).max(low).min(high);
                let lr = units * bump;
                *p = *p * (1.0 - lr * decay) - u * lr;
                *sum += units;
                let near = (units / APART).to_bits();
                // To the nearest, half way to the even one.
                *rate = f16::from_bits(((near + 0xfff + (near >> 13 & 1)) >> 13) as u16 | sign);
            }
        }
        sums.iter().map(|sum| f64::from(*sum)).sum()
    }
}

impl State {
    /// In one pass over memory.
    fn go(&mut self, param: &Param, update: &Tensor, s: &Settings) -> Result<(), OptimError> {
        let by = [s.low, s.high, s.bump, s.weight_decay].map(|x| x as f32);
        let rates = &mut self.rates;
        let sums = fused::beside(
            param,
            update,
            rates,
            |part| part.f16(),
            |p, u, rates| kernel(p, u, rates, by),
        )?;
        self.mean = sums.iter().sum::<f64>() / param.var.elem_count().max(1) as f64 * s.bump;
        Ok(())
    }

    /// The same by the tensor library's operations, for other devices.
    fn composed(&mut self, param: &Param, update: &Tensor, s: &Settings) -> Result<(), OptimError> {
        let rates = self.rates.get().to_dtype(DType::F32)?;
        // 1 or -1.
        let sign = |t: &Tensor| (t.gt(0f64)?.to_dtype(DType::F32)? * 2.0)? - 1.0;
        let now = sign(update)?;
        let units = ((rates.abs()? + (sign(&rates)? * &now)?)?).clamp(s.low, s.high)?;
        let lr = (&units * s.bump)?;
        let p = param.var.as_tensor().detach();
        let keep = ((&lr * -s.weight_decay)? + 1.0)?;
        param.var.set(&((p * keep)? - (update * &lr)?)?)?;
        self.rates.set((&units * now)?.to_dtype(s.dtype)?);
        self.mean = f64::from(lr.mean_all()?.to_scalar::<f32>()?);
        Ok(())
    }
}

impl Optimizer for Automagic {
    fn step(&mut self, grads: &Grads, _: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        let s = &self.settings;
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let grad = grad.to_dtype(DType::F32)?.detach();
            let update = state.second.update(&grad, s.beta2, s.eps, s.clip_threshold)?;
            if fused::takes(param) && s.dtype == DType::F16 {
                state.go(param, &update, s)?;
            } else {
                state.composed(param, &update, s)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::from([("lr_bump".to_owned(), saved::number(self.settings.bump)?)]);
        for (param, state) in self.params.iter().zip(&self.states) {
            state.second.save(param, &mut out);
            out.insert(format!("{}.lr", param.name), state.rates.lend());
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let s = &self.settings;
        let mut saved = Saved::new(state);
        // Whoever changes the bump keeps the rates.
        let units = saved.number("lr_bump")? / s.bump;
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = format!("{}.lr", param.name);
            let mut rates = saved.kept(&name, s.dtype, param.var.dims(), param.var.device())?;
            let mut bumps = rates.get().to_dtype(DType::F32)?;
            if units != 1.0 {
                bumps = (bumps * units)?;
                rates.set(bumps.to_dtype(s.dtype)?);
            }
            states.push(State {
                second: SecondMoment::load(&mut saved, param)?,
                mean: f64::from(bumps.abs()?.mean_all()?.to_scalar::<f32>()?) * s.bump,
                rates,
            });
        }
        saved.done()?;
        self.states = states;
        Ok(())
    }

    /// The mean of all parameters' mean rates, as ai-toolkit shows it.
    fn shown_lr(&self, lr: f64) -> Result<f64, OptimError> {
        let means: Vec<f64> = self.states.iter().map(|state| state.mean).collect();
        Ok(super::mean(&means).unwrap_or(lr))
    }
}
