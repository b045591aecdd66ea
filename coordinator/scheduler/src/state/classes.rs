//! Jobs that are alike in what they need of a device are placed alike: they share a class, and what is found out for
//! one holds for all. So an event costs what the classes that it concerns cost, and not what the queue costs.

use crate::model::ClassId;
use crate::model::{Job, Level, SlotId, Wants, Worker};
use crate::state::slots::Held;
use crate::state::speeds::TOO_SLOW;
use crate::state::user::UserIndex;
use crate::state::user_queue::UserQueue;

use aitk_common::capability::{Device, DeviceKind};
use aitk_common::id::JobId;
use aitk_common::plan::need::MemoryNeed;
use aitk_common::plan::profile::MemoryProfile;
use std::collections::{BTreeMap, BTreeSet};

/// What placement needs to know of a job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Needs {
    pub(crate) local: bool,
    pub(crate) device: Option<DeviceKind>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) profile: Option<MemoryProfile>,
    pub(crate) memory: Option<u64>,
    pub(crate) family: Option<String>,
    pub(crate) predicted: Option<MemoryNeed>,
    pub(crate) at_most: Option<MemoryProfile>,
    pub(crate) alone: bool,
    pub(crate) yields: bool,
    /// The job that it is a part of: what devices do for that one matters.
    pub(crate) part_of: Option<JobId>,
}

impl Needs {
    pub(crate) fn of(job: &Job) -> Self {
        let part_of = job
            .array
            .as_ref()
            .filter(|place| place.split)
            .map(|place| place.id.clone());
        Self {
            part_of,
            ..Self::of_wants(&job.wants, job.local, job.at_most)
        }
    }

    pub(crate) fn of_wants(wants: &Wants, local: bool, at_most: Option<MemoryProfile>) -> Self {
        let demand = wants.demand.as_ref();
        Self {
            local,
            device: wants.device,
            labels: wants.labels.clone(),
            profile: wants.profile,
            memory: wants.memory,
            family: demand.map(|demand| demand.family.clone()),
            predicted: demand.and_then(|demand| demand.memory),
            at_most,
            alone: wants.alone,
            yields: wants.yields,
            part_of: None,
        }
    }

    /// Whether such a job had better wait than take a device that needs this many seconds per unit of work, when the
    /// fastest device that fits needs `fastest`. A job that asks for a kind of device takes a slow one.
    pub(crate) fn is_too_slow(&self, seconds_per_unit: f64, fastest: f64) -> bool {
        self.device.is_none() && seconds_per_unit > fastest * TOO_SLOW
    }

    /// What is set aside for such a job under a plan that needs `bytes`.
    pub(crate) fn held(&self, bytes: Option<u64>) -> Held {
        Held {
            bytes,
            alone: self.alone,
        }
    }
}

/// Why a device is not for a job. Ordered: of several devices, the reason that came closest is shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Misfit {
    OtherMachine,
    Label(String, String),
    Kind(DeviceKind),
    Profile(MemoryProfile),
    /// Predicted, under the leanest profile that may be tried.
    Needs {
        most: u64,
        needed: u64,
        profile: MemoryProfile,
    },
    /// As its user says.
    Asks {
        most: u64,
        wanted: u64,
    },
    NoBudget,
}

/// A way to run a job on a device: the profile, and the bytes that it needs; none: not known.
pub(crate) type Choice = (MemoryProfile, Option<u64>);

/// Whether the device can run such a job when it is idle, and how: under the least slow profile. Beside others it runs
/// under the same one or not at all; a task that is squeezed in beside others would only crawl.
pub(crate) fn fit(needs: &Needs, worker: &Worker, device: &Device) -> Result<Choice, Misfit> {
    if needs.local && !worker.same_machine {
        return Err(Misfit::OtherMachine);
    }
    if let Some((key, value)) = needs
        .labels
        .iter()
        .find(|(key, value)| worker.labels.get(*key) != Some(*value))
    {
        return Err(Misfit::Label(key.clone(), value.clone()));
    }
    let kind = device.device.kind;
    if let Some(wanted) = needs.device.filter(|wanted| *wanted != kind) {
        return Err(Misfit::Kind(wanted));
    }
    let on_cpu = kind == DeviceKind::Cpu;
    let wrong_kind = match needs.profile {
        Some(MemoryProfile::CpuOnly) => !on_cpu,
        Some(MemoryProfile::FullGpu) => on_cpu,
        _ => false,
    };
    if let Some(profile) = needs.profile.filter(|_| wrong_kind) {
        return Err(Misfit::Profile(profile));
    }
    let budget = device.memory_budget;
    if budget == 0 {
        return Err(Misfit::NoBudget);
    }
    if let Some(wanted) = needs.memory.filter(|wanted| *wanted > budget) {
        return Err(Misfit::Asks { most: budget, wanted });
    }
    // From the one after which it ran out of memory.
    let rest = |most: MemoryProfile| {
        MemoryProfile::on(on_cpu)
            .into_iter()
            .skip_while(move |one| *one != most)
    };
    let tried: Vec<MemoryProfile> = match (needs.profile, needs.at_most) {
        (Some(profile), _) => vec![profile],
        (None, Some(most)) => rest(most).collect(),
        (None, None) => MemoryProfile::on(on_cpu).to_vec(),
    };
    let Some(predicted) = needs.predicted else {
        let own = if on_cpu { MemoryProfile::CpuOnly } else { device.profile };
        let chosen = tried.iter().find(|one| **one == own).or(tried.first());
        return Ok((*chosen.unwrap_or(&own), needs.memory));
    };
    let mut layouts: Vec<_> = tried.iter().map(|one| (*one, predicted.under(*one, on_cpu))).collect();
    // A leaner profile that saves nothing is no way out.
    layouts.dedup_by_key(|(_, bytes)| *bytes);
    // What the user allows is what it gets; otherwise it may fill the device.
    let room = needs.memory.unwrap_or(budget);
    let fitting = layouts.iter().find(|(_, bytes)| *bytes <= room);
    let leanest = layouts.last().copied().unwrap_or((MemoryProfile::Extreme, 0));
    match (fitting, needs.memory) {
        // Its user knows better, and whoever runs a job in place wants it to run here: a prediction does not stop it.
        (found, Some(wanted)) => Ok((found.map_or(leanest.0, |found| found.0), Some(wanted))),
        (found, None) if needs.local => Ok((found.map_or(leanest.0, |found| found.0), None)),
        (Some((profile, bytes)), None) => Ok((*profile, Some(*bytes))),
        (None, None) => Err(Misfit::Needs {
            most: budget,
            needed: leanest.1,
            profile: leanest.0,
        }),
    }
}

