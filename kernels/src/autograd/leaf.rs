//! Tensors that candle treats as variables: the outputs of steps.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor, Var};
use std::cell::RefCell;

/// A leaf on the CPU with these elements.
pub(super) fn leaf_from_vec(elements: Vec<f32>, shape: Shape) -> Tensor {
    let storage = Storage::Cpu(CpuStorage::F32(elements));
    Tensor::from_storage(storage, shape, BackpropOp::none(), true)
}

/// A leaf with the elements of `result`, which an operation computed from `inputs`. The storage of `result` moves to
/// the leaf; it is copied if it is the storage of an input, or if `result` is not the whole of it.
pub(super) fn leaf_from_result(result: Tensor, inputs: &[Tensor]) -> Result<Tensor> {
    let storage = address(&result);
    let is_whole = result.is_contiguous() && result.layout().start_offset() == 0;
    if !is_whole || inputs.iter().any(|input| address(input) == storage) {
        return Ok(Var::from_tensor(&result.detach())?.into_inner());
    }
    let shape = result.shape().clone();
    let take = TakeStorage::default();
    result.detach().inplace_op1(&take)?;
    match take.0.into_inner() {
        Some(storage) => Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), true)),
        None => candle_core::bail!("the storage of an operation's result was not taken"),
    }
}

/// The address of a tensor's storage, which views of the tensor share.
fn address(x: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&x.storage_and_layout().0).addr()
}

/// Takes the storage of a tensor and leaves one of a single zero. Nothing may read the tensor afterwards.
#[derive(Default)]
struct TakeStorage(RefCell<Option<Storage>>);

/// Replaces `storage` by one of a single zero and returns it.
fn take<S: BackendStorage>(storage: &mut S) -> Result<S>
where
    S::Device: BackendDevice<Storage = S>,
{
    let rest = storage.device().zeros_impl(&Shape::from(1), storage.dtype())?;
    Ok(std::mem::replace(storage, rest))
}

impl InplaceOp1 for TakeStorage {
    fn name(&self) -> &'static str {
        "take-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.0.replace(Some(Storage::Cpu(take(storage)?)));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.0.replace(Some(Storage::Cuda(take(storage)?)));
        Ok(())
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
        self.0.replace(Some(Storage::Metal(take(storage)?)));
        Ok(())
    }
}
