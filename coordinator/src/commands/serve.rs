//! The program without a subcommand: serves.

use super::console::default_data_dir;
use aitk_common::id::UserName;
use aitk_common::telemetry;
use aitk_common::telemetry::traces::Traces;
use aitk_coordinator::{
    Cluster, ClusterNode, Config, DatabaseUrl, Limits, PkiConfig, Retention, TlsFiles, ca_folder, start,
};
use aitk_scheduler::Quotas;
use anyhow::{Context, bail};
use clap::Args;
use clap::builder::BoolishValueParser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
/// The default lifetime of a worker's certificate in days.
const WORKER_CERT_DAYS: u32 = 30;
/// How long sending the last spans may take at shutdown.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Arguments of the server.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to listen on. Anything but loopback needs a certificate: `aitk-coordinator init`, or --tls-cert and --tls-key.
    #[arg(long, env = "AITK_BIND", default_value = "127.0.0.1:7420", value_name = "IP:PORT")]
    bind: SocketAddr,
    /// Folder for the database, the token, and blobs. Default: aitk/coordinator below $XDG_DATA_HOME or ~/.local/share.
    #[arg(long, env = "AITK_COORDINATOR_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// PostgreSQL database: postgres://USER@HOST/NAME[?sslmode=verify-full]. Give a password in PGPASSWORD, or in
    /// a line in ~/.pgpass. Default: SQLite, in the data folder.
    #[arg(long, env = "AITK_DATABASE", value_name = "URL", hide_env_values = true)]
    database: Option<String>,
    /// Object storage: file:///path, s3://bucket/prefix, gs://…, az://…. Default: a folder in the data folder.
    #[arg(long, env = "AITK_STORAGE", value_name = "URL")]
    storage: Option<String>,
    /// Let workers with tokens of their own use the bucket directly if they have its keys. The coordinator does not see their
    /// uploads, so they may refer to any blob as a result. Workers with the token in the data folder always may.
    #[arg(long, env = "AITK_DIRECT_STORAGE", value_parser = BoolishValueParser::new())]
    direct_storage: bool,
    /// A name or address under which this coordinator is reached, for the certificate that it makes itself. May be repeated.
    /// Default: those given to `init`, and the machine's own names and addresses.
    #[arg(
        long = "hostname",
        env = "AITK_HOSTNAMES",
        value_delimiter = ',',
        value_name = "NAME"
    )]
    hostnames: Vec<String>,
    /// Lifetime of a worker's certificate in days; the worker renews it after half of it.
    #[arg(long, env = "AITK_WORKER_CERT_DAYS", default_value_t = WORKER_CERT_DAYS, value_name = "DAYS",
          value_parser = clap::value_parser!(u32).range(1..=365))]
    worker_cert_days: u32,
    /// Accept workers on other machines that have a token but no certificate. Meant for a migration: a copied token works
    /// until it expires or is revoked, a certificate for days, and its key never leaves the worker.
    #[arg(long, env = "AITK_ALLOW_WORKER_TOKENS", value_parser = BoolishValueParser::new())]
    allow_worker_tokens: bool,
    /// PEM file with a certificate of another authority. Default: with an authority (`init`), one that the coordinator signs
    /// and renews itself.
    #[arg(long, env = "AITK_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, env = "AITK_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File with the administrator's token. Created at the first start. Default: `token` in the
    /// data folder.
    #[arg(long, env = "AITK_COORDINATOR_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Seconds without a heartbeat of its worker after which a job is placed elsewhere.
    #[arg(long, env = "AITK_LEASE_SECONDS", default_value_t = Config::DEFAULT_LEASE.as_secs_f64(), value_name = "SECONDS")]
    lease_seconds: f64,
    /// Retries after failures in a row, for jobs that do not specify `retries`.
    #[arg(long, env = "AITK_RETRIES", default_value_t = Config::DEFAULT_RETRIES, value_name = "N")]
    retries: u32,
    /// Devices that a user may hold at once: N for everyone, USER=N for one; may be given several times, separated by commas in
    /// the variable. Default: no limit.
    #[arg(long = "quota", env = "AITK_QUOTAS", value_name = "[USER=]N", value_delimiter = ',')]
    quotas: Vec<String>,
    /// Maximum waiting jobs of one user; 0: no limit. Operators and administrators are not limited.
    #[arg(long, env = "AITK_USER_WAITING_JOBS", default_value_t = Limits::default().waiting_jobs.unwrap_or(0), value_name = "N")]
    user_waiting_jobs: u64,
    /// Maximum MiB of the configs of all stored jobs of one user; 0: no limit. Operators and administrators are
    /// not limited.
    #[arg(long, env = "AITK_USER_CONFIG_MIB", default_value_t = Limits::default().config_bytes.unwrap_or(0) >> 20, value_name = "MIB")]
    user_config_mib: u64,
    /// Maximum GiB in the object storage that one user uploaded, whether a job refers to them or not; 0: no limit.
    /// Operators and administrators are not limited.
    #[arg(long, env = "AITK_USER_STORED_GIB", default_value_t = Limits::default().stored_bytes.unwrap_or(0) >> 30, value_name = "GIB")]
    user_stored_gib: u64,
    /// Maximum MiB per second of all uploads of one user together; 0: no limit. Operators and administrators are not
    /// limited.
    #[arg(long, env = "AITK_USER_UPLOAD_MIB", default_value_t = Limits::default().upload_rate.unwrap_or(0) >> 20, value_name = "MIB")]
    user_upload_mib: u64,
    /// MiB of the disk that are reserved for the database: below that, blobs are refused and no job starts. Default: 5 % of the
    /// disk, and at least 1024.
    #[arg(long, env = "AITK_DISK_RESERVE_MIB", value_name = "MIB")]
    disk_reserve_mib: Option<u64>,
    /// Remove ended jobs that no other job waits for, with their logs and files, after this many days. Default: never.
    #[arg(long, env = "AITK_KEEP_JOBS_DAYS", value_name = "DAYS")]
    keep_jobs_days: Option<u32>,
    /// Keep the last checkpoint of a completed or failed job for this many days; a job resumed later starts from the beginning.
    #[arg(long, env = "AITK_KEEP_CHECKPOINTS_DAYS", default_value_t = 30, value_name = "DAYS")]
    keep_checkpoints_days: u32,
    /// Keep audit lines about refused calls for this many days; lines about completed actions are kept forever.
    #[arg(long, env = "AITK_KEEP_REFUSALS_DAYS", default_value_t = 90, value_name = "DAYS")]
    keep_refusals_days: u32,
    /// Keep about this many of a job's newest log lines and metrics; state changes, checkpoints and files stay in its log.
    #[arg(long, env = "AITK_KEEP_LOG_LINES", default_value_t = Retention::default().events, value_name = "N")]
    keep_log_lines: u64,
    /// Minutes between garbage collections, which delete blobs that no job needs; 0: only with `aitk-coordinator gc`.
    #[arg(long, env = "AITK_GC_MINUTES", default_value_t = 60, value_name = "MINUTES")]
    gc_minutes: u32,
    /// Remove a blob that no job refers to this many minutes after its sender stopped uploading; at most --gc-grace-hours.
    #[arg(long, env = "AITK_GC_UNNAMED_MINUTES", default_value_t = 60, value_name = "MINUTES")]
    gc_unnamed_minutes: u32,
    /// Keep a blob that no job refers to for this many hours while its sender is still uploading, or when its sender is unknown.
    /// Must be longer than the longest upload.
    #[arg(long, env = "AITK_GC_GRACE_HOURS", default_value_t = 24, value_name = "HOURS")]
    gc_grace_hours: u32,
    /// Address for metrics and health over plain HTTP, on loopback. Default: none.
    #[arg(long, env = "AITK_METRICS_BIND", value_name = "IP:PORT")]
    metrics_bind: Option<SocketAddr>,
    /// Share the work with other coordinators on the same --database and --storage: one leads, the others stand by and take over
    /// within seconds. This is where the others reach this one: https://HOST:7420.
    #[arg(
        long,
        env = "AITK_ADVERTISE",
        value_name = "URL",
        requires = "database",
        requires = "storage"
    )]
    advertise: Option<String>,
    /// PEM file with the authority that signed the other coordinators' certificates. Default: those that the system trusts.
    #[arg(long, env = "AITK_PEER_CA_FILE", value_name = "FILE", requires = "advertise")]
    peer_ca_file: Option<PathBuf>,
    /// error, warn, info, debug, trace, or a filter such as `info,aitk_coordinator=debug`. Default: $AITK_LOG_LEVEL, or info.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log one JSON object per line.
    #[arg(long, env = "AITK_JSON_LOG", value_parser = BoolishValueParser::new())]
    json: bool,
}

