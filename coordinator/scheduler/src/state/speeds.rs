//! Speeds of devices: measured ones, and until there is a measurement guesses by the rate of their matrix products.

use crate::model::Speed;

use aitk_common::capability::Device;
use aitk_common::plan::demand::WORK_UNIT;
use aitk_common::plan::family::FamilySpeed;
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;
use std::time::Duration;

/// A device is not used if it is slower than the fastest device that fits by more than this factor: waiting is better.
pub(crate) const MAX_SLOWDOWN: f64 = 8.0;
/// The most names of devices that are remembered; far more than a cluster has.
pub(crate) const MAX_ENTRIES: usize = 4096;

/// The slowdown of a step under a profile, compared with everything on the device. Offloaded text encoders cost
/// little; 8-bit weights 1.05 to 1.3; streamed blocks 1.1 to 2, depending on the bus (figures of SimpleTuner's sweeps and
/// musubi-tuner's pull request 972).
pub(crate) fn slowdown(profile: MemoryProfile) -> f64 {
    match profile {
        MemoryProfile::FullGpu | MemoryProfile::CpuOnly => 1.0,
        MemoryProfile::Balanced => 1.05,
        MemoryProfile::GpuPoor => 1.3,
        MemoryProfile::Extreme => 2.0,
    }
}

/// Measured speeds: device name -> family -> seconds per pass with everything on the device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Speeds(pub(crate) BTreeMap<String, BTreeMap<String, f64>>);

impl Speeds {
    /// Adds a speed that was measured before a restart, unless work was counted otherwise then.
    pub(crate) fn restore(&mut self, speed: &Speed) {
        if speed.unit == WORK_UNIT && speed.nanoseconds_per_pass > 0 && self.0.len() < MAX_ENTRIES {
            let seconds = Duration::from_nanos(speed.nanoseconds_per_pass).as_secs_f64();
            self.0
                .entry(speed.device.clone())
                .or_default()
                .insert(speed.family.clone(), seconds);
        }
    }

    pub(crate) fn measured(&self, device: &Device, family: Option<&str>) -> Option<f64> {
        self.0.get(&device.name)?.get(family?).copied()
    }

    /// Whether work of this family was measured on a device of this name.
    pub(crate) fn is_measured(&self, device: &Device, family: Option<&str>) -> bool {
        self.measured(device, family).is_some()
    }

    /// Seconds per pass on a device under a profile, measured or guessed.
    pub(crate) fn seconds_per_pass(&self, device: &Device, family: Option<&str>, profile: MemoryProfile) -> f64 {
        let plain = self.measured(device, family).unwrap_or_else(|| {
            let family = FamilySpeed::or_unknown(family.and_then(FamilySpeed::of));
            family.estimated_seconds_per_pass(device.id.kind, device.gflops)
        });
        plain * slowdown(profile)
    }
}
