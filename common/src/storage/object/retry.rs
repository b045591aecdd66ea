//! The one place where a request is tried again.

use super::StorageError;
use crate::fsutil::FsError;
use std::error::Error as StdError;
use std::fmt::Write;
use std::future::Future;
use std::time::Duration;
use tokio::time::Instant;

/// How long, and with which pauses, a request is tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    pub(super) budget: Duration,
    pub(super) first_wait: Duration,
    pub(super) longest_wait: Duration,
}

impl Retry {
    /// Runs `attempt` until it succeeds, fails for good, or the budget is used up. One attempt may take
    /// `limit`. `None` means that the object is not there.
    pub(super) async fn run<T, F, A>(
        &self,
        what: &'static str,
        limit: Duration,
        mut attempt: F,
    ) -> Result<Option<T>, StorageError>
    where
        F: FnMut() -> A,
        A: Future<Output = object_store::Result<T>>,
    {
        let begin = Instant::now();
        let mut wait = self.first_wait;
        loop {
            let left = self.budget.saturating_sub(begin.elapsed());
            let message = match tokio::time::timeout(limit.min(left), attempt()).await {
                Ok(Ok(value)) => return Ok(Some(value)),
                Ok(Err(object_store::Error::NotFound { source, .. })) if !is_missing_container(source.as_ref()) => {
                    return Ok(None);
                }
                Ok(Err(error)) => transient(what, error)?,
                Err(_) => "no answer in time".to_owned(),
            };
            let pause = jittered(wait);
            if begin.elapsed() + pause >= self.budget {
                return Err(StorageError::Unavailable {
                    what,
                    after: begin.elapsed(),
                    message,
                });
            }
            tracing::warn!(what, pause_ms = pause.as_millis(), error = %message, "object storage has trouble; trying again");
            tokio::time::sleep(pause).await;
            wait = (wait * 2).min(self.longest_wait);
        }
    }
}

/// An error that is worth another try.
pub(super) fn stalled(message: &str) -> object_store::Error {
    object_store::Error::Generic {
        store: "aitk",
        source: message.to_owned().into(),
    }
}

/// The message of an error that another try may cure; any other becomes the final error.
fn transient(what: &'static str, error: object_store::Error) -> Result<String, StorageError> {
    use object_store::Error as E;
    let message = chain(&error);
    if let Some(io) = io_error(&error) {
        return Err(FsError::new(what, "in the storage folder", io).into());
    }
    match error {
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Err(StorageError::Denied { what, message }),
        E::Generic { .. } | E::JoinError { .. } if client_error(&message).is_none() => Ok(message),
        _ => Err(StorageError::Failed { what, message }),
    }
}

/// A local file's error within a store's error. A network error is none: it comes wrapped by the HTTP client.
fn io_error(error: &object_store::Error) -> Option<std::io::Error> {
    let mut current: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = current {
        if error.is::<object_store::client::HttpError>() {
            return None;
        }
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return Some(match io.raw_os_error() {
                Some(code) => std::io::Error::from_raw_os_error(code),
                None => std::io::Error::new(io.kind(), io.to_string()),
            });
        }
        current = error.source();
    }
    None
}

/// The HTTP status of an answer that says that our request is wrong. `object_store` keeps the status to itself,
/// so it is read from its text; 408 and 429 are the server's trouble.
fn client_error(message: &str) -> Option<u16> {
    let (_, rest) = message.split_once("status code: ")?;
    let status: u16 = rest.get(..3)?.parse().ok()?;
    ((400..500).contains(&status) && status != 408 && status != 429).then_some(status)
}

/// Whether the bucket or container itself is what is missing.
fn is_missing_container(source: &(dyn StdError + 'static)) -> bool {
    let text = source.to_string();
    [
        "NoSuchBucket",
        "ContainerNotFound",
        "The specified bucket does not exist",
    ]
    .iter()
    .any(|sign| text.contains(sign))
}

/// An error and its causes on one line, each said once.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            let _ = write!(text, ": {cause_text}");
        }
        source = cause.source();
    }
    let line: Vec<&str> = text.split_whitespace().collect();
    let mut line = line.join(" ");
    if let Some((end, _)) = line.char_indices().nth(600) {
        line.truncate(end);
        line.push('…');
    }
    line
}

/// Half to all of the pause, so that many clients do not come back at the same instant.
fn jittered(wait: Duration) -> Duration {
    let random = u32::from(uuid::Uuid::new_v4().as_bytes()[0]);
    wait / 2 + (wait / 2) * random / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Retry = Retry {
        budget: Duration::from_millis(300),
        first_wait: Duration::from_millis(5),
        longest_wait: Duration::from_millis(20),
    };

    #[tokio::test]
    async fn a_hang_and_endless_errors_both_end_within_the_budget() {
        let begin = Instant::now();
        let hang = QUICK
            .run(
                "test",
                Duration::from_millis(50),
                std::future::pending::<object_store::Result<()>>,
            )
            .await;
        assert!(matches!(hang, Err(StorageError::Unavailable { .. })), "{hang:?}");
        let errors = QUICK
            .run("test", Duration::from_secs(9), || async {
                Err::<(), _>(stalled("500"))
            })
            .await;
        assert!(matches!(errors, Err(StorageError::Unavailable { .. })), "{errors:?}");
        assert!(begin.elapsed() < Duration::from_secs(2));
    }

    #[tokio::test]
    async fn what_another_try_cannot_change_is_not_tried_again() {
        let mut tries = 0;
        let result = QUICK
            .run("test", Duration::from_secs(1), || {
                tries += 1;
                let source = "denied".into();
                async {
                    Err::<(), _>(object_store::Error::PermissionDenied {
                        path: String::new(),
                        source,
                    })
                }
            })
            .await;
        assert!(
            matches!(result, Err(StorageError::Denied { .. })) && tries == 1,
            "{result:?}"
        );
        assert_eq!(client_error("… status code: 400 Bad Request: x"), Some(400));
        assert_eq!(client_error("… status code: 429 Too Many Requests"), None);
        assert_eq!(client_error("… status code: 500 x"), None);
    }
}
