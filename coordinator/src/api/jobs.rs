//! Jobs, their events and artifacts, workers.

use super::{Shared, refused, stopped, storage_failed, store_failed};
use crate::core::{Event, NewJob, Payload, Reply};
use crate::garbage::{Held, Named, present};
use crate::runner::full;
use crate::submit::{Asked, fresh_job_id, fresh_seed, wants};
use aitk_common::control::{EventBody, JobEvent, PROTOCOL_VERSION, ServerInfo, Submission};
use aitk_common::id::JobId;
use aitk_common::storage::StorageError;
use aitk_proto::v1;
use aitk_proto::v1::jobs_server::Jobs;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Events read from the store at a time.
const PAGE: u32 = 500;
/// Events between us and a follower's socket. A follower that reads slowly waits in its own task, nobody else does.
const WIRE_BUFFER: usize = 64;
/// A follower that takes nothing for so long is gone.
const FOLLOWER_TIMEOUT: Duration = Duration::from_secs(60);

type Follower = mpsc::Sender<Result<v1::JobEvent, Status>>;

#[derive(Debug)]
pub(super) struct JobsApi(pub(super) Shared);

impl JobsApi {
    async fn find(&self, text: String) -> Result<JobId, Status> {
        let found = self.0.core.query(move |state, _| state.find(&text)).await?;
        found.map_err(|refusal| refused(&refusal))
    }

    /// Every input is in storage, and stays until the job is stored.
    async fn inputs_present(&self, submission: &Submission) -> Result<Vec<Held>, Status> {
        let mut all = Vec::new();
        for (path, snapshot) in &submission.inputs {
            let named = Named::Snapshot(*snapshot);
            match present(&self.0.pins, self.0.blobs.as_ref(), named).await {
                Ok(held) => all.extend(held),
                Err(StorageError::NotFound { hash }) if hash == *snapshot => {
                    return Err(Status::failed_precondition(format!(
                        "inputs: the snapshot {snapshot} of {path} is not in storage; upload it first (`aitk submit` does)"
                    )));
                }
                Err(StorageError::NotFound { hash }) => {
                    return Err(Status::failed_precondition(format!(
                        "inputs: {hash}, a file of the snapshot of {path}, is not in storage; submit again, which uploads what is missing"
                    )));
                }
                Err(
                    error @ (StorageError::Malformed { .. } | StorageError::Name(_) | StorageError::TooLarge { .. }),
                ) => {
                    return Err(Status::invalid_argument(format!(
                        "inputs: {snapshot}, given for {path}, is no snapshot: {}",
                        full(&error)
                    )));
                }
                Err(error) => return Err(storage_failed(&error)),
            }
        }
        Ok(all)
    }

    async fn call(&self, event: impl FnOnce(crate::core::Ticket) -> Event) -> Result<Reply, Status> {
        self.0.core.call(event).await?.map_err(|refusal| refused(&refusal))
    }

    async fn change(&self, event: impl FnOnce(crate::core::Ticket) -> Event) -> Result<Response<v1::Job>, Status> {
        match self.call(event).await? {
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
        let peer = request.remote_addr();
        let submission = Submission::try_from(request.into_inner())?;
        if submission.local && !peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback()) {
            return Err(Status::invalid_argument(
                "a job that runs in place can only be submitted on the coordinator's own machine; use `aitk submit`",
            ));
        }
        let Asked {
            named,
            wants,
            after,
            not_before,
        } = wants(&submission, self.0.retries).map_err(Status::invalid_argument)?;
        let _held = self.inputs_present(&submission).await?;
        let job = NewJob {
            id: fresh_job_id(),
            seed: fresh_seed(),
            name: named.name,
            kind: named.kind,
            wants,
            after,
            not_before,
            local: submission.local,
            idempotency_key: submission.idempotency_key,
            payload: Arc::new(Payload {
                config_text: submission.config_text,
                config_format: submission.config_format,
                job_json: submission.job_json,
                inputs: submission.inputs,
            }),
        };
        match self
            .call(|ticket| Event::JobSubmitted {
                ticket,
                job: Box::new(job),
            })
            .await?
        {
            Reply::Submitted(submitted) => Ok(Response::new(submitted.into())),
            Reply::Job(_) | Reply::Worker(_) => Err(Status::internal("an answer of another kind")),
        }
    }

    async fn get(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        let id = self.find(request.into_inner().job_id).await?;
        let wanted = id.clone();
        let view = self
            .0
            .core
            .query(move |state, now| state.job_view(now, &wanted))
            .await?;
        let mut view = view.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        if let Some(payload) = self.0.store.payload(&id).await.map_err(|error| store_failed(&error))? {
            view.config_text = Some(payload.config_text);
            view.config_format = Some(payload.config_format);
        }
        Ok(Response::new(view.into()))
    }

    async fn list(&self, request: Request<v1::ListJobsRequest>) -> Result<Response<v1::ListJobsReply>, Status> {
        let v1::ListJobsRequest { all, limit } = request.into_inner();
        let views = self
            .0
            .core
            .query(move |state, now| state.job_views(now, all, limit as usize))
            .await?;
        Ok(Response::new(v1::ListJobsReply {
            jobs: views.into_iter().map(Into::into).collect(),
        }))
    }

    async fn stop(&self, request: Request<v1::StopJobRequest>) -> Result<Response<v1::Job>, Status> {
        let v1::StopJobRequest { job_id, now } = request.into_inner();
        self.change(|ticket| Event::StopRequested {
            ticket,
            job: job_id,
            now,
        })
        .await
    }

    async fn resume(&self, request: Request<v1::ResumeJobRequest>) -> Result<Response<v1::Job>, Status> {
        let job = request.into_inner().job_id;
        self.change(|ticket| Event::ResumeRequested { ticket, job }).await
    }

