//! Checks of slider trainings: what each type needs, and keys of other trainings that have no effect.

use super::dataset::DatasetConfig;
use super::limits::{MAX_DATASETS, MAX_SLIDER_PROMPTS};
use super::objective::{LossTarget, LossType};
use super::process::TrainerProcess;
use super::process_type::ProcessType;
use super::sampler::SamplerName;
use super::schema::ReadContext;
use super::slider::{ReferenceDataset, SliderConfig};
use super::train::{TimestepType, TrainConfig};
use super::values::{ImageSize, OneOrMany};

/// More sampling steps than this before each training step of `type: slider` are probably the default, not a choice.
const MANY_STEPS: u32 = 100;
/// Pixels of latents that are sampled.
const MAX_SAMPLED_PIXELS: u64 = 4096 * 4096;
/// What a negative weight does.
const NEGATIVE: &str = "is negative: the adapter is trained away from the target, without a limit";

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
        cx.missing_at(
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
    warn_of_snr(process, cx);
    warn_of_ineffective_datasets(process, cx);
    let slider = process.slider.clone().unwrap_or_default();
    warn_of_other_kinds(process, &slider, cx);
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
        check_sampling(&process.train, process.model.arch.name.is_flow(), cx);
        check_sizes(&slider, cx);
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
    if slider.guidance_strength == 0.0 {
        cx.error_at(
            "slider.guidance_strength",
            "must not be 0: the slider would learn nothing",
        );
    }
}

fn check_targets(slider: &SliderConfig, cx: &mut ReadContext) {
    if slider.targets.is_empty() && !cx.is_reported("slider") {
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
        if target.weight == 0.0 {
            cx.error_at(
                &format!("{key}.weight"),
                "must not be 0: nothing would be learned from this pair",
            );
        } else if target.weight < 0.0 {
            cx.warn_at(&format!("{key}.weight"), NEGATIVE);
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
        cx.missing_at(
            "slider.datasets",
            "needs at least one set of image pairs: `- {pos_folder: …, neg_folder: …}` or `- {pair_folder: …}`",
        );
    }
    if process.kind == ProcessType::UltimateSlider {
        if slider.img_loss_weight == 0.0 && slider.cfg_loss_weight == 0.0 {
            cx.error_at(
                "slider",
                "`img_loss_weight` and `cfg_loss_weight` are both 0: nothing would be learned",
            );
        }
        for (weight, key) in [
            (slider.img_loss_weight, "slider.img_loss_weight"),
            (slider.cfg_loss_weight, "slider.cfg_loss_weight"),
        ] {
            if weight < 0.0 {
                cx.warn_at(key, NEGATIVE);
            }
        }
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
            (true, false, true) | (false, true, true) => cx.error_at(
                &key,
                "has a `pair_folder` and one of `pos_folder` and `neg_folder`: keep the pair folder alone, or the two others",
            ),
            _ => cx.error_at(
                &key,
                "needs `pos_folder` and `neg_folder`, or a `pair_folder` of images with the negative half on the left",
            ),
        }
        if is_set(&dataset.pos_folder) && dataset.pos_folder == dataset.neg_folder {
            cx.error_at(
                &format!("{key}.neg_folder"),
                "is the same as `pos_folder`: the slider learns what the pairs differ in",
            );
        }
        if dataset.strengths() == [0.0, 0.0] {
            cx.error_at(
                &key,
                "its strengths are 0 (`network_weight`): the adapter would do nothing while it is trained",
            );
        }
    }
}

/// The most sampling steps from which all samplers' noise levels are finite and in the table.
fn most_sampling_steps(train: &TrainConfig, is_flow: bool) -> u32 {
    let table = train.num_train_timesteps;
    match train.noise_scheduler {
        _ if is_flow => table,
        SamplerName::Lcm => 50.min(table),
        // Of nearly equal noise levels the second order divides by nearly nothing.
        SamplerName::DpmSolver
        | SamplerName::DpmSolverPp
        | SamplerName::KDpmSolver
        | SamplerName::KDpmSolverPp
        | SamplerName::DpmSingle => table / 2,
        _ => table.saturating_sub(1),
    }
}

