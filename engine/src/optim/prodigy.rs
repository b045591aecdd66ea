//! Prodigy (Mishchenko and Defazio, arXiv 2306.06101) as prodigyopt 1.1.2 computes it: Adam that estimates its own
//! learning rate, `d`, from how far the weights have moved.
//!
//! `prodigy8bit` is ai-toolkit's name (its `toolkit/optimizers/prodigy_8bit.py`) for the same with all four of its tensors
//! in 8 bits, each with one scale and equal steps: what is below a 254th of a tensor's largest number is lost, which takes
//! the denominator from under most weights, and the beginning is known only to a 254th of the largest weight, where the
//! way from it, of which `d` is made, begins with a millionth. Here the means are kept as bitsandbytes keeps Adam's, and `d`
//! is estimated in float32 from every fifth element, which prodigyopt's `slice_p` does for the same purpose: 3.6 bytes per
//! weight instead of 4, and what comes out lies by the float32 optimizer (`reference_tests`).

use super::blockwise::{BLOCK, Map};
use super::fused::{self, Mean, PIECE, take, unpacked};
use super::inplace;
use super::kernels::for_every_unit;
use super::moment::Moment;
use super::saved::{self, Saved};
use super::state_tensor::StateTensor;
use super::{Build, Grads, OptimError, Optimizer, Param, Precision, one_each};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// One of so many elements is enough to estimate `d` from, in 8 bits. No factor of the usual ranks, heights and widths, so
/// that no row, column or corner of a kernel is left out.
const EIGHT_BIT_SLICE: u64 = 5;

/// `prodigy` and `prodigy8bit`, and every name that begins so.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let eight = matches!(input.name, OptimizerName::Prodigy8Bit);
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
        slice: usize::try_from(of.whole("slice_p", if eight { EIGHT_BIT_SLICE } else { 1 })).unwrap_or(usize::MAX),
        precision: if eight {
            Precision::eight_bits(of)
        } else {
            Precision::Full
        },
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
    /// How the two means are kept.
    precision: Precision,
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
    exp_avg: Moment,
    exp_avg_sq: Moment,
    /// Running sum of gradients; flat, sliced.
    s: StateTensor,
    /// The weights before the first update; flat, sliced.
    p0: StateTensor,
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
        let p0 = sliced(&param.var.as_tensor().detach().copy()?, settings.slice)?;
        Ok(Self {
            exp_avg: Moment::zeros(param, settings.precision, Map::signed())?,
            exp_avg_sq: Moment::zeros(param, settings.precision, Map::unsigned())?,
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
    /// What taking in a gradient multiplies with.
    fn lessons(&self, d: f64, dlr: f64) -> Lessons {
        Lessons {
            // Without momentum the mean stays as it is.
            beta1: if self.beta1 > 0.0 { self.beta1 } else { 1.0 },
            rest1: if self.beta1 > 0.0 { d * (1.0 - self.beta1) } else { 0.0 },
            beta2: self.beta2,
            rest2: d * d * (1.0 - self.beta2),
            beta3: self.beta3,
            weight: d / self.d0 * if self.safeguard_warmup { d } else { dlr },
            decay: if self.decouple { 0.0 } else { self.weight_decay },
        }
    }

    /// What an update multiplies with, once `d` is known.
    fn moves(&self, d: f64, dlr: f64) -> Moves {
        let decay = self.weight_decay;
        Moves {
            keep: if self.decouple { 1.0 - decay * dlr } else { 1.0 },
            decay: if self.decouple { 0.0 } else { decay },
            eps: d * self.eps,
            momentum: self.beta1 > 0.0,
            step: if self.beta1 > 0.0 { dlr } else { dlr * d },
        }
    }
}

#[derive(Clone, Copy)]
struct Lessons {
    beta1: f64,
    rest1: f64,
    beta2: f64,
    rest2: f64,
    beta3: f64,
    weight: f64,
    /// Of the parameter, as a part of the gradient.
    decay: f64,
}

#[derive(Clone, Copy)]
struct Moves {
    /// Of the parameter, for decoupled decay.
    keep: f64,
    decay: f64,
    eps: f64,
    /// Along the mean of gradients, not the last one.
    momentum: bool,
    step: f64,
}

/// The elements of a state beside the parameter and its gradient; of `s` and `p0`, which may be fewer.
struct Piece<'a> {
    p: &'a [f32],
    g: &'a [f32],
    means: [Mean<'a>; 2],
    s: &'a mut [f32],
    p0: &'a [f32],
}

impl Piece<'_> {
    /// Sums of g.(p0 - p) and of |s|.
    fn learn(self, slice: usize, by: Lessons) -> [f64; 2] {
        unpacked(self.means, self.g.len(), |at, [m, v]| {
            average(&self.p[at.clone()], &self.g[at], m, v, by);
        });
        estimate(self.p, self.g, self.s, self.p0, slice, by)
    }
}

