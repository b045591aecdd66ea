//! How many calls of one user are answered at once, and how much memory they may take.
//!
//! A connection carries a hundred calls, and a user may have many connections. Whoever sends large requests and never ends
//! them, or asks for large answers and never reads them, is held back by what they hold already; others are not.

use super::changes::Changes;
use crate::access::Identity;
use crate::transfers::{TransferPermit, Transfers};
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

/// Calls of one user at once, streams included; sessions of workers are not counted: many may share a token.
const CALLS: usize = 512;
/// Answers of one user, and of all, that wait to be read; each has a few MiB at the most.
const ANSWERS: (usize, usize) = (32, 128);
/// Logs that one user, and all, follow; each holds half a MiB of events at the most.
const FOLLOWERS: (usize, usize) = (256, 768);
/// Requests of one user, and of all, that are larger than [`SMALL`]; each has up to `MAX_MESSAGE_BYTES`.
const LARGE_REQUESTS: (usize, usize) = (8, 24);
/// Bytes of a request that cost nothing to have.
const SMALL: usize = 32 << 10;
/// Whoever holds as much as they may waits so long for a turn, then is told.
const TURN: Duration = Duration::from_secs(60);
/// A large request that is not there after so long is given up.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a call may hold up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A worker's session.
    Session,
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
        "Workers/Session" => Kind::Session,
        "Blobs/Put" | "Blobs/Get" => Kind::Stream,
        "Jobs/Events" => Kind::Follower,
        "Jobs/Submit" | "Jobs/SubmitArray" | "Blobs/Has" => Kind::Write,
        _ => Kind::Read,
    }
}

/// Whether a call writes a line of the audit log each time that it is carried out.
fn is_change(path: &str) -> bool {
    let name = path.strip_prefix("/aitk.v1.Jobs/");
    name.is_some_and(|name| {
        matches!(
            name,
            "Submit" | "SubmitArray" | "Stop" | "Resume" | "Pause" | "SetPriority" | "Remove"
        )
    })
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    /// By user.
    open: Arc<Mutex<HashMap<UserName, usize>>>,
    answers: Transfers,
    followers: Transfers,
    requests: Transfers,
    changes: Arc<Changes>,
    /// [`TURN`].
    patience: Duration,
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
    _open: Option<Open>,
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
            changes: Arc::default(),
            patience: TURN,
        }
    }

    /// Takes a call in; waits for a turn while its user holds as many answers as they may.
    ///
    /// # Errors
    /// When its user has too many calls already, or has made too many changes, or no turn came.
    pub(super) async fn enter(&self, who: &Identity, path: &str) -> Result<Held, Status> {
        if is_change(path) {
            self.changes.count(who, Instant::now())?;
        }
        let kind = kind_of(path);
        let open = (kind != Kind::Session).then(|| self.open(&who.name)).transpose()?;
        let answer = match kind {
            Kind::Session | Kind::Stream | Kind::Write => None,
            Kind::Follower => Some((&self.followers, FOLLOWERS.0, "logs that are followed")),
            Kind::Read => Some((&self.answers, ANSWERS.0, "answers that are not read yet")),
        };
        let answer = match answer {
            Some((answers, most, what)) => Some(turn(answers, &who.name, self.patience, (most, what)).await?),
            None => None,
        };
        Ok(Held {
            _open: open,
            _answer: answer,
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
        if matches!(kind_of(path), Kind::Session | Kind::Stream) {
            return (body, turn);
        }
        let request = Request {
            body,
            bytes: 0,
            requests: self.requests.clone(),
            patience: self.patience,
            who: who.name.clone(),
            turn: turn.clone(),
            waits: None,
            late: None,
        };
        (Body::new(request), turn)
    }
}

/// Waits for one of `most`.
///
/// # Errors
/// When none came free in time.
async fn turn(
    all: &Transfers,
    who: &UserName,
    patience: Duration,
    (most, what): (usize, &str),
) -> Result<TransferPermit, Status> {
    match tokio::time::timeout(patience, all.permit(who)).await {
        Ok(permit) => permit.map_err(|_| Status::unavailable("the coordinator is shutting down")),
        Err(_) => Err(Status::resource_exhausted(format!(
            "no turn came within {} s: user {who} may have {most} {what}, and all users together some times as many; end some, \
             and try again",
            patience.as_secs()
        ))),
    }
}

/// The turn of a large request.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn(Arc<Mutex<Option<TransferPermit>>>);

/// A frame, and the turn that it waits for.
struct Waits {
    frame: Option<Frame<Bytes>>,
    turn: BoxFuture<TransferPermit, Status>,
}

struct Request {
    body: Body,
    bytes: usize,
    requests: Transfers,
    patience: Duration,
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
            *this.turn.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(permit);
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
        let (requests, who, patience) = (this.requests.clone(), this.who.clone(), this.patience);
        this.late = Some(Box::pin(tokio::time::sleep(PATIENCE)));
        this.waits = Some(Waits {
            frame: Some(frame),
            turn: Box::pin(async move {
                turn(
                    &requests,
                    &who,
                    patience,
                    (LARGE_REQUESTS.0, "large requests under way"),
                )
                .await
            }),
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
        // Its sessions are not among its calls.
        let session = calls.enter(&eve, "/aitk.v1.Workers/Session").await.unwrap();
        while held.len() < CALLS {
            held.push(calls.enter(&eve, "/aitk.v1.Blobs/Get").await.unwrap());
        }
        let refused = calls.enter(&eve, "/aitk.v1.Jobs/Submit").await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        drop(calls.enter(&eve, "/aitk.v1.Workers/Session").await.unwrap());
        drop(session);
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
    async fn whoever_gets_no_turn_is_told() {
        let calls = Calls {
            patience: Duration::from_millis(20),
            ..Calls::new()
        };
        let eve = who("eve");
        let mut held = Vec::new();
        for _ in 0..FOLLOWERS.0 {
            held.push(calls.enter(&eve, "/aitk.v1.Jobs/Events").await.unwrap());
        }
        let told = calls.enter(&eve, "/aitk.v1.Jobs/Events").await.unwrap_err();
        assert_eq!(told.code(), tonic::Code::ResourceExhausted);
        assert!(told.message().contains("256 logs that are followed"), "{told}");
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
