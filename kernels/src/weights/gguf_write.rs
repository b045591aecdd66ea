//! Writes GGUF files, one tensor at a time (ggml's `docs/gguf.md`, version 3, little-endian).

use crate::error::{EngineError, Result};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use std::io::{self, Write};

/// Data begin at multiples of this.
const ALIGNMENT: usize = 32;
/// Numbers that are converted at a time, in whole rows. Few in tests, so that small tensors have several parts.
const CHUNK_LEN: usize = if cfg!(test) { 512 } else { 16 << 20 };

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// Text.
    Text(String),
    /// A whole number of 32 bits.
    Unsigned(u32),
    /// A float of 32 bits.
    Float(f32),
    /// True or false.
    Flag(bool),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of whole numbers of 32 bits.
    Integers(Vec<i32>),
    /// A list of floats of 32 bits.
    Floats(Vec<f32>),
}

/// The metadata of a GGUF file, and the names, types and shapes of its tensors, all in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct GgufLayout {
    metadata: Vec<(String, GgufValue)>,
    tensors: Vec<(String, GgmlDType, Vec<usize>)>,
}

impl GgufLayout {
    /// Adds a value to the metadata.
    pub fn set(&mut self, key: impl Into<String>, value: GgufValue) {
        self.metadata.push((key.into(), value));
    }

    /// Adds a tensor with its shape in PyTorch's order.
    pub fn add(&mut self, name: impl Into<String>, dtype: GgmlDType, shape: impl Into<Vec<usize>>) {
        self.tensors.push((name.into(), dtype, shape.into()));
    }

    /// The tensors: name, type and shape.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, GgmlDType, &[usize])> {
        let all = self.tensors.iter();
        all.map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()))
    }

    /// Writes the file. Calls `tensor` with each name, in order; it returns the tensor in any float dtype.
    ///
    /// # Errors
    /// The errors of `out`; an [`EngineError`] in [`io::Error::other`] when `tensor` fails or returns another shape, or when a number is not
    /// finite in the type of the file. [`EngineError::io`] extracts it.
    pub fn write(&self, out: &mut dyn Write, mut tensor: impl FnMut(&str) -> Result<Tensor>) -> io::Result<()> {
        let header = self.header().map_err(io::Error::other)?;
        out.write_all(&header)?;
        for (name, dtype, shape) in &self.tensors {
            let tensor = tensor(name).map_err(io::Error::other)?;
            if tensor.dims() != shape {
                let message = format!("`{name}` was to be saved as {shape:?} and is {:?}", tensor.dims());
                return Err(io::Error::other(EngineError::Internal(message)));
            }
            write_tensor(out, name, *dtype, &tensor)?;
            let length = byte_count(*dtype, shape);
            out.write_all(&vec![0; length.next_multiple_of(ALIGNMENT) - length])?;
        }
        Ok(())
    }

    /// The header, padded to the alignment.
    fn header(&self) -> Result<Vec<u8>> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_text(&mut bytes, key);
            write_value(&mut bytes, value);
        }
        let mut offset = 0_u64;
        for (name, dtype, shape) in &self.tensors {
            let block = dtype.block_size();
            if shape.last().is_none_or(|row| !row.is_multiple_of(block)) {
                return Err(EngineError::Internal(format!(
                    "`{name}` of shape {shape:?} has no rows of blocks of {block} numbers"
                )));
            }
            write_text(&mut bytes, name);
            bytes.extend((shape.len() as u32).to_le_bytes());
            shape
                .iter()
                .rev()
                .for_each(|side| bytes.extend((*side as u64).to_le_bytes()));
            bytes.extend(type_number(*dtype)?.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            offset += byte_count(*dtype, shape).next_multiple_of(ALIGNMENT) as u64;
        }
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        Ok(bytes)
    }
}

fn byte_count(dtype: GgmlDType, shape: &[usize]) -> usize {
    shape.iter().product::<usize>() / dtype.block_size() * dtype.type_size()
}

/// ggml's number of a type that is written (`enum ggml_type`).
fn type_number(dtype: GgmlDType) -> Result<u32> {
    Ok(match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q4K => 12,
        GgmlDType::Q6K => 14,
        GgmlDType::BF16 => 30,
        other => return Err(EngineError::Internal(format!("{other:?} is not written to GGUF files"))),
    })
}

