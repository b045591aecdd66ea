//! What a coordinator is told at its start.

use crate::garbage::Retention;
use crate::store::DatabaseUrl;
use aitk_common::telemetry::traces::Traces;
use aitk_scheduler::Quotas;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Where the certificate and its key lie, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, with those between it and its authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// How a coordinator shares its work with others on the same PostgreSQL database: one leads, the others stand by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Where the others reach this one: `https://host:7420`.
    pub address: String,
    /// A PEM file with the certificate authority of the others' certificates; none: that of the system.
    pub ca_file: Option<PathBuf>,
}

/// The certificate authority of a pool, and what it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PkiConfig {
    /// Its folder.
    pub folder: PathBuf,
    /// Names and addresses of this coordinator, besides those that the machine knows.
    pub hostnames: Vec<String>,
    /// How long a worker's certificate lives; it is renewed after two thirds.
    pub worker_life: Duration,
    /// The same for the coordinator's own.
    pub server_life: Duration,
    /// Let workers on other machines in that have a token and no certificate.
    pub allow_worker_tokens: bool,
}

impl PkiConfig {
    /// How long a worker's certificate lives.
    /// It is renewed after half of that, so that a coordinator may be away for two weeks and nobody has to join again.
    pub const WORKER_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
    /// How long the coordinator's own certificate lives.
    pub const SERVER_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);

    /// The authority in this folder, every default.
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

/// How much one user may take, so that the service stays good for the others. Operators and administrators are not held to
/// it. None: no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Jobs that wait.
    pub waiting_jobs: Option<u64>,
    /// Bytes of the configs of all jobs that are kept.
    pub config_bytes: Option<u64>,
    /// Bytes in the object storage that they sent, whether a job names them or not.
    pub stored_bytes: Option<u64>,
    /// Bytes a second that they send, all their uploads together.
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

/// How a coordinator is set up.
#[derive(Clone, PartialEq, Eq)]
pub struct Config {
    /// Where to listen. Anything but loopback needs [`Self::pki`] or [`Self::tls`]. Port 0: any free one.
    pub bind: SocketAddr,
    /// Where everything lies that must survive: `aitk.db`, `token`, `storage/`. Made when missing.
    pub data_dir: PathBuf,
    /// A PostgreSQL database. None: `aitk.db` in the data folder.
    pub database: Option<DatabaseUrl>,
    /// Object storage: `file://`, `s3://`, `gs://`, `az://`. None: `storage/` in the data folder.
    pub storage_url: Option<String>,
    /// Workers with tokens of their own are told the bucket's address, too, and use it directly where they have keys for
    /// it. Nobody knows what they send then, so they may name every blob as a result.
    pub direct_storage: bool,
    /// The token. None: that of the token file.
    pub token: Option<String>,
    /// None: `token` in the data folder. Made at the first start.
    pub token_file: Option<PathBuf>,
    /// The listener's own certificate. None: one of [`Self::pki`], or no TLS.
    pub tls: Option<TlsFiles>,
    /// A certificate authority: the listener speaks TLS, and workers show certificates.
    pub pki: Option<PkiConfig>,
    /// How long an attempt lives without a beat of its worker. Workers beat six times as often.
    pub lease: Duration,
    /// Failed tries in a row that a job is granted which says nothing about them.
    pub retries: u32,
    /// How many devices a user may hold at once.
    pub quotas: Quotas,
    /// How much a user may take who only submits.
    pub limits: Limits,
    /// Bytes of the disk that are kept for the database: blobs are refused and the queue pauses below that. None: 5 %, and at
    /// least 1 GiB.
    pub disk_reserve: Option<u64>,
    /// How long things are kept.
    pub retention: Retention,
    /// Where metrics and health are told over plain HTTP; loopback only. None: nowhere.
    pub metrics: Option<SocketAddr>,
    /// With others. None: alone on its database.
    pub cluster: Option<Cluster>,
    /// Where the spans of jobs go.
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
    /// The port when none is given.
    pub const DEFAULT_PORT: u16 = 7420;
    /// Long enough for a laptop that dozes off or a switch that restarts.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(45);
    /// A machine may fail three times in a row before its job gives up.
    pub const DEFAULT_RETRIES: u32 = 3;

    /// Loopback, storage and token in the data folder, every default.
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
