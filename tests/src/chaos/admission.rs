//! Workers that are refused for good, and let in again later: their certificate, or their token, is revoked, and they get
//! another one.

use crate::members::{admin_command, join_command};
use crate::place::Place;
use crate::pool::Pool;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long one command may take: whoever leads may be frozen, and the round goes on.
const ANSWER: Duration = Duration::from_secs(5);
/// How long it may take until a worker is let in, with everything else that goes wrong meanwhile.
const LIMIT: Duration = Duration::from_secs(240);
/// Between two tries, and between two looks at a command.
const PAUSE: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_millis(5);

/// What sends a worker away, and lets it in again.
pub(super) struct Admission {
    name: String,
    /// An administrator's command without arguments.
    admin: Command,
    access: Access,
}

enum Access {
    /// With a certificate; the command lacks its join token.
    Certificate { join: Command },
    /// With a token of its own, in this file.
    Token(PathBuf),
}

impl Admission {
    /// Of this worker.
    pub(super) fn of(pool: &Pool, name: &str, place: &Place) -> Self {
        let access = match pool.setup().endpoint {
            Some(_) => Access::Certificate {
                join: join_command(pool, name, place),
            },
            None => Access::Token(pool.worker_token(name)),
        };
        Self {
            name: name.to_owned(),
            admin: admin_command(pool),
            access,
        }
    }

    /// From now on the worker is refused. False when nobody could be told so.
    pub(super) fn revoke(&self) -> bool {
        match &self.access {
            Access::Certificate { .. } => self.ask(&["worker", "revoke", &self.name]).is_some(),
            Access::Token(_) => self.revoke_tokens(),
        }
    }

    /// Lets it in again, however often that has to be tried.
    pub(super) fn let_in(self) -> JoinHandle<bool> {
        std::thread::spawn(move || {
            let begun = Instant::now();
            while begun.elapsed() < LIMIT {
                if self.try_to_let_in() {
                    return true;
                }
                std::thread::sleep(PAUSE);
            }
            false
        })
    }

    fn try_to_let_in(&self) -> bool {
        match &self.access {
            Access::Certificate { join } => {
                let Some(token) = self.ask(&["worker", "join-token", &self.name]) else {
                    return false;
                };
                let joined = ask(copy(join).arg(token)).is_some();
                if !joined {
                    // Had only the answer been lost, its name would be taken.
                    self.ask(&["worker", "revoke", &self.name]);
                }
                joined
            }
            Access::Token(file) => {
                let made = self.ask(&["token", "create", &self.name, "--role", "worker"]);
                made.is_some_and(|token| write_secret(file, &token))
            }
        }
    }

    /// All that it has: an answer to an earlier try may have been lost.
    fn revoke_tokens(&self) -> bool {
        let Some(list) = self.ask(&["token", "ls", "--json"]) else {
            return false;
        };
        let tokens = list
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let good = tokens.filter(|token| token["name"] == self.name.as_str() && token["revoked"].is_null());
        let revoked = good.map(|token| self.ask(&["token", "revoke", token["id"].as_str().unwrap_or_default()]));
        revoked.fold(false, |any, revoked| any | revoked.is_some())
    }

    fn ask(&self, arguments: &[&str]) -> Option<String> {
        ask(copy(&self.admin).args(arguments))
    }
}

/// The same command once more.
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

/// What a command says; none when it fails, or takes too long. It says little: nobody has to read while it runs.
fn ask(command: &mut Command) -> Option<String> {
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
        if begun.elapsed() > ANSWER {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(LOOK);
    };
    let mut said = String::new();
    child.stdout.as_mut()?.read_to_string(&mut said).ok()?;
    status.success().then(|| said.trim().to_owned())
}

/// Puts a secret in the place of another one, whole at every moment.
fn write_secret(file: &Path, secret: &str) -> bool {
    let beside = file.with_extension("next");
    let mut options = std::fs::File::options();
    options.create(true).write(true).truncate(true).mode(0o600);
    let written = options
        .open(&beside)
        .and_then(|mut out| out.write_all(secret.as_bytes()));
    written.and_then(|()| std::fs::rename(&beside, file)).is_ok()
}
