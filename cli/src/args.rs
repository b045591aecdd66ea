//! The command line: every verb, flag and example. `docs/cli.md` is made from here.

use crate::exit::help_table;
use crate::output::format::parse_duration;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

const ENVIRONMENT: &str = "Environment:
  AITK_SERVER      address of the coordinator
  AITK_TOKEN_FILE  file with the token, mode 0600; or AITK_TOKEN, the token
  AITK_CA_FILE     CA certificate that signs the coordinator's
  AITK_USER        whose jobs are submitted, for shares and quotas
  AITK_LOG_LEVEL   error, warn, info, debug, trace
  NO_COLOR         no colours;  COLUMNS  width of tables
A flag wins over the environment, that over ./aitk.yaml, that over the user file
(~/.config/aitk/config.yaml), that over a running `aitk up`. `aitk doctor` shows
which of them is used.";

fn root_help() -> String {
    format!("{}\n\n{ENVIRONMENT}", help_table())
}

/// Train and run generative models on the machines you already own.
#[derive(Debug, Parser)]
#[command(
    name = "aitk",
    bin_name = "aitk",
    version,
    about,
    after_help = root_help(),
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Flags of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Address of the coordinator [env: AITK_SERVER]
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,
    /// File that holds the token, mode 0600 [env: AITK_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// CA certificate (PEM) that signs the coordinator's [env: AITK_CA_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// No colours
    #[arg(long, global = true)]
    pub no_color: bool,
    /// Say more: -v what the program does, -vv details
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// error, warn, info, debug, trace, or tracing directives [env: AITK_LOG_LEVEL]
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run configs on this machine, with no server
    #[command(
        long_about = "Run configs on this machine, with no server.\n\nDoes what `python run.py CONFIG…` did: same folders and file \
                  names under training_folder/name. Run the same command again to resume. The first Ctrl-C saves and \
                  stops (exit code 130), a second one kills (137)."
    )]
    Run(RunArgs),
    /// Submit a config to a coordinator; prints the job's id
    #[command(
        long_about = "Submit a config to a coordinator; prints the job's id.\n\nThe config is checked here first. Local inputs \
                  (data sets, models) are uploaded as snapshots: what the store already has is not sent again. From then \
                  on nothing depends on this machine. With --follow, Ctrl-C detaches (exit code 130) and the job goes on; \
                  otherwise the exit code is the job's."
    )]
    Submit(SubmitArgs),
    /// List jobs
    #[command(
        long_about = "List jobs: the active ones and the last ones that ended.\n\nOn a terminal a table; in a pipe the same \
                  columns with tabs between them."
    )]
    Ps(PsArgs),
    /// Show what happened to a job
    #[command(
        long_about = "Show what happened to a job, with its time: what it wrote, where it ran, its phases, its loss now and \
                  then, and the files it saved.\n\nWith -f the command follows the job until it ends and returns the job's exit \
                  code; Ctrl-C detaches (130) and the job goes on. A broken connection is taken up where it stopped."
    )]
    Logs(LogsArgs),
    /// Follow a job until it ends
    #[command(
        long_about = "Follow a job until it ends: progress, log lines, files.\n\nReturns the job's exit code. Ctrl-C detaches \
                  (130) and the job goes on. A broken connection is taken up where it stopped."
    )]
    Watch(WatchArgs),
    /// Wait for jobs to end
    #[command(
        long_about = "Wait for jobs to end.\n\nThe exit code is that of the first job, in the order given, that did not \
                  complete; 0 when all did; 124 when the time is over first."
    )]
    Wait(WaitArgs),
    /// Stop a job after saving its state
    #[command(
        long_about = "Stop a job after saving its state.\n\n`aitk resume` lets it go on from there. The command returns when the \
                  job is asked to stop; `aitk wait` waits until it has."
    )]
    Stop(StopArgs),
    /// Let a stopped, paused or failed job go on from its last checkpoint
    #[command(
        long_about = "Let a stopped, paused or failed job go on from its last checkpoint, on whatever machine fits."
    )]
    Resume(ResumeArgs),
    /// Let a job wait, saved, until it is resumed
    #[command(
        long_about = "Let a job wait, saved, until it is resumed.\n\nA waiting job is not started; a running one saves its state \
                      first and leaves its device to others. Either keeps its place in the queue."
    )]
    Pause(PauseArgs),
    /// Give a job another priority
    #[command(
        long_about = "Give a job another priority: higher goes first.\n\nA running job keeps its device, unless it yields \
                      (cluster.yields) to those who are now above it."
    )]
    Priority(PriorityArgs),
    /// Say why a job waits, device by device
    Explain(ExplainArgs),
    /// Say where a config could run, before it is submitted
    #[command(
        long_about = "Say where a config could run, before it is submitted: which machines, with which memory profile, how much \
                      memory and about how long.\n\nNothing is stored and nothing is sent but the config. The exit code is 7 \
                      when no connected device fits."
    )]
    Fit(FitArgs),
    /// List or fetch what a job made
    Artifacts(ArtifactsArgs),
    /// Show machines and jobs, live
    #[command(
        long_about = "Show machines and jobs, live: devices with what runs on them, jobs with how far they are, and below them the \
                      chosen job, with why it waits, device by device.\n\nKeys: arrows or j and k choose a job, q leaves."
    )]
    Top(TopArgs),
    /// List workers and their devices
    Workers(WorkersArgs),
    /// Let a worker take no more work, or work again
    Worker(WorkerArgs),
    /// Check this machine, its settings and the way to the coordinator
    #[command(
        long_about = "Check this machine, its settings and the way to the coordinator.\n\nEach problem comes with what to do \
                  about it. The exit code is 0 when jobs can run, here or there; 1 when there is a problem."
    )]
    Doctor(DoctorArgs),
    /// Write a commented job file to start from
    Init(InitArgs),
    /// Start a coordinator and a worker here
    #[command(
        long_about = "Start a coordinator and a worker here.\n\nOther aitk commands of this user find it by themselves. The first \
                  Ctrl-C lets running jobs save and goes; they are taken up at the next `aitk up`. An address other than \
                  loopback needs --tls-cert and --tls-key."
    )]
    Up(UpArgs),
    /// Train a tiny model in two minutes and show the result
    Demo(DemoArgs),
    /// Measure how fast the parts of aitk are here
    Bench(BenchArgs),
    /// Write shell completions
    Completions(CompletionsArgs),
    /// Run one attempt (started by the worker)
    #[command(hide = true)]
    Attempt(AttemptArgs),
}

