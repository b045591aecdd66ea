//! Group norm, layer norm and RMS norm.
//!
//! Each computes its statistics over a row (the elements of a group, or the last dimension), then scales and shifts.

mod params;
mod row_norm;
mod rows;
mod tensors;

use super::activation::Activation;
use super::visit_layers::LayerMut;
use crate::autograd::apply;
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{D, DType, Device, Tensor};
pub use params::NormParams;
use row_norm::RowNorm;

/// Group normalisation over the channels of [b, c, ..].
#[derive(Clone, Debug)]
pub struct GroupNorm {
    params: NormParams,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// Loads `weight` and `bias` ([channels]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape, or the groups do not divide the channels.
    pub fn new(weights: &Weights, groups: usize, channels: usize, eps: f64) -> Result<Self> {
        if !channels.is_multiple_of(groups) {
            return Err(weights.config_error(format!("{channels} channels cannot be split into {groups} groups")));
        }
        let weight = weights.get_with(channels, "weight", Init::Ones)?;
        let bias = weights.get_with(channels, "bias", Init::Zeros)?;
        Ok(Self::from_tensors(weight, bias, groups, eps))
    }

    /// A group norm with this weight and bias ([channels]), whose number `groups` divides.
    pub(crate) fn from_tensors(weight: Tensor, bias: Tensor, groups: usize, eps: f64) -> Self {
        Self {
            params: NormParams::new(weight, bias),
            groups,
            eps,
        }
    }

    /// Normalises each channel alone, without weight and bias: PyTorch's `InstanceNorm2d`.
    ///
    /// # Errors
    /// When the device has no memory for a row of ones.
    pub fn of_each_channel(channels: usize, eps: f64, dtype: DType, device: &Device) -> candle_core::Result<Self> {
        let weight = Tensor::ones(channels, dtype, device)?;
        let bias = weight.zeros_like()?;
        Ok(Self::from_tensors(weight, bias, channels, eps))
    }

    /// x [b, c, ..] -> the same shape.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.forward_with(x, None)
    }

    /// SiLU of the norm, as one operation: the result of the norm is neither stored nor saved for the backward pass.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward_silu(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.forward_with(x, Some(Activation::Silu))
    }

    fn forward_with(&self, x: &Tensor, activation: Option<Activation>) -> candle_core::Result<Tensor> {
        let channels = x.dim(1)?;
        if channels != self.params.channels() {
            candle_core::bail!(
                "group norm of {} channels: the input has the shape {:?}",
                self.params.channels(),
                x.dims()
            );
        }
        let spatial = x.elem_count() / (x.dim(0)? * channels).max(1);
        let rows = RowNorm {
            length: channels / self.groups * spatial,
            channels,
            spatial,
            eps: self.eps,
            subtract_mean: true,
            activation,
        };
        let [weight, bias] = self.params.changed()?;
        apply([x, &weight, &bias], rows)
    }

    /// Calls `f` with the norm, if it has a weight of its own.
    ///
    /// # Errors
    /// That of `f`.
    pub fn visit(&mut self, path: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        visit(&mut self.params, path, f)
    }
}

/// Calls `f` with a norm that has a weight of its own.
fn visit(params: &mut NormParams, path: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
    match params.has_weight {
        true => f(path, LayerMut::Norm(params)),
        false => Ok(()),
    }
}

/// Normalisation over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    params: NormParams,
    eps: f64,
}

impl LayerNorm {
    /// Loads `weight` and `bias` ([features]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, features: usize, eps: f64) -> Result<Self> {
        let weight = weights.get_with(features, "weight", Init::Ones)?;
        let bias = weights.get_with(features, "bias", Init::Zeros)?;
        let params = NormParams::new(weight, bias);
        Ok(Self { params, eps })
    }

    /// A layer norm without weight and bias: `elementwise_affine=False`.
    ///
    /// # Errors
    /// When the device has no memory for a row of ones.
    pub fn plain(features: usize, eps: f64, dtype: DType, device: &Device) -> candle_core::Result<Self> {
        let weight = Tensor::ones(features, dtype, device)?;
        let bias = Tensor::zeros(features, dtype, device)?;
        let params = NormParams {
            has_weight: false,
            has_bias: false,
            ..NormParams::new(weight, bias)
        };
        Ok(Self { params, eps })
    }

    #[cfg(test)]
    pub(super) fn from_parts(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        let params = NormParams::new(weight, bias);
        Self { params, eps }
    }

    /// x [.., features] -> the same shape.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let features = x.dim(D::Minus1)?;
        if features != self.params.channels() {
            candle_core::bail!(
                "layer norm of {} features: the input has the shape {:?}",
                self.params.channels(),
                x.dims()
            );
        }
        let rows = RowNorm {
            length: features,
            channels: features,
            spatial: 1,
            eps: self.eps,
            subtract_mean: true,
            activation: None,
        };
        let [weight, bias] = self.params.changed()?;
        apply([x, &weight, &bias], rows)
    }

    /// Calls `f` with the norm, if it has a weight of its own.
    ///
    /// # Errors
    /// That of `f`.
    pub fn visit(&mut self, path: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        visit(&mut self.params, path, f)
    }
}

/// RMS normalisation over the last dimension, then a weight (B. Zhang and R. Sennrich, arXiv:1910.07467).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// Without a bias.
    params: NormParams,
    eps: f64,
}

impl RmsNorm {
    /// Loads `weight` ([features]).
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn new(weights: &Weights, features: usize, eps: f64) -> Result<Self> {
        Ok(Self::from_weight(
            weights.get_with(features, "weight", Init::Ones)?,
            eps,
        )?)
    }

    /// An RMS norm with this weight [features].
    ///
    /// # Errors
    /// When the device has no memory for a row of zeros.
    pub fn from_weight(weight: Tensor, eps: f64) -> candle_core::Result<Self> {
        let zeros = weight.zeros_like()?.detach();
        let params = NormParams {
            has_bias: false,
            ..NormParams::new(weight, zeros)
        };
        Ok(Self { params, eps })
    }

    /// Normalises x [.., n * features] as [.., n, features] and keeps its shape: the heads of a query are normalised
    /// without a reshape.
    ///
    /// # Errors
    /// When the last dimension is not a multiple of the features.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let features = self.params.channels();
        if features == 0 || !x.dim(D::Minus1)?.is_multiple_of(features) {
            candle_core::bail!(
                "RMS norm of {features} features: the input has the shape {:?}",
                x.dims()
            );
        }
        let rows = RowNorm {
            length: features,
            channels: features,
            spatial: 1,
            eps: self.eps,
            subtract_mean: false,
            activation: None,
        };
        let [weight, zeros] = self.params.changed()?;
        apply([x, &weight, &zeros], rows)
    }

    /// Calls `f` with the norm, if it has a weight of its own.
    ///
    /// # Errors
    /// That of `f`.
    pub fn visit(&mut self, path: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        visit(&mut self.params, path, f)
    }
}
