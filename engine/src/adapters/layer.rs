//! One LoRA layer: `y + up(dropout(down(x))) * alpha / rank * multiplier`.

use crate::nn::{self, LayerAdapter, LowRank, conv2d, linear};
use crate::rng::generator_of;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The strength of all layers of one LoRA, shared, so that it can change from image to image.
#[derive(Clone, Debug)]
pub struct Multiplier(Arc<AtomicU64>);

impl Multiplier {
    /// A new handle.
    #[must_use]
    pub fn new(value: f64) -> Self {
        Self(Arc::new(AtomicU64::new(value.to_bits())))
    }

    /// The strength now.
    #[must_use]
    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    /// Changes the strength of every layer. At 0 the layers cost nothing.
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }
}

/// What all layers of one LoRA share.
#[derive(Debug)]
pub struct LoraHandle {
    /// The strength.
    pub multiplier: Multiplier,
    /// While training: the text that, with a layer's name behind it, seeds its dropout mask.
    training: Mutex<Option<Arc<str>>>,
}

impl LoraHandle {
    /// A handle for layers that do not train.
    #[must_use]
    pub fn new(multiplier: f64) -> Arc<Self> {
        Arc::new(Self {
            multiplier: Multiplier::new(multiplier),
            training: Mutex::new(None),
        })
    }

    /// Training: gradients reach the layers and dropout works; the mask of a layer comes from the generator of
    /// `<masks>/<name of the layer>`, so that a layer which is run again in the backward pass has the same one.
    /// `None`: neither.
    pub fn set_training(&self, masks: Option<&str>) {
        *self.lock() = masks.map(Arc::from);
    }

    fn training(&self) -> Option<Arc<str>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.training.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the layer sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// x [.., in].
    Linear,
    /// x [b, in, h, w]; the kernel of `down` has this stride and padding.
    Conv {
        /// Of the base layer.
        stride: usize,
        /// Of the base layer.
        padding: usize,
    },
}

/// The low-rank change of one layer. Weights are float32, whatever the base layer computes in.
#[derive(Debug)]
pub struct LoraLayer {
    /// As files call it: `lora_unet_down_blocks_0_…`.
    pub name: String,
    /// [rank, in] or [rank, in, kh, kw] ([rank, in, 1, 1] when there is a `mid`).
    pub down: Var,
    /// [out, rank] or [out, rank, 1, 1].
    pub up: Var,
    /// LoCon's Tucker core [rank, rank, kh, kw]; only in files made elsewhere.
    pub mid: Option<Tensor>,
    /// The effective scale is alpha / rank.
    pub alpha: f64,
    /// Chance to drop an element between down and up, while training.
    pub dropout: f64,
    pub(super) shape: Shape,
    pub(super) handle: Arc<LoraHandle>,
}

impl LoraLayer {
    /// Rows of `down`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.down.dims().first().copied().unwrap_or(1).max(1)
    }

    /// alpha / rank times the multiplier of now.
    fn strength(&self) -> f64 {
        self.handle.multiplier.get() * self.alpha / self.rank() as f64
    }

    /// `down` and `up`, tracked while they train.
    fn weights(&self, training: bool) -> [Tensor; 2] {
        [&self.down, &self.up].map(|v| {
            if training {
                v.as_tensor().clone()
            } else {
                v.as_tensor().detach()
            }
        })
    }

    /// Zeros and 1 / (1 - p).
    fn mask(&self, masks: &str, like: &Tensor) -> Result<Tensor> {
        let keep = (1.0 / (1.0 - self.dropout)) as f32;
        let mask: Vec<f32> = generator_of(&format!("{masks}/{}", self.name))
            .rand(like.elem_count())
            .into_iter()
            .map(|u| if f64::from(u) < self.dropout { 0.0 } else { keep })
            .collect();
        Tensor::from_vec(mask, like.shape(), like.device())
    }
}

impl LayerAdapter for LoraLayer {
    fn apply(&self, x: &Tensor, base_output: Tensor) -> Result<Tensor> {
        let strength = self.strength();
        if strength == 0.0 {
            return Ok(base_output);
        }
        let training = self.handle.training();
        let [down, up] = self.weights(training.is_some());
        let x = x.to_dtype(DType::F32)?;
        let project = |x: &Tensor, w: &Tensor, stride: usize, padding: usize| match self.shape {
            Shape::Linear => linear(x, w, None),
            Shape::Conv { .. } => conv2d(x, w, None, stride, padding),
        };
        let (stride, padding) = match self.shape {
            Shape::Linear => (1, 0),
            Shape::Conv { stride, padding } => (stride, padding),
        };
        let mut h = match &self.mid {
            None => project(&x, &down, stride, padding)?,
            Some(mid) => project(&project(&x, &down, 1, 0)?, mid, stride, padding)?,
        };
        if let Some(masks) = training.filter(|_| self.dropout > 0.0) {
            h = (&h * self.mask(&masks, &h)?)?;
        }
        let change = (project(&h, &up, 1, 0)? * strength)?;
        let change = change.to_dtype(base_output.dtype())?;
        nn::add(&base_output, &change)
    }

    fn low_rank(&self) -> Option<LowRank> {
        let (scale, training) = (self.strength(), self.handle.training().is_some());
        if scale == 0.0 || self.mid.is_some() || (training && self.dropout > 0.0) {
            return None;
        }
        let [down, up] = self.weights(training);
        Some(LowRank { down, up, scale })
    }
}
