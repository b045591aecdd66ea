//! Prodigy (Mishchenko and Defazio, arXiv 2306.06101) as in prodigyopt 1.1.2: Adam that estimates its own learning
//! rate, `d`, from the distance that the weights have moved.
//!
//! ai-toolkit's `prodigy8bit` (its `toolkit/optimizers/prodigy_8bit.py`) stores all four state tensors in 8 bits, each
//! with one scale and equal steps. Values below 1/254 of a tensor's largest value are lost: most weights lose their
//! denominator, and the initial weights are known only to 1/254 of the largest weight, while the distance from them,
//! which `d` is computed from, starts at a millionth. Here the moments have bitsandbytes' blockwise format, and `d` is
//! estimated in float32 from every fifth element, as prodigyopt does with `slice_p`. That takes 3.6 bytes per weight
//! instead of 4, and the result is close to the float32 optimizer (`reference_tests`).

use super::blockwise::{BLOCK, QuantMap};
use super::fused::{self, CHUNK_LEN, MomentMut, for_each_dequantized, split_front};
use super::inplace;
use super::kernels::multiversion;
use super::moment::Moment;
use super::moment::Precision;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use super::state_tensor::StateTensor;
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The default `slice_p` of the 8-bit optimizer. It divides none of the usual ranks, heights and widths, so that no
/// row, column or kernel position is always skipped.
const EIGHT_BIT_STRIDE: u64 = 5;

/// `prodigy` and `prodigy8bit`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let is_eight_bit = matches!(spec.name, OptimizerName::Prodigy8Bit);
    let (beta1, beta2) = options.pair("betas", (0.9, 0.999));
    let settings = Settings {
        beta1,
        beta2,
        beta3: options.optional("beta3").unwrap_or(beta2.sqrt()),
        eps: options.number("eps", 1e-6),
        weight_decay: options.number("weight_decay", 0.0),
        decouple: options.flag("decouple", true),
        use_bias_correction: options.flag("use_bias_correction", false),
        safeguard_warmup: options.flag("safeguard_warmup", false),
        d0: options.number("d0", 1e-6),
        d_coef: options.number("d_coef", 1.0),
        growth_rate: options.optional("growth_rate").unwrap_or(f64::INFINITY),
        stride: usize::try_from(options.whole("slice_p", if is_eight_bit { EIGHT_BIT_STRIDE } else { 1 }))
            .unwrap_or(usize::MAX),
        precision: if is_eight_bit {
            Precision::eight_bit(options)
        } else {
            Precision::Float32
        },
    };
    let estimate = Estimate {
        d: settings.d0,
        d_max: settings.d0,
        numerator: 0.0,
        steps: 0,
    };
    let states = spec.params.iter().map(|p| State::new(p, &settings));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Box::new(Prodigy {
        settings,
        estimate,
        params: spec.params,
        states,
    }))
}

struct Settings {
    beta1: f64,
    beta2: f64,
    /// Decay of `s` and of the numerator of `d`.
    beta3: f64,
    eps: f64,
    weight_decay: f64,
    decouple: bool,
    use_bias_correction: bool,
    safeguard_warmup: bool,
    d0: f64,
    d_coef: f64,
    growth_rate: f64,
    /// `slice_p`: `d` is estimated from one of this many elements.
    stride: usize,
    /// The number format of the two moments.
    precision: Precision,
}

/// The estimate of `d`, shared by all parameters.
#[derive(Clone, Copy)]
struct Estimate {
    d: f64,
    d_max: f64,
    numerator: f64,
    steps: u64,
}

struct State {
    exp_avg: Moment,
    exp_avg_sq: Moment,
    /// The running sum of gradients; flat, strided.
    s: StateTensor,
    /// The weights before the first update; flat, strided.
    p0: StateTensor,
}

/// Every `stride`-th element of the flattened tensor.
fn strided(t: &Tensor, stride: usize) -> Result<Tensor, OptimError> {
    let flat = t.flatten_all()?;
    if stride == 1 {
        return Ok(flat);
    }
    let index: Vec<u32> = (0..flat.elem_count()).step_by(stride).map(|i| i as u32).collect();
    let count = index.len();
    Ok(flat.index_select(&Tensor::from_vec(index, count, flat.device())?, 0)?)
}

fn sum_all(t: &Tensor) -> Result<f64, OptimError> {
    Ok(f64::from(t.sum_all()?.to_scalar::<f32>()?))
}

