//! Limits the concurrent calls of each user and the memory that they take.
//!
//! A connection carries up to a hundred calls, and a user may have many connections. A client that sends large
//! requests without ending them, or asks for large answers without reading them, must wait for its own earlier calls;
//! other users are not affected.

use super::change_rate_limit::ChangeLimiter;
use super::status::busy_status;
use crate::access::Identity;
use crate::transfer_limit::{TransferLimiter, TransferPermit};
use aitk_common::id::UserName;
use http_body::{Frame, SizeHint};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Bytes};

/// Maximum concurrent calls of one user, streams included. Sessions of workers are not counted, because many may share
/// a token.
const MAX_CALLS: usize = 512;
/// Maximum unread answers per user and in total; each is a few MiB at most.
const MAX_ANSWERS: (usize, usize) = (32, 128);
/// Maximum followed logs per user and in total; each holds at most half a MiB of events.
const MAX_FOLLOWERS: (usize, usize) = (256, 768);
/// Maximum requests larger than [`SMALL`] per user and in total; each has up to `MAX_MESSAGE_BYTES`.
const MAX_LARGE_REQUESTS: (usize, usize) = (8, 24);
/// Requests up to this many bytes are not limited.
const SMALL: usize = 32 << 10;
/// How long a call waits for a permit before it fails.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a large request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// What a call holds while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A worker's session.
    Session,
    /// A stream with limits of its own.
    Stream,
    /// The event stream of a job.
    Follower,
    /// One request with a small answer.
    Write,
    /// One request with a possibly large answer.
    Read,
}

fn kind_of(path: &str) -> Kind {
    match path.strip_prefix("/aitk.v1.").unwrap_or(path) {
        "Workers/Session" => Kind::Session,
        "Blobs/Put" | "Blobs/Get" => Kind::Stream,
        "Jobs/Events" => Kind::Follower,
        "Jobs/Submit" | "Jobs/SubmitArray" | "Blobs/Has" => Kind::Write,
        _ => Kind::Read,
    }
}

/// Whether each execution of a call writes a line of the audit log.
fn is_change(path: &str) -> bool {
    let name = path.strip_prefix("/aitk.v1.Jobs/");
    name.is_some_and(|name| {
        matches!(
            name,
            "Submit" | "SubmitArray" | "Stop" | "Resume" | "Pause" | "Save" | "Sample" | "SetPriority" | "Remove"
        )
    })
}

/// Limits calls per user; see the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct CallLimiter {
    /// By user.
    open: Arc<Mutex<HashMap<UserName, usize>>>,
    answers: TransferLimiter,
    followers: TransferLimiter,
    requests: TransferLimiter,
    changes: Arc<ChangeLimiter>,
    /// How long to wait for a permit: [`PERMIT_TIMEOUT`], less in tests.
    permit_timeout: Duration,
}

/// An open call of a user; uncounted when dropped.
#[derive(Debug)]
struct OpenCall {
    calls: CallLimiter,
    who: UserName,
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let mut open = self.calls.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.who);
            }
        }
    }
}

/// Permits of a call, held until its answer was read.
#[derive(Debug)]
pub(super) struct CallPermit {
    _open: Option<OpenCall>,
    _answer: Option<TransferPermit>,
}

impl CallLimiter {
    pub(crate) fn new() -> Self {
        let of = |(each, all)| TransferLimiter::with_limits(all, each);
        Self {
            open: Arc::default(),
            answers: of(MAX_ANSWERS),
            followers: of(MAX_FOLLOWERS),
            requests: of(MAX_LARGE_REQUESTS),
            changes: Arc::default(),
            permit_timeout: PERMIT_TIMEOUT,
        }
    }

    /// Admits a call; waits for a permit if its user has the maximum number of unread answers.
    ///
    /// # Errors
    /// When its user has too many open calls or made too many changes, or no permit came in time.
    pub(super) async fn admit(&self, who: &Identity, path: &str) -> Result<CallPermit, Status> {
        if is_change(path) {
            self.changes.try_take(who, Instant::now())?;
        }
        let kind = kind_of(path);
        let open = (kind != Kind::Session).then(|| self.open_call(&who.name)).transpose()?;
        let answer = match kind {
            Kind::Session | Kind::Stream | Kind::Write => None,
            Kind::Follower => Some((&self.followers, MAX_FOLLOWERS.0, "logs that are followed")),
            Kind::Read => Some((&self.answers, MAX_ANSWERS.0, "answers that are not read yet")),
        };
        let answer = match answer {
            Some((answers, max, what)) => {
                Some(wait_for_permit(answers, &who.name, self.permit_timeout, (max, what)).await?)
            }
            None => None,
        };
        Ok(CallPermit {
            _open: open,
            _answer: answer,
        })
    }

