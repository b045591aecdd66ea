//! Drops privileges of an attempt's process before it reads anything: it computes on files that others sent.
//!
//! The process does this itself right after its start, and cannot undo it. Memory is not limited here, because mapped
//! weights would count; the coordinator plans the memory of a device. The number of processes is not limited either:
//! the kernel counts all processes of the user, not those of this attempt.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::close;
use std::os::fd::RawFd;

/// The most open files: far more than the largest model has.
const MAX_OPEN_FILES: u64 = 4096;

/// Drops privileges, inherited files and core dumps. Call it before the first thread starts. Returns warnings about
/// what failed.
pub(crate) fn drop_privileges() -> (PrivateUmask, Vec<String>) {
    let mut warnings = Vec::new();
    close_inherited(&mut warnings);
    let mut record = |what: &str, result: nix::Result<()>| {
        if let Err(error) = result {
            warnings.push(format!("{what}: {error}"));
        }
    };
    // No program that it starts gains privileges, whatever its set-user-ID bits.
    #[cfg(target_os = "linux")]
    record("no_new_privs cannot be set", nix::sys::prctl::set_no_new_privs());
    // A core dump would hold weights and images, in an unpredictable place.
    record("core dumps cannot be disabled", setrlimit(Resource::RLIMIT_CORE, 0, 0));
    let files = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, max)| {
        let files = max.min(MAX_OPEN_FILES);
        setrlimit(Resource::RLIMIT_NOFILE, files, files)
    });
    record("open files cannot be limited", files);
    let previous = umask(Mode::S_IRWXG | Mode::S_IRWXO);
    (PrivateUmask { previous }, warnings)
}

/// The umask that makes new files private to their owner; holds the previous one.
#[derive(Debug)]
pub(crate) struct PrivateUmask {
    previous: Mode,
}

impl PrivateUmask {
    /// Restores the user's umask, for results in the user's own folders.
    pub(crate) fn restore(self) {
        umask(self.previous);
    }
}

/// Closes files inherited from the process that started the daemon; the daemon's own files are close-on-exec.
fn close_inherited(warnings: &mut Vec<String>) {
    match open_files() {
        Ok(all) => {
            for file in all.into_iter().filter(|file| *file > 2) {
                // The directory that was listed was one of them, and is closed already.
                let _ = close(file);
            }
        }
        Err(error) => warnings.push(format!("inherited files cannot be listed: {error}")),
    }
}

fn open_files() -> std::io::Result<Vec<RawFd>> {
    let names = std::fs::read_dir("/dev/fd")?.flatten();
    Ok(names
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}
