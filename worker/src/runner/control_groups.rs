//! Control groups for attempts: limits for the attempt's process with all its threads, and not for the daemon.
//!
//! Groups can be created if the daemon may write to its own group: as root, or in a systemd unit with `Delegate=memory pids`.

use crate::probe;
use aitk_common::confinement::Protection;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder of the system's control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// The most threads of an attempt: far more than any pool of ours has.
const MAX_THREADS: u64 = 4096;
/// Prefix of the names of our groups.
const PREFIX: &str = "aitk-attempt-";
/// The group that the daemon itself moves to: in cgroup v2, a group with limited subgroups cannot contain processes.
const DAEMON_GROUP: &str = "worker";

/// Creates the control groups of attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroups {
    /// Folders in which groups are created, with their limit files.
    parents: Vec<Parent>,
    version: u32,
    memory: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parent {
    folder: PathBuf,
    limits: Vec<(&'static str, u64)>,
}

/// Detects whether control groups can limit the memory of attempts, so that some is left for the daemon and the rest
/// of the machine. Returns what is in force, and the control groups if they work.
#[must_use]
pub fn detect_control_groups() -> (Protection, Option<ControlGroups>) {
    match ControlGroups::detect(max_attempt_memory()) {
        Ok(groups) => (Protection::enforced_by(groups.describe()), Some(groups)),
        Err(reason) => (Protection::missing(reason.chars().take(60).collect::<String>()), None),
    }
}

/// The memory that an attempt may use, in bytes: all but what the daemon and the rest of the machine need.
#[must_use]
pub fn max_attempt_memory() -> u64 {
    let memory = probe::memory().total;
    memory - (memory / 16).min(1 << 30)
}

impl ControlGroups {
    /// Checks whether this process can create groups that limit attempts to `memory` bytes each. With cgroup v2 the
    /// process moves into a group of its own for that, so it must be a daemon that is alone in its unit.
    ///
    /// # Errors
    /// The reason why not.
    pub fn detect(memory: u64) -> Result<Self, String> {
        let own_group =
            fs::read_to_string("/proc/self/cgroup").map_err(|error| format!("no control groups: {error}"))?;
        let found = Self::detect_in(Path::new(ROOT), &own_group, memory)?;
        found.remove_empty_groups();
        // Create a group to be sure; file modes are not enough to know.
        let trial = found.create(&format!("{PREFIX}{}", std::process::id()));
        trial
            .map(drop)
            .map_err(|error| format!("no control group can be created: {error}"))?;
        Ok(found)
    }

    fn detect_in(root: &Path, own_group: &str, memory: u64) -> Result<Self, String> {
        let path = |marker: &str| {
            own_group
                .lines()
                .find_map(|line| Some(line.split_once(marker)?.1.to_owned()))
        };
        let v1: Vec<Parent> = [
            ("memory", "memory.limit_in_bytes", memory),
            ("pids", "pids.max", MAX_THREADS),
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
        match v1.len() {
            0 => {}
            2 => {
                return Ok(Self {
                    parents: v1,
                    version: 1,
                    memory,
                });
            }
            _ => return Err("control groups v1 without controllers for both memory and processes".to_owned()),
        }
        let own_group = root.join(path("0::/").ok_or("this system has no control groups")?);
        let folder = enable_controllers(root, &own_group)?;
        Ok(Self {
            parents: vec![Parent {
                folder,
                limits: vec![("memory.max", memory), ("pids.max", MAX_THREADS)],
            }],
            version: 2,
            memory,
        })
    }

    /// Describes the limits, for display.
    #[must_use]
    pub fn describe(&self) -> String {
        let gib = self.memory as f64 / f64::from(1 << 30);
        let version = self.version;
        format!("control groups v{version}: {gib:.1} GiB and {MAX_THREADS} threads an attempt")
    }

    /// Creates a group and moves the process `pid` into it.
    pub(super) fn add_process(&self, pid: i32) -> io::Result<ControlGroup> {
        self.remove_empty_groups();
        let group = self.create(&format!("{PREFIX}{pid}"))?;
        for folder in &group.folders {
            fs::write(folder.join("cgroup.procs"), pid.to_string())?;
        }
        Ok(group)
    }

    fn create(&self, name: &str) -> io::Result<ControlGroup> {
        let mut group = ControlGroup { folders: Vec::new() };
        for parent in &self.parents {
            let folder = parent.folder.join(name);
            match fs::create_dir(&folder) {
                // A daemon that was killed left it, and its process had the same number as the new one. A group with processes cannot
                // be removed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    fs::remove_dir(&folder)?;
                    fs::create_dir(&folder)?;
                }
                made => made?,
            }
            group.folders.push(folder.clone());
            for (file, limit) in &parent.limits {
                fs::write(folder.join(file), limit.to_string())?;
            }
        }
        Ok(group)
    }

    /// Removes groups whose processes were still exiting when their attempt ended.
    fn remove_empty_groups(&self) {
        for parent in &self.parents {
            for entry in fs::read_dir(&parent.folder).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
                // The group of a living process may belong to another worker, which is just creating it.
                if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                    let _ = fs::remove_dir(entry.path());
                }
            }
        }
    }
}

