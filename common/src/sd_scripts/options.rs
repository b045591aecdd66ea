//! The options of the training scripts. To add an option, add its line to its group. If it is translated, read it in a file of the group:
//!
//! - model: `model.rs`
//! - adapter: `network.rs`; of LyCORIS `lycoris.rs`; ranks of blocks and of files `block_ranks.rs`, `weights_ranks.rs`
//! - textual inversion: `textual_inversion.rs`
//! - optimizer and learning rate: `optimizer.rs`, `schedule.rs`; learning rates of blocks `block_rates.rs`, `lora_plus.rs`
//! - training: `config` in `mod.rs`; `resume` in `resumed.rs`, epochs in `epochs.rs`, memory in `model.rs`
//! - noise, timesteps, loss: `objective.rs`
//! - images and captions: `datasets.rs`, `subset_section.rs`; images that are held out `held_out.rs`
//! - saving and logging: `saving.rs`
//! - samples: `samples.rs`

use super::option::Fate::{NoInfluence, Noted, Refused, Translated};
use super::option::Kind::{Choice, Flag, Number, Numbers, Size, Text, Texts, Whole};
use super::option::{Group, OptionRow, UsedBy, row};

const ALL: UsedBy = UsedBy::ALL;
const LORA: UsedBy = UsedBy::LORA;
const FULL: UsedBy = UsedBy::FULL;
const UNET: UsedBy = UsedBy::UNET;
const FLUX: UsedBy = UsedBy::FLUX;
const SD3: UsedBy = UsedBy::SD3;
const FLOW: UsedBy = UsedBy::FLOW;
const NOT_SD3: UsedBy = UsedBy::NOT_SD3;

const MEMORY: &str = "memory or speed only";
const FUSED: &str =
    "no influence without max_grad_norm: sd-scripts clips the gradients of each tensor then, aitk all together";
const LOGGER: &str = "the curves of a job are in `aitk plot` and `metrics.jsonl`";
const HUB: &str =
    "`aitk run` uploads the run folder to the repository, with the token of HF_TOKEN or of `hf auth login`";
const GUI: &str = "a field of the kohya GUI, which sd-scripts does not read";

/// Why an option of captions or images is refused, in training configs and in data set configs.
pub(super) const COLOR_AUG: &str = "use `datasets[].augmentations` in a config of aitk, such as `HueSaturationValue`";
pub(super) const FACE_CROP: &str = "aitk crops at the centre or at random";
pub(super) const EVERY_N_EPOCHS: &str = "aitk drops captions at random (`caption_dropout_rate`), not in certain epochs";
pub(super) const TOKEN_WARMUP: &str = "aitk trains whole captions from the first step on";

pub(super) const VALIDATION_SPLIT: &str = "`datasets[].excluded_images`: the images that sd-scripts holds out; with LoRAs also `train.validation_config`, as in sd-scripts";
pub(super) const VALIDATION_SEED: &str = "which images are held out; `seed` without it";

const fn refused(why: &'static str) -> super::option::Fate {
    Refused { unless: "", why }
}

const fn refused_unless(unless: &'static str, why: &'static str) -> super::option::Fate {
    Refused { unless, why }
}

