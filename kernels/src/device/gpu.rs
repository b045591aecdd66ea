//! A GPU and its properties.

use aitk_common::capability::DeviceRef;

/// A GPU: what its driver reports, and the dtypes that work on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Its kind and index.
    pub device: DeviceRef,
    /// The vendor's name for it. Empty when the driver does not report one.
    pub name: String,
    /// `sm_89`, `applegpu_g15s`, ….
    pub architecture: String,
    /// Its memory in bytes.
    pub memory_total: u64,
    /// Free bytes; on a Mac, of the memory that the system recommends to use.
    pub memory_free: u64,
    /// The dtypes in which all operations work.
    pub dtypes: Vec<String>,
    /// Why the other dtypes do not work: `bf16: conv2d: …`.
    pub faults: Vec<String>,
    /// Measured rate of matrix products in billions of floating-point operations per second; 0: not measured.
    pub gflops: u64,
}

/// A reason if the card is older than the compute capability that this program was built for, `built` (`80`, `90a`):
/// then no kernel runs on it.
#[cfg(any(feature = "cuda", test))]
pub(super) fn too_old_for_build(major: i32, minor: i32, built: Option<&str>) -> Option<String> {
    let built = built?;
    let number: i32 = built.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse().ok()?;
    (major * 10 + minor < number).then(|| {
        format!(
            "the card has compute capability {major}.{minor}, this program was built for {}.{} and later",
            number / 10,
            number % 10
        )
    })
}
