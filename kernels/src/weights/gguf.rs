//! Reads the header of a GGUF file.

use super::bytes::FloatFormat;
use super::header::{FileHeader, StorageType, StoredTensor};
use crate::error::{EngineError, Result};
use aitk_common::gguf::{self, Header};
use candle_core::quantized::GgmlDType;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

/// Reads and checks the header of a file of `length` bytes.
pub(super) fn read_header(path: &Path, mut file: &File, length: u64) -> Result<FileHeader> {
    let file_error = |reason: String| EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    };
    file.seek(SeekFrom::Start(0)).map_err(|e| EngineError::io(path, e))?;
    let header = Header::read(file, length).map_err(|e| match e.kind() {
        std::io::ErrorKind::InvalidData => file_error(e.to_string()),
        _ => EngineError::io(path, e),
    })?;
    let mut out = FileHeader {
        metadata: header.texts,
        ..FileHeader::default()
    };
    for (name, info) in header.tensors {
        // The offsets must fit into this machine's `usize`.
        let to_usize = |n: u64| {
            usize::try_from(n).map_err(|_| file_error(format!("tensor {name:?} is too large for this machine")))
        };
        let stored_tensor = StoredTensor {
            storage: info.kind.map_or_else(unsupported, storage_of),
            shape: info.shape.iter().map(|side| to_usize(*side)).collect::<Result<_>>()?,
            start: to_usize(info.byte_range.0)?,
            end: to_usize(info.byte_range.1)?,
        };
        out.tensors.insert(name, stored_tensor);
    }
    Ok(out)
}

fn unsupported(number: u32) -> StorageType {
    StorageType::Unsupported(format!("ggml type {number}"))
}

fn storage_of(kind: gguf::Kind) -> StorageType {
    let block = match kind.name {
        "f32" => return StorageType::Floats(FloatFormat::F32),
        "f16" => return StorageType::GgufHalf(FloatFormat::F16),
        "bf16" => return StorageType::GgufHalf(FloatFormat::Bf16),
        "q4_0" => GgmlDType::Q4_0,
        "q4_1" => GgmlDType::Q4_1,
        "q5_0" => GgmlDType::Q5_0,
        "q5_1" => GgmlDType::Q5_1,
        "q8_0" => GgmlDType::Q8_0,
        "q2_k" => GgmlDType::Q2K,
        "q3_k" => GgmlDType::Q3K,
        "q4_k" => GgmlDType::Q4K,
        "q5_k" => GgmlDType::Q5K,
        "q6_k" => GgmlDType::Q6K,
        other => return StorageType::Unsupported(other.to_owned()),
    };
    StorageType::GgmlBlocks(block, kind.name)
}
