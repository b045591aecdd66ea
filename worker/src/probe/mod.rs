//! What this machine offers: its devices, what they can do, and how much memory a task may use.

mod cpu;
mod memory;

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::plan::profile::MemoryProfile;
use aitk_engine::device::gpus::{self, Gpu};
pub use memory::{Memory, memory};
use std::str::FromStr;

const GIB: u64 = 1 << 30;

/// What looking for devices found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Every device that this build can use and that computes: GPUs first, the CPU last.
    pub devices: Vec<Device>,
    /// GPUs and drivers that do not; a sentence each, for people.
    pub left_out: Vec<String>,
    /// GPUs that may be here and that this build was not made for; a sentence each.
    pub not_built_for: Vec<String>,
}

/// Looks for devices and tries them. Takes a second or so; with CUDA, the first time on a machine, more.
#[must_use]
pub fn look() -> Found {
    let survey = gpus::survey();
    let mut devices: Vec<Device> = survey.gpus.into_iter().map(gpu).collect();
    devices.push(cpu::device());
    Found {
        devices,
        left_out: survey.left_out,
        not_built_for: survey.not_built_for,
    }
}

/// The devices of [`look`]; what is left out goes to the log.
#[must_use]
pub fn devices() -> Vec<Device> {
    let found = look();
    for reason in &found.left_out {
        tracing::warn!("{reason}");
    }
    for notice in &found.not_built_for {
        tracing::info!("{notice}");
    }
    found.devices
}

fn gpu(found: Gpu) -> Device {
    let memory_budget = gpu_budget(found.device.kind, found.memory_free);
    Device {
        device: found.device,
        name: if found.name.is_empty() { cpu::name() } else { found.name },
        architecture: found.architecture,
        memory_total: found.memory_total,
        memory_budget,
        dtypes: found.dtypes,
        attention: vec!["eager".to_owned()],
        profile: MemoryProfile::for_gpu_budget(memory_budget),
    }
}

/// With CUDA, free memory less a margin for the driver's own needs and for fragmentation: a sixteenth, at least half a
/// GiB. What Metal recommends leaves room for the rest of the system already.
fn gpu_budget(kind: DeviceKind, free: u64) -> u64 {
    match kind {
        DeviceKind::Cuda => free.saturating_sub((free / 16).max(GIB / 2)),
        DeviceKind::Metal | DeviceKind::Cpu => free,
    }
}

/// Which devices a worker offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The GPUs, or the CPU when there is none.
    #[default]
    Auto,
    /// These.
    These(Vec<DeviceRef>),
}

/// A choice of devices that cannot be read or met.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// The text is not a choice.
    #[error("cannot read the device {0:?}: expected auto, cpu, cuda:N or metal:N, several with commas between them")]
    Unreadable(String),
    /// There is no such device.
    #[error("this machine has no device {wanted} (it has: {found})")]
    Missing {
        /// What was asked for.
        wanted: String,
        /// What there is.
        found: String,
    },
}

impl FromStr for Choice {
    type Err = ChoiceError;

    fn from_str(text: &str) -> Result<Self, ChoiceError> {
        if text.trim() == "auto" {
            return Ok(Self::Auto);
        }
        text.split(',')
            .map(|part| parse_device(part.trim()))
            .collect::<Result<_, _>>()
            .map(Self::These)
    }
}

fn parse_device(text: &str) -> Result<DeviceRef, ChoiceError> {
    let unreadable = || ChoiceError::Unreadable(text.to_owned());
    let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
    let kind = match kind {
        "cpu" => DeviceKind::Cpu,
        "cuda" => DeviceKind::Cuda,
        // As torch calls it.
        "metal" | "mps" => DeviceKind::Metal,
        _ => return Err(unreadable()),
    };
    Ok(DeviceRef {
        kind,
        index: index.parse().map_err(|_| unreadable())?,
    })
}

