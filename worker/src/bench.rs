//! What `aitk bench engine` computes: one piece of work in this process, with the memory that it takes.

use aitk_common::capability::DeviceRef;
pub use aitk_engine::bench::{WORKS, Work};
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

/// From here on the peak counts anew, where the system can do that.
fn forget_peak() {
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most memory that this process held at once.
fn peak() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0).saturating_mul(1024)
    }
    #[cfg(not(target_os = "linux"))]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        // Macs count bytes here; elsewhere it is KiB.
        let most = getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.max_rss());
        u64::try_from(most).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_is_at_least_what_is_held() {
        forget_peak();
        let held = vec![1u8; 64 << 20];
        assert!(peak() >= held.len() as u64 && held.iter().all(|byte| *byte == 1));
    }
}
