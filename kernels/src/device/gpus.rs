//! Finds the GPUs of this machine that this build can use.

pub use super::gpu::Gpu;
use super::self_test::catch_panic;
use aitk_common::capability::DeviceKind;

/// The result of [`probe_gpus`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuProbe {
    /// GPUs that work, at least in f32.
    pub gpus: Vec<Gpu>,
    /// GPUs that do not work and drivers that do not start: a sentence for the user each.
    pub left_out: Vec<String>,
    /// Kinds of GPUs that may be in this machine and that this build does not support: a sentence for the user each.
    /// These are notices, not errors.
    pub not_built_for: Vec<String>,
}

/// How the GPUs of one kind are found.
struct Backend {
    kind: DeviceKind,
    count: fn() -> Result<u32, String>,
    open_and_test: fn(u32) -> candle_core::Result<Gpu>,
}

const BACKENDS: &[Backend] = &[
    #[cfg(feature = "cuda")]
    Backend {
        kind: DeviceKind::Cuda,
        count: super::cuda::count,
        open_and_test: super::cuda::open_and_test,
    },
    #[cfg(feature = "metal")]
    Backend {
        kind: DeviceKind::Metal,
        count: super::metal::count,
        open_and_test: super::metal::open_and_test,
    },
];

/// Finds and tests every GPU that this build supports. Takes seconds with CUDA, which compiles its kernels for the card
/// when they are first used. Never fails: a GPU that cannot be used is left out, with a reason.
#[must_use]
pub fn probe_gpus() -> GpuProbe {
    let mut probe = GpuProbe::default();
    for backend in BACKENDS {
        probe_backend(backend, &mut probe);
    }
    probe.not_built_for.extend(unsupported_gpu());
    probe
}

fn probe_backend(backend: &Backend, probe: &mut GpuProbe) {
    let name = backend.kind.name();
    let count = match catch_panic(backend.count) {
        Some(Ok(count)) => count,
        Some(Err(reason)) => return probe.left_out.push(format!("{name}: {reason}")),
        None => {
            return probe
                .left_out
                .push(format!("{name}: its driver failed while listing devices"));
        }
    };
    for index in 0..count {
        match catch_panic(|| (backend.open_and_test)(index)) {
            Some(Ok(gpu)) if gpu.dtypes.iter().any(|dtype| dtype == "f32") => probe.gpus.push(gpu),
            Some(Ok(gpu)) => probe.left_out.push(format!(
                "{name}:{index} ({} {}) does not compute f32: {}",
                gpu.name,
                gpu.architecture,
                gpu.faults.join("; ")
            )),
            Some(Err(error)) => probe.left_out.push(format!("{name}:{index} cannot be opened: {error}")),
            None => probe
                .left_out
                .push(format!("{name}:{index}: its driver failed during the test")),
        }
    }
}

/// A notice about a GPU that this build does not support.
fn unsupported_gpu() -> Option<String> {
    let driver = ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"];
    if !cfg!(feature = "cuda") && driver.iter().any(|path| std::path::Path::new(path).exists()) {
        return Some(
            "NVIDIA's driver is installed, but this program was built without CUDA: deploy/build/cuda.sh builds one with it"
                .to_owned(),
        );
    }
    if !cfg!(feature = "metal") && cfg!(all(target_os = "macos", target_arch = "aarch64")) {
        return Some(
            "this program was built without Metal: build it with `--features metal` to use the GPU".to_owned(),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::gpu::too_old_for_build;
    use super::*;
    use aitk_common::capability::DeviceRef;

    fn gpu(dtypes: &[&str]) -> Gpu {
        Gpu {
            device: DeviceRef {
                kind: DeviceKind::Cuda,
                index: 0,
            },
            name: "Card".to_owned(),
            architecture: "sm_75".to_owned(),
            memory_total: 8,
            memory_free: 4,
            dtypes: dtypes.iter().map(|&dtype| dtype.to_owned()).collect(),
            faults: vec!["bf16: conv2d: no such kernel".to_owned()],
            gflops: 0,
        }
    }

    fn probe_with(count: fn() -> Result<u32, String>, open_and_test: fn(u32) -> candle_core::Result<Gpu>) -> GpuProbe {
        let mut probe = GpuProbe::default();
        let backend = Backend {
            kind: DeviceKind::Cuda,
            count,
            open_and_test,
        };
        probe_backend(&backend, &mut probe);
        probe
    }

    #[test]
    fn a_gpu_is_used_if_f32_works() {
        let probe = probe_with(|| Ok(1), |_| Ok(gpu(&["f32", "f16"])));
        assert_eq!((probe.gpus.len(), probe.left_out.len()), (1, 0));
        let probe = probe_with(|| Ok(1), |_| Ok(gpu(&["f16"])));
        assert!(probe.gpus.is_empty());
        assert!(probe.left_out[0].contains("no such kernel"), "{probe:?}");
    }

    #[test]
    fn errors_and_panics_of_a_driver_become_reasons() {
        let probe = probe_with(|| Err("too old".to_owned()), |_| Ok(gpu(&["f32"])));
        assert_eq!(probe.left_out, ["cuda: too old"]);
        let probe = probe_with(|| panic!("no library"), |_| Ok(gpu(&["f32"])));
        assert!(probe.left_out[0].contains("failed"), "{probe:?}");
        let probe = probe_with(
            || Ok(3),
            |index| match index {
                0 => panic!("a fault of the driver"),
                1 => Err(candle_core::Error::Msg("in use".to_owned())),
                _ => Ok(gpu(&["f32"])),
            },
        );
        assert_eq!(probe.gpus.len(), 1);
        assert!(probe.left_out[0].starts_with("cuda:0"), "{probe:?}");
        assert!(probe.left_out[1].contains("in use"), "{probe:?}");
    }

    #[test]
    fn a_card_that_is_too_old_for_the_build_is_reported() {
        let reason = too_old_for_build(7, 5, Some("80")).unwrap();
        assert!(reason.contains("7.5") && reason.contains("8.0 and later"), "{reason}");
        assert_eq!(too_old_for_build(12, 0, Some("80")), None);
        assert_eq!(too_old_for_build(9, 0, Some("90a")), None);
        assert!(too_old_for_build(9, 0, Some("120a")).unwrap().contains("12.0"));
        assert_eq!(too_old_for_build(7, 5, None), None);
    }
}
