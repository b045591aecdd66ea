//! How fast devices are: a guess by kind until work was measured there, then what was measured.

use crate::model::{Pace, SlotId, Speed};
use crate::state::State;
use crate::state::speeds::{KEPT, slowdown};
use aitk_common::id::WorkerId;
use aitk_common::plan::demand::Demand;
use aitk_common::plan::profile::MemoryProfile;
use std::time::Duration;

/// What a new measurement weighs against all earlier ones.
const WEIGHT: f64 = 0.3;
/// Steps below which a pace says nothing: the first ones are slower.
const STEPS: u64 = 5;
/// A change below this share moves nothing.
const NOTEWORTHY: f64 = 0.1;

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
