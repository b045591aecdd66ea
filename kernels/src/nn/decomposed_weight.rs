//! A weight with a change that two factors make, whose rows or columns are divided by their norms and multiplied with magnitudes (S.-Y. Liu
//! and others, "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353), as `apply_weight_decompose` of LyCORIS: the norms get
//! gradients, too.

use super::hadamard;
use super::tensors::matmul;
use crate::autograd::{Input, Operation, apply};
use crate::weights::Weight;
use candle_core::{DType, Result, Shape, Tensor};

/// Added to norms, so that none is zero: as in LyCORIS.
const EPSILON: f64 = f32::EPSILON as f64;

/// How two factors make a change of a weight [out, in ..].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeForm {
    /// The matrix product of [out, rank] and [rank, in ..].
    LowRank,
    /// The element-wise product of two matrix products: [2, out, rank] and [2, rank, in ..].
    Hadamard,
    /// The Kronecker product of [a, c] and [b, d ..].
    Kronecker,
}

/// How a weight is decomposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decomposition {
    /// How the factors make the change.
    pub form: ChangeForm,
    /// What their product is multiplied with.
    pub scale: f64,
    /// The axis of the weight that the magnitude has a number for each element of: 0, the outputs, or 1, the inputs.
    pub axis: usize,
    /// What the weight with its change is multiplied with is `1 + strength (magnitude / norm - 1)`.
    pub strength: f64,
    /// The dtype of the result.
    pub dtype: DType,
}

/// The decomposed weight [out, in ..]. `weight` gets no gradient. `mask` [out]: 1 for the rows of the change that are kept, 0 for those that
/// dropout drops. The factors, without axes of a kernel, and the magnitude are float32 and get gradients. The sum is made in float32; the
/// backward pass makes it again, so that it keeps no tensor in the size of the weight.
///
/// # Errors
/// When the shapes do not match, or the weight cannot be read.
pub fn decomposed_weight(
    weight: &Weight,
    factors: [&Tensor; 2],
    magnitude: &Tensor,
    mask: Option<&Tensor>,
    options: Decomposition,
) -> Result<Tensor> {
    let base = match weight {
        Weight::Plain(tensor) => Weight::Plain(tensor.detach()),
        other => other.clone(),
    };
    let mask = mask.map(Tensor::detach);
    let [a, b] = factors;
    apply([a, b, magnitude], DecomposedWeight { base, mask, options })
}

struct DecomposedWeight {
    base: Weight,
    mask: Option<Tensor>,
    options: Decomposition,
}

impl ChangeForm {
    /// The change, with the elements of the weight in their order.
    fn change(self, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
        match self {
            Self::LowRank => matmul(&(a * scale)?, b),
            Self::Hadamard => hadamard::product(a, b, scale),
            Self::Kronecker => {
                let ((rows, columns), (b_rows, b_columns)) = (a.dims2()?, b.dims2()?);
                let first = (a * scale)?.reshape((rows, 1, columns, 1))?;
                first.broadcast_mul(&b.reshape((1, b_rows, 1, b_columns))?)
            }
        }
    }

    /// The gradients of the factors, from that of the change.
    fn gradients(self, a: &Tensor, b: &Tensor, scale: f64, gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        match self {
            Self::LowRank => {
                let gradient = gradient.reshape((a.dim(0)?, b.dim(1)?))?;
                let of_a = (matmul(&gradient, &b.t()?.contiguous()?)? * scale)?;
                let of_b = matmul(&(a * scale)?.t()?.contiguous()?, &gradient)?;
                Ok([Some(of_a), Some(of_b)])
            }
            Self::Hadamard => hadamard::factor_gradients(a, b, scale, gradient),
            Self::Kronecker => {
                let ((rows, columns), (b_rows, b_columns)) = (a.dims2()?, b.dims2()?);
                // The elements of the first factor, and for each those of the second.
                let gradient = gradient.reshape((rows, b_rows, columns, b_columns))?;
                let gradient = gradient.permute((0, 2, 1, 3))?.contiguous()?;
                let gradient = gradient.reshape((rows * columns, b_rows * b_columns))?;
                let of_a = (matmul(&gradient, &b.reshape((b_rows * b_columns, 1))?)? * scale)?;
                let of_b = (matmul(&a.reshape((1, rows * columns))?, &gradient)? * scale)?;
                Ok([
                    Some(of_a.reshape((rows, columns))?),
                    Some(of_b.reshape((b_rows, b_columns))?),
                ])
            }
        }
    }
}

