//! Arrays: jobs that were submitted together. Each member is an ordinary job. The array adds a common name, a limit of how
//! many members run at the same time, and lets other jobs wait for all members.

use super::changes::Changes;
use super::event::{Effect, NewArray, NewJob, Refusal, Reply};
use super::model::{ArrayMembership, DependencyCondition, Job, QueueState, Ticket};
use super::state::State;
use crate::state::array::Array;
use aitk_common::control_plane::{JobState, MAX_ARRAY_MEMBERS, SubmissionReceipt, UnixMillis};
use aitk_common::id::JobId;
use std::collections::BTreeSet;

impl State {
    pub(super) fn submit_array(&mut self, changes: &mut Changes, ticket: Ticket, new: NewArray) {
        let reply = self.accept_array(changes, new);
        changes.push(Effect::Reply(ticket, reply.map(Reply::Submitted)));
    }

    /// Accepts all members of an array, or none.
    fn accept_array(&mut self, changes: &mut Changes, new: NewArray) -> Result<SubmissionReceipt, Refusal> {
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
        if let Some(first) = members.first().filter(|first| first.user_limits_apply) {
            let bytes = members.iter().map(|member| member.config_bytes).sum();
            self.check_user_limits(&first.requirements.owner, members.len() as u64, bytes)?;
        }
        if !(2..=MAX_ARRAY_MEMBERS).contains(&members.len()) {
            return Err(Refusal::Conflict(format!(
                "an array has 2 to {MAX_ARRAY_MEMBERS} members, this one {size}"
            )));
        }
        let is_taken = |id: &JobId| self.jobs.contains_key(id) || self.arrays.contains_key(id);
        if is_taken(&id) || members.iter().any(|member| is_taken(&member.id)) {
            return Err(Refusal::Conflict(format!("the job id {id} is taken; submit again")));
        }
        let ids: BTreeSet<&JobId> = members.iter().map(|member| &member.id).collect();
        let names: BTreeSet<&str> = members.iter().map(|member| member.name.as_str()).collect();
        if ids.len() < members.len() || (names.len() < members.len() && !split) {
            return Err(Refusal::Conflict(
                "two members of the array have the same name; their files would be taken for each other's".into(),
            ));
        }
        let mut afters: Vec<Vec<(JobId, DependencyCondition)>> = Vec::with_capacity(members.len());
        for (index, member) in members.iter().enumerate() {
            // Most members have the same dependencies, and resolving a name searches all jobs.
            let before = index
                .checked_sub(1)
                .and_then(|before| members.get(before).zip(afters.get(before)));
            let same =
                |other: &NewJob| other.after == member.after && other.requirements.owner == member.requirements.owner;
            afters.push(match before.filter(|(other, _)| same(other)) {
                Some((_, found)) => found.clone(),
                None => self.resolve_dependencies(&member.after, &member.requirements.owner, member.sees_all)?,
            });
        }
        for after in &afters {
            self.check_can_be_met(after)?;
        }
        for ((index, mut member), after) in (0..).zip(members).zip(afters) {
            // The idempotency key of the array is stored with its first member.
            member.idempotency_key = idempotency_key.clone().filter(|_| index == 0);
            let membership = ArrayMembership {
                id: id.clone(),
                name: name.clone(),
                index,
                size,
                at_most,
                split,
            };
            self.insert_job(changes, member, after, Some(Box::new(membership)));
        }
        Ok(SubmissionReceipt {
            job: id,
            name,
            existed: false,
        })
    }

    /// The job or array that was submitted with this idempotency key before.
    #[must_use]
    pub fn submitted_before(&self, key: Option<&String>) -> Option<SubmissionReceipt> {
        let id = self.keys.get(key?)?;
        let name = match (self.jobs.get(id), self.arrays.get(id)) {
            (Some(job), _) => job.name.clone(),
            (None, array) => array.map(|array| array.name.clone()).unwrap_or_default(),
        };
        Some(SubmissionReceipt {
            job: id.clone(),
            name,
            existed: true,
        })
    }

    /// Adds a new or restored job to its array and to the indexes of idempotency keys and config bytes.
    pub(super) fn index_job(&mut self, id: &JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        if job.config_bytes > 0 {
            *self.config_bytes.entry(job.requirements.owner.clone()).or_default() += job.config_bytes;
        }
        if let Some(key) = &job.idempotency_key {
            let submitted = job.array_id().unwrap_or(id);
            self.keys.insert(key.clone(), submitted.clone());
        }
        let Some(membership) = &job.array else { return };
        let array = self.arrays.entry(membership.id.clone()).or_insert_with(|| Array {
            name: membership.name.clone(),
            size: membership.size,
            at_most: membership.at_most,
            split: membership.split,
            ..Array::default()
        });
        array.members.insert(membership.index, id.clone());
        array.completed += usize::from(job.state == JobState::Completed);
    }

