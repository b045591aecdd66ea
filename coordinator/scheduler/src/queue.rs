//! The queue: what waiting jobs wait for, and in which order they start.

use super::changes::Changes;
use super::model::{ClassId, DependencyCondition, Job, PriorityLevel};
use super::state::State;
use super::state::classes::DeviceNeeds;
use crate::model::QueueState;
use crate::state::user::{User, UserIndex};
use aitk_common::control_plane::{JobState, UnixMillis};
use aitk_common::id::{JobId, UserName};
use std::collections::BTreeSet;
use std::time::Duration;

/// What a waiting job waits for before devices are considered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StartCondition {
    /// The user paused it.
    Paused,
    /// It starts after this job or array.
    After(JobId),
    /// It does not start before this time of the wall clock.
    NotBefore(UnixMillis),
    /// It is tried again at this time of the clock of leases.
    RetryAt(UnixMillis),
    /// It waits for none of these.
    Met,
}

/// The order in which waiting jobs start: by level, then fair share (the user whose jobs hold the fewest devices, then the one that
/// used the least device time), then order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePosition {
    pub(super) level: PriorityLevel,
    pub(super) running: u32,
    pub(super) device_millis: u64,
    pub(super) order: u64,
}

impl State {
    /// What a waiting job waits for before devices are considered.
    pub(super) fn start_condition(&self, now: UnixMillis, job: &Job) -> StartCondition {
        if job.paused {
            return StartCondition::Paused;
        }
        if let Some(before) = job
            .after
            .iter()
            .find(|before| !self.is_met(before, job.condition(before)))
        {
            return StartCondition::After(before.clone());
        }
        match job.retry_at {
            Some(time) if time > now => StartCondition::RetryAt(time),
            None if job.not_before > self.wall_time(now) => StartCondition::NotBefore(job.not_before),
            Some(_) | None => StartCondition::Met,
        }
    }

    /// Puts a waiting job into the index of the queue where it belongs.
    pub(super) fn enqueue(&mut self, now: UnixMillis, id: &JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let (level, owner, order) = (job.level(), job.requirements.owner.clone(), job.order);
        let start_condition = self.start_condition(now, job);
        let array_limited = if start_condition == StartCondition::Met {
            self.admit_to_array(id)
        } else {
            None
        };
        let Some(job) = self.jobs.get(id) else { return };
        let needs = (start_condition == StartCondition::Met && array_limited.is_none()).then(|| DeviceNeeds::of(job));
        for before in &job.after {
            self.dependents.entry(before.clone()).or_default().insert(id.clone());
        }
        if let Some(index) = self.jobs.index_of(id) {
            self.queue.insert(job.queue_key(), index);
        }
        let user = self.count_waiting(&owner);
        let queue_state = match (start_condition, needs) {
            (StartCondition::NotBefore(time), _) => {
                self.timed.insert((time, id.clone()));
                QueueState::Timed(time)
            }
            (StartCondition::RetryAt(time), _) => {
                self.retries.insert((time, id.clone()));
                QueueState::Retry(time)
            }
            (_, Some(needs)) => {
                let class = self.find_or_create_class(needs);
                self.classes.add(class, level, user, order);
                // If the class is blocked, so is this job, unless it may preempt a job or take a device that is reserved
                // against the others.
                let blocked = self.classes.get(class).is_some_and(|class| class.blocked);
                if !blocked || !self.preemptible.is_empty() || self.takeover_slots > 0 {
                    self.classes.wake(class);
                }
                QueueState::Ready(class)
            }
            _ => array_limited.unwrap_or(QueueState::Held),
        };
        if let Some(job) = self.jobs.get_mut(id) {
            job.queue_state = queue_state;
        }
    }

    /// Removes a job from the queue, whatever it waited for.
    pub(super) fn dequeue(&mut self, id: &JobId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let queue_state = std::mem::take(&mut job.queue_state);
        if queue_state == QueueState::NotQueued {
            return;
        }
        let (level, order) = (job.level(), job.order);
        self.queue.remove(&job.queue_key());
        let user = self
            .users
            .get_full_mut(&job.requirements.owner)
            .map(|(index, _, user)| {
                user.waiting = user.waiting.saturating_sub(1);
                index
            });
        for before in &job.after {
            if let Some(waiting) = self.dependents.get_mut(before) {
                waiting.remove(id);
                if waiting.is_empty() {
                    self.dependents.remove(before);
                }
            }
        }
        match queue_state {
            QueueState::Timed(time) => {
                self.timed.remove(&(time, id.clone()));
            }
            QueueState::Retry(time) => {
                self.retries.remove(&(time, id.clone()));
            }
            QueueState::Ready(class) => {
                if let Some(user) = user {
                    self.classes.remove(class, level, user, order);
                }
            }
            QueueState::Held | QueueState::ArrayLimited | QueueState::NotQueued => {}
        }
        self.leave_array_queue(id, queue_state);
    }

