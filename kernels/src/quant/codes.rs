//! Quantisation to codes with scales: int8, float8 and nf4, and other formats of files.

use aitk_common::job::QType;
use half::f16;
use rayon::prelude::*;

/// The number of nf4 weights with a common scale, as in bitsandbytes.
pub(super) const NF4_BLOCK: usize = 64;
/// The smallest scale; a row of zeros has it.
const MIN_SCALE: f32 = 1e-12;
/// Weights that one task dequantises; a multiple of [`NF4_BLOCK`].
const STRIPE: usize = 1 << 14;

/// The normal-float table: quantiles of the normal distribution, with a zero (QLoRA, appendix E).
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The format of the codes of a quantised weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Code {
    /// An unsigned byte with an offset: 128 is zero.
    Int8,
    /// A signed byte.
    Signed,
    /// An 8-bit float with 4 bits of exponent and 3 of mantissa, without infinities.
    E4m3,
    /// An 8-bit float with 5 bits of exponent and 2 of mantissa: the upper byte of a half float.
    E5m2,
    /// Four bits, an index of this table. Two in a byte, the first in its upper half.
    Four([f32; 16]),
}

impl Code {
    /// The format of the codes of `qtype`; `None` for GGUF's blocks.
    pub(super) fn from_qtype(qtype: QType) -> Option<Self> {
        match qtype {
            QType::Int8 => Some(Self::Int8),
            QType::Float8 => Some(Self::E4m3),
            QType::Nf4 => Some(Self::Four(NF4)),
            QType::Q8_0 | QType::Q4K => None,
        }
    }

    /// The number of codes in a byte.
    #[must_use]
    pub fn per_byte(&self) -> usize {
        match self {
            Self::Four(_) => 2,
            _ => 1,
        }
    }

    /// The value of every code, before its scale.
    #[must_use]
    pub fn table(&self) -> Vec<f32> {
        let bytes = 0..=u8::MAX;
        match self {
            Self::Int8 => bytes.map(|code| f32::from(code) - 128.0).collect(),
            Self::Signed => bytes.map(|code| f32::from(code.cast_signed())).collect(),
            Self::E4m3 => bytes.map(from_e4m3).collect(),
            Self::E5m2 => bytes
                .map(|code| f16::from_bits(u16::from(code) << 8).to_f32())
                .collect(),
            Self::Four(table) => table.to_vec(),
        }
    }
}

/// Quantises `values` to codes and scales. The last scale may be for fewer weights.
///
/// Each block is written where it stays: a list for each of them left gaps between what other parts of a model allocate.
pub(super) fn quantize(qtype: QType, values: &[f32], per_scale: usize) -> (Vec<u8>, Vec<f32>) {
    let (largest, per_byte) = match qtype {
        QType::Nf4 => (1.0, 2),
        QType::Float8 => (448.0, 1),
        _ => (127.5, 1),
    };
    let per_scale = per_scale.max(1).next_multiple_of(per_byte);
    // Tasks get whole blocks.
    let stripe = STRIPE.next_multiple_of(per_scale);
    let mut codes = vec![0u8; values.len().div_ceil(per_byte)];
    let mut scales = vec![0f32; values.len().div_ceil(per_scale)];
    values
        .par_chunks(stripe)
        .zip(codes.par_chunks_mut(stripe / per_byte))
        .zip(scales.par_chunks_mut(stripe / per_scale))
        .for_each(|((values, codes), scales)| {
            let blocks = values.chunks(per_scale).zip(codes.chunks_mut(per_scale / per_byte));
            for ((block, codes), scale) in blocks.zip(scales) {
                let absmax = block.iter().fold(0f32, |max, value| max.max(value.abs()));
                *scale = (absmax / largest).max(MIN_SCALE);
                let scale = *scale;
                match qtype {
                    QType::Nf4 => {
                        for (pair, code) in block.chunks(2).zip(codes) {
                            // A block of an odd length ends with the code of zero.
                            let second = pair.get(1).map_or(7, |value| nearest_nf4(value / scale));
                            *code = nearest_nf4(pair[0] / scale) << 4 | second;
                        }
                    }
                    QType::Float8 => {
                        for (value, code) in block.iter().zip(codes) {
                            *code = to_e4m3(value / scale);
                        }
                    }
                    _ => {
                        for (value, code) in block.iter().zip(codes) {
                            *code = ((value / scale).round_ties_even().clamp(-128.0, 127.0) + 128.0) as u8;
                        }
                    }
                }
            }
        });
    (codes, scales)
}