/// Checks the number of sampling steps from which the noise level of each training step is drawn.
fn check_sampling(train: &TrainConfig, is_flow: bool, cx: &mut ReadContext) {
    let (steps, max) = (train.max_denoising_steps, most_sampling_steps(train, is_flow));
    if steps < 3 || steps > max {
        let sampler = train.noise_scheduler;
        cx.error_at(
            "train.max_denoising_steps",
            format!("expected 3 to {max} with `noise_scheduler: {sampler}`, found {steps}: a slider without images samples with this many steps, and trains after some of them"),
        );
    } else if steps > MANY_STEPS {
        cx.warn_at(
            "train.max_denoising_steps",
            format!("each training step first samples up to {steps} steps, which takes long: 40 are usual"),
        );
    }
}

/// Checks the sizes of the latents that are sampled.
fn check_sizes(slider: &SliderConfig, cx: &mut ReadContext) {
    for (index, ImageSize(width, height)) in slider.resolutions.iter().enumerate().take(MAX_SLIDER_PROMPTS) {
        let key = format!("slider.resolutions[{index}]");
        if u64::from(*width) * u64::from(*height) > MAX_SAMPLED_PIXELS {
            cx.error_at(
                &key,
                format!("{width} x {height} is too large: expected at most {MAX_SAMPLED_PIXELS} pixels (4096 x 4096)"),
            );
        } else if width % 8 != 0 || height % 8 != 0 {
            cx.warn_at(
                &key,
                format!("sides are rounded down to multiples of 8 (of 16 for transformers): {width} x {height} becomes smaller"),
            );
        }
    }
}

/// Warns of keys of other kinds of sliders.
fn warn_of_other_kinds(process: &TrainerProcess, slider: &SliderConfig, cx: &mut ReadContext) {
    let kind = process.kind;
    let default = SliderConfig::default();
    let (concept, pairs) = (kind == ProcessType::ConceptSlider, kind.uses_image_pairs());
    let (prompts, ultimate) = (kind == ProcessType::Slider, kind == ProcessType::UltimateSlider);
    let keys = [
        (!slider.targets.is_empty() && !kind.uses_slider_targets(), "targets"),
        (!slider.anchors.is_empty() && !prompts, "anchors"),
        (
            slider.resolutions != default.resolutions && !process.samples_for_slider(),
            "resolutions",
        ),
        (!slider.datasets.is_empty() && !pairs, "datasets"),
        (
            slider.guidance_strength != default.guidance_strength && !concept,
            "guidance_strength",
        ),
        (
            slider.anchor_strength != default.anchor_strength && !concept,
            "anchor_strength",
        ),
        (!slider.positive_prompt.is_empty() && !concept, "positive_prompt"),
        (!slider.negative_prompt.is_empty() && !concept, "negative_prompt"),
        (!slider.target_class.is_empty() && !concept, "target_class"),
        (slider.anchor_class.is_some() && !concept, "anchor_class"),
        (slider.weight_jitter != 0.0 && !pairs, "weight_jitter"),
        (
            slider.img_loss_weight != default.img_loss_weight && !ultimate,
            "img_loss_weight",
        ),
        (
            slider.cfg_loss_weight != default.cfg_loss_weight && !ultimate,
            "cfg_loss_weight",
        ),
        (!slider.batch_full_slide && !prompts && !ultimate, "batch_full_slide"),
    ];
    for (_, key) in keys.into_iter().filter(|(on, _)| *on) {
        let why = match key == "resolutions" && prompts {
            true => "has no effect: the images of `datasets` have their own sizes".to_owned(),
            false => format!("has no effect with `type: {kind}` (docs/sliders.md has the keys of each type)"),
        };
        cx.warn_at(&format!("slider.{key}"), why);
    }
}

