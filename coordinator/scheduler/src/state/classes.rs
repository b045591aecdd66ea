//! Classes of jobs with the same needs. What is found out about devices for one job of a class holds for all of them, so the
//! cost of an event depends on the number of classes and not on the length of the queue.

use crate::model::ClassId;
use crate::model::{Job, PriorityLevel, Requirements, SlotId, Worker};
use crate::state::slots::Reservation;
use crate::state::speeds::MAX_SLOWDOWN;
use crate::state::user::UserIndex;
use crate::state::user_queue::UserQueue;

use aitk_common::capability::{Device, DeviceKind};
use aitk_common::id::JobId;
use aitk_common::plan::need::MemoryNeed;
use aitk_common::plan::profile::MemoryProfile;
use std::collections::{BTreeMap, BTreeSet};

/// What decides on which devices a job may run. Jobs with equal needs are in one class.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceNeeds {
    pub(crate) local: bool,
    pub(crate) device: Option<DeviceKind>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) profile: Option<MemoryProfile>,
    pub(crate) memory: Option<u64>,
    pub(crate) family: Option<String>,
    pub(crate) predicted: Option<MemoryNeed>,
    pub(crate) max_profile: Option<MemoryProfile>,
    pub(crate) exclusive: bool,
    pub(crate) yields: bool,
    /// The array that it is a part of: the placement of a part depends on where the other parts run.
    pub(crate) part_of: Option<JobId>,
}

impl DeviceNeeds {
    pub(crate) fn of(job: &Job) -> Self {
        let part_of = job
            .array
            .as_ref()
            .filter(|membership| membership.split)
            .map(|membership| membership.id.clone());
        Self {
            part_of,
            ..Self::of_requirements(&job.requirements, job.local, job.max_profile)
        }
    }

    pub(crate) fn of_requirements(
        requirements: &Requirements,
        local: bool,
        max_profile: Option<MemoryProfile>,
    ) -> Self {
        let demand = requirements.demand.as_ref();
        Self {
            local,
            device: requirements.device,
            labels: requirements.labels.clone(),
            profile: requirements.profile,
            memory: requirements.memory,
            family: demand.map(|demand| demand.family.clone()),
            predicted: demand.and_then(|demand| demand.memory),
            max_profile,
            exclusive: requirements.exclusive,
            yields: requirements.yields,
            part_of: None,
        }
    }

    /// Whether a job with these needs should wait instead of taking a device that needs this many seconds per pass, when the
    /// fastest device that fits needs `fastest`. A job that asks for a kind of device takes a slow one.
    pub(crate) fn is_too_slow(&self, seconds_per_pass: f64, fastest: f64) -> bool {
        self.device.is_none() && seconds_per_pass > fastest * MAX_SLOWDOWN
    }

    /// What is reserved for such a job when it needs `bytes`.
    pub(crate) fn reservation(&self, bytes: Option<u64>) -> Reservation {
        Reservation {
            bytes,
            exclusive: self.exclusive,
        }
    }
}

/// Why a job does not fit on a device. The greater one is closer to fitting; of several devices the greatest is shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FitError {
    OtherMachine,
    MissingLabel(String, String),
    OtherKind(DeviceKind),
    UnsupportedProfile(MemoryProfile),
    /// The prediction under the smallest profile that may be tried is more than the device's budget.
    PredictedMemory {
        budget: u64,
        needed: u64,
        profile: MemoryProfile,
    },
    /// The memory that the user asks for is more than the device's budget.
    RequestedMemory {
        budget: u64,
        requested: u64,
    },
    /// The device offers no memory.
    NoBudget,
}

/// How a job would run on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FittingProfile {
    pub(crate) profile: MemoryProfile,
    /// The memory that it needs; none: not known.
    pub(crate) bytes: Option<u64>,
}

