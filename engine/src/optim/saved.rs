//! Reading a saved state back: every tensor is looked at, and none may be left over.

use super::OptimError;
use super::state_tensor::StateTensor;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

/// A saved state on its way into an optimizer.
pub(super) struct Saved<'a> {
    tensors: &'a BTreeMap<String, Tensor>,
    taken: usize,
}

impl<'a> Saved<'a> {
    pub(super) fn new(tensors: &'a BTreeMap<String, Tensor>) -> Self {
        Self { tensors, taken: 0 }
    }

    /// A tensor of this type and shape, on this device.
    pub(super) fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        device: &Device,
    ) -> Result<Tensor, OptimError> {
        let wrong = |what: String| OptimError::State(format!("\"{name}\" {what}"));
        let tensor = self.tensors.get(name).ok_or_else(|| wrong("is missing".into()))?;
        if tensor.dims() != shape {
            return Err(wrong(format!("has shape {:?}, expected {shape:?}", tensor.dims())));
        }
        if tensor.dtype() != dtype {
            return Err(wrong(format!("is {:?}, expected {dtype:?}", tensor.dtype())));
        }
        self.taken += 1;
        Ok(tensor.to_device(device)?)
    }

    /// The same, to go on with.
    pub(super) fn kept(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        device: &Device,
    ) -> Result<StateTensor, OptimError> {
        // Whoever reads the saved state again finds it as it was.
        Ok(StateTensor::borrowed(
            self.tensor(name, dtype, shape, device)?.contiguous()?,
        ))
    }

    /// A count, as [`count`] saved it.
    pub(super) fn count(&mut self, name: &str) -> Result<u64, OptimError> {
        let value = self.tensor(name, DType::I64, &[], &Device::Cpu)?.to_scalar::<i64>()?;
        u64::try_from(value).map_err(|_| OptimError::State(format!("\"{name}\" is not a count")))
    }

    /// A number, as [`number`] saved it.
    pub(super) fn number(&mut self, name: &str) -> Result<f64, OptimError> {
        Ok(self.tensor(name, DType::F64, &[], &Device::Cpu)?.to_scalar()?)
    }

    /// Everything was taken.
    pub(super) fn done(self) -> Result<(), OptimError> {
        if self.tensors.len() == self.taken {
            Ok(())
        } else {
            Err(OptimError::State(format!(
                "{} tensors, expected {}",
                self.tensors.len(),
                self.taken
            )))
        }
    }
}

/// A count to save.
pub(super) fn count(value: u64) -> Result<Tensor, OptimError> {
    Ok(Tensor::new(i64::try_from(value).unwrap_or(i64::MAX), &Device::Cpu)?)
}

/// A number to save.
pub(super) fn number(value: f64) -> Result<Tensor, OptimError> {
    Ok(Tensor::new(value, &Device::Cpu)?)
}
