//! What the header of a weights file says, whatever its format.

use super::bytes::FloatFormat;
use candle_core::quantized::GgmlDType;
use std::collections::BTreeMap;
use std::ops::Range;

/// How a tensor is stored in its file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StorageType {
    /// One float per element.
    Floats(FloatFormat),
    /// One 16-bit float per element in a GGUF file; a layer may use them without conversion.
    GgufHalf(FloatFormat),
    /// Quantised blocks in a GGUF file, and the name of their type.
    GgmlBlocks(GgmlDType, &'static str),
    /// Bytes (U8).
    Bytes,
    /// Signed 8-bit integers.
    Int8,
    /// An unsupported type, by its name in the file.
    Unsupported(String),
}

/// The storage type, the shape and the byte range of a tensor in its file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) storage: StorageType,
    pub(super) shape: Vec<usize>,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl StoredTensor {
    /// The first byte in the file, and the number of bytes, of these elements, of which `per_block` take `block_bytes`
    /// bytes. The bytes never exceed those of the tensor.
    pub(super) fn byte_range(&self, elements: &Range<usize>, per_block: usize, block_bytes: usize) -> (usize, usize) {
        let byte = |element: usize| {
            let bytes = element.div_ceil(per_block.max(1)).saturating_mul(block_bytes);
            self.start.saturating_add(bytes).min(self.end)
        };
        let start = byte(elements.start);
        (start, byte(elements.end).saturating_sub(start))
    }
}

/// The content of a file's header.
#[derive(Default)]
pub(super) struct FileHeader {
    pub(super) tensors: BTreeMap<String, StoredTensor>,
    /// The free-form metadata.
    pub(super) metadata: BTreeMap<String, String>,
}
