//! LoKr: the change of a weight is a Kronecker product of two matrices, the second of which may be a low-rank product (S.-Y. Yeh and
//! others, "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model Evaluation", 2023).
//!
//! Files have the names of LyCORIS: `lokr_w1` [a, c] or `lokr_w1_a` [a, rank] and `lokr_w1_b` [rank, c]; `lokr_w2` [b, d, kh, kw] or
//! `lokr_w2_a` [b, rank] and `lokr_w2_b` [rank, d kh kw], or with `lokr_t2` [rank, rank, kh, kw] `lokr_w2_a` [rank, b] and
//! `lokr_w2_b` [rank, d]; `alpha`. The layer has a b outputs and c d inputs. The scale is alpha / rank, and 1 where no matrix has a
//! rank.

mod layer;
mod tensors;
mod trained;

pub(super) use tensors::LokrTensors;

use super::trained_layer::{AdapterType, NewLayer, TrainedLayer};
use crate::rng::TorchGenerator;
pub use aitk_common::job::lokr::LokrSplits;
use aitk_common::job::lokr::lokr_is_full;
use candle_core::{DType, Result, Tensor, Var};
use layer::{Factor, LokrLayer};
use std::sync::Arc;

/// `network.type: lokr`, as ai-toolkit's `LokrModule` trains it, or with the options of LyCORIS' module of that name.
#[derive(Clone, Copy, Debug)]
pub struct Lokr {
    /// `network.lokr_factor`; `None` (-1) splits as square as possible.
    pub factor: Option<usize>,
    /// `network.old_lokr_format`.
    pub old_names: bool,
    /// How weights are split besides.
    pub splits: LokrSplits,
}

impl Lokr {
    /// As square as possible, as ai-toolkit splits weights.
    pub const SQUARE: Self = Self {
        factor: None,
        old_names: false,
        splits: LokrSplits {
            smaller_first: false,
            unbalanced: false,
            decompose_both: false,
        },
    };
}

impl AdapterType for Lokr {
    fn has_old_names(&self) -> bool {
        self.old_names
    }

    /// The first matrix is uniform in ±1/sqrt(c), or `lokr_w1_a` in ±1/sqrt(rank) and `lokr_w1_b` in ±1/sqrt(c). The second is zero:
    /// itself, or `lokr_w2_b`, where `lokr_w2_a` is uniform in ±1/sqrt(rank), with a Tucker decomposition in ±1/sqrt(b) and `lokr_t2` in
    /// ±1/sqrt(rank kh kw). These are torch's Kaiming-uniform numbers with a = sqrt(5). With a scalar, which is zero, what would be zero has
    /// such numbers too.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let [[a, b], [c, d]] = self.splits.factors([new.dims[0], new.dims[1]], self.factor);
        let kernel = &new.dims[2..];
        let zeros = |dims: &[usize]| Var::from_tensor(&Tensor::zeros(dims, DType::F32, new.device)?);
        let mut uniform = |rows: usize, columns: usize| {
            let bound = (1.0 / columns.max(1) as f64).sqrt() as f32;
            new.variable(generator.uniform(rows * columns, -bound, bound), &[rows, columns])
        };
        // With a scalar, which is zero, no matrix need be zero.
        let last = |uniform: &mut dyn FnMut(usize, usize) -> Result<Var>, rows: usize, columns: usize| match new.scalar
        {
            true => uniform(rows, columns),
            false => zeros(&[rows, columns]),
        };
        let splits_first = self.splits.splits_first(new.rank, [a, c]);
        let first = match splits_first {
            true => Factor::LowRank(uniform(a, new.rank)?, uniform(new.rank, c)?),
            false => Factor::Full(uniform(a, c)?),
        };
        let is_full = lokr_is_full(new.rank, [b, d]);
        let are_whole = is_full && !splits_first;
        let scale = match (are_whole, new.rank_stabilised) {
            (false, _) => new.alpha / new.rank as f64,
            // LyCORIS multiplies whole matrices with sqrt(rank) too (`rs_lora`).
            (true, true) => (new.rank as f64).sqrt(),
            (true, false) => 1.0,
        };
        let taps: usize = kernel.iter().product();
        let second = match is_full {
            true => {
                let whole = last(&mut uniform, b, d * taps)?.as_detached_tensor();
                Factor::Full(Var::from_tensor(&whole.reshape([&[b, d], kernel].concat())?)?)
            }
            false if new.core_kernel().is_some() => {
                let left = uniform(new.rank, b)?;
                let core = uniform(new.rank, new.rank * taps)?;
                let core = core
                    .as_detached_tensor()
                    .reshape([&[new.rank, new.rank], kernel].concat())?;
                let right = last(&mut uniform, new.rank, d)?;
                Factor::Tucker(Var::from_tensor(&core)?, left, right)
            }
            false => {
                let left = uniform(b, new.rank)?;
                Factor::LowRank(left, last(&mut uniform, new.rank, d * taps)?)
            }
        };
        let scalar = new.new_scalar()?;
        Ok(Arc::new(LokrLayer {
            name: new.name,
            first,
            second,
            kernel: kernel.to_vec(),
            // ai-toolkit saves the configured rank of a layer whose matrices have none.
            alpha: if are_whole { new.rank as f64 } else { new.alpha },
            scale,
            rows: None,
            scalar,
            dropout: new.dropout,
            handle: new.handle.clone(),
        }))
    }
}
