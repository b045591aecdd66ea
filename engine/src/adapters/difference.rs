//! Whole differences of the weight and the bias of a layer or a norm (`.diff`, `.diff_b`; of norms in files of LyCORIS `.w_norm`,
//! `.b_norm`): trained with `network.type: fullrank`, `network.all_layers`, `network_kwargs.train_norm` and
//! `network_kwargs.full_if_contains`, and in extracted files where factors would be larger than the difference.

use super::file_layer::{FileLayer, RoleTensors, Site};
use super::handle::AdapterHandle;
use super::keys::TensorRole;
use super::names::{NamedLayers, RowRanges};
use super::trained_layer::{AdapterType, NewLayer, TrainedLayer, Values};
use super::weight_adapter::{WeightAdapter, add_product, select_rows, tracked_if};
use crate::nn::{BaseLayer, LayerAdapter, NormAdapter};
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// `network.type: fullrank`, and the layers of `full_if_contains`: the change of the weight itself, and that of the bias. Both start
/// at zero.
#[derive(Clone, Copy, Debug)]
pub struct Difference;

impl AdapterType for Difference {
    fn create(&self, new: NewLayer<'_>, _: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        Ok(Arc::new(DenseLayer::zeros(new)?))
    }
}

/// The names of both differences in files.
const SUFFIXES: [&str; 2] = ["diff", "diff_b"];
/// LyCORIS' names of those of norms.
const NORM_SUFFIXES: [&str; 2] = ["w_norm", "b_norm"];

/// A change of a layer's weight, of its bias, or of both, as tensors of their sizes.
#[derive(Debug)]
pub(super) struct DenseLayer {
    /// The name of the layer in saved files.
    name: String,
    /// In the shape of the weight.
    weight: Option<Var>,
    /// [out].
    bias: Option<Var>,
    /// The names of both in files.
    suffixes: [&'static str; 2],
    handle: Arc<AdapterHandle>,
}

impl DenseLayer {
    /// A difference of a layer or of a norm that is trained.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn zeros(new: NewLayer<'_>) -> Result<Self> {
        let zeros = |dims: &[usize]| Var::from_tensor(&Tensor::zeros(dims, DType::F32, new.device)?);
        Ok(Self {
            weight: Some(zeros(new.dims)?),
            bias: new.bias.map(|_| zeros(&new.dims[..1])).transpose()?,
            suffixes: SUFFIXES,
            name: new.name,
            handle: new.handle.clone(),
        })
    }

    /// The difference of a norm, with LyCORIS' names in files.
    pub(super) fn with_lycoris_names(self) -> Self {
        Self {
            suffixes: NORM_SUFFIXES,
            ..self
        }
    }

    /// A difference, at the strength of the current pass.
    fn scaled(&self, var: &Var) -> Result<Tensor> {
        let tensor = tracked_if(self.handle.dropout_seed().is_some(), var);
        let strength = self.handle.strength();
        match strength == 1.0 {
            true => Ok(tensor),
            false => tensor * strength,
        }
    }

    /// The change of a layer by tensors of a file.
    ///
    /// # Errors
    /// When a shape does not match.
    pub(super) fn new(
        site: Site<'_>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> std::result::Result<Self, String> {
        let dims = site.weight.dims();
        let variable = |tensor: &Tensor, dims: &[usize]| {
            let fits = tensor.elem_count() == dims.iter().product::<usize>() && tensor.dims()[0] == dims[0];
            if !fits {
                return Err(format!("the file has {:?}, the model needs {dims:?}", tensor.dims()));
            }
            let tensor = tensor.reshape(dims).and_then(|t| t.to_device(site.weight.device()));
            tensor
                .and_then(|t| Var::from_tensor(&t))
                .map_err(|error| error.to_string())
        };
        Ok(Self {
            weight: weight.map(|weight| variable(weight, dims)).transpose()?,
            bias: bias.map(|bias| variable(bias, &dims[..1])).transpose()?,
            suffixes: SUFFIXES,
            name: site.name,
            handle: site.handle.clone(),
        })
    }
}

impl LayerAdapter for DenseLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        if self.handle.strength() == 0.0 {
            return Ok(output);
        }
        let bias = self.bias.as_ref().map(|bias| self.scaled(bias)).transpose()?;
        match (&self.weight, bias) {
            (Some(weight), bias) => add_product(layer.kind, x, &self.scaled(weight)?, bias.as_ref(), &output),
            (None, Some(bias)) => output.broadcast_add(&layer.kind.over_channels(&bias.to_dtype(output.dtype())?)?),
            (None, None) => Ok(output),
        }
    }
}

impl NormAdapter for DenseLayer {
    fn changes(&self) -> Result<[Option<Tensor>; 2]> {
        if self.handle.strength() == 0.0 {
            return Ok([None, None]);
        }
        let change = |var: &Option<Var>| var.as_ref().map(|var| self.scaled(var)).transpose();
        Ok([change(&self.weight)?, change(&self.bias)?])
    }
}

impl WeightAdapter for DenseLayer {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        match &self.weight {
            Some(change) => change.as_detached_tensor() * self.handle.strength(),
            None => Tensor::zeros(weight.dims(), DType::F32, weight.device()),
        }
    }

    fn bias_change(&self) -> Result<Option<Tensor>> {
        let change = |bias: &Var| bias.as_detached_tensor() * self.handle.strength();
        self.bias.as_ref().map(change).transpose()
    }
}

