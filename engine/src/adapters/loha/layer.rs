//! One LoHa layer: `y + (W1 ⊙ W2) x * alpha / rank * multiplier`.

use super::super::file_layer::FileLayer;
use super::super::handle::LoraHandle;
use super::super::trained_layer::{TrainedLayer, Values};
use super::super::weight_adapter::{WeightAdapter, add_product, tracked_if};
use super::file::LohaTensors;
use crate::nn::{BaseLayer, LayerAdapter, hadamard_of_products};
use crate::weights::Weight;
use candle_core::{Device, Result, Tensor, Var};
use std::sync::Arc;

/// A low-rank product [out, rank] [rank, in kh kw], float32.
#[derive(Debug)]
pub(super) struct Product {
    pub(super) left: Var,
    pub(super) right: Var,
}

/// The LoHa of one layer.
#[derive(Debug)]
pub(super) struct LohaLayer {
    /// The name of the layer in saved files.
    pub(super) name: String,
    pub(super) first: Product,
    pub(super) second: Product,
    pub(super) alpha: f64,
    pub(super) rank: usize,
    /// The shape of the layer's weight.
    pub(super) dims: Vec<usize>,
    pub(super) handle: Arc<LoraHandle>,
}

impl LohaLayer {
    fn scale(&self) -> f64 {
        self.alpha / self.rank.max(1) as f64
    }

    /// The change of the weight, tracked for gradients if `is_training`.
    fn tensor(&self, is_training: bool) -> Result<Tensor> {
        let stacked = |[first, second]: [&Var; 2]| {
            let both = [tracked_if(is_training, first), tracked_if(is_training, second)];
            Tensor::stack(&both, 0)
        };
        let left = stacked([&self.first.left, &self.second.left])?;
        let right = stacked([&self.first.right, &self.second.right])?;
        let scale = self.scale() * self.handle.strength();
        hadamard_of_products(&left, &right, scale)?.reshape(self.dims.as_slice())
    }
}

impl LayerAdapter for LohaLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        if self.handle.strength() == 0.0 {
            return Ok(output);
        }
        let change = self.tensor(self.handle.dropout_seed().is_some())?;
        add_product(layer.kind, x, &change, None, &output)
    }
}

impl WeightAdapter for LohaLayer {
    fn change(&self, _: &Weight) -> Result<Tensor> {
        self.tensor(false)
    }
}

impl TrainedLayer for LohaLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        vec![
            ("hada_w1_a", &self.first.left),
            ("hada_w1_b", &self.first.right),
            ("hada_w2_a", &self.second.left),
            ("hada_w2_b", &self.second.right),
        ]
    }

    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let params = self.params().into_iter();
        let alpha = Tensor::new(self.alpha as f32, &Device::Cpu)?;
        Ok(params
            .map(|(suffix, var)| (suffix, var.as_detached_tensor()))
            .chain([("alpha", alpha)])
            .collect())
    }

    /// The strength of the file is kept: where its scale is another one, `hada_w2_a` is multiplied.
    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<LohaTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains a LoHa",
                file.kind()
            ));
        };
        let matrices = tensors.factors()?;
        let ratio = tensors.scale() / self.scale();
        let mut values = Values::default();
        for ((suffix, var), matrix) in self.params().into_iter().zip(matrices) {
            if matrix.dims() != var.dims() {
                return Err(format!(
                    "the file's `{suffix}` is {:?}, that of this job {:?}: set `network.linear` and `network.conv` to the ranks of the file",
                    matrix.dims(),
                    var.dims()
                ));
            }
            let value = match suffix == "hada_w2_a" && ratio != 1.0 {
                true => &matrix * ratio,
                false => Ok(matrix),
            };
            let value = value.and_then(|value| value.to_device(var.device()));
            values.values.push((var, value.map_err(|error| error.to_string())?));
        }
        Ok(values)
    }
}
