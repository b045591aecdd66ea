//! Conversions of jobs, their events, and workers as clients see them.

use super::image_batches;
use super::vocabulary::enum_field;
use super::worker_id;
use super::workers::{confinement, inputs, labels, wire_confinement, wire_inputs};
use super::{ConvertError, Result, Within, artifact_name, attempt_id, hash, job_id, required, short_text, user_name};
use crate::v1;
use aitk_common::capability::{Device, DeviceRef};
use aitk_common::control_plane::{
    ArrayCounts, ArrayView, DeviceForecast, Forecast, NewMember, UnixMillis, WorkerDeviceView, WorkerView,
};
use aitk_common::control_plane::{
    Artifact, AttemptView, EventBody, JobEvent, JobView, ServerInfo, Submission, SubmissionReceipt,
};
use aitk_common::id::{Epoch, UserName};
use aitk_common::plan::parameter_counts::{CompactWeights, ParameterCounts};

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl From<ServerInfo> for v1::InfoReply {
    fn from(info: ServerInfo) -> Self {
        Self {
            version: info.version,
            protocol: info.protocol,
            started_ms: info.started.0,
            storage: info.storage,
            workers_connected: info.workers_connected,
            jobs_active: info.jobs_active,
        }
    }
}

impl From<v1::InfoReply> for ServerInfo {
    fn from(wire: v1::InfoReply) -> Self {
        Self {
            version: wire.version,
            protocol: wire.protocol,
            started: UnixMillis(wire.started_ms),
            storage: wire.storage,
            workers_connected: wire.workers_connected,
            jobs_active: wire.jobs_active,
        }
    }
}

impl From<Submission> for v1::SubmitRequest {
    fn from(submission: Submission) -> Self {
        Self {
            config_text: submission.config_text,
            config_format: submission.config_format,
            job_json: submission.job_json,
            inputs: wire_inputs(submission.inputs),
            local: submission.local,
            idempotency_key: submission.idempotency_key.unwrap_or_default(),
            owner: submission.owner.map(|owner| owner.to_string()).unwrap_or_default(),
            anatomy: submission.parameter_counts.map(|counts| v1::Anatomy {
                denoiser: counts.denoiser,
                text: counts.text,
                vae: counts.vae,
                denoiser_stored: wire_stored(counts.denoiser_stored),
                text_stored: wire_stored(counts.text_stored),
                vae_stored: wire_stored(counts.vae_stored),
                shapes: counts.shapes.map(v1::ModelShapes::from),
                decoder: counts.decoder.as_ref().and_then(super::shapes::wire_language_shapes),
            }),
            images: submission.images,
            image_batches: image_batches::wire(&submission.image_batches),
            longest_prompt: submission.longest_prompt,
        }
    }
}

impl TryFrom<v1::SubmitRequest> for Submission {
    type Error = ConvertError;
    fn try_from(wire: v1::SubmitRequest) -> Result<Self> {
        if !["yaml", "json", "jsonc"].contains(&wire.config_format.as_str()) {
            return Err(ConvertError::new("config_format", "expected `yaml`, `json` or `jsonc`"));
        }
        Ok(Self {
            config_text: wire.config_text,
            config_format: wire.config_format,
            job_json: wire.job_json,
            inputs: inputs(wire.inputs, "inputs")?,
            local: wire.local,
            idempotency_key: non_empty(short_text(wire.idempotency_key, "idempotency_key")?),
            owner: match wire.owner.as_str() {
                "" => None,
                name => Some(user_name(name, "owner")?),
            },
            parameter_counts: wire.anatomy.map(|wire| ParameterCounts {
                denoiser: wire.denoiser,
                text: wire.text,
                vae: wire.vae,
                denoiser_stored: stored(wire.denoiser_stored),
                text_stored: stored(wire.text_stored),
                vae_stored: stored(wire.vae_stored),
                shapes: super::shapes::shapes(wire.shapes),
                decoder: super::shapes::decoder(wire.decoder),
            }),
            images: wire.images,
            image_batches: image_batches::batches(&wire.image_batches),
            longest_prompt: wire.longest_prompt,
        })
    }
}

fn wire_stored(stored: CompactWeights) -> Option<v1::StoredWeights> {
    (stored != CompactWeights::default()).then_some(v1::StoredWeights {
        quantised: stored.quantised,
        bytes: stored.bytes,
        halves: stored.halves,
    })
}

