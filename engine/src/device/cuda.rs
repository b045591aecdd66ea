//! What CUDA says of its cards.

use super::gpus::{Gpu, older_than_built_for};
use super::trial;
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::Device;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};

/// How many there are; why none can be had, where there should be some.
pub(super) fn count() -> Result<u32, String> {
    match CudaContext::device_count() {
        Ok(count) => Ok(u32::try_from(count).unwrap_or(0)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => {
            Err("the CUDA library found is the empty one of a tool kit: install NVIDIA's driver".to_owned())
        }
        Err(error) => Err(format!(
            "NVIDIA's driver does not start ({error:?}): update it, or reboot after an update"
        )),
    }
}

/// Opens one and tries it.
pub(super) fn examine(index: u32) -> candle_core::Result<Gpu> {
    let device = Device::new_cuda(index as usize)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let context = stream.context();
    let (major, minor) = context.compute_capability().w()?;
    let (free, total) = context.mem_get_info().w()?;
    let name = context.name().w()?;
    let (dtypes, mut faults) = trial::working_dtypes(&device);
    if let Some(built) = older_than_built_for(major, minor, option_env!("CUDA_COMPUTE_CAP")) {
        faults.insert(0, built);
    }
    Ok(Gpu {
        device: DeviceRef {
            kind: DeviceKind::Cuda,
            index,
        },
        name,
        architecture: format!("sm_{major}{minor}"),
        memory_total: total as u64,
        memory_free: free as u64,
        dtypes,
        faults,
    })
}

/// The most bytes that were in use at once of the pool from which tensors are taken; it counts anew from here.
pub(super) fn take_peak(index: u32) -> Option<u64> {
    let device = result::device::get(i32::try_from(index).ok()?).ok()?;
    let (mut most, mut restart) = (0_u64, 0_u64);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    // SAFETY: the pool is the driver's own for this device and lives as long as it; the attribute is a u64 to read, and
    // zero is what may be written to it.
    #[allow(unsafe_code)]
    unsafe {
        let pool = result::device::get_mem_pool(device).ok()?;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut most).cast()).ok()?;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut restart).cast()).ok()?;
    }
    Some(most)
}
