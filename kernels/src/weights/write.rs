//! Writes safetensors files, one tensor at a time.
//!
//! The header is computed from names, dtypes and shapes, so that only one tensor of a large model is in memory at a
//! time. Metadata and tensors are sorted by name, so that equal content gives equal bytes (the `safetensors` crate
//! writes metadata in a random order).

use super::stored_bytes::StoredBytes;
use crate::error::{EngineError, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Numbers that are converted to bytes at a time.
const CHUNK_LEN: usize = 16 << 10;

/// The names, dtypes and shapes of the tensors of a safetensors file, and its metadata.
#[derive(Clone, Debug, Default)]
pub struct SafetensorsLayout {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, (DType, Vec<usize>)>,
    stored: BTreeMap<String, StoredBytes>,
}

impl SafetensorsLayout {
    /// Creates a layout with this metadata and no tensors.
    #[must_use]
    pub fn new(metadata: BTreeMap<String, String>) -> Self {
        Self {
            metadata,
            tensors: BTreeMap::new(),
            stored: BTreeMap::new(),
        }
    }

    /// Adds a tensor. Returns `false` if it replaces one of this name.
    pub fn add(&mut self, name: impl Into<String>, dtype: DType, shape: impl Into<Vec<usize>>) -> bool {
        let name = name.into();
        let is_other = self.stored.remove(&name).is_none();
        self.tensors.insert(name, (dtype, shape.into())).is_none() && is_other
    }

    /// Adds a tensor of another file as it is stored there. Such tensors come after the others, so that these stay aligned. Returns `false`
    /// if it replaces one of this name.
    pub fn add_stored(&mut self, name: impl Into<String>, stored: StoredBytes) -> bool {
        let name = name.into();
        let is_other = self.tensors.remove(&name).is_none();
        self.stored.insert(name, stored).is_none() && is_other
    }

    /// Writes the file. Calls `tensor` with each name, in order; it returns the tensor on any device.
    ///
    /// # Errors
    /// The errors of `out`; an [`EngineError`] in [`io::Error::other`] when `tensor` fails, returns another dtype or
    /// shape than was added, or when a dtype cannot be saved. [`EngineError::io`] extracts it.
    pub fn write(&self, out: &mut dyn Write, mut tensor: impl FnMut(&str) -> Result<Tensor>) -> io::Result<()> {
        let header = self.header().map_err(io::Error::other)?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (name, (dtype, shape)) in &self.tensors {
            let tensor = tensor(name).map_err(io::Error::other)?;
            if tensor.dtype() != *dtype || tensor.dims() != shape {
                return Err(io::Error::other(EngineError::Internal(format!(
                    "`{name}` was to be saved as {dtype:?} {shape:?} and is {:?} {:?}",
                    tensor.dtype(),
                    tensor.dims()
                ))));
            }
            write_numbers(out, &tensor)?;
        }
        self.stored.values().try_for_each(|stored| out.write_all(&stored.bytes))
    }

    /// The header as JSON, padded with spaces to a multiple of 8 bytes.
    fn header(&self) -> Result<Vec<u8>> {
        let mut header = serde_json::Map::new();
        if !self.metadata.is_empty() {
            let pairs = self.metadata.iter();
            let pairs = pairs.map(|(key, value)| (key.clone(), Value::String(value.clone())));
            header.insert("__metadata__".into(), Value::Object(pairs.collect()));
        }
        let mut start = 0;
        for (name, (dtype, shape)) in &self.tensors {
            let end = start + shape.iter().product::<usize>() * dtype.size_in_bytes();
            let entry = json!({"dtype": type_name(*dtype)?, "shape": shape, "data_offsets": [start, end]});
            header.insert(name.clone(), entry);
            start = end;
        }
        for (name, stored) in &self.stored {
            let end = start + stored.bytes.len();
            let entry = json!({"dtype": stored.type_name, "shape": stored.shape, "data_offsets": [start, end]});
            header.insert(name.clone(), entry);
            start = end;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok(text)
    }
}

/// Writes tensors as a safetensors file. Only one tensor is copied to the CPU at a time.
///
/// # Errors
/// As [`SafetensorsLayout::write`].
pub fn write_tensors(
    out: &mut dyn Write,
    tensors: &BTreeMap<String, Tensor>,
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    let mut layout = SafetensorsLayout::new(metadata.clone());
    for (name, tensor) in tensors {
        layout.add(name, tensor.dtype(), tensor.dims());
    }
    layout.write(out, |name| {
        let tensor = tensors.get(name).cloned();
        tensor.ok_or_else(|| EngineError::Internal(format!("`{name}` is missing")))
    })
}

fn type_name(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::I64 => "I64",
        DType::U32 => "U32",
        DType::U8 => "U8",
        other => {
            return Err(EngineError::Internal(format!(
                "tensors of type {other:?} cannot be saved"
            )));
        }
    })
}

