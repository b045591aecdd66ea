//! Devices, the jobs that run on them, and their free capacity.

use crate::model::SlotId;
use crate::model::{ClassId, DeviceKey, device_key};
use crate::state::table::Table;

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control_plane::UnixMillis;
use aitk_common::id::{JobId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// The most jobs on one device. With more, each of them would be too slow.
const MAX_JOBS_PER_DEVICE: usize = 3;

/// A device of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) worker: WorkerId,
    pub(crate) device: Device,
    /// The jobs that run on it, and what is reserved for each.
    pub(crate) running: Table<JobId, Reservation>,
    /// Total bytes that are reserved for them; a job whose need is not known counts as the whole budget.
    pub(crate) reserved: u64,
    /// Its worker is connected and offers it.
    pub(crate) connected: bool,
    /// It takes work: it is connected and not quarantined, and its worker is neither leaving nor drained.
    pub(crate) accepts_jobs: bool,
    /// When its quarantine ends; none: it is not quarantined.
    pub(crate) quarantined: Option<UnixMillis>,
    /// The classes of waiting jobs that fit on it.
    pub(crate) classes: BTreeSet<ClassId>,
    /// The part that moves to this device from a slower one.
    pub(crate) takeover_by: Option<JobId>,
    /// Under which capacity it is in the index of devices with capacity.
    indexed: Option<Capacity>,
}

/// The free capacity of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Capacity {
    /// Nothing runs on it.
    Idle,
    /// This many bytes for a small job beside others.
    Shared(u64),
}

/// What is reserved on a device for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    /// Bytes; none: the whole device.
    pub(crate) bytes: Option<u64>,
    /// The job shares the device with no other job.
    pub(crate) exclusive: bool,
}

impl Slot {
    /// Whether a job is small enough to share this device: it needs at most half of its memory. CPUs are never shared: two
    /// jobs on one CPU would each take twice as long.
    fn is_small(&self, reservation: Reservation) -> bool {
        !reservation.exclusive
            && reservation
                .bytes
                .is_some_and(|bytes| bytes <= self.device.memory_budget / 2)
    }

    /// Whether any job could start here.
    pub(crate) fn has_capacity(&self) -> bool {
        self.accepts_jobs
            && (self.running.is_empty()
                || (self.device.id.kind != DeviceKind::Cpu
                    && self.running.len() < MAX_JOBS_PER_DEVICE
                    && self.reserved < self.device.memory_budget
                    && self.running.values().all(|reservation| self.is_small(*reservation))))
    }

    /// Sums up what is reserved after a change of the jobs or of the memory.
    fn update_reserved(&mut self) {
        let whole = self.device.memory_budget;
        let bytes = self
            .running
            .values()
            .map(|reservation| reservation.bytes.unwrap_or(whole));
        self.reserved = bytes.fold(0, u64::saturating_add);
    }

    fn capacity(&self) -> Option<Capacity> {
        let left = self.device.memory_budget.saturating_sub(self.reserved);
        match self.has_capacity() {
            false => None,
            true if self.running.is_empty() => Some(Capacity::Idle),
            true => Some(Capacity::Shared(left.min(self.device.memory_budget / 2))),
        }
    }

    /// Whether a job with this reservation could start here if the running job `without` were gone.
    pub(crate) fn has_capacity_for(&self, wanted: Reservation, without: Option<&JobId>) -> bool {
        let mut others = self.running.iter().filter(|(id, _)| Some(*id) != without).peekable();
        if others.peek().is_none() {
            return true;
        }
        if self.device.id.kind == DeviceKind::Cpu || !self.is_small(wanted) {
            return false;
        }
        let (mut count, mut bytes) = (1, wanted.bytes.unwrap_or(u64::MAX));
        for (_, reservation) in others {
            if !self.is_small(*reservation) {
                return false;
            }
            count += 1;
            bytes = bytes.saturating_add(reservation.bytes.unwrap_or(u64::MAX));
        }
        count <= MAX_JOBS_PER_DEVICE && bytes <= self.device.memory_budget
    }
}

