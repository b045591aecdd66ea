//! A control group for each attempt: limits that hold for its process with all its threads, and not for the daemon.
//!
//! Groups can be made where the daemon may write to its own: as root, or in a systemd unit with `Delegate=yes`.

use crate::probe;
use aitk_common::confinement::Protection;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the system has its groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Threads of an attempt: far more than any pool of ours has.
const THREADS: u64 = 4096;
/// Beginning of the names of our groups.
const PREFIX: &str = "aitk-attempt-";
/// The group that the daemon itself moves to: with the second version, processes and limits of groups below exclude each other.
const DAEMON: &str = "worker";

/// Makes the groups of attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Folders in which groups are made, with the file that limits memory and the one that limits threads.
    parents: Vec<Parent>,
    version: u32,
    memory: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parent {
    folder: PathBuf,
    limits: Vec<(&'static str, u64)>,
}

/// Control groups that keep something of the memory for the daemon and the rest of the machine, where there can be any; and what is
/// to be said of that.
#[must_use]
pub fn limit_attempts() -> (Protection, Option<Groups>) {
    match Groups::find(most_memory()) {
        Ok(groups) => (Protection::by(groups.describe()), Some(groups)),
        Err(reason) => (Protection::missing(reason.chars().take(60).collect::<String>()), None),
    }
}

/// Bytes of memory that an attempt may hold: all but what the daemon and the rest of the machine need.
#[must_use]
pub fn most_memory() -> u64 {
    let memory = probe::memory().total;
    memory - (memory / 16).min(1 << 30)
}

impl Groups {
    /// Finds out whether this process can make groups that hold attempts to `memory` bytes each. With the second version of
    /// control groups the process moves into a group of its own for that, so it must be a daemon that has the unit to itself.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn find(memory: u64) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| format!("no control groups: {error}"))?;
        let found = Self::below(Path::new(ROOT), &own, memory)?;
        found.sweep();
        // A trial says more than modes of files.
        let trial = found.make(&format!("{PREFIX}{}", std::process::id()));
        trial
            .map(drop)
            .map_err(|error| format!("no control group can be made: {error}"))?;
        Ok(found)
    }

    fn below(root: &Path, own: &str, memory: u64) -> Result<Self, String> {
        let path = |mark: &str| own.lines().find_map(|line| Some(line.split_once(mark)?.1.to_owned()));
        let v1: Vec<Parent> = [
            ("memory", "memory.limit_in_bytes", memory),
            ("pids", "pids.max", THREADS),
        ]
        .into_iter()
        .filter_map(|(controller, file, limit)| {
            let folder = root.join(controller).join(path(&format!(":{controller}:/"))?);
            folder.is_dir().then(|| Parent {
                folder,
                limits: vec![(file, limit)],
            })
        })
        .collect();
        if !v1.is_empty() {
            return Ok(Self {
                parents: v1,
                version: 1,
                memory,
            });
        }
        let own = root.join(path("0::/").ok_or("this system has no control groups")?);
        let folder = prepare(root, &own)?;
        Ok(Self {
            parents: vec![Parent {
                folder,
                limits: vec![("memory.max", memory), ("pids.max", THREADS)],
            }],
            version: 2,
            memory,
        })
    }

    /// What is limited, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let gib = self.memory as f64 / f64::from(1 << 30);
        let version = self.version;
        format!("control groups v{version}: {gib:.1} GiB and {THREADS} threads an attempt")
    }

    /// A group for the process `pid`.
    pub(super) fn start(&self, pid: i32) -> io::Result<Group> {
        self.sweep();
        let group = self.make(&format!("{PREFIX}{pid}"))?;
        for folder in &group.folders {
            fs::write(folder.join("cgroup.procs"), pid.to_string())?;
        }
        Ok(group)
    }

    fn make(&self, name: &str) -> io::Result<Group> {
        let mut group = Group { folders: Vec::new() };
        for parent in &self.parents {
            let folder = parent.folder.join(name);
            fs::create_dir(&folder)?;
            group.folders.push(folder.clone());
            for (file, limit) in &parent.limits {
                fs::write(folder.join(file), limit.to_string())?;
            }
        }
        Ok(group)
    }

    /// Removes groups whose processes had not quite gone when their attempt ended.
    fn sweep(&self) {
        for parent in &self.parents {
            for entry in fs::read_dir(&parent.folder).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
                // That of a living process may be another worker's, and just being made.
                if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                    let _ = fs::remove_dir(entry.path());
                }
            }
        }
    }
}

