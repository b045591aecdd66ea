//! Submission of several jobs at once: arrays, and jobs that are split into parts.

use super::jobs::JobsApi;
use super::new_job::new_job;
use super::shared::run_to_end;
use super::status::{refusal_status, store_status};
use crate::access::Identity;
use crate::garbage::PinGuard;
use crate::job_size_limit;
use crate::store::AuditLine;
use crate::store::JobText;
use crate::submit::{ParsedSubmission, fresh_job_id, fresh_seed, parse_submission};
use aitk_common::control_plane::{Artifact, MAX_ARRAY_MEMBERS, NewMember, Submission, SubmissionReceipt};
use aitk_common::error_chain::error_chain;
use aitk_common::id::{JobId, UserName};
use aitk_common::job::cluster::Split;
use aitk_common::plan::demand::Demand;
use aitk_common::telemetry::context::TraceContext;
use aitk_proto::{STORAGE_HEADER, v1};
use aitk_scheduler::{Event, NewArray, NewJob, Payload, Reply, State, Ticket};
use std::collections::BTreeMap;
use std::sync::Arc;
use tonic::{Code, Status};

/// Maximum bytes of the parts of a split job, without what they share: as much as one request can carry.
const MEMBERS_BYTES: usize = aitk_proto::MAX_MESSAGE_BYTES;

/// What the members of an array share.
struct ArrayTemplate {
    who: Identity,
    id: JobId,
    /// Its `job_json` is replaced for each member.
    submission: Submission,
    /// Bytes of the shared part.
    bytes: usize,
    retries: u32,
    trace: Option<TraceContext>,
}

impl ArrayTemplate {
    /// Validates every member and creates its job. Shared data is stored once for all members.
    fn members(mut self, members: Vec<NewMember>) -> Result<Vec<NewJob>, String> {
        let payload = Arc::new(Payload {
            config_text: self.submission.config_text.as_str().into(),
            config_format: self.submission.config_format.as_str().into(),
            job_json: "".into(),
            inputs: Arc::new(self.submission.inputs.clone()),
            shared: Some(format!("{}/shared", self.id).into()),
        });
        let mut seeds: BTreeMap<u32, u64> = BTreeMap::new();
        let mut jobs = Vec::with_capacity(members.len());
        for (index, NewMember { job_json, seed_group }) in members.into_iter().enumerate() {
            let job = self.member(
                index,
                job_json,
                *seeds.entry(seed_group).or_insert_with(fresh_seed),
                &payload,
            );
            jobs.push(job.map_err(|problem| format!("members[{index}]: {problem}"))?);
        }
        Ok(jobs)
    }

    fn member(&mut self, index: usize, job_json: String, seed: u64, shared: &Payload) -> Result<NewJob, String> {
        let own = job_json.len();
        job_size_limit::check_job_size(self.bytes, own)?;
        self.submission.job_json = job_json;
        let parsed = parse_submission(&self.submission, self.retries)?;
        if parsed.split.is_some() {
            return Err("cluster.split: a member of an array is not cut into parts; remove the key".into());
        }
        let payload = Payload {
            job_json: self.submission.job_json.as_str().into(),
            ..shared.clone()
        };
        Ok(NewJob {
            config_bytes: (own + if index == 0 { self.bytes } else { 0 }) as u64,
            trace: self.trace,
            ..new_job(
                &self.who,
                member_id(&self.id, index),
                seed,
                parsed,
                &self.submission,
                payload,
            )
        })
    }
}

