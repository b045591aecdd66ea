//! How FLUX.1 differs from other families of transformers.

use super::FluxFamily;
use super::text::{CLIP, CONTEXT, FluxTextEncoders, FluxTextFiles, LENGTHS, POOLED};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::conditioning::Conditioning;
use crate::families::model::{GuidanceKind, no_control};
use crate::families::options::LoadOptions;
use crate::families::part::PartInfo;
use crate::families::part_files::{PublishedVae, TransformerKind, check_width};
use crate::families::scheduler_config;
use crate::families::text_files::{AdaptedClip, open_t5};
use crate::families::transformer_family::{PartsOf, TransformerFamily};
use crate::models::clip::ClipTokenizer;
use crate::models::config;
use crate::models::flux::{FluxConditions, FluxConfig, FluxTransformer2DModel, single_file};
use crate::models::t5::{T5EncoderModel, T5Tokenizer};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::ModelParts;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::path::Path;

/// The guidance scale in the conditioning.
const GUIDANCE: &str = "guidance";
/// The latents of the control image in the conditioning.
const CONTROL: &str = "control";
/// T5 tokens of a prompt for FLUX.1-dev and the models made from it, also those without a guidance embedding.
const TEXT_TOKENS_DEV: usize = 512;
/// T5 tokens of a prompt for FLUX.1-schnell: it has no guidance embedding, and its scheduler has no `use_dynamic_shifting`.
const TEXT_TOKENS_SCHNELL: usize = 256;
/// Why the widths of parts may differ.
const OTHER_WIDTHS: &str =
    "they belong to different models, or to one with additional channels (Fill, control), which is not supported yet";

impl TransformerFamily for FluxFamily {
    type Config = FluxConfig;
    type Transformer = FluxTransformer2DModel;
    type TextFiles = FluxTextFiles;
    type Text = FluxTextEncoders;

