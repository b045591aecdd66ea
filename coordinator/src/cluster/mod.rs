//! High availability: of several coordinators on one database, one leads; the others stand by and take over within
//! seconds.
//!
//! A standby coordinator answers too: it forwards users' calls to the leader (see [`forward`]), so its answers are
//! never older than the leader's, and clients can use any address. Workers connect to the leader directly.

mod forward;
mod health;

use crate::address::ClientAddress;
use crate::config::{Cluster, Config};
use crate::connection_limiter::ConnectionLimiter;
use crate::pki::Tls;
use crate::server::{
    CoordinatorHandle, FIRST_CALL_TIMEOUT, LocalResources, MAX_UNAUTHENTICATED, RunError, StartError, listen,
    listen_for_metrics, server_builder, start_leading,
};
use crate::store::StandbyCoordinator;
use crate::store::leader_lease::{Candidate, Leader, RENEW_INTERVAL};
use crate::store::{SqlStore, StoreError};
use aitk_common::hash::ContentHash;
use aitk_common::security::ca::CERT_FILE;
use aitk_proto::client;
use forward::{Forward, Upstream};
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

/// How long forwarded calls may take to end when this coordinator becomes the leader; then they are cancelled.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of warnings that the database does not answer.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// One of several coordinators on the same database.
pub struct ClusterNode {
    config: Config,
    cluster: Cluster,
    local: LocalResources,
    standby: StandbyCoordinator,
    candidate: Candidate,
}

impl std::fmt::Debug for ClusterNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterNode")
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

impl ClusterNode {
    /// Checks the config and locks the data folder.
    ///
    /// # Errors
    /// [`StartError`]; among others when the database or the shared storage is missing.
    pub fn prepare(config: Config) -> Result<Self, StartError> {
        let missing = |missing| StartError::Cluster { missing };
        let mut cluster = config.cluster.clone().ok_or_else(|| missing("an address"))?;
        let database = config
            .database
            .as_ref()
            .ok_or_else(|| missing("--database postgres://…"))?;
        if config.storage_url.is_none() {
            return Err(missing(
                "--storage, the same for all: a bucket, or a folder that all of them see",
            ));
        }
        // Coordinators with a certificate authority share it.
        if cluster.ca_file.is_none() && config.tls.is_none() {
            cluster.ca_file = config.pki.as_ref().map(|pki| pki.folder.join(CERT_FILE));
        }
        client::connect_lazily(&cluster.address, cluster.ca_file.as_deref())
            .map_err(|error| StartError::Advertise(error.to_string()))?;
        let standby = StandbyCoordinator::new(database)?;
        let local = LocalResources::prepare(&config)?;
        let candidate = Candidate {
            address: Some(cluster.address.clone()),
            token: ContentHash::of(local.token.secret().as_bytes()),
            storage: local.storage_url.trim_end_matches('/').to_owned(),
        };
        Ok(Self {
            config,
            cluster,
            local,
            standby,
            candidate,
        })
    }

