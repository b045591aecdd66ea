//! Several coordinators on one database: one leads, the others stand by and take over within seconds.
//!
//! Whoever stands by answers too: it passes users' calls on to the leader (see [`forward`]), so its answers are never
//! older than the leader's own, and every address is as good as another. Workers go to the leader themselves.

mod forward;
mod health;

use crate::address::ClientAddress;
use crate::config::{Cluster, Config};
use crate::connection_limiter::ConnectionLimiter;
use crate::pki::Tls;
use crate::server::{
    FIRST_CALL, MAX_UNAUTHENTICATED, Prerequisites, RunError, Running, StartError, bring_up, limited, listen,
    listen_for_metrics,
};
use crate::store::Contender;
use crate::store::lease::{Candidate, Leader, RENEW};
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

/// How long calls that are passed on may take to end when this coordinator begins to lead; then they are cut.
const HANDOVER: Duration = Duration::from_secs(1);
/// How often it is said that the database does not answer.
const COMPLAIN: Duration = Duration::from_secs(60);

/// One of several coordinators.
pub struct Member {
    config: Config,
    cluster: Cluster,
    prerequisites: Prerequisites,
    contender: Contender,
    candidate: Candidate,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

impl Member {
    /// Checks the config and takes the data folder.
    ///
    /// # Errors
    /// [`StartError`]; without a database and a storage that others can reach there is nothing to share.
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
        // Coordinators with an authority share it.
        if cluster.ca_file.is_none() && config.tls.is_none() {
            cluster.ca_file = config.pki.as_ref().map(|pki| pki.folder.join(CERT_FILE));
        }
        client::connect_lazily(&cluster.address, cluster.ca_file.as_deref())
            .map_err(|error| StartError::Advertise(error.to_string()))?;
        let contender = Contender::new(database)?;
        let prerequisites = Prerequisites::prepare(&config)?;
        let candidate = Candidate {
            address: Some(cluster.address.clone()),
            token: ContentHash::of(prerequisites.token.secret().as_bytes()),
            storage: prerequisites.storage_url.trim_end_matches('/').to_owned(),
        };
        Ok(Self {
            config,
            cluster,
            prerequisites,
            contender,
            candidate,
        })
    }

    /// Stands by, leads, and stands by again when another one took over, until `stopping` turns true.
    ///
    /// # Errors
    /// [`StartError`] when it cannot listen, or is unlike the others; [`RunError`] inside [`MemberError`] when leading ended
    /// for another reason than a new leader.
    pub async fn run(self, mut stopping: watch::Receiver<bool>) -> Result<(), MemberError> {
        loop {
            let Some(store) = Box::pin(self.stand_by(&mut stopping)).await? else {
                return Ok(());
            };
            tracing::info!(address = self.cluster.address, "this coordinator leads");
            let mut running = Box::pin(bring_up(self.config.clone(), &self.prerequisites, store)).await?;
            let failure = tokio::select! {
                failure = running.failed() => failure,
                _ = stopping.wait_for(|stop| *stop) => {
                    running.shutdown().await;
                    return Ok(());
                }
            };
            self.step_down(running, failure).await?;
        }
    }

    async fn step_down(&self, running: Running, failure: RunError) -> Result<(), MemberError> {
        match failure {
            RunError::Store(StoreError::Superseded { .. } | StoreError::LeaseLost | StoreError::Failed { .. }) => {
                tracing::warn!(error = %failure, cause = ?std::error::Error::source(&failure).map(ToString::to_string), "this coordinator leads no more; it stands by");
                running.shutdown().await;
                Ok(())
            }
            other => {
                running.shutdown().await;
                Err(other.into())
            }
        }
    }

