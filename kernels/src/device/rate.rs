//! Measures how fast a device multiplies matrices, from which the scheduler guesses the time of a job before any job has run there.

use super::portable::portable;
use super::self_test::catch_panic;
use crate::nn;
use candle_core::{DType, Device, Tensor};
use std::time::{Duration, Instant};

/// How long products are repeated, at least twice.
const DURATION: Duration = Duration::from_millis(60);
/// Sides of the matrices: large enough that the launch of a kernel does not count.
const CPU_SIDE: usize = 1024;
#[cfg(any(feature = "cuda", feature = "metal"))]
const GPU_SIDE: usize = 4096;

/// Billions of floating-point operations per second of matrix products on the CPU, in f32. 0: it cannot be measured.
#[must_use]
pub fn cpu_gflops() -> u64 {
    measure(&Device::Cpu, DType::F32, CPU_SIDE)
}

/// The same in portable mode.
#[must_use]
pub fn portable_gflops() -> u64 {
    portable(cpu_gflops)
}

/// The same on a GPU, in the fastest of the dtypes that work there.
#[cfg(any(feature = "cuda", feature = "metal"))]
pub(super) fn gpu_gflops(device: &Device, dtypes: &[String]) -> u64 {
    let all = [("bf16", DType::BF16), ("f16", DType::F16), ("f32", DType::F32)];
    all.iter()
        .filter(|(name, _)| dtypes.iter().any(|dtype| dtype == name))
        .map(|(_, dtype)| measure(device, *dtype, GPU_SIDE))
        .max()
        .unwrap_or(0)
}

fn measure(device: &Device, dtype: DType, side: usize) -> u64 {
    let seconds = catch_panic(|| seconds_per_product(device, dtype, side));
    match seconds {
        Some(Ok(seconds)) if seconds > 0.0 => {
            let flops = 2.0 * (side as f64).powi(3);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a positive number"
            )]
            let gflops = (flops / seconds / 1e9).round() as u64;
            gflops.max(1)
        }
        _ => 0,
    }
}

/// The shortest time of a product: others were delayed by other programs.
fn seconds_per_product(device: &Device, dtype: DType, side: usize) -> candle_core::Result<f64> {
    let matrix = Tensor::ones((side, side), dtype, device)?;
    let timed = || {
        let start = Instant::now();
        nn::linear(&matrix, &matrix, None)?;
        device.synchronize()?;
        Ok::<f64, candle_core::Error>(start.elapsed().as_secs_f64())
    };
    // The first product loads kernels.
    timed()?;
    let (start, mut best) = (Instant::now(), timed()?);
    while start.elapsed() < DURATION {
        best = best.min(timed()?);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_measured_in_every_dtype() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert!(portable(|| measure(&Device::Cpu, dtype, 64)) > 0, "{dtype:?}");
        }
        assert!(measure(&Device::Cpu, DType::F32, 64) > 0);
        assert_eq!(
            measure(&Device::Cpu, DType::U8, 64),
            0,
            "a dtype without matrix products"
        );
    }
}
