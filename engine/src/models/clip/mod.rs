//! CLIP's tokenizer and text encoder.

mod learned;
mod text;
mod tokenizer;
mod words;

pub use text::{ClipTextConfig, ClipTextModel};
pub use tokenizer::ClipTokenizer;
pub use words::{has_word, replace_word, word_conflict};
