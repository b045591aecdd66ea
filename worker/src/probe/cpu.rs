//! The CPU as a device.

use super::memory::memory;
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::plan::profile::MemoryProfile;
use aitk_engine::device::{rate, self_test};
use sysinfo::{CpuRefreshKind, RefreshKind, System};

/// The CPU as a device.
pub(super) fn device() -> Device {
    let memory = memory();
    Device {
        id: DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        },
        name: name(),
        architecture: architecture(),
        memory_total: memory.total,
        // The rest is for the system, file caches and other programs.
        memory_budget: memory.available / 4 * 3,
        dtypes: self_test::cpu_dtypes(),
        // Attention runs in tiles: the scores of all tokens with all tokens are never in memory at once.
        attention: vec!["flash".to_owned()],
        profile: MemoryProfile::CpuOnly,
        gflops: rate::cpu_gflops(),
    }
}

/// The CPU in portable mode, which computes in the forms that GPUs use.
pub(super) fn portable_device() -> Device {
    Device {
        id: DeviceRef::PORTABLE_CPU,
        dtypes: self_test::portable_dtypes(),
        attention: vec!["eager".to_owned()],
        gflops: rate::portable_gflops(),
        ..device()
    }
}

/// The name of the CPU, such as `AMD EPYC 7763 (2 cores)`.
pub(super) fn name() -> String {
    let system = System::new_with_specifics(RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing()));
    let brand = system
        .ok()
        .and_then(|system| system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()))
        .unwrap_or_default();
    let brand = if brand.is_empty() {
        format!("{} CPU", std::env::consts::ARCH)
    } else {
        brand
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{brand} ({cores} core{})", if cores == 1 { "" } else { "s" })
}

/// The architecture with its features, such as `x86_64+avx2+fma`. Detected at run time, because the program may run
/// on another machine than the one it was built on.
fn architecture() -> String {
    let mut text = std::env::consts::ARCH.to_owned();
    for feature in features() {
        text.push('+');
        text.push_str(feature);
    }
    text
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let found = [
        ("avx2", std::is_x86_feature_detected!("avx2")),
        ("fma", std::is_x86_feature_detected!("fma")),
        ("f16c", std::is_x86_feature_detected!("f16c")),
        ("avx512f", std::is_x86_feature_detected!("avx512f")),
        ("avx512bf16", std::is_x86_feature_detected!("avx512bf16")),
    ];
    found
        .into_iter()
        .filter(|(_, there)| *there)
        .map(|(name, _)| name)
        .collect()
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    let found = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
    ];
    found
        .into_iter()
        .filter(|(_, there)| *there)
        .map(|(name, _)| name)
        .collect()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}
