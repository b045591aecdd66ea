//! `train`: steps, optimizer, noise, loss and the other settings of the training loop.

use super::declare::section;
use super::dtype::DType;
use super::limits::{
    MAX_BATCH, MAX_FACTOR, MAX_MULTIRES, MAX_NEGATIVE_PROMPTS, MAX_NOISE_FACTOR, MAX_NOISE_PAIRS, MAX_TIMESTEPS,
};
use super::lr_factor::{self, LrFactor};
use super::optimizer::{LrSchedulerName, OptimizerName};
use super::optimizer_params::OptimizerParams;
use super::sampler::SamplerName;
use super::schema::{PresentKeys, ReadContext, SupportLevel, SupportReport, join};
use super::values::{FloatOrRange, FreeMap};

pub use super::ema::EmaConfig;
pub use super::objective::{ContentOrStyle, GuidanceLossSchedule, LossTarget, LossType, TimestepType};
pub use super::validation::{ValidationConfig, ValidationItem};

section! {
    /// Steps, optimizer, noise, loss and the other settings of the training loop.
    pub struct TrainConfig("train") {
        /// Total number of steps, including the steps before a resume.
        steps: u64 = 1000, Works;
        /// Items per batch. A dataset may override it.
        batch_size: u32 = 1, Works;
        /// Batches per step; gradients are summed, the reported loss is the mean.
        gradient_accumulation: u64 = 1, Works;
        /// Legacy: each micro-batch counts as a step; -1 accumulates a whole epoch. Exclusive with `gradient_accumulation`.
        gradient_accumulation_steps: i64 = 1, Works;
        /// Learning rate.
        lr: f64 = 1e-6, Works;
        /// No effect for LoRAs and full training: `lr` is used.
        unet_lr: Option<f64> = None, Ignored("`lr` is used, as ai-toolkit did"), shown "`lr`";
        /// No effect for LoRAs and full training: `lr` is used.
        text_encoder_lr: Option<f64> = None, Ignored("`lr` is used, as ai-toolkit did"), shown "`lr`";
        /// Other learning rates for some of the trained tensors (ours): of several entries, the first whose text is in the name.
        lr_factors: Vec<LrFactor> = Vec::new(), Works;
        /// Learning rate of the refiner.
        refiner_lr: Option<f64> = None, DependsOn("train_refiner"), shown "`lr`";
        /// Learning rate of a textual inversion.
        embedding_lr: Option<f64> = None, DependsOn("embedding"), shown "`lr`";
        /// Learning rate of an adapter.
        adapter_lr: Option<f64> = None, DependsOn("adapter"), shown "`lr`";
        /// Optimizer. eps is 1e-6 for the Adam family and Prodigy unless `optimizer_params` sets it. For `prodigy`,
        /// `prodigy8bit` and the dadaptations an `lr` below 0.1 is read as 1. For `automagic` and `automagic2` an `lr` above
        /// 1e-3 is read as 1e-6. All automagics start at `lr` and then adapt it themselves; `lr_scheduler` is ignored. The
        /// gradients of `adafactor`, `automagic2` and (unless its parameters set `fused: false`) `automagic3` are not clipped.
        /// With `relative_step: true` in `optimizer_params`, `adafactor` chooses the learning rate itself, and `lr` has no effect.
        optimizer: OptimizerName = OptimizerName::AdamW, Works;
        /// Parameters of the optimizer: `weight_decay`, `betas`, …; an unknown one is an error that lists the known ones.
        optimizer_params: FreeMap = FreeMap::new(), Works;
        /// How the learning rate changes.
        lr_scheduler: LrSchedulerName = LrSchedulerName::Constant, Works;
        /// Parameters of the scheduler.
        lr_scheduler_params: FreeMap = FreeMap::new(), Works;
        /// Gradients are clipped to this norm; 0 or less: no clipping.
        max_grad_norm: f64 = 1.0, Works;
        /// Start at this step instead of the checkpoint's step. A run that was interrupted after it started there goes on where it was
        /// interrupted; ai-toolkit starts there again.
        start_step: Option<u64> = None, Works;
        /// Number format of the arithmetic; also replaces `model.dtype`.
        dtype: DType = DType::F32, Works;
        /// Recompute activations in the backward pass instead of keeping them: the same result, less memory, about a third
        /// more time.
        gradient_checkpointing: bool = true, Works;
        /// Train the U-Net or transformer.
        train_unet: bool = true, Works;
        /// Train the text encoders.
        train_text_encoder: bool = false, Works;
        /// Train the refiner.
        train_refiner: bool = true, Accepted("only with a refiner model");
        /// No samples before the first step but those of `first_sample`.
        skip_first_sample: bool = false, Works;
        /// Samples before the first step even on resume. Not with `skip_first_sample`.
        force_first_sample: bool = false, Works;
        /// No samples at all.
        disable_sampling: bool = false, Works;
        /// Moving average of the weights.
        ema_config: EmaConfig = EmaConfig::default(), Works, shown "off";
        /// FreeU while sampling.
        free_u: bool = false, Ignored("samples are made without FreeU; the training is the same");
        /// xformers attention.
        xformers: bool = false, Accepted("an optimisation; the result is the same");
        /// torch's fused attention.
        sdp: bool = false, Accepted("an optimisation; the result is the same");
        /// Attention implementation.
        attention_backend: String = "native".into(), Accepted("an optimisation; the result is the same");
        /// Train a changing share of the tensors: each step chooses others at random. With the optimizers `adafactor` and `automagic`. The
        /// misspelling is the real key.
        do_paramiter_swapping: bool = false, Works;
        /// The share of the trained numbers that a step of `do_paramiter_swapping` trains: tensors are chosen as long as together they
        /// have fewer numbers.
        paramiter_swapping_factor: f64 = 0.1, Works;
        /// At each save, merge the LoRA into the model, save the full model, and restart the LoRA.
        merge_network_on_save: bool = false, Works;
        /// The strength of the merge of `merge_network_on_save`.
        merge_network_on_save_strength: f64 = 1.0, Works;
        /// Run a batch one item at a time. Gradients are those of the mean of the items, as without it; in ai-toolkit of their sum.
        single_item_batching: bool = false, Accepted("saves memory only");
        /// No effect, as in ai-toolkit.
        weight_jitter: f64 = 0.0, Accepted("never had an effect");

        /// Noise scheduler. Flow models need `flowmatch`.
        noise_scheduler: SamplerName = SamplerName::Ddpm, Works;
        /// How flow models draw timesteps; others ignore it.
        timestep_type: TimestepType = TimestepType::Sigmoid, Works;
        /// sd-scripts: the standard deviation of the normal numbers of `timestep_type: sigmoid`.
        timestep_sigmoid_scale: f64 = 1.0, Works;
        /// sd-scripts: the noise levels of `timestep_type: sigmoid` and `linear` are shifted by this factor, above 1 towards more
        /// noise: `shift s / (1 + (shift - 1) s)`.
        timestep_shift: f64 = 1.0, Works;
        /// sd-scripts: the noise levels are shifted by the size of the image instead of `timestep_shift`, as FLUX.1's sampler does.
        timestep_shift_by_size: bool = false, Works;
        /// Which noise levels are trained most.
        content_or_style: ContentOrStyle = ContentOrStyle::Balanced, Works;
        /// Smallest index of the timestep table that is drawn.
        min_denoising_steps: u32 = 0, Works;
        /// Largest index of the timestep table that is drawn.
        max_denoising_steps: u32 = 999, Works;
        /// Length of the timestep table. Diffusion models: `n` entries are `1000 / n` (a whole number) apart, and the last is 0.
        num_train_timesteps: u32 = 1000, Works;
        /// Flow models: even timesteps with a bell-shaped loss weight. Not with `timestep_type: next_sample`.
        linear_timesteps: bool = false, Works;
        /// Flow models: as `linear_timesteps`, with half a bell.
        linear_timesteps2: bool = false, Works;
        /// Steps for `timestep_type: next_sample`.
        next_sample_timesteps: u32 = 8, Works;
        /// Strength of one extra noise value per channel.
        noise_offset: f64 = 0.0, Works;
        /// sd-scripts: `noise_offset` is the largest strength; each batch has a random one.
        noise_offset_random_strength: bool = false, Works;
        /// sd-scripts: this many times the absolute mean of each channel of the latents is added to `noise_offset`, not below 0.
        adaptive_noise_scale: f64 = 0.0, Works;
        /// Shift the noise by half the latents' mean per channel; not that of regularisation sets.
        dynamic_noise_offset: bool = false, Works;
        /// Scale of the noise.
        noise_multiplier: f64 = 1.0, Works;
        /// Scale of the noise in the target only.
        target_noise_multiplier: f64 = 1.0, Works;
        /// Standard deviation of the logarithm of a random scale of the noise, drawn per item and channel.
        random_noise_multiplier: f64 = 0.0, Works;
        /// Standard deviation of a random shift of the noise, drawn per item and channel.
        random_noise_shift: f64 = 0.0, Works;
        /// The same noise for an image each time: seeded by its content and its flips (ai-toolkit: by its path). Without
        /// `noise_offset`.
        force_consistent_noise: bool = false, Works;
        /// Draw this many noise tensors per item and keep the one nearest to its latents. Above 1: without `noise_offset` and
        /// `force_consistent_noise`.
        optimal_noise_pairing_samples: u32 = 1, Works;
        /// Add the latents to their noise, times one random number per item and channel.
        do_signal_correction_noise: bool = false, Works;
        /// Standard deviation of the random numbers of `do_signal_correction_noise`.
        signal_correction_noise_scale: f64 = 1.0, Works;
        /// In batches of several items: add the latents of another item to the noise, times one random number per item and channel.
        do_batch_noise_correction: bool = false, Works;
        /// Standard deviation of the random numbers of `do_batch_noise_correction`.
        batch_noise_correction_scale: f64 = 0.1, Works;
        /// Add the difference between the blurred latents and the latents to the noise, times a random number from 0 to 2 per item.
        blended_blur_noise: bool = false, Works;
        /// Contrast of the images around the mean of their batch, from 0 to 1. Not for regularisation sets, nor where latents are cached.
        img_multiplier: f64 = 1.0, Works;
        /// Scale of the latents.
        latent_multiplier: f64 = 1.0, Works;
        /// Scale of the noisy latents.
        noisy_latent_multiplier: f64 = 1.0, Works;
        /// Divide latents by their standard deviation per channel, in place of `latent_multiplier`.
        adaptive_scaling_factor: bool = false, Works;
        /// Give red, green and blue of each image a fixed mean and standard deviation: those of SDXL, or of Stable Diffusion for all
        /// other models. Not where latents are cached.
        standardize_images: bool = false, Works;
        /// Give each channel of the latents the mean and the standard deviation of ai-toolkit's tables. Stable Diffusion 1.x, 2.x
        /// and SDXL only.
        standardize_latents: bool = false, Works;
        /// Wan 2.2 14B: steps per expert before switching.
        switch_boundary_every: u32 = 1, Accepted("only Wan 2.2 14B uses it");

        /// How prediction and target are compared.
        loss_type: LossType = LossType::Mse, Works;
        /// What the prediction is compared with.
        loss_target: LossTarget = LossTarget::Noise, Works;
        /// SNR weighting of the loss, capped at this value. Ignored if `snr_gamma` is set.
        min_snr_gamma: Option<f64> = None, Works;
        /// Multiplies the loss by `gamma / snr`, not capped.
        snr_gamma: Option<f64> = None, Works;
        /// sd-scripts' debiased estimation: the loss is divided by the square root of the signal-to-noise ratio (v prediction: by it
        /// plus 1), which counts as at most 1000. Diffusion models only.
        debiased_estimation_loss: bool = false, Works;
        /// sd-scripts' multi-resolution noise: this many coarser noise tensors are added to the noise; 0: none, 6 to 10 are usual.
        multires_noise_iterations: u32 = 0, Works;
        /// The strength of each noise tensor of `multires_noise_iterations`, as a factor of the strength of the one before.
        multires_noise_discount: f64 = 0.3, Works;
        /// sd-scripts' input perturbation: the noisy latents have this many times more noise, which is not in the target; 0.1 is usual.
        ip_noise_gamma: f64 = 0.0, Works;
        /// sd-scripts: `ip_noise_gamma` is the largest factor; each batch has a random one.
        ip_noise_gamma_random_strength: bool = false, Works;
        /// Diffusion models: the loss of each item is multiplied by `|gamma / ((snr + offset_1) * scale + offset_2)|`, whose four numbers
        /// are learned so that all losses are about as large. `min_snr_gamma`, `snr_gamma` and
        /// `debiased_estimation_loss` have no effect then.
        learnable_snr_gos: bool = false, Works;
        /// Loss weight of regularisation items.
        reg_weight: f64 = 1.0, Works;
        /// Scale the prediction of each item to the norm of its noise.
        match_noise_norm: bool = false, Works;
        /// Scale of the prediction.
        pred_scaler: f64 = 1.0, Works;
        /// Flow models: compare the image that the prediction leads to with the image, instead of the velocities.
        t0_loss_target: bool = false, Works;
        /// Multiply the loss of `t0_loss_target` by `1 / t^2`, at most 100, so that it is as large as the loss of the velocity.
        t0_velocity_equiv_weight: bool = false, Works;
        /// Flow models: add the mean squared difference between the spectra (absolute values) of the predicted image and of the image.
        do_fft_loss: bool = false, Works;
        /// Multiply the loss of `do_fft_loss` by `1 / t^2`, at most 100.
        do_fft_velocity_equiv_weight: bool = false, Works;
        /// Add how far the standard deviation of the prediction of each item and channel is from `target_norm_std_value`.
        target_norm_std: bool = false, Works;
        /// The standard deviation of `target_norm_std`.
        target_norm_std_value: f64 = 1.0, Works;
        /// Flow models: the target moves further from the image: `noise - latents * (1 + strength * (1 - t))`. Not for batches with masks
        /// under `inverted_mask_prior`.
        do_signal_amplification: bool = false, Works;
        /// The strength of `do_signal_amplification`.
        signal_amplification_strength: f64 = 0.5, Works;
        /// Cap of the loss of a batch. A batch with a larger loss has no gradients.
        max_loss: Option<f64> = None, Works;
        /// Log when the loss was capped.
        max_loss_debug: bool = false, Accepted("the metrics have the loss of each step");
        /// Weight of the sound.
        audio_loss_multiplier: f64 = 1.0, Accepted("only models with sound use it");
        /// Subtract the mean squared difference from the prediction of the model without the adapter, so that they move apart. A step
        /// takes 1.3 times as long.
        do_prior_divergence: bool = false, Works;
        /// Flow models: the network whose features of the predicted and of the true image are compared, too: `v3` (SigLIP 2 and VGG16, from the
        /// repositories `google/siglip2-so400m-patch16-512` and `timm/vgg16.tv_in1k`), `v4` or `v5` (SigLIP 2,
        /// `google/siglip2-so400m-patch16-naflex`), `v6` (DINOv3, `facebook/dinov3-vith16plus-pretrain-lvd1689m`), `v7` or `v8` (TIPSv2,
        /// `google/tipsv2-b14-dpt` and `google/tipsv2-b14`), `v9` (Sapiens 2, `facebook/sapiens2-pretrain-1b`), `v10` (VGG16,
        /// `timm/vgg16.tv_in1k`); a folder or a repository with such a network; or a safetensors file of version 1 or 2 or with a VGG16.
        latent_feature_extractor_path: Option<String> = None, Works, input Vae;
        /// The second network of `latent_feature_extractor_path`, where it has two: the VGG16 of `v3`, the vision transformer of `v7` and
        /// `v8`. aitk only.
        latent_feature_extractor_second_path: Option<String> = None, Works, input Vae;
        /// Compare the images after a small step of the sampler instead of the images without noise; `v8` does. For the network of `v7` and `v8`.
        /// aitk only.
        latent_feature_extractor_partial_step: bool = false, Works;
        /// Weight of the loss of `latent_feature_extractor_path`.
        latent_feature_loss_weight: f64 = 1.0, Works;
        /// Older name of `latent_feature_extractor_path`, with precedence.
        diffusion_feature_extractor_path: Option<String> = None, Works, input Vae;
        /// Older name of `latent_feature_loss_weight`, with precedence.
        diffusion_feature_extractor_weight: Option<f64> = None, Works, shown "`latent_feature_loss_weight`";

        /// The negative prompt of `do_cfg`, or a `.txt` file with one per line, of which each item gets one at random. Not with
        /// `cache_text_embeddings` and `unload_text_encoder`.
        negative_prompt: Option<String> = None, Works, input PromptFile;
        /// Above 1: each item gets 1 to this many negative prompts of the file, joined by commas.
        max_negative_prompts: u32 = 1, Works;
        /// Prompt of the unconditional prediction of `do_guidance_loss`.
        unconditional_prompt: String = String::new(), Works;
        /// The loss is that of the prediction with CFG, of the scale `cfg_scale`, with `negative_prompt` or the empty prompt.
        do_cfg: bool = false, Works;
        /// As `do_cfg`, with a random scale for each step, from 1 to `max_cfg_scale`.
        do_random_cfg: bool = false, Works;
        /// The scale of `do_cfg`. Models with a guidance embedding (FLUX.1-dev): the guidance at which they are trained, too.
        cfg_scale: f64 = 1.0, Works;
        /// Upper bound of the random scale.
        max_cfg_scale: Option<f64> = None, Works, shown "`cfg_scale`";
        /// The guided prediction gets the mean and the standard deviation that this scale would give it.
        cfg_rescale: Option<f64> = None, Works, shown "`cfg_scale`";
        /// Chance that a prompt is empty; for SDXL, for each text encoder by itself. Stable Diffusion 1.x, 2.x, SDXL and FLUX.1; without
        /// `cache_text_embeddings` and `unload_text_encoder`.
        prompt_dropout_prob: f64 = 0.0, Works;
        /// Chance to repeat a caption of fewer than 77 words until it fills the encoder; not in regularisation sets, and not with
        /// `cache_text_embeddings`.
        prompt_saturation_chance: f64 = 0.0, Works;
        /// Train each image with its caption and with `caption_short` of the JSON data set: batches are twice as large. Not
        /// regularisation sets.
        short_and_long_captions: bool = false, Works;
        /// SDXL: the first text encoder gets `caption_short` of the JSON data set, the second one the caption.
        short_and_long_captions_encoder_split: bool = false, Works;
        /// Items whose caption is blank are trained with latents of zeros.
        do_blank_stabilization: bool = false, Works;
        /// Models with a guidance embedding (FLUX.1-dev): train without it. Samples have it.
        bypass_guidance_embedding: bool = false, Works;

        /// Contrastive loss: the target becomes `u + scale * (target - u)`, where `u` is the prediction for `unconditional_prompt`. A
        /// step takes 1.3 times as long. Models with a guidance embedding get the scale there too.
        do_guidance_loss: bool = false, Works;
        /// The scale of `do_guidance_loss`. From a range, each item draws one.
        guidance_loss_target: FloatOrRange = FloatOrRange::Fixed(3.0), Works;
        /// How the scale of `do_guidance_loss` changes with the noise level.
        guidance_loss_schedule: GuidanceLossSchedule = GuidanceLossSchedule::Constant, Works;
        /// Scale `u` by its projection on the target (CFG-Zero*).
        do_guidance_loss_cfg_zero: bool = false, Works;
        /// The target becomes `prediction + scale * (target - prediction)`. In ai-toolkit it has no effect without `do_guidance_loss`.
        do_differential_guidance: bool = false, Works;
        /// Scale of the differential guidance.
        differential_guidance_scale: f64 = 3.0, Works;

        /// Every caption is the process's trigger word (or blank, as for regularisation), unless `cache_text_embeddings` is on too.
        /// It and the prompts of samples are encoded before the model is loaded, and the text encoders leave the memory.
        unload_text_encoder: bool = false, Works;
        /// Encode all captions before the model is loaded, into `_t_e_cache` beside the images; the text encoders leave the memory.
        /// Each caption is built once, as in ai-toolkit: tokens are shuffled once and never dropped. For all data sets.
        cache_text_embeddings: bool = false, Works;

        /// Keep what the base model predicts for the caption with the class in the place of the trigger word: the mean squared
        /// difference of the predictions with and without the adapter is added to the loss. A step takes 2.3 times as long.
        diff_output_preservation: bool = false, Works;
        /// What the trigger word is replaced with.
        diff_output_preservation_class: String = String::new(), Works;
        /// Weight of the loss of `diff_output_preservation`.
        diff_output_preservation_multiplier: f64 = 1.0, Works;
        /// Keep what the base model predicts for the empty prompt, in the same way.
        blank_prompt_preservation: bool = false, Works;
        /// Weight of the loss of `blank_prompt_preservation`.
        blank_prompt_preservation_multiplier: f64 = 1.0, Works;
        /// Of data sets with masks: outside of its mask, each image is compared with what the model without the adapter predicts. A
        /// step takes 1.3 times as long.
        inverted_mask_prior: bool = false, Works;
        /// Weight of the loss of `inverted_mask_prior`.
        inverted_mask_prior_multiplier: f64 = 0.5, Works;
        /// Models that predict the noise: the noise in the target is changed as the prediction would have to be to get the mean and the
        /// standard deviation of what the model without the adapter predicts, per item and channel. Not for regularisation sets. A step
        /// takes 1.3 times as long.
        correct_pred_norm: bool = false, Works;
        /// How far `correct_pred_norm` moves the mean and the standard deviation: 0 is not at all, 1 is all the way.
        correct_pred_norm_multiplier: f64 = 1.0, Works;
        /// Loss on fixed images.
        validation_config: Option<ValidationConfig> = None, Works;
    }
    rare {
        "train_turbo" => Refused("in ai-toolkit it fails for batches without masks and for cached latents; remove it");
        "show_turbo_outputs" => DependsOn("train_turbo");
        "adapter_assist_name_or_path" => Refused("no assistant adapters");
        "adapter_assist_type" => DependsOn("adapter_assist_name_or_path");
        "match_adapter_assist" => Refused("no assistant adapters");
        "match_adapter_chance" => DependsOn("match_adapter_assist");
    }
    finish = finish;
    check = check;
}

