//! Starts, runs and shuts down a coordinator.

mod error;
mod handle;
mod local_resources;

pub use error::{RunError, StartError};
pub use handle::CoordinatorHandle;
pub(crate) use local_resources::LocalResources;

use crate::access::Access;
use crate::address::ClientAddress;
use crate::api::{Authenticator, Shared, UnfinishedUploads, routes};
use crate::assign::Assigner;
use crate::blob_access::{BlobAccess, Uploads};
use crate::clock::Clock;
use crate::config::Config;
use crate::connection_limiter::ConnectionLimiter;
use crate::disk_reserve::DiskSpace;
use crate::garbage::{Collector, Pins};
use crate::job_config_cache::JobConfigCache;
use crate::metrics::{self, Metrics};
use crate::pki::Tls;
use crate::scheduler_task::SchedulerTask;
use crate::spans::Spans;
use crate::storage_monitor::{StorageMonitor, may_be_refusal};
use crate::store::leader_lease::RENEW_INTERVAL;
use crate::store::{SqlStore, Store, StoreError};
use crate::transfer_limit::{TransferLimiter, UploadRate};
use aitk_common::error_chain::error_chain;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, ObjectBlobs};
use aitk_scheduler::{Settings, State, UserLimits};
use futures::future::BoxFuture;
use local_resources::TRANSIT;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::transport::Server;

/// HTTP/2 keep-alive interval of an idle connection, and the timeout of a response: those of clients.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a connection may take until its first authenticated call.
pub(crate) const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum unauthenticated connections. Together with those of [`metrics`] fewer than half of the files that a process
/// may open by default.
pub(crate) const MAX_UNAUTHENTICATED: usize = 384;
/// Concurrent calls on one connection: a worker or a client needs a handful.
const MAX_STREAMS: u32 = 256;
/// Name of the SQLite database in the data folder.
pub(crate) const DATABASE: &str = "aitk.db";
/// Concurrent downloads: each takes a few MiB of memory and no disk.
const MAX_DOWNLOADS: usize = 48;
/// Large submissions parsed concurrently: each takes a CPU core, and serving needs one too.
const MAX_PARSING: usize = 2;
/// Concurrent uploads of all clients: each may take a file of its size beside the database.
const MAX_UPLOADS: usize = 16;

/// Starts a coordinator and returns when it is ready for calls.
///
/// # Errors
/// [`StartError`]
pub fn start(config: Config) -> BoxFuture<'static, Result<CoordinatorHandle, StartError>> {
    // Boxed: the future is large, because it holds those of the database libraries. And an `async fn` is compiled by each crate
    // that awaits it: of the whole coordinator that took a minute and a half for each program and each test program.
    Box::pin(async {
        let local = LocalResources::prepare(&config)?;
        let store = match &config.database {
            Some(url) => SqlStore::postgres(url).await?,
            None => SqlStore::sqlite(&local.data_dir.join(DATABASE)).await?,
        };
        Box::pin(start_leading(config, &local, store)).await
    })
}

/// Returns a tonic server builder with our limits.
pub(crate) fn server_builder() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .max_concurrent_streams(MAX_STREAMS)
        .tcp_nodelay(true)
}

/// Starts leading with a store that may write.
pub(crate) async fn start_leading(
    config: Config,
    local: &LocalResources,
    store: SqlStore,
) -> Result<CoordinatorHandle, StartError> {
    let store = Arc::new(store.with_events_kept(config.retention.events));
    // From now on: loading many jobs may take longer than the lease, and two coordinators would take over from one another for ever.
    let lease_task = tokio::spawn(renew_lease(store.clone(), config.cluster.is_some()));
    let renewal = lease_task.abort_handle();
    let started = Box::pin(start_tasks(config, local, store, lease_task)).await;
    if started.is_err() {
        renewal.abort();
    }
    started
}

