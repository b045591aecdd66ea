//! The header of a GGUF file as a table of tensors.

use super::bytes::Number;
use super::file::{Kind, Place, Table};
use crate::error::{EngineError, Result};
use aitk_common::gguf::{self, Header};
use candle_core::quantized::GgmlDType;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

/// What the file, of `length` bytes, says of its tensors and of itself.
pub(super) fn header(path: &Path, mut file: &File, length: u64) -> Result<Table> {
    let wrong = |reason: String| EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    };
    file.seek(SeekFrom::Start(0)).map_err(|e| EngineError::io(path, e))?;
    let header = Header::read(file, length).map_err(|e| match e.kind() {
        std::io::ErrorKind::InvalidData => wrong(e.to_string()),
        _ => EngineError::io(path, e),
    })?;
    let mut table = Table {
        metadata: header.texts,
        ..Table::default()
    };
    for (name, info) in header.tensors {
        // A header is checked against the file's length and this machine's counting.
        let reach =
            |n: u64| usize::try_from(n).map_err(|_| wrong(format!("tensor {name:?} is too large for this machine")));
        let place = Place {
            kind: info.kind.map_or_else(unknown, kind),
            shape: info.shape.iter().map(|side| reach(*side)).collect::<Result<_>>()?,
            start: reach(info.byte_range.0)?,
            end: reach(info.byte_range.1)?,
        };
        table.tensors.insert(name, place);
    }
    Ok(table)
}

fn unknown(number: u32) -> Kind {
    Kind::Other(format!("kind {number} of ggml"))
}

fn kind(kind: gguf::Kind) -> Kind {
    let block = match kind.name {
        "f32" => return Kind::Numbers(Number::F32),
        "f16" => return Kind::Halves(Number::F16),
        "bf16" => return Kind::Halves(Number::Bf16),
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
        other => return Kind::Other(other.to_owned()),
    };
    Kind::Blocks(block, kind.name)
}