#[rustfmt::skip]
const MODEL: &[OptionRow] = &[
    row("pretrained_model_name_or_path", Text, "", ALL, Translated("`model.name_or_path`")),
    row("v2", Flag, "false", UsedBy::SD, Translated("`model.arch`: sd2, else sd1")),
    row("v_parameterization", Flag, "false", UNET, Translated("`model.is_v_pred`")),
    row("vae", Text, "", UsedBy(0x7b), Translated("`model.vae_path`")),
    row("clip_l", Text, "", FLOW, Translated("`model.extras_name_or_path` (FLUX.1), `model.te_name_or_path` (SD3): its folder")),
    row("clip_g", Text, "", SD3, Translated("`model.te_name_or_path`: its folder")),
    row("t5xxl", Text, "", FLOW, Translated("`model.te_name_or_path`")),
    row("ae", Text, "", FLUX, Translated("`model.vae_path`")),
    row("model_type", Choice(&["flux", "chroma"]), "flux", FLUX, refused_unless("flux", "Chroma is not imported yet; write a config with `arch: chroma`")),
    row("controlnet_model_name_or_path", Text, "", FLUX, Noted("samples are made without a ControlNet; the training is the same")),
    row("base_weights", Texts, "", LORA, Translated("`model.lora_path`, if there is one")),
    row("base_weights_multiplier", Numbers, "1", LORA, Translated("only 1: a LoRA is applied at full strength")),
    row("no_half_vae", Flag, "false", UNET, NoInfluence("aitk's VAE computes in float32 where its config asks for it")),
    row("tokenizer_cache_dir", Text, "", ALL, NoInfluence("the tokenizers are built in, or in the model's folder")),
    row("clip_skip", Whole, "", UsedBy::SD, Translated("`model.clip_skip`")),
    row("max_token_length", Whole, "75", UNET, Translated("`model.max_token_length`")),
    row("weighted_captions", Flag, "false", UNET, refused("aitk has no weights in captions")),
    row("no_token_padding", Flag, "false", UsedBy::FULL_SD, NoInfluence("sd-scripts sets it and fills captions up to 77 tokens all the same")),
    row("t5xxl_max_token_length", Whole, "512 (dev), 256", FLOW, Translated("only the model's own: 512 of FLUX.1-dev, 256 of schnell and SD3")),
    row("apply_t5_attn_mask", Flag, "false", FLOW, Translated("`model.apply_t5_attn_mask`; for SD3 ignored with a note where T5 is not cached, because sd-scripts does not mask it there")),
    row("apply_lg_attn_mask", Flag, "false", SD3, Translated("`model.apply_lg_attn_mask`; ignored with a note where the CLIPs are trained or not cached, because sd-scripts does not mask them there")),
    row("t5xxl_dtype", Text, "", SD3, NoInfluence("aitk computes T5 in the model's dtype")),
    row("t5xxl_device", Text, "", SD3, NoInfluence(MEMORY)),
    row("save_clip", Flag, "false", SD3, Noted("a LoRA file has the trained layers only")),
    row("save_t5xxl", Flag, "false", SD3, Noted("a LoRA file has the trained layers only")),
    row("use_t5xxl_cache_only", Flag, "false", SD3, NoInfluence("memory or speed only, but for apply_t5_attn_mask: it caches T5")),
    row("train_t5xxl", Flag, "false", UsedBy::SD3, refused("aitk does not train T5")),
    row("clip_l_dropout_rate", Number, "0", SD3, refused("aitk drops whole captions: use caption_dropout_rate")),
    row("clip_g_dropout_rate", Number, "0", SD3, refused("aitk drops whole captions: use caption_dropout_rate")),
    row("t5_dropout_rate", Number, "0", SD3, refused("aitk drops whole captions: use caption_dropout_rate")),
    row("pos_emb_random_crop_rate", Number, "0", SD3, refused("aitk uses the centre of the positions, as diffusers does")),
    row("enable_scaled_pos_embed", Flag, "false", SD3, refused("aitk uses the model's own positions")),
];

#[rustfmt::skip]
const NETWORK: &[OptionRow] = &[
    row("network_module", Text, "", LORA, Translated("`network.type`: `networks.lora`, `networks.lora_flux`, `networks.lora_sd3`, `lycoris.kohya`")),
    row("network_dim", Whole, "4", LORA, Translated("`network.linear`")),
    row("network_alpha", Number, "1", LORA, Translated("`network.linear_alpha`; for FLUX.1 and SD3 it must be the same as network_dim")),
    row("network_dropout", Number, "0", LORA, Translated("`network.dropout`; for LyCORIS without influence, as there")),
    row("network_args", Texts, "", LORA, Translated("see below")),
    row("network_weights", Text, "", LORA, Translated("`network.pretrained_lora_path`")),
    row("dim_from_weights", Flag, "false", LORA, Translated("`network.ranks_of_pretrained_lora`: each layer of network_weights has its rank and alpha there, and no other layer is trained")),
    row("network_train_unet_only", Flag, "false", LORA, Translated("`train.train_text_encoder`: false; true without it")),
    row("network_train_text_encoder_only", Flag, "false", LORA, Translated("`train.train_unet`: false")),
    row("scale_weight_norms", Number, "0", LORA, Translated("`network.scale_weight_norms`")),
    row("train_text_encoder", Flag, "false", UsedBy(0x2b), Translated("`train.train_text_encoder`")),
    row("stop_text_encoder_training", Whole, "", UsedBy::FULL_SD, Translated("0 and -1: `train.train_text_encoder` false; aitk cannot stop it later")),
    row("diffusers_xformers", Flag, "false", FULL, NoInfluence(MEMORY)),
    row("num_last_block_to_freeze", Whole, "0", SD3, refused("use ai-toolkit's `model.ignore_if_contains` in a YAML config")),
];

