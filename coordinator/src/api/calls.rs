//! How many calls of one user are answered at once, and how much memory they may take.
//!
//! A connection carries a hundred calls, and a user may have many connections. Whoever sends large requests and never ends
//! them, or asks for large answers and never reads them, is held back by what they hold already; others are not.

use crate::access::Identity;
use crate::transfers::{TransferPermit, Transfers};
use aitk_common::id::UserName;
use http_body::{Frame, SizeHint};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Bytes};

/// Calls of one user at once, streams included.
const CALLS: usize = 512;
/// Answers of one user, and of all, that wait to be read; each has a few MiB at the most.
const ANSWERS: (usize, usize) = (32, 128);
/// Logs that one user, and all, follow; each holds a page of events.
const FOLLOWERS: (usize, usize) = (64, 256);
/// Requests of one user, and of all, that are larger than [`SMALL`]; each has up to `MAX_MESSAGE_BYTES`.
const LARGE_REQUESTS: (usize, usize) = (8, 24);
/// Bytes of a request that cost nothing to have.
const SMALL: usize = 32 << 10;
/// A large request that is not there after so long is given up.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a call may hold up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A stream that has limits of its own.
    Stream,
    /// The events of a job.
    Follower,
    /// One request, and an answer of a few bytes.
    Write,
    /// One request, and an answer that may be large.
    Read,
}

fn kind_of(path: &str) -> Kind {
    match path.strip_prefix("/aitk.v1.").unwrap_or(path) {
        "Workers/Session" | "Blobs/Put" | "Blobs/Get" => Kind::Stream,
        "Jobs/Events" => Kind::Follower,
        "Jobs/Submit" | "Jobs/SubmitArray" | "Blobs/Has" => Kind::Write,
        _ => Kind::Read,
    }
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    /// By user.
    open: Arc<Mutex<HashMap<UserName, usize>>>,
    answers: Transfers,
    followers: Transfers,
    requests: Transfers,
}

/// One call among its user's.
#[derive(Debug)]
struct Open {
    calls: Calls,
    who: UserName,
}

impl Drop for Open {
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

/// What is held until the answer was read.
#[derive(Debug)]
pub(super) struct Held {
    _open: Open,
    _answer: Option<TransferPermit>,
}

impl Calls {
    pub(crate) fn new() -> Self {
        let of = |(each, all)| Transfers::with(all, each);
        Self {
            open: Arc::default(),
            answers: of(ANSWERS),
            followers: of(FOLLOWERS),
            requests: of(LARGE_REQUESTS),
        }
    }

    /// Takes a call in; waits while its user holds too many answers.
    ///
    /// # Errors
    /// When its user has too many calls already.
    pub(super) async fn enter(&self, who: &Identity, path: &str) -> Result<Held, Status> {
        let open = self.open(&who.name)?;
        let answer = match kind_of(path) {
            Kind::Stream | Kind::Write => None,
            Kind::Follower => Some(&self.followers),
            Kind::Read => Some(&self.answers),
        };
        let answer = match answer {
            Some(answers) => Some(answers.permit(&who.name).await),
            None => None,
        };
        let answer = answer.transpose();
        Ok(Held {
            _open: open,
            _answer: answer.map_err(|_| Status::unavailable("the coordinator is shutting down"))?,
        })
    }

    fn open(&self, who: &UserName) -> Result<Open, Status> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(who.clone()).or_default();
        if *count >= CALLS {
            return Err(Status::resource_exhausted(format!(
                "user {who} has {count} calls open at once, which is the limit; wait for some of them to end"
            )));
        }
        *count += 1;
        Ok(Open {
            calls: self.clone(),
            who: who.clone(),
        })
    }

    /// The body of a request, which waits for a turn once it is large; and what to hold until the call has been carried out.
    pub(super) fn request(&self, who: &Identity, path: &str, body: Body) -> (Body, Turn) {
        let turn = Turn::default();
        if kind_of(path) == Kind::Stream {
            return (body, turn);
        }
        let request = Request {
            body,
            bytes: 0,
            requests: self.requests.clone(),
            who: who.name.clone(),
            turn: turn.clone(),
            waits: None,
            late: None,
        };
        (Body::new(request), turn)
    }
}

