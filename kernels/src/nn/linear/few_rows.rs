//! Products of a few rows with a weight in its stored form: each weight is read once and never written to memory as float32. Generating
//! text computes one row for each text at a time, and is limited by the bytes of the weights.

use super::stored_blocks::{
    BLOCK, BLOCKS, Bf16Blocks, CHUNK, Decoded, F16Blocks, GROUP, Int8Blocks, Q4KBlocks, Q6KBlocks, Q8Blocks, TILE,
    UNIT, WeightBlocks, order_of_words,
};
use crate::nn::cpu::{Kernel, Simd, run_vectorised};
use crate::nn::transpose::transpose_slice;
use crate::quant::{HalfFormat, StoredFormat, StoredRows};
use candle_core::{Result, Shape};
use rayon::prelude::*;
use std::borrow::Cow;

/// The most rows that are multiplied here. All numbers of rows up to it give a row the same bits, so that a text does not depend on the
/// others of its batch.
pub(super) const MAX_ROWS: usize = 64;

/// Outputs of a task.
const OUTPUTS: usize = 32;
/// The most lanes of a vector.
const MAX_LANES: usize = 16;

/// x W^T + b of a weight [outputs, inputs]: x [.., inputs] with `rows` rows -> [.., outputs].
///
/// # Errors
/// When the lengths do not match.
pub(super) fn multiply(
    weight: StoredRows<'_>,
    x: &[f32],
    shape: &Shape,
    bias: Option<&[f32]>,
) -> Result<(Vec<f32>, Shape)> {
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    let mut dims = shape.dims().to_vec();
    let rows = match dims.last_mut() {
        Some(width) if *width == inputs && inputs > 0 => x.len() / std::mem::replace(width, outputs),
        _ => candle_core::bail!("linear: input {shape:?} does not match {inputs} inputs"),
    };
    if x.len() != rows * inputs || bias.is_some_and(|bias| bias.len() != outputs) {
        candle_core::bail!("linear: input and bias do not match {rows} rows and {outputs} outputs");
    }
    if rows == 0 {
        return Ok((Vec::new(), dims.into()));
    }
    let input = run_vectorised(Prepare { weight, x });
    // [outputs, rows], so that each task writes to its own part.
    let mut y = vec![0f32; outputs * rows];
    y.par_chunks_mut(OUTPUTS * rows).enumerate().for_each(|(task, y)| {
        run_vectorised(Outputs {
            weight,
            input: &input,
            rows,
            first: task * OUTPUTS,
            y,
        });
    });
    if let Some(bias) = bias {
        for (y, bias) in y.chunks_mut(rows).zip(bias) {
            y.iter_mut().for_each(|y| *y += bias);
        }
    }
    Ok((transpose_slice(&y, [1, outputs, rows]), dims.into()))
}

/// Rows of inputs as they are multiplied with a weight.
struct Input<'a> {
    /// [rows, inputs], in the order of the codes of the weight.
    x: Cow<'a, [f32]>,
    /// The sum of each block of inputs, [rows, blocks], for formats with a minimum.
    sums: Vec<f32>,
}

/// Makes the [`Input`] of rows.
struct Prepare<'a> {
    weight: StoredRows<'a>,
    /// [rows, inputs].
    x: &'a [f32],
}

impl<'a> Kernel for Prepare<'a> {
    type Output = Input<'a>;

    #[inline(always)]
    fn run<S: Simd>(self) -> Input<'a> {
        const ORDER: [usize; UNIT] = order_of_words();
        let StoredFormat::Q4K(_) = self.weight.format else {
            return Input {
                x: Cow::Borrowed(self.x),
                sums: Vec::new(),
            };
        };
        // A row has whole groups.
        let mut x = Cow::Borrowed(self.x);
        if Q4KBlocks::has_words::<S>() {
            let mut ordered = Vec::with_capacity(x.len());
            for unit in self.x.as_chunks::<UNIT>().0 {
                ordered.extend_from_slice(&ORDER.map(|input| unit[input]));
            }
            x = Cow::Owned(ordered);
        }
        Input {
            x,
            sums: self.x.chunks(BLOCK).map(|block| block.iter().sum()).collect(),
        }
    }
}

/// Adds the products of the outputs from `first` on to `y`, [outputs, rows].
struct Outputs<'a, 'y> {
    weight: StoredRows<'a>,
    input: &'a Input<'a>,
    rows: usize,
    first: usize,
    y: &'y mut [f32],
}

