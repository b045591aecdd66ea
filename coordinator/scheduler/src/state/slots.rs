//! Devices, what runs on them, and whether there is room for more.

use crate::model::SlotId;
use crate::model::{ClassId, DeviceKey, device_key};
use crate::state::table::Table;

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control::UnixMillis;
use aitk_common::id::{JobId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// Jobs on one device at the most. More would each crawl.
const SHARE_MOST: usize = 3;

/// A device of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) worker: WorkerId,
    pub(crate) device: Device,
    /// Who runs on it, and what is set aside for each.
    pub(crate) running: Table<JobId, Held>,
    /// What is set aside in all, as far as it is known.
    pub(crate) reserved: u64,
    /// Its worker is connected and offers it.
    pub(crate) connected: bool,
    /// It takes work: connected, not leaving, not drained, not quarantined.
    pub(crate) open: bool,
    /// No work until then, because of driver faults.
    pub(crate) quarantined: Option<UnixMillis>,
    /// Classes of waiting jobs that fit on it.
    pub(crate) classes: BTreeSet<ClassId>,
    /// A part that leaves a slower device for this one.
    pub(crate) reserved_for: Option<JobId>,
    /// Where it is listed among those with room.
    listed: Option<Room>,
}

/// How much room a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// All of it.
    Idle,
    /// So many bytes, for a small task beside others.
    Beside(u64),
}

/// What is set aside for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Bytes; none: all of the device.
    pub(crate) bytes: Option<u64>,
    /// It shares with nobody.
    pub(crate) alone: bool,
}

impl Slot {
    /// Whether a small task can be beside another one here: both are at most half of the device. CPUs are not
    /// shared: two tasks on one would each take twice as long and gain nothing.
    fn is_small(&self, held: Held) -> bool {
        !held.alone && held.bytes.is_some_and(|bytes| bytes <= self.device.memory_budget / 2)
    }

    /// Whether anything at all might start here.
    pub(crate) fn has_room(&self) -> bool {
        self.open
            && (self.running.is_empty()
                || (self.device.device.kind != DeviceKind::Cpu
                    && self.running.len() < SHARE_MOST
                    && self.reserved < self.device.memory_budget
                    && self.running.values().all(|held| self.is_small(*held))))
    }

    fn room(&self) -> Option<Room> {
        let left = self.device.memory_budget.saturating_sub(self.reserved);
        match self.has_room() {
            false => None,
            true if self.running.is_empty() => Some(Room::Idle),
            true => Some(Room::Beside(left.min(self.device.memory_budget / 2))),
        }
    }

    /// Whether there is room for this one, `without` one of those that run.
    pub(crate) fn has_room_for(&self, wanted: Held, without: Option<&JobId>) -> bool {
        let mut others = self.running.iter().filter(|(id, _)| Some(*id) != without).peekable();
        if others.peek().is_none() {
            return true;
        }
        if self.device.device.kind == DeviceKind::Cpu || !self.is_small(wanted) {
            return false;
        }
        let (mut count, mut bytes) = (1, wanted.bytes.unwrap_or(u64::MAX));
        for (_, held) in others {
            if !self.is_small(*held) {
                return false;
            }
            count += 1;
            bytes = bytes.saturating_add(held.bytes.unwrap_or(u64::MAX));
        }
        count <= SHARE_MOST && bytes <= self.device.memory_budget
    }
}

/// All devices that were ever offered since the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    all: Vec<Slot>,
    index: Table<WorkerId, BTreeMap<DeviceKey, SlotId>>,
    /// Derived: those on which nothing runs.
    pub(crate) idle: BTreeSet<SlotId>,
    /// Derived: those with room beside what runs there, by how much.
    pub(crate) beside: BTreeSet<(u64, SlotId)>,
}

impl Slots {
    pub(crate) fn get(&self, id: SlotId) -> Option<&Slot> {
        self.all.get(id)
    }

    pub(crate) fn get_mut(&mut self, id: SlotId) -> Option<&mut Slot> {
        self.all.get_mut(id)
    }

    pub(crate) fn find(&self, worker: &WorkerId, device: DeviceRef) -> Option<SlotId> {
        self.index.get(worker)?.get(&device_key(device)).copied()
    }

