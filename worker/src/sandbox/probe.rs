//! Measures what is in force: a process confines itself as an attempt does, tries what is forbidden, and tells.

use super::{Rules, enter, profile};
use crate::confine;
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
const PATIENCE: Duration = Duration::from_secs(20);
/// The file beside the folder of the rules, which must stay out of reach.
const OUTSIDE: &str = "outside";
/// The folder of the rules.
const INSIDE: &str = "inside";

/// Measures how attempts of this worker are confined, in a process that `command` starts as it does attempts. Takes a
/// fraction of a second. Anything that goes wrong counts as not confined, with the reason.
#[must_use]
pub fn measure(command: &[OsString]) -> Confinement {
    ask(command).unwrap_or_else(|error| Confinement::none(&short(&format!("the trial failed: {error}"))))
}

fn ask(command: &[OsString]) -> io::Result<Confinement> {
    let folder = tempfile::tempdir()?;
    let place = folder.path().canonicalize()?;
    fs::create_dir(place.join(INSIDE))?;
    fs::write(place.join(OUTSIDE), b"out of reach")?;
    let Some((program, arguments)) = command.split_first() else {
        return Err(io::Error::other("the worker has no program for its attempts"));
    };
    let mut command = match wrapped(program, &rules(&place)) {
        Some(command) => command?,
        None => Command::new(program),
    };
    let mut child = command
        .args(arguments)
        .args(["attempt", "--try-sandbox"])
        .arg(&place)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let until = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > until => {
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

/// On a Mac the daemon puts the confinement around the process.
fn wrapped(program: &OsStr, rules: &Rules) -> Option<io::Result<Command>> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let profile = profile(rules, Path::new(program)).map_err(io::Error::other);
    Some(profile.map(|profile| {
        let mut command = Command::new(crate::runner::SANDBOX_EXEC);
        command.arg("-p").arg(profile).arg(program);
        command
    }))
}

fn rules(place: &Path) -> Rules {
    Rules {
        read: Vec::new(),
        write: vec![place.join(INSIDE)],
        device: DeviceKind::Cpu,
    }
}

/// The other side of [`measure`]: confines this process, tries what an attempt must not be able to do, and prints a
/// [`Confinement`] as JSON. The process must belong to this call.
#[must_use]
pub fn try_in_this_process(place: &Path) -> ExitCode {
    let _ = confine::confine();
    let mut confinement = enter(Some(&rules(place)));
    let doubts = [
        (&mut confinement.files, files(place)),
        (&mut confinement.network, network()),
        (&mut confinement.syscalls, syscalls()),
    ];
    for (part, problem) in doubts {
        if let Some(problem) = problem
            && part.in_force
        {
            *part = Protection::missing(short(&format!("{}, but {problem}", part.by)));
        }
        part.by = short(&part.by);
    }
    let text = serde_json::to_vec(&confinement).unwrap_or_default();
    match io::stdout().write_all(&text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// What of files is not as it should be.
fn files(place: &Path) -> Option<String> {
    let outside = place.join(OUTSIDE);
    if is_possible(File::open(&outside)) || is_possible(fs::read_dir(place)) {
        return Some("a file outside could be read".to_owned());
    }
    let file = File::options().append(true).open(&outside);
    if is_possible(file) || is_possible(File::create(place.join("new"))) {
        return Some("a file outside could be written".to_owned());
    }
    #[cfg(target_os = "linux")]
    if is_possible(File::open(format!("/proc/{}/environ", nix::unistd::getppid()))) {
        return Some("the environment of another process could be read".to_owned());
    }
    let inside = place.join(INSIDE);
    if is_possible(std::os::unix::fs::symlink(&outside, inside.join("link"))) {
        return Some("a symbolic link could be made".to_owned());
    }
    // Refused altogether would be no use to anybody either.
    match fs::write(inside.join("file"), b"x") {
        Ok(()) => None,
        Err(error) => Some(format!("its own folder cannot be written: {error}")),
    }
}

fn network() -> Option<String> {
    let loopback = "127.0.0.1:9";
    let possible = is_possible(UdpSocket::bind("127.0.0.1:0"))
        || is_possible(TcpListener::bind("127.0.0.1:0"))
        // Nobody listens there: only a refusal by rule counts.
        || !matches!(TcpStream::connect(loopback), Err(error) if error.kind() == io::ErrorKind::PermissionDenied)
        || is_possible(std::os::unix::net::UnixDatagram::unbound());
    possible.then(|| "a socket could be had".to_owned())
}

fn syscalls() -> Option<String> {
    // A program that is there on every system.
    let started = Command::new("/bin/sh").args(["-c", "exit 0"]).spawn();
    is_possible(started.map(|mut child| child.wait())).then(|| "a program could be started".to_owned())
}

/// Whether something worked, or failed for another reason than a rule.
fn is_possible<T>(result: io::Result<T>) -> bool {
    !matches!(result, Err(error) if error.kind() == io::ErrorKind::PermissionDenied)
}

/// Within the protocol's bound for short texts: 256 bytes, no control characters.
fn short(text: &str) -> String {
    let plain = |c: char| if c.is_ascii() && !c.is_ascii_control() { c } else { '?' };
    text.chars().map(plain).take(200).collect()
}
