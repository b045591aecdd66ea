//! Calls to a coordinator, with errors converted to [`Failure`]s with exit codes.

mod busy;
mod status;

pub use status::{is_busy, status_failure};

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::format::{printable, printable_lines};
use crate::settings::{Origin, Settings, TokenSource};
use aitk_common::control_plane::{
    Artifact, Forecast, JobEvent, JobView, NewMember, ServerInfo, Submission, SubmissionReceipt, WorkerView,
};
use aitk_common::id::JobId;
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_common::security::token::{Token, TokenError};
use aitk_common::telemetry::context::TraceContext;
use aitk_proto::client::{AuthChannel, Clients, ConnectError, addresses, connect};
use aitk_proto::v1::jobs_client::JobsClient;
use aitk_proto::{LEADER_HEADER, trace, v1};
use busy::WaitNotice;
use futures::{Stream, StreamExt};
use status::{CallFailure, SubmissionFailure, deleted_before, invalid_message, tls_hint};
use std::collections::HashSet;
use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// Timeout of a call. A coordinator that takes longer counts as unreachable.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a call is retried while another coordinator becomes leader, which takes up to ten seconds.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(20);
const FAILOVER_RETRY_DELAY: Duration = Duration::from_millis(250);
/// How long a call is retried while the coordinator is busy: as long as the upload of a blob.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest pause between two tries of such a call. The first is [`FAILOVER_RETRY_DELAY`]; each is twice the one before.
const MAX_BUSY_DELAY: Duration = Duration::from_secs(8);

type Jobs = JobsClient<AuthChannel>;

/// A connection to a coordinator.
#[derive(Clone, Debug)]
pub struct Api {
    clients: Clients,
    server: String,
    trace: Option<TraceContext>,
    wait_notice: WaitNotice,
}

impl Api {
    /// Connects with the address and token of the settings.
    ///
    /// # Errors
    /// When no server or token is set, the token file is readable by others or cannot be read, or the coordinator is
    /// unreachable.
    pub async fn from_settings(settings: &Settings) -> Result<Self, Failure> {
        let server = settings.server()?;
        let token = settings.token.as_ref().ok_or_else(|| {
            let failure = Failure::new(Exit::Unauthorised, format!("no token for {}", server.value))
                .hint("give --token-file FILE, or set AITK_TOKEN_FILE or AITK_TOKEN");
            match server.origin {
                Origin::Project(_) => {
                    failure.hint("a server from ./aitk.yaml gets no token from the settings file; set the token file in ./aitk.yaml or with a flag")
                }
                _ => failure.hint("at its first start the coordinator wrote a token to `token` in its data folder"),
            }
        })?;
        let token = match &token.value {
            TokenSource::Value(secret) => secret.expose().to_owned(),
            TokenSource::File(path) => read_token(path)?,
        };
        let ca_file: Option<PathBuf> = settings.ca_file.as_ref().map(|setting| setting.value.clone());
        let connected = Self::connect(&server.value, &token, ca_file.as_deref()).await;
        connected.map_err(|failure| match (&server.origin, failure.exit) {
            (Origin::Up(path), Exit::Unreachable) => failure.hint(format!(
                "the address comes from {}, the state file of an `aitk up` that no longer runs: start it again, or delete the file",
                path.display()
            )),
            (origin, Exit::Unreachable) => failure.hint(format!("the address comes from: {origin}")),
            _ => failure,
        })
    }

