//! An update in one pass over memory: a piece of the parameter, of its gradient and of its running means is taken, all of
//! the arithmetic done with it, and the next piece taken. Pieces are of a fixed size and do not look at each other, so
//! that the result does not depend on how many threads there are.

use super::blockwise::{BLOCK, Map, decode, encode};
use super::inplace::{self, Part};
use super::kernels::prefetch;
use super::moment::Moment;
use super::state_tensor::StateTensor;
use super::{OptimError, Param};
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Elements that one thread takes at a time: whole blocks of 8-bit state.
pub(super) const PIECE: usize = 64 * BLOCK;
/// Elements of 8-bit state that are unpacked at a time.
const BURST: usize = 2 * BLOCK;

/// The elements of a running mean.
pub(super) enum Mean<'a> {
    /// In float32.
    Full(&'a mut [f32]),
    /// In 8 bits: codes and scales.
    Blocks(&'static Map, &'a mut [u8], &'a mut [f32]),
}

impl<'a> Mean<'a> {
    /// The next elements: as many, whole blocks, or the rest.
    pub(super) fn take(&mut self, count: usize) -> Self {
        match self {
            Self::Full(numbers) => Self::Full(take(numbers, count)),
            Self::Blocks(map, codes, absmax) => {
                Self::Blocks(map, take(codes, count), take(absmax, count.div_ceil(BLOCK)))
            }
        }
    }

    fn unpack(&self, out: &mut [f32]) {
        match self {
            Self::Full(numbers) => out.copy_from_slice(numbers),
            Self::Blocks(map, codes, absmax) => decode(map, codes, absmax, out),
        }
    }

    fn pack(&mut self, from: &[f32], soon: &[f32]) {
        match self {
            Self::Full(numbers) => numbers.copy_from_slice(from),
            Self::Blocks(map, codes, absmax) => encode(map, from, codes, absmax, soon),
        }
    }

    fn full(self) -> Option<&'a mut [f32]> {
        match self {
            Self::Full(numbers) => Some(numbers),
            Self::Blocks(..) => None,
        }
    }

    fn soon(&self, count: usize) {
        if let Self::Blocks(_, codes, _) = self {
            prefetch(&codes[..count.min(codes.len())]);
        }
    }
}

/// The first elements of a slice, which keeps the others.
pub(super) fn take<'a, T>(from: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let all = std::mem::take(from);
    let (first, rest) = all.split_at_mut(count.min(all.len()));
    *from = rest;
    first
}

/// Whether a parameter is updated here, and not by the tensor library's operations.
pub(super) fn takes(param: &Param) -> bool {
    param.var.dtype() == DType::F32 && inplace::possible(param.var.as_tensor())
}

/// Runs `kernel` on pieces of a parameter, its gradient and its means, which it changes. Only for what it [`takes`].
pub(super) fn update<const N: usize>(
    param: &Param,
    grad: &Tensor,
    means: [&mut Moment; N],
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    run(param, grad, means, true, kernel)
}

/// [`update`] with a kernel that leaves the means as they are: they are read, and in 8 bits not written again.
pub(super) fn apply<const N: usize>(
    param: &Param,
    grad: &Tensor,
    means: [&mut Moment; N],
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    run(param, grad, means, false, kernel)
}

fn run<const N: usize>(
    param: &Param,
    grad: &Tensor,
    means: [&mut Moment; N],
    packs: bool,
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    let p = param.var.as_tensor();
    let grad = inplace::gradient(grad, p)?;
    inplace::read(&grad, |g| {
        with([p], means, |[p], means| {
            in_pieces(Piece { p, g, means, packs }, &kernel)
        })
    })?
}

