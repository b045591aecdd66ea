//! Measures the speed of devices from attempts that end.

use crate::model::{Pace, SlotId, Speed};
use crate::state::State;
use crate::state::speeds::{MAX_ENTRIES, slowdown};
use aitk_common::id::WorkerId;
use aitk_common::plan::demand::{Demand, WORK_UNIT};
use aitk_common::plan::profile::MemoryProfile;
use std::time::Duration;

/// The weight of a new measurement in the moving average.
const NEW_WEIGHT: f64 = 0.3;
/// The least steps for a measurement: the first steps of an attempt are slower.
const MIN_STEPS: u64 = 5;
/// Relative changes below this are ignored.
const MIN_CHANGE: f64 = 0.1;

impl State {
    /// Measures the speed of a device from an attempt that has just ended there. Returns the worker whose record changed.
    pub(super) fn record_speed(
        &mut self,
        pace: Pace,
        demand: &Demand,
        worker: &WorkerId,
        profile: MemoryProfile,
        slot: SlotId,
    ) -> Option<WorkerId> {
        let steps = pace.to.checked_sub(pace.from).filter(|steps| *steps >= MIN_STEPS)?;
        let seconds = pace.until.since(pace.since).as_secs_f64();
        let device = self.slots.get(slot)?.device.clone();
        // Beside other jobs an attempt is slower than the device.
        if self.slots.get(slot)?.running.len() > 1 || seconds <= 0.0 || pace.total == 0 {
            return None;
        }
        let units = demand.passes() * steps as f64 / pace.total as f64;
        let measured = seconds / units / slowdown(profile);
        if !measured.is_finite() || measured <= 0.0 {
            return None;
        }
        let family = demand.family.clone();
        let known = self.speeds.measured(&device, Some(&family));
        if known.is_none() && self.speeds.0.len() >= MAX_ENTRIES {
            return None;
        }
        let average = known.map_or(measured, |known| known * (1.0 - NEW_WEIGHT) + measured * NEW_WEIGHT);
        if known.is_some_and(|known| (average / known - 1.0).abs() < MIN_CHANGE) {
            return None;
        }
        self.speeds
            .0
            .entry(device.name.clone())
            .or_default()
            .insert(family.clone(), average);
        self.update_fits_of_family(&device.name, &family);
        let worker = self.workers.get_mut(worker)?;
        let nanoseconds = Duration::try_from_secs_f64(average).ok()?.as_nanos();
        let speed = Speed {
            device: device.name.clone(),
            family,
            nanoseconds_per_pass: u64::try_from(nanoseconds).unwrap_or(u64::MAX),
            unit: WORK_UNIT,
        };
        worker
            .speeds
            .retain(|one| one.device != speed.device || one.family != speed.family);
        worker.speeds.push(speed);
        let surplus = worker.speeds.len().saturating_sub(MAX_ENTRIES);
        worker.speeds.drain(..surplus);
        Some(worker.id.clone())
    }

    /// Recomputes the fits of all devices of this name for the classes of this family, after a new measurement.
    fn update_fits_of_family(&mut self, device: &str, family: &str) {
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
                self.update_fit(*slot, class);
            }
            // A device that was too slow before may not be now.
            self.classes.wake(class);
        }
    }
}
