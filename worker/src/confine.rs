//! What an attempt's process gives up before it reads anything: it computes on files that others sent.
//!
//! It does so itself, right after it was started: nothing of it can be taken back. Memory has no limit here, because
//! mapped weights would count against it; what a device may take is planned by the coordinator. Nor has the number of
//! processes: the kernel counts all those of the user, and not those of this attempt.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::close;
use std::os::fd::RawFd;

/// Files open at once: far more than the largest model has.
const FILES: u64 = 4096;

/// Gives up privileges, files of others, core dumps. Must be called before the first thread. Says what could not be done.
pub(crate) fn confine() -> (Privacy, Vec<String>) {
    let mut failed = Vec::new();
    close_inherited(&mut failed);
    let mut note = |what: &str, result: nix::Result<()>| {
        if let Err(error) = result {
            failed.push(format!("{what}: {error}"));
        }
    };
    // No program that it starts gets rights that it has not, whatever bits are set on it.
    #[cfg(target_os = "linux")]
    note(
        "new privileges cannot be ruled out",
        nix::sys::prctl::set_no_new_privs(),
    );
    // A core has weights and images in it, and lies where a crash happens to leave it.
    note("core dumps cannot be ruled out", setrlimit(Resource::RLIMIT_CORE, 0, 0));
    let files = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, most)| {
        let files = most.min(FILES);
        setrlimit(Resource::RLIMIT_NOFILE, files, files)
    });
    note("open files cannot be limited", files);
    let before = umask(Mode::S_IRWXG | Mode::S_IRWXO);
    (Privacy { before }, failed)
}

/// Files that are made from now on are their owner's alone.
#[derive(Debug)]
pub(crate) struct Privacy {
    before: Mode,
}

impl Privacy {
    /// As its user has it, for results in their own folders.
    pub(crate) fn end(self) {
        umask(self.before);
    }
}

/// Closes what came from whoever started the daemon; the daemon's own files close by themselves.
fn close_inherited(failed: &mut Vec<String>) {
    match open_files() {
        Ok(all) => {
            for file in all.into_iter().filter(|file| *file > 2) {
                // The list itself was one of them, and is closed.
                let _ = close(file);
            }
        }
        Err(error) => failed.push(format!("inherited files cannot be found: {error}")),
    }
}

fn open_files() -> std::io::Result<Vec<RawFd>> {
    let names = std::fs::read_dir("/dev/fd")?.flatten();
    Ok(names
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}