for_every_unit! {
    fn average(p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], by: Lessons) {
        let (beta1, rest1, beta2, rest2) = (by.beta1 as f32, by.rest1 as f32, by.beta2 as f32, by.rest2 as f32);
        let decay = by.decay as f32;
        for (((p, g), m), v) in p.iter().zip(g).zip(m).zip(v) {
            let g = g + p * decay;
            *m = *m * beta1 + g * rest1;
            *v = *v * beta2 + g * g * rest2;
        }
    }
}

for_every_unit! {
    fn estimate(p: &[f32], g: &[f32], s: &mut [f32], p0: &[f32], slice: usize, by: Lessons) -> [f64; 2] {
        let by = [by.beta3 as f32, by.weight as f32, by.decay as f32];
        let mut sums = [[0f32; LANES]; 2];
        if slice == 1 {
            // The usual case, which vector units can do.
            let (ps, p) = p.as_chunks::<LANES>();
            let (gs, g) = g.as_chunks::<LANES>();
            let (ss, s) = s.as_chunks_mut::<LANES>();
            let (p0s, p0) = p0.as_chunks::<LANES>();
            for (((p, g), s), p0) in ps.iter().zip(gs).zip(ss).zip(p0s) {
                remember(p.iter().zip(g), s, p0, &mut sums, by);
            }
            remember(p.iter().zip(g), s, p0, &mut sums, by);
        } else {
            let many = p.chunks(LANES * slice).zip(g.chunks(LANES * slice));
            for (((p, g), s), p0) in many.zip(s.chunks_mut(LANES)).zip(p0.chunks(LANES)) {
                remember(p.iter().zip(g).step_by(slice), s, p0, &mut sums, by);
            }
        }
        sums.map(|sums| sums.iter().map(|sum| f64::from(*sum)).sum())
    }
}

/// Sums beside each other.
const LANES: usize = 32;

/// [`estimate`] for as many elements as there are sums, or fewer.
#[inline(always)]
fn remember<'a>(
    now: impl Iterator<Item = (&'a f32, &'a f32)>,
    s: &mut [f32],
    p0: &[f32],
    sums: &mut [[f32; LANES]; 2],
    [beta3, weight, decay]: [f32; 3],
) {
    let [moved, size] = sums;
    let sums = moved.iter_mut().zip(size);
    for ((((p, g), s), p0), (moved, size)) in now.zip(s).zip(p0).zip(sums) {
        let g = g + p * decay;
        *moved += g * (p0 - p);
        *s = *s * beta3 + g * weight;
        *size += s.abs();
    }
}

for_every_unit! {
    fn go(p: &mut [f32], g: &[f32], m: &[f32], v: &[f32], by: Moves) {
        let (keep, decay, eps, step) = (by.keep as f32, by.decay as f32, by.eps as f32, by.step as f32);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let along = if by.momentum { *m } else { g + *p * decay };
            *p = *p * keep - along / (v.sqrt() + eps) * step;
        }
    }
}

