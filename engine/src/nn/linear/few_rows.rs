//! Products of a few rows with a weight in its stored form: each weight is read once and never written to memory as float32. Generating
//! text computes one row for each text at a time, and is limited by the bytes of the weights.

use crate::nn::cpu::{Kernel, Simd, run_vectorised};
use crate::nn::transpose::transpose_slice;
use crate::quant::StoredRows;
use candle_core::{Result, Shape};
use rayon::prelude::*;

/// The most rows that are multiplied here. All numbers of rows up to it give a row the same bits, so that a text does not depend on the
/// others of its batch.
pub(super) const MAX_ROWS: usize = 64;

/// Weights of a row that are widened at once: those of all outputs of a tile stay in the L1 cache.
const CHUNK: usize = 1024;
/// Outputs of a tile: their products share the loads of the input.
const TILE: usize = 4;
/// Outputs of a task.
const OUTPUTS: usize = 32;

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
    // [outputs, rows], so that each task writes to its own part.
    let mut y = vec![0f32; outputs * rows];
    y.par_chunks_mut(OUTPUTS * rows).enumerate().for_each(|(task, y)| {
        run_vectorised(Outputs {
            weight,
            x,
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

/// Adds the products of the outputs from `first` on to `y`, [outputs, rows].
struct Outputs<'a, 'y> {
    weight: StoredRows<'a>,
    x: &'a [f32],
    rows: usize,
    first: usize,
    y: &'y mut [f32],
}

impl Kernel for Outputs<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let inputs = self.weight.inputs();
        let mut buffer = [[0f32; CHUNK]; TILE];
        for (tile, y) in self.y.chunks_mut(TILE * self.rows).enumerate() {
            let first = self.first + tile * TILE;
            let count = y.len() / self.rows;
            for start in (0..inputs).step_by(CHUNK) {
                let length = CHUNK.min(inputs - start);
                for (output, buffer) in buffer.iter_mut().take(count).enumerate() {
                    self.weight.read(first + output, start, &mut buffer[..length]);
                }
                for row in 0..self.rows {
                    let x = &self.x[row * inputs + start..][..length];
                    match count {
                        TILE => {
                            let sums = dot::<S, TILE>(&buffer, x);
                            for (output, sum) in sums.into_iter().enumerate() {
                                y[output * self.rows + row] += sum;
                            }
                        }
                        _ => {
                            for (output, buffer) in buffer.iter().take(count).enumerate() {
                                let [sum] = dot::<S, 1>(std::slice::from_ref(buffer), x);
                                y[output * self.rows + row] += sum;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The products of `N` rows of weights with `x`. The order of the sum does not depend on `N`.
#[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
#[inline(always)]
fn dot<S: Simd, const N: usize>(weights: &[[f32; CHUNK]], x: &[f32]) -> [f32; N] {
    assert!(x.len() <= CHUNK && weights.len() >= N, "a chunk has another size");
    let mut even = [S::splat(0.0); N];
    let mut odd = even;
    let mut at = 0;
    while at + 2 * S::LANES <= x.len() {
        // SAFETY: two vectors from `at` on lie inside `x`, and inside each row of `weights`, which is no shorter than `x`.
        unsafe {
            let (first, second) = (S::load(x.as_ptr().add(at)), S::load(x.as_ptr().add(at + S::LANES)));
            for ((even, odd), weights) in even.iter_mut().zip(&mut odd).zip(weights) {
                let weights = weights.as_ptr().add(at);
                *even = S::mul_add(S::load(weights), first, *even);
                *odd = S::mul_add(S::load(weights.add(S::LANES)), second, *odd);
            }
        }
        at += 2 * S::LANES;
    }
    while at < x.len() {
        let rest = (x.len() - at).min(S::LANES);
        // SAFETY: as above for `rest` elements.
        unsafe {
            let first = S::load_first(x.as_ptr().add(at), rest);
            for (even, weights) in even.iter_mut().zip(weights) {
                *even = S::mul_add(S::load_first(weights.as_ptr().add(at), rest), first, *even);
            }
        }
        at += rest;
    }
    std::array::from_fn(|output| sum::<S>(S::add(even[output], odd[output])))
}

/// The sum of the lanes.
#[expect(unsafe_code, reason = "the store of a vector takes a raw pointer")]
#[inline(always)]
fn sum<S: Simd>(v: S::V) -> f32 {
    let mut lanes = [0f32; 16];
    // SAFETY: no unit has more lanes than `lanes` has elements.
    unsafe { S::store(lanes.as_mut_ptr(), v) };
    let mut width = 8;
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
    use candle_core::{Device, Tensor};

    fn weights() -> Vec<Quantized> {
        // Sizes with and without whole chunks, tiles and tasks.
        let mut all = Vec::new();
        for (outputs, inputs) in [(1, 32), (7, 1280), (70, 1024), (33, 96), (5, 2304), (66, 37)] {
            let numbers = TorchGenerator::manual_seed(outputs as u64).randn(outputs * inputs);
            let plain = Tensor::from_vec(numbers, (outputs, inputs), &Device::Cpu).unwrap();
            for qtype in [QType::Int8, QType::Q8_0, QType::Q4K] {
                all.extend(
                    Quantized::quantize(&plain, qtype)
                        .unwrap()
                        .and_then(std::sync::Arc::into_inner),
                );
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
    fn every_vector_unit_gives_the_same_product() {
        for weight in weights() {
            let &[outputs, inputs] = weight.dims() else { panic!() };
            let x = TorchGenerator::manual_seed(3).randn(3 * inputs);
            let on = |isa| {
                let mut y = vec![0f32; outputs * 3];
                let run = |stored: Option<StoredRows<'_>>| {
                    run_on(
                        isa,
                        Outputs {
                            weight: stored.unwrap(),
                            x: &x,
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

    #[test]
    fn wrong_sizes_are_errors() {
        let plain = Tensor::ones((4, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
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
