//! The three text encoders of Stable Diffusion 3.5: CLIP-L, CLIP-G, and T5, which may be missing.

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::TextEncoders;
use crate::families::part::{Part, PartInfo};
use crate::families::text_files::{AdaptedClip, ClipFiles, TextEncoderFiles};
use crate::families::transformer_family::TransformerText;
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::nn::cat_channels;
use aitk_common::model_files::ModelPart;
use candle_core::{D, DType, Device, Tensor};

/// The names in the conditioning: the encoded text, and the pooled text.
pub(super) const CONTEXT: &str = "context";
pub(super) const POOLED: &str = "pooled";
/// Tokens of a prompt for T5 (`max_sequence_length` of diffusers' pipeline).
pub(super) const TEXT_TOKENS: usize = 256;

/// CLIP-L and CLIP-G, to whose layers adapters are added.
pub(super) const CLIP: [AdaptedClip; 2] = [
    AdaptedClip {
        part: ModelPart::ClipL,
        info: PartInfo::text_encoder("text_encoder"),
        published: published_clip_l,
        build: ClipTextModel::with_projection_if_stored,
    },
    AdaptedClip {
        part: ModelPart::ClipG,
        info: PartInfo::text_encoder("text_encoder_2"),
        published: published_clip_g,
        build: ClipTextModel::with_projection_if_stored,
    },
];

/// `text_encoder/config.json` of Stable Diffusion 3.5: CLIP-L.
fn published_clip_l() -> ClipTextConfig {
    ClipTextConfig {
        projection_dim: 768,
        ..ClipTextConfig::default()
    }
}

/// `text_encoder_2/config.json` of Stable Diffusion 3.5: CLIP-G.
fn published_clip_g() -> ClipTextConfig {
    ClipTextConfig {
        hidden_size: 1280,
        intermediate_size: 5120,
        num_hidden_layers: 32,
        num_attention_heads: 20,
        hidden_act: "gelu".into(),
        projection_dim: 1280,
        ..ClipTextConfig::default()
    }
}

/// What the text encoders are built from.
pub struct Sd3TextFiles {
    /// CLIP-L and CLIP-G.
    pub(super) clip: [ClipFiles; 2],
    /// Without T5 its tokens are zeros.
    pub(super) t5: Option<TextEncoderFiles<T5Config>>,
}

/// CLIP with its tokenizer.
#[derive(Clone, Debug)]
pub(super) struct ClipEncoder {
    pub(super) tokenizer: ClipTokenizer,
    pub(super) model: ClipTextModel,
}

/// T5 with its tokenizer.
#[derive(Clone, Debug)]
pub(super) struct T5Encoder {
    pub(super) tokenizer: T5Tokenizer,
    pub(super) model: T5EncoderModel,
}

/// The text encoders.
#[derive(Clone, Debug)]
pub struct Sd3TextEncoders {
    /// CLIP-L and CLIP-G, both with a projection of the pooled text.
    pub(super) clip: [ClipEncoder; 2],
    /// Without T5 its tokens are zeros, as in diffusers.
    pub(super) t5: Option<T5Encoder>,
    /// Tokens of a prompt for T5.
    pub(super) max_sequence_length: usize,
    /// No token attends to the padding in T5 (sd-scripts' `apply_t5_attn_mask`). The transformer attends to all of T5's tokens.
    pub(super) masks_attention: bool,
    /// The same in both CLIPs (`apply_lg_attn_mask`).
    pub(super) masks_clip_attention: bool,
    /// Features of a token: those of T5.
    pub(super) width: usize,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

impl TextEncoders for Sd3TextEncoders {
    /// Encodes prompts, as `StableDiffusion3Pipeline.encode_prompt`: the tokens of both CLIPs side by side, padded with zeros to the width of
    /// T5's, before those of T5, [b, 77 + `max_sequence_length`, width]; and the pooled text of both CLIPs side by side.
    /// The second prompt is that of CLIP-G.
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        let first: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        let second: Vec<&str> = prompts
            .iter()
            .map(|prompt| prompt.text_2.as_deref().unwrap_or(&prompt.text))
            .collect();
        let (mut tokens, mut pooled) = (Vec::new(), Vec::new());
        for (encoder, texts) in self.clip.iter().zip([&first, &second]) {
            let ids = encoder.tokenizer.encode(texts)?.to_device(&self.device)?;
            let (of_encoder, projected) = encoder.model.penultimate_and_pooled(&ids, self.masks_clip_attention)?;
            tokens.push(of_encoder);
            pooled.extend(projected);
        }
        let tokens = Tensor::cat(&tokens, D::Minus1)?;
        let missing = self.width.saturating_sub(tokens.dim(D::Minus1)?);
        let tokens = tokens.pad_with_zeros(D::Minus1, 0, missing)?;
        let of_t5 = match &self.t5 {
            Some(t5) => {
                let ids = t5.tokenizer.encode(&first, self.max_sequence_length)?;
                let lengths = match self.masks_attention {
                    true => Some(t5.tokenizer.lengths(&ids)?),
                    false => None,
                };
                t5.model.forward(&ids.to_device(&self.device)?, lengths.as_deref())?
            }
            None => Tensor::zeros(
                (prompts.len(), self.max_sequence_length, self.width),
                self.dtype,
                &self.device,
            )?,
        };
        Ok(Conditioning::default()
            .with(CONTEXT, cat_channels(&tokens, &of_t5)?)
            .with(POOLED, Tensor::cat(&pooled, D::Minus1)?))
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let [first, second] = &mut self.clip;
        let [clip_l, clip_g] = CLIP;
        vec![clip_l.info.with(&mut first.model), clip_g.info.with(&mut second.model)]
    }
}

impl TransformerText for Sd3TextEncoders {
    fn max_sequence_length(&self) -> usize {
        self.max_sequence_length
    }

    fn set_max_sequence_length(&mut self, tokens: usize) {
        self.max_sequence_length = tokens;
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        for encoder in &mut self.clip {
            encoder.model.checkpointing = checkpointing;
        }
        if let Some(t5) = &mut self.t5 {
            t5.model.checkpointing = checkpointing;
        }
    }
}
