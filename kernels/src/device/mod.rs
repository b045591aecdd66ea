//! Devices, and the dtype that models are computed in.

pub mod allocator;
#[cfg(feature = "cuda")]
mod cuda;
mod gpu;
pub mod gpus;
#[cfg(feature = "metal")]
mod metal;
mod peak;
pub mod portable;
pub mod precision;
pub mod rate;
pub mod self_test;
pub mod threads;

pub use peak::DevicePeak;

use crate::error::{EngineError, Result};
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::{DType, Device};
use precision::MatmulPrecision;

/// An open device and the dtype to compute in.
#[derive(Clone, Debug)]
pub struct Compute {
    /// The device of all tensors.
    pub device: Device,
    /// The dtype of weights and activations.
    pub dtype: DType,
    /// Notices for the user: why a requested dtype is not used.
    pub notes: Vec<String>,
}

/// Opens a device.
///
/// # Errors
/// When this program was built without support for its kind, or the device cannot be opened.
pub fn open(device: DeviceRef) -> Result<Device> {
    let index = device.index as usize;
    let (opened, feature) = match device.kind {
        DeviceKind::Cpu => return Ok(Device::Cpu),
        DeviceKind::Cuda => (self_test::catch_panic(|| Device::new_cuda(index)), "cuda"),
        // candle panics when the device does not exist.
        DeviceKind::Metal => (self_test::catch_panic(|| Device::new_metal(index)), "metal"),
    };
    let message = match opened {
        Some(Ok(device)) => {
            #[cfg(feature = "cuda")]
            if device.is_cuda() {
                cuda::keep_freed_memory(index);
            }
            return Ok(device);
        }
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

/// Opens a device and chooses the dtype. `requested` is the config's name (`fp16`, `bf16`, `float32`, …), or empty for
/// f32.
///
/// On the CPU tensors are always f32. Where bf16 is requested and the CPU has instructions for it, layers multiply in bf16 if the caller runs
/// them in [`precision::MatmulPrecision::of`] this request; other requests for 16 bits get a notice. A GPU, or the CPU in portable mode,
/// computes in the requested dtype if all operations work in it ([`self_test::first_failure`]), else in f16 if bf16 was requested (its
/// products are summed in f32 too), else in f32.
///
/// # Errors
/// When the name is unknown or the device cannot be opened.
pub fn open_with_dtype(device: DeviceRef, requested: &str) -> Result<Compute> {
    let requested_dtype = parse_dtype(requested)?;
    let opened = open(device)?;
    let (dtype, notes) = match (device.kind, requested_dtype) {
        (_, DType::F32) => (DType::F32, Vec::new()),
        (DeviceKind::Cpu, dtype) if MatmulPrecision::of(device, dtype) == MatmulPrecision::Bf16 => {
            (DType::F32, Vec::new())
        }
        (DeviceKind::Cpu, _) if !device.is_portable() => {
            let note = format!("computing in f32 on the CPU (the config asks for {requested})");
            (DType::F32, vec![note])
        }
        (kind, dtype) => first_working(dtype, kind, |dtype| {
            let failure = || self_test::first_failure(&opened, dtype);
            if device.is_portable() {
                portable::portable(failure)
            } else {
                failure()
            }
        }),
    };
    Ok(Compute {
        device: opened,
        dtype,
        notes,
    })
}

/// `requested` if it works, else the closest dtype that works; and a notice for each dtype that does not work.
fn first_working(
    requested: DType,
    kind: DeviceKind,
    failure: impl Fn(DType) -> Option<String>,
) -> (DType, Vec<String>) {
    let mut notes = Vec::new();
    let candidates: &[DType] = if requested == DType::BF16 {
        &[DType::BF16, DType::F16]
    } else {
        &[DType::F16]
    };
    for &dtype in candidates {
        match failure(dtype) {
            None => return (dtype, notes),
            Some(failure) => notes.push(format!(
                "not computing in {} on {}: it does not work there ({failure})",
                dtype.as_str(),
                kind.name()
            )),
        }
    }
    (DType::F32, notes)
}

/// Ends a phase of a job: returns the peaks of this process on a GPU since the last call, and gives freed memory back to the
/// driver. `None` where nothing is counted: on the CPU, with Metal, or when the driver does not report it.
#[must_use]
pub fn end_phase(device: DeviceRef) -> Option<DevicePeak> {
    match device.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => cuda::end_phase(device.index),
        _ => None,
    }
}

/// Parses the name of a dtype. Accepts the names of ai-toolkit.
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

/// Sets the number of threads for all computation on the CPU, and returns whether that succeeded. It succeeds once per
/// process, before the first computation. Results do not depend on the number.
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
    fn the_cpu_has_tensors_in_f32_and_a_notice_where_it_computes_in_another_dtype() {
        let cpu = DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        };
        let fp16 = open_with_dtype(cpu, "fp16").unwrap();
        assert_eq!(fp16.dtype, DType::F32);
        assert!(fp16.notes[0].contains("f32"));
        let bf16 = open_with_dtype(cpu, "bf16").unwrap();
        assert_eq!(bf16.dtype, DType::F32);
        assert_eq!(
            bf16.notes.is_empty(),
            precision::has_bf16_products(),
            "{:?}",
            bf16.notes
        );
        assert!(open_with_dtype(cpu, "float32").unwrap().notes.is_empty());
        let portable = open_with_dtype(DeviceRef::PORTABLE_CPU, "bf16").unwrap();
        assert_eq!((portable.dtype, portable.notes), (DType::BF16, vec![]));
        assert!(open_with_dtype(cpu, "fp12").unwrap_err().to_string().contains("fp12"));
    }

    #[test]
    fn a_dtype_that_does_not_work_is_replaced_by_the_closest_one() {
        let failure_in =
            |broken: &'static [DType]| move |dtype| broken.contains(&dtype).then(|| "conv2d: no".to_owned());
        let chosen = |requested, broken| first_working(requested, DeviceKind::Metal, failure_in(broken));
        assert_eq!(chosen(DType::BF16, &[]), (DType::BF16, vec![]));
        let (dtype, notes) = chosen(DType::BF16, &[DType::BF16]);
        assert_eq!((dtype, notes.len()), (DType::F16, 1));
        assert!(
            notes[0].contains("bf16 on metal") && notes[0].contains("conv2d"),
            "{notes:?}"
        );
        assert_eq!(chosen(DType::BF16, &[DType::BF16, DType::F16]).0, DType::F32);
        assert_eq!(chosen(DType::F16, &[DType::BF16]), (DType::F16, vec![]));
        assert_eq!(
            chosen(DType::F16, &[DType::F16]).0,
            DType::F32,
            "bf16 has a shorter mantissa than f16"
        );
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn the_error_names_the_missing_feature() {
        let error = open(DeviceRef {
            kind: DeviceKind::Cuda,
            index: 0,
        })
        .unwrap_err()
        .to_string();
        assert!(error.contains("--features cuda"), "{error}");
    }
}
