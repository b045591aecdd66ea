//! A running coordinator and its shutdown.

use super::error::RunError;
use super::local_resources::LocalResources;
use crate::store::{Store, StoreError};
use aitk_common::error_chain::error_chain;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long open calls may take to end at a shutdown; then they are cancelled.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// A running coordinator. Dropping it without [`Self::shutdown`] leaves it running until the runtime ends.
#[derive(Debug)]
pub struct CoordinatorHandle {
    /// Address of its listener.
    pub addr: SocketAddr,
    /// The administrator's token.
    pub token: String,
    /// File with the token, unless it was given in the config.
    pub token_file: Option<PathBuf>,
    /// Address of metrics and health.
    pub metrics: Option<SocketAddr>,
    /// Whether its listener uses TLS.
    pub tls: bool,
    pub(super) stop: watch::Sender<bool>,
    pub(super) server: JoinHandle<Result<(), tonic::transport::Error>>,
    pub(super) scheduler_task: JoinHandle<Result<(), StoreError>>,
    pub(super) garbage_task: JoinHandle<()>,
    pub(super) audit_task: JoinHandle<()>,
    /// Renews the listener's own certificate.
    pub(super) certificate_task: Option<JoinHandle<()>>,
    pub(super) lease_task: JoinHandle<StoreError>,
    pub(super) store: Arc<dyn Store>,
    pub(super) _local: LocalResources,
}

impl CoordinatorHandle {
    /// Returns the URL for clients on this machine.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls { "https" } else { "http" }, self.addr)
    }

    /// Waits until the coordinator fails permanently.
    pub fn wait_for_failure(&mut self) -> BoxFuture<'_, RunError> {
        // Boxed: compiled once, in this crate.
        Box::pin(self.wait_for_tasks())
    }

    async fn wait_for_tasks(&mut self) -> RunError {
        tokio::select! {
            result = &mut self.scheduler_task => match result {
                Ok(Err(error)) => RunError::Store(error),
                Ok(Ok(())) => RunError::Serve("the queue ended".into()),
                Err(error) => RunError::Serve(error.to_string()),
            },
            result = &mut self.lease_task => match result {
                Ok(error) => RunError::Store(error),
                Err(error) => RunError::Serve(error.to_string()),
            },
            result = &mut self.server => RunError::Serve(match result {
                Ok(Ok(())) => "it ended".into(),
                Ok(Err(error)) => error_chain(&error),
                Err(error) => error.to_string(),
            }),
        }
    }

    /// Ends sessions and streams, waits a few seconds for open calls, then closes the database. Acknowledged changes
    /// are already stored.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        // Boxed: compiled once, in this crate.
        Box::pin(self.end_tasks())
    }

    async fn end_tasks(mut self) {
        let _ = self.stop.send(true);
        // Stopping a collection at any point is safe: it only deleted unneeded blobs.
        self.garbage_task.abort();
        if let Some(certificate_task) = &self.certificate_task {
            certificate_task.abort();
        }
        if !finished_in_time(&mut self.server).await {
            tracing::warn!("some calls did not end in time; cancelling them");
            self.server.abort();
            finished_in_time(&mut self.server).await;
        }
        // All handles to the scheduler are dropped soon. A hanging task is aborted: its callers got no answer.
        if !finished_in_time(&mut self.scheduler_task).await {
            self.scheduler_task.abort();
            finished_in_time(&mut self.scheduler_task).await;
        }
        self.lease_task.abort();
        // Recent refusals are still written to the audit log.
        finished_in_time(&mut self.audit_task).await;
        self.store.close().await;
    }
}

/// Waits for the end of a task, up to [`SHUTDOWN_TIMEOUT`]. Returns whether it ended. A task that has already finished
/// must not be polled again, because its result may have been taken.
async fn finished_in_time<T>(task: &mut JoinHandle<T>) -> bool {
    task.is_finished() || tokio::time::timeout(SHUTDOWN_TIMEOUT, task).await.is_ok()
}