impl Kernel for Outputs<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let inputs = self.weight.inputs();
        match self.weight.format {
            StoredFormat::Half(HalfFormat::Bf16, numbers) => self.multiply::<S, _>(Bf16Blocks { numbers, inputs }),
            StoredFormat::Int8(codes, scales) => self.multiply::<S, _>(Int8Blocks { codes, scales, inputs }),
            StoredFormat::Q8_0(blocks) => self.multiply::<S, _>(Q8Blocks {
                blocks,
                per_row: inputs / BLOCK,
            }),
            StoredFormat::Q4K(blocks) => self.multiply::<S, _>(Q4KBlocks {
                blocks,
                per_row: inputs / GROUP,
            }),
            StoredFormat::Half(HalfFormat::F16, numbers) => self.multiply::<S, _>(F16Blocks { numbers, inputs }),
            StoredFormat::Q6K(blocks) => self.multiply::<S, _>(Q6KBlocks {
                blocks,
                per_row: inputs / GROUP,
            }),
        }
    }
}

impl Outputs<'_, '_> {
    /// With the weights in the form in which they are stored, if there is one row, or else decoded once for all rows.
    #[inline(always)]
    fn multiply<S: Simd, B: WeightBlocks>(self, blocks: B) {
        let inputs = self.weight.inputs();
        let whole = inputs - inputs % BLOCK;
        let mut decoded = Decoded::new();
        let (all_x, all_sums) = (&*self.input.x, &self.input.sums);
        for (tile, y) in self.y.chunks_mut(TILE * self.rows).enumerate() {
            let first = self.first + tile * TILE;
            let count = y.len() / self.rows;
            for start in (0..whole).step_by(CHUNK) {
                let length = CHUNK.min(whole - start);
                if self.rows > 1 {
                    for output in 0..count {
                        decoded.decode::<S, B>(blocks, output, [first + output, start, length]);
                    }
                }
                for row in 0..self.rows {
                    let at = row * inputs + start;
                    let x = &all_x[at..at + length];
                    let sums = match B::HAS_MIN {
                        true => &all_sums[(row * inputs + start) / BLOCK..][..length / BLOCK],
                        false => &[],
                    };
                    let mut add = |output: usize, product: f32| {
                        y[output * self.rows + row] += product * blocks.row_scale(first + output);
                    };
                    match (count, self.rows) {
                        (TILE, 1) => {
                            let products = dot::<S, B, TILE>(blocks, [first, start], x, sums);
                            products
                                .into_iter()
                                .enumerate()
                                .for_each(|(output, product)| add(output, product));
                        }
                        (TILE, _) => {
                            let products = dot::<S, _, TILE>(decoded.view::<B>(), [0, 0], x, sums);
                            products
                                .into_iter()
                                .enumerate()
                                .for_each(|(output, product)| add(output, product));
                        }
                        (_, 1) => {
                            for output in 0..count {
                                let [product] = dot::<S, B, 1>(blocks, [first + output, start], x, sums);
                                add(output, product);
                            }
                        }
                        _ => {
                            for output in 0..count {
                                let [product] = dot::<S, _, 1>(decoded.view::<B>(), [output, 0], x, sums);
                                add(output, product);
                            }
                        }
                    }
                }
            }
            // Inputs after the last whole block.
            for (index, y) in y.iter_mut().enumerate() {
                let (output, row) = (first + index / self.rows, index % self.rows);
                for input in whole..inputs {
                    *y += blocks.number(output, input) * all_x[row * inputs + input] * blocks.row_scale(output);
                }
            }
        }
    }
}

