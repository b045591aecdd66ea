//! A coordinator in a process of its own, which a test can kill.

use super::eventually;
use aitk_proto::client::{Clients, connect};
use aitk_tests::processes::free_address;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

pub(crate) struct Daemon {
    child: Child,
    address: SocketAddr,
    dir: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Daemon {
    /// Starts a coordinator on a data folder and waits until it answers. `ADDRESS` in the arguments is replaced by its address.
    pub(crate) async fn start(dir: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let address = free_address();
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        let environment: Vec<_> = environment
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        let child = spawn(dir, address, &arguments, &environment);
        let daemon = Self {
            child,
            address,
            dir: dir.to_owned(),
            arguments,
            environment,
        };
        daemon.wait_until_ready().await;
        daemon
    }

    /// Kills the process (SIGKILL) and starts a new one on the same folder and address.
    pub(crate) async fn kill_and_restart(&mut self) {
        self.kill();
        self.child = spawn(&self.dir, self.address, &self.arguments, &self.environment);
        self.wait_until_ready().await;
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.ca_file().is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    fn ca_file(&self) -> Option<PathBuf> {
        Some(self.dir.join("ca/ca.pem")).filter(|path| path.exists())
    }

    pub(crate) fn token(&self) -> String {
        std::fs::read_to_string(self.dir.join("token"))
            .unwrap()
            .trim()
            .to_owned()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    pub(crate) async fn clients(&self) -> Clients {
        let ca_file = self.ca_file();
        connect(&self.url(), &self.token(), ca_file.as_deref()).await.unwrap()
    }

    async fn wait_until_ready(&self) {
        eventually(
            &format!("the coordinator to answer; its log: {}", self.log()),
            || async {
                if !self.dir.join("token").exists() {
                    return None;
                }
                let ca_file = self.ca_file();
                connect(&self.url(), &self.token(), ca_file.as_deref()).await.ok()
            },
        )
        .await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().filter(|line| line.contains("aitk_coordinator")).collect();
            let last = &lines[lines.len().saturating_sub(40)..];
            eprintln!("{}:\n{}", self.dir.display(), last.join("\n"));
        }
    }
}

fn spawn(dir: &Path, address: SocketAddr, arguments: &[String], environment: &[(String, String)]) -> Child {
    std::fs::create_dir_all(dir).unwrap();
    let log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
    Command::new(env!("CARGO_BIN_EXE_aitk-coordinator"))
        .args(["--bind", &address.to_string(), "--log-level", "debug", "--data-dir"])
        .arg(dir)
        .args(
            arguments
                .iter()
                .map(|text| text.replace("ADDRESS", &address.to_string())),
        )
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}
