//! Access to the elements of CPU tensors as slices, to change them in place.

use crate::device::portable::is_portable;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor};
use half::f16;
use std::cell::{Cell, RefCell};

/// The elements of one contiguous tensor.
pub(super) enum ElementsMut<'a> {
    /// float32.
    F32(&'a mut [f32]),
    /// float16.
    F16(&'a mut [f16]),
    /// 8-bit codes.
    U8(&'a mut [u8]),
}

impl<'a> ElementsMut<'a> {
    /// The float32 elements; an empty slice for another dtype.
    pub(super) fn f32(self) -> &'a mut [f32] {
        match self {
            Self::F32(numbers) => numbers,
            _ => &mut [],
        }
    }

    /// The float16 elements; an empty slice for another dtype.
    pub(super) fn f16(self) -> &'a mut [f16] {
        match self {
            Self::F16(numbers) => numbers,
            _ => &mut [],
        }
    }

    /// The 8-bit elements; an empty slice for another dtype.
    pub(super) fn u8(self) -> &'a mut [u8] {
        match self {
            Self::U8(codes) => codes,
            _ => &mut [],
        }
    }
}

/// Whether the tensor's elements can be accessed as one slice: a contiguous CPU tensor of a supported dtype,
/// outside portable mode.
pub(super) fn is_supported(t: &Tensor) -> bool {
    !is_portable()
        && t.device().is_cpu()
        && matches!(t.dtype(), DType::F32 | DType::F16 | DType::U8)
        && t.is_contiguous()
}

/// Calls `f` with the elements of all these tensors, in order. Every tensor must be supported (see [`is_supported`]),
/// and no two may share their storage. Other tensors that share a storage with one of them see the changes.
pub(super) fn with_elements_mut<R>(tensors: &[&Tensor], f: impl FnOnce(Vec<ElementsMut<'_>>) -> R) -> Result<R> {
    let (f, mut out) = (Cell::new(Some(f)), None);
    with_nested(tensors, Vec::with_capacity(tensors.len()), &mut |elements| {
        if let Some(f) = f.take() {
            out = Some(f(elements));
        }
    })?;
    out.ok_or_else(|| candle_core::Error::Msg("the closure over the tensors' elements was not called".into()))
}

fn with_nested(
    tensors: &[&Tensor],
    opened: Vec<ElementsMut<'_>>,
    f: &mut dyn FnMut(Vec<ElementsMut<'_>>),
) -> Result<()> {
    let Some((first, rest)) = tensors.split_first() else {
        f(opened);
        return Ok(());
    };
    let mut result = Ok(());
    first.inplace_op1(&ElementsOp(RefCell::new(Some(|elements: ElementsMut<'_>| {
        let mut all: Vec<ElementsMut<'_>> = opened;
        all.push(elements);
        result = with_nested(rest, all, f);
    }))))?;
    result
}

struct ElementsOp<F>(RefCell<Option<F>>);

impl<F: FnOnce(ElementsMut<'_>)> InplaceOp1 for ElementsOp<F> {
    fn name(&self) -> &'static str {
        "elements"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("expected a contiguous tensor");
        };
        let too_short = || candle_core::Error::Msg("layout exceeds storage".into());
        let elements = match storage {
            CpuStorage::F32(all) => ElementsMut::F32(all.get_mut(start..end).ok_or_else(too_short)?),
            CpuStorage::F16(all) => ElementsMut::F16(all.get_mut(start..end).ok_or_else(too_short)?),
            CpuStorage::U8(all) => ElementsMut::U8(all.get_mut(start..end).ok_or_else(too_short)?),
            _ => candle_core::bail!("expected f32, f16 or u8"),
        };
        if let Some(f) = self.0.borrow_mut().take() {
            f(elements);
        }
        Ok(())
    }
}

/// Calls `f` with the elements of a contiguous float32 tensor on the CPU.
pub(super) fn with_f32<R>(t: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(all)), Some((start, end))) => match all.get(start..end) {
            Some(elements) => Ok(f(elements)),
            None => candle_core::bail!("layout exceeds storage"),
        },
        _ => candle_core::bail!("expected contiguous f32 on the CPU"),
    }
}

/// Converts a gradient to a contiguous float32 tensor that does not share its storage with `param`.
pub(super) fn readable_gradient(grad: &Tensor, param: &Tensor) -> Result<Tensor> {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0).addr();
    let grad = grad.to_dtype(DType::F32)?.contiguous()?.detach();
    if address(&grad) == address(param) {
        grad.copy()
    } else {
        Ok(grad)
    }
}
