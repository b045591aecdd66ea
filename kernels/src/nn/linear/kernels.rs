//! The matrix products of linear layers on the CPU.

use crate::nn::cpu::{self, InitialValue, Product, RightOperand, Sizes};
use crate::nn::transpose::transpose_slice;
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// The number of rows of x [.., width].
pub(super) fn rows_of(x: &Shape) -> usize {
    x.elem_count() / x.dims().last().copied().unwrap_or(1).max(1)
}

/// An output [rows, outputs] with the bias in every row, and the factor `beta` for a product that is added to it.
pub(super) fn output_with_bias(
    bias: Option<&[f32]>,
    rows: usize,
    outputs: usize,
) -> candle_core::Result<(Vec<f32>, f32)> {
    let mut y = vec![0f32; rows * outputs];
    let Some(bias) = bias.filter(|_| outputs > 0) else {
        return Ok((y, 0.0));
    };
    if bias.len() != outputs {
        candle_core::bail!("linear: the bias has {} elements, expected {outputs}", bias.len());
    }
    y.par_chunks_mut(outputs)
        .with_min_len(64)
        .for_each(|row| row.copy_from_slice(bias));
    Ok((y, 1.0))
}

/// x W^T + b: x [.., in], weight [out, in] -> [.., out].
pub(super) fn multiply(
    x: &[f32],
    shape: &Shape,
    weight: &[f32],
    outputs: usize,
    bias: Option<&[f32]>,
) -> ForwardResult {
    let (rows, mut dims) = (rows_of(shape), shape.dims().to_vec());
    let Some(width) = dims.last_mut() else {
        candle_core::bail!("linear: the input is a scalar");
    };
    let inputs = std::mem::replace(width, outputs);
    if rows <= FEW_ROWS {
        return Ok((
            multiply_few_rows(x, weight, bias, [rows, inputs, outputs])?,
            dims.into(),
        ));
    }
    let weight = cpu::Mat::new(weight, outputs, inputs).t();
    let sizes = Sizes {
        rows,
        cols: outputs,
        depth: inputs,
    };
    Ok((multiply_dense(x, weight, bias, sizes)?, dims.into()))
}

/// As [`multiply_rows`], with a matrix in f32.
fn multiply_dense(x: &[f32], b: cpu::Mat<'_>, bias: Option<&[f32]>, sizes: Sizes) -> candle_core::Result<Vec<f32>> {
    let Sizes { rows, cols, depth } = sizes;
    if rows < ROWS_PER_COLUMN * cols {
        return multiply_rows(x, &b, bias, sizes);
    }
    let (mut y, beta) = output_with_bias(bias, rows, cols)?;
    let out = cpu::MatMut::new(&mut y, rows, cols);
    cpu::gemm(out, cpu::Mat::new(x, rows, depth), b, 1.0, beta, cpu::threads())?;
    Ok(y)
}

/// From this number of rows for each column of the result on, the gemm crate is faster: the packed right operand is small, and what counts is
/// how the left one is packed. (With 4096 rows and 320 columns by a tenth; with 512 rows and 4096 columns it takes 1.5 times as long, because it
/// transposes the weight element by element.)
const ROWS_PER_COLUMN: usize = 4;

/// x B + b: x [rows, depth], b [cols] -> [rows, cols].
pub(super) fn multiply_rows<B: RightOperand>(
    x: &[f32],
    b: &B,
    bias: Option<&[f32]>,
    sizes: Sizes,
) -> candle_core::Result<Vec<f32>> {
    let Sizes { rows, cols, depth } = sizes;
    if x.len() != rows * depth {
        candle_core::bail!("linear: {} elements are not {rows} rows of {depth}", x.len());
    }
    let (mut y, beta) = output_with_bias(bias, rows, cols)?;
    let product = Product {
        sizes,
        a: &cpu::Mat::new(x, rows, depth),
        b,
        initial: if beta == 0.0 {
            InitialValue::Zero
        } else {
            InitialValue::Output
        },
    };
    product.write(&mut y, cols, cpu::threads());
    Ok(y)
}

/// Up to this number of rows, packing the weight takes longer than multiplying with it.
pub(super) const FEW_ROWS: usize = 160;

/// [`multiply`] for few rows. It computes the transposed result, so that each element of the weight is read once, in
/// place.
fn multiply_few_rows(
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    [rows, inputs, outputs]: [usize; 3],
) -> candle_core::Result<Vec<f32>> {
    let mut transposed = vec![0f32; outputs * rows];
    multiply_few_rows_into(&mut transposed, x, weight, bias, [rows, inputs, outputs])?;
    Ok(transpose_slice(&transposed, [1, outputs, rows]))
}

/// The transposed result of [`multiply_few_rows`], [outputs, rows], into a slice of that size.
pub(super) fn multiply_few_rows_into(
    transposed: &mut [f32],
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    [rows, inputs, outputs]: [usize; 3],
) -> candle_core::Result<()> {
    if weight.len() != inputs * outputs || bias.is_some_and(|bias| bias.len() != outputs) {
        candle_core::bail!("linear: weight and bias do not match {inputs} inputs and {outputs} outputs");
    }
    let product = Product {
        sizes: Sizes {
            rows: outputs,
            cols: rows,
            depth: inputs,
        },
        a: &cpu::Mat::new(weight, outputs, inputs),
        b: &cpu::Mat::new(x, rows, inputs).t(),
        initial: bias.map_or(InitialValue::Zero, InitialValue::PerRow),
    };
    product.write(transposed, rows, cpu::threads());
    Ok(())
}

/// Runs `f` on the elements of the bias.
pub(super) fn with_bias<R>(
    bias: Option<&Tensor>,
    f: impl FnOnce(Option<&[f32]>) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    match bias {
        Some(bias) => cpu::with_slice(bias, |bias| f(Some(bias)))?,
        None => f(None),
    }
}

pub(super) type ForwardResult = candle_core::Result<(Vec<f32>, Shape)>;

/// Computes the gradient of x: dy W.
pub(super) fn backward_input(x: &Shape, weight: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let sizes = Sizes {
        rows: rows_of(x),
        cols: inputs,
        depth: outputs,
    };
    let dx = cpu::with_slice(weight, |weight| {
        cpu::with_slice(gradient, |dy| {
            multiply_dense(dy, cpu::Mat::new(weight, outputs, inputs), None, sizes)
        })
    })???;
    Tensor::from_vec(dx, x, &Device::Cpu)
}
