//! `aitk-coordinator`: the coordinator as a daemon, and its administration commands.

mod commands;

use aitk_common::error_chain::error_chain;
use anyhow::Context;
use clap::Parser;
use commands::Command;
use commands::serve::{ServeArgs, serve, start_logging};
use std::io::Write;
use std::process::ExitCode;

/// Manages the queue of training and generation jobs and assigns them to workers.
#[derive(Debug, Parser)]
#[command(name = "aitk-coordinator", version, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: ServeArgs,
}

const EXAMPLES: &str = "Examples:
  aitk-coordinator
      For this machine only, with all data below ~/.local/share/aitk/coordinator.
  aitk-coordinator init --hostname gpu.lab
  aitk-coordinator --bind 0.0.0.0:7420 --storage s3://bucket/aitk
      For a network, with certificates of its own, and blobs in a bucket.
  aitk-coordinator worker join-token
      Let a machine join: aitk-worker join https://gpu.lab:7420 TOKEN
  aitk-coordinator token create anna --role submitter
      Let a user in: aitk login https://gpu.lab:7420
  aitk-coordinator gc --dry-run
      Show how much of the object storage no job needs any more.";

fn main() -> ExitCode {
    let args = Args::parse();
    if args.command.is_none()
        && let Err(code) = start_logging(&args.serve)
    {
        return code;
    }
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
        .and_then(|runtime| match args.command {
            Some(command) => runtime.block_on(command.run()),
            None => runtime.block_on(serve(args.serve)),
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed.
            let _ = writeln!(std::io::stderr(), "error: {}", error_chain(&*error));
            ExitCode::FAILURE
        }
    }
}