/// The products of `N` outputs from the first one on with `x`, whole blocks of the inputs from `start` on. `sums`: the sum of each block of
/// `x`. The order of the sum does not depend on `N`.
#[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
#[inline(always)]
fn dot<S: Simd, B: WeightBlocks, const N: usize>(
    blocks: B,
    [first, start]: [usize; 2],
    x: &[f32],
    sums: &[f32],
) -> [f32; N] {
    if B::has_words::<S>() {
        return dot_words::<S, B, N>(blocks, [first, start], x, sums);
    }
    let vectors = BLOCK / S::LANES;
    let zero = [S::splat(0.0); N];
    let (mut even, mut odd) = (zero, zero);
    // The sums of the groups so far, times their scales.
    let mut groups_before = zero;
    let mut minima = [[0f32; BLOCKS]; N];
    for (index, x) in x.chunks(GROUP).enumerate() {
        let x = x.as_chunks::<BLOCK>().0;
        // Loops, because closures would be compiled without the instruction set.
        let mut groups = [blocks.group(first, start + index * GROUP, x.len()); N];
        for (output, group) in groups.iter_mut().enumerate() {
            *group = blocks.group(first + output, start + index * GROUP, x.len());
            blocks.prefetch::<S>(*group);
        }
        let mut factors = [B::Factors::default(); N];
        for (factors, group) in factors.iter_mut().zip(groups) {
            *factors = B::factors::<S>(group);
        }
        if B::HAS_MIN {
            let sums = &sums.as_chunks::<BLOCKS>().0[index];
            for ((totals, group), factors) in minima.iter_mut().zip(groups).zip(&factors) {
                let minima = B::minima(group, factors);
                for block in 0..BLOCKS {
                    totals[block] += minima[block] * sums[block];
                }
            }
        }
        for (block, x) in x.iter().enumerate() {
            let mut vectors_of_x = [S::splat(0.0); BLOCK / 4];
            for (i, v) in vectors_of_x.iter_mut().take(vectors).enumerate() {
                // SAFETY: the vectors are inside the block.
                *v = unsafe { S::load(x.as_ptr().add(i * S::LANES)) };
            }
            let x = vectors_of_x;
            for output in 0..N {
                let weights = B::load::<S>(groups[output], &factors[output], block);
                if B::HAS_SCALE {
                    let mut sum = S::mul(weights[0], x[0]);
                    for i in 1..vectors {
                        sum = S::mul_add(weights[i], x[i], sum);
                    }
                    let scale = B::scale::<S>(groups[output], &factors[output], block);
                    even[output] = S::mul_add(scale, sum, even[output]);
                } else {
                    for i in 0..vectors {
                        let total = if i % 2 == 0 {
                            &mut even[output]
                        } else {
                            &mut odd[output]
                        };
                        *total = S::mul_add(weights[i], x[i], *total);
                    }
                }
            }
        }
        if B::HAS_GROUP_SCALE {
            for output in 0..N {
                let total = match B::HAS_SCALE {
                    true => even[output],
                    false => S::add(even[output], odd[output]),
                };
                groups_before[output] = S::mul_add(B::group_scale::<S>(groups[output]), total, groups_before[output]);
            }
            (even, odd) = (zero, zero);
        }
    }
    let mut products = [0f32; N];
    for output in 0..N {
        let total = match B::HAS_GROUP_SCALE {
            true => groups_before[output],
            false => S::add(even[output], odd[output]),
        };
        products[output] = sum::<S>(total);
        if B::HAS_MIN {
            products[output] -= minima[output].iter().sum::<f32>();
        }
    }
    products
}

/// As [`dot`], for formats whose codes are multiplied in the order of the words in which they are stored; `x` is in that order.
#[inline(always)]
fn dot_words<S: Simd, B: WeightBlocks, const N: usize>(
    blocks: B,
    [first, start]: [usize; 2],
    x: &[f32],
    sums: &[f32],
) -> [f32; N] {
    let mut totals = [S::splat(0.0); N];
    let mut minima = [[0f32; BLOCKS]; N];
    let (groups_of_x, sums) = (x.as_chunks::<GROUP>().0, sums.as_chunks::<BLOCKS>().0);
    for (index, (x, sums)) in groups_of_x.iter().zip(sums).enumerate() {
        let mut groups = [blocks.group(first, start + index * GROUP, BLOCKS); N];
        for (output, group) in groups.iter_mut().enumerate() {
            *group = blocks.group(first + output, start + index * GROUP, BLOCKS);
            blocks.prefetch::<S>(*group);
        }
        let mut factors = [B::Factors::default(); N];
        for (factors, group) in factors.iter_mut().zip(groups) {
            *factors = B::factors::<S>(group);
        }
        for ((totals, group), factors) in minima.iter_mut().zip(groups).zip(&factors) {
            let minima = B::minima(group, factors);
            for block in 0..BLOCKS {
                totals[block] += minima[block] * sums[block];
            }
        }
        let mut group_totals = [S::splat(0.0); N];
        let [first_unit, second_unit] = [&x[..UNIT], &x[UNIT..]];
        add_unit::<S, B, N>(&mut group_totals, groups, &factors, first_unit, 0);
        add_unit::<S, B, N>(&mut group_totals, groups, &factors, second_unit, 1);
        for output in 0..N {
            totals[output] = S::mul_add(
                B::group_scale::<S>(groups[output]),
                group_totals[output],
                totals[output],
            );
        }
    }
    let mut products = [0f32; N];
    for output in 0..N {
        products[output] = sum::<S>(totals[output]) - minima[output].iter().sum::<f32>();
    }
    products
}

