//! Checks for combinations of keys that can never work, in this or a later release.

use super::arch::ArchName;
use super::dataset::DatasetConfig;
use super::limits::MAX_DATASETS;
use super::objective::{LossTarget, LossType};
use super::process::{Img2ImgProcess, TrainerProcess};
use super::process_type::ProcessType;
use super::repository::is_repository;
use super::schema::ReadContext;

impl TrainerProcess {
    /// Checks the keys of a training process against each other.
    pub(super) fn check_combinations(&self, cx: &mut ReadContext) {
        let train = &self.train;
        let model = &self.model;
        let has_trigger =
            self.trigger_word.is_some() || self.datasets.iter().any(|dataset| dataset.trigger_word.is_some());
        if self.save.push_to_hub {
            match self.save.hf_repo_id.as_deref() {
                None => cx.error_at(
                    "save.push_to_hub",
                    "needs `save.hf_repo_id`, the repository to upload to, such as `me/my_lora`",
                ),
                Some(repo) if !is_repository(repo) => cx.error_at(
                    "save.hf_repo_id",
                    format!(
                        "`{}` is not the name of a repository: expected USER/NAME or ORG/NAME, such as `me/my_lora`",
                        repo.escape_debug()
                    ),
                ),
                Some(_) => {}
            }
        }
        // A textual inversion trains its word, and an adapter or a decorator is trained, whatever these say.
        let trains_other = self.embedding.is_some() || self.trains_beside_model();
        if !train.train_unet && !train.train_text_encoder && !trains_other {
            cx.error_at(
                "train.train_unet",
                "is off, and so is `train_text_encoder`: there is nothing to train",
            );
        }
        if train.train_text_encoder && self.trains_whole_model() && model.arch.name.takes_parts() {
            cx.error_at(
                "train.train_text_encoder",
                format!(
                    "cannot be used in a full fine-tune of `arch: {}`, which trains the transformer alone; train text encoders with a \
                     LoRA (a `network` section)",
                    model.arch
                ),
            );
        }
        if train.unload_text_encoder && matches!(model.arch.name, ArchName::QwenImageEdit | ArchName::BooguImageEdit) {
            cx.error_at(
                "train.unload_text_encoder",
                format!(
                    "cannot be used with `{}`, whose text encoder sees each control image",
                    model.arch.name
                ),
            );
        }
        if train.diff_output_preservation {
            if !has_trigger {
                cx.error_at("train.diff_output_preservation", "needs a `trigger_word`");
            }
            if self.network.is_none() {
                cx.error_at("train.diff_output_preservation", "needs a `network`");
            }
        }
        let uses_base = [
            (train.inverted_mask_prior, "train.inverted_mask_prior".to_owned()),
            (train.do_prior_divergence, "train.do_prior_divergence".to_owned()),
            (train.correct_pred_norm, "train.correct_pred_norm".to_owned()),
        ];
        let sets = self.datasets.iter().enumerate();
        let of_sets = sets.map(|(index, set)| (set.prior_reg, format!("datasets[{index}].prior_reg")));
        for (on, key) in uses_base.into_iter().chain(of_sets) {
            if on && (self.trains_whole_model() || self.trains_beside_model()) {
                cx.error_at(
                    &key,
                    "needs a `network`: it compares with what the model predicts without it",
                );
            }
        }
        let has_masks = |set: &DatasetConfig| set.mask_key().is_some();
        if train.inverted_mask_prior && !self.kind.is_slider() && !self.datasets.iter().any(has_masks) {
            cx.warn_at(
                "train.inverted_mask_prior",
                "has no effect: no data set has masks (`mask_path`, `alpha_mask`, or `mask` in `controls`)",
            );
        }
        self.check_merge(cx);
        check_model_kind(self, cx);
        check_images(self, cx);
        check_prompts(self, cx);
        check_targets(self, cx);
        check_compared_images(self, cx);
        self.check_paired_images(cx);
        self.check_feature_extractor(cx);
        if model.lora_path.is_some() && self.trains_whole_model() {
            cx.error_at(
                "model.lora_path",
                "needs a `network`: a full fine-tune would not save this LoRA; merge it into the model first",
            );
        }
        if model.accuracy_recovery_adapter.is_some() && self.trains_whole_model() {
            cx.error_at(
                "model.accuracy_recovery_adapter",
                "this adapter, which `model.qtype` can name too, needs a `network`: a full fine-tune does not quantise the weights that it trains",
            );
        }
        if model.inference_lora_path.is_some() && self.trains_whole_model() {
            cx.error_at(
                "model.inference_lora_path",
                "needs a `network`: samples of a full fine-tune use the trained weights alone",
            );
        }
        if train.blank_prompt_preservation && self.network.is_none() {
            cx.error_at("train.blank_prompt_preservation", "needs a `network`");
        }
        let cached = self
            .datasets
            .iter()
            .filter(|dataset| dataset.cache_text_embeddings)
            .count();
        if !train.cache_text_embeddings && cached != 0 && cached != self.datasets.len() {
            cx.error_at(
                "datasets",
                "`cache_text_embeddings` must be on for all data sets or for none",
            );
        }
        if cached != 0 && train.train_text_encoder {
            cx.error_at(
                "train.train_text_encoder",
                "cannot be used together with `cache_text_embeddings`",
            );
        }
        let bucketed = self.datasets.iter().filter(|dataset| dataset.buckets).count();
        if bucketed != 0 && bucketed != self.datasets.len() {
            cx.error_at("datasets", "`buckets` must be on for all data sets or for none");
        }
        let needs_data = matches!(
            self.kind,
            ProcessType::SdTrainer
                | ProcessType::DiffusionTrainer
                | ProcessType::UiTrainer
                | ProcessType::TextualInversionTrainer
                | ProcessType::ConceptSlider
        );
        if needs_data && self.datasets.is_empty() {
            cx.missing_at(
                "datasets",
                "a training needs at least one data set (`- folder_path: …`)",
            );
        }
        if needs_data {
            check_datasets(&self.datasets, cx);
        }
    }
}

