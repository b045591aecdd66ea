//! Rotary position embedding: rotates pairs of features by an angle that is proportional to the position (J. Su and
//! others, arXiv:2104.09864).

use super::cpu;
use super::tensors::widen;
use crate::autograd::{Input, Operation, apply};
use crate::cuda_kernels::{self, Rotation};
use candle_core::{D, Device, DeviceLocation, Shape, Tensor};
use rayon::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// Which features of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Features 0 and 1, 2 and 3, …: FLUX, diffusers' `use_real_unbind_dim=-1`.
    Interleaved,
    /// Feature i of the first half with feature i of the second half: Llama, Qwen, T5 Gemma; `use_real_unbind_dim=-2`.
    Halves,
}

/// Cosines and sines by device, [1, positions, 1, width / 2].
type Copies = Vec<(DeviceLocation, [Tensor; 2])>;

/// A rotary position embedding: the cosines and sines for each position.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// [positions, width / 2], f32, on the CPU.
    cos: Arc<Vec<f32>>,
    sin: Arc<Vec<f32>>,
    positions: usize,
    half: usize,
    pairs: RotaryPairs,
    /// Cosines and sines on the devices that used them.
    copies: Arc<Mutex<Copies>>,
}

impl Rotary {
    /// For positions with one coordinate per axis. Axis i rotates `widths[i]` features of a head, with frequencies from
    /// 1 down to almost 1 / `theta`. Angles are computed in f64, as in diffusers' `get_1d_rotary_pos_embed` for FLUX.
    ///
    /// # Errors
    /// When a position does not have one coordinate per axis, or a width is odd.
    pub fn for_axes(
        positions: &[Vec<f64>],
        widths: &[usize],
        theta: f64,
        pairs: RotaryPairs,
    ) -> candle_core::Result<Self> {
        if positions.iter().any(|position| position.len() != widths.len()) || widths.iter().any(|width| width % 2 != 0)
        {
            candle_core::bail!(
                "rotary: each position needs {} coordinates, and the widths {widths:?} must be even",
                widths.len()
            );
        }
        let half = widths.iter().sum::<usize>() / 2;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in positions {
            for (coordinate, width) in position.iter().zip(widths) {
                for pair in 0..width / 2 {
                    let frequency = theta.powf(-2.0 * pair as f64 / *width as f64);
                    let (s, c) = (coordinate * frequency).sin_cos();
                    cos.push(c as f32);
                    sin.push(s as f32);
                }
            }
        }
        Ok(Self {
            cos: Arc::new(cos),
            sin: Arc::new(sin),
            positions: positions.len(),
            half,
            pairs,
            copies: Arc::default(),
        })
    }

    /// For positions 0, 1, 2, … and heads of `width` features.
    ///
    /// # Errors
    /// When the width is odd.
    pub fn for_sequence(length: usize, width: usize, theta: f64, pairs: RotaryPairs) -> candle_core::Result<Self> {
        let positions: Vec<_> = (0..length).map(|position| vec![position as f64]).collect();
        Self::for_axes(&positions, &[width], theta, pairs)
    }

    /// For any positions, in runs of positions with the same frequencies: the angle per position of each pair of features, [width / 2].
    /// Angles are computed in f32, as in transformers. Cosines and sines are multiplied by `scale` (transformers' `attention_scaling`).
    ///
    /// # Errors
    /// When there are no frequencies, or not equally many in all runs.
    pub fn for_positions<'a, F: AsRef<[f32]>>(
        runs: impl IntoIterator<Item = (&'a [u32], F)>,
        scale: f32,
        pairs: RotaryPairs,
    ) -> candle_core::Result<Self> {
        let (mut cos, mut sin, mut count, mut half) = (Vec::new(), Vec::new(), 0, 0);
        for (positions, frequencies) in runs {
            let frequencies = frequencies.as_ref();
            if frequencies.is_empty() || (half != 0 && half != frequencies.len()) {
                candle_core::bail!(
                    "rotary: there are {} frequencies, and {half} before: expected equally many",
                    frequencies.len()
                );
            }
            half = frequencies.len();
            count += positions.len();
            for position in positions {
                for frequency in frequencies {
                    let (s, c) = f64::from(*position as f32 * frequency).sin_cos();
                    cos.push(c as f32 * scale);
                    sin.push(s as f32 * scale);
                }
            }
        }
        Ok(Self {
            cos: Arc::new(cos),
            sin: Arc::new(sin),
            positions: count,
            half,
            pairs,
            copies: Arc::default(),
        })
    }

    /// For any positions, with the cosine and the sine for each pair of features, [positions, width / 2], as a model computes them.
    ///
    /// # Errors
    /// When there are not equally many cosines and sines, or not equally many for each position.
    pub fn from_tables(
        positions: usize,
        cosines: Vec<f32>,
        sines: Vec<f32>,
        pairs: RotaryPairs,
    ) -> candle_core::Result<Self> {
        let half = cosines.len() / positions.max(1);
        if cosines.len() != sines.len() || half * positions != cosines.len() {
            candle_core::bail!(
                "rotary: {} cosines and {} sines do not fit {positions} positions",
                cosines.len(),
                sines.len()
            );
        }
        Ok(Self {
            cos: Arc::new(cosines),
            sin: Arc::new(sines),
            positions,
            half,
            pairs,
            copies: Arc::default(),
        })
    }

