//! Numbers in 8 bits: blocks of 256 with one scale each, as bitsandbytes keeps the state of its 8-bit optimizers.
//!
//! A code is an index into a table of 256 values from -1 to 1 (from 0 to 1 for what is never negative), which lie ten
//! times closer together with every decade down. Source: Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization", arXiv 2110.02861, and bitsandbytes 0.50.2, `functional.create_dynamic_map`. Fixtures:
//! `tests/reference/make_optim8.py`.

use candle_core::{D, DType, Device, Result, Shape, Tensor};
use rayon::prelude::*;
use std::sync::OnceLock;

/// Elements that share a scale.
pub(super) const BLOCK: usize = 256;

/// Bits of a float that stay behind when it becomes the number of a cell: below them are 2^15 floats.
const CELL_BITS: u32 = 15;
/// Cells begin at 2^-23, below the smallest bound of both tables.
const FIRST_CELL: u32 = (127 - 23) << (23 - CELL_BITS);
/// From 2^-23 up to 1 inclusive.
const CELLS: usize = (23 << (23 - CELL_BITS)) + 1;

/// A table of 256 values, and how to find the nearest one.
pub(super) struct Map {
    values: [f32; 256],
    /// Half way between a value and the next; the last is endless.
    bounds: [f32; 256],
    /// For each cell of positive numbers, then of negative ones: how many bounds lie before it. No cell has two.
    cells: Vec<u8>,
}