    /// Connects to an address with a token.
    ///
    /// # Errors
    /// When the address or token is malformed, or the coordinator is unreachable.
    pub async fn connect(server: &str, token: &str, ca_file: Option<&std::path::Path>) -> Result<Self, Failure> {
        let started = Instant::now();
        let connected = loop {
            match connect(server, token, ca_file).await {
                // During a failover no coordinator may be listening for a moment.
                Err(ConnectError::Unreachable { .. }) if is_shared(server) && started.elapsed() < FAILOVER_TIMEOUT => {
                    tokio::time::sleep(FAILOVER_RETRY_DELAY).await;
                }
                connected => break connected,
            }
        };
        let clients = connected.map_err(|error| {
            let exit = match &error {
                ConnectError::BadAddress { .. } | ConnectError::Plaintext { .. } => Exit::Usage,
                ConnectError::BadToken => Exit::Unauthorised,
                ConnectError::CaFile { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Exit::NotFound,
                ConnectError::CaFile { .. } | ConnectError::Tls { .. } => Exit::Failed,
                ConnectError::Unreachable { .. } | ConnectError::Untrusted { .. } => Exit::Unreachable,
            };
            let failure = Failure::new(exit, printable_lines(&error.to_string()));
            match &error {
                ConnectError::Unreachable { problem, .. } => match tls_hint(problem) {
                    Some(hint) => failure.hint(hint),
                    None => failure,
                },
                _ => failure,
            }
        })?;
        Ok(Self {
            clients,
            server: server.to_owned(),
            trace: None,
            wait_notice: WaitNotice::default(),
        })
    }

    /// Sets how the user is told, once, that a coordinator that is busy is asked again.
    #[must_use]
    pub fn with_wait_notice(mut self, print: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.wait_notice = WaitNotice::new(print);
        self
    }

    /// Tells the user, once, that a call is repeated because of this failure.
    pub(crate) fn show_wait(&self, failure: &Failure) {
        self.wait_notice.show(&failure.message);
    }

    /// Sets the parent span of submissions.
    #[must_use]
    pub fn with_trace(mut self, trace: Option<TraceContext>) -> Self {
        self.trace = trace;
        self
    }

    /// Returns the address as it was given.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Returns the generated clients, for calls about blobs.
    #[must_use]
    pub fn clients(&self) -> Clients {
        self.clients.clone()
    }

    /// Returns version and state of the coordinator.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn info(&self) -> Result<ServerInfo, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.info(request).await };
        Ok(self.call(v1::InfoRequest {}, call).await?.into())
    }