    /// Determines again what a waiting job waits for.
    pub(super) fn reevaluate_wait(&mut self, now: UnixMillis, id: &JobId) {
        if self
            .jobs
            .get(id)
            .is_some_and(|job| job.queue_state != QueueState::NotQueued)
        {
            self.dequeue(id);
            self.enqueue(now, id);
        }
    }

    /// Releases the jobs that start after a job or an array that has ended; stops those that can no longer start.
    fn release_dependents(&mut self, changes: &mut Changes, id: &JobId) {
        let waiting = self.dependents.get(id).cloned().unwrap_or_default();
        for job in waiting {
            if self.can_never_start(&job) {
                let reason = format!("not needed: {id} has completed, and this job starts only if it fails");
                self.set_state(changes, &job, JobState::Stopped, reason);
                continue;
            }
            // A job whose condition is not met keeps waiting.
            let is_met = |waiting: &Job| self.is_met(id, waiting.condition(id));
            if !self.jobs.get(&job).is_some_and(is_met) {
                continue;
            }
            self.dequeue(&job);
            self.record_met_dependency(changes, &job, id);
            self.enqueue(changes.now, &job);
        }
    }

    /// Removes a dependency that is met from a waiting job. A dependency that was met stays met, even if the other job is
    /// resumed. Completion needs no such record, because a completed job is never resumed.
    fn record_met_dependency(&mut self, changes: &mut Changes, id: &JobId, before: &JobId) {
        let condition = self.jobs.get(id).map(|job| job.condition(before)).unwrap_or_default();
        if condition == DependencyCondition::Completed || !self.is_met(before, condition) {
            return;
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.after.retain(|other| other != before);
            job.conditions.remove(before);
            changes.touch(id);
        }
    }

    /// Removes all dependencies of a job that are met. Called when the job returns to the queue, because dependencies may
    /// have been met while it was not in it.
    pub(super) fn record_met_dependencies(&mut self, changes: &mut Changes, id: &JobId) {
        let after = self.jobs.get(id).map(|job| job.after.clone()).unwrap_or_default();
        for before in after {
            self.record_met_dependency(changes, id, &before);
        }
    }

    /// Whether a job starts only if another job fails, and that job has completed.
    pub(super) fn can_never_start(&self, id: &JobId) -> bool {
        let Some(job) = self.jobs.get(id) else { return false };
        let mut conditions = job.conditions.iter();
        conditions.any(|(before, condition)| *condition == DependencyCondition::Failed && self.has_completed(before))
    }

    /// Releases the jobs whose start time, or the time of their next try, has come.
    pub(super) fn release_timed(&mut self, now: UnixMillis) {
        while let Some((time, id)) = first_due(&self.timed, self.wall_time(now)) {
            self.reevaluate_wait(now, &id);
            // Whatever it waits for now, it does not wait for this time.
            self.timed.remove(&(time, id));
        }
        while let Some((time, id)) = first_due(&self.retries, now) {
            self.reevaluate_wait(now, &id);
            self.retries.remove(&(time, id));
        }
    }

    /// Counts one more waiting job of a user. A user that was inactive starts at the least device time of all active users.
    fn count_waiting(&mut self, owner: &UserName) -> UserIndex {
        let idle = |user: &User| user.waiting == 0 && user.running == 0;
        let known = self.users.get_full_mut(owner).filter(|(_, _, user)| !idle(user));
        if let Some((index, _, user)) = known {
            user.waiting += 1;
            return index;
        }
        let min = self
            .users
            .values()
            .filter(|user| !idle(user))
            .map(|user| user.device_millis)
            .min()
            .unwrap_or(0);
        let entry = self.users.entry(owner.clone());
        let index = entry.index();
        let user = entry.or_default();
        user.device_millis = user.device_millis.max(min);
        user.waiting += 1;
        index
    }

