//! CUDA devices: how many there are, their properties and their peak memory.

use super::gpu::{Gpu, too_old_for_build};
use super::peak::DevicePeak;
use super::rate::gpu_gflops;
use super::self_test;
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::Device;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};

/// The number of CUDA devices.
///
/// # Errors
/// Why the driver cannot be used; a machine without a device is not an error.
pub(super) fn count() -> Result<u32, String> {
    match CudaContext::device_count() {
        Ok(count) => Ok(u32::try_from(count).unwrap_or(0)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => {
            Err("the CUDA library found is the stub of a toolkit, without a driver: install NVIDIA's driver".to_owned())
        }
        Err(error) => Err(format!(
            "NVIDIA's driver does not start ({error:?}): update it, or reboot if it was just updated"
        )),
    }
}

/// Opens a device, reads its properties and tests it.
pub(super) fn open_and_test(index: u32) -> candle_core::Result<Gpu> {
    let device = Device::new_cuda(index as usize)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let context = stream.context();
    let (major, minor) = context.compute_capability().w()?;
    let (free, total) = context.mem_get_info().w()?;
    let name = context.name().w()?;
    let (dtypes, mut faults) = self_test::working_dtypes(&device);
    if let Some(built) = too_old_for_build(major, minor, option_env!("CUDA_COMPUTE_CAP")) {
        faults.insert(0, built);
    }
    let gflops = gpu_gflops(&device, &dtypes);
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
        gflops,
    })
}

/// Lets this process keep memory that its tensors freed. Otherwise the driver gives it back, and takes it anew, each time the processor
/// waits for the device.
pub(super) fn keep_freed_memory(index: usize) {
    let Ok(device) = i32::try_from(index)
        .map_err(drop)
        .and_then(|index| result::device::get(index).map_err(drop))
    else {
        return;
    };
    let mut everything = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    #[expect(unsafe_code, reason = "the driver's C interface takes raw pointers")]
    // SAFETY: the default pool belongs to the driver and lives as long as the device. The attribute is a u64 that may be written; the
    // pointer is to a u64 variable that outlives the call.
    let done = unsafe {
        result::device::get_mem_pool(device)
            .and_then(|pool| result::mem_pool::set_attribute(pool, attribute, (&raw mut everything).cast()))
    };
    if let Err(error) = done {
        tracing::debug!(?error, "the driver does not let this process keep freed memory");
    }
}

/// The peaks of the pool of the device's tensors since the last call. Then freed memory that the process has kept is returned to the
/// driver: the next phase needs tensors of other sizes, which would not fit into its gaps.
pub(super) fn end_phase(index: u32) -> Option<DevicePeak> {
    let device = result::device::get(i32::try_from(index).ok()?).ok()?;
    #[expect(unsafe_code, reason = "the driver's C interface takes raw pointers")]
    // SAFETY: the default pool belongs to the driver and lives as long as the device; only memory that no tensor uses is returned.
    // The attributes are u64s that may be read, and reset by writing zero; the pointers are to u64 variables that outlive the calls.
    unsafe {
        let pool = result::device::get_mem_pool(device).ok()?;
        let read = |attribute| {
            let mut max = 0_u64;
            result::mem_pool::get_attribute(pool, attribute, (&raw mut max).cast()).ok()?;
            Some(max)
        };
        let attributes = [
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        ];
        let peak = DevicePeak {
            allocated: read(attributes[0])?,
            reserved: read(attributes[1])?,
        };
        if let Err(error) = result::mem_pool::trim_to(pool, 0) {
            tracing::debug!(?error, "the driver takes no memory back");
        }
        for attribute in attributes {
            let mut restart = 0_u64;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut restart).cast()).ok()?;
        }
        Some(peak)
    }
}
