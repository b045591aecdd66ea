//! Arguments of the commands that list and control workers, and of `doctor` and `login`.

use crate::output::format::parse_duration;
use clap::{Args, Subcommand, ValueEnum};
use std::time::Duration;

/// `aitk worker`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk worker drain box1 --now\n  aitk worker undrain box1",
    disable_help_subcommand = true
)]
pub struct WorkerArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: WorkerCommand,
}

/// The subcommands of `aitk worker`.
#[derive(Clone, Debug, Subcommand)]
pub enum WorkerCommand {
    /// Stop assigning work to a worker
    #[command(
        long_about = "Stop assigning work to a worker, also after it or the coordinator restarts, until `aitk worker \
                     undrain`.\n\nRunning jobs run to their end; with --now they save and move to other workers."
    )]
    Drain(DrainArgs),
    /// Assign work to a worker again
    #[command(
        long_about = "Assign work to a worker again, after a drain, or after its devices were quarantined because of faults."
    )]
    Undrain(UndrainArgs),
    /// Remove a disconnected worker from the list
    #[command(
        long_about = "Remove a disconnected worker from the list.\n\nA connected worker cannot be removed. If the \
                     worker connects later, it registers again unless its certificate is revoked (`aitk-coordinator worker revoke`)."
    )]
    Forget(ForgetArgs),
}

/// `aitk worker forget`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk worker forget box1\n  aitk worker forget box1 --json | jq -r .id")]
pub struct ForgetArgs {
    /// Worker: its name, its id, or the beginning of its id
    #[arg(value_name = "WORKER")]
    pub worker: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk worker drain`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk worker drain box1\n  aitk worker drain box1 --now && aitk workers")]
pub struct DrainArgs {
    /// Worker: its name, its id, or the beginning of its id
    #[arg(value_name = "WORKER")]
    pub worker: String,
    /// Running jobs save and move to other workers
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

/// `aitk top`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk top\n  aitk top --interval 10s --server https://box:7420")]
pub struct TopArgs {
    /// How often to refresh: 1s, 10s, 1m
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s")]
    pub interval: Duration,
}

/// The state of a worker or its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WorkerState {
    /// No job is running, and the device is available
    Idle,
    /// A job is running
    Running,
    /// The worker is drained: it gets no new work
    Drained,
    /// The worker is shutting down
    Leaving,
    /// The worker is not connected
    Away,
    /// The device gets no work because of faults
    Quarantined,
}

impl WorkerState {
    /// Returns the name as on the command line and in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Drained => "drained",
            Self::Leaving => "leaving",
            Self::Away => "away",
            Self::Quarantined => "quarantined",
        }
    }
}

/// `aitk workers`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk workers 'box*' --state idle\n  aitk workers --label zone=lab --json | jq '.workers[].devices[].memory_budget'"
)]
pub struct WorkersArgs {
    /// Only these: names, ids, beginnings of ids, or patterns with * and ?
    #[arg(value_name = "WORKER")]
    pub names: Vec<String>,
    /// Only workers with a device in this state; may be given several times, then any may match
    #[arg(long = "state", value_enum, value_name = "STATE")]
    pub states: Vec<WorkerState>,
    /// Only workers with this label, or with this value of the label; may be given several times, then all must match
    #[arg(long = "label", value_name = "NAME[=VALUE]")]
    pub labels: Vec<String>,
    /// Print only ids
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk doctor`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk doctor\n  aitk doctor --json > report.json\n  aitk doctor --thorough --device cuda:1"
)]
pub struct DoctorArgs {
    /// Also run jobs and benchmarks on each device, and compare them with the CPU: about six minutes for a GPU
    #[arg(long)]
    pub thorough: bool,
    /// Devices for --thorough: cuda, cuda:1, metal, cpu, cpu:portable [default: all devices of this machine]
    #[arg(long, value_name = "DEVICE", requires = "thorough")]
    pub device: Option<String>,
    /// Time for each device with --thorough, in seconds; benchmarks that it does not suffice for are skipped [default: 330 for a GPU, 1200 for a CPU]
    #[arg(long, value_name = "SECONDS", requires = "thorough", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub time: Option<u64>,
    /// Steps of the demo's training with --thorough. Its tests take fewer
    #[arg(long, value_name = "N", requires = "thorough", hide = true, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub steps: u64,
    /// Also write the report as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub report: Option<std::path::PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk login`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk login https://gpu.lab:7420\n  aitk login https://gpu.lab:7420 --token-file anna.token"
)]
pub struct LoginArgs {
    /// Address of the coordinator
    #[arg(value_name = "URL")]
    pub server: String,
}
