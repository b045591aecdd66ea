//! A tensor of a type that no operation reads, for files that are copied.

/// A tensor as its safetensors file stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBytes {
    /// The name of its type in the file: `BOOL`, `I64`.
    pub type_name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}