    /// Rotates every head of x [b, positions, heads * width].
    ///
    /// # Errors
    /// When x has another number of positions, or its features are not a multiple of the width.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.check_shape(x.shape())?;
        apply([x], self.clone())
    }

    /// The cosines and sines, [1, positions, 1, width / 2], on this device. They are copied there once.
    fn tables_on(&self, device: &Device) -> candle_core::Result<[Tensor; 2]> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tables)) = copies.iter().find(|(location, _)| *location == device.location()) {
            return Ok(tables.clone());
        }
        let table = |values: &[f32]| Tensor::from_slice(values, (1, self.positions, 1, self.half), device);
        let tables = [table(&self.cos)?, table(&self.sin)?];
        copies.push((device.location(), tables.clone()));
        Ok(tables)
    }

    /// [`Self::rotate`] with candle's operations, in f32.
    fn rotate_tensors(&self, x: &Tensor, sign: f64) -> candle_core::Result<Tensor> {
        let (batch, n, features) = x.dims3()?;
        let [cos, sin] = self.tables_on(x.device())?;
        let rotation = Rotation {
            cos: &cos,
            sin: &sin,
            half: self.half,
            interleaved: self.pairs == RotaryPairs::Interleaved,
            sign,
        };
        if let Some(y) = cuda_kernels::rotate(&rotation, x)? {
            return Ok(y);
        }
        let heads = features / (2 * self.half);
        let (shape, axis) = match self.pairs {
            RotaryPairs::Interleaved => ((batch, n, heads, self.half, 2), D::Minus1),
            RotaryPairs::Halves => ((batch, n, heads, 2, self.half), D::Minus2),
        };
        let paired = widen(&x.reshape(shape)?)?;
        let part = |which: usize| paired.narrow(axis, which, 1)?.squeeze(axis);
        let (first, second) = (part(0)?, part(1)?);
        let (cos, sin) = (cos.to_dtype(paired.dtype())?, (sin.to_dtype(paired.dtype())? * sign)?);
        let rotated = [
            (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?,
            (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?,
        ];
        Tensor::stack(&rotated, axis)?.reshape(x.shape())?.to_dtype(x.dtype())
    }

    fn check_shape(&self, x: &Shape) -> candle_core::Result<()> {
        let (_, n, features) = x.dims3()?;
        if n != self.positions || self.half == 0 || !features.is_multiple_of(2 * self.half) {
            candle_core::bail!(
                "rotary: {x:?} does not have {} positions and heads of {} features",
                self.positions,
                2 * self.half
            );
        }
        Ok(())
    }

    /// Rotates x by the angles (`sign` 1) or back (-1).
    fn rotate(&self, x: &[f32], features: usize, sign: f32) -> Vec<f32> {
        let mut y = vec![0f32; x.len()];
        if x.is_empty() {
            return y;
        }
        let rows = y.par_chunks_mut(features).zip(x.par_chunks(features));
        rows.with_min_len(16).enumerate().for_each(|(row, (y, x))| {
            let at = row % self.positions * self.half;
            let (cos, sin) = (&self.cos[at..at + self.half], &self.sin[at..at + self.half]);
            let heads = y.chunks_exact_mut(2 * self.half).zip(x.chunks_exact(2 * self.half));
            for (y, x) in heads {
                let angles = cos.iter().zip(sin);
                match self.pairs {
                    RotaryPairs::Interleaved => {
                        let pairs = y.as_chunks_mut::<2>().0.iter_mut().zip(x.as_chunks::<2>().0);
                        for (([y0, y1], [x0, x1]), (cos, sin)) in pairs.zip(angles) {
                            *y0 = x0 * cos - sign * x1 * sin;
                            *y1 = x1 * cos + sign * x0 * sin;
                        }
                    }
                    RotaryPairs::Halves => {
                        let ((y0, y1), (x0, x1)) = (y.split_at_mut(self.half), x.split_at(self.half));
                        let pairs = y0.iter_mut().zip(y1).zip(x0.iter().zip(x1));
                        for (((y0, y1), (x0, x1)), (cos, sin)) in pairs.zip(angles) {
                            *y0 = x0 * cos - sign * x1 * sin;
                            *y1 = x1 * cos + sign * x0 * sin;
                        }
                    }
                }
            }
        });
        y
    }
}

impl Operation<1> for Rotary {
    const NAME: &'static str = "rotary";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> candle_core::Result<(Vec<f32>, Shape)> {
        self.check_shape(shape)?;
        Ok((self.rotate(x, shape.dims3()?.2, 1.0), shape.clone()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let features = x.shape().dims3()?.2;
        let dx = cpu::with_slice(gradient, |dy| self.rotate(dy, features, -1.0))?;
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        self.check_shape(x.shape())?;
        self.rotate_tensors(x, 1.0)
    }

    fn backward_tensors(&self, _: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        Ok([Some(self.rotate_tensors(gradient, -1.0)?)])
    }
}
