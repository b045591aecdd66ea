//! The memory that the process has taken so far.

use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::plan::device_factors::CUDA_CONTEXT;

/// The most bytes that this process took on a device in the current phase. `None`: the system does not report it.
///
/// On a CPU it is the peak of the process, which the program resets at the beginning of a phase where the system allows it. On a GPU it is what the
/// process has reserved for tensors, with the driver's context.
pub(super) fn process_peak(device: DeviceRef) -> Option<u64> {
    #[cfg(test)]
    if let Some(taken) = tests_override::get() {
        return taken;
    }
    match device.kind {
        DeviceKind::Cpu => host_peak(),
        DeviceKind::Cuda | DeviceKind::Metal => {
            crate::device::end_phase(device).map(|peak| peak.reserved.saturating_add(CUDA_CONTEXT))
        }
    }
}

/// The line `VmHWM` of `/proc/self/status`.
fn host_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A peak that tests set for the thread on which they train: the process of the tests runs many of them.
#[cfg(test)]
pub(super) mod tests_override {
    use std::cell::Cell;

    thread_local! {
        static TAKEN: Cell<Option<Option<u64>>> = const { Cell::new(None) };
    }

    pub(in super::super) fn set(taken: Option<Option<u64>>) {
        TAKEN.with(|cell| cell.set(taken));
    }

    pub(super) fn get() -> Option<Option<u64>> {
        TAKEN.with(Cell::get)
    }
}
