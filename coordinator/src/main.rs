//! `aitk-coordinator`: the coordinator as a daemon.

use aitk_common::id::UserName;
use aitk_common::telemetry;
use aitk_coordinator::core::Quotas;
use aitk_coordinator::{Config, TlsFiles, start};
use anyhow::{Context, bail};
use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Keeps the queue of training and generation jobs, and gives work to workers.
#[derive(Debug, Parser)]
#[command(name = "aitk-coordinator", version, after_help = EXAMPLES)]
struct Args {
    /// Address to listen on. Anything but loopback needs --tls-cert and --tls-key.
    #[arg(long, env = "AITK_BIND", default_value = "127.0.0.1:7420", value_name = "IP:PORT")]
    bind: SocketAddr,
    /// Folder for the database, the token, and blobs. Default: aitk/coordinator below $XDG_DATA_HOME or ~/.local/share.
    #[arg(long, env = "AITK_COORDINATOR_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Object storage: file:///path, s3://bucket/prefix, gs://…, az://…. Default: a folder in the data folder.
    #[arg(long, env = "AITK_STORAGE", value_name = "URL")]
    storage: Option<String>,
    /// PEM file with the certificate.
    #[arg(long, env = "AITK_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, env = "AITK_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File with the token that workers and clients must show. Made at the first start. Default: `token` in the data folder.
    #[arg(long, env = "AITK_COORDINATOR_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Seconds that a job may go on without hearing from its worker before it is placed elsewhere.
    #[arg(long, env = "AITK_LEASE_SECONDS", default_value_t = Config::DEFAULT_LEASE.as_secs_f64(), value_name = "SECONDS")]
    lease_seconds: f64,
    /// Failed tries in a row that are followed by another one, for jobs that do not say.
    #[arg(long, env = "AITK_RETRIES", default_value_t = Config::DEFAULT_RETRIES, value_name = "N")]
    retries: u32,
    /// Devices that a user may hold at once: N for everyone, USER=N for one; may be given several times. Default: no limit.
    #[arg(long = "quota", value_name = "[USER=]N")]
    quotas: Vec<String>,
    /// error, warn, info, debug, trace, or a filter such as `info,aitk_coordinator=debug`. Default: $AITK_LOG_LEVEL, or info.
    #[arg(long, value_name = "LEVEL", conflicts_with = "json")]
    log_level: Option<String>,
    /// Log one JSON object per line.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  aitk-coordinator
      For this machine only, everything below ~/.local/share/aitk/coordinator.
  aitk-coordinator --bind 0.0.0.0:7420 --tls-cert cert.pem --tls-key key.pem --storage s3://bucket/aitk
      For a network, with blobs in a bucket.";

impl Args {
    fn config(self) -> anyhow::Result<Config> {
        let data_dir = match self.data_dir {
            Some(path) => path,
            None => default_data_dir().context("there is no home folder; give --data-dir")?,
        };
        let lease = Duration::try_from_secs_f64(self.lease_seconds)
            .with_context(|| format!("--lease-seconds {}: not a time", self.lease_seconds))?;
        if lease < Duration::from_secs(1) {
            bail!("--lease-seconds {}: at least 1 second", self.lease_seconds);
        }
        Ok(Config {
            bind: self.bind,
            storage_url: self.storage,
            token_file: self.token_file,
            tls: self
                .tls_cert
                .zip(self.tls_key)
                .map(|(cert, key)| TlsFiles { cert, key }),
            lease,
            retries: self.retries,
            quotas: quotas(&self.quotas)?,
            ..Config::new(data_dir)
        })
    }
}

/// Reads `4` and `ada=2`.
fn quotas(given: &[String]) -> anyhow::Result<Quotas> {
    let mut quotas = Quotas::default();
    for text in given {
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

fn default_data_dir() -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let base = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")))?;
    Some(base.join("aitk/coordinator"))
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Err(code) = start_logging(&args) {
        return code;
    }
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
        .and_then(|runtime| runtime.block_on(serve(args)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A level on the command line is checked; one from the environment only gets a warning.
fn start_logging(args: &Args) -> Result<(), ExitCode> {
    let Some(level) = &args.log_level else {
        telemetry::init(telemetry::Options {
            kind: telemetry::Kind::Daemon,
            json: args.json,
        });
        return Ok(());
    };
    let Ok(filter) = tracing_subscriber::EnvFilter::try_new(level) else {
        eprintln!("error: --log-level {level:?}: expected error, warn, info, debug, trace, or a filter");
        return Err(ExitCode::from(2));
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    Ok(())
}

async fn serve(args: Args) -> anyhow::Result<()> {
    let mut running = start(args.config()?).await?;
    // The token itself is in the file only.
    let token_file = running
        .token_file
        .as_deref()
        .map(|path| path.display().to_string())
        .unwrap_or_default();
    tracing::info!(url = %running.url(), token_file, "the coordinator answers");
    let failure = tokio::select! {
        failure = running.failed() => Some(failure),
        () = asked_to_stop() => None,
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

/// Ctrl-C or SIGTERM.
async fn asked_to_stop() {
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