/// Warns of options that another one makes ineffective, and refuses those that compare unlike things.
fn check_targets(process: &TrainerProcess, cx: &mut ReadContext) {
    let train = &process.train;
    let sets = || process.datasets.iter().enumerate().filter(|(_, set)| set.prior_reg);
    let of_sets = || sets().map(|(index, _)| format!("datasets[{index}].prior_reg"));
    if train.t0_loss_target {
        for (on, key) in [
            (train.inverted_mask_prior, "inverted_mask_prior"),
            (train.do_prior_divergence, "do_prior_divergence"),
        ] {
            if on {
                cx.error_at(
                    &format!("train.{key}"),
                    "cannot be used together with `t0_loss_target`: one compares velocities, the other images",
                );
            }
        }
        let ineffective = [
            (train.do_guidance_loss, "do_guidance_loss"),
            (train.do_differential_guidance, "do_differential_guidance"),
            (train.do_signal_amplification, "do_signal_amplification"),
            (train.target_noise_multiplier != 1.0, "target_noise_multiplier"),
        ];
        let of_train = ineffective.into_iter().filter(|(on, _)| *on);
        for key in of_train.map(|(_, key)| format!("train.{key}")).chain(of_sets()) {
            cx.warn_at(
                &key,
                "has no effect together with `t0_loss_target`, whose target is the image",
            );
        }
        return;
    }
    if train.diff_output_preservation || train.blank_prompt_preservation {
        let of_train = Some("train.do_prior_divergence".to_owned());
        // Batches with masks are compared with the prediction without the adapter anyway.
        let of_train = of_train.filter(|_| train.do_prior_divergence && !train.inverted_mask_prior);
        for key in of_train.into_iter().chain(of_sets()) {
            cx.warn_at(
                &key,
                "has no effect together with a preservation loss, as in ai-toolkit",
            );
        }
    } else if train.do_prior_divergence {
        for key in of_sets() {
            cx.warn_at(&key, "has no effect together with `train.do_prior_divergence`");
        }
    }
}

