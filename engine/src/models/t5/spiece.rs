//! Reads `spiece.model`, a SentencePiece model, as a tokenizer.

use super::super::sentencepiece::{ModelProto, UNIGRAM};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde_json::{Value, json};

/// Ids for masked spans, which the tokenizer of T5 has after the pieces.
const EXTRA_IDS: usize = 100;

/// Converts a SentencePiece model to the JSON of a `tokenizer.json`, as transformers 5 does for T5: white space separates
/// words, each word begins with `▁`, and `</s>` ends a text.
///
/// # Errors
/// A sentence about the file.
pub(super) fn to_tokenizer_json(model: &[u8]) -> Result<Value, String> {
    let model = ModelProto::decode(model).map_err(|error| format!("not a SentencePiece model: {error}"))?;
    let trainer = model.trainer_spec.unwrap_or_default();
    if trainer.model_type.unwrap_or(UNIGRAM) != UNIGRAM {
        return Err("this SentencePiece model is not a unigram model".into());
    }
    let mut vocabulary: Vec<(String, f64)> = model
        .pieces
        .into_iter()
        .map(|piece| (piece.piece, f64::from(piece.score)))
        .collect();
    let extra = (0..EXTRA_IDS).rev().map(|id| format!("<extra_id_{id}>"));
    let extra: Vec<String> = extra
        .filter(|name| !vocabulary.iter().any(|(piece, _)| piece == name))
        .collect();
    vocabulary.extend(extra.into_iter().map(|name| (name, 0.0)));
    let id = |token: &str| vocabulary.iter().position(|(piece, _)| piece == token);
    let Some(end) = id("</s>") else {
        return Err("this SentencePiece model has no `</s>`".into());
    };
    let special: Vec<Value> = vocabulary
        .iter()
        .enumerate()
        .filter(|(_, (piece, _))| {
            matches!(piece.as_str(), "<pad>" | "</s>" | "<unk>") || piece.starts_with("<extra_id_")
        })
        .map(|(id, (piece, _))| {
            json!({
                "id": id, "content": piece, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    let charsmap = model.normalizer_spec.and_then(|spec| spec.precompiled_charsmap);
    let charsmap = charsmap.filter(|map| !map.is_empty());
    let normalizer = charsmap.map(|map| json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(map)}));
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    Ok(json!({
        "version": "1.0",
        "added_tokens": special,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [end], "tokens": ["</s>"]}},
        },
        "model": {
            "type": "Unigram",
            "unk_id": trainer.unk_id.unwrap_or(2),
            "vocab": vocabulary,
            "byte_fallback": trainer.byte_fallback.unwrap_or(false),
        },
    }))
}
