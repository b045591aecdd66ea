//! Matrices in files that are whole, a low-rank product, or a Tucker decomposition of a convolution.

use super::names::RowRanges;
use super::weight_adapter::select_rows;
use crate::nn::matmul;
use candle_core::{Device, Result, Tensor};

/// A matrix of a LoKr or a LoHa in a file, float32 on the CPU.
#[derive(Clone, Debug)]
pub(super) enum StoredMatrix {
    Full(Tensor),
    /// [rows, rank] and [rank, columns].
    LowRank(Tensor, Tensor),
    /// A Tucker decomposition of a convolution: the core [rank, rank, kh, kw], [rank, rows] and [rank, columns].
    Tucker(Tensor, Tensor, Tensor),
}

impl StoredMatrix {
    /// The rows and the columns; the columns of a convolution's low-rank product include its kernel.
    pub(super) fn sizes(&self) -> [usize; 2] {
        match self {
            Self::Full(matrix) => [matrix.dims()[0], matrix.dims()[1]],
            Self::LowRank(left, right) => [left.dims()[0], right.dims()[1]],
            Self::Tucker(_, left, right) => [left.dims()[1], right.dims()[1]],
        }
    }

    pub(super) fn rank(&self) -> Option<usize> {
        match self {
            Self::Full(_) => None,
            Self::LowRank(_, right) | Self::Tucker(_, _, right) => Some(right.dims()[0]),
        }
    }

    pub(super) fn dense(&self) -> Result<Tensor> {
        match self {
            Self::Full(matrix) => Ok(matrix.clone()),
            Self::LowRank(left, right) => left.matmul(right),
            Self::Tucker(core, left, right) => {
                let (rank, _, height, width) = core.dims4()?;
                // sum over i and j of core[i, j, h, w] left[i, p] right[j, r].
                let rows = left.t()?.matmul(&core.reshape((rank, rank * height * width))?)?;
                let rows = rows
                    .reshape(((), rank, height * width))?
                    .transpose(1, 2)?
                    .contiguous()?;
                let (p, taps, _) = rows.dims3()?;
                let product = rows.reshape((p * taps, rank))?.matmul(right)?;
                let product = product.reshape((p, taps, ()))?.transpose(1, 2)?.contiguous()?;
                product.reshape((p, right.dim(1)?, height, width))
            }
        }
    }

    /// Some of its rows, in this order: ranges of their beginning and length.
    pub(super) fn select_rows(&self, rows: &RowRanges) -> Result<Self> {
        let select = |matrix: &Tensor, axis| select_rows(matrix.clone(), axis, Some(rows));
        Ok(match self {
            Self::Full(matrix) => Self::Full(select(matrix, 0)?),
            Self::LowRank(left, right) => Self::LowRank(select(left, 0)?, right.clone()),
            Self::Tucker(core, left, right) => Self::Tucker(core.clone(), select(left, 1)?, right.clone()),
        })
    }

    /// Its tensors, with the names of a whole matrix, of both factors and of the core.
    pub(super) fn named(&self, [full, left, right, core]: [&'static str; 4]) -> Vec<(&'static str, Tensor)> {
        match self {
            Self::Full(matrix) => vec![(full, matrix.clone())],
            Self::LowRank(a, b) => vec![(left, a.clone()), (right, b.clone())],
            Self::Tucker(t, a, b) => vec![(core, t.clone()), (left, a.clone()), (right, b.clone())],
        }
    }

    /// Whether its tensors fit together. `kind`: the type of adapter, for the message.
    pub(super) fn check(&self, kind: &str) -> std::result::Result<(), String> {
        let fits = match self {
            Self::Full(matrix) => matrix.rank() >= 2,
            Self::LowRank(left, right) => left.rank() == 2 && right.rank() == 2 && left.dims()[1] == right.dims()[0],
            Self::Tucker(core, left, right) => {
                let (core, ranks) = (core.dims(), [left.dims().first(), right.dims().first()]);
                left.rank() == 2 && right.rank() == 2 && core.len() == 4 && ranks == [core.first(), core.get(1)]
            }
        };
        if fits {
            return Ok(());
        }
        let dims = match self {
            Self::Full(matrix) => vec![matrix.dims()],
            Self::LowRank(left, right) => vec![left.dims(), right.dims()],
            Self::Tucker(core, left, right) => vec![left.dims(), right.dims(), core.dims()],
        };
        Err(format!("its {kind} matrices {dims:?} do not fit together"))
    }
}

/// The matrix [rows, columns kh kw] that Tucker's core [rows, rank, kh, kw] makes of a matrix [rank, columns]: the sum over the rank. Its
/// columns are those of a convolution's weight.
///
/// # Errors
/// When the shapes do not match.
pub(super) fn with_core(core: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    let (rows, rank, height, width) = core.dims4()?;
    let taps = height * width;
    let spread = core.permute((0, 2, 3, 1))?.contiguous()?.reshape((rows * taps, rank))?;
    let product = matmul(&spread, matrix)?.reshape((rows, taps, matrix.dim(1)?))?;
    product
        .transpose(1, 2)?
        .contiguous()?
        .reshape((rows, matrix.dim(1)? * taps))
}

/// Tensors with their alpha, of a layer whose `rows` are `None` if it is a layer of the model by itself.
pub(super) fn with_alpha(
    mut tensors: Vec<(&'static str, Tensor)>,
    alpha: Option<f64>,
    rows: Option<&RowRanges>,
) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
    if rows.is_some() {
        return Err("the file has it for several layers of the model together".to_owned());
    }
    if let Some(alpha) = alpha {
        let alpha = Tensor::new(alpha as f32, &Device::Cpu).map_err(|error| error.to_string())?;
        tensors.push(("alpha", alpha));
    }
    Ok(tensors)
}
