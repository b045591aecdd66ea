//! Finds the devices of this machine, their capabilities, and the memory that a task may use.

mod cpu;
mod memory;

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::plan::profile::MemoryProfile;
use aitk_engine::device::gpus::{self, Gpu};
pub use memory::{Memory, memory};
use std::str::FromStr;

const GIB: u64 = 1 << 30;

/// The result of the device probe.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeResult {
    /// All usable devices: GPUs first, the CPU last.
    pub devices: Vec<Device>,
    /// GPUs and drivers that cannot be used; a sentence each.
    pub left_out: Vec<String>,
    /// GPUs that may exist and that this build does not support; a sentence each.
    pub not_built_for: Vec<String>,
}

/// Finds devices and tests them. Takes about a second; with CUDA, longer the first time on a machine.
#[must_use]
pub fn probe_devices() -> ProbeResult {
    let probe = gpus::probe_gpus();
    let mut devices: Vec<Device> = probe.gpus.into_iter().map(gpu_device).collect();
    devices.push(cpu::device());
    ProbeResult {
        devices,
        left_out: probe.left_out,
        not_built_for: probe.not_built_for,
    }
}

/// The devices of [`probe_devices`]; the others are logged.
#[must_use]
pub fn devices() -> Vec<Device> {
    let found = probe_devices();
    for reason in &found.left_out {
        tracing::warn!("{reason}");
    }
    for notice in &found.not_built_for {
        tracing::info!("{notice}");
    }
    found.devices
}

fn gpu_device(found: Gpu) -> Device {
    let memory_budget = gpu_budget(found.device.kind, found.memory_free);
    Device {
        id: found.device,
        name: if found.name.is_empty() { cpu::name() } else { found.name },
        architecture: found.architecture,
        memory_total: found.memory_total,
        memory_budget,
        dtypes: found.dtypes,
        attention: vec!["eager".to_owned()],
        profile: MemoryProfile::for_gpu_budget(memory_budget),
        gflops: found.gflops,
    }
}

/// The memory that a task may use on a GPU. With CUDA: free memory less a margin for the driver and for
/// fragmentation, a sixteenth but at least half a GiB. Metal's recommendation already leaves memory for the rest of
/// the system.
fn gpu_budget(kind: DeviceKind, free: u64) -> u64 {
    match kind {
        DeviceKind::Cuda => free.saturating_sub((free / 16).max(GIB / 2)),
        DeviceKind::Metal | DeviceKind::Cpu => free,
    }
}

/// The selection of devices that a worker offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceSelection {
    /// The GPUs, or the CPU if there is none.
    #[default]
    Auto,
    /// The listed devices.
    Listed(Vec<DeviceRef>),
}

/// Why a selection of devices cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceSelectionError {
    /// The text is not a valid selection.
    #[error(
        "cannot read the device {0:?}: expected auto, cpu, cpu:portable, cuda:N or metal:N, several with commas between them"
    )]
    Unreadable(String),
    /// A selected device does not exist.
    #[error("this machine has no device {requested} (it has: {found})")]
    Missing {
        /// The selected device.
        requested: String,
        /// The devices of this machine.
        found: String,
    },
}

impl FromStr for DeviceSelection {
    type Err = DeviceSelectionError;

    fn from_str(text: &str) -> Result<Self, DeviceSelectionError> {
        if text.trim() == "auto" {
            return Ok(Self::Auto);
        }
        text.split(',')
            .map(|part| parse_device(part.trim()))
            .collect::<Result<_, _>>()
            .map(Self::Listed)
    }
}

/// The name of the CPU in portable mode.
const PORTABLE_CPU: &str = "cpu:portable";

fn parse_device(text: &str) -> Result<DeviceRef, DeviceSelectionError> {
    let unreadable = || DeviceSelectionError::Unreadable(text.to_owned());
    if text == PORTABLE_CPU {
        return Ok(DeviceRef::PORTABLE_CPU);
    }
    let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
    let kind = match kind {
        "cpu" => DeviceKind::Cpu,
        "cuda" => DeviceKind::Cuda,
        // `mps` is PyTorch's name.
        "metal" | "mps" => DeviceKind::Metal,
        _ => return Err(unreadable()),
    };
    let index = index.parse().map_err(|_| unreadable())?;
    // The index of the portable CPU is not a name for it.
    if kind == DeviceKind::Cpu && index != 0 {
        return Err(unreadable());
    }
    Ok(DeviceRef { kind, index })
}

