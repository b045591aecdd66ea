//! The text encoder of Z-Image: Qwen3 without its last layer.

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::TextEncoders;
use crate::families::part::Part;
use crate::families::transformer_family::TransformerText;
use crate::models::qwen3::{Qwen3Model, Qwen3Tokenizer};
use candle_core::{Device, Tensor};

/// The names in the conditioning: the encoded text, padded with zeros, and the number of its tokens (u32).
pub(super) const CONTEXT: &str = "context";
pub(super) const LENGTHS: &str = "lengths";
/// Tokens of a prompt, as in diffusers' pipeline.
pub(super) const TEXT_TOKENS: usize = 512;

/// Qwen3 with its tokenizer.
#[derive(Clone, Debug)]
pub struct ZImageTextEncoder {
    pub(super) tokenizer: Qwen3Tokenizer,
    /// Without its last layer: the text is the states before it.
    pub(super) model: Qwen3Model,
    /// Tokens of a prompt, with those of the chat around it.
    pub(super) max_sequence_length: usize,
    /// The most tokens of a prompt for which the transformer has positions.
    pub(super) max_tokens: usize,
    pub(super) device: Device,
}

impl TextEncoders for ZImageTextEncoder {
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        let texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        // A longer prompt is cut at its end, as in diffusers' pipeline, which fails where the transformer has fewer positions.
        let tokens = self
            .tokenizer
            .encode_chat(&texts, self.max_sequence_length.min(self.max_tokens))?;
        // The padding of shorter texts comes after them, so that it changes nothing: attention is causal.
        let states = self.model.forward(&tokens.ids.to_device(&self.device)?, None)?;
        let rows = tokens.lengths.iter().enumerate().map(|(item, length)| {
            let text = states.get(item)?.narrow(0, 0, *length)?;
            text.pad_with_zeros(0, 0, self.max_sequence_length - length)
        });
        let context = Tensor::stack(&rows.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        let lengths: Vec<u32> = tokens.lengths.iter().map(|length| *length as u32).collect();
        Ok(Conditioning::default()
            .with(CONTEXT, context)
            .with(LENGTHS, Tensor::new(lengths, &Device::Cpu)?))
    }

    /// None: LoRAs are of the transformer only.
    fn parts(&mut self) -> Vec<Part<'_>> {
        Vec::new()
    }
}

impl TransformerText for ZImageTextEncoder {
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
