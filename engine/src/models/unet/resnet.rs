//! Residual blocks, downsampling and upsampling, for the U-Net and the VAE.

use crate::error::Result;
use crate::nn::{Conv2d, GroupNorm, LayerMut, Linear, add, add_channels, join, silu, upsample_nearest};
use crate::weights::Weights;
use candle_core::Tensor;

/// A function that is called with the path of a layer and the layer.
pub(crate) type Visitor<'a> = dyn FnMut(&str, LayerMut<'_>) -> Result<()> + 'a;

/// A residual block: norm, SiLU, conv; plus the time embedding; norm, SiLU, conv; plus the input.
#[derive(Clone, Debug)]
pub struct ResnetBlock {
    norm1: GroupNorm,
    conv1: Conv2d,
    time_emb_proj: Option<Linear>,
    norm2: GroupNorm,
    conv2: Conv2d,
    conv_shortcut: Option<Conv2d>,
}

/// Sizes of a residual block.
#[derive(Clone, Copy, Debug)]
pub struct ResnetSizes {
    /// Input channels.
    pub inputs: usize,
    /// Output channels.
    pub outputs: usize,
    /// Features of the time embedding; `None` if the block has none.
    pub time: Option<usize>,
    /// Groups of the norms.
    pub groups: usize,
    /// The epsilon of the norms.
    pub eps: f64,
}

impl ResnetBlock {
    /// Loads the block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, sizes: ResnetSizes) -> Result<Self> {
        let ResnetSizes {
            inputs,
            outputs,
            time,
            groups,
            eps,
        } = sizes;
        let norm = |name, channels| GroupNorm::new(&weights.pp(name), groups, channels, eps);
        let shortcut = inputs != outputs;
        Ok(Self {
            norm1: norm("norm1", inputs)?,
            conv1: Conv2d::new(&weights.pp("conv1"), inputs, outputs, 3, 1, 1)?,
            time_emb_proj: time
                .map(|width| Linear::new(&weights.pp("time_emb_proj"), width, outputs, true))
                .transpose()?,
            norm2: norm("norm2", outputs)?,
            conv2: Conv2d::new(&weights.pp("conv2"), outputs, outputs, 3, 1, 1)?,
            conv_shortcut: shortcut
                .then(|| Conv2d::new(&weights.pp("conv_shortcut"), inputs, outputs, 1, 1, 0))
                .transpose()?,
        })
    }

    /// x [b, in, h, w], time [b, width] -> [b, out, h, w].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor, time: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let mut h = self.conv1.forward(&self.norm1.forward_silu(x)?)?;
        if let (Some(projection), Some(time)) = (&self.time_emb_proj, time) {
            let shift = projection.forward(&silu(time)?)?;
            h = add_channels(&h, &shift)?;
        }
        let h = self.conv2.forward(&self.norm2.forward_silu(&h)?)?;
        match &self.conv_shortcut {
            Some(conv) => add(&conv.forward(x)?, &h),
            None => add(x, &h),
        }
    }

    pub(crate) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "conv1"), LayerMut::Conv2d(&mut self.conv1))?;
        if let Some(projection) = &mut self.time_emb_proj {
            f(&join(path, "time_emb_proj"), LayerMut::Linear(projection))?;
        }
        f(&join(path, "conv2"), LayerMut::Conv2d(&mut self.conv2))?;
        if let Some(conv) = &mut self.conv_shortcut {
            f(&join(path, "conv_shortcut"), LayerMut::Conv2d(conv))?;
        }
        Ok(())
    }
}

impl ResnetBlock {
    pub(crate) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.norm1.visit(&join(path, "norm1"), f)?;
        self.norm2.visit(&join(path, "norm2"), f)
    }
}

/// Downsampling to half the size, by a convolution with stride 2.
#[derive(Clone, Debug)]
pub struct Downsample {
    conv: Conv2d,
}

impl Downsample {
    /// Loads the block. With `padding` 0, the input is padded by one row below and one column on the right, as in the
    /// VAE.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, channels: usize, padding: usize) -> Result<Self> {
        Ok(Self {
            conv: Conv2d::new(&weights.pp("conv"), channels, channels, 3, 2, padding)?,
        })
    }

    /// The height and width of the result for an input of this height and width.
    #[must_use]
    pub fn output_size(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let added = (2 * self.conv.padding).max(1);
        let half = |side: usize| (side + added).saturating_sub(3) / 2 + 1;
        (half(height), half(width))
    }

    /// x [b, c, h, w] -> [b, c, about h / 2, about w / 2].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        if self.conv.padding == 0 {
            return self.conv.forward(&x.pad_with_zeros(2, 0, 1)?.pad_with_zeros(3, 0, 1)?);
        }
        self.conv.forward(x)
    }

    pub(crate) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "conv"), LayerMut::Conv2d(&mut self.conv))
    }
}

/// Nearest-neighbour upsampling, followed by a convolution.
#[derive(Clone, Debug)]
pub struct Upsample {
    conv: Conv2d,
}

impl Upsample {
    /// Loads the block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, channels: usize) -> Result<Self> {
        Ok(Self {
            conv: Conv2d::new(&weights.pp("conv"), channels, channels, 3, 1, 1)?,
        })
    }

    /// x [b, c, h, w] -> [b, c, size].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor, size: (usize, usize)) -> candle_core::Result<Tensor> {
        self.conv.forward(&upsample_nearest(x, size.0, size.1)?)
    }

    pub(crate) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "conv"), LayerMut::Conv2d(&mut self.conv))
    }
}