    async fn pause(&self, request: Request<v1::PauseJobRequest>) -> Result<Response<v1::Job>, Status> {
        let job = request.into_inner().job_id;
        self.change(|ticket| Event::PauseRequested { ticket, job }).await
    }

    async fn set_priority(&self, request: Request<v1::SetPriorityRequest>) -> Result<Response<v1::Job>, Status> {
        let v1::SetPriorityRequest { job_id, priority } = request.into_inner();
        self.change(|ticket| Event::PriorityRequested {
            ticket,
            job: job_id,
            priority,
        })
        .await
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::ForecastReply>, Status> {
        let id = self.find(request.into_inner().job_id).await?;
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
        let submission = Submission::try_from(request.into_inner())?;
        let asked = wants(&submission, self.0.retries).map_err(Status::invalid_argument)?;
        let forecast = self.0.core.query(move |state, _| state.fit(&asked.wants)).await?;
        Ok(Response::new(forecast.into()))
    }

    async fn drain_worker(&self, request: Request<v1::DrainWorkerRequest>) -> Result<Response<v1::Worker>, Status> {
        let v1::DrainWorkerRequest { worker, drain, now } = request.into_inner();
        let drained = self.call(|ticket| Event::DrainRequested {
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

    type EventsStream = ReceiverStream<Result<v1::JobEvent, Status>>;

    async fn events(&self, request: Request<v1::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let v1::EventsRequest { job_id, cursor, follow } = request.into_inner();
        let job = self.find(job_id).await?;
        let (follower, receiver) = mpsc::channel(WIRE_BUFFER);
        let shared = self.0.clone();
        tokio::spawn(async move {
            if let Err(status) = stream_events(&shared, &job, cursor, follow, &follower).await {
                let _ = tokio::time::timeout(FOLLOWER_TIMEOUT, follower.send(Err(status))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn artifacts(&self, request: Request<v1::ArtifactsRequest>) -> Result<Response<v1::ArtifactsReply>, Status> {
        let job = self.find(request.into_inner().job_id).await?;
        let artifacts = self
            .0
            .store
            .artifacts(&job)
            .await
            .map_err(|error| store_failed(&error))?;
        let artifacts = artifacts.into_iter().map(Into::into).collect();
        Ok(Response::new(v1::ArtifactsReply {
            job_id: job.to_string(),
            artifacts,
        }))
    }

    async fn list_workers(&self, _: Request<v1::ListWorkersRequest>) -> Result<Response<v1::ListWorkersReply>, Status> {
        let views = self.0.core.query(|state, _| state.worker_views()).await?;
        Ok(Response::new(v1::ListWorkersReply {
            workers: views.into_iter().map(Into::into).collect(),
        }))
    }
}

/// Whether the follower is still there.
async fn tell(follower: &Follower, event: JobEvent) -> bool {
    matches!(
        tokio::time::timeout(FOLLOWER_TIMEOUT, follower.send(Ok(event.into()))).await,
        Ok(Ok(()))
    )
}

/// What is stored, then what happens, without a gap and without a repetition. Ends when the job has ended.
async fn stream_events(
    shared: &Shared,
    job: &JobId,
    mut cursor: u64,
    follow: bool,
    follower: &Follower,
) -> Result<(), Status> {
    let mut stopping = shared.stopping.clone();
    // Listening before reading: what happens in between is then seen twice, and dropped by its cursor.
    let mut live = shared.core.follow(job);
    let mut told_progress = false;
    loop {
        loop {
            let page = shared
                .store
                .events(job, cursor, PAGE)
                .await
                .map_err(|error| store_failed(&error))?;
            let full_page = page.len() == PAGE as usize;
            for event in page {
                cursor = event.cursor;
                if !tell(follower, event).await {
                    return Ok(());
                }
            }
            if !full_page {
                break;
            }
        }
        // Progress is not stored: the last one is told from the state.
        let id = job.clone();
        let look = move |state: &crate::core::State, _| {
            state
                .job(&id)
                .map(|job| (job.state.is_ended(), job.cursor, job.progress))
        };
        let Some((ended, newest, progress)) = shared.core.query(look).await? else {
            return Ok(());
        };
        if let Some(progress) = progress.filter(|_| !told_progress && newest == cursor) {
            told_progress = true;
            let event = JobEvent {
                cursor,
                time: shared.clock.now(),
                attempt: None,
                body: EventBody::Progress(progress),
            };
            if !tell(follower, event).await {
                return Ok(());
            }
        }
        if newest > cursor {
            continue;
        }
        if ended || !follow {
            return Ok(());
        }
        loop {
            let event = tokio::select! {
                event = live.recv() => event,
                () = follower.closed() => return Ok(()),
                () = stopped(&mut stopping) => {
                    return Err(Status::unavailable("the coordinator shuts down; follow again from the last cursor"));
                }
            };
            let event = match event {
                Ok(event) => event,
                // Too slow for the channel: read on from the store.
                Err(RecvError::Lagged(_)) => break,
                Err(RecvError::Closed) => {
                    live = shared.core.follow(job);
                    break;
                }
            };
            let ephemeral = matches!(event.body, EventBody::Progress(_));
            if event.cursor < cursor + u64::from(!ephemeral) {
                continue;
            }
            if event.cursor > cursor + 1 {
                // A gap cannot be told; the store has what lies in it.
                break;
            }
            cursor = event.cursor;
            told_progress |= ephemeral;
            let ended = matches!(&event.body, EventBody::State { state, .. } if state.is_ended());
            if !tell(follower, (*event).clone()).await || ended {
                return Ok(());
            }
        }
    }
}
