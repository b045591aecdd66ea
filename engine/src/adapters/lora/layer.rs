//! One LoRA layer: `y + up(dropout(down(dropout(x)))) * alpha / rank * multiplier`.

use super::super::dropout::Dropout;
use super::super::handle::AdapterHandle;
use super::super::stored_matrix::with_core;
use super::super::weight_adapter::{WeightAdapter, product, tracked_if};
use crate::device::precision::MatmulPrecision;
use crate::families::AdapterNames;
use crate::nn::{self, BaseLayer, LayerAdapter, LayerKind, LowRank};
use crate::rng::generator_from_text;
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// The LoRA of one layer. The weights are float32, whatever the dtype of the base layer.
#[derive(Debug)]
pub struct LoraLayer {
    /// The name in LoRA files: `lora_unet_down_blocks_0_…`.
    pub name: String,
    /// [rank, in], of a convolution with its kernel: [rank, in, kh, kw] ([rank, in, 1, 1] when there is a `mid`).
    pub down: Var,
    /// [out, rank], of a convolution with a kernel of 1: [out, rank, 1, 1].
    pub up: Var,
    /// LoCon's Tucker core [rank, rank, kh, kw].
    pub mid: Option<Var>,
    /// The scale of the update is alpha / rank.
    pub alpha: f64,
    /// A number that is trained too and multiplies the update.
    pub scalar: Option<Var>,
    /// What training drops.
    pub dropout: Dropout,
    /// How saved files name its tensors.
    pub(crate) names: AdapterNames,
    pub(crate) handle: Arc<AdapterHandle>,
}

impl LoraLayer {
    /// The rank: the rows of `down`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.down.dims().first().copied().unwrap_or(1).max(1)
    }

    /// alpha / rank times the strength of the pass.
    fn strength(&self) -> f64 {
        self.handle.strength() * self.alpha / self.rank() as f64
    }

    /// `down`, with the core of a Tucker decomposition if there is one, and `up`, which is multiplied by the scalar. `dropout_seed`: that of
    /// training, in which they are tracked for gradients, and `up` is without the outputs that are dropped.
    pub(super) fn weights(&self, dropout_seed: Option<&str>) -> Result<[Tensor; 2]> {
        let is_training = dropout_seed.is_some();
        let (down, up) = (tracked_if(is_training, &self.down), tracked_if(is_training, &self.up));
        let down = self.joined(down, is_training)?;
        let outputs = self.up.dim(0)?;
        let mask = match dropout_seed {
            Some(seed) => self.dropout.output_mask(seed, &self.name, outputs, up.device())?,
            None => None,
        };
        let up = match mask {
            Some(mask) => {
                let mut shape = vec![1; up.rank()];
                shape[0] = outputs;
                up.broadcast_mul(&mask.reshape(shape)?)?
            }
            None => up,
        };
        let up = match &self.scalar {
            Some(scalar) => up.broadcast_mul(&tracked_if(is_training, scalar))?,
            None => up,
        };
        Ok([down, up])
    }

    /// `down` [rank, in, kh, kw] of a LoRA without a core that changes the layer as this one.
    pub(super) fn down_with_core(&self) -> Result<Tensor> {
        self.joined(self.down.as_detached_tensor(), false)
    }

    /// `down` with the core of a Tucker decomposition, if there is one.
    fn joined(&self, down: Tensor, is_training: bool) -> Result<Tensor> {
        let Some(mid) = &self.mid else {
            return Ok(down);
        };
        let mut dims = vec![self.rank(), self.down.dim(1)?];
        if self.down.rank() > 2 {
            dims.extend(&mid.dims()[2..]);
        }
        with_core(&tracked_if(is_training, mid), &down.flatten_from(1)?)?.reshape(dims)
    }

    /// A mask of this shape: 0 with this probability, else 1 / (1 - p). `purpose` is part of the seed, so that each use
    /// has a mask of its own.
    fn mask(&self, seed: &str, purpose: &str, probability: f64, shape: &[usize], like: &Tensor) -> Result<Tensor> {
        let keep = (1.0 / (1.0 - probability)) as f32;
        let values: Vec<f32> = generator_from_text(&format!("{seed}/{}{purpose}", self.name))
            .rand(shape.iter().product())
            .into_iter()
            .map(|u| if f64::from(u) < probability { 0.0 } else { keep })
            .collect();
        Tensor::from_vec(values, shape, like.device())
    }

    /// What is between down and up, [b, .., rank] or [b, rank, h, w], without what training drops.
    fn drop_from(&self, hidden: Tensor, kind: LayerKind, seed: &str) -> Result<Tensor> {
        let Dropout { element, rank, .. } = self.dropout;
        let mut hidden = hidden;
        if element > 0.0 {
            let mask = self.mask(seed, "", element, hidden.dims(), &hidden)?;
            hidden = (hidden * mask)?;
        }
        if rank > 0.0 {
            let axis = kind.channels_axis(hidden.rank());
            let mut shape = vec![1; hidden.rank()];
            (shape[0], shape[axis]) = (hidden.dim(0)?, hidden.dim(axis)?);
            let mask = self.mask(seed, "/rank", rank, &shape, &hidden)?;
            hidden = hidden.broadcast_mul(&mask)?;
        }
        Ok(hidden)
    }
}

