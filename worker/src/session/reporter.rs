//! How an attempt talks to the session.

use crate::outbox::Request;
use aitk_common::control::{HeldAttempt, Report, UnixMillis};
use aitk_common::id::AttemptId;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// What an attempt says.
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
    pub(crate) message: String,
}

/// Speaks for one attempt.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    held: HeldAttempt,
    session: mpsc::Sender<FromAttempt>,
}

impl Reporter {
    pub(crate) fn new(held: HeldAttempt, session: mpsc::Sender<FromAttempt>) -> Self {
        Self { held, session }
    }

    /// Whose reports these are.
    pub(crate) fn held(&self) -> &HeldAttempt {
        &self.held
    }

    /// The attempt.
    pub(crate) fn attempt(&self) -> &AttemptId {
        &self.held.attempt
    }

    /// Says something that need not arrive.
    pub(crate) async fn report(&self, report: Report) {
        let message = FromAttempt::Report {
            attempt: self.held.attempt.clone(),
            time: now(),
            report,
        };
        let _ = self.session.send(message).await;
    }

    /// A line for the job's log.
    pub(crate) async fn log(&self, level: &str, message: impl Into<String>) {
        self.report(Report::Log {
            level: level.to_owned(),
            message: message.into(),
        })
        .await;
    }

    /// The same from code that cannot wait; lost when the session is busy.
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

    /// A phase for people.
    pub(crate) async fn phase(&self, name: &str) {
        self.report(Report::Phase { name: name.to_owned() }).await;
    }

    /// Says something that must arrive, and waits until it has: through broken connections, for as long as it takes.
    /// Never returns for an attempt that is not ours any more; its task is cancelled then.
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

/// The wall clock.
fn now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMillis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
