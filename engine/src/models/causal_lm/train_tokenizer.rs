//! Trains a tokenizer on texts: byte pair encoding on bytes, as StarCoder's, with its tokens for the end of a text and for gaps.

use crate::error::{EngineError, Result};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{
    AddedToken, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, Tokenizer,
    Trainer,
};

/// The token that ends a text.
pub const END_TOKEN: &str = "<|endoftext|>";
/// The tokens with the ids 0 to 3, as StarCoder has them.
const SPECIAL: [&str; 4] = [END_TOKEN, "<fim_prefix>", "<fim_middle>", "<fim_suffix>"];
/// The smallest vocabulary: all bytes and the special tokens.
const MIN_VOCABULARY: usize = 256 + SPECIAL.len();
/// The most bytes of a token: texts with long runs of one character make no tokens of them.
const MAX_TOKEN_BYTES: usize = 32;

/// Trains a tokenizer of at most this many tokens, and returns its `tokenizer.json`. The same texts give the same bytes.
///
/// # Errors
/// When the vocabulary is smaller than the bytes and the special tokens.
pub fn train_tokenizer(texts: &[String], vocabulary: usize) -> Result<String> {
    if vocabulary < MIN_VOCABULARY {
        return Err(EngineError::bad_input(format!(
            "a tokenizer of {vocabulary} tokens: expected at least {MIN_VOCABULARY}, one for each byte and {} special ones",
            SPECIAL.len()
        )));
    }
    let failed =
        |error: tokenizers::Error| EngineError::bad_input(format!("the tokenizer could not be trained: {error}"));
    let special = SPECIAL.map(|name| AddedToken::from(name, true));
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(vocabulary)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special.to_vec())
        .max_token_length(Some(MAX_TOKEN_BYTES))
        .build();
    let bytes = ByteLevel::new(false, true, true);
    let splitter = Sequence::new(vec![
        PreTokenizerWrapper::Digits(Digits::new(true)),
        PreTokenizerWrapper::ByteLevel(bytes),
    ]);
    let words = trainer.feed(texts.iter(), |text| {
        let mut split = PreTokenizedString::from(text);
        splitter.pre_tokenize(&mut split)?;
        let words = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        Ok(words.into_iter().map(|(word, _, _)| word.to_owned()).collect())
    });
    words.map_err(failed)?;
    let mut model = BPE::default();
    trainer.train(&mut model).map_err(failed)?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(splitter));
    tokenizer.with_decoder(Some(bytes));
    tokenizer.add_special_tokens(special).map_err(failed)?;
    tokenizer.to_string(false).map_err(failed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_trained_tokenizer_is_the_same_each_time_and_gives_texts_back() {
        let texts: Vec<String> = (0..40)
            .map(|number| {
                format!("/// Number {number}.\nfn number_{number}(value: f64) -> f64 {{\n    value * {number}.5\n}}\n")
            })
            .collect();
        let json = train_tokenizer(&texts, 320).unwrap();
        assert_eq!(json, train_tokenizer(&texts, 320).unwrap());
        let tokenizer: Tokenizer = json.parse().unwrap();
        // These few words have fewer pairs than the vocabulary has room for.
        assert!((270..=320).contains(&tokenizer.get_vocab_size(true)));
        assert_eq!(SPECIAL.map(|name| tokenizer.token_to_id(name)), [0, 1, 2, 3].map(Some));
        for text in [texts[7].as_str(), "fn ä() { 1234 }\r\n\t\"§🦀\"", ""] {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), text);
        }
        let ids = tokenizer.encode(texts[7].as_str(), true).unwrap();
        assert!(ids.len() * 2 < texts[7].len(), "{}", ids.len());
        assert!(
            train_tokenizer(&texts, 200)
                .unwrap_err()
                .to_string()
                .contains("at least 260")
        );
    }
}
