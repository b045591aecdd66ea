//! What coordinator, workers and clients tell each other about jobs: plain data, no wire types.

mod array;
mod forecast;
mod session;

pub use array::{ArrayCounts, ArrayView, MEMBERS_MOST, NewMember};
pub use forecast::{DeviceForecast, Forecast};
pub use session::{Assignment, HeldAttempt, OfferedCheckpoint, Registration, ToCoordinator, ToWorker, Verdict};

use crate::capability::{Device, DeviceRef};
use crate::confinement::Confinement;
use crate::hash::ContentHash;
use crate::id::{AttemptId, Epoch, JobId, UserName, WorkerId};
use crate::plan::anatomy::Anatomy;
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The version of the wire protocol. Both sides must have the same one.
pub const PROTOCOL_VERSION: u32 = 1;
/// The largest config that is submitted, in bytes, each for its text and its parsed form.
pub const MAX_CONFIG_BYTES: usize = 4 << 20;

/// A point in time: milliseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// This long after it; stays at the end of time instead of wrapping.
    #[must_use]
    pub fn after(self, time: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        )
    }

    /// Time from `earlier` to here; zero when it lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for a device, or for the time of its next try.
    Queued,
    /// Has a live attempt.
    Running,
    /// Was asked to stop; its attempt saves.
    Stopping,
    /// Stopped on request; can be resumed.
    Stopped,
    /// All work is done.
    Completed,
    /// Gave up; the reason says why. Can be resumed.
    Failed,
}

impl JobState {
    /// The name used on screens and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// The name used on screens for a job that its user paused, or not: `paused` while it waits for `resume`, `pausing`
    /// while it saves.
    #[must_use]
    pub fn status(self, paused: bool) -> &'static str {
        match self {
            Self::Queued if paused => "paused",
            Self::Running if paused => "pausing",
            state => state.name(),
        }
    }

    /// Whether nothing more happens by itself.
    #[must_use]
    pub fn is_ended(self) -> bool {
        matches!(self, Self::Stopped | Self::Completed | Self::Failed)
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where one try stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptState {
    /// Given to a worker which has not said yet that it holds it.
    Assigned,
    /// The worker holds it.
    Running,
    /// Did all the work.
    Completed,
    /// Stopped as it was asked to; its message says what was saved.
    Stopped,
    /// Ended with an error.
    Failed,
    /// Its worker was not heard of for too long, or no longer knows it.
    Lost,
}

impl AttemptState {
    /// The name used on screens and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Assigned => "assigned",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }

    /// Whether it may still report.
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, Self::Assigned | Self::Running)
    }
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps (or images) done.
    pub done: u64,
    /// Steps (or images) in all.
    pub total: u64,
    /// Wall time in seconds per step over the last steps, everything included; none where that is not known or not true any more.
    pub seconds_per_step: Option<f64>,
}

/// What an attempt says while it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Report {
    /// A phase began.
    Phase {
        /// Its name, for people.
        name: String,
    },
    /// How far the work is.
    Progress(Progress),
    /// Numbers of a step.
    Metrics {
        /// The step they belong to.
        step: u64,
        /// Name -> value.
        #[serde(with = "any_number")]
        values: BTreeMap<String, f64>,
    },
    /// A line for the log.
    Log {
        /// `info`, `warn` or `error`.
        level: String,
        /// The text.
        message: String,
    },
    /// The commit of a model of the hub that the attempt works with, where the job names none: later attempts get the same.
    Pinned {
        /// The repository, `ORG/NAME`.
        repository: String,
        /// The commit.
        commit: String,
        /// The same for the job's log.
        message: String,
    },
}

/// A file that a job made for its user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Its name below the output root, with `/` between folders.
    pub name: String,
    /// `lora`, `sample`, `image`, `config`, `grid`, ….
    pub kind: String,
    /// The blob; none for a job that runs in place.
    pub hash: Option<ContentHash>,
    /// Its size.
    pub bytes: u64,
    /// The step it belongs to.
    pub step: Option<u64>,
    /// Which of that step's files of this kind.
    pub index: Option<u64>,
    /// Where it lies, for a job that runs in place.
    pub local_path: Option<String>,
}

impl Artifact {
    /// What makes it the same artifact when a step runs twice: kind, step and index if it has an index, else its name.
    #[must_use]
    pub fn identity(&self) -> String {
        match (self.step, self.index) {
            (Some(step), Some(index)) => format!("{}#{step}#{index}", self.kind),
            (None, Some(index)) => format!("{}##{index}", self.kind),
            (_, None) => self.name.clone(),
        }
    }
}

