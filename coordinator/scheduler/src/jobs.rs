//! Submits, stops, resumes and pauses jobs, and finds them by id or name.

use super::changes::Changes;
use super::event::{Dependency, Effect, NewJob, Record, Refusal, Reply};
use super::model::{ArrayMembership, DependencyCondition, Job, Preemption, QueueState, Ticket, UserLimits};
use super::saved_work::saved_work_message;
use super::state::State;
use aitk_common::control_plane::{AttemptRef, EventBody, JobState, SubmissionReceipt, ToWorker, UnixMillis};
use aitk_common::id::{JobId, UserName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The most jobs of one name that a refusal lists.
const MAX_NAMED: usize = 5;

impl State {
    pub(super) fn submit(&mut self, changes: &mut Changes, ticket: Ticket, new: NewJob) {
        let reply = self.accept_job(changes, new);
        changes.push(Effect::Reply(ticket, reply.map(Reply::Submitted)));
    }

    fn accept_job(&mut self, changes: &mut Changes, new: NewJob) -> Result<SubmissionReceipt, Refusal> {
        if let Some(earlier) = self.submitted_before(new.idempotency_key.as_ref()) {
            return Ok(earlier);
        }
        if self.jobs.contains_key(&new.id) || self.arrays.contains_key(&new.id) {
            return Err(Refusal::Conflict(format!(
                "the job id {} is taken; submit again",
                new.id
            )));
        }
        if new.user_limits_apply {
            self.check_user_limits(&new.requirements.owner, 1, new.config_bytes)?;
        }
        let after = self.resolve_dependencies(&new.after, &new.requirements.owner, new.sees_all)?;
        self.check_can_be_met(&after)?;
        let (job, name) = (new.id.clone(), new.name.clone());
        self.insert_job(changes, new, after, None);
        Ok(SubmissionReceipt {
            job,
            name,
            existed: false,
        })
    }

    /// Checks whether a user may submit this many more jobs, whose configs have this many bytes.
    ///
    /// # Errors
    /// [`Refusal::LimitExceeded`] names the limit, the current use, and what to do.
    pub fn check_user_limits(&self, owner: &UserName, jobs: u64, bytes: u64) -> Result<(), Refusal> {
        let UserLimits {
            waiting_jobs,
            config_bytes,
        } = self.settings.user_limits;
        let waiting = self.users.get(owner).map_or(0, |user| user.waiting as u64);
        if let Some(max) = waiting_jobs.filter(|max| waiting.saturating_add(jobs) > *max) {
            return Err(Refusal::LimitExceeded(format!(
                "user {owner} has {waiting} waiting jobs and wants {jobs} more; at most {max} may wait \
                 (`--user-waiting-jobs` of the coordinator): submit again when some have started, or `aitk stop` some"
            )));
        }
        let stored = self.config_bytes.get(owner).copied().unwrap_or(0);
        if let Some(max) = config_bytes.filter(|max| stored.saturating_add(bytes) > *max) {
            return Err(Refusal::LimitExceeded(format!(
                "the configs of user {owner}'s jobs have {stored} bytes and would get {bytes} more; at most {max} are kept \
                 (`--user-config-mib` of the coordinator): submit smaller configs, or have old jobs forgotten \
                 (`--keep-jobs-days`)"
            )));
        }
        Ok(())
    }

    /// Adds a job whose id is not in use.
    pub(super) fn insert_job(
        &mut self,
        changes: &mut Changes,
        new: NewJob,
        after: Vec<(JobId, DependencyCondition)>,
        array: Option<Box<ArrayMembership>>,
    ) {
        // A dependency that was met stays met, see `record_met_dependency`.
        let is_met = |(before, condition): &(JobId, DependencyCondition)| {
            *condition != DependencyCondition::Completed && self.is_met(before, *condition)
        };
        let after: Vec<(JobId, DependencyCondition)> = after.into_iter().filter(|one| !is_met(one)).collect();
        let job = Job {
            id: new.id.clone(),
            name: new.name,
            kind: new.kind,
            requirements: new.requirements,
            local: new.local,
            idempotency_key: new.idempotency_key,
            seed: new.seed,
            order: self.next_order,
            created: changes.wall_time,
            started: None,
            ended: None,
            state: JobState::Queued,
            reason: String::new(),
            not_before: new.not_before.unwrap_or(UnixMillis(0)),
            failures: 0,
            network_outage: None,
            checkpoint: None,
            attempts: Vec::new(),
            stop_now: false,
            conditions: after
                .iter()
                .filter(|(_, condition)| *condition != DependencyCondition::Completed)
                .cloned()
                .collect(),
            after: after.into_iter().map(|(before, _)| before).collect(),
            paused: false,
            preemption: None,
            max_profile: None,
            used_millis: 0,
            time_limit_reached: false,
            array,
            taken_over: false,
            storage_failures: 0,
            revisions: BTreeMap::new(),
            config_bytes: new.config_bytes,
            trace: new.trace.map(Box::new),
            cursor: 0,
            live: None,
            progress: None,
            phase: None,
            loss: None,
            retry_at: None,
            newest_time: changes.wall_time,
            queue_state: QueueState::NotQueued,
        };
        self.next_order += 1;
        self.jobs.insert(Arc::new(job));
        let before = changes.effects.len();
        self.index_job(&new.id);
        self.enqueue(changes.now, &new.id);
        self.log(
            changes,
            &new.id,
            None,
            EventBody::State {
                state: JobState::Queued,
                reason: "submitted".into(),
                paused: false,
            },
            None,
        );
        // Created last, because a job that is shared with a record is copied when it changes; but stored before its event.
        if let Some(job) = self.jobs.share(&new.id) {
            let record = Effect::Persist(Record::NewJob(job, new.payload));
            changes.effects.insert(before, record);
        }
    }

    /// Applies a change to a job, or to all members of an array that allow it. Refused if no member allows it.
    pub(super) fn change(
        &mut self,
        changes: &mut Changes,
        ticket: Ticket,
        text: &str,
        change_one: impl Fn(&mut Self, &mut Changes, &JobId) -> Result<(), Refusal>,
    ) {
        let found = self.find(text).and_then(|id| {
            let mut refusal = None;
            let mut changed = false;
            for member in self.members(&id) {
                match change_one(self, changes, &member) {
                    Ok(()) => changed = true,
                    Err(why) => refusal = refusal.or(Some(why)),
                }
            }
            match refusal {
                Some(why) if !changed => Err(why),
                _ => Ok(id),
            }
        });
        self.reply_job(changes, ticket, found);
    }

    pub(super) fn stop(&mut self, changes: &mut Changes, ticket: Ticket, text: &str, now: bool) {
        self.change(changes, ticket, text, |state, changes, id| {
            state.stop_one(changes, id, now)
        });
    }

    fn stop_one(&mut self, changes: &mut Changes, id: &JobId, now: bool) -> Result<(), Refusal> {
        let Some(job) = self.jobs.get_mut(id) else {
            return Err(Refusal::NotFound(id.to_string()));
        };
        match job.state {
            JobState::Stopped => {}
            JobState::Completed | JobState::Failed => return Err(has_ended(job)),
            JobState::Queued => {
                let reason = match job.attempts.is_empty() {
                    true => "stopped before it ran".into(),
                    false => format!("stopped while it waited: {}", saved_work_message(job, None, None)),
                };
                self.set_state(changes, id, JobState::Stopped, reason);
            }
            JobState::Running | JobState::Stopping => {
                let is_first = job.state == JobState::Running;
                job.stop_now |= now;
                changes.touch(id);
                if is_first {
                    let reason = if now { "ends now" } else { "saves, then stops" };
                    self.set_state(changes, id, JobState::Stopping, reason.into());
                }
                self.send_stop(changes, id);
            }
        }
        Ok(())
    }

    pub(super) fn resume(&mut self, changes: &mut Changes, ticket: Ticket, text: &str) {
        self.change(changes, ticket, text, Self::resume_one);
    }

    fn resume_one(&mut self, changes: &mut Changes, id: &JobId) -> Result<(), Refusal> {
        let can_never_start = self.can_never_start(id);
        if !can_never_start {
            self.record_met_dependencies(changes, id);
        }
        // Without the wait it would resume from an older checkpoint than the one that its worker sends.
        let offered_until = self.offers.get(id).map(|offer| offer.until.max(changes.now));
        let start = offered_until.unwrap_or(changes.now);
        let not_before = changes.wall_time.after(start.since(changes.now));
        let Some(job) = self.jobs.get_mut(id) else {
            return Err(Refusal::NotFound(id.to_string()));
        };
        match job.state {
            JobState::Stopped if can_never_start => {
                return Err(Refusal::Conflict(format!(
                    "job {id} starts only if another job fails, and that job has completed; submit it again without cluster.after_failed"
                )));
            }
            JobState::Stopped | JobState::Failed => {
                job.failures = 0;
                job.network_outage = None;
                job.storage_failures = 0;
                job.stop_now = false;
                job.paused = false;
                job.time_limit_reached = false;
                job.used_millis = 0;
                // The machine that ran out of memory may be gone, or have more free memory now.
                job.max_profile = None;
                (job.not_before, job.retry_at) = (not_before, Some(start));
                self.set_state(changes, id, JobState::Queued, "resumed".into());
            }
            JobState::Queued if job.paused => {
                job.paused = false;
                job.max_profile = None;
                if offered_until.is_some() {
                    (job.not_before, job.retry_at) = (not_before, Some(start));
                }
                self.set_state(changes, id, JobState::Queued, "resumed".into());
            }
            JobState::Running if job.paused => {
                job.paused = false;
                self.set_state(changes, id, JobState::Running, "saves, then continues".into());
            }
            JobState::Stopping => {
                return Err(Refusal::Conflict(format!(
                    "job {id} is still stopping; resume it when it has stopped"
                )));
            }
            JobState::Queued | JobState::Running | JobState::Completed => {
                return Err(Refusal::Conflict(format!(
                    "job {id} is {}: there is nothing to resume",
                    job.state
                )));
            }
        }
        Ok(())
    }

    /// Pauses a job until it is resumed. A running job first saves and leaves its device.
    pub(super) fn pause(&mut self, changes: &mut Changes, ticket: Ticket, text: &str) {
        self.change(changes, ticket, text, Self::pause_one);
    }

    fn pause_one(&mut self, changes: &mut Changes, id: &JobId) -> Result<(), Refusal> {
        let Some(job) = self.jobs.get_mut(id) else {
            return Err(Refusal::NotFound(id.to_string()));
        };
        match job.state {
            JobState::Queued if job.paused => {}
            JobState::Queued => {
                job.paused = true;
                self.set_state(changes, id, JobState::Queued, "paused".into());
            }
            JobState::Running => {
                let was_paused = std::mem::replace(&mut job.paused, true);
                changes.touch(id);
                let reason = "saves, then waits until it is resumed".into();
                if job.preemption.is_none() {
                    self.preempt(changes, id, Preemption::Pause, reason);
                } else if !was_paused {
                    // It leaves its device already, for another reason.
                    self.set_state(changes, id, JobState::Running, reason);
                }
            }
            JobState::Stopping | JobState::Stopped | JobState::Completed | JobState::Failed => {
                return Err(Refusal::Conflict(format!(
                    "job {id} is {}: there is nothing to pause",
                    job.state
                )));
            }
        }
        Ok(())
    }

    pub(super) fn set_priority(&mut self, changes: &mut Changes, ticket: Ticket, text: &str, priority: i64) {
        self.change(changes, ticket, text, |state, changes, id| {
            state.set_priority_of(changes, id, priority)
        });
    }

    fn set_priority_of(&mut self, changes: &mut Changes, id: &JobId, priority: i64) -> Result<(), Refusal> {
        let Some(job) = self.jobs.get(id) else {
            return Err(Refusal::NotFound(id.to_string()));
        };
        if job.state.is_ended() {
            return Err(has_ended(job));
        }
        let waits = job.state == JobState::Queued;
        // Several indexes contain it under its old priority.
        self.dequeue(id);
        if let Some(job) = self.jobs.get_mut(id) {
            job.requirements.priority = priority;
        }
        if waits {
            self.enqueue(changes.now, id);
        } else {
            // Waiting jobs may now be above it and preempt it.
            let slot = self.jobs.get(id).and_then(|job| job.live_attempt());
            let slot = slot.and_then(|attempt| self.slots.find(&attempt.worker, attempt.device));
            let classes = slot
                .and_then(|slot| self.slots.get(slot))
                .map(|slot| slot.classes.clone());
            for class in classes.unwrap_or_default() {
                self.classes.wake(class);
            }
        }
        changes.touch(id);
        Ok(())
    }

    fn reply_job(&self, changes: &mut Changes, ticket: Ticket, found: Result<JobId, Refusal>) {
        let reply = found.and_then(|id| {
            self.job_view(changes.now, &id)
                .map(|view| Reply::Job(Box::new(view)))
                .ok_or_else(|| Refusal::NotFound(id.to_string()))
        });
        changes.push(Effect::Reply(ticket, reply));
    }

    /// Asks the worker of a job's live attempt to stop it. A worker that is not connected is asked when it registers again.
    pub(super) fn send_stop(&self, changes: &mut Changes, id: &JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(attempt) = job.live_attempt() else { return };
        if let Some(session) = self.workers.get(&attempt.worker).and_then(|worker| worker.session) {
            let held = AttemptRef {
                attempt: attempt.id.clone(),
                epoch: attempt.epoch,
            };
            changes.push(Effect::Send(
                session,
                ToWorker::Stop {
                    held,
                    save: !job.stop_now,
                },
            ));
        }
    }

    /// Checks the dependencies of a job without submitting it.
    ///
    /// # Errors
    /// Why a submission with these dependencies would be refused.
    pub fn check_dependencies(&self, all: &[Dependency], owner: &UserName, sees_all: bool) -> Result<(), Refusal> {
        let found = self.resolve_dependencies(all, owner, sees_all)?;
        self.check_can_be_met(&found)
    }

    /// The jobs and arrays that dependencies name: by id, by name (the newest of this user), or by a unique prefix of an id.
    pub(super) fn resolve_dependencies(
        &self,
        dependencies: &[Dependency],
        owner: &UserName,
        sees_all: bool,
    ) -> Result<Vec<(JobId, DependencyCondition)>, Refusal> {
        let mut found: Vec<(JobId, DependencyCondition)> = Vec::with_capacity(dependencies.len());
        for Dependency { job: text, condition } in dependencies {
            let is_visible = |job: &Job| sees_all || job.requirements.owner == *owner;
            let named = || self.newest_named(text, owner).map(Ok);
            let id = self.find_by_exact_id(text, is_visible).map(Ok).or_else(named);
            let shown: String = text.chars().take(80).collect();
            let id = match id.unwrap_or_else(|| self.find_by_prefix(text, is_visible)) {
                Err(Refusal::NotFound(_)) => {
                    return Err(Refusal::Conflict(format!(
                        "{}: there is no job {shown:?} to wait for; give the id or the name of a job that was submitted",
                        condition.key()
                    )));
                }
                other => other?,
            };
            match found.iter().find(|(known, _)| *known == id) {
                None => found.push((id, *condition)),
                Some((_, other)) if other == condition => {}
                Some(_) => {
                    return Err(Refusal::Conflict(format!(
                        "job {shown:?} is in two of cluster.after, after_any and after_failed; keep it in one of them"
                    )));
                }
            }
        }
        Ok(found)
    }

    /// Refuses the dependencies of a job that could never start.
    pub(super) fn check_can_be_met(&self, after: &[(JobId, DependencyCondition)]) -> Result<(), Refusal> {
        let impossible = |(before, condition): &&(JobId, DependencyCondition)| {
            *condition == DependencyCondition::Failed && self.has_completed(before)
        };
        match after.iter().find(impossible) {
            Some((before, _)) => Err(Refusal::Conflict(format!(
                "cluster.after_failed: {before} has completed, so it will not fail, and this job would never start"
            ))),
            None => Ok(()),
        }
    }

    /// The newest job or array of this user with this name.
    fn newest_named(&self, name: &str, owner: &UserName) -> Option<JobId> {
        let own = self.jobs.values().filter(|job| job.requirements.owner == *owner);
        let named = own.filter_map(|job| match &job.array {
            Some(array) if array.name == name => Some((job.order, &array.id)),
            _ => (job.name == name).then_some((job.order, &job.id)),
        });
        named.max().map(|(_, id)| id.clone())
    }

    /// The job or array with this id or name, or the only one whose id has this prefix.
    ///
    /// # Errors
    /// [`Refusal::NotFound`], [`Refusal::Ambiguous`], [`Refusal::DuplicateName`]
    pub fn find(&self, text: &str) -> Result<JobId, Refusal> {
        self.find_among(text, |_| true)
    }

    /// [`Self::find`] among the jobs for which `is_visible` is true.
    ///
    /// # Errors
    /// [`Refusal::NotFound`], [`Refusal::Ambiguous`], [`Refusal::DuplicateName`]
    pub fn find_among(&self, text: &str, is_visible: impl Fn(&Job) -> bool) -> Result<JobId, Refusal> {
        if let Some(id) = self.find_by_exact_id(text, &is_visible) {
            return Ok(id);
        }
        match self.find_by_name(text, &is_visible)? {
            Some(id) => Ok(id),
            None => self.find_by_prefix(text, is_visible),
        }
    }

    /// The job or array with exactly this id.
    fn find_by_exact_id(&self, text: &str, is_visible: impl Fn(&Job) -> bool) -> Option<JobId> {
        let id = JobId::parse(text).ok()?;
        let there = self.jobs.get(&id).is_some_and(&is_visible)
            || (self.arrays.contains_key(&id)
                && self.members(&id).iter().filter_map(|id| self.job(id)).any(&is_visible));
        there.then_some(id)
    }

    /// The job or array with this name: the one that has not ended, else the newest that has. A member of an array is found
    /// only when nothing else has the name. Several that have not ended are an error, because any of them could be meant.
    fn find_by_name(&self, name: &str, is_visible: impl Fn(&Job) -> bool) -> Result<Option<JobId>, Refusal> {
        /// Jobs or arrays of a name.
        #[derive(Default)]
        struct NameMatches<'a> {
            active: BTreeSet<&'a JobId>,
            newest_ended: Option<(u64, &'a JobId)>,
        }
        impl<'a> NameMatches<'a> {
            fn add(&mut self, job: &Job, id: &'a JobId) {
                if job.state.is_ended() {
                    self.newest_ended = self.newest_ended.max(Some((job.order, id)));
                } else {
                    self.active.insert(id);
                }
            }
        }
        let (mut whole, mut members) = (NameMatches::default(), NameMatches::default());
        for job in self.jobs.values() {
            match &job.array {
                None if job.name == name && is_visible(job) => whole.add(job, &job.id),
                Some(array) if array.name == name && is_visible(job) => whole.add(job, &array.id),
                Some(_) if job.name == name && is_visible(job) => members.add(job, &job.id),
                _ => {}
            }
        }
        for named in [whole, members] {
            let mut active = named.active.iter();
            match (active.next(), active.next(), named.newest_ended) {
                (Some(only), None, _) => return Ok(Some((*only).clone())),
                (Some(_), Some(_), _) => {
                    return Err(Refusal::DuplicateName {
                        name: name.chars().take(80).collect(),
                        count: named.active.len(),
                        ids: named.active.iter().take(MAX_NAMED).map(|id| (*id).clone()).collect(),
                    });
                }
                (None, _, Some((_, newest))) => return Ok(Some(newest.clone())),
                (None, _, None) => {}
            }
        }
        Ok(None)
    }

    /// The only job or array whose id has this prefix.
    fn find_by_prefix(&self, text: &str, is_visible: impl Fn(&Job) -> bool) -> Result<JobId, Refusal> {
        if JobId::parse(text).is_err() {
            return Err(Refusal::NotFound(text.chars().take(80).collect()));
        }
        // Searches all jobs; only a person who types a part of an id gets here.
        let has_prefix = |id: &JobId, job: &Job| id.as_str().starts_with(text) && is_visible(job);
        let mut fitting: Vec<_> = self.jobs.iter().filter(|(id, job)| has_prefix(id, job)).collect();
        fitting.sort_unstable_by_key(|(id, _)| *id);
        let mut matches: Vec<JobId> = Vec::new();
        for (id, job) in fitting {
            // A prefix of an array's id names the array, not its members.
            let array = job.array_id().filter(|array| array.as_str().starts_with(text));
            let named = array.unwrap_or(id);
            if matches.last() != Some(named) {
                matches.push(named.clone());
            }
            if matches.len() > 5 {
                break;
            }
        }
        match matches.as_slice() {
            [] => Err(Refusal::NotFound(text.to_owned())),
            [only] => Ok(only.clone()),
            several => Err(Refusal::Ambiguous {
                text: text.to_owned(),
                matches: several.iter().map(ToString::to_string).collect(),
            }),
        }
    }
}

fn has_ended(job: &Job) -> Refusal {
    Refusal::Conflict(format!("job {} has ended already: it is {}", job.id, job.state))
}
