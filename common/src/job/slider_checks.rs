//! Checks of slider trainings: what each type needs, and keys of other trainings that have no effect.

use super::dataset::DatasetConfig;
use super::limits::{MAX_DATASETS, MAX_SLIDER_PROMPTS};
use super::objective::LossType;
use super::process::TrainerProcess;
use super::process_type::ProcessType;
use super::schema::ReadContext;
use super::slider::{ReferenceDataset, SliderConfig};
use super::train::{TimestepType, TrainConfig};
use super::values::OneOrMany;

/// More sampling steps than this before each training step of `type: slider` are probably the default, not a choice.
const MANY_STEPS: u32 = 100;

impl TrainerProcess {
    /// Checks a slider training, and turns off what it cannot train.
    pub(super) fn finish_slider(&mut self, cx: &mut ReadContext) {
        finish(self, cx);
    }

    /// Whether each step of this slider makes its noisy latents from noise, by sampling, and not from images.
    #[must_use]
    pub fn samples_for_slider(&self) -> bool {
        self.kind == ProcessType::Slider && self.datasets.is_empty()
    }
}

fn finish(process: &mut TrainerProcess, cx: &mut ReadContext) {
    if !process.kind.is_slider() {
        if process
            .slider
            .as_ref()
            .is_some_and(|slider| *slider != SliderConfig::default())
        {
            let kind = process.kind;
            cx.warn_at(
                "slider",
                format!("has no effect with `type: {kind}`: a slider needs `type: concept_slider`, `slider` or one with image pairs"),
            );
        }
        return;
    }
    let kind = process.kind;
    if process.network.is_none() {
        cx.error_at(
            "network",
            format!("`type: {kind}` needs a `network`: a slider is an adapter with two directions"),
        );
    }
    if process.train.train_text_encoder {
        process.train.train_text_encoder = false;
        cx.warn_at(
            "train.train_text_encoder",
            "has no effect: the prompts of a slider are encoded without the adapter, so that only the U-Net or transformer learns",
        );
    }
    if !process.train.train_unet {
        cx.error_at(
            "train.train_unet",
            "a slider trains the U-Net or transformer alone: set it to true",
        );
    }
    if process.model.arch.name.takes_control_image() {
        let message = format!(
            "`{}` needs a control image for each prompt, which sliders do not have",
            process.model.arch.name
        );
        cx.error_at("model.arch", message);
    }
    warn_of_ineffective(&process.train, cx);
    let slider = process.slider.clone().unwrap_or_default();
    match kind {
        ProcessType::ConceptSlider => check_concept(&slider, cx),
        _ => {
            if kind.uses_slider_targets() {
                check_targets(&slider, cx);
            }
            if kind.uses_image_pairs() {
                check_pairs(process, &slider, cx);
            }
        }
    }
    if process.samples_for_slider() {
        check_sampling(&process.train, cx);
        warn_of_noise(&process.train, cx);
    }
}

fn check_concept(slider: &SliderConfig, cx: &mut ReadContext) {
    if slider.positive_prompt.trim() == slider.negative_prompt.trim() {
        cx.error_at(
            "slider",
            "needs a `positive_prompt` and a `negative_prompt` that differ: the slider learns their difference",
        );
    }
}

fn check_targets(slider: &SliderConfig, cx: &mut ReadContext) {
    if slider.targets.is_empty() {
        cx.error_at(
            "slider.targets",
            "needs at least one pair: `- {target_class: person, positive: old person, negative: young person}`",
        );
    }
    cx.check_item_count("slider.targets", slider.targets.len(), MAX_SLIDER_PROMPTS);
    cx.check_item_count("slider.anchors", slider.anchors.len(), MAX_SLIDER_PROMPTS);
    cx.check_item_count("slider.resolutions", slider.resolutions.len(), MAX_SLIDER_PROMPTS);
    if slider.resolutions.is_empty() {
        cx.error_at("slider.resolutions", "needs at least one size, such as `[512, 512]`");
    }
    for (index, target) in slider.targets.iter().enumerate().take(MAX_SLIDER_PROMPTS) {
        let key = format!("slider.targets[{index}]");
        if target.positive.trim() == target.negative.trim() {
            cx.error_at(
                &key,
                "`positive` and `negative` must differ (one of them may be empty): the slider learns their difference",
            );
        }
        if target.multiplier == 0.0 {
            cx.error_at(
                &format!("{key}.multiplier"),
                "must not be 0: the adapter would do nothing while it is trained",
            );
        }
    }
}

