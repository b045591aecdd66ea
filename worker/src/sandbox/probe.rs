//! Measures what the sandbox enforces: a process confines itself as an attempt does, tries forbidden operations, and
//! prints the result.

use super::{SandboxRules, apply, profile};
use crate::privileges;
use aitk_common::capability::DeviceKind;
use aitk_common::confinement::{Confinement, Protection};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// How long the process may take: it starts, and tries a dozen calls.
const TIMEOUT: Duration = Duration::from_secs(20);
/// A file outside of the allowed folder, which must not be accessible.
const OUTSIDE: &str = "outside";
/// The folder that the rules allow.
const INSIDE: &str = "inside";

/// Measures how attempts of this worker are confined, in a process that `command` starts in the same way as attempts.
/// Takes a fraction of a second. Any error counts as not confined, with the reason.
#[must_use]
pub fn measure(command: &[OsString]) -> Confinement {
    run_test_process(command)
        .unwrap_or_else(|error| Confinement::none(&truncate_ascii(&format!("the test process failed: {error}"))))
}

fn run_test_process(command: &[OsString]) -> io::Result<Confinement> {
    let temporary = tempfile::tempdir()?;
    let folder = temporary.path().canonicalize()?;
    fs::create_dir(folder.join(INSIDE))?;
    fs::write(folder.join(OUTSIDE), b"not accessible")?;
    let Some((program, arguments)) = command.split_first() else {
        return Err(io::Error::other("the worker has no program for its attempts"));
    };
    let mut command = match sandbox_exec_command(program, &test_rules(&folder)) {
        Some(command) => command?,
        None => Command::new(program),
    };
    let mut child = command
        .args(arguments)
        .args(["attempt", "--try-sandbox"])
        .arg(&folder)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::other("the process did not end"));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut text = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(64 << 10).read_to_end(&mut text)?;
    }
    serde_json::from_slice(&text).map_err(|_| io::Error::other(format!("the process ended with {status}")))
}

/// On macOS the daemon starts the process in `sandbox-exec`; `None` on other systems.
fn sandbox_exec_command(program: &OsStr, allowed: &SandboxRules) -> Option<io::Result<Command>> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let profile = profile(allowed, Path::new(program)).map_err(io::Error::other);
    Some(profile.map(|profile| {
        let mut command = Command::new(crate::runner::SANDBOX_EXEC);
        command.arg("-p").arg(profile).arg(program);
        command
    }))
}

fn test_rules(folder: &Path) -> SandboxRules {
    SandboxRules {
        read: Vec::new(),
        write: vec![folder.join(INSIDE)],
        execute: Vec::new(),
        device: DeviceKind::Cpu,
    }
}

/// The process that [`measure`] starts: confines itself, tries what an attempt must not be able to do, and prints a
/// [`Confinement`] as JSON. Call it only in a process of its own.
#[must_use]
pub fn try_in_this_process(folder: &Path) -> ExitCode {
    let _ = privileges::drop_privileges();
    let mut confinement = apply(Some(&test_rules(folder)));
    let checks = [
        (&mut confinement.files, check_files(folder)),
        (&mut confinement.network, check_network()),
        (&mut confinement.syscalls, check_syscalls()),
    ];
    for (part, problem) in checks {
        if let Some(problem) = problem
            && part.in_force
        {
            *part = Protection::missing(truncate_ascii(&format!("{}, but {problem}", part.by)));
        }
        part.by = truncate_ascii(&part.by);
    }
    let text = serde_json::to_vec(&confinement).unwrap_or_default();
    match io::stdout().write_all(&text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Returns what is wrong with the confinement of files.
fn check_files(folder: &Path) -> Option<String> {
    let outside = folder.join(OUTSIDE);
    if is_allowed(File::open(&outside)) || is_allowed(fs::read_dir(folder)) {
        return Some("a file outside could be read".to_owned());
    }
    let file = File::options().append(true).open(&outside);
    if is_allowed(file) || is_allowed(File::create(folder.join("new"))) {
        return Some("a file outside could be written".to_owned());
    }
    #[cfg(target_os = "linux")]
    if is_allowed(File::open(format!("/proc/{}/environ", nix::unistd::getppid()))) {
        return Some("the environment of another process could be read".to_owned());
    }
    let inside = folder.join(INSIDE);
    if is_allowed(std::os::unix::fs::symlink(&outside, inside.join("link"))) {
        return Some("a symbolic link could be created".to_owned());
    }
    // The attempt's own folder has to be writable.
    match fs::write(inside.join("file"), b"x") {
        Ok(()) => None,
        Err(error) => Some(format!("its own folder is not writable: {error}")),
    }
}

fn check_network() -> Option<String> {
    let loopback = "127.0.0.1:9";
    let possible = is_allowed(UdpSocket::bind("127.0.0.1:0"))
        || is_allowed(TcpListener::bind("127.0.0.1:0"))
        // Nothing listens there: only "permission denied" means that the sandbox refused it.
        || !matches!(TcpStream::connect(loopback), Err(error) if error.kind() == io::ErrorKind::PermissionDenied)
        || is_allowed(std::os::unix::net::UnixDatagram::unbound())
        // It could send to any local socket of this kind.
        || (cfg!(target_os = "linux") && is_allowed(std::os::unix::net::UnixDatagram::pair()));
    possible.then(|| "a socket could be created".to_owned())
}

fn check_syscalls() -> Option<String> {
    // A program that exists on every system.
    let started = Command::new("/bin/sh").args(["-c", "exit 0"]).spawn();
    is_allowed(started.map(|mut child| child.wait())).then(|| "a program could be started".to_owned())
}

/// Returns whether an operation worked, or failed for another reason than the sandbox.
fn is_allowed<T>(result: io::Result<T>) -> bool {
    !matches!(result, Err(error) if error.kind() == io::ErrorKind::PermissionDenied)
}

/// Shortens a text to the protocol's limit for short texts: 256 bytes, no control characters.
fn truncate_ascii(text: &str) -> String {
    let plain = |c: char| if c.is_ascii() && !c.is_ascii_control() { c } else { '?' };
    text.chars().map(plain).take(200).collect()
}
