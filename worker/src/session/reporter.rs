//! The handle through which an attempt sends messages to the session.

use crate::outbox::Request;
use aitk_common::control_plane::{AttemptRef, Report, UnixMillis};
use aitk_common::id::AttemptId;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// A message of an attempt.
pub(crate) enum FromAttempt {
    Report {
        attempt: AttemptId,
        time: UnixMillis,
        report: Report,
    },
    Request {
        attempt: AttemptId,
        request: Request,
        reply: oneshot::Sender<Answer>,
    },
}

/// The coordinator's answer to a request of an attempt that is still ours.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) accepted: bool,
    /// Not accepted because the coordinator cannot decide now: the same request may be accepted later.
    pub(crate) is_temporary: bool,
    pub(crate) message: String,
}

/// Sends the messages of one attempt.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    held: AttemptRef,
    session: mpsc::Sender<FromAttempt>,
}

impl Reporter {
    pub(crate) fn new(held: AttemptRef, session: mpsc::Sender<FromAttempt>) -> Self {
        Self { held, session }
    }

    /// The attempt and epoch that the messages are about.
    pub(crate) fn held(&self) -> &AttemptRef {
        &self.held
    }

    /// The id of the attempt.
    pub(crate) fn attempt(&self) -> &AttemptId {
        &self.held.attempt
    }

    /// Sends a report that may be lost.
    pub(crate) async fn report(&self, report: Report) {
        let message = FromAttempt::Report {
            attempt: self.held.attempt.clone(),
            time: now(),
            report,
        };
        let _ = self.session.send(message).await;
    }

    /// Sends a line for the job's log.
    pub(crate) async fn log(&self, level: &str, message: impl Into<String>) {
        self.report(Report::Log {
            level: level.to_owned(),
            message: message.into(),
        })
        .await;
    }

    /// Sends a log line from code that cannot await; it is lost when the session is busy.
    pub(crate) fn log_now(&self, level: &str, message: String) {
        let report = Report::Log {
            level: level.to_owned(),
            message,
        };
        let attempt = self.held.attempt.clone();
        let _ = self.session.try_send(FromAttempt::Report {
            attempt,
            time: now(),
            report,
        });
    }

    /// Reports the current phase, for display.
    pub(crate) async fn phase(&self, name: &str) {
        self.report(Report::Phase { name: name.to_owned() }).await;
    }

    /// Sends a request and waits for its answer, across broken connections, for as long as it takes. Never returns
    /// for a fenced attempt, whose task is cancelled.
    pub(crate) async fn request(&self, request: Request) -> Answer {
        let (reply, answer) = oneshot::channel();
        let message = FromAttempt::Request {
            attempt: self.held.attempt.clone(),
            request,
            reply,
        };
        if self.session.send(message).await.is_ok()
            && let Ok(answer) = answer.await
        {
            return answer;
        }
        std::future::pending().await
    }
}

/// The current time by the wall clock.
fn now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMillis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