/// Writes the numbers of a tensor in little-endian order.
fn write_numbers(out: &mut dyn Write, tensor: &Tensor) -> io::Result<()> {
    let tensor_error = |error: candle_core::Error| io::Error::other(EngineError::Tensor(error));
    let tensor = tensor.detach().to_device(&Device::Cpu).map_err(tensor_error)?;
    let tensor = tensor.contiguous().map_err(tensor_error)?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((from, to))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(internal_error("a tensor on the CPU is not contiguous"));
    };
    match storage {
        CpuStorage::U8(all) => out.write_all(element_range(all, from, to)?),
        CpuStorage::U32(all) => write_in_chunks(out, element_range(all, from, to)?, |n| n.to_le_bytes()),
        CpuStorage::I64(all) => write_in_chunks(out, element_range(all, from, to)?, |n| n.to_le_bytes()),
        CpuStorage::BF16(all) => write_in_chunks(out, element_range(all, from, to)?, |n| n.to_le_bytes()),
        CpuStorage::F16(all) => write_in_chunks(out, element_range(all, from, to)?, |n| n.to_le_bytes()),
        CpuStorage::F32(all) => write_in_chunks(out, element_range(all, from, to)?, |n| n.to_le_bytes()),
        CpuStorage::F64(all) => write_in_chunks(out, element_range(all, from, to)?, |n| n.to_le_bytes()),
        _ => Err(internal_error("this type of tensor cannot be saved")),
    }
}

fn internal_error(what: &str) -> io::Error {
    io::Error::other(EngineError::Internal(what.to_owned()))
}

fn element_range<T>(all: &[T], from: usize, to: usize) -> io::Result<&[T]> {
    all.get(from..to)
        .ok_or_else(|| internal_error("a tensor is longer than its storage"))
}

