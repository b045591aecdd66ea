//! A tiny tokenizer for tests: each byte is a token.

use serde_json::{Map, Value, json};
use std::path::Path;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// The id of the end of a text, behind those of bytes.
pub(crate) const END: u32 = 256;
/// The end of a text, and the tokens for gaps.
const SPECIAL: [&str; 4] = ["<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"];

/// Writes `tokenizer.json` for a model with this many tokens: of 260 tokens and more, all bytes and the special tokens; else only the first
/// bytes of an alphabet.
pub(crate) fn write_tokenizer(folder: &Path, vocab_size: usize) {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab = alphabet.into_iter().zip(0u32..).take(vocab_size);
    let vocab: Map<String, Value> = vocab.map(|(byte, id)| (byte.to_string(), json!(id))).collect();
    let special = SPECIAL.iter().zip(END..).filter(|_| vocab_size >= 260).map(|(name, id)| {
        json!({
            "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true
        })
    });
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special.collect::<Vec<_>>(), "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}
