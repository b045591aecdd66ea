//! Reports of attempts, artifacts, and the events of a job.

use super::non_finite;
use super::state::{AttemptState, JobState};
use super::time::UnixMillis;
use crate::capability::DeviceRef;
use crate::hash::ContentHash;
use crate::id::AttemptId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps (or images) done.
    pub done: u64,
    /// Total number of steps (or images).
    pub total: u64,
    /// Wall time per step in seconds, averaged over the last steps, with sampling and saving. None: unknown or out of date.
    pub seconds_per_step: Option<f64>,
}

/// A report of a running attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Report {
    /// A phase began.
    Phase {
        /// The phase's display name.
        name: String,
    },
    /// The progress of the work.
    Progress(Progress),
    /// Metrics of a step.
    Metrics {
        /// The step they belong to.
        step: u64,
        /// Name -> value.
        #[serde(with = "non_finite")]
        values: BTreeMap<String, f64>,
    },
    /// A line for the log.
    Log {
        /// `info`, `warn` or `error`.
        level: String,
        /// The text.
        message: String,
    },
    /// The commit of a hub model that the attempt uses, if the job names none. Later attempts use the same commit.
    Pinned {
        /// The repository, `ORG/NAME`.
        repository: String,
        /// The commit.
        commit: String,
        /// The line for the job's log.
        message: String,
    },
}

/// An output file of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Its path relative to the output root, with `/` between folders.
    pub name: String,
    /// `lora`, `sample`, `image`, `config`, `grid`, ….
    pub kind: String,
    /// The blob; none for a job that runs in place.
    pub hash: Option<ContentHash>,
    /// Its size in bytes.
    pub bytes: u64,
    /// The step it belongs to.
    pub step: Option<u64>,
    /// Index among that step's files of this kind.
    pub index: Option<u64>,
    /// Its local path, for a job that runs in place.
    pub local_path: Option<String>,
}

impl Artifact {
    /// The key that identifies the artifact when a step runs twice: kind, step and index if it has an index, else its name.
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
    /// Increases within the job. Pass the last one to continue after it.
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
        /// The reason as text.
        reason: String,
        /// Whether the user paused it: it waits until it is resumed, or is saving first.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        paused: bool,
    },
    /// An attempt began or ended.
    Attempt {
        /// Its state now.
        state: AttemptState,
        /// The machine.
        worker_name: String,
        /// The device.
        device: DeviceRef,
        /// How it ended.
        message: String,
    },
    /// A phase began.
    Phase {
        /// Its name.
        name: String,
    },
    /// The progress of the work.
    Progress(Progress),
    /// Metrics of a step.
    Metrics {
        /// The step.
        step: u64,
        /// Name -> value.
        #[serde(with = "non_finite")]
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
    /// Retention removed a file.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_non_finite_loss_round_trips_through_json() {
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
