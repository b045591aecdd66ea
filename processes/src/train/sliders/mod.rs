//! Sliders: adapters with two directions. In each step the model is trained with the adapter at a positive and at a negative
//! strength, to predict what the model without it predicts for other prompts, or to make other images.
//!
//! One file for each kind; docs/sliders.md has the formulas, and what ai-toolkit does otherwise.

mod concept;
mod image_pairs;
mod pass;
mod prompts;
pub(super) mod slider;
mod targets;

use super::run::Run;
use crate::error::Result;
pub(super) use pass::MicroBatchNumber;
use slider::Slider;

/// Computes the losses and the gradients of a micro-batch.
///
/// # Errors
/// When the data cannot be read or the arithmetic fails.
pub(super) fn micro_batch(slider: &Slider, run: &mut Run<'_>, at: MicroBatchNumber) -> Result<()> {
    match slider {
        Slider::Concept(config) => concept::micro_batch(config, run, at),
        Slider::Prompts(targets) => prompts::micro_batch(targets, run, at),
        Slider::ImagePairs(config, targets) => image_pairs::micro_batch(config, targets.as_ref(), run, at),
    }
}
