//! An update in one pass over memory: a piece of the parameter, of its gradient and of its running means is taken, all of
//! the arithmetic done with it, and the next piece taken. Pieces are of a fixed size and do not look at each other, so
//! that the result does not depend on how many threads there are.

use super::blockwise::{BLOCK, Map, decode, encode};
use super::inplace::{self, Part};
use super::kernels::prefetch;
use super::moment::Moment;
use super::{OptimError, Param};
use candle_core::Tensor;
use rayon::prelude::*;

/// Elements that one thread takes at a time: whole blocks of 8-bit state.
pub(super) const PIECE: usize = 64 * BLOCK;
/// Elements of 8-bit state that are unpacked at a time.
const BURST: usize = 2 * BLOCK;

/// The elements of a running mean.
enum Mean<'a> {
    Full(&'a mut [f32]),
    Blocks(&'static Map, &'a mut [u8], &'a mut [f32]),
}

impl<'a> Mean<'a> {
    /// The next elements: as many, whole blocks, or the rest.
    fn take(&mut self, count: usize) -> Self {
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
    inplace::possible(param.var.as_tensor())
}

/// Runs `kernel` on pieces of a parameter, its gradient and its means, which it changes. Only for what it [`takes`].
pub(super) fn update<const N: usize>(
    param: &Param,
    grad: &Tensor,
    means: [&mut Moment; N],
    kernel: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<(), OptimError> {
    let p = param.var.as_tensor();
    let grad = inplace::gradient(grad, p)?;
    let mut tensors = vec![p];
    let mut maps = Vec::with_capacity(N);
    for mean in means {
        match mean {
            Moment::Full(all) => {
                tensors.push(all.own()?);
                maps.push(None);
            }
            Moment::Blocks(blocks) => {
                maps.push(Some(blocks.map));
                tensors.push(blocks.codes.own()?);
                tensors.push(blocks.absmax.own()?);
            }
        }
    }
    inplace::read(&grad, |g| {
        inplace::with(&tensors, |parts| {
            let mut parts = parts.into_iter();
            let mut next = || parts.next().unwrap_or(Part::F32(&mut []));
            let p = next().f32();
            let means: Vec<_> = maps
                .iter()
                .map(|map| match map {
                    None => Mean::Full(next().f32()),
                    Some(map) => Mean::Blocks(map, next().u8(), next().f32()),
                })
                .collect();
            if let Ok(means) = <[Mean<'_>; N]>::try_from(means) {
                in_pieces(Piece { p, g, means }, &kernel);
            }
        })
    })??;
    Ok(())
}

struct Piece<'a, const N: usize> {
    p: &'a mut [f32],
    g: &'a [f32],
    means: [Mean<'a>; N],
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
