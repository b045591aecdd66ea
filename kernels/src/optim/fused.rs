//! Fused optimizer steps on the CPU: one pass over the parameter, its gradient and its moments, chunk by chunk. Chunks
//! have a fixed length and are independent of each other, so that the result does not depend on the number of threads.

use super::blockwise::{BLOCK, QuantMap, decode, encode};
use super::inplace::{self, ElementsMut};
use super::kernels;
use super::moment::Moment;
use super::optimizer::{OptimError, Param};
use super::state_tensor::StateTensor;
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Elements per task: whole blocks of 8-bit state.
pub(super) const CHUNK_LEN: usize = 64 * BLOCK;
/// Elements of 8-bit state that are dequantised at a time.
const BURST: usize = 2 * BLOCK;

/// The elements of a moment, or a contiguous part of them.
pub(super) enum MomentMut<'a> {
    /// float32.
    Float32(&'a mut [f32]),
    /// 8 bits: the codes and the scales of their blocks.
    EightBit(&'static QuantMap, &'a mut [u8], &'a mut [f32]),
}

impl<'a> MomentMut<'a> {
    /// Splits off the next `count` elements (whole blocks), or all that are left.
    pub(super) fn split_front(&mut self, count: usize) -> Self {
        match self {
            Self::Float32(numbers) => Self::Float32(split_front(numbers, count)),
            Self::EightBit(quant_map, codes, absmax) => Self::EightBit(
                quant_map,
                split_front(codes, count),
                split_front(absmax, count.div_ceil(BLOCK)),
            ),
        }
    }

    fn dequantize_into(&self, out: &mut [f32]) {
        match self {
            Self::Float32(numbers) => out.copy_from_slice(numbers),
            Self::EightBit(quant_map, codes, absmax) => decode(quant_map, codes, absmax, out),
        }
    }

    fn quantize_from(&mut self, from: &[f32], next: &[f32]) {
        match self {
            Self::Float32(numbers) => numbers.copy_from_slice(from),
            Self::EightBit(quant_map, codes, absmax) => encode(quant_map, from, codes, absmax, next),
        }
    }

    fn into_f32(self) -> Option<&'a mut [f32]> {
        match self {
            Self::Float32(numbers) => Some(numbers),
            Self::EightBit(..) => None,
        }
    }

    fn prefetch(&self, count: usize) {
        if let Self::EightBit(_, codes, _) = self {
            kernels::prefetch(&codes[..count.min(codes.len())]);
        }
    }
}

/// Splits off the first `count` elements of a slice, or all of them; the slice keeps the rest.
pub(super) fn split_front<'a, T>(from: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let all = std::mem::take(from);
    let (first, rest) = all.split_at_mut(count.min(all.len()));
    *from = rest;
    first
}

/// Whether the fused code can update a parameter. Otherwise candle's operations do.
pub(super) fn is_supported(param: &Param) -> bool {
    param.var.dtype() == DType::F32 && inplace::is_supported(param.var.as_tensor())
}

/// Runs `kernel` on chunks of a parameter, its gradient and its moments. The kernel changes the parameter and the
/// moments. Only for supported parameters (see [`is_supported`]).
pub(super) fn update<const N: usize>(
    param: &Param,
    grad: &Tensor,
    moments: [&mut Moment; N],
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    run(param, grad, moments, true, kernel)
}

/// As [`update`], for a kernel that does not change the moments: 8-bit moments are not quantised again.
pub(super) fn update_with_fixed_moments<const N: usize>(
    param: &Param,
    grad: &Tensor,
    moments: [&mut Moment; N],
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    run(param, grad, moments, false, kernel)
}

fn run<const N: usize>(
    param: &Param,
    grad: &Tensor,
    moments: [&mut Moment; N],
    writes_moments: bool,
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    let p = param.var.as_tensor();
    let grad = inplace::readable_gradient(grad, p)?;
    inplace::with_f32(&grad, |g| {
        with_slices([p], moments, |[p], moments| {
            run_in_chunks(
                Chunk {
                    p,
                    g,
                    moments,
                    writes_moments,
                },
                &kernel,
            )
        })
    })?
}

