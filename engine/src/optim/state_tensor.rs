//! A tensor of an optimizer's state: changed in place, unless somebody else may have it too.

use candle_core::{Result, Tensor};
use std::cell::Cell;

/// One tensor, in order.
pub(super) struct StateTensor {
    tensor: Tensor,
    /// It was given away, or came from somewhere: the next change is made to a copy.
    lent: Cell<bool>,
}

impl StateTensor {
    /// A tensor that nobody else has.
    pub(super) fn new(tensor: Tensor) -> Self {
        Self {
            tensor,
            lent: Cell::new(false),
        }
    }

    /// A tensor that somebody else may have.
    pub(super) fn borrowed(tensor: Tensor) -> Self {
        Self {
            tensor,
            lent: Cell::new(true),
        }
    }

    /// As it is, to be read before the next change.
    pub(super) fn get(&self) -> &Tensor {
        &self.tensor
    }

    /// As it is and will stay, whatever is done here.
    pub(super) fn lend(&self) -> Tensor {
        self.lent.set(true);
        self.tensor.clone()
    }

    /// To be changed in place.
    pub(super) fn own(&mut self) -> Result<&Tensor> {
        if self.lent.replace(false) {
            self.tensor = self.tensor.copy()?;
        }
        Ok(&self.tensor)
    }

    /// Takes another value.
    pub(super) fn set(&mut self, tensor: Tensor) {
        *self = Self::new(tensor);
    }
}
