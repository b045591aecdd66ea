//! The LoRA of an embedding layer: the row of an id gets `up` times the column of `down` for this id.
//!
//! As peft's `lora.Embedding`. What training drops of other layers is not dropped here, as there.

use super::super::file_layer::FileLayer;
use super::super::handle::AdapterHandle;
use super::super::trained_layer::{NewLayer, TrainedLayer, Values};
use super::super::weight_adapter::{WeightAdapter, tracked_if};
use super::tensors::LoraEmbeddingTensors;
use crate::device::precision::MatmulPrecision;
use crate::nn::{self, BaseLayer, LayerAdapter, linear};
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// The names of both matrices in files: peft alone has names for them.
pub(super) const DOWN: &str = "lora_embedding_A";
pub(super) const UP: &str = "lora_embedding_B";

/// The LoRA of one embedding layer. The weights are float32, whatever the dtype of the table.
#[derive(Debug)]
pub(super) struct LoraEmbedding {
    /// The name in LoRA files.
    pub(super) name: String,
    /// [rank, count].
    pub(super) down: Var,
    /// [width, rank].
    pub(super) up: Var,
    /// The scale of the update is alpha / rank.
    pub(super) alpha: f64,
    pub(super) handle: Arc<AdapterHandle>,
}

impl LoraEmbedding {
    /// A LoRA that changes nothing yet: `down` is zero, and `up` is normal with a standard deviation of 1.
    pub(super) fn new(new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Self> {
        let &[count, width] = new.dims else {
            candle_core::bail!("{}: an embedding layer has two axes, found {:?}", new.name, new.dims);
        };
        let rank = new.rank;
        Ok(Self {
            down: Var::from_tensor(&Tensor::zeros((rank, count), DType::F32, new.device)?)?,
            up: new.variable(generator.randn(width * rank), &[width, rank])?,
            name: new.name,
            alpha: new.alpha,
            handle: new.handle.clone(),
        })
    }

    fn rank(&self) -> usize {
        self.down.dims().first().copied().unwrap_or(1).max(1)
    }

    /// alpha / rank times the strength of the pass.
    fn strength(&self) -> f64 {
        self.handle.strength() * self.alpha / self.rank() as f64
    }
}

impl LayerAdapter for LoraEmbedding {
    fn apply(&self, _layer: &BaseLayer<'_>, ids: &Tensor, output: Tensor) -> Result<Tensor> {
        let strength = self.strength();
        if strength == 0.0 {
            return Ok(output);
        }
        let is_training = self.handle.dropout_seed().is_some();
        let (down, up) = (tracked_if(is_training, &self.down), tracked_if(is_training, &self.up));
        let ids = ids.flatten_all()?.to_device(down.device())?;
        let hidden = down.index_select(&ids, 1)?.t()?.contiguous()?;
        // In float32 beside products in bfloat16 too, as the LoRAs of other layers.
        let product = MatmulPrecision::F32.run(|| linear(&hidden, &up, None))?;
        let change = (product * strength)?;
        nn::add(&output, &change.reshape(output.shape())?.to_dtype(output.dtype())?)
    }
}

impl WeightAdapter for LoraEmbedding {
    /// [count, width].
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        // The smaller matrix is scaled: the product may be as large as the largest tensor of the model.
        let up = (self.up.as_detached_tensor() * self.strength())?;
        let down = self.down.as_detached_tensor().t()?.contiguous()?;
        down.matmul(&up.t()?.contiguous()?)?.reshape(weight.dims())
    }
}

impl TrainedLayer for LoraEmbedding {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        vec![(DOWN, &self.down), (UP, &self.up)]
    }

    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let params = self.params().into_iter();
        Ok(params.map(|(name, var)| (name, var.as_detached_tensor())).collect())
    }

    fn zeroed(&self) -> Option<Vec<&Var>> {
        Some(vec![&self.down])
    }

    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<LoraEmbeddingTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains a LoRA of an embedding layer",
                file.kind()
            ));
        };
        let failed = |error: candle_core::Error| error.to_string();
        // The scale of a file of another program goes into its weights.
        let file_rank = tensors.rank() as f64;
        let scale = tensors.alpha.unwrap_or(file_rank) / file_rank / (self.alpha / self.rank() as f64);
        let up = (&tensors.up * scale).map_err(failed)?;
        let mut values = Values::default();
        for (var, tensor) in [(&self.down, &tensors.down), (&self.up, &up)] {
            if tensor.dims() != var.dims() {
                return Err(format!("the file has {:?}, this job {:?}", tensor.dims(), var.dims()));
            }
            values
                .values
                .push((var, tensor.to_device(var.device()).map_err(failed)?));
        }
        Ok(values)
    }
}
