//! Runs one benchmark of `aitk bench engine` in this process, and measures its memory.

use crate::memory_usage::{peak_memory, reset_peak_memory};
use aitk_common::capability::DeviceRef;
pub use aitk_engine::bench::random_model::{RandomModelSize, write_random_parts};
pub use aitk_engine::bench::{BENCHMARKS, Benchmark};
use aitk_engine::device::portable::portable;
use aitk_engine::device::precision::MatmulPrecision;
use aitk_engine::device::{open_with_dtype, parse_dtype, threads::on_pool};
use aitk_engine::error::EngineError;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The result of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchmarkResult {
    /// The name of the benchmark.
    pub work: String,
    /// Seconds per run: the median.
    pub seconds: f64,
    /// Floating-point operations of one run; 0 if it is limited by memory bandwidth.
    pub flops: u64,
    /// Peak memory of the process during the runs, weights and inputs included, in bytes; 0 if the system does not
    /// report it.
    pub peak_bytes: u64,
    /// Number of timed runs.
    pub runs: usize,
}

/// Runs a benchmark in a dtype (`float32`, `bf16`, …) on a device for about `duration`. Use a process of its own: the memory
/// is that of the whole process.
///
/// # Errors
/// If the device cannot be opened or fails, or does not compute in this dtype.
pub fn measure(
    work: &Benchmark,
    device: DeviceRef,
    dtype: &str,
    duration: Duration,
) -> Result<BenchmarkResult, EngineError> {
    let compute = open_with_dtype(device, dtype)?;
    if let Some(note) = compute.notes.first() {
        return Err(EngineError::BadInput(note.clone()));
    }
    let precision = MatmulPrecision::of(device, parse_dtype(dtype)?);
    let measure = || work.measure(&compute, duration, reset_peak_memory);
    let measured = on_pool(|| {
        if device.is_portable() {
            portable(measure)
        } else {
            precision.run(measure)
        }
    })?;
    Ok(BenchmarkResult {
        work: work.name.to_owned(),
        seconds: measured.seconds,
        flops: work.flops,
        peak_bytes: peak_memory(),
        runs: measured.runs,
    })
}
