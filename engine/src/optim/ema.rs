//! Exponential moving average of the trained weights (`train.ema_config`).

use super::fused::{self, PIECE};
use super::inplace::{self, Part};
use super::kernels::for_every_unit;
use super::state_tensor::StateTensor;
use super::{OptimError, Param};
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Shadow weights. ai-toolkit saves and samples with these.
///
/// After every optimizer step: `shadow <- shadow - (1 - decay) * (shadow - param)`, with a constant decay, as
/// ai-toolkit configures it.
pub struct Ema {
    decay: f64,
    use_feedback: bool,
    param_multiplier: f64,
    updates: u64,
    params: Vec<Param>,
    shadow: Vec<StateTensor>,
    /// What training goes on with, while the shadow weights are swapped in.
    parked: Option<Vec<Tensor>>,
}

impl Ema {
    /// Starts from the parameters as they are.
    ///
    /// # Errors
    /// When the device fails.
    pub fn new(params: Vec<Param>, decay: f64, use_feedback: bool, param_multiplier: f64) -> Result<Self, OptimError> {
        let shadow = params
            .iter()
            .map(|p| Ok(StateTensor::new(p.var.as_tensor().detach().copy()?)))
            .collect::<Result<_, OptimError>>()?;
        Ok(Self {
            decay,
            use_feedback,
            param_multiplier,
            updates: 0,
            params,
            shadow,
            parked: None,
        })
    }

    /// Takes in the parameters after an optimizer step. With `use_feedback` the parameters are pulled towards the
    /// shadow weights by ten times that difference; `param_multiplier` scales them (1 = off).
    ///
    /// # Errors
    /// When the device fails.
    pub fn update(&mut self) -> Result<(), OptimError> {
        self.updates += 1;
        let one_minus_decay = 1.0 - self.decay;
        for (param, shadow) in self.params.iter().zip(&mut self.shadow) {
            if fused::takes(param) {
                let pull = if self.use_feedback { 10.0 } else { 0.0 };
                let by = [one_minus_decay as f32, pull, self.param_multiplier as f32];
                let tensors = [shadow.own()?, param.var.as_tensor()];
                inplace::with(&tensors, |parts| in_pieces(parts, by))?;
                continue;
            }
            let p = param.var.as_tensor().detach();
            let step = ((shadow.get() - &p)? * one_minus_decay)?;
            shadow.set((shadow.get() - &step)?);
            if self.use_feedback || self.param_multiplier != 1.0 {
                let mut next = p;
                if self.use_feedback {
                    next = (next + (&step * 10.0)?)?;
                }
                if self.param_multiplier != 1.0 {
                    next = (next * self.param_multiplier)?;
                }
                param.var.set(&next)?;
            }
        }
        Ok(())
    }

    /// Swaps the shadow weights in. Does nothing when they are in already.
    ///
    /// # Errors
    /// When the device fails.
    pub fn swap_in(&mut self) -> Result<(), OptimError> {
        if self.parked.is_none() {
            let mut parked = Vec::with_capacity(self.params.len());
            for (param, shadow) in self.params.iter().zip(&self.shadow) {
                parked.push(param.var.as_tensor().detach().copy()?);
                param.var.set(shadow.get())?;
            }
            self.parked = Some(parked);
        }
        Ok(())
    }

    /// Puts the training weights back.
    ///
    /// # Errors
    /// When the device fails.
    pub fn swap_out(&mut self) -> Result<(), OptimError> {
        if let Some(parked) = self.parked.take() {
            for (param, value) in self.params.iter().zip(&parked) {
                param.var.set(value)?;
            }
        }
        Ok(())
    }

    /// Shadow weights under the parameters' names, and the number of updates so far.
    #[must_use]
    pub fn state(&self) -> (BTreeMap<String, Tensor>, u64) {
        (
            self.params
                .iter()
                .map(|p| p.name.clone())
                .zip(self.shadow.iter().map(StateTensor::lend))
                .collect(),
            self.updates,
        )
    }

    /// Takes back what [`Ema::state`] gave.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn load_state(&mut self, state: &BTreeMap<String, Tensor>, updates: u64) -> Result<(), OptimError> {
        let mut shadow = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let t = state
                .get(&param.name)
                .filter(|t| t.shape() == param.var.shape())
                .ok_or_else(|| {
                    OptimError::State(format!("EMA of \"{}\" is missing or has another shape", param.name))
                })?;
            let t = t.to_dtype(DType::F32)?.to_device(param.var.device())?.contiguous()?;
            shadow.push(StateTensor::borrowed(t));
        }
        self.shadow = shadow;
        self.updates = updates;
        Ok(())
    }
}

/// The shadow, then the weights, piece by piece.
fn in_pieces(parts: Vec<Part<'_>>, by: [f32; 3]) {
    let mut parts = parts.into_iter().map(Part::f32);
    let (Some(shadow), Some(p)) = (parts.next(), parts.next()) else {
        return;
    };
    let stays = by[1..] == [0.0, 1.0];
    let pieces = shadow.par_chunks_mut(PIECE).zip(p.par_chunks_mut(PIECE));
    pieces.for_each(|(shadow, p)| {
        if stays {
            follow(shadow, p, by[0])
        } else {
            pull(shadow, p, by)
        }
    });
}

for_every_unit! {
    fn follow(shadow: &mut [f32], p: &[f32], one_minus_decay: f32) {
        for (shadow, p) in shadow.iter_mut().zip(p) {
            *shadow -= (*shadow - p) * one_minus_decay;
        }
    }
}

for_every_unit! {
    fn pull(shadow: &mut [f32], p: &mut [f32], by: [f32; 3]) {
        let [one_minus_decay, pull, multiplier] = by;
        for (shadow, p) in shadow.iter_mut().zip(p) {
            let step = (*shadow - *p) * one_minus_decay;
            *shadow -= step;
            *p = (*p + step * pull) * multiplier;
        }
    }
}
