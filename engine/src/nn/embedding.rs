//! Embedding tables.

use crate::error::Result;
use crate::weights::Weight;
use crate::weights::{Init, Weights};
use candle_core::{Shape, Tensor};

/// A table of vectors, one for each id.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// [count, width]; never quantised.
    weight: Weight,
}

impl Embedding {
    /// Loads `weight` ([count, width]).
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn new(weights: &Weights, count: usize, width: usize) -> Result<Self> {
        let shape = Shape::from((count, width));
        Ok(Self {
            weight: match weights.stream(&shape, "weight")? {
                Some(streamed) => Weight::Streamed(streamed),
                None => Weight::Plain(weights.get_with(shape, "weight", Init::Normal(0.02))?),
            },
        })
    }

    /// The table, [count, width].
    #[must_use]
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The number of vectors.
    #[must_use]
    pub fn count(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or(0)
    }

    /// The number of features of a vector.
    #[must_use]
    pub fn width(&self) -> usize {
        self.weight.dims().get(1).copied().unwrap_or(0)
    }

    /// ids [..] (u32, on any device) -> [.., width].
    ///
    /// # Errors
    /// When an id is not in the table.
    pub fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mut shape = ids.dims().to_vec();
        shape.push(self.width());
        let ids = ids.flatten_all()?;
        let rows = match &self.weight {
            Weight::Streamed(table) => table.rows(&ids.to_vec1()?).map_err(candle_core::Error::wrap)?,
            table => table.dense()?.index_select(&ids.to_device(table.device())?, 0)?,
        };
        rows.reshape(shape)
    }
}