impl State {
    fn new(param: &Param, settings: &Settings) -> Result<Self, OptimError> {
        let p0 = strided(&param.value()?.copy()?, settings.stride)?;
        Ok(Self {
            exp_avg: Moment::zeros(param, settings.precision, QuantMap::signed())?,
            exp_avg_sq: Moment::zeros(param, settings.precision, QuantMap::unsigned())?,
            s: StateTensor::new(p0.zeros_like()?),
            p0: StateTensor::new(p0),
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

impl Settings {
    /// The factors of [`State::update_state`].
    fn state_factors(&self, d: f64, dlr: f64) -> StateFactors {
        StateFactors {
            // Without momentum `exp_avg` is unchanged.
            beta1: if self.beta1 > 0.0 { self.beta1 } else { 1.0 },
            exp_avg_weight: if self.beta1 > 0.0 { d * (1.0 - self.beta1) } else { 0.0 },
            beta2: self.beta2,
            exp_avg_sq_weight: d * d * (1.0 - self.beta2),
            beta3: self.beta3,
            s_weight: d / self.d0 * if self.safeguard_warmup { d } else { dlr },
            l2_decay: if self.decouple { 0.0 } else { self.weight_decay },
        }
    }

    /// The factors of [`State::apply_update`], computed from the new `d`.
    fn update_factors(&self, d: f64, dlr: f64) -> UpdateFactors {
        UpdateFactors {
            param_scale: if self.decouple {
                1.0 - self.weight_decay * dlr
            } else {
                1.0
            },
            l2_decay: if self.decouple { 0.0 } else { self.weight_decay },
            eps: d * self.eps,
            momentum: self.beta1 > 0.0,
            step_size: if self.beta1 > 0.0 { dlr } else { dlr * d },
        }
    }
}

/// The factors of the state's update.
#[derive(Clone, Copy)]
struct StateFactors {
    beta1: f64,
    /// The weight of the gradient in `exp_avg`: d * (1 - beta1).
    exp_avg_weight: f64,
    beta2: f64,
    /// The weight of the squared gradient in `exp_avg_sq`: d^2 * (1 - beta2).
    exp_avg_sq_weight: f64,
    beta3: f64,
    /// The weight of the gradient in `s`.
    s_weight: f64,
    /// Weight decay that is added to the gradient (L2).
    l2_decay: f64,
}

/// The factors of the parameter's update.
#[derive(Clone, Copy)]
struct UpdateFactors {
    /// Scale of the parameter for decoupled decay: 1 - dlr * weight_decay.
    param_scale: f64,
    l2_decay: f64,
    eps: f64,
    /// Whether the step uses `exp_avg` and not the gradient.
    momentum: bool,
    step_size: f64,
}

/// A chunk of a parameter, of its gradient and of its state; `s` and `p0` have the strided elements only.
struct Chunk<'a> {
    p: &'a [f32],
    g: &'a [f32],
    moments: [MomentMut<'a>; 2],
    s: &'a mut [f32],
    p0: &'a [f32],
}

impl Chunk<'_> {
    /// Updates the moments and `s`; returns the sums of g * (p0 - p) and of |s|.
    fn update_state(self, stride: usize, factors: StateFactors) -> [f64; 2] {
        for_each_dequantized(self.moments, self.g.len(), |range, [m, v]| {
            update_moments(&self.p[range.clone()], &self.g[range], m, v, factors);
        });
        update_s(self.p, self.g, self.s, self.p0, stride, factors)
    }
}

multiversion! {
    fn update_moments(p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], factors: StateFactors) {
        let (beta1, exp_avg_weight) = (factors.beta1 as f32, factors.exp_avg_weight as f32);
        let (beta2, exp_avg_sq_weight) = (factors.beta2 as f32, factors.exp_avg_sq_weight as f32);
        let l2_decay = factors.l2_decay as f32;
        for (((p, g), m), v) in p.iter().zip(g).zip(m).zip(v) {
            let g = g + p * l2_decay;
            *m = *m * beta1 + g * exp_avg_weight;
            *v = *v * beta2 + g * g * exp_avg_sq_weight;
        }
    }
}

multiversion! {
    fn update_s(p: &[f32], g: &[f32], s: &mut [f32], p0: &[f32], stride: usize, factors: StateFactors) -> [f64; 2] {
        let factors = [factors.beta3 as f32, factors.s_weight as f32, factors.l2_decay as f32];
        let mut sums = [[0f32; LANES]; 2];
        if stride == 1 {
            // The usual case, which the compiler vectorises.
            let (ps, p) = p.as_chunks::<LANES>();
            let (gs, g) = g.as_chunks::<LANES>();
            let (ss, s) = s.as_chunks_mut::<LANES>();
            let (p0s, p0) = p0.as_chunks::<LANES>();
            for (((p, g), s), p0) in ps.iter().zip(gs).zip(ss).zip(p0s) {
                update_s_chunk(p.iter().zip(g), s, p0, &mut sums, factors);
            }
            update_s_chunk(p.iter().zip(g), s, p0, &mut sums, factors);
        } else {
            let chunks = p.chunks(LANES * stride).zip(g.chunks(LANES * stride));
            for (((p, g), s), p0) in chunks.zip(s.chunks_mut(LANES)).zip(p0.chunks(LANES)) {
                update_s_chunk(p.iter().zip(g).step_by(stride), s, p0, &mut sums, factors);
            }
        }
        sums.map(|sums| sums.iter().map(|x| f64::from(*x)).sum())
    }
}

/// The number of partial sums.
const LANES: usize = 32;

/// [`update_s`] for at most [`LANES`] elements.
#[inline(always)]
fn update_s_chunk<'a>(
    param_and_grad: impl Iterator<Item = (&'a f32, &'a f32)>,
    s: &mut [f32],
    p0: &[f32],
    sums: &mut [[f32; LANES]; 2],
    [beta3, s_weight, l2_decay]: [f32; 3],
) {
    let [distance, s_abs_sum] = sums;
    let sums = distance.iter_mut().zip(s_abs_sum);
    for ((((p, g), s), p0), (distance, s_abs_sum)) in param_and_grad.zip(s).zip(p0).zip(sums) {
        let g = g + p * l2_decay;
        *distance += g * (p0 - p);
        *s = *s * beta3 + g * s_weight;
        *s_abs_sum += s.abs();
    }
}

multiversion! {
    fn apply_update(p: &mut [f32], g: &[f32], m: &[f32], v: &[f32], factors: UpdateFactors) {
        let (param_scale, l2_decay) = (factors.param_scale as f32, factors.l2_decay as f32);
        let (eps, step_size) = (factors.eps as f32, factors.step_size as f32);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let direction = if factors.momentum { *m } else { g + *p * l2_decay };
            *p = *p * param_scale - direction / (v.sqrt() + eps) * step_size;
        }
    }
}