/// The name of a type that is written, as configs have it.
pub fn type_name(dtype: GgmlDType) -> &'static str {
    match dtype {
        GgmlDType::F32 => "f32",
        GgmlDType::F16 => "f16",
        GgmlDType::BF16 => "bf16",
        GgmlDType::Q8_0 => "q8_0",
        GgmlDType::Q6K => "q6_k",
        GgmlDType::Q4K => "q4_k",
        _ => "other",
    }
}

fn write_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn write_value(bytes: &mut Vec<u8>, value: &GgufValue) {
    let list = |bytes: &mut Vec<u8>, kind: u32, count: usize| {
        bytes.extend([9_u32, kind].map(u32::to_le_bytes).concat());
        bytes.extend((count as u64).to_le_bytes());
    };
    match value {
        GgufValue::Unsigned(number) => {
            bytes.extend(4_u32.to_le_bytes());
            bytes.extend(number.to_le_bytes());
        }
        GgufValue::Float(number) => {
            bytes.extend(6_u32.to_le_bytes());
            bytes.extend(number.to_le_bytes());
        }
        GgufValue::Flag(flag) => {
            bytes.extend(7_u32.to_le_bytes());
            bytes.push(u8::from(*flag));
        }
        GgufValue::Text(text) => {
            bytes.extend(8_u32.to_le_bytes());
            write_text(bytes, text);
        }
        GgufValue::Texts(texts) => {
            list(bytes, 8, texts.len());
            texts.iter().for_each(|text| write_text(bytes, text));
        }
        GgufValue::Integers(numbers) => {
            list(bytes, 5, numbers.len());
            numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        }
        GgufValue::Floats(numbers) => {
            list(bytes, 6, numbers.len());
            numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        }
    }
}

/// Writes the numbers of a tensor, some rows at a time.
fn write_tensor(out: &mut dyn Write, name: &str, dtype: GgmlDType, tensor: &Tensor) -> io::Result<()> {
    let row = tensor.dims().last().copied().unwrap_or(1).max(1);
    let count = tensor.elem_count();
    let step = (CHUNK_LEN / row).max(1) * row;
    let convert = |start: usize| -> Result<Vec<u8>> {
        let flat = tensor.detach().flatten_all()?;
        let part = flat.narrow(0, start, step.min(count - start))?;
        let part = part.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        encoded(name, dtype, &part.reshape(((), row))?)
    };
    for start in (0..count).step_by(step) {
        out.write_all(&convert(start).map_err(io::Error::other)?)?;
    }
    Ok(())
}