/// The turn of a large request.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn(Arc<Mutex<Option<TransferPermit>>>);

/// A frame, and the turn that it waits for.
struct Waits {
    frame: Option<Frame<Bytes>>,
    turn: BoxFuture<Option<TransferPermit>, Status>,
}

struct Request {
    body: Body,
    bytes: usize,
    requests: Transfers,
    who: UserName,
    turn: Turn,
    waits: Option<Waits>,
    /// Set once it is large.
    late: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for Request {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if let Some(late) = &mut this.late
            && late.as_mut().poll(context).is_ready()
        {
            let late = Status::deadline_exceeded(format!("a request has to be sent within {} s", PATIENCE.as_secs()));
            return Poll::Ready(Some(Err(late)));
        }
        if let Some(waits) = &mut this.waits {
            let permit = ready!(waits.turn.as_mut().poll(context))?;
            *this.turn.0.lock().unwrap_or_else(PoisonError::into_inner) = permit;
            let frame = waits.frame.take();
            this.waits = None;
            return Poll::Ready(frame.map(Ok));
        }
        let frame = match ready!(Pin::new(&mut this.body).poll_frame(context)) {
            Some(Ok(frame)) => frame,
            other => return Poll::Ready(other),
        };
        this.bytes += frame.data_ref().map_or(0, Bytes::len);
        if this.bytes <= SMALL || this.late.is_some() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let (requests, who) = (this.requests.clone(), this.who.clone());
        this.late = Some(Box::pin(tokio::time::sleep(PATIENCE)));
        this.waits = Some(Waits {
            frame: Some(frame),
            turn: Box::pin(async move { Ok(requests.permit(&who).await.ok()) }),
        });
        self.poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.waits.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// An answer that holds what it took until it was read.
pub(super) struct Answer {
    body: Body,
    _held: Held,
}

impl Answer {
    pub(super) fn new(body: Body, held: Held) -> Self {
        Self { body, _held: held }
    }
}

impl http_body::Body for Answer {
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
mod tests {
    use super::*;
    use aitk_common::security::role::Role;
    use http_body::Body as _;

    fn who(name: &str) -> Identity {
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
    async fn who_reads_no_answers_waits_and_others_do_not() {
        let calls = Calls::new();
        let (eve, ada) = (who("eve"), who("ada"));
        let get = "/aitk.v1.Jobs/Get";
        let mut held = Vec::new();
        for _ in 0..ANSWERS.0 {
            held.push(calls.enter(&eve, get).await.unwrap());
        }
        assert!(waits(calls.enter(&eve, get)).await);
        drop(calls.enter(&eve, "/aitk.v1.Jobs/Submit").await.unwrap());
        drop(calls.enter(&ada, get).await.unwrap());
        held.pop();
        drop(calls.enter(&eve, get).await.unwrap());
        while held.len() < CALLS {
            held.push(calls.enter(&eve, "/aitk.v1.Blobs/Get").await.unwrap());
        }
        let refused = calls.enter(&eve, "/aitk.v1.Jobs/Submit").await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        drop(calls.enter(&ada, get).await.unwrap());
        held.clear();
        assert!(calls.open.lock().unwrap().is_empty());
    }

    /// A body of so many frames of 16 KiB.
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
    async fn large_requests_take_turns_and_lose_nothing() {
        let calls = Calls::new();
        let (eve, ada) = (who("eve"), who("ada"));
        let request = |who: &Identity, frames| calls.request(who, "/aitk.v1.Jobs/Submit", Body::new(Frames(frames)));
        let mut held = Vec::new();
        for _ in 0..LARGE_REQUESTS.0 {
            let (mut body, turn) = request(&eve, 5);
            assert_eq!(read(&mut body).await, 5 << 14);
            held.push(turn);
        }
        let (mut body, _turn) = request(&eve, 3);
        assert!(waits(read(&mut body)).await);
        let (mut small, _turn) = request(&eve, 2);
        assert_eq!(read(&mut small).await, 2 << 14);
        let (mut other, _turn) = request(&ada, 3);
        assert_eq!(read(&mut other).await, 3 << 14);
        // Its turn comes when a request of hers has been carried out; what was read before is not lost.
        held.pop();
        assert_eq!(read(&mut body).await, 1 << 14);
    }
}
