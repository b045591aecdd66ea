//! Calls to a coordinator, with errors that carry our exit codes.

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::format::printable;
use crate::settings::{Origin, Settings, TokenSource};
use aitk_common::control::{
    Artifact, Forecast, JobEvent, JobView, NewMember, ServerInfo, Submission, Submitted, WorkerView,
};
use aitk_common::id::JobId;
use aitk_common::security::token::{Token, TokenError};
use aitk_common::telemetry::context::TraceContext;
use aitk_proto::client::{AuthChannel, Clients, ConnectError, addresses, connect};
use aitk_proto::v1::jobs_client::JobsClient;
use aitk_proto::{LEADER_HEADER, trace, v1};
use futures::{Stream, StreamExt};
use std::collections::HashSet;
use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// A coordinator that takes longer than this to answer a small question is as good as not there.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a call to one of several coordinators is made again while another one takes over; that takes up to ten seconds.
const TAKEOVER: Duration = Duration::from_secs(20);
const TAKEOVER_PAUSE: Duration = Duration::from_millis(250);

type Jobs = JobsClient<AuthChannel>;

/// A connection to a coordinator.
#[derive(Clone, Debug)]
pub struct Api {
    clients: Clients,
    server: String,
    trace: Option<TraceContext>,
}

impl Api {
    /// Connects with the address and token that the settings name.
    ///
    /// # Errors
    /// When no server or token is named, the token file is unsafe or unreadable, or nobody answers.
    pub async fn from_settings(settings: &Settings) -> Result<Self, Failure> {
        let server = settings.server()?;
        let token = settings.token.as_ref().ok_or_else(|| {
            let failure = Failure::new(Exit::Unauthorised, format!("no token for {}", server.value))
                .hint("give --token-file FILE, or set AITK_TOKEN_FILE or AITK_TOKEN");
            match server.origin {
                Origin::Project(_) => {
                    failure.hint("a server from ./aitk.yaml gets no token from the user file; name it there or here")
                }
                _ => failure.hint("the coordinator wrote it to `token` in its data folder when it started first"),
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
                "the address comes from {}, left by an `aitk up` that no longer runs: start it again, or delete the file",
                path.display()
            )),
            (origin, Exit::Unreachable) => failure.hint(format!("the address comes from: {origin}")),
            _ => failure,
        })
    }

    /// Connects to this address with this token.
    ///
    /// # Errors
    /// When the address or token is malformed, or nobody answers.
    pub async fn connect(server: &str, token: &str, ca_file: Option<&std::path::Path>) -> Result<Self, Failure> {
        let begun = Instant::now();
        let connected = loop {
            match connect(server, token, ca_file).await {
                // Whoever takes over closes one door and opens another.
                Err(ConnectError::Unreachable { .. }) if is_shared(server) && begun.elapsed() < TAKEOVER => {
                    tokio::time::sleep(TAKEOVER_PAUSE).await;
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
            let failure = Failure::new(exit, error.to_string());
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
        })
    }

    /// The same, and what is submitted is part of this span.
    #[must_use]
    pub fn part_of(mut self, trace: Option<TraceContext>) -> Self {
        self.trace = trace;
        self
    }

    /// The address as it was given.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The generated clients, for blobs.
    #[must_use]
    pub fn clients(&self) -> Clients {
        self.clients.clone()
    }

    /// What the coordinator says about itself.
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
    pub async fn submit(&self, submission: Submission) -> Result<Submitted, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.submit(request).await };
        let reply = self.call(v1::SubmitRequest::from(submission), call).await?;
        reply.try_into().map_err(impossible)
    }

    /// Submits an array: jobs that have everything of `shared` but their JSON. `at_most` 0: no limit.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn submit_array(
        &self,
        shared: Submission,
        name: String,
        members: Vec<NewMember>,
        at_most: u32,
    ) -> Result<Submitted, Failure> {
        let request = v1::SubmitArrayRequest {
            shared: Some(shared.into()),
            name,
            members: members.into_iter().map(Into::into).collect(),
            at_most,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.submit_array(request).await };
        let reply = self.call(request, call).await?;
        reply.try_into().map_err(impossible)
    }

    /// One job by its id or a unique beginning of it.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn get(&self, id: &str) -> Result<JobView, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.get(request).await };
        let reply = self.call(v1::GetJobRequest { job_id: id.to_owned() }, call).await?;
        reply.try_into().map_err(impossible)
    }

    /// What a job was submitted as.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn submission(&self, id: &JobId) -> Result<Submission, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.submission(request).await };
        let request = v1::GetJobRequest { job_id: id.to_string() };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Jobs: active ones, then ended ones; an array is one of them. `limit` 0 leaves it to the coordinator.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn list(&self, all: bool, limit: u32) -> Result<Vec<JobView>, Failure> {
        self.listed(v1::ListJobsRequest {
            all,
            limit,
            ..Default::default()
        })
        .await
    }

    /// The members of an array, by index.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn members(&self, array: &JobId) -> Result<Vec<JobView>, Failure> {
        self.listed(v1::ListJobsRequest {
            array_id: array.to_string(),
            ..Default::default()
        })
        .await
    }

    async fn listed(&self, request: v1::ListJobsRequest) -> Result<Vec<JobView>, Failure> {
        Ok(self.list_jobs(request, usize::MAX).await?.0)
    }

    /// The first jobs of a list, as many as are wanted, page by page; and how many fit in all.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn list_jobs(
        &self,
        mut request: v1::ListJobsRequest,
        most: usize,
    ) -> Result<(Vec<JobView>, u64), Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.list(request).await };
        let (mut jobs, mut known): (Vec<JobView>, HashSet<JobId>) = (Vec::new(), HashSet::new());
        loop {
            request.page_size = u32::try_from(most.saturating_sub(jobs.len())).unwrap_or(0);
            let reply = self.call(request.clone(), call).await?;
            for job in reply.jobs {
                let job: JobView = job.try_into().map_err(impossible)?;
                // One that changed meanwhile may be on two pages.
                if jobs.len() < most && known.insert(job.id.clone()) {
                    jobs.push(job);
                }
            }
            let total = reply.total.max(jobs.len() as u64);
            let stuck = reply.next_page_token == request.page_token;
            if jobs.len() >= most || reply.next_page_token.is_empty() || stuck {
                return Ok((jobs, total));
            }
            request.page_token = reply.next_page_token;
        }
    }

    /// Asks a job to stop: with a save, or at once.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn stop(&self, id: &JobId, now: bool) -> Result<JobView, Failure> {
        let request = v1::StopJobRequest {
            job_id: id.to_string(),
            now,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.stop(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Lets a job go on.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn resume(&self, id: &JobId) -> Result<JobView, Failure> {
        let request = v1::ResumeJobRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.resume(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Lets a job wait, saved, until it is resumed.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn pause(&self, id: &JobId) -> Result<JobView, Failure> {
        let request = v1::PauseJobRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.pause(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Gives a job another priority.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn set_priority(&self, id: &JobId, priority: i64) -> Result<JobView, Failure> {
        let request = v1::SetPriorityRequest {
            job_id: id.to_string(),
            priority,
        };
        let call = |mut jobs: Jobs, request| async move { jobs.set_priority(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Why a job waits, device by device.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn explain(&self, id: &JobId) -> Result<Forecast, Failure> {
        let request = v1::ExplainRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.explain(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Where a job could run, were it submitted now.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn fit(&self, submission: Submission) -> Result<Forecast, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.fit(request).await };
        let reply = self.call(v1::SubmitRequest::from(submission), call).await?;
        reply.try_into().map_err(impossible)
    }

    /// Lets a worker take no more work, or work again; `now`: what runs there saves and goes on elsewhere.
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
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Forgets a job or an array that has ended.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn remove(&self, id: &JobId) -> Result<JobView, Failure> {
        let request = v1::RemoveJobRequest { job_id: id.to_string() };
        let call = |mut jobs: Jobs, request| async move { jobs.remove(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Forgets a worker that is gone.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn forget_worker(&self, worker: &str) -> Result<WorkerView, Failure> {
        let request = v1::ForgetWorkerRequest {
            worker: worker.to_owned(),
        };
        let call = |mut jobs: Jobs, request| async move { jobs.forget_worker(request).await };
        self.call(request, call).await?.try_into().map_err(impossible)
    }

    /// Events of a job after `cursor`; with `follow` until the job has ended.
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
            Ok(event) => JobEvent::try_from(event).map_err(impossible),
            Err(status) => Err(status_failure(&server, &status)),
        }))
    }

    /// What a job made.
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
                all.push(artifact.try_into().map_err(impossible)?);
            }
            if reply.next_page_token.is_empty() || reply.next_page_token == request.page_token {
                return Ok(all);
            }
            request.page_token = reply.next_page_token;
        }
    }

    /// Workers and their devices.
    ///
    /// # Errors
    /// As [`status_failure`].
    pub async fn workers(&self) -> Result<Vec<WorkerView>, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.list_workers(request).await };
        let (mut request, mut all) = (v1::ListWorkersRequest::default(), Vec::new());
        loop {
            let reply = self.call(request.clone(), call).await?;
            for worker in reply.workers {
                all.push(worker.try_into().map_err(impossible)?);
            }
            if reply.next_page_token.is_empty() || reply.next_page_token == request.page_token {
                return Ok(all);
            }
            request.page_token = reply.next_page_token;
        }
    }

    /// A job by its id, its name, or a unique beginning of its id; in this order. The coordinator knows all of them, so
    /// that is where it is looked up.
    ///
    /// # Errors
    /// Code 3 when there is none, code 2 when the name or the beginning fits several.
    pub async fn resolve(&self, text: &str) -> Result<JobView, Failure> {
        let call = |mut jobs: Jobs, request| async move { jobs.get(request).await };
        let request = v1::GetJobRequest {
            job_id: text.to_owned(),
        };
        let describe = |server: &str, status: &Status| match status.code() {
            Code::NotFound => Failure::not_found(format!("no job '{}' at {server}", printable(text)))
                .hint("`aitk ps -a` lists all jobs"),
            // The text means several.
            Code::InvalidArgument => Failure::usage(printable(status.message())),
            _ => status_failure(server, status),
        };
        let reply = self.call_or(request, call, describe).await?;
        reply.try_into().map_err(impossible)
    }

    /// Makes a call; while another coordinator takes over, again: none of ours does more when it comes twice.
    async fn call<M: Clone, T, F>(&self, message: M, call: impl Fn(Jobs, tonic::Request<M>) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        self.call_or(message, call, status_failure).await
    }

    /// [`Self::call`], with errors in other words.
    async fn call_or<M: Clone, T, F>(
        &self,
        message: M,
        call: impl Fn(Jobs, tonic::Request<M>) -> F,
        describe: impl Fn(&str, &Status) -> Failure,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let begun = Instant::now();
        loop {
            let mut request = tonic::Request::new(message.clone());
            trace::insert(request.metadata_mut(), self.trace);
            // Boxed: the generated futures are large.
            let called = Box::pin(call(self.clients.jobs.clone(), request));
            let Ok(answer) = tokio::time::timeout(CALL_TIMEOUT, called).await else {
                let seconds = CALL_TIMEOUT.as_secs();
                let text = format!("{} did not answer within {seconds} seconds", self.server);
                return Err(Failure::new(Exit::Unreachable, text));
            };
            let status = match answer {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) => status,
            };
            let failure = describe(&self.server, &status);
            let another = is_shared(&self.server) || status.metadata().contains_key(LEADER_HEADER);
            if failure.exit != Exit::Unreachable || !another || begun.elapsed() >= TAKEOVER {
                return Err(failure);
            }
            tracing::debug!(problem = status.message(), "trying again");
            tokio::time::sleep(TAKEOVER_PAUSE).await;
        }
    }
}

/// Whether several coordinators share their work there.
fn is_shared(server: &str) -> bool {
    addresses(server).len() > 1
}

/// What to do about a server that our side does not speak TLS with, by the words of the TLS library.
fn tls_hint(problem: &str) -> Option<&'static str> {
    let hints = [
        (
            "InvalidContentType",
            "it may serve without TLS: write http:// before its address",
        ),
        (
            "UnknownIssuer",
            "nobody whom this machine trusts signed its certificate: use the whole token from `aitk-coordinator token create`, which names the authority, or give --ca-file FILE (the certificate itself, if it is self-made)",
        ),
        (
            "CaUsedAsEndEntity",
            "its certificate is one of a CA; make one for a server: openssl req -x509 … -addext basicConstraints=critical,CA:FALSE",
        ),
        (
            "NotValidForName",
            "its certificate is for another name: use the name that it was made for, or add this one as a subjectAltName",
        ),
    ];
    let found = hints.iter().find(|(word, _)| problem.contains(word));
    found.map(|(_, hint)| *hint)
}

