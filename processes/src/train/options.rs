//! Converts the config to the engine's types.

use super::super::caption_rules::caption_rules;
use super::super::context::Context;
use super::super::run_folder::{RunFolder, SAMPLES};
use super::prompts::splits_captions;
use super::sliders::slider;
use crate::data::{
    Augmentations, BuiltInAugmentation, CaptionRules, ControlOptions, ControlRole, ControlSource, ControlsBeside,
    DatasetOptions, ImageStatistics, MaskOptions, MaskSource, SameFolderControlOptions,
};
use crate::error::{EngineError, Result};
use crate::families;
use crate::image_adapters;
use crate::rng::TorchGenerator;
use crate::training::{
    ChannelStatistics, GuidanceLoss, LatentOptions, LossKind, LossOptions, NoiseLevelPreference, NoiseOptions,
    PixelOptions, SnrWeighting, TrainingCfg, X0Loss,
};
use aitk_common::job::arch::ArchName;
use aitk_common::job::augmentation::read_augmentations;
use aitk_common::job::controls::ControlType;
use aitk_common::job::dataset::DatasetConfig;
use aitk_common::job::limits::{MAX_DECORATOR_TOKENS, MAX_EMBEDDING_VECTORS};
use aitk_common::job::process::{ProcessType, TrainerProcess};
use aitk_common::job::train::{ContentOrStyle, GuidanceLossSchedule, LossTarget, LossType};
use aitk_common::job::values::ImageSize;

/// Checks that the engine can train what the config says. Jobs are checked before they are accepted; this protects
/// against specs from other sources.
pub(super) fn check_supported(process: &TrainerProcess, job: &str) -> Result<()> {
    let unsupported = |what: String| Err(EngineError::Unsupported(what));
    let arch = process.model.arch.name;
    families::find(arch)?;
    let control_key = |dataset: &DatasetConfig| match dataset.control_path.is_empty() {
        true => dataset.condition_type().map(|_| "controls"),
        false => Some("control_path"),
    };
    if let Some(key) = process
        .datasets
        .iter()
        .find_map(control_key)
        .filter(|_| !process.takes_control_images())
    {
        return Err(EngineError::bad_input(format!(
            "datasets: {key}: `arch: {arch}` takes no control images; remove the key, or train FLUX.1 Kontext (`arch: flux_kontext`) or an \
             `adapter`"
        )));
    }
    slider::check(process)?;
    check_embedding(process)?;
    check_adapter(process)?;
    check_decorator(process)?;
    if process.trains_whole_model() && process.model.lora_path.is_some() {
        return unsupported(
            "model.lora_path: the saves of a full fine-tune would not include this LoRA; train with a `network` section, or \
             start from a model into which the LoRA was merged"
                .into(),
        );
    }
    if process.trains_whole_model() && process.model.inference_lora_path.is_some() {
        return unsupported(
            "model.inference_lora_path: samples of a full fine-tune use the trained weights alone; remove this key"
                .into(),
        );
    }
    if process.saves_folders() && job == SAMPLES {
        return Err(EngineError::bad_input(format!(
            "config.name: a model that is saved as a folder cannot be called `{SAMPLES}`: the run folder has its sample images there"
        )));
    }
    let trains_other = process.embedding.is_some() || process.trains_beside_model();
    if !process.train.train_text_encoder && !process.train.train_unet && !trains_other {
        return Err(EngineError::bad_input(
            "`train.train_unet` and `train.train_text_encoder` are both false: there is nothing to train",
        ));
    }
    if process.train.train_text_encoder && (process.train.unload_text_encoder || caches_captions(process)) {
        return Err(EngineError::bad_input(
            "`train.train_text_encoder` cannot be used together with `cache_text_embeddings` or `train.unload_text_encoder`: they \
             remove the text encoders from memory before the training; turn one of them off",
        ));
    }
    if process.train.loss_type == LossType::MeanFlow {
        return unsupported(
            "train.loss_type: `mean_flow` needs the `mean_flow` adapter of ai-toolkit, which is not supported: use `mse`, `mae` or \
             `pseudo_huber`"
                .into(),
        );
    }
    if process.train.learnable_snr_gos && arch.is_flow() {
        return Err(EngineError::bad_input(format!(
            "train.learnable_snr_gos: `arch: {arch}` is trained by flow matching, which has no signal-to-noise ratios; remove the key"
        )));
    }
    if let Some(source) = process.feature_extractor().filter(|_| !arch.is_flow()) {
        return Err(EngineError::bad_input(format!(
            "train.{}: `arch: {arch}` is not trained by flow matching, whose velocities lead to the images that are compared; remove the key",
            source.key
        )));
    }
    if let Some((key, why)) = process.train.excluded_by_swapping() {
        return Err(EngineError::bad_input(format!("train.{key}: {why}")));
    }
    let uses_base = process.train.inverted_mask_prior
        || process.train.do_prior_divergence
        || process.train.correct_pred_norm
        || process.datasets.iter().any(|dataset| dataset.prior_reg);
    if (process.trains_whole_model() || process.trains_beside_model()) && uses_base {
        return Err(EngineError::bad_input(
            "`inverted_mask_prior`, `do_prior_divergence`, `correct_pred_norm` and `prior_reg` need a `network`: they compare with what the model predicts \
             without it",
        ));
    }
    if let Some((key, why)) = process.excluded_by_short_captions() {
        return Err(EngineError::bad_input(format!("train.{key}: {why}")));
    }
    if let Some((key, why)) = process.datasets.iter().find_map(DatasetConfig::excluded_by_random_crop) {
        return Err(EngineError::bad_input(format!("datasets: {key}: {why}")));
    }
    if let Some((key, why)) = process.excluded_by_paired_images().first() {
        return Err(EngineError::bad_input(format!("{key}: {why}")));
    }
    if process.train.gradient_accumulation > 1 && process.train.gradient_accumulation_steps != 1 {
        return Err(EngineError::bad_input(
            "`train.gradient_accumulation` and `train.gradient_accumulation_steps` cannot be used together; remove `train.gradient_accumulation_steps`",
        ));
    }
    Ok(())
}

