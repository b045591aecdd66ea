//! Where tensors live and in which dtype they are computed.

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
        DeviceKind::Cuda => (Device::new_cuda(index), "cuda"),
        DeviceKind::Metal => (Device::new_metal(index), "metal"),
    };
    opened.map_err(|error| {
        let missing = matches!(
            error,
            candle_core::Error::NotCompiledWithCudaSupport | candle_core::Error::NotCompiledWithMetalSupport
        );
        let message = if missing {
            format!("this program was built without {feature}: build it with `--features {feature}`, or use the cpu")
        } else {
            format!("cannot be opened: {error}")
        };
        EngineError::Device {
            device: format!("{}:{index}", device.kind.name()),
            message,
        }
    })
}

/// Opens a device and settles the dtype; `wanted` is the config's name (`fp16`, `bf16`, `float32`, …), empty for none.
///
/// The processor always computes in f32: its half-precision products are slower and less exact. A Mac computes in
/// f32 where bf16 is asked for, because candle's Metal kernels lack some operations in it.
///
/// # Errors
/// When the name is unknown or the device cannot be opened.
pub fn compute(device: DeviceRef, wanted: &str) -> Result<Compute> {
    let asked = parse_dtype(wanted)?;
    let opened = open(device)?;
    let mut notes = Vec::new();
    let dtype = match (device.kind, asked) {
        (_, DType::F32) => DType::F32,
        (DeviceKind::Cpu, _) => {
            notes.push(format!(
                "computing in f32 on the processor (the config asks for {wanted})"
            ));
            DType::F32
        }
        (DeviceKind::Metal, DType::BF16) => {
            notes.push("computing in f32 on Metal (the config asks for bf16)".to_owned());
            DType::F32
        }
        (_, asked) => asked,
    };
    Ok(Compute {
        device: opened,
        dtype,
        notes,
    })
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

/// Sets the number of threads for all arithmetic on the processor. Works once per process, before any arithmetic;
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
    fn the_processor_computes_in_f32_and_says_so() {
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
