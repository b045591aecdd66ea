//! Conversions of types that several services share: devices, progress, artifacts, outcomes, states.

use super::{ConvertError, Result, Within, artifact_name, optional_hash, required, short_text};
use crate::v1;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control_plane::{Artifact, AttemptState, JobState, Progress, Report};
use aitk_common::job::repository::{is_commit, is_repository};
use aitk_common::plan::profile::MemoryProfile;

/// Implements both directions of an enum conversion. 0 and unknown numbers are errors.
macro_rules! wire_enum {
    ($wire:ty, $domain:ty, $what:literal, { $($name:ident),+ $(,)? }) => {
        impl From<$domain> for $wire {
            fn from(value: $domain) -> Self {
                match value { $(<$domain>::$name => Self::$name),+ }
            }
        }
        impl TryFrom<$wire> for $domain {
            type Error = ConvertError;
            fn try_from(value: $wire) -> Result<Self> {
                match value {
                    $(<$wire>::$name => Ok(Self::$name),)+
                    <$wire>::Unspecified => Err(ConvertError::new($what, "not set")),
                }
            }
        }
    };
}

wire_enum!(v1::DeviceKind, DeviceKind, "kind", { Cuda, Metal, Cpu });
wire_enum!(v1::MemoryProfile, MemoryProfile, "profile", { FullGpu, Balanced, GpuPoor, Extreme, CpuOnly });
wire_enum!(v1::FailureCause, FailureCause, "cause", {
    BadInput, OutOfMemory, DiskFull, Storage, Machine, Internal, Network, NoProgress, DeviceStuck, Interrupted, Job, StorageRefused,
    Unknown,
});
wire_enum!(v1::JobState, JobState, "state", { Queued, Running, Stopping, Stopped, Completed, Failed });
wire_enum!(v1::AttemptState, AttemptState, "state", { Assigned, Running, Completed, Stopped, Failed, Lost });

/// Converts an enum field, which prost stores as a number.
pub(super) fn enum_field<W, D>(number: i32, field: &str) -> Result<D>
where
    W: TryFrom<i32>,
    D: TryFrom<W, Error = ConvertError>,
{
    let wire = W::try_from(number).map_err(|_| ConvertError::new(field, format!("unknown value {number}")))?;
    D::try_from(wire).map_err(|_| ConvertError::new(field, "not set"))
}

/// Converts a failure cause. A cause of a newer peer becomes `Unknown`, so that the failure itself is not lost.
fn failure_cause(number: i32) -> Result<FailureCause> {
    match v1::FailureCause::try_from(number) {
        Ok(_) => enum_field::<v1::FailureCause, _>(number, "failed.cause"),
        Err(_) => Ok(FailureCause::Unknown),
    }
}

impl From<DeviceRef> for v1::DeviceRef {
    fn from(device: DeviceRef) -> Self {
        Self {
            kind: v1::DeviceKind::from(device.kind).into(),
            index: device.index,
        }
    }
}

impl TryFrom<v1::DeviceRef> for DeviceRef {
    type Error = ConvertError;
    fn try_from(wire: v1::DeviceRef) -> Result<Self> {
        Ok(Self {
            kind: enum_field::<v1::DeviceKind, _>(wire.kind, "kind")?,
            index: wire.index,
        })
    }
}

/// The largest rate of matrix products that a device may report, in billions of floating-point operations per second: no device of
/// these years is faster.
const MAX_GFLOPS: u64 = 20_000_000;

impl From<Device> for v1::Device {
    fn from(device: Device) -> Self {
        Self {
            device: Some(device.id.into()),
            name: device.name,
            architecture: device.architecture,
            memory_total: device.memory_total,
            memory_budget: device.memory_budget,
            dtypes: device.dtypes,
            attention: device.attention,
            profile: v1::MemoryProfile::from(device.profile).into(),
            gflops: device.gflops,
        }
    }
}

impl TryFrom<v1::Device> for Device {
    type Error = ConvertError;
    fn try_from(wire: v1::Device) -> Result<Self> {
        let texts = |list: Vec<String>, field: &str| {
            if list.len() > 64 {
                return Err(ConvertError::new(field, format!("{} entries; at most 64", list.len())));
            }
            list.into_iter()
                .map(|text| short_text(text, field))
                .collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            id: DeviceRef::try_from(required(wire.device, "device")?).within("device")?,
            name: short_text(wire.name, "name")?,
            architecture: short_text(wire.architecture, "architecture")?,
            memory_total: wire.memory_total,
            memory_budget: wire.memory_budget,
            dtypes: texts(wire.dtypes, "dtypes")?,
            attention: texts(wire.attention, "attention")?,
            profile: enum_field::<v1::MemoryProfile, _>(wire.profile, "profile")?,
            gflops: wire.gflops.min(MAX_GFLOPS),
        })
    }
}

impl From<Progress> for v1::Progress {
    fn from(progress: Progress) -> Self {
        Self {
            done: progress.done,
            total: progress.total,
            seconds_per_step: progress.seconds_per_step,
        }
    }
}