/// Checks a textual inversion. Jobs are checked before they are accepted; this protects against specs from other sources.
fn check_embedding(process: &TrainerProcess) -> Result<()> {
    let Some(embedding) = &process.embedding else {
        return match process.kind {
            ProcessType::TextualInversionTrainer => Err(EngineError::bad_input(
                "embedding: missing: add `embedding: {trigger: WORD}`, the word that is trained",
            )),
            _ => Ok(()),
        };
    };
    let wrong = |what: &str| Err(EngineError::bad_input(format!("embedding{what}")));
    if process.network.is_some() || process.kind.is_slider() {
        return wrong(": cannot be used together with `network` or a slider");
    }
    if !(1..=MAX_EMBEDDING_VECTORS).contains(&embedding.tokens) {
        return wrong(&format!(".tokens: expected 1 to {MAX_EMBEDDING_VECTORS}"));
    }
    if embedding.trigger.is_empty() || embedding.trigger.chars().any(char::is_whitespace) {
        return wrong(".trigger: expected one word, without blanks");
    }
    Ok(())
}

/// Checks the training of an adapter. Jobs are checked before they are accepted; this protects against specs from other sources.
fn check_adapter(process: &TrainerProcess) -> Result<()> {
    let Some(adapter) = &process.adapter else { return Ok(()) };
    image_adapters::find(adapter.kind)?;
    let wrong = |what: &str| Err(EngineError::bad_input(format!("adapter{what}")));
    if process.network.is_some() || process.embedding.is_some() || process.kind.is_slider() {
        return wrong(": cannot be used together with `network`, `embedding` or a slider");
    }
    if process.train.train_text_encoder {
        return wrong(": cannot be used together with `train.train_text_encoder`");
    }
    if !adapter.train {
        return wrong(".train: is false: set `train: true`");
    }
    let has_control = |set: &DatasetConfig| {
        !set.control_path.is_empty() || set.control_from_same_folder || set.condition_type().is_some()
    };
    match process.datasets.iter().all(has_control) {
        true => Ok(()),
        false => wrong(": every data set needs control images (`control_path`, or `controls`)"),
    }
}

