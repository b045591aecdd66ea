//! Where a tensor is stored, and how it is quantised there.

use super::bytes::FloatFormat;
use super::header::StorageType;
use candle_core::Tensor;
use candle_core::quantized::GgmlDType;
use serde::Deserialize;
use std::sync::Arc;

/// A tensor of an [`Index`](super::Index).
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) location: TensorLocation,
    pub(super) storage: StorageType,
    pub(super) shape: Vec<usize>,
    pub(super) quantization: Option<StoredQuantization>,
    /// Set if the tensor is only a part of the stored one, or its transpose.
    pub(super) view: Option<StoredView>,
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
    /// The transpose of a matrix.
    Transposed,
}

impl View {
    /// The shape of the view of a tensor of this shape. `None` if the tensor has no such view.
    pub(super) fn shape(self, stored: &[usize]) -> Option<Vec<usize>> {
        match (self, stored) {
            (Self::Rows { start, count }, [rows, rest @ ..]) if start.checked_add(count)? <= *rows => {
                Some([&[count], rest].concat())
            }
            (Self::Transposed, [rows, columns]) => Some(vec![*columns, *rows]),
            _ => None,
        }
    }

    pub(super) fn apply(self, stored: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            // A copy, so that the other rows do not stay in memory.
            Self::Rows { start, count } => stored.narrow(0, start, count)?.force_contiguous(),
            Self::Transposed => stored.t()?.contiguous(),
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
