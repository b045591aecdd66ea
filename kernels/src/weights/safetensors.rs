//! Reads and checks the header of a safetensors file.

use super::bytes::FloatFormat;
use super::header::{FileHeader, StorageType, StoredTensor};
use crate::error::{EngineError, Result};
use safetensors::Dtype;
use safetensors::tensor::{SafeTensorError, SafeTensors};
use std::fs::File;
use std::path::Path;

/// Reads and checks the header.
pub(super) fn read_header(path: &Path, file: &File) -> Result<FileHeader> {
    let file_error = |reason: String| EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    };
    #[expect(
        unsafe_code,
        reason = "`SafeTensors::read_metadata` takes the whole file as a slice, but reads only its header"
    )]
    // SAFETY: the mapping is read-only and lives only in this function. No process may shorten or write the file
    // meanwhile, which holds for downloaded models and the content-addressed cache.
    let map = unsafe { memmap2::Mmap::map(file) }.map_err(|e| EngineError::io(path, e))?;
    if let Some(error) = check_file_type(path, &map) {
        return Err(error);
    }
    let (header_len, metadata) = SafeTensors::read_metadata(&map).map_err(|e| file_error(describe_error(&e, &map)))?;
    // With a dimension of 0 the file's length does not bound the other dimensions, so check that their product fits.
    let has_countable_elements = |sides: &[usize]| {
        let mut sides = sides.iter().filter(|side| **side > 0);
        sides.try_fold(1_usize, |all, side| all.checked_mul(*side)).is_some()
    };
    let mut out = FileHeader::default();
    for (name, info) in metadata.tensors() {
        if !has_countable_elements(&info.shape) {
            return Err(file_error(format!(
                "tensor {name:?} has the impossible shape {:?}: download or copy it again",
                info.shape
            )));
        }
        let (start, end) = info.data_offsets;
        let stored_tensor = StoredTensor {
            storage: storage_of(info.dtype),
            shape: info.shape.clone(),
            start: header_len + 8 + start,
            end: header_len + 8 + end,
        };
        out.tensors.insert(name, stored_tensor);
    }
    if let Some(pairs) = metadata.metadata() {
        out.metadata = pairs.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    }
    Ok(out)
}

fn storage_of(dtype: Dtype) -> StorageType {
    match dtype {
        Dtype::F64 => StorageType::Floats(FloatFormat::F64),
        Dtype::F32 => StorageType::Floats(FloatFormat::F32),
        Dtype::F16 => StorageType::Floats(FloatFormat::F16),
        Dtype::BF16 => StorageType::Floats(FloatFormat::Bf16),
        Dtype::F8_E4M3 => StorageType::Floats(FloatFormat::E4m3),
        Dtype::F8_E5M2 => StorageType::Floats(FloatFormat::E5m2),
        Dtype::U8 => StorageType::Bytes,
        Dtype::I8 => StorageType::Int8,
        other => StorageType::Unsupported(format!("{other:?}")),
    }
}

/// Returns an error if the file is a pickle, a Git LFS pointer or a web page.
fn check_file_type(path: &Path, bytes: &[u8]) -> Option<EngineError> {
    let file_error = |reason: &str| {
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
        return file_error("this is a Git LFS pointer, not the weights: run `git lfs pull` in the model's folder");
    }
    let text = String::from_utf8_lossy(start).trim_start().to_lowercase();
    if text.starts_with("<!doctype") || text.starts_with("<html") {
        return file_error(
            "this is a web page, not weights: the download failed (a login may be needed); download it again",
        );
    }
    None
}

/// Whether a `{` follows the 8 bytes of the header's length, as in a safetensors file.
fn looks_like_header(start: &[u8]) -> bool {
    start.get(8) == Some(&b'{')
}

fn describe_error(error: &SafeTensorError, bytes: &[u8]) -> String {
    let advice = "download or copy it again";
    match error {
        SafeTensorError::HeaderTooSmall => {
            format!("the file has only {} bytes, so it is cut off: {advice}", bytes.len())
        }
        SafeTensorError::HeaderTooLarge => {
            "not a safetensors file: its first 8 bytes give a header of more than 100 MB; \
             if it is a checkpoint in another format, get its .safetensors version"
                .to_owned()
        }
        SafeTensorError::InvalidHeaderLength if looks_like_header(bytes) => {
            format!("the file is cut off within its header: {advice}")
        }
        SafeTensorError::InvalidHeaderLength => {
            "not a safetensors file (its first 8 bytes are not the length of a header)".to_owned()
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            format!("the file's length does not match its header, so it is cut off or damaged: {advice}")
        }
        other => format!("not a valid safetensors file ({other}): {advice}"),
    }
}
