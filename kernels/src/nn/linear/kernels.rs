//! The matrix products of linear layers on the CPU, in f32 or of operands that are rounded to bfloat16.

use crate::nn::cpu::{self, Bf16Isa, Bf16Product, InitialValue, Product, RightOperand, Sizes};
use crate::nn::transpose::transpose_slice;
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// The number of rows of x [.., width].
pub(super) fn rows_of(x: &Shape) -> usize {
    x.elem_count() / x.dims().last().copied().unwrap_or(1).max(1)
}

/// An output [rows, outputs] with the bias in every row, and whether it has one, so that a product is added to it.
pub(super) fn output_with_bias(
    bias: Option<&[f32]>,
    rows: usize,
    outputs: usize,
) -> candle_core::Result<(Vec<f32>, bool)> {
    let mut y = vec![0f32; rows * outputs];
    let Some(bias) = bias.filter(|_| outputs > 0) else {
        return Ok((y, false));
    };
    if bias.len() != outputs {
        candle_core::bail!("linear: the bias has {} elements, expected {outputs}", bias.len());
    }
    y.par_chunks_mut(outputs)
        .with_min_len(64)
        .for_each(|row| row.copy_from_slice(bias));
    Ok((y, true))
}

/// x W^T + b: x [.., in], weight [out, in] -> [.., out]; of operands that are rounded to bfloat16, or `None`: in f32.
pub(super) fn multiply(
    bf16: Option<Bf16Isa>,
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
            multiply_few_rows(bf16, x, weight, bias, [rows, inputs, outputs])?,
            dims.into(),
        ));
    }
    let (mut y, has_bias) = output_with_bias(bias, rows, outputs)?;
    let out = cpu::MatMut::new(&mut y, rows, outputs);
    let (x, weight) = (cpu::Mat::new(x, rows, inputs), cpu::Mat::new(weight, outputs, inputs));
    cpu::layer_product(bf16, out, x, weight.t(), has_bias, cpu::threads())?;
    Ok((y, dims.into()))
}

/// x B + b in f32: x [rows, depth], b [cols] -> [rows, cols].
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
    let (mut y, has_bias) = output_with_bias(bias, rows, cols)?;
    let product = Product {
        sizes,
        a: &cpu::Mat::new(x, rows, depth),
        b,
        initial: match has_bias {
            true => InitialValue::Output,
            false => InitialValue::Zero,
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
    bf16: Option<Bf16Isa>,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    [rows, inputs, outputs]: [usize; 3],
) -> candle_core::Result<Vec<f32>> {
    let mut transposed = vec![0f32; outputs * rows];
    multiply_few_rows_into(bf16, &mut transposed, x, weight, bias, [rows, inputs, outputs])?;
    Ok(transpose_slice(&transposed, [1, outputs, rows]))
}

/// The transposed result of [`multiply_few_rows`], [outputs, rows], into a slice of that size.
pub(super) fn multiply_few_rows_into(
    bf16: Option<Bf16Isa>,
    transposed: &mut [f32],
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    [rows, inputs, outputs]: [usize; 3],
) -> candle_core::Result<()> {
    if weight.len() != inputs * outputs || bias.is_some_and(|bias| bias.len() != outputs) {
        candle_core::bail!("linear: weight and bias do not match {inputs} inputs and {outputs} outputs");
    }
    let sizes = Sizes {
        rows: outputs,
        cols: rows,
        depth: inputs,
    };
    let a = &cpu::Mat::new(weight, outputs, inputs);
    let b = &cpu::Mat::new(x, rows, inputs).t();
    let initial = bias.map_or(InitialValue::Zero, InitialValue::PerRow);
    if let Some(isa) = bf16 {
        return Bf16Product { sizes, a, b, initial }.write(isa, transposed, rows, cpu::threads());
    }
    Product { sizes, a, b, initial }.write(transposed, rows, cpu::threads());
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

/// Computes the gradient of x: dy W. `bf16` as for [`multiply`].
pub(super) fn backward_input(
    bf16: Option<Bf16Isa>,
    x: &Shape,
    weight: &Tensor,
    gradient: &Tensor,
) -> candle_core::Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let rows = rows_of(x);
    let mut dx = vec![0f32; rows * inputs];
    cpu::with_slice(weight, |weight| {
        cpu::with_slice(gradient, |dy| {
            let (dy, weight) = (cpu::Mat::new(dy, rows, outputs), cpu::Mat::new(weight, outputs, inputs));
            let out = cpu::MatMut::new(&mut dx, rows, inputs);
            cpu::layer_product(bf16, out, dy, weight, false, cpu::threads())
        })
    })???;
    Tensor::from_vec(dx, x, &Device::Cpu)
}
