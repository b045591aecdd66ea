//! LoRAs of embedding layers in files.

use super::super::file_layer::{FileLayer, RoleTensors, Site};
use super::super::keys::TensorRole;
use super::super::names::NamedLayers;
use super::super::weight_adapter::WeightAdapter;
use super::embedding::{DOWN, LoraEmbedding, UP};
use super::tensors::LoraEmbeddingTensors;
use candle_core::{Result, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// Reads the tensors of a layer. `None`: they are not a LoRA of an embedding layer.
pub(in super::super) fn read_lora_embedding(
    found: &RoleTensors,
) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let (down, up) = match (found.get(TensorRole::EmbeddingDown), found.get(TensorRole::EmbeddingUp)) {
        (Some(down), Some(up)) => (down, up),
        (None, None) => return None,
        (down, _) => {
            let missing = if down.is_some() { UP } else { DOWN };
            return Some(Err(format!("it has no {missing}: the file is incomplete")));
        }
    };
    match (down.dims(), up.dims()) {
        ([rank, _], [_, columns]) if rank == columns && *rank > 0 => {}
        (down, up) => {
            return Some(Err(format!(
                "lora_embedding_A {down:?} and lora_embedding_B {up:?} do not fit together"
            )));
        }
    }
    if let Some(alpha) = found.alpha().filter(|alpha| !alpha.is_finite()) {
        return Some(Err(format!("its alpha is {alpha}: the file is damaged")));
    }
    Some(Ok(Arc::new(LoraEmbeddingTensors {
        down,
        up,
        alpha: found.alpha(),
    })))
}

impl FileLayer for LoraEmbeddingTensors {
    fn kind(&self) -> &'static str {
        "LoRA of an embedding layer"
    }

    fn outputs(&self) -> usize {
        self.up.dims()[0]
    }

    fn inputs(&self) -> usize {
        self.down.dims()[1]
    }

    fn lacks_alpha(&self) -> bool {
        self.alpha.is_none()
    }

    fn split(
        &self,
        named: &NamedLayers,
        metadata_alpha: &dyn Fn(f64) -> Option<f64>,
    ) -> Result<Vec<Arc<dyn FileLayer>>> {
        if named.is_converted() {
            candle_core::bail!("its LoRA of an embedding layer is that of several layers of this model");
        }
        let rank = self.rank() as f64;
        let alpha = self.alpha.filter(|alpha| *alpha != 0.0);
        let alpha = alpha.or_else(|| metadata_alpha(rank)).unwrap_or(rank);
        Ok(vec![Arc::new(Self {
            alpha: Some(alpha),
            ..self.clone()
        })])
    }

    fn adapter(&self, _site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        Err("the file has a LoRA of an embedding layer of it, and it is none".to_owned())
    }

    fn embedding_adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let found = [self.inputs(), self.outputs()];
        if site.weight.dims() != found {
            return Err(format!(
                "the file has a LoRA of a table {found:?}, the model has {:?}",
                site.weight.dims()
            ));
        }
        let variable = |tensor: &Tensor| {
            let tensor = tensor.to_device(site.weight.device())?;
            Var::from_tensor(&tensor)
        };
        let failed = |error: candle_core::Error| error.to_string();
        Ok(Arc::new(LoraEmbedding {
            down: variable(&self.down).map_err(failed)?,
            up: variable(&self.up).map_err(failed)?,
            name: site.name,
            alpha: self.alpha.unwrap_or(self.rank() as f64),
            handle: site.handle.clone(),
        }))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let mut tensors = vec![(DOWN, self.down.clone()), (UP, self.up.clone())];
        if let Some(alpha) = self.alpha {
            let alpha = Tensor::new(alpha as f32, self.up.device()).map_err(|error| error.to_string())?;
            tensors.push(("alpha", alpha));
        }
        Ok(tensors)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
