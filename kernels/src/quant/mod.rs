//! Quantised weights: stored in 4 to 8 bits and dequantised layer by layer at each use, in the forward and the backward
//! pass. At most one layer's dense weight is in memory at a time. Quantised weights get no gradient; the inputs of their layers do.
//!
//! | name | a weight is | extra |
//! |---|---|---|
//! | `int8` | 8 bits, a scale per output: absmax / 127.5 (as torchao's weight-only int8) | 4 bytes per output |
//! | `float8` | e4m3 (no infinities), a scale per output: absmax / 448 | 4 bytes per output |
//! | `nf4` | 4 bits of the normal-float table, a scale per 64 weights: absmax (Dettmers et al. 2023, QLoRA) | 4 bytes per 64 |
//! | `q8_0` | GGUF: 8 bits, a half-float scale per 32 | |
//! | `q4_k` | GGUF: 4 bits in super-blocks of 256; rows that are not a multiple of 256 take `q8_0` | |
//!
//! These formats are quantised here. Weights that are quantised in their files stay as they are: other block formats of
//! GGUF, float8 with or without scales, and the 4 and 8 bits of bitsandbytes.

mod codes;
mod halves;
mod stored_rows;
#[cfg(test)]
mod tests;

use crate::autograd::with_slice;
use crate::device::portable::is_portable;
use aitk_common::job::QType;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use std::borrow::Cow;
use std::sync::Arc;

pub use codes::Code;
pub(crate) use halves::{HalfFormat, f16_to_f32};
pub(crate) use stored_rows::{Q4_K_BYTES, Q6_K_BYTES, Q8_0_BYTES, StoredFormat, StoredRows, q4_k_codes, q6_k_codes};

/// A quantised weight of a linear layer `[out, in]` or a convolution `[out, in, kernel, kernel]`.
pub struct Quantized {
    kind: &'static str,
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
    data: Data,
}

/// A quantised weight from a file, as codes and scales.
#[derive(Clone, Debug)]
pub struct Codes {
    /// The values of the codes.
    pub code: Code,
    /// The codes.
    pub bytes: Vec<u8>,
    /// A scale for each block of weights.
    pub scales: Vec<f32>,
    /// The number of weights of a block; the last block may be shorter.
    pub per_scale: usize,
}

// With CUDA, a QTensor takes 232 bytes; a model has a few hundred layers.
#[allow(clippy::large_enum_variant)]
enum Data {
    /// One code per byte, or two with the first in the upper half; f32 scales, each for `per_scale` consecutive
    /// weights.
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

/// The tensor, copied if it shares its storage with others: candle quantises all numbers of the storage from its start, also where the
/// tensor is a view of a part of it.
fn with_own_storage(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let is_whole = {
        let (storage, layout) = tensor.storage_and_layout();
        let stored = match &*storage {
            Storage::Cpu(storage) => storage.as_slice::<f32>().ok().map(<[f32]>::len),
            _ => None,
        };
        layout.is_contiguous() && stored == Some(tensor.elem_count())
    };
    match is_whole {
        true => Ok(tensor.clone()),
        false => tensor.force_contiguous(),
    }
}

impl Quantized {
    /// Quantises a weight. `None` if the format does not support its shape (GGUF needs rows of a multiple of 32).
    ///
    /// # Errors
    /// When an operation fails.
    pub fn quantize(weight: &Tensor, qtype: QType) -> candle_core::Result<Option<Arc<Self>>> {
        let shape = weight.dims().to_vec();
        let outputs = shape.first().copied().unwrap_or(0);
        let count = weight.elem_count();
        if outputs == 0 || count == 0 {
            return Ok(None);
        }
        let (dtype, device) = (weight.dtype(), weight.device().clone());
        let inputs = count / outputs;
        // Always on the CPU: it is done once, and gives the same bits for every device.
        let plain = weight.detach().to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let data = match Code::from_qtype(qtype) {
            None => {
                let kind = match qtype {
                    QType::Q4K if inputs.is_multiple_of(256) => GgmlDType::Q4K,
                    _ => GgmlDType::Q8_0,
                };
                if !inputs.is_multiple_of(kind.block_size()) {
                    return Ok(None);
                }
                let rows = with_own_storage(&plain.reshape((outputs, inputs))?)?;
                Data::Gguf(QTensor::quantize_onto(&rows, kind, &device)?)
            }
            Some(code) => {
                let per_scale = if qtype == QType::Nf4 { codes::NF4_BLOCK } else { inputs };
                let (bytes, scales) =
                    with_slice(&plain.contiguous()?, |values| codes::quantize(qtype, values, per_scale))?;
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

    /// A weight from codes and scales. `kind` is the name of the format in messages, `dtype` the dtype of the dense
    /// weight.
    ///
    /// # Errors
    /// When the numbers of codes and scales do not match the shape, or the device has no memory for them.
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
            candle_core::bail!(
                "{length} bytes and {blocks} scales for {per_scale} weights each do not match a {kind} weight of shape {shape:?}"
            );
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

    /// A weight from blocks of GGUF, which follow each other whatever the shape is.
    ///
    /// # Errors
    /// When the number of blocks does not match the shape, or the device has no memory for them.
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
            candle_core::bail!("{length} bytes do not match a {kind} weight of shape {shape:?}");
        }
        if bytes.as_ptr().align_offset(align_of::<f32>()) != 0 {
            candle_core::bail!("the bytes of a {kind} weight are not aligned to 4 bytes");
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

    /// The weight for use on `device`: its codes stay in the memory where they are, and are copied to the device at each use.
    #[must_use]
    pub fn offloaded_from(self, device: &Device) -> Self {
        Self {
            device: device.clone(),
            ..self
        }
    }

    /// The weight with its codes in the memory of `device`.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn to_device(self, device: &Device) -> candle_core::Result<Self> {
        let data = match self.data {
            Data::Codes {
                code,
                codes,
                scales,
                per_scale,
            } => Data::Codes {
                code,
                codes: codes.to_device(device)?,
                scales: scales.to_device(device)?,
                per_scale,
            },
            Data::Gguf(blocks) => {
                let storage = QStorage::from_data(blocks.data()?, device, blocks.dtype())?;
                Data::Gguf(QTensor::new(storage, blocks.shape().clone())?)
            }
        };
        Ok(Self {
            data,
            device: device.clone(),
            ..self
        })
    }

    /// The name of the format, as in files and configs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The shape of the weight.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }

    /// The dtype of the dense weight.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the weight.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The bytes of memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::Codes { codes, scales, .. } => codes.elem_count() + 4 * scales.elem_count(),
            Data::Gguf(blocks) => blocks.storage_size_in_bytes(),
        }
    }

