//! The text encoders of FLUX.1: CLIP for the pooled text, T5 for the context.

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::TextEncoders;
use crate::families::part::{Part, PartInfo};
use crate::families::text_files::{AdaptedClip, ClipFiles, TextEncoderFiles};
use crate::families::transformer_family::TransformerText;
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use aitk_common::model_files::ModelPart;
use candle_core::{Device, Tensor};

/// The names in the conditioning: the encoded text (T5), the pooled text (CLIP), and where padding is masked the number of T5's tokens (u32).
pub(super) const CONTEXT: &str = "context";
pub(super) const LENGTHS: &str = "lengths";
pub(super) const POOLED: &str = "pooled";

/// The text encoder to whose layers adapters are added.
pub(super) const CLIP: AdaptedClip = AdaptedClip {
    part: ModelPart::ClipL,
    info: PartInfo::text_encoder("text_encoder"),
    published: ClipTextConfig::default,
    build: ClipTextModel::new,
};

/// What both text encoders are built from.
pub struct FluxTextFiles {
    pub(super) clip: ClipFiles,
    pub(super) t5: TextEncoderFiles<T5Config>,
}

/// Both text encoders with their tokenizers.
#[derive(Clone, Debug)]
pub struct FluxTextEncoders {
    pub(super) clip_tokenizer: ClipTokenizer,
    pub(super) clip: ClipTextModel,
    pub(super) t5_tokenizer: T5Tokenizer,
    pub(super) t5: T5EncoderModel,
    /// Tokens of a prompt for T5: 512 for dev, 256 for schnell.
    pub(super) max_sequence_length: usize,
    /// What T5 makes of the padding becomes zero (ai-toolkit's `attn_masking`).
    pub(super) masks_padding: bool,
    /// No token attends to the padding of T5 (sd-scripts' `apply_t5_attn_mask`).
    pub(super) masks_attention: bool,
    pub(super) device: Device,
}

impl TextEncoders for FluxTextEncoders {
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        let first: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        let second: Vec<&str> = prompts
            .iter()
            .map(|prompt| prompt.text_2.as_deref().unwrap_or(&prompt.text))
            .collect();
        let clip_ids = self.clip_tokenizer.encode(&first)?.to_device(&self.device)?;
        let t5_ids = self.t5_tokenizer.encode(&second, self.max_sequence_length)?;
        let lengths = match self.masks_attention {
            true => Some(self.t5_tokenizer.lengths(&t5_ids)?),
            false => None,
        };
        let mut context = self.t5.forward(&t5_ids.to_device(&self.device)?, lengths.as_deref())?;
        if self.masks_padding {
            let mask = self.t5_tokenizer.mask(&t5_ids)?.to_device(&self.device)?;
            context = context.broadcast_mul(&mask.to_dtype(context.dtype())?)?;
        }
        let conditioning = Conditioning::default()
            .with(CONTEXT, context)
            .with(POOLED, self.clip.pooled(&clip_ids)?);
        Ok(match lengths {
            Some(lengths) => {
                let lengths: Vec<u32> = lengths.into_iter().map(|length| length as u32).collect();
                conditioning.with(LENGTHS, Tensor::new(lengths, &Device::Cpu)?)
            }
            None => conditioning,
        })
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        vec![CLIP.info.with(&mut self.clip)]
    }
}

impl TransformerText for FluxTextEncoders {
    fn max_sequence_length(&self) -> usize {
        self.max_sequence_length
    }

    fn set_max_sequence_length(&mut self, tokens: usize) {
        self.max_sequence_length = tokens;
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.clip.checkpointing = checkpointing;
        self.t5.checkpointing = checkpointing;
    }
}
