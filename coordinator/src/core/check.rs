//! What always holds.

use super::model::{State, device_key, live_states};
use aitk_common::control::JobState;
use std::collections::{BTreeMap, BTreeSet};

/// Checks every invariant of the state; tests run it after each step.
///
/// # Errors
/// The first invariant that is broken, in words.
pub fn check(state: &State) -> Result<(), String> {
    let mut queue = BTreeSet::new();
    let mut live = BTreeSet::new();
    let mut busy: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for (id, job) in &state.jobs {
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
        if job.state == JobState::Queued {
            queue.insert(job.queue_key());
            if state.explain(job.not_before, job).is_empty() {
                return fail("waits without a reason");
            }
        }
        if let Some(attempt) = job.current() {
            live.insert(id.clone());
            let devices = busy.entry(attempt.worker.clone()).or_default();
            if devices.insert(device_key(attempt.device), id.clone()).is_some() {
                return fail("shares its device with another job");
            }
        }
        if let Some(key) = &job.idempotency_key
            && state.keys.get(key) != Some(id)
        {
            return fail("its idempotency key leads elsewhere");
        }
    }
    if queue != state.queue {
        return Err("the queue is not the set of waiting jobs".into());
    }
    if live != state.live {
        return Err("the index of live jobs is wrong".into());
    }
    if busy != state.busy {
        return Err("the index of busy devices is wrong".into());
    }
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