/// Checks losses that compare images, and targets that need `augmentations` or the prediction without the adapter.
fn check_compared_images(process: &TrainerProcess, cx: &mut ReadContext) {
    let train = &process.train;
    if train.correct_pred_norm && (train.diff_output_preservation || train.blank_prompt_preservation) {
        cx.warn_at(
            "train.correct_pred_norm",
            "has no effect together with a preservation loss, as in ai-toolkit",
        );
    }
    let uses_source = matches!(train.loss_target, LossTarget::Source | LossTarget::Unaugmented);
    let ignores_base = train.correct_pred_norm || uses_source || train.loss_type == LossType::Stepped;
    let sets = process.datasets.iter().enumerate();
    for (index, _) in sets.filter(|(_, set)| set.prior_reg && ignores_base) {
        cx.warn_at(
            &format!("datasets[{index}].prior_reg"),
            "has no effect together with `correct_pred_norm`, `loss_type: stepped` and `loss_target: source` or `unaugmented`, which \
             have other targets",
        );
    }
    let is_augmented = |set: &DatasetConfig| set.augmentations.as_ref().is_some_and(|list| !list.is_empty());
    let needs_augmentations = matches!(
        train.loss_target,
        LossTarget::Unaugmented | LossTarget::DifferentialNoise
    );
    if needs_augmentations && !process.kind.is_slider() && !process.datasets.iter().any(is_augmented) {
        cx.error_at(
            "train.loss_target",
            format!(
                "`{}` compares with the images before their `augmentations`, which no data set has: add them or use `noise`",
                train.loss_target
            ),
        );
    }
    let (key, name) = match (uses_source, train.loss_type) {
        (true, _) => ("loss_target", train.loss_target.to_string()),
        (false, LossType::Stepped) => ("loss_type", train.loss_type.to_string()),
        (false, _) => return,
    };
    if train.t0_loss_target {
        cx.error_at(
            "train.t0_loss_target",
            format!("cannot be used together with `{key}: {name}`: each says which images are compared"),
        );
    }
    let targets = [
        (train.do_guidance_loss, "do_guidance_loss"),
        (train.do_differential_guidance, "do_differential_guidance"),
        (train.do_signal_amplification, "do_signal_amplification"),
        (train.correct_pred_norm, "correct_pred_norm"),
    ];
    let of_source = [
        (train.target_noise_multiplier != 1.0, "target_noise_multiplier"),
        (train.loss_type != LossType::Mse, "loss_type"),
        (train.do_fft_loss, "do_fft_loss"),
        (train.linear_timesteps || train.linear_timesteps2, "linear_timesteps"),
    ];
    let of_source = of_source.into_iter().filter(|_| uses_source);
    for (_, ineffective) in targets.into_iter().chain(of_source).filter(|(on, _)| *on) {
        cx.warn_at(
            &format!("train.{ineffective}"),
            format!("has no effect together with `{key}: {name}`, whose target is the image"),
        );
    }
}

/// Checks what short captions exclude, and warns of a dropout of prompts that has no effect.
fn check_prompts(process: &TrainerProcess, cx: &mut ReadContext) {
    let train = &process.train;
    if let Some((key, why)) = process.excluded_by_short_captions() {
        cx.error_at(&format!("train.{key}"), why);
    }
    if train.short_and_long_captions_encoder_split && process.model.arch.name != ArchName::Sdxl {
        cx.warn_at(
            "train.short_and_long_captions_encoder_split",
            "has no effect: only SDXL has two text encoders that read a caption each",
        );
    }
    if train.prompt_dropout_prob == 0.0 {
        return;
    }
    if train.diff_output_preservation && process.drops_prompts() {
        cx.error_at(
            "train.prompt_dropout_prob",
            "is not supported together with `diff_output_preservation`; use a data set's `caption_dropout_rate`",
        );
    } else if !process.drops_prompts() {
        cx.warn_at(
            "train.prompt_dropout_prob",
            match process.encodes_captions_first() {
                true => "has no effect, as in ai-toolkit: captions are encoded before the training".to_owned(),
                false => format!(
                    "has no effect, as in ai-toolkit: a `{}` has no such dropout",
                    process.model.arch.name
                ),
            },
        );
    }
}

