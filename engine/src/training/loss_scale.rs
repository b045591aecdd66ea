//! Dynamic loss scaling for f16 (P. Micikevicius and others, arXiv:1710.03740; the rule and the numbers of
//! `torch.amp.GradScaler`).
//!
//! The smallest number of f16 is 6e-8, and many gradients are below it. The backward pass therefore starts with a
//! large factor instead of 1, by which the gradients of the parameters, which are f32, are divided. The factor is
//! halved when a gradient overflows, and doubled after many steps without an overflow.

use crate::error::{EngineError, Result};
use candle_core::{DType, Device, Tensor};

/// The factor of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LossScale {
    factor: f64,
    /// The steps since the factor changed.
    steps: u32,
}

const INITIAL_FACTOR: f64 = 65_536.0;
/// The steps without an overflow after which the factor is doubled.
const GROWTH_INTERVAL: u32 = 2_000;

impl Default for LossScale {
    fn default() -> Self {
        Self {
            factor: INITIAL_FACTOR,
            steps: 0,
        }
    }
}

impl LossScale {
    /// The gradient of the loss with which the backward pass starts.
    pub(super) fn scale(self, loss: &Tensor) -> candle_core::Result<Tensor> {
        loss.ones_like()? * self.factor
    }

    /// Divides the gradient of a parameter by the factor.
    pub(super) fn unscale(self, gradient: &Tensor) -> candle_core::Result<Tensor> {
        gradient * self.factor.recip()
    }

    /// Changes the factor after a step. Returns whether an overflow is explained by the factor: it was above 1.
    pub(super) fn update(&mut self, is_finite: bool) -> bool {
        if !is_finite {
            let is_explained = self.factor > 1.0;
            *self = Self {
                factor: self.factor * 0.5,
                steps: 0,
            };
            return is_explained;
        }
        self.steps += 1;
        if self.steps == GROWTH_INTERVAL {
            *self = Self {
                factor: self.factor * 2.0,
                steps: 0,
            };
        }
        false
    }

    /// The tensor [factor, steps] of a checkpoint, f64.
    pub(super) fn state(self) -> candle_core::Result<Tensor> {
        Tensor::new(&[self.factor, f64::from(self.steps)], &Device::Cpu)
    }

    /// Reads a tensor of [`Self::state`].
    ///
    /// # Errors
    /// When it does not hold a positive factor and a number of steps below the interval.
    pub(super) fn from_state(tensor: &Tensor) -> Result<Self> {
        let numbers = match (tensor.dims(), tensor.dtype()) {
            ([2], DType::F64) => tensor.to_device(&Device::Cpu)?.to_vec1::<f64>()?,
            _ => Vec::new(),
        };
        match numbers.as_slice() {
            &[factor, steps]
                if factor.is_finite() && factor > 0.0 && (0.0..f64::from(GROWTH_INTERVAL)).contains(&steps) =>
            {
                let steps = steps as u32;
                Ok(Self { factor, steps })
            }
            _ => Err(EngineError::bad_input(format!(
                "the checkpoint's loss scale is {:?} of shape {:?}, expected a positive factor and a number of steps, f64",
                tensor.dtype(),
                tensor.dims()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_follows_grad_scaler() {
        let mut scale = LossScale::default();
        assert!(scale.update(false), "an overflow is explained by the factor");
        assert_eq!(scale.factor, 32_768.0);
        for step in 1..=GROWTH_INTERVAL {
            assert_eq!(scale.factor, 32_768.0, "before step {step}");
            assert!(!scale.update(true));
        }
        assert_eq!((scale.factor, scale.steps), (65_536.0, 0));
        scale.factor = 1.0;
        assert!(
            !scale.update(false),
            "without a factor the gradients are not finite either"
        );
    }

    #[test]
    fn a_saved_scale_is_restored_and_others_are_refused() {
        let scale = LossScale {
            factor: 128.0,
            steps: 17,
        };
        assert_eq!(LossScale::from_state(&scale.state().unwrap()).unwrap(), scale);
        for wrong in [[0.0, 1.0], [-2.0, 1.0], [f64::NAN, 1.0], [2.0, 2_000.0], [2.0, -1.0]] {
            let wrong = Tensor::new(&wrong, &Device::Cpu).unwrap();
            assert!(LossScale::from_state(&wrong).is_err(), "{wrong}");
        }
        assert!(LossScale::from_state(&Tensor::new(&[2f32, 1.0], &Device::Cpu).unwrap()).is_err());
    }
}