impl DecomposedWeight {
    /// The change without the rows that dropout drops.
    fn with_dropped_rows(&self, change: Tensor) -> Result<Tensor> {
        match &self.mask {
            Some(mask) => change.broadcast_mul(&mask.reshape(((), 1, 1))?),
            None => Ok(change),
        }
    }

    /// The weight with its change, float32, [out, in, kernel].
    fn sum(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let (outputs, inputs) = match self.base.dims() {
            [outputs, inputs, ..] => (*outputs, *inputs),
            dims => candle_core::bail!("a weight {dims:?} has no rows and columns"),
        };
        let change = self.options.form.change(a, b, self.options.scale)?;
        let change = self.with_dropped_rows(change.reshape((outputs, inputs, ()))?)?;
        let base = self.base.dense()?.detach().to_dtype(DType::F32)?;
        base.reshape((outputs, inputs, ()))? + change
    }

    /// The sums over all axes but that of the magnitude.
    fn sums(&self, tensor: &Tensor) -> Result<Tensor> {
        match self.options.axis {
            0 => tensor.sum((1, 2)),
            _ => tensor.sum((0, 2)),
        }
    }

    /// A vector along the axis of the magnitude.
    fn over(&self, vector: &Tensor) -> Result<Tensor> {
        match self.options.axis {
            0 => vector.reshape(((), 1, 1)),
            _ => vector.reshape((1, (), 1)),
        }
    }

    fn norms(&self, sum: &Tensor) -> Result<Tensor> {
        self.sums(&sum.sqr()?)?.sqrt()? + EPSILON
    }

    /// What the weight with its change is multiplied with.
    fn ratios(&self, magnitude: &Tensor, norms: &Tensor) -> Result<Tensor> {
        (((magnitude / norms)? - 1.0)? * self.options.strength)? + 1.0
    }
}

impl Operation<3> for DecomposedWeight {
    const NAME: &'static str = "decomposed-weight";

    fn saved_inputs(&self, _: [bool; 3]) -> [bool; 3] {
        [true; 3]
    }

    /// candle's products are as fast on the CPU.
    fn has_slices(&self) -> bool {
        false
    }

    fn forward(&self, _: [&[f32]; 3], _: [&Shape; 3]) -> Result<(Vec<f32>, Shape)> {
        candle_core::bail!("{} has no form for slices", Self::NAME)
    }

    fn backward(&self, inputs: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        self.backward_tensors(inputs, gradient)
    }

    fn forward_tensors(&self, [a, b, magnitude]: [&Tensor; 3]) -> Result<Tensor> {
        let sum = self.sum(a, b)?;
        let ratios = self.ratios(magnitude, &self.norms(&sum)?)?;
        let weight = sum.broadcast_mul(&self.over(&ratios)?)?;
        drop(sum);
        weight.reshape(self.base.dims())?.to_dtype(self.options.dtype)
    }

    /// With V the weight with its change, n its norms, m the magnitude and k the strength: the result is V (1 + k (m / n - 1)), and the
    /// gradient of n is that of V times V / n.
    fn backward_tensors(&self, inputs: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [a, b, magnitude] = inputs;
        let (a, b, magnitude) = (a.tensor()?, b.tensor()?, magnitude.tensor()?);
        let strength = self.options.strength;
        let sum = self.sum(a, b)?;
        let norms = self.norms(&sum)?;
        let gradient = gradient.to_dtype(DType::F32)?.reshape(sum.shape())?;
        let products = self.sums(&(&gradient * &sum)?)?;
        let of_magnitude = ((&products / &norms)? * strength)?;
        let cubes = (norms.sqr()? * &norms)?;
        let of_norms = (((magnitude * &products)? / &cubes)? * strength)?;
        let of_sum = gradient.broadcast_mul(&self.over(&self.ratios(magnitude, &norms)?)?)?;
        drop(gradient);
        let of_sum = (of_sum - sum.broadcast_mul(&self.over(&of_norms)?)?)?;
        drop(sum);
        let of_change = self.with_dropped_rows(of_sum)?;
        let [of_a, of_b] = self.options.form.gradients(a, b, self.options.scale, &of_change)?;
        Ok([of_a, of_b, Some(of_magnitude)])
    }
}
