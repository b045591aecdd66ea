//! Arrays: jobs that were submitted together. Each member is a job like any other; an array adds what holds for all of
//! them: that they are named together, that others wait for all of them, and how many may run at the same time.

use super::event::{Effect, NewArray, NewJob, Refusal, Reply};
use super::model::{ArrayPlace, Condition, Job, QueueState, Ticket};
use super::state::State;
use super::step::Step;
use crate::state::array::Array;
use aitk_common::control::{JobState, MAX_ARRAY_MEMBERS, Submitted, UnixMillis};
use aitk_common::id::JobId;
use std::collections::BTreeSet;

impl State {
    pub(super) fn submit_array(&mut self, step: &mut Step, ticket: Ticket, new: NewArray) {
        let reply = self.take_array(step, new);
        step.push(Effect::Reply(ticket, reply.map(Reply::Submitted)));
    }

    /// All members, or none.
    fn take_array(&mut self, step: &mut Step, new: NewArray) -> Result<Submitted, Refusal> {
        if let Some(earlier) = self.submitted_before(new.idempotency_key.as_ref()) {
            return Ok(earlier);
        }
        let NewArray {
            id,
            name,
            at_most,
            split,
            idempotency_key,
            members,
        } = new;
        let size = u32::try_from(members.len()).unwrap_or(u32::MAX);
        if let Some(first) = members.first().filter(|first| first.capped) {
            let bytes = members.iter().map(|member| member.config_bytes).sum();
            self.has_room_for(&first.wants.owner, members.len() as u64, bytes)?;
        }
        if !(2..=MAX_ARRAY_MEMBERS).contains(&members.len()) {
            return Err(Refusal::Conflict(format!(
                "an array has 2 to {MAX_ARRAY_MEMBERS} members, this one {size}"
            )));
        }
        let taken = |id: &JobId| self.jobs.contains_key(id) || self.arrays.contains_key(id);
        if taken(&id) || members.iter().any(|member| taken(&member.id)) {
            return Err(Refusal::Conflict(format!("the job id {id} is taken; submit again")));
        }
        let ids: BTreeSet<&JobId> = members.iter().map(|member| &member.id).collect();
        let names: BTreeSet<&str> = members.iter().map(|member| member.name.as_str()).collect();
        if ids.len() < members.len() || (names.len() < members.len() && !split) {
            return Err(Refusal::Conflict(
                "two members of the array have the same name; their files would be taken for each other's".into(),
            ));
        }
        let mut afters: Vec<Vec<(JobId, Condition)>> = Vec::with_capacity(members.len());
        for (index, member) in members.iter().enumerate() {
            // Members mostly wait for the same, and a name is looked for among all jobs.
            let before = index
                .checked_sub(1)
                .and_then(|before| members.get(before).zip(afters.get(before)));
            let same = |other: &NewJob| other.after == member.after && other.wants.owner == member.wants.owner;
            afters.push(match before.filter(|(other, _)| same(other)) {
                Some((_, found)) => found.clone(),
                None => self.find_all(&member.after, &member.wants.owner, member.sees_all)?,
            });
        }
        for after in &afters {
            self.refuse_impossible(after)?;
        }
        for ((index, mut member), after) in (0..).zip(members).zip(afters) {
            // The key is the array's; its first member remembers it.
            member.idempotency_key = idempotency_key.clone().filter(|_| index == 0);
            let place = ArrayPlace {
                id: id.clone(),
                name: name.clone(),
                index,
                size,
                at_most,
                split,
            };
            self.take(step, member, after, Some(Box::new(place)));
        }
        Ok(Submitted {
            job: id,
            name,
            existed: false,
        })
    }

    /// What a submission with this key gave before.
    #[must_use]
    pub fn submitted_before(&self, key: Option<&String>) -> Option<Submitted> {
        let id = self.keys.get(key?)?;
        let name = match (self.jobs.get(id), self.arrays.get(id)) {
            (Some(job), _) => job.name.clone(),
            (None, array) => array.map(|array| array.name.clone()).unwrap_or_default(),
        };
        Some(Submitted {
            job: id.clone(),
            name,
            existed: true,
        })
    }

    /// A job became known: a new one, or one of the store.
    pub(super) fn join_array(&mut self, id: &JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        if job.config_bytes > 0 {
            *self.config_bytes.entry(job.wants.owner.clone()).or_default() += job.config_bytes;
        }
        if let Some(key) = &job.idempotency_key {
            let meant = job.array_id().unwrap_or(id);
            self.keys.insert(key.clone(), meant.clone());
        }
        let Some(place) = &job.array else { return };
        let array = self.arrays.entry(place.id.clone()).or_insert_with(|| Array {
            name: place.name.clone(),
            size: place.size,
            at_most: place.at_most,
            split: place.split,
            ..Array::default()
        });
        array.members.insert(place.index, id.clone());
        array.completed += usize::from(job.state == JobState::Completed);
    }

