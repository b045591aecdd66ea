//! Starts kernels. Without the feature `cuda` nothing is started; tests may have kernels emulated on the CPU.

use super::arguments::{Arg, Launch};
use super::emulation;
use crate::device::portable::emulates_kernels;
use candle_core::{DType, Device, Result, Shape, Tensor};

/// The name of a dtype in the names of kernels.
pub(super) fn dtype_name(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("f32"),
        DType::F16 => Some("f16"),
        DType::BF16 => Some("bf16"),
        _ => None,
    }
}

/// How many elements a thread reads at once, at most 16 bytes: several only if all these lengths are multiples, and the tensors
/// start at such addresses.
pub(super) fn elements_at_once(dtype: DType, lengths: &[usize], tensors: &[&Tensor]) -> usize {
    let count = 16 / dtype.size_in_bytes();
    let divides = |length: &usize| length.is_multiple_of(count);
    let starts = tensors.iter().map(|tensor| tensor.layout().start_offset());
    if lengths.iter().all(divides) && starts.into_iter().all(|start| divides(&start)) {
        count
    } else {
        1
    }
}

/// Whether there are kernels for the tensors of a device: a GPU of NVIDIA, or the CPU if they are emulated.
pub(crate) fn are_available(device: &Device) -> bool {
    match device.is_cpu() {
        true => emulates_kernels(),
        false => cfg!(feature = "cuda") && device.is_cuda() && is_enabled(),
    }
}

/// Whether kernels can read these tensors: of a device with kernels, contiguous, not empty, of a known dtype, and not tracked for gradients.
pub(super) fn are_usable(tensors: &[&Tensor]) -> bool {
    let is_usable = |tensor: &&Tensor| {
        are_available(tensor.device())
            && tensor.is_contiguous()
            && tensor.elem_count() > 0
            && !tensor.track_op()
            && dtype_name(tensor.dtype()).is_some()
    };
    tensors.iter().all(is_usable)
}

/// Whether the kernels are used at all.
fn is_enabled() -> bool {
    static ENABLED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *ENABLED.get_or_init(|| std::env::var_os("AITK_CUDA_KERNELS").is_none_or(|value| value != "0"))
}

/// A tensor for the result of a kernel, which writes all of its elements.
///
/// # Errors
/// When the device has no memory.
pub(super) fn output(shape: &Shape, dtype: DType, device: &Device) -> Result<Tensor> {
    #[expect(unsafe_code, reason = "candle's function for memory that is not zeroed first")]
    // SAFETY: any bytes are valid numbers, and a kernel writes all elements before others read them: work on a device is done in order.
    unsafe {
        Tensor::empty(shape, dtype, device)
    }
}