/// Adds the products of the codes of 64 bytes of each group, times their scales, to `totals`.
#[inline(always)]
fn add_unit<S: Simd, B: WeightBlocks, const N: usize>(
    totals: &mut [S::V; N],
    groups: [B::Group; N],
    factors: &[B::Factors; N],
    x: &[f32],
    unit: usize,
) {
    let (low, high) = x.split_at(UNIT / 2);
    let low = load_four_vectors::<S>(low);
    for output in 0..N {
        let sum = products_of_words::<S>(B::load_words::<S, false>(groups[output], unit), low);
        let scales = B::word_scales::<S, false>(groups[output], &factors[output], unit);
        totals[output] = S::mul_add(scales, sum, totals[output]);
    }
    let high = load_four_vectors::<S>(high);
    for output in 0..N {
        let sum = products_of_words::<S>(B::load_words::<S, true>(groups[output], unit), high);
        let scales = B::word_scales::<S, true>(groups[output], &factors[output], unit);
        totals[output] = S::mul_add(scales, sum, totals[output]);
    }
}

/// The first four vectors of a slice that has so many.
#[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
#[inline(always)]
fn load_four_vectors<S: Simd>(x: &[f32]) -> [S::V; 4] {
    let mut vectors = [S::splat(0.0); 4];
    for (v, x) in vectors.iter_mut().zip(x.chunks_exact(S::LANES)) {
        // SAFETY: `x` has as many elements as the vector.
        *v = unsafe { S::load(x.as_ptr()) };
    }
    vectors
}

/// a0 b0 + a1 b1 + a2 b2 + a3 b3, lane by lane.
#[inline(always)]
fn products_of_words<S: Simd>(a: [S::V; 4], b: [S::V; 4]) -> S::V {
    let mut sum = S::mul(a[0], b[0]);
    for i in 1..4 {
        sum = S::mul_add(a[i], b[i], sum);
    }
    sum
}

