//! Jobs that come in together: arrays, and jobs that are cut into parts.

use super::jobs::JobsApi;
use crate::access::{AuditLine, Identity};
use crate::core::{Event, NewArray, NewJob, Payload, Reply};
use crate::submit::{Asked, fresh_job_id, fresh_seed, wants};
use aitk_common::control::{Artifact, MEMBERS_MOST, NewMember, Submission, Submitted};
use aitk_common::id::JobId;
use aitk_common::job::cluster::Split;
use aitk_common::plan::demand::Demand;
use aitk_common::telemetry::context::TraceContext;
use aitk_proto::v1;
use std::collections::BTreeMap;
use std::sync::Arc;
use tonic::Status;

/// Bytes of configs of all members of an array together: what one transaction may hold.
const CONFIGS_MOST: usize = 64 << 20;

impl JobsApi {
    /// Takes in an array whose members are jobs of their own.
    pub(super) async fn take_array(
        &self,
        who: &Identity,
        request: v1::SubmitArrayRequest,
        same_machine: bool,
        trace: Option<TraceContext>,
    ) -> Result<Submitted, Status> {
        let shared = request
            .shared
            .ok_or_else(|| Status::invalid_argument("shared: missing"))?;
        let mut shared = Submission::try_from(shared)?;
        let count = request.members.len();
        if !(2..=MEMBERS_MOST).contains(&count) {
            return Err(Status::invalid_argument(format!(
                "members: an array has 2 to {MEMBERS_MOST}, this one {count}"
            )));
        }
        let name = request.name;
        if name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) {
            return Err(Status::invalid_argument(
                "name: expected 1 to 256 bytes and no control characters",
            ));
        }
        if shared.local {
            return Err(Status::invalid_argument("shared.local: an array does not run in place"));
        }
        let jobs: usize = request.members.iter().map(|member| member.job_json.len()).sum();
        fits(jobs.saturating_add(shared.config_text.len().saturating_mul(count)))?;
        shared.owner = Some(self.owner(who, &shared, same_machine)?);
        let _held = self.inputs_present(who, &shared).await?;

