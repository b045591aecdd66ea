//! Embedding tables.

use super::adapter::{BaseLayer, LayerAdapter, LayerKind, with_adapters};
use crate::error::Result;
use crate::quant::Quantized;
use crate::weights::Weight;
use crate::weights::{Init, Weights};
use candle_core::{Device, Shape, Tensor};
use std::sync::Arc;

/// A table of vectors, one for each id.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// [count, width]; never quantised by us.
    pub weight: Weight,
    /// Adapters, applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Embedding {
    /// Loads `weight` ([count, width]): streamed or in its stored form where the weights say so.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn new(weights: &Weights, count: usize, width: usize) -> Result<Self> {
        let shape = Shape::from((count, width));
        let weight = if let Some(streamed) = weights.stream(&shape, "weight")? {
            Weight::Streamed(streamed)
        } else if let Some(stored) = weights.stored_table(&shape)? {
            Weight::Quantized(stored)
        } else {
            Weight::Plain(weights.get_with(shape, "weight", Init::Normal(0.02))?)
        };
        Ok(Self {
            weight,
            adapters: Vec::new(),
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
        let layer = BaseLayer {
            kind: LayerKind::Embedding,
            weight: &self.weight,
            bias: None,
        };
        with_adapters(&layer, ids, &self.adapters, || self.rows(ids))
    }

    /// The rows of the table without adapters, [.., width].
    fn rows(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mut shape = ids.dims().to_vec();
        shape.push(self.width());
        let ids = ids.flatten_all()?;
        let rows = match &self.weight {
            Weight::Streamed(table) => table.rows(&ids.to_vec1()?).map_err(candle_core::Error::wrap)?,
            Weight::Quantized(table) if self.weight.has_slices() => stored_rows(table, &ids.to_vec1()?)?,
            table => return lookup(&ids, &table.dense()?)?.reshape(shape),
        };
        rows.reshape(shape)
    }
}

/// The rows of a table [count, width] with these ids [..] (u32, on any device) -> [.., width]. A tracked table gets a gradient.
///
/// # Errors
/// When an id is not in the table.
pub fn lookup(ids: &Tensor, table: &Tensor) -> candle_core::Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(table.dim(1)?);
    let ids = ids.flatten_all()?.to_device(table.device())?;
    table.index_select(&ids, 0)?.reshape(shape)
}

/// Rows of a table in its stored form, [ids, width] in f32.
fn stored_rows(table: &Quantized, ids: &[u32]) -> candle_core::Result<Tensor> {
    let &[count, width] = table.dims() else {
        candle_core::bail!(
            "embedding: expected a table of two dimensions, found {:?}",
            table.dims()
        );
    };
    if let Some(id) = ids.iter().find(|id| **id as usize >= count) {
        candle_core::bail!("embedding: the id {id} is not in a table of {count} rows");
    }
    let read = table.with_rows(|rows| {
        let rows = rows?;
        let mut read = vec![0f32; ids.len() * width];
        for (id, to) in ids.iter().zip(read.chunks_mut(width.max(1))) {
            rows.read(*id as usize, 0, to);
        }
        Some(read)
    })?;
    match read {
        Some(read) => Tensor::from_vec(read, (ids.len(), width), &Device::Cpu),
        None => {
            let ids = Tensor::from_slice(ids, ids.len(), &Device::Cpu)?;
            table.dequantize()?.index_select(&ids, 0)
        }
    }
}