/// The devices of `found` that were selected, in the order of the selection.
///
/// # Errors
/// [`DeviceSelectionError::Missing`] for a device that does not exist.
pub fn choose(found: Vec<Device>, choice: &DeviceSelection) -> Result<Vec<Device>, DeviceSelectionError> {
    let names = |devices: &[Device]| devices.iter().map(|d| label(d.id)).collect::<Vec<_>>().join(", ");
    match choice {
        DeviceSelection::Auto => {
            let gpus: Vec<Device> = found.iter().filter(|d| d.id.kind != DeviceKind::Cpu).cloned().collect();
            Ok(if gpus.is_empty() { found } else { gpus })
        }
        DeviceSelection::Listed(requested) => {
            let mut chosen: Vec<Device> = Vec::new();
            for requested in requested {
                if chosen.iter().any(|known| known.id == *requested) {
                    continue;
                }
                // It is not a device of the machine, and exists only where it is selected.
                if requested.is_portable() {
                    chosen.push(cpu::portable_device());
                    continue;
                }
                let device = found.iter().find(|device| device.id == *requested).ok_or_else(|| {
                    DeviceSelectionError::Missing {
                        requested: label(*requested),
                        found: names(&found),
                    }
                })?;
                chosen.push(device.clone());
            }
            Ok(chosen)
        }
    }
}

/// `cuda:0`, `metal:0`, `cpu`, `cpu:portable`.
#[must_use]
pub fn label(device: DeviceRef) -> String {
    match device.kind {
        DeviceKind::Cpu if device.is_portable() => PORTABLE_CPU.to_owned(),
        DeviceKind::Cpu => "cpu".to_owned(),
        kind => format!("{}:{}", kind.name(), device.index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(text: &str) -> Device {
        Device {
            id: parse_device(text).unwrap(),
            ..cpu::device()
        }
    }

    fn chosen(found: &[&str], choice: &str) -> Result<Vec<String>, DeviceSelectionError> {
        let found = found.iter().map(|text| device(text)).collect();
        let devices = choose(found, &choice.parse()?)?;
        Ok(devices.iter().map(|device| label(device.id)).collect())
    }

    #[test]
    fn auto_selects_the_gpus_or_else_the_cpu() {
        assert_eq!(
            chosen(&["cuda:0", "cuda:1", "cpu"], "auto").unwrap(),
            ["cuda:0", "cuda:1"]
        );
        assert_eq!(chosen(&["cpu"], "auto").unwrap(), ["cpu"]);
    }

    #[test]
    fn a_missing_device_is_an_error_that_lists_the_existing_ones() {
        assert_eq!(
            chosen(&["cuda:0", "cpu"], "cpu, cuda:0,cpu").unwrap(),
            ["cpu", "cuda:0"]
        );
        let message = chosen(&["cpu"], "cuda:1").unwrap_err().to_string();
        assert!(
            message.contains("cuda:1") && message.contains("it has: cpu"),
            "{message}"
        );
        assert_eq!(chosen(&["cpu"], "cpu:portable,cpu").unwrap(), ["cpu:portable", "cpu"]);
        for bad in ["", "gpu", "cuda:x", "cuda:-1", "cpu,,", "cpu:1"] {
            assert!(
                matches!(chosen(&["cpu"], bad), Err(DeviceSelectionError::Unreadable(_))),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn part_of_a_cuda_cards_memory_stays_free() {
        assert_eq!(gpu_budget(DeviceKind::Cuda, 0), 0);
        assert_eq!(gpu_budget(DeviceKind::Cuda, 4 * GIB), 4 * GIB - GIB / 2);
        assert_eq!(gpu_budget(DeviceKind::Cuda, 32 * GIB), 30 * GIB);
        assert_eq!(gpu_budget(DeviceKind::Metal, 32 * GIB), 32 * GIB);
    }

    #[test]
    fn the_cpu_is_always_found() {
        let devices = devices();
        let cpu = devices.last().unwrap();
        assert_eq!(cpu.id.kind, DeviceKind::Cpu);
        assert_eq!(cpu.profile, MemoryProfile::CpuOnly);
        assert!(cpu.dtypes.iter().any(|dtype| dtype == "f32"));
        assert!(cpu.memory_budget > 0 && cpu.memory_budget < cpu.memory_total, "{cpu:?}");
        assert!(cpu.name.contains("core"), "{}", cpu.name);
    }
}
