//! Products with a weight that stays in 16-bit floats: it is widened to f32 as it is packed, or a block of it at a time, so that a copy of the
//! whole in f32 never exists. Products of bfloat16 numbers take it as it is.

use super::kernels::{
    FEW_ROWS, ForwardResult, multiply, multiply_few_rows_into, multiply_rows, output_with_bias, rows_of,
};
use crate::nn::cpu::{
    self, Bf16Isa, Bf16Mat, Bf16Product, Bf16Transposed, BrainHalf, Element, Half, InitialValue, Mat, MatMut, Sizes,
    StoredMat,
};
use crate::nn::transpose::transpose_slice;
use crate::quant::HalfFormat;
use candle_core::{Result, Shape};
use rayon::prelude::*;
use std::ops::Range;

/// Elements of a block: 16 MiB in f32. The product of a smaller one would pack the input more often.
const BLOCK: usize = 1 << 22;

/// A weight [outputs, inputs], each number in two bytes with the low one first.
#[derive(Clone, Copy)]
pub(super) struct HalfWeight<'a> {
    format: HalfFormat,
    data: &'a [[u8; 2]],
    outputs: usize,
    inputs: usize,
    /// What products are computed with; `None`: in f32.
    bf16: Option<Bf16Isa>,
}

impl<'a> HalfWeight<'a> {
    /// # Errors
    /// When the bytes do not match the shape.
    pub(super) fn new(format: HalfFormat, bytes: &'a [u8], dims: &[usize]) -> Result<Self> {
        let (data, rest) = bytes.as_chunks::<2>();
        match *dims {
            [outputs, inputs] if rest.is_empty() && outputs.checked_mul(inputs) == Some(data.len()) => Ok(Self {
                format,
                data,
                outputs,
                inputs,
                bf16: None,
            }),
            _ => candle_core::bail!("{} bytes do not match a 16-bit weight of shape {dims:?}", bytes.len()),
        }
    }

    /// The same weight, whose products are computed in this way; `None`: in f32.
    pub(super) fn multiplied_with(self, bf16: Option<Bf16Isa>) -> Self {
        Self { bf16, ..self }
    }

    /// Writes the numbers of these outputs and inputs to `block`, one row after the other.
    fn widen(&self, outputs: Range<usize>, inputs: Range<usize>, block: &mut Vec<f32>) {
        let width = inputs.len();
        block.resize(outputs.len() * width, 0.0);
        if width == 0 {
            return;
        }
        let rows = block.par_chunks_mut(width).zip(outputs.into_par_iter());
        rows.with_min_len(16).for_each(|(to, output)| {
            let from = &self.data[output * self.inputs..][inputs.clone()];
            self.format.widen(from, to);
        });
    }

    /// The matrix and the instructions for its products, where these are products of bfloat16 numbers: then nothing is widened.
    fn in_bf16(&self) -> Option<(Bf16Isa, Bf16Mat<'a>)> {
        let isa = self.bf16.filter(|_| self.format == HalfFormat::Bf16)?;
        let weight = Bf16Mat {
            data: self.data,
            rows: self.outputs,
            cols: self.inputs,
        };
        Some((isa, weight))
    }

    /// As [`multiply`].
    pub(super) fn multiply(&self, x: &[f32], shape: &Shape, bias: Option<&[f32]>) -> ForwardResult {
        let Self { outputs, inputs, .. } = *self;
        let rows = rows_of(shape);
        if let Some((isa, weight)) = self.in_bf16() {
            return multiply_in_bf16(isa, weight, x, shape, bias);
        }
        if rows > FEW_ROWS && self.bf16.is_none() {
            return self.multiply_many_rows(x, shape, bias);
        }
        let mut block = Vec::new();
        if outputs * inputs <= BLOCK || inputs == 0 {
            self.widen(0..outputs, 0..inputs, &mut block);
            return multiply(self.bf16, x, shape, &block, outputs, bias);
        }
        let mut dims = shape.dims().to_vec();
        if let Some(width) = dims.last_mut() {
            *width = outputs;
        }
        if bias.is_some_and(|bias| bias.len() != outputs) {
            candle_core::bail!("linear: the bias does not match {outputs} outputs");
        }
        let step = (BLOCK / inputs).max(1);
        let few = rows <= FEW_ROWS;
        let (mut y, has_bias) = match few {
            true => (vec![0f32; outputs * rows], false),
            false => output_with_bias(bias, rows, outputs)?,
        };
        for start in (0..outputs).step_by(step) {
            let part = start..(start + step).min(outputs);
            self.widen(part.clone(), 0..inputs, &mut block);
            if few {
                // Transposed: the rows of this block lie together.
                let to = &mut y[part.start * rows..part.end * rows];
                let bias = bias.map(|bias| &bias[part.clone()]);
                multiply_few_rows_into(self.bf16, to, x, &block, bias, [rows, inputs, part.len()])?;
                continue;
            }
            let out = MatMut::strided(&mut y[part.start..], rows, part.len(), outputs);
            let (x, weight) = (Mat::new(x, rows, inputs), Mat::new(&block, part.len(), inputs));
            cpu::layer_product(self.bf16, out, x, weight.t(), has_bias, cpu::threads())?;
        }
        match few {
            true => Ok((transpose_slice(&y, [1, outputs, rows]), dims.into())),
            false => Ok((y, dims.into())),
        }
    }

