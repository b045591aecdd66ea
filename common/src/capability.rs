//! What a device is and can do, as a worker advertises it.

use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// An NVIDIA GPU.
    Cuda,
    /// The GPU of an Apple Silicon Mac.
    Metal,
    /// The CPU.
    Cpu,
}

impl DeviceKind {
    /// The name used in configs and on screens: `cuda`, `metal`, `cpu`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Metal => "metal",
            Self::Cpu => "cpu",
        }
    }
}

/// Which device of a machine: its kind and its number among those of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceRef {
    /// CUDA, Metal or CPU.
    pub kind: DeviceKind,
    /// Counted from 0 among the devices of that kind.
    pub index: u32,
}

/// One device and what it can do. Found by trying, not by a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Which device of its machine.
    pub device: DeviceRef,
    /// What the vendor calls it, for people: `NVIDIA GeForce RTX 4090`, `Apple M4 Max`, `AMD EPYC (2 cores)`.
    pub name: String,
    /// `sm_89`, `apple9`, `x86_64+avx2`, ….
    pub architecture: String,
    /// Bytes the device has.
    pub memory_total: u64,
    /// Bytes a task may use: free memory less a margin.
    pub memory_budget: u64,
    /// dtypes in which every operation was tried on small tensors and came out right: `f32`, `bf16`, `f16`.
    pub dtypes: Vec<String>,
    /// Attention implementations that run here: `flash` never holds all scores (the CPU), `eager` is composed of
    /// products and a softmax, some queries at a time (GPUs).
    pub attention: Vec<String>,
    /// The memory profile that this device offers to a task that asks for none.
    pub profile: MemoryProfile,
}