#[rustfmt::skip]
const TEXTUAL_INVERSION: &[OptionRow] = &[
    row("token_string", Text, "", UsedBy::EMBEDDING, Translated("`embedding.trigger`")),
    row("num_vectors_per_token", Whole, "1", UsedBy::EMBEDDING, Translated("`embedding.tokens`")),
    row("init_word", Text, "", UsedBy::EMBEDDING, Translated("`embedding.init_words`, repeated for all vectors; `*` without it")),
    row("weights", Text, "", UsedBy::EMBEDDING, refused("aitk starts from init_word")),
    row("use_object_template", Flag, "false", UsedBy::EMBEDDING, refused("aitk trains captions: write them beside the images")),
    row("use_style_template", Flag, "false", UsedBy::EMBEDDING, refused("aitk trains captions: write them beside the images")),
];

#[rustfmt::skip]
const OPTIMIZER: &[OptionRow] = &[
    row("learning_rate", Number, "2e-6", ALL, Translated("`train.lr`")),
    row("unet_lr", Number, "learning_rate", LORA, Translated("`train.lr`")),
    row("text_encoder_lr", Numbers, "learning_rate", LORA, Translated("`train.lr_factors`; 0: not trained. The first of a list, for SD3 the first two, as in sd-scripts")),
    row("text_encoder_lr1", Number, "text_encoder_lr", UsedBy::SDXL, refused("sd-scripts trains both text encoders with one rate: use text_encoder_lr")),
    row("text_encoder_lr2", Number, "text_encoder_lr", UsedBy::SDXL, refused("sd-scripts trains both text encoders with one rate: use text_encoder_lr")),
    row("learning_rate_te", Number, "learning_rate", UsedBy::FULL_SD, Translated("`train.lr_factors`; 0: not trained")),
    row("learning_rate_te1", Number, "learning_rate", UsedBy(0x2a), Translated("`train.lr_factors`, with train_text_encoder; both 0: not trained")),
    row("learning_rate_te2", Number, "learning_rate", UsedBy(0x2a), Translated("`train.lr_factors`, with train_text_encoder")),
    row("learning_rate_te3", Number, "learning_rate", SD3, NoInfluence("T5 is not trained")),
    row("block_lr", Text, "", UsedBy::SDXL, refused("aitk has one learning rate for all blocks")),
    row("optimizer_type", Text, "AdamW", ALL, Translated("`train.optimizer`")),
    row("optimizer_args", Texts, "", ALL, Translated("`train.optimizer_params`, completed with sd-scripts' defaults")),
    row("use_8bit_adam", Flag, "false", ALL, Translated("`train.optimizer`: adamw8bit")),
    row("use_lion_optimizer", Flag, "false", ALL, Translated("`train.optimizer`: lion")),
    row("max_grad_norm", Number, "1.0", ALL, Translated("`train.max_grad_norm`; aitk does not clip with Adafactor")),
    row("fused_backward_pass", Flag, "false", ALL, Translated("no influence; an error without optimizer_type Adafactor, or with gradient_accumulation_steps, as in sd-scripts")),
    row("fused_optimizer_groups", Whole, "", UsedBy(0x22), Translated(FUSED)),
    row("blockwise_fused_optimizers", Flag, "false", UsedBy(0x2c), Translated(FUSED)),
    row(
        "lr_scheduler",
        Choice(&[
            "constant",
            "constant_with_warmup",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "cosine_with_min_lr",
            "inverse_sqrt",
            "warmup_stable_decay",
            "piecewise_constant",
            "reduce_lr_on_plateau",
            "adafactor",
        ]),
        "constant",
        ALL,
        Translated("`train.lr_scheduler`, `lr_scheduler_params`; adafactor only with Adafactor's relative_step; the four before it are refused"),
    ),
    row("lr_warmup_steps", Number, "0", ALL, Translated("`lr_scheduler_params.num_warmup_steps`; below 1 a share of the steps")),
    row("lr_decay_steps", Number, "0", ALL, NoInfluence("only warmup_stable_decay uses it, which is refused")),
    row("lr_scheduler_num_cycles", Whole, "1", ALL, Translated("`lr_scheduler_params.T_0`")),
    row("lr_scheduler_power", Number, "1", ALL, Translated("`lr_scheduler_params.power`")),
    row("lr_scheduler_min_lr_ratio", Number, "", ALL, Translated("`lr_scheduler_params.eta_min`")),
    row("lr_scheduler_timescale", Whole, "", ALL, NoInfluence("only inverse_sqrt uses it, which is refused")),
    row("lr_scheduler_args", Texts, "", ALL, Translated("`lr_scheduler_params`, with lr_scheduler_type")),
    row("lr_scheduler_type", Text, "", ALL, Translated("`train.lr_scheduler`: torch's CosineAnnealingLR, CosineAnnealingWarmRestarts, LinearLR and StepLR")),
];

