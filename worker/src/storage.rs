//! Access to object storage: directly if this worker has credentials for it, otherwise through the coordinator. The
//! connection changes with the session; calls wait here until there is one.

use aitk_common::storage::{BlobStore, ObjectBlobs, StorageError};
use aitk_proto::client::Clients;
use aitk_proto::remote_blobs::RemoteBlobs;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// The first delay between two tries; it doubles up to 32 times this. The store itself retries for a while first.
const FIRST_DELAY: Duration = Duration::from_millis(600);

/// A store, and how it is reached.
#[derive(Clone, Debug)]
struct StorageRoute {
    store: Arc<dyn BlobStore>,
    /// Whether requests go through the coordinator.
    through_coordinator: bool,
}

/// The store that can be used now, if there is one.
#[derive(Debug)]
pub(crate) struct StorageAccess {
    route: watch::Sender<Option<StorageRoute>>,
    first_delay: Duration,
}

impl StorageAccess {
    pub(crate) fn new() -> Self {
        Self {
            route: watch::Sender::new(None),
            first_delay: FIRST_DELAY,
        }
    }

    /// Access to this store, without a session.
    #[cfg(test)]
    pub(crate) fn with_store(store: Arc<dyn BlobStore>) -> Self {
        let access = Self::new();
        access.route.send_replace(Some(StorageRoute {
            store,
            through_coordinator: false,
        }));
        access
    }

    /// Call this when a session opens: storage can be reached through it, or directly at `url`.
    pub(crate) fn connected(&self, clients: &Clients, url: Option<&str>) {
        let direct = url.filter(|url| has_credentials(url, |name| std::env::var_os(name).is_some()));
        let route = match direct.map(ObjectBlobs::open) {
            Some(Ok(store)) => StorageRoute {
                store: Arc::new(store),
                through_coordinator: false,
            },
            Some(Err(error)) => {
                tracing::warn!(%error, "the object storage cannot be opened directly; using the coordinator instead");
                coordinator_route(clients)
            }
            None => coordinator_route(clients),
        };
        self.route.send_replace(Some(route));
    }

    /// Call this when the session ends.
    pub(crate) fn connection_lost(&self) {
        self.route
            .send_if_modified(|route| route.take_if(|route| route.through_coordinator).is_some());
    }

    /// Waits for a store. Returns it with a future that completes when the store can no longer be used.
    async fn wait_for_store(&self) -> (Arc<dyn BlobStore>, BoxFuture<'static, ()>) {
        let mut changes = self.route.subscribe();
        let route = match changes.wait_for(Option::is_some).await {
            Ok(route) => route.clone(),
            Err(_) => None,
        };
        match route {
            Some(StorageRoute {
                store,
                through_coordinator: true,
            }) => {
                let route_lost = async move {
                    if changes.changed().await.is_err() {
                        std::future::pending().await
                    }
                };
                (store, Box::pin(route_lost))
            }
            Some(route) => (route.store, Box::pin(std::future::pending())),
            // Unreachable: the sender lives in `self`, and `wait_for` waited for `Some`.
            None => std::future::pending().await,
        }
    }

    /// Calls `work` until it succeeds, fails for good, or storage has failed for longer than `timeout`. While there
    /// is no store at all, it waits, and that time does not count: the training goes on, and must not fail because a
    /// coordinator is away for an hour. A request through a coordinator is aborted when the session ends, and
    /// repeated in the next session, which may be with another coordinator.
    pub(crate) async fn retry<'a, T>(
        &self,
        timeout: Duration,
        mut work: impl FnMut(Arc<dyn BlobStore>) -> BoxFuture<'a, Result<T, StorageError>> + Send,
    ) -> Result<T, StorageError> {
        let mut spent = Duration::ZERO;
        let mut delay = self.first_delay;
        loop {
            let (store, route_lost) = self.wait_for_store().await;
            let started_at = Instant::now();
            let tried = tokio::select! {
                tried = work(store) => tried,
                () = route_lost => continue,
            };
            let error = match tried {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let elapsed = started_at.elapsed();
            let failing = match &error {
                // The work may have gone on for hours before that.
                StorageError::Unavailable { after, .. } => elapsed.min(*after),
                _ => elapsed,
            };
            spent += failing + delay;
            let corrupt = matches!(error, StorageError::Corrupt { .. });
            if !(error.is_transient() || corrupt) || spent > timeout {
                return Err(error);
            }
            tracing::warn!(%error, "object storage failed; trying again");
            sleep(delay).await;
            delay = (delay * 2).min(self.first_delay * 32);
        }
    }
}

