//! The header of a safetensors file, checked before anything is read.

use super::bytes::Number;
use super::file::{Kind, Place, Table};
use crate::error::{EngineError, Result};
use safetensors::Dtype;
use safetensors::tensor::{SafeTensorError, SafeTensors};
use std::fs::File;
use std::path::Path;

/// What the file says of its tensors and of itself.
pub(super) fn header(path: &Path, file: &File) -> Result<Table> {
    let wrong = |reason: String| EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    };
    #[expect(
        unsafe_code,
        reason = "the parser of headers wants the whole file, of which it looks at the header only: mapped for as long \
        as that takes, in which nothing may shorten it, as holds for downloaded models and our content-addressed cache"
    )]
    let map = unsafe { memmap2::Mmap::map(file) }.map_err(|e| EngineError::io(path, e))?;
    if let Some(error) = mislabelled(path, &map) {
        return Err(error);
    }
    let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|e| wrong(explain(&e, &map)))?;
    // One side of zero hides from the length of the file how long the others are; they still have to be counted.
    let countable = |sides: &[usize]| {
        let mut sides = sides.iter().filter(|side| **side > 0);
        sides.try_fold(1_usize, |all, side| all.checked_mul(*side)).is_some()
    };
    let mut table = Table::default();
    for (name, info) in metadata.tensors() {
        if !countable(&info.shape) {
            return Err(wrong(format!(
                "tensor {name:?} has the impossible shape {:?}: download or copy it again",
                info.shape
            )));
        }
        let (start, end) = info.data_offsets;
        let place = Place {
            kind: kind(info.dtype),
            shape: info.shape.clone(),
            start: header + 8 + start,
            end: header + 8 + end,
        };
        table.tensors.insert(name, place);
    }
    if let Some(pairs) = metadata.metadata() {
        table.metadata = pairs.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    }
    Ok(table)
}

fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F64 => Kind::Numbers(Number::F64),
        Dtype::F32 => Kind::Numbers(Number::F32),
        Dtype::F16 => Kind::Numbers(Number::F16),
        Dtype::BF16 => Kind::Numbers(Number::Bf16),
        Dtype::F8_E4M3 => Kind::Numbers(Number::E4m3),
        Dtype::F8_E5M2 => Kind::Numbers(Number::E5m2),
        Dtype::U8 => Kind::Bytes,
        Dtype::I8 => Kind::Signed,
        other => Kind::Other(format!("{other:?}")),
    }
}

/// A file that is something else than its name says.
fn mislabelled(path: &Path, bytes: &[u8]) -> Option<EngineError> {
    let wrong = |reason: &str| {
        Some(EngineError::WeightsFile {
            path: path.to_path_buf(),
            reason: reason.to_owned(),
        })
    };
    let start = &bytes[..bytes.len().min(256)];
    // torch.save writes a zip archive, earlier versions a bare pickle (protocol mark, then a version).
    if start.starts_with(b"PK\x03\x04") || matches!(start, [0x80, 2..=5, ..]) && !looks_like_header(start) {
        return Some(EngineError::Pickle {
            path: path.to_path_buf(),
        });
    }
    if start.starts_with(b"version https://git-lfs") {
        return wrong("this is a Git LFS pointer, not the weights: run `git lfs pull` in the model's folder");
    }
    let text = String::from_utf8_lossy(start).trim_start().to_lowercase();
    if text.starts_with("<!doctype") || text.starts_with("<html") {
        return wrong(
            "this is a web page, not weights: the download failed (a login may be needed); download it again",
        );
    }
    None
}

/// A safetensors file begins with the header's length and then `{`.
fn looks_like_header(start: &[u8]) -> bool {
    start.get(8) == Some(&b'{')
}

fn explain(error: &SafeTensorError, bytes: &[u8]) -> String {
    let again = "download or copy it again";
    match error {
        SafeTensorError::HeaderTooSmall => {
            format!("the file has only {} bytes, so it is cut off: {again}", bytes.len())
        }
        SafeTensorError::HeaderTooLarge => {
            "not a safetensors file: its first 8 bytes give a header of more than 100 MB; \
             if it is a checkpoint in another format, get its .safetensors version"
                .to_owned()
        }
        SafeTensorError::InvalidHeaderLength if looks_like_header(bytes) => {
            format!("the file is cut off within its header: {again}")
        }
        SafeTensorError::InvalidHeaderLength => {
            "not a safetensors file (its first 8 bytes are not the length of a header)".to_owned()
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            format!("the file's length does not match its header, so it is cut off or damaged: {again}")
        }
        other => format!("not a valid safetensors file ({other}): {again}"),
    }
}