/// Checks the training of a decorator. Jobs are checked before they are accepted; this protects against specs from other sources.
fn check_decorator(process: &TrainerProcess) -> Result<()> {
    let Some(decorator) = &process.decorator else {
        return Ok(());
    };
    let wrong = |what: &str| Err(EngineError::bad_input(format!("decorator{what}")));
    if process.network.is_some() || process.embedding.is_some() || process.adapter.is_some() || process.kind.is_slider()
    {
        return wrong(": cannot be used together with `network`, `embedding`, `adapter` or a slider");
    }
    if process.train.train_text_encoder {
        return wrong(": cannot be used together with `train.train_text_encoder`");
    }
    match (1..=MAX_DECORATOR_TOKENS).contains(&decorator.num_tokens) {
        true => Ok(()),
        false => wrong(&format!(".num_tokens: expected 1 to {MAX_DECORATOR_TOKENS}")),
    }
}

/// Whether every caption is encoded before the training, and so is the same in every epoch.
pub(super) fn caches_captions(process: &TrainerProcess) -> bool {
    process.train.cache_text_embeddings
        || process.datasets.iter().any(|dataset| dataset.cache_text_embeddings)
        // The captions of image pairs are trained on without the text encoder, too.
        || (process.kind.uses_image_pairs() && process.train.unload_text_encoder)
}

/// Converts the data sets, one per resolution.
pub(super) fn dataset_options(process: &TrainerProcess, cx: &Context<'_>) -> Result<Vec<DatasetOptions>> {
    let mut out = Vec::new();
    for dataset in process.split_datasets() {
        let path = dataset
            .path()
            .ok_or_else(|| EngineError::bad_input("datasets: an entry has no `folder_path`"))?;
        let masks = masks(process, &dataset, cx)?;
        let folders = dataset.control_path.iter().map(|path| cx.local_path(path));
        let folders = folders.collect::<Result<Vec<_>>>()?;
        let controls = match (folders.is_empty(), dataset.condition_type()) {
            (false, _) => Some(ControlSource::Folders(folders)),
            (true, kind) => kind.map(|kind| ControlSource::Beside(beside(process, &dataset, kind, cx))),
        };
        let pairs = dataset.unconditional_path.as_ref().map(|path| cx.local_path(path));
        let pairs = pairs.transpose()?;
        out.push(DatasetOptions {
            path: cx.local_path(path)?,
            derived: cx.spec.derived.get(path).cloned(),
            resolution: dataset.resolution.first().copied().unwrap_or(512),
            batch_size: dataset.batch_size.unwrap_or(process.train.batch_size).max(1) as usize,
            repeats: dataset.num_repeats.max(1) as usize,
            caption_ext: dataset.caption_ext.clone(),
            default_caption: match process.kind {
                // Sliders between prompts use no captions, so that none is missing.
                ProcessType::ConceptSlider | ProcessType::Slider => Some(String::new()),
                // An image without a caption is trained with the word alone.
                _ => dataset.default_caption.clone().or_else(|| {
                    let word = process.embedding.as_ref().filter(|_| !dataset.is_reg);
                    word.map(|embedding| embedding.trigger.clone())
                }),
            },
            short_captions: dataset.use_short_captions,
            needs_short_captions: (process.train.short_and_long_captions && !dataset.is_reg)
                || splits_captions(process),
            captions: CaptionRules {
                process_trigger: process.trigger_word.clone(),
                regularisation: dataset.is_reg,
                saturation: process.train.prompt_saturation_chance,
                ..caption_rules(&dataset, cx)?
            },
            regularisation: dataset.is_reg,
            buckets: dataset.buckets,
            size: dataset.size.map(|ImageSize(width, height)| (width, height)),
            square_crop: dataset.square_crop,
            random_crop: dataset.random_crop,
            random_scale: dataset.random_scale,
            scale: dataset.scale,
            flip_x: dataset.flip_x,
            flip_y: dataset.flip_y,
            normalization: dataset.standardize_images.then_some(match process.model.arch.name {
                ArchName::Sdxl => ImageStatistics::SDXL,
                _ => ImageStatistics::DATASET,
            }),
            augmentations: augmentations(&dataset)?,
            masks,
            side_by_side: process.kind.uses_image_pairs() && controls.is_none(),
            guidance: pairs.as_ref().and(dataset.paired_guidance()),
            controls: match pairs {
                Some(folder) => Some(ControlOptions {
                    role: ControlRole::Paired,
                    source: ControlSource::Folders(vec![folder]),
                    background: None,
                    full_size: true,
                }),
                None => controls.map(|source| ControlOptions {
                    role: match process.kind.uses_image_pairs() {
                        true => ControlRole::Negative,
                        false => ControlRole::Condition,
                    },
                    source,
                    background: (!process.kind.uses_image_pairs()).then_some(dataset.control_transparent_color.0),
                    full_size: dataset.full_size_control_images,
                }),
            },
            same_folder_controls: dataset.control_from_same_folder.then_some(SameFolderControlOptions {
                background: dataset.control_transparent_color.0,
                full_size: dataset.full_size_control_images,
            }),
            network_weight: *dataset.network_weight,
            loss_multiplier: dataset.loss_multiplier,
            prior_target: dataset.prior_reg,
            cache_latents: dataset.cache_latents && dataset.caches_latents(),
            cache_latents_to_disk: dataset.cache_latents_to_disk && dataset.caches_latents(),
            stay_in_folder: cx.has_staged_inputs(),
            captions_file: dataset
                .captions_file
                .as_ref()
                .map(|path| cx.local_path(path))
                .transpose()?,
            excluded: dataset.excluded_images.clone(),
        });
    }
    Ok(out)
}