impl From<v1::Progress> for Progress {
    fn from(wire: v1::Progress) -> Self {
        // Non-finite and negative speeds are ignored.
        let seconds_per_step = wire.seconds_per_step.filter(|s| s.is_finite() && *s >= 0.0);
        Self {
            done: wire.done,
            total: wire.total,
            seconds_per_step,
        }
    }
}

impl From<Report> for v1::attempt_event::Report {
    fn from(report: Report) -> Self {
        match report {
            Report::Phase { name } => Self::Phase(v1::Phase { name }),
            Report::Progress(progress) => Self::Progress(progress.into()),
            Report::Metrics { step, values } => Self::Metrics(v1::Metrics {
                step,
                values: values.into_iter().collect(),
            }),
            Report::Log { level, message } => Self::Log(v1::LogLine {
                level,
                message,
                ..Default::default()
            }),
            Report::Pinned {
                repository,
                commit,
                message,
            } => Self::Log(v1::LogLine {
                level: "info".to_owned(),
                message,
                repository,
                commit,
            }),
        }
    }
}

impl TryFrom<v1::attempt_event::Report> for Report {
    type Error = ConvertError;
    fn try_from(wire: v1::attempt_event::Report) -> Result<Self> {
        use v1::attempt_event::Report as Wire;
        Ok(match wire {
            Wire::Phase(phase) => Self::Phase {
                name: short_text(phase.name, "phase.name")?,
            },
            Wire::Progress(progress) => Self::Progress(progress.into()),
            Wire::Metrics(metrics) => {
                if metrics.values.len() > 1000 {
                    return Err(ConvertError::new("metrics.values", "more than 1000 entries"));
                }
                let named = |(name, value)| Ok((short_text(name, "metrics.values")?, value));
                Self::Metrics {
                    step: metrics.step,
                    values: metrics.values.into_iter().map(named).collect::<Result<_>>()?,
                }
            }
            Wire::Log(line) if !line.repository.is_empty() => {
                if !is_repository(&line.repository) || !is_commit(&line.commit) {
                    return Err(ConvertError::new("log.repository", "not a repository at a commit"));
                }
                Self::Pinned {
                    repository: line.repository,
                    commit: line.commit,
                    message: line.message,
                }
            }
            Wire::Log(line) => Self::Log {
                level: short_text(line.level, "log.level")?,
                message: line.message,
            },
        })
    }
}

impl From<Artifact> for v1::Artifact {
    fn from(artifact: Artifact) -> Self {
        Self {
            name: artifact.name,
            kind: artifact.kind,
            sha256: artifact.hash.map(|hash| hash.to_hex()).unwrap_or_default(),
            bytes: artifact.bytes,
            step: artifact.step,
            index: artifact.index,
            local_path: artifact.local_path.unwrap_or_default(),
        }
    }
}

impl TryFrom<v1::Artifact> for Artifact {
    type Error = ConvertError;
    fn try_from(wire: v1::Artifact) -> Result<Self> {
        let hash = optional_hash(&wire.sha256, "sha256")?;
        let local_path = Some(wire.local_path).filter(|path| !path.is_empty());
        if local_path.as_ref().is_some_and(|path| path.len() > 4096) {
            return Err(ConvertError::new("local_path", "more than 4096 bytes"));
        }
        if hash.is_none() && local_path.is_none() {
            return Err(ConvertError::new(
                "sha256",
                "missing, and there is no local_path either",
            ));
        }
        Ok(Self {
            name: artifact_name(wire.name, "name")?,
            kind: short_text(wire.kind, "kind")?,
            hash,
            bytes: wire.bytes,
            step: wire.step,
            index: wire.index,
            local_path,
        })
    }
}

impl From<Outcome> for v1::Outcome {
    fn from(outcome: Outcome) -> Self {
        use v1::outcome::{Completed, Failed, Outcome as Wire, Stopped};
        let wire = match outcome {
            Outcome::Completed => Wire::Completed(Completed {}),
            Outcome::Stopped { saved_step, at_step } => Wire::Stopped(Stopped { saved_step, at_step }),
            Outcome::Failed { cause, message } => Wire::Failed(Failed {
                cause: v1::FailureCause::from(cause).into(),
                message,
            }),
        };
        Self { outcome: Some(wire) }
    }
}

impl TryFrom<v1::Outcome> for Outcome {
    type Error = ConvertError;
    fn try_from(wire: v1::Outcome) -> Result<Self> {
        use v1::outcome::Outcome as Wire;
        Ok(match required(wire.outcome, "outcome")? {
            Wire::Completed(_) => Self::Completed,
            Wire::Stopped(stopped) => Self::Stopped {
                saved_step: stopped.saved_step,
                at_step: stopped.at_step,
            },
            Wire::Failed(failed) => Self::Failed {
                cause: failure_cause(failed.cause)?,
                message: failed.message,
            },
        })
    }
}