/// Computes `count` weights from their codes and scales.
pub(super) fn dequantize(code: &Code, codes: &[u8], scales: &[f32], per_scale: usize, count: usize) -> Vec<f32> {
    let table = code.table();
    let mut values = vec![0f32; count];
    let value = |code: u8| table.get(usize::from(code)).copied().unwrap_or(0.0);
    // Tasks get whole rows or whole blocks.
    let stripe = STRIPE.next_multiple_of(per_scale.max(1));
    values
        .par_chunks_mut(stripe)
        .enumerate()
        .for_each(|(at, stripe_values)| {
            let first = at * stripe;
            for (block, out) in stripe_values.chunks_mut(per_scale.max(1)).enumerate() {
                let begin = first + block * per_scale;
                let scale = scales.get(begin / per_scale.max(1)).copied().unwrap_or(0.0);
                if code.per_byte() == 2 {
                    let bytes = codes.get(begin / 2..).unwrap_or_default();
                    for (pair, byte) in out.chunks_mut(2).zip(bytes) {
                        pair[0] = value(byte >> 4) * scale;
                        if let Some(second) = pair.get_mut(1) {
                            *second = value(byte & 15) * scale;
                        }
                    }
                } else {
                    let bytes = codes.get(begin..).unwrap_or_default();
                    for (out, code) in out.iter_mut().zip(bytes) {
                        *out = value(*code) * scale;
                    }
                }
            }
        });
    values
}

/// The code with the nearest value: the number of midpoints between neighbouring values that are smaller than `value`.
fn nearest_nf4(value: f32) -> u8 {
    NF4.windows(2)
        .map(|pair| u8::from(value > f32::midpoint(pair[0], pair[1])))
        .sum()
}

/// Rounds to the nearest number with 4 bits of exponent and 3 of mantissa, ties to even; larger numbers become 448.
fn to_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let size = value.abs();
    let code = if size < 1.0 / 64.0 {
        // Below the smallest normal number, the distance between numbers is 2^-9.
        (size * 512.0).round_ties_even() as u32
    } else {
        let bits = size.to_bits();
        let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
        // The exponent's bias is 127 in f32 and 7 here.
        (rounded >> 20).saturating_sub(120 << 3)
    };
    sign | code.min(0x7E) as u8
}

fn from_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float8_numbers_are_exact_and_others_round_to_the_nearest() {
        let numbers: Vec<f32> = (0..0x7F).map(from_e4m3).collect();
        assert!(numbers.is_sorted() && numbers[0x7E] == 448.0, "{numbers:?}");
        for (code, number) in numbers.iter().enumerate() {
            assert_eq!(to_e4m3(*number), code as u8);
            assert_eq!(to_e4m3(-number), code as u8 | 0x80);
        }
        for i in 0..10_000 {
            let value = 450.0 * (i as f32 / 10_000.0).powi(5);
            let nearest = numbers
                .iter()
                .map(|number| (number - value).abs())
                .fold(f32::MAX, f32::min);
            assert_eq!((from_e4m3(to_e4m3(value)) - value).abs(), nearest, "{value}");
        }
        assert!(from_e4m3(0x7F).is_nan());
    }

    #[test]
    fn nf4_rounds_to_the_nearest_value_and_allows_odd_counts() {
        let values: Vec<f32> = (0..133).map(|i| ((i * 37) as f32).sin()).collect();
        let (codes, scales) = quantize(QType::Nf4, &values, NF4_BLOCK);
        assert_eq!((codes.len(), scales.len()), (67, 3));
        let back = dequantize(&Code::Four(NF4), &codes, &scales, NF4_BLOCK, values.len());
        for ((at, value), back) in values.iter().enumerate().zip(&back) {
            let scale = scales[at / NF4_BLOCK];
            let nearest = NF4
                .iter()
                .map(|code| (code * scale - value).abs())
                .fold(f32::MAX, f32::min);
            assert!(
                (back - value).abs() <= nearest * 1.000_01 + 1e-7,
                "{at}: {value} became {back}"
            );
        }
        for qtype in [QType::Nf4, QType::Int8, QType::Float8] {
            let (codes, scales) = quantize(qtype, &[0.0; 8], 8);
            let code = Code::from_qtype(qtype).unwrap();
            assert_eq!(dequantize(&code, &codes, &scales, 8, 8), [0.0; 8], "{qtype}");
        }
    }
}
