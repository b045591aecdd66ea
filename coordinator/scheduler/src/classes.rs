//! Jobs that are alike in what they need of a device are placed alike: they share a class, and what is found out for
//! one holds for all. So an event costs what the classes that it concerns cost, and not what the queue costs.

use crate::model::{ClassId, SlotId, Worker};
use crate::state::State;
use crate::state::classes::{Class, DeviceOffer, Misfit, Needs, fit};
use crate::state::speeds::Speeds;
use aitk_common::capability::Device;

/// What a device offers to a job with these needs when it is idle.
///
/// # Errors
/// Why the job does not fit on the device.
pub(super) fn device_offer(
    speeds: &Speeds,
    needs: &Needs,
    worker: &Worker,
    device: &Device,
) -> Result<DeviceOffer, Misfit> {
    let choice = fit(needs, worker, device)?;
    Ok(DeviceOffer {
        choice,
        seconds_per_unit: speeds.seconds_per_unit(device, needs.family.as_deref(), choice.0),
    })
}

impl State {
    /// The class of jobs with these needs, made if need be.
    pub(super) fn class_of(&mut self, needs: Needs) -> ClassId {
        if let Some(id) = self.classes.find(&needs) {
            return id;
        }
        for gone in self.classes.take_surplus() {
            self.forget_offers(&gone);
        }
        let id = self.classes.insert(needs);
        let connected: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.connected)
            .map(|(id, _)| id)
            .collect();
        for slot in connected {
            self.offer(slot, id);
        }
        id
    }

    /// A class is gone: no device offers anything to it any more.
    fn forget_offers(&mut self, (id, class): &(ClassId, Class)) {
        for slot in class.offers.keys() {
            if let Some(slot) = self.slots.get_mut(*slot) {
                slot.classes.remove(id);
            }
        }
    }

    /// What this device offers to every class, anew.
    pub(super) fn refit(&mut self, slot: SlotId) {
        for class in self.classes.ids() {
            self.offer(slot, class);
        }
    }

    /// What this device offers to this class, anew.
    pub(super) fn offer(&mut self, slot_id: SlotId, class_id: ClassId) {
        let (Some(slot), Some(class)) = (self.slots.get_mut(slot_id), self.classes.get_mut(class_id)) else {
            return;
        };
        class.best = None;
        let offer = match self.workers.get(&slot.worker) {
            Some(worker) if slot.connected => device_offer(&self.speeds, &class.needs, worker, &slot.device).ok(),
            _ => None,
        };
        match offer {
            Some(offer) => {
                slot.classes.insert(class_id);
                class.offers.insert(slot_id, offer);
            }
            None => {
                slot.classes.remove(&class_id);
                class.offers.remove(&slot_id);
            }
        }
    }
}