    /// Removes a job from its array and from the indexes of idempotency keys and config bytes.
    pub(super) fn unindex_job(&mut self, job: &Job) {
        if let Some(bytes) = self.config_bytes.get_mut(&job.requirements.owner) {
            *bytes = bytes.saturating_sub(job.config_bytes);
            if *bytes == 0 {
                self.config_bytes.remove(&job.requirements.owner);
            }
        }
        if let Some(key) = &job.idempotency_key {
            self.keys.remove(key);
        }
        let Some(membership) = &job.array else { return };
        let Some(array) = self.arrays.get_mut(&membership.id) else {
            return;
        };
        array.members.remove(&membership.index);
        array.completed -= usize::from(job.state == JobState::Completed);
        if array.members.is_empty() {
            self.arrays.remove(&membership.id);
        }
    }

    /// Whether this is the id of an array.
    #[must_use]
    pub fn is_array(&self, id: &JobId) -> bool {
        self.arrays.contains_key(id)
    }

    /// The members of an array, by index; of a job, the job itself.
    #[must_use]
    pub fn members(&self, id: &JobId) -> Vec<JobId> {
        match self.arrays.get(id) {
            Some(array) => array.members.values().cloned().collect(),
            None => vec![id.clone()],
        }
    }

    /// Whether a job, or every member of an array, has completed.
    pub(super) fn has_completed(&self, id: &JobId) -> bool {
        match self.jobs.get(id) {
            Some(job) => job.state == JobState::Completed,
            None => self
                .arrays
                .get(id)
                .is_some_and(|array| array.completed == array.members.len()),
        }
    }

    /// Whether a dependency has ended as the condition demands.
    pub(super) fn is_met(&self, id: &JobId, condition: DependencyCondition) -> bool {
        match condition {
            DependencyCondition::Completed => self.has_completed(id),
            DependencyCondition::Ended => self.has_ended(id, |_| true),
            DependencyCondition::Failed => self.has_ended(id, |state| state == JobState::Failed),
        }
    }

    /// Whether a job, or every member of an array, has ended, and at least one of them in a state that counts.
    fn has_ended(&self, id: &JobId, counts: impl Fn(JobState) -> bool) -> bool {
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
        states.iter().all(|state| state.is_ended()) && states.iter().any(|state| counts(*state))
    }

    /// Counts a completed member of its array.
    pub(super) fn array_member_completed(&mut self, id: &JobId) {
        let array = self.jobs.get(id).and_then(|job| job.array_id()).cloned();
        if let Some(array) = array.and_then(|array| self.arrays.get_mut(&array)) {
            array.completed += 1;
        }
    }

    /// Admits a member that could start now to its array's limit. Returns [`QueueState::ArrayLimited`] if the limit is
    /// reached, else `None`.
    pub(super) fn admit_to_array(&mut self, id: &JobId) -> Option<QueueState> {
        let job = self.jobs.get(id)?;
        let key = job.queue_key();
        let array = self.arrays.get_mut(job.array_id()?)?;
        array.at_most?;
        if array.can_admit() {
            array.ready.insert(id.clone());
            return None;
        }
        array.over_limit.insert(key, id.clone());
        Some(QueueState::ArrayLimited)
    }

    /// Updates the array of a member that leaves the queue.
    pub(super) fn leave_array_queue(&mut self, id: &JobId, queue_state: QueueState) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(array_id) = job.array_id().cloned() else {
            return;
        };
        let key = job.queue_key();
        let Some(array) = self.arrays.get_mut(&array_id) else {
            return;
        };
        match queue_state {
            QueueState::ArrayLimited => {
                array.over_limit.remove(&key);
            }
            _ if array.ready.remove(id) => {
                self.arrays_with_capacity.insert(array_id);
            }
            _ => {}
        }
    }

    /// Updates the array of a member whose attempt starts.
    pub(super) fn array_member_started(&mut self, id: &JobId) {
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

    /// Updates the array of a member whose attempt has ended.
    pub(super) fn array_member_ended(&mut self, id: &JobId) {
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

    /// Releases members that waited for their array's limit, as far as the limit now allows. Runs at the end of a call, so
    /// that a member which returned from its device in this call goes first.
    pub(super) fn release_array_members(&mut self, now: UnixMillis) {
        for id in std::mem::take(&mut self.arrays_with_capacity) {
            while let Some(array) = self.arrays.get_mut(&id)
                && array.can_admit()
                && let Some((_, job)) = array.over_limit.pop_first()
            {
                self.reevaluate_wait(now, &job);
            }
        }
    }
}
