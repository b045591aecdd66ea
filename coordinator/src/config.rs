//! Configuration of a coordinator.

use crate::garbage::Retention;
use crate::store::DatabaseUrl;
use aitk_common::telemetry::traces::Traces;
use aitk_scheduler::Quotas;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Certificate and private key as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by its intermediate certificates.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// High availability with other coordinators on the same PostgreSQL database: one leads, the others stand by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Address where the others reach this one: `https://host:7420`.
    pub address: String,
    /// PEM file with the certificate authority of the others; `None`: the system's trust store.
    pub ca_file: Option<PathBuf>,
}

/// Certificate authority and lifetimes of certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PkiConfig {
    /// Folder of the authority.
    pub folder: PathBuf,
    /// Names and addresses of this coordinator, in addition to those that the machine reports.
    pub hostnames: Vec<String>,
    /// Lifetime of a worker's certificate; it is renewed after half of it.
    pub worker_life: Duration,
    /// Lifetime of the coordinator's own certificate; it is renewed after two thirds.
    pub server_life: Duration,
    /// Accept workers on other machines that have a token but no certificate.
    pub allow_worker_tokens: bool,
}

impl PkiConfig {
    /// How long a worker's certificate lives.
    /// It is renewed after half of that, so that no worker has to join again after an outage of up to two weeks.
    pub const WORKER_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
    /// How long the coordinator's own certificate lives.
    pub const SERVER_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);

    /// Returns the defaults for the authority in this folder.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            hostnames: Vec::new(),
            worker_life: Self::WORKER_LIFE,
            server_life: Self::SERVER_LIFE,
            allow_worker_tokens: false,
        }
    }
}

/// Limits per user, so that the service stays available for the others. Operators and administrators are not limited.
/// `None`: no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Waiting jobs.
    pub waiting_jobs: Option<u64>,
    /// Bytes of the configs of all stored jobs.
    pub config_bytes: Option<u64>,
    /// Bytes in the object storage that the user uploaded, whether a job refers to them or not.
    pub stored_bytes: Option<u64>,
    /// Bytes per second of all the user's uploads together.
    pub upload_rate: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            waiting_jobs: Some(20_000),
            config_bytes: Some(1 << 30),
            stored_bytes: Some(256 << 30),
            upload_rate: Some(256 << 20),
        }
    }
}

/// Configuration of a coordinator.
#[derive(Clone, PartialEq, Eq)]
pub struct Config {
    /// Address to listen on. Anything but loopback needs [`Self::pki`] or [`Self::tls`]. Port 0: any free one.
    pub bind: SocketAddr,
    /// Folder of everything that must survive a restart: `aitk.db`, `token`, `storage/`. Created if missing.
    pub data_dir: PathBuf,
    /// A PostgreSQL database. None: `aitk.db` in the data folder.
    pub database: Option<DatabaseUrl>,
    /// Object storage: `file://`, `s3://`, `gs://`, `az://`. None: `storage/` in the data folder.
    pub storage_url: Option<String>,
    /// Workers with tokens of their own also get the bucket's address and use it directly if they have keys. Their
    /// uploads are then unknown here, so they may refer to any blob as a result.
    pub direct_storage: bool,
    /// The administrator's token. `None`: read it from the token file.
    pub token: Option<String>,
    /// Token file. `None`: `token` in the data folder. Created at the first start.
    pub token_file: Option<PathBuf>,
    /// Certificate of the listener. `None`: one of [`Self::pki`], or no TLS.
    pub tls: Option<TlsFiles>,
    /// Certificate authority: the listener speaks TLS, and workers show certificates.
    pub pki: Option<PkiConfig>,
    /// How long an attempt lives without a heartbeat of its worker. Workers send six heartbeats in this time.
    pub lease: Duration,
    /// Default number of retries of a job after failures in a row.
    pub retries: u32,
    /// How many devices a user may hold at once.
    pub quotas: Quotas,
    /// Limits per user.
    pub limits: Limits,
    /// Bytes of the disk reserved for the database: below that, blobs are refused and the queue pauses. `None`: 5 %,
    /// and at least 1 GiB.
    pub disk_reserve: Option<u64>,
    /// How long data is kept.
    pub retention: Retention,
    /// Address for metrics and health over plain HTTP; loopback only. `None`: no metrics.
    pub metrics: Option<SocketAddr>,
    /// High availability. `None`: the only coordinator on its database.
    pub cluster: Option<Cluster>,
    /// Trace exporter.
    pub traces: Traces,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("bind", &self.bind)
            .field("data_dir", &self.data_dir)
            .field("database", &self.database)
            .field("storage_url", &self.storage_url)
            .field("direct_storage", &self.direct_storage)
            .field("token_file", &self.token_file)
            .field("tls", &self.tls)
            .field("pki", &self.pki)
            .field("lease", &self.lease)
            .field("retries", &self.retries)
            .field("quotas", &self.quotas)
            .field("limits", &self.limits)
            .field("disk_reserve", &self.disk_reserve)
            .field("retention", &self.retention)
            .field("metrics", &self.metrics)
            .field("cluster", &self.cluster)
            .field("traces", &self.traces)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Default port.
    pub const DEFAULT_PORT: u16 = 7420;
    /// Default lease: long enough for a laptop that briefly sleeps or a switch that restarts.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(45);
    /// Three failures in a row before a job gives up.
    pub const DEFAULT_RETRIES: u32 = 3;

    /// Returns the defaults: loopback, storage and token in the data folder.
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), Self::DEFAULT_PORT),
            data_dir: data_dir.into(),
            database: None,
            storage_url: None,
            direct_storage: false,
            token: None,
            token_file: None,
            tls: None,
            pki: None,
            lease: Self::DEFAULT_LEASE,
            retries: Self::DEFAULT_RETRIES,
            quotas: Quotas::default(),
            limits: Limits::default(),
            disk_reserve: None,
            retention: Retention::default(),
            metrics: None,
            cluster: None,
            traces: Traces::default(),
        }
    }
}