    /// Stands by, leads, and stands by again after another coordinator took over, until `stopping` turns true.
    ///
    /// # Errors
    /// [`StartError`] when it cannot listen or differs from the leader's config; [`RunError`] inside [`ClusterNodeError`]
    /// when leading ended for another reason than a new leader.
    pub fn run(self, stopping: watch::Receiver<bool>) -> BoxFuture<'static, Result<(), ClusterNodeError>> {
        // Boxed: compiled once, in this crate.
        Box::pin(self.stand_by_and_lead(stopping))
    }

    async fn stand_by_and_lead(self, mut stopping: watch::Receiver<bool>) -> Result<(), ClusterNodeError> {
        loop {
            let Some(store) = Box::pin(self.stand_by(&mut stopping)).await? else {
                return Ok(());
            };
            tracing::info!(address = self.cluster.address, "this coordinator leads");
            let mut running = Box::pin(start_leading(self.config.clone(), &self.local, store)).await?;
            let failure = tokio::select! {
                failure = running.wait_for_failure() => Some(failure),
                _ = stopping.wait_for(|stop| *stop) => None,
            };
            let Some(failure) = failure else {
                running.shutdown().await;
                return Ok(());
            };
            self.step_down(running, failure).await?;
        }
    }

    async fn step_down(&self, running: CoordinatorHandle, failure: RunError) -> Result<(), ClusterNodeError> {
        match failure {
            RunError::Store(StoreError::Superseded { .. } | StoreError::LeaseLost | StoreError::Failed { .. }) => {
                tracing::warn!(error = %failure, cause = ?std::error::Error::source(&failure).map(ToString::to_string), "this coordinator does not lead any more; it stands by");
                running.shutdown().await;
                Ok(())
            }
            other => {
                running.shutdown().await;
                Err(other.into())
            }
        }
    }

    /// Forwards calls until this coordinator leads; then returns its store. `None` at shutdown.
    async fn stand_by(&self, stopping: &mut watch::Receiver<bool>) -> Result<Option<SqlStore>, ClusterNodeError> {
        let (leader_sender, leader) = watch::channel(None);
        let (end, ended) = watch::channel(false);
        let (listener, addr) = listen(self.config.bind).await?;
        ClientAddress::of(&self.config, addr).write(&self.local.data_dir);
        let mut health = None;
        if let Some(listener) = listen_for_metrics(self.config.metrics).await? {
            health = Some(tokio::spawn(health::serve(listener, leader.clone(), ended.clone())));
        }
        let mut shutdown = ended;
        let shutdown = async move {
            let _ = shutdown.wait_for(|stop| *stop).await;
        };
        let limiter = ConnectionLimiter::new(FIRST_CALL_TIMEOUT, MAX_UNAUTHENTICATED);
        let routes = axum::Router::new().fallback_service(Forward::new(leader, limiter.clone()));
        let router = server_builder().add_routes(tonic::service::Routes::from(routes));
        let (serving, certificate_task): (BoxFuture<'static, _>, _) =
            match Tls::open(self.config.tls.as_ref(), self.config.pki.as_ref(), addr).map_err(StartError::from)? {
                None => {
                    let incoming = limiter.incoming(listener);
                    (Box::pin(router.serve_with_incoming_shutdown(incoming, shutdown)), None)
                }
                Some(tls) => {
                    let refused = |from, problem: &str| tracing::info!(%from, problem, "a certificate was refused");
                    let (incoming, certificate_task) = tls.accept(limiter, listener, refused);
                    (
                        Box::pin(router.serve_with_incoming_shutdown(incoming, shutdown)),
                        certificate_task,
                    )
                }
            };
        let mut serving = tokio::spawn(serving);
        tracing::info!(%addr, "this coordinator stands by");
        let found = tokio::select! {
            found = self.wait_for_leadership(&leader_sender) => found.map(Some).map_err(ClusterNodeError::from),
            _ = stopping.wait_for(|stop| *stop) => Ok(None),
            result = &mut serving => Err(RunError::Serve(format!("{result:?}")).into()),
        };
        // The address must be free for the leader's listener.
        let _ = end.send(true);
        if let Some(certificate_task) = certificate_task {
            certificate_task.abort();
        }
        if !serving.is_finished() && tokio::time::timeout(HANDOVER_TIMEOUT, &mut serving).await.is_err() {
            serving.abort();
            let _ = serving.await;
        }
        if let Some(mut health) = health
            && tokio::time::timeout(HANDOVER_TIMEOUT, &mut health).await.is_err()
        {
            health.abort();
            let _ = health.await;
        }
        found
    }

    async fn wait_for_leadership(
        &self,
        leader_sender: &watch::Sender<Option<Arc<Upstream>>>,
    ) -> Result<SqlStore, StartError> {
        let mut ticks = tokio::time::interval(RENEW_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut warned_at: Option<Instant> = None;
        loop {
            ticks.tick().await;
            let attempt = match self.standby.leader().await {
                Ok(Some(leader)) => {
                    self.follow(leader_sender, leader)?;
                    continue;
                }
                Ok(None) => self.standby.try_lead(&self.candidate).await,
                Err(error) => Err(error),
            };
            match attempt {
                Ok(Some(store)) => return Ok(store),
                // Another coordinator was faster, or still holds the lock.
                Ok(None) => {}
                Err(error) => {
                    leader_sender.send_replace(None);
                    if warned_at.is_none_or(|at| at.elapsed() > WARN_INTERVAL) {
                        tracing::warn!(error = %aitk_common::error_chain::error_chain(&error), "cannot find out which coordinator leads; trying again");
                        warned_at = Some(Instant::now());
                    }
                }
            }
        }
    }

    /// Forwards calls to this leader from now on.
    fn follow(&self, leader_sender: &watch::Sender<Option<Arc<Upstream>>>, leader: Leader) -> Result<(), StartError> {
        let known = leader_sender
            .borrow()
            .as_ref()
            .is_some_and(|upstream| upstream.epoch == leader.epoch);
        if known {
            return Ok(());
        }
        let Some(address) = leader.address.clone() else {
            tracing::warn!(
                "a coordinator that was started without --advertise uses the database; waiting until it ends"
            );
            leader_sender.send_replace(None);
            return Ok(());
        };
        let mismatch = |what, remedy| StartError::SettingsDiffer {
            what,
            leader: address.clone(),
            remedy,
        };
        if leader.token != self.candidate.token.to_hex() {
            return Err(mismatch(
                "the token",
                "copy the file `token` from its data folder into this one's",
            ));
        }
        if leader.storage != self.candidate.storage {
            return Err(mismatch("the object storage", "give both the same --storage"));
        }
        let channel = match client::connect_lazily(&address, self.cluster.ca_file.as_deref()) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::warn!(%error, "cannot forward calls to the leader");
                leader_sender.send_replace(None);
                return Ok(());
            }
        };
        tracing::info!(leader = address, "forwarding calls to the leader");
        leader_sender.send_replace(Some(Arc::new(Upstream {
            epoch: leader.epoch,
            address,
            forwarding_secret: leader.forwarding_secret,
            channel,
        })));
        Ok(())
    }
}

/// Why a node of a cluster ended.
#[derive(Debug, thiserror::Error)]
pub enum ClusterNodeError {
    /// It could not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It failed while leading.
    #[error(transparent)]
    Run(#[from] RunError),
}