/// A refusal or failure of the coordinator as one of ours.
#[must_use]
pub fn status_failure(server: &str, status: &Status) -> Failure {
    let said = status.message();
    match status.code() {
        Code::NotFound => Failure::not_found(said),
        Code::Unauthenticated | Code::PermissionDenied => Failure::new(Exit::Unauthorised, said)
            .hint("`aitk doctor` shows which token is used and where it comes from"),
        Code::Unavailable | Code::DeadlineExceeded => Failure::new(
            Exit::Unreachable,
            format!("the connection to {server} is broken: {said}"),
        )
        .hint("is the coordinator running? `aitk doctor` checks the way to it"),
        // A connection that breaks off mid-stream comes as one of these, with nothing from the server.
        Code::Unknown | Code::Cancelled if is_transport(status) => Failure::new(
            Exit::Unreachable,
            format!("the connection to {server} broke off: {said}"),
        ),
        Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => Failure::new(Exit::Conflict, said),
        Code::Unimplemented => Failure::new(
            Exit::Conflict,
            format!("{server} does not know this call; it is another version of aitk"),
        )
        .hint("`aitk doctor` shows both versions"),
        // What a server that wants TLS answers to somebody who does not begin with it.
        _ if said.contains("h2 protocol error") && !server.starts_with("https:") => Failure::new(
            Exit::Unreachable,
            format!("{server} does not answer as a coordinator does: {said}"),
        )
        .hint("it may want TLS: write https:// before its address"),
        // So it comes from a coordinator that passed the call on to a leader that died; what a server says has no source.
        Code::Internal if is_transport(status) => Failure::new(
            Exit::Unreachable,
            format!("the connection to {server} broke off: {said}"),
        ),
        _ => Failure::failed(format!("{server} answered: {said}")),
    }
}