    /// A job is forgotten.
    pub(super) fn leave_array(&mut self, job: &Job) {
        if let Some(bytes) = self.config_bytes.get_mut(&job.wants.owner) {
            *bytes = bytes.saturating_sub(job.config_bytes);
            if *bytes == 0 {
                self.config_bytes.remove(&job.wants.owner);
            }
        }
        if let Some(key) = &job.idempotency_key {
            self.keys.remove(key);
        }
        let Some(place) = &job.array else { return };
        let Some(array) = self.arrays.get_mut(&place.id) else {
            return;
        };
        array.members.remove(&place.index);
        array.completed -= usize::from(job.state == JobState::Completed);
        if array.members.is_empty() {
            self.arrays.remove(&place.id);
        }
    }

    /// Whether this is the id of an array.
    #[must_use]
    pub fn is_array(&self, id: &JobId) -> bool {
        self.arrays.contains_key(id)
    }

    /// The members of an array, by index; a job is all there is of itself.
    #[must_use]
    pub fn members(&self, id: &JobId) -> Vec<JobId> {
        match self.arrays.get(id) {
            Some(array) => array.members.values().cloned().collect(),
            None => vec![id.clone()],
        }
    }

    /// Whether what others wait for has completed: a job, or every member of an array.
    pub(super) fn has_completed(&self, id: &JobId) -> bool {
        match self.jobs.get(id) {
            Some(job) => job.state == JobState::Completed,
            None => self
                .arrays
                .get(id)
                .is_some_and(|array| array.completed == array.members.len()),
        }
    }

    /// Whether what a job starts after has ended as it has to.
    pub(super) fn is_met(&self, id: &JobId, condition: Condition) -> bool {
        match condition {
            Condition::Completed => self.has_completed(id),
            Condition::Ended => self.has_ended(id, |_| false),
            Condition::Failed => self.has_ended(id, |any| any != JobState::Failed),
        }
    }

    /// Whether a job, or every member of an array, has ended; not so if all of them ended in a way that does not count.
    fn has_ended(&self, id: &JobId, counts_not: impl Fn(JobState) -> bool) -> bool {
        let members = self.members(id);
        let mut states = members
            .iter()
            .filter_map(|id| self.job(id))
            .map(|job| job.state)
            .peekable();
        if states.peek().is_none() {
            return false;
        }
        let states: Vec<JobState> = states.collect();
        states.iter().all(|state| state.is_ended()) && !states.iter().all(|state| counts_not(*state))
    }

    /// A member has completed.
    pub(super) fn member_completed(&mut self, id: &JobId) {
        let array = self.jobs.get(id).and_then(|job| job.array_id()).cloned();
        if let Some(array) = array.and_then(|array| self.arrays.get_mut(&array)) {
            array.completed += 1;
        }
    }

    /// Where a member that could start now waits: for a device, or for others of its array. `None`: it is in no array
    /// with a limit.
    pub(super) fn admit_member(&mut self, id: &JobId) -> Option<QueueState> {
        let job = self.jobs.get(id)?;
        let key = job.queue_key();
        let array = self.arrays.get_mut(job.array_id()?)?;
        array.at_most?;
        if array.has_room() {
            array.ready.insert(id.clone());
            return None;
        }
        array.held.insert(key, id.clone());
        Some(QueueState::Held)
    }

    /// A member leaves the queue.
    pub(super) fn dismiss_member(&mut self, id: &JobId, queue_state: QueueState) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(array_id) = job.array_id().cloned() else {
            return;
        };
        let key = job.queue_key();
        let Some(array) = self.arrays.get_mut(&array_id) else {
            return;
        };
        match queue_state {
            QueueState::Held => {
                array.held.remove(&key);
            }
            _ if array.ready.remove(id) => {
                self.arrays_with_capacity.insert(array_id);
            }
            _ => {}
        }
    }

    /// A member has a live attempt.
    pub(super) fn member_starts(&mut self, id: &JobId) {
        let Some(array_id) = self.jobs.get(id).and_then(|job| job.array_id()) else {
            return;
        };
        if let Some(array) = self.arrays.get_mut(array_id) {
            array.running.insert(id.clone());
            if array.split {
                self.splits.insert(array_id.clone());
            }
        }
    }

    /// A member has no live attempt any more.
    pub(super) fn member_ends(&mut self, id: &JobId) {
        let Some(array_id) = self.jobs.get(id).and_then(|job| job.array_id()).cloned() else {
            return;
        };
        if let Some(array) = self.arrays.get_mut(&array_id) {
            array.running.remove(id);
            if array.split {
                self.arrays_to_recheck.insert(array_id.clone());
            }
            if array.running.is_empty() {
                self.splits.remove(&array_id);
            }
            self.arrays_with_capacity.insert(array_id);
        }
    }

    /// Members that waited for others of their array, where there is room now. At the end of a step: a member that came
    /// back from its device has had the first choice.
    pub(super) fn release_members(&mut self, now: UnixMillis) {
        for id in std::mem::take(&mut self.arrays_with_capacity) {
            while let Some(array) = self.arrays.get_mut(&id)
                && array.has_room()
                && let Some((_, job)) = array.held.pop_first()
            {
                self.requeue_in_place(now, &job);
            }
        }
    }
}
