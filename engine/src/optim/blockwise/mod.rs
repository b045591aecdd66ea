//! Numbers in 8 bits: blocks of 256 with one scale each, as bitsandbytes keeps the state of its 8-bit optimizers.
//!
//! A code is an index into a table of 256 values from -1 to 1 (from 0 to 1 for what is never negative), which lie ten
//! times closer together with every decade down. Source: Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization", arXiv 2110.02861, and bitsandbytes 0.50.2, `functional.create_dynamic_map`. Fixtures:
//! `tests/reference/make_optim8.py`.

mod codec;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod map;

pub(super) use codec::{decode, encode};
pub(super) use map::Map;

use super::state_tensor::StateTensor;
use candle_core::{D, DType, Device, Result, Shape, Tensor};
use rayon::prelude::*;

/// Elements that share a scale.
pub(super) const BLOCK: usize = 256;

/// A tensor in 8 bits.
pub(super) struct Blocks {
    pub(super) map: &'static Map,
    /// As many as the tensor has elements, in its shape; `u8`.
    pub(super) codes: StateTensor,
    /// One scale per block of the flattened tensor; float32.
    pub(super) absmax: StateTensor,
}

/// Blocks of a tensor with this many elements.
pub(super) fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

impl Blocks {
    /// From codes and scales.
    pub(super) fn new(map: &'static Map, codes: StateTensor, absmax: StateTensor) -> Self {
        Self { map, codes, absmax }
    }

    /// All zero.
    pub(super) fn zeros(map: &'static Map, shape: &Shape, device: &Device) -> Result<Self> {
        let absmax = Tensor::zeros(blocks(shape.elem_count()), DType::F32, device)?;
        let codes = Tensor::zeros(shape, DType::U8, device)?;
        Ok(Self::new(map, StateTensor::new(codes), StateTensor::new(absmax)))
    }

    /// The tensor in float32.
    pub(super) fn read(&self) -> Result<Tensor> {
        let codes = self.codes.get();
        if !codes.device().is_cpu() {
            return self.read_by_operations();
        }
        let mut values = vec![0f32; codes.elem_count()];
        let bytes = codes.flatten_all()?.to_vec1::<u8>()?;
        let absmax = self.absmax.get().to_vec1::<f32>()?;
        let blocks = values.par_chunks_mut(BLOCK).zip(bytes.par_chunks(BLOCK));
        blocks
            .zip(absmax.par_chunks(1))
            .for_each(|((values, codes), absmax)| decode(self.map, codes, absmax, values));
        Tensor::from_vec(values, codes.shape(), codes.device())
    }

    /// Takes a tensor of the same shape.
    pub(super) fn write(&mut self, values: &Tensor) -> Result<()> {
        if !self.codes.get().device().is_cpu() {
            return self.write_by_operations(values);
        }
        let shape = self.codes.get().shape().clone();
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let mut codes = vec![0u8; values.len()];
        let mut absmax = vec![0f32; blocks(values.len())];
        let blocks = codes.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        blocks
            .zip(absmax.par_chunks_mut(1))
            .for_each(|((codes, values), absmax)| encode(self.map, values, codes, absmax, &[]));
        let count = absmax.len();
        self.codes.set(Tensor::from_vec(codes, shape, &Device::Cpu)?);
        self.absmax.set(Tensor::from_vec(absmax, count, &Device::Cpu)?);
        Ok(())
    }

    /// [`Blocks::read`] where only the library's own operations run: CUDA and Metal.
    fn read_by_operations(&self) -> Result<Tensor> {
        let codes = self.codes.get();
        let table = Tensor::new(&self.map.values, codes.device())?;
        // As u32: in an index of type u8 the library takes 255 for "nothing".
        let values = table.index_select(&codes.flatten_all()?.to_dtype(DType::U32)?, 0)?;
        let rows = in_blocks(&values)?.broadcast_mul(&self.absmax.get().unsqueeze(1)?)?;
        rows.flatten_all()?
            .narrow(0, 0, codes.elem_count())?
            .reshape(codes.shape())
    }