/// `aitk run`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk run my_lora.yaml\n  aitk run a.yaml b.yaml --recover -l run.log")]
pub struct RunArgs {
    /// Config files, run in this order: names in ./config or paths
    #[arg(required = true, value_name = "CONFIG")]
    pub configs: Vec<PathBuf>,
    /// Go on with the next config when one fails
    #[arg(short, long)]
    pub recover: bool,
    /// Replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Also write everything that is shown to the end of this file
    #[arg(short, long = "log", value_name = "LOGFILE")]
    pub log: Option<PathBuf>,
    /// Where to compute: cuda, cuda:1, metal, cpu
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk submit`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk submit my_lora.yaml\n  id=$(aitk submit my_lora.yaml -n ada -y) && aitk wait \"$id\""
)]
pub struct SubmitArgs {
    /// Config file: a name in ./config or a path
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Follow the job until it ends
    #[arg(short, long)]
    pub follow: bool,
    /// Replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Higher goes first; wins over cluster.priority
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub priority: Option<i32>,
    /// Whose job it is, for shares and quotas [env: AITK_USER]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Do not ask before a large upload
    #[arg(short, long)]
    pub yes: bool,
    /// The same key gives the same job, however often it is submitted
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Print JSON: id, name, uploaded bytes; with --follow one line per event
    #[arg(long)]
    pub json: bool,
    /// No progress bars and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk ps`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk ps -a\n  aitk ps --json | jq -r '.jobs[] | select(.state == \"failed\") | .id'"
)]
pub struct PsArgs {
    /// All jobs, not only the active and the last ones
    #[arg(short, long)]
    pub all: bool,
    /// Show again every two seconds, until Ctrl-C; with --json one line each time
    #[arg(short, long)]
    pub watch: bool,
    /// Ids only
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk logs`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk logs 3f2a --tail 50\n  aitk logs my_lora -f --since 10m")]
pub struct LogsArgs {
    /// Job: its id, the beginning of its id, or its name
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Follow until the job ends
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last N lines of what is there
    #[arg(long, value_name = "N")]
    pub tail: Option<usize>,
    /// Only lines since then: 10m, 2h, or RFC 3339
    #[arg(long, value_name = "WHEN")]
    pub since: Option<String>,
    /// One JSON line per line that the job itself wrote; `aitk watch --json` has every event
    #[arg(long)]
    pub json: bool,
}

/// `aitk watch`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk watch my_lora\n  aitk watch 3f2a --json | jq -c 'select(.event == \"metrics\")'"
)]
pub struct WatchArgs {
    /// Job: its id, the beginning of its id, or its name
    #[arg(value_name = "JOB")]
    pub job: String,
    /// One JSON line per event
    #[arg(long)]
    pub json: bool,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk wait`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk wait my_lora\n  aitk wait 3f2a 91bc --timeout 2h")]
pub struct WaitArgs {
    /// Jobs: ids, beginnings of ids, or names
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Give up after this long: 90s, 10m, 2h
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// Print the jobs' ids and nothing else
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk stop`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk stop my_lora\n  aitk stop 3f2a --now")]
pub struct StopArgs {
    /// Jobs: ids, beginnings of ids, or names
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// End it at once, without saving: work since the last checkpoint is lost
    #[arg(long)]
    pub now: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk resume`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk resume my_lora\n  aitk resume 3f2a && aitk watch 3f2a")]
pub struct ResumeArgs {
    /// Jobs: ids, beginnings of ids, or names
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk pause`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk pause my_lora\n  aitk pause 3f2a && aitk resume 3f2a")]
pub struct PauseArgs {
    /// Jobs: ids, beginnings of ids, or names
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk priority`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk priority my_lora 10\n  aitk priority 3f2a -5")]
pub struct PriorityArgs {
    /// Job: its id, the beginning of its id, or its name
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Higher goes first; 0 is usual
    #[arg(value_name = "N", allow_negative_numbers = true)]
    pub priority: i32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk explain`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk explain my_lora\n  aitk explain 3f2a --json | jq '.devices[] | select(.fits)'"
)]
pub struct ExplainArgs {
    /// Job: its id, the beginning of its id, or its name
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk fit`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk fit my_lora.yaml\n  aitk fit my_lora.yaml --json | jq -r .summary")]
pub struct FitArgs {
    /// Config file: a name in ./config or a path
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk worker`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk worker drain box1 --now\n  aitk worker undrain box1",
    disable_help_subcommand = true
)]
pub struct WorkerArgs {
    /// What to do with it.
    #[command(subcommand)]
    pub command: WorkerCommand,
}

/// The verbs below `aitk worker`.
#[derive(Clone, Debug, Subcommand)]
pub enum WorkerCommand {
    /// A worker takes no more work
    #[command(
        long_about = "A worker takes no more work, also after it or the coordinator restarts, until `aitk worker undrain`.\n\nWhat \
                      runs there runs to its end; with --now it saves and goes on elsewhere."
    )]
    Drain(DrainArgs),
    /// A worker takes work again
    #[command(
        long_about = "A worker takes work again, after a drain, or after its devices were quarantined for driver faults."
    )]
    Undrain(UndrainArgs),
}

/// `aitk worker drain`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk worker drain box1\n  aitk worker drain box1 --now && aitk workers")]
pub struct DrainArgs {
    /// Worker: its name, its id, or the beginning of its id
    #[arg(value_name = "WORKER")]
    pub worker: String,
    /// What runs there saves and goes on elsewhere
    #[arg(long)]
    pub now: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk worker undrain`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk worker undrain box1\n  aitk worker undrain box1 --json | jq .drained")]
pub struct UndrainArgs {
    /// Worker: its name, its id, or the beginning of its id
    #[arg(value_name = "WORKER")]
    pub worker: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk artifacts`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk artifacts ls my_lora\n  aitk artifacts get my_lora -o out",
    disable_help_subcommand = true
)]
pub struct ArtifactsArgs {
    /// List or fetch.
    #[command(subcommand)]
    pub command: ArtifactsCommand,
}

/// The verbs below `aitk artifacts`.
#[derive(Clone, Debug, Subcommand)]
pub enum ArtifactsCommand {
    /// List what a job made
    Ls(ArtifactsLsArgs),
    /// Fetch what a job made
    #[command(
        long_about = "Fetch what a job made into a folder.\n\nEvery file is checked against its hash and appears only when it is \
                  complete. Files that are there already with the same content are skipped, so the same command goes on \
                  after a break. Nothing is ever written outside the folder. Prints the paths of the files."
    )]
    Get(ArtifactsGetArgs),
}

/// `aitk artifacts ls`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk artifacts ls my_lora\n  aitk artifacts ls 3f2a -q | grep safetensors")]
pub struct ArtifactsLsArgs {
    /// Job: its id, the beginning of its id, or its name
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Names only
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk artifacts get`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk artifacts get my_lora -o out\n  aitk artifacts get 3f2a -o out '*.safetensors'"
)]
pub struct ArtifactsGetArgs {
    /// Job: its id, the beginning of its id, or its name
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Only these: names, folders, or patterns with * and ?
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Folder to write into; it is made if need be
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace files that are there with another content
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk top`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk top\n  aitk top --interval 10s --server https://box:7420")]
pub struct TopArgs {
    /// How often to look: 1s, 10s, 1m
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s")]
    pub interval: Duration,
}

/// `aitk workers`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk workers\n  aitk workers --json | jq '.workers[].devices[].memory_budget'")]
pub struct WorkersArgs {
    /// Ids only
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk doctor`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk doctor\n  aitk doctor --json > report.json")]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk init`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk init\n  aitk init config/my_lora.yaml --force")]
pub struct InitArgs {
    /// Folder (then job.yaml in it) or file to write
    #[arg(value_name = "DIR|FILE", default_value = ".")]
    pub path: PathBuf,
    /// Overwrite what is there
    #[arg(long)]
    pub force: bool,
}

/// `aitk up`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk up\n  aitk up --bind 0.0.0.0:7420 --tls-cert cert.pem --tls-key key.pem")]
pub struct UpArgs {
    /// Address to listen at; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7420")]
    pub bind: std::net::SocketAddr,
    /// Where jobs, checkpoints and the token are kept [default: ~/.local/share/aitk]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Object storage: file:///…, s3://bucket/prefix, gs://…, az://… [default: below --data-dir]
    #[arg(long, value_name = "URL")]
    pub storage: Option<String>,
    /// TLS certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// TLS key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Only the coordinator, no worker
    #[arg(long)]
    pub no_worker: bool,
    /// The worker's device: cuda, cuda:1, metal, cpu [default: the best there is]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// The worker's name [default: the name of this machine]
    #[arg(long, value_name = "NAME")]
    pub worker_name: Option<String>,
}

/// `aitk demo`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk demo\n  aitk demo -o my_demo")]
pub struct DemoArgs {
    /// Folder for what it makes
    #[arg(short, long, value_name = "DIR", default_value = "aitk-demo")]
    pub output: PathBuf,
    /// Where to compute: cuda, cuda:1, metal, cpu
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// No progress bars and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk bench`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk bench control\n  aitk bench control --json | jq .tasks_per_s",
    disable_help_subcommand = true
)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The verbs below `aitk bench`.
#[derive(Clone, Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure a coordinator with simulated workers
    #[command(
        long_about = "Measure a coordinator with simulated workers.\n\nStarts a coordinator in a process of its own, on loopback with \
                      TLS, and workers with a connection each that end their tasks at once. Everything is durable before \
                      it is acknowledged. Shows tasks per second from submit to finish, then how soon single tasks are \
                      assigned while others wait, then how long a restart takes. Nothing is left behind."
    )]
    Control(BenchControlArgs),
}

