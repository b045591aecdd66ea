//! Jobs, their files, and workers.

use super::arrays::new_job;
use super::auth::{caller, same_machine};
use super::follow::{FOLLOWER_TIMEOUT, WIRE_BUFFER, stream_events};
use super::{Shared, refused, store_failed, token_ended};
use crate::access::{AuditLine, Identity};
use crate::core::{Event, Reply, Ticket};
use crate::submit::{Asked, fresh_job_id, fresh_seed, wants, wants_to_fit};
use aitk_common::control::{PROTOCOL_VERSION, ServerInfo, Submission};
use aitk_common::id::{JobId, UserName};
use aitk_proto::v1::jobs_server::Jobs;
use aitk_proto::{trace, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

#[derive(Debug)]
pub(super) struct JobsApi(pub(super) Shared);

impl JobsApi {
    /// The job that this caller means, if they may see it. Others might as well not be there.
    async fn find(&self, who: &Identity, text: String) -> Result<JobId, Status> {
        self.find_if(who, text, Identity::sees).await
    }

    async fn find_if(
        &self,
        who: &Identity,
        text: String,
        may: fn(&Identity, &UserName) -> bool,
    ) -> Result<JobId, Status> {
        let who = who.clone();
        let look = move |state: &crate::core::State, _| state.find_among(&text, |job| may(&who, &job.wants.owner));
        let found = self.0.core.query(look).await?;
        found.map_err(|refusal| refused(&refusal))
    }

    /// The job that this caller means, if they may change it; a refusal is noted.
    async fn find_to_change(
        &self,
        who: &Identity,
        action: &str,
        text: String,
    ) -> Result<(JobId, Box<AuditLine>), Status> {
        let found = self.find_if(who, text.clone(), Identity::changes).await;
        let object = found.as_ref().map_or(text.as_str(), JobId::as_str);
        let mut line = who.line(self.0.clock.now(), action, object);
        match found {
            Ok(id) => Ok((id, Box::new(line))),
            Err(status) => {
                (line.done, line.detail) = (false, AuditLine::quote(status.message()));
                self.0.access.note(line);
                Err(status)
            }
        }
    }

    pub(super) async fn call(
        &self,
        line: Box<AuditLine>,
        event: impl FnOnce(Ticket) -> Event,
    ) -> Result<Reply, Status> {
        let answer = self.0.core.call(event, line).await?;
        answer.map_err(|refusal| refused(&refusal))
    }

    /// Changes a job that this caller may change.
    async fn change(
        &self,
        who: &Identity,
        action: &str,
        text: String,
        event: impl FnOnce(Ticket, String) -> Event,
    ) -> Result<Response<v1::Job>, Status> {
        let (id, line) = self.find_to_change(who, action, text).await?;
        match self.call(line, |ticket| event(ticket, id.to_string())).await? {
            Reply::Job(view) => Ok(Response::new((*view).into())),
            Reply::Submitted(_) | Reply::Worker(_) => Err(Status::internal("an answer of another kind")),
        }
    }
}

#[tonic::async_trait]
impl Jobs for JobsApi {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoReply>, Status> {
        let (workers_connected, jobs_active) = self.0.core.query(|state, _| state.counts()).await?;
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
        let trace = trace::get(request.metadata());
        let mut submission = Submission::try_from(request.into_inner())?;
        submission.owner = Some(self.owner(&who, &submission, same_machine)?);
        let asked = wants(&submission, self.0.retries).map_err(|problem| self.refuse_job(&who, problem))?;
        let asked = Asked { trace, ..asked };
        let _held = self.inputs_present(&who, &submission).await?;
        if let Some(split) = asked.split
            && let Some(array) = self.cut(&who, &asked, split, &submission).await?
        {
            return Ok(Response::new(self.submit_together(&who, array).await?.into()));
        }
        let job = new_job(&who, fresh_job_id(), fresh_seed(), asked, submission);
        let mut line = who.line(self.0.clock.now(), "job.submit", job.id.as_str());
        line.detail = AuditLine::quote(&job.name);
        let submitted = self.call(Box::new(line), |ticket| Event::JobSubmitted {
            ticket,
            job: Box::new(job),
        });
        match submitted.await? {
            Reply::Submitted(submitted) => Ok(Response::new(submitted.into())),
            Reply::Job(_) | Reply::Worker(_) => Err(Status::internal("an answer of another kind")),
        }
    }

    async fn submit_array(
        &self,
        request: Request<v1::SubmitArrayRequest>,
    ) -> Result<Response<v1::SubmitReply>, Status> {
        let who = caller(&request)?;
        let same_machine = same_machine(&request);
        let trace = trace::get(request.metadata());
        let submitted = self.take_array(&who, request.into_inner(), same_machine, trace).await?;
        Ok(Response::new(submitted.into()))
    }

    async fn get(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        let who = caller(&request)?;
        let id = self.find(&who, request.into_inner().job_id).await?;
        let wanted = id.clone();
        let look = move |state: &crate::core::State, now| {
            // An array has no config of its own: its first member's is as good as any.
            let first = state.members(&wanted).into_iter().next();
            state.job_view(now, &wanted).zip(first)
        };
        let found = self.0.core.query(look).await?;
        let (mut view, first) = found.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        if let Some(payload) = self
            .0
            .store
            .payload(&first)
            .await
            .map_err(|error| store_failed(&error))?
        {
            view.config_text = Some(payload.config_text);
            view.config_format = Some(payload.config_format);
        }
        Ok(Response::new(view.into()))
    }

    async fn list(&self, request: Request<v1::ListJobsRequest>) -> Result<Response<v1::ListJobsReply>, Status> {
        let who = caller(&request)?;
        let v1::ListJobsRequest {
            all,
            limit,
            members,
            array_id,
        } = request.into_inner();
        let array = match array_id.as_str() {
            "" => None,
            text => Some(self.find(&who, text.to_owned()).await?),
        };
        let look = move |state: &crate::core::State, now| {
            let sees = |job: &crate::core::Job| who.sees(&job.wants.owner);
            match array {
                Some(id) => state.member_views(now, &id, sees),
                None if members => state.job_views(now, all, limit as usize, sees),
                None => state.overview(now, all, limit as usize, sees),
            }
        };
        let views = self.0.core.query(look).await?;
        Ok(Response::new(v1::ListJobsReply {
            jobs: views.into_iter().map(Into::into).collect(),
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
            .core
            .query(move |state, now| state.explain_job(now, &wanted))
            .await?;
        let forecast = forecast.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        Ok(Response::new(forecast.into()))
    }

    async fn fit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::ForecastReply>, Status> {
        let who = caller(&request)?;
        let mut submission = Submission::try_from(request.into_inner())?;
        // Nothing is submitted: whose it would be only decides whose jobs are named in the answer.
        submission.owner = Some(who.owner());
        let asked = wants_to_fit(&submission, self.0.retries).map_err(Status::invalid_argument)?;
        let forecast = self.0.core.query(move |state, _| state.fit(&asked.wants)).await?;
        Ok(Response::new(forecast.into()))
    }

    async fn drain_worker(&self, request: Request<v1::DrainWorkerRequest>) -> Result<Response<v1::Worker>, Status> {
        let who = caller(&request)?;
        let v1::DrainWorkerRequest { worker, drain, now } = request.into_inner();
        let action = if drain { "worker.drain" } else { "worker.undrain" };
        let line = who.line(self.0.clock.now(), action, &worker);
        let drained = self.call(Box::new(line), |ticket| Event::DrainRequested {
            ticket,
            worker,
            drain,
            now,
        });
        match drained.await? {
            Reply::Worker(view) => Ok(Response::new((*view).into())),
            Reply::Job(_) | Reply::Submitted(_) => Err(Status::internal("an answer of another kind")),
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
        let line = who.line(self.0.clock.now(), "worker.forget", &worker);
        let forget = |ticket| Event::ForgetWorkerRequested { ticket, worker };
        match self.call(Box::new(line), forget).await? {
            Reply::Worker(view) => Ok(Response::new((*view).into())),
            Reply::Job(_) | Reply::Submitted(_) => Err(Status::internal("an answer of another kind")),
        }
    }

    type EventsStream = ReceiverStream<Result<v1::JobEvent, Status>>;

    async fn events(&self, request: Request<v1::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let who = caller(&request)?;
        let v1::EventsRequest { job_id, cursor, follow } = request.into_inner();
        let job = self.find(&who, job_id).await?;
        let sought = job.clone();
        if self.0.core.query(move |state, _| state.is_array(&sought)).await? {
            return Err(Status::invalid_argument(format!(
                "{job} is an array, whose members have their events; ask for those of a member, such as {job}-0"
            )));
        }
        let (follower, receiver) = mpsc::channel(WIRE_BUFFER);
        let shared = self.0.clone();
        tokio::spawn(async move {
            let streamed = tokio::select! {
                streamed = stream_events(&shared, &job, cursor, follow, &follower) => streamed,
                () = shared.access.ended(&who) => Err(token_ended()),
            };
            if let Err(status) = streamed {
                let _ = tokio::time::timeout(FOLLOWER_TIMEOUT, follower.send(Err(status))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn artifacts(&self, request: Request<v1::ArtifactsRequest>) -> Result<Response<v1::ArtifactsReply>, Status> {
        let who = caller(&request)?;
        let job = self.find(&who, request.into_inner().job_id).await?;
        let artifacts = self.artifacts_of(&job).await?;
        let artifacts = artifacts.into_iter().map(Into::into).collect();
        Ok(Response::new(v1::ArtifactsReply {
            job_id: job.to_string(),
            artifacts,
        }))
    }

    async fn list_workers(
        &self,
        request: Request<v1::ListWorkersRequest>,
    ) -> Result<Response<v1::ListWorkersReply>, Status> {
        let who = caller(&request)?;
        let views = self
            .0
            .core
            .query(move |state, _| state.worker_views(|job| who.sees(&job.wants.owner)))
            .await?;
        Ok(Response::new(v1::ListWorkersReply {
            workers: views.into_iter().map(Into::into).collect(),
        }))
    }
}
