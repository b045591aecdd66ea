//! The text encoders of Stable Diffusion, in a model and alone.

use super::TextEncoder;
use super::load::open_text;
use super::variant::{TextOutput, Variant};
use crate::error::{EngineError, Result};
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::TextEncoders;
use crate::families::options::{LoadOptions, PromptReading};
use crate::families::part::Part;
use candle_core::{D, Device, Tensor};
use std::path::Path;

/// The names in the conditioning: the encoded text (`encoder_hidden_states` of diffusers) and the pooled text (`text_embeds`).
pub(super) const CONTEXT: &str = "context";
pub(super) const POOLED: &str = "pooled";

/// Encodes prompts.
pub(super) fn encode(
    variant: &Variant,
    encoders: &[TextEncoder],
    device: &Device,
    prompts: &[Prompt],
) -> Result<Conditioning> {
    let (mut contexts, mut pooled) = (Vec::new(), None);
    for (index, encoder) in encoders.iter().enumerate() {
        let texts: Vec<&str> = prompts
            .iter()
            .map(|prompt| match (&prompt.text_2, index) {
                (Some(second), 1) => second.as_str(),
                _ => prompt.text.as_str(),
            })
            .collect();
        let PromptReading { clip_skip, chunks, .. } = encoder.reading;
        let ids = encoder.tokenizer.encode_chunks(&texts, chunks)?.to_device(device)?;
        match variant.text_output {
            TextOutput::LastHidden => {
                contexts.push(join_chunks(&encoder.model.forward_skipping(&ids, clip_skip)?, chunks)?);
            }
            TextOutput::PenultimateAndPooled => {
                let (context, of_encoder) = encoder.model.penultimate_and_pooled(&ids, false)?;
                contexts.push(join_chunks(&context, chunks)?);
                // SDXL: of the last encoder that has one.
                pooled = of_encoder
                    .map(|pooled| of_first_chunk(&pooled, chunks))
                    .transpose()?
                    .or(pooled);
            }
        }
    }
    let context = match contexts.as_slice() {
        [only] => only.clone(),
        all => Tensor::cat(all, D::Minus1)?,
    };
    let conditioning = Conditioning::default().with(CONTEXT, context);
    Ok(match pooled {
        Some(pooled) => conditioning.with(POOLED, pooled),
        None => conditioning,
    })
}

/// The encoded chunks of each prompt as one text with one start and one end: [b * chunks, n, c] -> [b, chunks * (n - 2) + 2, c].
fn join_chunks(context: &Tensor, chunks: usize) -> Result<Tensor> {
    let (rows, n, width) = context.dims3()?;
    if chunks == 1 {
        return Ok(context.clone());
    }
    let (prompts, inner) = (rows / chunks, n - 2);
    let start = context.reshape((prompts, chunks * n, width))?.narrow(1, 0, 1)?;
    let end = context
        .reshape((prompts, chunks * n, width))?
        .narrow(1, chunks * n - 1, 1)?;
    let inner = context
        .narrow(1, 1, inner)?
        .contiguous()?
        .reshape((prompts, chunks * inner, width))?;
    Ok(Tensor::cat(&[start, inner, end], 1)?)
}

/// The pooled text of each prompt: that of its first chunk, [b * chunks, c] -> [b, c].
fn of_first_chunk(pooled: &Tensor, chunks: usize) -> Result<Tensor> {
    let (rows, width) = pooled.dims2()?;
    let pooled = pooled.reshape((rows / chunks, chunks, width))?;
    Ok(pooled.narrow(1, 0, 1)?.squeeze(1)?)
}

/// The vectors of the first `count` tokens of a text, padded with those of `*`, in each text encoder.
pub(super) fn initial_embedding(encoders: &[TextEncoder], text: &str, count: usize) -> Result<Vec<Tensor>> {
    let of_encoder = |encoder: &TextEncoder| {
        let mut ids = encoder.tokenizer.tokens(text)?;
        ids.truncate(count);
        // The whole word `*`, whose token may be repeated.
        let star = encoder.tokenizer.tokens("*")?;
        let missing = count.saturating_sub(ids.len());
        ids.extend(star.iter().cycle().take(missing));
        encoder.model.token_vectors(&ids)
    };
    encoders.iter().map(of_encoder).collect()
}

/// Adds a word to the prompts of text encoders.
pub(super) fn add_embedding(encoders: &mut [TextEncoder], trigger: &str, vectors: &[Tensor]) -> Result<()> {
    if encoders.len() != vectors.len() {
        return Err(EngineError::bad_input(format!(
            "the word `{trigger}` has vectors for {} text encoders, and the model has {}",
            vectors.len(),
            encoders.len()
        )));
    }
    for (encoder, vectors) in encoders.iter_mut().zip(vectors) {
        let (width, expected) = (vectors.dim(D::Minus1)?, encoder.model.vector_width());
        if width != expected {
            return Err(EngineError::bad_input(format!(
                "the word `{trigger}` has vectors of {width} numbers, and the text encoder has vectors of {expected}: it was trained for \
                 another family of models"
            )));
        }
        let ids = encoder.model.add_vectors(vectors.clone())?;
        encoder.tokenizer.add_embedding(trigger, ids)?;
    }
    Ok(())
}

/// The parts of text encoders.
pub(super) fn parts(encoders: &mut [TextEncoder]) -> Vec<Part<'_>> {
    encoders
        .iter_mut()
        .map(|encoder| encoder.spec.part_info().with(&mut encoder.model))
        .collect()
}

/// The text encoders of a family, without a U-Net.
#[derive(Debug)]
struct SdTextEncoders {
    variant: &'static Variant,
    encoders: Vec<TextEncoder>,
    device: Device,
}

impl TextEncoders for SdTextEncoders {
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        encode(self.variant, &self.encoders, &self.device, prompts)
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        parts(&mut self.encoders)
    }

    fn add_embedding(&mut self, trigger: &str, vectors: &[Tensor]) -> Result<()> {
        add_embedding(&mut self.encoders, trigger, vectors)
    }
}

/// Loads the text encoders of a diffusers folder or a single-file model alone.
///
/// # Errors
/// When a file is missing, or tensors do not match the configs.
pub fn load_text_encoders(
    variant: &'static Variant,
    path: &Path,
    options: &LoadOptions,
) -> Result<Box<dyn TextEncoders>> {
    Ok(Box::new(SdTextEncoders {
        variant,
        encoders: open_text(variant, path, options)?,
        device: options.device.clone(),
    }))
}