fn is_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

fn impossible(error: aitk_proto::ConvertError) -> Failure {
    Failure::failed(format!("the coordinator sent something impossible: {error}"))
        .hint("it may be another version of aitk; `aitk doctor` shows both")
}

/// Reads a token file, refusing one that others may read.
pub(crate) fn read_token(path: &std::path::Path) -> Result<String, Failure> {
    let token = Token::read(path).map_err(|error| {
        let failure = Failure::new(Exit::Unauthorised, error.to_string());
        match &error {
            TokenError::Exposed { .. } => failure,
            _ => failure.hint("--token-file, AITK_TOKEN_FILE and the settings files may name another one"),
        }
    })?;
    Ok(token.secret().to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use aitk_common::control::{JobState, UnixMillis};

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

    #[test]
    fn what_is_wrong_with_a_certificate_has_a_way_out() {
        for (problem, part) in [
            ("invalid peer certificate: UnknownIssuer", "--ca-file"),
            (
                "invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))",
                "CA:FALSE",
            ),
            ("certificate not valid for name; NotValidForName", "subjectAltName"),
        ] {
            assert!(tls_hint(problem).unwrap().contains(part));
        }
        assert!(tls_hint("Connection refused").is_none());
        let refused = status_failure("http://h:1", &Status::internal("h2 protocol error: http2 error"));
        assert_eq!(refused.exit, Exit::Unreachable);
        assert!(refused.render(false).contains("https://"), "{}", refused.render(false));
    }

    #[test]
    fn refusals_carry_the_documented_codes() {
        for (status, exit) in [
            (Status::not_found("no job x"), Exit::NotFound),
            (Status::unauthenticated("wrong token"), Exit::Unauthorised),
            (Status::unavailable("refused"), Exit::Unreachable),
            (Status::failed_precondition("protocol 2"), Exit::Conflict),
            (Status::internal("x"), Exit::Failed),
        ] {
            assert_eq!(status_failure("http://s", &status).exit, exit);
        }
        // Not said by the coordinator, but by what is between: such a stream is taken up again.
        let mut cut = Status::internal("h2 protocol error: error reading a body from connection");
        cut.set_source(std::sync::Arc::new(std::io::Error::other("reset")));
        assert_eq!(status_failure("https://s", &cut).exit, Exit::Unreachable);
    }
}
