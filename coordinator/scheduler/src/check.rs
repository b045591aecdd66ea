//! The invariants of the state.

use super::class_fits::device_fit;
use super::model::{Job, Preemption, QueueState, live_states};
use super::queue::StartCondition;
use super::state::State;
use super::state::array::Array;
use super::state::slots::Reservation;
use super::state::table::Table;
use aitk_common::control_plane::{JobState, UnixMillis};
use aitk_common::id::{JobId, UserName};
use std::collections::{BTreeMap, BTreeSet};

/// Checks every invariant of the state; tests run it after each step.
///
/// # Errors
/// The first invariant that is broken, as text.
pub fn check(state: &State) -> Result<(), String> {
    check_jobs(state)?;
    check_queue(state)?;
    check_classes(state)?;
    check_arrays(state)?;
    check_devices(state)?;
    check_sessions(state)
}

fn check_jobs(state: &State) -> Result<(), String> {
    for (id, job) in state.jobs.iter() {
        let fail = |what: &str| Err(format!("{id} ({}): {what}", job.state));
        if job.id != *id {
            return fail("stored under another id");
        }
        let states = live_states(job);
        if states.len() > 1 {
            return fail("two live attempts");
        }
        let runs = matches!(job.state, JobState::Running | JobState::Stopping);
        if runs != job.live_attempt().is_some() || states.len() != usize::from(runs) {
            return fail("live attempt and state disagree");
        }
        if runs != job.live.is_some() {
            return fail("lease and state disagree");
        }
        if !runs && job.preemption.is_some() {
            return fail("is being preempted, but does not run");
        }
        if job.attempts.windows(2).any(|pair| pair[0].epoch >= pair[1].epoch) {
            return fail("epochs do not increase");
        }
        if job
            .attempts
            .iter()
            .any(|attempt| attempt.state.is_live() == attempt.ended.is_some())
        {
            return fail("an attempt's end and its state disagree");
        }
        if job.state.is_ended() != job.ended.is_some() {
            return fail("end and state disagree");
        }
        if job.failures > job.requirements.retries.saturating_add(1) {
            return fail("more failures than retries allow");
        }
        if job.order >= state.next_order {
            return fail("its order is not below next_order");
        }
        if job.state == JobState::Queued && state.explain(after_wait(job), job).is_empty() {
            return fail("waits without a reason");
        }
        let known = |id: &JobId| state.jobs.contains_key(id) || state.arrays.contains_key(id);
        if job.state != JobState::Completed && !job.after.iter().all(known) {
            return fail("starts after a job that does not exist");
        }
        if let Some(key) = &job.idempotency_key
            && state.keys.get(key) != Some(job.array_id().unwrap_or(id))
        {
            return fail("its idempotency key belongs to another job");
        }
    }
    Ok(())
}

/// A time at which a job waits neither for its start time nor to be tried again.
fn after_wait(job: &Job) -> UnixMillis {
    job.not_before.max(job.retry_at.unwrap_or_default())
}

/// Checks that every waiting job is in the right index of the queue and in no other.
fn check_queue(state: &State) -> Result<(), String> {
    let mut queue = BTreeMap::new();
    let (mut timed, mut retries) = (BTreeSet::new(), BTreeSet::new());
    let mut dependents: BTreeMap<JobId, BTreeSet<JobId>> = BTreeMap::new();
    let mut users: BTreeMap<UserName, (usize, u32)> = BTreeMap::new();
    let mut ready = 0;
    for (id, job) in state.jobs.iter() {
        let fail = |what: &str| Err(format!("{id} ({}): {what}", job.state));
        let user = users.entry(job.requirements.owner.clone()).or_default();
        user.1 += u32::from(job.live_attempt().is_some());
        if job.state != JobState::Queued {
            if job.queue_state != QueueState::NotQueued {
                return fail("is in the queue and does not wait");
            }
            continue;
        }
        user.0 += 1;
        queue.insert(job.queue_key(), state.jobs.index_of(id));
        for before in &job.after {
            dependents.entry(before.clone()).or_default().insert(id.clone());
        }
        match (job.queue_state, state.start_condition(after_wait(job), job)) {
            (QueueState::Timed(time), _) => {
                timed.insert((time, id.clone()));
            }
            (QueueState::Retry(time), _) => {
                retries.insert((time, id.clone()));
            }
            (QueueState::Held, StartCondition::Paused | StartCondition::After(_))
            | (QueueState::ArrayLimited, StartCondition::Met) => {}
            (QueueState::Ready(class), StartCondition::Met) => {
                ready += 1;
                let waits = state.classes.get(class).is_some_and(|class| {
                    let own_queue = class
                        .waiting
                        .get(&job.level())
                        .and_then(|users| users.get(&state.users.get_index_of(&job.requirements.owner)?));
                    class.needs == super::state::classes::DeviceNeeds::of(job)
                        && own_queue.is_some_and(|queue| queue.is_consistent_with(job.order))
                });
                if !waits {
                    return fail("is not in its class");
                }
            }
            (queue_state, start_condition) => {
                return Err(format!(
                    "{id}: is queued as {queue_state:?}, but waits for {start_condition:?}"
                ));
            }
        }
    }
    for (what, same) in [
        (
            "queue",
            queue
                .into_iter()
                .eq(state.queue.iter().map(|(key, index)| (*key, Some(*index)))),
        ),
        ("index of times", timed == state.timed),
        ("index of retries", retries == state.retries),
        ("index of dependents", dependents == state.dependents),
        (
            "count of ready jobs",
            state.classes.iter().map(|(_, class)| class.count).sum::<usize>() == ready,
        ),
    ] {
        if !same {
            return Err(format!("the {what} is wrong"));
        }
    }
    for (name, user) in &state.users {
        let (waiting, running) = users.get(name).copied().unwrap_or_default();
        if (user.waiting, user.running) != (waiting, running) {
            return Err(format!(
                "user {name}: {user:?}, but {waiting} jobs wait and {running} run"
            ));
        }
    }
    Ok(())
}