/// Enables limits for subgroups. Returns the folder in which they are created.
fn enable_controllers(root: &Path, own_group: &Path) -> Result<PathBuf, String> {
    let failed = |what: &Path, error: io::Error| {
        format!(
            "{}: {error} (a systemd unit needs Delegate=memory pids)",
            what.display()
        )
    };
    let read = |path: PathBuf| fs::read_to_string(&path).map_err(|error| failed(&path, error));
    // After a restart in place the process is already in that group.
    let base = match own_group.file_name() {
        Some(name) if name == DAEMON_GROUP => own_group.parent().unwrap_or(own_group),
        _ => own_group,
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
        if base != root && base == own_group {
            let pids = read(base.join("cgroup.procs"))?;
            let own_pid = std::process::id().to_string();
            if pids.lines().any(|pid| pid != own_pid) {
                return Err(format!(
                    "{} contains other processes; start the worker as a service",
                    base.display()
                ));
            }
            let daemon = base.join(DAEMON_GROUP);
            match fs::create_dir(&daemon) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(&daemon, error)),
                _ => {}
            }
            let procs = daemon.join("cgroup.procs");
            fs::write(&procs, own_pid).map_err(|error| failed(&procs, error))?;
        }
        fs::write(&control, "+memory +pids").map_err(|error| failed(&control, error))?;
    }
    // Copy the unit's limit to the daemon's own group, where the daemon reads how much memory there is.
    if let Ok(limit) = fs::read_to_string(base.join("memory.max"))
        && base.join(DAEMON_GROUP).is_dir()
    {
        let own_group = base.join(DAEMON_GROUP).join("memory.max");
        fs::write(&own_group, limit.trim()).map_err(|error| failed(&own_group, error))?;
    }
    Ok(base.to_owned())
}

/// The groups of one attempt, removed when this value is dropped.
#[derive(Debug)]
pub(super) struct ControlGroup {
    folders: Vec<PathBuf>,
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for folder in &self.folders {
            // Only cgroup v2 has this file; the process group is killed as well.
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
    fn a_process_gets_its_limits_and_its_group_is_removed() {
        let Ok(groups) = ControlGroups::detect(1 << 30) else {
            return crate::skip::skip("cgroup", "no control group can be created");
        };
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let group = groups.add_process(pid).unwrap();
        let own_group = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let lines = own_group
            .lines()
            .filter(|line| line.ends_with(&format!("/{PREFIX}{pid}")));
        assert_eq!(lines.count(), groups.parents.len(), "{own_group}");
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
        groups.remove_empty_groups();
        assert!(folders.iter().all(|folder| !folder.exists()), "{folders:?}");
    }

    #[test]
    fn a_group_that_a_killed_daemon_left_is_made_again() {
        let root = tempfile::tempdir().unwrap();
        let groups = ControlGroups {
            parents: vec![Parent {
                folder: root.path().to_owned(),
                limits: Vec::new(),
            }],
            version: 2,
            memory: 1,
        };
        let left = root.path().join(format!("{PREFIX}1"));
        fs::create_dir(&left).unwrap();
        let group = groups.create(&format!("{PREFIX}1")).unwrap();
        assert_eq!(group.folders, std::slice::from_ref(&left));
        // The system refuses to remove a group with processes, as it refuses a folder with files here.
        write(left.join("cgroup.procs"), "7\n");
        assert!(groups.create(&format!("{PREFIX}1")).is_err());
    }

    #[test]
    fn control_groups_that_limit_only_one_of_memory_and_threads_are_not_used() {
        let root = tempfile::tempdir().unwrap();
        let own_group = "5:pids:/a\n4:memory:/a\n";
        fs::create_dir_all(root.path().join("pids/a")).unwrap();
        let refused = ControlGroups::detect_in(root.path(), own_group, 1).unwrap_err();
        assert!(refused.contains("memory"), "{refused}");
        fs::create_dir_all(root.path().join("memory/a")).unwrap();
        let groups = ControlGroups::detect_in(root.path(), own_group, 1).unwrap();
        assert_eq!((groups.version, groups.parents.len()), (1, 2));
    }

    #[test]
    fn with_cgroup_v2_the_daemon_moves_and_other_processes_do_not() {
        let root = tempfile::tempdir().unwrap();
        let unit = root.path().join("system.slice/aitk-worker.service");
        write(unit.join("cgroup.controllers"), "cpu memory pids\n");
        write(unit.join("cgroup.subtree_control"), "\n");
        write(unit.join("memory.max"), "8589934592\n");
        write(unit.join("cgroup.procs"), &format!("{}\n", std::process::id()));
        let own_group = "0::/system.slice/aitk-worker.service\n";
        let groups = ControlGroups::detect_in(root.path(), own_group, 5 << 30).unwrap();
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
        // After a restart in place, it is already in its own group.
        let after_restart =
            ControlGroups::detect_in(root.path(), "0::/system.slice/aitk-worker.service/worker\n", 5 << 30).unwrap();
        assert_eq!(after_restart, groups);

        let shell = root.path().join("session.scope");
        write(shell.join("cgroup.controllers"), "memory pids\n");
        write(shell.join("cgroup.subtree_control"), "\n");
        write(shell.join("cgroup.procs"), &format!("1\n{}\n", std::process::id()));
        let refused = ControlGroups::detect_in(root.path(), "0::/session.scope\n", 1).unwrap_err();
        assert!(refused.contains("other processes"), "{refused}");
        assert!(!shell.join("worker").exists());
        write(shell.join("cgroup.controllers"), "cpu\n");
        let refused = ControlGroups::detect_in(root.path(), "0::/session.scope\n", 1).unwrap_err();
        assert!(refused.contains("no controllers"), "{refused}");
    }
}