impl ServeArgs {
    /// The names without empty ones: an empty `AITK_HOSTNAMES` has one.
    fn hostnames(&self) -> Vec<String> {
        let names = self.hostnames.iter().map(|name| name.trim());
        names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }

    /// The options that were given and have no effect without an authority (`init`).
    fn authority_options(&self) -> Vec<&'static str> {
        let options = [
            (!self.hostnames().is_empty(), "--hostname"),
            (self.allow_worker_tokens, "--allow-worker-tokens"),
            (self.worker_cert_days != WORKER_CERT_DAYS, "--worker-cert-days"),
        ];
        let given = options.into_iter().filter(|(is_given, _)| *is_given);
        given.map(|(_, name)| name).collect()
    }

    fn config(self) -> anyhow::Result<Config> {
        let authority_options = self.authority_options();
        let hostnames = self.hostnames();
        let data_dir = match self.data_dir {
            Some(path) => path,
            None => default_data_dir()?,
        };
        let lease = Duration::try_from_secs_f64(self.lease_seconds)
            .with_context(|| format!("--lease-seconds {}: not a time", self.lease_seconds))?;
        if lease < Duration::from_secs(1) {
            bail!("--lease-seconds {}: at least 1 second", self.lease_seconds);
        }
        // Parsed here instead of by clap, whose error message would repeat the password.
        let database = self.database.as_deref().map(str::parse::<DatabaseUrl>).transpose()?;
        let authority = ca_folder(&data_dir);
        if !authority_options.is_empty() && !authority.exists() {
            tracing::warn!(
                options = authority_options.join(", "),
                folder = %authority.display(),
                "these options are for certificates of the coordinator's own authority, and it has none: create one with \
                 `aitk-coordinator init`, or remove the options"
            );
        }
        let days = |days: u32| Duration::from_secs(u64::from(days) * DAY);
        let every = Duration::from_secs(u64::from(self.gc_minutes) * 60);
        Ok(Config {
            bind: self.bind,
            database,
            storage_url: self.storage,
            direct_storage: self.direct_storage,
            token_file: self.token_file,
            tls: self
                .tls_cert
                .zip(self.tls_key)
                .map(|(cert, key)| TlsFiles { cert, key }),
            // An existing folder without a certificate is damaged; the start reports it.
            pki: authority.exists().then(|| PkiConfig {
                hostnames,
                worker_life: days(self.worker_cert_days),
                allow_worker_tokens: self.allow_worker_tokens,
                ..PkiConfig::new(authority)
            }),
            lease,
            retries: self.retries,
            quotas: quotas(&self.quotas)?,
            disk_reserve: self.disk_reserve_mib.map(|mib| mib.saturating_mul(1 << 20)),
            limits: Limits {
                waiting_jobs: limit(self.user_waiting_jobs),
                config_bytes: limit(self.user_config_mib.saturating_mul(1 << 20)),
                stored_bytes: limit(self.user_stored_gib.saturating_mul(1 << 30)),
                upload_rate: limit(self.user_upload_mib.saturating_mul(1 << 20)),
            },
            retention: Retention {
                every: Some(every).filter(|every| !every.is_zero()),
                grace: Duration::from_secs(u64::from(self.gc_grace_hours) * HOUR),
                unreferenced: Duration::from_secs(u64::from(self.gc_unnamed_minutes) * 60),
                jobs: self.keep_jobs_days.map(days),
                checkpoints: Some(days(self.keep_checkpoints_days)),
                refusals: days(self.keep_refusals_days),
                events: self.keep_log_lines.max(1),
            },
            metrics: self.metrics_bind,
            cluster: self.advertise.map(|address| Cluster {
                address,
                ca_file: self.peer_ca_file,
            }),
            traces: Traces::from_environment(),
            ..Config::new(data_dir)
        })
    }
}