/// The sum of the lanes.
#[expect(unsafe_code, reason = "the store of a vector takes a raw pointer")]
#[inline(always)]
fn sum<S: Simd>(v: S::V) -> f32 {
    let mut lanes = [0f32; MAX_LANES];
    // SAFETY: no vector has more lanes than `lanes` has elements.
    unsafe { S::store(lanes.as_mut_ptr(), v) };
    let mut width = MAX_LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::nn::cpu::{available_isas, run_on};
    use crate::quant::Quantized;
    use crate::rng::TorchGenerator;
    use aitk_common::job::QType;
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{DType, Device, Tensor};
    use std::sync::Arc;

    fn weights() -> Vec<Quantized> {
        // Sizes with and without whole chunks, tiles and tasks.
        let mut all = Vec::new();
        for (outputs, inputs) in [(1, 32), (7, 1280), (70, 1024), (33, 96), (5, 2304), (66, 37)] {
            let numbers = TorchGenerator::manual_seed(outputs as u64).randn(outputs * inputs);
            let plain = Tensor::from_vec(numbers, (outputs, inputs), &Device::Cpu).unwrap();
            for qtype in [QType::Int8, QType::Q8_0, QType::Q4K] {
                all.extend(Quantized::quantize(&plain, qtype).unwrap().and_then(Arc::into_inner));
            }
            // No config quantises to it: it comes from files.
            if inputs % GROUP == 0 {
                let (q6, dims) = (GgmlDType::Q6K, [outputs, inputs]);
                let bytes = QTensor::quantize(&plain, q6).unwrap().data().unwrap().into_owned();
                let weight = Quantized::from_blocks("q6_k", q6, &bytes, &dims, DType::F32, &Device::Cpu);
                all.extend(Arc::into_inner(weight.unwrap()));
            }
        }
        all
    }

    /// Products on every instruction set equal those with the dense weight, and a row's bits do not depend on the other rows.
    #[test]
    fn products_are_those_of_the_dense_weight() {
        let weights = weights();
        assert!(weights.len() > 12);
        for weight in weights {
            let &[outputs, inputs] = weight.dims() else { panic!() };
            let dense: Vec<Vec<f32>> = weight.dequantize().unwrap().to_vec2().unwrap();
            let bias = TorchGenerator::manual_seed(1).randn(outputs);
            for rows in [1, 2, 5, MAX_ROWS] {
                let x = TorchGenerator::manual_seed(2).randn(rows * inputs);
                let shape = Shape::from((rows, 1, inputs));
                let (y, dims) = weight
                    .with_rows(|stored| multiply(stored.unwrap(), &x, &shape, Some(&bias)))
                    .unwrap()
                    .unwrap();
                assert_eq!(dims.dims(), [rows, 1, outputs]);
                for (row, (y, x)) in y.chunks(outputs).zip(x.chunks(inputs)).enumerate() {
                    for output in 0..outputs {
                        let terms = dense[output].iter().zip(x).map(|(a, b)| f64::from(a * b));
                        let expected = terms.sum::<f64>() + f64::from(bias[output]);
                        assert!(
                            (f64::from(y[output]) - expected).abs() < 2e-4,
                            "{weight:?} {rows}: {row} {output}: {} {expected}",
                            y[output]
                        );
                    }
                    let one = Shape::from((1, inputs));
                    let (alone, _) = weight
                        .with_rows(|stored| multiply(stored.unwrap(), x, &one, Some(&bias)))
                        .unwrap()
                        .unwrap();
                    assert_eq!(alone, y, "row {row} of {rows}");
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_product() {
        for weight in weights() {
            let &[outputs, inputs] = weight.dims() else { panic!() };
            let x = TorchGenerator::manual_seed(3).randn(3 * inputs);
            let on = |isa| {
                let mut y = vec![0f32; outputs * 3];
                let run = |stored: Option<StoredRows<'_>>| {
                    let weight = stored.unwrap();
                    let input = &run_on(isa, Prepare { weight, x: &x });
                    run_on(
                        isa,
                        Outputs {
                            weight,
                            input,
                            rows: 3,
                            first: 0,
                            y: &mut y,
                        },
                    );
                };
                weight.with_rows(run).unwrap();
                y
            };
            let units = available_isas();
            let expected = on(units[0]);
            for isa in units {
                for (found, expected) in on(isa).iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() < 2e-4,
                        "{isa:?} {weight:?}: {found} {expected}"
                    );
                }
            }
        }
    }

    /// 16-bit floats, on every instruction set: one row, whose weights are multiplied as they are loaded, has the bits of the same row among
    /// others, for which they are decoded first.
    #[test]
    fn products_of_16_bit_floats_are_those_of_their_numbers() {
        for (outputs, inputs) in [(66, 37), (7, 1280), (5, 31), (9, 2080)] {
            let numbers = TorchGenerator::manual_seed(5).randn(outputs * inputs);
            let x = TorchGenerator::manual_seed(6).randn(3 * inputs);
            for format in [HalfFormat::Bf16, HalfFormat::F16] {
                let bytes: Vec<u8> = match format {
                    HalfFormat::Bf16 => numbers
                        .iter()
                        .flat_map(|n| half::bf16::from_f32(*n).to_le_bytes())
                        .collect(),
                    HalfFormat::F16 => numbers
                        .iter()
                        .flat_map(|n| half::f16::from_f32(*n).to_le_bytes())
                        .collect(),
                };
                let weight = StoredRows::halves(format, &bytes, &[outputs, inputs]).unwrap();
                let dense = format.widened(&bytes);
                for isa in available_isas() {
                    let on = |x: &[f32], rows: usize| {
                        let mut y = vec![0f32; outputs * rows];
                        let input = &run_on(isa, Prepare { weight, x });
                        let y_of = &mut y;
                        run_on(
                            isa,
                            Outputs {
                                weight,
                                input,
                                rows,
                                first: 0,
                                y: y_of,
                            },
                        );
                        y
                    };
                    let together = on(&x, 3);
                    for (row, x) in x.chunks(inputs).enumerate() {
                        let alone = on(x, 1);
                        for (output, weights) in dense.chunks(inputs).enumerate() {
                            let expected: f64 = weights.iter().zip(x).map(|(a, b)| f64::from(a * b)).sum();
                            assert!((f64::from(alone[output]) - expected).abs() < 2e-4, "{format:?} {isa:?}");
                            assert_eq!(
                                alone[output].to_bits(),
                                together[output * 3 + row].to_bits(),
                                "{format:?} {isa:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn wrong_sizes_are_errors() {
        let plain = Tensor::ones((4, 32), DType::F32, &Device::Cpu).unwrap();
        let weight = Quantized::quantize(&plain, QType::Q8_0).unwrap().unwrap();
        let run = |x: usize, shape: &[usize], bias: usize| {
            let (x, bias) = (vec![1f32; x], vec![0f32; bias]);
            weight
                .with_rows(|rows| multiply(rows.unwrap(), &x, &Shape::from(shape), Some(&bias)))
                .unwrap()
        };
        assert!(run(64, &[2, 32], 4).is_ok());
        assert!(run(0, &[0, 32], 4).is_ok());
        assert!(run(64, &[2, 32], 3).is_err());
        assert!(run(63, &[2, 32], 4).is_err());
        assert!(run(64, &[4, 16], 4).is_err());
        assert!(run(1, &[], 4).is_err());
    }
}
