//! One weights file. Its header is checked when it is opened; each tensor is read when it is requested. The file does
//! not stay memory-mapped, so that a process holds each number only once.

use super::bytes::{FileReader, FloatFormat, vec_filled_by};
use super::header::{FileHeader, StorageType, StoredTensor};
use super::stored_bytes::StoredBytes;
use super::{gguf, safetensors};
use crate::device::portable::is_portable;
use crate::error::{EngineError, Result};
use crate::quant::{HalfFormat, Quantized};
use aitk_common::fsutil::regular;
use candle_core::{DType, Device, Tensor};
use std::io::Read;
use std::ops::Range;
use std::path::Path;

/// An open weights file, safetensors or GGUF.
pub(super) struct TensorFile {
    reader: FileReader,
    header: FileHeader,
    is_gguf: bool,
}

impl TensorFile {
    /// Opens a file. The format is recognised by the first bytes, not by the file name.
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
        let header = match is_gguf {
            true => gguf::read_header(path, &file, info.len())?,
            false => safetensors::read_header(path, &file)?,
        };
        Ok(Self {
            reader: FileReader::new(path, file),
            header,
            is_gguf,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.reader.path()
    }

    /// Every tensor, sorted by name.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&String, &StoredTensor)> {
        self.header.tensors.iter()
    }

