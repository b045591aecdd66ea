//! Runs the S3 server as a child process with its own folder and port.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
        // Another program may take the port before the server binds it.
        (0..5)
            .find_map(|_| Self::try_start(&program, keys))
            .or_else(|| panic!("{} does not start", program.display()))
    }

    fn try_start(program: &Path, keys: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bucket")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = Command::new(program)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(keys)
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(20) && child.try_wait().unwrap().is_none() {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(Self { child, folder, port });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
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

/// The server program: `AITK_S3S_FS`, else the server of the whole-system tests in the parent of this test's folder, else one in
/// the `PATH`.
fn program() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("AITK_S3S_FS").filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named));
    }
    // target/<profile>/deps/<this test> and target/<profile>/s3-server
    let test = std::env::current_exe().ok()?;
    let sibling = test.ancestors().nth(2)?.join("s3-server");
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(sibling)
        .chain(std::env::split_paths(&on_path).map(|folder| folder.join("s3s-fs")))
        .find(|path| path.is_file())
}