/// One entry of a job's event log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobEvent {
    /// Grows within the job; give the last one seen to go on after it.
    pub cursor: u64,
    /// When it happened.
    pub time: UnixMillis,
    /// The attempt it belongs to, if any.
    pub attempt: Option<AttemptId>,
    /// What happened.
    #[serde(flatten)]
    pub body: EventBody,
}

/// What happened to a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EventBody {
    /// The job changed its state.
    State {
        /// The new one.
        state: JobState,
        /// Why, in words.
        reason: String,
        /// It waits until it is resumed, or saves in order to.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        paused: bool,
    },
    /// A try began or ended.
    Attempt {
        /// Its state now.
        state: AttemptState,
        /// The machine.
        worker_name: String,
        /// The device.
        device: DeviceRef,
        /// How it ended, in words.
        message: String,
    },
    /// A phase began.
    Phase {
        /// Its name.
        name: String,
    },
    /// How far the work is.
    Progress(Progress),
    /// Numbers of a step.
    Metrics {
        /// The step.
        step: u64,
        /// Name -> value.
        #[serde(with = "any_number")]
        values: BTreeMap<String, f64>,
    },
    /// A line of the log.
    Log {
        /// `info`, `warn` or `error`.
        level: String,
        /// The text.
        message: String,
    },
    /// A file is ready.
    Artifact(Artifact),
    /// A file was removed by retention.
    ArtifactRemoved {
        /// Its name.
        name: String,
    },
    /// A checkpoint was committed: the job resumes from here.
    Checkpoint {
        /// Optimizer steps done.
        step: u64,
        /// Its manifest.
        manifest: ContentHash,
    },
}

impl From<Report> for EventBody {
    fn from(report: Report) -> Self {
        match report {
            Report::Phase { name } => Self::Phase { name },
            Report::Progress(progress) => Self::Progress(progress),
            Report::Metrics { step, values } => Self::Metrics { step, values },
            Report::Log { level, message } => Self::Log { level, message },
            Report::Pinned { message, .. } => Self::Log {
                level: "info".to_owned(),
                message,
            },
        }
    }
}

/// A try, for screens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttemptView {
    /// Its id.
    pub id: AttemptId,
    /// Its epoch.
    pub epoch: Epoch,
    /// The worker.
    pub worker: WorkerId,
    /// What people call the worker.
    pub worker_name: String,
    /// The device.
    pub device: DeviceRef,
    /// The memory profile.
    pub profile: MemoryProfile,
    /// Bytes of device memory that are set aside for it; none: the whole device.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Where it stands.
    pub state: AttemptState,
    /// When it was assigned.
    pub created: UnixMillis,
    /// When it ended.
    pub ended: Option<UnixMillis>,
    /// How it ended, in words.
    pub message: String,
}

/// A job, for screens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Its id.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// `extension`, `generate`, ….
    pub kind: String,
    /// Where it stands.
    pub state: JobState,
    /// Why, in words.
    pub reason: String,
    /// Whose it is.
    pub owner: UserName,
    /// Higher goes first.
    pub priority: i64,
    /// Whether its user paused it: it waits until it is resumed.
    pub paused: bool,
    /// Whether it gives way to jobs that do not.
    pub yields: bool,
    /// Whether it runs in place (`aitk run`).
    pub local: bool,
    /// When it was submitted.
    pub created: UnixMillis,
    /// When its first attempt began.
    pub started: Option<UnixMillis>,
    /// When it ended.
    pub ended: Option<UnixMillis>,
    /// How far it is.
    pub progress: Option<Progress>,
    /// What it does now.
    pub phase: Option<String>,
    /// The last loss that it reported; none: it reported none, or not since the coordinator started.
    #[serde(default)]
    pub loss: Option<f64>,
    /// The step of its last committed checkpoint.
    pub checkpoint_step: Option<u64>,
    /// Its tries, the newest last; of many only the newest.
    pub attempts: Vec<AttemptView>,
    /// Failed tries since the last committed checkpoint.
    pub failures: u32,
    /// Failed tries it is allowed in a row.
    pub retries: u32,
    /// The array that it belongs to, or that this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<ArrayView>,
    /// The config as its user wrote it; only when one job is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_text: Option<String>,
    /// `yaml`, `json` or `jsonc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_format: Option<String>,
}

impl JobView {
    /// How long its attempts have taken, once it has ended: what it waited between them does not count. None where it did not start.
    ///
    /// Of a job with many attempts only the newest are known: all of the time before these counts.
    #[must_use]
    pub fn took(&self) -> Option<Duration> {
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

    /// Where it stands, in the word that screens use.
    #[must_use]
    pub fn status(&self) -> &'static str {
        self.state.status(self.paused)
    }
}