    /// Submits a job.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn submit(&self, submission: Submission) -> Result<SubmissionReceipt, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.submit(request).await };
        let reply = self.call(v1::SubmitRequest::from(submission), call).await?;
        reply.try_into().map_err(invalid_message)
    }

    /// Submits an array: its members have everything of `shared` except the JSON. `at_most` 0: no limit.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn submit_array(
        &self,
        shared: Submission,
        name: String,
        members: Vec<NewMember>,
        at_most: u32,
    ) -> Result<SubmissionReceipt, Failure> {
        let request = v1::SubmitArrayRequest {
            shared: Some(shared.into()),
            name,
            members: members.into_iter().map(Into::into).collect(),
            at_most,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.submit_array(request).await };
        let reply = self.call(request, call).await?;
        reply.try_into().map_err(invalid_message)
    }

    /// Returns a job by its id or a unique prefix of it.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn get(&self, id: &str) -> Result<JobView, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.get(request).await };
        let reply = self.call(v1::GetJobRequest { job_id: id.to_owned() }, call).await?;
        reply.try_into().map_err(invalid_message)
    }

    /// Returns the submission of a job.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn submission(&self, id: &JobId) -> Result<Submission, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.submission(request).await };
        let request = v1::GetJobRequest { job_id: id.to_string() };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Lists jobs: active ones, then ended ones; an array is one entry. `limit` 0: the coordinator's default.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn list(&self, all: bool, limit: u32) -> Result<Vec<JobView>, Failure> {
        self.list_all(v1::ListJobsRequest {
            all,
            limit,
            ..Default::default()
        })
        .await
    }

    /// Lists the members of an array, by index.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn members(&self, array: &JobId) -> Result<Vec<JobView>, Failure> {
        self.list_all(v1::ListJobsRequest {
            array_id: array.to_string(),
            ..Default::default()
        })
        .await
    }

    async fn list_all(&self, request: v1::ListJobsRequest) -> Result<Vec<JobView>, Failure> {
        Ok(self.list_jobs(request, usize::MAX).await?.0)
    }

    /// Lists at most `limit` jobs, page by page; returns them and the total number that match.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn list_jobs(
        &self,
        mut request: v1::ListJobsRequest,
        limit: usize,
    ) -> Result<(Vec<JobView>, u64), Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.list(request).await };
        let (mut jobs, mut known): (Vec<JobView>, HashSet<JobId>) = (Vec::new(), HashSet::new());
        loop {
            request.page_size = u32::try_from(limit.saturating_sub(jobs.len())).unwrap_or(0);
            let reply = self.call(request.clone(), call).await?;
            for job in reply.jobs {
                let job: JobView = job.try_into().map_err(invalid_message)?;
                // A job that changes between two calls may be on two pages.
                if jobs.len() < limit && known.insert(job.id.clone()) {
                    jobs.push(job);
                }
            }
            let total = reply.total.max(jobs.len() as u64);
            let stuck = reply.next_page_token == request.page_token;
            if jobs.len() >= limit || reply.next_page_token.is_empty() || stuck {
                return Ok((jobs, total));
            }
            request.page_token = reply.next_page_token;
        }
    }

    /// Asks a job to stop: after saving, or immediately with `now`.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn stop(&self, id: &JobId, now: bool) -> Result<JobView, Failure> {
        let request = v1::StopJobRequest {
            job_id: id.to_string(),
            now,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.stop(request).await };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Resumes a job.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn resume(&self, id: &JobId) -> Result<JobView, Failure> {
        let request = v1::ResumeJobRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.resume(request).await };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Pauses a job: it saves and waits until it is resumed.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn pause(&self, id: &JobId) -> Result<JobView, Failure> {
        let request = v1::PauseJobRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.pause(request).await };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Asks a running training for outputs: to save, or to sample.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn request_outputs(&self, id: &JobId, outputs: RequestedOutputs) -> Result<JobView, Failure> {
        let job_id = id.to_string();
        let job = if outputs.samples {
            let call = |mut jobs: Jobs, request| async move { jobs.sample(request).await };
            self.call(v1::SampleJobRequest { job_id }, call).await?
        } else {
            let call = |mut jobs: Jobs, request| async move { jobs.save(request).await };
            self.call(v1::SaveJobRequest { job_id }, call).await?
        };
        job.try_into().map_err(invalid_message)
    }

    /// Sets the priority of a job.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn set_priority(&self, id: &JobId, priority: i64) -> Result<JobView, Failure> {
        let request = v1::SetPriorityRequest {
            job_id: id.to_string(),
            priority,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.set_priority(request).await };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Returns why a job waits, device by device.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn explain(&self, id: &JobId) -> Result<Forecast, Failure> {
        let request = v1::ExplainRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.explain(request).await };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Returns where a job could run if it were submitted now. The inner error: the coordinator would refuse the submission.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn fit(&self, submission: Submission) -> Result<Result<Forecast, Failure>, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.fit(request).await };
        match self.call_with(v1::SubmitRequest::from(submission), call).await {
            Ok(reply) => reply.try_into().map(Ok).map_err(invalid_message),
            Err(problem) => match SubmissionFailure::of(problem) {
                SubmissionFailure::Refused(failure) => Ok(Err(failure)),
                SubmissionFailure::CallFailed(failure) => Err(failure),
            },
        }
    }

    /// Drains a worker, so that it gets no new work, or undrains it. `now`: its running jobs save and move to other
    /// workers.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn drain_worker(&self, worker: &str, drain: bool, now: bool) -> Result<WorkerView, Failure> {
        let request = v1::DrainWorkerRequest {
            worker: worker.to_owned(),
            drain,
            now,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.drain_worker(request).await };
        self.call(request, call).await?.try_into().map_err(invalid_message)
    }

    /// Deletes a job or an array that has ended. Returns it, or `job` if a lost try deleted it.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn remove(&self, job: &JobView) -> Result<JobView, Failure> {
        let request = v1::RemoveJobRequest {
            job_id: job.id.to_string(),
        };
        let call = |mut jobs: Jobs, request| async move { jobs.remove(request).await };
        match self.call_with(request, call).await {
            Ok(reply) => reply.try_into().map_err(invalid_message),
            Err(problem) => deleted_before(problem, Some(job.clone())),
        }
    }

    /// Deletes a worker that is not connected. Returns it, or `known`, what is known of it, if a lost try deleted it.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn forget_worker(&self, worker: &str, known: Option<WorkerView>) -> Result<WorkerView, Failure> {
        let request = v1::ForgetWorkerRequest {
            worker: worker.to_owned(),
        };
        let call = |mut jobs: Jobs, request| async move { jobs.forget_worker(request).await };
        match self.call_with(request, call).await {
            Ok(reply) => reply.try_into().map_err(invalid_message),
            Err(problem) => deleted_before(problem, known),
        }
    }

    /// Streams the events of a job after `cursor`; with `follow` until the job has ended.
    ///
    /// # Errors
    /// As [`status_failure`], for the call and for each event.
    pub async fn events(
        &self,
        id: &JobId,
        cursor: u64,
        follow: bool,
    ) -> Result<impl Stream<Item = Result<JobEvent, Failure>> + Send + Unpin + use<>, Failure> {
        let request = v1::EventsRequest {
            job_id: id.to_string(),
            cursor,
            follow,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.events(request).await };
        let stream = self.call(request, call).await?;
        let server = self.server.clone();
        Ok(stream.map(move |item| match item {
            Ok(event) => JobEvent::try_from(event).map_err(invalid_message),
            Err(status) => Err(status_failure(&server, &status)),
        }))
    }

    /// Lists the files that a job has written.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn artifacts(&self, id: &JobId) -> Result<Vec<Artifact>, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.artifacts(request).await };
        let mut request = v1::ArtifactsRequest {
            job_id: id.to_string(),
            page_token: String::new(),
        };
        let mut all = Vec::new();
        loop {
            let reply = self.call(request.clone(), call).await?;
            for artifact in reply.artifacts {
                all.push(artifact.try_into().map_err(invalid_message)?);
            }
            if reply.next_page_token.is_empty() || reply.next_page_token == request.page_token {
                return Ok(all);
            }
            request.page_token = reply.next_page_token;
        }
    }

    /// Lists workers and their devices.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn workers(&self) -> Result<Vec<WorkerView>, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.list_workers(request).await };
        let (mut request, mut all) = (v1::ListWorkersRequest::default(), Vec::new());
        loop {
            let reply = self.call(request.clone(), call).await?;
            for worker in reply.workers {
                all.push(worker.try_into().map_err(invalid_message)?);
            }
            if reply.next_page_token.is_empty() || reply.next_page_token == request.page_token {
                return Ok(all);
            }
            request.page_token = reply.next_page_token;
        }
    }

    /// Finds a job by its id, its name, or a unique prefix of its id, in this order. The coordinator does the lookup.
    ///
    /// # Errors
    /// Code 3 when there is none, code 2 when the name or prefix matches several.
    pub async fn resolve(&self, text: &str) -> Result<JobView, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.get(request).await };
        let request = v1::GetJobRequest {
            job_id: text.to_owned(),
        };
        let describe = |problem: CallFailure| match problem.code {
            Some(Code::NotFound) => Failure::not_found(format!("no job '{}' at {}", printable(text), self.server))
                .hint("`aitk ps -a` lists all jobs"),
            // The text matches several jobs.
            Some(Code::InvalidArgument) => Failure::usage(printable(&problem.answer)),
            _ => problem.failure,
        };
        let reply = self.call_with(request, call).await.map_err(describe)?;
        reply.try_into().map_err(invalid_message)
    }

    /// Makes a call, and repeats it while another coordinator becomes leader or the coordinator is busy. A try whose answer was lost may have been carried out: a
    /// second one must change nothing more. One that deletes finds nothing then, see [`deleted_before`].
    async fn call<M: Clone, T, F>(&self, message: M, call: impl Fn(Jobs, tonic::Request<M>) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let result = self.call_with(message, call).await;
        result.map_err(|problem| problem.failure)
    }

    /// As [`Self::call`], with the coordinator's answer in the error.
    async fn call_with<M: Clone, T, F>(
        &self,
        message: M,
        call: impl Fn(Jobs, tonic::Request<M>) -> F,
    ) -> Result<T, CallFailure>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let started = Instant::now();
        let (mut repeated, mut busy_delay) = (false, FAILOVER_RETRY_DELAY);
        loop {
            let mut request = tonic::Request::new(message.clone());
            trace::insert(request.metadata_mut(), self.trace);
            // Boxed: the generated futures are large.
            let called = Box::pin(call(self.clients.jobs.clone(), request));
            let Ok(answer) = tokio::time::timeout(CALL_TIMEOUT, called).await else {
                let seconds = CALL_TIMEOUT.as_secs();
                let text = format!("{} did not answer within {seconds} seconds", self.server);
                return Err(CallFailure {
                    failure: Failure::new(Exit::Unreachable, text),
                    code: None,
                    answer: String::new(),
                    repeated,
                });
            };
            let status = match answer {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) => status,
            };
            let failure = status_failure(&self.server, &status);
            // A call that the coordinator was too busy for was not carried out.
            if is_busy(&status) && started.elapsed() < BUSY_TIMEOUT {
                self.show_wait(&failure);
                tokio::time::sleep(busy_delay).await;
                busy_delay = (busy_delay * 2).min(MAX_BUSY_DELAY);
                continue;
            }
            let another = is_shared(&self.server) || status.metadata().contains_key(LEADER_HEADER);
            if failure.exit != Exit::Unreachable || !another || started.elapsed() >= FAILOVER_TIMEOUT {
                return Err(CallFailure {
                    failure,
                    code: Some(status.code()),
                    answer: status.message().to_owned(),
                    repeated,
                });
            }
            tracing::debug!(problem = status.message(), "trying again");
            repeated = true;
            tokio::time::sleep(FAILOVER_RETRY_DELAY).await;
        }
    }
}

