//! Parallel reads from a file into uninitialised memory, with conversion to float32.

use crate::error::{EngineError, Result};
use crate::quant::Code;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::fs::File;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

/// Bytes per parallel read.
const READ_CHUNK: usize = 2 << 20;
/// Numbers that are converted at a time.
const CONVERT_CHUNK: usize = 16 << 10;

/// The format of a floating-point number in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FloatFormat {
    F64,
    F32,
    F16,
    Bf16,
    /// An 8-bit float; see [`Code`].
    E4m3,
    /// An 8-bit float; see [`Code`].
    E5m2,
}

impl FloatFormat {
    /// Bytes per number.
    pub(super) fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }

    /// The code of an 8-bit float; `None` for other formats.
    pub(super) fn code(self) -> Option<Code> {
        match self {
            Self::E4m3 => Some(Code::E4m3),
            Self::E5m2 => Some(Code::E5m2),
            _ => None,
        }
    }
}

/// An open file and its path.
pub(super) struct FileReader {
    path: PathBuf,
    file: File,
}

impl FileReader {
    pub(super) fn new(path: &Path, file: File) -> Self {
        Self {
            path: path.to_path_buf(),
            file,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads `count` bytes from offset `start`.
    pub(super) fn read(&self, start: usize, count: usize) -> Result<Vec<u8>> {
        vec_filled_by(count, |bytes| self.fill(bytes, start))
    }

    /// Reads `count` numbers from offset `start` and converts them to float32.
    pub(super) fn read_floats(&self, format: FloatFormat, start: usize, count: usize) -> Result<Vec<f32>> {
        let size = format.size();
        vec_filled_by(count, |out| {
            if format == FloatFormat::F32 && cfg!(target_endian = "little") {
                return self.fill(as_uninit_bytes(out), start);
            }
            for_each_chunk(out, READ_CHUNK / size, |offset, chunk| {
                self.convert(format, start + offset * size, chunk)
            })
        })
    }

    /// Asks the system to read bytes into its page cache. Where it cannot, they are read when they are needed.
    pub(super) fn read_ahead(&self, start: usize, count: usize) {
        // To the system, a length of 0 means the rest of the file.
        if count == 0 {
            return;
        }
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(
            &self.file,
            start as u64,
            std::num::NonZeroU64::new(count as u64),
            rustix::fs::Advice::WillNeed,
        );
        #[cfg(target_vendor = "apple")]
        let _ = rustix::fs::fcntl_rdadvise(&self.file, start as u64, count as u64);
        #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
        let _ = (start, count);
    }

    /// Fills `bytes` from offset `at`, on all threads.
    pub(super) fn fill(&self, bytes: &mut [MaybeUninit<u8>], at: usize) -> Result<()> {
        for_each_chunk(bytes, READ_CHUNK, |offset, chunk| {
            self.fill_on_this_thread(chunk, at + offset)?;
            Ok(())
        })
    }

    /// Fills `bytes` from offset `at`, and returns them as initialised.
    pub(super) fn fill_on_this_thread<'a>(&self, bytes: &'a mut [MaybeUninit<u8>], at: usize) -> Result<&'a mut [u8]> {
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::pread(&self.file, &mut bytes[filled..], (at + filled) as u64) {
                Ok(([], _)) => {
                    return Err(EngineError::WeightsFile {
                        path: self.path.clone(),
                        reason: "the file became shorter while it was in use: download or copy it again".into(),
                    });
                }
                Ok((read, _)) => filled += read.len(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(EngineError::io(&self.path, error.into())),
            }
        }
        #[expect(unsafe_code, reason = "a buffer that the system call initialised")]
        // SAFETY: the loop ends only when `pread` has written every byte of `bytes`.
        Ok(unsafe { bytes.assume_init_mut() })
    }

    /// Reads numbers and converts them to float32, `CONVERT_CHUNK` at a time, so that the bytes stay in the CPU's
    /// cache.
    fn convert(&self, format: FloatFormat, start: usize, out: &mut [MaybeUninit<f32>]) -> Result<()> {
        let size = format.size();
        let mut buffer = Vec::with_capacity(CONVERT_CHUNK * size);
        let (mut halves, mut values) = (Vec::with_capacity(CONVERT_CHUNK), vec![0f32; CONVERT_CHUNK]);
        let table = format.code().map(|code| code.table()).unwrap_or_default();
        for (i, out) in out.chunks_mut(CONVERT_CHUNK).enumerate() {
            let bytes = &mut buffer.spare_capacity_mut()[..out.len() * size];
            let bytes = self.fill_on_this_thread(bytes, start + i * CONVERT_CHUNK * size)?;
            let values = &mut values[..out.len()];
            match format {
                FloatFormat::F16 => {
                    halves.clear();
                    halves.extend(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)));
                    halves.convert_to_f32_slice(values);
                }
                FloatFormat::Bf16 => convert_each(bytes, values, |b| bf16::from_le_bytes(b).to_f32()),
                FloatFormat::F64 => convert_each(bytes, values, |b| f64::from_le_bytes(b) as f32),
                FloatFormat::F32 => convert_each(bytes, values, f32::from_le_bytes),
                FloatFormat::E4m3 | FloatFormat::E5m2 => convert_each(bytes, values, |[code]| {
                    table.get(usize::from(code)).copied().unwrap_or_default()
                }),
            }
            out.write_copy_of_slice(values);
        }
        Ok(())
    }
}

/// Converts each group of `N` bytes to one number.
fn convert_each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = convert(*bytes);
    }
}

/// Creates a vector of `count` elements without zeroing it first. `fill` must write every element, or fail.
pub(super) fn vec_filled_by<T: Copy>(
    count: usize,
    fill: impl FnOnce(&mut [MaybeUninit<T>]) -> Result<()>,
) -> Result<Vec<T>> {
    let mut all = Vec::with_capacity(count);
    fill(&mut all.spare_capacity_mut()[..count])?;
    #[expect(unsafe_code, reason = "a vector that `fill` initialised")]
    // SAFETY: the capacity is at least `count`, and every caller's `fill` writes each element or returns an error.
    unsafe {
        all.set_len(count);
    }
    Ok(all)
}

/// Runs `f` on chunks of `count` elements in parallel; the first argument is the index of the chunk's first element.
fn for_each_chunk<T: Send>(
    all: &mut [T],
    count: usize,
    f: impl Fn(usize, &mut [T]) -> Result<()> + Send + Sync,
) -> Result<()> {
    if all.len() <= count {
        return f(0, all);
    }
    let chunks = all.par_chunks_mut(count).enumerate();
    chunks.try_for_each(|(i, chunk)| f(i * count, chunk))
}

/// Views uninitialised numbers as uninitialised bytes.
fn as_uninit_bytes(numbers: &mut [MaybeUninit<f32>]) -> &mut [MaybeUninit<u8>] {
    #[expect(unsafe_code, reason = "a slice of the same memory with another element type")]
    // SAFETY: pointer and length in bytes come from one slice, which is borrowed mutably for as long as the result.
    // Bytes need no alignment, `MaybeUninit<u8>` allows any content, and every byte pattern that is written is a valid
    // `f32`.
    unsafe {
        std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), std::mem::size_of_val(numbers))
    }
}
