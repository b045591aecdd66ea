//! Bytes at the peak, by device and memory profile.

use super::profile::MemoryProfile;
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// Memory that a job needs at its peak: under each profile, on a GPU and on a CPU, where everything is computed in
/// float32 and the numbers of the program itself count as well. Kept in whole MiB, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct MemoryNeed {
    gpu: [u32; 4],
    cpu: [u32; 4],
}

/// As it lies in records. Earlier versions had five numbers of bytes, the last of them for a CPU.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Stored {
    Now {
        gpu: [u32; 4],
        #[serde(rename = "processor")]
        cpu: [u32; 4],
    },
    Before([u64; 5]),
}

impl From<Stored> for MemoryNeed {
    fn from(stored: Stored) -> Self {
        match stored {
            Stored::Now { gpu, cpu } => Self { gpu, cpu },
            Stored::Before([full, balanced, poor, extreme, cpu]) => {
                Self::new([full, balanced, poor, extreme], [cpu; 4])
            }
        }
    }
}

impl From<MemoryNeed> for Stored {
    fn from(need: MemoryNeed) -> Self {
        Self::Now {
            gpu: need.gpu,
            cpu: need.cpu,
        }
    }
}

impl MemoryNeed {
    /// Bytes on a GPU and on a CPU: with everything in memory, then under `balanced`, `gpu_poor` and `extreme`.
    #[must_use]
    pub fn new(gpu: [u64; 4], cpu: [u64; 4]) -> Self {
        let mib = |bytes: u64| u32::try_from(bytes.div_ceil(MIB)).unwrap_or(u32::MAX);
        Self {
            gpu: gpu.map(mib),
            cpu: cpu.map(mib),
        }
    }

    /// The same bytes everywhere.
    #[must_use]
    pub fn flat(bytes: u64) -> Self {
        Self::new([bytes; 4], [bytes; 4])
    }

    /// Bytes under a profile, on a CPU or on a GPU. `full_gpu` and `cpu_only` both keep everything in memory.
    #[must_use]
    pub fn under(&self, profile: MemoryProfile, on_cpu: bool) -> u64 {
        let place = match profile {
            MemoryProfile::FullGpu | MemoryProfile::CpuOnly => 0,
            MemoryProfile::Balanced => 1,
            MemoryProfile::GpuPoor => 2,
            MemoryProfile::Extreme => 3,
        };
        let needs = if on_cpu { &self.cpu } else { &self.gpu };
        u64::from(needs[place]) * MIB
    }

    /// Whichever is more, place by place.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let most = |one: [u32; 4], two: [u32; 4]| std::array::from_fn(|i| one[i].max(two[i]));
        Self {
            gpu: most(self.gpu, other.gpu),
            cpu: most(self.cpu, other.cpu),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_earlier_versions_are_read() {
        let before: MemoryNeed = serde_json::from_str("[5368709120, 4294967296, 3221225472, 2147483648, 9]").unwrap();
        assert_eq!(before.under(MemoryProfile::GpuPoor, false), 3 << 30);
        assert_eq!(before.under(MemoryProfile::Balanced, true), 1 << 20);
        let now = MemoryNeed::new([4 << 30, 3 << 30, 2 << 30, 1], [u64::MAX, 0, 1 << 20, 7 << 20]);
        let text = serde_json::to_string(&now).unwrap();
        assert_eq!(serde_json::from_str::<MemoryNeed>(&text).unwrap(), now);
        assert!(now.under(MemoryProfile::CpuOnly, true) > 1 << 50);
    }
}
