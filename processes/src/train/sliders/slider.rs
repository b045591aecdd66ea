//! What a slider trains, by its config.

use super::targets::PromptTargets;
use crate::error::{EngineError, Result};
use aitk_common::job::process::{ProcessType, TrainerProcess};
use aitk_common::job::slider::SliderConfig;

/// A kind of slider, with what it is trained on besides images.
#[derive(Debug)]
pub(crate) enum Slider {
    /// `concept_slider`: two prompts, on images.
    Concept(SliderConfig),
    /// `slider`: pairs of prompts.
    Prompts(PromptTargets),
    /// `image_reference_slider_trainer`, and `ultimate_slider_trainer` with prompts.
    ImagePairs(SliderConfig, Option<PromptTargets>),
}

impl Slider {
    /// The slider that a config trains, if it trains one.
    pub(crate) fn of(process: &TrainerProcess, seed: u64) -> Option<Self> {
        let config = process.slider.clone().unwrap_or_default();
        let targets = |config: &SliderConfig| PromptTargets::new(config.clone(), process.train.steps, seed);
        Some(match process.kind {
            ProcessType::ConceptSlider => Self::Concept(config),
            ProcessType::Slider => Self::Prompts(targets(&config)),
            ProcessType::ImageReferenceSlider => Self::ImagePairs(config, None),
            ProcessType::UltimateSlider => {
                let targets = targets(&config);
                Self::ImagePairs(config, Some(targets))
            }
            _ => return None,
        })
    }

    /// Every prompt that it encodes besides captions and the empty one.
    pub(crate) fn prompts(&self) -> Vec<String> {
        match self {
            Self::Concept(config) => {
                let prompts = [&config.positive_prompt, &config.negative_prompt, &config.target_class];
                prompts.into_iter().chain(&config.anchor_class).cloned().collect()
            }
            Self::Prompts(targets) => targets.prompts(),
            Self::ImagePairs(_, targets) => targets.iter().flat_map(PromptTargets::prompts).collect(),
        }
    }
}

/// Checks that the engine can train this slider. Jobs are checked before they are accepted; this protects against specs from other
/// sources.
pub(crate) fn check(process: &TrainerProcess) -> Result<()> {
    if !process.kind.is_slider() {
        return Ok(());
    }
    let config = process.slider.clone().unwrap_or_default();
    let wrong = |what: &str| Err(EngineError::bad_input(what));
    if process.network.is_none() {
        return wrong("network: a slider needs one: it is an adapter with two directions");
    }
    if process.model.arch.name.takes_control_image() {
        return wrong("model.arch: this model needs a control image for each prompt, which sliders do not have");
    }
    if process.train.train_text_encoder {
        return wrong("train.train_text_encoder: a slider trains the U-Net or transformer alone");
    }
    let has_targets = !config.targets.is_empty() && !config.resolutions.is_empty();
    if process.kind.uses_slider_targets() && !has_targets {
        return wrong("slider: needs `targets` and `resolutions`");
    }
    if process.kind.uses_image_pairs() && (config.datasets.is_empty() || !process.datasets.is_empty()) {
        return wrong("slider.datasets: put the image pairs here, and remove `datasets`");
    }
    let (steps, table) = (process.train.max_denoising_steps, process.train.num_train_timesteps);
    if process.samples_for_slider() && !(3..=table).contains(&steps) {
        return wrong(&format!(
            "train.max_denoising_steps: a slider without images needs 3 to {table} (`num_train_timesteps`), found {steps}"
        ));
    }
    Ok(())
}