/// Converts 0 to no limit.
fn limit(number: u64) -> Option<u64> {
    Some(number).filter(|number| *number > 0)
}

/// Parses texts such as `4` and `ada=2`.
fn quotas(given: &[String]) -> anyhow::Result<Quotas> {
    let mut quotas = Quotas::default();
    // An empty variable has one empty text.
    for text in given.iter().map(|text| text.trim()).filter(|text| !text.is_empty()) {
        let bad = || format!("--quota {text}: expected a number, or USER=NUMBER");
        match text.split_once('=') {
            None => quotas.everyone = Some(text.parse().with_context(bad)?),
            Some((user, number)) => {
                let user = UserName::parse(user).with_context(bad)?;
                quotas.users.insert(user, number.parse().with_context(bad)?);
            }
        }
    }
    Ok(quotas)
}

/// Starts logging. A bad level on the command line is an error; one from the environment only causes a warning.
pub(crate) fn start_logging(args: &ServeArgs) -> Result<(), ExitCode> {
    let level = args.log_level.as_deref();
    if let Some(problem) = level.and_then(telemetry::level_problem) {
        eprintln!("error: {problem}");
        return Err(ExitCode::from(2));
    }
    let options = telemetry::Options {
        kind: telemetry::Kind::Daemon,
        json: args.json,
    };
    telemetry::init_at(options, level);
    Ok(())
}