    const NAME: &'static str = "FLUX.1";
    const ARCH: ArchName = ArchName::Flux;
    const DENOISER: PartInfo =
        PartInfo::transformer("transformer", &["transformer_blocks", "single_transformer_blocks"]);
    const ADAPTED_CLIPS: &'static [AdaptedClip] = &[CLIP];
    const TRANSFORMER: TransformerKind<FluxConfig> = TransformerKind {
        has_original_names: single_file::has_original_names,
        with_diffusers_names: single_file::with_diffusers_names,
        config_of: single_file::config_of,
        config_json: single_file::config_json,
    };
    const VAE: PublishedVae = PublishedVae::FLUX;
    const NEVER_QUANTISED: &'static [&'static str] = &[
        "x_embedder",
        "context_embedder",
        "time_text_embed.*",
        "norm_out.*",
        "proj_out",
    ];
    const FILTERS_WITH_PART: bool = true;
    const GUIDANCE: GuidanceKind = GuidanceKind::Distilled;

    fn arch_name(&self) -> ArchName {
        self.arch
    }

    fn open_text(parts: &ModelParts, path: &Path) -> Result<FluxTextFiles> {
        Ok(FluxTextFiles {
            clip: CLIP.open(parts)?,
            t5: open_t5(parts, path)?,
        })
    }

    fn text_indexes(text: &FluxTextFiles) -> Vec<&Index> {
        vec![&text.clip.index, &text.t5.index]
    }

    /// Without one of the same kind (dev, schnell): the published one.
    fn scheduler(parts: &ModelParts, flux: &FluxConfig) -> Result<Value> {
        let is_dev = flux.guidance_embeds;
        let is_other = |file: &Path| Ok(config::read::<FluxConfig>(file)?.guidance_embeds != is_dev);
        scheduler_config::of_transformer(parts, is_other, scheduler_config::flux(is_dev))
    }

    fn check_widths(parts: &PartsOf<Self>) -> Result<()> {
        let (clip, t5, flux) = (&parts.text.clip, &parts.text.t5, &parts.config);
        check_width(
            &clip.index,
            "text encoder gives",
            clip.config.hidden_size,
            flux.pooled_projection_dim,
            OTHER_WIDTHS,
        )?;
        check_width(
            &t5.index,
            "second text encoder gives",
            t5.config.d_model,
            flux.joint_attention_dim,
            OTHER_WIDTHS,
        )?;
        check_width(
            &parts.vae,
            "autoencoder's tokens have",
            parts.vae_config.latent_channels.saturating_mul(4),
            flux.in_channels,
            OTHER_WIDTHS,
        )
    }

    fn build_text(parts: &PartsOf<Self>, options: &LoadOptions) -> Result<FluxTextEncoders> {
        let (clip, t5) = (&parts.text.clip, &parts.text.t5);
        let is_schnell = !parts.config.guidance_embeds && parts.scheduler["use_dynamic_shifting"] != true;
        Ok(FluxTextEncoders {
            clip_tokenizer: clip.open_tokenizer(ClipTokenizer::openai)?,
            clip: clip.build(options, CLIP.build)?,
            t5_tokenizer: T5Tokenizer::open(&t5.tokenizer)?,
            t5: t5.build(options, T5EncoderModel::new)?,
            masks_padding: options.prompt_reading.masks_padding,
            masks_attention: options.prompt_reading.masks_attention,
            max_sequence_length: match is_schnell {
                true => TEXT_TOKENS_SCHNELL,
                false => TEXT_TOKENS_DEV,
            },
            device: options.device.clone(),
        })
    }

    fn build_transformer(weights: &Weights, config: &FluxConfig) -> Result<FluxTransformer2DModel> {
        FluxTransformer2DModel::new(weights, config)
    }

    fn checkpointing(transformer: &mut FluxTransformer2DModel) -> &mut Checkpointing {
        &mut transformer.checkpointing
    }

    fn predict(
        transformer: &FluxTransformer2DModel,
        latents: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        _: &[usize],
    ) -> Result<Tensor> {
        let dtype = latents.dtype();
        let guidance = conditioning.find(GUIDANCE);
        let guidance = guidance.map(|scale| scale.to_dtype(DType::F32)).transpose()?;
        let control = conditioning.find(CONTROL);
        let control = control.map(|latents| latents.to_dtype(dtype)).transpose()?;
        let lengths = conditioning.find(LENGTHS);
        let lengths = lengths.map(|_| conditioning.counts(LENGTHS)).transpose()?;
        let conditions = FluxConditions {
            text: &conditioning.get(CONTEXT)?.to_dtype(dtype)?,
            text_lengths: lengths.as_deref(),
            pooled: &conditioning.get(POOLED)?.to_dtype(dtype)?,
            guidance: guidance.as_ref(),
            control: control.as_ref(),
        };
        transformer.forward(latents, timesteps, &conditions)
    }

    fn with_guidance(conditioning: Conditioning, scales: &[f64], device: &Device) -> Result<Conditioning> {
        let count = conditioning.batch();
        let scales: Vec<f32> = match scales {
            [scale] => vec![*scale as f32; count],
            scales => scales.iter().map(|scale| *scale as f32).collect(),
        };
        Ok(conditioning.with(GUIDANCE, Tensor::from_vec(scales, count, device)?))
    }

    fn without_guidance(conditioning: Conditioning) -> Conditioning {
        conditioning.without(GUIDANCE)
    }

    fn decorator_width(transformer: &FluxTransformer2DModel) -> Option<usize> {
        Some(transformer.text_width())
    }

    /// They have positions of zero, as all text.
    fn with_tokens(&self, conditioning: Conditioning, tokens: &Tensor) -> Result<Conditioning> {
        if conditioning.find(LENGTHS).is_some() {
            return Err(EngineError::bad_input(
                "model.apply_t5_attn_mask: cannot be used together with `decorator`, whose tokens follow the padding that is masked",
            ));
        }
        let text = conditioning.get(CONTEXT)?;
        let (items, _, width) = text.dims3()?;
        let tokens = tokens.to_dtype(text.dtype())?.unsqueeze(0)?;
        let tokens = tokens.broadcast_as((items, tokens.dim(1)?, width))?;
        let text = Tensor::cat(&[text, &tokens], 1)?;
        Ok(conditioning.with(CONTEXT, text))
    }

    fn takes_control(&self) -> bool {
        self.arch == ArchName::FluxKontext
    }

    fn with_control(&self, conditioning: Conditioning, latents: &[Tensor]) -> Result<Conditioning> {
        match (self.takes_control(), latents) {
            (true, [latents]) => Ok(conditioning.with(CONTROL, latents.clone())),
            (true, _) => Err(EngineError::Internal(
                "FLUX.1 Kontext takes one latent tensor of a control image".into(),
            )),
            (false, _) => Err(no_control(self.arch)),
        }
    }
}