    fn open_call(&self, who: &UserName) -> Result<OpenCall, Status> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(who.clone()).or_default();
        if *count >= MAX_CALLS {
            return Err(busy_status(format!(
                "user {who} has {count} calls open at once, which is the limit; wait for some of them to end"
            )));
        }
        *count += 1;
        Ok(OpenCall {
            calls: self.clone(),
            who: who.clone(),
        })
    }

    /// Wraps the body of a request so that it waits for a permit once it is large. The returned permit must be held
    /// until the call has been executed.
    pub(super) fn limit_body(&self, who: &Identity, path: &str, body: Body) -> (Body, RequestPermit) {
        let permit = RequestPermit::default();
        if matches!(kind_of(path), Kind::Session | Kind::Stream) {
            return (body, permit);
        }
        let request = LimitedBody {
            body,
            bytes: 0,
            requests: self.requests.clone(),
            timeout: self.permit_timeout,
            who: who.name.clone(),
            permit: permit.clone(),
            pending: None,
            deadline: None,
        };
        (Body::new(request), permit)
    }
}

/// Waits for one of `max` permits.
///
/// # Errors
/// When no permit became free in time.
async fn wait_for_permit(
    all: &TransferLimiter,
    who: &UserName,
    timeout: Duration,
    (max, what): (usize, &str),
) -> Result<TransferPermit, Status> {
    match tokio::time::timeout(timeout, all.permit(who)).await {
        Ok(permit) => permit.map_err(|_| Status::unavailable("the coordinator is shutting down")),
        Err(_) => Err(busy_status(format!(
            "no slot became free within {} s: user {who} may have {max} {what} at once, and all users together a few times as many; end some, \
             and try again",
            timeout.as_secs()
        ))),
    }
}

/// Permit of a large request; empty while the request is small.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestPermit(Arc<Mutex<Option<TransferPermit>>>);

/// A frame that waits for the permit.
struct PendingFrame {
    frame: Option<Frame<Bytes>>,
    permit: BoxFuture<TransferPermit, Status>,
}

struct LimitedBody {
    body: Body,
    bytes: usize,
    requests: TransferLimiter,
    timeout: Duration,
    who: UserName,
    permit: RequestPermit,
    pending: Option<PendingFrame>,
    /// Set once the request is large.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for LimitedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            let deadline = Status::deadline_exceeded(format!(
                "a request has to be sent within {} s",
                REQUEST_TIMEOUT.as_secs()
            ));
            return Poll::Ready(Some(Err(deadline)));
        }
        if let Some(pending) = &mut this.pending {
            let permit = ready!(pending.permit.as_mut().poll(context))?;
            *this.permit.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(permit);
            let frame = pending.frame.take();
            this.pending = None;
            return Poll::Ready(frame.map(Ok));
        }
        let frame = match ready!(Pin::new(&mut this.body).poll_frame(context)) {
            Some(Ok(frame)) => frame,
            other => return Poll::Ready(other),
        };
        this.bytes += frame.data_ref().map_or(0, Bytes::len);
        if this.bytes <= SMALL || this.deadline.is_some() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let (requests, who, timeout) = (this.requests.clone(), this.who.clone(), this.timeout);
        this.deadline = Some(Box::pin(tokio::time::sleep(REQUEST_TIMEOUT)));
        this.pending = Some(PendingFrame {
            frame: Some(frame),
            permit: Box::pin(async move {
                wait_for_permit(
                    &requests,
                    &who,
                    timeout,
                    (MAX_LARGE_REQUESTS.0, "large requests under way"),
                )
                .await
            }),
        });
        self.poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.pending.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// An answer that holds its permits until it was read.
pub(super) struct LimitedResponse {
    body: Body,
    _permit: CallPermit,
}