/// Serves until the shutdown signal.
pub(crate) async fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let config = args.config()?;
    let traces = config.traces.clone();
    let served = serve_with(config).await;
    // Last: nothing else uses this runtime any more.
    traces.finish(LAST_SPANS);
    served
}

async fn serve_with(config: Config) -> anyhow::Result<()> {
    if config.cluster.is_some() {
        return run_cluster_node(ClusterNode::prepare(config)?).await;
    }
    let mut running = start(config).await?;
    // The log names only the token's file.
    let token_file = running
        .token_file
        .as_deref()
        .map(|path| path.display().to_string())
        .unwrap_or_default();
    tracing::info!(url = %running.url(), token_file, "the coordinator answers");
    let failure = tokio::select! {
        failure = running.wait_for_failure() => Some(failure),
        () = shutdown_signal() => None,
    };
    match failure {
        Some(failure) => Err(failure.into()),
        None => {
            tracing::info!("shutting down");
            running.shutdown().await;
            Ok(())
        }
    }
}

/// Leads or stands by until the shutdown signal.
async fn run_cluster_node(node: ClusterNode) -> anyhow::Result<()> {
    let (stop, stopping) = tokio::sync::watch::channel(false);
    let asked = async {
        shutdown_signal().await;
        tracing::info!("shutting down");
        let _ = stop.send(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = Box::pin(node.run(stopping)) => Ok(ended?),
        () = asked => Ok(()),
    }
}

/// Waits for Ctrl-C or SIGTERM.
async fn shutdown_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        serve: ServeArgs,
    }

    #[test]
    fn empty_names_are_left_out() {
        let serve = |names: &str| {
            Program::try_parse_from(["aitk-coordinator", "--hostname", names])
                .unwrap()
                .serve
        };
        assert!(serve("").hostnames().is_empty() && serve(" , ").authority_options().is_empty());
        assert_eq!(serve("gpu.lab, ,10.1.2.3 ").hostnames(), ["gpu.lab", "10.1.2.3"]);
    }

    #[test]
    fn quotas_are_separated_by_commas() {
        let of = |text: &str| {
            let program = Program::try_parse_from(["aitk-coordinator", "--quota", text]).unwrap();
            quotas(&program.serve.quotas)
        };
        let both = of("4, ada=2").unwrap();
        assert_eq!((both.everyone, both.users.len()), (Some(4), 1));
        assert_eq!(of("").unwrap(), Quotas::default());
        assert!(of("4,ada").is_err());
    }

    #[test]
    fn options_of_an_authority_are_found() {
        let found = |arguments: &[&str]| {
            let all = std::iter::once("aitk-coordinator").chain(arguments.iter().copied());
            Program::try_parse_from(all).unwrap().serve.authority_options()
        };
        let given = ["--hostname", "gpu.lab", "--worker-cert-days", "7"];
        assert_eq!(found(&given), ["--hostname", "--worker-cert-days"]);
        assert_eq!(found(&["--allow-worker-tokens"]), ["--allow-worker-tokens"]);
        assert!(found(&["--worker-cert-days", "30"]).is_empty());
    }
}