/// What a device offers to a class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviceOffer {
    pub(crate) choice: Choice,
    /// Seconds per unit of work.
    pub(crate) seconds_per_unit: f64,
}

/// Jobs that are alike, and where they fit.
#[derive(Clone, Debug)]
pub(crate) struct Class {
    pub(crate) needs: Needs,
    /// Connected devices on which one fits when they are idle.
    pub(crate) offers: BTreeMap<SlotId, DeviceOffer>,
    /// The least seconds per unit among open devices; none: to be looked up.
    pub(crate) best: Option<f64>,
    /// The least bytes that one needs on any open device; looked up with `best`.
    pub(crate) least: u64,
    /// Those that wait and may start, by level, user and order.
    pub(crate) waiting: BTreeMap<Level, BTreeMap<UserIndex, UserQueue>>,
    pub(crate) count: usize,
    /// None of them can start until a device on which they fit gets room.
    pub(crate) stuck: bool,
    /// Running jobs that were told to give way for one of them.
    pub(crate) claims: BTreeSet<JobId>,
}

/// Empty classes that are kept, because the next job is often like the last one.
const EMPTY_KEPT: usize = 256;

/// All classes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Classes {
    /// By their ids; none: free for the next one.
    all: Vec<Option<Class>>,
    index: BTreeMap<Needs, ClassId>,
    free: Vec<ClassId>,
    /// Empty ones.
    empty: usize,
    /// Those of which one may be able to start now.
    pub(crate) candidates: BTreeSet<ClassId>,
}

impl Classes {
    pub(crate) fn get(&self, id: ClassId) -> Option<&Class> {
        self.all.get(id)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: ClassId) -> Option<&mut Class> {
        self.all.get_mut(id)?.as_mut()
    }

    pub(crate) fn find(&self, needs: &Needs) -> Option<ClassId> {
        self.index.get(needs).copied()
    }

    pub(crate) fn ids(&self) -> Vec<ClassId> {
        self.iter().map(|(id, _)| id).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ClassId, &Class)> {
        let all = self.all.iter().enumerate();
        all.filter_map(|(id, class)| class.as_ref().map(|class| (id, class)))
    }

    /// Adds an empty class, to which no device offers anything yet.
    pub(crate) fn insert(&mut self, needs: Needs) -> ClassId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.index.insert(needs.clone(), id);
        self.empty += 1;
        if let Some(place) = self.all.get_mut(id) {
            *place = Some(Class {
                needs,
                offers: BTreeMap::new(),
                best: None,
                least: 0,
                waiting: BTreeMap::new(),
                count: 0,
                stuck: false,
                claims: BTreeSet::new(),
            });
        }
        id
    }

    /// Removes the empty classes that nobody claims a device for, once there are too many empty ones.
    pub(crate) fn take_surplus(&mut self) -> Vec<(ClassId, Class)> {
        if self.empty <= EMPTY_KEPT {
            return Vec::new();
        }
        let unused = |class: &mut Class| class.count == 0 && class.claims.is_empty();
        let mut gone = Vec::new();
        for (id, place) in self.all.iter_mut().enumerate() {
            if let Some(class) = place.take_if(unused) {
                self.free.push(id);
                self.index.remove(&class.needs);
                self.candidates.remove(&id);
                self.empty -= 1;
                gone.push((id, class));
            }
        }
        gone
    }

    /// One of the class may be able to start.
    pub(crate) fn wake(&mut self, id: ClassId) {
        if let Some(class) = self.get_mut(id) {
            class.stuck = false;
            if class.count > 0 {
                self.candidates.insert(id);
            }
        }
    }

    pub(crate) fn add(&mut self, id: ClassId, level: Level, user: UserIndex, order: u64) {
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

    pub(crate) fn remove(&mut self, id: ClassId, level: Level, user: UserIndex, order: u64) {
        let Some(class) = self.all.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let Some(users) = class.waiting.get_mut(&level) else {
            return;
        };
        let Some(queue) = users.get_mut(&user) else { return };
        if !queue.take(order) {
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
