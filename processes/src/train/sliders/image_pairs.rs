//! `image_reference_slider_trainer` and `ultimate_slider_trainer`: sliders between pairs of images (`extensions_built_in/` in ai-toolkit at
//! 27a03a91), the second also between prompts.

use super::super::run::Run;
use super::pass::{MicroBatchNumber, NoisyLatents, Pass};
use super::prompts::passes_on;
use super::targets::{PromptTargets, StepPart};
use crate::error::{EngineError, Result};
use crate::rng::generator_for;
use crate::training::SliderTarget;
use aitk_common::job::slider::SliderConfig;

/// Trains the positive images at one strength, and the negative ones at the opposite strength. `targets`: the prompts whose difference is
/// trained on the same noisy images.
///
/// # Errors
/// When the data cannot be read or the arithmetic fails.
pub(super) fn micro_batch(
    config: &SliderConfig,
    targets: Option<&PromptTargets>,
    run: &mut Run<'_>,
    at: MicroBatchNumber,
) -> Result<()> {
    let batch = run.draw_batch(at.step, at.micro)?;
    let mut generator = generator_for(run.seed, "slider", at.step, at.micro);
    let set = config.datasets.get(batch.step_batch.batch.dataset);
    let set = set.ok_or_else(|| EngineError::Internal("a batch of no data set".into()))?;
    let [mut positive, mut negative] = set.strengths();
    let mut weight = 1.0;
    let jitter = config.weight_jitter;
    if jitter > 0.0 {
        // As in ai-toolkit, both move the same way: one direction gets longer, the other one shorter.
        let by = jitter * (2.0 * generator.rand_f64(1)[0] - 1.0);
        (positive, negative) = (positive + by, negative + by);
        // ai-toolkit's other trainer does not weigh the loss.
        if targets.is_none() {
            weight = 1.0 - by.abs() / jitter;
        }
    }
    let negatives = batch.inputs.control.clone();
    let negatives = negatives.ok_or_else(|| EngineError::Internal("an image pair has no negative image".into()))?;
    let sizes = run.sizes_of(&batch);
    let conditioning = run.slider_conditioning(&batch.prompts.captions, &sizes)?;
    let timesteps = run.timesteps_of(&batch.noise_draw)?;
    let item_weights = batch
        .noise_draw
        .timesteps
        .iter()
        .map(|t| Ok(run.objective.loss_weight(*t)? as f32));
    let item_weights: Vec<f32> = item_weights.collect::<Result<_>>()?;
    let image_weight = match targets.is_some() {
        true => config.img_loss_weight,
        false => 1.0,
    };
    let (mut passes, mut noisy_sides) = (Vec::new(), Vec::new());
    for (latents, strength) in [(batch.inputs.latents.clone(), positive), (vec![negatives], negative)] {
        let noisy = run.slider_noisy(&latents, &batch.noise_draw)?;
        passes.push(Pass {
            strength,
            conditioning: conditioning.clone(),
            noisy: noisy.clone(),
            timesteps: timesteps.clone(),
            target: SliderTarget {
                prediction: run.objective.target(&latents, &batch.noise_draw)?,
                weight: 0.5 * weight * image_weight,
            },
            item_weights: item_weights.clone(),
        });
        noisy_sides.push(NoisyLatents {
            latents: noisy,
            timesteps: batch.noise_draw.timesteps.clone(),
            sizes: sizes.clone(),
        });
    }
    if let Some(targets) = targets {
        let (target, parts) = targets.choose(&mut generator)?;
        for (noisy, is_positive) in noisy_sides.iter().zip([true, false]) {
            let of_side: Vec<StepPart> = parts
                .iter()
                .copied()
                .filter(|part| part.is_positive == is_positive)
                .collect();
            if !of_side.is_empty() {
                passes.extend(passes_on(run, (target, None), noisy, &of_side, config.cfg_loss_weight)?);
            }
        }
    }
    run.train_slider(at, passes, 1.0)
}