/// Lets groups below have limits. Returns the folder in which they are made.
fn prepare(root: &Path, own: &Path) -> Result<PathBuf, String> {
    let failed =
        |what: &Path, error: io::Error| format!("{}: {error} (a systemd unit needs Delegate=yes)", what.display());
    let read = |path: PathBuf| fs::read_to_string(&path).map_err(|error| failed(&path, error));
    // After a restart in place it is there already.
    let base = match own.file_name() {
        Some(name) if name == DAEMON => own.parent().unwrap_or(own),
        _ => own,
    };
    let has_both = |text: &str| {
        ["memory", "pids"]
            .iter()
            .all(|one| text.split_whitespace().any(|word| word == *one))
    };
    if !has_both(&read(base.join("cgroup.controllers"))?) {
        return Err(format!(
            "{} has no controllers for memory and processes",
            base.display()
        ));
    }
    let control = base.join("cgroup.subtree_control");
    if !has_both(&read(control.clone())?) {
        if base != root && base == own {
            let others = read(base.join("cgroup.procs"))?;
            let own = std::process::id().to_string();
            if others.lines().any(|pid| pid != own) {
                return Err(format!(
                    "{} has other processes in it; start the worker as a service",
                    base.display()
                ));
            }
            let daemon = base.join(DAEMON);
            match fs::create_dir(&daemon) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(&daemon, error)),
                _ => {}
            }
            let procs = daemon.join("cgroup.procs");
            fs::write(&procs, own).map_err(|error| failed(&procs, error))?;
        }
        fs::write(&control, "+memory +pids").map_err(|error| failed(&control, error))?;
    }
    // The limit of the unit, where the daemon looks for its own: how much memory there is follows from it.
    if let Ok(limit) = fs::read_to_string(base.join("memory.max"))
        && base.join(DAEMON).is_dir()
    {
        let own = base.join(DAEMON).join("memory.max");
        fs::write(&own, limit.trim()).map_err(|error| failed(&own, error))?;
    }
    Ok(base.to_owned())
}

/// The groups of one attempt, removed when this goes away.
#[derive(Debug)]
pub(super) struct Group {
    folders: Vec<PathBuf>,
}

impl Drop for Group {
    fn drop(&mut self) {
        for folder in &self.folders {
            // Only the second version has it; the group of processes gets its signal besides.
            let _ = fs::write(folder.join("cgroup.kill"), "1");
            let _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_process_is_held_to_its_limits_and_its_group_goes_with_it() {
        let Ok(groups) = Groups::find(1 << 30) else {
            return println!("skipped: this machine grants no control group");
        };
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let group = groups.start(pid).unwrap();
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let lines = own.lines().filter(|line| line.ends_with(&format!("/{PREFIX}{pid}")));
        assert_eq!(lines.count(), groups.parents.len(), "{own}");
        for (folder, parent) in group.folders.iter().zip(&groups.parents) {
            for (file, limit) in &parent.limits {
                let set = fs::read_to_string(folder.join(file)).unwrap();
                assert_eq!(set.trim(), limit.to_string(), "{file}");
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let folders = group.folders.clone();
        drop(group);
        groups.sweep();
        assert!(folders.iter().all(|folder| !folder.exists()), "{folders:?}");
    }

    #[test]
    fn the_second_version_moves_the_daemon_aside_and_leaves_others_alone() {
        let root = tempfile::tempdir().unwrap();
        let unit = root.path().join("system.slice/aitk-worker.service");
        write(unit.join("cgroup.controllers"), "cpu memory pids\n");
        write(unit.join("cgroup.subtree_control"), "\n");
        write(unit.join("memory.max"), "8589934592\n");
        write(unit.join("cgroup.procs"), &format!("{}\n", std::process::id()));
        let own = "0::/system.slice/aitk-worker.service\n";
        let groups = Groups::below(root.path(), own, 5 << 30).unwrap();
        assert_eq!((groups.version, &groups.parents[0].folder), (2, &unit));
        assert_eq!(
            fs::read_to_string(unit.join("worker/cgroup.procs")).unwrap(),
            std::process::id().to_string()
        );
        assert_eq!(
            fs::read_to_string(unit.join("cgroup.subtree_control")).unwrap(),
            "+memory +pids"
        );
        assert_eq!(
            fs::read_to_string(unit.join("worker/memory.max")).unwrap(),
            "8589934592"
        );
        assert!(groups.describe().contains("v2: 5.0 GiB"), "{}", groups.describe());
        // Started again by itself, it is in its own group already.
        let again = Groups::below(root.path(), "0::/system.slice/aitk-worker.service/worker\n", 5 << 30).unwrap();
        assert_eq!(again, groups);

        let shell = root.path().join("session.scope");
        write(shell.join("cgroup.controllers"), "memory pids\n");
        write(shell.join("cgroup.subtree_control"), "\n");
        write(shell.join("cgroup.procs"), &format!("1\n{}\n", std::process::id()));
        let refused = Groups::below(root.path(), "0::/session.scope\n", 1).unwrap_err();
        assert!(refused.contains("other processes"), "{refused}");
        assert!(!shell.join("worker").exists());
        write(shell.join("cgroup.controllers"), "cpu\n");
        let refused = Groups::below(root.path(), "0::/session.scope\n", 1).unwrap_err();
        assert!(refused.contains("no controllers"), "{refused}");
    }
}
