//! Rows of a stored weight as float32, a part at a time, for products that read each weight once.

use super::codes::Code;
use super::halves::{HalfFormat, f16_to_f32};
use candle_core::quantized::GgmlDType;

/// Bytes of a block of 32 weights in `q8_0`: a scale, and a signed byte for each weight.
pub(crate) const Q8_0_BYTES: usize = 2 + 32;
/// Bytes of a block of 256 weights in `q4_k`: two scales, 12 bytes with eight pairs of 6 bits, and half a byte for each weight.
pub(crate) const Q4_K_BYTES: usize = 2 + 2 + 12 + 128;
/// Bytes of a block of 256 weights in `q6_k`: 4 bits and 2 bits of each weight, 16 signed scales of 16 weights, and a scale of them all.
pub(crate) const Q6_K_BYTES: usize = 128 + 64 + 16 + 2;

/// The numbers of a weight [outputs, inputs] in the form in which they are stored.
#[derive(Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    pub(crate) format: StoredFormat<'a>,
    outputs: usize,
    inputs: usize,
}

/// A format, with its numbers in the order of the rows.
#[derive(Clone, Copy)]
pub(crate) enum StoredFormat<'a> {
    /// 16-bit floats, the low byte first.
    Half(HalfFormat, &'a [[u8; 2]]),
    /// Blocks of 32 weights.
    Q8_0(&'a [[u8; Q8_0_BYTES]]),
    /// Blocks of 256 weights.
    Q4K(&'a [[u8; Q4_K_BYTES]]),
    /// Blocks of 256 weights.
    Q6K(&'a [[u8; Q6_K_BYTES]]),
    /// A byte for each weight, 128 for zero, and a scale for each row.
    Int8(&'a [u8], &'a [f32]),
}

impl<'a> StoredRows<'a> {
    /// A weight of 16-bit floats. `None` if the bytes do not match the shape.
    pub(crate) fn halves(format: HalfFormat, bytes: &'a [u8], dims: &[usize]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks();
        Self::new(StoredFormat::Half(format, numbers), numbers.len(), 1, dims).filter(|_| rest.is_empty())
    }

    /// A weight in blocks of GGUF. `None` for formats that are not read here, and if blocks span several rows.
    pub(super) fn blocks(format: GgmlDType, bytes: &'a [u8], dims: &[usize]) -> Option<Self> {
        match format {
            GgmlDType::BF16 => Self::halves(HalfFormat::Bf16, bytes, dims),
            GgmlDType::F16 => Self::halves(HalfFormat::F16, bytes, dims),
            GgmlDType::Q8_0 => {
                let blocks = bytes.as_chunks().0;
                Self::new(StoredFormat::Q8_0(blocks), blocks.len() * 32, 32, dims)
            }
            GgmlDType::Q4K => {
                let blocks = bytes.as_chunks().0;
                Self::new(StoredFormat::Q4K(blocks), blocks.len() * 256, 256, dims)
            }
            GgmlDType::Q6K => {
                let blocks = bytes.as_chunks().0;
                Self::new(StoredFormat::Q6K(blocks), blocks.len() * 256, 256, dims)
            }
            _ => None,
        }
    }

    /// A weight in codes with scales. `None` for formats that are not read here.
    pub(super) fn codes(
        code: Code,
        bytes: &'a [u8],
        scales: &'a [f32],
        per_scale: usize,
        dims: &[usize],
    ) -> Option<Self> {
        match code {
            Code::Int8 => Self::new(StoredFormat::Int8(bytes, scales), bytes.len(), 1, dims)
                .filter(|rows| per_scale == rows.inputs && scales.len() == rows.outputs),
            _ => None,
        }
    }

    fn new(format: StoredFormat<'a>, count: usize, per_block: usize, dims: &[usize]) -> Option<Self> {
        let [outputs, inputs] = *dims else {
            return None;
        };
        let fits = inputs.is_multiple_of(per_block) && outputs.checked_mul(inputs) == Some(count);
        fits.then_some(Self {
            format,
            outputs,
            inputs,
        })
    }

    /// The number of rows.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// The numbers of a row.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Writes the numbers of a row from `start` on, which is a multiple of 256. `to` ends with the row, or its length is a multiple of
    /// 256 too.
    // Inlined, so that it is compiled for the instruction set of the caller.
    #[inline(always)]
    pub(crate) fn read(&self, output: usize, start: usize, to: &mut [f32]) {
        let at = output * self.inputs + start;
        match self.format {
            StoredFormat::Half(format, numbers) => format.widen(&numbers[at..at + to.len()], to),
            StoredFormat::Q8_0(blocks) => {
                let (parts, _) = to.as_chunks_mut::<32>();
                for (to, block) in parts.iter_mut().zip(&blocks[at / 32..]) {
                    read_q8_0(block, to);
                }
            }
            StoredFormat::Q4K(blocks) => {
                let (parts, _) = to.as_chunks_mut::<256>();
                for (to, block) in parts.iter_mut().zip(&blocks[at / 256..]) {
                    read_q4_k(block, to);
                }
            }
            StoredFormat::Q6K(blocks) => {
                let (parts, _) = to.as_chunks_mut::<256>();
                for (to, block) in parts.iter_mut().zip(&blocks[at / 256..]) {
                    read_q6_k(block, to);
                }
            }
            StoredFormat::Int8(codes, scales) => {
                let scale = scales[output];
                for (to, code) in to.iter_mut().zip(&codes[at..]) {
                    *to = (f32::from(*code) - 128.0) * scale;
                }
            }
        }
    }
}

/// The scale of a block of `q8_0`.
#[inline(always)]
fn q8_0_scale(block: &[u8; Q8_0_BYTES]) -> f32 {
    f16_to_f32(block[0], block[1])
}

#[inline(always)]
fn read_q8_0(block: &[u8; Q8_0_BYTES], to: &mut [f32; 32]) {
    let scale = q8_0_scale(block);
    for (to, code) in to.iter_mut().zip(&block[2..]) {
        *to = f32::from(code.cast_signed()) * scale;
    }
}

/// The codes of the scales of the eight parts of 32 weights of a block of `q4_k`, and those of their minima. A weight is its code times the
/// first scale of the block and the code of the part's scale, less the second scale times the code of its minimum. Part `2 n` has the low four
/// bits of the `n`-th 32 bytes of codes, part `2 n + 1` the high ones.
#[inline(always)]
pub(crate) fn q4_k_codes(block: &[u8; Q4_K_BYTES]) -> [u8; 16] {
    let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    // 6 bits each. Those of the last four parts are in two places: four bits in the last word, and the high two bits of the first words.
    let (scales, minima, rest) = (word(4), word(8), word(12));
    let high = |first: u32, low: u32| (low & 0x0F0F_0F0F) | (first >> 2 & 0x3030_3030);
    let codes = [
        scales & 0x3F3F_3F3F,
        high(scales, rest),
        minima & 0x3F3F_3F3F,
        high(minima, rest >> 4),
    ];
    let [first, second, third, last] = codes.map(u128::from);
    (first | second << 32 | third << 64 | last << 96).to_le_bytes()
}

#[inline(always)]
fn read_q4_k(block: &[u8; Q4_K_BYTES], to: &mut [f32; 256]) {
    let codes_of_factors = q4_k_codes(block);
    let (scale_of_scales, scale_of_minima) = (f16_to_f32(block[0], block[1]), f16_to_f32(block[2], block[3]));
    let (codes, _) = block[16..].as_chunks::<32>();
    let (parts, _) = to.as_chunks_mut::<32>();
    for (part, to) in parts.iter_mut().enumerate() {
        let scale = scale_of_scales * f32::from(codes_of_factors[part]);
        let min = scale_of_minima * f32::from(codes_of_factors[8 + part]);
        for (to, code) in to.iter_mut().zip(&codes[part / 2]) {
            let code = if part % 2 == 0 { code & 15 } else { code >> 4 };
            *to = scale * f32::from(code) - min;
        }
    }
}

/// The codes of the scales of the 16 parts of 16 weights of a block of `q6_k`, signed bytes: a weight is its code less 32, times that of its part and
/// the scale of the block.
#[inline(always)]
pub(crate) fn q6_k_codes(block: &[u8; Q6_K_BYTES]) -> &[u8; 16] {
    let (parts, _) = block[192..].as_chunks();
    &parts[0]
}

#[inline(always)]
fn read_q6_k(block: &[u8; Q6_K_BYTES], to: &mut [f32; 256]) {
    let scale = f16_to_f32(block[208], block[209]);
    // Two halves of 128 weights, each in four parts of 32: the low four bits of parts 0 and 2 share bytes, and of parts 1 and 3; the
    // high two bits of all four parts share bytes.
    for (which, to) in to.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let (low, high) = (&block[64 * which..][..64], &block[128 + 32 * which..][..32]);
        let scales = &block[192 + 8 * which..][..8];
        for (part, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = &low[32 * (part & 1)..][..32];
            let (low_shift, high_shift) = (4 * (part >> 1), 2 * part);
            for (i, to) in to.iter_mut().enumerate() {
                let code = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
                let factor = scale * f32::from(scales[2 * part + i / 16].cast_signed());
                *to = factor * (f32::from(code) - 32.0);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;
    use candle_core::quantized::{QStorage, QTensor};
    use candle_core::{Device, Tensor};
    use std::borrow::Cow;

    /// Blocks of random bytes, whose scales are numbers: each weight is the one that candle computes.
    #[test]
    fn blocks_are_read_as_candle_reads_them() {
        let mut generator = TorchGenerator::manual_seed(3);
        for (format, block, scales) in [
            (GgmlDType::Q8_0, 34, vec![1]),
            (GgmlDType::Q4K, 144, vec![1, 3]),
            (GgmlDType::Q6K, 210, vec![209]),
            (GgmlDType::BF16, 2, vec![1]),
            (GgmlDType::F16, 2, vec![1]),
        ] {
            let dims = [5, 1280];
            let count = 5 * 1280 / format.block_size() * block;
            let mut bytes: Vec<u8> = (0..count).map(|_| generator.next_u64() as u8).collect();
            for block in bytes.chunks_mut(block) {
                for at in &scales {
                    // No infinity: the exponent is not full.
                    block[*at] &= 0xBB;
                }
            }
            let storage = QStorage::from_data(Cow::Borrowed(&bytes), &Device::Cpu, format).unwrap();
            let expected = QTensor::new(storage, &dims).unwrap().dequantize(&Device::Cpu).unwrap();
            let expected: Vec<Vec<f32>> = expected.to_vec2().unwrap();
            let rows = StoredRows::blocks(format, &bytes, &dims).unwrap();
            for (output, expected) in expected.iter().enumerate() {
                for start in [0, 256, 1024] {
                    let mut found = vec![0f32; (dims[1] - start).min(512)];
                    rows.read(output, start, &mut found);
                    for (found, expected) in found.iter().zip(&expected[start..]) {
                        assert!(
                            (found - expected).abs() <= 1e-6 * expected.abs(),
                            "{format:?}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }

    /// Codes with a scale for each row.
    #[test]
    fn codes_are_read_as_they_are_dequantised() {
        let plain = Tensor::from_vec(TorchGenerator::manual_seed(4).randn(3 * 300), (3, 300), &Device::Cpu).unwrap();
        let weight = super::super::Quantized::quantize(&plain, aitk_common::job::QType::Int8)
            .unwrap()
            .unwrap();
        let expected: Vec<Vec<f32>> = weight.dequantize().unwrap().to_vec2().unwrap();
        let found = weight.with_rows(|rows| {
            let rows = rows.unwrap();
            let mut found = vec![0f32; 300];
            rows.read(2, 0, &mut found[..256]);
            rows.read(2, 256, &mut found[256..]);
            found
        });
        assert_eq!(found.unwrap(), expected[2]);
    }

    #[test]
    fn other_shapes_are_not_read() {
        let bytes = [0; 34 * 6];
        assert!(StoredRows::blocks(GgmlDType::Q8_0, &bytes, &[3, 64]).is_some());
        assert!(StoredRows::blocks(GgmlDType::Q8_0, &bytes, &[4, 48]).is_none());
        assert!(StoredRows::blocks(GgmlDType::Q8_0, &bytes, &[2, 64]).is_none());
        assert!(StoredRows::blocks(GgmlDType::Q8_0, &bytes, &[3, 2, 32]).is_none());
        assert!(StoredRows::halves(HalfFormat::F16, &bytes[..9], &[2, 2]).is_none());
    }
}
