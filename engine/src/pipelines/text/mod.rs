//! Generates texts with a language model: the same tokens as transformers' `generate`, without beams.

mod generator;
mod sampling_params;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod text_stream;

pub use generator::{Completion, StopReason, TextEvents, TextRequest, TextSettings, check_prompt, generate_texts};
pub use sampling_params::SamplingParams;
