//! `slider` and `replacements`: trainings guided by text or by image pairs.

use super::declare::section;
use super::limits::{MAX_FACTOR, MAX_SIDE};
use super::schema::{PresentKeys, ReadContext};
use super::values::ImageSize;

section! {
    /// One pair of opposites for a slider.
    pub struct SliderTarget("targets") {
        /// Prompt of the concept that is changed. Empty: everything.
        target_class: String = String::new(), Works;
        /// Prompt of the positive end.
        positive: String = String::new(), Works;
        /// Prompt of the negative end.
        negative: String = String::new(), Works;
        /// Strength of the adapter at the positive end; the negative end has it with the other sign.
        multiplier: f64 = 1.0, Works;
        /// Loss weight.
        weight: f64 = 1.0, Works;
        /// Also train permutations of the comma-separated parts, up to 8.
        shuffle: bool = false, Works;
    }
    finish = finish_target;
}

fn finish_target(target: &mut SliderTarget, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_in_range("multiplier", target.multiplier, -MAX_FACTOR..=MAX_FACTOR);
    cx.check_in_range("weight", target.weight, -MAX_FACTOR..=MAX_FACTOR);
}

section! {
    /// A prompt that a slider must not change.
    pub struct SliderAnchor("anchors") {
        /// The prompt.
        prompt: String = String::new(), Works;
        /// No effect: anchors are predicted without guidance, as in ai-toolkit.
        neg_prompt: String = String::new(), Accepted("anchors are predicted without guidance, as in ai-toolkit");
        /// Strength of the adapter in the positive direction.
        multiplier: f64 = 1.0, Works;
    }
    finish = finish_anchor;
}

fn finish_anchor(anchor: &mut SliderAnchor, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_in_range("multiplier", anchor.multiplier, -MAX_FACTOR..=MAX_FACTOR);
}

section! {
    /// Paired images for a slider.
    pub struct ReferenceDataset("slider.datasets") {
        /// Side-by-side images: the negative half is on the left, the positive one on the right.
        pair_folder: Option<String> = None, Works, input Dataset;
        /// Positive images, matched by stem.
        pos_folder: Option<String> = None, Works, input Dataset;
        /// Negative images, matched by stem.
        neg_folder: Option<String> = None, Works, input Dataset;
        /// Prompt when there is no caption.
        target_class: String = String::new(), Works;
        /// Bucket resolution, as `resolution` of other data sets.
        size: u32 = 512, Works;
        /// Default of the next two.
        network_weight: f64 = 1.0, Works;
        /// LoRA strength of the positive end.
        pos_weight: Option<f64> = None, Works, shown "`network_weight`";
        /// LoRA strength of the negative end.
        neg_weight: Option<f64> = None, Works, shown "`network_weight`";
    }
    finish = finish_reference;
}

fn finish_reference(dataset: &mut ReferenceDataset, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_not_zero("size", dataset.size);
    cx.check_at_most("size", dataset.size, MAX_SIDE);
    for (key, value) in [
        ("network_weight", Some(dataset.network_weight)),
        ("pos_weight", dataset.pos_weight),
        ("neg_weight", dataset.neg_weight),
    ] {
        cx.check_in_range(key, value.unwrap_or(1.0), -MAX_FACTOR..=MAX_FACTOR);
    }
}

section! {
    /// Sliders of every kind; which keys matter depends on the process type (docs/sliders.md).
    pub struct SliderConfig("slider") {
        /// Pairs of opposites (`slider`, `ultimate_slider_trainer`).
        targets: Vec<SliderTarget> = Vec::new(), Works;
        /// Prompts whose result must not change (`slider`).
        anchors: Vec<SliderAnchor> = Vec::new(), Works;
        /// Sizes of the sampled latents (`slider` without `datasets`); one is picked at random. Sides are rounded down to multiples of 8, of
        /// transformers of 16.
        resolutions: Vec<ImageSize> = vec![ImageSize(512, 512)], Works;
        /// Neutral prompts, one per line.
        prompt_file: Option<String> = None, Ignored("no loss uses neutral prompts, also in ai-toolkit"), input PromptFile;
        /// Cache of encoded prompts.
        prompt_tensors: Option<String> = None, Ignored("prompts are encoded when the training starts");
        /// Train all parts of a pair in each step: two directions, each from two sides. Otherwise one part.
        batch_full_slide: bool = true, Works;
        /// `depth`.
        use_adapter: Option<String> = None, Refused("sliders are not conditioned on depth images: remove it");
        /// Depth images by stem.
        adapter_img_dir: Option<String> = None, DependsOn("use_adapter"), input ControlImages;
        /// `concept_slider`: strength of the push.
        guidance_strength: f64 = 3.0, Works;
        /// `concept_slider`: strength of the anchor.
        anchor_strength: f64 = 1.0, Works;
        /// `concept_slider`: the positive end.
        positive_prompt: String = String::new(), Works;
        /// `concept_slider`: the negative end.
        negative_prompt: String = String::new(), Works;
        /// `concept_slider`: what is changed.
        target_class: String = String::new(), Works;
        /// `concept_slider`: what must not change.
        anchor_class: Option<String> = None, Works;
        /// Paired images (`ultimate_slider_trainer`, `image_reference_slider_trainer`).
        datasets: Vec<ReferenceDataset> = Vec::new(), Works;
        /// More losses (`ultimate_slider_trainer`, `image_reference_slider_trainer`).
        additional_losses: Vec<String> = Vec::new(), Accepted("never had an effect");
        /// The strengths of both images of a pair are moved by the same random number, from minus this one to it.
        weight_jitter: f64 = 0.0, Works;
        /// Weight of the image loss (`ultimate_slider_trainer`).
        img_loss_weight: f64 = 1.0, Works;
        /// Weight of the text loss (`ultimate_slider_trainer`).
        cfg_loss_weight: f64 = 1.0, Works;
    }
    rare {
        "low_ram" => Accepted("saves memory only");
    }
    finish = finish_slider;
}

fn finish_slider(slider: &mut SliderConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    for (index, ImageSize(width, height)) in slider.resolutions.iter().enumerate() {
        let key = format!("resolutions[{index}]");
        cx.check_not_zero(&key, *width.min(height));
        cx.check_at_most(&key, *width.max(height), MAX_SIDE);
    }
    for (key, value) in [
        ("guidance_strength", slider.guidance_strength),
        ("anchor_strength", slider.anchor_strength),
        ("img_loss_weight", slider.img_loss_weight),
        ("cfg_loss_weight", slider.cfg_loss_weight),
    ] {
        cx.check_in_range(key, value, -MAX_FACTOR..=MAX_FACTOR);
    }
    cx.check_in_range("weight_jitter", slider.weight_jitter, 0.0..=MAX_FACTOR);
}

section! {
    /// A concept and what replaces it.
    pub struct Replacement("replacements") {
        /// Concept that is replaced.
        concept: String = String::new(), Works;
        /// The replacement.
        replacement: String = String::new(), Works;
    }
}