impl JobsApi {
    /// Accepts an array whose members are separate jobs.
    pub(super) async fn accept_array(
        &self,
        who: &Identity,
        request: v1::SubmitArrayRequest,
        same_machine: bool,
        trace: Option<TraceContext>,
    ) -> Result<SubmissionReceipt, Status> {
        let shared = request
            .shared
            .ok_or_else(|| Status::invalid_argument("shared: missing"))?;
        let mut shared = Submission::try_from(shared)?;
        let count = request.members.len();
        if !(2..=MAX_ARRAY_MEMBERS).contains(&count) {
            return Err(Status::invalid_argument(format!(
                "members: an array has 2 to {MAX_ARRAY_MEMBERS}, this one {count}"
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
        let bytes = job_size_limit::of_shared(&shared);
        let longest = request.members.iter().map(|member| member.job_json.len()).max();
        job_size_limit::check_job_size(bytes, longest.unwrap_or(0)).map_err(Status::invalid_argument)?;
        let owner = self.check_owner(who, &shared, same_machine)?;
        let own: usize = request.members.iter().map(|member| member.job_json.len()).sum();
        self.check_limits(who, &owner, shared.idempotency_key.as_ref(), (count, bytes + own))
            .await?;
        shared.owner = Some(owner);
        let pins = self.pin_inputs(who, &shared).await?;

        let id = fresh_job_id();
        let idempotency_key = shared.idempotency_key.take().map(|key| who.idempotency_key(&key));
        let template = ArrayTemplate {
            who: who.clone(),
            id: id.clone(),
            submission: shared,
            bytes,
            retries: self.0.retries,
            trace,
        };
        let members = request.members.into_iter().map(Into::into).collect();
        let members = self.run_parser(bytes + own, move || template.members(members)).await;
        let members = members.map_err(|status| self.audit_refused_job(who, status))?;
        let array = NewArray {
            id,
            name,
            at_most: Some(request.at_most).filter(|max| *max > 0),
            split: false,
            idempotency_key,
            members,
        };
        self.submit_new_array(who, array, pins).await
    }

    /// Runs `work` on a submission of this size. Large submissions run on a blocking thread, a limited number at once.
    pub(super) async fn run_parser<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, Status> {
        if bytes <= job_size_limit::SMALL {
            return work().map_err(Status::invalid_argument);
        }
        let permit = self.0.parsing.clone().acquire_owned().await;
        let permit = permit.map_err(|_| Status::unavailable("the coordinator is shutting down"))?;
        let worked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        let worked = worked.await.map_err(|error| Status::internal(error.to_string()))?;
        worked.map_err(Status::invalid_argument)
    }

    /// Checks that this user may submit this many more jobs and bytes, before anything is stored. A refusal is recorded
    /// in the audit log.
    pub(super) async fn check_limits(
        &self,
        who: &Identity,
        owner: &UserName,
        key: Option<&String>,
        (jobs, bytes): (usize, usize),
    ) -> Result<(), Status> {
        if who.role.changes_all() {
            return Ok(());
        }
        let (of, key) = (owner.clone(), key.map(|key| who.idempotency_key(key)));
        // A repeated submission is answered again, whatever the limits are by now.
        let query = move |state: &State, _| match state.submitted_before(key.as_ref()) {
            Some(_) => Ok(()),
            None => state.check_user_limits(&of, jobs as u64, bytes as u64),
        };
        let Err(refusal) = self.0.scheduler.query(query).await? else {
            return Ok(());
        };
        let mut line = who.audit_line(self.0.clock.wall_time(), "job.submit", "");
        (line.done, line.detail) = (false, AuditLine::quote(&refusal.to_string()));
        self.0.access.record_audit(line);
        Err(refusal_status(&refusal))
    }

    /// Splits a job into parts if that is worthwhile; `None` when it stays whole.
    pub(super) async fn split_job(
        &self,
        who: &Identity,
        parsed: &ParsedSubmission,
        (split, images): (Split, u64),
        submission: &Submission,
    ) -> Result<Option<NewArray>, Status> {
        let requirements = parsed.requirements.clone();
        let parts = self
            .0
            .scheduler
            .query(move |state, _| state.part_count(&requirements, images, split))
            .await?;
        // The requested number is an upper limit: fewer if the configs would not fit.
        let own = submission.job_json.len();
        let parts = parts.min((MEMBERS_BYTES / own.max(1)) as u64);
        if parts < 2 {
            return Ok(None);
        }
        let mut whole: serde_json::Value =
            serde_json::from_str(&submission.job_json).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (id, seed) = (fresh_job_id(), fresh_seed());
        let shared = Payload {
            config_text: submission.config_text.as_str().into(),
            config_format: submission.config_format.as_str().into(),
            job_json: "".into(),
            inputs: Arc::new(submission.inputs.clone()),
            shared: Some(format!("{id}/shared").into()),
        };
        let mut members = Vec::new();
        for part in 0..parts {
            let bound = |part: u64| u128::from(images) * u128::from(part) / u128::from(parts);
            let (from, to) = (bound(part) as u64, bound(part + 1) as u64);
            whole["part"] = serde_json::json!({ "from": from, "to": to });
            let mut parsed = parsed.clone();
            parsed.title.name = format!("{}[{part}]", parsed.title.name);
            parsed.requirements.demand = parsed
                .requirements
                .demand
                .map(|demand| demand_of_part(demand, to - from, images));
            let payload = Payload {
                job_json: whole.to_string().into(),
                ..shared.clone()
            };
            let index = usize::try_from(part).unwrap_or(usize::MAX);
            let bytes = payload.job_json.len()
                + if index == 0 {
                    job_size_limit::of_shared(submission)
                } else {
                    0
                };
            members.push(NewJob {
                config_bytes: bytes as u64,
                ..new_job(who, member_id(&id, index), seed, parsed, submission, payload)
            });
        }
        Ok(Some(NewArray {
            id,
            name: parsed.title.name.clone(),
            at_most: None,
            split: true,
            idempotency_key: submission.idempotency_key.as_ref().map(|key| who.idempotency_key(key)),
            members,
        }))
    }

    /// Submits an array whose inputs are pinned.
    pub(super) async fn submit_new_array(
        &self,
        who: &Identity,
        array: NewArray,
        pins: Vec<PinGuard>,
    ) -> Result<SubmissionReceipt, Status> {
        let key = array.idempotency_key.clone();
        if let Some(earlier) = self
            .0
            .scheduler
            .query(move |state, _| state.submitted_before(key.as_ref()))
            .await?
        {
            return Ok(earlier);
        }
        let mut line = who.audit_line(self.0.clock.wall_time(), "job.submit", array.id.as_str());
        line.detail = AuditLine::quote(&format!("{} ({} members)", array.name, array.members.len()));
        let job_configs: Vec<_> = array
            .members
            .iter()
            .map(|job| (job.id.clone(), job.payload.clone()))
            .collect();
        self.submit_to_end(pins, job_configs, line, |ticket| Event::ArraySubmitted {
            ticket,
            array: Box::new(array),
        })
        .await
    }

    /// [`Self::store_then_submit`] on a task of its own: if it ended when its client disconnects, the configs that it has stored would
    /// stay until the next start, and count for no user. The pins keep the inputs until the jobs are stored.
    pub(super) async fn submit_to_end(
        &self,
        pins: Vec<PinGuard>,
        job_configs: Vec<(JobId, Arc<Payload>)>,
        line: AuditLine,
        event: impl FnOnce(Ticket) -> Event + Send + 'static,
    ) -> Result<SubmissionReceipt, Status> {
        let api = self.clone();
        run_to_end(async move {
            let _pins = pins;
            api.store_then_submit(job_configs, line, event).await
        })
        .await
    }

    /// Stores the configs of jobs in small transactions, then submits the jobs, so that the scheduler's own
    /// transaction stays small. If the submission is refused, the configs are removed again.
    async fn store_then_submit(
        &self,
        job_configs: Vec<(JobId, Arc<Payload>)>,
        line: AuditLine,
        event: impl FnOnce(Ticket) -> Event,
    ) -> Result<SubmissionReceipt, Status> {
        let mut texts: Vec<JobText> = job_configs
            .first()
            .and_then(|(_, first)| JobText::shared(first))
            .into_iter()
            .collect();
        if !texts.is_empty() {
            texts.extend(job_configs.into_iter().map(|(id, payload)| JobText {
                id: id.to_string(),
                text: payload.job_json.clone(),
            }));
            let written = self.0.store.write_job_texts(&texts).await;
            written.map_err(|error| store_status(&error))?;
        }
        let submitted = self.submit_event(Box::new(line), event).await;
        let taken = matches!(&submitted, Ok(Reply::Submitted(submitted)) if !submitted.existed);
        // The next start removes unused configs.
        let is_unknown = submitted.as_ref().is_err_and(is_outcome_unknown);
        if !taken && !is_unknown && !texts.is_empty() {
            let ids: Vec<String> = texts.into_iter().map(|body| body.id).collect();
            if let Err(error) = self.0.store.forget_payloads(&ids).await {
                tracing::warn!(error = %error_chain(&error), "cannot remove the configs of refused jobs; they stay until the next start");
            }
        }
        match submitted? {
            Reply::Submitted(submitted) => Ok(submitted),
            Reply::Job(_) | Reply::Worker(_) => Err(Status::internal(
                "the scheduler sent a reply of the wrong kind; this is a bug of the coordinator",
            )),
        }
    }

    /// Returns the files of a job, or of all members of an array, each below its member's folder.
    pub(super) async fn artifacts_of(&self, id: &JobId) -> Result<Vec<Artifact>, Status> {
        let wanted = id.clone();
        let members = self.0.scheduler.query(move |state, _| {
            let members = state.members(&wanted);
            let name = |member: &JobId| {
                let job = state.job(member)?;
                let membership = job.array.as_ref().filter(|_| state.is_array(&wanted))?;
                // Parts of one job share its folder, as if it were not split.
                (!membership.split).then(|| folder(&job.name, membership.index))
            };
            members
                .into_iter()
                .map(|member| (name(&member), member))
                .collect::<Vec<_>>()
        });
        let mut all = Vec::new();
        for (folder, member) in members.await? {
            let artifacts = self.0.store.artifacts(&member).await;
            let artifacts = artifacts.map_err(|error| store_status(&error))?;
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

/// Whether the jobs of a failed submission may still be accepted: there was no answer, or the database was full, so that they are stored
/// when there is room.
fn is_outcome_unknown(status: &Status) -> bool {
    status.code() == Code::Unavailable || status.metadata().contains_key(STORAGE_HEADER)
}

/// Returns the folder for a member's files: its name if that is a valid folder name, else its index.
fn folder(name: &str, index: u32) -> String {
    let plain = !name.contains(['/', '\\', ':']) && !name.chars().any(char::is_control) && name != "." && name != "..";
    if plain { name.to_owned() } else { index.to_string() }
}

fn demand_of_part(mut demand: Demand, images: u64, of: u64) -> Demand {
    let units = u128::from(demand.millipasses) * u128::from(images) / u128::from(of.max(1));
    demand.millipasses = u64::try_from(units).unwrap_or(u64::MAX).max(1);
    demand
}

fn member_id(array: &JobId, index: usize) -> JobId {
    JobId::new(format!("{array}-{index}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_scheduler::Refusal;

    #[test]
    fn the_configs_of_jobs_that_a_full_database_delays_are_kept() {
        let full = refusal_status(&Refusal::DatabaseFull("not stored yet".into()));
        let limit = refusal_status(&Refusal::LimitExceeded("too many jobs".into()));
        assert_eq!(full.code(), limit.code());
        assert!(is_outcome_unknown(&full) && !is_outcome_unknown(&limit));
        assert!(is_outcome_unknown(&Status::unavailable("it shuts down")));
    }
}
