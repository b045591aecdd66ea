//! The element-wise product of two matrix products (LoHa), of which the backward pass needs the factors alone.

use super::tensors::matmul;
use crate::autograd::{Input, Operation, apply};
use candle_core::{DType, Result, Shape, Tensor};

/// `(a[0] b[0]) * (a[1] b[1]) * scale`, element by element: a [2, m, rank] and b [2, rank, n] -> [m, n]. All tracked inputs get
/// gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn hadamard_of_products(a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    apply([a, b], HadamardOfProducts { scale })
}

/// `base` plus [`hadamard_of_products`]: base with m rows, m n elements and any dtype, which gets no gradient -> the shape of base, in
/// `dtype`. The sum is made in float32. The backward pass does not keep base, which may be a dequantised copy.
///
/// # Errors
/// When the shapes do not match.
pub fn add_hadamard_of_products(base: &Tensor, a: &Tensor, b: &Tensor, scale: f64, dtype: DType) -> Result<Tensor> {
    let base = base.detach();
    apply([&base, a, b], AddHadamardOfProducts { scale, dtype })
}

/// `(a[0] b[0]) * (a[1] b[1]) * scale`. The scale goes to a factor, which is smaller than the product.
pub(super) fn product(a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let first = matmul(&(a.get(0)? * scale)?, &b.get(0)?)?;
    let second = matmul(&a.get(1)?, &b.get(1)?)?;
    &first * &second
}

/// The gradients of a and b, from that of the product in any dtype and any shape of its elements.
pub(super) fn factor_gradients(a: &Tensor, b: &Tensor, scale: f64, gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
    let gradient = gradient.to_dtype(a.dtype())?.reshape((a.dim(1)?, b.dim(2)?))?;
    let mut gradients = [Vec::with_capacity(2), Vec::with_capacity(2)];
    for (own, other) in [(0, 1), (1, 0)] {
        let of_product = (matmul(&(a.get(other)? * scale)?, &b.get(other)?)? * &gradient)?;
        let transposed = |t: &Tensor| t.get(own)?.t()?.contiguous();
        gradients[0].push(matmul(&of_product, &transposed(b)?)?);
        gradients[1].push(matmul(&transposed(a)?, &of_product)?);
    }
    let [of_a, of_b] = gradients;
    Ok([Some(Tensor::stack(&of_a, 0)?), Some(Tensor::stack(&of_b, 0)?)])
}

struct HadamardOfProducts {
    scale: f64,
}

impl Operation<2> for HadamardOfProducts {
    const NAME: &'static str = "hadamard-of-products";

    fn saved_inputs(&self, _: [bool; 2]) -> [bool; 2] {
        [true; 2]
    }

    /// candle's products are as fast on the CPU.
    fn has_slices(&self) -> bool {
        false
    }

    fn forward(&self, _: [&[f32]; 2], _: [&Shape; 2]) -> Result<(Vec<f32>, Shape)> {
        candle_core::bail!("{} has no form for slices", Self::NAME)
    }

    fn backward(&self, inputs: [&Input; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        self.backward_tensors(inputs, gradient)
    }

    fn forward_tensors(&self, [a, b]: [&Tensor; 2]) -> Result<Tensor> {
        product(a, b, self.scale)
    }

    fn backward_tensors(&self, [a, b]: [&Input; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        factor_gradients(a.tensor()?, b.tensor()?, self.scale, gradient)
    }
}

struct AddHadamardOfProducts {
    scale: f64,
    /// The dtype of the sum.
    dtype: DType,
}

impl Operation<3> for AddHadamardOfProducts {
    const NAME: &'static str = "add-hadamard-of-products";

    fn saved_inputs(&self, _: [bool; 3]) -> [bool; 3] {
        [false, true, true]
    }

    /// As for [`HadamardOfProducts`].
    fn has_slices(&self) -> bool {
        false
    }

    fn forward(&self, _: [&[f32]; 3], _: [&Shape; 3]) -> Result<(Vec<f32>, Shape)> {
        candle_core::bail!("{} has no form for slices", Self::NAME)
    }

    fn backward(&self, inputs: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        self.backward_tensors(inputs, gradient)
    }

    fn forward_tensors(&self, [base, a, b]: [&Tensor; 3]) -> Result<Tensor> {
        let product = product(a, b, self.scale)?.reshape(base.shape())?;
        let sum = (base.to_dtype(product.dtype())? + product)?;
        sum.to_dtype(self.dtype)
    }

    fn backward_tensors(&self, [_, a, b]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [of_a, of_b] = factor_gradients(a.tensor()?, b.tensor()?, self.scale, gradient)?;
        Ok([None, of_a, of_b])
    }
}
