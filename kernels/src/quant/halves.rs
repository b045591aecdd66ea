//! 16-bit floats that stay as they are in memory and are widened where they are used.

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Numbers that are widened at once: they fit into the cache of one core.
const CHUNK: usize = 1 << 16;
/// Numbers of float16 that are converted at once, on the stack.
const LANES: usize = 256;

/// A format of 16-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfFormat {
    /// bfloat16: the upper half of the bits of a float32.
    Bf16,
    /// IEEE 754's half precision.
    F16,
}

impl HalfFormat {
    /// Writes the numbers, each with its low byte first, as float32. The slices have the same length.
    // Inlined, so that it is compiled for the instruction set of the caller.
    #[inline(always)]
    pub(crate) fn widen(self, from: &[[u8; 2]], to: &mut [f32]) {
        match self {
            Self::Bf16 => {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16);
                }
            }
            // With the CPU's instructions, which need a slice of numbers.
            Self::F16 => {
                let mut halves = [f16::ZERO; LANES];
                for (to, from) in to.chunks_mut(LANES).zip(from.chunks(LANES)) {
                    for (half, bytes) in halves.iter_mut().zip(from) {
                        *half = f16::from_le_bytes(*bytes);
                    }
                    halves[..to.len()].convert_to_f32_slice(to);
                }
            }
        }
    }

    /// All of the numbers as float32, on all cores.
    pub(crate) fn widened(self, bytes: &[u8]) -> Vec<f32> {
        let (numbers, _) = bytes.as_chunks::<2>();
        let mut widened = vec![0f32; numbers.len()];
        let chunks = widened.par_chunks_mut(CHUNK).zip(numbers.par_chunks(CHUNK));
        chunks.for_each(|(to, from)| self.widen(from, to));
        widened
    }
}

/// The number of these two bytes, the low one first, in IEEE 754's half precision. Without the library's check of the CPU, which would take
/// longer than the conversion.
#[inline(always)]
pub(crate) fn f16_to_f32(low: u8, high: u8) -> f32 {
    let bits = u32::from(u16::from_le_bytes([low, high]));
    let (sign, rest) = ((bits & 0x8000) << 16, bits & 0x7FFF);
    // 112 is the difference of the exponents' biases. Below the normal numbers, which the scales of blocks often are, the exponent is that of the
    // smallest of them, and its implied bit is subtracted: processors take a hundred times as long for a product with a number that small.
    let size = match rest {
        0..0x0400 => (f32::from_bits((rest << 13) + (113 << 23)) - f32::from_bits(113 << 23)).to_bits(),
        0x0400..0x7C00 => (rest << 13) + (112 << 23),
        _ => rest << 13 | 0x7F80_0000,
    };
    f32::from_bits(size | sign)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn every_number_in_half_precision_is_exact() {
        for bits in 0..=u16::MAX {
            let [low, high] = bits.to_le_bytes();
            let (found, expected) = (f16_to_f32(low, high), half::f16::from_bits(bits).to_f32());
            assert!(
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }

    /// Every number of 16 bits, and slices whose length is not a multiple of the lanes.
    #[test]
    fn every_number_is_widened_exactly() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        for count in [bits.len(), LANES + 3, 1, 0] {
            let bytes: Vec<u8> = bits[..count].iter().flat_map(|bits| bits.to_le_bytes()).collect();
            for (format, expected) in [
                (
                    HalfFormat::Bf16,
                    (|bits| bf16::from_bits(bits).to_f32()) as fn(u16) -> f32,
                ),
                (HalfFormat::F16, |bits| f16::from_bits(bits).to_f32()),
            ] {
                let widened = format.widened(&bytes);
                assert_eq!(widened.len(), count);
                for (found, bits) in widened.iter().zip(&bits) {
                    let expected = expected(*bits);
                    let is_same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                    assert!(is_same, "{format:?} {bits:#x}: {found} {expected}");
                }
            }
        }
    }
}
