//! The text encoder of Chroma: T5, with masks.

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::TextEncoders;
use crate::families::part::Part;
use crate::families::transformer_family::TransformerText;
use crate::models::t5::{T5EncoderModel, T5Tokenizer};
use candle_core::{Device, Tensor};

/// The names in the conditioning: the encoded text, and the number of its tokens that the transformer attends to (u32).
pub(super) const CONTEXT: &str = "context";
pub(super) const LENGTHS: &str = "lengths";
/// Tokens of a prompt, as in diffusers' pipeline.
pub(super) const TEXT_TOKENS: usize = 512;
/// How much of the padding the transformer attends to: the model was trained so.
const ATTENDED_PADDING: usize = 1;

/// T5 with its tokenizer.
#[derive(Clone, Debug)]
pub struct ChromaTextEncoder {
    pub(super) tokenizer: T5Tokenizer,
    pub(super) model: T5EncoderModel,
    /// Tokens of a prompt, with its end and padding.
    pub(super) max_sequence_length: usize,
    pub(super) device: Device,
}

impl TextEncoders for ChromaTextEncoder {
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        let texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        let ids = self.tokenizer.encode(&texts, self.max_sequence_length)?;
        let lengths = self.tokenizer.lengths(&ids)?;
        // T5 itself attends to no padding.
        let context = self.model.forward(&ids.to_device(&self.device)?, Some(&lengths))?;
        let attended = lengths
            .into_iter()
            .map(|length| (length + ATTENDED_PADDING).min(self.max_sequence_length) as u32);
        let attended: Vec<u32> = attended.collect();
        Ok(Conditioning::default()
            .with(CONTEXT, context)
            .with(LENGTHS, Tensor::new(attended, &Device::Cpu)?))
    }

    /// None: LoRAs are of the transformer only.
    fn parts(&mut self) -> Vec<Part<'_>> {
        Vec::new()
    }
}

impl TransformerText for ChromaTextEncoder {
    fn max_sequence_length(&self) -> usize {
        self.max_sequence_length
    }

    fn set_max_sequence_length(&mut self, tokens: usize) {
        self.max_sequence_length = tokens;
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.model.checkpointing = checkpointing;
    }
}