async fn start_tasks(
    config: Config,
    local: &LocalResources,
    store: Arc<SqlStore>,
    lease_task: JoinHandle<StoreError>,
) -> Result<CoordinatorHandle, StartError> {
    let mut server = server_builder();
    let LocalResources {
        data_dir,
        token,
        token_file,
        storage_url,
        ..
    } = local.clone();
    let unwatched_blobs: Arc<dyn BlobStore> = Arc::new(ObjectBlobs::open(&storage_url)?);
    let storage_monitor = StorageMonitor::default();
    let blobs = storage_monitor.watch_store(unwatched_blobs.clone());
    let upload_folder = data_dir.join(TRANSIT);

    let clock = Clock::new();
    let removed = store.remove_orphaned_texts().await?;
    if removed > 0 {
        tracing::info!(count = removed, "removed configs of jobs that were never accepted");
    }
    let store: Arc<dyn Store> = store;
    let loaded = store.load().await?;
    tracing::info!(
        jobs = loaded.jobs.len(),
        workers = loaded.workers.len(),
        "database loaded"
    );
    let settings = Settings {
        quotas: config.quotas.clone(),
        user_limits: UserLimits {
            waiting_jobs: config.limits.waiting_jobs,
            config_bytes: config.limits.config_bytes,
        },
        ..Settings::from_lease(config.lease)
    };
    let state = State::restore(settings, clock.now(), loaded.jobs, loaded.workers);
    // An absolute path means `file://`.
    let scheme = storage_url.split_once(':').filter(|_| !storage_url.starts_with('/'));
    let storage = scheme.map_or("file", |(scheme, _)| scheme).to_owned();
    // Workers can access a bucket themselves; a local folder only through this coordinator.
    let bucket_url_for_workers = Some(storage_url).filter(|_| !matches!(storage.as_str(), "file" | "memory"));

    let (listener, addr) = listen(config.bind).await?;
    let tls = Tls::open(config.tls.as_ref(), config.pki.as_ref(), addr)?;
    ClientAddress::of(&config, addr).write(&data_dir);
    let metrics_listener = listen_for_metrics(config.metrics).await?;
    let metrics_addr = metrics_listener
        .as_ref()
        .and_then(|listener| listener.local_addr().ok());
    let (stop, stopping) = watch::channel(false);
    let metrics = Metrics::new(&config.traces);
    let spans = Spans::new(&config.traces);
    let job_configs = JobConfigCache::default();
    let assigner = Assigner::new(store.clone(), job_configs.clone());
    if bucket_url_for_workers.is_some() {
        tokio::spawn(check_storage(blobs.clone(), stopping.clone()));
    }
    let (scheduler_task, scheduler) = SchedulerTask::new(
        state,
        clock,
        store.clone(),
        bucket_url_for_workers,
        metrics.clone(),
        spans,
        job_configs,
    );
    tokio::spawn(
        storage_monitor
            .clone()
            .run(unwatched_blobs, scheduler.clone(), stopping.clone()),
    );
    if let Some(listener) = metrics_listener {
        tokio::spawn(metrics::serve(listener, metrics, scheduler.clone(), stopping.clone()));
    }
    let (access, audit_task) = Access::open(store.clone(), token.clone(), clock, &data_dir).await?;
    let pins = Pins::new();
    let uploads = Arc::new(Uploads::new(store.clone()));
    let collector = Collector {
        scheduler: scheduler.clone(),
        clock,
        store: store.clone(),
        blobs: blobs.clone(),
        pins: pins.clone(),
        uploads: uploads.clone(),
        retention: config.retention.clone(),
        refusals_seen: Arc::default(),
    };
    let garbage_task = tokio::spawn(collector.clone().run());
    let blob_access = BlobAccess::new(
        scheduler.clone(),
        access.clone(),
        store.clone(),
        blobs.clone(),
        uploads,
        config.direct_storage,
        config.limits.stored_bytes,
    );
    // A bucket has its own space, but uploads to it pass through a local folder.
    let stored_here = local.storage_folder();
    let folders: Vec<PathBuf> = [Some(data_dir.clone()), stored_here].into_iter().flatten().collect();
    let space = DiskSpace::new(folders, config.disk_reserve);
    tokio::spawn(space.clone().watch(scheduler.clone(), stopping.clone()));
    let shared = Shared {
        scheduler,
        access: access.clone(),
        blob_access,
        pins,
        collector,
        clock,
        store: store.clone(),
        blobs,
        storage,
        storage_monitor,
        started: clock.now(),
        lease: config.lease,
        retries: config.retries,
        signer: tls.as_ref().and_then(Tls::signer),
        upload_folder,
        unfinished_uploads: UnfinishedUploads::default(),
        space,
        downloads: TransferLimiter::new(MAX_DOWNLOADS),
        parsing: Arc::new(Semaphore::new(MAX_PARSING)),
        assigner,
        uploads: TransferLimiter::new(MAX_UPLOADS),
        upload_rate: UploadRate::new(config.limits.upload_rate),
        stopping: stopping.clone(),
    };
    let is_tls = tls.is_some();
    let certificates_only = tls.as_ref().is_some_and(|tls| tls.certificates_only);
    let limiter = ConnectionLimiter::new(FIRST_CALL_TIMEOUT, MAX_UNAUTHENTICATED);
    let authenticator = Authenticator::new(
        access.clone(),
        store.forwarding_secret(),
        certificates_only,
        limiter.clone(),
    );
    let router = server.add_routes(routes(&shared, &authenticator));
    let mut stopped = stopping;
    let stopped = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let (serving, certificate_task): (BoxFuture<'static, _>, _) = match tls {
        None => {
            let incoming = limiter.incoming(listener);
            (Box::pin(router.serve_with_incoming_shutdown(incoming, stopped)), None)
        }
        Some(tls) => {
            let refused = move |from, problem: &str| access.audit_refused_certificate(from, problem);
            let (incoming, certificate_task) = tls.accept(limiter, listener, refused);
            (
                Box::pin(router.serve_with_incoming_shutdown(incoming, stopped)),
                certificate_task,
            )
        }
    };
    let scheduler_task = tokio::spawn(scheduler_task.run());
    let server = tokio::spawn(serving);
    Ok(CoordinatorHandle {
        addr,
        token: token.secret().to_owned(),
        token_file,
        metrics: metrics_addr,
        tls: is_tls,
        stop,
        certificate_task,
        server,
        scheduler_task,
        garbage_task,
        audit_task,
        lease_task,
        store,
        _local: local.clone(),
    })
}

