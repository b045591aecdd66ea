//! CLIP's tokenizer and text encoder.

mod text;
mod tokenizer;

pub use text::{ClipTextConfig, ClipTextModel};
pub use tokenizer::ClipTokenizer;
