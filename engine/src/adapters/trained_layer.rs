//! Types of adapters that can be trained.

use super::dropout::Dropout;
use super::file_layer::FileLayer;
use super::handle::AdapterHandle;
use super::weight_adapter::WeightAdapter;
use crate::families::{AdapterNames, PartRole};
use crate::nn::ChangeForm;
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Device, Result, Tensor, Var};
use std::fmt::Debug;
use std::sync::Arc;

/// A type of adapter: `network.type`.
pub trait AdapterType: Debug {
    /// Whether a layer of this dotted path gets an adapter, if the filters of the config select it.
    fn covers(&self, _role: PartRole, _path: &str) -> bool {
        true
    }

    /// Whether it can be trained on a denoiser with these names.
    ///
    /// # Errors
    /// A message for the user that says what to do instead.
    fn check_names(&self, _names: AdapterNames) -> std::result::Result<(), String> {
        Ok(())
    }

    /// Whether layers of transformers get the flattened names of older versions of ai-toolkit, and an alpha of the config.
    fn has_old_names(&self) -> bool {
        false
    }

    /// Whether embedding layers can have one ([`Self::create_embedding`]).
    fn covers_embeddings(&self) -> bool {
        false
    }

    /// A new adapter of an embedding layer, whose weight is [count, width]. It changes nothing yet.
    ///
    /// # Errors
    /// When the device fails, or the type has no adapter of such layers.
    fn create_embedding(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let _ = generator;
        candle_core::bail!("{}: {self:?} has no adapter of embedding layers", new.name)
    }

    /// A new adapter that changes nothing yet.
    ///
    /// # Errors
    /// When the device fails.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>>;
}

/// The layer for which an adapter is made.
pub struct NewLayer<'a> {
    /// Its name in saved files.
    pub name: String,
    /// How saved files name tensors.
    pub names: AdapterNames,
    /// Its weight.
    pub weight: &'a Weight,
    /// Its bias.
    pub bias: Option<&'a Tensor>,
    /// The shape of its weight.
    pub dims: &'a [usize],
    /// The device of its weight.
    pub device: &'a Device,
    /// The rank.
    pub rank: usize,
    /// The alpha, which is not 0.
    pub alpha: f64,
    /// What training drops.
    pub dropout: Dropout,
    /// Whether convolutions have a Tucker decomposition.
    pub tucker: bool,
    /// Whether the alpha is that of a scale alpha / sqrt(rank), so that it is times sqrt(rank).
    pub rank_stabilised: bool,
    /// Whether a trained number multiplies the change of a LoRA, LoKr or LoHa. It starts at zero, so that no matrix does.
    pub scalar: bool,
    pub(super) handle: &'a Arc<AdapterHandle>,
}

impl NewLayer<'_> {
    /// The kernel of Tucker's core, if the adapter has one. A convolution of 1 x 1 has none, as in LyCORIS.
    pub(super) fn core_kernel(&self) -> Option<[usize; 2]> {
        match self.dims {
            [_, _, height, width] if self.tucker && height * width > 1 => Some([*height, *width]),
            _ => None,
        }
    }

    /// The number that multiplies the change, if it has one: zero.
    pub(super) fn new_scalar(&self) -> Result<Option<Var>> {
        let zero = || Var::from_tensor(&Tensor::zeros((), DType::F32, self.device)?);
        self.scalar.then(zero).transpose()
    }

    /// A variable with these numbers on the device of the layer.
    pub(super) fn variable(&self, numbers: Vec<f32>, dims: &[usize]) -> Result<Var> {
        Var::from_tensor(&Tensor::from_vec(numbers, dims, self.device)?)
    }
}

/// An adapter that is trained.
pub trait TrainedLayer: WeightAdapter {
    /// The name of the layer in saved files.
    fn name(&self) -> &str;

    /// Its variables in a fixed order, with the suffixes that files have for them.
    fn params(&self) -> Vec<(&'static str, &Var)>;

    /// The tensors of a file, by their suffixes.
    ///
    /// # Errors
    /// When the device fails.
    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>>;

    /// The variables that are zero while it changes nothing. `None`: no zero does that, so it cannot start anew.
    fn zeroed(&self) -> Option<Vec<&Var>> {
        None
    }

    /// Whether it changes the bias of its layer too.
    fn changes_bias(&self) -> bool {
        false
    }

    /// The weight and the bias that it puts in place of those of its layer, float32, if it is not a change of them.
    fn replacement(&self) -> Option<(Tensor, Option<Tensor>)> {
        None
    }

    /// What makes its change of the weight at strength 1, tracked for gradients if `is_training`. `None`: it is not made of two factors.
    ///
    /// # Errors
    /// When an operation fails.
    fn change_factors(&self, is_training: bool) -> Result<Option<ChangeFactors>> {
        let _ = is_training;
        Ok(None)
    }

    /// Makes its change of the weight smaller if the norm is above `max`, by one factor for all its matrices or for the number that
    /// multiplies them (`scale_weight_norms`).
    ///
    /// # Errors
    /// When the device fails, or the type of adapter has no such limit.
    fn limit_norm(&self, max: f64) -> Result<()> {
        let _ = max;
        candle_core::bail!("the norm of {} has no limit", self.name())
    }

    /// The values of its variables that a file holds.
    ///
    /// # Errors
    /// When the file does not fit: why, for a message in which the caller puts the name of the layer first.
    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String>;
}

/// The norm of a product of two matrices, without making it.
///
/// # Errors
/// When the shapes do not match, or the device fails.
pub(super) fn norm_of_product(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    let of_left = left.t()?.contiguous()?.matmul(&left.contiguous()?)?;
    let of_right = right.matmul(&right.t()?.contiguous()?)?;
    (of_left * of_right)?.sum_all()?.maximum(0f32)?.sqrt()
}

/// Multiplies matrices, or a number, whose product is a change of this norm, by the same factor, so that the norm is at most `max`. As in
/// sd-scripts and LyCORIS, a norm below half of `max` counts as that half.
///
/// # Errors
/// When the device fails.
pub(super) fn limit_norm_of(matrices: &[&Var], norm: &Tensor, max: f64) -> Result<()> {
    let norm = norm.maximum(max / 2.0)?;
    let factor = (norm.minimum(max)? / norm)?.powf(1.0 / matrices.len().max(1) as f64)?;
    for matrix in matrices {
        matrix.set(&matrix.as_detached_tensor().broadcast_mul(&factor)?)?;
    }
    Ok(())
}

/// The change of a weight as two factors.
#[derive(Clone, Debug)]
pub struct ChangeFactors {
    /// How they make the change.
    pub form: ChangeForm,
    /// The factors, in the shapes of the form.
    pub factors: [Tensor; 2],
    /// What their product is multiplied with.
    pub scale: f64,
}

/// New values of variables.
#[derive(Debug, Default)]
pub struct Values<'a> {
    /// Each variable with its value.
    pub values: Vec<(&'a Var, Tensor)>,
    /// Whether the rank differed.
    pub resized: bool,
    /// What the strength of the file's change is multiplied with, because its matrices are used as they are beside another alpha / rank.
    pub other_strength: Option<f64>,
}