/// Where the files of a type of a data set's `controls` are, and what makes those that are missing.
fn beside(process: &TrainerProcess, dataset: &DatasetConfig, kind: ControlType, cx: &Context<'_>) -> ControlsBeside {
    let derived = dataset.path().and_then(|path| cx.spec.derived.get(path));
    ControlsBeside {
        kind,
        generator: dataset.control_generator(kind).map(str::to_owned),
        cache: Some(match derived {
            Some(folder) => folder.join("_controls"),
            None => RunFolder::path_of(process, cx).join(".aitk/controls"),
        }),
        writes_cache: derived.is_some(),
    }
}

/// Converts the options of the loss masks of a data set.
fn masks(process: &TrainerProcess, dataset: &DatasetConfig, cx: &Context<'_>) -> Result<Option<MaskOptions>> {
    let source = match (&dataset.mask_path, dataset.mask_type()) {
        // The image's alpha channel has precedence over a mask file, as in ai-toolkit.
        _ if dataset.alpha_mask => MaskSource::Alpha,
        (Some(path), _) => MaskSource::Folder(cx.local_path(path)?),
        (None, Some(kind)) => MaskSource::Beside(beside(process, dataset, kind, cx)),
        (None, None) => return Ok(None),
    };
    Ok(Some(MaskOptions {
        source,
        invert: dataset.invert_mask,
        min_value: dataset.mask_min_value,
    }))
}

/// Converts the augmentations of a data set.
fn augmentations(dataset: &DatasetConfig) -> Result<Augmentations> {
    let built_in = dataset.augments.iter().map(|name| {
        BuiltInAugmentation::from_name(name)
            .ok_or_else(|| EngineError::bad_input(format!("datasets: augments: there is no `{name}`")))
    });
    let entries = dataset.augmentations.as_deref().unwrap_or_default();
    let list = read_augmentations(entries).map_err(|mistakes| {
        let lines = mistakes
            .into_iter()
            .map(|(key, message)| format!("datasets: augmentations{key}: {message}"));
        EngineError::bad_input(lines.collect::<Vec<_>>().join("; "))
    });
    Ok(Augmentations {
        built_in: built_in.collect::<Result<_>>()?,
        list: list?,
        shuffle: dataset.shuffle_augmentations,
        replay: dataset.replay_transforms,
    })
}