/// Calls `f` with the elements of float32 tensors and of moments, to change them. No two tensors may share their
/// storage, and every one must be supported (see [`inplace::is_supported`]).
pub(super) fn with_slices<const T: usize, const N: usize, R>(
    tensors: [&Tensor; T],
    moments: [&mut Moment; N],
    f: impl FnOnce([&mut [f32]; T], [MomentMut<'_>; N]) -> R,
) -> Result<R, OptimError> {
    let mut all = tensors.to_vec();
    let mut quant_maps = [None; N];
    for (moment, quant_map) in moments.into_iter().zip(&mut quant_maps) {
        match moment {
            Moment::Float32(tensor) => all.push(tensor.make_mut()?),
            Moment::EightBit(blocks) => {
                *quant_map = Some(blocks.quant_map);
                all.push(blocks.codes.make_mut()?);
                all.push(blocks.absmax.make_mut()?);
            }
        }
    }
    Ok(inplace::with_elements_mut(&all, |elements| {
        let mut elements = elements.into_iter();
        let mut next = || elements.next().unwrap_or(ElementsMut::F32(&mut []));
        let tensors = std::array::from_fn(|_| next().f32());
        let moments = quant_maps.map(|quant_map| match quant_map {
            None => MomentMut::Float32(next().f32()),
            Some(quant_map) => MomentMut::EightBit(quant_map, next().u8(), next().f32()),
        });
        f(tensors, moments)
    })?)
}

/// Runs `kernel` on chunks of a parameter, of an input of the same shape and of a state tensor. Returns the kernel's
/// results in the order of the chunks. Only for supported parameters (see [`is_supported`]).
pub(super) fn map_with_state<S: Send, R: Send>(
    param: &Param,
    input: &Tensor,
    state: &mut StateTensor,
    select: fn(ElementsMut<'_>) -> &mut [S],
    kernel: impl Fn(&mut [f32], &[f32], &mut [S]) -> R + Sync,
) -> Result<Vec<R>, OptimError> {
    let p = param.var.as_tensor();
    let input = inplace::readable_gradient(input, p)?;
    let state = state.make_mut()?;
    Ok(inplace::with_f32(&input, |input| {
        inplace::with_elements_mut(&[p, state], |elements| {
            let mut elements = elements.into_iter();
            let p = elements.next().map(ElementsMut::f32).unwrap_or_default();
            let state = elements.next().map(select).unwrap_or_default();
            let chunks = p.par_chunks_mut(CHUNK_LEN).zip(input.par_chunks(CHUNK_LEN));
            let chunks = chunks.zip(state.par_chunks_mut(CHUNK_LEN));
            chunks.map(|((p, input), state)| kernel(p, input, state)).collect()
        })
    })??)
}

/// Runs `f` on the values of moments, which it may change. Float32 moments are passed at once; 8-bit moments are
/// dequantised a few blocks at a time. The first argument of `f` is the range of the elements. Each moment must start
/// at a block.
pub(super) fn for_each_dequantized<const N: usize>(
    mut moments: [MomentMut<'_>; N],
    count: usize,
    mut f: impl FnMut(Range<usize>, [&mut [f32]; N]),
) {
    if moments.iter().all(|moment| matches!(moment, MomentMut::Float32(_))) {
        return f(0..count, moments.map(|moment| moment.into_f32().unwrap_or_default()));
    }
    let mut numbers = [[0f32; BURST]; N];
    for at in (0..count).step_by(BURST) {
        let len = BURST.min(count - at);
        let mut current = moments.each_mut().map(|moment| moment.split_front(len));
        for (moment, out) in current.iter().zip(&mut numbers) {
            moment.dequantize_into(&mut out[..len]);
        }
        f(at..at + len, numbers.each_mut().map(|numbers| &mut numbers[..len]));
        for (moment, from) in current.iter_mut().zip(&numbers) {
            moment.quantize_from(&from[..len], &[]);
        }
    }
}

struct Chunk<'a, const N: usize> {
    p: &'a mut [f32],
    g: &'a [f32],
    moments: [MomentMut<'a>; N],
    /// Whether the kernel changes the moments.
    writes_moments: bool,
}

impl<const N: usize> Chunk<'_, N> {
    /// Splits off the next `count` elements, or all that are left.
    fn split_front(&mut self, count: usize) -> Self {
        let (g, rest) = self.g.split_at(count.min(self.g.len()));
        self.g = rest;
        Self {
            p: split_front(&mut self.p, count),
            g,
            moments: self.moments.each_mut().map(|moment| moment.split_front(count)),
            writes_moments: self.writes_moments,
        }
    }

    fn run(mut self, kernel: &impl Fn(&mut [f32], &[f32], [&mut [f32]; N])) {
        if self
            .moments
            .iter()
            .all(|moment| matches!(moment, MomentMut::Float32(_)))
        {
            let moments = self.moments.map(|moment| moment.into_f32().unwrap_or_default());
            return kernel(self.p, self.g, moments);
        }
        let mut values = [[0f32; BURST]; N];
        while !self.g.is_empty() {
            let mut current = self.split_front(BURST);
            // Arithmetic and memory take about equally long: prefetch the next elements during the arithmetic.
            let prefetch_len = BURST.min(self.g.len());
            for (moment, out) in current.moments.iter().zip(&mut values) {
                moment.dequantize_into(&mut out[..current.g.len()]);
            }
            for moment in &self.moments {
                moment.prefetch(prefetch_len);
            }
            let len = current.g.len();
            kernel(current.p, current.g, values.each_mut().map(|moment| &mut moment[..len]));
            if !self.writes_moments {
                continue;
            }
            let (p, g) = (&self.p[..prefetch_len], &self.g[..prefetch_len]);
            for (at, (moment, from)) in current.moments.iter_mut().zip(&values).enumerate() {
                moment.quantize_from(&from[..len], if at == 0 { g } else { p });
            }
            if N == 1 {
                kernels::prefetch(p);
            }
        }
    }
}

fn run_in_chunks<const N: usize>(
    mut all: Chunk<'_, N>,
    kernel: &(impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync),
) {
    if all.g.len() <= CHUNK_LEN {
        return all.run(kernel);
    }
    let chunks: Vec<_> = (0..all.g.len().div_ceil(CHUNK_LEN))
        .map(|_| all.split_front(CHUNK_LEN))
        .collect();
    chunks.into_par_iter().for_each(|chunk| chunk.run(kernel));
}
