//! What `aitk bench engine` computes: one piece of work in this process, with the memory that it takes.

use crate::usage::{forget_peak, peak};
use aitk_common::capability::DeviceRef;
pub use aitk_engine::bench::{BENCHMARKS as WORKS, Benchmark as Work};
use aitk_engine::device::{compute, threads::on_pool};
use aitk_engine::error::EngineError;
use serde::{Deserialize, Serialize};

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The work's name.
    pub work: String,
    /// Of one run, the median of some.
    pub seconds: f64,
    /// Floating-point operations of one run; 0 where bytes are the limit.
    pub flops: u64,
    /// The most memory that the process held at once while it ran, weights and inputs included; 0 where the system does
    /// not tell.
    pub peak_bytes: u64,
    /// How many runs were timed.
    pub runs: usize,
}

/// Runs a piece of work in float32 on a device. It wants a process of its own: memory is that of the whole process.
///
/// # Errors
/// When the device cannot be opened or fails.
pub fn measure(work: &Work, device: DeviceRef) -> Result<Finding, EngineError> {
    let compute = compute(device, "float32")?;
    let measured = on_pool(|| work.measure(&compute, forget_peak))?;
    Ok(Finding {
        work: work.name.to_owned(),
        seconds: measured.seconds,
        flops: work.flops,
        peak_bytes: peak(),
        runs: measured.runs,
    })
}