    /// The free-form metadata of the header, sorted by key.
    pub(super) fn user_metadata(&self) -> Vec<(String, String)> {
        let pairs = self.header.metadata.iter();
        pairs.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Reads a tensor as `dtype`. `shape` replaces the stored shape and must have as many elements.
    pub(super) fn read(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let count = self.stored_tensor(name)?.shape.iter().product();
        Ok(self.read_range(name, 0..count, dtype, device)?.reshape(shape)?)
    }

    /// Reads a tensor onto the CPU, in the dtype of the file.
    pub(super) fn read_as_stored(&self, name: &str) -> Result<Tensor> {
        let stored_tensor = self.stored_tensor(name)?;
        let (shape, start) = (stored_tensor.shape.as_slice(), stored_tensor.start);
        let dtype = match &stored_tensor.storage {
            StorageType::Floats(FloatFormat::F32) => {
                let values = self
                    .reader
                    .read_floats(FloatFormat::F32, start, shape.iter().product())?;
                return Ok(Tensor::from_vec(values, shape, &Device::Cpu)?);
            }
            StorageType::Floats(format) => candle_dtype(*format),
            StorageType::Bytes => Some(DType::U8),
            StorageType::Unsupported(type_name) if type_name == "I64" => Some(DType::I64),
            StorageType::Unsupported(type_name) if type_name == "U32" => Some(DType::U32),
            _ => None,
        };
        let dtype = dtype.ok_or_else(|| self.unsupported_error(name, stored_tensor))?;
        let data = self.reader.read(start, stored_tensor.end.saturating_sub(start))?;
        Ok(Tensor::from_raw_buffer(&data, dtype, shape, &Device::Cpu)?)
    }

    /// Reads these elements of a tensor as `dtype`, one range after the other.
    pub(super) fn read_elements(
        &self,
        name: &str,
        elements: &[Range<usize>],
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let read = |range: &Range<usize>| self.read_range(name, range.clone(), dtype, device);
        let tensor = match elements {
            [only] => read(only)?,
            ranges => Tensor::cat(&ranges.iter().map(read).collect::<Result<Vec<_>>>()?, 0)?,
        };
        Ok(tensor.reshape(shape)?)
    }

    /// Reads elements of a tensor as `dtype`, flat.
    fn read_range(&self, name: &str, elements: Range<usize>, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored_tensor = self.stored_tensor(name)?;
        let count = elements.len();
        match stored_tensor.storage {
            StorageType::Floats(format) | StorageType::GgufHalf(format) => {
                let (start, length) = stored_tensor.byte_range(&elements, 1, format.size());
                let Some(dtype_in_file) =
                    candle_dtype(format).filter(|_| !device.is_cpu() || dtype != DType::F32 || is_portable())
                else {
                    let values = self.reader.read_floats(format, start, count)?;
                    return Ok(Tensor::from_vec(values, count, device)?.to_dtype(dtype)?);
                };
                let data = self.reader.read(start, length)?;
                Ok(Tensor::from_raw_buffer(&data, dtype_in_file, &[count], device)?.to_dtype(dtype)?)
            }
            StorageType::GgmlBlocks(..) if count == 0 => Ok(Tensor::zeros(count, dtype, device)?),
            StorageType::GgmlBlocks(block, type_name) => {
                let size = block.block_size();
                // The blocks that the elements lie in.
                let first = elements.start / size * size;
                let whole = first..elements.end.next_multiple_of(size);
                let (start, length) = stored_tensor.byte_range(&whole, size, block.type_size());
                let data = self.reader.read(start, length)?;
                let flat = Quantized::from_blocks(type_name, block, &data, &[whole.len()], dtype, device)?;
                Ok(flat.dequantize()?.narrow(0, elements.start - first, count)?)
            }
            // A whole number, such as the alpha of a LoRA.
            StorageType::Unsupported(_) | StorageType::Bytes | StorageType::Int8
                if count == 1 && stored_tensor.shape.iter().product::<usize>() == 1 =>
            {
                let data = self.reader.read(
                    stored_tensor.start,
                    stored_tensor.end.saturating_sub(stored_tensor.start),
                )?;
                let number = whole_number(&stored_tensor.storage, &data)
                    .ok_or_else(|| self.unsupported_error(name, stored_tensor))?;
                Ok(Tensor::from_vec(vec![number], 1, device)?.to_dtype(dtype)?)
            }
            _ => Err(self.unsupported_error(name, stored_tensor)),
        }
    }

    /// Reads rows of a two-dimensional tensor as `dtype`, in the given order: [rows, width].
    pub(super) fn read_rows(
        &self,
        name: &str,
        rows: &[u32],
        width: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let stored_tensor = self.stored_tensor(name)?;
        let row_bytes = match &stored_tensor.storage {
            StorageType::Floats(format) | StorageType::GgufHalf(format) => width * format.size(),
            StorageType::GgmlBlocks(block, _) if width.is_multiple_of(block.block_size()) => {
                width / block.block_size() * block.type_size()
            }
            StorageType::GgmlBlocks(..) => {
                return Ok(self
                    .read(name, &stored_tensor.shape, dtype, device)?
                    .index_select(&Tensor::new(rows, device)?, 0)?);
            }
            _ => return Err(self.unsupported_error(name, stored_tensor)),
        };
        let data = vec_filled_by(rows.len() * row_bytes, |buffer| {
            for (row, row_bytes_out) in rows.iter().zip(buffer.chunks_mut(row_bytes.max(1))) {
                let at = stored_tensor.start + *row as usize * row_bytes;
                if at + row_bytes > stored_tensor.end {
                    return Err(EngineError::bad_input(format!("`{name}` has no row {row}")));
                }
                self.reader.fill_on_this_thread(row_bytes_out, at)?;
            }
            Ok(())
        })?;
        let shape = [rows.len(), width];
        match stored_tensor.storage {
            _ if data.is_empty() => Ok(Tensor::zeros(&shape, dtype, device)?),
            StorageType::GgmlBlocks(block, type_name) => {
                Ok(Quantized::from_blocks(type_name, block, &data, &shape, dtype, device)?.dequantize()?)
            }
            StorageType::Floats(format) | StorageType::GgufHalf(format) => {
                match (candle_dtype(format), format.code()) {
                    (Some(dtype_in_file), _) => {
                        Ok(Tensor::from_raw_buffer(&data, dtype_in_file, &shape, device)?.to_dtype(dtype)?)
                    }
                    (None, code) => {
                        let table = code.map(|code| code.table()).unwrap_or_default();
                        let value = |code: &u8| table.get(usize::from(*code)).copied().unwrap_or_default();
                        let values: Vec<f32> = data.iter().map(value).collect();
                        Ok(Tensor::from_vec(values, &shape, device)?.to_dtype(dtype)?)
                    }
                }
            }
            _ => Err(self.unsupported_error(name, stored_tensor)),
        }
    }

    /// Reads a tensor that has no floats, as it is stored. `None`: it has floats.
    pub(super) fn read_stored(&self, name: &str) -> Result<Option<StoredBytes>> {
        let stored_tensor = self.stored_tensor(name)?;
        let type_name = match &stored_tensor.storage {
            StorageType::Bytes => "U8",
            StorageType::Int8 => "I8",
            StorageType::Unsupported(type_name) if !self.is_gguf => type_name,
            StorageType::Unsupported(_) => return Err(self.unsupported_error(name, stored_tensor)),
            StorageType::Floats(_) | StorageType::GgufHalf(_) | StorageType::GgmlBlocks(..) => return Ok(None),
        };
        Ok(Some(StoredBytes {
            type_name: type_name.to_owned(),
            shape: stored_tensor.shape.clone(),
            bytes: self.read_bytes(name)?,
        }))
    }

    /// Reads the bytes of a tensor without conversion.
    pub(super) fn read_bytes(&self, name: &str) -> Result<Vec<u8>> {
        let stored_tensor = self.stored_tensor(name)?;
        self.reader
            .read(stored_tensor.start, stored_tensor.end - stored_tensor.start)
    }

    /// Reads the bytes of these elements of a tensor without conversion, one range after the other. `per_block` elements
    /// take `block_bytes` bytes; a range begins and ends with a block, or with the tensor.
    pub(super) fn read_blocks(
        &self,
        name: &str,
        elements: &[Range<usize>],
        per_block: usize,
        block_bytes: usize,
    ) -> Result<Vec<u8>> {
        let stored_tensor = self.stored_tensor(name)?;
        let read = |range: &Range<usize>| {
            let (start, length) = stored_tensor.byte_range(range, per_block, block_bytes);
            self.reader.read(start, length)
        };
        match elements {
            [only] => read(only),
            ranges => Ok(ranges.iter().map(read).collect::<Result<Vec<_>>>()?.concat()),
        }
    }

    /// Reads the numbers of a tensor in float32, flattened.
    pub(super) fn read_floats(&self, name: &str) -> Result<Vec<f32>> {
        let stored_tensor = self.stored_tensor(name)?;
        match stored_tensor.storage {
            StorageType::Floats(format) | StorageType::GgufHalf(format) => self.reader.read_floats(
                format,
                stored_tensor.start,
                (stored_tensor.end - stored_tensor.start) / format.size(),
            ),
            _ => Err(self.unsupported_error(name, stored_tensor)),
        }
    }

    /// The first byte and the number of bytes of a part of a tensor, from its first element to its last; `None` if it is not
    /// in the file.
    pub(super) fn range(&self, name: &str, elements: &[Range<usize>]) -> Option<(usize, usize)> {
        let stored_tensor = self.header.tensors.get(name)?;
        let (per_block, block_bytes) = match &stored_tensor.storage {
            StorageType::Floats(format) | StorageType::GgufHalf(format) => (1, format.size()),
            StorageType::GgmlBlocks(block, _) => (block.block_size(), block.type_size()),
            _ => return Some((stored_tensor.start, stored_tensor.end - stored_tensor.start)),
        };
        let first = elements.iter().map(|range| range.start).min()?;
        let last = elements.iter().map(|range| range.end).max()?;
        Some(stored_tensor.byte_range(&(first..last), per_block, block_bytes))
    }

    /// The format of a tensor whose bytes products take as they are: bf16, and f16 of GGUF files (see [`super::Index::read_half`]). `None` for
    /// others.
    pub(super) fn half_format(&self, name: &str) -> Result<Option<HalfFormat>> {
        Ok(match self.stored_tensor(name)?.storage {
            StorageType::Floats(FloatFormat::Bf16) | StorageType::GgufHalf(FloatFormat::Bf16) => Some(HalfFormat::Bf16),
            StorageType::GgufHalf(FloatFormat::F16) => Some(HalfFormat::F16),
            _ => None,
        })
    }

    /// Reads the bytes of these elements of a tensor of 16-bit floats, one range after the other.
    pub(super) fn read_half_bytes(&self, name: &str, elements: &[Range<usize>]) -> Result<Vec<u8>> {
        let stored_tensor = self.stored_tensor(name)?;
        let read = |range: &Range<usize>| {
            let (start, length) = stored_tensor.byte_range(range, 1, 2);
            self.reader.read(start, length)
        };
        match elements {
            [only] => read(only),
            ranges => Ok(ranges.iter().map(read).collect::<Result<Vec<_>>>()?.concat()),
        }
    }

    /// Asks the system to read these bytes from disk, see [`FileReader::read_ahead`].
    pub(super) fn read_ahead(&self, start: usize, length: usize) {
        self.reader.read_ahead(start, length);
    }

    /// Looks up a tensor.
    fn stored_tensor(&self, name: &str) -> Result<&StoredTensor> {
        self.header.tensors.get(name).ok_or_else(|| EngineError::MissingTensor {
            path: self.path().to_path_buf(),
            name: name.to_owned(),
            nearest: None,
        })
    }

    fn unsupported_error(&self, name: &str, stored_tensor: &StoredTensor) -> EngineError {
        self.type_error(name, &stored_tensor.storage)
    }

    /// The error of a tensor whose type is not read.
    pub(super) fn type_error(&self, name: &str, storage: &StorageType) -> EngineError {
        let type_in_file = match storage {
            StorageType::Unsupported(type_name) => type_name,
            StorageType::Bytes => "U8",
            _ => "I8",
        };
        let supported = match self.is_gguf {
            true => aitk_common::gguf::Kind::names(),
            false => "F32, F16, BF16, F64, F8_E4M3, F8_E5M2, and 4 and 8 bits as bitsandbytes writes them".to_owned(),
        };
        EngineError::WeightsFile {
            path: self.path().to_path_buf(),
            reason: format!("tensor `{name}` is stored as {type_in_file}; supported types: {supported}"),
        }
    }
}

/// The number in these bytes, if safetensors calls the type an integer.
fn whole_number(storage: &StorageType, bytes: &[u8]) -> Option<f32> {
    let type_name = match storage {
        StorageType::Unsupported(type_name) => type_name.as_str(),
        StorageType::Bytes => "U8",
        StorageType::Int8 => "I8",
        _ => return None,
    };
    Some(match type_name {
        "I64" => i64::from_le_bytes(bytes.try_into().ok()?) as f32,
        "I32" => i32::from_le_bytes(bytes.try_into().ok()?) as f32,
        "I16" => f32::from(i16::from_le_bytes(bytes.try_into().ok()?)),
        "I8" => f32::from(i8::from_le_bytes(bytes.try_into().ok()?)),
        "U8" => f32::from(u8::from_le_bytes(bytes.try_into().ok()?)),
        _ => return None,
    })
}

/// candle's dtype for the format, if it has one.
fn candle_dtype(format: FloatFormat) -> Option<DType> {
    match format {
        FloatFormat::F64 => Some(DType::F64),
        FloatFormat::F32 => Some(DType::F32),
        FloatFormat::F16 => Some(DType::F16),
        FloatFormat::Bf16 => Some(DType::BF16),
        FloatFormat::E4m3 | FloatFormat::E5m2 => None,
    }
}
