//! Reading numbers at places in a file, on all threads, into memory that was not written before.

use crate::error::{EngineError, Result};
use crate::nn::quant::Code;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::fs::File;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

/// Bytes that one thread reads before it takes the next.
const SHARE: usize = 2 << 20;
/// Numbers that are converted at a time.
const FEW: usize = 16 << 10;

/// How a file stores a number by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    F64,
    F32,
    F16,
    Bf16,
    /// 8-bit floats: see [`Code`].
    E4m3,
    E5m2,
}

impl Number {
    /// Bytes of one.
    pub(super) fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }

    /// What its codes are, of an 8-bit float.
    pub(super) fn code(self) -> Option<Code> {
        match self {
            Self::E4m3 => Some(Code::E4m3),
            Self::E5m2 => Some(Code::E5m2),
            _ => None,
        }
    }
}

/// An open file of which parts are read.
pub(super) struct Bytes {
    path: PathBuf,
    file: File,
}

impl Bytes {
    pub(super) fn new(path: &Path, file: File) -> Self {
        Self {
            path: path.to_path_buf(),
            file,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// So many bytes as they are.
    pub(super) fn read(&self, start: usize, count: usize) -> Result<Vec<u8>> {
        filled(count, |bytes| self.fill(bytes, start))
    }

    /// So many numbers in float32.
    pub(super) fn floats(&self, stored: Number, start: usize, count: usize) -> Result<Vec<f32>> {
        let size = stored.size();
        filled(count, |out| {
            if stored == Number::F32 && cfg!(target_endian = "little") {
                return self.fill(as_bytes(out), start);
            }
            shared(out, SHARE / size, |offset, part| {
                self.convert(stored, start + offset * size, part)
            })
        })
    }

    /// All of these bytes, on all threads.
    pub(super) fn fill(&self, bytes: &mut [MaybeUninit<u8>], at: usize) -> Result<()> {
        shared(bytes, SHARE, |offset, part| {
            self.fill_part(part, at + offset)?;
            Ok(())
        })
    }

    /// All of these bytes, whatever they held.
    pub(super) fn fill_part<'a>(&self, bytes: &'a mut [MaybeUninit<u8>], at: usize) -> Result<&'a mut [u8]> {
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

    /// Numbers in float32, a few at a time, so that their bytes stay near.
    fn convert(&self, stored: Number, start: usize, out: &mut [MaybeUninit<f32>]) -> Result<()> {
        let size = stored.size();
        let mut near = Vec::with_capacity(FEW * size);
        let (mut halves, mut floats) = (Vec::with_capacity(FEW), vec![0f32; FEW]);
        let table = stored.code().map(|code| code.table()).unwrap_or_default();
        for (i, out) in out.chunks_mut(FEW).enumerate() {
            let bytes = &mut near.spare_capacity_mut()[..out.len() * size];
            let bytes = self.fill_part(bytes, start + i * FEW * size)?;
            let floats = &mut floats[..out.len()];
            match stored {
                Number::F16 => {
                    halves.clear();
                    halves.extend(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)));
                    halves.convert_to_f32_slice(floats);
                }
                Number::Bf16 => each(bytes, floats, |b| bf16::from_le_bytes(b).to_f32()),
                Number::F64 => each(bytes, floats, |b| f64::from_le_bytes(b) as f32),
                Number::F32 => each(bytes, floats, f32::from_le_bytes),
                Number::E4m3 | Number::E5m2 => each(bytes, floats, |[code]| {
                    table.get(usize::from(code)).copied().unwrap_or_default()
                }),
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
pub(super) fn filled<T: Copy>(count: usize, fill: impl FnOnce(&mut [MaybeUninit<T>]) -> Result<()>) -> Result<Vec<T>> {
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
