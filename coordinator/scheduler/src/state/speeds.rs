//! How fast devices are: a guess by kind until work was measured there, then what was measured.

use crate::model::Speed;

use aitk_common::capability::{Device, DeviceKind};
use aitk_common::plan::family::{Family, UNKNOWN_SECONDS_PER_UNIT};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;
use std::time::Duration;

/// A device that takes this many times as long as the fastest one that fits is not taken: waiting is better.
pub(crate) const TOO_SLOW: f64 = 8.0;
/// Kinds of devices and families that are remembered; far more than a pool has.
pub(crate) const KEPT: usize = 4096;

/// How much longer a step takes under a profile than with everything on the device. Encoders that leave cost little;
/// 8-bit weights 1.05 to 1.3; streamed blocks about a tenth to twice as long, by the bus (figures of SimpleTuner's
/// sweeps and musubi-tuner's pull request 972).
pub(crate) fn slowdown(profile: MemoryProfile) -> f64 {
    match profile {
        MemoryProfile::FullGpu | MemoryProfile::CpuOnly => 1.0,
        MemoryProfile::Balanced => 1.05,
        MemoryProfile::GpuPoor => 1.3,
        MemoryProfile::Extreme => 2.0,
    }
}

/// How much longer work takes than on a middling CUDA card, before anything was measured.
fn guess(kind: DeviceKind) -> f64 {
    match kind {
        DeviceKind::Cuda => 1.0,
        DeviceKind::Metal => 4.0,
        DeviceKind::Cpu => 100.0,
    }
}

/// What was measured: device name -> family -> seconds per unit with everything on the device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Speeds(pub(crate) BTreeMap<String, BTreeMap<String, f64>>);

impl Speeds {
    /// Takes over what an earlier process learned.
    pub(crate) fn take_over(&mut self, speed: &Speed) {
        if speed.nanoseconds_per_unit > 0 && self.0.len() < KEPT {
            let seconds = Duration::from_nanos(speed.nanoseconds_per_unit).as_secs_f64();
            self.0
                .entry(speed.device.clone())
                .or_default()
                .insert(speed.family.clone(), seconds);
        }
    }

    pub(crate) fn measured(&self, device: &Device, family: Option<&str>) -> Option<f64> {
        self.0.get(&device.name)?.get(family?).copied()
    }

    /// Whether work of this family was measured on such a device.
    pub(crate) fn is_measured(&self, device: &Device, family: Option<&str>) -> bool {
        self.measured(device, family).is_some()
    }

    /// Seconds per unit of work on a device under a profile.
    pub(crate) fn seconds_per_unit(&self, device: &Device, family: Option<&str>, profile: MemoryProfile) -> f64 {
        let plain = self.measured(device, family).unwrap_or_else(|| {
            let usual = family
                .and_then(Family::of)
                .map_or(UNKNOWN_SECONDS_PER_UNIT, |family| family.seconds_per_unit);
            usual * guess(device.device.kind)
        });
        plain * slowdown(profile)
    }
}
