//! Confines the process of an attempt to its own inputs and folder, without network and without access to other
//! processes.
//!
//! An attempt computes on files and settings that somebody else sent. On Linux it confines itself before its first
//! thread and before it opens an input: Landlock for files, TCP, abstract sockets and signals; seccomp for system
//! calls. On macOS the daemon starts it in `sandbox-exec`. Neither can be undone. What is in force is measured by
//! trying forbidden operations ([`probe`]), never assumed. docs/security.md says what the sandbox prevents and what
//! it does not.

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
pub(crate) use rules::SandboxRules;
pub(crate) use seatbelt::profile;

/// Confines this process for good. With `rules` of `None` only network and system calls are restricted, and files are
/// not.
///
/// Call it before the process has a second thread: Landlock restricts the calling thread, and those that it starts
/// later.
#[cfg(target_os = "linux")]
pub(crate) fn apply(rules: Option<&SandboxRules>) -> Confinement {
    let device = rules.map_or(DeviceKind::Cuda, |rules| rules.device);
    let files = match rules {
        Some(rules) => landlock::restrict(rules),
        None => Err("a local job works in the folders of its user".to_owned()),
    };
    let starts_programs = rules.is_some_and(|rules| !rules.execute.is_empty());
    let syscalls = match seccomp::restrict(device, starts_programs) {
        Ok(()) => Protection::enforced_by("seccomp"),
        Err(reason) => Protection::missing(reason),
    };
    let network = match (syscalls.in_force && !can_bind_socket(), &files) {
        (true, _) => Protection::enforced_by("seccomp"),
        (false, Ok(_)) => Protection::missing("only Landlock is in force, which does not restrict UDP"),
        (false, Err(_)) => Protection::missing(syscalls.by.clone()),
    };
    let files = match files {
        // The root folder always exists, and is never among the rules.
        Ok(by) if std::fs::read_dir("/").is_err() => Protection::enforced_by(by),
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

/// Measures the sandbox that the daemon started this process in (`sandbox-exec`).
#[cfg(not(target_os = "linux"))]
pub(crate) fn apply(rules: Option<&SandboxRules>) -> Confinement {
    let measured = |refused: bool| match (rules, refused) {
        (None, _) => Protection::missing("a local job works in the folders of its user"),
        (Some(_), true) => Protection::enforced_by("sandbox-exec"),
        (Some(_), false) => Protection::missing("it was started without sandbox-exec"),
    };
    // A file that every system of this kind has, and that no rule allows.
    let files = measured(std::fs::File::open("/etc/passwd").is_err());
    let network = measured(!can_bind_socket());
    Confinement {
        syscalls: files.clone(),
        files,
        network,
        limits: Protection::missing("only where a worker serves"),
    }
}

/// Returns whether a socket can be created and bound.
fn can_bind_socket() -> bool {
    std::net::UdpSocket::bind(("127.0.0.1", 0)).is_ok() || std::net::TcpListener::bind(("127.0.0.1", 0)).is_ok()
}
