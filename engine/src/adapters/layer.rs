//! One LoRA layer: `y + up(dropout(down(x))) * alpha / rank * multiplier`.

use crate::autograd::PassKey;
use crate::nn::{self, BaseLayer, LayerAdapter, LayerKind, LowRank, conv2d, linear};
use crate::rng::generator_from_text;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The strength of all layers of one LoRA. Clones share the value, so that it can change between images.
#[derive(Clone, Debug)]
pub struct Multiplier(Arc<AtomicU64>);

impl Multiplier {
    /// Creates a multiplier.
    #[must_use]
    pub fn new(value: f64) -> Self {
        Self(Arc::new(AtomicU64::new(value.to_bits())))
    }

    /// The current strength.
    #[must_use]
    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    /// Sets the strength of every layer. At 0 the layers are skipped.
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }
}

/// The state that all layers of one LoRA share.
#[derive(Debug)]
pub struct LoraHandle {
    /// The strength.
    pub multiplier: Multiplier,
    /// `Some` while training: the text that seeds the dropout masks, together with the layer's name.
    dropout_seed: Mutex<Option<Arc<str>>>,
    /// The settings of the current pass, which have precedence.
    pass: PassKey,
}

/// The settings of a LoRA in one forward pass.
#[derive(Clone, Debug)]
pub struct LoraPass {
    /// The strength.
    pub strength: f64,
    /// As in [`LoraHandle::set_training`].
    pub dropout_seed: Option<Arc<str>>,
}

impl LoraHandle {
    /// Creates a handle in inference mode.
    #[must_use]
    pub fn new(multiplier: f64) -> Arc<Self> {
        Arc::new(Self {
            multiplier: Multiplier::new(multiplier),
            dropout_seed: Mutex::new(None),
            pass: PassKey::new(),
        })
    }

    /// Switches between training and inference. With `Some`, gradients are recorded and dropout is active. The dropout
    /// mask of a layer comes from the generator of `<dropout_seed>/<name of the layer>`, so that a layer that runs
    /// again in the backward pass gets the same mask. `None`: inference.
    pub fn set_training(&self, dropout_seed: Option<&str>) {
        *self.lock_dropout_seed() = dropout_seed.map(Arc::from);
    }

    /// Runs a forward pass with these settings. Blocks that the backward pass runs again get the same settings, whatever
    /// is set then.
    pub fn in_pass<R>(&self, pass: LoraPass, forward: impl FnOnce() -> R) -> R {
        self.pass.with(pass, forward)
    }

    /// The strength of the current pass.
    fn strength(&self) -> f64 {
        match self.pass.get::<LoraPass>() {
            Some(pass) => pass.strength,
            None => self.multiplier.get(),
        }
    }

    fn dropout_seed(&self) -> Option<Arc<str>> {
        match self.pass.get::<LoraPass>() {
            Some(pass) => pass.dropout_seed.clone(),
            None => self.lock_dropout_seed().clone(),
        }
    }

    fn lock_dropout_seed(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.dropout_seed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The LoRA of one layer. The weights are float32, whatever the dtype of the base layer.
#[derive(Debug)]
pub struct LoraLayer {
    /// The name in LoRA files: `lora_unet_down_blocks_0_…`.
    pub name: String,
    /// [rank, in] or [rank, in, kh, kw] ([rank, in, 1, 1] when there is a `mid`).
    pub down: Var,
    /// [out, rank] or [out, rank, 1, 1].
    pub up: Var,
    /// LoCon's Tucker core [rank, rank, kh, kw]; only in files of other programs.
    pub mid: Option<Tensor>,
    /// The scale of the update is alpha / rank.
    pub alpha: f64,
    /// The probability to drop an element between down and up during training.
    pub dropout: f64,
    pub(super) handle: Arc<LoraHandle>,
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

    /// `down` and `up`, tracked for gradients if `is_training`.
    fn weights(&self, is_training: bool) -> [Tensor; 2] {
        [&self.down, &self.up].map(|v| {
            if is_training {
                v.as_tensor().clone()
            } else {
                v.as_tensor().detach()
            }
        })
    }

    /// A dropout mask for `like`: 0 or 1 / (1 - p) per element.
    fn dropout_mask(&self, dropout_seed: &str, like: &Tensor) -> Result<Tensor> {
        let keep = (1.0 / (1.0 - self.dropout)) as f32;
        let values: Vec<f32> = generator_from_text(&format!("{dropout_seed}/{}", self.name))
            .rand(like.elem_count())
            .into_iter()
            .map(|u| if f64::from(u) < self.dropout { 0.0 } else { keep })
            .collect();
        Tensor::from_vec(values, like.shape(), like.device())
    }
}

impl LayerAdapter for LoraLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let strength = self.strength();
        if strength == 0.0 {
            return Ok(output);
        }
        let dropout_seed = self.handle.dropout_seed();
        let [down, up] = self.weights(dropout_seed.is_some());
        let x = x.to_dtype(DType::F32)?;
        let project = |x: &Tensor, w: &Tensor, stride: usize, padding: usize| match layer.kind {
            LayerKind::Linear => linear(x, w, None),
            LayerKind::Conv { .. } => conv2d(x, w, None, stride, padding),
        };
        let (stride, padding) = match layer.kind {
            LayerKind::Linear => (1, 0),
            LayerKind::Conv { stride, padding } => (stride, padding),
        };
        let mut h = match &self.mid {
            None => project(&x, &down, stride, padding)?,
            Some(mid) => project(&project(&x, &down, 1, 0)?, mid, stride, padding)?,
        };
        if let Some(dropout_seed) = dropout_seed.filter(|_| self.dropout > 0.0) {
            h = (&h * self.dropout_mask(&dropout_seed, &h)?)?;
        }
        let change = (project(&h, &up, 1, 0)? * strength)?;
        let change = change.to_dtype(output.dtype())?;
        nn::add(&output, &change)
    }

    fn low_rank(&self) -> Option<LowRank> {
        let (scale, is_training) = (self.strength(), self.handle.dropout_seed().is_some());
        if scale == 0.0 || self.mid.is_some() || (is_training && self.dropout > 0.0) {
            return None;
        }
        let [down, up] = self.weights(is_training);
        Some(LowRank { down, up, scale })
    }
}
