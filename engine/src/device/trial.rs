//! What the devices of this machine can do, found by trying: a small product in each dtype, compared with plain loops.

use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::{DType, Device, Tensor};

/// A GPU as its driver describes it, and what came out right on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Which one.
    pub device: DeviceRef,
    /// What the vendor calls it. Empty when the driver does not say.
    pub name: String,
    /// `sm_89`, `applegpu_g15s`, ….
    pub architecture: String,
    /// Bytes it has.
    pub memory_total: u64,
    /// Bytes that are free now; on a Mac, of what the system recommends to use at once.
    pub memory_free: u64,
    /// dtypes that work.
    pub dtypes: Vec<String>,
}

const ROWS: usize = 8;
const INNER: usize = 16;
const COLUMNS: usize = 4;

/// The dtypes in which `device` computes a small product rightly: some of `f32`, `bf16`, `f16`.
fn working_dtypes(device: &Device) -> Vec<String> {
    [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")]
        .into_iter()
        .filter(|&(dtype, _)| product_is_right(device, dtype).unwrap_or(false))
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// The dtypes that work on the processor.
#[must_use]
pub fn cpu_dtypes() -> Vec<String> {
    working_dtypes(&Device::Cpu)
}

/// Multiplies two matrices whose entries every dtype holds exactly, and compares with the exact product.
fn product_is_right(device: &Device, dtype: DType) -> candle_core::Result<bool> {
    let entry = |at: usize, by: usize| ((at * by % 11) as f32 - 5.0) / 8.0;
    let left: Vec<f32> = (0..ROWS * INNER).map(|at| entry(at, 7)).collect();
    let right: Vec<f32> = (0..INNER * COLUMNS).map(|at| entry(at, 3)).collect();
    let place = |values: &[f32], rows, columns| {
        Tensor::from_slice(values, (rows, columns), &Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(device)
    };
    let product = place(&left, ROWS, INNER)?.matmul(&place(&right, INNER, COLUMNS)?)?;
    let product = product
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    // Half precisions round the sum: bf16 keeps 8 bits of it, f16 11.
    let tolerance = match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1.0 / 512.0,
        _ => 1e-5,
    };
    let right_everywhere = product.iter().enumerate().all(|(at, &got)| {
        let (row, column) = (at / COLUMNS, at % COLUMNS);
        let expected: f32 = (0..INNER)
            .map(|k| left[row * INNER + k] * right[k * COLUMNS + column])
            .sum();
        (got - expected).abs() <= tolerance * expected.abs().max(1.0)
    });
    Ok(product.len() == ROWS * COLUMNS && right_everywhere)
}

/// Every GPU that this build can use and that answers. A GPU whose driver fails is left out with a line in the log.
#[must_use]
pub fn gpus() -> Vec<Gpu> {
    let mut found = Vec::new();
    for (kind, count, open) in [
        (
            DeviceKind::Cuda,
            cuda::count as fn() -> u32,
            cuda::open as fn(u32) -> candle_core::Result<Gpu>,
        ),
        (DeviceKind::Metal, metal::count, metal::open),
    ] {
        for index in 0..quietly(count).unwrap_or(0) {
            match quietly(|| open(index)) {
                Some(Ok(gpu)) => found.push(gpu),
                Some(Err(error)) => tracing::warn!(%error, kind = kind.name(), index, "device left out"),
                None => tracing::warn!(kind = kind.name(), index, "device left out: its driver failed"),
            }
        }
    }
    found
}

/// A driver library that is missing or broken ends in a panic inside its binding.
fn quietly<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).ok()
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{Gpu, working_dtypes};
    use aitk_common::capability::{DeviceKind, DeviceRef};
    use candle_core::Device;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    use std::path::Path;

    pub(super) fn count() -> u32 {
        // Asked of the file system first: without a driver the binding panics. /dev/dxg is the driver under WSL.
        let driver = ["/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg"]
            .iter()
            .any(|path| Path::new(path).exists());
        if !driver {
            return 0;
        }
        CudaContext::device_count()
            .ok()
            .and_then(|count| u32::try_from(count).ok())
            .unwrap_or(0)
    }

    pub(super) fn open(index: u32) -> candle_core::Result<Gpu> {
        let device = Device::new_cuda(index as usize)?;
        let stream = device.as_cuda_device()?.cuda_stream();
        let context = stream.context();
        let (major, minor) = context.compute_capability().w()?;
        let (free, total) = context.mem_get_info().w()?;
        Ok(Gpu {
            device: DeviceRef {
                kind: DeviceKind::Cuda,
                index,
            },
            name: context.name().w()?,
            architecture: format!("sm_{major}{minor}"),
            memory_total: total as u64,
            memory_free: free as u64,
            dtypes: working_dtypes(&device),
        })
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    pub(super) fn count() -> u32 {
        0
    }

    pub(super) fn open(_index: u32) -> candle_core::Result<super::Gpu> {
        Err(candle_core::Error::NotCompiledWithCudaSupport)
    }
}

#[cfg(feature = "metal")]
mod metal {
    use super::{Gpu, working_dtypes};
    use aitk_common::capability::{DeviceKind, DeviceRef};
    use candle_core::Device;

    pub(super) fn count() -> u32 {
        // Apple Silicon has one GPU.
        u32::from(candle_core::utils::metal_is_available())
    }

    pub(super) fn open(index: u32) -> candle_core::Result<Gpu> {
        let device = Device::new_metal(index as usize)?;
        let metal = device.as_metal_device()?.metal_device();
        let usable = metal.recommended_max_working_set_size() as u64;
        Ok(Gpu {
            device: DeviceRef {
                kind: DeviceKind::Metal,
                index,
            },
            name: String::new(),
            architecture: metal.architecture_name(),
            memory_total: usable,
            memory_free: usable.saturating_sub(metal.current_allocated_size() as u64),
            dtypes: working_dtypes(&device),
        })
    }
}

#[cfg(not(feature = "metal"))]
mod metal {
    pub(super) fn count() -> u32 {
        0
    }

    pub(super) fn open(_index: u32) -> candle_core::Result<super::Gpu> {
        Err(candle_core::Error::NotCompiledWithMetalSupport)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_computes_in_every_dtype() {
        assert_eq!(cpu_dtypes(), ["f32", "bf16", "f16"]);
    }
}
