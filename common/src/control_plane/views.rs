//! Jobs, attempts, workers and coordinators as clients see them, and submissions.

use super::array::ArrayView;
use super::events::Progress;
use super::state::{AttemptState, JobState};
use super::time::UnixMillis;
use crate::capability::{Device, DeviceRef};
use crate::confinement::Confinement;
use crate::hash::ContentHash;
use crate::id::{AttemptId, Epoch, JobId, UserName, WorkerId};
use crate::plan::image_batches::ImageBatch;
use crate::plan::parameter_counts::ParameterCounts;
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// An attempt as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttemptView {
    /// Its id.
    pub id: AttemptId,
    /// Its epoch.
    pub epoch: Epoch,
    /// The worker.
    pub worker: WorkerId,
    /// The worker's name.
    pub worker_name: String,
    /// The device.
    pub device: DeviceRef,
    /// The memory profile.
    pub profile: MemoryProfile,
    /// Bytes of device memory reserved for it; none: the whole device.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Its state.
    pub state: AttemptState,
    /// When it was assigned.
    pub created: UnixMillis,
    /// When it ended.
    pub ended: Option<UnixMillis>,
    /// How it ended.
    pub message: String,
}

/// A job as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Its id.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// `extension`, `generate`, ….
    pub kind: String,
    /// Its state.
    pub state: JobState,
    /// The reason for the state, as text.
    pub reason: String,
    /// The job's owner.
    pub owner: UserName,
    /// Jobs with a higher priority run first.
    pub priority: i64,
    /// Whether the user paused it, so that it waits until it is resumed.
    pub paused: bool,
    /// Whether it may be preempted by jobs without this setting.
    pub yields: bool,
    /// Whether it runs in place (`aitk run`).
    pub local: bool,
    /// When it was submitted.
    pub created: UnixMillis,
    /// When its first attempt began.
    pub started: Option<UnixMillis>,
    /// When it ended.
    pub ended: Option<UnixMillis>,
    /// Its progress.
    pub progress: Option<Progress>,
    /// Its current phase.
    pub phase: Option<String>,
    /// The last reported loss. None: no report since the coordinator started.
    #[serde(default)]
    pub loss: Option<f64>,
    /// The step of its last committed checkpoint.
    pub checkpoint_step: Option<u64>,
    /// Its attempts, the newest last. Only the newest if there are many.
    pub attempts: Vec<AttemptView>,
    /// Failed attempts since the last committed checkpoint.
    pub failures: u32,
    /// Allowed failed attempts in a row.
    pub retries: u32,
    /// The array that it belongs to, or that it represents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<ArrayView>,
    /// The config as the user wrote it; only if a single job was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_text: Option<String>,
    /// `yaml`, `json` or `jsonc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_format: Option<String>,
}

impl JobView {
    /// The total run time of the attempts of an ended job, without the waits between them. None if it did not start.
    ///
    /// If only the newest attempts are known, all of the time before them counts.
    #[must_use]
    pub fn run_time(&self) -> Option<Duration> {
        let (started, ended) = (self.started?, self.ended?);
        let whole = ended.since(started);
        let each = |attempt: &AttemptView| Some(attempt.ended?.since(attempt.created));
        let attempts: Option<Duration> = self.attempts.iter().map(each).sum();
        let unknown = self.attempts.first().filter(|first| first.epoch > Epoch(1));
        let before = unknown.map_or(Duration::ZERO, |first| first.created.since(started));
        match (self.array.is_some() || self.attempts.len() < 2, attempts) {
            (false, Some(attempts)) => Some(attempts.saturating_add(before).min(whole)),
            _ => Some(whole),
        }
    }

    /// The display name of its state.
    #[must_use]
    pub fn status(&self) -> &'static str {
        self.state.status(self.paused)
    }
}

/// A device of a worker, with its jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerDeviceView {
    /// The device.
    pub device: Device,
    /// The jobs that run on it. Several if all of them are small.
    pub jobs: Vec<JobId>,
    /// Known bytes reserved for them.
    pub reserved: u64,
    /// Number of consecutive faults.
    pub faults: u32,
    /// Whether it gets no work because of its faults.
    pub quarantined: bool,
    /// Why it is quarantined; empty if it is not.
    #[serde(default)]
    pub quarantine_reason: String,
}

