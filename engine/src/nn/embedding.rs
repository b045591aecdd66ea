//! Embedding tables.

use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::Tensor;

/// A table of vectors, one per id.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// Loads `weight` ([count, width]).
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn new(weights: &Weights, count: usize, width: usize) -> Result<Self> {
        Ok(Self {
            weight: weights.get_with((count, width), "weight", Init::Normal(0.02))?,
        })
    }

    /// ids [..] (u32, on any device) -> [.., width].
    ///
    /// # Errors
    /// When an id is not in the table.
    pub fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mut shape = ids.dims().to_vec();
        shape.push(self.weight.dim(1)?);
        let ids = ids.flatten_all()?.to_device(self.weight.device())?;
        self.weight.index_select(&ids, 0)?.reshape(shape)
    }

    /// The table, [count, width].
    #[must_use]
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}
