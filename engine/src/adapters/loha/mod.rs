//! LoHa: the change of a weight is the element-wise product of two low-rank products (N. Hyeon-Woo and others, "FedPara: Low-Rank Hadamard
//! Product for Communication-Efficient Federated Learning", arXiv:2108.06098), as in LyCORIS.
//!
//! Files have `hada_w1_a` [out, rank], `hada_w1_b` [rank, in kh kw], `hada_w2_a` and `hada_w2_b` of the same shapes, or with `hada_t1`
//! and `hada_t2` [rank, rank, kh, kw] (Tucker) `hada_w1_a` [rank, out] and `hada_w1_b` [rank, in]; `alpha`. The scale is alpha / rank.

mod file;
mod layer;
mod trained;

pub(super) use file::LohaTensors;

use super::trained_layer::{AdapterType, NewLayer, TrainedLayer};
use crate::rng::TorchGenerator;
use candle_core::{DType, Result, Tensor, Var};
use layer::{LohaLayer, Product};
use std::sync::Arc;

/// `network.type: loha`.
#[derive(Clone, Copy, Debug)]
pub struct Loha;

impl AdapterType for Loha {
    /// As LyCORIS: `hada_w1_b` and `hada_w2_b` are normal, `hada_w1_a` and the cores `hada_t1` and `hada_t2` are normal with a standard
    /// deviation of 0.1, `hada_w2_a` is zero. With a scalar, which is zero, it is normal as `hada_w1_a`.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let (outputs, rank, core_kernel) = (new.dims[0], new.rank, new.core_kernel());
        let mut normal = |deviation: f32, dims: &[usize]| {
            let numbers = generator.randn(dims.iter().product());
            new.variable(numbers.into_iter().map(|n| n * deviation).collect(), dims)
        };
        let (left, columns) = match core_kernel {
            Some(_) => ([rank, outputs], new.dims[1]),
            None => ([outputs, rank], new.dims[1..].iter().product()),
        };
        let core = |normal: &mut dyn FnMut(f32, &[usize]) -> Result<Var>| match core_kernel {
            Some([height, width]) => normal(0.1, &[rank, rank, height, width]).map(Some),
            None => Ok(None),
        };
        let first = Product {
            left: normal(0.1, &left)?,
            right: normal(1.0, &[rank, columns])?,
            core: core(&mut normal)?,
        };
        let second = Product {
            left: match new.scalar {
                true => normal(0.1, &left)?,
                false => Var::from_tensor(&Tensor::zeros(&left, DType::F32, new.device)?)?,
            },
            right: normal(1.0, &[rank, columns])?,
            core: core(&mut normal)?,
        };
        let scalar = new.new_scalar()?;
        Ok(Arc::new(LohaLayer {
            name: new.name,
            first,
            second,
            alpha: new.alpha,
            rank,
            dims: new.dims.to_vec(),
            scalar,
            dropout: new.dropout,
            handle: new.handle.clone(),
        }))
    }
}
