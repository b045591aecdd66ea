//! The configs of Stable Diffusion XL base as diffusers writes them, for models that were loaded from a single file,
//! which has no configs.

/// `text_encoder/config.json`.
pub(super) const TEXT_ENCODER: &str = r#"{
  "architectures": ["CLIPTextModel"],
  "attention_dropout": 0.0,
  "bos_token_id": 0,
  "dtype": "float32",
  "eos_token_id": 2,
  "hidden_act": "quick_gelu",
  "hidden_size": 768,
  "initializer_factor": 1.0,
  "initializer_range": 0.02,
  "intermediate_size": 3072,
  "layer_norm_eps": 1e-05,
  "max_position_embeddings": 77,
  "model_type": "clip_text_model",
  "num_attention_heads": 12,
  "num_hidden_layers": 12,
  "pad_token_id": 1,
  "projection_dim": 768,
  "torch_dtype": "float32",
  "vocab_size": 49408
}
"#;

/// `text_encoder_2/config.json`.
pub(super) const TEXT_ENCODER_2: &str = r#"{
  "architectures": ["CLIPTextModelWithProjection"],
  "attention_dropout": 0.0,
  "bos_token_id": 0,
  "dtype": "float32",
  "eos_token_id": 2,
  "hidden_act": "gelu",
  "hidden_size": 1280,
  "initializer_factor": 1.0,
  "initializer_range": 0.02,
  "intermediate_size": 5120,
  "layer_norm_eps": 1e-05,
  "max_position_embeddings": 77,
  "model_type": "clip_text_model",
  "num_attention_heads": 20,
  "num_hidden_layers": 32,
  "pad_token_id": 1,
  "projection_dim": 1280,
  "torch_dtype": "float32",
  "vocab_size": 49408
}
"#;

/// `unet/config.json`.
pub(super) const UNET: &str = r#"{
  "_class_name": "UNet2DConditionModel",
  "_diffusers_version": "0.42.1",
  "act_fn": "silu",
  "addition_embed_type": "text_time",
  "addition_time_embed_dim": 256,
  "attention_head_dim": [5, 10, 20],
  "block_out_channels": [320, 640, 1280],
  "center_input_sample": false,
  "cross_attention_dim": 2048,
  "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
  "downsample_padding": 1,
  "flip_sin_to_cos": true,
  "freq_shift": 0,
  "in_channels": 4,
  "layers_per_block": 2,
  "mid_block_scale_factor": 1,
  "mid_block_type": "UNetMidBlock2DCrossAttn",
  "norm_eps": 1e-05,
  "norm_num_groups": 32,
  "out_channels": 4,
  "projection_class_embeddings_input_dim": 2816,
  "sample_size": 128,
  "transformer_layers_per_block": [1, 2, 10],
  "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
  "use_linear_projection": true
}
"#;

/// `vae/config.json`.
pub(super) const VAE: &str = r#"{
  "_class_name": "AutoencoderKL",
  "_diffusers_version": "0.42.1",
  "act_fn": "silu",
  "block_out_channels": [128, 256, 512, 512],
  "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D"],
  "force_upcast": true,
  "in_channels": 3,
  "latent_channels": 4,
  "layers_per_block": 2,
  "norm_num_groups": 32,
  "out_channels": 3,
  "sample_size": 1024,
  "scaling_factor": 0.13025,
  "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"]
}
"#;

/// `scheduler/scheduler_config.json`.
pub(super) const SCHEDULER: &str = r#"{
  "_class_name": "EulerDiscreteScheduler",
  "_diffusers_version": "0.42.1",
  "beta_end": 0.012,
  "beta_schedule": "scaled_linear",
  "beta_start": 0.00085,
  "interpolation_type": "linear",
  "num_train_timesteps": 1000,
  "prediction_type": "epsilon",
  "set_alpha_to_one": false,
  "skip_prk_steps": true,
  "steps_offset": 1,
  "timestep_spacing": "leading",
  "trained_betas": null,
  "use_karras_sigmas": false
}
"#;
