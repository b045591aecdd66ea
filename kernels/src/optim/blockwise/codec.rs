//! Encodes and decodes blocks: with SIMD instructions where the CPU has them, otherwise with tables. Both give the same
//! bits.

use super::quant_map::QuantMap;
#[cfg(not(target_arch = "x86_64"))]
use super::scalar::{decode_by_table, encode_by_table};
#[cfg(target_arch = "x86_64")]
use super::simd;
#[cfg(target_arch = "x86_64")]
use crate::nn::cpu::best_isa;

/// Decodes to float32. The slices start at a block; the last block may be shorter.
pub(crate) fn decode(quant_map: &QuantMap, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    simd::decode(best_isa(), quant_map, codes, absmax, out);
    #[cfg(not(target_arch = "x86_64"))]
    decode_by_table(quant_map, codes, absmax, out);
}

/// Encodes to the nearest codes and computes the scale of each block. The slices start at a block; the last block may
/// be shorter. `next` is the data that the caller reads next: it is prefetched during the arithmetic.
pub(crate) fn encode(quant_map: &QuantMap, values: &[f32], codes: &mut [u8], absmax: &mut [f32], next: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    simd::encode(best_isa(), quant_map, values, codes, absmax, next);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = next;
        encode_by_table(quant_map, values, codes, absmax);
    }
}