impl State {
    /// In one pass over memory.
    fn learn(&mut self, param: &Param, grad: &Tensor, slice: usize, by: Lessons) -> Result<[f64; 2], OptimError> {
        let p = param.var.as_tensor();
        let grad = inplace::gradient(grad, p)?;
        let means = [&mut self.exp_avg, &mut self.exp_avg_sq];
        let sums = inplace::read(&grad, |mut g| {
            inplace::read(p, |mut p| {
                inplace::read(self.p0.get(), |mut p0| {
                    fused::with([self.s.own()?], means, |[mut s], [mut m, mut v]| {
                        // Whole slices and whole blocks, about a piece.
                        let count = BLOCK * (PIECE / BLOCK / slice).max(1);
                        let many = count.saturating_mul(slice);
                        let mut pieces = Vec::with_capacity(g.len().div_ceil(many));
                        while !g.is_empty() {
                            pieces.push(Piece {
                                p: first(&mut p, many),
                                g: first(&mut g, many),
                                means: [m.take(many), v.take(many)],
                                s: take(&mut s, count),
                                p0: first(&mut p0, count),
                            });
                        }
                        let sums = pieces.into_par_iter().map(|piece| piece.learn(slice, by));
                        sums.collect::<Vec<_>>()
                    })
                })
            })
        })????;
        Ok(sums.iter().fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]))
    }

    /// The same by the tensor library's operations, for other devices.
    fn learn_composed(
        &mut self,
        param: &Param,
        grad: &Tensor,
        slice: usize,
        by: Lessons,
    ) -> Result<[f64; 2], OptimError> {
        let p = param.var.as_tensor().detach();
        let grad = coupled(&p, grad, by.decay)?;
        let few = sliced(&grad, slice)?;
        let moved = sum(&(&few * (self.p0.get() - sliced(&p, slice)?)?)?)?;
        let m = ((self.exp_avg.read()? * by.beta1)? + (&grad * by.rest1)?)?;
        self.exp_avg.write(m)?;
        let v = ((self.exp_avg_sq.read()? * by.beta2)? + (grad.sqr()? * by.rest2)?)?;
        self.exp_avg_sq.write(v)?;
        self.s.set(((self.s.get() * by.beta3)? + (few * by.weight)?)?);
        Ok([moved, sum(&self.s.get().abs()?)?])
    }

    fn go(&mut self, param: &Param, grad: &Tensor, by: Moves) -> Result<(), OptimError> {
        let means = [&mut self.exp_avg, &mut self.exp_avg_sq];
        fused::apply(param, grad, means, |p, g, [m, v]| go(p, g, m, v, by))
    }

    fn go_composed(&self, param: &Param, grad: &Tensor, by: Moves) -> Result<(), OptimError> {
        let p = param.var.as_tensor().detach();
        let denominator = (self.exp_avg_sq.read()?.sqrt()? + by.eps)?;
        let along = if by.momentum {
            self.exp_avg.read()?
        } else {
            coupled(&p, grad, by.decay)?
        };
        let update = ((along / denominator)? * by.step)?;
        param.var.set(&((p * by.keep)? - update)?)?;
        Ok(())
    }
}

fn coupled(p: &Tensor, grad: &Tensor, decay: f64) -> Result<Tensor, OptimError> {
    let grad = grad.to_dtype(DType::F32)?.detach();
    Ok(if decay == 0.0 { grad } else { (grad + (p * decay)?)? })
}

/// The first elements of a slice, which keeps the others.
fn first<'a>(from: &mut &'a [f32], count: usize) -> &'a [f32] {
    let (first, rest) = from.split_at(count.min(from.len()));
    *from = rest;
    first
}

impl Prodigy {
    /// Takes in the gradients. What the numerator of `d` grows by, and its denominator.
    fn learn(&mut self, grads: &Grads, lr: f64, dlr: f64) -> Result<(f64, f64), OptimError> {
        let s = &self.settings;
        let d = self.estimate.d;
        let (mut numerator, mut denominator) = (0.0, 0.0);
        if lr <= 0.0 {
            return Ok((numerator, denominator));
        }
        let by = s.lessons(d, dlr);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            let [moved, size] = if fused::takes(param) {
                state.learn(param, grad, s.slice, by)?
            } else {
                state.learn_composed(param, grad, s.slice, by)?
            };
            numerator += d / s.d0 * dlr * moved;
            denominator += size;
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
        let (grown, denominator) = self.learn(grads, lr, dlr)?;
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
        let by = s.moves(self.estimate.d, dlr);
        for ((param, state), grad) in self.params.iter().zip(&mut self.states).zip(grads) {
            let Some(grad) = grad else { continue };
            if fused::takes(param) {
                state.go(param, grad, by)?;
            } else {
                state.go_composed(param, grad, by)?;
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
            let name = |part: &str| format!("{}.{part}", param.name);
            state.exp_avg.save(&name("exp_avg"), &mut out);
            state.exp_avg_sq.save(&name("exp_avg_sq"), &mut out);
            out.insert(name("s"), state.s.lend());
            out.insert(name("p0"), state.p0.lend());
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
            let name = |part: &str| format!("{}.{part}", param.name);
            let few = [param.var.elem_count().div_ceil(self.settings.slice)];
            let precision = self.settings.precision;
            states.push(State {
                exp_avg: Moment::load(&mut saved, &name("exp_avg"), param, precision, Map::signed())?,
                exp_avg_sq: Moment::load(&mut saved, &name("exp_avg_sq"), param, precision, Map::unsigned())?,
                s: saved.kept(&name("s"), DType::F32, &few, param.var.device())?,
                p0: saved.kept(&name("p0"), DType::F32, &few, param.var.device())?,
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