impl LayerAdapter for LoraLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let (strength, dropout_seed) = (self.strength(), self.handle.dropout_seed());
        if self.dropout.is_off(strength, dropout_seed.as_deref(), &self.name) {
            return Ok(output);
        }
        let [down, up] = self.weights(dropout_seed.as_deref())?;
        let mut x = x.to_dtype(DType::F32)?;
        if let (Some(seed), true) = (&dropout_seed, self.dropout.input > 0.0) {
            let mask = self.mask(seed, "/input", self.dropout.input, x.dims(), &x)?;
            x = (x * mask)?;
        }
        // As where layer and LoRA are one operation.
        let product = |kind, x: &Tensor, weight: &Tensor| MatmulPrecision::F32.run(|| product(kind, x, weight, None));
        let mut h = product(layer.kind, &x, &down)?;
        if let Some(seed) = dropout_seed {
            h = self.drop_from(h, layer.kind, &seed)?;
        }
        let change = (product(layer.kind.pointwise(), &h, &up)? * strength)?;
        let change = change.to_dtype(output.dtype())?;
        nn::add(&output, &change)
    }

    fn low_rank(&self) -> Option<LowRank> {
        let (scale, dropout_seed) = (self.strength(), self.handle.dropout_seed());
        if scale == 0.0 || (dropout_seed.is_some() && !self.dropout.keeps_low_rank()) {
            return None;
        }
        let [down, up] = self.weights(dropout_seed.as_deref()).ok()?;
        Some(LowRank { down, up, scale })
    }
}

impl WeightAdapter for LoraLayer {
    fn factors(&self) -> Result<Option<LowRank>> {
        let [down, up] = self.weights(None)?;
        let scale = self.strength();
        Ok(Some(LowRank { down, up, scale }))
    }

    fn change(&self, weight: &Weight) -> Result<Tensor> {
        let [down, up] = self.weights(None)?;
        let (rank, outputs) = (self.rank(), up.dims()[0]);
        let up = up.reshape((outputs, rank))?;
        let change = up.matmul(&down.flatten_from(1)?)?;
        (change * self.strength())?.reshape(weight.dims())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::adapters::AdapterPass;
    use candle_core::{Device, Shape};

    #[test]
    fn a_dropped_input_is_zero_and_the_others_are_larger() {
        let width = 64;
        let eye = || Var::from_tensor(&Tensor::eye(width, DType::F32, &Device::Cpu).unwrap()).unwrap();
        let handle = AdapterHandle::new(1.0);
        let lora = LoraLayer {
            name: "layer".into(),
            down: eye(),
            up: eye(),
            mid: None,
            alpha: width as f64,
            scalar: None,
            dropout: Dropout {
                input: 0.25,
                ..Dropout::default()
            },
            names: AdapterNames::Peft,
            handle: Arc::clone(&handle),
        };
        let weight = Weight::Plain(Tensor::zeros((width, width), DType::F32, &Device::Cpu).unwrap());
        let layer = BaseLayer {
            kind: LayerKind::Linear,
            weight: &weight,
            bias: None,
        };
        let x = Tensor::ones(Shape::from((1, 40, width)), DType::F32, &Device::Cpu).unwrap();
        let change = |seed: Option<&str>| -> Vec<f32> {
            let pass = AdapterPass {
                strength: 1.0,
                dropout_seed: seed.map(Into::into),
            };
            let out = handle.in_pass(pass, || lora.apply(&layer, &x, x.zeros_like().unwrap()));
            out.unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let dropped = change(Some("a"));
        let zeros = dropped.iter().filter(|value| **value == 0.0).count();
        assert!(
            dropped
                .iter()
                .all(|value| *value == 0.0 || (*value - 4.0 / 3.0).abs() < 1e-6)
        );
        let share = zeros as f64 / dropped.len() as f64;
        assert!((share - 0.25).abs() < 0.03, "{share}");
        assert_eq!(change(Some("a")), dropped);
        assert_ne!(change(Some("b")), dropped);
        assert!(change(None).iter().all(|value| *value == 1.0));
    }
}
