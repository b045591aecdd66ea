//! Runs the S3 server as a child process with its own folder and port.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

pub(super) const KEY: &str = "AKEXAMPLE";
pub(super) const SECRET: &str = "a-secret-for-tests";

pub(super) struct Server {
    child: Child,
    folder: tempfile::TempDir,
    port: u16,
}

impl Server {
    /// Starts a server with an empty bucket named `bucket`. Prints a message and returns `None` if there is no server program.
    pub(super) fn start() -> Option<Self> {
        Self::start_with(&["--access-key", KEY, "--secret-key", SECRET])
    }

    /// Starts a server without access control.
    pub(super) fn start_open() -> Option<Self> {
        Self::start_with(&[])
    }

    fn start_with(keys: &[&str]) -> Option<Self> {
        let Some(program) = program() else {
            crate::skip::skip(
                "s3-server",
                "`cargo test --workspace` builds the S3 server (tests/src/bin/s3-server.rs)",
            );
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bucket")).unwrap();
        // The server chooses the port: one that is chosen here could be taken by another server before this one binds it.
        let mut child = Command::new(&program)
            .args(["--host", "127.0.0.1", "--port", "0"])
            .args(keys)
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let address = line
            .strip_prefix("listening on ")
            .and_then(|address| address.trim().parse::<SocketAddr>().ok());
        let Some(address) = address else {
            panic!("{} does not start: {line:?}", program.display())
        };
        // The server writes a line for each request, and must not wait for a reader.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Some(Self {
            child,
            folder,
            port: address.port(),
        })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(super) fn root(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server of the whole-system tests, which is in the parent of this test's folder.
fn program() -> Option<PathBuf> {
    // target/<profile>/deps/<this test> and target/<profile>/s3-server
    let test = std::env::current_exe().ok()?;
    let path = test.ancestors().nth(2)?.join("s3-server");
    path.is_file().then_some(path)
}