/// The largest shift of timesteps, and the largest scale of their normal numbers: beyond it, all of them are at the ends.
const MAX_TIMESTEP_FACTOR: f64 = 100.0;

fn finish(train: &mut TrainConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    if train.batch_size == 0 {
        cx.error_at("batch_size", "expected at least 1");
    }
    cx.check_at_most("batch_size", train.batch_size, MAX_BATCH);
    cx.check_at_most("num_train_timesteps", train.num_train_timesteps, MAX_TIMESTEPS);
    for (key, factor) in [
        ("timestep_shift", train.timestep_shift),
        ("timestep_sigmoid_scale", train.timestep_sigmoid_scale),
    ] {
        if factor <= 0.0 {
            cx.error_at(key, "expected a factor above 0");
        }
        cx.check_in_range(key, factor, 0.0..=MAX_TIMESTEP_FACTOR);
    }
    if train.gradient_accumulation == 0 {
        cx.error_at("gradient_accumulation", "expected at least 1");
    }
    if train.gradient_accumulation_steps == 0 || train.gradient_accumulation_steps < -1 {
        cx.error_at(
            "gradient_accumulation_steps",
            "expected at least 1, or -1 for a whole epoch",
        );
    }
    if train.gradient_accumulation > 1 && train.gradient_accumulation_steps != 1 {
        cx.error_at(
            "gradient_accumulation_steps",
            "cannot be used together with `gradient_accumulation`; keep `gradient_accumulation`",
        );
    }
    if train.num_train_timesteps == 0 {
        cx.error_at("num_train_timesteps", "expected at least 1");
    }
    if train.min_denoising_steps > train.max_denoising_steps {
        cx.error_at("min_denoising_steps", "is larger than `max_denoising_steps`");
    }
    for (on, key) in [
        (train.adaptive_noise_scale != 0.0, "adaptive_noise_scale"),
        (train.noise_offset_random_strength, "noise_offset_random_strength"),
    ] {
        if on && train.noise_offset == 0.0 {
            cx.error_at(key, "needs a `noise_offset`");
        }
    }
    if train.paramiter_swapping_factor == 0.0 {
        cx.error_at("paramiter_swapping_factor", "expected a share above 0, up to 1");
    }
    cx.check_in_range("paramiter_swapping_factor", train.paramiter_swapping_factor, 0.0..=1.0);
    if let Some((key, why)) = train.excluded_by_swapping() {
        cx.error_at(key, why);
    }
    cx.check_in_range("lr", train.lr, 0.0..=MAX_FACTOR);
    for (key, rate) in [("embedding_lr", train.embedding_lr), ("adapter_lr", train.adapter_lr)] {
        if let Some(rate) = rate {
            cx.check_in_range(key, rate, 0.0..=MAX_FACTOR);
        }
    }
    lr_factor::check(&train.lr_factors, train.optimizer, train.train_text_encoder, cx);
    let chooses_rates = train.optimizer_params.get("relative_step") == Some(&true.into());
    if chooses_rates && !train.lr_factors.is_empty() {
        let message = "has no effect with `optimizer_params.relative_step`, with which the optimizer chooses the learning rates: remove one of them";
        cx.error_at("lr_factors", message);
    }
    cx.check_in_range(
        "merge_network_on_save_strength",
        train.merge_network_on_save_strength,
        -MAX_FACTOR..=MAX_FACTOR,
    );
    cx.check_in_range("noise_multiplier", train.noise_multiplier, 0.0..=MAX_NOISE_FACTOR);
    for (key, value) in [
        ("noise_offset", train.noise_offset),
        ("adaptive_noise_scale", train.adaptive_noise_scale),
        ("target_noise_multiplier", train.target_noise_multiplier),
        ("signal_correction_noise_scale", train.signal_correction_noise_scale),
        ("batch_noise_correction_scale", train.batch_noise_correction_scale),
        ("latent_multiplier", train.latent_multiplier),
        ("noisy_latent_multiplier", train.noisy_latent_multiplier),
    ] {
        cx.check_in_range(key, value, -MAX_NOISE_FACTOR..=MAX_NOISE_FACTOR);
    }
    cx.check_at_most(
        "multires_noise_iterations",
        train.multires_noise_iterations,
        MAX_MULTIRES,
    );
    cx.check_in_range("multires_noise_discount", train.multires_noise_discount, 0.0..=1.0);
    cx.check_in_range("ip_noise_gamma", train.ip_noise_gamma, 0.0..=MAX_NOISE_FACTOR);
    cx.check_in_range("random_noise_shift", train.random_noise_shift, 0.0..=MAX_NOISE_FACTOR);
    // Its exponential is the factor.
    cx.check_in_range("random_noise_multiplier", train.random_noise_multiplier, 0.0..=4.0);
    cx.check_in_range("prompt_saturation_chance", train.prompt_saturation_chance, 0.0..=1.0);
    cx.check_in_range("prompt_dropout_prob", train.prompt_dropout_prob, 0.0..=1.0);
    cx.check_at_most(
        "optimal_noise_pairing_samples",
        train.optimal_noise_pairing_samples,
        MAX_NOISE_PAIRS,
    );
    if let Some(max) = train.max_loss.filter(|max| *max <= 0.0) {
        cx.error_at(
            "max_loss",
            format!("expected more than 0, found {max}: no step would change the weights"),
        );
    }
    let (low, high) = train.guidance_loss_target.bounds();
    for scale in [low, high] {
        cx.check_in_range("guidance_loss_target", scale, -MAX_FACTOR..=MAX_FACTOR);
    }
    if low > high {
        cx.error_at(
            "guidance_loss_target",
            format!("expected [low, high], found [{low}, {high}]"),
        );
    }
    for (key, value) in [
        ("reg_weight", Some(train.reg_weight)),
        ("cfg_scale", Some(train.cfg_scale)),
        ("pred_scaler", Some(train.pred_scaler)),
        ("target_norm_std_value", Some(train.target_norm_std_value)),
        (
            "signal_amplification_strength",
            Some(train.signal_amplification_strength),
        ),
        ("differential_guidance_scale", Some(train.differential_guidance_scale)),
        (
            "inverted_mask_prior_multiplier",
            Some(train.inverted_mask_prior_multiplier),
        ),
        ("correct_pred_norm_multiplier", Some(train.correct_pred_norm_multiplier)),
        ("max_cfg_scale", train.max_cfg_scale),
        (
            "diff_output_preservation_multiplier",
            Some(train.diff_output_preservation_multiplier),
        ),
        (
            "blank_prompt_preservation_multiplier",
            Some(train.blank_prompt_preservation_multiplier),
        ),
        ("cfg_rescale", train.cfg_rescale),
        ("img_multiplier", Some(train.img_multiplier)),
        ("latent_feature_loss_weight", Some(train.latent_feature_loss_weight)),
        (
            "diffusion_feature_extractor_weight",
            train.diffusion_feature_extractor_weight,
        ),
    ] {
        cx.check_in_range(key, value.unwrap_or(1.0), -MAX_FACTOR..=MAX_FACTOR);
    }
    train.resolve_feature_extractors();
    cx.check_not_zero("next_sample_timesteps", train.next_sample_timesteps);
    cx.check_not_zero("max_negative_prompts", train.max_negative_prompts);
    cx.check_at_most("max_negative_prompts", train.max_negative_prompts, MAX_NEGATIVE_PROMPTS);
    if train.diff_output_preservation && train.blank_prompt_preservation {
        cx.error_at(
            "blank_prompt_preservation",
            "cannot be used together with `diff_output_preservation`",
        );
    }
    if train.bypass_guidance_embedding && train.do_guidance_loss {
        cx.error_at(
            "bypass_guidance_embedding",
            "cannot be used together with `do_guidance_loss`",
        );
    }
    if train.train_text_encoder {
        for (on, key) in [
            (train.unload_text_encoder, "unload_text_encoder"),
            (train.cache_text_embeddings, "cache_text_embeddings"),
            (train.diff_output_preservation, "diff_output_preservation"),
        ] {
            if on {
                cx.error_at(key, "cannot be used together with `train_text_encoder`");
            }
        }
    }
}