impl Map {
    /// For numbers of either sign.
    pub(super) fn signed() -> &'static Self {
        static MAP: OnceLock<Map> = OnceLock::new();
        MAP.get_or_init(|| Self::new(true))
    }

    /// For numbers that are not negative.
    pub(super) fn unsigned() -> &'static Self {
        static MAP: OnceLock<Map> = OnceLock::new();
        MAP.get_or_init(|| Self::new(false))
    }

    /// Decade `i` of seven holds the middles of 2^i (signed) or 2^(i + 1) equal pieces of 0.1 to 1, times 10^(i - 6);
    /// with 0 and 1 that makes 256 values. In float32, as torch computes them, but for the last bit of some.
    fn new(signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for decade in 0..7 {
            let pieces = 1 << (decade + usize::from(!signed));
            let edges = edges(pieces);
            let scale = 10f64.powi(decade as i32 - 6) as f32;
            for pair in edges.windows(2) {
                let middle = (pair[0] + pair[1]) / 2.0 * scale;
                values.push(middle);
                if signed {
                    values.push(-middle);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let mut table = [1.0; 256];
        table.copy_from_slice(&values);
        let mut bounds = [f32::INFINITY; 256];
        for (bound, pair) in bounds.iter_mut().zip(table.windows(2)) {
            *bound = (pair[0] + pair[1]) / 2.0;
        }
        let before = |test: &dyn Fn(f32) -> bool| bounds.iter().filter(|bound| test(**bound)).count() as u8;
        // The cell of the smallest numbers begins at 0.
        let edge = |cell: usize| match cell {
            0 => 0.0,
            cell => f32::from_bits((FIRST_CELL + cell as u32) << CELL_BITS),
        };
        let positive = (0..CELLS).map(|cell| before(&|bound| bound < edge(cell)));
        // A negative cell ends before its edge that is further from 0.
        let negative = (0..CELLS).map(|cell| before(&|bound| bound <= -edge(cell + 1)));
        let cells = positive.chain(negative).collect();
        Self {
            values: table,
            bounds,
            cells,
        }
    }

    /// What the codes stand for.
    #[cfg(test)]
    pub(super) fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code of the value nearest to `x`, which lies from -1 to 1; half way between two, the lower one.
    #[inline]
    fn nearest(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let cell = ((bits & 0x7fff_ffff) >> CELL_BITS).saturating_sub(FIRST_CELL) as usize;
        let side = (bits >> 31) as usize * CELLS;
        let code = self.cells[side + cell.min(CELLS - 1)];
        code + u8::from(self.bounds[usize::from(code)] < x)
    }

    /// A block's scale; its codes go to `codes`.
    #[inline]
    pub(super) fn quantise(&self, block: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = block.iter().fold(0f32, |most, x| most.max(x.abs()));
        // A block of zeros has zeros for codes' values.
        let scale = if absmax > 0.0 { absmax } else { 1.0 };
        for (code, x) in codes.iter_mut().zip(block) {
            *code = self.nearest(x / scale);
        }
        absmax
    }

    /// What a code stands for in a block of this scale.
    #[inline]
    pub(super) fn value(&self, code: u8, absmax: f32) -> f32 {
        self.values[usize::from(code)] * absmax
    }
}

/// `torch.linspace(0.1, 1, pieces + 1)`: from both ends to the middle, in float32.
fn edges(pieces: usize) -> Vec<f32> {
    let (start, end) = (0.1f32, 1f32);
    let step = (end - start) / pieces as f32;
    let at = |i: usize| {
        if i < pieces.div_ceil(2) {
            start + step * i as f32
        } else {
            end - step * (pieces - i) as f32
        }
    };
    (0..=pieces).map(at).collect()
}

/// A tensor in 8 bits.
#[derive(Clone)]
pub(super) struct Blocks {
    map: &'static Map,
    /// As many as the tensor has elements, in its shape; `u8`.
    pub(super) codes: Tensor,
    /// One scale per block of the flattened tensor; float32.
    pub(super) absmax: Tensor,
}

/// Blocks of a tensor with this many elements.
pub(super) fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

impl Blocks {
    /// From codes and scales.
    pub(super) fn new(map: &'static Map, codes: Tensor, absmax: Tensor) -> Self {
        Self { map, codes, absmax }
    }

    /// All zero.
    pub(super) fn zeros(map: &'static Map, shape: &Shape, device: &Device) -> Result<Self> {
        let absmax = Tensor::zeros(blocks(shape.elem_count()), DType::F32, device)?;
        Ok(Self::new(map, Tensor::zeros(shape, DType::U8, device)?, absmax))
    }

    /// The tensor in float32.
    pub(super) fn read(&self) -> Result<Tensor> {
        if !self.codes.device().is_cpu() {
            return self.read_by_operations();
        }
        let codes = self.codes.flatten_all()?.to_vec1::<u8>()?;
        let absmax = self.absmax.to_vec1::<f32>()?;
        let mut values = vec![0f32; codes.len()];
        values
            .par_chunks_mut(BLOCK)
            .zip(codes.par_chunks(BLOCK))
            .zip(&absmax)
            .for_each(|((values, codes), absmax)| {
                for (value, code) in values.iter_mut().zip(codes) {
                    *value = self.map.value(*code, *absmax);
                }
            });
        Tensor::from_vec(values, self.codes.shape(), self.codes.device())
    }

    /// Takes a tensor of the same shape.
    pub(super) fn write(&mut self, values: &Tensor) -> Result<()> {
        if !self.codes.device().is_cpu() {
            return self.write_by_operations(values);
        }
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let mut codes = vec![0u8; values.len()];
        let mut absmax = vec![0f32; blocks(values.len())];
        codes
            .par_chunks_mut(BLOCK)
            .zip(values.par_chunks(BLOCK))
            .zip(&mut absmax)
            .for_each(|((codes, values), absmax)| *absmax = self.map.quantise(values, codes));
        let count = absmax.len();
        self.codes = Tensor::from_vec(codes, self.codes.shape(), &Device::Cpu)?;
        self.absmax = Tensor::from_vec(absmax, count, &Device::Cpu)?;
        Ok(())
    }

    /// [`Blocks::read`] where only the library's own operations run: CUDA and Metal.
    fn read_by_operations(&self) -> Result<Tensor> {
        let count = self.codes.elem_count();
        let table = Tensor::new(&self.map.values, self.codes.device())?;
        // As u32: in an index of type u8 the library takes 255 for "nothing".
        let values = table.index_select(&self.codes.flatten_all()?.to_dtype(DType::U32)?, 0)?;
        let rows = in_blocks(&values)?.broadcast_mul(&self.absmax.unsqueeze(1)?)?;
        rows.flatten_all()?.narrow(0, 0, count)?.reshape(self.codes.shape())
    }

    /// [`Blocks::write`], likewise: eight comparisons find how many bounds lie below each number.
    fn write_by_operations(&mut self, values: &Tensor) -> Result<()> {
        let count = values.elem_count();
        let rows = in_blocks(&values.flatten_all()?)?;
        let absmax = rows.abs()?.max(D::Minus1)?;
        let zero = absmax.eq(0f64)?.to_dtype(DType::F32)?;
        let x = rows.broadcast_div(&(&absmax + zero)?.unsqueeze(1)?)?.flatten_all()?;
        let bounds = Tensor::new(&self.map.bounds, values.device())?;
        let mut below = x.zeros_like()?;
        for step in [128f64, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0] {
            let probe = bounds.index_select(&(&below + (step - 1.0))?.to_dtype(DType::U32)?, 0)?;
            below = (below + (probe.lt(&x)?.to_dtype(DType::F32)? * step)?)?;
        }
        self.codes = below
            .to_dtype(DType::U8)?
            .narrow(0, 0, count)?
            .reshape(self.codes.shape())?;
        self.absmax = absmax;
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

    /// The rule that `nearest` must follow, without its table of cells.
    fn searched(map: &Map, x: f32) -> u8 {
        map.bounds.partition_point(|bound| *bound < x) as u8
    }

    #[test]
    fn the_nearest_value_is_found_everywhere() {
        for map in [Map::signed(), Map::unsigned()] {
            let mut numbers: Vec<f32> = vec![0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, -1e-30, 1e-7, 1.2e-7, -1.2e-7];
            for edge in map.bounds.iter().chain(&map.values).filter(|edge| edge.is_finite()) {
                for step in -2..=2i32 {
                    numbers.push(f32::from_bits(edge.to_bits().wrapping_add_signed(step)));
                }
            }
            // Every edge between cells, too.
            for cell in 0..CELLS as u32 {
                let edge = (FIRST_CELL + cell) << CELL_BITS;
                numbers.extend([edge - 1, edge, edge + 1].map(f32::from_bits));
                numbers.extend([edge - 1, edge, edge + 1].map(|bits| -f32::from_bits(bits)));
            }
            numbers.extend(TorchGenerator::manual_seed(1).uniform(100_000, -1.0, 1.0));
            for x in numbers.into_iter().filter(|x| x.abs() <= 1.0) {
                assert_eq!(map.nearest(x), searched(map, x), "{x:e}");
            }
            assert!(map.values.is_sorted());
            // What is no number finds some code and nothing worse.
            map.nearest(f32::NAN);
        }
    }

    /// Numbers of many sizes, zeros among them, in 17 blocks of which the last is short.
    fn numbers(signed: bool) -> Tensor {
        let mut generator = TorchGenerator::manual_seed(3);
        let exponents = generator.uniform(4270, -9.0, 1.0);
        let values = generator.randn(4270).into_iter().zip(exponents).enumerate();
        let number = |(i, (x, e)): (usize, (f32, f32))| match i {
            256..512 => 0.0,
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
            let mut two = one.clone();
            one.write(&x).unwrap();
            two.write_by_operations(&x).unwrap();
            let bytes = |b: &Blocks| b.codes.flatten_all().unwrap().to_vec1::<u8>().unwrap();
            assert_eq!(bytes(&one), bytes(&two));
            let scales = |b: &Blocks| b.absmax.to_vec1::<f32>().unwrap();
            assert_eq!(scales(&one), scales(&two));
            let floats = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(floats(one.read().unwrap()), floats(two.read_by_operations().unwrap()));
        }
    }
}
