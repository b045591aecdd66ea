//! Norms on the CPU. Sums run in f64, one row on one thread, so that the result does not depend on the number of
//! threads.

use crate::autograd::{Input, Operation};
use crate::nn::activation::Activation;
use crate::nn::cpu::{self, Function, Simd, Work, each_here, vectorised};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// Rows of `length` elements; element `i` of the whole tensor belongs to channel `i / spatial % channels`.
pub(super) struct Rows {
    pub(super) length: usize,
    pub(super) channels: usize,
    pub(super) spatial: usize,
    pub(super) eps: f64,
    /// Whether the mean is taken away first; what is divided by is the root mean square in any case.
    pub(super) centred: bool,
    /// What the result goes through.
    pub(super) then: Option<Activation>,
}

/// `mul * x + add`, and what that goes through.
#[derive(Clone, Copy)]
struct Affine {
    mul: f32,
    add: f32,
    then: Option<Activation>,
}

impl Function<1> for Affine {
    #[inline(always)]
    fn of<S: Simd>(self, [x]: [S::V; 1]) -> S::V {
        let y = S::mul_add(x, S::splat(self.mul), S::splat(self.add));
        match self.then {
            Some(then) => then.value::<S>(y),
            None => y,
        }
    }
}

/// The gradient of what came before `then`.
impl Function<2> for Affine {
    #[inline(always)]
    fn of<S: Simd>(self, [x, dy]: [S::V; 2]) -> S::V {
        let y = S::mul_add(x, S::splat(self.mul), S::splat(self.add));
        match self.then {
            Some(then) => S::mul(dy, then.derivative::<S>(y)),
            None => dy,
        }
    }
}

impl Rows {
    /// What becomes of a channel's elements, with the mean of its row and 1 / sqrt(variance + eps).
    fn affine(&self, (mean, scale): (f32, f32), weight: f32, bias: f32) -> Affine {
        Affine {
            mul: scale * weight,
            add: bias - mean * scale * weight,
            then: self.then,
        }
    }

    /// Mean and 1 / sqrt(variance + eps).
    fn statistics(&self, row: &[f32]) -> (f32, f32) {
        vectorised(Statistics {
            row,
            eps: self.eps,
            centred: self.centred,
        })
    }

    /// The channel of the first element of row `r`.
    fn first_channel(&self, r: usize) -> usize {
        r * self.length / self.spatial % self.channels
    }
}

impl Operation<3> for Rows {
    const NAME: &'static str = "norm";

    fn saved_inputs(&self, _: [bool; 3]) -> [bool; 3] {
        [true, true, self.then.is_some()]
    }

    fn forward(
        &self,
        [x, weight, bias]: [&[f32]; 3],
        [shape, ..]: [&Shape; 3],
    ) -> candle_core::Result<(Vec<f32>, Shape)> {
        let mut y = vec![0f32; x.len()];
        if !x.is_empty() {
            y.par_chunks_mut(self.length)
                .zip(x.par_chunks(self.length))
                .enumerate()
                .for_each(|(r, (y, x))| {
                    let (mean, scale) = self.statistics(x);
                    let first = self.first_channel(r);
                    if self.spatial == 1 && self.then.is_none() {
                        let (weight, bias) = (&weight[first..], &bias[first..]);
                        for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                            *y = (x - mean) * scale * w + b;
                        }
                        return;
                    }
                    for (i, (y, x)) in y.chunks_mut(self.spatial).zip(x.chunks(self.spatial)).enumerate() {
                        each_here(self.affine((mean, scale), weight[first + i], bias[first + i]), [x], y);
                    }
                });
        }
        Ok((y, shape.clone()))
    }

    fn backward(&self, [x, weight, bias]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let affine = weight.requires_grad() || bias.requires_grad();
        let shape = x.shape();
        let mut dx = vec![0f32; shape.elem_count()];
        let (mut dw, mut db) = (vec![0f64; self.channels], vec![0f64; self.channels]);
        let biases = match self.then {
            Some(_) => bias.with(<[f32]>::to_vec)?,
            None => Vec::new(),
        };
        x.with(|x| {
            weight.with(|weight| {
                cpu::with_slice(gradient, |dy| {
                    if x.is_empty() {
                        return;
                    }
                    let inputs = x.par_chunks(self.length).zip(dy.par_chunks(self.length));
                    dx.par_chunks_mut(self.length).zip(inputs).enumerate().for_each_init(
                        Vec::new,
                        |room, (r, (dx, (x, dy)))| {
                            let first = self.first_channel(r);
                            let dy = self.before(first, x, dy, (weight, &biases), room);
                            self.backward_row(first, x, dy, weight, dx);
                        },
                    );
                    if affine {
                        let mut room = Vec::new();
                        for (r, (x, dy)) in x.chunks(self.length).zip(dy.chunks(self.length)).enumerate() {
                            let (mean, scale) = self.statistics(x);
                            let first = self.first_channel(r);
                            let dy = self.before(first, x, dy, (weight, &biases), &mut room);
                            for (i, (x, dy)) in x.chunks(self.spatial).zip(dy.chunks(self.spatial)).enumerate() {
                                let (mut w, mut b) = (0f64, 0f64);
                                for (x, dy) in x.iter().zip(dy) {
                                    w += f64::from(dy * (x - mean) * scale);
                                    b += f64::from(*dy);
                                }
                                dw[first + i] += w;
                                db[first + i] += b;
                            }
                        }
                    }
                })
            })
        })???;
        let vector = |v: Vec<f64>| Tensor::from_vec(v.iter().map(|v| *v as f32).collect(), self.channels, &Device::Cpu);
        Ok([
            Some(Tensor::from_vec(dx, shape, &Device::Cpu)?),
            if affine { Some(vector(dw)?) } else { None },
            if affine { Some(vector(db)?) } else { None },
        ])
    }
}