    /// [`Blocks::write`], likewise: eight comparisons find how many bounds lie below each number.
    fn write_by_operations(&mut self, values: &Tensor) -> Result<()> {
        let count = values.elem_count();
        let rows = in_blocks(&values.flatten_all()?)?;
        let absmax = rows.abs()?.max(D::Minus1)?;
        // As `codec::factors` does it: first up, where the scale is too small for its reciprocal to exist.
        let small = absmax.lt(f64::from(f32::MIN_POSITIVE))?.to_dtype(DType::F32)?;
        let up = ((small * f64::from(codec::UP))? + 1.0)?;
        let zero = absmax.eq(0f64)?.to_dtype(DType::F32)?;
        let factor = ((&absmax * &up)? + zero)?.recip()?;
        let x = rows
            .broadcast_mul(&up.unsqueeze(1)?)?
            .broadcast_mul(&factor.unsqueeze(1)?)?;
        let x = x.flatten_all()?;
        let bounds = Tensor::new(&self.map.bounds, values.device())?;
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

/// A flat tensor as rows of one block each, the last one filled up with zeros.
fn in_blocks(flat: &Tensor) -> Result<Tensor> {
    let count = flat.elem_count();
    let rows = blocks(count);
    flat.pad_with_zeros(0, 0, rows * BLOCK - count)?.reshape((rows, BLOCK))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;

    /// Numbers of many sizes, zeros among them, in 17 blocks of which the last is short.
    fn numbers(signed: bool) -> Tensor {
        let mut generator = TorchGenerator::manual_seed(3);
        let exponents = generator.uniform(4270, -9.0, 1.0);
        let values = generator.randn(4270).into_iter().zip(exponents).enumerate();
        let number = |(i, (x, e)): (usize, (f32, f32))| match i {
            256..512 => 0.0,
            // A scale whose reciprocal is no finite number.
            512..768 => x.abs() * 1e-41,
            i if i % 41 == 0 => 0.0,
            _ if signed => x * 10f32.powf(e),
            _ => (x * 10f32.powf(e)).abs(),
        };
        Tensor::from_vec(values.map(number).collect(), (70, 61), &Device::Cpu).unwrap()
    }

    #[test]
    fn what_is_written_is_read_back_as_the_nearest_value() {
        for (map, signed) in [(Map::signed(), true), (Map::unsigned(), false)] {
            let x = numbers(signed);
            let mut blocks = Blocks::zeros(map, x.shape(), &Device::Cpu).unwrap();
            blocks.write(&x).unwrap();
            let got = blocks.read().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let want = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (want, got) in want.chunks(BLOCK).zip(got.chunks(BLOCK)) {
                let most = want.iter().fold(0f32, |m, x| m.max(x.abs()));
                for (want, got) in want.iter().zip(got) {
                    let distance = |value: &f32| (value * most - want).abs();
                    let nearest = map.values.iter().map(distance).fold(f32::INFINITY, f32::min);
                    assert!(
                        (want - got).abs() <= nearest * 1.0001,
                        "{want:e} {got:e}, block of {most:e}"
                    );
                    if *want == 0.0 {
                        assert_eq!(*got, 0.0);
                    }
                }
            }
        }
    }

    #[test]
    fn the_librarys_operations_give_the_same_codes() {
        for (map, signed) in [(Map::signed(), true), (Map::unsigned(), false)] {
            let x = numbers(signed);
            let mut one = Blocks::zeros(map, x.shape(), &Device::Cpu).unwrap();
            let mut two = Blocks::zeros(map, x.shape(), &Device::Cpu).unwrap();
            one.write(&x).unwrap();
            two.write_by_operations(&x).unwrap();
            let bytes = |b: &Blocks| b.codes.get().flatten_all().unwrap().to_vec1::<u8>().unwrap();
            assert_eq!(bytes(&one), bytes(&two));
            let scales = |b: &Blocks| b.absmax.get().to_vec1::<f32>().unwrap();
            assert_eq!(scales(&one), scales(&two));
            let floats = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(floats(one.read().unwrap()), floats(two.read_by_operations().unwrap()));
        }
    }
}
