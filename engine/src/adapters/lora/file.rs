//! LoRA and LoCon in files.

use super::super::dropout::Dropout;
use super::super::file_layer::{FileLayer, RoleTensors, Site};
use super::super::joined::split;
use super::super::keys::TensorRole;
use super::super::names::NamedLayers;
use super::super::stored_matrix::with_core;
use super::super::weight_adapter::WeightAdapter;
use super::layer::LoraLayer;
use super::tensors::LoraTensors;
use candle_core::{Result, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// Reads the tensors of a layer. `None`: they are not a LoRA.
pub(crate) fn read_lora(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let (down, up) = match (found.get(TensorRole::Down), found.get(TensorRole::Up)) {
        (Some(down), Some(up)) => (down, up),
        (None, None) => return None,
        (down, _) => {
            let missing = if down.is_some() { "up (lora_B)" } else { "down (lora_A)" };
            return Some(Err(format!("it has no {missing} matrix: the file is incomplete")));
        }
    };
    if down.rank() < 2 || up.rank() < 2 || down.dims()[0] != up.dims()[1] {
        let (down, up) = (down.dims(), up.dims());
        return Some(Err(format!("down {down:?} and up {up:?} do not fit together")));
    }
    if down.dims()[0] == 0 {
        return Some(Err("its rank is 0".to_owned()));
    }
    if let Some(alpha) = found.alpha().filter(|alpha| !alpha.is_finite()) {
        return Some(Err(format!("its alpha is {alpha}: the file is damaged")));
    }
    Some(Ok(Arc::new(LoraTensors {
        down,
        up,
        mid: found.get(TensorRole::Mid),
        alpha: found.alpha(),
        scalar: found.numbers.get(&TensorRole::Scalar).copied().unwrap_or(1.0),
    })))
}

impl FileLayer for LoraTensors {
    fn kind(&self) -> &'static str {
        "LoRA"
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
        let rank = self.rank() as f64;
        // In sd-scripts an alpha of 0 means the rank.
        let alpha = self.alpha.filter(|alpha| *alpha != 0.0);
        let alpha = alpha.or_else(|| metadata_alpha(rank)).unwrap_or(rank);
        let whole = Self {
            alpha: Some(alpha),
            ..self.clone()
        };
        let each = |part| -> Arc<dyn FileLayer> { Arc::new(part) };
        Ok(split(whole, named)?.into_iter().map(each).collect())
    }

    /// Tensors are reshaped if needed: some files store a linear layer as a 1x1 convolution, or the other way round. Tucker's core is
    /// multiplied with `down` here, once, because the numbers of a file do not change.
    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let (dims, rank) = (site.weight.dims(), self.rank());
        let reshape_to = |t: &Tensor, want: &[usize]| -> std::result::Result<Var, String> {
            let squeezed = |d: &[usize]| d.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
            if squeezed(t.dims()) != squeezed(want) {
                return Err(format!("the file has {:?}, the model needs {want:?}", t.dims()));
            }
            let t = t
                .reshape(want)
                .and_then(|t| t.to_device(site.weight.device()))
                .map_err(|e| e.to_string())?;
            Var::from_tensor(&t).map_err(|e| e.to_string())
        };
        let kernel: Vec<usize> = dims[2..].to_vec();
        let ones = vec![1usize; kernel.len()];
        let weight_shape = |out_dim: usize, in_dim: usize, k: &[usize]| [&[out_dim, in_dim], k].concat();
        let down_kernel = if self.mid.is_some() { &ones } else { &kernel };
        let down = reshape_to(&self.down, &weight_shape(rank, dims[1], down_kernel))?;
        let up = reshape_to(&self.up, &weight_shape(dims[0], rank, &ones))?;
        let down = match &self.mid {
            Some(mid) => {
                // A linear layer has the core of a kernel of 1 x 1.
                let core_kernel = if kernel.is_empty() { &[1, 1][..] } else { &kernel };
                let mid = reshape_to(mid, &weight_shape(rank, rank, core_kernel))?.as_detached_tensor();
                let joined = down
                    .as_detached_tensor()
                    .flatten_from(1)
                    .and_then(|down| with_core(&mid, &down))
                    .and_then(|joined| joined.reshape(weight_shape(rank, dims[1], &kernel)))
                    .and_then(|joined| Var::from_tensor(&joined));
                joined.map_err(|error| error.to_string())?
            }
            None => down,
        };
        Ok(Arc::new(LoraLayer {
            name: site.name,
            down,
            up,
            mid: None,
            alpha: self.alpha.unwrap_or(rank as f64) * self.scalar,
            scalar: None,
            dropout: Dropout::default(),
            names: site.names,
            handle: site.handle.clone(),
        }))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        Ok(Vec::new())
    }

    fn lora(&self) -> Option<&LoraTensors> {
        Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
