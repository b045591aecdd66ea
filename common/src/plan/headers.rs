//! Reads the names, shapes and storage types of the tensors of a weights file from its header.

use crate::gguf;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The size limit of a safetensors header. Headers of known models are smaller.
const HEADER_LIMIT: u64 = 64 << 20;

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightEncoding {
    /// Converted to the compute dtype when loaded.
    Plain,
    /// bf16, or a 16-bit weight of a GGUF file: a CPU keeps it in 2 bytes.
    Half,
    /// 8-bit floats.
    Float8,
    /// Unsigned bytes, which may be a packed 4-bit weight.
    Bytes,
    /// Signed 8-bit integers, which may be a quantised weight.
    Signed,
    /// GGUF blocks: numbers per block, and bytes per block.
    Blocks(u64, u64),
}

/// A tensor's shape and storage.
pub(super) struct Tensor {
    pub(super) shape: Vec<u64>,
    pub(super) storage: WeightEncoding,
}

impl Tensor {
    /// Number of elements.
    pub(super) fn count(&self) -> u64 {
        self.shape.iter().fold(1_u64, |product, n| product.saturating_mul(*n))
    }
}

#[derive(Deserialize)]
struct Entry {
    shape: Vec<u64>,
    #[serde(default)]
    dtype: String,
}

/// Reads the tensors of a safetensors or GGUF file. The first bytes decide the format.
pub(super) fn tensors(path: &Path) -> io::Result<BTreeMap<String, Tensor>> {
    let (mut file, _) = crate::fsutil::regular::open(path)?;
    let mut first = [0; 8];
    file.read_exact(&mut first)?;
    if first.starts_with(gguf::MAGIC) {
        file.seek(SeekFrom::Start(0))?;
        let length = file.metadata()?.len();
        let header = gguf::Header::read(file, length)?;
        return Ok(header.tensors.into_iter().map(of_gguf).collect());
    }
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
    // A safetensors file begins with 8 bytes of header length, then JSON.
    let length = u64::from_le_bytes(first);
    if length > HEADER_LIMIT {
        return Err(bad("it has no valid safetensors header"));
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|_| bad("it has no valid safetensors header"))?;
    Ok(header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .filter_map(|(name, value)| {
            let entry: Entry = serde_json::from_value(value).ok()?;
            let storage = match entry.dtype.as_str() {
                "F8_E4M3" | "F8_E5M2" => WeightEncoding::Float8,
                "U8" => WeightEncoding::Bytes,
                "I8" => WeightEncoding::Signed,
                "BF16" => WeightEncoding::Half,
                _ => WeightEncoding::Plain,
            };
            Some((
                name,
                Tensor {
                    shape: entry.shape,
                    storage,
                },
            ))
        })
        .collect())
}

fn of_gguf((name, info): (String, gguf::TensorInfo)) -> (String, Tensor) {
    let storage = match info.kind {
        Ok(kind) if kind.block > 1 => WeightEncoding::Blocks(kind.block, kind.bytes),
        Ok(kind) if kind.bytes == 2 => WeightEncoding::Half,
        _ => WeightEncoding::Plain,
    };
    (
        name,
        Tensor {
            shape: info.shape,
            storage,
        },
    )
}
