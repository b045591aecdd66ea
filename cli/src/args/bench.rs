//! Flags of what measures.

use clap::{Args, Subcommand, ValueEnum};

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
    /// Measure this machine with parts of models at full size
    #[command(
        long_about = "Measure this machine with parts of models at full size.\n\nEach piece of work runs in a process of its own, in \
                      float32 with random weights: once uncounted, then for a few seconds; the median counts. Shows the time \
                      of one run, the operations per second, and the most memory that the process held. Some want several \
                      GiB and minutes."
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
    /// Where to compute: cuda, cuda:1, metal, cpu [default: the best there is]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// The work of this name, or all whose name has this in it
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// Names and what they are, without measuring
    #[arg(long)]
    pub list: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// In this very process, one line of JSON
    #[arg(long, hide = true, requires = "only")]
    pub here: bool,
}

/// `aitk bench control`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk bench control --tasks 5000 --workers 50\n  aitk bench control --json > control.json\n  \
                  aitk bench control --workers 1000 --beat 600\n  \
                  aitk bench control --store postgres --database postgres://aitk@localhost/bench"
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
    /// First let the workers only beat, for so many seconds, and show what share of a core the coordinator takes for it
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub beat: u64,
    /// Where the coordinator keeps its tasks
    #[arg(long, value_enum, default_value_t = BenchStore::Sqlite)]
    pub store: BenchStore,
    /// For --store postgres, an empty database: postgres://USER@HOST/NAME; its tables stay. A password goes into PGPASSWORD
    #[arg(long, value_name = "URL", required_if_eq("store", "postgres"))]
    pub database: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Where the coordinator under test keeps its tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchStore {
    /// SQLite on a file system in memory: what the disk costs
    Memory,
    /// SQLite on the disk, the default of every coordinator
    Sqlite,
    /// PostgreSQL
    Postgres,
}

impl BenchStore {
    /// As it is written on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }
}
