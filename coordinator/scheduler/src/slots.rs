//! Devices, what runs on them, and whether there is room for more.

use crate::model::SlotId;
use crate::state::State;
use aitk_common::capability::Device;
use aitk_common::id::WorkerId;

impl State {
    /// A worker came, went, or takes work in another way than before: its devices follow, and so do those who wait.
    pub(super) fn refresh_worker(&mut self, id: &WorkerId) {
        let Some(worker) = self.workers.get(id) else { return };
        let connected = worker.session.is_some();
        let takes_work = connected && !worker.leaving && !worker.drained;
        let offered: Vec<Device> = worker.devices.clone();
        let health = worker.health.clone();
        for device in &offered {
            self.slots.ensure(id, device.device, Some(device));
        }
        for slot_id in self.slots.of_worker(id) {
            // A fast device that goes makes a slow one worth taking.
            let before = self.slots.get(slot_id).map(|slot| slot.classes.clone());
            for class in before.into_iter().flatten() {
                self.classes.wake(class);
            }
            let Some(slot) = self.slots.get_mut(slot_id) else {
                continue;
            };
            let here = offered.iter().any(|device| device.device == slot.device.device);
            slot.quarantined = health
                .iter()
                .find(|one| one.device == slot.device.device)
                .and_then(|one| one.quarantined_until);
            slot.connected = connected && here;
            slot.open = takes_work && here && slot.quarantined.is_none();
            self.refit(slot_id);
            self.grown(slot_id);
        }
    }

    /// There may be more room on a device than before: whoever fits there is looked at again.
    pub(super) fn grown(&mut self, id: SlotId) {
        if !self.slots.list(id) {
            return;
        }
        let Some(slot) = self.slots.get(id) else { return };
        for class in &slot.classes {
            self.classes.wake(*class);
        }
    }
}
