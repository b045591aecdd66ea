//! One safetensors file: its header is checked before anything is read, and tensors are read one by one when they are
//! asked for. Nothing of them stays mapped: a process holds each number once, in the tensor that it became.

use crate::error::{EngineError, Result};
use candle_core::{DType, Device, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An open safetensors file.
pub(super) struct SafetensorsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: usize,
}

/// Read at a time.
const CHUNK: usize = 64 << 10;

impl SafetensorsFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let wrong = |reason: String| EngineError::WeightsFile {
            path: path.to_path_buf(),
            reason,
        };
        let file = File::open(path).map_err(|e| EngineError::io(path, e))?;
        let info = file.metadata().map_err(|e| EngineError::io(path, e))?;
        if info.is_dir() {
            return Err(EngineError::io(path, std::io::ErrorKind::IsADirectory.into()));
        }
        if info.len() == 0 {
            return Err(wrong("the file is empty: download or copy it again".into()));
        }
        #[expect(
            unsafe_code,
            reason = "the parser of headers wants the whole file, of which it looks at the header only: mapped for as long \
            as that takes, in which nothing may shorten it, as holds for downloaded models and our content-addressed cache"
        )]
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| EngineError::io(path, e))?;
        if let Some(error) = mislabelled(path, &map) {
            return Err(error);
        }
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|e| wrong(explain(&e, &map)))?;
        // One side of zero hides from the length of the file how long the others are; they still have to be counted.
        let countable = |sides: &[usize]| {
            let mut sides = sides.iter().filter(|side| **side > 0);
            sides.try_fold(1_usize, |all, side| all.checked_mul(*side)).is_some()
        };
        if let Some((name, info)) = metadata.tensors().iter().find(|(_, info)| !countable(&info.shape)) {
            return Err(wrong(format!(
                "tensor {name:?} has the impossible shape {:?}: download or copy it again",
                info.shape
            )));
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            metadata,
            data_start: header + 8,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Name, dtype and shape of every tensor.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| (name, info.shape.clone()))
    }

    /// The free-form metadata of the header.
    pub(super) fn user_metadata(&self) -> Vec<(String, String)> {
        let Some(map) = self.metadata.metadata() else {
            return Vec::new();
        };
        let mut pairs: Vec<_> = map.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        pairs.sort();
        pairs
    }

    /// Reads one tensor as `dtype`; `shape` replaces the stored one and has as many elements.
    pub(super) fn read(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let (stored, start, end) = self.place(name)?;
        if device.is_cpu() && dtype == DType::F32 {
            return Ok(Tensor::from_vec(self.floats(stored, start, end)?, shape, device)?);
        }
        let mut bytes = vec![0; end - start];
        self.fill(&mut bytes, start)?;
        Ok(Tensor::from_raw_buffer(&bytes, stored, shape, device)?.to_dtype(dtype)?)
    }

    /// Reads some rows of a tensor of two axes, in this order, as `dtype`: [rows, width].
    pub(super) fn rows(&self, name: &str, rows: &[u32], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let (stored, start, end) = self.place(name)?;
        let row_bytes = width * stored.size_in_bytes();
        let mut bytes = vec![0; rows.len() * row_bytes];
        for (row, part) in rows.iter().zip(bytes.chunks_mut(row_bytes.max(1))) {
            let at = start + *row as usize * row_bytes;
            if at + row_bytes > end {
                return Err(EngineError::bad_input(format!("`{name}` has no row {row}")));
            }
            self.fill(part, at)?;
        }
        Ok(Tensor::from_raw_buffer(&bytes, stored, &[rows.len(), width], device)?.to_dtype(dtype)?)
    }

    /// How a tensor is stored, and where it begins and ends in the file.
    fn place(&self, name: &str) -> Result<(DType, usize, usize)> {
        let info = self.metadata.info(name).ok_or_else(|| EngineError::MissingTensor {
            path: self.path.clone(),
            name: name.to_owned(),
            nearest: None,
        })?;
        use safetensors::Dtype as D;
        let stored = match info.dtype {
            D::F32 => DType::F32,
            D::F16 => DType::F16,
            D::BF16 => DType::BF16,
            D::F64 => DType::F64,
            other => {
                return Err(EngineError::WeightsFile {
                    path: self.path.clone(),
                    reason: format!("tensor `{name}` is stored as {other:?}; only F32, F16, BF16 and F64 work"),
                });
            }
        };
        let (start, end) = info.data_offsets;
        Ok((stored, self.data_start + start, self.data_start + end))
    }

    fn fill(&self, bytes: &mut [u8], at: usize) -> Result<()> {
        self.file
            .read_exact_at(bytes, at as u64)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => EngineError::WeightsFile {
                    path: self.path.clone(),
                    reason: "the file became shorter while it was in use: download or copy it again".into(),
                },
                _ => EngineError::io(&self.path, error),
            })
    }

    fn floats(&self, stored: DType, start: usize, end: usize) -> Result<Vec<f32>> {
        let mut out = Vec::with_capacity((end - start) / stored.size_in_bytes());
        let mut chunk = vec![0; CHUNK.min(end - start)];
        let mut halves = Vec::new();
        for at in (start..end).step_by(CHUNK) {
            let bytes = &mut chunk[..CHUNK.min(end - at)];
            self.fill(bytes, at)?;
            match stored {
                DType::F16 => {
                    halves.clear();
                    halves.extend(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)));
                    let before = out.len();
                    out.resize(before + halves.len(), 0.0);
                    halves.convert_to_f32_slice(&mut out[before..]);
                }
                DType::BF16 => out.extend(
                    bytes
                        .as_chunks::<2>()
                        .0
                        .iter()
                        .map(|b| bf16::from_le_bytes(*b).to_f32()),
                ),
                DType::F64 => out.extend(bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32)),
                _ => out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
            }
        }
        Ok(out)
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
    if start.starts_with(b"GGUF") {
        return wrong("this is a GGUF file, not safetensors: get the .safetensors file of the same model");
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
