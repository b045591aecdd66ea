//! Where a tensor is stored, and how it is quantised there.

use super::bytes::FloatFormat;
use super::header::StorageType;
use candle_core::Tensor;
use candle_core::quantized::GgmlDType;
use serde::Deserialize;
use std::ops::Range;
use std::sync::Arc;

/// A tensor of an [`Index`](super::Index).
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) location: TensorLocation,
    pub(super) storage: StorageType,
    pub(super) shape: Vec<usize>,
    pub(super) quantization: Option<StoredQuantization>,
    /// Set if the tensor is only a part of the stored one, or has its elements in another order.
    pub(super) view: Option<StoredView>,
}

impl Entry {
    /// The shape of the stored tensor.
    pub(super) fn stored_shape(&self) -> &[usize] {
        self.view.as_ref().map_or(&self.shape, |view| &view.stored_shape)
    }

    /// The elements of the stored tensor that this one consists of, in order. `None` if they are not ranges: a transpose.
    pub(super) fn elements(&self) -> Option<Vec<Range<usize>>> {
        let shape = self.stored_shape();
        let Some(view) = &self.view else {
            return Some(std::iter::once(0..shape.iter().product()).collect());
        };
        let width: usize = shape.iter().skip(1).product();
        let rows = view.view.rows(shape)?.into_iter();
        Some(rows.map(|rows| rows.start * width..rows.end * width).collect())
    }
}

/// A tensor that is made from another one that is stored.
#[derive(Clone, Debug)]
pub(super) struct StoredView {
    pub(super) stored_shape: Vec<usize>,
    pub(super) view: View,
}

/// How a tensor is made from a stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// These rows of a tensor.
    Rows {
        /// The first row.
        start: usize,
        /// The number of rows.
        count: usize,
    },
    /// All rows, the second half before the first.
    HalvesSwapped,
    /// The transpose of a matrix.
    Transposed,
    /// All rows in another order.
    Reordered(RowOrder),
}

/// Another order of rows: rows [outer, first, second, inner] become [outer, second, first, inner].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOrder {
    /// Groups of rows that stay in their order.
    pub outer: usize,
    /// The first of the two swapped axes.
    pub first: usize,
    /// The second of the two swapped axes.
    pub second: usize,
    /// Rows that stay together.
    pub inner: usize,
}

impl RowOrder {
    /// The order that turns the result back.
    #[must_use]
    pub fn inverse(self) -> Self {
        Self {
            first: self.second,
            second: self.first,
            ..self
        }
    }

    /// The number of rows. `None`: it overflows.
    fn rows(self) -> Option<usize> {
        let all = [self.first, self.second, self.inner];
        all.iter().try_fold(self.outer, |rows, side| rows.checked_mul(*side))
    }

    /// The rows of a tensor in this order, in new memory.
    ///
    /// # Errors
    /// When the tensor has another number of rows.
    pub fn apply(self, stored: &Tensor) -> candle_core::Result<Tensor> {
        let row: usize = stored.dims().iter().skip(1).product();
        let split = stored.reshape((self.outer, self.first, self.second, self.inner * row))?;
        split.transpose(1, 2)?.contiguous()?.reshape(stored.shape())
    }
}

impl View {
    /// The shape of the view of a tensor of this shape. `None` if the tensor has no such view.
    pub(super) fn shape(self, stored: &[usize]) -> Option<Vec<usize>> {
        match (self, stored) {
            (Self::Rows { start, count }, [rows, rest @ ..]) if start.checked_add(count)? <= *rows => {
                Some([&[count], rest].concat())
            }
            (Self::HalvesSwapped, [rows, ..]) if rows.is_multiple_of(2) => Some(stored.to_vec()),
            (Self::Transposed, [rows, columns]) => Some(vec![*columns, *rows]),
            (Self::Reordered(order), [rows, ..]) if order.rows() == Some(*rows) => Some(stored.to_vec()),
            _ => None,
        }
    }

    /// The rows of a stored tensor of this shape, in the order of the view. `None` for a transpose.
    fn rows(self, stored: &[usize]) -> Option<Vec<Range<usize>>> {
        match self {
            Self::Rows { start, count } => Some(std::iter::once(start..start + count).collect()),
            Self::HalvesSwapped => {
                let count = stored.first().copied().unwrap_or(0);
                Some(vec![count / 2..count, 0..count / 2])
            }
            Self::Transposed => None,
            Self::Reordered(RowOrder {
                outer,
                first,
                second,
                inner,
            }) => {
                let mut rows = Vec::with_capacity(outer * first * second);
                for group in 0..outer {
                    for b in 0..second {
                        rows.extend((0..first).map(|a| {
                            let start = ((group * first + a) * second + b) * inner;
                            start..start + inner
                        }));
                    }
                }
                Some(rows)
            }
        }
    }

    pub(super) fn apply(self, stored: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            // A copy, so that the other rows do not stay in memory.
            Self::Rows { start, count } => stored.narrow(0, start, count)?.force_contiguous(),
            Self::HalvesSwapped => {
                let half = stored.dim(0)? / 2;
                Tensor::cat(&[stored.narrow(0, half, half)?, stored.narrow(0, 0, half)?], 0)
            }
            Self::Transposed => stored.t()?.contiguous(),
            Self::Reordered(order) => order.apply(stored),
        }
    }
}

/// The file of a tensor, and its name there.
#[derive(Clone, Debug)]
pub(super) struct TensorLocation {
    pub(super) file: usize,
    pub(super) name: String,
}

/// How a weight is quantised.
#[derive(Clone, Debug)]
pub(super) enum StoredQuantization {
    /// 8-bit floats, with scales or without.
    Float8 {
        format: FloatFormat,
        scale: Option<TensorLocation>,
    },
    /// bitsandbytes' 8-bit integers with one scale per output.
    Int8 { scale: TensorLocation },
    /// bitsandbytes' 4 bits with a table of values.
    FourBit(Arc<FourBit>),
    /// GGUF blocks.
    GgmlBlocks(GgmlDType, &'static str),
}

/// The parts of a 4-bit weight of bitsandbytes.
#[derive(Debug)]
pub(super) struct FourBit {
    pub(super) kind: &'static str,
    pub(super) state: QuantState,
    pub(super) absmax: TensorLocation,
    pub(super) map: TensorLocation,
    /// With double quantisation: the scales of the scales, and their table.
    pub(super) nested: Option<(TensorLocation, TensorLocation)>,
}

/// bitsandbytes' `quant_state` of a 4-bit weight.
#[derive(Debug, Deserialize)]
pub(super) struct QuantState {
    pub(super) shape: Vec<usize>,
    pub(super) blocksize: usize,
    pub(super) nested_blocksize: Option<usize>,
    pub(super) nested_offset: Option<f64>,
}
