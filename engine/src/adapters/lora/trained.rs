//! `network.type: lora`: low-rank changes of the layers' weights.

use super::super::file_layer::FileLayer;
use super::super::trained_layer::{AdapterType, NewLayer, TrainedLayer, Values, limit_norm_of, norm_of_product};
use super::layer::LoraLayer;
use super::tensors::LoraTensors;
use crate::families::AdapterNames;
use crate::rng::TorchGenerator;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// LoRA.
#[derive(Clone, Copy, Debug)]
pub struct Lora;

impl AdapterType for Lora {
    /// `down` is Kaiming-uniform with a = sqrt(5), that is uniform in ±1/sqrt(fan_in), and `up` is zero.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        Ok(Arc::new(new_layer(new, generator, |_, _, new, dims| {
            Var::from_tensor(&Tensor::zeros(dims, DType::F32, new.device)?)
        })?))
    }
}

/// A layer whose `up` matrix, of the given shape, `make_up` makes.
pub(crate) fn new_layer(
    new: NewLayer<'_>,
    generator: &mut TorchGenerator,
    make_up: impl FnOnce(&mut TorchGenerator, usize, &NewLayer<'_>, &[usize]) -> Result<Var>,
) -> Result<LoraLayer> {
    let (dims, rank) = (new.dims, new.rank);
    let fan_in: usize = dims[1..].iter().product();
    let bound = (1.0 / fan_in.max(1) as f64).sqrt() as f32;
    let down = generator.uniform(rank * fan_in, -bound, bound);
    let down = new.variable(down, &[&[rank], &dims[1..]].concat())?;
    let up_dims = [&[dims[0], rank][..], &vec![1; dims.len() - 2]].concat();
    let up = make_up(generator, rank, &new, &up_dims)?;
    Ok(LoraLayer {
        name: new.name,
        down,
        up,
        mid: None,
        alpha: new.alpha,
        scalar: None,
        dropout: new.dropout,
        names: new.names,
        handle: new.handle.clone(),
    })
}

impl TrainedLayer for LoraLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let [down, up] = self.names.matrices();
        let scalar = self.scalar.iter().map(|scalar| ("scalar", scalar));
        [(down, &self.down), (up, &self.up)].into_iter().chain(scalar).collect()
    }

    /// `down` keeps its values, as in ai-toolkit (`reset_weights` of `toolkit/network_mixins.py`).
    fn zeroed(&self) -> Option<Vec<&Var>> {
        Some(vec![&self.up])
    }

    /// The scalar is multiplied into `up`, as LyCORIS saves it: few programs read it as a tensor of its own.
    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let [down, up] = self.names.matrices();
        let up_weight = self.up.as_detached_tensor();
        let up_weight = match &self.scalar {
            Some(scalar) => up_weight.broadcast_mul(&scalar.as_detached_tensor())?,
            None => up_weight,
        };
        let mut tensors = vec![(down, self.down.as_detached_tensor()), (up, up_weight)];
        if self.names == AdapterNames::Kohya {
            tensors.push(("alpha", Tensor::new(self.alpha as f32, &candle_core::Device::Cpu)?));
        }
        Ok(tensors)
    }

    /// As `apply_max_norm_regularization` in `networks/lora.py` of sd-scripts. The norm of `up * down` comes from two matrices of rank x
    /// rank, without the product.
    fn limit_norm(&self, max: f64) -> Result<()> {
        let (down, up) = (self.down.as_detached_tensor(), self.up.as_detached_tensor());
        let (rows, columns) = (down.flatten_from(1)?, up.flatten_from(1)?);
        let norm = (norm_of_product(&columns, &rows)? * (self.alpha / self.rank() as f64).abs())?;
        limit_norm_of(&[&self.down, &self.up], &norm, max)
    }

    /// If the file has a lower rank, the additional rows of `down` keep their initial values and `up` is padded with zeros, so that
    /// the output is unchanged and all rows are trained. A higher rank is cut.
    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<LoraTensors>() else {
            let hint = match file.kind() {
                "whole difference" => ": extract it with a lower rank",
                _ => "",
            };
            return Err(format!(
                "the file has a {} of it, and this job trains a LoRA{hint}",
                file.kind()
            ));
        };
        if tensors.mid.is_some() {
            return Err("the file has a LoCon with a third matrix (`lora_mid`) of it, which is not trained".to_owned());
        }
        let failed = |error: candle_core::Error| error.to_string();
        let mut up = tensors.up.clone();
        // The scale of dotted names is 1 and saved nowhere, so that of another program's file goes into its weights.
        let file_rank = tensors.rank() as f64;
        let scale = match self.names {
            AdapterNames::Peft => tensors.alpha.unwrap_or(file_rank) * tensors.scalar / file_rank,
            AdapterNames::Kohya => tensors.scalar,
        };
        if scale != 1.0 {
            up = (up * scale).map_err(failed)?;
        }
        let rank = self.rank();
        let mut found = Values::default();
        for (var, tensor, axis) in [(&self.down, &tensors.down, 0), (&self.up, &up, 1)] {
            let t = pad_or_cut_rank(tensor, axis, rank).map_err(failed)?;
            found.resized |= t.dims() != tensor.dims();
            if t.elem_count() != var.elem_count() || t.dims()[..2] != var.dims()[..2] {
                return Err(format!(
                    "the file has {:?}, the model needs {:?}",
                    tensor.dims(),
                    var.dims()
                ));
            }
            let value = value_of(var, &t, tensor.dims()[axis], axis).map_err(failed)?;
            found.values.push((var, value));
        }
        if let Some(scalar) = &self.scalar {
            found.values.push((scalar, scalar.ones_like().map_err(failed)?));
        }
        Ok(found)
    }
}

/// The value of a variable: `t` in its shape, and its own initial rows where the file has fewer.
fn value_of(var: &Var, t: &Tensor, file_rank: usize, axis: usize) -> Result<Tensor> {
    let value = t.reshape(var.shape())?.to_device(var.device())?;
    let rank = var.dim(axis)?;
    if axis != 0 || file_rank >= rank {
        return Ok(value);
    }
    // If `down` and `up` were both zero, the new rows would never get a gradient.
    let initial_rows = var.narrow(0, file_rank, rank - file_rank)?.to_dtype(value.dtype())?;
    Tensor::cat(&[&value.narrow(0, 0, file_rank)?, &initial_rows], 0)
}

/// Pads with zeros, or cuts, along the rank axis.
fn pad_or_cut_rank(t: &Tensor, axis: usize, rank: usize) -> Result<Tensor> {
    let current = t.dim(axis)?;
    Ok(match current.cmp(&rank) {
        std::cmp::Ordering::Equal => t.clone(),
        std::cmp::Ordering::Greater => t.narrow(axis, 0, rank)?.contiguous()?,
        std::cmp::Ordering::Less => t.pad_with_zeros(axis, 0, rank - current)?,
    })
}