fn stored(wire: Option<v1::StoredWeights>) -> CompactWeights {
    wire.map_or(CompactWeights::default(), |wire| CompactWeights {
        quantised: wire.quantised,
        bytes: wire.bytes,
        halves: wire.halves,
    })
}

impl From<ArrayView> for v1::Array {
    fn from(array: ArrayView) -> Self {
        let counts = array.counts;
        Self {
            id: array.id.to_string(),
            index: array.index,
            size: array.size,
            at_most: array.at_most,
            split: array.split,
            waiting: counts.waiting,
            running: counts.running,
            completed: counts.completed,
            failed: counts.failed,
            stopped: counts.stopped,
            paused: counts.paused,
        }
    }
}

impl TryFrom<v1::Array> for ArrayView {
    type Error = ConvertError;
    fn try_from(wire: v1::Array) -> Result<Self> {
        Ok(Self {
            id: job_id(&wire.id, "id")?,
            index: wire.index,
            size: wire.size,
            at_most: wire.at_most,
            split: wire.split,
            counts: ArrayCounts {
                waiting: wire.waiting,
                running: wire.running,
                completed: wire.completed,
                failed: wire.failed,
                stopped: wire.stopped,
                paused: wire.paused,
            },
        })
    }
}

impl From<NewMember> for v1::ArrayMember {
    fn from(member: NewMember) -> Self {
        Self {
            job_json: member.job_json,
            twin: member.seed_group,
        }
    }
}

impl From<v1::ArrayMember> for NewMember {
    fn from(wire: v1::ArrayMember) -> Self {
        Self {
            job_json: wire.job_json,
            seed_group: wire.twin,
        }
    }
}

impl From<SubmissionReceipt> for v1::SubmitReply {
    fn from(submitted: SubmissionReceipt) -> Self {
        Self {
            job_id: submitted.job.to_string(),
            name: submitted.name,
            existed: submitted.existed,
        }
    }
}

impl TryFrom<v1::SubmitReply> for SubmissionReceipt {
    type Error = ConvertError;
    fn try_from(wire: v1::SubmitReply) -> Result<Self> {
        Ok(Self {
            job: job_id(&wire.job_id, "job_id")?,
            name: wire.name,
            existed: wire.existed,
        })
    }
}

impl From<AttemptView> for v1::Attempt {
    fn from(attempt: AttemptView) -> Self {
        Self {
            id: attempt.id.to_string(),
            epoch: attempt.epoch.0,
            worker_id: attempt.worker.to_string(),
            worker_name: attempt.worker_name,
            device: Some(attempt.device.into()),
            profile: v1::MemoryProfile::from(attempt.profile).into(),
            memory: attempt.memory,
            state: v1::AttemptState::from(attempt.state).into(),
            created_ms: attempt.created.0,
            ended_ms: attempt.ended.map(|time| time.0),
            message: attempt.message,
        }
    }
}

impl TryFrom<v1::Attempt> for AttemptView {
    type Error = ConvertError;
    fn try_from(wire: v1::Attempt) -> Result<Self> {
        Ok(Self {
            id: attempt_id(&wire.id, "id")?,
            epoch: Epoch(wire.epoch),
            worker: worker_id(&wire.worker_id, "worker_id")?,
            worker_name: wire.worker_name,
            device: DeviceRef::try_from(required(wire.device, "device")?).within("device")?,
            profile: enum_field::<v1::MemoryProfile, _>(wire.profile, "profile")?,
            memory: wire.memory,
            state: enum_field::<v1::AttemptState, _>(wire.state, "state")?,
            created: UnixMillis(wire.created_ms),
            ended: wire.ended_ms.map(UnixMillis),
            message: wire.message,
        })
    }
}

impl From<JobView> for v1::Job {
    fn from(job: JobView) -> Self {
        Self {
            id: job.id.to_string(),
            name: job.name,
            kind: job.kind,
            state: v1::JobState::from(job.state).into(),
            reason: job.reason,
            owner: job.owner.to_string(),
            priority: job.priority,
            paused: job.paused,
            yields: job.yields,
            local: job.local,
            created_ms: job.created.0,
            started_ms: job.started.map(|time| time.0),
            ended_ms: job.ended.map(|time| time.0),
            progress: job.progress.map(Into::into),
            phase: job.phase.unwrap_or_default(),
            checkpoint_step: job.checkpoint_step,
            attempts: job.attempts.into_iter().map(Into::into).collect(),
            failures: job.failures,
            retries: job.retries,
            config_text: job.config_text.unwrap_or_default(),
            config_format: job.config_format.unwrap_or_default(),
            array: job.array.map(Into::into),
            loss: job.loss,
        }
    }
}