    /// [`Self::multiply`] in f32: the weight is widened as it is packed.
    fn multiply_many_rows(&self, x: &[f32], shape: &Shape, bias: Option<&[f32]>) -> ForwardResult {
        let sizes = Sizes {
            rows: rows_of(shape),
            cols: self.outputs,
            depth: self.inputs,
        };
        let y = match self.format {
            HalfFormat::Bf16 => multiply_rows(x, &self.transposed::<BrainHalf>(), bias, sizes),
            HalfFormat::F16 => multiply_rows(x, &self.transposed::<Half>(), bias, sizes),
        };
        let mut dims = shape.dims().to_vec();
        if let Some(width) = dims.last_mut() {
            *width = self.outputs;
        }
        Ok((y?, dims.into()))
    }

    /// The weight [outputs, inputs].
    fn matrix<E: Element<Stored = [u8; 2]>>(&self) -> StoredMat<'a, E> {
        StoredMat {
            data: self.data,
            row_stride: self.inputs,
            col_stride: 1,
        }
    }

    /// The transposed weight [inputs, outputs].
    fn transposed<E: Element<Stored = [u8; 2]>>(&self) -> StoredMat<'a, E> {
        StoredMat {
            data: self.data,
            row_stride: 1,
            col_stride: self.inputs,
        }
    }

    /// The gradient of an input of `rows` rows: dy W, from dy [rows, outputs].
    pub(super) fn backward_input(&self, rows: usize, dy: &[f32]) -> Result<Vec<f32>> {
        let Self { outputs, inputs, .. } = *self;
        let sizes = Sizes {
            rows,
            cols: inputs,
            depth: outputs,
        };
        if self.bf16.is_none() {
            return match self.format {
                HalfFormat::Bf16 => multiply_rows(dy, &self.matrix::<BrainHalf>(), None, sizes),
                HalfFormat::F16 => multiply_rows(dy, &self.matrix::<Half>(), None, sizes),
            };
        }
        let mut dx = vec![0f32; rows * inputs];
        if let Some((isa, weight)) = self.in_bf16() {
            let (a, b, initial) = (&Mat::new(dy, rows, outputs), &weight, InitialValue::Zero);
            Bf16Product { sizes, a, b, initial }.write(isa, &mut dx, inputs, cpu::threads())?;
            return Ok(dx);
        }
        // Blocks of inputs, so that each sum is over all outputs at once.
        let step = (BLOCK / outputs.max(1)).max(1);
        let mut block = Vec::new();
        for start in (0..inputs).step_by(step) {
            let part = start..(start + step).min(inputs);
            self.widen(0..outputs, part.clone(), &mut block);
            let out = MatMut::strided(dx.get_mut(part.start..).unwrap_or_default(), rows, part.len(), inputs);
            let (dy, weight) = (Mat::new(dy, rows, outputs), Mat::new(&block, outputs, part.len()));
            cpu::layer_product(self.bf16, out, dy, weight, false, cpu::threads())?;
        }
        Ok(dx)
    }
}

