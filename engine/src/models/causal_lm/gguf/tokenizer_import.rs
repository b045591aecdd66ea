//! The tokenizer of a GGUF file, from its metadata (`tokenizer.ggml.*`).

use super::super::scored_vocabulary::Token;
use super::super::sentencepiece_tokenizer::scored_tokenizer_json;
use super::metadata::Metadata;
use super::pre_tokenizer;
use super::tokenizer_export::{CONTROL, NORMAL, UNUSED, USER_DEFINED};
use serde_json::{Map, Value, json};

/// The tokenizer as the text of a `tokenizer.json`.
///
/// # Errors
/// Why this release cannot use it.
pub(super) fn tokenizer_json(metadata: &Metadata) -> Result<String, String> {
    let text = |key: &str| metadata.text(&format!("tokenizer.ggml.{key}"));
    let id = |key: &str| metadata.number(&format!("tokenizer.ggml.{key}_token_id"));
    match text("model") {
        Some("gpt2") => {}
        Some("llama") => return sentencepiece_json(metadata),
        Some(other) => {
            return Err(format!(
                "its tokenizer is of the type `{other}`, and only `gpt2` (byte-level BPE) and `llama` (SentencePiece) can be read"
            ));
        }
        None => return Err("it has no tokenizer".into()),
    }
    let pre = pre_tokenizer::canonical(text("pre").unwrap_or(pre_tokenizer::DEFAULT));
    let pre_tokenizer = pre_tokenizer::section_of(pre).ok_or_else(|| {
        format!(
            "its tokenizer splits texts by the rule `{pre}` (`tokenizer.ggml.pre`), and only these can be read: {}",
            pre_tokenizer::known_names()
        )
    })?;
    let tokens = metadata
        .texts("tokenizer.ggml.tokens")
        .ok_or("its tokenizer has no tokens")?;
    let merges = metadata
        .texts("tokenizer.ggml.merges")
        .ok_or("its tokenizer has no merges")?;
    let types = metadata.wholes("tokenizer.ggml.token_type").unwrap_or_default();
    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, token) in tokens.iter().enumerate() {
        let kind = types.get(id).and_then(|kind| i32::try_from(*kind).ok());
        match kind {
            Some(UNUSED) => continue,
            Some(kind @ (CONTROL | USER_DEFINED)) => added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": kind == CONTROL
            })),
            _ => {}
        }
        vocab.insert(token.clone(), json!(id));
    }
    let begins = metadata
        .flag("tokenizer.ggml.add_bos_token")
        .unwrap_or(pre == "llama-bpe");
    let first = id("bos").and_then(|id| tokens.get(id)).filter(|_| begins);
    let post_processor = first.map(|token| {
        let of = |kind: &str, id: &str| json!({kind: {"id": id, "type_id": 0}});
        json!({
            "type": "TemplateProcessing",
            "single": [of("SpecialToken", token), of("Sequence", "A")],
            "pair": [of("SpecialToken", token), of("Sequence", "A"), of("Sequence", "B")],
            "special_tokens": {token: {"id": token, "ids": [id("bos")], "tokens": [token]}}
        })
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": pre == "llama-bpe", "vocab": Value::Object(vocab), "merges": merges,
        },
    });
    Ok(tokenizer.to_string())
}

/// The tokenizer of a file whose tokens are the pieces of a SentencePiece model. Missing keys have llama.cpp's values.
fn sentencepiece_json(metadata: &Metadata) -> Result<String, String> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let (texts, scores) = (metadata.texts(&key("tokens")), metadata.floats(&key("scores")));
    let (Some(texts), Some(scores)) = (texts, scores) else {
        return Err("its tokenizer has no tokens or no scores".into());
    };
    if texts.len() != scores.len() {
        return Err(format!(
            "its tokenizer has {} tokens and {} scores",
            texts.len(),
            scores.len()
        ));
    }
    let kinds = metadata.wholes(&key("token_type")).unwrap_or_default();
    let kind_of = |id: usize| {
        kinds
            .get(id)
            .and_then(|kind| i32::try_from(*kind).ok())
            .unwrap_or(NORMAL)
    };
    let tokens: Vec<Token> = texts
        .iter()
        .zip(scores)
        .enumerate()
        .map(|(id, (text, score))| Token {
            text: text.clone(),
            score: *score,
            kind: kind_of(id),
        })
        .collect();
    let flag = |name: &str, usual: bool| metadata.flag(&key(name)).unwrap_or(usual);
    let id = |name: &str, usual: usize| metadata.number(&key(name)).unwrap_or(usual);
    let begin = flag("add_bos_token", true).then(|| id("bos_token_id", 1));
    let end = flag("add_eos_token", false).then(|| id("eos_token_id", 2));
    scored_tokenizer_json(&tokens, flag("add_space_prefix", true), [begin, end]).map(|json| json.to_string())
}
