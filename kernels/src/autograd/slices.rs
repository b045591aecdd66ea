//! The elements of tensors as slices.

use crate::device::portable::is_portable;
use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};

/// Whether the kernels on slices can run on this tensor: f32 on the CPU, outside portable mode.
pub(crate) fn is_cpu_f32(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32 && !is_portable()
}

/// The elements of a contiguous f32 tensor on the CPU, from its storage.
pub(super) fn cpu_slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    let CpuStorage::F32(data) = storage else {
        candle_core::bail!("expected f32 on the CPU");
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => data
            .get(start..end)
            .ok_or_else(|| candle_core::Error::Msg("the layout of a tensor exceeds its storage".into())),
        None => candle_core::bail!("expected a contiguous tensor, found the layout {layout:?}"),
    }
}

/// As [`cpu_slice`], for the storage of a tensor on any device.
///
/// # Errors
/// When the tensor is not on the CPU.
pub(super) fn storage_slice<'a>(storage: &'a Storage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    match storage {
        Storage::Cpu(storage) => cpu_slice(storage, layout),
        _ => candle_core::bail!("expected a tensor on the CPU"),
    }
}

/// Runs `f` on the elements of a contiguous f32 tensor on the CPU.
pub(crate) fn with_slice<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    Ok(f(storage_slice(&storage, layout)?))
}
