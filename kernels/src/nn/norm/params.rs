//! The weight and the bias of a norm, and what adapters add to them.

use crate::nn::adapter::NormAdapter;
use crate::weights::Weight;
use candle_core::Tensor;
use std::sync::Arc;

/// The weight and the bias of a norm.
#[derive(Clone, Debug)]
pub struct NormParams {
    /// [channels]: always a tensor.
    pub weight: Weight,
    /// [channels]; zeros if the norm has none.
    pub(crate) bias: Tensor,
    /// Whether the weight is one of the model's tensors.
    pub(super) has_weight: bool,
    /// Whether the bias is one of the model's tensors.
    pub(super) has_bias: bool,
    /// What changes them.
    pub adapters: Vec<Arc<dyn NormAdapter>>,
}

impl NormParams {
    pub(super) fn new(weight: Tensor, bias: Tensor) -> Self {
        Self {
            weight: Weight::Plain(weight),
            bias,
            has_weight: true,
            has_bias: true,
            adapters: Vec::new(),
        }
    }

    /// The bias, if the model has one.
    #[must_use]
    pub fn own_bias(&self) -> Option<&Tensor> {
        Some(&self.bias).filter(|_| self.has_bias)
    }

    /// The number of channels.
    pub(super) fn channels(&self) -> usize {
        self.weight.dims().iter().product()
    }

    /// The weight and the bias with what adapters add to them.
    pub(super) fn changed(&self) -> candle_core::Result<[Tensor; 2]> {
        let (mut weight, mut bias) = (self.weight.dense()?, self.bias.clone());
        for adapter in &self.adapters {
            let [of_weight, of_bias] = adapter.changes()?;
            for (tensor, change) in [(&mut weight, of_weight), (&mut bias, of_bias)] {
                if let Some(change) = change {
                    *tensor = (&*tensor + change.to_dtype(tensor.dtype())?)?;
                }
            }
        }
        Ok([weight, bias])
    }
}
