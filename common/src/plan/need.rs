//! Peak memory by kind of device and memory profile.

use super::profile::MemoryProfile;
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// Peak memory of a job under each profile, on a GPU and on a CPU. A CPU computes in float32, and the memory of the program
/// itself counts. Serialized in MiB, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Serialized", into = "Serialized")]
pub struct MemoryNeed {
    gpu: [u32; 4],
    cpu: [u32; 4],
}

/// The serialised form. Earlier versions wrote five byte counts, the last one for a CPU.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Serialized {
    Current {
        gpu: [u32; 4],
        #[serde(rename = "processor")]
        cpu: [u32; 4],
    },
    Legacy([u64; 5]),
}

impl From<Serialized> for MemoryNeed {
    fn from(stored: Serialized) -> Self {
        match stored {
            Serialized::Current { gpu, cpu } => Self { gpu, cpu },
            Serialized::Legacy([full, balanced, poor, extreme, cpu]) => {
                Self::new([full, balanced, poor, extreme], [cpu; 4])
            }
        }
    }
}

impl From<MemoryNeed> for Serialized {
    fn from(need: MemoryNeed) -> Self {
        Self::Current {
            gpu: need.gpu,
            cpu: need.cpu,
        }
    }
}

impl MemoryNeed {
    /// Creates it from bytes on a GPU and on a CPU: with everything in memory, then under `balanced`, `gpu_poor` and `extreme`.
    #[must_use]
    pub fn new(gpu: [u64; 4], cpu: [u64; 4]) -> Self {
        let mib = |bytes: u64| u32::try_from(bytes.div_ceil(MIB)).unwrap_or(u32::MAX);
        Self {
            gpu: gpu.map(mib),
            cpu: cpu.map(mib),
        }
    }

    /// The same number of bytes under every profile.
    #[must_use]
    pub fn flat(bytes: u64) -> Self {
        Self::new([bytes; 4], [bytes; 4])
    }

    /// Bytes under a profile, on a CPU or a GPU. `full_gpu` and `cpu_only` both keep everything in memory.
    #[must_use]
    pub fn under(&self, profile: MemoryProfile, on_cpu: bool) -> u64 {
        let index = match profile {
            MemoryProfile::FullGpu | MemoryProfile::CpuOnly => 0,
            MemoryProfile::Balanced => 1,
            MemoryProfile::GpuPoor => 2,
            MemoryProfile::Extreme => 3,
        };
        let needs = if on_cpu { &self.cpu } else { &self.gpu };
        u64::from(needs[index]) * MIB
    }

    /// The elementwise maximum.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let larger = |one: [u32; 4], two: [u32; 4]| std::array::from_fn(|i| one[i].max(two[i]));
        Self {
            gpu: larger(self.gpu, other.gpu),
            cpu: larger(self.cpu, other.cpu),
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
