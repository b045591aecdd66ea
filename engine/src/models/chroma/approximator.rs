//! The network that makes every modulation vector of Chroma from the timestep and the number of the vector (diffusers'
//! `ChromaCombinedTimestepTextProjEmbeddings` and `ChromaApproximator`, `models/transformers/transformer_chroma.py`).

use crate::error::Result;
use crate::models::mmdit::{Embedder, Visitor};
use crate::nn::{self, LayerMut, Linear, RmsNorm, join, sinusoids};
use crate::weights::Weights;
use candle_core::{DType, Device, Tensor};

/// The epsilon of its norms: that of PyTorch's `RMSNorm` in float32, where none is given.
const EPS: f64 = 1.192_092_9e-7;
/// By how much the numbers of the vectors are multiplied before they are embedded.
const NUMBER_SCALE: f32 = 1000.0;

/// Sizes of the approximator.
#[derive(Clone, Copy, Debug)]
pub(super) struct ApproximatorSizes {
    /// Features of its input, four times those of the embedded timestep.
    pub(super) inputs: usize,
    /// Features of its layers.
    pub(super) hidden: usize,
    /// Its layers.
    pub(super) layers: usize,
    /// Features of a vector.
    pub(super) width: usize,
    /// How many vectors it makes.
    pub(super) vectors: usize,
}

/// The approximator.
#[derive(Clone, Debug)]
pub(super) struct Approximator {
    in_proj: Linear,
    layers: Vec<Embedder>,
    norms: Vec<RmsNorm>,
    out_proj: Linear,
    /// The embedded numbers of the vectors, [1, vectors, inputs / 2], f32.
    numbers: Tensor,
    /// Features of the embedded timestep.
    channels: usize,
}

impl Approximator {
    /// Loads the network.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(super) fn new(weights: &Weights, sizes: ApproximatorSizes) -> Result<Self> {
        let ApproximatorSizes { inputs, hidden, .. } = sizes;
        let (layers, norms) = (weights.pp("layers"), weights.pp("norms"));
        let in_proj = Linear::new(&weights.pp("in_proj"), inputs, hidden, true)?;
        let layers = (0..sizes.layers).map(|i| Embedder::new(&layers.pp(i), hidden, hidden));
        let layers = layers.collect::<Result<_>>()?;
        let norms = (0..sizes.layers).map(|i| RmsNorm::new(&norms.pp(i), hidden, EPS));
        let norms = norms.collect::<Result<_>>()?;
        let out_proj = Linear::new(&weights.pp("out_proj"), hidden, sizes.width, true)?;
        let channels = inputs / 4;
        // On the CPU, so that the large angles do not depend on the device.
        let numbers: Vec<f32> = (0..sizes.vectors).map(|number| number as f32 * NUMBER_SCALE).collect();
        let numbers = Tensor::from_vec(numbers, sizes.vectors, &Device::Cpu)?;
        let numbers = sinusoids(&numbers, 2 * channels, true, 0.0)?.unsqueeze(0)?;
        Ok(Self {
            in_proj,
            layers,
            norms,
            out_proj,
            numbers: numbers.to_device(weights.device())?,
            channels,
        })
    }

    /// The vectors [b, vectors, width] at the timesteps [b] (f32, 0 to 1000). The guidance scale, the second part of the input, is always 0.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn forward(&self, timesteps: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        let (batch, vectors) = (timesteps.dim(0)?, self.numbers.dim(1)?);
        let embedded = |numbers: &Tensor| sinusoids(numbers, self.channels, true, 0.0);
        let items = Tensor::cat(&[embedded(timesteps)?, embedded(&timesteps.zeros_like()?)?], 1)?;
        let items = items.unsqueeze(1)?.repeat((1, vectors, 1))?;
        let numbers = self.numbers.repeat((batch, 1, 1))?;
        let inputs = Tensor::cat(&[&items, &numbers], 2)?.to_dtype(dtype)?;
        let mut x = self.in_proj.forward(&inputs)?;
        for (layer, norm) in self.layers.iter().zip(&self.norms) {
            x = nn::add(&x, &layer.forward(&norm.forward(&x)?)?)?;
        }
        self.out_proj.forward(&x)
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "in_proj"), LayerMut::Linear(&mut self.in_proj))?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            layer.visit(&format!("{path}.layers.{index}"), f)?;
        }
        f(&join(path, "out_proj"), LayerMut::Linear(&mut self.out_proj))
    }

    /// Calls `f` with every norm, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        for (index, norm) in self.norms.iter_mut().enumerate() {
            norm.visit(&format!("{path}.norms.{index}"), f)?;
        }
        Ok(())
    }
}