impl TrainedLayer for DenseLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let [of_weight, of_bias] = self.suffixes;
        let weight = self.weight.iter().map(|weight| (of_weight, weight));
        weight.chain(self.bias.iter().map(|bias| (of_bias, bias))).collect()
    }

    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let params = self.params().into_iter();
        Ok(params.map(|(suffix, var)| (suffix, var.as_detached_tensor())).collect())
    }

    fn zeroed(&self) -> Option<Vec<&Var>> {
        Some(self.weight.iter().chain(self.bias.iter()).collect())
    }

    fn changes_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// LyCORIS limits the changes of layers alone.
    fn limit_norm(&self, _: f64) -> Result<()> {
        match self.suffixes == NORM_SUFFIXES {
            true => Ok(()),
            false => candle_core::bail!("the norm of {} has no limit", self.name),
        }
    }

    /// A difference that the file lacks is zero.
    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<DifferenceTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains a whole difference of it",
                file.kind()
            ));
        };
        if tensors.bias.is_some() && self.bias.is_none() {
            return Err("the file has a `.diff_b` of it, and the layer of this model has no bias".to_owned());
        }
        let mut values = Values::default();
        for (var, found) in [(&self.weight, &tensors.weight), (&self.bias, &tensors.bias)] {
            let Some(var) = var else { continue };
            let value = match found {
                Some(found) if found.elem_count() != var.elem_count() || found.dims()[0] != var.dims()[0] => {
                    return Err(format!(
                        "the file has {:?}, the model needs {:?}",
                        found.dims(),
                        var.dims()
                    ));
                }
                Some(found) => found.reshape(var.shape()).and_then(|t| t.to_device(var.device())),
                None => var.zeros_like(),
            };
            values.values.push((var, value.map_err(|error| error.to_string())?));
        }
        Ok(values)
    }
}

/// The differences of one layer in a file, float32 on the CPU.
#[derive(Clone, Debug)]
struct DifferenceTensors {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    /// The rows that the layer has of them, in its order; all if there are none.
    rows: Option<RowRanges>,
}

/// Reads a layer whose tensors are whole differences. `None`: it has none.
pub(super) fn read_difference(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let (weight, bias) = (found.get(TensorRole::Diff), found.get(TensorRole::DiffB));
    let differences = usize::from(weight.is_some()) + usize::from(bias.is_some());
    if differences == 0 {
        return None;
    }
    if found.tensors.len() > differences {
        return Some(Err(
            "it has a whole difference (`.diff` or `.diff_b`) and other tensors, which is not supported".to_owned(),
        ));
    }
    if let Some(dims) = weight
        .as_ref()
        .map(Tensor::dims)
        .filter(|dims| ![1, 2, 4].contains(&dims.len()))
    {
        return Some(Err(format!(
            "its `.diff` {dims:?} is not the whole difference of a linear layer, a convolution or a norm"
        )));
    }
    if let Some(dims) = bias.as_ref().map(Tensor::dims).filter(|dims| dims.len() != 1) {
        return Some(Err(format!("its `.diff_b` {dims:?} is not the difference of a bias")));
    }
    Some(Ok(Arc::new(DifferenceTensors {
        weight,
        bias,
        rows: None,
    })))
}

impl FileLayer for DifferenceTensors {
    fn kind(&self) -> &'static str {
        "whole difference"
    }

    fn outputs(&self) -> usize {
        let tensor = self.weight.as_ref().or(self.bias.as_ref());
        tensor.map_or(0, |tensor| tensor.dims()[0])
    }

    fn inputs(&self) -> usize {
        self.weight
            .as_ref()
            .map_or(0, |weight| weight.dims().get(1).copied().unwrap_or(0))
    }

    fn lacks_alpha(&self) -> bool {
        false
    }

    fn split(&self, named: &NamedLayers, _: &dyn Fn(f64) -> Option<f64>) -> Result<Vec<Arc<dyn FileLayer>>> {
        let parts = named
            .rows_if_converted()
            .into_iter()
            .map(|rows| -> Arc<dyn FileLayer> { Arc::new(Self { rows, ..self.clone() }) });
        Ok(parts.collect())
    }

    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let select = |tensor: &Option<Tensor>| {
            let rows = tensor
                .clone()
                .map(|tensor| select_rows(tensor, 0, self.rows.as_deref()));
            rows.transpose().map_err(|error| error.to_string())
        };
        let (weight, bias) = (select(&self.weight)?, select(&self.bias)?);
        DenseLayer::new(site, weight.as_ref(), bias.as_ref()).map(|layer| -> Arc<dyn WeightAdapter> { Arc::new(layer) })
    }

    fn norm_adapter(&self, site: Site<'_>, has_bias: bool) -> std::result::Result<Arc<dyn NormAdapter>, String> {
        if self.bias.is_some() && !has_bias {
            return Err("the file has a `.diff_b` of it, and the norm of this model has no bias".to_owned());
        }
        let layer = DenseLayer::new(site, self.weight.as_ref(), self.bias.as_ref())?;
        Ok(Arc::new(layer))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let tensors = [("diff", &self.weight), ("diff_b", &self.bias)].into_iter();
        let found = tensors.filter_map(|(suffix, tensor)| Some((suffix, tensor.clone()?)));
        let select = |(suffix, tensor)| Ok((suffix, select_rows(tensor, 0, self.rows.as_deref())?));
        found
            .map(select)
            .collect::<Result<_>>()
            .map_err(|error| error.to_string())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
