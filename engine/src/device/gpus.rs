//! The GPUs of this machine, as far as this build can use them.

use super::trial::catch_panic;
use aitk_common::capability::{DeviceKind, DeviceRef};

/// A GPU as its driver describes it, and what came out right on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Which one.
    pub device: DeviceRef,
    /// What the vendor calls it. Empty when the driver does not say.
    pub name: String,
    /// `sm_89`, `applegpu_g15s`, ….
    pub architecture: String,
    /// Bytes it has.
    pub memory_total: u64,
    /// Bytes that are free now; on a Mac, of what the system recommends to use at once.
    pub memory_free: u64,
    /// dtypes that work.
    pub dtypes: Vec<String>,
    /// Why others do not: `bf16: conv2d: …`.
    pub faults: Vec<String>,
}

/// What looking for GPUs found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Survey {
    /// Those that compute, at least in f32.
    pub gpus: Vec<Gpu>,
    /// Those that do not, and drivers that do not start; a sentence each, for people.
    pub left_out: Vec<String>,
    /// Kinds of GPUs that may be here and that this build was not made for; a sentence each. Nothing is wrong with that.
    pub not_built_for: Vec<String>,
}

/// How a kind of GPU is asked.
struct Kind {
    kind: DeviceKind,
    count: fn() -> Result<u32, String>,
    examine: fn(u32) -> candle_core::Result<Gpu>,
}

const KINDS: &[Kind] = &[
    #[cfg(feature = "cuda")]
    Kind {
        kind: DeviceKind::Cuda,
        count: super::cuda::count,
        examine: super::cuda::examine,
    },
    #[cfg(feature = "metal")]
    Kind {
        kind: DeviceKind::Metal,
        count: super::metal::count,
        examine: super::metal::examine,
    },
];

/// Looks for every GPU of the kinds in this build and tries it. Takes seconds with CUDA, whose kernels are translated
/// for the card when they are first used. Never fails: what does not answer is left out, with a reason.
#[must_use]
pub fn survey() -> Survey {
    let mut survey = Survey::default();
    for kind in KINDS {
        look(kind, &mut survey);
    }
    survey.not_built_for.extend(unused_card());
    survey
}

fn look(kind: &Kind, survey: &mut Survey) {
    let name = kind.kind.name();
    let count = match catch_panic(kind.count) {
        Some(Ok(count)) => count,
        Some(Err(reason)) => return survey.left_out.push(format!("{name}: {reason}")),
        None => {
            return survey
                .left_out
                .push(format!("{name}: its driver failed when it was asked for devices"));
        }
    };
    for index in 0..count {
        match catch_panic(|| (kind.examine)(index)) {
            Some(Ok(gpu)) if gpu.dtypes.iter().any(|dtype| dtype == "f32") => survey.gpus.push(gpu),
            Some(Ok(gpu)) => survey.left_out.push(format!(
                "{name}:{index} ({} {}) does not compute f32: {}",
                gpu.name,
                gpu.architecture,
                gpu.faults.join("; ")
            )),
            Some(Err(error)) => survey
                .left_out
                .push(format!("{name}:{index} cannot be opened: {error}")),
            None => survey
                .left_out
                .push(format!("{name}:{index}: its driver failed when it was tried")),
        }
    }
}

/// A card that is there and that this build cannot use.
fn unused_card() -> Option<String> {
    let driver = ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"];
    if !cfg!(feature = "cuda") && driver.iter().any(|path| std::path::Path::new(path).exists()) {
        return Some(
            "NVIDIA's driver is here, and this program was built without CUDA: deploy/build/cuda.sh builds one with it"
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

/// The usual reason for a card on which nothing works. `built` is what the build was told: `80`, `90a`.
#[cfg(any(feature = "cuda", test))]
pub(super) fn older_than_built_for(major: i32, minor: i32, built: Option<&str>) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
        }
    }

    fn found(count: fn() -> Result<u32, String>, examine: fn(u32) -> candle_core::Result<Gpu>) -> Survey {
        let mut survey = Survey::default();
        let kind = Kind {
            kind: DeviceKind::Cuda,
            count,
            examine,
        };
        look(&kind, &mut survey);
        survey
    }

    #[test]
    fn a_gpu_counts_when_it_computes() {
        let survey = found(|| Ok(1), |_| Ok(gpu(&["f32", "f16"])));
        assert_eq!((survey.gpus.len(), survey.left_out.len()), (1, 0));
        let survey = found(|| Ok(1), |_| Ok(gpu(&["f16"])));
        assert!(survey.gpus.is_empty());
        assert!(survey.left_out[0].contains("no such kernel"), "{survey:?}");
    }

    #[test]
    fn whatever_a_driver_does_is_a_sentence() {
        let survey = found(|| Err("too old".to_owned()), |_| Ok(gpu(&["f32"])));
        assert_eq!(survey.left_out, ["cuda: too old"]);
        let survey = found(|| panic!("no library"), |_| Ok(gpu(&["f32"])));
        assert!(survey.left_out[0].contains("failed"), "{survey:?}");
        let survey = found(
            || Ok(3),
            |index| match index {
                0 => panic!("a fault of the driver"),
                1 => Err(candle_core::Error::Msg("in use".to_owned())),
                _ => Ok(gpu(&["f32"])),
            },
        );
        assert_eq!(survey.gpus.len(), 1);
        assert!(survey.left_out[0].starts_with("cuda:0"), "{survey:?}");
        assert!(survey.left_out[1].contains("in use"), "{survey:?}");
    }

    #[test]
    fn a_card_that_is_too_old_is_told() {
        let told = older_than_built_for(7, 5, Some("80")).unwrap();
        assert!(told.contains("7.5") && told.contains("8.0 and later"), "{told}");
        assert_eq!(older_than_built_for(12, 0, Some("80")), None);
        assert_eq!(older_than_built_for(9, 0, Some("90a")), None);
        assert!(older_than_built_for(9, 0, Some("120a")).unwrap().contains("12.0"));
        assert_eq!(older_than_built_for(7, 5, None), None);
    }
}
