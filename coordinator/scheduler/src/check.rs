//! What always holds.

use super::model::{QueueState, live_states};
use super::queue::StartCondition;
use super::state::State;
use super::state::array::Array;
use super::state::slots::Held;
use super::state::table::Table;
use aitk_common::control::JobState;
use aitk_common::id::{JobId, UserName};
use std::collections::{BTreeMap, BTreeSet};

/// Checks every invariant of the state; tests run it after each step.
///
/// # Errors
/// The first invariant that is broken, in words.
pub fn check(state: &State) -> Result<(), String> {
    check_jobs(state)?;
    check_queue(state)?;
    check_arrays(state)?;
    check_devices(state)?;
    check_sessions(state)
}

fn check_jobs(state: &State) -> Result<(), String> {
    for (id, job) in state.jobs.iter() {
        let fail = |what: &str| Err(format!("{id} ({}): {what}", job.state));
        if job.id != *id {
            return fail("kept under another id");
        }
        let states = live_states(job);
        if states.len() > 1 {
            return fail("two live attempts");
        }
        let runs = matches!(job.state, JobState::Running | JobState::Stopping);
        if runs != job.current().is_some() || states.len() != usize::from(runs) {
            return fail("live attempt and state disagree");
        }
        if runs != job.live.is_some() {
            return fail("lease and state disagree");
        }
        if !runs && job.recall.is_some() {
            return fail("recalled, but does not run");
        }
        if job.attempts.windows(2).any(|pair| pair[0].epoch >= pair[1].epoch) {
            return fail("epochs do not grow");
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
        if job.failures > job.wants.retries.saturating_add(1) {
            return fail("more tries than allowed");
        }
        if job.order >= state.next_order {
            return fail("order from the future");
        }
        if job.state == JobState::Queued && state.explain(job.not_before, job).is_empty() {
            return fail("waits without a reason");
        }
        let known = |id: &JobId| state.jobs.contains_key(id) || state.arrays.contains_key(id);
        if job.state != JobState::Completed && !job.after.iter().all(known) {
            return fail("starts after a job that is forgotten");
        }
        if let Some(key) = &job.idempotency_key
            && state.keys.get(key) != Some(job.array_id().unwrap_or(id))
        {
            return fail("its idempotency key leads elsewhere");
        }
    }
    Ok(())
}

/// Every waiting job is where it waits, and nowhere else; nobody waits who could start.
fn check_queue(state: &State) -> Result<(), String> {
    let mut queue = BTreeMap::new();
    let mut timed = BTreeSet::new();
    let mut dependents: BTreeMap<JobId, BTreeSet<JobId>> = BTreeMap::new();
    let mut users: BTreeMap<UserName, (usize, u32)> = BTreeMap::new();
    let mut ready = 0;
    for (id, job) in state.jobs.iter() {
        let fail = |what: &str| Err(format!("{id} ({}): {what}", job.state));
        let user = users.entry(job.wants.owner.clone()).or_default();
        user.1 += u32::from(job.current().is_some());
        if job.state != JobState::Queued {
            if job.queue_state != QueueState::Nowhere {
                return fail("is in the queue and does not wait");
            }
            continue;
        }
        user.0 += 1;
        queue.insert(job.queue_key(), state.jobs.index_of(id));
        for before in &job.after {
            dependents.entry(before.clone()).or_default().insert(id.clone());
        }
        match (job.queue_state, state.start_condition(job.not_before, job)) {
            (QueueState::Timed(time), _) => {
                timed.insert((time, id.clone()));
            }
            (QueueState::Blocked, StartCondition::Paused | StartCondition::After(_))
            | (QueueState::Held, StartCondition::Open) => {}
            (QueueState::Ready(class), StartCondition::Open) => {
                ready += 1;
                let waits = state.classes.get(class).is_some_and(|class| {
                    let mine = class
                        .waiting
                        .get(&job.level())
                        .and_then(|users| users.get(&state.users.get_index_of(&job.wants.owner)?));
                    class.needs == super::state::classes::Needs::of(job)
                        && mine.is_some_and(|line| line.holds(job.order))
                });
                if !waits {
                    return fail("is not in its class");
                }
            }
            (queue_state, start_condition) => {
                return Err(format!(
                    "{id}: waits at {queue_state:?} and should at {start_condition:?}"
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
            return Err(format!("user {name}: {user:?}, but {waiting} wait and {running} run"));
        }
    }
    for (id, class) in state.classes.iter() {
        for victim in &class.claims {
            if state.jobs.get(victim).is_none_or(|job| job.recall.is_none()) {
                return Err(format!("class {id} has a claim on {victim}, which does not give way"));
            }
        }
    }
    Ok(())
}

/// Arrays are what their members say, and no more of them run or wait for a device than may; nobody is held back
/// without need.
fn check_arrays(state: &State) -> Result<(), String> {
    let mut arrays: BTreeMap<JobId, Array> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        let Some(place) = &job.array else {
            if job.queue_state == QueueState::Held {
                return Err(format!("{id} is held back and in no array"));
            }
            continue;
        };
        let array = arrays.entry(place.id.clone()).or_insert_with(|| Array {
            name: place.name.clone(),
            size: place.size,
            at_most: place.at_most,
            split: place.split,
            ..Array::default()
        });
        if array.members.insert(place.index, id.clone()).is_some() || place.index >= array.size {
            return Err(format!("{id} is not at its place in its array"));
        }
        array.completed += usize::from(job.state == JobState::Completed);
        if job.current().is_some() {
            array.running.insert(id.clone());
        }
        match job.queue_state {
            QueueState::Ready(_) if place.at_most.is_some() => {
                array.ready.insert(id.clone());
            }
            QueueState::Held => {
                array.held.insert(job.queue_key(), id.clone());
            }
            _ => {}
        }
    }
    for (id, array) in &arrays {
        let most = array.at_most.map_or(usize::MAX, |most| most as usize);
        if array.running.len() + array.ready.len() > most {
            return Err(format!("more than {most} of the array {id} run or may start"));
        }
        if !array.held.is_empty() && array.has_room() {
            return Err(format!("the array {id} holds members back without need"));
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
        return Err("the index of parts that run is wrong".into());
    }
    match state.arrays_with_capacity.first() {
        Some(id) => Err(format!("the array {id} was not looked at")),
        None => Ok(()),
    }
}

/// Devices hold what their jobs say, and no more than they have.
fn check_devices(state: &State) -> Result<(), String> {
    let mut live = Table::default();
    let mut yielding = BTreeSet::new();
    let mut deadlines = BTreeSet::new();
    let mut running: BTreeMap<usize, Table<JobId, Held>> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        let Some(attempt) = job.current() else { continue };
        live.extend(state.jobs.index_of(id).map(|index| (id.clone(), index)));
        if job.wants.yields && job.recall.is_none() && job.state == JobState::Running {
            yielding.insert(id.clone());
        }
        if let Some(deadline) = job.live.and_then(|live| live.deadline)
            && job.state == JobState::Running
        {
            deadlines.insert((deadline, id.clone()));
        }
        let slot = state
            .slots
            .find(&attempt.worker, attempt.device)
            .ok_or_else(|| format!("{id} runs on a device that is not known"))?;
        let held = Held {
            bytes: attempt.memory,
            alone: job.wants.alone,
        };
        running.entry(slot).or_default().insert(id.clone(), held);
    }
    if live != state.live {
        return Err("the index of live jobs is wrong".into());
    }
    if yielding != state.yielding {
        return Err("the index of yielding jobs is wrong".into());
    }
    if !deadlines.is_subset(&state.deadlines) {
        return Err("the index of time limits is wrong".into());
    }
    for (id, slot) in state.slots.iter() {
        let name = format!(
            "{} {} {}",
            slot.worker,
            slot.device.device.kind.name(),
            slot.device.device.index
        );
        let jobs = running.remove(&id).unwrap_or_default();
        if jobs != slot.running {
            return Err(format!("{name} runs {:?}, but should {:?}", slot.running, jobs));
        }
        if jobs.len() > 1 {
            let sum = jobs
                .values()
                .map(|held| held.bytes.map_or(u128::MAX >> 1, u128::from))
                .sum::<u128>();
            // A device that was offered anew may have shrunk below what runs on it; nothing more is added then.
            if slot.connected && sum > u128::from(slot.device.memory_budget) && slot.has_room() {
                return Err(format!("{name} is over its budget and takes more"));
            }
        }
        if let Some(reserved_for) = &slot.reserved_for {
            let comes = |job: &super::model::Job| matches!(job.recall, Some(super::model::Recall::Faster { .. }));
            if !state.jobs.get(reserved_for).is_some_and(comes) {
                return Err(format!("{name} is kept for {reserved_for}, which does not come"));
            }
        }
        if !state.slots.is_listed_right(id) {
            return Err(format!("{name}: the index of devices with room is wrong"));
        }
    }
    let kept = state.slots.iter().filter(|(_, slot)| slot.reserved_for.is_some());
    if kept.count() != state.reserved_slots {
        return Err("the count of devices that are kept is wrong".into());
    }
    let with_room = state.slots.iter().filter(|(_, slot)| slot.has_room()).count();
    if with_room != state.slots.with_room() {
        return Err("the index of devices with room has too many".into());
    }
    Ok(())
}

fn check_sessions(state: &State) -> Result<(), String> {
    for (session, id) in &state.sessions {
        if state.workers.get(id).and_then(|worker| worker.session) != Some(*session) {
            return Err(format!("session {} is not its worker's", session.0));
        }
    }
    let open = state.workers.values().filter(|worker| worker.session.is_some()).count();
    if open != state.sessions.len() {
        return Err("a worker has a session that is not indexed".into());
    }
    Ok(())
}