#[rustfmt::skip]
const TRAINING: &[OptionRow] = &[
    row("max_train_steps", Whole, "1600", ALL, Translated("`train.steps`")),
    row("max_train_epochs", Whole, "", ALL, Translated("`train.steps`: epochs times the steps of an epoch; wins over max_train_steps")),
    row("train_batch_size", Whole, "1", ALL, Translated("`train.batch_size`")),
    row("gradient_accumulation_steps", Whole, "1", ALL, Translated("`train.gradient_accumulation`, and `datasets[].loss_multiplier`: 1 / steps, because aitk adds gradients where sd-scripts averages them")),
    row("gradient_checkpointing", Flag, "false", ALL, Translated("`train.gradient_checkpointing`")),
    row("mixed_precision", Choice(&["no", "fp16", "bf16"]), "no", ALL, Translated("`train.dtype`")),
    row("full_fp16", Flag, "false", ALL, Translated("a LoRA keeps its weights in float32; a whole model is refused")),
    row("full_bf16", Flag, "false", ALL, Translated("a LoRA keeps its weights in float32; a whole model is trained in bfloat16")),
    row("fp8_base", Flag, "false", LORA, Translated("`model.quantize`, `qtype: float8`, `quantize_te`")),
    row("fp8_base_unet", Flag, "false", LORA, Translated("the same without `quantize_te`")),
    row("seed", Whole, "", ALL, Translated("`training_seed`")),
    row("cache_text_encoder_outputs", Flag, "false", UsedBy::NOT_SD, Translated("`train.cache_text_embeddings`; for FLUX.1 and SD3 no influence where a text encoder is trained: sd-scripts caches T5 alone")),
    row("cache_text_encoder_outputs_to_disk", Flag, "false", UsedBy::NOT_SD, Translated("`train.cache_text_embeddings`; for FLUX.1 and SD3 no influence where a text encoder is trained: sd-scripts caches T5 alone")),
    row("text_encoder_batch_size", Whole, "", FLOW, NoInfluence(MEMORY)),
    row("blocks_to_swap", Whole, "", FLOW, Translated("`model.layer_offloading` with the same share of the transformer")),
    row("split_mode", Flag, "false", FLUX, Translated("as `blocks_to_swap = 18`")),
    row("double_blocks_to_swap", Whole, "", FLUX, NoInfluence(MEMORY)),
    row("single_blocks_to_swap", Whole, "", FLUX, NoInfluence(MEMORY)),
    row("cpu_offload_checkpointing", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("unsloth_offload_checkpointing", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("mem_eff_attn", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("xformers", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("sdpa", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("attn_mode", Text, "", ALL, NoInfluence(MEMORY)),
    row("split_attn", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("lowram", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("highvram", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("disable_mmap_load_safetensors", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("torch_compile", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("dynamo_backend", Text, "inductor", ALL, NoInfluence(MEMORY)),
    row("dynamo_mode", Text, "", ALL, NoInfluence(MEMORY)),
    row("dynamo_use_fullgraph", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("dynamo_use_dynamic", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("compile", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("compile_backend", Text, "inductor", ALL, NoInfluence(MEMORY)),
    row("compile_mode", Text, "default", ALL, NoInfluence(MEMORY)),
    row("compile_dynamic", Text, "auto", ALL, NoInfluence(MEMORY)),
    row("compile_fullgraph", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("compile_cache_size_limit", Whole, "", ALL, NoInfluence(MEMORY)),
    row("max_data_loader_n_workers", Whole, "8", ALL, NoInfluence(MEMORY)),
    row("persistent_data_loader_workers", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("ddp_timeout", Whole, "", ALL, NoInfluence(MEMORY)),
    row("ddp_gradient_as_bucket_view", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("ddp_static_graph", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("deepspeed", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("zero_stage", Whole, "2", ALL, NoInfluence(MEMORY)),
    row("offload_optimizer_device", Text, "", ALL, NoInfluence(MEMORY)),
    row("offload_optimizer_nvme_path", Text, "", ALL, NoInfluence(MEMORY)),
    row("offload_param_device", Text, "", ALL, NoInfluence(MEMORY)),
    row("offload_param_nvme_path", Text, "", ALL, NoInfluence(MEMORY)),
    row("zero3_init_flag", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("zero3_save_16bit_model", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("fp16_master_weights_and_gradients", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("initial_epoch", Whole, "", LORA, refused("give the step: initial_step")),
    row("initial_step", Whole, "", LORA, Translated("`train.start_step`")),
    row("skip_until_initial_step", Flag, "false", LORA, NoInfluence("aitk goes on with the images of the step")),
    row("resume", Text, "", ALL, Translated("for LoRAs: `network.pretrained_lora_path`, the weights in the state folder, and `train.start_step`, its step; the optimizer's state starts anew")),
    row("resume_from_huggingface", Flag, "false", ALL, refused("aitk reads state folders on this machine: download it")),
    row("train_inpainting", Flag, "false", UNET, refused("aitk trains no inpainting models")),
];

#[rustfmt::skip]
const LOSS: &[OptionRow] = &[
    row("noise_offset", Number, "0", UNET, Translated("`train.noise_offset`")),
    row("noise_offset_random_strength", Flag, "false", UNET, Translated("`train.noise_offset_random_strength`")),
    row("adaptive_noise_scale", Number, "0", UNET, Translated("`train.adaptive_noise_scale`, with noise_offset")),
    row("multires_noise_iterations", Whole, "0", UNET, Translated("`train.multires_noise_iterations`")),
    row("multires_noise_discount", Number, "0.3", UNET, Translated("`train.multires_noise_discount`")),
    row("ip_noise_gamma", Number, "0", NOT_SD3, Translated("`train.ip_noise_gamma`")),
    row("ip_noise_gamma_random_strength", Flag, "false", NOT_SD3, Translated("`train.ip_noise_gamma_random_strength`")),
    row("min_snr_gamma", Number, "0", UNET, Translated("`train.min_snr_gamma`")),
    row("scale_v_pred_loss_like_noise_pred", Flag, "false", UNET, refused("aitk weighs the loss of velocities with min_snr_gamma only")),
    row("v_pred_like_loss", Number, "0", UNET, refused("aitk adds no loss of velocities to that of noise")),
    row("debiased_estimation_loss", Flag, "false", UNET, Translated("`train.debiased_estimation_loss`")),
    row("zero_terminal_snr", Flag, "false", UNET, refused("aitk reads it from the model's files (`ztsnr`, or scheduler_config.json): remove it if yours have it")),
    row("min_timestep", Whole, "0", UsedBy(0x7b), Translated("`train.max_denoising_steps`: 999 - min_timestep")),
    row("max_timestep", Whole, "1000", UsedBy(0x7b), Translated("`train.min_denoising_steps`: 1000 - max_timestep")),
    row("loss_type", Choice(&["l1", "l2", "huber", "smooth_l1"]), "l2", ALL, Translated("`train.loss_type`: mae, mse; huber and smooth_l1 with a constant huber_c of 0.01: pseudo_huber")),
    row("huber_schedule", Choice(&["constant", "exponential", "snr"]), "snr", ALL, Translated("only constant, with huber and smooth_l1")),
    row("huber_c", Number, "0.1", ALL, Translated("only 0.01 (times huber_scale), with huber and smooth_l1")),
    row("huber_scale", Number, "1.0", ALL, Translated("see huber_c")),
    row("prior_loss_weight", Number, "1.0", ALL, Translated("`train.reg_weight`; sdxl_train does not use it")),
    row("masked_loss", Flag, "false", ALL, Translated("`datasets[].mask_path`; aitk scales the weights of a batch to 1 on average")),
    row("conditioning_data_dir", Text, "", ALL, refused("sd-scripts reads it in the subsets of a dataset_config only: put it there")),
    row("guidance_scale", Number, "3.5", FLUX, Translated("`train.cfg_scale`")),
    row("timestep_sampling", Choice(&["sigma", "uniform", "sigmoid", "shift", "flux_shift"]), "sigma", FLUX, Translated("`train.timestep_type`: uniform and sigma are linear, the others sigmoid")),
    row("discrete_flow_shift", Number, "3.0", FLUX, Translated("`train.timestep_shift`, with timestep_sampling shift or sigma")),
    row("sigmoid_scale", Number, "1.0", FLUX, Translated("`train.timestep_sigmoid_scale`, with timestep_sampling sigmoid, shift or flux_shift")),
    row("model_prediction_type", Choice(&["raw", "additive", "sigma_scaled"]), "sigma_scaled", FLUX, Translated("only raw")),
    row("weighting_scheme", Choice(&["sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform"]), "uniform", FLOW, Translated("SD3: `train.timestep_type`, `t0_loss_target`; mode and cosmap are refused. FLUX.1: only with timestep_sampling sigma, where logit_normal and mode are refused")),
    row("logit_mean", Number, "0", SD3, refused_unless("0", "aitk's sigmoid has the mean 0")),
    row("logit_std", Number, "1", SD3, Translated("`train.timestep_sigmoid_scale`, with weighting_scheme logit_normal")),
    row("mode_scale", Number, "1.29", FLOW, NoInfluence("only weighting_scheme mode uses it, which is refused")),
    row("training_shift", Number, "1.0", SD3, Translated("`train.timestep_shift`")),
];

#[rustfmt::skip]
const DATA: &[OptionRow] = &[
    row("train_data_dir", Text, "", ALL, Translated("one entry of `datasets` for each folder named `10_name`")),
    row("reg_data_dir", Text, "", ALL, Translated("the same, with `is_reg`")),
    row("dataset_config", Text, "", ALL, Translated("`datasets`, see below; then the two options above have no effect")),
    row("in_json", Text, "", ALL, Translated("`datasets[].captions_file`, of the images in train_data_dir")),
    row("dataset_repeats", Whole, "1", ALL, Translated("`datasets[].num_repeats` of data set configs")),
    row("dataset_class", Text, "", ALL, refused("aitk runs no code of a config")),
    row("resolution", Size, "", ALL, Translated("`datasets[].resolution`: the side of a square of the same area; without buckets, if it is not a square: `datasets[].size`")),
    row("enable_bucket", Flag, "false", ALL, Translated("`datasets[].buckets`")),
    row("bucket_no_upscale", Flag, "false", ALL, Translated("always on: with buckets, aitk does not enlarge images")),
    row("min_bucket_reso", Whole, "256", ALL, NoInfluence("aitk's buckets have the area of the resolution, at the ratio of the image")),
    row("max_bucket_reso", Whole, "1024", ALL, NoInfluence("aitk's buckets have the area of the resolution, at the ratio of the image")),
    row("bucket_reso_steps", Whole, "64", ALL, NoInfluence("aitk's buckets are multiples of what the model needs")),
    row("caption_extension", Text, ".caption", ALL, Translated("`datasets[].caption_ext`")),
    row("caption_extention", Text, "", ALL, Translated("older spelling of caption_extension; wins over it")),
    row("shuffle_caption", Flag, "false", ALL, Translated("`datasets[].shuffle_tokens`")),
    row("keep_tokens", Whole, "0", ALL, Translated("`datasets[].keep_tokens`, `datasets[].shuffle_keeps_tokens`")),
    row("keep_tokens_separator", Text, "", ALL, Translated("`datasets[].keep_tokens_separator` if captions are shuffled or tags are dropped, else without influence")),
    row("caption_separator", Text, ",", ALL, Translated("`datasets[].caption_separator`")),
    row("secondary_separator", Text, "", ALL, Translated("`datasets[].secondary_separator`")),
    row("enable_wildcard", Flag, "false", ALL, Translated("`datasets[].enable_wildcard`")),
    row("caption_prefix", Text, "", ALL, Translated("`datasets[].caption_prefix`")),
    row("caption_suffix", Text, "", ALL, Translated("`datasets[].caption_suffix`")),
    row("caption_dropout_rate", Number, "0", ALL, Translated("`datasets[].caption_dropout_rate`")),
    row("caption_dropout_every_n_epochs", Whole, "0", ALL, refused(EVERY_N_EPOCHS)),
    row("caption_tag_dropout_rate", Number, "0", ALL, Translated("`datasets[].token_dropout_rate`")),
    row("token_warmup_min", Whole, "1", ALL, NoInfluence("only token_warmup_step uses it, which is refused")),
    row("token_warmup_step", Number, "0", ALL, refused(TOKEN_WARMUP)),
    row("flip_aug", Flag, "false", ALL, Translated("`datasets[].flip_x`: both images, where sd-scripts flips every second time")),
    row("color_aug", Flag, "false", ALL, refused(COLOR_AUG)),
    row("random_crop", Flag, "false", ALL, Translated("`datasets[].random_crop`: with buckets drawn once for each image")),
    row("face_crop_aug_range", Text, "", ALL, refused(FACE_CROP)),
    row("resize_interpolation", Text, "", ALL, Noted("aitk has one way to scale images")),
    row("alpha_mask", Flag, "false", ALL, Translated("`datasets[].alpha_mask`; aitk scales the weights of a batch to 1 on average. fine_tune does not use it")),
    row("cache_latents", Flag, "false", ALL, Translated("`datasets[].cache_latents`")),
    row("cache_latents_to_disk", Flag, "false", ALL, Translated("`datasets[].cache_latents_to_disk`")),
    row("vae_batch_size", Whole, "1", ALL, NoInfluence(MEMORY)),
    row("skip_cache_check", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("skip_latents_validity_check", Flag, "false", FULL, NoInfluence(MEMORY)),
    row("cache_info", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("debug_dataset", Flag, "false", ALL, refused("it shows the images and trains nothing: use `aitk validate`")),
    row("validation_split", Number, "0", ALL, Translated(VALIDATION_SPLIT)),
    row("validation_seed", Whole, "", ALL, Translated(VALIDATION_SEED)),
    row("validate_every_n_steps", Whole, "", LORA, Translated("`train.validation_config.validate_every_n_steps`; wins over validate_every_n_epochs")),
    row("validate_every_n_epochs", Whole, "1", LORA, Translated("`train.validation_config.validate_every_n_steps`: epochs times the steps of an epoch")),
    row("max_validation_steps", Whole, "", LORA, Translated("`train.validation_config.validation_items`: at most this many batches of images")),
];

#[rustfmt::skip]
const SAVING: &[OptionRow] = &[
    row("output_dir", Text, "", ALL, Translated("`training_folder`; the files are in a folder of the job's name in it")),
    row("output_name", Text, "last", ALL, Translated("`config.name`")),
    row("save_every_n_steps", Whole, "", ALL, Translated("`save.save_every`")),
    row("save_every_n_epochs", Whole, "", ALL, Translated("`save.save_every`: epochs times the steps of an epoch")),
    row("save_n_epoch_ratio", Whole, "", ALL, Translated("`save.save_every`: at least this many saves")),
    row("save_last_n_steps", Whole, "", ALL, Translated("`save.max_step_saves_to_keep`, else 0: all")),
    row("save_last_n_epochs", Whole, "", ALL, Translated("`save.max_step_saves_to_keep`, else 0: all")),
    row("save_precision", Choice(&["float", "fp16", "bf16"]), "the weights' own", ALL, Translated("`save.dtype`")),
    row("save_model_as", Choice(&["ckpt", "pt", "safetensors", "diffusers", "diffusers_safetensors"]), "safetensors; of whole models that of the model", ALL, Translated("`save.save_format` of whole models; aitk writes safetensors")),
    row("use_safetensors", Flag, "false", ALL, NoInfluence("aitk writes safetensors")),
    row("save_state", Flag, "false", ALL, NoInfluence("aitk always keeps what it needs to resume")),
    row("save_state_on_train_end", Flag, "false", ALL, NoInfluence("aitk always keeps what it needs to resume")),
    row("save_last_n_steps_state", Whole, "", ALL, NoInfluence("aitk always keeps what it needs to resume")),
    row("save_last_n_epochs_state", Whole, "", ALL, NoInfluence("aitk always keeps what it needs to resume")),
    row("mem_eff_save", Flag, "false", ALL, NoInfluence(MEMORY)),
    row("no_metadata", Flag, "false", LORA, Noted("files have their metadata")),
    row("training_comment", Text, "", ALL, Translated("`meta.training_comment`")),
    row("metadata_title", Text, "", ALL, Translated("`meta.title`")),
    row("metadata_author", Text, "", ALL, Translated("`meta.author`")),
    row("metadata_description", Text, "", ALL, Translated("`meta.description`")),
    row("metadata_license", Text, "", ALL, Translated("`meta.license`")),
    row("metadata_tags", Text, "", ALL, Translated("`meta.tags`")),
    row("metadata_usage_hint", Text, "", ALL, Translated("`meta.usage_hint`")),
    row("metadata_thumbnail", Text, "", ALL, Translated("`meta.thumbnail`")),
    row("metadata_merged_from", Text, "", ALL, Translated("`meta.merged_from`")),
    row("metadata_trigger_phrase", Text, "", ALL, Translated("`meta.trigger_phrase`")),
    row("metadata_preprocessor", Text, "", ALL, Translated("`meta.preprocessor`")),
    row("metadata_is_negative_embedding", Text, "", ALL, Translated("`meta.is_negative_embedding`")),
    row("huggingface_repo_id", Text, "", ALL, Translated("`save.push_to_hub`, `save.hf_repo_id`")),
    row("huggingface_repo_type", Text, "", ALL, NoInfluence(HUB)),
    row("huggingface_path_in_repo", Text, "", ALL, NoInfluence(HUB)),
    row("huggingface_token", Text, "", ALL, NoInfluence(HUB)),
    row("huggingface_repo_visibility", Text, "", ALL, Translated("`save.hf_private`: private unless it is `public`")),
    row("save_state_to_huggingface", Flag, "false", ALL, NoInfluence(HUB)),
    row("async_upload", Flag, "false", ALL, NoInfluence(HUB)),
];

#[rustfmt::skip]
const SAMPLES: &[OptionRow] = &[
    row("sample_prompts", Text, "", ALL, Translated("`sample.samples`: the prompts of the file")),
    row("sample_every_n_steps", Whole, "", ALL, Translated("`sample.sample_every`")),
    row("sample_every_n_epochs", Whole, "", ALL, Translated("`sample.sample_every`: epochs times the steps of an epoch")),
    row("sample_at_first", Flag, "false", ALL, Translated("`train.skip_first_sample`: true without it")),
    row(
        "sample_sampler",
        Choice(&[
            "ddim",
            "pndm",
            "lms",
            "euler",
            "euler_a",
            "heun",
            "dpm_2",
            "dpm_2_a",
            "dpmsolver",
            "dpmsolver++",
            "dpmsingle",
            "k_lms",
            "k_euler",
            "k_euler_a",
            "k_dpm_2",
            "k_dpm_2_a",
        ]),
        "ddim",
        UNET,
        Translated("`sample.sampler`; one that aitk lacks is replaced, with a note"),
    ),
];

#[rustfmt::skip]
const LOGGING: &[OptionRow] = &[
    row("logging_dir", Text, "", ALL, Translated("`log_dir`: metrics for TensorBoard. The folder in it is named by the job and the time")),
    row("log_with", Text, "", ALL, NoInfluence(LOGGER)),
    row("log_prefix", Text, "", ALL, NoInfluence(LOGGER)),
    row("log_tracker_name", Text, "", ALL, NoInfluence(LOGGER)),
    row("log_tracker_config", Text, "", ALL, NoInfluence(LOGGER)),
    row("log_config", Flag, "false", ALL, NoInfluence(LOGGER)),
    row("wandb_run_name", Text, "", ALL, NoInfluence(LOGGER)),
    row("wandb_api_key", Text, "", ALL, NoInfluence(LOGGER)),
    row("console_log_level", Text, "", ALL, NoInfluence(LOGGER)),
    row("console_log_file", Text, "", ALL, NoInfluence(LOGGER)),
    row("console_log_simple", Flag, "false", ALL, NoInfluence(LOGGER)),
    row("config_file", Text, "", ALL, NoInfluence("this is the config file")),
    row("output_config", Flag, "false", ALL, NoInfluence("it writes the config file: `aitk import -o`")),
    row("show_timesteps", Text, "", ALL, refused("it shows the timesteps and trains nothing")),
    row("show_timesteps_resolution", Text, "", ALL, NoInfluence("only show_timesteps uses it")),
    row("epoch", Whole, "", ALL, NoInfluence(GUI)),
    row("noise_offset_type", Text, "", ALL, NoInfluence(GUI)),
    row("model_list", Text, "", ALL, NoInfluence(GUI)),
];

/// All options, in the order of the documentation.
pub(super) const GROUPS: &[Group] = &[
    Group {
        title: "Model",
        options: MODEL,
    },
    Group {
        title: "Adapter, and what is trained",
        options: NETWORK,
    },
    Group {
        title: "Textual inversion",
        options: TEXTUAL_INVERSION,
    },
    Group {
        title: "Optimizer and learning rate",
        options: OPTIMIZER,
    },
    Group {
        title: "Training",
        options: TRAINING,
    },
    Group {
        title: "Noise, timesteps, loss",
        options: LOSS,
    },
    Group {
        title: "Images and captions",
        options: DATA,
    },
    Group {
        title: "Saving",
        options: SAVING,
    },
    Group {
        title: "Samples",
        options: SAMPLES,
    },
    Group {
        title: "Logging and others",
        options: LOGGING,
    },
];

/// All options.
pub(super) fn rows() -> impl Iterator<Item = &'static OptionRow> + Clone {
    GROUPS.iter().flat_map(|group| group.options)
}

/// The option with this name.
pub(super) fn find(name: &str) -> Option<&'static OptionRow> {
    rows().find(|row| row.name == name)
}