impl TryFrom<v1::Job> for JobView {
    type Error = ConvertError;
    fn try_from(wire: v1::Job) -> Result<Self> {
        Ok(Self {
            id: job_id(&wire.id, "id")?,
            name: wire.name,
            kind: wire.kind,
            state: enum_field::<v1::JobState, _>(wire.state, "state")?,
            reason: wire.reason,
            owner: match wire.owner.as_str() {
                "" => UserName::default(),
                name => user_name(name, "owner")?,
            },
            priority: wire.priority,
            paused: wire.paused,
            yields: wire.yields,
            local: wire.local,
            created: UnixMillis(wire.created_ms),
            started: wire.started_ms.map(UnixMillis),
            ended: wire.ended_ms.map(UnixMillis),
            progress: wire.progress.map(Into::into),
            phase: non_empty(wire.phase),
            checkpoint_step: wire.checkpoint_step,
            attempts: wire
                .attempts
                .into_iter()
                .enumerate()
                .map(|(index, attempt)| AttemptView::try_from(attempt).within(&format!("attempts[{index}]")))
                .collect::<Result<Vec<_>>>()?,
            failures: wire.failures,
            retries: wire.retries,
            config_text: non_empty(wire.config_text),
            config_format: non_empty(wire.config_format),
            array: wire.array.map(ArrayView::try_from).transpose().within("array")?,
            loss: wire.loss.filter(|loss| loss.is_finite()),
        })
    }
}

impl From<JobEvent> for v1::JobEvent {
    fn from(event: JobEvent) -> Self {
        use v1::job_event::Body as Wire;
        let body = match event.body {
            EventBody::State { state, reason, paused } => Wire::State(v1::StateChanged {
                state: v1::JobState::from(state).into(),
                reason,
                paused,
            }),
            EventBody::Attempt {
                state,
                worker_name,
                device,
                message,
            } => Wire::Attempt(v1::AttemptChanged {
                state: v1::AttemptState::from(state).into(),
                worker_name,
                device: Some(device.into()),
                message,
            }),
            EventBody::Phase { name } => Wire::Phase(v1::Phase { name }),
            EventBody::Progress(progress) => Wire::Progress(progress.into()),
            EventBody::Metrics { step, values } => Wire::Metrics(v1::Metrics {
                step,
                values: values.into_iter().collect(),
            }),
            EventBody::Log { level, message } => Wire::Log(v1::LogLine {
                level,
                message,
                ..Default::default()
            }),
            EventBody::Artifact(artifact) => Wire::Artifact(artifact.into()),
            EventBody::ArtifactRemoved { name } => Wire::ArtifactRemoved(name),
            EventBody::Checkpoint { step, manifest } => Wire::Checkpoint(v1::CheckpointCommitted {
                step,
                manifest_sha256: manifest.to_hex(),
            }),
        };
        Self {
            cursor: event.cursor,
            time_ms: event.time.0,
            attempt_id: event.attempt.map(|id| id.to_string()).unwrap_or_default(),
            body: Some(body),
        }
    }
}

impl TryFrom<v1::JobEvent> for JobEvent {
    type Error = ConvertError;
    fn try_from(wire: v1::JobEvent) -> Result<Self> {
        use v1::job_event::Body as Wire;
        let body = match required(wire.body, "body")? {
            Wire::State(changed) => EventBody::State {
                state: enum_field::<v1::JobState, _>(changed.state, "state.state")?,
                reason: changed.reason,
                paused: changed.paused,
            },
            Wire::Attempt(changed) => EventBody::Attempt {
                state: enum_field::<v1::AttemptState, _>(changed.state, "attempt.state")?,
                worker_name: changed.worker_name,
                device: DeviceRef::try_from(required(changed.device, "attempt.device")?).within("attempt.device")?,
                message: changed.message,
            },
            Wire::Phase(phase) => EventBody::Phase { name: phase.name },
            Wire::Progress(progress) => EventBody::Progress(progress.into()),
            Wire::Metrics(metrics) => EventBody::Metrics {
                step: metrics.step,
                values: metrics.values.into_iter().collect(),
            },
            Wire::Log(line) => EventBody::Log {
                level: line.level,
                message: line.message,
            },
            Wire::Artifact(artifact) => EventBody::Artifact(Artifact::try_from(artifact).within("artifact")?),
            Wire::ArtifactRemoved(name) => EventBody::ArtifactRemoved {
                name: artifact_name(name, "artifact_removed")?,
            },
            Wire::Checkpoint(commit) => EventBody::Checkpoint {
                step: commit.step,
                manifest: hash(&commit.manifest_sha256, "checkpoint.manifest_sha256")?,
            },
        };
        let attempt = match wire.attempt_id.as_str() {
            "" => None,
            id => Some(attempt_id(id, "attempt_id")?),
        };
        Ok(Self {
            cursor: wire.cursor,
            time: UnixMillis(wire.time_ms),
            attempt,
            body,
        })
    }
}

