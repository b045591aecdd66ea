//! Activations and their derivatives with candle's operations.

use super::Activation;
use crate::nn::tensors::sigmoid;
use candle_core::{Result, Tensor};
use std::f64::consts::FRAC_1_SQRT_2;

/// The density of the normal distribution at 0.
const NORMAL_DENSITY: f64 = 0.398_942_280_401_432_7;
const QUICK_SLOPE: f64 = 1.702;
/// 2 sqrt(2 / pi): (1 + tanh u) / 2 is the logistic function of 2 u.
const TANH_SLOPE: f64 = 1.595_769_121_605_731;
const TANH_CUBE: f64 = 0.044_715;

impl Activation {
    /// The function of x, in f32 or f64, with candle's operations.
    pub(in crate::nn) fn value_tensors(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Silu => x.silu(),
            Self::Gelu => x.gelu_erf(),
            Self::GeluTanh => x.gelu(),
            // By SiLU, whose gradient in candle is finite also where the exponential overflows.
            Self::QuickGelu => (x * QUICK_SLOPE)?.silu()? / QUICK_SLOPE,
        }
    }

    /// The derivative at x, in f32 or f64, with candle's operations.
    pub(in crate::nn) fn derivative_tensors(self, x: &Tensor) -> Result<Tensor> {
        // Of x * s(u(x)) with the logistic function s: s + x * s * (1 - s) * u'.
        let logistic = |s: Tensor, slope: Tensor| ((&s * (1.0 - &s)?)? * slope)? + s;
        match self {
            Self::Silu => logistic(sigmoid(x)?, x.clone()),
            Self::Gelu => {
                let density = ((x.sqr()? * -0.5)?.exp()? * NORMAL_DENSITY)?;
                let normal = (((x * FRAC_1_SQRT_2)?.erf()? + 1.0)? * 0.5)?;
                normal + (x * density)?
            }
            Self::GeluTanh => {
                let square = x.sqr()?;
                let inner = (x * ((&square * TANH_CUBE)? + 1.0)?)? * TANH_SLOPE;
                let slope = ((square * (3.0 * TANH_SLOPE * TANH_CUBE))? + TANH_SLOPE)?;
                logistic(sigmoid(&inner?)?, (x * slope)?)
            }
            Self::QuickGelu => {
                let inner = (x * QUICK_SLOPE)?;
                logistic(sigmoid(&inner)?, inner)
            }
        }
    }
}
