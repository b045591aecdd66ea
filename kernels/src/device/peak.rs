//! The peak memory of a process on a GPU.

/// The most memory of a GPU that a process took, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DevicePeak {
    /// What tensors held.
    pub allocated: u64,
    /// What tensors held, and what they freed and the process kept. The driver's context is not included.
    pub reserved: u64,
}
