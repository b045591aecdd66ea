//! Peak memory by kind of device and memory profile.

use super::profile::MemoryProfile;
use crate::capability::DeviceKind;
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// Peak memory of a job under each profile, on each kind of device. With CUDA and Metal it is the GPU's memory. A CPU computes in
/// float32, and the memory of the program itself counts. Serialized in MiB, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Serialized", into = "Serialized")]
pub struct MemoryNeed {
    cuda: [u32; 4],
    metal: [u32; 4],
    cpu: [u32; 4],
}

/// The serialised form. Earlier versions wrote the same for all GPUs, or five byte counts, the last one for a CPU.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Serialized {
    Current {
        #[serde(rename = "gpu")]
        cuda: [u32; 4],
        #[serde(default, skip_serializing_if = "Option::is_none")]
        metal: Option<[u32; 4]>,
        #[serde(rename = "processor")]
        cpu: [u32; 4],
    },
    Legacy([u64; 5]),
}

impl From<Serialized> for MemoryNeed {
    fn from(stored: Serialized) -> Self {
        match stored {
            Serialized::Current { cuda, metal, cpu } => Self {
                cuda,
                metal: metal.unwrap_or(cuda),
                cpu,
            },
            Serialized::Legacy([full, balanced, poor, extreme, cpu]) => {
                Self::new([[full, balanced, poor, extreme]; 2], [cpu; 4])
            }
        }
    }
}

impl From<MemoryNeed> for Serialized {
    fn from(need: MemoryNeed) -> Self {
        Self::Current {
            cuda: need.cuda,
            metal: (need.metal != need.cuda).then_some(need.metal),
            cpu: need.cpu,
        }
    }
}

impl MemoryNeed {
    /// Creates it from bytes with CUDA and with Metal, and on a CPU: with everything in memory, then under `balanced`, `gpu_poor` and
    /// `extreme`.
    #[must_use]
    pub fn new([cuda, metal]: [[u64; 4]; 2], cpu: [u64; 4]) -> Self {
        let mib = |bytes: u64| u32::try_from(bytes.div_ceil(MIB)).unwrap_or(u32::MAX);
        Self {
            cuda: cuda.map(mib),
            metal: metal.map(mib),
            cpu: cpu.map(mib),
        }
    }

    /// The same number of bytes under every profile.
    #[must_use]
    pub fn flat(bytes: u64) -> Self {
        Self::new([[bytes; 4]; 2], [bytes; 4])
    }

    /// Bytes under a profile, on a kind of device. `full_gpu` and `cpu_only` both keep everything in memory.
    #[must_use]
    pub fn under(&self, profile: MemoryProfile, kind: DeviceKind) -> u64 {
        let index = match profile {
            MemoryProfile::FullGpu | MemoryProfile::CpuOnly => 0,
            MemoryProfile::Balanced => 1,
            MemoryProfile::GpuPoor => 2,
            MemoryProfile::Extreme => 3,
        };
        let needs = match kind {
            DeviceKind::Cuda => &self.cuda,
            DeviceKind::Metal => &self.metal,
            DeviceKind::Cpu => &self.cpu,
        };
        u64::from(needs[index]) * MIB
    }

    /// The elementwise maximum.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let larger = |one: [u32; 4], two: [u32; 4]| std::array::from_fn(|i| one[i].max(two[i]));
        Self {
            cuda: larger(self.cuda, other.cuda),
            metal: larger(self.metal, other.metal),
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
        assert_eq!(before.under(MemoryProfile::GpuPoor, DeviceKind::Cuda), 3 << 30);
        assert_eq!(before.under(MemoryProfile::Balanced, DeviceKind::Cpu), 1 << 20);
        let same = r#"{"gpu":[4096,3072,2048,1],"processor":[1,1,1,7]}"#;
        let before: MemoryNeed = serde_json::from_str(same).unwrap();
        assert_eq!(before.under(MemoryProfile::Balanced, DeviceKind::Metal), 3 << 30);
        assert_eq!(serde_json::to_string(&before).unwrap(), same);
        let cuda = [4 << 30, 3 << 30, 2 << 30, 1];
        let now = MemoryNeed::new([cuda, [5 << 30; 4]], [u64::MAX, 0, 1 << 20, 7 << 20]);
        let text = serde_json::to_string(&now).unwrap();
        assert_eq!(serde_json::from_str::<MemoryNeed>(&text).unwrap(), now);
        assert!(now.under(MemoryProfile::CpuOnly, DeviceKind::Cpu) > 1 << 50);
    }
}
