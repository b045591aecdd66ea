//! The singular value decomposition of a weight, for LoRAs that are extracted from two models.
//!
//! A = U·S·Vᵀ is computed from the eigenvectors of the smaller one of A·Aᵀ and Aᵀ·A in float64. Singular values above 1e-8 of the
//! largest are exact to float32, and A is never decomposed whole: the Gram matrix of a convolution of 1280 x 11520 has 1280 x 1280
//! numbers. Where only a few singular vectors are needed, a block Krylov iteration (Musco and Musco, "Randomized Block Krylov
//! Methods", 2015) with a fixed seed finds them without the others.

mod eigen;
mod krylov;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::error::{EngineError, Result};
use candle_core::{DType, Device, Tensor};
use eigen::{Eigen, eigen};
use nalgebra::DMatrix;

/// Rows or columns that are converted to float64 at a time.
const PANEL: usize = 2048;

/// The largest singular values of a matrix, with their singular vectors.
#[derive(Debug)]
pub struct Svd {
    /// [rows, columns], float32.
    matrix: Tensor,
    /// Singular vectors of the narrower side, one a row: [count, narrower side], float64.
    vectors: Tensor,
    values: Vec<f64>,
}

impl Svd {
    /// Decomposes a matrix [rows, columns], float32 on the CPU, whose numbers are finite.
    ///
    /// # Errors
    /// When it is no such matrix.
    pub fn new(matrix: &Tensor) -> Result<Self> {
        let gram = gram(matrix)?;
        Self::from_eigen(matrix, &eigen(gram), usize::MAX)
    }

    /// As [`Self::new`], with the `rank` largest singular values only.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn largest(matrix: &Tensor, rank: usize) -> Result<Self> {
        let gram = gram(matrix)?;
        let eigen = match krylov::largest(&gram, rank) {
            Some(largest) => largest,
            None => eigen(gram),
        };
        Self::from_eigen(matrix, &eigen, rank)
    }

    fn from_eigen(matrix: &Tensor, eigen: &Eigen, rank: usize) -> Result<Self> {
        let (side, count) = (eigen.vectors.nrows(), eigen.values.len().min(rank));
        // nalgebra has one column after the other: the rows of the transpose.
        let vectors = eigen.vectors.columns(0, count).iter().copied().collect();
        Ok(Self {
            matrix: matrix.clone(),
            vectors: Tensor::from_vec::<_, f64>(vectors, (count, side), &Device::Cpu)?,
            values: eigen
                .values
                .iter()
                .take(count)
                .map(|value| value.max(0.0).sqrt())
                .collect(),
        })
    }

    /// The singular values, largest first.
    #[must_use]
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The two factors of the best approximation of this rank: U·S, [rows, rank], and Vᵀ, [rank, columns], float32. A rank above the
    /// number of singular values is that number.
    ///
    /// # Errors
    /// When memory is short.
    pub fn factors(&self, rank: usize) -> Result<(Tensor, Tensor)> {
        let (rows, columns) = self.matrix.dims2()?;
        let vectors = self.vectors.narrow(0, 0, rank.min(self.values.len()))?;
        if rows > columns {
            let mut scaled = Vec::new();
            for panel in panels(rows) {
                let panel = self.matrix.narrow(0, panel.start, panel.len())?.to_dtype(DType::F64)?;
                scaled.push(panel.matmul(&vectors.t()?)?.to_dtype(DType::F32)?);
            }
            return Ok((Tensor::cat(&scaled, 0)?, vectors.to_dtype(DType::F32)?));
        }
        let mut scaled = Vec::new();
        for panel in panels(columns) {
            let panel = self.matrix.narrow(1, panel.start, panel.len())?.to_dtype(DType::F64)?;
            scaled.push(vectors.matmul(&panel)?);
        }
        let scaled = Tensor::cat(&scaled, 1)?;
        // The length of each row, not its singular value: so the product is U·Uᵀ·A also where that is rounding error.
        let lengths = scaled.sqr()?.sum_keepdim(1)?.sqrt()?;
        let zero = lengths.zeros_like()?;
        let is_zero = lengths.eq(&zero)?;
        let divisors = is_zero.where_cond(&lengths.ones_like()?, &lengths)?;
        let down = scaled.broadcast_div(&divisors)?.to_dtype(DType::F32)?;
        let up = vectors.broadcast_mul(&lengths)?.t()?.to_dtype(DType::F32)?;
        Ok((up.contiguous()?, down))
    }
}

/// The ranges of at most [`PANEL`] numbers of a side.
fn panels(side: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..side)
        .step_by(PANEL)
        .map(move |start| start..(start + PANEL).min(side))
}

/// A·Aᵀ of a matrix with fewer rows than columns, else Aᵀ·A.
fn gram(matrix: &Tensor) -> Result<DMatrix<f64>> {
    let (rows, columns) = matrix.dims2()?;
    let (side, axis, long) = if rows > columns {
        (columns, 0, rows)
    } else {
        (rows, 1, columns)
    };
    let mut sum = Tensor::zeros((side, side), DType::F64, &Device::Cpu)?;
    for range in panels(long) {
        let panel = matrix.narrow(axis, range.start, range.len())?.to_dtype(DType::F64)?;
        let product = match axis {
            0 => panel.t()?.matmul(&panel)?,
            _ => panel.matmul(&panel.t()?)?,
        };
        sum = (sum + product)?;
    }
    let numbers = sum.flatten_all()?.to_vec1::<f64>()?;
    if numbers.iter().any(|number| !number.is_finite()) {
        return Err(EngineError::Internal(
            "a matrix with numbers that are not finite has no singular values".into(),
        ));
    }
    Ok(DMatrix::from_vec(side, side, numbers))
}
