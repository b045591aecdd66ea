//! What training drops of an adapter's change.

use crate::rng::generator_from_text;
use candle_core::{Device, Result, Tensor};

/// The probabilities with which training drops parts of an adapter's change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// An element of the input of `down`, as peft's `lora_dropout`. Only LoRAs have it.
    pub input: f64,
    /// An element between down and up. Only LoRAs have it.
    pub element: f64,
    /// A row of `down`, for each image of the batch. Only LoRAs have it.
    pub rank: f64,
    /// An output of the change, that is a row of the weight's change, in one pass. The others are not scaled: LyCORIS' `rank_dropout`.
    pub output: f64,
    /// The whole change of a layer, in one pass.
    pub module: f64,
}

impl Dropout {
    /// Whether what is left of a low-rank product is always one, too.
    #[must_use]
    pub fn keeps_low_rank(self) -> bool {
        Self { output: 0.0, ..self } == Self::default()
    }

    /// Whether the layer with this name is computed as without its adapter, in a pass with this strength and seed of what is dropped.
    pub(super) fn is_off(self, strength: f64, seed: Option<&str>, layer: &str) -> bool {
        strength == 0.0 || seed.is_some_and(|seed| self.drops_module(seed, layer))
    }

    fn drops_module(self, seed: &str, layer: &str) -> bool {
        let mut generator = generator_from_text(&format!("{seed}/{layer}/module"));
        self.module > 0.0 && generator.rand(1).iter().any(|u| f64::from(*u) < self.module)
    }

    /// 1 for each output of the layer that the pass with this seed keeps, and 0 for the others, [outputs]. `None`: all are kept.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn output_mask(
        self,
        seed: &str,
        layer: &str,
        outputs: usize,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        if self.output == 0.0 {
            return Ok(None);
        }
        let drawn = generator_from_text(&format!("{seed}/{layer}/output")).rand(outputs);
        let mask = drawn.into_iter().map(|u| match f64::from(u) < self.output {
            true => 0.0,
            false => 1.0,
        });
        let mask: Vec<f32> = mask.collect();
        Tensor::from_vec(mask, outputs, device).map(Some)
    }
}