/// Checks what classes cache, that a preempted job is noted for one class at most, and that no class waits although its next job
/// could start.
fn check_classes(state: &State) -> Result<(), String> {
    let mut preempted = BTreeSet::new();
    for (id, class) in state.classes.iter() {
        let fail = |what: String| Err(format!("class {id}: {what}"));
        for victim in &class.preempted {
            if state.jobs.get(victim).is_none_or(|job| job.preemption.is_none()) {
                return fail(format!("lists {victim} as preempted, which is not being preempted"));
            }
            if !preempted.insert(victim) {
                return fail(format!("lists {victim} as preempted, as another class does"));
            }
        }
        for (slot_id, slot) in state.slots.iter() {
            let worker = state.workers.get(&slot.worker).filter(|_| slot.connected);
            let fit = worker.and_then(|worker| device_fit(&state.speeds, &class.needs, worker, &slot.device).ok());
            if class.fits.get(&slot_id) != fit.as_ref() || slot.classes.contains(&id) != fit.is_some() {
                return fail(format!(
                    "its fit on device {slot_id} is {:?}, and should be {fit:?}",
                    class.fits.get(&slot_id)
                ));
            }
        }
        let computed = state.compute_least_seconds_and_bytes(class);
        if class.least_seconds_and_bytes.is_some_and(|cached| cached != computed) {
            return fail(format!(
                "caches {:?} as least seconds and bytes, not {computed:?}",
                class.least_seconds_and_bytes
            ));
        }
        // When parts are left to faster devices depends on the time, and a device that is reserved on the state of a part.
        let depends = class.needs.part_of.is_some() || state.takeover_slots > 0;
        // A candidate is considered with the next placement, and after a restart that is the next change.
        if depends || state.storage_full.is_some() || state.classes.candidates.contains(&id) {
            continue;
        }
        let next = state.position(id).and_then(|position| state.job_at(position));
        if let Some(job) = next
            && let Some(choice) = state.choose_device(UnixMillis(0), job, id)
        {
            return fail(format!("{} waits, and could start on device {}", job.id, choice.slot));
        }
    }
    Ok(())
}

/// Checks that arrays match their members, that no array exceeds its limit, and that no member waits for a limit that is not
/// reached.
fn check_arrays(state: &State) -> Result<(), String> {
    let mut arrays: BTreeMap<JobId, Array> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        let Some(membership) = &job.array else {
            if job.queue_state == QueueState::ArrayLimited {
                return Err(format!("{id} waits for an array limit and is in no array"));
            }
            continue;
        };
        let array = arrays.entry(membership.id.clone()).or_insert_with(|| Array {
            name: membership.name.clone(),
            size: membership.size,
            at_most: membership.at_most,
            split: membership.split,
            ..Array::default()
        });
        if array.members.insert(membership.index, id.clone()).is_some() || membership.index >= array.size {
            return Err(format!("{id} has a wrong index in its array"));
        }
        array.completed += usize::from(job.state == JobState::Completed);
        if job.live_attempt().is_some() {
            array.running.insert(id.clone());
        }
        match job.queue_state {
            QueueState::Ready(_) if membership.at_most.is_some() => {
                array.ready.insert(id.clone());
            }
            QueueState::ArrayLimited => {
                array.over_limit.insert(job.queue_key(), id.clone());
            }
            _ => {}
        }
    }
    for (id, array) in &arrays {
        let max = array.at_most.map_or(usize::MAX, |max| max as usize);
        if array.running.len() + array.ready.len() > max {
            return Err(format!("more than {max} of the array {id} run or may start"));
        }
        if !array.over_limit.is_empty() && array.can_admit() {
            return Err(format!(
                "the array {id} lets members wait although its limit is not reached"
            ));
        }
    }
    if arrays != state.arrays {
        return Err(format!(
            "the index of arrays is wrong: {:?}, not {arrays:?}",
            state.arrays
        ));
    }
    let splits = arrays
        .iter()
        .filter(|(_, array)| array.split && !array.running.is_empty());
    if !splits.map(|(id, _)| id).eq(&state.splits) || !state.reserved_until_placed.is_empty() {
        return Err("the index of arrays with running parts is wrong".into());
    }
    match state.arrays_with_capacity.first() {
        Some(id) => Err(format!("the array {id} is still marked to be released")),
        None => Ok(()),
    }
}