fn check_pairs(process: &TrainerProcess, slider: &SliderConfig, cx: &mut ReadContext) {
    if !process.datasets.is_empty() {
        cx.error_at(
            "datasets",
            format!("`type: {}` has its images in `slider.datasets`", process.kind),
        );
    }
    if slider.datasets.is_empty() {
        cx.error_at(
            "slider.datasets",
            "needs at least one set of image pairs: `- {pos_folder: …, neg_folder: …}` or `- {pair_folder: …}`",
        );
    }
    cx.check_item_count("slider.datasets", slider.datasets.len(), MAX_DATASETS);
    for (index, dataset) in slider.datasets.iter().enumerate().take(MAX_DATASETS) {
        let key = format!("slider.datasets[{index}]");
        let is_set = |path: &Option<String>| path.as_deref().is_some_and(|path| !path.is_empty());
        match (
            is_set(&dataset.pos_folder),
            is_set(&dataset.neg_folder),
            is_set(&dataset.pair_folder),
        ) {
            (true, true, false) | (false, false, true) => {}
            (true, true, true) => {
                cx.warn_at(
                    &format!("{key}.pair_folder"),
                    "has no effect beside `pos_folder` and `neg_folder`",
                );
            }
            _ => cx.error_at(
                &key,
                "needs `pos_folder` and `neg_folder`, or a `pair_folder` of images with the negative half on the left",
            ),
        }
    }
}

/// Checks the number of sampling steps from which the noise level of each training step is drawn.
fn check_sampling(train: &TrainConfig, cx: &mut ReadContext) {
    let (steps, table) = (train.max_denoising_steps, train.num_train_timesteps);
    if steps < 3 || steps > table {
        cx.error_at(
            "train.max_denoising_steps",
            format!("expected 3 to {table}: a slider without images samples with so many steps, and trains after some of them"),
        );
    } else if steps > MANY_STEPS {
        cx.warn_at(
            "train.max_denoising_steps",
            format!("each training step first samples up to {steps} steps, which takes long: 40 are usual"),
        );
    }
}

/// Warns of options of the noise that is added to images.
fn warn_of_noise(train: &TrainConfig, cx: &mut ReadContext) {
    let keys = [
        (train.noise_offset != 0.0, "noise_offset"),
        (train.noise_multiplier != 1.0, "noise_multiplier"),
        (train.dynamic_noise_offset, "dynamic_noise_offset"),
        (train.multires_noise_iterations > 0, "multires_noise_iterations"),
        (train.ip_noise_gamma != 0.0, "ip_noise_gamma"),
        (train.random_noise_shift != 0.0, "random_noise_shift"),
        (train.random_noise_multiplier != 0.0, "random_noise_multiplier"),
        (train.min_denoising_steps != 0, "min_denoising_steps"),
    ];
    for (_, key) in keys.into_iter().filter(|(on, _)| *on) {
        cx.warn_at(
            &format!("train.{key}"),
            "has no effect: without `datasets`, a slider samples its noisy latents from plain noise",
        );
    }
}

/// Warns of keys whose losses and noise a slider does not use.
fn warn_of_ineffective(train: &TrainConfig, cx: &mut ReadContext) {
    let keys = [
        (train.loss_type != LossType::Mse, "loss_type"),
        (train.do_cfg, "do_cfg"),
        (train.do_random_cfg, "do_random_cfg"),
        (train.diff_output_preservation, "diff_output_preservation"),
        (train.blank_prompt_preservation, "blank_prompt_preservation"),
        (train.inverted_mask_prior, "inverted_mask_prior"),
        (train.do_prior_divergence, "do_prior_divergence"),
        (train.do_guidance_loss, "do_guidance_loss"),
        (train.do_differential_guidance, "do_differential_guidance"),
        (train.t0_loss_target, "t0_loss_target"),
        (train.do_fft_loss, "do_fft_loss"),
        (train.do_signal_amplification, "do_signal_amplification"),
        (train.match_noise_norm, "match_noise_norm"),
        (train.target_norm_std, "target_norm_std"),
        (train.max_loss.is_some(), "max_loss"),
        (train.pred_scaler != 1.0, "pred_scaler"),
        (train.noisy_latent_multiplier != 1.0, "noisy_latent_multiplier"),
        (train.target_noise_multiplier != 1.0, "target_noise_multiplier"),
        (train.timestep_type == TimestepType::NextSample, "timestep_type"),
    ];
    for (_, key) in keys.into_iter().filter(|(on, _)| *on) {
        cx.warn_at(
            &format!("train.{key}"),
            "has no effect on a slider, which compares predictions with those of the model without it",
        );
    }
}

impl ReferenceDataset {
    /// The pairs as a data set: its images are the positive ones. Its control images are the negative ones; it has none where both
    /// are halves of one image (`pair_folder`).
    #[must_use]
    pub fn as_dataset(&self) -> DatasetConfig {
        let folder = |path: &Option<String>| path.clone().filter(|path| !path.is_empty());
        let (positive, negative) = (folder(&self.pos_folder), folder(&self.neg_folder));
        let (images, controls) = match (positive, negative) {
            (Some(positive), Some(negative)) => (Some(positive), vec![negative]),
            _ => (folder(&self.pair_folder), Vec::new()),
        };
        DatasetConfig {
            folder_path: images,
            control_path: OneOrMany(controls),
            full_size_control_images: true,
            resolution: OneOrMany(vec![self.size]),
            default_caption: Some(self.target_class.clone()),
            ..DatasetConfig::default()
        }
    }

    /// LoRA strengths of the positive and of the negative images, the second with its sign.
    #[must_use]
    pub fn strengths(&self) -> [f64; 2] {
        [
            self.pos_weight.unwrap_or(self.network_weight),
            -self.neg_weight.unwrap_or(self.network_weight),
        ]
    }
}