/// As [`multiply`], of a weight and inputs in bfloat16.
fn multiply_in_bf16(
    isa: Bf16Isa,
    weight: Bf16Mat<'_>,
    x: &[f32],
    shape: &Shape,
    bias: Option<&[f32]>,
) -> ForwardResult {
    let (rows, mut dims) = (rows_of(shape), shape.dims().to_vec());
    let (outputs, inputs) = (weight.rows, weight.cols);
    if let Some(width) = dims.last_mut() {
        *width = outputs;
    }
    let x = Mat::new(x, rows, inputs);
    if rows > FEW_ROWS {
        let (mut y, has_bias) = output_with_bias(bias, rows, outputs)?;
        let product = Bf16Product {
            sizes: Sizes {
                rows,
                cols: outputs,
                depth: inputs,
            },
            a: &x,
            b: &Bf16Transposed(weight),
            initial: if has_bias {
                InitialValue::Output
            } else {
                InitialValue::Zero
            },
        };
        product.write(isa, &mut y, outputs, cpu::threads())?;
        return Ok((y, dims.into()));
    }
    if bias.is_some_and(|bias| bias.len() != outputs) {
        candle_core::bail!("linear: the bias does not match {outputs} outputs");
    }
    // The transposed result, so that the weight is the operand that is packed without a transposition.
    let mut transposed = vec![0f32; outputs * rows];
    let product = Bf16Product {
        sizes: Sizes {
            rows: outputs,
            cols: rows,
            depth: inputs,
        },
        a: &weight,
        b: &x.t(),
        initial: bias.map_or(InitialValue::Zero, InitialValue::PerRow),
    };
    product.write(isa, &mut transposed, rows, cpu::threads())?;
    Ok((transpose_slice(&transposed, [1, outputs, rows]), dims.into()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::kernels;
    use super::*;
    use crate::rng::TorchGenerator;
    use candle_core::{Device, Tensor};
    use half::{bf16, f16};

    /// Forward and backward products of random sizes equal those of a copy in f32.
    #[test]
    fn products_equal_those_of_a_copy_in_f32() {
        let mut generator = TorchGenerator::manual_seed(19);
        let mut below = |limit: u64| 1 + (generator.next_u64() % limit) as usize;
        // The last two have more than one block, with few rows and with many.
        let mut sizes: Vec<[usize; 3]> = (0..6).map(|_| [below(400), below(60), below(60)]).collect();
        sizes.extend([[3, 2050, 2100], [170, 2100, 2050]]);
        let formats = [HalfFormat::Bf16, HalfFormat::F16];
        for ([rows, outputs, inputs], format) in sizes
            .into_iter()
            .flat_map(|sizes| formats.map(|format| (sizes, format)))
        {
            let numbers = |seed: u64, count: usize| TorchGenerator::manual_seed(seed).randn(count);
            // Numbers that both formats have: with the bits of the shorter one, and not too small for the narrower one.
            let floats = numbers(1, outputs * inputs)
                .into_iter()
                .map(|x| bf16::from_f32(x).to_f32());
            let floats: Vec<f32> = floats.map(|x| if x.abs() < 1e-3 { 0.0 } else { x }).collect();
            let bytes: Vec<u8> = match format {
                HalfFormat::Bf16 => floats.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
                HalfFormat::F16 => floats.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            };
            let (x, bias) = (numbers(2, rows * inputs), numbers(3, outputs));
            let weight = HalfWeight::new(format, &bytes, &[outputs, inputs]).unwrap();
            let shape = Shape::from((rows, inputs));
            for bias in [None, Some(bias.as_slice())] {
                let (y, dims) = weight.multiply(&x, &shape, bias).unwrap();
                let (expected, expected_dims) = multiply(None, &x, &shape, &floats, outputs, bias).unwrap();
                assert_eq!(dims, expected_dims);
                close(&y, &expected, [rows, outputs, inputs]);
            }
            let dy = numbers(4, rows * outputs);
            let dx = weight.backward_input(rows, &dy).unwrap();
            let dy = Tensor::from_vec(dy, (rows, outputs), &Device::Cpu).unwrap();
            let dense = Tensor::from_vec(floats, (outputs, inputs), &Device::Cpu).unwrap();
            let expected = kernels::backward_input(None, &shape, &dense, &dy).unwrap();
            close(
                &dx,
                &expected.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                [rows, outputs, inputs],
            );
        }
    }

    fn close(found: &[f32], expected: &[f32], sizes: [usize; 3]) {
        assert_eq!(found.len(), expected.len(), "{sizes:?}");
        let largest = expected.iter().fold(1f32, |max, value| max.max(value.abs()));
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() <= 1e-5 * largest,
                "{sizes:?}: {found} {expected}"
            );
        }
    }

    #[test]
    fn bytes_of_another_size_are_an_error() {
        assert!(HalfWeight::new(HalfFormat::F16, &[0; 12], &[2, 3]).is_ok());
        for length in [0, 11, 13, 14] {
            assert!(HalfWeight::new(HalfFormat::Bf16, &vec![0; length], &[2, 3]).is_err());
        }
        assert!(HalfWeight::new(HalfFormat::F16, &[0; 12], &[6]).is_err());
    }
}
