//! The worker daemon.

use aitk_common::error_chain::error_chain;
use aitk_common::job::cluster::TimeSpan;
use aitk_common::security::token::Token;
use aitk_common::telemetry;
use aitk_common::telemetry::traces::Traces;
use aitk_worker::probe::{self, DeviceSelection};
use aitk_worker::runner::detect_control_groups;
use aitk_worker::{Config, JoinOptions, Refusal, StartError, WorkerIdentity, check_allowed_programs, sandbox};
use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Training allocates and frees large buffers by the thousand: the system's allocator returns each one to the kernel
/// and gets it back page by page.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long sending the last spans may take at shutdown.
const SPAN_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

const AFTER_HELP: &str = "\
Exit codes:
  0  shut down after SIGTERM, Ctrl-C or the end of its terminal
  1  failed; the last line says why
  2  wrong usage
  4  the coordinator refused the token or certificate
  6  the coordinator refused this worker, for example because it has another protocol version

Examples:
  aitk-worker join https://gpu-lab:7420 TOKEN
  aitk-worker
      Join once, with the token of `aitk-coordinator worker join-token`; then start the worker without options.
  aitk-worker --server https://gpu-lab:7420 --token-file ~/.config/aitk/token --ca-file lab-ca.pem
  aitk-worker --server http://127.0.0.1:7420 --devices cuda:0,cuda:1 --label room=basement
  aitk-worker probe --json";

/// Offers this machine to an aitk coordinator: runs its jobs and uploads their results.
#[derive(Debug, Parser)]
#[command(name = "aitk-worker", version, after_help = AFTER_HELP)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    daemon: Daemon,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Join a coordinator: exchange a single-use join token for a certificate that renews itself.
    #[command(after_help = JOIN_HELP)]
    Join(Join),
    /// Show the devices of this machine.
    Probe {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run one attempt; the daemon starts this.
    #[command(hide = true)]
    Attempt {
        /// The attempt's specification.
        #[arg(long, required_unless_present = "try_sandbox")]
        spec: Option<PathBuf>,
        /// Confine this process to a folder, try forbidden operations, and print what the sandbox enforces.
        #[arg(long, value_name = "FOLDER", conflicts_with = "spec")]
        try_sandbox: Option<PathBuf>,
    },
}

const JOIN_HELP: &str = "\
Examples:
  aitk-worker join https://gpu-lab:7420 aitk_join_…
  ssh gpu-lab aitk-coordinator worker join-token box-3 | aitk-worker join https://gpu-lab:7420 --token-file -";

