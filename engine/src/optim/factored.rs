//! The second moment of Adafactor (Shazeer and Stern, arXiv 1804.04235): one mean per row and one per column instead of
//! one per element.

use super::factored_pass::{self, Matrix};
use super::saved::Saved;
use super::{OptimError, Param, inplace};
use candle_core::{D, DType, Device, Tensor};
use std::collections::BTreeMap;

/// Running means of squared gradients.
pub(super) enum SecondMoment {
    /// Of a tensor with two or more dimensions: over its last one and over the one before it.
    Factored {
        /// Without the last dimension.
        row: Tensor,
        /// Without the last but one.
        column: Tensor,
    },
    /// Of a list of numbers.
    Full(Tensor),
}

/// The shapes of the means of rows and columns, where there are any.
fn shapes(dims: &[usize]) -> Option<(Vec<usize>, Vec<usize>)> {
    let (last, front) = dims.split_last()?;
    let (_, outer) = front.split_last()?;
    Some((front.to_vec(), [outer, &[*last]].concat()))
}

/// The root of the mean of squares.
pub(super) fn rms(t: &Tensor) -> Result<f64, OptimError> {
    let sum = f64::from(t.sqr()?.sum_all()?.to_scalar::<f32>()?);
    Ok((sum / t.elem_count().max(1) as f64).sqrt())
}

fn rsqrt(t: &Tensor) -> Result<Tensor, OptimError> {
    Ok(t.sqrt()?.recip()?)
}

/// The next means of rows and columns, and the update.
fn in_passes(
    grad: &Tensor,
    [row, column]: [&Tensor; 2],
    decay: f64,
    eps: f64,
    threshold: f64,
) -> Result<(Tensor, Tensor, Tensor), OptimError> {
    let dims = grad.dims();
    let [.., rows, columns] = *dims else {
        return Err(OptimError::State("a list of numbers has no rows".into()));
    };
    let matrix = Matrix { rows, columns };
    let mean = |old: &Tensor, sums: Vec<f32>, of: usize| -> Result<Vec<f32>, OptimError> {
        let next = |(old, sum): (&f32, f32)| old * decay as f32 + (sum / of as f32 + eps as f32) * (1.0 - decay) as f32;
        Ok(inplace::read(old, |old| old.iter().zip(sums).map(next).collect())?)
    };
    let (of_rows, of_columns) = inplace::read(grad, |g| factored_pass::sums(g, matrix))?;
    let (next_row, next_column) = (mean(row, of_rows, columns)?, mean(column, of_columns, rows)?);
    // The mean of the rows' means is that of the whole matrix.
    let by_row: Vec<f32> = next_row
        .chunks_exact(rows)
        .flat_map(|means| {
            let whole = means.iter().sum::<f32>() / rows as f32;
            means.iter().map(move |mean| (mean / whole).sqrt().recip())
        })
        .collect();
    let by_column: Vec<f32> = next_column.iter().map(|mean| mean.sqrt().recip()).collect();
    let (mut update, squares) = inplace::read(grad, |g| factored_pass::scaled(g, matrix, &by_row, &by_column))?;
    let divisor = (squares / update.len() as f64).sqrt() / threshold;
    if divisor > 1.0 {
        factored_pass::times(&mut update, divisor.recip() as f32);
    }
    let like = |numbers: Vec<f32>, t: &Tensor| Tensor::from_vec(numbers, t.shape(), t.device());
    Ok((like(next_row, row)?, like(next_column, column)?, like(update, grad)?))
}

impl SecondMoment {
    /// All zero.
    pub(super) fn zeros(param: &Param) -> Result<Self, OptimError> {
        let device = param.var.device();
        let zeros = |dims: Vec<usize>| Tensor::zeros(dims, DType::F32, device);
        Ok(match shapes(param.var.dims()) {
            Some((row, column)) => Self::Factored {
                row: zeros(row)?,
                column: zeros(column)?,
            },
            None => Self::Full(zeros(param.var.dims().to_vec())?),
        })
    }

    /// Takes in a gradient's squares (plus `eps`) with this decay and returns the gradient divided by the root of the
    /// mean, scaled down so that its own root mean square is at most `threshold`.
    pub(super) fn update(&mut self, grad: &Tensor, decay: f64, eps: f64, threshold: f64) -> Result<Tensor, OptimError> {
        if let Self::Factored { row, column } = self
            && [grad, &*row, &*column].iter().all(|t| inplace::possible(t))
            && grad.elem_count() > 0
        {
            let (next_row, next_column, update) = in_passes(grad, [row, column], decay, eps, threshold)?;
            (*row, *column) = (next_row, next_column);
            return Ok(update);
        }
        let squares = (grad.sqr()? + eps)?;
        let mean = |old: &Tensor, new: Tensor| (old * decay)? + (new * (1.0 - decay))?;
        let scaled = match self {
            Self::Factored { row, column } => {
                *row = mean(row, squares.mean(D::Minus1)?)?;
                *column = mean(column, squares.mean(D::Minus2)?)?;
                let of_rows = rsqrt(&row.broadcast_div(&row.mean_keepdim(D::Minus1)?)?)?;
                let of_columns = rsqrt(column)?;
                of_rows
                    .unsqueeze(D::Minus1)?
                    .broadcast_mul(&of_columns.unsqueeze(D::Minus2)?)?
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

    /// As ai-toolkit calls them: `exp_avg_sq_row` and `exp_avg_sq_col`, or `exp_avg_sq`.
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

    /// What [`SecondMoment::save`] saved.
    pub(super) fn load(saved: &mut Saved<'_>, param: &Param) -> Result<Self, OptimError> {
        let device: &Device = param.var.device();
        let mut get =
            |part: &str, dims: &[usize]| saved.tensor(&format!("{}.{part}", param.name), DType::F32, dims, device);
        Ok(match shapes(param.var.dims()) {
            Some((row, column)) => Self::Factored {
                row: get("exp_avg_sq_row", &row)?,
                column: get("exp_avg_sq_col", &column)?,
            },
            None => Self::Full(get("exp_avg_sq", param.var.dims())?),
        })
    }
}