/// Checks that devices match the jobs that run on them, and that no device is over its budget.
fn check_devices(state: &State) -> Result<(), String> {
    let mut live = Table::default();
    let mut preemptible = BTreeSet::new();
    let (mut deadlines, mut all_deadlines) = (BTreeSet::new(), BTreeSet::new());
    let mut running: BTreeMap<usize, Table<JobId, Reservation>> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        let Some(attempt) = job.live_attempt() else { continue };
        live.extend(state.jobs.index_of(id).map(|index| (id.clone(), index)));
        if job.requirements.yields && job.preemption.is_none() && job.state == JobState::Running {
            preemptible.insert(id.clone());
        }
        if let Some(deadline) = job.live.and_then(|live| live.deadline) {
            all_deadlines.insert((deadline, id.clone()));
            // A job that is stopping may have passed its deadline.
            if job.state == JobState::Running {
                deadlines.insert((deadline, id.clone()));
            }
        }
        let slot = state
            .slots
            .find(&attempt.worker, attempt.device)
            .ok_or_else(|| format!("{id} runs on a device that is not known"))?;
        let reservation = Reservation {
            bytes: attempt.memory,
            exclusive: job.requirements.exclusive,
        };
        running.entry(slot).or_default().insert(id.clone(), reservation);
    }
    if live != state.live {
        return Err("the index of live jobs is wrong".into());
    }
    if preemptible != state.preemptible {
        return Err("the index of preemptible jobs is wrong".into());
    }
    if !deadlines.is_subset(&state.deadlines) || !state.deadlines.is_subset(&all_deadlines) {
        return Err("the index of time limits is wrong".into());
    }
    for (id, slot) in state.slots.iter() {
        let name = format!(
            "{} {} {}",
            slot.worker,
            slot.device.id.kind.name(),
            slot.device.id.index
        );
        let jobs = running.remove(&id).unwrap_or_default();
        if jobs != slot.running {
            return Err(format!("{name} runs {:?}, but should run {:?}", slot.running, jobs));
        }
        let whole = slot.device.memory_budget;
        let reserved = jobs
            .values()
            .fold(0, |sum: u64, held| sum.saturating_add(held.bytes.unwrap_or(whole)));
        if reserved != slot.reserved {
            return Err(format!(
                "{name} reserves {} bytes, and should reserve {reserved}",
                slot.reserved
            ));
        }
        if jobs.len() > 1 {
            let sum = jobs
                .values()
                .map(|held| held.bytes.map_or(u128::MAX >> 1, u128::from))
                .sum::<u128>();
            // A device that was registered again may have shrunk below what runs on it; then it takes no more jobs.
            if slot.connected && sum > u128::from(slot.device.memory_budget) && slot.has_capacity() {
                return Err(format!("{name} is over its budget and takes more"));
            }
        }
        if let Some(takeover_by) = &slot.takeover_by {
            let is_taken_over = |job: &Job| matches!(job.preemption, Some(Preemption::FasterDevice { .. }));
            if !state.jobs.get(takeover_by).is_some_and(is_taken_over) {
                return Err(format!("{name} is reserved for {takeover_by}, which no takeover moves"));
            }
        }
        if !state.slots.is_indexed_correctly(id) {
            return Err(format!("{name}: the index of devices with capacity is wrong"));
        }
    }
    let reserved = state.slots.iter().filter(|(_, slot)| slot.takeover_by.is_some());
    if reserved.count() != state.takeover_slots {
        return Err("the count of reserved devices is wrong".into());
    }
    let with_capacity = state.slots.iter().filter(|(_, slot)| slot.has_capacity()).count();
    if with_capacity != state.slots.with_capacity() {
        return Err("the index of devices with capacity has too many".into());
    }
    Ok(())
}

fn check_sessions(state: &State) -> Result<(), String> {
    for (session, id) in &state.sessions {
        if state.workers.get(id).and_then(|worker| worker.session) != Some(*session) {
            return Err(format!("session {} does not belong to its worker", session.0));
        }
    }
    let open = state.workers.values().filter(|worker| worker.session.is_some()).count();
    if open != state.sessions.len() {
        return Err("a worker has a session that is not indexed".into());
    }
    Ok(())
}
