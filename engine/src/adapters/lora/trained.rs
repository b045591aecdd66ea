//! `network.type: lora`: low-rank changes of the layers' weights.

use super::super::file_layer::FileLayer;
use super::super::trained_layer::{
    AdapterType, ChangeFactors, NewLayer, TrainedLayer, Values, limit_norm_of, norm_of_product,
};
use super::embedding::LoraEmbedding;
use super::layer::LoraLayer;
use super::tensors::LoraTensors;
use crate::families::AdapterNames;
use crate::nn::ChangeForm;
use crate::rng::TorchGenerator;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// The suffix of Tucker's core in files.
const MID: &str = "lora_mid.weight";

/// LoRA.
#[derive(Clone, Copy, Debug)]
pub struct Lora;

impl AdapterType for Lora {
    fn covers_embeddings(&self) -> bool {
        true
    }

    fn create_embedding(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        Ok(Arc::new(LoraEmbedding::new(new, generator)?))
    }

    /// `down` is Kaiming-uniform with a = sqrt(5), that is uniform in ±1/sqrt(fan_in), as the core of a Tucker decomposition, and `up` is
    /// zero. With a scalar, which is zero, `up` is uniform in ±1/sqrt(rank), as in LyCORIS.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let scalar = new.new_scalar()?;
        let mut layer = new_layer(new, generator, |generator, rank, new, dims| match new.scalar {
            true => {
                let bound = (1.0 / rank.max(1) as f64).sqrt() as f32;
                new.variable(generator.uniform(dims.iter().product(), -bound, bound), dims)
            }
            false => Var::from_tensor(&Tensor::zeros(dims, DType::F32, new.device)?),
        })?;
        layer.scalar = scalar;
        Ok(Arc::new(layer))
    }
}

/// A layer whose `up` matrix, of the given shape, `make_up` makes.
pub(crate) fn new_layer(
    new: NewLayer<'_>,
    generator: &mut TorchGenerator,
    make_up: impl FnOnce(&mut TorchGenerator, usize, &NewLayer<'_>, &[usize]) -> Result<Var>,
) -> Result<LoraLayer> {
    let (dims, rank, core_kernel) = (new.dims, new.rank, new.core_kernel());
    let mut uniform = |dims: &[usize]| {
        let fan_in: usize = dims[1..].iter().product();
        let bound = (1.0 / fan_in.max(1) as f64).sqrt() as f32;
        new.variable(generator.uniform(rank * fan_in, -bound, bound), dims)
    };
    let down = match core_kernel {
        Some(_) => uniform(&[rank, dims[1], 1, 1])?,
        None => uniform(&[&[rank], &dims[1..]].concat())?,
    };
    let mid = match core_kernel {
        Some([height, width]) => Some(uniform(&[rank, rank, height, width])?),
        None => None,
    };
    let up_dims = [&[dims[0], rank][..], &vec![1; dims.len() - 2]].concat();
    let up = make_up(generator, rank, &new, &up_dims)?;
    Ok(LoraLayer {
        name: new.name,
        down,
        up,
        mid,
        alpha: new.alpha,
        scalar: None,
        dropout: new.dropout,
        names: new.names,
        handle: new.handle.clone(),
    })
}

impl LoraLayer {
    /// What the strength of a file's change is multiplied with, whose matrices are used beside the alpha of this job. As ai-toolkit and
    /// sd-scripts, the job's alpha counts where names have one. `None`: both are the same, but for the rounding of the file's alpha.
    fn other_strength(&self, file: &LoraTensors) -> Option<f64> {
        let file_rank = file.rank() as f64;
        let of_file = file.alpha.unwrap_or(file_rank) / file_rank;
        let ratio = self.alpha / self.rank() as f64 / of_file;
        let is_other = self.names == AdapterNames::Kohya && (ratio - 1.0).abs() > 0.01;
        (is_other && ratio.is_finite()).then_some(ratio)
    }
}

impl TrainedLayer for LoraLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let [down, up] = self.names.matrices();
        let mid = self.mid.iter().map(|mid| (MID, mid));
        let scalar = self.scalar.iter().map(|scalar| ("scalar", scalar));
        let matrices = [(down, &self.down), (up, &self.up)].into_iter();
        matrices.chain(mid).chain(scalar).collect()
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
        if let Some(mid) = &self.mid {
            tensors.push((MID, mid.as_detached_tensor()));
        }
        if self.names == AdapterNames::Kohya {
            tensors.push(("alpha", Tensor::new(self.alpha as f32, &candle_core::Device::Cpu)?));
        }
        Ok(tensors)
    }

    fn change_factors(&self, is_training: bool) -> Result<Option<ChangeFactors>> {
        let [down, up] = self.weights(is_training.then_some(""))?;
        Ok(Some(ChangeFactors {
            form: ChangeForm::LowRank,
            factors: [up.flatten_from(1)?, down.flatten_from(1)?],
            scale: self.alpha / self.rank() as f64,
        }))
    }

    /// As `apply_max_norm_regularization` in `networks/lora.py` of sd-scripts; beside a trained number as `LoConModule.apply_max_norm` of
    /// LyCORIS, which multiplies that number. The norm of `up * down` comes from two matrices of rank x
    /// rank, without the product.
    fn limit_norm(&self, max: f64) -> Result<()> {
        let (down, up) = (self.down_with_core()?, self.up.as_detached_tensor());
        let (rows, columns) = (down.flatten_from(1)?, up.flatten_from(1)?);
        let norm = (norm_of_product(&columns, &rows)? * (self.alpha / self.rank() as f64).abs())?;
        if let Some(scalar) = &self.scalar {
            return limit_norm_of(&[scalar], &(norm * scalar.as_detached_tensor().abs()?)?, max);
        }
        let matrices: Vec<&Var> = [&self.down, &self.up].into_iter().chain(&self.mid).collect();
        limit_norm_of(&matrices, &norm, max)
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
        let rank = self.rank();
        match (&self.mid, &tensors.mid) {
            (None, Some(_)) => {
                return Err(
                    "the file has a LoCon with a third matrix (`lora_mid`) of it, which this job does not train: set \
                     `network.network_kwargs.use_cp: true`"
                        .to_owned(),
                );
            }
            (Some(_), None) => {
                return Err(
                    "the file has no third matrix (`lora_mid`) of it, which this job trains: set `network.network_kwargs.use_cp: false`"
                        .to_owned(),
                );
            }
            (Some(_), Some(_)) if tensors.rank() != rank => {
                return Err(format!(
                    "the file's rank is {}, that of this job {rank}: with `use_cp` they must be the same",
                    tensors.rank()
                ));
            }
            _ => {}
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
        let mut found = Values {
            other_strength: self.other_strength(tensors),
            ..Values::default()
        };
        if let (Some(mid), Some(tensor)) = (&self.mid, &tensors.mid) {
            let value = tensor.reshape(mid.shape()).and_then(|t| t.to_device(mid.device()));
            found.values.push((mid, value.map_err(failed)?));
        }
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