impl State {
    /// Updates the moments and `s` in one pass over memory; returns the sums of g * (p0 - p) and of |s|.
    fn update_state(
        &mut self,
        param: &Param,
        grad: &Tensor,
        stride: usize,
        factors: StateFactors,
    ) -> Result<[f64; 2], OptimError> {
        let p = param.var.as_tensor();
        let grad = inplace::readable_gradient(grad, p)?;
        let moments = [&mut self.exp_avg, &mut self.exp_avg_sq];
        let sums = inplace::with_f32(&grad, |mut g| {
            inplace::with_f32(p, |mut p| {
                inplace::with_f32(self.p0.get(), |mut p0| {
                    fused::with_slices([self.s.make_mut()?], moments, |[mut s], [mut m, mut v]| {
                        // Whole blocks of every tensor, about `CHUNK_LEN` elements.
                        let count = BLOCK * (CHUNK_LEN / BLOCK / stride).max(1);
                        let chunk_len = count.saturating_mul(stride);
                        let mut chunks = Vec::with_capacity(g.len().div_ceil(chunk_len));
                        while !g.is_empty() {
                            chunks.push(Chunk {
                                p: split_front_ref(&mut p, chunk_len),
                                g: split_front_ref(&mut g, chunk_len),
                                moments: [m.split_front(chunk_len), v.split_front(chunk_len)],
                                s: split_front(&mut s, count),
                                p0: split_front_ref(&mut p0, count),
                            });
                        }
                        let sums = chunks.into_par_iter().map(|chunk| chunk.update_state(stride, factors));
                        sums.collect::<Vec<_>>()
                    })
                })
            })
        })????;
        Ok(sums.iter().fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]))
    }

    /// The same update with candle's operations, for other devices.
    fn update_state_with_tensor_ops(
        &mut self,
        param: &Param,
        grad: &Tensor,
        stride: usize,
        factors: StateFactors,
    ) -> Result<[f64; 2], OptimError> {
        let p = param.value()?;
        let grad = grad_with_l2(&p, grad, factors.l2_decay)?;
        let strided_grad = strided(&grad, stride)?;
        let distance = sum_all(&(&strided_grad * (self.p0.get() - strided(&p, stride)?)?)?)?;
        let m = ((self.exp_avg.to_f32()? * factors.beta1)? + (&grad * factors.exp_avg_weight)?)?;
        self.exp_avg.set(m)?;
        let v = ((self.exp_avg_sq.to_f32()? * factors.beta2)? + (grad.sqr()? * factors.exp_avg_sq_weight)?)?;
        self.exp_avg_sq.set(v)?;
        self.s
            .set(((self.s.get() * factors.beta3)? + (strided_grad * factors.s_weight)?)?);
        Ok([distance, sum_all(&self.s.get().abs()?)?])
    }

    fn apply_update(&mut self, param: &Param, grad: &Tensor, factors: UpdateFactors) -> Result<(), OptimError> {
        let moments = [&mut self.exp_avg, &mut self.exp_avg_sq];
        fused::update_with_fixed_moments(param, grad, moments, |p, g, [m, v]| apply_update(p, g, m, v, factors))
    }

    fn apply_update_with_tensor_ops(
        &self,
        param: &Param,
        grad: &Tensor,
        factors: UpdateFactors,
    ) -> Result<(), OptimError> {
        let p = param.value()?;
        let denominator = (self.exp_avg_sq.to_f32()?.sqrt()? + factors.eps)?;
        let direction = if factors.momentum {
            self.exp_avg.to_f32()?
        } else {
            grad_with_l2(&p, grad, factors.l2_decay)?
        };
        let update = ((direction / denominator)? * factors.step_size)?;
        param.set(&((p * factors.param_scale)? - update)?)?;
        Ok(())
    }
}

