//! The `aitk` command line: parse, talk to a coordinator (or embed one), show.

pub mod api;
pub mod args;
#[cfg(feature = "embedded")]
pub mod bench;
pub mod chart;
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
pub mod failure;
pub mod follow;
pub mod job_file;
pub mod journal;
pub mod members;
pub mod notify;
pub mod output;
pub mod paths;
pub mod preflight;
pub mod run_folder;
pub mod settings;
pub mod sweep;
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

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            if !help && std::io::stderr().is_terminal() {
                // Whoever asked wrongly did not say how to show it.
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
        return attempt(args, &ui);
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
    let ended = runtime.block_on(Box::pin(commands::dispatch(cli)));
    // A file that is still being hashed must not hold up who pressed Ctrl-C.
    runtime.shutdown_timeout(Duration::from_secs(2));
    trace::finish();
    ended
}

/// What is logged: by flag, else by `AITK_LOG_LEVEL`, else by how often `-v` was said.
fn start_logging(global: &args::Global) {
    let kind = telemetry::Kind::Command;
    let louder = match global.verbose {
        0 => None,
        1 => Some("info"),
        2 => Some("debug"),
        _ => Some("trace"),
    };
    let level = global.log_level.as_deref().or(louder);
    telemetry::init_at(telemetry::Options { kind, json: false }, level);
}

/// The child process of a worker inside this program. The worker reads what it prints, so it prints nothing itself.
#[cfg(feature = "embedded")]
fn attempt(args: &args::AttemptArgs, _ui: &Ui) -> ExitCode {
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
fn attempt(_args: &args::AttemptArgs, ui: &Ui) -> ExitCode {
    let failure = Failure::failed("this aitk was built as a small client and runs no attempts");
    ui.failure(&failure);
    failure.exit.into()
}