/// Checks whether a job with these needs fits on a device when the device is idle, and chooses the fastest profile that fits.
/// Beside other jobs it runs under the same profile or not at all: a smaller one would be too slow.
///
/// # Errors
/// Why it does not fit.
pub(crate) fn check_fit(needs: &DeviceNeeds, worker: &Worker, device: &Device) -> Result<FittingProfile, FitError> {
    if needs.local && !worker.same_machine {
        return Err(FitError::OtherMachine);
    }
    if let Some((key, value)) = needs
        .labels
        .iter()
        .find(|(key, value)| worker.labels.get(*key) != Some(*value))
    {
        return Err(FitError::MissingLabel(key.clone(), value.clone()));
    }
    let kind = device.id.kind;
    if let Some(wanted) = needs.device.filter(|wanted| *wanted != kind) {
        return Err(FitError::OtherKind(wanted));
    }
    let on_cpu = kind == DeviceKind::Cpu;
    let wrong_kind = match needs.profile {
        Some(MemoryProfile::CpuOnly) => !on_cpu,
        Some(MemoryProfile::FullGpu) => on_cpu,
        _ => false,
    };
    if let Some(profile) = needs.profile.filter(|_| wrong_kind) {
        return Err(FitError::UnsupportedProfile(profile));
    }
    let budget = device.memory_budget;
    if budget == 0 {
        return Err(FitError::NoBudget);
    }
    if let Some(requested) = needs.memory.filter(|requested| *requested > budget) {
        return Err(FitError::RequestedMemory { budget, requested });
    }
    let no_larger_than = |max: MemoryProfile| MemoryProfile::on(on_cpu).into_iter().skip_while(move |one| *one != max);
    let tried: Vec<MemoryProfile> = match (needs.profile, needs.max_profile) {
        (Some(profile), _) => vec![profile],
        (None, Some(max)) => no_larger_than(max).collect(),
        (None, None) => MemoryProfile::on(on_cpu).to_vec(),
    };
    let Some(predicted) = needs.predicted else {
        let own = if on_cpu { MemoryProfile::CpuOnly } else { device.profile };
        let chosen = tried.iter().find(|one| **one == own).or(tried.first());
        return Ok(FittingProfile {
            profile: *chosen.unwrap_or(&own),
            bytes: needs.memory,
        });
    };
    let mut layouts: Vec<_> = tried.iter().map(|one| (*one, predicted.under(*one, kind))).collect();
    // A smaller profile that saves no memory is not tried.
    layouts.dedup_by_key(|(_, bytes)| *bytes);
    // The job gets the memory that its user states; otherwise it may fill the device.
    let limit = needs.memory.unwrap_or(budget);
    let fitting = layouts.iter().find(|(_, bytes)| *bytes <= limit);
    let smallest = layouts.last().copied().unwrap_or((MemoryProfile::Extreme, 0));
    match (fitting, needs.memory) {
        // A prediction does not stop a job whose user states its memory, nor one that runs in place.
        (found, bytes @ Some(_)) => Ok(FittingProfile {
            profile: found.map_or(smallest.0, |found| found.0),
            bytes,
        }),
        (found, None) if needs.local => Ok(FittingProfile {
            profile: found.map_or(smallest.0, |found| found.0),
            bytes: None,
        }),
        (Some((profile, bytes)), None) => Ok(FittingProfile {
            profile: *profile,
            bytes: Some(*bytes),
        }),
        (None, None) => Err(FitError::PredictedMemory {
            budget,
            needed: smallest.1,
            profile: smallest.0,
        }),
    }
}

/// How the jobs of a class would run on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviceFit {
    pub(crate) fitting: FittingProfile,
    /// Seconds per pass.
    pub(crate) seconds_per_pass: f64,
}

/// A class: jobs with equal needs, and the devices on which they fit.
#[derive(Clone, Debug)]
pub(crate) struct JobClass {
    pub(crate) needs: DeviceNeeds,
    /// The connected devices on which the jobs fit when the devices are idle.
    pub(crate) fits: BTreeMap<SlotId, DeviceFit>,
    /// The least seconds per pass, and the least bytes that a job needs, among the devices that accept jobs; none: to be computed.
    pub(crate) least_seconds_and_bytes: Option<(f64, u64)>,
    /// The jobs that wait for a device, by level, user and order.
    pub(crate) waiting: BTreeMap<PriorityLevel, BTreeMap<UserIndex, UserQueue>>,
    /// How many jobs wait for a device.
    pub(crate) count: usize,
    /// None of them can start until a device on which they fit gets more capacity.
    pub(crate) blocked: bool,
    /// The running jobs that are being preempted for one of them.
    pub(crate) preempted: BTreeSet<JobId>,
}