    /// Passes calls on until this coordinator leads; its store then. `None` when it is to stop.
    async fn stand_by(&self, stopping: &mut watch::Receiver<bool>) -> Result<Option<SqlStore>, MemberError> {
        let (tell, leader) = watch::channel(None);
        let (end, ended) = watch::channel(false);
        let (listener, addr) = listen(self.config.bind).await?;
        ClientAddress::of(&self.config, addr).write(&self.prerequisites.data_dir);
        let mut health = None;
        if let Some(listener) = listen_for_metrics(self.config.metrics).await? {
            health = Some(tokio::spawn(health::serve(listener, leader.clone(), ended.clone())));
        }
        let mut over = ended;
        let over = async move {
            let _ = over.wait_for(|over| *over).await;
        };
        let limiter = ConnectionLimiter::new(FIRST_CALL, MAX_UNAUTHENTICATED);
        let routes = axum::Router::new().fallback_service(Forward::new(leader, limiter.clone()));
        let router = limited().add_routes(tonic::service::Routes::from(routes));
        let (serving, renewing): (BoxFuture<'static, _>, _) =
            match Tls::open(&self.config, addr).map_err(StartError::from)? {
                None => {
                    let incoming = limiter.incoming(listener);
                    (Box::pin(router.serve_with_incoming_shutdown(incoming, over)), None)
                }
                Some(tls) => {
                    let refused = |from, problem: &str| tracing::info!(%from, problem, "a certificate was refused");
                    let (incoming, renewing) = tls.accept(limiter, listener, refused);
                    (Box::pin(router.serve_with_incoming_shutdown(incoming, over)), renewing)
                }
            };
        let mut serving = tokio::spawn(serving);
        tracing::info!(%addr, "this coordinator stands by");
        let found = tokio::select! {
            found = self.wait_for_the_lead(&tell) => found.map(Some).map_err(MemberError::from),
            _ = stopping.wait_for(|stop| *stop) => Ok(None),
            result = &mut serving => Err(RunError::Serve(format!("{result:?}")).into()),
        };
        // The address must be free for the one that leads.
        let _ = end.send(true);
        if let Some(renewing) = renewing {
            renewing.abort();
        }
        if !serving.is_finished() && tokio::time::timeout(HANDOVER, &mut serving).await.is_err() {
            serving.abort();
            let _ = serving.await;
        }
        if let Some(mut health) = health
            && tokio::time::timeout(HANDOVER, &mut health).await.is_err()
        {
            health.abort();
            let _ = health.await;
        }
        found
    }

    async fn wait_for_the_lead(&self, tell: &watch::Sender<Option<Arc<Upstream>>>) -> Result<SqlStore, StartError> {
        let mut ticks = tokio::time::interval(RENEW);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut complained: Option<Instant> = None;
        loop {
            ticks.tick().await;
            let vacant = match self.contender.look().await {
                Ok(Some(leader)) => {
                    self.follow(tell, leader)?;
                    continue;
                }
                Ok(None) => self.contender.lead(&self.candidate).await,
                Err(error) => Err(error),
            };
            match vacant {
                Ok(Some(store)) => return Ok(store),
                // Somebody else was faster, or still holds the tables.
                Ok(None) => {}
                Err(error) => {
                    tell.send_replace(None);
                    if complained.is_none_or(|at| at.elapsed() > COMPLAIN) {
                        tracing::warn!(error = %crate::error_chain::error_chain(&error), "cannot see who leads; trying again");
                        complained = Some(Instant::now());
                    }
                }
            }
        }
    }

    /// Passes calls on to this leader.
    fn follow(&self, tell: &watch::Sender<Option<Arc<Upstream>>>, leader: Leader) -> Result<(), StartError> {
        let known = tell
            .borrow()
            .as_ref()
            .is_some_and(|upstream| upstream.epoch == leader.epoch);
        if known {
            return Ok(());
        }
        let Some(address) = leader.address.clone() else {
            tracing::warn!(
                "a coordinator that was started without --advertise works on the database; waiting for its end"
            );
            tell.send_replace(None);
            return Ok(());
        };
        let unlike = |what, remedy| StartError::Unlike {
            what,
            leader: address.clone(),
            remedy,
        };
        if leader.token != self.candidate.token.to_hex() {
            return Err(unlike(
                "the token",
                "copy the file `token` from its data folder into this one's",
            ));
        }
        if leader.storage != self.candidate.storage {
            return Err(unlike("the object storage", "give both the same --storage"));
        }
        let channel = match client::connect_lazily(&address, self.cluster.ca_file.as_deref()) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::warn!(%error, "calls cannot be passed on to the leader");
                tell.send_replace(None);
                return Ok(());
            }
        };
        tracing::info!(leader = address, "passing calls on to the leader");
        tell.send_replace(Some(Arc::new(Upstream {
            epoch: leader.epoch,
            address,
            proof: leader.proof,
            channel,
        })));
        Ok(())
    }
}

/// Why one of several coordinators ended.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// It could not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It led, and could not go on.
    #[error(transparent)]
    Run(#[from] RunError),
}
