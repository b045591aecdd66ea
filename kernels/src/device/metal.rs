//! The GPU of an Apple Silicon Mac.

use super::gpu::Gpu;
use super::rate::gpu_gflops;
use super::self_test;
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::Device;

/// The number of GPUs: Apple Silicon has one.
///
/// # Errors
/// When the system has no GPU for Metal.
pub(super) fn count() -> Result<u32, String> {
    // candle panics when the system lists no GPU, as in a virtual machine.
    let found = self_test::catch_panic(|| Device::new_metal(0)).is_some_and(|opened| opened.is_ok());
    if found {
        Ok(1)
    } else {
        Err("the system lists no GPU for Metal".to_owned())
    }
}

/// Opens the GPU, reads its properties and tests it.
pub(super) fn open_and_test(index: u32) -> candle_core::Result<Gpu> {
    let device = Device::new_metal(index as usize)?;
    let metal = device.as_metal_device()?.metal_device();
    // The memory is shared with all other programs: this much can be used before the system starts to swap.
    let usable = metal.recommended_max_working_set_size() as u64;
    let free = usable.saturating_sub(metal.current_allocated_size() as u64);
    let architecture = metal.architecture_name();
    let (dtypes, faults) = self_test::working_dtypes(&device);
    let gflops = gpu_gflops(&device, &dtypes);
    Ok(Gpu {
        device: DeviceRef {
            kind: DeviceKind::Metal,
            index,
        },
        // The worker fills in the chip's name.
        name: String::new(),
        architecture,
        memory_total: usable,
        memory_free: free,
        dtypes,
        faults,
        gflops,
    })
}
