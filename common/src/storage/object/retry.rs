//! Retries of storage requests.

use crate::fsutil::FsError;
use crate::storage::StorageError;
use std::error::Error as StdError;
use std::fmt::Write;
use std::future::Future;
use std::time::Duration;
use tokio::time::Instant;

/// The retry policy of requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    pub(super) budget: Duration,
    /// The longest time in which a request that fails by itself got no further: it was sending or receiving before.
    pub(super) stall: Duration,
    pub(super) first_delay: Duration,
    pub(super) max_delay: Duration,
}

impl Retry {
    /// Runs `attempt` until it succeeds, fails permanently, or the budget is used up. `limit` is the timeout of one attempt, which may be longer
    /// than the budget: on a slow line a part takes minutes, and its connection may break. `None` means that the object does not exist.
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
        let mut spent = Duration::ZERO;
        let mut wait = self.first_delay;
        loop {
            let begin = Instant::now();
            let message = match tokio::time::timeout(limit, attempt()).await {
                Ok(Ok(value)) => return Ok(Some(value)),
                Ok(Err(object_store::Error::NotFound { source, .. })) if !is_missing_container(source.as_ref()) => {
                    return Ok(None);
                }
                Ok(Err(error)) => {
                    let message = transient_message(what, error)?;
                    spent += begin.elapsed().min(self.stall);
                    message
                }
                Err(_) => {
                    spent += begin.elapsed();
                    "no answer in time".to_owned()
                }
            };
            let pause = jittered(wait);
            spent += pause;
            if spent >= self.budget {
                return Err(StorageError::Unavailable {
                    what,
                    after: spent,
                    message,
                });
            }
            tracing::warn!(what, pause_ms = pause.as_millis(), error = %message, "object storage failed; retrying");
            tokio::time::sleep(pause).await;
            wait = (wait * 2).min(self.max_delay);
        }
    }
}

/// A retryable error.
pub(super) fn stalled(message: &str) -> object_store::Error {
    object_store::Error::Generic {
        store: "aitk",
        source: message.to_owned().into(),
    }
}

/// Returns the message of a retryable error. Other errors become the final error.
fn transient_message(what: &'static str, error: object_store::Error) -> Result<String, StorageError> {
    use object_store::Error as E;
    let message = error_chain(&error);
    if let Some(io) = io_error(&error) {
        return Err(FsError::new(what, "in the storage folder", io).into());
    }
    match error {
        // The caller has dealt with missing objects, so this is a missing bucket.
        E::PermissionDenied { .. } | E::Unauthenticated { .. } | E::NotFound { .. } => {
            Err(StorageError::Denied { what, message })
        }
        _ if is_refused_caller(&message) => Err(StorageError::Denied { what, message }),
        E::Generic { .. } | E::JoinError { .. } if client_error_status(&message).is_none() => Ok(message),
        _ => Err(StorageError::Failed { what, message }),
    }
}

/// Finds the error of a local file within a store's error. Network errors, which are wrapped by the HTTP client, do not count.
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

/// Parses the HTTP status of a permanent client error from the message, because `object_store` does not expose it. 408 and 429
/// are retryable, and so is 400 with the code by which S3 says 408: a body stalled.
fn client_error_status(message: &str) -> Option<u16> {
    let (_, rest) = message.split_once("status code: ")?;
    let status: u16 = rest.get(..3)?.parse().ok()?;
    let is_stalled = status == 408 || rest.contains("<Code>RequestTimeout</Code>");
    ((400..500).contains(&status) && !is_stalled && status != 429).then_some(status)
}

/// Whether a client error says that the credentials are wrong. S3 has the status 400 for those that have expired. The answer to a `HEAD` has
/// no body, and the request itself is always well formed, so such an answer with 400 is about the credentials too.
fn is_refused_caller(message: &str) -> bool {
    const CODES: [&str; 5] = [
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "InvalidAccessKeyId",
        "AuthorizationHeaderMalformed",
    ];
    let Some(status) = client_error_status(message) else {
        return false;
    };
    let has_code = |code: &&str| message.contains(&format!("<Code>{code}</Code>"));
    CODES.iter().any(has_code) || (status == 400 && message.ends_with("400 Bad Request:"))
}

/// Whether the bucket or container itself does not exist.
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

/// Formats an error and its causes on one line, without repetitions.
fn error_chain(error: &dyn StdError) -> String {
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

/// A random pause between half of `wait` and `wait`, so that clients do not retry at the same time.
fn jittered(wait: Duration) -> Duration {
    let random = u32::from(uuid::Uuid::new_v4().as_bytes()[0]);
    wait / 2 + (wait / 2) * random / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Retry = Retry {
        budget: Duration::from_millis(300),
        stall: Duration::from_millis(20),
        first_delay: Duration::from_millis(5),
        max_delay: Duration::from_millis(20),
    };

    #[tokio::test]
    async fn hangs_and_repeated_errors_end_as_unavailable() {
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
    }

    /// Before, a part that took longer than the budget was given up at the first break of its connection, or in the middle.
    #[tokio::test]
    async fn an_attempt_that_sends_for_longer_than_the_budget_is_retried() {
        let mut tries = 0;
        let result = QUICK
            .run("test", Duration::from_secs(60), || {
                tries += 1;
                let is_last = tries == 3;
                async move {
                    tokio::time::sleep(QUICK.budget * 2).await;
                    if is_last { Ok(7) } else { Err(stalled("broken")) }
                }
            })
            .await;
        assert!(matches!(result, Ok(Some(7))) && tries == 3, "{result:?} {tries}");
        // One that does not answer for longer than the budget is not.
        let mut tries = 0;
        let result = QUICK
            .run("test", QUICK.budget * 2, || {
                tries += 1;
                std::future::pending::<object_store::Result<()>>()
            })
            .await;
        assert!(
            matches!(result, Err(StorageError::Unavailable { .. })) && tries == 1,
            "{result:?} {tries}"
        );
    }

    #[tokio::test]
    async fn permanent_errors_are_not_retried() {
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
        assert_eq!(client_error_status("… status code: 400 Bad Request: x"), Some(400));
        assert_eq!(client_error_status("… status code: 429 Too Many Requests"), None);
        let stalled =
            "… status code: 400 Bad Request: <Error><Code>RequestTimeout</Code><Message>Your socket connection";
        assert_eq!(client_error_status(stalled), None);
        assert_eq!(client_error_status("… status code: 500 x"), None);
    }

    #[test]
    fn expired_credentials_are_wrong_credentials() {
        let expired = "… status code: 400 Bad Request: <Error><Code>ExpiredToken</Code></Error>";
        assert!(is_refused_caller(expired) && is_refused_caller("… status code: 400 Bad Request:"));
        let wrong_request = "… status code: 400 Bad Request: <Error><Code>EntityTooLarge</Code></Error>";
        assert!(!is_refused_caller(wrong_request));
        assert!(!is_refused_caller(
            "… status code: 500 Internal Server Error: ExpiredToken"
        ));
    }
}
