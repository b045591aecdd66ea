//! Reads a saved optimizer state: every tensor is checked, and an unexpected tensor is an error.

use super::optimizer::OptimError;
use super::state_tensor::StateTensor;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

/// The tensors of a saved state, and how many of them were read.
pub(super) struct SavedState<'a> {
    tensors: &'a BTreeMap<String, Tensor>,
    tensors_read: usize,
}

impl<'a> SavedState<'a> {
    pub(super) fn new(tensors: &'a BTreeMap<String, Tensor>) -> Self {
        Self {
            tensors,
            tensors_read: 0,
        }
    }

    /// Reads a tensor, checks its dtype and shape, and copies it to the device.
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
        self.tensors_read += 1;
        Ok(tensor.to_device(device)?)
    }

    /// As [`SavedState::tensor`], for a tensor that the optimizer changes.
    pub(super) fn state_tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        device: &Device,
    ) -> Result<StateTensor, OptimError> {
        // The caller keeps the saved state, which must not change.
        Ok(StateTensor::shared(
            self.tensor(name, dtype, shape, device)?.contiguous()?,
        ))
    }

    /// Reads a count that [`count`] saved.
    pub(super) fn count(&mut self, name: &str) -> Result<u64, OptimError> {
        let value = self.tensor(name, DType::I64, &[], &Device::Cpu)?.to_scalar::<i64>()?;
        u64::try_from(value).map_err(|_| OptimError::State(format!("\"{name}\" is not a count")))
    }

    /// Reads a number that [`number`] saved.
    pub(super) fn number(&mut self, name: &str) -> Result<f64, OptimError> {
        Ok(self.tensor(name, DType::F64, &[], &Device::Cpu)?.to_scalar()?)
    }

    /// Checks that every tensor was read.
    pub(super) fn finish(self) -> Result<(), OptimError> {
        if self.tensors.len() == self.tensors_read {
            Ok(())
        } else {
            Err(OptimError::State(format!(
                "{} tensors, expected {}",
                self.tensors.len(),
                self.tensors_read
            )))
        }
    }
}

/// A count as a tensor to save.
pub(super) fn count(value: u64) -> Result<Tensor, OptimError> {
    Ok(Tensor::new(i64::try_from(value).unwrap_or(i64::MAX), &Device::Cpu)?)
}

/// A number as a tensor to save.
pub(super) fn number(value: f64) -> Result<Tensor, OptimError> {
    Ok(Tensor::new(value, &Device::Cpu)?)
}
