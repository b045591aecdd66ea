//! Devices and their capabilities, as a worker advertises them.

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

/// Identifies a device of a machine by its kind and its index among the devices of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceRef {
    /// CUDA, Metal or CPU.
    pub kind: DeviceKind,
    /// Counted from 0 among the devices of that kind. The CPU is 0, and 1 in portable mode.
    pub index: u32,
}

impl DeviceRef {
    /// The CPU in portable mode, `cpu:portable`: it computes in the forms that GPUs use, to test them on a machine
    /// without one.
    pub const PORTABLE_CPU: Self = Self {
        kind: DeviceKind::Cpu,
        index: 1,
    };

    /// Whether this is the CPU in portable mode.
    #[must_use]
    pub fn is_portable(self) -> bool {
        self == Self::PORTABLE_CPU
    }
}

/// A device and its capabilities, found by running test operations on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Identifies the device on its machine.
    #[serde(rename = "device")]
    pub id: DeviceRef,
    /// The vendor's product name: `NVIDIA GeForce RTX 4090`, `Apple M4 Max`, `AMD EPYC (2 cores)`.
    pub name: String,
    /// `sm_89`, `apple9`, `x86_64+avx2`, ….
    pub architecture: String,
    /// Total memory of the device in bytes.
    pub memory_total: u64,
    /// Bytes that tasks may use: free memory minus a margin.
    pub memory_budget: u64,
    /// dtypes in which every test operation on small tensors gave correct results: `f32`, `bf16`, `f16`.
    pub dtypes: Vec<String>,
    /// Attention implementations that run on the device: `flash` never materialises the full score matrix (CPU); `eager` is
    /// matrix products and a softmax, in chunks of queries (GPUs).
    pub attention: Vec<String>,
    /// The default memory profile of tasks that request none.
    pub profile: MemoryProfile,
    /// Matrix products in the fastest of these dtypes, measured when the worker starts: billions of floating-point operations per
    /// second. 0: not measured.
    #[serde(default)]
    pub gflops: u64,
}
