//! One file of weights: its header is checked before anything is read, and tensors are read one by one when they are
//! asked for. Nothing of them stays mapped: a process holds each number once, in the tensor that it became.

use super::bytes::{Bytes, Number, filled};
use super::{gguf, safetensors};
use crate::error::{EngineError, Result};
use crate::nn::quant::Quantized;
use aitk_common::fsutil::regular;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// How a tensor is stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// Number by number.
    Numbers(Number),
    /// The same in a GGUF file, of 16 bits: a layer may keep them so.
    Halves(Number),
    /// Blocks of GGUF, and what it calls them.
    Blocks(GgmlDType, &'static str),
    /// Bytes that are no numbers by themselves.
    Bytes,
    /// Whole numbers of 8 bits.
    Signed,
    /// What cannot be read here, by its name in the file.
    Other(String),
}

/// Where a tensor lies, and as what.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) kind: Kind,
    pub(super) shape: Vec<usize>,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// What a header says.
#[derive(Default)]
pub(super) struct Table {
    pub(super) tensors: BTreeMap<String, Place>,
    /// By key.
    pub(super) metadata: BTreeMap<String, String>,
}

/// An open file of weights, safetensors or GGUF.
pub(super) struct TensorFile {
    bytes: Bytes,
    table: Table,
    is_gguf: bool,
}

impl TensorFile {
    /// Opens a file; what it is its first bytes say, whatever its name.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (mut file, _) = regular::open(path).map_err(|e| EngineError::io(path, e))?;
        let info = file.metadata().map_err(|e| EngineError::io(path, e))?;
        if info.is_dir() {
            return Err(EngineError::io(path, std::io::ErrorKind::IsADirectory.into()));
        }
        if info.len() == 0 {
            return Err(EngineError::WeightsFile {
                path: path.to_path_buf(),
                reason: "the file is empty: download or copy it again".into(),
            });
        }
        let mut first = Vec::new();
        let read = file.by_ref().take(4).read_to_end(&mut first);
        read.map_err(|e| EngineError::io(path, e))?;
        let is_gguf = first == *aitk_common::gguf::MAGIC;
        let table = match is_gguf {
            true => gguf::header(path, &file, info.len())?,
            false => safetensors::header(path, &file)?,
        };
        Ok(Self {
            bytes: Bytes::new(path, file),
            table,
            is_gguf,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.bytes.path()
    }

    /// Name and place of every tensor, by name.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&String, &Place)> {
        self.table.tensors.iter()
    }