impl Rows {
    /// The gradient before the activation, of a row; in `room` if there is an activation.
    fn before<'a>(
        &self,
        first: usize,
        x: &[f32],
        dy: &'a [f32],
        (weight, bias): (&[f32], &[f32]),
        room: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        if self.then.is_none() {
            return dy;
        }
        let statistics = self.statistics(x);
        room.resize(x.len(), 0.0);
        let channels = room
            .chunks_mut(self.spatial)
            .zip(x.chunks(self.spatial))
            .zip(dy.chunks(self.spatial));
        for (i, ((to, x), dy)) in channels.enumerate() {
            each_here(self.affine(statistics, weight[first + i], bias[first + i]), [x, dy], to);
        }
        room
    }

    /// dx = scale * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight; without mean(g) if not centred.
    fn backward_row(&self, first: usize, x: &[f32], dy: &[f32], weight: &[f32], dx: &mut [f32]) {
        let (mean, scale) = self.statistics(x);
        vectorised(BackwardRow {
            x,
            dy,
            dx,
            weight: &weight[first..],
            spatial: self.spatial,
            centred: self.centred,
            mean,
            scale,
        });
    }
}

/// Partial sums: so many that the CPU need not wait for one addition before the next, in an order of their own.
const PARTS: usize = 16;

#[inline(always)]
fn sum<const N: usize>(inputs: [&[f32]; N], parts: &mut [f64; PARTS], f: impl Fn([f32; N]) -> f32) {
    let length = inputs.iter().map(|x| x.len()).min().unwrap_or(0);
    let whole = length - length % PARTS;
    for at in (0..whole).step_by(PARTS) {
        let blocks = inputs.map(|x| &x[at..at + PARTS]);
        for (i, part) in parts.iter_mut().enumerate() {
            *part += f64::from(f(blocks.map(|block| block[i])));
        }
    }
    for i in whole..length {
        parts[i - whole] += f64::from(f(inputs.map(|x| x[i])));
    }
}

struct Statistics<'a> {
    row: &'a [f32],
    eps: f64,
    centred: bool,
}

impl Work for Statistics<'_> {
    type Out = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self) -> (f32, f32) {
        let n = self.row.len().max(1) as f64;
        let (mut total, mut squares) = ([0f64; PARTS], [0f64; PARTS]);
        if self.centred {
            sum([self.row], &mut total, |[v]| v);
        }
        let mean = total.iter().sum::<f64>() / n;
        // Of what is left when the mean is taken away: squares of large numbers would cancel.
        let centre = mean as f32;
        sum([self.row], &mut squares, |[v]| (v - centre) * (v - centre));
        let variance = squares.iter().sum::<f64>() / n - (mean - f64::from(centre)).powi(2);
        (centre, (1.0 / (variance.max(0.0) + self.eps).sqrt()) as f32)
    }
}

struct BackwardRow<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
    /// From the row's first channel on.
    weight: &'a [f32],
    spatial: usize,
    centred: bool,
    mean: f32,
    scale: f32,
}

impl Work for BackwardRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            x,
            dy,
            dx,
            weight,
            spatial,
            centred,
            mean,
            scale,
        } = self;
        let (mut g_sum, mut gx_sum) = ([0f64; PARTS], [0f64; PARTS]);
        let n = x.len() as f64;
        let means = |g: [f64; PARTS], gx: [f64; PARTS]| {
            // What a mean that is not taken away would send back.
            let g = if centred { g.iter().sum::<f64>() / n } else { 0.0 };
            (g as f32, (gx.iter().sum::<f64>() / n) as f32)
        };
        if spatial == 1 {
            sum([dy, weight], &mut g_sum, |[dy, w]| dy * w);
            sum([dy, weight, x], &mut gx_sum, |[dy, w, x]| dy * w * (x - mean) * scale);
            let (mean_g, mean_gx) = means(g_sum, gx_sum);
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx = scale * (dy * w - mean_g - (x - mean) * scale * mean_gx);
            }
            return;
        }
        let channels = || x.chunks(spatial).zip(dy.chunks(spatial)).zip(weight);
        for ((x, dy), w) in channels() {
            sum([dy], &mut g_sum, |[dy]| dy * w);
            sum([dy, x], &mut gx_sum, |[dy, x]| dy * w * (x - mean) * scale);
        }
        let (mean_g, mean_gx) = means(g_sum, gx_sum);
        for (((x, dy), w), dx) in channels().zip(dx.chunks_mut(spatial)) {
            for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
                *dx = scale * (dy * w - mean_g - (x - mean) * scale * mean_gx);
            }
        }
    }
}
