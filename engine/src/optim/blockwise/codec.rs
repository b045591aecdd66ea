//! Whole blocks into codes and back: on vector units by the lines of the decades, elsewhere by the tables. Both give the
//! same bits.

use super::BLOCK;
#[cfg(target_arch = "x86_64")]
use super::lanes;
use super::map::Map;
#[cfg(target_arch = "x86_64")]
use crate::nn::cpu::best_unit;

/// What these codes stand for. Blocks begin with the slices; the last may be shorter.
pub(in super::super) fn decode(map: &Map, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    lanes::decode(best_unit(), map, codes, absmax, out);
    #[cfg(not(target_arch = "x86_64"))]
    decode_by_table(map, codes, absmax, out);
}

/// The nearest codes of these numbers, and a scale for each block. Blocks begin with the slices; the last may be shorter.
/// `soon` is what will be read next: this takes longer than memory does, which can bring it meanwhile.
pub(in super::super) fn encode(map: &Map, values: &[f32], codes: &mut [u8], absmax: &mut [f32], soon: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    lanes::encode(best_unit(), map, values, codes, absmax, soon);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = soon;
        encode_by_table(map, values, codes, absmax);
    }
}

/// [`decode`] for any CPU.
pub(super) fn decode_by_table(map: &Map, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    for ((out, codes), absmax) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(absmax) {
        decode_each(map, codes, *absmax, out);
    }
}

/// [`encode`] for any CPU.
pub(super) fn encode_by_table(map: &Map, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
    for ((codes, values), absmax) in codes.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).zip(absmax) {
        *absmax = greatest(values, 0.0);
        encode_each(map, values, *absmax, codes);
    }
}

/// The numbers of one block, or the last few of them.
pub(super) fn decode_each(map: &Map, codes: &[u8], absmax: f32, out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(codes) {
        *value = map.values[usize::from(*code)] * absmax;
    }
}

/// The codes of one block, or the last few of them.
pub(super) fn encode_each(map: &Map, values: &[f32], absmax: f32, codes: &mut [u8]) {
    let (up, factor) = factors(absmax);
    for (code, x) in codes.iter_mut().zip(values) {
        *code = map.nearest(x * up * factor);
    }
}

/// The greatest distance from zero, at least `most`.
pub(super) fn greatest(values: &[f32], most: f32) -> f32 {
    values.iter().fold(most, |most, x| most.max(x.abs()))
}

/// What brings small scales to where their reciprocals exist.
pub(super) const UP: f32 = (1u128 << 100) as f32;

/// What the numbers of a block are multiplied with, one after the other, to lie from -1 to 1.
pub(super) fn factors(absmax: f32) -> (f32, f32) {
    if absmax >= f32::MIN_POSITIVE {
        (1.0, 1.0 / absmax)
    } else if absmax > 0.0 {
        (UP, 1.0 / (absmax * UP))
    } else {
        // A block of zeros has zeros for codes' values.
        (1.0, 1.0)
    }
}
