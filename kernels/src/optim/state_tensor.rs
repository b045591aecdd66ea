//! A copy-on-write tensor of an optimizer's state.

use candle_core::{Result, Tensor};
use std::cell::Cell;

/// A contiguous tensor that is changed in place, and copied first when other code may hold the same storage.
pub(super) struct StateTensor {
    tensor: Tensor,
    /// Whether other code may hold the storage, so that [`StateTensor::make_mut`] must copy it first.
    is_shared: Cell<bool>,
}

impl StateTensor {
    /// Wraps a tensor that no other code holds.
    pub(super) fn new(tensor: Tensor) -> Self {
        Self {
            tensor,
            is_shared: Cell::new(false),
        }
    }

    /// Wraps a tensor that other code may hold.
    pub(super) fn shared(tensor: Tensor) -> Self {
        Self {
            tensor,
            is_shared: Cell::new(true),
        }
    }

    /// The tensor, to be read before the next change.
    pub(super) fn get(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the current value. Later changes to `self` do not affect it.
    pub(super) fn snapshot(&self) -> Tensor {
        self.is_shared.set(true);
        self.tensor.clone()
    }

    /// Returns the tensor to change in place, copied first if it is shared.
    pub(super) fn make_mut(&mut self) -> Result<&Tensor> {
        if self.is_shared.replace(false) {
            self.tensor = self.tensor.copy()?;
        }
        Ok(&self.tensor)
    }

    /// Replaces the value.
    pub(super) fn set(&mut self, tensor: Tensor) {
        *self = Self::new(tensor);
    }
}
