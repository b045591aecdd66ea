//! The `aitk` command line: parses the arguments, calls a coordinator (or embeds one), and prints the result.

pub mod api;
pub mod args;
#[cfg(feature = "embedded")]
pub mod bench;
pub mod chart;
#[cfg(feature = "embedded")]
pub mod child_process;
pub mod commands;
pub mod config;
pub mod context;
#[cfg(feature = "embedded")]
pub mod demo;
pub mod docs;
pub mod download;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod exit;
#[cfg(feature = "embedded")]
pub mod extensions;
pub mod failure;
pub mod follow;
pub mod hub_push;
pub mod log_formatter;
pub mod members;
pub mod notify;
pub mod output;
#[cfg(feature = "embedded")]
mod own_address;
pub mod paths;
pub mod preflight;
pub mod reconnection;
pub mod run_folder;
pub mod sd_scripts;
pub mod settings;
pub mod step_history;
pub mod submission_data;
pub mod sweep;
#[cfg(feature = "embedded")]
pub mod thorough;
pub mod top;
pub mod trace;
pub mod upload;
pub mod views;

use aitk_common::telemetry;
use args::{Cli, Command};
use clap::Parser;
use clap::error::ErrorKind;
use exit::Exit;
use failure::{CommandResult, Failure};
use output::Ui;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// Runs the program and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            if !help && std::io::stderr().is_terminal() {
                // The arguments did not parse, so the flags for colour and progress are unknown.
                let ui = Ui::from_env(&context::env, false, true);
                ui.usage(&error);
                return Exit::Usage.into();
            }
            let exit = match error.print() {
                Err(closed) => Failure::output(&closed).exit,
                Ok(()) if help => Exit::Ok,
                Ok(()) => Exit::Usage,
            };
            return exit.into();
        }
    };
    let ui = Ui::from_env(&context::env, cli.global.no_color, true);
    if let Command::Attempt(args) = &cli.command {
        return run_attempt(args, &ui);
    }
    start_logging(&cli.global);
    match with_runtime(cli) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            ui.failure(&failure);
            failure.exit.into()
        }
    }
}

fn with_runtime(cli: Cli) -> CommandResult {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("cannot start: {error}")))?;
    let result = runtime.block_on(Box::pin(commands::dispatch(cli)));
    // After Ctrl-C, do not wait for a thread that is still hashing a large file.
    runtime.shutdown_timeout(Duration::from_secs(2));
    trace::finish();
    result
}

/// Starts logging. The level comes from `--log-level`, else from the number of `-v` flags, else from `AITK_LOG_LEVEL`.
fn start_logging(global: &args::Global) {
    let kind = telemetry::Kind::Command;
    let verbosity = match global.verbose {
        0 => None,
        1 => Some("info"),
        2 => Some("debug"),
        _ => Some("trace"),
    };
    let level = global.log_level.as_deref().or(verbosity);
    telemetry::init_at(telemetry::Options { kind, json: false }, level);
}

/// Runs as the child process of a worker that is embedded in this program. The worker reads its standard output, so
/// nothing else may be printed there.
#[cfg(feature = "embedded")]
fn run_attempt(args: &args::AttemptArgs, _ui: &Ui) -> ExitCode {
    if let Some(folder) = &args.try_sandbox {
        return aitk_worker::sandbox::try_in_this_process(folder);
    }
    telemetry::init(telemetry::Options {
        kind: telemetry::Kind::Attempt,
        json: false,
    });
    match &args.spec {
        Some(spec) => aitk_worker::run_attempt(spec),
        None => ExitCode::from(2),
    }
}

#[cfg(not(feature = "embedded"))]
fn run_attempt(_args: &args::AttemptArgs, ui: &Ui) -> ExitCode {
    let failure = Failure::failed("this aitk was built as a small client and cannot run attempts");
    ui.failure(&failure);
    failure.exit.into()
}