/// Warns of options of images that have no effect.
fn check_images(process: &TrainerProcess, cx: &mut ReadContext) {
    let train = &process.train;
    if train.img_multiplier > 1.0 {
        cx.warn_at(
            "train.img_multiplier",
            "has no effect above 1, as in ai-toolkit, which only reduces the contrast",
        );
    } else if train.img_multiplier < 0.0 {
        cx.error_at("train.img_multiplier", "expected 0 to 1");
    }
    if !process.datasets.iter().any(DatasetConfig::caches_latents) {
        return;
    }
    for (on, key) in [
        (train.standardize_images, "standardize_images"),
        (train.img_multiplier < 1.0, "img_multiplier"),
    ] {
        if on {
            cx.warn_at(
                &format!("train.{key}"),
                "has no effect on data sets with `cache_latents` or `cache_latents_to_disk`, as in ai-toolkit",
            );
        }
    }
}

/// Checks that options of flow models, and of latents with 4 channels, are used with such models.
fn check_model_kind(process: &TrainerProcess, cx: &mut ReadContext) {
    let (train, arch) = (&process.train, process.model.arch.name);
    let extractor = process.feature_extractor();
    let flow_only = [
        (
            extractor.is_some(),
            extractor.map_or("latent_feature_extractor_path", |source| source.key),
        ),
        (train.t0_loss_target, "t0_loss_target"),
        (train.do_fft_loss, "do_fft_loss"),
        (train.do_signal_amplification, "do_signal_amplification"),
        (
            matches!(train.loss_type, LossType::Wavelet | LossType::Stepped),
            "loss_type",
        ),
    ];
    for (on, key) in flow_only {
        if on && !arch.is_flow() {
            let what = match key {
                "loss_type" => format!("`{}`", train.loss_type),
                _ => "this".to_owned(),
            };
            cx.error_at(
                &format!("train.{key}"),
                format!("{what} compares velocities of flow matching, which `{arch}` does not predict"),
            );
        }
    }
    if process.model.uses_true_cfg() && train.do_guidance_loss {
        cx.error_at(
            "model.use_flux_cfg",
            "cannot be used together with `train.do_guidance_loss`",
        );
    }
    if let Some(step) = train.start_step.filter(|step| *step >= train.steps) {
        cx.error_at(
            "train.start_step",
            format!(
                "step {step} is not before the end of the training, which has {} steps (`train.steps`)",
                train.steps
            ),
        );
    }
    if process.model.is_v_pred {
        for (on, key) in [
            (train.correct_pred_norm, "correct_pred_norm"),
            (
                matches!(train.loss_target, LossTarget::Source | LossTarget::Unaugmented),
                "loss_target",
            ),
        ] {
            if on && !process.kind.is_slider() {
                cx.error_at(
                    &format!("train.{key}"),
                    "is for models that predict the noise, and `model.is_v_pred` says that this one predicts the velocity; remove one of them",
                );
            }
        }
    }
    if train.learnable_snr_gos && arch.is_flow() {
        cx.error_at(
            "train.learnable_snr_gos",
            format!("needs signal-to-noise ratios, which `{arch}` does not have: it is trained by flow matching; remove the key"),
        );
    }
    let weighs_uncapped = train.snr_gamma.is_some_and(|gamma| gamma > 1e-6);
    if weighs_uncapped && train.min_snr_gamma.is_some() && !train.learnable_snr_gos && !process.kind.is_slider() {
        cx.warn_at(
            "train.min_snr_gamma",
            "has no effect together with `snr_gamma`, as in ai-toolkit",
        );
    }
    if train.learnable_snr_gos && !process.kind.is_slider() {
        for (on, key) in [
            (train.min_snr_gamma.is_some(), "min_snr_gamma"),
            (train.snr_gamma.is_some(), "snr_gamma"),
            (train.debiased_estimation_loss, "debiased_estimation_loss"),
        ] {
            if on {
                cx.warn_at(
                    &format!("train.{key}"),
                    "has no effect together with `learnable_snr_gos`, as in ai-toolkit",
                );
            }
        }
    }
    if train.correct_pred_norm && arch.is_flow() {
        cx.error_at(
            "train.correct_pred_norm",
            format!(
                "corrects a prediction of the noise, and `{arch}` predicts velocities: in ai-toolkit it would train the model to predict \
                 the noise; remove the key"
            ),
        );
    }
    if train.standardize_latents && arch.is_flow() {
        cx.error_at(
            "train.standardize_latents",
            format!(
                "the tables of means and deviations are those of Stable Diffusion and SDXL; `{arch}` has other latents"
            ),
        );
    }
}

