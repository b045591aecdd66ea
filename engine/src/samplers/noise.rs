//! The source of a pipeline's random numbers.

use crate::rng::{NormalKind, TorchGenerator};
use candle_core::{DType, Device, Tensor};

/// One generator for a whole batch, or one per image: the two ways in which diffusers takes a `generator`.
#[derive(Clone, Debug)]
pub enum NoiseSource {
    /// `generator=g`: the noise of a batch is drawn at once.
    Shared(TorchGenerator),
    /// `generator=[g0, g1, …]`: the noise of image i is drawn from generator i, so that it does not depend on the
    /// others.
    PerImage(Vec<TorchGenerator>),
}

impl NoiseSource {
    /// One generator per seed. With a single seed it behaves like [`Self::Shared`].
    #[must_use]
    pub fn from_seeds(seeds: &[u64]) -> Self {
        Self::PerImage(seeds.iter().copied().map(TorchGenerator::manual_seed).collect())
    }

    /// Normal noise like `randn_tensor(shape)` of diffusers: drawn on the CPU in the model's dtype, returned as f32 on
    /// `device`.
    ///
    /// # Errors
    /// When there are several generators and their number differs from the batch size.
    pub fn randn(&mut self, shape: &[usize], dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        self.draw(shape, dtype, device, false)
    }

    /// The noise of one item, drawn from the first generator.
    ///
    /// # Errors
    /// When the device fails.
    pub fn randn_of_first(&mut self, shape: &[usize], dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        self.draw(shape, dtype, device, true)
    }

    fn draw(
        &mut self,
        shape: &[usize],
        dtype: DType,
        device: &Device,
        only_first: bool,
    ) -> candle_core::Result<Tensor> {
        let kind = match dtype {
            DType::F16 => NormalKind::F16,
            DType::BF16 => NormalKind::BF16,
            _ => NormalKind::F32,
        };
        let count: usize = shape.iter().product();
        let data = match self {
            Self::Shared(generator) => generator.randn_as(count, kind),
            Self::PerImage(generators) if generators.len() == 1 || (only_first && !generators.is_empty()) => {
                generators[0].randn_as(count, kind)
            }
            Self::PerImage(generators) => {
                let batch = shape.first().copied().unwrap_or(0);
                if generators.len() != batch {
                    candle_core::bail!(
                        "{} random generators were given for a batch of {batch}",
                        generators.len()
                    );
                }
                generators
                    .iter_mut()
                    .flat_map(|g| g.randn_as(count / batch, kind))
                    .collect()
            }
        };
        Tensor::from_vec(data, shape, device)
    }
}