        let id = fresh_job_id();
        let mut seeds: BTreeMap<u32, u64> = BTreeMap::new();
        let mut members = Vec::with_capacity(count);
        for (index, member) in request.members.into_iter().enumerate() {
            let NewMember { job_json, twin } = member.into();
            let submission = Submission {
                job_json,
                ..shared.clone()
            };
            let asked = wants(&submission, self.0.retries)
                .map_err(|problem| self.refuse_job(who, format!("members[{index}]: {problem}")))?;
            if asked.split.is_some() {
                return Err(Status::invalid_argument(format!(
                    "members[{index}]: cluster.split: a member of an array is not cut into parts; take the key out"
                )));
            }
            let asked = Asked { trace, ..asked };
            let seed = *seeds.entry(twin).or_insert_with(fresh_seed);
            members.push(new_job(who, member_id(&id, index), seed, asked, submission));
        }
        let array = NewArray {
            id,
            name,
            at_most: Some(request.at_most).filter(|most| *most > 0),
            split: false,
            idempotency_key: shared.idempotency_key.map(|key| who.key(&key)),
            members,
        };
        self.submit_together(who, array).await
    }

    /// Cuts a job into parts if that pays: none when it stays whole.
    pub(super) async fn cut(
        &self,
        who: &Identity,
        asked: &Asked,
        (split, pictures): (Split, u64),
        submission: &Submission,
    ) -> Result<Option<NewArray>, Status> {
        let wishes = asked.wants.clone();
        let parts = self
            .0
            .core
            .query(move |state, _| state.parts(&wishes, pictures, split))
            .await?;
        // At most so many were asked for: fewer if the configs would not fit.
        let size = submission.job_json.len() + submission.config_text.len();
        let parts = parts.min((CONFIGS_MOST / size.max(1)) as u64);
        if parts < 2 {
            return Ok(None);
        }
        let mut whole: serde_json::Value =
            serde_json::from_str(&submission.job_json).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (id, seed) = (fresh_job_id(), fresh_seed());
        let mut members = Vec::new();
        for part in 0..parts {
            let bound = |part: u64| u128::from(pictures) * u128::from(part) / u128::from(parts);
            let (from, to) = (bound(part) as u64, bound(part + 1) as u64);
            whole["part"] = serde_json::json!({ "from": from, "to": to });
            let mut asked = asked.clone();
            asked.named.name = format!("{}[{part}]", asked.named.name);
            asked.wants.demand = asked.wants.demand.map(|demand| share(demand, to - from, pictures));
            let submission = Submission {
                job_json: whole.to_string(),
                ..submission.clone()
            };
            let index = usize::try_from(part).unwrap_or(usize::MAX);
            members.push(new_job(who, member_id(&id, index), seed, asked, submission));
        }
        Ok(Some(NewArray {
            id,
            name: asked.named.name.clone(),
            at_most: None,
            split: true,
            idempotency_key: submission.idempotency_key.as_ref().map(|key| who.key(key)),
            members,
        }))
    }

    pub(super) async fn submit_together(&self, who: &Identity, array: NewArray) -> Result<Submitted, Status> {
        let mut line = who.line(self.0.clock.now(), "job.submit", array.id.as_str());
        line.detail = AuditLine::quote(&format!("{} ({} members)", array.name, array.members.len()));
        let submitted = self.call(Box::new(line), |ticket| Event::ArraySubmitted {
            ticket,
            array: Box::new(array),
        });
        match submitted.await? {
            Reply::Submitted(submitted) => Ok(submitted),
            Reply::Job(_) | Reply::Worker(_) => Err(Status::internal("an answer of another kind")),
        }
    }

    /// The files of a job, or of all members of an array, each in its place.
    pub(super) async fn artifacts_of(&self, id: &JobId) -> Result<Vec<Artifact>, Status> {
        let wanted = id.clone();
        let members = self.0.core.query(move |state, _| {
            let members = state.members(&wanted);
            let name = |member: &JobId| {
                let job = state.job(member)?;
                let place = job.array.as_ref().filter(|_| state.is_array(&wanted))?;
                // Parts of one job share its folder, as if it were whole.
                (!place.split).then(|| folder(&job.name, place.index))
            };
            members
                .into_iter()
                .map(|member| (name(&member), member))
                .collect::<Vec<_>>()
        });
        let mut all = Vec::new();
        for (folder, member) in members.await? {
            let artifacts = self.0.store.artifacts(&member).await;
            let artifacts = artifacts.map_err(|error| super::store_failed(&error))?;
            all.extend(artifacts.into_iter().map(|mut artifact| {
                if let Some(folder) = &folder
                    && artifact.name.split('/').next() != Some(folder)
                {
                    artifact.name = format!("{folder}/{}", artifact.name);
                }
                artifact
            }));
        }
        Ok(all)
    }
}

/// The folder of a member's files: its name where that names a folder, else its index.
fn folder(name: &str, index: u32) -> String {
    let plain = !name.contains(['/', '\\', ':']) && !name.chars().any(char::is_control) && name != "." && name != "..";
    if plain { name.to_owned() } else { index.to_string() }
}

fn fits(bytes: usize) -> Result<(), Status> {
    if bytes <= CONFIGS_MOST {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "members: their configs have {bytes} bytes together; at most {CONFIGS_MOST}: submit several arrays"
    )))
}

fn share(mut demand: Demand, pictures: u64, of: u64) -> Demand {
    let units = u128::from(demand.milliunits) * u128::from(pictures) / u128::from(of.max(1));
    demand.milliunits = u64::try_from(units).unwrap_or(u64::MAX).max(1);
    demand
}

fn member_id(array: &JobId, index: usize) -> JobId {
    JobId::new(format!("{array}-{index}"))
}

/// What the core is told of a submission.
pub(super) fn new_job(who: &Identity, id: JobId, seed: u64, asked: Asked, submission: Submission) -> NewJob {
    NewJob {
        id,
        seed,
        name: asked.named.name,
        kind: asked.named.kind,
        wants: asked.wants,
        after: asked.after,
        sees_all: who.role.sees_all(),
        not_before: asked.not_before,
        trace: asked.trace,
        local: submission.local,
        idempotency_key: submission.idempotency_key.map(|key| who.key(&key)),
        payload: Arc::new(Payload {
            config_text: submission.config_text,
            config_format: submission.config_format,
            job_json: submission.job_json,
            inputs: submission.inputs,
        }),
    }
}