/// Calls `f` with the elements of float32 tensors and of means, to change them. Only for tensors that are not the same and
/// for which this is [`inplace::possible`].
pub(super) fn with<const T: usize, const N: usize, R>(
    tensors: [&Tensor; T],
    means: [&mut Moment; N],
    f: impl FnOnce([&mut [f32]; T], [Mean<'_>; N]) -> R,
) -> Result<R, OptimError> {
    let mut all = tensors.to_vec();
    let mut maps = [None; N];
    for (mean, map) in means.into_iter().zip(&mut maps) {
        match mean {
            Moment::Full(numbers) => all.push(numbers.own()?),
            Moment::Blocks(blocks) => {
                *map = Some(blocks.map);
                all.push(blocks.codes.own()?);
                all.push(blocks.absmax.own()?);
            }
        }
    }
    Ok(inplace::with(&all, |parts| {
        let mut parts = parts.into_iter();
        let mut next = || parts.next().unwrap_or(Part::F32(&mut []));
        let tensors = std::array::from_fn(|_| next().f32());
        let means = maps.map(|map| match map {
            None => Mean::Full(next().f32()),
            Some(map) => Mean::Blocks(map, next().u8(), next().f32()),
        });
        f(tensors, means)
    })?)
}

/// Runs `kernel` on pieces of a parameter, of a tensor like it, to be read, and of a tensor of its state; gives what it made
/// of each piece, in their order. Only for what it [`takes`].
pub(super) fn beside<S: Send, R: Send>(
    param: &Param,
    read: &Tensor,
    state: &mut StateTensor,
    part: fn(Part<'_>) -> &mut [S],
    kernel: impl Fn(&mut [f32], &[f32], &mut [S]) -> R + Sync,
) -> Result<Vec<R>, OptimError> {
    let p = param.var.as_tensor();
    let read = inplace::gradient(read, p)?;
    let state = state.own()?;
    Ok(inplace::read(&read, |read| {
        inplace::with(&[p, state], |parts| {
            let mut parts = parts.into_iter();
            let p = parts.next().map(Part::f32).unwrap_or_default();
            let state = parts.next().map(part).unwrap_or_default();
            let pieces = p.par_chunks_mut(PIECE).zip(read.par_chunks(PIECE));
            let pieces = pieces.zip(state.par_chunks_mut(PIECE));
            pieces.map(|((p, read), state)| kernel(p, read, state)).collect()
        })
    })??)
}

/// Runs `f` on the numbers of means, which it changes; where they are in 8 bits, a few at a time. `f` is told which of the
/// `count` elements they are. Means that begin with a block.
pub(super) fn unpacked<const N: usize>(
    mut means: [Mean<'_>; N],
    count: usize,
    mut f: impl FnMut(Range<usize>, [&mut [f32]; N]),
) {
    if means.iter().all(|mean| matches!(mean, Mean::Full(_))) {
        return f(0..count, means.map(|mean| mean.full().unwrap_or_default()));
    }
    let mut numbers = [[0f32; BURST]; N];
    for at in (0..count).step_by(BURST) {
        let few = BURST.min(count - at);
        let mut now = means.each_mut().map(|mean| mean.take(few));
        for (mean, out) in now.iter().zip(&mut numbers) {
            mean.unpack(&mut out[..few]);
        }
        f(at..at + few, numbers.each_mut().map(|numbers| &mut numbers[..few]));
        for (mean, from) in now.iter_mut().zip(&numbers) {
            mean.pack(&from[..few], &[]);
        }
    }
}

struct Piece<'a, const N: usize> {
    p: &'a mut [f32],
    g: &'a [f32],
    means: [Mean<'a>; N],
    /// Whether the kernel changes the means.
    packs: bool,
}

impl<const N: usize> Piece<'_, N> {
    /// The next elements: as many, or the rest.
    fn take(&mut self, count: usize) -> Self {
        let (g, rest) = self.g.split_at(count.min(self.g.len()));
        self.g = rest;
        Self {
            p: take(&mut self.p, count),
            g,
            means: self.means.each_mut().map(|mean| mean.take(count)),
            packs: self.packs,
        }
    }

    fn run(mut self, kernel: &impl Fn(&mut [f32], &[f32], [&mut [f32]; N])) {
        if self.means.iter().all(|mean| matches!(mean, Mean::Full(_))) {
            let means = self.means.map(|mean| mean.full().unwrap_or_default());
            return kernel(self.p, self.g, means);
        }
        let mut unpacked = [[0f32; BURST]; N];
        while !self.g.is_empty() {
            let mut now = self.take(BURST);
            // Arithmetic takes about as long as memory here: the next elements come while these are worked on.
            let soon = BURST.min(self.g.len());
            for (mean, out) in now.means.iter().zip(&mut unpacked) {
                mean.unpack(&mut out[..now.g.len()]);
            }
            for mean in &self.means {
                mean.soon(soon);
            }
            let few = now.g.len();
            kernel(now.p, now.g, unpacked.each_mut().map(|mean| &mut mean[..few]));
            if !self.packs {
                continue;
            }
            let (p, g) = (&self.p[..soon], &self.g[..soon]);
            for (at, (mean, from)) in now.means.iter_mut().zip(&unpacked).enumerate() {
                mean.pack(&from[..few], if at == 0 { g } else { p });
            }
            if N == 1 {
                prefetch(p);
            }
        }
    }
}

fn in_pieces<const N: usize>(mut all: Piece<'_, N>, kernel: &(impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync)) {
    if all.g.len() <= PIECE {
        return all.run(kernel);
    }
    let pieces: Vec<_> = (0..all.g.len().div_ceil(PIECE)).map(|_| all.take(PIECE)).collect();
    pieces.into_par_iter().for_each(|piece| piece.run(kernel));
}
