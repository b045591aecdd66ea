//! Names, shapes and kinds of the tensors of a weights file, from its header.

use crate::gguf;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// A header larger than this belongs to no model that we know.
const HEADER_LIMIT: u64 = 64 << 20;

/// How a tensor is stored, as far as it matters for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Numbers that are read as they are computed with.
    Plain,
    /// A weight in GGUF of 16 bits.
    Half,
    /// 8-bit floats.
    Float8,
    /// Bytes, which may be a weight of 4 bits.
    Bytes,
    /// Whole numbers of 8 bits, which may be a weight.
    Signed,
    /// Blocks of so many numbers in so many bytes.
    Blocks(u64, u64),
}

/// A tensor.
pub(super) struct Tensor {
    pub(super) shape: Vec<u64>,
    pub(super) kind: Kind,
}

impl Tensor {
    /// Numbers in it.
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

/// The tensors of a safetensors or GGUF file, whichever its first bytes say.
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
    // 8 bytes with the header's length, then JSON.
    let length = u64::from_le_bytes(first);
    if length > HEADER_LIMIT {
        return Err(bad("no safetensors header"));
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|_| bad("no safetensors header"))?;
    Ok(header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .filter_map(|(name, value)| {
            let entry: Entry = serde_json::from_value(value).ok()?;
            let kind = match entry.dtype.as_str() {
                "F8_E4M3" | "F8_E5M2" => Kind::Float8,
                "U8" => Kind::Bytes,
                "I8" => Kind::Signed,
                _ => Kind::Plain,
            };
            Some((
                name,
                Tensor {
                    shape: entry.shape,
                    kind,
                },
            ))
        })
        .collect())
}

fn of_gguf((name, info): (String, gguf::TensorInfo)) -> (String, Tensor) {
    let kind = match info.kind {
        Ok(kind) if kind.block > 1 => Kind::Blocks(kind.block, kind.bytes),
        Ok(kind) if kind.bytes == 2 => Kind::Half,
        _ => Kind::Plain,
    };
    (
        name,
        Tensor {
            shape: info.shape,
            kind,
        },
    )
}
