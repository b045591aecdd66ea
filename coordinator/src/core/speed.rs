//! How fast devices are: a guess by kind until work was measured there, then what was measured.

use super::model::{Pace, Speed};
use super::slots::SlotId;
use super::state::State;
use aitk_common::capability::{Device, DeviceKind};
use aitk_common::id::WorkerId;
use aitk_common::plan::demand::Demand;
use aitk_common::plan::family::{Family, UNKNOWN_SECONDS_PER_UNIT};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;
use std::time::Duration;

/// A device that takes this many times as long as the fastest one that fits is not taken: waiting is better.
pub(super) const TOO_SLOW: f64 = 8.0;
/// What a new measurement weighs against all earlier ones.
const WEIGHT: f64 = 0.3;
/// Steps below which a pace says nothing: the first ones are slower.
const STEPS: u64 = 5;
/// Kinds of devices and families that are remembered; far more than a pool has.
const KEPT: usize = 4096;
/// A change below this share moves nothing.
const NOTEWORTHY: f64 = 0.1;

/// How much longer a step takes under a profile than with everything on the device. Encoders that leave cost little;
/// 8-bit weights 1.05 to 1.3; streamed blocks about a tenth to twice as long, by the bus (figures of SimpleTuner's
/// sweeps and musubi-tuner's pull request 972).
fn slowdown(profile: MemoryProfile) -> f64 {
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
pub(crate) struct Speeds(BTreeMap<String, BTreeMap<String, f64>>);

impl Speeds {
    /// Takes over what an earlier process learned.
    pub(super) fn take_over(&mut self, speed: &Speed) {
        if speed.nanoseconds_per_unit > 0 && self.0.len() < KEPT {
            let seconds = Duration::from_nanos(speed.nanoseconds_per_unit).as_secs_f64();
            self.0
                .entry(speed.device.clone())
                .or_default()
                .insert(speed.family.clone(), seconds);
        }
    }

    fn measured(&self, device: &Device, family: Option<&str>) -> Option<f64> {
        self.0.get(&device.name)?.get(family?).copied()
    }

    /// Whether work of this family was measured on such a device.
    pub(super) fn is_measured(&self, device: &Device, family: Option<&str>) -> bool {
        self.measured(device, family).is_some()
    }

    /// Seconds per unit of work on a device under a profile.
    pub(super) fn seconds_per_unit(&self, device: &Device, family: Option<&str>, profile: MemoryProfile) -> f64 {
        let plain = self.measured(device, family).unwrap_or_else(|| {
            let usual = family
                .and_then(Family::of)
                .map_or(UNKNOWN_SECONDS_PER_UNIT, |family| family.seconds_per_unit);
            usual * guess(device.device.kind)
        });
        plain * slowdown(profile)
    }
}

impl State {
    /// Learns from an attempt that has just ended how fast its device is. Returns the worker whose record changed.
    pub(super) fn learn(
        &mut self,
        pace: Pace,
        demand: &Demand,
        worker: &WorkerId,
        profile: MemoryProfile,
        slot: SlotId,
    ) -> Option<WorkerId> {
        let steps = pace.to.checked_sub(pace.from).filter(|steps| *steps >= STEPS)?;
        let seconds = pace.until.since(pace.since).as_secs_f64();
        let device = self.slots.get(slot)?.device.clone();
        // Beside others it was slower than it is.
        if self.slots.get(slot)?.running.len() > 1 || seconds <= 0.0 || pace.total == 0 {
            return None;
        }
        let units = demand.units() * steps as f64 / pace.total as f64;
        let fresh = seconds / units / slowdown(profile);
        if !fresh.is_finite() || fresh <= 0.0 {
            return None;
        }
        let family = demand.family.clone();
        let known = self.speeds.measured(&device, Some(&family));
        if known.is_none() && self.speeds.0.len() >= KEPT {
            return None;
        }
        let learned = known.map_or(fresh, |known| known * (1.0 - WEIGHT) + fresh * WEIGHT);
        if known.is_some_and(|known| (learned / known - 1.0).abs() < NOTEWORTHY) {
            return None;
        }
        self.speeds
            .0
            .entry(device.name.clone())
            .or_default()
            .insert(family.clone(), learned);
        self.apply_speed(&device.name, &family);
        let worker = self.workers.get_mut(worker)?;
        let nanoseconds = Duration::try_from_secs_f64(learned).ok()?.as_nanos();
        let speed = Speed {
            device: device.name.clone(),
            family,
            nanoseconds_per_unit: u64::try_from(nanoseconds).unwrap_or(u64::MAX),
        };
        worker
            .speeds
            .retain(|one| one.device != speed.device || one.family != speed.family);
        worker.speeds.push(speed);
        let surplus = worker.speeds.len().saturating_sub(KEPT);
        worker.speeds.drain(..surplus);
        Some(worker.id.clone())
    }

    /// Offers of such devices to jobs of this family, with the new speed.
    fn apply_speed(&mut self, device: &str, family: &str) {
        let slots: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.connected && slot.device.name == device)
            .map(|(id, _)| id)
            .collect();
        let classes: Vec<_> = self
            .classes
            .iter()
            .filter(|(_, class)| class.needs.family.as_deref() == Some(family))
            .map(|(id, _)| id)
            .collect();
        for class in classes {
            for slot in &slots {
                self.offer(*slot, class);
            }
            // What was too slow before may not be now.
            self.classes.wake(class);
        }
    }
}
