//! `aitk bench`: measures parts of aitk on this machine.

mod control;
pub(crate) mod engine;
mod server;
mod simulated_workers;

use crate::args::{BenchArgs, BenchCommand};
use crate::context::Context;
use crate::failure::CommandResult;

/// Runs the benchmark of the command line.
///
/// # Errors
/// When the benchmark fails.
pub async fn run(context: &Context, args: BenchArgs) -> CommandResult {
    match args.command {
        BenchCommand::Control(args) => control::run(context, &args).await,
        BenchCommand::Engine(args) => engine::run(context, &args).await,
    }
}