/// The bytes of rows [n, row] (f32 on the CPU) in a type.
fn encoded(name: &str, dtype: GgmlDType, rows: &Tensor) -> Result<Vec<u8>> {
    let numbers = rows.flatten_all()?.to_vec1::<f32>()?;
    let not_finite = |number: f32| {
        EngineError::bad_input(match number.is_finite() {
            true => format!(
                "`{name}` has the number {number}, which {} does not have: its largest number is smaller. Use `dtype: bf16` or `f32`",
                type_name(dtype)
            ),
            false => format!("`{name}` has the number {number}: the model is damaged, or its training diverged"),
        })
    };
    let check = |number: f32, stored: f32| match stored.is_finite() {
        true => Ok(()),
        false => Err(not_finite(number)),
    };
    Ok(match dtype {
        GgmlDType::F32 => {
            numbers.iter().try_for_each(|number| check(*number, *number))?;
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        GgmlDType::F16 => {
            let halves: Vec<half::f16> = numbers.iter().map(|number| half::f16::from_f32(*number)).collect();
            let mut both = numbers.iter().zip(&halves);
            both.try_for_each(|(number, half)| check(*number, half.to_f32()))?;
            halves.iter().flat_map(|half| half.to_le_bytes()).collect()
        }
        GgmlDType::BF16 => {
            let halves: Vec<half::bf16> = numbers.iter().map(|number| half::bf16::from_f32(*number)).collect();
            let mut both = numbers.iter().zip(&halves);
            both.try_for_each(|(number, half)| check(*number, half.to_f32()))?;
            halves.iter().flat_map(|half| half.to_le_bytes()).collect()
        }
        block => {
            numbers.iter().try_for_each(|number| check(*number, *number))?;
            // A tensor of its own, not the view of a part of the weight: candle quantises the whole storage of a tensor.
            let rows = Tensor::from_vec(numbers, rows.shape(), &Device::Cpu)?;
            let bytes = QTensor::quantize(&rows, block)?.data()?.into_owned();
            // The scales of a block are half floats.
            let scales: &[usize] = match block {
                GgmlDType::Q8_0 => &[0],
                GgmlDType::Q4K => &[0, 2],
                GgmlDType::Q6K => &[208],
                other => return Err(EngineError::Internal(format!("{other:?} is not written to GGUF files"))),
            };
            for (index, stored) in bytes.chunks(block.type_size()).enumerate() {
                let is_finite = |at: &usize| half::f16::from_le_bytes([stored[*at], stored[*at + 1]]).is_finite();
                if !scales.iter().all(is_finite) {
                    let size = block.block_size();
                    let numbers = rows.flatten_all()?.narrow(0, index * size, size)?.to_vec1::<f32>()?;
                    let largest = numbers.into_iter().max_by(|a, b| a.abs().total_cmp(&b.abs()));
                    return Err(not_finite(largest.unwrap_or(f32::MAX)));
                }
            }
            bytes
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Index;

    #[test]
    fn tensors_of_every_type_are_read_back() {
        let numbers: Vec<f32> = (0..1024).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        let tensor = Tensor::from_vec(numbers.clone(), (4, 256), &Device::Cpu).unwrap();
        let mut layout = GgufLayout::default();
        layout.set("general.architecture", GgufValue::Text("llama".into()));
        layout.set("tokens", GgufValue::Texts(vec!["a".into(), "é".into()]));
        layout.set("types", GgufValue::Integers(vec![1, -3]));
        layout.set("flag", GgufValue::Flag(true));
        // The largest error that each type may have.
        let types = [
            (GgmlDType::F32, 0.0),
            (GgmlDType::F16, 5e-4),
            (GgmlDType::BF16, 4e-3),
            (GgmlDType::Q8_0, 5e-3),
            (GgmlDType::Q6K, 0.04),
            (GgmlDType::Q4K, 0.08),
        ];
        for (dtype, _) in types {
            layout.add(format!("{dtype:?}"), dtype, [4, 256]);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gguf");
        let mut bytes = Vec::new();
        layout.write(&mut bytes, |_| Ok(tensor.clone())).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let index = Index::open(&path).unwrap();
        assert!(
            index
                .metadata()
                .contains(&("general.architecture".into(), "llama".into()))
        );
        for (dtype, max) in types {
            let read = index.read(&format!("{dtype:?}"), DType::F32, &Device::Cpu).unwrap();
            let read = read.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let error = read
                .iter()
                .zip(&numbers)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(error <= max, "{dtype:?}: {error}");
        }
    }

    #[test]
    fn numbers_that_a_type_does_not_have_are_refused() {
        let write = |dtype: GgmlDType, number: f32| {
            let share = |i: i32| (1 - 2 * (i % 2)) as f32 * (i % 5 + 1) as f32 / 5.0;
            let numbers: Vec<f32> = (0..256).map(|i| number * share(i)).collect();
            let tensor = Tensor::from_vec(numbers, (1, 256), &Device::Cpu).unwrap();
            let mut layout = GgufLayout::default();
            layout.add("w", dtype, [1, 256]);
            layout.write(&mut Vec::new(), |_| Ok(tensor.clone()))
        };
        // Blocks have scales: 70000 is 127 times 551.
        for (dtype, too_large) in [
            (GgmlDType::F16, 70_000.0),
            (GgmlDType::Q8_0, 1e7),
            (GgmlDType::Q4K, 1e9),
            (GgmlDType::Q6K, 1e9),
        ] {
            if dtype != GgmlDType::F16 {
                write(dtype, 70_000.0).unwrap();
            }
            let error = write(dtype, too_large).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{too_large}")) && error.contains(type_name(dtype)),
                "{error}"
            );
        }
        for dtype in [GgmlDType::BF16, GgmlDType::F32] {
            write(dtype, 1e9).unwrap();
        }
        for dtype in [GgmlDType::F16, GgmlDType::F32, GgmlDType::Q8_0, GgmlDType::Q4K] {
            let error = write(dtype, f32::NAN).unwrap_err().to_string();
            assert!(error.contains("NaN") && error.contains("damaged"), "{error}");
        }
    }
}
