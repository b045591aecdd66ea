//! Flags of the verbs that look at machines and steer them.

use crate::output::format::parse_duration;
use clap::{Args, Subcommand};
use std::time::Duration;

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
        long_about = "A worker takes work again, after a drain, or after its devices were quarantined for faults."
    )]
    Undrain(UndrainArgs),
    /// A worker that is gone is no longer listed
    #[command(
        long_about = "A worker that is gone is no longer listed.\n\nOnly one that is not connected can be forgotten. Should it come back, it \
                      registers again; `aitk-coordinator worker revoke` ends its certificate."
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
