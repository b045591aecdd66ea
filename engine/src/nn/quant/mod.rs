//! Quantised weights: kept in 4 to 8 bits, unpacked layer by layer when they are used, forwards and again backwards, so
//! that the dense weight of one layer exists at a time. Gradients go through them to what is before, never into them.
//!
//! | name | a weight is | extra |
//! |---|---|---|
//! | `int8` | 8 bits, a scale per output: absmax / 127.5 (as torchao's weight-only int8) | 4 bytes per output |
//! | `float8` | e4m3 (no infinities), a scale per output: absmax / 448 | 4 bytes per output |
//! | `nf4` | 4 bits of the normal-float table, a scale per 64 weights: absmax (Dettmers et al. 2023, QLoRA) | 4 bytes per 64 |
//! | `q8_0` | GGUF: 8 bits, a half-float scale per 32 | |
//! | `q4_k` | GGUF: 4 bits in super-blocks of 256; rows that are no multiple of 256 take `q8_0` | |
//!
//! These are packed here. What a file holds in few bits comes as it is: other blocks of GGUF, float8 with scales for
//! runs of weights or none, and the 4 and 8 bits of bitsandbytes.

mod codes;
#[cfg(test)]
mod tests;

use aitk_common::job::QType;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use std::borrow::Cow;
use std::sync::Arc;

pub use codes::Code;

/// A weight of a linear layer `[out, in]` or a convolution `[out, in, kernel, kernel]` in a few bits.
pub struct Quantized {
    kind: &'static str,
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
    data: Data,
}

/// A weight as codes and scales, on its way from a file.
#[derive(Clone, Debug)]
pub struct Codes {
    /// What a code stands for.
    pub code: Code,
    /// The codes.
    pub bytes: Vec<u8>,
    /// A scale for each run of weights.
    pub scales: Vec<f32>,
    /// How long a run is; the last may be shorter.
    pub per_scale: usize,
}

// With CUDA a QTensor takes 232 bytes, in a few hundred layers.
#[allow(clippy::large_enum_variant)]
enum Data {
    /// A byte each, or two in a byte with the first in its upper half; f32 scales, each for as many weights in a row.
    Codes {
        code: Code,
        codes: Tensor,
        scales: Tensor,
        per_scale: usize,
    },
    /// Blocks of GGUF.
    Gguf(QTensor),
}

impl std::fmt::Debug for Quantized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Quantized({} {:?})", self.kind, self.shape)
    }
}

impl Quantized {
    /// Packs a weight; `None` when this kind has no room for its shape (GGUF wants rows of a multiple of 32).
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn pack(weight: &Tensor, qtype: QType) -> candle_core::Result<Option<Arc<Self>>> {
        let shape = weight.dims().to_vec();
        let outputs = shape.first().copied().unwrap_or(0);
        let count = weight.elem_count();
        if outputs == 0 || count == 0 {
            return Ok(None);
        }
        let (dtype, device) = (weight.dtype(), weight.device().clone());
        let inputs = count / outputs;
        // Quantized on the CPU wherever it lies: once, and to the same bits everywhere.
        let plain = weight.detach().to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let data = match Code::of(qtype) {
            None => {
                let kind = match qtype {
                    QType::Q4K if inputs.is_multiple_of(256) => GgmlDType::Q4K,
                    _ => GgmlDType::Q8_0,
                };
                if !inputs.is_multiple_of(kind.block_size()) {
                    return Ok(None);
                }
                let rows = plain.reshape((outputs, inputs))?.contiguous()?;
                Data::Gguf(QTensor::quantize_onto(&rows, kind, &device)?)
            }
            Some(code) => {
                let values = plain.flatten_all()?.to_vec1::<f32>()?;
                let per_scale = if qtype == QType::Nf4 { codes::NF4_BLOCK } else { inputs };
                let (bytes, scales) = codes::pack(qtype, &values, per_scale);
                let (length, blocks) = (bytes.len(), scales.len());
                Data::Codes {
                    code,
                    codes: Tensor::from_vec(bytes, length, &device)?,
                    scales: Tensor::from_vec(scales, blocks, &device)?,
                    per_scale,
                }
            }
        };
        Ok(Some(Arc::new(Self {
            kind: qtype.name(),
            shape,
            dtype,
            device,
            data,
        })))
    }