impl From<WorkerView> for v1::Worker {
    fn from(worker: WorkerView) -> Self {
        let devices = worker.devices.into_iter().map(|one| v1::WorkerDevice {
            device: Some(one.device.into()),
            job_ids: one.jobs.iter().map(ToString::to_string).collect(),
            reserved: one.reserved,
            faults: one.faults,
            quarantined: one.quarantined,
            quarantine_reason: one.quarantine_reason,
        });
        Self {
            id: worker.id.to_string(),
            name: worker.name,
            version: worker.version,
            host: worker.host,
            connected: worker.connected,
            leaving: worker.leaving,
            drained: worker.drained,
            last_seen_ms: worker.last_seen.0,
            devices: devices.collect(),
            labels: worker.labels.into_iter().collect(),
            confinement: worker.confinement.map(wire_confinement),
        }
    }
}

impl TryFrom<v1::Worker> for WorkerView {
    type Error = ConvertError;
    fn try_from(wire: v1::Worker) -> Result<Self> {
        let device = |one: v1::WorkerDevice| -> Result<WorkerDeviceView> {
            Ok(WorkerDeviceView {
                device: Device::try_from(required(one.device, "device")?).within("device")?,
                jobs: one
                    .job_ids
                    .iter()
                    .map(|id| job_id(id, "job_ids"))
                    .collect::<Result<_>>()?,
                reserved: one.reserved,
                faults: one.faults,
                quarantined: one.quarantined,
                quarantine_reason: one.quarantine_reason,
            })
        };
        Ok(Self {
            id: worker_id(&wire.id, "id")?,
            name: wire.name,
            version: wire.version,
            host: wire.host,
            connected: wire.connected,
            leaving: wire.leaving,
            drained: wire.drained,
            last_seen: UnixMillis(wire.last_seen_ms),
            devices: wire
                .devices
                .into_iter()
                .map(device)
                .collect::<Result<Vec<_>>>()
                .within("devices")?,
            labels: labels(wire.labels, "labels")?,
            confinement: confinement(wire.confinement)?,
        })
    }
}

impl From<Forecast> for v1::ForecastReply {
    fn from(forecast: Forecast) -> Self {
        let devices = forecast.devices.into_iter().map(|one| v1::DeviceForecast {
            worker_id: one.worker.to_string(),
            worker_name: one.worker_name,
            device: Some(one.device.into()),
            device_name: one.device_name,
            budget: one.budget,
            fits: one.fits,
            ready: one.can_start_now,
            profile: one
                .profile
                .map_or(v1::MemoryProfile::Unspecified, v1::MemoryProfile::from)
                .into(),
            memory: one.memory,
            seconds: one.seconds,
            measured: one.is_speed_measured,
            words: one.description,
        });
        Self {
            summary: forecast.summary,
            devices: devices.collect(),
        }
    }
}

impl TryFrom<v1::ForecastReply> for Forecast {
    type Error = ConvertError;
    fn try_from(wire: v1::ForecastReply) -> Result<Self> {
        let device = |one: v1::DeviceForecast| -> Result<DeviceForecast> {
            Ok(DeviceForecast {
                worker: worker_id(&one.worker_id, "worker_id")?,
                worker_name: one.worker_name,
                device: DeviceRef::try_from(required(one.device, "device")?).within("device")?,
                device_name: one.device_name,
                budget: one.budget,
                fits: one.fits,
                can_start_now: one.ready,
                profile: match one.profile {
                    0 => None,
                    profile => Some(enum_field::<v1::MemoryProfile, _>(profile, "profile")?),
                },
                memory: one.memory,
                seconds: one.seconds.filter(|seconds| seconds.is_finite()),
                is_speed_measured: one.measured,
                description: one.words,
            })
        };
        Ok(Self {
            summary: wire.summary,
            devices: wire
                .devices
                .into_iter()
                .map(device)
                .collect::<Result<_>>()
                .within("devices")?,
        })
    }
}
