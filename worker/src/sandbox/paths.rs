//! System files that every attempt needs: libraries, a few devices, kernel information about memory and CPUs.

use aitk_common::capability::DeviceKind;
use std::ffi::OsString;
use std::path::PathBuf;

/// Libraries, and the files that configure them. Read-only. Only an attempt with an extension may start
/// programs: [`PROGRAMS`].
const LIBRARIES: &[&str] = &[
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/run/opengl-driver",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    // The time zone of log lines; it links to /usr.
    "/etc/localtime",
];

/// Folders with the system's programs: interpreters, and the loader of libraries, which the kernel starts too.
const PROGRAMS: &[&str] = &["/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"];

/// Folders with the system's programs. Some of them may not exist.
pub(super) fn system_programs() -> Vec<PathBuf> {
    PROGRAMS.iter().map(PathBuf::from).collect()
}

/// Kernel information about this process and the machine: CPUs (rayon, gemm), memory, limits of control groups, huge
/// pages (mimalloc).
const KERNEL_FILES: &[&str] = &[
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/vm",
    "/proc/version",
    "/proc/vmstat",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/sys/kernel/mm/transparent_hugepage",
];

/// Files that NVIDIA's driver also reads: its settings, where cards are attached, which modules are loaded.
const CUDA_FILES: &[&str] = &[
    "/etc/nvidia",
    "/proc/devices",
    "/proc/driver/nvidia",
    "/proc/driver/nvidia-uvm",
    "/proc/modules",
    "/sys/bus/pci",
    "/sys/class",
    "/sys/devices",
    "/sys/module",
];

/// Devices without hardware.
#[cfg(target_os = "linux")]
const PLAIN_DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// Prefixes of the names of NVIDIA's devices: cards, Tegra's, and those of the Windows subsystem for Linux.
#[cfg(target_os = "linux")]
const CUDA_DEVICE_PREFIXES: &[&str] = &["nvidia", "nvhost", "nvmap", "nvgpu", "dxg"];

/// Paths that an attempt may read on a device of this kind. Some of them may not exist.
pub(super) fn readable_paths(device: DeviceKind) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = LIBRARIES.iter().chain(KERNEL_FILES).map(PathBuf::from).collect();
    if device == DeviceKind::Cuda {
        all.extend(CUDA_FILES.iter().map(PathBuf::from));
        // A toolkit in a folder of its own.
        for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
            all.extend(std::env::var_os(name).map(PathBuf::from));
        }
    }
    // Library folders that the worker's administrator configured; the environment is the daemon's, never a job's.
    for name in ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"] {
        let paths: OsString = std::env::var_os(name).unwrap_or_default();
        all.extend(std::env::split_paths(&paths));
    }
    all.extend(std::env::current_exe().ok());
    all.retain(|path| path.is_absolute() && path.parent().is_some());
    all
}

/// Devices that an attempt may read, write and control.
#[cfg(target_os = "linux")]
pub(super) fn device_paths(device: DeviceKind) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = PLAIN_DEVICES.iter().map(PathBuf::from).collect();
    if device == DeviceKind::Cuda {
        all.push(PathBuf::from("/dev/dri"));
        for entry in std::fs::read_dir("/dev").into_iter().flatten().flatten() {
            let name = entry.file_name();
            if CUDA_DEVICE_PREFIXES
                .iter()
                .any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
            {
                all.push(entry.path());
            }
        }
    }
    all
}