/// Logs an error at the start if the storage address or its keys are wrong, before the first job fails. Runs in the
/// background, so that a storage that starts later does not delay the coordinator.
async fn check_storage(blobs: Arc<dyn BlobStore>, mut stopping: watch::Receiver<bool>) {
    let nothing = [ContentHash::of(b"")];
    let answer = tokio::select! {
        answer = blobs.has(&nothing) => answer,
        _ = stopping.wait_for(|stop| *stop) => return,
    };
    // The monitor logs refusals.
    if let Err(error) = answer
        && !may_be_refusal(&error)
    {
        tracing::error!(error = %error_chain(&error), "the object storage cannot be used; jobs cannot read inputs or store results");
    }
}

/// Renews the lease until another coordinator has it. In a cluster it also ends when the lease has expired without an
/// answer of the database: another coordinator may lead by then, and workers must not hear two leaders.
async fn renew_lease(store: Arc<dyn Store>, is_clustered: bool) -> StoreError {
    let mut ticks = tokio::time::interval(RENEW_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut valid_until = None;
    loop {
        let lost = async {
            match valid_until {
                Some(until) if is_clustered => tokio::time::sleep_until(until).await,
                _ => std::future::pending().await,
            }
        };
        let renewing = async {
            ticks.tick().await;
            store.renew().await
        };
        match tokio::select! {
            biased;
            renewed = renewing => renewed,
            () = lost => return StoreError::LeaseLost,
        } {
            Err(error) => return error,
            Ok(None) => return std::future::pending().await,
            Ok(Some(until)) => valid_until = Some(Instant::from_std(until)),
        }
    }
}

/// Binds the address; returns the listener and its actual address.
pub(crate) async fn listen(bind: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Bind { bind, source };
    let listener = TcpListener::bind(bind).await.map_err(failed)?;
    let addr = listener.local_addr().map_err(failed)?;
    Ok((listener, addr))
}

/// Binds the metrics address, which must be loopback because metrics are not encrypted.
pub(crate) async fn listen_for_metrics(bind: Option<SocketAddr>) -> Result<Option<TcpListener>, StartError> {
    let Some(bind) = bind else { return Ok(None) };
    if !bind.ip().to_canonical().is_loopback() {
        return Err(StartError::Metrics {
            bind,
            problem: "metrics are not encrypted, so only loopback is allowed".to_owned(),
        });
    }
    match TcpListener::bind(bind).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) => Err(StartError::Metrics {
            bind,
            problem: error.to_string(),
        }),
    }
}
