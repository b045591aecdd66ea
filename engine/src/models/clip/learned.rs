//! Vectors of textual inversion beside the table of a text encoder.

use crate::nn::Embedding;
use candle_core::{DType, Result, Tensor};
use std::ops::Range;

/// Vectors for the ids that follow those of a table. They may be variables: the table stays as it is.
#[derive(Clone, Debug, Default)]
pub(super) struct LearnedVectors {
    /// [vectors, width] each.
    tensors: Vec<Tensor>,
}

impl LearnedVectors {
    fn count(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.dims()[0]).sum()
    }

    /// Adds vectors, [vectors, width], and returns their ids.
    pub(super) fn add(&mut self, vectors: Tensor, table: &Embedding) -> Result<Range<u32>> {
        let (count, width) = vectors.dims2()?;
        if width != table.width() {
            candle_core::bail!("vectors of {width} numbers for a text encoder of {}", table.width());
        }
        let first = table.count() + self.count();
        self.tensors.push(vectors);
        let id = |index: usize| u32::try_from(index).map_err(candle_core::Error::wrap);
        Ok(id(first)?..id(first + count)?)
    }

    /// Whether some of them are variables.
    pub(super) fn has_variables(&self) -> bool {
        self.tensors.iter().any(Tensor::is_variable)
    }

    /// The same vectors without variables; they share their memory.
    pub(super) fn detached(&self) -> Self {
        Self {
            tensors: self.tensors.iter().map(Tensor::detach).collect(),
        }
    }

    /// ids [b, n] (u32) -> vectors of the table and of these, [b, n, width].
    pub(super) fn embed(&self, table: &Embedding, ids: &Tensor) -> Result<Tensor> {
        let limit = u32::try_from(table.count()).map_err(candle_core::Error::wrap)?;
        if self.tensors.is_empty() {
            return table.forward(ids);
        }
        let (rows, columns) = ids.dims2()?;
        let all: Vec<u32> = ids.flatten_all()?.to_vec1()?;
        if all.iter().all(|id| *id < limit) {
            return table.forward(ids);
        }
        let known: Vec<u32> = all.iter().map(|id| if *id < limit { *id } else { 0 }).collect();
        let device = ids.device();
        let known = table.forward(&Tensor::from_vec(known, (rows, columns), device)?)?;
        let (dtype, width, count) = (known.dtype(), table.width(), self.count());
        // Products with zeros and ones have gradients on every device, and are exact.
        let (mut kept, mut chosen) = (vec![1f32; all.len()], vec![0f32; all.len() * count]);
        for (position, id) in all.iter().enumerate().filter(|(_, id)| **id >= limit) {
            kept[position] = 0.0;
            match chosen
                .get_mut(position * count..)
                .and_then(|row| row.get_mut((*id - limit) as usize))
            {
                Some(one) if ((*id - limit) as usize) < count => *one = 1.0,
                _ => candle_core::bail!("the id {id} is not one of {}", table.count() + count),
            }
        }
        let kept = Tensor::from_vec(kept, (rows, columns, 1), device)?.to_dtype(dtype)?;
        let chosen = Tensor::from_vec(chosen, (all.len(), count), device)?;
        let vectors: Vec<Tensor> = self
            .tensors
            .iter()
            .map(|tensor| tensor.to_dtype(DType::F32))
            .collect::<Result<_>>()?;
        let learned = chosen.matmul(&Tensor::cat(&vectors, 0)?)?.to_dtype(dtype)?;
        known
            .broadcast_mul(&kept)?
            .broadcast_add(&learned.reshape((rows, columns, width))?)
    }
}
