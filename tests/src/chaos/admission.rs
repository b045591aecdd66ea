//! Revokes a worker's certificate or token, and later gives it a new one.

use crate::cluster::TestCluster;
use crate::coordinators::{admin_command, join_command};
use crate::namespaces::Namespaces;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time limit of one command. The leader may be frozen, and the round must go on.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of an admission, with other faults at the same time.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(240);
/// Pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(300);
/// How often a running command is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Revokes and restores the access of one worker.
pub(super) struct Admission {
    name: String,
    /// An administrator's command without arguments.
    admin: Command,
    access: Access,
}

enum Access {
    /// A certificate. The command lacks its last argument, the join token.
    Certificate { join: Command },
    /// A token of its own, in this file.
    Token(PathBuf),
}

impl Admission {
    /// The admission of this worker.
    pub(super) fn of(test_cluster: &TestCluster, name: &str, namespaces: &Namespaces) -> Self {
        let access = match test_cluster.setup().endpoint {
            Some(_) => Access::Certificate {
                join: join_command(test_cluster, name, namespaces),
            },
            None => Access::Token(test_cluster.worker_token(name)),
        };
        Self {
            name: name.to_owned(),
            admin: admin_command(test_cluster),
            access,
        }
    }

    /// Revokes the worker's access. Returns false when no coordinator answered.
    pub(super) fn revoke(&self) -> bool {
        match &self.access {
            Access::Certificate { .. } => self.run(&["worker", "revoke", &self.name]).is_some(),
            Access::Token(_) => self.revoke_tokens(),
        }
    }

    /// Restores the worker's access in a thread, with retries. The result is false after [`ADMISSION_TIMEOUT`].
    pub(super) fn admit(self) -> JoinHandle<bool> {
        std::thread::spawn(move || {
            let begun = Instant::now();
            while begun.elapsed() < ADMISSION_TIMEOUT {
                if self.try_to_admit() {
                    return true;
                }
                std::thread::sleep(RETRY_PAUSE);
            }
            false
        })
    }

    fn try_to_admit(&self) -> bool {
        match &self.access {
            Access::Certificate { join } => {
                let Some(token) = self.run(&["worker", "join-token", &self.name]) else {
                    return false;
                };
                let joined = run(copy(join).arg(token)).is_some();
                if !joined {
                    // If only the answer was lost, the name is taken and must be revoked first.
                    self.run(&["worker", "revoke", &self.name]);
                }
                joined
            }
            Access::Token(file) => {
                let made = self.run(&["token", "create", &self.name, "--role", "worker"]);
                made.is_some_and(|token| write_secret(file, &token))
            }
        }
    }

    /// Revokes all its tokens; the answer to an earlier attempt may have been lost.
    fn revoke_tokens(&self) -> bool {
        let Some(list) = self.run(&["token", "ls", "--json"]) else {
            return false;
        };
        let tokens = list
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let good = tokens.filter(|token| token["name"] == self.name.as_str() && token["revoked"].is_null());
        let revoked = good.map(|token| self.run(&["token", "revoke", token["id"].as_str().unwrap_or_default()]));
        revoked.fold(false, |any, revoked| any | revoked.is_some())
    }

    fn run(&self, arguments: &[&str]) -> Option<String> {
        run(copy(&self.admin).args(arguments))
    }
}

/// A copy of a command.
fn copy(command: &Command) -> Command {
    let mut copy = Command::new(command.get_program());
    copy.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => copy.env(name, value),
            None => copy.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        copy.current_dir(folder);
    }
    copy
}

/// Runs a command and returns its output; `None` when it fails or takes too long. The output is short enough to fit into the
/// pipe's buffer.
fn run(command: &mut Command) -> Option<String> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let begun = Instant::now();
    let status = loop {
        if let Ok(Some(status)) = child.try_wait() {
            break status;
        }
        if begun.elapsed() > COMMAND_TIMEOUT {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    let mut stdout = String::new();
    child.stdout.as_mut()?.read_to_string(&mut stdout).ok()?;
    status.success().then(|| stdout.trim().to_owned())
}

/// Replaces the secret in a file atomically.
fn write_secret(file: &Path, secret: &str) -> bool {
    let temporary = file.with_extension("next");
    let mut options = std::fs::File::options();
    options.create(true).write(true).truncate(true).mode(0o600);
    let written = options
        .open(&temporary)
        .and_then(|mut out| out.write_all(secret.as_bytes()));
    written.and_then(|()| std::fs::rename(&temporary, file)).is_ok()
}
