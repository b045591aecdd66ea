//! Where tensors live and in which dtype they are computed.

pub mod allocator;
#[cfg(feature = "cuda")]
mod cuda;
pub mod gpus;
#[cfg(feature = "metal")]
mod metal;
pub mod threads;
pub mod trial;

use crate::error::{EngineError, Result};
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::{DType, Device};

/// An open device and the dtype policy that holds on it.
#[derive(Clone, Debug)]
pub struct Compute {
    /// Where tensors live.
    pub device: Device,
    /// What the weights and activations of a model are computed in.
    pub dtype: DType,
    /// What a person should know: a dtype that was asked for and is not used, and why.
    pub notes: Vec<String>,
}

/// Opens a device.
///
/// # Errors
/// When this program was built without its kind, or the driver refuses.
pub fn open(device: DeviceRef) -> Result<Device> {
    let index = device.index as usize;
    let (opened, feature) = match device.kind {
        DeviceKind::Cpu => return Ok(Device::Cpu),
        DeviceKind::Cuda => (trial::catch_panic(|| Device::new_cuda(index)), "cuda"),
        // candle panics where there is no such device.
        DeviceKind::Metal => (trial::catch_panic(|| Device::new_metal(index)), "metal"),
    };
    let message = match opened {
        Some(Ok(device)) => return Ok(device),
        Some(Err(candle_core::Error::NotCompiledWithCudaSupport | candle_core::Error::NotCompiledWithMetalSupport)) => {
            format!("this program was built without {feature}: build it with `--features {feature}`, or use the cpu")
        }
        Some(Err(error)) => format!("cannot be opened: {error}"),
        None => "cannot be opened: there is no such device, or its driver failed".to_owned(),
    };
    Err(EngineError::Device {
        device: format!("{}:{index}", device.kind.name()),
        message,
    })
}

/// Opens a device and settles the dtype; `wanted` is the config's name (`fp16`, `bf16`, `float32`, …), empty for none.
///
/// The CPU always computes in f32: its half-precision products are slower and less exact. A GPU computes in what
/// is asked for if all operations come out right in it ([`trial::fault`]); otherwise in f16 instead of bf16 (products
/// add up in f32 there too), otherwise in f32.
///
/// # Errors
/// When the name is unknown or the device cannot be opened.
pub fn compute(device: DeviceRef, wanted: &str) -> Result<Compute> {
    let asked = parse_dtype(wanted)?;
    let opened = open(device)?;
    let (dtype, notes) = match (device.kind, asked) {
        (_, DType::F32) => (DType::F32, Vec::new()),
        (DeviceKind::Cpu, _) => {
            let note = format!("computing in f32 on the CPU (the config asks for {wanted})");
            (DType::F32, vec![note])
        }
        (kind, asked) => first_working(asked, kind, |dtype| trial::fault(&opened, dtype)),
    };
    Ok(Compute {
        device: opened,
        dtype,
        notes,
    })
}

/// `asked` if nothing is wrong with it, or what comes closest, and a note for each that was passed over.
fn first_working(asked: DType, kind: DeviceKind, fault: impl Fn(DType) -> Option<String>) -> (DType, Vec<String>) {
    let mut notes = Vec::new();
    let candidates: &[DType] = if asked == DType::BF16 {
        &[DType::BF16, DType::F16]
    } else {
        &[DType::F16]
    };
    for &dtype in candidates {
        match fault(dtype) {
            None => return (dtype, notes),
            Some(fault) => notes.push(format!(
                "not computing in {} on {}, it does not work there ({fault})",
                dtype.as_str(),
                kind.name()
            )),
        }
    }
    (DType::F32, notes)
}

/// The most bytes that tensors of this process held on a GPU at once since the last call. `None` where nobody counts them:
/// on the CPU, with Metal, or when the driver does not tell.
#[must_use]
pub fn take_peak(device: DeviceRef) -> Option<u64> {
    match device.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => cuda::take_peak(device.index),
        _ => None,
    }
}

/// The dtype of a config's name, as ai-toolkit accepts them.
///
/// # Errors
/// When the name is unknown.
pub fn parse_dtype(name: &str) -> Result<DType> {
    match name.trim().to_lowercase().as_str() {
        "" | "fp32" | "float32" | "float" | "f32" => Ok(DType::F32),
        "fp16" | "float16" | "half" | "f16" => Ok(DType::F16),
        "bf16" | "bfloat16" => Ok(DType::BF16),
        _ => Err(EngineError::BadInput(format!(
            "dtype `{name}` is unknown: use fp32, fp16 or bf16"
        ))),
    }
}

/// Sets the number of threads for all arithmetic on the CPU. Works once per process, before any arithmetic;
/// later calls change nothing. Results do not depend on it.
///
/// Returns whether it took effect.
pub fn set_threads(threads: usize) -> bool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_computes_in_f32_and_says_so() {
        let cpu = DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        };
        let bf16 = compute(cpu, "bf16").unwrap();
        assert_eq!(bf16.dtype, DType::F32);
        assert!(bf16.notes[0].contains("f32"));
        assert!(compute(cpu, "float32").unwrap().notes.is_empty());
        assert!(compute(cpu, "fp12").unwrap_err().to_string().contains("fp12"));
    }

    #[test]
    fn what_does_not_work_is_replaced_by_what_comes_closest() {
        let none_of = |broken: &'static [DType]| move |dtype| broken.contains(&dtype).then(|| "conv2d: no".to_owned());
        let settled = |asked, broken| first_working(asked, DeviceKind::Metal, none_of(broken));
        assert_eq!(settled(DType::BF16, &[]), (DType::BF16, vec![]));
        let (dtype, notes) = settled(DType::BF16, &[DType::BF16]);
        assert_eq!((dtype, notes.len()), (DType::F16, 1));
        assert!(
            notes[0].contains("bf16 on metal") && notes[0].contains("conv2d"),
            "{notes:?}"
        );
        assert_eq!(settled(DType::BF16, &[DType::BF16, DType::F16]).0, DType::F32);
        assert_eq!(settled(DType::F16, &[DType::BF16]), (DType::F16, vec![]));
        assert_eq!(
            settled(DType::F16, &[DType::F16]).0,
            DType::F32,
            "bf16 keeps less than f16 does"
        );
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_missing_feature_is_named() {
        let error = open(DeviceRef {
            kind: DeviceKind::Cuda,
            index: 0,
        })
        .unwrap_err()
        .to_string();
        assert!(error.contains("--features cuda"), "{error}");
    }
}