/// Converts the options of the loss.
pub(super) fn loss_options(process: &TrainerProcess) -> LossOptions {
    let train = &process.train;
    LossOptions {
        kind: match train.loss_type {
            LossType::Mae => LossKind::Mae,
            LossType::PseudoHuber => LossKind::PseudoHuber,
            // Haar's transform is orthonormal, so the mean of squares of `wavelet` is that of `mse`.
            LossType::Mse | LossType::Wavelet | LossType::Stepped => LossKind::Mse,
            // `check_supported` refuses it.
            LossType::MeanFlow => LossKind::Mse,
        },
        stepped: train.loss_type == LossType::Stepped,
        source: uses_source(process),
        norm_correction: train.correct_pred_norm.then_some(train.correct_pred_norm_multiplier),
        noisy_multiplier: train.noisy_latent_multiplier,
        match_noise_norm: train.match_noise_norm,
        prediction_scale: train.pred_scaler,
        target_noise_multiplier: train.target_noise_multiplier,
        signal_amplification: match train.do_signal_amplification {
            true => train.signal_amplification_strength,
            false => 0.0,
        },
        guidance: train.do_guidance_loss.then_some(GuidanceLoss {
            cfg_zero: train.do_guidance_loss_cfg_zero,
            by_sigma: train.guidance_loss_schedule == GuidanceLossSchedule::Sigma,
        }),
        differential_guidance: train
            .do_differential_guidance
            .then_some(train.differential_guidance_scale),
        x0: train.t0_loss_target.then_some(X0Loss {
            weighted: train.t0_velocity_equiv_weight,
        }),
        // As in ai-toolkit, it is not part of the loss of `source`.
        spectrum: (train.do_fft_loss && !uses_source(process)).then_some(X0Loss {
            weighted: train.do_fft_velocity_equiv_weight,
        }),
        diverges: train.do_prior_divergence,
        outside_weight: train.inverted_mask_prior_multiplier,
        deviation: train.target_norm_std.then_some(train.target_norm_std_value),
        max: train.max_loss,
    }
}

/// Whether the noise in the target is corrected by the prediction without the adapter. In ai-toolkit, a preservation loss has that
/// prediction for itself.
pub(super) fn corrects_norm(process: &TrainerProcess) -> bool {
    process.train.correct_pred_norm && !preserves(process) && !uses_source(process)
}

/// Whether a preservation loss is added.
fn preserves(process: &TrainerProcess) -> bool {
    process.train.diff_output_preservation || process.train.blank_prompt_preservation
}

/// Whether the prediction without the adapter is the target of a data set, or the loss moves away from it. As in ai-toolkit, not
/// beside a preservation loss.
pub(super) fn compares_with_base(process: &TrainerProcess, has_prior_target: bool) -> bool {
    let train = &process.train;
    let compares = train.do_prior_divergence || (has_prior_target && !train.correct_pred_norm);
    compares && !preserves(process)
}

/// Whether the loss compares images instead of noise or velocities (`loss_target`).
fn uses_source(process: &TrainerProcess) -> bool {
    matches!(process.train.loss_target, LossTarget::Source | LossTarget::Unaugmented)
}

/// Whether the loss compares with the images before their `augmentations`.
pub(super) fn uses_unaugmented(process: &TrainerProcess) -> bool {
    let target = process.train.loss_target;
    matches!(target, LossTarget::Unaugmented | LossTarget::DifferentialNoise) && !process.kind.is_slider()
}

/// Converts the options of the latents.
pub(super) fn latent_options(process: &TrainerProcess) -> LatentOptions {
    let train = &process.train;
    let statistics = match process.model.arch.name {
        ArchName::Sdxl => ChannelStatistics::SDXL,
        _ => ChannelStatistics::STABLE_DIFFUSION,
    };
    LatentOptions {
        statistics: train.standardize_latents.then_some(statistics),
        multiplier: train.latent_multiplier,
        by_deviation: train.adaptive_scaling_factor,
        zeros_for_blank: train.do_blank_stabilization,
    }
}

/// Converts the options of the images of a batch.
pub(super) fn pixel_options(process: &TrainerProcess) -> PixelOptions {
    let statistics = match process.model.arch.name {
        ArchName::Sdxl => ImageStatistics::SDXL,
        _ => ImageStatistics::TRAINING,
    };
    PixelOptions {
        contrast: process.train.img_multiplier.clamp(0.0, 1.0),
        statistics: process.train.standardize_images.then_some(statistics),
    }
}

