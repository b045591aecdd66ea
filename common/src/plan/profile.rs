//! Memory profiles, named as in the project's seed documents.

use serde::{Deserialize, Serialize};

const GIB: u64 = 1 << 30;

/// How a task is laid out in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryProfile {
    /// Everything on the device.
    FullGpu,
    /// Encoders leave the device when idle.
    Balanced,
    /// Components come and go, weights are quantised.
    GpuPoor,
    /// Weights are streamed block by block.
    Extreme,
    /// The CPU does it all.
    CpuOnly,
}

impl MemoryProfile {
    /// Every profile, the most generous first.
    pub const ALL: [Self; 5] = [
        Self::FullGpu,
        Self::Balanced,
        Self::GpuPoor,
        Self::Extreme,
        Self::CpuOnly,
    ];

    /// The name used in configs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FullGpu => "full_gpu",
            Self::Balanced => "balanced",
            Self::GpuPoor => "gpu_poor",
            Self::Extreme => "extreme",
            Self::CpuOnly => "cpu_only",
        }
    }

    /// The profile with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|profile| profile.name() == name)
    }

    /// What a GPU with this much usable memory offers by default: 16, 10 and 6 GiB are the steps.
    #[must_use]
    pub fn for_gpu_budget(bytes: u64) -> Self {
        match bytes {
            b if b >= 16 * GIB => Self::FullGpu,
            b if b >= 10 * GIB => Self::Balanced,
            b if b >= 6 * GIB => Self::GpuPoor,
            _ => Self::Extreme,
        }
    }

    /// What may be tried on such a device, the least slow first.
    #[must_use]
    pub fn on(cpu: bool) -> [Self; 4] {
        let first = if cpu { Self::CpuOnly } else { Self::FullGpu };
        [first, Self::Balanced, Self::GpuPoor, Self::Extreme]
    }

    /// The next smaller one; none: this is the smallest.
    #[must_use]
    pub fn smaller(self) -> Option<Self> {
        match self {
            Self::FullGpu | Self::CpuOnly => Some(Self::Balanced),
            Self::Balanced => Some(Self::GpuPoor),
            Self::GpuPoor => Some(Self::Extreme),
            Self::Extreme => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_thresholds_hold() {
        for profile in MemoryProfile::ALL {
            assert_eq!(MemoryProfile::from_name(profile.name()), Some(profile));
        }
        assert_eq!(MemoryProfile::for_gpu_budget(16 * GIB), MemoryProfile::FullGpu);
        assert_eq!(MemoryProfile::for_gpu_budget(16 * GIB - 1), MemoryProfile::Balanced);
        assert_eq!(MemoryProfile::for_gpu_budget(6 * GIB), MemoryProfile::GpuPoor);
        assert_eq!(MemoryProfile::for_gpu_budget(0), MemoryProfile::Extreme);
    }

    #[test]
    fn profiles_come_in_order() {
        for cpu in [false, true] {
            for pair in MemoryProfile::on(cpu).windows(2) {
                assert_eq!(pair[0].smaller(), Some(pair[1]));
            }
        }
    }
}
