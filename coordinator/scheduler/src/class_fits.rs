//! Keeps the classes of jobs, and the devices on which each class fits, up to date.

use crate::model::{ClassId, SlotId, Worker};
use crate::state::State;
use crate::state::classes::{DeviceFit, DeviceNeeds, FitError, JobClass, check_fit};
use crate::state::speeds::Speeds;
use aitk_common::capability::Device;

/// How a job with these needs would run on a device that is idle.
///
/// # Errors
/// Why the job does not fit on the device.
pub(super) fn device_fit(
    speeds: &Speeds,
    needs: &DeviceNeeds,
    worker: &Worker,
    device: &Device,
) -> Result<DeviceFit, FitError> {
    let fitting = check_fit(needs, worker, device)?;
    Ok(DeviceFit {
        fitting,
        seconds_per_pass: speeds.seconds_per_pass(device, needs.family.as_deref(), fitting.profile),
    })
}

impl State {
    /// The class of jobs with these needs; it is created if it does not exist.
    pub(super) fn find_or_create_class(&mut self, needs: DeviceNeeds) -> ClassId {
        if let Some(id) = self.classes.find(&needs) {
            return id;
        }
        for removed in self.classes.remove_surplus() {
            self.remove_fits(&removed);
        }
        let id = self.classes.insert(needs);
        let connected: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.connected)
            .map(|(id, _)| id)
            .collect();
        for slot in connected {
            self.update_fit(slot, id);
        }
        id
    }

    /// Removes a class that was deleted from the devices on which it fitted.
    fn remove_fits(&mut self, (id, class): &(ClassId, JobClass)) {
        for slot in class.fits.keys() {
            if let Some(slot) = self.slots.get_mut(*slot) {
                slot.classes.remove(id);
            }
        }
    }

    /// Recomputes for every class whether it fits on this device.
    pub(super) fn update_fits(&mut self, slot: SlotId) {
        for class in self.classes.ids() {
            self.update_fit(slot, class);
        }
    }

    /// Recomputes whether this class fits on this device.
    pub(super) fn update_fit(&mut self, slot_id: SlotId, class_id: ClassId) {
        let (Some(slot), Some(class)) = (self.slots.get_mut(slot_id), self.classes.get_mut(class_id)) else {
            return;
        };
        class.least_seconds_and_bytes = None;
        let fit = match self.workers.get(&slot.worker) {
            Some(worker) if slot.connected => device_fit(&self.speeds, &class.needs, worker, &slot.device).ok(),
            _ => None,
        };
        match fit {
            Some(fit) => {
                slot.classes.insert(class_id);
                class.fits.insert(slot_id, fit);
            }
            None => {
                slot.classes.remove(&class_id);
                class.fits.remove(&slot_id);
            }
        }
    }
}
