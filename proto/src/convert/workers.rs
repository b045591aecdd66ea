//! Conversions of the messages of a worker session.

use super::vocabulary::enum_field;
use super::{ConvertError, Result, Within, artifact_name, attempt_id, hash, job_id, optional_hash, required};
use super::{short_text, task_id, user_name, worker_id};
use crate::v1;
use aitk_common::attempt::Outcome;
use aitk_common::capability::{Device, DeviceRef};
use aitk_common::confinement::{Confinement, Protection};
use aitk_common::control_plane::{
    Artifact, Assignment, AttemptRef, OfferedCheckpoint, Registration, Report, ToCoordinator, ToWorker,
};
use aitk_common::control_plane::{UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::Epoch;
use aitk_common::requested_outputs::RequestedOutputs;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

fn held(attempt: &str, epoch: u64) -> Result<AttemptRef> {
    Ok(AttemptRef {
        attempt: attempt_id(attempt, "attempt_id")?,
        epoch: Epoch(epoch),
    })
}

fn held_list(list: Vec<v1::HeldAttempt>, field: &str) -> Result<Vec<AttemptRef>> {
    // Far more than a machine runs: it has a few devices, and each runs one attempt or a few small ones.
    if list.len() > 4096 {
        return Err(ConvertError::new(
            field,
            format!("{} entries; at most 4096", list.len()),
        ));
    }
    list.iter()
        .map(|one| held(&one.attempt_id, one.epoch).within(field))
        .collect()
}

fn wire_held(list: Vec<AttemptRef>) -> Vec<v1::HeldAttempt> {
    list.into_iter()
        .map(|one| v1::HeldAttempt {
            attempt_id: one.attempt.to_string(),
            epoch: one.epoch.0,
        })
        .collect()
}

/// The most inputs of a job. Jobs usually have a few data sets and models.
const MAX_INPUTS: usize = 10_000;
/// The length limit of a path in bytes, as on Linux.
const MAX_PATH_BYTES: usize = 4096;
/// The most labels of a worker.
const MAX_LABELS: usize = 256;

pub(super) fn inputs(map: HashMap<String, String>, field: &str) -> Result<BTreeMap<String, ContentHash>> {
    if map.len() > MAX_INPUTS {
        return Err(ConvertError::new(
            field,
            format!("{} entries; at most {MAX_INPUTS}", map.len()),
        ));
    }
    map.into_iter()
        .map(|(path, text)| {
            if path.len() > MAX_PATH_BYTES {
                return Err(ConvertError::new(
                    field,
                    format!("a path of {} bytes; at most {MAX_PATH_BYTES}", path.len()),
                ));
            }
            let id = hash(&text, &format!("{field}[{path:?}]"))?;
            Ok((path, id))
        })
        .collect()
}

pub(super) fn wire_inputs(map: BTreeMap<String, ContentHash>) -> HashMap<String, String> {
    map.into_iter().map(|(path, id)| (path, id.to_hex())).collect()
}

pub(super) fn labels(map: HashMap<String, String>, field: &str) -> Result<BTreeMap<String, String>> {
    if map.len() > MAX_LABELS {
        return Err(ConvertError::new(
            field,
            format!("{} entries; at most {MAX_LABELS}", map.len()),
        ));
    }
    map.into_iter()
        .map(|(key, value)| Ok((short_text(key, field)?, short_text(value, field)?)))
        .collect()
}

/// The most checkpoints that a worker may offer at once.
const MAX_OFFERS: usize = 64;

impl TryFrom<v1::Register> for Registration {
    type Error = ConvertError;
    fn try_from(wire: v1::Register) -> Result<Self> {
        if wire.devices.len() > 1024 {
            return Err(ConvertError::new(
                "devices",
                format!("{} entries; at most 1024", wire.devices.len()),
            ));
        }
        let mut devices: Vec<Device> = Vec::with_capacity(wire.devices.len());
        for (index, device) in wire.devices.into_iter().enumerate() {
            let field = format!("devices[{index}]");
            let device = Device::try_from(device).within(&field)?;
            if devices.iter().any(|earlier| earlier.id == device.id) {
                return Err(ConvertError::new(field, "the same device twice"));
            }
            devices.push(device);
        }
        let worker = if wire.worker_id.is_empty() {
            None
        } else {
            Some(worker_id(&wire.worker_id, "worker_id")?)
        };
        Ok(Self {
            protocol: wire.protocol,
            worker,
            name: short_text(wire.name, "name")?,
            version: short_text(wire.version, "version")?,
            host: short_text(wire.host, "host")?,
            devices,
            labels: labels(wire.labels, "labels")?,
            running: held_list(wire.running, "running")?,
            confinement: confinement(wire.confinement)?,
            offers: offers(wire.offers)?,
            outputs_on_request: wire.outputs_on_request,
        })
    }
}

pub(super) fn confinement(wire: Option<v1::Confinement>) -> Result<Option<Confinement>> {
    let part = |wire: Option<v1::Protection>, field: &str| -> Result<Protection> {
        let wire = wire.unwrap_or_default();
        Ok(Protection {
            in_force: wire.in_force,
            by: short_text(wire.by, field)?,
        })
    };
    let Some(wire) = wire else { return Ok(None) };
    Ok(Some(Confinement {
        files: part(wire.files, "confinement.files")?,
        network: part(wire.network, "confinement.network")?,
        syscalls: part(wire.syscalls, "confinement.syscalls")?,
        limits: part(wire.limits, "confinement.limits")?,
    }))
}

pub(super) fn wire_confinement(confinement: Confinement) -> v1::Confinement {
    let part = |part: Protection| {
        Some(v1::Protection {
            in_force: part.in_force,
            by: part.by,
        })
    };
    v1::Confinement {
        files: part(confinement.files),
        network: part(confinement.network),
        syscalls: part(confinement.syscalls),
        limits: part(confinement.limits),
    }
}

/// Converts the offered checkpoints.
fn offers(wire: Vec<v1::OfferedCheckpoint>) -> Result<Vec<OfferedCheckpoint>> {
    if wire.len() > MAX_OFFERS {
        return Err(ConvertError::new(
            "offers",
            format!("{} entries; at most {MAX_OFFERS}", wire.len()),
        ));
    }
    let offer = |one: v1::OfferedCheckpoint| {
        Ok(OfferedCheckpoint {
            held: held(&one.attempt_id, one.epoch).within("offers")?,
            step: one.step,
            bytes: one.bytes,
        })
    };
    wire.into_iter().map(offer).collect()
}

impl From<OfferedCheckpoint> for v1::OfferedCheckpoint {
    fn from(offer: OfferedCheckpoint) -> Self {
        Self {
            attempt_id: offer.held.attempt.to_string(),
            epoch: offer.held.epoch.0,
            step: offer.step,
            bytes: offer.bytes,
        }
    }
}

impl From<Registration> for v1::Register {
    fn from(registration: Registration) -> Self {
        Self {
            protocol: registration.protocol,
            worker_id: registration.worker.map(|id| id.to_string()).unwrap_or_default(),
            name: registration.name,
            version: registration.version,
            host: registration.host,
            devices: registration.devices.into_iter().map(Into::into).collect(),
            labels: registration.labels.into_iter().collect(),
            running: wire_held(registration.running),
            confinement: registration.confinement.map(wire_confinement),
            offers: registration.offers.into_iter().map(Into::into).collect(),
            outputs_on_request: registration.outputs_on_request,
        }
    }
}

impl TryFrom<v1::WorkerMessage> for ToCoordinator {
    type Error = ConvertError;
    fn try_from(wire: v1::WorkerMessage) -> Result<Self> {
        use v1::worker_message::Message as Wire;
        let request = wire.request_id;
        Ok(match required(wire.message, "message")? {
            Wire::Register(register) => Self::Register(Box::new(Registration::try_from(register).within("register")?)),
            Wire::Beat(beat) => Self::Heartbeat {
                running: held_list(beat.running, "beat.running")?,
            },
            Wire::Event(event) => Self::Event {
                held: held(&event.attempt_id, event.epoch).within("event")?,
                seq: event.seq,
                time: UnixMillis(event.time_ms),
                report: Report::try_from(required(event.report, "event.report")?).within("event")?,
            },
            Wire::ArtifactReady(ready) => Self::ArtifactReady {
                request,
                held: held(&ready.attempt_id, ready.epoch).within("artifact_ready")?,
                artifact: Artifact::try_from(required(ready.artifact, "artifact_ready.artifact")?)
                    .within("artifact_ready.artifact")?,
            },
            Wire::ArtifactRemoved(removed) => Self::ArtifactRemoved {
                request,
                held: held(&removed.attempt_id, removed.epoch).within("artifact_removed")?,
                name: artifact_name(removed.name, "artifact_removed.name")?,
            },
            Wire::Commit(commit) => Self::Commit {
                request,
                held: held(&commit.attempt_id, commit.epoch).within("commit")?,
                manifest: hash(&commit.manifest_sha256, "commit.manifest_sha256")?,
                step: commit.step,
            },
            Wire::Finished(finished) => Self::Finished {
                request,
                held: held(&finished.attempt_id, finished.epoch).within("finished")?,
                outcome: Outcome::try_from(required(finished.outcome, "finished.outcome")?).within("finished")?,
            },
            Wire::GoingAway(away) => Self::GoingAway {
                reason: short_text(away.reason, "going_away.reason")?,
            },
        })
    }
}

impl From<ToCoordinator> for v1::WorkerMessage {
    fn from(message: ToCoordinator) -> Self {
        use v1::worker_message::Message as Wire;
        let ids = |held: AttemptRef| (held.attempt.to_string(), held.epoch.0);
        let (request_id, message) = match message {
            ToCoordinator::Register(registration) => (0, Wire::Register((*registration).into())),
            ToCoordinator::Heartbeat { running } => (
                0,
                Wire::Beat(v1::Beat {
                    running: wire_held(running),
                }),
            ),
            ToCoordinator::Event {
                held,
                seq,
                time,
                report,
            } => {
                let (attempt_id, epoch) = ids(held);
                let report = Some(report.into());
                (
                    0,
                    Wire::Event(v1::AttemptEvent {
                        attempt_id,
                        epoch,
                        seq,
                        time_ms: time.0,
                        report,
                    }),
                )
            }
            ToCoordinator::ArtifactReady {
                request,
                held,
                artifact,
            } => {
                let (attempt_id, epoch) = ids(held);
                let artifact = Some(artifact.into());
                (
                    request,
                    Wire::ArtifactReady(v1::ArtifactReady {
                        attempt_id,
                        epoch,
                        artifact,
                    }),
                )
            }
            ToCoordinator::ArtifactRemoved { request, held, name } => {
                let (attempt_id, epoch) = ids(held);
                (
                    request,
                    Wire::ArtifactRemoved(v1::ArtifactRemoved {
                        attempt_id,
                        epoch,
                        name,
                    }),
                )
            }
            ToCoordinator::Commit {
                request,
                held,
                manifest,
                step,
            } => {
                let (attempt_id, epoch) = ids(held);
                let manifest_sha256 = manifest.to_hex();
                (
                    request,
                    Wire::Commit(v1::CommitCheckpoint {
                        attempt_id,
                        epoch,
                        manifest_sha256,
                        step,
                    }),
                )
            }
            ToCoordinator::Finished { request, held, outcome } => {
                let (attempt_id, epoch) = ids(held);
                let outcome = Some(outcome.into());
                (
                    request,
                    Wire::Finished(v1::Finished {
                        attempt_id,
                        epoch,
                        outcome,
                    }),
                )
            }
            ToCoordinator::GoingAway { reason } => (0, Wire::GoingAway(v1::WorkerGoingAway { reason })),
        };
        Self {
            request_id,
            message: Some(message),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl TryFrom<v1::Assign> for Assignment {
    type Error = ConvertError;
    fn try_from(wire: v1::Assign) -> Result<Self> {
        Ok(Self {
            job: job_id(&wire.job_id, "job_id")?,
            task: task_id(&wire.task_id, "task_id")?,
            attempt: attempt_id(&wire.attempt_id, "attempt_id")?,
            epoch: Epoch(wire.epoch),
            job_json: wire.job_json,
            config_text: wire.config_text,
            config_format: short_text(wire.config_format, "config_format")?,
            inputs: inputs(wire.inputs, "inputs")?,
            local: wire.local,
            resume: optional_hash(&wire.resume_manifest_sha256, "resume_manifest_sha256")?,
            device: DeviceRef::try_from(required(wire.device, "device")?).within("device")?,
            profile: enum_field::<v1::MemoryProfile, _>(wire.profile, "profile")?,
            seed: wire.seed,
            generated: wire.drawn,
            // An invalid trace context is ignored, as the W3C recommendation requires.
            trace: wire.traceparent.parse().ok(),
            owner: match wire.owner.as_str() {
                "" => None,
                name => Some(user_name(name, "owner")?),
            },
        })
    }
}

impl From<Assignment> for v1::Assign {
    fn from(work: Assignment) -> Self {
        Self {
            job_id: work.job.to_string(),
            task_id: work.task.to_string(),
            attempt_id: work.attempt.to_string(),
            epoch: work.epoch.0,
            job_json: work.job_json,
            config_text: work.config_text,
            config_format: work.config_format,
            inputs: wire_inputs(work.inputs),
            local: work.local,
            resume_manifest_sha256: work.resume.map(|hash| hash.to_hex()).unwrap_or_default(),
            device: Some(work.device.into()),
            profile: v1::MemoryProfile::from(work.profile).into(),
            seed: work.seed,
            drawn: work.generated,
            traceparent: work.trace.map(|trace| trace.to_string()).unwrap_or_default(),
            owner: work.owner.map(|owner| owner.to_string()).unwrap_or_default(),
        }
    }
}

impl TryFrom<v1::CoordinatorMessage> for ToWorker {
    type Error = ConvertError;
    fn try_from(wire: v1::CoordinatorMessage) -> Result<Self> {
        use v1::coordinator_message::Message as Wire;
        Ok(match required(wire.message, "message")? {
            Wire::Welcome(welcome) => {
                // An interval of 0 would make the worker send heartbeats in a busy loop.
                if welcome.beat_interval_ms == 0 || welcome.lease_ms == 0 {
                    return Err(ConvertError::new(
                        "welcome",
                        "beat_interval_ms and lease_ms must not be 0",
                    ));
                }
                Self::Welcome {
                    worker: worker_id(&welcome.worker_id, "welcome.worker_id")?,
                    heartbeat_interval: Duration::from_millis(welcome.beat_interval_ms),
                    lease: Duration::from_millis(welcome.lease_ms),
                    storage_url: Some(welcome.storage_url).filter(|url| !url.is_empty()),
                    keep: welcome
                        .keep
                        .iter()
                        .map(|id| attempt_id(id, "welcome.keep"))
                        .collect::<Result<Vec<_>>>()?,
                    wanted: welcome
                        .wanted
                        .iter()
                        .map(|id| attempt_id(id, "welcome.wanted"))
                        .collect::<Result<Vec<_>>>()?,
                }
            }
            Wire::BeatReply(reply) => Self::HeartbeatReply {
                events: reply
                    .events
                    .iter()
                    .map(|cursor| Ok((attempt_id(&cursor.attempt_id, "beat_reply.events")?, cursor.seq)))
                    .collect::<Result<Vec<_>>>()?,
            },
            Wire::Assign(assign) => Self::Assign(Box::new(Assignment::try_from(assign).within("assign")?)),
            Wire::Stop(stop) => Self::Stop {
                held: held(&stop.attempt_id, stop.epoch).within("stop")?,
                save: stop.save,
            },
            Wire::RequestOutputs(request) => Self::RequestOutputs {
                held: held(&request.attempt_id, request.epoch).within("request_outputs")?,
                outputs: RequestedOutputs {
                    save: request.save,
                    samples: request.samples,
                },
            },
            Wire::Fence(fence) => Self::Fence {
                held: held(&fence.attempt_id, fence.epoch).within("fence")?,
                reason: fence.reason,
            },
            Wire::Answer(answer) => Self::Answer {
                request: answer.request_id,
                verdict: match v1::Verdict::try_from(answer.verdict) {
                    Ok(v1::Verdict::Accepted) => Verdict::Accepted,
                    Ok(v1::Verdict::Fenced) => Verdict::Fenced,
                    Ok(v1::Verdict::Refused) if answer.temporary => Verdict::Unavailable,
                    Ok(v1::Verdict::Refused) => Verdict::Refused,
                    Ok(v1::Verdict::Unspecified) | Err(_) => {
                        return Err(ConvertError::new("answer.verdict", "not set, or unknown"));
                    }
                },
                message: answer.message,
            },
            Wire::GoingAway(away) => Self::GoingAway {
                reason: away.reason,
                retry: away.retry,
            },
        })
    }
}

impl From<ToWorker> for v1::CoordinatorMessage {
    fn from(message: ToWorker) -> Self {
        use v1::coordinator_message::Message as Wire;
        let message = match message {
            ToWorker::Welcome {
                worker,
                heartbeat_interval,
                lease,
                storage_url,
                keep,
                wanted,
            } => Wire::Welcome(v1::Welcome {
                worker_id: worker.to_string(),
                beat_interval_ms: millis(heartbeat_interval),
                lease_ms: millis(lease),
                storage_url: storage_url.unwrap_or_default(),
                keep: keep.iter().map(ToString::to_string).collect(),
                wanted: wanted.iter().map(ToString::to_string).collect(),
            }),
            ToWorker::HeartbeatReply { events } => Wire::BeatReply(v1::BeatReply {
                events: events
                    .into_iter()
                    .map(|(attempt, seq)| v1::EventCursor {
                        attempt_id: attempt.to_string(),
                        seq,
                    })
                    .collect(),
            }),
            ToWorker::Assign(work) => Wire::Assign((*work).into()),
            ToWorker::Stop { held, save } => Wire::Stop(v1::StopAttempt {
                attempt_id: held.attempt.to_string(),
                epoch: held.epoch.0,
                save,
            }),
            ToWorker::RequestOutputs { held, outputs } => Wire::RequestOutputs(v1::RequestOutputs {
                attempt_id: held.attempt.to_string(),
                epoch: held.epoch.0,
                save: outputs.save,
                samples: outputs.samples,
            }),
            ToWorker::Fence { held, reason } => Wire::Fence(v1::Fence {
                attempt_id: held.attempt.to_string(),
                epoch: held.epoch.0,
                reason,
            }),
            ToWorker::Answer {
                request,
                verdict,
                message,
            } => {
                let (verdict, temporary) = match verdict {
                    Verdict::Accepted => (v1::Verdict::Accepted, false),
                    Verdict::Fenced => (v1::Verdict::Fenced, false),
                    Verdict::Refused => (v1::Verdict::Refused, false),
                    // Not a value of its own: an older worker would end its session at one that it does not know.
                    Verdict::Unavailable => (v1::Verdict::Refused, true),
                };
                Wire::Answer(v1::Answer {
                    request_id: request,
                    verdict: verdict.into(),
                    message,
                    temporary,
                })
            }
            ToWorker::GoingAway { reason, retry } => Wire::GoingAway(v1::CoordinatorGoingAway { reason, retry }),
        };
        Self { message: Some(message) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_a_refusal_for_workers_that_know_no_outages() {
        for verdict in [
            Verdict::Accepted,
            Verdict::Fenced,
            Verdict::Refused,
            Verdict::Unavailable,
        ] {
            let answer = ToWorker::Answer {
                request: 7,
                verdict,
                message: "why".into(),
            };
            let wire = v1::CoordinatorMessage::from(answer.clone());
            let Some(v1::coordinator_message::Message::Answer(sent)) = &wire.message else {
                panic!("{wire:?}");
            };
            let is_refused = matches!(verdict, Verdict::Refused | Verdict::Unavailable);
            assert_eq!(sent.verdict() == v1::Verdict::Refused, is_refused, "{verdict:?}");
            assert_eq!(ToWorker::try_from(wire).unwrap(), answer);
        }
    }
}
