//! Arguments of the benchmarks.

use clap::{Args, Subcommand, ValueEnum};

/// `aitk bench`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk bench control\n  aitk bench control --json | jq .jobs_per_s",
    disable_help_subcommand = true
)]
pub struct BenchArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The subcommands of `aitk bench`.
#[derive(Clone, Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure a coordinator with simulated workers
    #[command(
        long_about = "Measure a coordinator with simulated workers.\n\nStarts a coordinator in a child process, on \
                     loopback with TLS, and simulated workers, each with a connection, that finish their jobs at \
                     once. All writes are durable before they are acknowledged. Shows jobs per second from \
                     submission to finish, then the latency of single jobs while others wait, then the time of a \
                     restart. The local data is removed at the end."
    )]
    Control(BenchControlArgs),
    /// Measure this machine with parts of models at full size
    #[command(
        long_about = "Measure this machine with parts of models at full size.\n\nEach benchmark runs in a child \
                     process, with random weights: one warm-up run, then runs for a few seconds, of which \
                     the median is reported. Shows the time of one run, the operations per second, and the peak \
                     memory of the process. Some need several GiB and several minutes."
    )]
    Engine(BenchEngineArgs),
}

/// `aitk bench engine`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk bench engine --only unet_sd15_forward_64\n  aitk bench engine --only vae --json\n  aitk bench \
                  engine --list"
)]
pub struct BenchEngineArgs {
    /// Device to compute on: cuda, cuda:1, metal, cpu, cpu:portable [default: the best device]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Dtype of weights and activations: float32, bf16, float16. A CPU computes in float32, and in bf16 with AVX512-BF16
    #[arg(long, value_name = "DTYPE", default_value = "float32")]
    pub dtype: String,
    /// How long each benchmark is repeated, at least three times, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    pub seconds: f64,
    /// Only the benchmark with this name, or all whose names contain it
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// List the benchmarks without running them
    #[arg(long)]
    pub list: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Measure in this process and print one line of JSON
    #[arg(long, hide = true, requires = "only")]
    pub here: bool,
}

/// `aitk bench control`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk bench control --jobs 5000 --workers 50\n  aitk bench control --json > control.json\n  \
                  aitk bench control --workers 1000 --heartbeats 600\n  \
                  aitk bench control --store postgres --database postgres://aitk@localhost/bench"
)]
pub struct BenchControlArgs {
    /// Jobs to submit as fast as the coordinator accepts them
    #[arg(long, alias = "tasks", value_name = "N", default_value_t = 20_000, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000_000))]
    pub jobs: usize,
    /// Simulated workers, one device each
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000))]
    pub workers: usize,
    /// Jobs that wait while the latency of single jobs is measured
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub waiting: usize,
    /// First send only heartbeats for this many seconds, and show the share of a CPU core that the coordinator uses for
    /// them
    #[arg(long, alias = "beat", value_name = "SECONDS", default_value_t = 0)]
    pub heartbeats: u64,
    /// Where the coordinator stores its jobs
    #[arg(long, value_enum, default_value_t = BenchStore::Sqlite)]
    pub store: BenchStore,
    /// Empty database for --store postgres: postgres://USER@HOST/NAME; its tables are not removed. The password is read
    /// from PGPASSWORD
    #[arg(long, value_name = "URL", required_if_eq("store", "postgres"))]
    pub database: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Where the coordinator under test keeps its jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchStore {
    /// SQLite on a file system in memory, without the disk
    Memory,
    /// SQLite on the disk, the default of every coordinator
    Sqlite,
    /// PostgreSQL
    Postgres,
}

impl BenchStore {
    /// Returns the name as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }
}