/// Warns of keys of data sets that a slider does not use.
fn warn_of_ineffective_datasets(process: &TrainerProcess, cx: &mut ReadContext) {
    for (index, dataset) in process.datasets.iter().enumerate().take(MAX_DATASETS) {
        let keys = [
            (dataset.mask_path.is_some(), "mask_path"),
            (dataset.alpha_mask, "alpha_mask"),
            (dataset.mask_type().is_some(), "controls"),
            (dataset.prior_reg, "prior_reg"),
            (dataset.is_reg, "is_reg"),
            (*dataset.network_weight != 1.0, "network_weight"),
            (dataset.loss_multiplier != 1.0, "loss_multiplier"),
            (*dataset.caption_dropout_rate != 0.0, "caption_dropout_rate"),
            (*dataset.token_dropout_rate != 0.0, "token_dropout_rate"),
            (dataset.trigger_word.is_some(), "trigger_word"),
        ];
        for (_, key) in keys.into_iter().filter(|(on, _)| *on) {
            cx.warn_at(
                &format!("datasets[{index}].{key}"),
                "has no effect on a slider, which has prompts and losses of its own (docs/sliders.md)",
            );
        }
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

/// The keys of `train` with a value for losses and noise that neither a slider nor paired images use.
pub(super) fn keys_of_other_losses(train: &TrainConfig) -> Vec<&'static str> {
    let keys = [
        (train.loss_type != LossType::Mse, "loss_type"),
        (train.loss_target != LossTarget::Noise, "loss_target"),
        (train.correct_pred_norm, "correct_pred_norm"),
        (train.learnable_snr_gos, "learnable_snr_gos"),
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
        (
            train.latent_feature_extractor_path.is_some(),
            "latent_feature_extractor_path",
        ),
        (
            train.diffusion_feature_extractor_path.is_some(),
            "diffusion_feature_extractor_path",
        ),
        (train.do_signal_amplification, "do_signal_amplification"),
        (train.match_noise_norm, "match_noise_norm"),
        (train.target_norm_std, "target_norm_std"),
        (train.max_loss.is_some(), "max_loss"),
        (train.pred_scaler != 1.0, "pred_scaler"),
        (train.noisy_latent_multiplier != 1.0, "noisy_latent_multiplier"),
        (train.target_noise_multiplier != 1.0, "target_noise_multiplier"),
        (train.timestep_type == TimestepType::NextSample, "timestep_type"),
    ];
    keys.into_iter().filter_map(|(on, key)| on.then_some(key)).collect()
}

/// Warns of keys whose losses and noise a slider does not use.
fn warn_of_ineffective(train: &TrainConfig, cx: &mut ReadContext) {
    for key in keys_of_other_losses(train) {
        cx.warn_at(
            &format!("train.{key}"),
            "has no effect on a slider, which has losses of its own (docs/sliders.md)",
        );
    }
}

/// Warns of weights by the signal-to-noise ratio that a slider does not use.
fn warn_of_snr(process: &TrainerProcess, cx: &mut ReadContext) {
    let train = &process.train;
    if train.snr_gamma.is_some_and(|gamma| gamma > 0.0) {
        cx.warn_at(
            "train.snr_gamma",
            "has no effect on a slider, as in ai-toolkit: only `min_snr_gamma` weighs the losses of sliders",
        );
    }
    let is_concept = process.kind == ProcessType::ConceptSlider;
    if is_concept && train.min_snr_gamma.is_some_and(|gamma| gamma > 0.0) {
        cx.warn_at(
            "train.min_snr_gamma",
            "has no effect on `type: concept_slider`, as in ai-toolkit: its losses have no such weight",
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
            // Their captions are prompts as they are.
            sd_scripts_captions: true,
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
