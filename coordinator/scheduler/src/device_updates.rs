//! Keeps the devices and their capacity up to date.

use crate::model::SlotId;
use crate::state::State;
use aitk_common::capability::Device;
use aitk_common::id::WorkerId;

impl State {
    /// Updates a worker's devices after the worker connected, disconnected or changed, and wakes the classes of waiting jobs
    /// that this concerns.
    pub(super) fn refresh_worker(&mut self, id: &WorkerId) {
        let Some(worker) = self.workers.get(id) else { return };
        let connected = worker.session.is_some();
        let takes_work = connected && !worker.leaving && !worker.drained;
        let offered: Vec<Device> = worker.devices.clone();
        let health = worker.health.clone();
        for device in &offered {
            self.slots.ensure(id, device.id, Some(device));
        }
        for slot_id in self.slots.of_worker(id) {
            // When a fast device is gone, a slow one may no longer count as too slow.
            let before = self.slots.get(slot_id).map(|slot| slot.classes.clone());
            for class in before.into_iter().flatten() {
                self.classes.wake(class);
            }
            let Some(slot) = self.slots.get_mut(slot_id) else {
                continue;
            };
            let is_offered = offered.iter().any(|device| device.id == slot.device.id);
            slot.quarantined = health
                .iter()
                .find(|one| one.device == slot.device.id)
                .and_then(|one| one.quarantined_until);
            slot.connected = connected && is_offered;
            slot.accepts_jobs = takes_work && is_offered && slot.quarantined.is_none();
            self.update_fits(slot_id);
            self.update_capacity(slot_id);
        }
    }

    /// Updates a device whose capacity may have grown: if it has capacity, wakes the classes that fit there.
    pub(super) fn update_capacity(&mut self, id: SlotId) {
        if !self.slots.reindex(id) {
            return;
        }
        let Some(slot) = self.slots.get(id) else { return };
        for class in &slot.classes {
            self.classes.wake(*class);
        }
    }
}
