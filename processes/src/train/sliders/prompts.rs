//! `slider`: a slider between pairs of prompts (`jobs/process/TrainSliderProcess.py` in ai-toolkit).
//!
//! Its noisy latents are made from noise, by sampling some steps with the class's prompt, or are those of images (`datasets`). ai-toolkit at
//! 27a03a91 stops with an error where there are no images; the sampling with guidance, and the anchors, are those of its last version that
//! worked (before 4af6c5cf).

use super::super::run::Run;
use super::pass::{MicroBatchNumber, NoisyLatents, Pass};
use super::targets::{PromptTargets, StepPart, choice};
use crate::adapters::AdapterPass;
use crate::error::{EngineError, Result};
use crate::families::{Conditioning, ItemSize};
use crate::pipelines::{GenerateRequest, Pipeline};
use crate::rng::{TorchGenerator, generator_for, generator_from_text};
use crate::samplers::NoiseSource;
use crate::training::{SliderTarget, moved_prediction};
use aitk_common::job::slider::{SliderAnchor, SliderTarget as TargetPrompts};
use aitk_common::job::values::ImageSize;
use candle_core::Tensor;

/// The guidance scale with which noisy latents are sampled, as in ai-toolkit.
const SAMPLING_GUIDANCE: f64 = 3.0;

/// Trains the class at one strength towards the difference of two prompts, and at the opposite strength away from it.
///
/// # Errors
/// When the data cannot be read or the arithmetic fails.
pub(super) fn micro_batch(targets: &PromptTargets, run: &mut Run<'_>, at: MicroBatchNumber) -> Result<()> {
    let MicroBatchNumber { step, micro } = at;
    let mut generator = generator_for(run.seed, "slider", step, micro);
    let (target, parts) = targets.choose(&mut generator)?;
    let anchor = match targets.anchors.is_empty() {
        true => None,
        false => Some(choice(&targets.anchors, &mut generator)?),
    };
    let of_images = match run.process.samples_for_slider() {
        true => None,
        false => Some(run.noisy_images(at)?),
    };
    let size = *choice(&targets.sizes, &mut generator)?;
    // At least one step, and not the last one.
    let max = i64::from(run.process.train.max_denoising_steps) - 1;
    let steps = generator.randint(1, max.max(2), 1)[0] as usize;
    let share = 1.0 / parts.len() as f64;
    let passes = match of_images {
        // All parts have the same latents.
        Some(noisy) => passes_on(run, (target, anchor), &noisy, &parts, share)?,
        None => {
            let mut all = Vec::new();
            for (index, part) in parts.into_iter().enumerate() {
                let noise = generator_from_text(&format!("{}/slider-noise/{step}/{micro}/{index}", run.seed));
                let noisy = sample(run, (target, part), (size, steps), noise, at)?;
                all.extend(passes_on(run, (target, anchor), &noisy, &[part], share)?);
            }
            all
        }
    };
    run.train_slider(at, passes, 1.0)
}

/// The passes of some parts with the same noisy latents: one for each direction among them, and one that keeps the anchor as it is.
/// `share`: the weight of each part.
pub(super) fn passes_on(
    run: &mut Run<'_>,
    (target, anchor): (&TargetPrompts, Option<&SliderAnchor>),
    noisy: &NoisyLatents,
    parts: &[StepPart],
    share: f64,
) -> Result<Vec<Pass>> {
    let timesteps = Tensor::from_vec(noisy.timesteps.clone(), noisy.timesteps.len(), &run.compute.device)?;
    let items = noisy.sizes.len();
    let mut predicted = |prompt: &str| {
        let conditioning = run.slider_conditioning(&vec![prompt.to_owned(); items], &noisy.sizes)?;
        let base = run.base_prediction(&noisy.latents, &timesteps, &conditioning)?;
        Ok::<_, EngineError>((conditioning, base))
    };
    let (_, positive) = predicted(&target.positive)?;
    let (_, negative) = predicted(&target.negative)?;
    let (_, neutral) = predicted("")?;
    let kept = anchor.map(|anchor| predicted(&anchor.prompt)).transpose()?;
    let class = run.slider_conditioning(&vec![target.target_class.clone(); items], &noisy.sizes)?;
    let item_weights = run.slider_item_weights(&noisy.timesteps)?;
    let mut passes = Vec::new();
    for direction in [1.0, -1.0] {
        let weight = share * parts.iter().filter(|part| part.direction() == direction).count() as f64;
        if weight == 0.0 {
            continue;
        }
        let strength = direction * target.multiplier;
        let pass = |strength: f64, conditioning: &Conditioning, target: SliderTarget, item_weights: Vec<f32>| Pass {
            strength,
            conditioning: conditioning.clone(),
            noisy: noisy.latents.clone(),
            timesteps: timesteps.clone(),
            target,
            item_weights,
        };
        if let (Some(anchor), Some((conditioning, prediction))) = (anchor, &kept) {
            let kept = SliderTarget {
                prediction: prediction.clone(),
                weight,
            };
            let strength = anchor.multiplier * strength.signum();
            passes.push(pass(strength, conditioning, kept, vec![1.0; items]));
        }
        let moved = SliderTarget {
            prediction: moved_prediction(&neutral, &positive, &negative, direction)?,
            weight: weight * target.weight,
        };
        passes.push(pass(strength, &class, moved, item_weights.clone()));
    }
    Ok(passes)
}

/// Samples from noise, without the adapter and with the class's prompt, and stops after `steps` of the steps.
fn sample(
    run: &Run<'_>,
    (target, part): (&TargetPrompts, StepPart),
    (ImageSize(width, height), steps): (ImageSize, usize),
    noise: TorchGenerator,
    at: MicroBatchNumber,
) -> Result<NoisyLatents> {
    let train = &run.process.train;
    let items = train.batch_size.max(1) as usize;
    // As images that are generated.
    let multiple = run.model.size_multiple().max(8);
    let side = |side: u32| (side as usize / multiple).max(1) * multiple;
    let avoided = match part.avoids_positive {
        true => &target.positive,
        false => &target.negative,
    };
    let request = GenerateRequest {
        prompts: vec![target.target_class.clone(); items],
        negative: vec![avoided.clone(); items],
        width: side(width),
        height: side(height),
        steps: train.max_denoising_steps as usize,
        guidance_scale: SAMPLING_GUIDANCE,
        sampler: train.noise_scheduler.name().to_owned(),
        ..GenerateRequest::default()
    };
    let pipeline = Pipeline::new(&*run.model, run.process.model.is_v_pred)?;
    let mut noise = NoiseSource::Shared(noise);
    // A step that is stopped is done again; gradients of earlier micro-batches would be lost.
    let mut goes_on = |_, _| at.micro > 0 || !run.stop.is_set();
    let sample = || pipeline.sample_partly(&request, steps, &mut noise, &mut goes_on);
    let (latents, timestep) = run.slider_handle()?.in_pass(AdapterPass::inference(0.0), sample)?;
    Ok(NoisyLatents {
        latents: latents.iter().map(Tensor::detach).collect(),
        timesteps: vec![timestep as f32; items],
        sizes: vec![ItemSize::whole(request.width as u32, request.height as u32); items],
    })
}
