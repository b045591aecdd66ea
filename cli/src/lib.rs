//! The `aitk` command line: parse, talk to a coordinator (or embed one), show.

pub mod api;
pub mod args;
pub mod docs;
pub mod exit;
pub mod failure;
pub mod output;
pub mod paths;
pub mod settings;
pub mod token;
pub mod views;

use clap::Parser;
use std::process::ExitCode;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let _cli = args::Cli::parse();
    exit::Exit::Ok.into()
}