impl LimitedResponse {
    pub(super) fn new(body: Body, permit: CallPermit) -> Self {
        Self { body, _permit: permit }
    }
}

impl http_body::Body for LimitedResponse {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use aitk_common::security::role::Role;
    use http_body::Body as _;

    pub(in super::super) fn who(name: &str) -> Identity {
        Identity {
            name: UserName::new(name),
            role: Role::Submitter,
            by: "t1".into(),
            from: None,
            certificate: None,
        }
    }

    async fn waits<T>(future: impl Future<Output = T>) -> bool {
        tokio::time::timeout(Duration::from_millis(20), future).await.is_err()
    }

    #[tokio::test]
    async fn a_user_with_unread_answers_waits_and_others_do_not() {
        let calls = CallLimiter::new();
        let (eve, ada) = (who("eve"), who("ada"));
        let get = "/aitk.v1.Jobs/Get";
        let mut held = Vec::new();
        for _ in 0..MAX_ANSWERS.0 {
            held.push(calls.admit(&eve, get).await.unwrap());
        }
        assert!(waits(calls.admit(&eve, get)).await);
        drop(calls.admit(&eve, "/aitk.v1.Jobs/Submit").await.unwrap());
        drop(calls.admit(&ada, get).await.unwrap());
        held.pop();
        drop(calls.admit(&eve, get).await.unwrap());
        // Sessions are not counted as calls.
        let session = calls.admit(&eve, "/aitk.v1.Workers/Session").await.unwrap();
        while held.len() < MAX_CALLS {
            held.push(calls.admit(&eve, "/aitk.v1.Blobs/Get").await.unwrap());
        }
        let refused = calls.admit(&eve, "/aitk.v1.Jobs/Submit").await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        drop(calls.admit(&eve, "/aitk.v1.Workers/Session").await.unwrap());
        drop(session);
        drop(calls.admit(&ada, get).await.unwrap());
        held.clear();
        assert!(calls.open.lock().unwrap().is_empty());
    }

    /// A body of this many frames of 16 KiB.
    struct Frames(usize);

    impl http_body::Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            let frame = self.0.checked_sub(1).map(|left| {
                self.0 = left;
                Ok(Frame::data(Bytes::from_static(&[7; 16 << 10])))
            });
            Poll::Ready(frame)
        }
    }

    async fn read(body: &mut Body) -> usize {
        let mut bytes = 0;
        while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
            bytes += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        bytes
    }

    #[tokio::test]
    async fn a_call_without_a_permit_fails_with_a_message() {
        let calls = CallLimiter {
            permit_timeout: Duration::from_millis(20),
            ..CallLimiter::new()
        };
        let eve = who("eve");
        let mut held = Vec::new();
        for _ in 0..MAX_FOLLOWERS.0 {
            held.push(calls.admit(&eve, "/aitk.v1.Jobs/Events").await.unwrap());
        }
        let refused = calls.admit(&eve, "/aitk.v1.Jobs/Events").await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().contains("256 logs that are followed"), "{refused}");
        assert!(refused.metadata().contains_key(aitk_proto::RETRY_HEADER), "{refused:?}");
    }

    #[tokio::test]
    async fn large_requests_wait_for_a_permit_without_losing_data() {
        let calls = CallLimiter::new();
        let (eve, ada) = (who("eve"), who("ada"));
        let request = |who: &Identity, frames| calls.limit_body(who, "/aitk.v1.Jobs/Submit", Body::new(Frames(frames)));
        let mut held = Vec::new();
        for _ in 0..MAX_LARGE_REQUESTS.0 {
            let (mut body, permit) = request(&eve, 5);
            assert_eq!(read(&mut body).await, 5 << 14);
            held.push(permit);
        }
        let (mut body, _permit) = request(&eve, 3);
        assert!(waits(read(&mut body)).await);
        let (mut small, _permit) = request(&eve, 2);
        assert_eq!(read(&mut small).await, 2 << 14);
        let (mut other, _permit) = request(&ada, 3);
        assert_eq!(read(&mut other).await, 3 << 14);
        // The next request continues when an earlier one was executed; data read before is not lost.
        held.pop();
        assert_eq!(read(&mut body).await, 1 << 14);
    }
}
