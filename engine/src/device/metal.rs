//! What Metal says of the GPU.

use super::gpus::Gpu;
use super::trial;
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::Device;

/// How many there are: Apple Silicon has one GPU.
pub(super) fn count() -> Result<u32, String> {
    // candle takes it out of a list that is empty where the system shows no GPU, as in a virtual machine.
    let there = trial::catch_panic(|| Device::new_metal(0)).is_some();
    if there {
        Ok(1)
    } else {
        Err("the system shows no GPU for Metal".to_owned())
    }
}

/// Opens it and tries it.
pub(super) fn examine(index: u32) -> candle_core::Result<Gpu> {
    let device = Device::new_metal(index as usize)?;
    let metal = device.as_metal_device()?.metal_device();
    // What may be used at once before the system moves things out: memory is shared with everything else.
    let usable = metal.recommended_max_working_set_size() as u64;
    let free = usable.saturating_sub(metal.current_allocated_size() as u64);
    let architecture = metal.architecture_name();
    let (dtypes, faults) = trial::working_dtypes(&device);
    Ok(Gpu {
        device: DeviceRef {
            kind: DeviceKind::Metal,
            index,
        },
        name: String::new(),
        architecture,
        memory_total: usable,
        memory_free: free,
        dtypes,
        faults,
    })
}