/// The parameters of a learning rate scheduler: its own, and those that every scheduler accepts.
fn lr_scheduler_params(name: LrSchedulerName) -> [&'static [&'static str]; 2] {
    let own: &[&str] = match name {
        LrSchedulerName::Constant | LrSchedulerName::ConstantWithWarmup => &["factor"],
        LrSchedulerName::Linear => &["start_factor", "end_factor"],
        LrSchedulerName::Cosine => &["eta_min", "T_max"],
        LrSchedulerName::CosineWithRestarts => &["eta_min", "T_0", "T_mult"],
        LrSchedulerName::Polynomial => &["lr_end", "power"],
        LrSchedulerName::Step => &["step_size", "gamma"],
        LrSchedulerName::PiecewiseConstant => &["step_rules"],
    };
    [
        own,
        &["num_warmup_steps", "total_iters", "max_iterations", "last_epoch"],
    ]
}

fn check(train: &TrainConfig, path: &str, report: &mut SupportReport) {
    if train.noise_scheduler.is_karras() {
        let message = format!(
            "`{}` is not supported yet: training does not use Karras sigmas, use `ddpm`",
            train.noise_scheduler
        );
        report.error(join(path, "noise_scheduler"), message);
    }
    // The parameters of an unsupported optimizer are not known.
    if matches!(train.optimizer.status(), SupportLevel::Works) {
        let checked = OptimizerParams::new(train.optimizer, &train.optimizer_params);
        for (key, problem) in checked.err().unwrap_or_default() {
            report.error(join(path, &format!("optimizer_params.{key}")), problem);
        }
    }
    let known = lr_scheduler_params(train.lr_scheduler).concat();
    for (key, value) in &train.lr_scheduler_params {
        let problem = if !known.contains(&key.as_str()) {
            format!(
                "`{}` has no such parameter; known: {}",
                train.lr_scheduler,
                known.join(", ")
            )
        } else if matches!(train.lr_scheduler, LrSchedulerName::PiecewiseConstant)
            || value.is_number()
            || value.is_null()
        {
            continue;
        } else {
            format!("expected a number, found {value}")
        };
        report.error(join(path, &format!("lr_scheduler_params.{key}")), problem);
    }
}