/// All devices that workers offered since the coordinator started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    all: Vec<Slot>,
    index: Table<WorkerId, BTreeMap<DeviceKey, SlotId>>,
    /// Derived: devices that accept jobs and on which nothing runs.
    pub(crate) idle: BTreeSet<SlotId>,
    /// Derived: devices that accept jobs and have capacity beside the jobs that run there, by the bytes of that capacity.
    pub(crate) shareable: BTreeSet<(u64, SlotId)>,
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
        let key = device_key(device.id);
        self.all.push(Slot {
            worker: worker.clone(),
            device,
            running: Table::default(),
            reserved: 0,
            connected: false,
            accepts_jobs: false,
            quarantined: None,
            classes: BTreeSet::new(),
            takeover_by: None,
            indexed: None,
        });
        self.index.entry(worker.clone()).or_default().insert(key, id);
        id
    }

    /// The slot of a device; it is created if it does not exist. A device that its worker no longer offers, but on which
    /// a job still runs, gets a slot without memory.
    pub(crate) fn ensure(&mut self, worker: &WorkerId, device: DeviceRef, offered: Option<&Device>) -> SlotId {
        match (self.find(worker, device), offered) {
            (Some(id), Some(offered)) => {
                if let Some(slot) = self.all.get_mut(id) {
                    slot.device.clone_from(offered);
                    slot.update_reserved();
                }
                id
            }
            (Some(id), None) => id,
            (None, offered) => {
                let unknown = || Device {
                    id: device,
                    name: String::new(),
                    architecture: String::new(),
                    memory_total: 0,
                    memory_budget: 0,
                    dtypes: Vec::new(),
                    attention: Vec::new(),
                    profile: aitk_common::plan::profile::MemoryProfile::Extreme,
                    gflops: 0,
                };
                let device = offered.cloned().unwrap_or_else(unknown);
                self.add(worker, device)
            }
        }
    }

    /// Records that a job runs on a device.
    pub(crate) fn occupy(&mut self, id: SlotId, job: &JobId, reservation: Reservation) {
        let Some(slot) = self.all.get_mut(id) else { return };
        slot.running.insert(job.clone(), reservation);
        slot.update_reserved();
        self.reindex(id);
    }

    /// Updates the index of devices with capacity for one device. Returns whether it has capacity.
    pub(crate) fn reindex(&mut self, id: SlotId) -> bool {
        let Some(slot) = self.all.get_mut(id) else { return false };
        let capacity = slot.capacity();
        match std::mem::replace(&mut slot.indexed, capacity) {
            before if before == capacity => {}
            Some(Capacity::Idle) => {
                self.idle.remove(&id);
            }
            Some(Capacity::Shared(bytes)) => {
                self.shareable.remove(&(bytes, id));
            }
            None => {}
        }
        match capacity {
            Some(Capacity::Idle) => {
                self.idle.insert(id);
            }
            Some(Capacity::Shared(bytes)) => {
                self.shareable.insert((bytes, id));
            }
            None => {}
        }
        capacity.is_some()
    }

    /// Whether the index of devices with capacity is right for one device.
    pub(crate) fn is_indexed_correctly(&self, id: SlotId) -> bool {
        self.all.get(id).is_some_and(|slot| {
            let indexed = |capacity: Capacity| match capacity {
                Capacity::Idle => self.idle.contains(&id),
                Capacity::Shared(bytes) => self.shareable.contains(&(bytes, id)),
            };
            slot.indexed == slot.capacity() && slot.indexed.is_none_or(indexed)
        })
    }

    /// How many devices have capacity.
    pub(crate) fn with_capacity(&self) -> usize {
        self.idle.len() + self.shareable.len()
    }

    /// Records that a job no longer runs on a device. The caller then calls [`Self::reindex`].
    pub(crate) fn vacate(&mut self, id: SlotId, job: &JobId) {
        let Some(slot) = self.all.get_mut(id) else { return };
        slot.running.shift_remove(job);
        slot.update_reserved();
    }

    /// The jobs that run on a worker's devices.
    pub(crate) fn jobs_of(&self, worker: &WorkerId) -> Vec<JobId> {
        let slots = self.index.get(worker).into_iter().flat_map(BTreeMap::values);
        slots
            .filter_map(|id| self.all.get(*id))
            .flat_map(|slot| slot.running.keys().cloned())
            .collect()
    }
}
