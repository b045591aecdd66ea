//! Confines the process of an attempt: it reaches its own inputs and folder, no network, and no other process.
//!
//! An attempt computes on files and settings that somebody else sent. On Linux it confines itself, before its first
//! thread and before it opens an input: Landlock for files, TCP, abstract sockets and signals, seccomp for system calls.
//! On a Mac the daemon starts it inside `sandbox-exec`. Neither can be taken back. What is in force is measured by trying
//! what is forbidden ([`probe`]), never assumed. docs/security.md says what this keeps out and what it does not.

#[cfg(target_os = "linux")]
mod landlock;
mod paths;
mod probe;
mod rules;
mod seatbelt;
#[cfg(target_os = "linux")]
mod seccomp;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use aitk_common::capability::DeviceKind;
use aitk_common::confinement::{Confinement, Protection};
pub use probe::{measure, try_in_this_process};
pub(crate) use rules::Rules;
pub(crate) use seatbelt::profile;

/// Confines this process for good. `rules` of `None` leave its files alone and take its network and system calls only.
///
/// Must be called before the process has a second thread: Landlock holds the thread that asks for it, and those that it
/// starts later.
#[cfg(target_os = "linux")]
pub(crate) fn enter(rules: Option<&Rules>) -> Confinement {
    let device = rules.map_or(DeviceKind::Cuda, |rules| rules.device);
    let files = match rules {
        Some(rules) => landlock::restrict(rules),
        None => Err("a local job works in the folders of its user".to_owned()),
    };
    let syscalls = match seccomp::restrict(device) {
        Ok(()) => Protection::by("seccomp"),
        Err(reason) => Protection::missing(reason),
    };
    let network = match (syscalls.in_force && !has_sockets(), &files) {
        (true, _) => Protection::by("seccomp"),
        (false, Ok(_)) => Protection::missing("Landlock alone, which leaves UDP"),
        (false, Err(_)) => Protection::missing(syscalls.by.clone()),
    };
    let files = match files {
        // The root folder is always there, and never among the rules.
        Ok(by) if std::fs::read_dir("/").is_err() => Protection::by(by),
        Ok(by) => Protection::missing(format!("{by} did not refuse the root folder")),
        Err(reason) => Protection::missing(reason),
    };
    Confinement {
        files,
        network,
        syscalls,
        limits: Protection::missing("only where a worker serves"),
    }
}

/// What the daemon put around this process when it started it (`sandbox-exec`), measured here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn enter(rules: Option<&Rules>) -> Confinement {
    let measured = |refused: bool| match (rules, refused) {
        (None, _) => Protection::missing("a local job works in the folders of its user"),
        (Some(_), true) => Protection::by("sandbox-exec"),
        (Some(_), false) => Protection::missing("it was started without sandbox-exec"),
    };
    // A file that every system of this kind has and no rule names.
    let files = measured(std::fs::File::open("/etc/passwd").is_err());
    let network = measured(!has_sockets());
    Confinement {
        syscalls: files.clone(),
        files,
        network,
        limits: Protection::missing("only where a worker serves"),
    }
}

/// Whether a socket can be had and bound.
fn has_sockets() -> bool {
    std::net::UdpSocket::bind(("127.0.0.1", 0)).is_ok() || std::net::TcpListener::bind(("127.0.0.1", 0)).is_ok()
}