/// The scale of the guidance loss for each of `items`; empty if there is none. Draws `rand(items)` if it is a range.
pub(super) fn guidance_scales(process: &TrainerProcess, items: usize, generator: &mut TorchGenerator) -> Vec<f64> {
    if !process.train.do_guidance_loss {
        return Vec::new();
    }
    match process.train.guidance_loss_target.bounds() {
        (low, high) if low == high => vec![low; items],
        (low, high) => {
            let drawn = generator.rand(items).into_iter();
            drawn.map(|u| low + f64::from(u) * (high - low)).collect()
        }
    }
}

/// Whether weights of the loss by the signal-to-noise ratio are learned. A slider has losses of its own.
pub(super) fn learns_snr(process: &TrainerProcess) -> bool {
    process.train.learnable_snr_gos && !process.kind.is_slider()
}

/// Converts the weighting of the loss.
pub(super) fn snr_weighting(process: &TrainerProcess) -> SnrWeighting {
    let train = &process.train;
    if learns_snr(process) {
        // It takes the place of the others.
        return SnrWeighting::default();
    }
    let positive = |g: Option<f64>| g.filter(|g| *g > 1e-6);
    SnrWeighting {
        min_snr_gamma: positive(train.min_snr_gamma),
        // ai-toolkit's sliders have the other one alone.
        snr_gamma: positive(train.snr_gamma).filter(|_| !process.kind.is_slider()),
        debiased: train.debiased_estimation_loss,
    }
}

/// Converts the options of drawing noise and timesteps. `schedule_steps`: training timesteps of the model's schedule.
pub(super) fn noise_options(process: &TrainerProcess, schedule_steps: usize) -> NoiseOptions {
    let train = &process.train;
    let schedule_steps = schedule_steps as u32;
    let table = train.num_train_timesteps.min(schedule_steps).max(1);
    NoiseOptions {
        preference: match train.content_or_style {
            ContentOrStyle::Balanced => NoiseLevelPreference::Balanced,
            ContentOrStyle::Content => NoiseLevelPreference::Content,
            ContentOrStyle::Style => NoiseLevelPreference::Style,
        },
        min_index: train.min_denoising_steps.min(table - 1),
        max_index: train.max_denoising_steps.min(table - 1),
        table_len: table,
        table_spacing: (schedule_steps / table).max(1),
        offset: train.noise_offset,
        random_offset: train.noise_offset_random_strength,
        adaptive_offset: train.adaptive_noise_scale,
        multiplier: train.noise_multiplier,
        blurred: train.blended_blur_noise,
        dynamic_offset: train.dynamic_noise_offset,
        pairing_samples: train.optimal_noise_pairing_samples,
        consistent: train.force_consistent_noise,
        signal_correction: train
            .do_signal_correction_noise
            .then_some(train.signal_correction_noise_scale),
        batch_correction: train
            .do_batch_noise_correction
            .then_some(train.batch_noise_correction_scale),
        multires: Some((train.multires_noise_iterations, train.multires_noise_discount))
            .filter(|(count, _)| *count > 0),
        input: train.ip_noise_gamma,
        random_input: train.ip_noise_gamma_random_strength,
        shift: train.random_noise_shift,
        random_multiplier: train.random_noise_multiplier,
    }
}

/// The guidance of a micro-batch. Draws `rand(1)` if its scale is random.
pub(super) fn training_cfg(process: &TrainerProcess, generator: &mut TorchGenerator) -> Option<TrainingCfg> {
    let train = &process.train;
    if !train.do_cfg && !train.do_random_cfg {
        return None;
    }
    let scale = match train.do_random_cfg {
        true => {
            let largest = train.max_cfg_scale.unwrap_or(train.cfg_scale);
            1.0 + f64::from(generator.rand(1)[0]) * (largest - 1.0)
        }
        false => train.cfg_scale,
    };
    Some(TrainingCfg {
        scale,
        rescale: train.cfg_rescale.unwrap_or(train.cfg_scale),
    })
}

/// The tag of the latent space in cache keys.
pub(super) fn latent_space(process: &TrainerProcess) -> String {
    match &process.model.latent_space_version {
        Some(version) => version.clone(),
        None => process.model.arch.name.latent_space_version().to_owned(),
    }
}
