//! The jobs service: jobs, their files, and workers.

use super::auth::{caller, same_machine};
use super::follow::{EventStream, WIRE_BUFFER, event_stream, stream_events};
use super::new_job::new_job;
use super::shared::{Shared, run_to_end};
use super::status::{refusal_status, store_status, token_ended_status};
use crate::access::Identity;
use crate::job_size_limit;
use crate::store::AuditLine;
use crate::store::StoreError;
use crate::submit::{ParsedSubmission, fresh_job_id, fresh_seed, parse_for_fit, parse_submission};
use crate::training_fit::describe_choices;
use aitk_common::control_plane::{
    Forecast, JobState, JobView, MAX_CONFIG_BYTES, PROTOCOL_VERSION, ServerInfo, Submission, UnixMillis,
};
use aitk_common::id::{JobId, UserName};
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_proto::v1::jobs_server::Jobs;
use aitk_proto::{MAX_MESSAGE_BYTES, Message, encoded_len, trace, v1};
use aitk_scheduler::{Event, ListQuery, NewJob, Payload, Refusal, Reply, State, Ticket};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub(super) struct JobsApi(pub(super) Shared);

impl JobsApi {
    /// Finds a job that the caller can see. Other jobs are reported as not found.
    async fn find(&self, who: &Identity, text: String) -> Result<JobId, Status> {
        let found = self.find_if(who, text.clone(), Identity::can_see).await;
        // A caller with the id of an existing, invisible job did not guess it by chance.
        if found.is_err()
            && let Ok(id) = JobId::parse(&text)
        {
            let id_to_find = id.clone();
            if self
                .0
                .scheduler
                .query(move |state, _| state.job(&id_to_find).is_some())
                .await?
            {
                let mut line = who.audit_line(self.0.clock.wall_time(), "job.read", id.as_str());
                (line.done, line.detail) = (false, "this user may not see it".into());
                self.0.access.record_audit(line);
            }
        }
        found
    }

    async fn find_if(
        &self,
        who: &Identity,
        text: String,
        may: fn(&Identity, &UserName) -> bool,
    ) -> Result<JobId, Status> {
        let who = who.clone();
        let query =
            move |state: &aitk_scheduler::State, _| state.find_among(&text, |job| may(&who, &job.requirements.owner));
        let found = self.0.scheduler.query(query).await?;
        found.map_err(|refusal| refusal_status(&refusal))
    }

    /// Finds a job that the caller may change; a refusal is recorded in the audit log.
    pub(super) async fn find_to_change(
        &self,
        who: &Identity,
        action: &str,
        text: String,
    ) -> Result<(JobId, Box<AuditLine>), Status> {
        let found = self.find_if(who, text.clone(), Identity::can_change).await;
        let object = found.as_ref().map_or(text.as_str(), JobId::as_str);
        let mut line = who.audit_line(self.0.clock.wall_time(), action, object);
        match found {
            Ok(id) => Ok((id, Box::new(line))),
            Err(status) => {
                (line.done, line.detail) = (false, AuditLine::quote(status.message()));
                self.0.access.record_audit(line);
                Err(status)
            }
        }
    }

    pub(super) async fn submit_event(
        &self,
        line: Box<AuditLine>,
        event: impl FnOnce(Ticket) -> Event,
    ) -> Result<Reply, Status> {
        let answer = self.0.scheduler.call(event, line).await?;
        answer.map_err(|refusal| refusal_status(&refusal))
    }

    /// Parses and validates a submission of this size.
    async fn parse_submission(
        &self,
        submission: Submission,
        bytes: usize,
        read: fn(&Submission, u32) -> Result<ParsedSubmission, String>,
    ) -> Result<(ParsedSubmission, Submission), Status> {
        let retries = self.0.retries;
        let read = move || read(&submission, retries).map(|parsed| (parsed, submission));
        self.run_parser(bytes, read).await
    }

    /// Sends an event that changes a job, if the caller may change it.
    async fn change(
        &self,
        who: &Identity,
        action: &str,
        text: String,
        event: impl FnOnce(Ticket, String) -> Event,
    ) -> Result<Response<v1::Job>, Status> {
        let (id, line) = self.find_to_change(who, action, text).await?;
        match self.submit_event(line, |ticket| event(ticket, id.to_string())).await? {
            Reply::Job(view) => Ok(Response::new((*view).into())),
            Reply::Submitted(_) | Reply::Worker(_) => Err(Status::internal(
                "the scheduler sent a reply of the wrong kind; this is a bug of the coordinator",
            )),
        }
    }
}