/// A device of a worker and what it does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerDeviceView {
    /// The device.
    pub device: Device,
    /// The jobs it runs; several when all of them are small.
    pub jobs: Vec<JobId>,
    /// Bytes that are set aside for them, as far as it is known.
    pub reserved: u64,
    /// Faults in a row.
    pub faults: u32,
    /// Whether it gets no work because of its faults.
    pub quarantined: bool,
    /// Why it is quarantined, in words; empty unless it is.
    #[serde(default)]
    pub quarantine_reason: String,
}

/// A worker, for screens.
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
    /// Whether it takes no more work, because it goes.
    pub leaving: bool,
    /// Whether it takes no more work, because a person said so.
    pub drained: bool,
    /// When it was heard of.
    pub last_seen: UnixMillis,
    /// Its devices.
    pub devices: Vec<WorkerDeviceView>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// How its attempts are confined; none: it did not say.
    #[serde(default)]
    pub confinement: Option<Confinement>,
}

/// What a coordinator says about itself.
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

/// A job as it is submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// The config as its user wrote it.
    pub config_text: String,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: String,
    /// `JobSpec` as JSON.
    pub job_json: String,
    /// Path as the config writes it -> snapshot.
    pub inputs: BTreeMap<String, ContentHash>,
    /// Runs in place on this very machine; nothing is uploaded.
    pub local: bool,
    /// The same key gives the same job.
    pub idempotency_key: Option<String>,
    /// Whose it is, as the client says; none: the default user.
    pub owner: Option<UserName>,
    /// What its model consists of, where the client has seen the model's files.
    pub anatomy: Option<Anatomy>,
    /// How many images it draws, where the client could count them; what `cluster.split` cuts into parts.
    pub images: Option<u64>,
}

/// The answer to a submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submitted {
    /// The job.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// The idempotency key was known: this is the earlier job.
    pub existed: bool,
}

/// Numbers in JSON that may be NaN or infinite (a diverged loss is worth seeing): those are written as text.
pub(crate) mod any_number {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::collections::BTreeMap;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Plain(f64),
        Text(String),
    }

    pub(crate) fn serialize<S: Serializer>(values: &BTreeMap<String, f64>, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(values.iter().map(|(name, value)| {
            let json = match value {
                v if v.is_finite() => serde_json::Value::from(*v),
                v => serde_json::Value::from(v.to_string()),
            };
            (name, json)
        }))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
        BTreeMap::<String, Number>::deserialize(from)?
            .into_iter()
            .map(|(name, number)| match number {
                Number::Plain(value) => Ok((name, value)),
                Number::Text(text) => match text.parse() {
                    Ok(value) => Ok((name, value)),
                    Err(_) => Err(D::Error::custom(format!("{name}: not a number: {text:?}"))),
                },
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::DeviceKind;

    #[test]
    fn a_diverged_loss_survives_json() {
        let values = BTreeMap::from([("loss".to_owned(), f64::NAN), ("lr".to_owned(), 1e-4)]);
        let event = JobEvent {
            cursor: 7,
            time: UnixMillis(1),
            attempt: Some(AttemptId::new("a")),
            body: EventBody::Metrics { step: 3, values },
        };
        let text = serde_json::to_string(&event).unwrap();
        assert!(
            text.contains(r#""event":"metrics""#) && text.contains(r#""loss":"NaN""#),
            "{text}"
        );
        let back: JobEvent = serde_json::from_str(&text).unwrap();
        let EventBody::Metrics { values, step: 3 } = back.body else {
            panic!("{back:?}")
        };
        assert!(values["loss"].is_nan() && values["lr"] == 1e-4);
    }

    #[test]
    fn a_job_took_what_its_attempts_took_as_far_as_they_are_known() {
        // Started at second 10 and ended at 1000; of each attempt its epoch, its first and its last second.
        let took = |attempts: &[(u64, u64, u64)]| {
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
            job.took().unwrap().as_secs()
        };
        assert_eq!(took(&[(1, 10, 1000)]), 990);
        assert_eq!(took(&[]), 990);
        // Without the wait between them.
        assert_eq!(took(&[(1, 10, 20), (2, 900, 1000)]), 110);
        // With what came before them.
        assert_eq!(took(&[(7, 500, 510), (8, 900, 1000)]), 490 + 110);
    }

    #[test]
    fn a_step_that_runs_twice_replaces_its_sample_but_not_its_lora() {
        let sample = |name: &str| Artifact {
            name: name.into(),
            kind: "sample".into(),
            hash: None,
            bytes: 1,
            step: Some(10),
            index: Some(0),
            local_path: None,
        };
        assert_eq!(sample("1_10_0.jpg").identity(), sample("2_10_0.jpg").identity());
        let lora = |name: &str| Artifact {
            kind: "lora".into(),
            index: None,
            ..sample(name)
        };
        assert_ne!(lora("a.safetensors").identity(), lora("a_10.safetensors").identity());
    }
}
