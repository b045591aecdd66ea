//! Encodes and decodes blocks with tables, on any CPU.

use super::quant_map::{BLOCK, QuantMap};

/// [`decode`](super::decode) for any CPU.
pub(super) fn decode_by_table(quant_map: &QuantMap, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    for ((out, codes), absmax) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(absmax) {
        decode_block(quant_map, codes, *absmax, out);
    }
}

/// [`encode`](super::encode) for any CPU.
pub(super) fn encode_by_table(quant_map: &QuantMap, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
    for ((codes, values), absmax) in codes.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).zip(absmax) {
        *absmax = abs_max(values, 0.0);
        encode_block(quant_map, values, *absmax, codes);
    }
}

/// Decodes one block or a part of it.
pub(super) fn decode_block(quant_map: &QuantMap, codes: &[u8], absmax: f32, out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(codes) {
        *value = quant_map.values[usize::from(*code)] * absmax;
    }
}

/// Encodes one block or a part of it with the scale of the block.
pub(super) fn encode_block(quant_map: &QuantMap, values: &[f32], absmax: f32, codes: &mut [u8]) {
    let (first, second) = scale_factors(absmax);
    for (code, x) in codes.iter_mut().zip(values) {
        *code = quant_map.nearest(x * first * second);
    }
}

/// The largest absolute value, and at least `at_least`.
pub(super) fn abs_max(values: &[f32], at_least: f32) -> f32 {
    values.iter().fold(at_least, |at_least, x| at_least.max(x.abs()))
}

/// Factor for scales whose reciprocal would be infinite.
pub(super) const TINY_SCALE_FACTOR: f32 = (1u128 << 100) as f32;

/// The two factors, applied one after the other, that scale the values of a block to -1..=1.
pub(super) fn scale_factors(absmax: f32) -> (f32, f32) {
    if absmax >= f32::MIN_POSITIVE {
        (1.0, 1.0 / absmax)
    } else if absmax > 0.0 {
        (TINY_SCALE_FACTOR, 1.0 / (absmax * TINY_SCALE_FACTOR))
    } else {
        // The block has only zeros.
        (1.0, 1.0)
    }
}