/// Converts and writes numbers through a small buffer.
fn write_in_chunks<T: Copy, const N: usize>(
    out: &mut dyn Write,
    numbers: &[T],
    bytes: impl Fn(T) -> [u8; N],
) -> io::Result<()> {
    let mut buffer = vec![0; numbers.len().min(CHUNK_LEN) * N];
    for chunk in numbers.chunks(CHUNK_LEN) {
        for (slot, number) in buffer.chunks_exact_mut(N).zip(chunk) {
            slot.copy_from_slice(&bytes(*number));
        }
        out.write_all(&buffer[..chunk.len() * N])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::IndexOp;

    fn named(tensors: &[(&str, Tensor)]) -> BTreeMap<String, Tensor> {
        tensors.iter().map(|(n, t)| ((*n).to_owned(), t.clone())).collect()
    }

    fn count_up(count: usize) -> Tensor {
        Tensor::arange(0f32, count as f32, &Device::Cpu).unwrap()
    }

    #[test]
    fn candle_reads_the_written_file() {
        let long = count_up(2 * CHUNK_LEN + 5);
        let table = count_up(24).reshape((4, 6)).unwrap();
        let tensors = named(&[
            ("a.long", long.clone()),
            ("b.view", table.i((1..3, 2..5)).unwrap()),
            ("c.transposed", table.t().unwrap()),
            ("d.f16", table.to_dtype(DType::F16).unwrap()),
            ("e.bf16", long.to_dtype(DType::BF16).unwrap()),
            ("f.f64", table.to_dtype(DType::F64).unwrap()),
            ("g.i64", table.to_dtype(DType::I64).unwrap()),
            ("g.u32", table.to_dtype(DType::U32).unwrap()),
            ("h.u8", table.to_dtype(DType::U8).unwrap()),
            ("i.empty", Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap()),
            ("j.number", Tensor::new(1.5f32, &Device::Cpu).unwrap()),
        ]);
        let metadata = BTreeMap::from([("z".to_owned(), "1".to_owned()), ("b \"q\"".to_owned(), "é".to_owned())]);
        let mut bytes = Vec::new();
        write_tensors(&mut bytes, &tensors, &metadata).unwrap();
        let (header, _) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header % 8, 0);
        let read = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        assert_eq!(read.len(), tensors.len());
        for (name, tensor) in &tensors {
            let read = &read[name];
            assert_eq!((read.dtype(), read.dims()), (tensor.dtype(), tensor.dims()), "{name}");
            let numbers = |t: &Tensor| {
                let flat = t.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
                flat.to_vec1::<f64>().unwrap()
            };
            assert_eq!(numbers(read), numbers(tensor), "{name}");
        }
        let mut second = Vec::new();
        write_tensors(&mut second, &tensors, &metadata).unwrap();
        assert_eq!(bytes, second);
    }

    #[test]
    fn the_header_has_the_exact_bytes() {
        let tensors = named(&[
            ("b", count_up(2).to_dtype(DType::BF16).unwrap()),
            ("a.weight", count_up(2).reshape((1, 2)).unwrap()),
        ]);
        let metadata = BTreeMap::from([("y".to_owned(), "1".to_owned()), ("x".to_owned(), "2".to_owned())]);
        let mut bytes = Vec::new();
        write_tensors(&mut bytes, &tensors, &metadata).unwrap();
        let header = concat!(
            r#"{"__metadata__":{"x":"2","y":"1"},"#,
            r#""a.weight":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"#,
            r#""b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]}}"#,
        );
        let mut expected = (header.len().next_multiple_of(8) as u64).to_le_bytes().to_vec();
        expected.extend(format!("{header:<width$}", width = header.len().next_multiple_of(8)).into_bytes());
        expected.extend([0, 0, 0, 0, 0, 0, 128, 63, 0, 0, 128, 63]);
        assert_eq!(bytes, expected);
    }

    /// Whichever of both is added last is in the file, once and at its place.
    #[test]
    fn a_copied_tensor_and_another_of_its_name_replace_each_other() {
        let stored = StoredBytes {
            type_name: "BOOL".to_owned(),
            shape: vec![3],
            bytes: vec![1, 0, 1],
        };
        let written = |layout: &SafetensorsLayout| {
            let mut bytes = Vec::new();
            layout.write(&mut bytes, |_| Ok(count_up(2))).unwrap();
            bytes
        };
        let mut layout = SafetensorsLayout::default();
        assert!(layout.add("a", DType::F32, [2]) && layout.add("w", DType::F32, [2]));
        assert!(!layout.add_stored("w", stored.clone()));
        let bytes = written(&layout);
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("w").unwrap().data(), [1, 0, 1]);
        assert_eq!(file.tensor("a").unwrap().data(), [0, 0, 0, 0, 0, 0, 128, 63]);
        assert!(!layout.add_stored("w", stored));
        assert!(!layout.add("w", DType::F32, [2]));
        let bytes = written(&layout);
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("w").unwrap().data(), [0, 0, 0, 0, 0, 0, 128, 63]);
    }

    #[test]
    fn an_engine_error_is_recovered_from_the_io_error() {
        let mut layout = SafetensorsLayout::default();
        assert!(layout.add("w", DType::F32, [2]));
        assert!(!layout.add("w", DType::F32, [3]), "there is one already");
        let error = layout.write(&mut Vec::new(), |_| Ok(count_up(2))).unwrap_err();
        assert!(error.to_string().contains("`w` was to be saved as F32 [3]"), "{error}");
        let error = layout.write(&mut Vec::new(), |_| Err(EngineError::bad_input("no such weight")));
        let error = EngineError::io("x.safetensors", error.unwrap_err());
        assert!(
            matches!(&error, EngineError::BadInput(text) if text == "no such weight"),
            "{error:?}"
        );
        let mut unsupported = SafetensorsLayout::default();
        unsupported.add("ids", DType::I16, [2]);
        assert!(unsupported.write(&mut Vec::new(), |_| Ok(count_up(2))).is_err());
    }
}
