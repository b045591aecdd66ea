//! The way to object storage as it is now: direct where we have the keys for it, else through the coordinator.
//! It comes and goes with the session; whoever wants to store something waits here until there is a way.

use aitk_common::storage::{BlobStore, ObjectBlobs, StorageError};
use aitk_proto::client::Clients;
use aitk_proto::remote_blobs::RemoteBlobs;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// The first wait between two tries; it doubles up to 32 times this. The store retries for a while by itself first.
const FIRST_WAIT: Duration = Duration::from_millis(600);

/// A way to storage.
#[derive(Clone, Debug)]
struct Way {
    store: Arc<dyn BlobStore>,
    /// Needs the coordinator.
    through_coordinator: bool,
}

/// The current way to storage, if there is one.
#[derive(Debug)]
pub(crate) struct StorageAccess {
    way: watch::Sender<Option<Way>>,
    first_wait: Duration,
}

impl StorageAccess {
    pub(crate) fn new() -> Self {
        Self {
            way: watch::Sender::new(None),
            first_wait: FIRST_WAIT,
        }
    }

    /// The session is open: storage can be reached through it, or directly at `url`.
    pub(crate) fn connected(&self, clients: &Clients, url: Option<&str>) {
        let direct = url.filter(|url| has_keys(url, |name| std::env::var_os(name).is_some()));
        let way = match direct.map(ObjectBlobs::open) {
            Some(Ok(store)) => Way {
                store: Arc::new(store),
                through_coordinator: false,
            },
            Some(Err(error)) => {
                tracing::warn!(%error, "the object storage cannot be opened from here; going through the coordinator");
                remote(clients)
            }
            None => remote(clients),
        };
        self.way.send_replace(Some(way));
    }

    /// The session broke.
    pub(crate) fn connection_lost(&self) {
        self.way
            .send_if_modified(|way| way.take_if(|way| way.through_coordinator).is_some());
    }

    /// The way, and a word that is heard when it leads nowhere any more.
    async fn get(&self) -> (Arc<dyn BlobStore>, BoxFuture<'static, ()>) {
        let mut changes = self.way.subscribe();
        let way = match changes.wait_for(Option::is_some).await {
            Ok(way) => way.clone(),
            Err(_) => None,
        };
        match way {
            Some(Way {
                store,
                through_coordinator: true,
            }) => {
                let gone = async move {
                    if changes.changed().await.is_err() {
                        std::future::pending().await
                    }
                };
                (store, Box::pin(gone))
            }
            Some(way) => (way.store, Box::pin(std::future::pending())),
            // Cannot be: the sender lives in self, and what was waited for is there.
            None => std::future::pending().await,
        }
    }

    /// Calls `work` until it succeeds, fails for good, or storage was in trouble for longer than `patience`.
    /// While there is no way to storage at all, it waits, and that time does not count: the training that hangs on
    /// it goes on, and a coordinator that is away for an hour must not cost it. What goes through a coordinator ends with the
    /// session, and begins again with the next one, which may be another coordinator's.
    pub(crate) async fn retry<'a, T>(
        &self,
        patience: Duration,
        mut work: impl FnMut(Arc<dyn BlobStore>) -> BoxFuture<'a, Result<T, StorageError>> + Send,
    ) -> Result<T, StorageError> {
        let mut spent = Duration::ZERO;
        let mut wait = self.first_wait;
        loop {
            let (store, gone) = self.get().await;
            let began = Instant::now();
            let tried = tokio::select! {
                tried = work(store) => tried,
                () = gone => continue,
            };
            let error = match tried {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            spent += began.elapsed() + wait;
            let corrupt = matches!(error, StorageError::Corrupt { .. });
            if !(error.is_transient() || corrupt) || spent > patience {
                return Err(error);
            }
            tracing::warn!(%error, "object storage is in trouble; trying again");
            sleep(wait).await;
            wait = (wait * 2).min(self.first_wait * 32);
        }
    }
}

fn remote(clients: &Clients) -> Way {
    Way {
        store: Arc::new(RemoteBlobs::new(clients)),
        through_coordinator: true,
    }
}

/// Whether our environment has what this kind of storage needs. `file://` is the coordinator's own disk, never ours.
fn has_keys(url: &str, set: impl Fn(&str) -> bool) -> bool {
    let any = |names: &[&str]| names.iter().any(|name| set(name));
    // As docs/storage.md says.
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
    fn only_a_bucket_that_we_have_keys_for_is_opened_directly() {
        let keys = |name: &str| name == "AWS_ACCESS_KEY_ID";
        assert!(has_keys("s3://bucket/x", keys));
        assert!(!has_keys("gs://bucket", keys) && !has_keys("file:///data", |_| true) && !has_keys("", |_| true));
    }

    #[tokio::test]
    async fn what_went_through_a_coordinator_that_leads_no_more_goes_through_the_next_one() {
        let access = StorageAccess::new();
        let way = |through_coordinator| Way {
            store: Arc::new(ObjectBlobs::open("memory://").unwrap()),
            through_coordinator,
        };
        access.way.send_replace(Some(way(true)));
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
        access.way.send_replace(Some(way(true)));
        storing.await.unwrap();
        assert_eq!(tries, 2);

        // One that needs no coordinator is not disturbed.
        access.way.send_replace(Some(way(false)));
        let (_, gone) = access.get().await;
        access.way.send_replace(Some(way(true)));
        assert!(tokio::time::timeout(pause, gone).await.is_err());
    }

    #[tokio::test]
    async fn trouble_is_retried_for_the_patience_and_no_way_at_all_is_waited_out() {
        let access = StorageAccess {
            first_wait: Duration::from_millis(1),
            ..StorageAccess::new()
        };
        let waiting = access.retry(Duration::ZERO, |_| Box::pin(async { Ok::<_, StorageError>(()) }));
        assert!(tokio::time::timeout(Duration::from_millis(30), waiting).await.is_err());

        let store = Arc::new(ObjectBlobs::open("memory://").unwrap());
        access.way.send_replace(Some(Way {
            store,
            through_coordinator: true,
        }));
        let trouble = move || StorageError::Unavailable {
            what: "store",
            after: Duration::ZERO,
            message: "500".into(),
        };
        let mut left = 3;
        let result = access.retry(Duration::from_secs(60), |_| {
            left -= 1;
            let answer = if left == 0 { Ok(7) } else { Err(trouble()) };
            Box::pin(async { answer })
        });
        assert_eq!(result.await.unwrap(), 7);
        let mut tries = 0;
        let patience = Duration::from_millis(60);
        let result: Result<(), _> = access
            .retry(patience, |_| {
                tries += 1;
                Box::pin(async move { Err(trouble()) })
            })
            .await;
        assert!(result.is_err() && (3..20).contains(&tries), "{tries}");
        access.connection_lost();
        assert!(access.way.borrow().is_none());
    }
}
