//! The main memory of this machine.

use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

/// The machine's main memory, in bytes, within the limits of our control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The total, in bytes.
    pub total: u64,
    /// Bytes that are available without swapping.
    pub available: u64,
}

/// Measures the main memory, within the limits of our control group.
#[must_use]
pub fn memory() -> Memory {
    // This fails only on a system that sysinfo does not support; such a machine offers no memory.
    let Ok(mut system) = System::new() else {
        return Memory { total: 0, available: 0 };
    };
    system.refresh_memory();
    let (total, available) = (system.total_memory(), system.available_memory());
    match control_group_limits(&mut system) {
        Some(group) => Memory {
            total: total.min(group.total),
            available: available.min(group.available),
        },
        None => Memory { total, available },
    }
}

/// The limits of this process's control group (a container's, a systemd unit's `MemoryMax`), if there are any. The
/// page cache of files that it read counts as used there, but is freed when memory is needed.
fn control_group_limits(system: &mut System) -> Option<Memory> {
    let own_pid = sysinfo::get_current_pid().ok()?;
    let nothing_else = ProcessRefreshKind::nothing();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own_pid]), false, nothing_else);
    let limits = system
        .process(own_pid)?
        .cgroup_limits()
        .filter(|limits| limits.total_memory > 0)?;
    Some(Memory {
        total: limits.total_memory,
        available: limits.free_memory.max(limits.total_memory.saturating_sub(limits.rss)),
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    const LIMIT: u64 = 300 << 20;
    const INSIDE: &str = "AITK_TEST_IN_A_CONTROL_GROUP";

    /// A control group with a limit of [`LIMIT`] bytes, below the one of this process.
    struct Group(PathBuf);

    impl Group {
        fn new() -> Option<Self> {
            let own_groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
            // `4:memory:/path` of the first version, `0::/path` of the second.
            let path = |mark: &str| {
                own_groups
                    .lines()
                    .find_map(|line| Some(line.split_once(mark)?.1.to_owned()))
            };
            let name = format!("aitk-test-{}", std::process::id());
            let (root, path, limit) = match path(":memory:/") {
                Some(path) => ("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"),
                None => ("/sys/fs/cgroup", path("0::/")?, "memory.max"),
            };
            let group = Self(Path::new(root).join(path).join(name));
            std::fs::create_dir(&group.0).ok()?;
            std::fs::write(group.0.join(limit), LIMIT.to_string()).ok()?;
            Some(group)
        }
    }

    impl Drop for Group {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    #[test]
    fn a_control_group_limits_the_offered_memory() {
        if std::env::var_os(INSIDE).is_some() {
            let memory = super::memory();
            assert!(memory.total <= LIMIT && memory.available < LIMIT, "{memory:?}");
            assert!(
                memory.available > LIMIT / 2,
                "the page cache counts as available: {memory:?}"
            );
            return;
        }
        let Some(group) = Group::new() else {
            return crate::skip::skip("cgroup", "no control group with a limit can be created");
        };
        // Run this test again inside the group. A file in the page cache counts as the group's memory.
        let program = std::env::current_exe().unwrap();
        let run = format!(
            "echo $$ > {0}/cgroup.procs && cat {1} > /dev/null && exec {1} --exact probe::memory::tests::a_control_group_limits_the_offered_memory",
            group.0.display(),
            program.display()
        );
        let out = Command::new("sh").args(["-c", &run]).env(INSIDE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains("1 passed"), "{text}");
    }
}