/// Those of `found` that were chosen, in the order of the choice.
///
/// # Errors
/// [`ChoiceError::Missing`] for a device that is not there.
pub fn choose(found: Vec<Device>, choice: &Choice) -> Result<Vec<Device>, ChoiceError> {
    let names = |devices: &[Device]| devices.iter().map(|d| label(d.device)).collect::<Vec<_>>().join(", ");
    match choice {
        Choice::Auto => {
            let gpus: Vec<Device> = found
                .iter()
                .filter(|d| d.device.kind != DeviceKind::Cpu)
                .cloned()
                .collect();
            Ok(if gpus.is_empty() { found } else { gpus })
        }
        Choice::These(wanted) => {
            let mut chosen: Vec<Device> = Vec::new();
            for wanted in wanted {
                let device =
                    found
                        .iter()
                        .find(|device| device.device == *wanted)
                        .ok_or_else(|| ChoiceError::Missing {
                            wanted: label(*wanted),
                            found: names(&found),
                        })?;
                if !chosen.iter().any(|known| known.device == *wanted) {
                    chosen.push(device.clone());
                }
            }
            Ok(chosen)
        }
    }
}

/// `cuda:0`, `metal:0`, `cpu`.
#[must_use]
pub fn label(device: DeviceRef) -> String {
    match device.kind {
        DeviceKind::Cpu => "cpu".to_owned(),
        kind => format!("{}:{}", kind.name(), device.index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(text: &str) -> Device {
        Device {
            device: parse_device(text).unwrap(),
            ..cpu::device()
        }
    }

    fn chosen(found: &[&str], choice: &str) -> Result<Vec<String>, ChoiceError> {
        let found = found.iter().map(|text| device(text)).collect();
        let devices = choose(found, &choice.parse()?)?;
        Ok(devices.iter().map(|device| label(device.device)).collect())
    }

    #[test]
    fn auto_takes_gpus_and_else_the_cpu() {
        assert_eq!(
            chosen(&["cuda:0", "cuda:1", "cpu"], "auto").unwrap(),
            ["cuda:0", "cuda:1"]
        );
        assert_eq!(chosen(&["cpu"], "auto").unwrap(), ["cpu"]);
    }

    #[test]
    fn a_choice_is_met_or_refused_with_what_there_is() {
        assert_eq!(
            chosen(&["cuda:0", "cpu"], "cpu, cuda:0,cpu").unwrap(),
            ["cpu", "cuda:0"]
        );
        let message = chosen(&["cpu"], "cuda:1").unwrap_err().to_string();
        assert!(
            message.contains("cuda:1") && message.contains("it has: cpu"),
            "{message}"
        );
        for bad in ["", "gpu", "cuda:x", "cuda:-1", "cpu,,"] {
            assert!(
                matches!(chosen(&["cpu"], bad), Err(ChoiceError::Unreadable(_))),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_card_keeps_a_margin() {
        assert_eq!(gpu_budget(DeviceKind::Cuda, 0), 0);
        assert_eq!(gpu_budget(DeviceKind::Cuda, 4 * GIB), 4 * GIB - GIB / 2);
        assert_eq!(gpu_budget(DeviceKind::Cuda, 32 * GIB), 30 * GIB);
        assert_eq!(gpu_budget(DeviceKind::Metal, 32 * GIB), 32 * GIB);
    }

    #[test]
    fn the_cpu_is_always_there() {
        let devices = devices();
        let cpu = devices.last().unwrap();
        assert_eq!(cpu.device.kind, DeviceKind::Cpu);
        assert_eq!(cpu.profile, MemoryProfile::CpuOnly);
        assert!(cpu.dtypes.iter().any(|dtype| dtype == "f32"));
        assert!(cpu.memory_budget > 0 && cpu.memory_budget < cpu.memory_total, "{cpu:?}");
        assert!(cpu.name.contains("core"), "{}", cpu.name);
    }
}
