//! The elements of tensors on the CPU, changed where they lie.

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor};
use half::f16;
use std::cell::{Cell, RefCell};

/// The elements of one tensor.
pub(super) enum Part<'a> {
    /// In float32.
    F32(&'a mut [f32]),
    /// In float16.
    F16(&'a mut [f16]),
    /// Codes.
    U8(&'a mut [u8]),
}

impl<'a> Part<'a> {
    /// The numbers in float32; none if it holds something else.
    pub(super) fn f32(self) -> &'a mut [f32] {
        match self {
            Self::F32(numbers) => numbers,
            _ => &mut [],
        }
    }

    /// The numbers in float16; none if it holds something else.
    pub(super) fn f16(self) -> &'a mut [f16] {
        match self {
            Self::F16(numbers) => numbers,
            _ => &mut [],
        }
    }

    /// The codes; none if it holds something else.
    pub(super) fn u8(self) -> &'a mut [u8] {
        match self {
            Self::U8(codes) => codes,
            _ => &mut [],
        }
    }
}

/// Whether a tensor's elements can be changed here, all of them one after the other.
pub(super) fn possible(t: &Tensor) -> bool {
    #[cfg(test)]
    if composed::asked_for() {
        return false;
    }
    t.device().is_cpu() && matches!(t.dtype(), DType::F32 | DType::F16 | DType::U8) && t.is_contiguous()
}

/// Calls `f` with the elements of all these tensors, for which this is [`possible`] and which are different ones.
/// Whoever shares a tensor's storage sees what becomes of it.
pub(super) fn with<R>(tensors: &[&Tensor], f: impl FnOnce(Vec<Part<'_>>) -> R) -> Result<R> {
    let (f, mut out) = (Cell::new(Some(f)), None);
    nested(tensors, Vec::with_capacity(tensors.len()), &mut |parts| {
        if let Some(f) = f.take() {
            out = Some(f(parts));
        }
    })?;
    out.ok_or_else(|| candle_core::Error::Msg("nothing was called".into()))
}

fn nested(tensors: &[&Tensor], before: Vec<Part<'_>>, f: &mut dyn FnMut(Vec<Part<'_>>)) -> Result<()> {
    let Some((first, rest)) = tensors.split_first() else {
        f(before);
        return Ok(());
    };
    let mut result = Ok(());
    first.inplace_op1(&Change(RefCell::new(Some(|part: Part<'_>| {
        let mut all: Vec<Part<'_>> = before;
        all.push(part);
        result = nested(rest, all, f);
    }))))?;
    result
}

struct Change<F>(RefCell<Option<F>>);

impl<F: FnOnce(Part<'_>)> InplaceOp1 for Change<F> {
    fn name(&self) -> &'static str {
        "change"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("expected a contiguous tensor");
        };
        let short = || candle_core::Error::Msg("layout exceeds storage".into());
        let part = match storage {
            CpuStorage::F32(all) => Part::F32(all.get_mut(start..end).ok_or_else(short)?),
            CpuStorage::F16(all) => Part::F16(all.get_mut(start..end).ok_or_else(short)?),
            CpuStorage::U8(all) => Part::U8(all.get_mut(start..end).ok_or_else(short)?),
            _ => candle_core::bail!("expected f32, f16 or u8"),
        };
        if let Some(f) = self.0.borrow_mut().take() {
            f(part);
        }
        Ok(())
    }
}

/// Calls `f` with the elements of a float32 tensor for which this is [`possible`].
pub(super) fn read<R>(t: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(all)), Some((start, end))) => match all.get(start..end) {
            Some(elements) => Ok(f(elements)),
            None => candle_core::bail!("layout exceeds storage"),
        },
        _ => candle_core::bail!("expected contiguous f32 on the CPU"),
    }
}

/// A gradient as it can be read while `changed` is changed: in float32, in order, and in a place of its own.
pub(super) fn gradient(grad: &Tensor, changed: &Tensor) -> Result<Tensor> {
    let place = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0).addr();
    let grad = grad.to_dtype(DType::F32)?.contiguous()?.detach();
    if place(&grad) == place(changed) {
        grad.copy()
    } else {
        Ok(grad)
    }
}

/// For tests: everything by the library's own operations, as on other devices.
#[cfg(test)]
pub(super) mod composed {
    use std::cell::Cell;

    thread_local!(static ASKED_FOR: Cell<bool> = const { Cell::new(false) });

    pub(in super::super) fn asked_for() -> bool {
        ASKED_FOR.get()
    }

    /// Runs `f` so, in this thread.
    pub(in super::super) fn only<R>(f: impl FnOnce() -> R) -> R {
        ASKED_FOR.set(true);
        let out = f();
        ASKED_FOR.set(false);
        out
    }
}