#[derive(Debug, Args)]
struct Join {
    /// The coordinator: https://HOST[:PORT].
    server: String,
    /// The join token, from `aitk-coordinator worker join-token`.
    #[arg(required_unless_present = "token_file", conflicts_with = "token_file")]
    token: Option<String>,
    /// A file with the join token; - for standard input.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The worker's name. Default: the name in the token, or the name of the machine.
    #[arg(long)]
    name: Option<String>,
    /// A PEM file with the certificate authority of a coordinator that has a certificate from elsewhere (--tls-cert).
    #[arg(long)]
    ca_file: Option<PathBuf>,
    /// The worker's data folder, where the certificate is stored. Default: ~/.local/share/aitk/worker.
    #[arg(long, env = "AITK_WORKER_DATA_DIR")]
    data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Daemon {
    /// The coordinator: https://HOST[:PORT], or http://127.0.0.1[:PORT] on this machine. For several coordinators,
    /// all addresses, separated by commas. Default: the one that was joined, or http://127.0.0.1:7420.
    #[arg(long, env = "AITK_SERVER")]
    server: Option<String>,
    /// A file with the coordinator's token, readable by its owner only. AITK_TOKEN holds a token itself. A worker that joined
    /// needs none.
    #[arg(long, env = "AITK_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// A PEM file with the certificate authority to trust.
    #[arg(long, env = "AITK_CA_FILE")]
    ca_file: Option<PathBuf>,
    /// The worker's display name, if it has a token. One that joined keeps the name of `join`. Default: the name of the machine.
    #[arg(long, env = "AITK_WORKER_NAME")]
    name: Option<String>,
    /// The worker's data folder: cache and running attempts. Default: ~/.local/share/aitk/worker.
    #[arg(long, env = "AITK_WORKER_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// The devices to offer: auto (GPUs, or the CPU without one), cpu, cuda:0,cuda:1, metal:0, …
    #[arg(long, env = "AITK_DEVICES", default_value = "auto")]
    devices: DeviceSelection,
    /// A label that jobs may ask for. May be repeated; separated by commas in the variable.
    #[arg(long = "label", env = "AITK_LABELS", value_name = "KEY=VALUE", value_delimiter = ',', value_parser = parse_label)]
    labels: Vec<(String, String)>,
    /// The size limit of the cache of inputs, in GiB.
    #[arg(long, env = "AITK_CACHE_GIB", default_value_t = 100)]
    cache_gib: u64,
    /// How long a job may show no progress before its process is stopped and the job retried, such as 30m; phases
    /// with slow steps get a longer limit. A job's `cluster.progress_timeout` overrides it.
    #[arg(long, env = "AITK_PROGRESS_TIMEOUT", default_value = "10m", value_parser = parse_duration)]
    progress_timeout: Duration,
    /// The size limit of files that jobs compute from their inputs and keep (cached latents, compiled kernels), in
    /// GiB.
    #[arg(long, env = "AITK_DERIVED_CACHE_GIB", default_value_t = 20)]
    derived_cache_gib: u64,
    /// Hash a cached input again when it is used and its last hash is older than this many days; 0: each time.
    #[arg(long, env = "AITK_VERIFY_CACHE_DAYS", default_value_t = 7)]
    verify_cache_days: u64,
    /// Refuse to start if the files and the network of attempts cannot be confined (docs/security.md).
    #[arg(long, env = "AITK_REQUIRE_SANDBOX", value_parser = clap::builder::BoolishValueParser::new(), num_args = 0..=1,
          default_missing_value = "true", default_value = "false", require_equals = true, value_name = "BOOL")]
    require_sandbox: bool,
    /// The largest file that an attempt may write, in GiB.
    #[arg(long, env = "AITK_LARGEST_FILE_GIB", default_value_t = 512)]
    largest_file_gib: u64,
    /// The largest model that is downloaded from Hugging Face for a job, in GiB.
    #[arg(long, env = "AITK_LARGEST_MODEL_GIB", default_value_t = 200)]
    largest_model_gib: u64,
    /// The most extra time at shutdown for checkpoints that are still being uploaded, such as 15m.
    #[arg(long = "upload-patience", env = "AITK_UPLOAD_PATIENCE", value_name = "UPLOAD_PATIENCE", default_value = "15m", value_parser = parse_duration)]
    upload_timeout: Duration,
    /// A repository on Hugging Face, ORG/NAME or ORG/*, for which jobs of other users may use this worker's token of it
    /// (HF_TOKEN, or that of `hf auth login`).
    /// May be repeated; separated by commas in the variable. Default: none, so that jobs get only public models.
    #[arg(
        long = "hub-allow",
        env = "AITK_HUB_ALLOW",
        value_name = "REPOSITORY",
        value_delimiter = ','
    )]
    hub_allow: Vec<String>,
    /// A folder with Hugging Face tokens of the cluster's users, in files USER/NAME with mode 0600: jobs of that user
    /// may name them (`cluster.hub_token: NAME`) for private and gated models. Default: none.
    #[arg(long, env = "AITK_HUB_SECRETS", value_name = "FOLDER")]
    hub_secrets: Option<PathBuf>,
    /// A program that jobs may run as the extension NAME, inside their sandbox (docs/extensions.md). May be repeated;
    /// separated by commas in the variable. Default: none.
    #[arg(
        long = "allow-extension",
        env = "AITK_ALLOW_EXTENSION",
        value_name = "NAME=PROGRAM",
        value_delimiter = ','
    )]
    allow_extension: Vec<String>,
    /// error, warn, info, debug or trace. Default: info.
    #[arg(long, env = "AITK_LOG_LEVEL")]
    log_level: Option<String>,
    /// Write the log as JSON.
    #[arg(long, env = "AITK_JSON_LOG", value_parser = clap::builder::BoolishValueParser::new())]
    json_log: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        // Before any thread or runtime starts: the attempt sets up both itself.
        Some(Command::Attempt { spec, try_sandbox }) => {
            return match (try_sandbox, spec) {
                (Some(folder), _) => sandbox::try_in_this_process(&folder),
                (None, Some(spec)) => aitk_worker::run_attempt(&spec),
                (None, None) => ExitCode::from(2),
            };
        }
        Some(Command::Probe { json }) => print_probe(json).map(|()| ExitCode::SUCCESS),
        Some(Command::Join(join)) => run_join(join),
        None => run_daemon(cli.daemon),
    };
    result.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {}", error_chain(&*error));
        ExitCode::FAILURE
    })
}