/// The most empty classes that are kept. They are kept because the next job often has the same needs as an earlier one.
const MAX_EMPTY_CLASSES: usize = 256;

/// All classes.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobClasses {
    /// By id; none: the id is free.
    all: Vec<Option<JobClass>>,
    index: BTreeMap<DeviceNeeds, ClassId>,
    free: Vec<ClassId>,
    /// How many classes are empty.
    empty: usize,
    /// The classes of which a job may be able to start now.
    pub(crate) candidates: BTreeSet<ClassId>,
}

impl JobClasses {
    pub(crate) fn get(&self, id: ClassId) -> Option<&JobClass> {
        self.all.get(id)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: ClassId) -> Option<&mut JobClass> {
        self.all.get_mut(id)?.as_mut()
    }

    pub(crate) fn find(&self, needs: &DeviceNeeds) -> Option<ClassId> {
        self.index.get(needs).copied()
    }

    pub(crate) fn ids(&self) -> Vec<ClassId> {
        self.iter().map(|(id, _)| id).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ClassId, &JobClass)> {
        let all = self.all.iter().enumerate();
        all.filter_map(|(id, class)| class.as_ref().map(|class| (id, class)))
    }

    /// Adds an empty class without devices.
    pub(crate) fn insert(&mut self, needs: DeviceNeeds) -> ClassId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.index.insert(needs.clone(), id);
        self.empty += 1;
        if let Some(entry) = self.all.get_mut(id) {
            *entry = Some(JobClass {
                needs,
                fits: BTreeMap::new(),
                least_seconds_and_bytes: None,
                waiting: BTreeMap::new(),
                count: 0,
                blocked: false,
                preempted: BTreeSet::new(),
            });
        }
        id
    }

    /// Removes the empty classes for which no job is being preempted, once there are too many empty classes.
    pub(crate) fn remove_surplus(&mut self) -> Vec<(ClassId, JobClass)> {
        if self.empty <= MAX_EMPTY_CLASSES {
            return Vec::new();
        }
        let unused = |class: &mut JobClass| class.count == 0 && class.preempted.is_empty();
        let mut removed = Vec::new();
        for (id, entry) in self.all.iter_mut().enumerate() {
            if let Some(class) = entry.take_if(unused) {
                self.free.push(id);
                self.index.remove(&class.needs);
                self.candidates.remove(&id);
                self.empty -= 1;
                removed.push((id, class));
            }
        }
        removed
    }

    /// Notes that a job of the class may be able to start.
    pub(crate) fn wake(&mut self, id: ClassId) {
        if let Some(class) = self.get_mut(id) {
            class.blocked = false;
            if class.count > 0 {
                self.candidates.insert(id);
            }
        }
    }

    pub(crate) fn add(&mut self, id: ClassId, level: PriorityLevel, user: UserIndex, order: u64) {
        let Some(class) = self.all.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        self.empty -= usize::from(class.count == 0);
        class.count += 1;
        let users = class.waiting.entry(level).or_default();
        users
            .entry(user)
            .and_modify(|queue| queue.add(order))
            .or_insert_with(|| UserQueue::of(order));
    }

    pub(crate) fn remove(&mut self, id: ClassId, level: PriorityLevel, user: UserIndex, order: u64) {
        let Some(class) = self.all.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let Some(users) = class.waiting.get_mut(&level) else {
            return;
        };
        let Some(queue) = users.get_mut(&user) else { return };
        if !queue.remove(order) {
            return;
        }
        if queue.is_empty() {
            users.remove(&user);
        }
        if users.is_empty() {
            class.waiting.remove(&level);
        }
        class.count -= 1;
        if class.count == 0 {
            self.empty += 1;
            self.candidates.remove(&id);
        }
    }
}