fn grad_with_l2(p: &Tensor, grad: &Tensor, l2_decay: f64) -> Result<Tensor, OptimError> {
    let grad = grad.to_dtype(DType::F32)?.detach();
    Ok(if l2_decay == 0.0 {
        grad
    } else {
        (grad + (p * l2_decay)?)?
    })
}

/// Splits off the first `count` elements of a slice, or all of them; the slice keeps the rest.
fn split_front_ref<'a>(from: &mut &'a [f32], count: usize) -> &'a [f32] {
    let (front, rest) = from.split_at(count.min(from.len()));
    *from = rest;
    front
}

impl Prodigy {
    /// Updates the states. Returns the addition to the numerator of `d`, and the denominator.
    fn update_state(&mut self, grads: &Grads, lr: f64, dlr: f64) -> Result<(f64, f64), OptimError> {
        let s = &self.settings;
        let d = self.estimate.d;
        let (mut numerator, mut denominator) = (0.0, 0.0);
        if lr <= 0.0 {
            return Ok((numerator, denominator));
        }
        let factors = s.state_factors(d, dlr);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let [distance, s_abs_sum] = if fused::is_supported(param) {
                state.update_state(param, grad, s.stride, factors)?
            } else {
                state.update_state_with_tensor_ops(param, grad, s.stride, factors)?
            };
            numerator += d / s.d0 * dlr * distance;
            denominator += s_abs_sum;
        }
        Ok((numerator, denominator))
    }
}

impl Optimizer for Prodigy {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
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
        let (numerator_delta, denominator) = self.update_state(grads, lr, dlr)?;
        // No gradient, or a learning rate of 0: neither the parameters nor the estimate change.
        if denominator == 0.0 {
            return Ok(());
        }
        let s = &self.settings;
        let numerator = numerator * s.beta3 + numerator_delta;
        let d_hat = s.d_coef * numerator / denominator;
        let base = if d == s.d0 { d.max(d_hat) } else { d };
        let d_max = d_max.max(d_hat);
        self.estimate = Estimate {
            d: d_max.min(base * s.growth_rate),
            d_max,
            numerator,
            steps: steps + 1,
        };
        let factors = s.update_factors(self.estimate.d, dlr);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            if fused::is_supported(param) {
                state.apply_update(param, grad, factors)?;
            } else {
                state.apply_update_with_tensor_ops(param, grad, factors)?;
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
            ("d_max".to_owned(), saved::number(e.d_max)?),
            ("d_numerator".to_owned(), saved::number(e.numerator)?),
            ("steps".to_owned(), saved::count(e.steps)?),
        ]);
        for (param, state) in self.params.iter().zip(&self.states) {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            state.exp_avg.save(&name("exp_avg"), &mut out);
            state.exp_avg_sq.save(&name("exp_avg_sq"), &mut out);
            out.insert(name("s"), state.s.snapshot());
            out.insert(name("p0"), state.p0.snapshot());
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let estimate = Estimate {
            d: saved.number("d")?,
            d_max: saved.number("d_max")?,
            numerator: saved.number("d_numerator")?,
            steps: saved.count("steps")?,
        };
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            let strided_shape = [param.var.elem_count().div_ceil(self.settings.stride)];
            let precision = self.settings.precision;
            states.push(State {
                exp_avg: Moment::load(&mut saved, &name("exp_avg"), param, precision, QuantMap::signed())?,
                exp_avg_sq: Moment::load(&mut saved, &name("exp_avg_sq"), param, precision, QuantMap::unsigned())?,
                s: saved.state_tensor(&name("s"), DType::F32, &strided_shape, param.var.device())?,
                p0: saved.state_tensor(&name("p0"), DType::F32, &strided_shape, param.var.device())?,
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
