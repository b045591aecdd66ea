//! A model hub over folders that injects faults on demand, see `aitk_tests::hub_server`.

use aitk_tests::hub_server::{Settings, serve};
use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(Parser)]
struct Options {
    /// The address to listen on.
    #[arg(long)]
    address: SocketAddr,
    /// The file with the current fault: fail, flaky N, hang, late, cut-answer N, slow N.
    #[arg(long)]
    fault_file: Option<PathBuf>,
    /// The number of the first commit.
    #[arg(long)]
    first_commit: u64,
    /// The folder with a folder for each organisation.
    root: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    serve(Settings {
        address: options.address,
        fault_file: options.fault_file,
        root: options.root,
        first_commit: options.first_commit,
    })
    .await
}
