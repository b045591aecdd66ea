//! CLIP's tokenizer and text encoder.

mod learned;
mod learned_words;
mod text;
mod tokenizer;

pub use learned_words::{has_word, replace_word, word_conflict};
pub use text::{ClipTextConfig, ClipTextModel};
pub use tokenizer::ClipTokenizer;