    /// The free-form metadata of the header, by key.
    pub(super) fn user_metadata(&self) -> Vec<(String, String)> {
        let pairs = self.table.metadata.iter();
        pairs.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Reads one tensor as `dtype`; `shape` replaces the stored one and has as many elements.
    pub(super) fn read(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let place = self.place(name)?;
        let (start, length) = (place.start, place.end - place.start);
        match place.kind {
            Kind::Numbers(number) | Kind::Halves(number) => {
                let Some(stored) = native(number).filter(|_| !device.is_cpu() || dtype != DType::F32) else {
                    let floats = self.bytes.floats(number, start, length / number.size())?;
                    return Ok(Tensor::from_vec(floats, shape, device)?.to_dtype(dtype)?);
                };
                let bytes = self.bytes.read(start, length)?;
                Ok(Tensor::from_raw_buffer(&bytes, stored, shape, device)?.to_dtype(dtype)?)
            }
            Kind::Blocks(..) if length == 0 => Ok(Tensor::zeros(shape, dtype, device)?),
            Kind::Blocks(block, kind) => {
                let bytes = self.bytes.read(start, length)?;
                Ok(Quantized::from_blocks(kind, block, &bytes, shape, dtype, device)?.dequantize()?)
            }
            _ => Err(self.unreadable(name, place)),
        }
    }

    /// Reads some rows of a tensor of two axes, in this order, as `dtype`: [rows, width].
    pub(super) fn rows(&self, name: &str, rows: &[u32], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let place = self.place(name)?;
        let row_bytes = match &place.kind {
            Kind::Numbers(number) | Kind::Halves(number) => width * number.size(),
            Kind::Blocks(block, _) if width.is_multiple_of(block.block_size()) => {
                width / block.block_size() * block.type_size()
            }
            Kind::Blocks(..) => {
                return Ok(self
                    .read(name, &place.shape, dtype, device)?
                    .index_select(&Tensor::new(rows, device)?, 0)?);
            }
            _ => return Err(self.unreadable(name, place)),
        };
        let bytes = filled(rows.len() * row_bytes, |bytes| {
            for (row, part) in rows.iter().zip(bytes.chunks_mut(row_bytes.max(1))) {
                let at = place.start + *row as usize * row_bytes;
                if at + row_bytes > place.end {
                    return Err(EngineError::bad_input(format!("`{name}` has no row {row}")));
                }
                self.bytes.fill_part(part, at)?;
            }
            Ok(())
        })?;
        let shape = [rows.len(), width];
        match place.kind {
            _ if bytes.is_empty() => Ok(Tensor::zeros(&shape, dtype, device)?),
            Kind::Blocks(block, kind) => {
                Ok(Quantized::from_blocks(kind, block, &bytes, &shape, dtype, device)?.dequantize()?)
            }
            Kind::Numbers(number) | Kind::Halves(number) => match (native(number), number.code()) {
                (Some(stored), _) => Ok(Tensor::from_raw_buffer(&bytes, stored, &shape, device)?.to_dtype(dtype)?),
                (None, code) => {
                    let table = code.map(|code| code.table()).unwrap_or_default();
                    let value = |code: &u8| table.get(usize::from(*code)).copied().unwrap_or_default();
                    let floats: Vec<f32> = bytes.iter().map(value).collect();
                    Ok(Tensor::from_vec(floats, &shape, device)?.to_dtype(dtype)?)
                }
            },
            _ => Err(self.unreadable(name, place)),
        }
    }

    /// The bytes of a tensor as they lie in the file.
    pub(super) fn raw(&self, name: &str) -> Result<Vec<u8>> {
        let place = self.place(name)?;
        self.bytes.read(place.start, place.end - place.start)
    }

    /// The numbers of a tensor in float32, whatever its shape.
    pub(super) fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let place = self.place(name)?;
        match place.kind {
            Kind::Numbers(number) | Kind::Halves(number) => {
                self.bytes
                    .floats(number, place.start, (place.end - place.start) / number.size())
            }
            _ => Err(self.unreadable(name, place)),
        }
    }

    /// Where a tensor lies.
    fn place(&self, name: &str) -> Result<&Place> {
        self.table.tensors.get(name).ok_or_else(|| EngineError::MissingTensor {
            path: self.path().to_path_buf(),
            name: name.to_owned(),
            nearest: None,
        })
    }

    fn unreadable(&self, name: &str, place: &Place) -> EngineError {
        let stored = match &place.kind {
            Kind::Other(kind) => kind,
            Kind::Bytes => "U8",
            _ => "I8",
        };
        let works = match self.is_gguf {
            true => aitk_common::gguf::Kind::names(),
            false => "F32, F16, BF16, F64, F8_E4M3, F8_E5M2, and 4 and 8 bits as bitsandbytes writes them".to_owned(),
        };
        EngineError::WeightsFile {
            path: self.path().to_path_buf(),
            reason: format!("tensor `{name}` is stored as {stored}; these work: {works}"),
        }
    }
}

/// What candle calls it, if it has it.
fn native(number: Number) -> Option<DType> {
    match number {
        Number::F64 => Some(DType::F64),
        Number::F32 => Some(DType::F32),
        Number::F16 => Some(DType::F16),
        Number::Bf16 => Some(DType::BF16),
        Number::E4m3 | Number::E5m2 => None,
    }
}