/// A worker as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerView {
    /// Its id.
    pub id: WorkerId,
    /// Its name.
    pub name: String,
    /// Its program's version.
    pub version: String,
    /// Its machine.
    pub host: String,
    /// Whether its session is open.
    pub connected: bool,
    /// Whether it takes no more work because it is shutting down.
    pub leaving: bool,
    /// Whether it takes no more work because an administrator drained it.
    pub drained: bool,
    /// When its last message arrived.
    pub last_seen: UnixMillis,
    /// Its devices.
    pub devices: Vec<WorkerDeviceView>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// How its attempts are confined; none: not reported.
    #[serde(default)]
    pub confinement: Option<Confinement>,
}

/// Information about a coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    /// Its program's version.
    pub version: String,
    /// Its protocol version.
    pub protocol: u32,
    /// When it started.
    pub started: UnixMillis,
    /// `file`, `s3`, `gs`, `az` or `memory`.
    pub storage: String,
    /// Open worker sessions.
    pub workers_connected: u64,
    /// Jobs that have not ended.
    pub jobs_active: u64,
}

/// A job submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// The config as the user wrote it.
    pub config_text: String,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: String,
    /// `JobSpec` as JSON.
    pub job_json: String,
    /// Path in the config -> snapshot.
    pub inputs: BTreeMap<String, ContentHash>,
    /// Whether it runs in place on this machine, without uploads.
    pub local: bool,
    /// Submissions with the same key give the same job.
    pub idempotency_key: Option<String>,
    /// The owner that the client names; none: the default user.
    pub owner: Option<UserName>,
    /// The parameter counts of its model, if the client has seen the model's files.
    pub parameter_counts: Option<ParameterCounts>,
    /// The largest batches of its data sets, if the client has seen them.
    pub image_batches: Vec<ImageBatch>,
    /// The number of images that it generates, if the client could count them. `cluster.split` divides them into parts.
    pub images: Option<u64>,
    /// Bytes of the longest prompt in its files of texts to continue, if the client has seen them.
    pub longest_prompt: Option<u64>,
}

/// The reply to a submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmissionReceipt {
    /// The job.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// Whether the idempotency key was known, so that this is the earlier job.
    pub existed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::DeviceKind;

    #[test]
    fn the_run_time_is_that_of_the_known_attempts() {
        // Started at second 10 and ended at 1000; of each attempt its epoch, its first and its last second.
        let run_time = |attempts: &[(u64, u64, u64)]| {
            let attempt = |(epoch, created, ended): &(u64, u64, u64)| AttemptView {
                id: AttemptId::numbered("j1", *epoch),
                epoch: Epoch(*epoch),
                worker: WorkerId::new("w1"),
                worker_name: "box".to_owned(),
                device: DeviceRef {
                    kind: DeviceKind::Cpu,
                    index: 0,
                },
                profile: MemoryProfile::CpuOnly,
                memory: None,
                state: AttemptState::Failed,
                created: UnixMillis(created * 1000),
                ended: Some(UnixMillis(ended * 1000)),
                message: String::new(),
            };
            let job = JobView {
                id: JobId::new("j1"),
                name: "a".to_owned(),
                kind: "extension".to_owned(),
                state: JobState::Completed,
                reason: String::new(),
                owner: UserName::default(),
                priority: 0,
                paused: false,
                yields: false,
                local: false,
                created: UnixMillis(0),
                started: Some(UnixMillis(10_000)),
                ended: Some(UnixMillis(1_000_000)),
                progress: None,
                phase: None,
                loss: None,
                checkpoint_step: None,
                attempts: attempts.iter().map(attempt).collect(),
                failures: 0,
                retries: 3,
                array: None,
                config_text: None,
                config_format: None,
            };
            job.run_time().unwrap().as_secs()
        };
        assert_eq!(run_time(&[(1, 10, 1000)]), 990);
        assert_eq!(run_time(&[]), 990);
        // The wait between them does not count.
        assert_eq!(run_time(&[(1, 10, 20), (2, 900, 1000)]), 110);
        // The time before the known attempts counts.
        assert_eq!(run_time(&[(7, 500, 510), (8, 900, 1000)]), 490 + 110);
    }
}
