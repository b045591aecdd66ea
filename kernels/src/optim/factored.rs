//! Adafactor's factored second moment (Shazeer and Stern, arXiv 1804.04235): one mean per row and per column instead of
//! one per element.

use super::factored_kernels::{self, Matrix};
use super::inplace;
use super::optimizer::{OptimError, Param};
use super::saved::SavedState;
use candle_core::{D, DType, Device, Tensor};
use std::collections::BTreeMap;

/// Running means of squared gradients.
pub(super) enum SecondMoment {
    /// For a tensor with two or more dimensions: means over the last dimension and over the one before it.
    Factored {
        /// Mean over the last dimension; has the tensor's shape without it.
        row: Tensor,
        /// Mean over the second-last dimension; has the tensor's shape without it.
        column: Tensor,
    },
    /// For a tensor with fewer dimensions: one mean per element.
    Full(Tensor),
}

/// The shapes of `row` and `column`; `None` for fewer than two dimensions.
fn row_and_column_shapes(dims: &[usize]) -> Option<(Vec<usize>, Vec<usize>)> {
    let (last, front) = dims.split_last()?;
    let (_, outer) = front.split_last()?;
    Some((front.to_vec(), [outer, &[*last]].concat()))
}

/// The root mean square.
pub(super) fn rms(t: &Tensor) -> Result<f64, OptimError> {
    let sum = f64::from(t.sqr()?.sum_all()?.to_scalar::<f32>()?);
    Ok((sum / t.elem_count().max(1) as f64).sqrt())
}

fn rsqrt(t: &Tensor) -> Result<Tensor, OptimError> {
    Ok(t.sqrt()?.recip()?)
}

/// [`SecondMoment::update`] on the CPU: returns the new `row`, the new `column` and the update.
fn update_on_cpu(
    grad: &Tensor,
    [row, column]: [&Tensor; 2],
    decay: f64,
    eps: f64,
    threshold: f64,
) -> Result<(Tensor, Tensor, Tensor), OptimError> {
    let dims = grad.dims();
    let [.., rows, columns] = *dims else {
        return Err(OptimError::State(
            "a tensor of one dimension has no factored second moment".into(),
        ));
    };
    let matrix = Matrix { rows, columns };
    let mean = |old: &Tensor, sums: Vec<f32>, of: usize| -> Result<Vec<f32>, OptimError> {
        let next = |(old, sum): (&f32, f32)| old * decay as f32 + (sum / of as f32 + eps as f32) * (1.0 - decay) as f32;
        Ok(inplace::with_f32(old, |old| old.iter().zip(sums).map(next).collect())?)
    };
    let (row_sums, column_sums) = inplace::with_f32(grad, |g| factored_kernels::row_and_column_sums(g, matrix))?;
    let (next_row, next_column) = (mean(row, row_sums, columns)?, mean(column, column_sums, rows)?);
    // The mean of the row means is the mean of the whole matrix.
    let row_factors: Vec<f32> = next_row
        .chunks_exact(rows)
        .flat_map(|means| {
            let whole = means.iter().sum::<f32>() / rows as f32;
            means.iter().map(move |mean| (mean / whole).sqrt().recip())
        })
        .collect();
    let column_factors: Vec<f32> = next_column.iter().map(|mean| mean.sqrt().recip()).collect();
    let (mut update, squares) = inplace::with_f32(grad, |g| {
        factored_kernels::scale_rows_and_columns(g, matrix, &row_factors, &column_factors)
    })?;
    let divisor = (squares / update.len() as f64).sqrt() / threshold;
    if divisor > 1.0 {
        factored_kernels::scale_in_place(&mut update, divisor.recip() as f32);
    }
    let like = |numbers: Vec<f32>, t: &Tensor| Tensor::from_vec(numbers, t.shape(), t.device());
    Ok((like(next_row, row)?, like(next_column, column)?, like(update, grad)?))
}

impl SecondMoment {
    /// Means of zero.
    pub(super) fn zeros(param: &Param) -> Result<Self, OptimError> {
        let device = param.var.device();
        let zeros = |dims: Vec<usize>| Tensor::zeros(dims, DType::F32, device);
        Ok(match row_and_column_shapes(param.var.dims()) {
            Some((row, column)) => Self::Factored {
                row: zeros(row)?,
                column: zeros(column)?,
            },
            None => Self::Full(zeros(param.var.dims().to_vec())?),
        })
    }

    /// Updates the means with the squared gradient plus `eps`, then returns the gradient divided by the root of the
    /// means. The result is scaled down if its root mean square is above `threshold`.
    pub(super) fn update(&mut self, grad: &Tensor, decay: f64, eps: f64, threshold: f64) -> Result<Tensor, OptimError> {
        if let Self::Factored { row, column } = self
            && [grad, &*row, &*column].iter().all(|t| inplace::is_supported(t))
            && grad.elem_count() > 0
        {
            let (next_row, next_column, update) = update_on_cpu(grad, [row, column], decay, eps, threshold)?;
            (*row, *column) = (next_row, next_column);
            return Ok(update);
        }
        let squares = (grad.sqr()? + eps)?;
        let mean = |old: &Tensor, new: Tensor| (old * decay)? + (new * (1.0 - decay))?;
        let scaled = match self {
            Self::Factored { row, column } => {
                *row = mean(row, squares.mean(D::Minus1)?)?;
                *column = mean(column, squares.mean(D::Minus2)?)?;
                let row_factors = rsqrt(&row.broadcast_div(&row.mean_keepdim(D::Minus1)?)?)?;
                let column_factors = rsqrt(column)?;
                row_factors
                    .unsqueeze(D::Minus1)?
                    .broadcast_mul(&column_factors.unsqueeze(D::Minus2)?)?
                    .mul(grad)?
            }
            Self::Full(all) => {
                *all = mean(all, squares)?;
                rsqrt(all)?.mul(grad)?
            }
        };
        let divisor = (rms(&scaled)? / threshold).max(1.0);
        Ok((scaled / divisor)?)
    }

    /// Adds the tensors to `out` under ai-toolkit's names: `exp_avg_sq_row` and `exp_avg_sq_col`, or `exp_avg_sq`.
    pub(super) fn save(&self, param: &Param, out: &mut BTreeMap<String, Tensor>) {
        let mut put = |part: &str, t: &Tensor| out.insert(format!("{}.{part}", param.name), t.clone());
        match self {
            Self::Factored { row, column } => {
                put("exp_avg_sq_row", row);
                put("exp_avg_sq_col", column);
            }
            Self::Full(all) => {
                put("exp_avg_sq", all);
            }
        }
    }

    /// Loads what [`SecondMoment::save`] saved.
    pub(super) fn load(saved: &mut SavedState<'_>, param: &Param) -> Result<Self, OptimError> {
        let device: &Device = param.var.device();
        let mut get =
            |part: &str, dims: &[usize]| saved.tensor(&format!("{}.{part}", param.name), DType::F32, dims, device);
        Ok(match row_and_column_shapes(param.var.dims()) {
            Some((row, column)) => Self::Factored {
                row: get("exp_avg_sq_row", &row)?,
                column: get("exp_avg_sq_col", &column)?,
            },
            None => Self::Full(get("exp_avg_sq", param.var.dims())?),
        })
    }
}