fn run_join(options: Join) -> anyhow::Result<ExitCode> {
    let mut token = options.token.unwrap_or_default();
    if let Some(path) = &options.token_file {
        let from_stdin = path.as_os_str() == "-";
        let read = if from_stdin {
            read_token(std::io::stdin())
        } else {
            File::open(path).and_then(read_token)
        };
        token = read.with_context(|| format!("cannot read the join token from {}", path.display()))?;
    }
    let data_dir_option = options.data_dir.clone();
    let data_dir = data_dir_or_default(options.data_dir)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let joined = runtime.block_on(aitk_worker::join(JoinOptions {
        server: options.server,
        token,
        name: options.name,
        ca_file: options.ca_file,
        data_dir,
    }));
    let joined = match joined {
        Ok(joined) => joined,
        Err(error) if error.is_refused() => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            return Ok(ExitCode::from(4));
        }
        Err(error) => return Err(error.into()),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", joined.name)?;
    let option = data_dir_option
        .map(|path| format!(" --data-dir {}", path.display()))
        .unwrap_or_default();
    writeln!(
        std::io::stderr(),
        "joined {} as {}; start it with: aitk-worker{option}\nThe certificate renews itself while the worker runs.",
        joined.server,
        joined.name,
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a token: at most 4096 bytes, because tokens are short.
fn read_token(from: impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    from.take(4096).read_to_string(&mut text)?;
    Ok(text)
}

fn data_dir_or_default(option: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let folder = option.or_else(default_data_dir);
    folder.context("there is no home folder; give a folder with --data-dir")
}

fn print_probe(json: bool) -> anyhow::Result<()> {
    let probe::ProbeResult {
        devices,
        left_out,
        not_built_for,
    } = probe::probe_devices();
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(
            &mut out,
            &serde_json::json!({ "schema_version": 1, "devices": devices, "left_out": left_out, "not_built_for": not_built_for }),
        )?;
        writeln!(out)?;
        return Ok(());
    }
    for device in devices {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        writeln!(out, "{}  {}", probe::label(device.id), device.name)?;
        writeln!(out, "    architecture  {}", device.architecture)?;
        let (budget, total) = (gib(device.memory_budget), gib(device.memory_total));
        writeln!(out, "    memory        {budget:.1} GiB for a task, of {total:.1} GiB")?;
        writeln!(out, "    dtypes        {}", device.dtypes.join(", "))?;
        writeln!(out, "    profile       {}", device.profile.name())?;
    }
    for reason in left_out {
        writeln!(out, "left out: {reason}")?;
    }
    for notice in not_built_for {
        writeln!(out, "{notice}")?;
    }
    Ok(())
}

fn run_daemon(mut options: Daemon) -> anyhow::Result<ExitCode> {
    match check_allowed_programs(&options.allow_extension, &std::env::current_dir()?) {
        Ok(programs) => options.allow_extension = programs,
        Err(wrong) => {
            let _ = writeln!(std::io::stderr(), "error: --allow-extension {wrong}");
            return Ok(ExitCode::from(2));
        }
    }
    let log = telemetry::Options {
        kind: telemetry::Kind::Daemon,
        json: options.json_log,
    };
    telemetry::init_at(log, options.log_level.as_deref());
    let config = configure(options)?;
    let traces = config.traces.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve(config));
    traces.finish(SPAN_FLUSH_TIMEOUT);
    served
}

