//! A real S3 server over a folder that injects faults on demand, see `aitk_tests::s3_server`.

use aitk_tests::s3_server::{Settings, serve};
use clap::Parser;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

#[derive(Parser)]
struct Options {
    /// The address to listen on.
    #[arg(long)]
    host: IpAddr,
    #[arg(long)]
    port: u16,
    /// The file with the current fault: fail, flaky N, hang, late, cut-upload N, cut-answer N, slow N,
    /// deny-coordinator.
    #[arg(long)]
    fault_file: Option<PathBuf>,
    /// An access key that is accepted, once or more often; without it, all requests are.
    #[arg(long, requires = "secret_key")]
    access_key: Vec<String>,
    /// The secret of each access key, in the same order.
    #[arg(long, requires = "access_key")]
    secret_key: Vec<String>,
    /// The folder with one sub-folder per bucket.
    root: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    serve(Settings {
        address: SocketAddr::new(options.host, options.port),
        fault_file: options.fault_file,
        keys: options.access_key.into_iter().zip(options.secret_key).collect(),
        root: options.root,
    })
    .await
}
