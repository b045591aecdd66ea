//! `init`: creates a certificate authority for a private network.

use super::console::{default_data_dir, print_line};
use aitk_coordinator::{Config, ca_folder, https_address, init};
use anyhow::Context;
use clap::Args;
use std::path::PathBuf;

/// Arguments of `init`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  aitk-coordinator init --hostname gpu.lab
  aitk-coordinator init --data-dir /var/lib/aitk --hostname gpu.lab --hostname 203.0.113.7")]
pub(crate) struct InitArgs {
    /// A name or address under which workers and users reach the coordinator. May be repeated. The machine's own names
    /// and addresses are always included.
    #[arg(long = "hostname", value_name = "NAME")]
    hostnames: Vec<String>,
    /// Data folder of the coordinator. Default: as for the coordinator itself.
    #[arg(long, env = "AITK_COORDINATOR_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

pub(super) fn run(args: &InitArgs) -> anyhow::Result<()> {
    let data_dir = args.data_dir.clone().map_or_else(default_data_dir, Ok)?;
    let outcome = init(&data_dir, &args.hostnames).context("cannot create the certificate authority")?;
    let folder = ca_folder(&data_dir);
    if !outcome.created {
        print_line(&format!(
            "{} exists already (SHA-256 {}); nothing was changed",
            folder.display(),
            outcome.hash
        ))?;
        if !args.hostnames.is_empty() {
            eprintln!(
                "the authority exists; give additional names when you start the coordinator: aitk-coordinator --hostname NAME"
            );
        }
        return Ok(());
    }
    let option = match &args.data_dir {
        Some(path) => format!(" --data-dir {}", path.display()),
        None => String::new(),
    };
    let host = args.hostnames.first().map_or("THIS-HOST", String::as_str);
    let address = https_address(host, Config::DEFAULT_PORT);
    print_line(&format!("{} (SHA-256 {})", folder.display(), outcome.hash))?;
    eprintln!(
        "A certificate authority was created; {} is its key: keep a copy in a safe place.
Next:
  aitk-coordinator --bind 0.0.0.0:7420{option}
      starts the coordinator with a certificate of its own
  aitk-coordinator worker join-token{option}
      here, for each worker; then there: aitk-worker join {address} TOKEN
  aitk-coordinator token create NAME --role submitter{option}
      here, for each user; then there: aitk login {address}",
        folder.join("ca.key").display()
    );
    Ok(())
}