    /// The devices of a worker.
    pub(crate) fn of_worker(&self, worker: &WorkerId) -> Vec<SlotId> {
        self.index
            .get(worker)
            .map(|devices| devices.values().copied().collect())
            .unwrap_or_default()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotId, &Slot)> {
        self.all.iter().enumerate()
    }

    fn add(&mut self, worker: &WorkerId, device: Device) -> SlotId {
        let id = self.all.len();
        let key = device_key(device.device);
        self.all.push(Slot {
            worker: worker.clone(),
            device,
            running: Table::default(),
            reserved: 0,
            connected: false,
            open: false,
            quarantined: None,
            classes: BTreeSet::new(),
            reserved_for: None,
            listed: None,
        });
        self.index.entry(worker.clone()).or_default().insert(key, id);
        id
    }

    /// The slot of a device, made if need be. A device that its worker does not offer any more, but on which a job
    /// still runs, is one without memory.
    pub(crate) fn ensure(&mut self, worker: &WorkerId, device: DeviceRef, offered: Option<&Device>) -> SlotId {
        match (self.find(worker, device), offered) {
            (Some(id), Some(offered)) => {
                if let Some(slot) = self.all.get_mut(id) {
                    slot.device.clone_from(offered);
                }
                id
            }
            (Some(id), None) => id,
            (None, offered) => {
                let unknown = || Device {
                    device,
                    name: String::new(),
                    architecture: String::new(),
                    memory_total: 0,
                    memory_budget: 0,
                    dtypes: Vec::new(),
                    attention: Vec::new(),
                    profile: aitk_common::plan::profile::MemoryProfile::Extreme,
                };
                let device = offered.cloned().unwrap_or_else(unknown);
                self.add(worker, device)
            }
        }
    }

    /// Puts a job on a device.
    pub(crate) fn occupy(&mut self, id: SlotId, job: &JobId, held: Held) {
        let Some(slot) = self.all.get_mut(id) else { return };
        slot.running.insert(job.clone(), held);
        slot.reserved = slot
            .reserved
            .saturating_add(held.bytes.unwrap_or(slot.device.memory_budget));
        self.list(id);
    }

    /// Lists a device among those with room, where it belongs now. Whether it has any.
    pub(crate) fn list(&mut self, id: SlotId) -> bool {
        let Some(slot) = self.all.get_mut(id) else { return false };
        let room = slot.room();
        match std::mem::replace(&mut slot.listed, room) {
            before if before == room => {}
            Some(Room::Idle) => {
                self.idle.remove(&id);
            }
            Some(Room::Beside(bytes)) => {
                self.beside.remove(&(bytes, id));
            }
            None => {}
        }
        match room {
            Some(Room::Idle) => {
                self.idle.insert(id);
            }
            Some(Room::Beside(bytes)) => {
                self.beside.insert((bytes, id));
            }
            None => {}
        }
        room.is_some()
    }

    /// Whether a device is listed as it should be.
    pub(crate) fn is_listed_right(&self, id: SlotId) -> bool {
        self.all.get(id).is_some_and(|slot| {
            let listed = |room: Room| match room {
                Room::Idle => self.idle.contains(&id),
                Room::Beside(bytes) => self.beside.contains(&(bytes, id)),
            };
            slot.listed == slot.room() && slot.listed.is_none_or(listed)
        })
    }

    /// How many devices have room.
    pub(crate) fn with_room(&self) -> usize {
        self.idle.len() + self.beside.len()
    }

    /// Takes it off again.
    pub(crate) fn vacate(&mut self, id: SlotId, job: &JobId) {
        let Some(slot) = self.all.get_mut(id) else { return };
        slot.running.shift_remove(job);
        let whole = slot.device.memory_budget;
        slot.reserved = slot
            .running
            .values()
            .fold(0, |sum: u64, held| sum.saturating_add(held.bytes.unwrap_or(whole)));
    }

    /// Jobs that run on a worker's devices.
    pub(crate) fn jobs_of(&self, worker: &WorkerId) -> Vec<JobId> {
        let slots = self.index.get(worker).into_iter().flat_map(BTreeMap::values);
        slots
            .filter_map(|id| self.all.get(*id))
            .flat_map(|slot| slot.running.keys().cloned())
            .collect()
    }
}