fn configure(options: Daemon) -> anyhow::Result<Config> {
    let token = match &options.token_file {
        Some(path) => Some(Token::read(path)?),
        None => Token::from_env(&|name| std::env::var(name).ok())?,
    };
    let data_dir = data_dir_or_default(options.data_dir)?;
    // An explicit token takes precedence over a saved identity.
    let joined = if token.is_none() {
        WorkerIdentity::read(&data_dir)?
    } else {
        None
    };
    let (secret, name) = match (&token, &joined) {
        (Some(token), _) => (token.secret(), None),
        (None, Some(joined)) => ("", Some(joined.name.to_string())),
        (None, None) => {
            return Err(anyhow::anyhow!(
                "no token; run `aitk-worker join` once, or give --token-file with the coordinator's token file, or set AITK_TOKEN"
            ));
        }
    };
    let server = options
        .server
        .or_else(|| joined.as_ref().map(|joined| joined.server.clone()));
    let server = server.unwrap_or_else(|| "http://127.0.0.1:7420".to_owned());
    let mut config = Config::new(server, secret, data_dir);
    config.name = name.unwrap_or(config.name);
    config.identity = joined;
    config.token_file = options.token_file.clone();
    config.upload_timeout = options.upload_timeout;
    config.ca_file = options.ca_file;
    config.traces = Traces::from_environment();
    if let Some(name) = options.name {
        match &config.identity {
            Some(joined) if joined.name.as_str() != name => tracing::warn!(
                given = name,
                joined = %joined.name,
                "--name has no effect: this worker has the name with which it joined. To change it, run `aitk-coordinator worker revoke` \
                 for that name, and `aitk-worker join --name` again"
            ),
            _ => config.name = name,
        }
    }
    config.labels = options.labels.into_iter().collect();
    config.progress_timeout = options.progress_timeout;
    config.cache_quota = options.cache_gib.saturating_mul(1 << 30);
    config.require_sandbox = options.require_sandbox;
    config.largest_model = options.largest_model_gib.saturating_mul(1 << 30);
    config.largest_file = options.largest_file_gib.saturating_mul(1 << 30);
    let mut confinement = sandbox::measure(&config.attempt_command);
    (confinement.limits, config.control_groups) = detect_control_groups();
    match confinement.holds() {
        true => tracing::info!(%confinement, "attempts are confined"),
        false => tracing::warn!(%confinement, "attempts are not confined; docs/security.md says what is needed"),
    }
    config.confinement = Some(confinement);
    config.verify_cache_after = Duration::from_secs(options.verify_cache_days.saturating_mul(24 * 60 * 60));
    config.derived_quota = options.derived_cache_gib.saturating_mul(1 << 30);
    // The variable may be set to nothing.
    config.hub_allow = options.hub_allow;
    config.hub_allow.retain(|name| !name.trim().is_empty());
    config.hub_secrets = options.hub_secrets;
    config.allow_extensions = options.allow_extension;
    config.devices = probe::choose(probe::devices(), &options.devices)?;
    for device in &config.devices {
        tracing::info!(
            device = probe::label(device.id),
            name = device.name,
            profile = device.profile.name(),
            "offering"
        );
    }
    Ok(config)
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let span = TimeSpan::parse(text).map(|span| span.0);
    span.ok_or_else(|| "expected a length of time such as 90s, 10m or 1h30m".to_owned())
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let label = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let label = label.map(|(key, value)| (key.to_owned(), value.to_owned()));
    label.ok_or_else(|| "expected KEY=VALUE".to_owned())
}

fn default_data_dir() -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let data = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    Some(data.join("aitk").join("worker"))
}

/// Whether the worker handles SIGHUP, which the kernel sends when a terminal closes, by shutting down. It does not if it was started with
/// SIGHUP ignored (`nohup`), or if the system does not say whether it was (no `/proc`).
fn handles_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|signals| u64::from_str_radix(signals.trim(), 16).ok());
    // The first bit is that of signal 1.
    ignored.is_some_and(|signals| signals & 1 == 0)
}

async fn serve(config: Config) -> anyhow::Result<ExitCode> {
    let timeout = config.shutdown_timeout;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // This comes before a handler is installed: the handler would replace the setting that ignores the signal.
    let mut hangup = handles_hangups().then(|| signal(SignalKind::hangup())).transpose()?;
    let closed = async {
        match &mut hangup {
            Some(hangup) => hangup.recv().await,
            None => std::future::pending().await,
        }
    };
    let mut worker = match aitk_worker::start(config).await {
        Ok(worker) => worker,
        Err(error @ (StartError::HubAllow(_) | StartError::Extension(_))) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            return Ok(ExitCode::from(2));
        }
        Err(error) => return Err(error.into()),
    };
    let ended = tokio::select! {
        ended = worker.ended() => ended,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        _ = closed => Ok(()),
    };
    match ended {
        Ok(()) => {
            tracing::info!(
                "shutting down within {} s: attempts save and report; a second signal ends them at once",
                timeout.as_secs()
            );
            tokio::select! {
                () = worker.shutdown() => {}
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(refusal) => {
            let _ = writeln!(std::io::stderr(), "error: {refusal}");
            Ok(ExitCode::from(match refusal {
                Refusal::Token(_) => 4,
                Refusal::Protocol(_) | Refusal::SessionEnded(_) => 6,
                Refusal::Config(_) => 1,
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_definition_is_valid() {
        Cli::command().debug_assert();
        assert_eq!(parse_label("a=b"), Ok(("a".to_owned(), "b".to_owned())));
        assert!(parse_label("c=").is_ok());
        assert!(parse_label("=b").is_err() && parse_label("a").is_err());
    }
}
