//! The `aitk` command line: parse, talk to a coordinator (or embed one), show.

pub mod api;
pub mod args;
pub mod commands;
pub mod docs;
pub mod download;
pub mod exit;
pub mod failure;
pub mod follow;
pub mod output;
pub mod paths;
pub mod settings;
pub mod token;
pub mod views;

use args::{Cli, Command};
use clap::Parser;
use clap::error::ErrorKind;
use exit::Exit;
use failure::{CommandResult, Failure};
use output::Ui;
use std::process::ExitCode;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            let exit = match error.print() {
                Err(closed) => Failure::output(&closed).exit,
                Ok(()) if help => Exit::Ok,
                Ok(()) => Exit::Usage,
            };
            return exit.into();
        }
    };
    let ui = Ui::from_env(&commands::env, cli.global.no_color, true);
    if let Command::Attempt(args) = &cli.command {
        return attempt(args, &ui);
    }
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
    runtime.block_on(Box::pin(commands::dispatch(cli)))
}

fn attempt(_args: &args::AttemptArgs, _ui: &Ui) -> ExitCode {
    Exit::Failed.into()
}
