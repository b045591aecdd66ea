//! Blockwise quantisation to 8 bits with one scale per 256 elements: the state format of bitsandbytes' 8-bit
//! optimizers.
//!
//! A code is an index into a table of 256 values from -1 to 1 (0 to 1 in the unsigned map). The values are ten times
//! denser in each lower decade. Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
//! 2110.02861, and bitsandbytes 0.50.2, `functional.create_dynamic_map`. Fixtures: `tests/reference/make_optim8.py`.

mod codec;
mod quant_map;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

pub(super) use codec::{decode, encode};
pub(super) use quant_map::{BLOCK, QuantMap};

use super::state_tensor::StateTensor;
use crate::device::portable::is_portable;
use candle_core::{D, DType, Device, Result, Shape, Tensor};
use rayon::prelude::*;

/// A tensor in 8 bits: one code per element and one scale per block.
pub(super) struct BlockwiseTensor {
    pub(super) quant_map: &'static QuantMap,
    /// One `u8` code per element, in the tensor's shape.
    pub(super) codes: StateTensor,
    /// One scale per block of the flattened tensor; float32.
    pub(super) absmax: StateTensor,
}

/// The number of blocks of a tensor with this many elements.
pub(super) fn block_count(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

impl BlockwiseTensor {
    /// Creates a tensor from its codes and scales.
    pub(super) fn new(quant_map: &'static QuantMap, codes: StateTensor, absmax: StateTensor) -> Self {
        Self {
            quant_map,
            codes,
            absmax,
        }
    }

    /// A tensor of zeros.
    pub(super) fn zeros(quant_map: &'static QuantMap, shape: &Shape, device: &Device) -> Result<Self> {
        let absmax = Tensor::zeros(block_count(shape.elem_count()), DType::F32, device)?;
        let codes = Tensor::zeros(shape, DType::U8, device)?;
        Ok(Self::new(quant_map, StateTensor::new(codes), StateTensor::new(absmax)))
    }

    /// Converts to float32.
    pub(super) fn dequantize(&self) -> Result<Tensor> {
        let codes = self.codes.get();
        if !codes.device().is_cpu() || is_portable() {
            return self.dequantize_with_tensor_ops();
        }
        let mut values = vec![0f32; codes.elem_count()];
        let bytes = codes.flatten_all()?.to_vec1::<u8>()?;
        let absmax = self.absmax.get().to_vec1::<f32>()?;
        let chunks = values.par_chunks_mut(BLOCK).zip(bytes.par_chunks(BLOCK));
        chunks
            .zip(absmax.par_chunks(1))
            .for_each(|((values, codes), absmax)| decode(self.quant_map, codes, absmax, values));
        Tensor::from_vec(values, codes.shape(), codes.device())
    }

    /// Replaces the values by those of a float32 tensor of the same shape.
    pub(super) fn quantize(&mut self, values: &Tensor) -> Result<()> {
        if !self.codes.get().device().is_cpu() || is_portable() {
            return self.quantize_with_tensor_ops(values);
        }
        let shape = self.codes.get().shape().clone();
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let mut codes = vec![0u8; values.len()];
        let mut absmax = vec![0f32; block_count(values.len())];
        let chunks = codes.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        chunks
            .zip(absmax.par_chunks_mut(1))
            .for_each(|((codes, values), absmax)| encode(self.quant_map, values, codes, absmax, &[]));
        let count = absmax.len();
        self.codes.set(Tensor::from_vec(codes, shape, &Device::Cpu)?);
        self.absmax.set(Tensor::from_vec(absmax, count, &Device::Cpu)?);
        Ok(())
    }

    /// [`BlockwiseTensor::dequantize`] with candle's operations, for CUDA and Metal.
    fn dequantize_with_tensor_ops(&self) -> Result<Tensor> {
        let codes = self.codes.get();
        let table = Tensor::new(&self.quant_map.values, codes.device())?;
        // As u32: candle treats the index 255 of type u8 as "no element".
        let values = table.index_select(&codes.flatten_all()?.to_dtype(DType::U32)?, 0)?;
        let rows = rows_of_blocks(&values)?.broadcast_mul(&self.absmax.get().unsqueeze(1)?)?;
        rows.flatten_all()?
            .narrow(0, 0, codes.elem_count())?
            .reshape(codes.shape())
    }

    /// [`BlockwiseTensor::quantize`] with candle's operations: a binary search of eight steps over the bounds gives the
    /// code.
    fn quantize_with_tensor_ops(&mut self, values: &Tensor) -> Result<()> {
        let count = values.elem_count();
        let rows = rows_of_blocks(&values.flatten_all()?)?;
        let absmax = rows.abs()?.max(D::Minus1)?;
        // As in `scalar::scale_factors`: scales whose reciprocal would be infinite are multiplied by a constant first.
        let is_tiny = absmax.lt(f64::from(f32::MIN_POSITIVE))?.to_dtype(DType::F32)?;
        let first = ((is_tiny * f64::from(scalar::TINY_SCALE_FACTOR))? + 1.0)?;
        let is_zero = absmax.eq(0f64)?.to_dtype(DType::F32)?;
        let second = ((&absmax * &first)? + is_zero)?.recip()?;
        let x = rows
            .broadcast_mul(&first.unsqueeze(1)?)?
            .broadcast_mul(&second.unsqueeze(1)?)?;
        let x = x.flatten_all()?;
        let bounds = Tensor::new(&self.quant_map.bounds, values.device())?;
        let mut below = x.zeros_like()?;
        for step in [128f64, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0] {
            let probe = bounds.index_select(&(&below + (step - 1.0))?.to_dtype(DType::U32)?, 0)?;
            below = (below + (probe.lt(&x)?.to_dtype(DType::F32)? * step)?)?;
        }
        let codes = below.to_dtype(DType::U8)?.narrow(0, 0, count)?;
        self.codes.set(codes.reshape(self.codes.get().shape())?.contiguous()?);
        self.absmax.set(absmax);
        Ok(())
    }
}

/// Reshapes a flat tensor to [blocks, BLOCK]; the last block is padded with zeros.
fn rows_of_blocks(flat: &Tensor) -> Result<Tensor> {
    let count = flat.elem_count();
    let rows = block_count(count);
    flat.pad_with_zeros(0, 0, rows * BLOCK - count)?.reshape((rows, BLOCK))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;

    /// Numbers of many magnitudes and zeros, in 17 blocks; the last block is short.
    fn numbers(signed: bool) -> Tensor {
        let mut generator = TorchGenerator::manual_seed(3);
        let exponents = generator.uniform(4270, -9.0, 1.0);
        let values = generator.randn(4270).into_iter().zip(exponents).enumerate();
        let number = |(i, (x, e)): (usize, (f32, f32))| match i {
            256..512 => 0.0,
            // A scale whose reciprocal is infinite.
            512..768 => x.abs() * 1e-41,
            i if i % 41 == 0 => 0.0,
            _ if signed => x * 10f32.powf(e),
            _ => (x * 10f32.powf(e)).abs(),
        };
        Tensor::from_vec(values.map(number).collect(), (70, 61), &Device::Cpu).unwrap()
    }

    #[test]
    fn quantizing_rounds_to_the_nearest_value() {
        for (quant_map, signed) in [(QuantMap::signed(), true), (QuantMap::unsigned(), false)] {
            let x = numbers(signed);
            let mut tensor = BlockwiseTensor::zeros(quant_map, x.shape(), &Device::Cpu).unwrap();
            tensor.quantize(&x).unwrap();
            let got = tensor
                .dequantize()
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap();
            let want = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (want, got) in want.chunks(BLOCK).zip(got.chunks(BLOCK)) {
                let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
                for (want, got) in want.iter().zip(got) {
                    let distance = |value: &f32| (value * largest - want).abs();
                    let nearest = quant_map.values.iter().map(distance).fold(f32::INFINITY, f32::min);
                    assert!(
                        (want - got).abs() <= nearest * 1.0001,
                        "{want:e} {got:e}, block of {largest:e}"
                    );
                    if *want == 0.0 {
                        assert_eq!(*got, 0.0);
                    }
                }
            }
        }
    }

    #[test]
    fn tensor_operations_give_the_same_codes() {
        for (quant_map, signed) in [(QuantMap::signed(), true), (QuantMap::unsigned(), false)] {
            let x = numbers(signed);
            let mut one = BlockwiseTensor::zeros(quant_map, x.shape(), &Device::Cpu).unwrap();
            let mut two = BlockwiseTensor::zeros(quant_map, x.shape(), &Device::Cpu).unwrap();
            one.quantize(&x).unwrap();
            two.quantize_with_tensor_ops(&x).unwrap();
            let bytes = |b: &BlockwiseTensor| b.codes.get().flatten_all().unwrap().to_vec1::<u8>().unwrap();
            assert_eq!(bytes(&one), bytes(&two));
            let scales = |b: &BlockwiseTensor| b.absmax.get().to_vec1::<f32>().unwrap();
            assert_eq!(scales(&one), scales(&two));
            let floats = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(
                floats(one.dequantize().unwrap()),
                floats(two.dequantize_with_tensor_ops().unwrap())
            );
        }
    }
}