/// Whether the address lists several coordinators.
fn is_shared(server: &str) -> bool {
    addresses(server).len() > 1
}

/// Reads a token file. Refuses a file that other users may read.
pub(crate) fn read_token(path: &std::path::Path) -> Result<String, Failure> {
    let token = Token::read(path).map_err(|error| {
        let failure = Failure::new(Exit::Unauthorised, error.to_string());
        match &error {
            TokenError::Exposed { .. } => failure,
            _ => failure.hint("set another token file with --token-file, AITK_TOKEN_FILE or a settings file"),
        }
    })?;
    Ok(token.secret().to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use aitk_common::control_plane::{JobState, UnixMillis};

    pub(crate) fn job(id: &str, name: &str, state: JobState, created: u64) -> JobView {
        JobView {
            id: JobId::new(id),
            name: name.to_owned(),
            kind: "extension".to_owned(),
            state,
            reason: String::new(),
            owner: aitk_common::id::UserName::default(),
            priority: 0,
            paused: false,
            yields: false,
            local: false,
            created: UnixMillis(created),
            started: None,
            ended: None,
            progress: None,
            phase: None,
            loss: None,
            checkpoint_step: None,
            attempts: Vec::new(),
            failures: 0,
            retries: 3,
            array: None,
            config_text: None,
            config_format: None,
        }
    }
}