impl TrainConfig {
    /// The key that cannot be used with `do_paramiter_swapping`, and why, if there is one.
    #[must_use]
    pub fn excluded_by_swapping(&self) -> Option<(&'static str, &'static str)> {
        if !self.do_paramiter_swapping {
            return None;
        }
        if !matches!(self.optimizer, OptimizerName::Adafactor | OptimizerName::Automagic) {
            let why = "only `adafactor` and `automagic` swap parameters, in ai-toolkit too; use one of them or remove \
                       `do_paramiter_swapping`";
            return Some(("optimizer", why));
        }
        let why = "cannot be used together with `do_paramiter_swapping`: each step trains other tensors; use `gradient_accumulation`";
        (self.gradient_accumulation_steps != 1).then_some(("gradient_accumulation_steps", why))
    }

    /// The first key that shifts or spreads the timesteps of flow models, if one is set.
    pub(super) fn shifts_timesteps(&self) -> Option<&'static str> {
        let keys = [
            (self.timestep_shift != 1.0, "timestep_shift"),
            (self.timestep_shift_by_size, "timestep_shift_by_size"),
            (self.timestep_sigmoid_scale != 1.0, "timestep_sigmoid_scale"),
        ];
        keys.into_iter().find_map(|(on, key)| on.then_some(key))
    }
}
