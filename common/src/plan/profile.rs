//! Memory profiles.

use serde::{Deserialize, Serialize};

const GIB: u64 = 1 << 30;

/// A memory profile: how much device memory a task uses, in exchange for speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryProfile {
    /// All weights stay on the device.
    FullGpu,
    /// Text encoders and VAE leave the device when idle.
    Balanced,
    /// Half of the denoiser's layers are streamed as well, and memory-saving options are enabled.
    GpuPoor,
    /// All of the denoiser's layers are streamed.
    Extreme,
    /// All weights stay in memory; everything runs on the CPU.
    CpuOnly,
}

impl MemoryProfile {
    /// Every profile, from the most to the least memory.
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

    /// The default profile of a GPU with this much usable memory. The thresholds are 16, 10 and 6 GiB.
    #[must_use]
    pub fn for_gpu_budget(bytes: u64) -> Self {
        match bytes {
            b if b >= 16 * GIB => Self::FullGpu,
            b if b >= 10 * GIB => Self::Balanced,
            b if b >= 6 * GIB => Self::GpuPoor,
            _ => Self::Extreme,
        }
    }

    /// The profiles to try on a CPU or a GPU, the fastest first.
    #[must_use]
    pub fn on(cpu: bool) -> [Self; 4] {
        let first = if cpu { Self::CpuOnly } else { Self::FullGpu };
        [first, Self::Balanced, Self::GpuPoor, Self::Extreme]
    }

    /// The next smaller profile. None for the smallest.
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
    fn each_profile_is_followed_by_the_next_smaller_one() {
        for cpu in [false, true] {
            for pair in MemoryProfile::on(cpu).windows(2) {
                assert_eq!(pair[0].smaller(), Some(pair[1]));
            }
        }
    }
}