#[tonic::async_trait]
impl Jobs for JobsApi {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoReply>, Status> {
        let (workers_connected, jobs_active) = self.0.scheduler.query(|state, _| state.counts()).await?;
        let info = ServerInfo {
            version: env!("CARGO_PKG_VERSION").into(),
            protocol: PROTOCOL_VERSION,
            started: self.0.started,
            storage: self.0.storage.clone(),
            workers_connected,
            jobs_active,
        };
        Ok(Response::new(info.into()))
    }

    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        let who = caller(&request)?;
        let same_machine = same_machine(&request);
        let trace = trace::extract(request.metadata());
        let mut submission = Submission::try_from(request.into_inner())?;
        let owner = self.check_owner(&who, &submission, same_machine)?;
        let (shared, own) = (job_size_limit::of_shared(&submission), submission.job_json.len());
        job_size_limit::check_job_size(shared, own).map_err(Status::invalid_argument)?;
        self.check_limits(&who, &owner, submission.idempotency_key.as_ref(), (1, shared + own))
            .await?;
        submission.owner = Some(owner);
        let read = self.parse_submission(submission, shared + own, parse_submission).await;
        let (parsed, submission) = read.map_err(|status| self.audit_refused_job(&who, status))?;
        let parsed = ParsedSubmission { trace, ..parsed };
        let pins = self.pin_inputs(&who, &submission).await?;
        if let Some(split) = parsed.split
            && let Some(array) = self.split_job(&who, &parsed, split, &submission).await?
        {
            return Ok(Response::new(self.submit_new_array(&who, array, pins).await?.into()));
        }
        let id = fresh_job_id();
        let large = shared + own > job_size_limit::SMALL;
        let payload = Payload {
            config_text: submission.config_text.as_str().into(),
            config_format: submission.config_format.as_str().into(),
            job_json: submission.job_json.as_str().into(),
            inputs: Arc::new(submission.inputs.clone()),
            shared: large.then(|| format!("{id}/shared").into()),
        };
        let job = NewJob {
            config_bytes: (shared + own) as u64,
            ..new_job(&who, id.clone(), fresh_seed(), parsed, &submission, payload)
        };
        let mut line = who.audit_line(self.0.clock.wall_time(), "job.submit", id.as_str());
        line.detail = AuditLine::quote(&job.name);
        let job_configs = vec![(id, job.payload.clone())];
        let submitted = self.submit_to_end(pins, job_configs, line, |ticket| Event::JobSubmitted {
            ticket,
            job: Box::new(job),
        });
        Ok(Response::new(submitted.await?.into()))
    }

    async fn submit_array(
        &self,
        request: Request<v1::SubmitArrayRequest>,
    ) -> Result<Response<v1::SubmitReply>, Status> {
        let who = caller(&request)?;
        let same_machine = same_machine(&request);
        let trace = trace::extract(request.metadata());
        let submitted = self
            .accept_array(&who, request.into_inner(), same_machine, trace)
            .await?;
        Ok(Response::new(submitted.into()))
    }

    async fn get(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let id = self.find(&who, request.into_inner().job_id).await?;
        let wanted = id.clone();
        let query = move |state: &aitk_scheduler::State, now| {
            // An array has no config of its own; use that of its first member.
            let first = state.members(&wanted).into_iter().next();
            state.job_view(now, &wanted).zip(first)
        };
        let found = self.0.scheduler.query(query).await?;
        let (mut view, first) = found.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        let payload = match self.0.store.payload(&first).await {
            // The rest of the job can be shown; the job fails with a message when it should run.
            Err(StoreError::Unreadable { .. }) => None,
            read => read.map_err(|error| store_status(&error))?,
        };
        if let Some(payload) = payload {
            // A config accepted by an older version may be larger than an answer.
            let fits = payload.config_text.len() <= MAX_CONFIG_BYTES;
            view.config_text = fits.then(|| payload.config_text.to_string());
            view.config_format = fits.then(|| payload.config_format.to_string());
        }
        Ok(Response::new(view.into()))
    }

    async fn submission(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::SubmitRequest>, Status> {
        let who = caller(&request)?;
        // It contains environment variables of the submitter, which not everyone who can see the job may read.
        let (id, line) = self
            .find_to_change(&who, "job.read", request.into_inner().job_id)
            .await?;
        let wanted = id.clone();
        let query = move |state: &aitk_scheduler::State, now| {
            let first = state.members(&wanted).into_iter().next();
            state.job_view(now, &wanted).zip(first)
        };
        let found = self.0.scheduler.query(query).await?;
        let (view, first) = found.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        let payload = match self.0.store.payload(&first).await {
            Err(error @ StoreError::Unreadable { .. }) => {
                return Err(Status::failed_precondition(format!("job {id} cannot be read: {error}")));
            }
            read => read.map_err(|error| store_status(&error))?,
        };
        let payload = payload.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        if view.owner != who.owner() {
            self.0.access.record_audit(*line);
        }
        let submission = v1::SubmitRequest::from(Submission {
            config_text: payload.config_text.to_string(),
            config_format: payload.config_format.to_string(),
            job_json: payload.job_json.to_string(),
            inputs: (*payload.inputs).clone(),
            local: view.local,
            idempotency_key: None,
            owner: Some(view.owner),
            parameter_counts: None,
            image_batches: Vec::new(),
            longest_prompt: None,
            images: None,
        });
        if encoded_len(&submission) > MAX_MESSAGE_BYTES {
            return Err(Status::failed_precondition(format!(
                "job {id} is larger than the maximum answer ({MAX_MESSAGE_BYTES} bytes)"
            )));
        }
        Ok(Response::new(submission))
    }

    async fn list(&self, request: Request<v1::ListJobsRequest>) -> Result<Response<v1::ListJobsReply>, Status> {
        let who = caller(&request)?;
        let (array_id, mut listing) = listing(request.into_inner())?;
        listing.array = match array_id.as_str() {
            "" => None,
            text => Some(self.find(&who, text.to_owned()).await?),
        };
        let query = move |state: &aitk_scheduler::State, now| {
            let mut bytes = 0;
            state.list(
                now,
                &listing,
                |job| who.can_see(&job.requirements.owner),
                |view| {
                    bytes += approximate_bytes(view);
                    bytes >= REPLY_BYTES
                },
            )
        };
        let page = self.0.scheduler.query(query).await?;
        Ok(Response::new(v1::ListJobsReply {
            jobs: page.jobs.into_iter().map(Into::into).collect(),
            next_page_token: page.next.map(|position| position.to_string()).unwrap_or_default(),
            total: page.total,
        }))
    }

    async fn stop(&self, request: Request<v1::StopJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let v1::StopJobRequest { job_id, now } = request.into_inner();
        let stop = |ticket, job| Event::StopRequested { ticket, job, now };
        self.change(&who, "job.stop", job_id, stop).await
    }

    async fn resume(&self, request: Request<v1::ResumeJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let resume = |ticket, job| Event::ResumeRequested { ticket, job };
        self.change(&who, "job.resume", request.into_inner().job_id, resume)
            .await
    }

    async fn pause(&self, request: Request<v1::PauseJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let pause = |ticket, job| Event::PauseRequested { ticket, job };
        self.change(&who, "job.pause", request.into_inner().job_id, pause).await
    }

    async fn save(&self, request: Request<v1::SaveJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        self.request_outputs(&who, request.into_inner().job_id, RequestedOutputs::SAVE)
            .await
    }

    async fn sample(&self, request: Request<v1::SampleJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        self.request_outputs(&who, request.into_inner().job_id, RequestedOutputs::SAMPLES)
            .await
    }

    async fn set_priority(&self, request: Request<v1::SetPriorityRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let v1::SetPriorityRequest { job_id, priority } = request.into_inner();
        let set = |ticket, job| Event::PriorityRequested { ticket, job, priority };
        self.change(&who, "job.priority", job_id, set).await
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::ForecastReply>, Status> {
        let who = caller(&request)?;
        let id = self.find(&who, request.into_inner().job_id).await?;
        let wanted = id.clone();
        let forecast = self
            .0
            .scheduler
            .query(move |state, now| state.explain_job(now, &wanted))
            .await?;
        let mut forecast = forecast.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        forecast.devices.truncate(DEVICES_SHOWN);
        Ok(Response::new(forecast.into()))
    }

    async fn fit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::ForecastReply>, Status> {
        let who = caller(&request)?;
        let mut submission = Submission::try_from(request.into_inner())?;
        // Nothing is submitted: the owner only decides whose jobs the answer may name.
        submission.owner = Some(who.owner());
        let bytes = job_size_limit::of_shared(&submission) + submission.job_json.len();
        let (parsed, submission) = self.parse_submission(submission, bytes, parse_for_fit).await?;
        let sees_all = who.role.sees_all();
        let forecast = move |state: &State, _| {
            state.check_dependencies(&parsed.after, &parsed.requirements.owner, sees_all)?;
            Ok(state.forecast_new_job(&parsed.requirements))
        };
        let forecast: Result<Forecast, Refusal> = self.0.scheduler.query(forecast).await?;
        let mut forecast = forecast.map_err(|refusal| refusal_status(&refusal))?;
        forecast.devices.truncate(DEVICES_SHOWN);
        let describe = move || {
            describe_choices(&submission, &mut forecast);
            Ok(forecast)
        };
        let forecast = self.run_parser(bytes, describe).await?;
        Ok(Response::new(forecast.into()))
    }

    async fn drain_worker(&self, request: Request<v1::DrainWorkerRequest>) -> Result<Response<v1::Worker>, Status> {
        let who = caller(&request)?;
        let v1::DrainWorkerRequest { worker, drain, now } = request.into_inner();
        let action = if drain { "worker.drain" } else { "worker.undrain" };
        let line = who.audit_line(self.0.clock.wall_time(), action, &worker);
        let drained = self.submit_event(Box::new(line), |ticket| Event::DrainRequested {
            ticket,
            worker,
            drain,
            now,
        });
        match drained.await? {
            Reply::Worker(view) => Ok(Response::new((*view).into())),
            Reply::Job(_) | Reply::Submitted(_) => Err(Status::internal(
                "the scheduler sent a reply of the wrong kind; this is a bug of the coordinator",
            )),
        }
    }

    async fn remove(&self, request: Request<v1::RemoveJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let remove = |ticket, job| Event::RemoveRequested { ticket, job };
        self.change(&who, "job.remove", request.into_inner().job_id, remove)
            .await
    }

    async fn forget_worker(&self, request: Request<v1::ForgetWorkerRequest>) -> Result<Response<v1::Worker>, Status> {
        let who = caller(&request)?;
        let worker = request.into_inner().worker;
        let line = who.audit_line(self.0.clock.wall_time(), "worker.forget", &worker);
        let forget = |ticket| Event::ForgetWorkerRequested { ticket, worker };
        let api = self.clone();
        let forget = async move {
            let guard = api.0.access.lock_registrations().await;
            match api.submit_event(Box::new(line), forget).await? {
                Reply::Worker(view) => {
                    api.0.access.remove_owner(guard, &view.id).await;
                    Ok(Response::new((*view).into()))
                }
                Reply::Job(_) | Reply::Submitted(_) => Err(Status::internal(
                    "the scheduler sent a reply of the wrong kind; this is a bug of the coordinator",
                )),
            }
        };
        run_to_end(forget).await
    }

    type EventsStream = EventStream;

    async fn events(&self, request: Request<v1::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let who = caller(&request)?;
        let v1::EventsRequest { job_id, cursor, follow } = request.into_inner();
        let job = self.find(&who, job_id).await?;
        let sought = job.clone();
        if self.0.scheduler.query(move |state, _| state.is_array(&sought)).await? {
            return Err(Status::invalid_argument(format!(
                "{job} is an array, and only its members have events; ask for the events of a member, such as {job}-0"
            )));
        }
        let (follower, receiver) = mpsc::channel(WIRE_BUFFER);
        let (end, ended) = oneshot::channel();
        let shared = self.0.clone();
        tokio::spawn(async move {
            let streamed = tokio::select! {
                streamed = stream_events(&shared, &job, cursor, follow, &follower) => streamed,
                () = shared.access.wait_until_invalid(&who) => Err(token_ended_status()),
            };
            // A follower that has gone needs no end.
            let _ = end.send(streamed);
        });
        Ok(Response::new(event_stream(receiver, ended)))
    }

    async fn artifacts(&self, request: Request<v1::ArtifactsRequest>) -> Result<Response<v1::ArtifactsReply>, Status> {
        let who = caller(&request)?;
        let v1::ArtifactsRequest { job_id, page_token } = request.into_inner();
        let job = self.find(&who, job_id).await?;
        let artifacts = self.artifacts_of(&job).await?;
        let (artifacts, next_page_token) = paginate(artifacts, &page_token, 0)?;
        Ok(Response::new(v1::ArtifactsReply {
            job_id: job.to_string(),
            artifacts,
            next_page_token,
        }))
    }

    async fn list_workers(
        &self,
        request: Request<v1::ListWorkersRequest>,
    ) -> Result<Response<v1::ListWorkersReply>, Status> {
        let who = caller(&request)?;
        let page_token = request.into_inner().page_token;
        let views = self
            .0
            .scheduler
            .query(move |state, _| state.worker_views(|job| who.can_see(&job.requirements.owner)))
            .await?;
        let (workers, next_page_token) = paginate(views, &page_token, 0)?;
        Ok(Response::new(v1::ListWorkersReply {
            workers,
            next_page_token,
        }))
    }
}

/// A page is full after this many bytes; the remaining row is far smaller than the rest of a message.
const REPLY_BYTES: usize = 4 << 20;

/// Maximum devices in a forecast, best first.
const DEVICES_SHOWN: usize = 1_000;

/// Converts a list request; also returns the array id as it was given.
fn listing(request: v1::ListJobsRequest) -> Result<(String, ListQuery), Status> {
    let text = |text: String| Some(text).filter(|text| !text.is_empty());
    let owner = text(request.owner).map(|name| UserName::parse(&name)).transpose();
    let owner = owner.map_err(|error| Status::invalid_argument(format!("owner: {error}")))?;
    let after = text(request.page_token).map(|token| token.parse()).transpose();
    let after = after.map_err(|problem: String| Status::invalid_argument(format!("page_token: {problem}")))?;
    let states: Result<_, _> = request
        .states
        .iter()
        .map(|state| {
            v1::JobState::try_from(*state)
                .ok()
                .and_then(|state| JobState::try_from(state).ok())
        })
        .map(|state| state.ok_or_else(|| Status::invalid_argument("states: not a state of a job")))
        .collect();
    let listing = ListQuery {
        all: request.all,
        limit: request.limit as usize,
        members: request.members,
        array: None,
        states: states?,
        owner,
        name: text(request.name),
        name_part: text(request.name_part),
        since: Some(UnixMillis(request.since_ms)).filter(|since| since.0 > 0),
        after,
        page: request.page_size as usize,
    };
    Ok((request.array_id, listing))
}

/// Estimates the bytes of a job in an answer.
fn approximate_bytes(view: &JobView) -> usize {
    let attempts = view
        .attempts
        .iter()
        .map(|attempt| attempt.message.len() + attempt.worker_name.len() + 200);
    view.name.len() + view.reason.len() + 300 + attempts.sum::<usize>()
}

/// Returns one page: the rows after the position in `token`, until the answer is full or has `max` rows (0: no
/// limit), and the token of the next page.
pub(super) fn paginate<T, W: From<T> + Message>(
    rows: Vec<T>,
    token: &str,
    max: u32,
) -> Result<(Vec<W>, String), Status> {
    let skip: usize = match token {
        "" => 0,
        token => token
            .parse()
            .map_err(|_| Status::invalid_argument("page_token: expected the `next_page_token` of an earlier answer"))?,
    };
    let all = rows.len();
    let (mut wire, mut bytes): (Vec<W>, _) = (Vec::new(), 0);
    for row in rows.into_iter().skip(skip) {
        if bytes >= REPLY_BYTES || (max > 0 && wire.len() >= max as usize) {
            break;
        }
        let row = W::from(row);
        bytes += encoded_len(&row);
        wire.push(row);
    }
    let next = skip.saturating_add(wire.len());
    Ok((wire, if next < all { next.to_string() } else { String::new() }))
}
