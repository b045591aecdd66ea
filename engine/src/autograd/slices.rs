//! Plain slices out of tensors.

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};

/// Whether the engine's own operations can take this tensor.
pub(crate) fn runs_here(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32
}

/// The elements of a contiguous f32 storage.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    let CpuStorage::F32(data) = storage else {
        candle_core::bail!("expected f32 on the CPU");
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => data
            .get(start..end)
            .ok_or_else(|| candle_core::Error::Msg("layout exceeds storage".into())),
        None => candle_core::bail!("expected a contiguous tensor"),
    }
}

/// The same of any storage.
pub(super) fn of<'a>(storage: &'a Storage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    match storage {
        Storage::Cpu(storage) => slice(storage, layout),
        _ => candle_core::bail!("expected a tensor on the CPU"),
    }
}

/// Runs `f` on the elements of a contiguous f32 tensor on the CPU.
pub(crate) fn with_slice<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    Ok(f(of(&storage, layout)?))
}
