//! One safetensors file: its header is checked before anything is read, and tensors are read one by one when they are
//! asked for. Nothing of them stays mapped: a process holds each number once, in the tensor that it became.

use crate::error::{EngineError, Result};
use candle_core::{DType, Device, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors};
use std::fs::File;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

/// An open safetensors file.
pub(super) struct SafetensorsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: usize,
}

/// Bytes that one thread reads before it takes the next.
const SHARE: usize = 2 << 20;
/// Numbers that are converted at a time.
const FEW: usize = 16 << 10;

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
        let bytes = filled(end - start, |bytes| self.fill(bytes, start))?;
        Ok(Tensor::from_raw_buffer(&bytes, stored, shape, device)?.to_dtype(dtype)?)
    }

    /// Reads some rows of a tensor of two axes, in this order, as `dtype`: [rows, width].
    pub(super) fn rows(&self, name: &str, rows: &[u32], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let (stored, start, end) = self.place(name)?;
        let row_bytes = width * stored.size_in_bytes();
        let bytes = filled(rows.len() * row_bytes, |bytes| {
            for (row, part) in rows.iter().zip(bytes.chunks_mut(row_bytes.max(1))) {
                let at = start + *row as usize * row_bytes;
                if at + row_bytes > end {
                    return Err(EngineError::bad_input(format!("`{name}` has no row {row}")));
                }
                self.fill(part, at)?;
            }
            Ok(())
        })?;
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

    /// All of these bytes, on all threads.
    fn fill(&self, bytes: &mut [MaybeUninit<u8>], at: usize) -> Result<()> {
        shared(bytes, SHARE, |offset, part| {
            self.fill_part(part, at + offset)?;
            Ok(())
        })
    }

    /// All of these bytes, whatever they held.
    fn fill_part<'a>(&self, bytes: &'a mut [MaybeUninit<u8>], at: usize) -> Result<&'a mut [u8]> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pread(&self.file, &mut bytes[done..], (at + done) as u64) {
                Ok(([], _)) => {
                    return Err(EngineError::WeightsFile {
                        path: self.path.clone(),
                        reason: "the file became shorter while it was in use: download or copy it again".into(),
                    });
                }
                Ok((read, _)) => done += read.len(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(EngineError::io(&self.path, error.into())),
            }
        }
        #[expect(unsafe_code, reason = "the loop ends when all of them were read")]
        Ok(unsafe { bytes.assume_init_mut() })
    }

    fn floats(&self, stored: DType, start: usize, end: usize) -> Result<Vec<f32>> {
        let size = stored.size_in_bytes();
        filled((end - start) / size, |out| {
            if stored == DType::F32 && cfg!(target_endian = "little") {
                return self.fill(as_bytes(out), start);
            }
            shared(out, SHARE / size, |offset, part| {
                self.convert(stored, start + offset * size, part)
            })
        })
    }

    /// Numbers in float32, a few at a time, so that their bytes stay near.
    fn convert(&self, stored: DType, start: usize, out: &mut [MaybeUninit<f32>]) -> Result<()> {
        let size = stored.size_in_bytes();
        let mut near = Vec::with_capacity(FEW * size);
        let (mut halves, mut floats) = (Vec::with_capacity(FEW), vec![0f32; FEW]);
        for (i, out) in out.chunks_mut(FEW).enumerate() {
            let bytes = &mut near.spare_capacity_mut()[..out.len() * size];
            let bytes = self.fill_part(bytes, start + i * FEW * size)?;
            let floats = &mut floats[..out.len()];
            match stored {
                DType::F16 => {
                    halves.clear();
                    halves.extend(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)));
                    halves.convert_to_f32_slice(floats);
                }
                DType::BF16 => each(bytes, floats, |b| bf16::from_le_bytes(b).to_f32()),
                DType::F64 => each(bytes, floats, |b| f64::from_le_bytes(b) as f32),
                _ => each(bytes, floats, f32::from_le_bytes),
            }
            out.write_copy_of_slice(floats);
        }
        Ok(())
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = number(*bytes);
    }
}

/// So many numbers, all of which `fill` writes, unless it fails. No zeros are written first.
fn filled<T: Copy>(count: usize, fill: impl FnOnce(&mut [MaybeUninit<T>]) -> Result<()>) -> Result<Vec<T>> {
    let mut all = Vec::with_capacity(count);
    fill(&mut all.spare_capacity_mut()[..count])?;
    #[expect(
        unsafe_code,
        reason = "all were written: every `fill` here writes each element or fails"
    )]
    unsafe {
        all.set_len(count);
    }
    Ok(all)
}

/// Runs `f` on parts of so many elements, and where they begin, on all threads.
fn shared<T: Send>(all: &mut [T], count: usize, f: impl Fn(usize, &mut [T]) -> Result<()> + Send + Sync) -> Result<()> {
    if all.len() <= count {
        return f(0, all);
    }
    let parts = all.par_chunks_mut(count).enumerate();
    parts.try_for_each(|(i, part)| f(i * count, part))
}

fn as_bytes(numbers: &mut [MaybeUninit<f32>]) -> &mut [MaybeUninit<u8>] {
    #[expect(
        unsafe_code,
        reason = "the same memory; bytes need no alignment and may be uninitialised"
    )]
    unsafe {
        std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), std::mem::size_of_val(numbers))
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
