//! A real S3 server with one bucket, `aitk`, that can be given faults and whose requests can be counted.

use crate::namespaces::Namespaces;
use crate::processes::{Process, free_address, wait_for_port};
use crate::server_fault::{COORDINATOR_KEY, ServerFault};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The access key of everyone.
const KEY: &str = "test-key";

/// A running S3 server.
pub struct S3 {
    fault_file: PathBuf,
    address: SocketAddr,
    /// The server.
    pub process: Process,
    /// The folder of its buckets.
    pub root: PathBuf,
}

/// Requests to the server, counted from its log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// `PUT` and `POST` requests.
    pub puts: u64,
    /// Bytes of their bodies.
    pub bytes_in: u64,
    /// `GET` requests.
    pub gets: u64,
    /// All requests.
    pub requests: u64,
}

impl S3 {
    /// Starts the server program at `program` (`env!("CARGO_BIN_EXE_s3-server")` in a test) below `folder`.
    ///
    /// # Panics
    /// When its folders cannot be created.
    #[must_use]
    pub fn start(program: &str, folder: &Path) -> Self {
        Self::start_in(program, folder, free_address(), &Namespaces::Host)
    }

    /// Starts it in these namespaces.
    ///
    /// # Panics
    /// When its folders cannot be created.
    #[must_use]
    pub fn start_in(program: &str, folder: &Path, address: SocketAddr, namespaces: &Namespaces) -> Self {
        let root = folder.join("s3");
        std::fs::create_dir_all(root.join("aitk")).expect("the bucket's folder can be made");
        let fault_file = folder.join("s3-fault");
        let mut command = namespaces.command(program, folder);
        command.args(["--host", &address.ip().to_string()]);
        command.args(["--port", &address.port().to_string()]);
        command.arg("--fault-file").arg(&fault_file);
        for key in [KEY, COORDINATOR_KEY] {
            command.args(["--access-key", key, "--secret-key", "test-secret"]);
        }
        command.arg(&root);
        let process = Process::start("s3", folder, &mut command);
        if *namespaces == Namespaces::Host {
            wait_for_port(address, &process);
        }
        Self {
            fault_file,
            address,
            process,
            root,
        }
    }

    /// The value for `--storage`.
    #[must_use]
    pub fn url(&self) -> String {
        "s3://aitk".to_owned()
    }

    /// The environment variables for coordinator and workers.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.address)),
            ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test-secret".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// The environment variable that gives the coordinator an access key of its own, see [`ServerFault::DenyCoordinator`].
    #[must_use]
    pub fn coordinator_key(&self) -> (String, String) {
        ("AWS_ACCESS_KEY_ID".to_owned(), COORDINATOR_KEY.to_owned())
    }

    /// Sets the current fault.
    ///
    /// # Panics
    /// When the fault file cannot be written.
    pub fn set_fault(&self, fault: ServerFault) {
        fault.write(&self.fault_file);
    }

    /// How many uploads have begun.
    #[must_use]
    pub fn uploads_begun(&self) -> usize {
        let log = self.process.log();
        log.lines()
            .filter(|line| line.starts_with("begin ") && line.contains(" PUT "))
            .count()
    }

    /// The requests so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let log = self.process.log();
        let mut traffic = Traffic::default();
        for line in log.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            match fields.as_slice() {
                ["begin", _, "PUT" | "POST", _] => {
                    (traffic.puts, traffic.requests) = (traffic.puts + 1, traffic.requests + 1)
                }
                ["begin", _, "GET", _] => (traffic.gets, traffic.requests) = (traffic.gets + 1, traffic.requests + 1),
                ["begin", ..] => traffic.requests += 1,
                ["end", _, _, bytes, _] => {
                    traffic.bytes_in += bytes
                        .strip_prefix("in=")
                        .and_then(|text| text.parse::<u64>().ok())
                        .unwrap_or(0);
                }
                _ => {}
            }
        }
        traffic
    }
}
