//! Detects whether the machine ran out of memory while a child ran: the only way to distinguish an out-of-memory kill
//! from another SIGKILL.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;

/// If less than 1/20 of all memory is available, an unexpected SIGKILL is attributed to the kernel.
const LOW_MEMORY_DIVISOR: u64 = 20;
/// The number of recent samples that count: with one sample in two seconds, the last ten seconds.
const MAX_SAMPLES: usize = 5;

/// Watches memory from the start of a child to its end.
#[derive(Debug)]
pub(super) struct MemoryWatch {
    kills_before: u64,
    recent: VecDeque<(u64, u64)>,
}

impl MemoryWatch {
    /// Starts watching.
    #[must_use]
    pub(super) fn start() -> Self {
        let mut watch = Self {
            kills_before: out_of_memory_kills(),
            recent: VecDeque::new(),
        };
        watch.sample();
        watch
    }

    /// Records how much memory is available now.
    pub(super) fn sample(&mut self) {
        let memory = crate::probe::memory();
        self.recent.push_back((memory.available, memory.total));
        if self.recent.len() > MAX_SAMPLES {
            self.recent.pop_front();
        }
    }

    /// Returns whether the kernel killed a process for memory since the start, or memory was nearly used up recently.
    #[must_use]
    pub(super) fn ran_out(&self) -> bool {
        out_of_memory_kills() > self.kills_before
            || self
                .recent
                .iter()
                .any(|&(available, total)| total > 0 && available < total / LOW_MEMORY_DIVISOR)
    }
}

/// Counts out-of-memory kills of our control groups, if there are any, and of the machine.
fn out_of_memory_kills() -> u64 {
    let own_groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_group = |marker: &str, root: &str, file: &str| {
        let path = own_groups.lines().find_map(|line| Some(line.split_once(marker)?.1))?;
        Some(PathBuf::from(root).join(path).join(file))
    };
    let counters = [
        Some(PathBuf::from("/proc/vmstat")),
        of_group("0::/", "/sys/fs/cgroup", "memory.events"),
        of_group(":memory:/", "/sys/fs/cgroup/memory", "memory.oom_control"),
    ];
    let kills = |path: PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_default();
        counter(&text, "oom_kill").unwrap_or(0)
    };
    counters.into_iter().flatten().map(kills).fold(0, u64::saturating_add)
}

/// The number after `name` in lines of `name number`.
fn counter(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_whole_name() {
        let text = "low 0\noom 3\noom_kill 7\noom_group_kill 1\n";
        assert_eq!(counter(text, "oom_kill"), Some(7));
        assert_eq!(counter(text, "oom_k"), None);
    }

    #[test]
    fn low_memory_counts_for_a_few_samples_only() {
        let mut watch = MemoryWatch {
            kills_before: u64::MAX,
            recent: VecDeque::from([(1, 100)]),
        };
        assert!(watch.ran_out());
        for _ in 0..MAX_SAMPLES {
            watch.recent.push_back((90, 100));
            watch.recent.pop_front();
        }
        assert!(!watch.ran_out());
    }
}