/// `aitk bench control`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk bench control --tasks 5000 --workers 50\n  aitk bench control --json > control.json"
)]
pub struct BenchControlArgs {
    /// Tasks that are submitted as fast as they are taken
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000_000))]
    pub tasks: usize,
    /// Simulated workers, one device each
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000))]
    pub workers: usize,
    /// Tasks that wait while single ones are assigned
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub waiting: usize,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk completions`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk completions bash > ~/.local/share/bash-completion/completions/aitk\n  aitk completions zsh \
                  > ~/.zfunc/_aitk"
)]
pub struct CompletionsArgs {
    /// Which shell
    pub shell: clap_complete::Shell,
}

/// `aitk attempt`, hidden.
#[derive(Args, Clone, Debug)]
pub struct AttemptArgs {
    /// What to run, as the worker wrote it
    #[arg(long, value_name = "FILE")]
    pub spec: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn upstream_spellings_of_run_parse() {
        let cli = Cli::parse_from(["aitk", "run", "a.yaml", "b", "-r", "-n", "ada", "-l", "x.log"]);
        let Command::Run(run) = cli.command else { panic!() };
        assert!(run.recover && run.configs.len() == 2);
        assert_eq!((run.name.as_deref(), run.log), (Some("ada"), Some("x.log".into())));
    }

    #[test]
    fn every_verb_shows_two_examples() {
        fn check(command: &clap::Command, path: &str) {
            for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
                let path = format!("{path} {}", sub.get_name());
                let text = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                let examples = text.lines().filter(|line| line.contains("aitk ")).count();
                assert!(examples >= 2, "{path} has {examples} examples");
                check(sub, &path);
            }
        }
        check(&Cli::command(), "aitk");
    }

    #[test]
    fn global_flags_go_anywhere() {
        for line in [
            ["aitk", "--server", "http://x", "ps"],
            ["aitk", "ps", "--server", "http://x"],
        ] {
            assert_eq!(Cli::parse_from(line).global.server.as_deref(), Some("http://x"));
        }
    }
}
