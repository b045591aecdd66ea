//! A fusion block of a DPT head: adds the image of a scale to that of the smaller scales, and doubles the size.

use super::scale::conv_without_bias;
use crate::error::Result;
use crate::nn::{Conv2d, Interpolation, add, interpolate};
use crate::weights::Weights;
use candle_core::Tensor;

/// Two convolutions after activations, plus the input.
#[derive(Clone, Debug)]
struct ResidualUnit([Conv2d; 2]);

impl ResidualUnit {
    fn new(weights: &Weights, channels: usize) -> Result<Self> {
        let conv = |name: &str| conv_without_bias(&weights.pp(name), channels, channels);
        Ok(Self([conv("conv1")?, conv("conv2")?]))
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let [first, second] = &self.0;
        let h = first.forward(&x.relu()?)?;
        add(&second.forward(&h.relu()?)?, x)
    }
}

/// A fusion block.
#[derive(Clone, Debug)]
pub(super) struct Fusion {
    /// Of the scale that is added; the first block, of the smallest scale, has none.
    residual: Option<ResidualUnit>,
    main: ResidualUnit,
    out: Conv2d,
}

impl Fusion {
    /// Reads a block. `has_residual`: whether it adds a scale.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(super) fn new(weights: &Weights, channels: usize, has_residual: bool) -> Result<Self> {
        let residual = has_residual.then(|| ResidualUnit::new(&weights.pp("residual_unit"), channels));
        Ok(Self {
            residual: residual.transpose()?,
            main: ResidualUnit::new(&weights.pp("main_unit"), channels)?,
            out: Conv2d::new(&weights.pp("out_conv"), channels, channels, 1, 1, 0)?,
        })
    }

    /// x [b, c, h, w] and the image of a scale -> [b, c, 2 h, 2 w].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, x: &Tensor, scale: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let (_, _, height, width) = x.dims4()?;
        let sum = match (&self.residual, scale) {
            (Some(unit), Some(scale)) => {
                let scale = interpolate(scale, (height, width), Interpolation::Bilinear)?;
                add(&unit.forward(&scale)?, x)?
            }
            _ => x.clone(),
        };
        let x = self.main.forward(&sum)?;
        let x = interpolate(&x, (2 * height, 2 * width), Interpolation::BilinearAligned)?;
        self.out.forward(&x)
    }
}
