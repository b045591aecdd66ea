//! `concept_slider`: a slider between two prompts, on images (`extensions_built_in/concept_slider/ConceptSliderTrainer.py` in ai-toolkit
//! at 27a03a91).

use super::super::run::Run;
use super::pass::{MicroBatchNumber, Pass};
use crate::error::{EngineError, Result};
use crate::families::Conditioning;
use crate::training::{SliderTarget, moved_prediction, with_statistics_of};
use aitk_common::job::slider::SliderConfig;
use candle_core::Tensor;

/// Trains the class at strength 1 towards the positive prompt, and at -1 towards the negative one.
///
/// # Errors
/// When the data cannot be read or the arithmetic fails.
pub(super) fn micro_batch(config: &SliderConfig, run: &mut Run<'_>, at: MicroBatchNumber) -> Result<()> {
    let batch = run.draw_batch(at.step, at.micro)?;
    let (sizes, count) = (run.sizes_of(&batch), batch.prompts.captions.len());
    let noisy = run.slider_noisy(&batch.inputs.latents, &batch.noise_draw)?;
    let timesteps = run.timesteps_of(&batch.noise_draw)?;
    let mut predicted = |prompt: &str| {
        let conditioning = run.slider_conditioning(&vec![prompt.to_owned(); count], &sizes)?;
        let base = run.base_prediction(&noisy, &timesteps, &conditioning)?;
        Ok::<_, EngineError>((conditioning, base))
    };
    let (_, positive) = predicted(&config.positive_prompt)?;
    let (class, neutral) = predicted(&config.target_class)?;
    let (_, negative) = predicted(&config.negative_prompt)?;
    let anchor = config.anchor_class.as_deref().map(&mut predicted).transpose()?;

    // The positive direction enhances the positive prompt and erases the negative one, which is the same twice: the class moves by
    // the difference of the prompts. The negative direction does the opposite.
    let mut passes = Vec::new();
    for strength in [1.0, -1.0] {
        let moved = moved_prediction(&neutral, &positive, &negative, strength * config.guidance_strength)?;
        let moved: Vec<Tensor> = moved
            .iter()
            .zip(&neutral)
            .map(|(moved, neutral)| with_statistics_of(moved, neutral))
            .collect::<Result<_>>()?;
        let pass = |conditioning: &Conditioning, prediction: Vec<Tensor>, weight: f64| Pass {
            strength,
            conditioning: conditioning.clone(),
            noisy: noisy.clone(),
            timesteps: timesteps.clone(),
            target: SliderTarget { prediction, weight },
            item_weights: vec![1.0; count],
        };
        passes.push(pass(&class, moved, 2.0 / 3.0));
        if let Some((conditioning, kept)) = &anchor {
            passes.push(pass(conditioning, kept.clone(), config.anchor_strength / 3.0));
        }
    }
    // ai-toolkit reports the mean of the directions; the gradients are those of their sum.
    run.train_slider(at, passes, 0.5)
}