/// Starts a kernel on the device of the tensors. Tensors that it changes must not share their storage with others that are read later
/// with their old values.
///
/// # Errors
/// When the driver fails.
pub(super) fn launch(launch: &Launch, args: &[Arg<'_>]) -> Result<()> {
    let device = args.iter().find_map(|arg| match arg {
        Arg::Tensor(tensor) => Some(tensor.device()),
        _ => None,
    });
    match device {
        Some(Device::Cpu) => emulation::run(launch, args),
        #[cfg(feature = "cuda")]
        Some(device) => on_cuda::launch(device.as_cuda_device()?, launch, args),
        _ => candle_core::bail!("{:?} {}: no device with kernels", launch.module, launch.kernel),
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::super::arguments::{Arg, Launch, Module};
    use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
    use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
    use candle_core::{CudaDevice, CudaStorage, Result, Storage, Tensor};

    impl Module {
        const fn ptx(self) -> (&'static str, &'static str) {
            match self {
                Self::Im2Col => ("aitk_im2col", include_str!(concat!(env!("OUT_DIR"), "/im2col.ptx"))),
                Self::Norm => ("aitk_norm", include_str!(concat!(env!("OUT_DIR"), "/norm.ptx"))),
                Self::Optimizer => (
                    "aitk_optimizer",
                    include_str!(concat!(env!("OUT_DIR"), "/optimizer.ptx")),
                ),
                Self::Pointwise => (
                    "aitk_pointwise",
                    include_str!(concat!(env!("OUT_DIR"), "/pointwise.ptx")),
                ),
                Self::Softmax => ("aitk_softmax", include_str!(concat!(env!("OUT_DIR"), "/softmax.ptx"))),
            }
        }
    }

    /// An argument as the driver reads it.
    enum Value {
        Address(u64),
        I32(i32),
        I64(i64),
        F32(f32),
    }

    pub(super) fn launch(device: &CudaDevice, launch: &Launch, args: &[Arg<'_>]) -> Result<()> {
        let stream = device.cuda_stream();
        let (name, ptx) = launch.module.ptx();
        let function = device.get_or_load_custom_func(&launch.kernel, name, ptx)?;
        let number = |number: usize| i32::try_from(number).map_err(candle_core::Error::wrap);
        let mut values = Vec::with_capacity(args.len());
        for arg in args {
            values.push(match arg {
                Arg::Tensor(tensor) => Value::Address(address(tensor, &stream)?),
                Arg::Absent => Value::Address(0),
                Arg::I32(value) => Value::I32(number(*value)?),
                Arg::I64(value) => Value::I64(i64::try_from(*value).map_err(candle_core::Error::wrap)?),
                #[expect(clippy::cast_possible_truncation, reason = "kernels compute in f32")]
                Arg::F32(value) => Value::F32(*value as f32),
            });
        }
        let mut builder = function.builder();
        for value in &values {
            match value {
                Value::Address(address) => builder.arg(address),
                Value::I32(value) => builder.arg(value),
                Value::I64(value) => builder.arg(value),
                Value::F32(value) => builder.arg(value),
            };
        }
        let size = |count: usize| u32::try_from(count).map_err(candle_core::Error::wrap);
        let config = LaunchConfig {
            grid_dim: (size(launch.blocks)?, 1, 1),
            block_dim: (size(launch.threads)?, 1, 1),
            shared_mem_bytes: 0,
        };
        #[expect(unsafe_code, reason = "the driver cannot check the arguments of a kernel")]
        // SAFETY: the functions of this module pass the arguments that the kernel declares, in its order, with lengths that are those
        // of the tensors. The tensors live until this call returns; the driver frees memory in the order of the stream, after the
        // kernel has run.
        unsafe {
            builder.launch(config).w()?;
        }
        Ok(())
    }

    /// The address of the first element of a tensor on a GPU.
    fn address(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(CudaStorage { slice, .. }) = &*storage else {
            candle_core::bail!("a kernel for CUDA got a tensor of another device")
        };
        let start = match slice {
            CudaStorageSlice::F32(slice) => slice.device_ptr(stream).0,
            CudaStorageSlice::F16(slice) => slice.device_ptr(stream).0,
            CudaStorageSlice::BF16(slice) => slice.device_ptr(stream).0,
            CudaStorageSlice::U8(slice) => slice.device_ptr(stream).0,
            _ => candle_core::bail!("a kernel for CUDA got a tensor of the dtype {:?}", tensor.dtype()),
        };
        Ok(start + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_elements_are_read_at_once_only_where_all_lengths_are_multiples() {
        let x = Tensor::zeros(32, DType::F16, &Device::Cpu).unwrap();
        assert_eq!(elements_at_once(DType::F16, &[16, 64], &[&x]), 8);
        assert_eq!(elements_at_once(DType::F16, &[16, 77], &[&x]), 1);
        let part = x.narrow(0, 4, 16).unwrap();
        assert_eq!(elements_at_once(DType::F16, &[16], &[&x, &part]), 1);
        assert_eq!(elements_at_once(DType::F32, &[16], &[&part]), 4);
    }
}