impl TrainerProcess {
    /// Whether a model with a guidance embedding is trained without it.
    #[must_use]
    pub fn bypasses_guidance_embedding(&self) -> bool {
        self.train.bypass_guidance_embedding || self.model.uses_true_cfg()
    }

    /// Whether every caption is encoded before the training.
    pub(super) fn encodes_captions_first(&self) -> bool {
        let train = &self.train;
        train.unload_text_encoder
            || train.cache_text_embeddings
            || self.datasets.iter().any(|dataset| dataset.cache_text_embeddings)
    }

    /// Whether `train.prompt_dropout_prob` empties prompts. In ai-toolkit, only these models have it, and not with captions that are
    /// encoded before the training.
    #[must_use]
    pub fn drops_prompts(&self) -> bool {
        let has_dropout = matches!(
            self.model.arch.name,
            ArchName::Sd1 | ArchName::Sd2 | ArchName::Sdxl | ArchName::Flux
        );
        self.train.prompt_dropout_prob > 0.0 && has_dropout && !self.kind.is_slider() && !self.encodes_captions_first()
    }

    /// The key of `train` that cannot be used with short captions, and why, if there is one.
    #[must_use]
    pub fn excluded_by_short_captions(&self) -> Option<(&'static str, &'static str)> {
        let train = &self.train;
        let (doubles, splits) = (
            train.short_and_long_captions,
            train.short_and_long_captions_encoder_split,
        );
        let key = match (doubles, splits) {
            (true, _) => "short_and_long_captions",
            (false, true) => "short_and_long_captions_encoder_split",
            (false, false) => return None,
        };
        let why = if doubles && splits {
            "cannot be used together with `short_and_long_captions_encoder_split`"
        } else if self.encodes_captions_first() {
            "cannot be used together with `cache_text_embeddings` or `unload_text_encoder`; it does not work in ai-toolkit either"
        } else if train.diff_output_preservation {
            "cannot be used together with `diff_output_preservation`; it does not work in ai-toolkit either"
        } else if self.kind.is_slider() {
            "cannot be used in a slider, whose prompts are its own"
        } else {
            return None;
        };
        Some((key, why))
    }
}

impl Img2ImgProcess {
    /// Checks that every data set has a path.
    pub(super) fn check_dataset_paths(&self, cx: &mut ReadContext) {
        check_datasets(&self.datasets, cx);
        for (index, dataset) in self.datasets.iter().enumerate() {
            let listed = dataset.augmentations.as_ref().is_some_and(|list| !list.is_empty());
            for (on, key) in [
                (!dataset.augments.is_empty(), "augments"),
                (listed, "augmentations"),
                (dataset.standardize_images, "standardize_images"),
                (dataset.random_crop && !dataset.buckets, "random_crop"),
            ] {
                if on {
                    cx.error_at(
                        &format!("datasets[{index}].{key}"),
                        "is not supported for the images of `batch_img2img`, which are used as they are",
                    );
                }
            }
        }
    }
}

/// Checks that every data set has a path.
fn check_datasets(datasets: &[DatasetConfig], cx: &mut ReadContext) {
    cx.check_item_count("datasets", datasets.len(), MAX_DATASETS);
    for (index, dataset) in datasets.iter().enumerate() {
        let is_unread = |key: &str| cx.is_reported(&format!("datasets[{index}].{key}"));
        if dataset.path().is_none() && !is_unread("folder_path") && !is_unread("dataset_path") {
            cx.error_at(
                &format!("datasets[{index}]"),
                "a data set needs `folder_path` or `dataset_path`",
            );
        }
    }
}
