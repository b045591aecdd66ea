//! The precision of the matrix products of layers on the CPU.
//!
//! On the CPU all tensors are f32, whatever `dtype` a config asks for. With bf16, on a CPU with instructions for it (AVX512-BF16), linear layers and
//! convolutions round their operands to bfloat16 where they multiply them, and sum in f32, as PyTorch does after
//! `torch.set_float32_matmul_precision("medium")`. So does attention in its forward pass. A CPU without them multiplies in f32.
//!
//! The precision belongs to a thread, as portable mode does: operations choose it on the thread that calls them, in both passes.

use super::portable::is_portable;
use aitk_common::capability::{DeviceKind, DeviceRef};
use candle_core::DType;
use std::cell::Cell;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

/// The precision in which layers multiply on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// f32.
    #[default]
    F32,
    /// Operands are rounded to bfloat16, and sums are f32, where the CPU has instructions for it.
    Bf16,
}

impl MatmulPrecision {
    /// The precision for a config's `dtype` on a device: bf16 on a CPU with instructions for it, outside portable mode. GPUs compute in the
    /// dtype of their tensors.
    #[must_use]
    pub fn of(device: DeviceRef, dtype: DType) -> Self {
        let is_cpu = device.kind == DeviceKind::Cpu && !device.is_portable();
        match dtype {
            DType::BF16 if is_cpu && has_bf16_products() => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// Runs `f` in this precision. The one from before is restored afterwards, also after a panic.
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        /// Restores the precision when it is dropped.
        struct Restore(MatmulPrecision);
        impl Drop for Restore {
            fn drop(&mut self) {
                PRECISION.set(self.0);
            }
        }
        let _restore = Restore(PRECISION.replace(self));
        f()
    }

    /// The precision of this thread: f32 in portable mode.
    #[must_use]
    pub fn current() -> Self {
        match is_portable() {
            true => Self::F32,
            false => PRECISION.get(),
        }
    }
}

/// Whether this CPU has the instructions for products of bfloat16 numbers that this program uses: AVX512-BF16, and AVX-512 as products in f32
/// use it.
#[must_use]
pub fn has_bf16_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(|| {
            is_x86_feature_detected!("avx512bf16")
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

thread_local!(static PRECISION: Cell<MatmulPrecision> = const { Cell::new(MatmulPrecision::F32) });

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::portable::{not_portable, portable};

    const CPU: DeviceRef = DeviceRef {
        kind: DeviceKind::Cpu,
        index: 0,
    };

    #[test]
    fn only_bf16_on_a_cpu_with_its_instructions_is_another_precision() {
        let expected = match has_bf16_products() {
            true => MatmulPrecision::Bf16,
            false => MatmulPrecision::F32,
        };
        assert_eq!(MatmulPrecision::of(CPU, DType::BF16), expected);
        for (device, dtype) in [
            (CPU, DType::F32),
            (CPU, DType::F16),
            (DeviceRef::PORTABLE_CPU, DType::BF16),
            (
                DeviceRef {
                    kind: DeviceKind::Cuda,
                    index: 0,
                },
                DType::BF16,
            ),
        ] {
            assert_eq!(
                MatmulPrecision::of(device, dtype),
                MatmulPrecision::F32,
                "{device:?} {dtype:?}"
            );
        }
    }

    #[test]
    fn the_precision_ends_with_the_call_and_after_a_panic() {
        let panicked = std::panic::catch_unwind(|| MatmulPrecision::Bf16.run(|| panic!("expected")));
        assert!(panicked.is_err());
        assert_eq!(MatmulPrecision::current(), MatmulPrecision::F32);
        MatmulPrecision::Bf16.run(|| {
            assert_eq!(MatmulPrecision::current(), MatmulPrecision::Bf16);
            MatmulPrecision::F32.run(|| assert_eq!(MatmulPrecision::current(), MatmulPrecision::F32));
            portable(|| {
                assert_eq!(
                    MatmulPrecision::current(),
                    MatmulPrecision::F32,
                    "other tensors, other operations"
                );
                not_portable(|| assert_eq!(MatmulPrecision::current(), MatmulPrecision::Bf16));
            });
            let other = std::thread::spawn(MatmulPrecision::current).join().unwrap();
            assert_eq!(other, MatmulPrecision::F32, "another thread");
        });
    }
}