fn coordinator_route(clients: &Clients) -> StorageRoute {
    StorageRoute {
        store: Arc::new(RemoteBlobs::new(clients)),
        through_coordinator: true,
    }
}

/// Returns whether the environment has credentials for this kind of storage. `file://` is a disk of the coordinator.
fn has_credentials(url: &str, set: impl Fn(&str) -> bool) -> bool {
    let any = |names: &[&str]| names.iter().any(|name| set(name));
    // See docs/storage.md.
    match url.split("://").next().unwrap_or_default() {
        "s3" => any(&[
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        ]),
        "gs" => any(&[
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ]),
        "az" => any(&[
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_CLIENT_ID",
        ]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_opened_directly_only_with_credentials() {
        let has_variable = |name: &str| name == "AWS_ACCESS_KEY_ID";
        assert!(has_credentials("s3://bucket/x", has_variable));
        assert!(
            !has_credentials("gs://bucket", has_variable)
                && !has_credentials("file:///data", |_| true)
                && !has_credentials("", |_| true)
        );
    }

    #[tokio::test]
    async fn a_request_through_a_lost_coordinator_is_repeated_through_the_next_one() {
        let access = StorageAccess::new();
        let route = |through_coordinator| StorageRoute {
            store: Arc::new(ObjectBlobs::open("memory://").unwrap()),
            through_coordinator,
        };
        access.route.send_replace(Some(route(true)));
        let mut tries = 0;
        let mut storing = Box::pin(access.retry(Duration::from_secs(60), |_| {
            tries += 1;
            let hangs = tries == 1;
            Box::pin(async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                Ok::<_, StorageError>(())
            })
        }));
        let pause = Duration::from_millis(30);
        assert!(tokio::time::timeout(pause, &mut storing).await.is_err());
        access.connection_lost();
        assert!(tokio::time::timeout(pause, &mut storing).await.is_err());
        access.route.send_replace(Some(route(true)));
        storing.await.unwrap();
        assert_eq!(tries, 2);

        // A direct store is not affected by the session.
        access.route.send_replace(Some(route(false)));
        let (_, route_lost) = access.wait_for_store().await;
        access.route.send_replace(Some(route(true)));
        assert!(tokio::time::timeout(pause, route_lost).await.is_err());
    }

    #[tokio::test]
    async fn errors_are_retried_for_the_timeout_and_time_without_a_store_does_not_count() {
        let access = StorageAccess {
            first_delay: Duration::from_millis(1),
            ..StorageAccess::new()
        };
        let waiting = access.retry(Duration::ZERO, |_| Box::pin(async { Ok::<_, StorageError>(()) }));
        assert!(tokio::time::timeout(Duration::from_millis(30), waiting).await.is_err());

        let store = Arc::new(ObjectBlobs::open("memory://").unwrap());
        access.route.send_replace(Some(StorageRoute {
            store,
            through_coordinator: true,
        }));
        let storage_error = move || StorageError::Unavailable {
            what: "store",
            after: Duration::ZERO,
            message: "500".into(),
        };
        let mut left = 3;
        let result = access.retry(Duration::from_secs(60), |_| {
            left -= 1;
            let answer = if left == 0 { Ok(7) } else { Err(storage_error()) };
            Box::pin(async { answer })
        });
        assert_eq!(result.await.unwrap(), 7);
        let mut tries = 0;
        let timeout = Duration::from_millis(60);
        let result: Result<(), _> = access
            .retry(timeout, |_| {
                tries += 1;
                Box::pin(async move { Err(storage_error()) })
            })
            .await;
        assert!(result.is_err() && (2..20).contains(&tries), "{tries}");

        // An error that came after work which took longer than the timeout.
        let mut tries = 0;
        let result = access.retry(timeout, |_| {
            tries += 1;
            let is_first = tries == 1;
            Box::pin(async move {
                if !is_first {
                    return Ok(());
                }
                sleep(timeout * 2).await;
                Err(storage_error())
            })
        });
        result.await.unwrap();
        assert_eq!(tries, 2);
        access.connection_lost();
        assert!(access.route.borrow().is_none());
    }
}