    /// A weight of 16-bit floats on the CPU: its format, and its bytes with the low one of each number first. `None` for
    /// other formats.
    pub(crate) fn half_bytes(&self) -> candle_core::Result<Option<(HalfFormat, Cow<'_, [u8]>)>> {
        let Data::Gguf(blocks) = &self.data else {
            return Ok(None);
        };
        let format = match blocks.dtype() {
            GgmlDType::BF16 => HalfFormat::Bf16,
            GgmlDType::F16 => HalfFormat::F16,
            _ => return Ok(None),
        };
        match self.device.is_cpu() {
            true => Ok(Some((format, blocks.data()?))),
            false => Ok(None),
        }
    }

    /// Runs `f` on the rows of a weight [outputs, inputs] on the CPU. `None` for formats whose rows are not read singly.
    pub(crate) fn with_rows<R>(&self, f: impl FnOnce(Option<StoredRows<'_>>) -> R) -> candle_core::Result<R> {
        let dims = self.dims();
        match &self.data {
            Data::Gguf(blocks) if self.device.is_cpu() => {
                let bytes = blocks.data()?;
                Ok(f(StoredRows::blocks(blocks.dtype(), &bytes, dims)))
            }
            Data::Codes {
                code,
                codes,
                scales,
                per_scale,
            } if self.device.is_cpu() => with_bytes(codes, |bytes| {
                with_slice(scales, |scales| {
                    f(StoredRows::codes(*code, bytes, scales, *per_scale, dims))
                })
            })?,
            _ => Ok(f(None)),
        }
    }

    /// The dense weight, in [`Self::dtype`].
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn dequantize(&self) -> candle_core::Result<Tensor> {
        if let Some((format, bytes)) = self.half_bytes()?.filter(|_| !is_portable()) {
            let widened = format.widened(&bytes);
            return Tensor::from_vec(widened, self.shape.as_slice(), &self.device)?.to_dtype(self.dtype);
        }
        let flat = match &self.data {
            Data::Gguf(blocks) => blocks.dequantize(&self.device)?,
            Data::Codes {
                code,
                codes,
                scales,
                per_scale,
            } if self.device.is_cpu() && !is_portable() => {
                let count = self.shape.iter().product();
                let values = with_bytes(codes, |codes| {
                    with_slice(scales, |scales| {
                        codes::dequantize(code, codes, scales, *per_scale, count)
                    })
                })??;
                Tensor::from_vec(values, count, &self.device)?
            }
            Data::Codes {
                code,
                codes,
                scales,
                per_scale,
            } => self.dequantize_with_candle(code, codes, scales, *per_scale)?,
        };
        flat.reshape(self.shape.as_slice())?.to_dtype(self.dtype)
    }

    /// The dense weight, computed with candle's operations on any device.
    fn dequantize_with_candle(
        &self,
        code: &Code,
        codes: &Tensor,
        scales: &Tensor,
        per_scale: usize,
    ) -> candle_core::Result<Tensor> {
        let count: usize = self.shape.iter().product();
        // An offloaded weight is in host memory.
        let (codes, scales) = (codes.to_device(&self.device)?, scales.to_device(&self.device)?);
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
        // The last block may be shorter: it is padded, and the padding is cut off at the end.
        let missing = (blocks * per_scale).saturating_sub(codes.elem_count());
        // candle takes the largest value of the index type as "no index", and 255 is a code.
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
            None => candle_core::bail!("the layout of a tensor exceeds its storage"),
        },
        _ => candle_core::bail!("expected contiguous bytes on the CPU"),
    }
}
