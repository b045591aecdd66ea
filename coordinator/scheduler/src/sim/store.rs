//! A store in memory for the simulation.

use crate::{Job, Record, RestoredJob, Settings, State, Worker};
use aitk_common::control_plane::{JobEvent, UnixMillis};
use aitk_common::id::{JobId, WorkerId};
use std::collections::BTreeMap;

/// The stored jobs, workers and events.
#[derive(Default)]
pub(super) struct MemoryStore {
    pub(super) jobs: BTreeMap<JobId, Job>,
    workers: BTreeMap<WorkerId, Worker>,
    events: BTreeMap<JobId, Vec<(JobEvent, Option<u64>)>>,
}

impl MemoryStore {
    pub(super) fn apply(&mut self, record: Record) {
        match record {
            Record::NewJob(job, _) => assert!(
                self.jobs.insert(job.id.clone(), Job::clone(&job)).is_none(),
                "a new job was stored twice"
            ),
            Record::Job(job) => assert!(
                self.jobs.insert(job.id.clone(), Job::clone(&job)).is_some(),
                "a job changed before it was stored"
            ),
            Record::JobRemoved(job) => {
                let gone = self.jobs.remove(&job).expect("a job was removed before it was stored");
                assert!(gone.state.is_ended(), "a job that had not ended was removed");
                self.events.remove(&job);
            }
            Record::Worker(worker) => {
                self.workers.insert(worker.id.clone(), *worker);
            }
            Record::WorkerRemoved(worker) => {
                self.workers
                    .remove(&worker)
                    .expect("a worker was removed before it was stored");
            }
            Record::Event { job, event, seq } => {
                let log = self.events.entry(job).or_default();
                assert_eq!(event.cursor, log.len() as u64 + 1, "a gap in the log");
                log.push((JobEvent::clone(&event), seq));
            }
            Record::Artifact(..) | Record::ArtifactRemoved(..) => {}
        }
    }

    /// Restores the state through JSON, as from a database.
    pub(super) fn load(&self, settings: &Settings, now: UnixMillis) -> State {
        let jobs = self.jobs.values().map(|job| {
            let job: Job = serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap();
            let log = self.events.get(&job.id).map(Vec::as_slice).unwrap_or_default();
            let current = job.live_attempt().map(|attempt| attempt.id.clone());
            let seqs = log
                .iter()
                .filter(|(event, _)| event.attempt == current)
                .filter_map(|(_, seq)| *seq);
            RestoredJob {
                cursor: log.last().map_or(0, |(event, _)| event.cursor),
                seq: seqs.max().unwrap_or(0),
                job,
            }
        });
        let workers = self
            .workers
            .values()
            .map(|w| serde_json::from_str(&serde_json::to_string(w).unwrap()).unwrap());
        State::restore(settings.clone(), now, jobs.collect(), workers.collect())
    }
}

/// The part of the state that a restart must preserve.
pub(super) fn durable(state: &State) -> (BTreeMap<JobId, Job>, BTreeMap<WorkerId, Worker>) {
    let mut jobs: BTreeMap<JobId, Job> = state.jobs.iter().map(|(id, job)| (id.clone(), job.clone())).collect();
    for job in jobs.values_mut() {
        (job.live, job.progress, job.phase) = (None, None, None);
        (job.retry_at, job.newest_time) = (None, UnixMillis(0));
        job.queue_state = crate::model::QueueState::NotQueued;
    }
    let mut workers: BTreeMap<WorkerId, Worker> = state.workers.clone().into_iter().collect();
    for worker in workers.values_mut() {
        (worker.session, worker.leaving, worker.same_machine, worker.last_seen) = (None, false, false, UnixMillis(0));
        worker.outputs_on_request = false;
    }
    (jobs, workers)
}