    /// A weight that comes as codes, each run of `per_scale` of them with a scale of its own. `kind` is its name in
    /// messages, `dtype` what it is unpacked to.
    ///
    /// # Errors
    /// When there are not as many codes and scales as the shape wants, or the device has no memory for them.
    pub fn from_codes(
        kind: &'static str,
        codes: Codes,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Arc<Self>> {
        let Codes {
            code,
            bytes,
            scales,
            per_scale,
        } = codes;
        let count: usize = shape.iter().product();
        let (length, blocks) = (bytes.len(), scales.len());
        let per_byte = code.per_byte();
        if per_scale == 0
            || !per_scale.is_multiple_of(per_byte)
            || length != count.div_ceil(per_byte)
            || blocks != count.div_ceil(per_scale)
        {
            candle_core::bail!("{length} bytes and {blocks} scales, each for {per_scale}, are no {kind} of {shape:?}");
        }
        Ok(Arc::new(Self {
            kind,
            shape: shape.to_vec(),
            dtype,
            device: device.clone(),
            data: Data::Codes {
                code,
                codes: Tensor::from_vec(bytes, length, device)?,
                scales: Tensor::from_vec(scales, blocks, device)?,
                per_scale,
            },
        }))
    }

    /// A weight that comes as GGUF's blocks; they follow each other whatever the shape is.
    ///
    /// # Errors
    /// When there are not as many blocks as the shape wants, or the device has no memory for them.
    pub fn from_blocks(
        kind: &'static str,
        block: GgmlDType,
        bytes: &[u8],
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Arc<Self>> {
        let count: usize = shape.iter().product();
        let (size, length) = (block.block_size(), bytes.len());
        if count == 0 || !count.is_multiple_of(size) || length != count / size * block.type_size() {
            candle_core::bail!("{length} bytes are no {kind} of {shape:?}");
        }
        if bytes.as_ptr().align_offset(align_of::<f32>()) != 0 {
            candle_core::bail!("the bytes of a {kind} lie askew in memory");
        }
        let blocks = QTensor::new(QStorage::from_data(Cow::Borrowed(bytes), device, block)?, count)?;
        Ok(Arc::new(Self {
            kind,
            shape: shape.to_vec(),
            dtype,
            device: device.clone(),
            data: Data::Gguf(blocks),
        }))
    }

    /// What kind it is, as it is called in files and configs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The shape of the weight.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }

    /// What it is unpacked to.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it lies.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::Codes { codes, scales, .. } => codes.elem_count() + 4 * scales.elem_count(),
            Data::Gguf(blocks) => blocks.storage_size_in_bytes(),
        }
    }

    /// The weight as it was, but for what the few bits lost.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn unpack(&self) -> candle_core::Result<Tensor> {
        let flat = match &self.data {
            Data::Gguf(blocks) => blocks.dequantize(&self.device)?,
            Data::Codes {
                code,
                codes,
                scales,
                per_scale,
            } if self.device.is_cpu() => {
                let count = self.shape.iter().product();
                let values = with_bytes(codes, |codes| {
                    super::cpu::with_slice(scales, |scales| codes::unpack(code, codes, scales, *per_scale, count))
                })??;
                Tensor::from_vec(values, count, &self.device)?
            }
            Data::Codes {
                code,
                codes,
                scales,
                per_scale,
            } => self.unpack_anywhere(code, codes, scales, *per_scale)?,
        };
        flat.reshape(self.shape.as_slice())?.to_dtype(self.dtype)
    }

    /// The same of candle's operations, on any device.
    fn unpack_anywhere(
        &self,
        code: &Code,
        codes: &Tensor,
        scales: &Tensor,
        per_scale: usize,
    ) -> candle_core::Result<Tensor> {
        let count: usize = self.shape.iter().product();
        let table = code.table();
        let table = Tensor::from_slice(table.as_slice(), table.len(), &self.device)?;
        let codes = match code {
            Code::Four(_) => {
                let bytes = codes.to_dtype(DType::F32)?;
                let upper = (&bytes / 16.0)?.floor()?;
                let lower = (bytes - (&upper * 16.0)?)?;
                Tensor::stack(&[upper, lower], 1)?.flatten_all()?
            }
            _ => codes.clone(),
        };
        let blocks = scales.elem_count();
        // The last block may be short: it is filled up, and cut off again.
        let missing = (blocks * per_scale).saturating_sub(codes.elem_count());
        // The largest number of an index's type means "none" to candle, and 255 is a code.
        let codes = codes.to_dtype(DType::U32)?;
        let values = table.index_select(&codes, 0)?.pad_with_zeros(0, 0, missing)?;
        let values = values.narrow(0, 0, blocks * per_scale)?.reshape((blocks, per_scale))?;
        let values = values.broadcast_mul(&scales.reshape((blocks, 1))?)?;
        values.flatten_all()?.narrow(0, 0, count)
    }
}

/// Runs `f` on the bytes of a contiguous tensor on the CPU.
fn with_bytes<R>(x: &Tensor, f: impl FnOnce(&[u8]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::U8(data)), Some((start, end))) => match data.get(start..end) {
            Some(data) => Ok(f(data)),
            None => candle_core::bail!("layout exceeds storage"),
        },
        _ => candle_core::bail!("expected contiguous bytes on the CPU"),
    }
}