    /// Whether a user holds as many devices as its quota allows.
    pub(super) fn at_quota(&self, owner: &UserName) -> bool {
        if self.settings.quotas.is_empty() {
            return false;
        }
        let running = self.users.get(owner).map_or(0, |user| user.running);
        self.settings.quotas.of(owner).is_some_and(|quota| running >= quota)
    }

    /// How many more devices a user's quota lets its jobs hold.
    pub(super) fn devices_left(&self, user: UserIndex) -> usize {
        let Some((owner, user)) = self.users.get_index(user) else {
            return 0;
        };
        let quota = self.settings.quotas.of(owner);
        quota.map_or(usize::MAX, |quota| quota.saturating_sub(user.running) as usize)
    }

    /// Counts one more running job of a user.
    pub(super) fn count_started(&mut self, owner: &UserName) {
        match self.users.get_mut(owner) {
            Some(user) => user.running += 1,
            None => self.users.entry(owner.clone()).or_default().running += 1,
        }
    }

    /// Counts one running job less of a user, which ran for `ran`. Wakes the user's classes if it was at its quota.
    pub(super) fn count_ended(&mut self, owner: &UserName, ran: Duration) {
        let was_at_quota = self.at_quota(owner);
        let Some((index, _, user)) = self.users.get_full_mut(owner) else {
            return;
        };
        user.running = user.running.saturating_sub(1);
        let ran = u64::try_from(ran.as_millis()).unwrap_or(u64::MAX);
        user.device_millis = user.device_millis.saturating_add(ran);
        if was_at_quota && !self.at_quota(owner) {
            let waiting = |class: &super::state::classes::JobClass| {
                class.waiting.values().any(|users| users.contains_key(&index))
            };
            let classes: Vec<ClassId> = self
                .classes
                .iter()
                .filter(|(_, class)| waiting(class))
                .map(|(id, _)| id)
                .collect();
            for class in classes {
                self.classes.wake(class);
            }
        }
    }

    /// The position of the job of a class that is next. None: no job waits, or all users with waiting jobs are at their quota.
    pub(super) fn position(&self, class: ClassId) -> Option<QueuePosition> {
        let class = self.classes.get(class)?;
        let no_quotas = self.settings.quotas.is_empty();
        for (level, users) in &class.waiting {
            let first = users
                .iter()
                .filter_map(|(user, queue)| {
                    let (owner, user) = self.users.get_index(*user)?;
                    let may_start = no_quotas || !self.at_quota(owner);
                    may_start.then_some((user.running, user.device_millis, queue.first()))
                })
                .min();
            if let Some((running, device_millis, order)) = first {
                return Some(QueuePosition {
                    level: *level,
                    running,
                    device_millis,
                    order,
                });
            }
        }
        None
    }

    /// Changes the state of a job. No other function does that.
    pub(super) fn set_state(&mut self, changes: &mut Changes, id: &JobId, state: JobState, reason: String) {
        self.dequeue(id);
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.state = state;
        job.reason.clone_from(&reason);
        job.ended = state.is_ended().then(|| job.record_time(changes.wall_time));
        let paused = job.paused && !state.is_ended();
        let body = aitk_common::control_plane::EventBody::State { state, reason, paused };
        changes.log(job, None, body, None);
        changes.touch(id);
        if state != JobState::Running {
            self.preemptible.remove(id);
        }
        match state {
            JobState::Queued => self.enqueue(changes.now, id),
            JobState::Stopping => self.mark_array_for_recheck(id),
            JobState::Completed | JobState::Failed | JobState::Stopped => {
                if state == JobState::Completed {
                    self.array_member_completed(id);
                }
                self.release_dependents(changes, id);
                let array = self.jobs.get(id).and_then(|job| job.array_id()).cloned();
                // Only if jobs wait for the array: it may have many members.
                if let Some(array) = array.filter(|array| self.dependents.contains_key(array)) {
                    self.release_dependents(changes, &array);
                }
            }
            _ => {}
        }
    }
}

/// The first of these jobs whose time has come.
fn first_due(times: &BTreeSet<(UnixMillis, JobId)>, now: UnixMillis) -> Option<(UnixMillis, JobId)> {
    times.first().filter(|(time, _)| *time <= now).cloned()
}
