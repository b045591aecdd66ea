//! Exponential moving average of the trained weights (`train.ema_config`).

use super::fused::{self, CHUNK_LEN};
use super::inplace::{self, ElementsMut};
use super::kernels::multiversion;
use super::optimizer::{OptimError, Param};
use super::state_tensor::StateTensor;
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The shadow weights of an exponential moving average. ai-toolkit saves them and samples with them.
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
    /// The weights of the training, while the shadow weights are swapped in.
    training_weights: Option<Vec<Tensor>>,
}

impl Ema {
    /// Creates an average that starts with the current parameters.
    ///
    /// # Errors
    /// When the device fails.
    pub fn new(params: Vec<Param>, decay: f64, use_feedback: bool, param_multiplier: f64) -> Result<Self, OptimError> {
        Ok(Self {
            decay,
            use_feedback,
            param_multiplier,
            updates: 0,
            shadow: copies(&params)?,
            params,
            training_weights: None,
        })
    }

    /// Starts the average anew with the current parameters.
    ///
    /// # Errors
    /// When the device fails.
    pub fn restart(&mut self) -> Result<(), OptimError> {
        self.shadow = copies(&self.params)?;
        (self.updates, self.training_weights) = (0, None);
        Ok(())
    }

    /// Updates the shadow weights after an optimizer step. With `use_feedback` the parameters move towards the shadow
    /// weights by ten times the shadow's step; `param_multiplier` scales the parameters (1 = off).
    ///
    /// # Errors
    /// When the device fails.
    pub fn update(&mut self) -> Result<(), OptimError> {
        self.updates += 1;
        let one_minus_decay = 1.0 - self.decay;
        for (param, shadow) in self.params.iter().zip(&mut self.shadow) {
            if fused::is_supported(param) {
                let feedback = if self.use_feedback { 10.0 } else { 0.0 };
                let factors = [one_minus_decay as f32, feedback, self.param_multiplier as f32];
                let tensors = [shadow.make_mut()?, param.var.as_tensor()];
                inplace::with_elements_mut(&tensors, |elements| update_in_chunks(elements, factors))?;
                continue;
            }
            let p = param.value()?;
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
                param.set(&next)?;
            }
        }
        Ok(())
    }

    /// Copies the shadow weights into the parameters. Does nothing if that was done already.
    ///
    /// # Errors
    /// When the device fails.
    pub fn swap_in(&mut self) -> Result<(), OptimError> {
        if self.training_weights.is_none() {
            let mut training_weights = Vec::with_capacity(self.params.len());
            for (param, shadow) in self.params.iter().zip(&self.shadow) {
                training_weights.push(param.var.as_tensor().detach().copy()?);
                // Outside of an optimizer's step: to the nearest number.
                param.set(shadow.get())?;
            }
            self.training_weights = Some(training_weights);
        }
        Ok(())
    }

    /// Restores the training weights.
    ///
    /// # Errors
    /// When the device fails.
    pub fn swap_out(&mut self) -> Result<(), OptimError> {
        if let Some(training_weights) = self.training_weights.take() {
            for (param, value) in self.params.iter().zip(&training_weights) {
                param.var.set(value)?;
            }
        }
        Ok(())
    }

    /// The shadow weights by the names of the parameters, and the number of updates so far.
    #[must_use]
    pub fn state(&self) -> (BTreeMap<String, Tensor>, u64) {
        (
            self.params
                .iter()
                .map(|p| p.name.clone())
                .zip(self.shadow.iter().map(StateTensor::snapshot))
                .collect(),
            self.updates,
        )
    }

    /// Loads what [`Ema::state`] returned.
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
            shadow.push(StateTensor::shared(t));
        }
        self.shadow = shadow;
        self.updates = updates;
        Ok(())
    }
}

/// Copies of the parameters.
fn copies(params: &[Param]) -> Result<Vec<StateTensor>, OptimError> {
    let copy = |param: &Param| Ok::<_, OptimError>(StateTensor::new(param.value()?.copy()?));
    params.iter().map(copy).collect()
}

/// Updates the shadow weights (`elements[0]`) and the parameters (`elements[1]`) in parallel chunks.
fn update_in_chunks(elements: Vec<ElementsMut<'_>>, factors: [f32; 3]) {
    let mut elements = elements.into_iter().map(ElementsMut::f32);
    let (Some(shadow), Some(p)) = (elements.next(), elements.next()) else {
        return;
    };
    let params_unchanged = factors[1..] == [0.0, 1.0];
    let chunks = shadow.par_chunks_mut(CHUNK_LEN).zip(p.par_chunks_mut(CHUNK_LEN));
    chunks.for_each(|(shadow, p)| {
        if params_unchanged {
            update_shadow(shadow, p, factors[0])
        } else {
            update_with_feedback(shadow, p, factors)
        }
    });
}

multiversion! {
    fn update_shadow(shadow: &mut [f32], p: &[f32], one_minus_decay: f32) {
        for (shadow, p) in shadow.iter_mut().zip(p) {
            *shadow -= (*shadow - p) * one_minus_decay;
        }
    }
}

multiversion! {
    fn update_with_feedback(shadow: &mut [f32], p: &mut [f32], factors: [f32; 3]) {
        let [one_minus_decay, feedback, multiplier] = factors;
        for (shadow, p) in shadow.iter_mut().zip(p) {
            let step = (*shadow - *p) * one_minus_decay;
            *shadow -= step;
            *p = (*p + step * feedback) * multiplier;
        }
    }
}
