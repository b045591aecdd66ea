//! The queue: what a waiting job waits for, and whose position it is.

use super::model::{ClassId, Condition, Job, Level};
use super::state::State;
use super::state::classes::Needs;
use super::step::Step;
use crate::model::QueueState;
use crate::state::user::{User, UserIndex};
use aitk_common::control::{JobState, UnixMillis};
use aitk_common::id::{JobId, UserName};
use std::time::Duration;

/// What a waiting job waits for before any device is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StartCondition {
    Paused,
    After(JobId),
    Until(UnixMillis),
    Open,
}

/// Whose position it is: by level, then who has the least, then who had the least, then who came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePosition {
    pub(super) level: Level,
    pub(super) running: u32,
    pub(super) spent: u64,
    pub(super) order: u64,
}

impl State {
    /// What holds a waiting job back.
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
        if job.not_before > now {
            return StartCondition::Until(job.not_before);
        }
        StartCondition::Open
    }

    /// Puts a queued job where it belongs.
    pub(super) fn enqueue(&mut self, now: UnixMillis, id: &JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let (level, owner, order) = (job.level(), job.wants.owner.clone(), job.order);
        let start_condition = self.start_condition(now, job);
        let held = if start_condition == StartCondition::Open {
            self.admit_member(id)
        } else {
            None
        };
        let Some(job) = self.jobs.get(id) else { return };
        let needs = (start_condition == StartCondition::Open && held.is_none()).then(|| Needs::of(job));
        for before in &job.after {
            self.dependents.entry(before.clone()).or_default().insert(id.clone());
        }
        if let Some(index) = self.jobs.index_of(id) {
            self.queue.insert(job.queue_key(), index);
        }
        let user = self.activate(&owner);
        let queue_state = match (start_condition, needs) {
            (StartCondition::Until(time), _) => {
                self.timed.insert((time, id.clone()));
                QueueState::Timed(time)
            }
            (_, Some(needs)) => {
                let class = self.class_of(needs);
                self.classes.add(class, level, user, order);
                // Others of its class wait for room, so it does; unless it may take a device from somebody, or one that is
                // kept from the others.
                let waits = self.classes.get(class).is_some_and(|class| class.stuck);
                if !waits || !self.yielding.is_empty() || self.reserved_slots > 0 {
                    self.classes.wake(class);
                }
                QueueState::Ready(class)
            }
            _ => held.unwrap_or(QueueState::Blocked),
        };
        if let Some(job) = self.jobs.get_mut(id) {
            job.queue_state = queue_state;
        }
    }

    /// Takes a job out of the queue, whatever it waited for.
    pub(super) fn dequeue(&mut self, id: &JobId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let queue_state = std::mem::take(&mut job.queue_state);
        if queue_state == QueueState::Nowhere {
            return;
        }
        let (level, order) = (job.level(), job.order);
        self.queue.remove(&job.queue_key());
        let user = self.users.get_full_mut(&job.wants.owner).map(|(index, _, user)| {
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
            QueueState::Ready(class) => {
                if let Some(user) = user {
                    self.classes.remove(class, level, user, order);
                }
            }
            QueueState::Blocked | QueueState::Held | QueueState::Nowhere => {}
        }
        self.dismiss_member(id, queue_state);
    }

    /// Looks again at what a waiting job waits for.
    pub(super) fn requeue_in_place(&mut self, now: UnixMillis, id: &JobId) {
        if self
            .jobs
            .get(id)
            .is_some_and(|job| job.queue_state != QueueState::Nowhere)
        {
            self.dequeue(id);
            self.enqueue(now, id);
        }
    }

    /// A job or an array has ended: those which start after it may have to wait no longer, or for ever.
    fn release_dependents(&mut self, step: &mut Step, id: &JobId) {
        let waiting = self.dependents.get(id).cloned().unwrap_or_default();
        for job in waiting {
            if self.can_never_start(&job) {
                let reason = format!("not needed: {id} has completed, and this job starts only if it fails");
                self.set_state(step, &job, JobState::Stopped, reason);
                continue;
            }
            // Whoever still waits for it stays where it is.
            let is_met = |waiting: &Job| self.is_met(id, waiting.condition(id));
            if !self.jobs.get(&job).is_some_and(is_met) {
                continue;
            }
            self.dequeue(&job);
            self.note_met(step, &job, id);
            self.enqueue(step.now, &job);
        }
    }

    /// Once another job has ended or failed as a waiting one needs it, that is so for good, also when the other one is resumed.
    /// Completion needs no note: nothing takes it back.
    fn note_met(&mut self, step: &mut Step, id: &JobId, before: &JobId) {
        let condition = self.jobs.get(id).map(|job| job.condition(before)).unwrap_or_default();
        if condition == Condition::Completed || !self.is_met(before, condition) {
            return;
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.after.retain(|other| other != before);
            job.conditions.remove(before);
            step.touch(id);
        }
    }

    /// The same of everything that a job waits for, when it is to wait again: it may have stood aside when that happened.
    pub(super) fn note_all_met(&mut self, step: &mut Step, id: &JobId) {
        let after = self.jobs.get(id).map(|job| job.after.clone()).unwrap_or_default();
        for before in after {
            self.note_met(step, id, &before);
        }
    }

    /// Whether a job starts only after another one fails, which has completed.
    pub(super) fn can_never_start(&self, id: &JobId) -> bool {
        let Some(job) = self.jobs.get(id) else { return false };
        let mut conditions = job.conditions.iter();
        conditions.any(|(before, condition)| *condition == Condition::Failed && self.has_completed(before))
    }

    /// Jobs whose time has come.
    pub(super) fn release_timed(&mut self, now: UnixMillis) {
        while let Some((time, id)) = self.timed.first().cloned() {
            if time > now {
                return;
            }
            self.requeue_in_place(now, &id);
            // Whatever it waits for now, it is not this time.
            self.timed.remove(&(time, id));
        }
    }

    /// A user has one job more that waits. Who was away starts level with the one who had the least.
    fn activate(&mut self, owner: &UserName) -> UserIndex {
        let idle = |user: &User| user.waiting == 0 && user.running == 0;
        let known = self.users.get_full_mut(owner).filter(|(_, _, user)| !idle(user));
        if let Some((index, _, user)) = known {
            user.waiting += 1;
            return index;
        }
        let least = self
            .users
            .values()
            .filter(|user| !idle(user))
            .map(|user| user.spent)
            .min()
            .unwrap_or(0);
        let entry = self.users.entry(owner.clone());
        let index = entry.index();
        let user = entry.or_default();
        user.spent = user.spent.max(least);
        user.waiting += 1;
        index
    }

    /// Whether a user holds as many devices as allowed.
    pub(super) fn at_quota(&self, owner: &UserName) -> bool {
        if self.settings.quotas.is_empty() {
            return false;
        }
        let running = self.users.get(owner).map_or(0, |user| user.running);
        self.settings.quotas.of(owner).is_some_and(|quota| running >= quota)
    }

    /// A user has one device more.
    pub(super) fn user_starts(&mut self, owner: &UserName) {
        match self.users.get_mut(owner) {
            Some(user) => user.running += 1,
            None => self.users.entry(owner.clone()).or_default().running += 1,
        }
    }

    /// A user has one device less, after this long.
    pub(super) fn user_ends(&mut self, owner: &UserName, ran: Duration) {
        let was_at_quota = self.at_quota(owner);
        let Some((index, _, user)) = self.users.get_full_mut(owner) else {
            return;
        };
        user.running = user.running.saturating_sub(1);
        let ran = u64::try_from(ran.as_millis()).unwrap_or(u64::MAX);
        user.spent = user.spent.saturating_add(ran);
        if was_at_quota && !self.at_quota(owner) {
            let waiting =
                |class: &super::state::classes::Class| class.waiting.values().any(|users| users.contains_key(&index));
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

    /// Whose position it is in a class: none when nobody waits, or all who do are at their quota.
    pub(super) fn position(&self, class: ClassId) -> Option<QueuePosition> {
        let class = self.classes.get(class)?;
        let no_quotas = self.settings.quotas.is_empty();
        for (level, users) in &class.waiting {
            let first = users
                .iter()
                .filter_map(|(user, line)| {
                    let (owner, user) = self.users.get_index(*user)?;
                    let has_turn = no_quotas || !self.at_quota(owner);
                    has_turn.then_some((user.running, user.spent, line.first()))
                })
                .min();
            if let Some((running, spent, order)) = first {
                return Some(QueuePosition {
                    level: *level,
                    running,
                    spent,
                    order,
                });
            }
        }
        None
    }

    /// The one place where a job's state changes.
    pub(super) fn set_state(&mut self, step: &mut Step, id: &JobId, state: JobState, reason: String) {
        self.dequeue(id);
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.state = state;
        job.reason.clone_from(&reason);
        job.ended = state.is_ended().then_some(step.now);
        let paused = job.paused && !state.is_ended();
        let body = aitk_common::control::EventBody::State { state, reason, paused };
        step.log(job, None, body, None);
        step.touch(id);
        if state != JobState::Running {
            self.yielding.remove(id);
        }
        match state {
            JobState::Queued => self.enqueue(step.now, id),
            JobState::Stopping => self.shake(id),
            JobState::Completed | JobState::Failed | JobState::Stopped => {
                if state == JobState::Completed {
                    self.member_completed(id);
                }
                self.release_dependents(step, id);
                let array = self.jobs.get(id).and_then(|job| job.array_id()).cloned();
                // Only for the sake of those who wait for it: an array has many members.
                if let Some(array) = array.filter(|array| self.dependents.contains_key(array)) {
                    self.release_dependents(step, &array);
                }
            }
            _ => {}
        }
    }
}
