//! The strength and the mode that all layers of one adapter file, or of one trained network, share.

use crate::autograd::PassKey;
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
pub struct AdapterHandle {
    /// The strength.
    pub multiplier: Multiplier,
    /// `Some` while training: the text that seeds the dropout masks, together with the layer's name.
    dropout_seed: Mutex<Option<Arc<str>>>,
    /// The settings of the current pass, which have precedence.
    pass: PassKey,
}

/// The settings of a LoRA in one forward pass.
#[derive(Clone, Debug)]
pub struct AdapterPass {
    /// The strength.
    pub strength: f64,
    /// As in [`AdapterHandle::set_training`].
    pub dropout_seed: Option<Arc<str>>,
}

impl AdapterPass {
    /// A pass that keeps nothing for a backward pass, without dropout. At strength 0 the model predicts without the LoRA.
    #[must_use]
    pub const fn inference(strength: f64) -> Self {
        Self {
            strength,
            dropout_seed: None,
        }
    }
}

impl AdapterHandle {
    /// Creates a handle in inference mode.
    #[must_use]
    pub fn new(multiplier: f64) -> Arc<Self> {
        Arc::new(Self {
            multiplier: Multiplier::new(multiplier),
            dropout_seed: Mutex::new(None),
            pass: PassKey::unique(),
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
    pub fn in_pass<R>(&self, pass: AdapterPass, forward: impl FnOnce() -> R) -> R {
        self.pass.with(pass, forward)
    }

    /// The strength of the current pass.
    pub(super) fn strength(&self) -> f64 {
        match self.pass.get::<AdapterPass>() {
            Some(pass) => pass.strength,
            None => self.multiplier.get(),
        }
    }

    /// `Some` while training.
    pub(super) fn dropout_seed(&self) -> Option<Arc<str>> {
        match self.pass.get::<AdapterPass>() {
            Some(pass) => pass.dropout_seed.clone(),
            None => self.lock_dropout_seed().clone(),
        }
    }

    fn lock_dropout_seed(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.dropout_seed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
