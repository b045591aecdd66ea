//! The tokenizer of a folder that has a SentencePiece model (`tokenizer.model`) and no `tokenizer.json`: Llama 2, Code Llama and others.

use super::super::sentencepiece::{
    BPE, CONTROL, ModelProto, NORMAL, NormalizerSpec, Piece, TrainerSpec, UNIGRAM, UNKNOWN, UNUSED, USER_DEFINED,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};

/// The name of the file.
pub(super) const FILE_NAME: &str = "tokenizer.model";
/// The most bytes of a piece. SentencePiece trains pieces of at most 16 characters, unless it is told otherwise.
const MAX_PIECE_BYTES: usize = 1024;
/// What stands for a space in pieces.
const SPACE: &str = "▁";

/// A token of the vocabulary; its id is its place.
struct Token {
    text: String,
    score: f32,
    kind: i32,
}

/// Converts a SentencePiece model to the JSON of a `tokenizer.json` that makes the same tokens. `settings`: `tokenizer_config.json`, `added`:
/// `added_tokens.json`; `null` for a file that is missing.
///
/// Names of special tokens in a text become these tokens, as in transformers.
///
/// # Errors
/// A sentence about the file.
pub(super) fn tokenizer_json(model: &[u8], settings: &Value, added: &Value) -> Result<Value, String> {
    let not_a_model = |reason: String| {
        format!("this is not a SentencePiece model ({reason}): put the tokenizer.json of the model into the folder")
    };
    let model = ModelProto::decode(model).map_err(|error| not_a_model(error.to_string()))?;
    if model.pieces.is_empty() {
        return Err(not_a_model("it has no pieces".to_owned()));
    }
    let trainer = model.trainer_spec.unwrap_or_default();
    let normalizer = model.normalizer_spec.unwrap_or_default();
    check_support(&trainer, &normalizer)?;
    let (tokens, extra) = vocabulary(model.pieces, settings, added)?;
    let Some(unknown) = tokens.iter().position(|token| token.kind == UNKNOWN) else {
        return Err("it has no token for unknown text".into());
    };
    let byte_fallback = trainer.byte_fallback.unwrap_or(false);
    let model = match trainer.model_type.unwrap_or(UNIGRAM) {
        BPE => json!({
            "type": "BPE", "dropout": null, "unk_token": tokens[unknown].text, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": byte_fallback, "ignore_merges": false,
            "vocab": ids(&tokens), "merges": merges(&tokens),
        }),
        UNIGRAM => {
            let scores: Vec<Value> = tokens.iter().map(|token| json!([token.text, token.score])).collect();
            json!({"type": "Unigram", "unk_id": unknown, "byte_fallback": byte_fallback, "vocab": scores})
        }
        other => {
            return Err(format!(
                "this SentencePiece model is of the type {other}: expected {UNIGRAM} (unigram) or {BPE} (BPE)"
            ));
        }
    };
    let prefix = prefix(&normalizer, settings);
    let added_tokens: Vec<Value> = tokens
        .iter()
        .chain(&extra)
        .enumerate()
        .filter(|(_, token)| [UNKNOWN, CONTROL, USER_DEFINED].contains(&token.kind))
        .map(|(id, token)| {
            json!({
                "id": id, "content": token.text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": token.kind != USER_DEFINED,
            })
        })
        .collect();
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens,
        "normalizer": {"type": "Sequence", "normalizers": normalizers(&normalizer, prefix)},
        "pre_tokenizer": pre_tokenizer(prefix),
        "post_processor": post_processor(&trainer, settings, &tokens, &extra)?,
        "decoder": {"type": "Sequence", "decoders": decoders(prefix)},
        "model": model,
    }))
}

/// Checks that the model has nothing that a `tokenizer.json` cannot express.
fn check_support(trainer: &TrainerSpec, normalizer: &NormalizerSpec) -> Result<(), String> {
    for (is_set, what) in [
        (
            trainer.treat_whitespace_as_suffix.unwrap_or(false),
            "`treat_whitespace_as_suffix`",
        ),
        (
            !normalizer.escape_whitespaces.unwrap_or(true),
            "`escape_whitespaces: false`",
        ),
    ] {
        if is_set {
            return Err(format!("this SentencePiece model has {what}, which is not supported"));
        }
    }
    Ok(())
}

/// The pieces, and the tokens that follow them.
fn vocabulary(pieces: Vec<Piece>, settings: &Value, added: &Value) -> Result<(Vec<Token>, Vec<Token>), String> {
    let mut tokens = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let kind = piece.kind.unwrap_or(NORMAL);
        if piece.piece.len() > MAX_PIECE_BYTES {
            return Err(format!(
                "a piece of it has {} bytes: expected at most {MAX_PIECE_BYTES}",
                piece.piece.len()
            ));
        }
        if kind == UNUSED {
            return Err(format!(
                "its piece `{}` is marked as unused, which is not supported",
                piece.piece
            ));
        }
        if kind == USER_DEFINED && piece.piece.contains(SPACE) {
            return Err(format!(
                "its piece `{}` is user-defined and has a space, which is not supported",
                piece.piece
            ));
        }
        tokens.push(Token {
            text: piece.piece,
            score: piece.score,
            kind,
        });
    }
    let mut extra: BTreeMap<usize, Token> = BTreeMap::new();
    for (id, text, is_special) in added_tokens(settings, added) {
        let kind = if is_special { CONTROL } else { USER_DEFINED };
        match tokens.get_mut(id) {
            // Files may give another name to a piece.
            Some(token) if token.text != text => {
                token.text = text;
                if token.kind != UNKNOWN {
                    token.kind = kind;
                }
            }
            Some(_) => {}
            None => {
                let score = 0.0;
                extra.insert(id, Token { text, score, kind });
            }
        }
    }
    if let Some((index, (id, token))) = extra
        .iter()
        .enumerate()
        .find(|(index, (id, _))| **id != tokens.len() + index)
    {
        return Err(format!(
            "the added token `{}` has the id {id}, and the next one after the model's is {}",
            token.text,
            tokens.len() + index
        ));
    }
    let extra: Vec<Token> = extra.into_values().collect();
    check_names(&tokens, &extra)?;
    Ok((tokens, extra))
}

/// Checks that no two tokens have the same text.
fn check_names(tokens: &[Token], extra: &[Token]) -> Result<(), String> {
    let mut names = HashMap::new();
    for (id, token) in tokens.iter().chain(extra).enumerate() {
        if let Some(other) = names.insert(token.text.as_str(), id) {
            return Err(format!("its tokens {other} and {id} are both `{}`", token.text));
        }
    }
    Ok(())
}

/// The tokens that other files of the folder name: id, text, and whether it is special.
fn added_tokens(settings: &Value, added: &Value) -> Vec<(usize, String, bool)> {
    let mut found: BTreeMap<usize, (String, bool)> = BTreeMap::new();
    for (text, id) in added.as_object().into_iter().flatten() {
        if let Some(id) = id.as_u64().and_then(|id| usize::try_from(id).ok()) {
            found.insert(id, (text.clone(), true));
        }
    }
    let decoder = settings.get("added_tokens_decoder").and_then(Value::as_object);
    for (id, token) in decoder.into_iter().flatten() {
        if let (Ok(id), Some(text)) = (id.parse::<usize>(), token.get("content").and_then(Value::as_str)) {
            let is_special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            found.insert(id, (text.to_owned(), is_special));
        }
    }
    let tokens = found.into_iter();
    tokens.map(|(id, (text, is_special))| (id, text, is_special)).collect()
}

/// The ids of tokens by their texts.
fn ids(tokens: &[Token]) -> Map<String, Value> {
    let entries = tokens.iter().enumerate();
    entries.map(|(id, token)| (token.text.clone(), json!(id))).collect()
}

/// The pairs that make a piece, first those of the piece with the largest score: SentencePiece joins the neighbours that make it.
fn merges(tokens: &[Token]) -> Vec<[&str; 2]> {
    let normal = || tokens.iter().filter(|token| token.kind == NORMAL);
    let known: HashMap<&str, usize> = normal()
        .enumerate()
        .map(|(place, token)| (token.text.as_str(), place))
        .collect();
    let mut merges = Vec::new();
    for token in normal() {
        let first = merges.len();
        for (at, _) in token.text.char_indices().skip(1) {
            let (left, right) = token.text.split_at(at);
            if let (Some(of_left), Some(of_right)) = (known.get(left), known.get(right)) {
                merges.push((token.score, [left, right], [*of_left, *of_right]));
            }
        }
        merges[first..].sort_by_key(|(_, _, places)| *places);
    }
    merges.sort_by(|(score, [left, right], _), (other, [other_left, other_right], _)| {
        let by_score = other.total_cmp(score);
        let by_length =
            || (characters(other_left), characters(other_right)).cmp(&(characters(left), characters(right)));
        by_score.then_with(by_length)
    });
    merges.into_iter().map(|(_, pair, _)| pair).collect()
}

fn characters(text: &str) -> usize {
    text.chars().count()
}

/// Where a space is put before a text.
#[derive(Clone, Copy, PartialEq)]
enum Prefix {
    None,
    /// Also after each special token in the text.
    Always,
    /// At the beginning of the text alone, unless it has a space there: `legacy: false` of transformers.
    First,
}

fn prefix(normalizer: &NormalizerSpec, settings: &Value) -> Prefix {
    let flag = |key: &str| settings.get(key).and_then(Value::as_bool);
    let is_added = flag("add_prefix_space").unwrap_or(normalizer.add_dummy_prefix.unwrap_or(true));
    match (is_added, flag("legacy")) {
        (false, _) => Prefix::None,
        (true, Some(false)) => Prefix::First,
        (true, _) => Prefix::Always,
    }
}

fn normalizers(normalizer: &NormalizerSpec, prefix: Prefix) -> Vec<Value> {
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let mut steps = Vec::new();
    if let Some(map) = normalizer.precompiled_charsmap.as_ref().filter(|map| !map.is_empty()) {
        steps.push(json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(map)}));
    }
    if normalizer.remove_extra_whitespaces.unwrap_or(true) {
        steps.push(replace(json!({"Regex": "^ +| +$"}), ""));
        steps.push(replace(json!({"Regex": " {2,}"}), " "));
    }
    if prefix == Prefix::Always {
        steps.push(json!({"type": "Prepend", "prepend": SPACE}));
    }
    if prefix != Prefix::First {
        steps.push(replace(json!({"String": " "}), SPACE));
    }
    steps
}

/// Spaces are a matter of the normalizer, except where only the first text of several has the prefix.
fn pre_tokenizer(prefix: Prefix) -> Option<Value> {
    let metaspace = json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": false});
    (prefix == Prefix::First).then_some(metaspace)
}

fn decoders(prefix: Prefix) -> Vec<Value> {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix != Prefix::None {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    steps
}

/// The tokens that begin and end a text: by default the first alone, as transformers' `LlamaTokenizer`.
fn post_processor(
    trainer: &TrainerSpec,
    settings: &Value,
    tokens: &[Token],
    extra: &[Token],
) -> Result<Option<Value>, String> {
    let token = |key: &str, id: i32| -> Result<Option<(String, usize)>, String> {
        let setting = settings.get(key);
        let name = setting.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
        let mut all = tokens.iter().chain(extra);
        match name {
            Some(name) => match all.position(|token| token.text == name) {
                Some(id) => Ok(Some((name.to_owned(), id))),
                None => Err(format!(
                    "`{key}` of tokenizer_config.json is `{name}`, which it does not have"
                )),
            },
            None => Ok(usize::try_from(id)
                .ok()
                .and_then(|id| Some((tokens.get(id)?.text.clone(), id)))),
        }
    };
    let flag = |key: &str, default: bool| settings.get(key).and_then(Value::as_bool).unwrap_or(default);
    let begin = match flag("add_bos_token", true) {
        true => token("bos_token", trainer.bos_id.unwrap_or(1))?,
        false => None,
    };
    let end = match flag("add_eos_token", false) {
        true => token("eos_token", trainer.eos_id.unwrap_or(2))?,
        false => None,
    };
    if begin.is_none() && end.is_none() {
        return Ok(None);
    }
    let part = |kind: &str, id: &str| json!({kind: {"id": id, "type_id": 0}});
    let of_text = |name: &str| {
        let special = |token: &Option<(String, usize)>| token.as_ref().map(|(token, _)| part("SpecialToken", token));
        let parts = special(&begin).into_iter().chain([part("Sequence", name)]);
        parts.chain(special(&end)).collect::<Vec<Value>>()
    };
    let special: Map<String, Value> = begin
        .iter()
        .chain(&end)
        .map(|(token, id)| (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]})))
        .collect();
    Ok(Some(json!({
        "type": "TemplateProcessing", "single": of_text("A"), "pair": [of_text("A"), of_text("B")].concat(),
        "special_tokens": special,
    })))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tokenizer::TextTokenizer;
    use super::tokenizer_json;
    use crate::testing::fixtures;
    use serde_json::{Value, json};
    use tokenizers::Tokenizer;

    fn model(name: &str) -> Vec<u8> {
        std::fs::read(fixtures().join("sentencepiece").join(name).join("tokenizer.model")).unwrap()
    }

    fn tokenizer(name: &str, settings: &Value, added: &Value) -> Tokenizer {
        let json = tokenizer_json(&model(name), settings, added).unwrap();
        json.to_string().parse().unwrap()
    }

    fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
        tokenizer.encode(text, special).unwrap().get_ids().to_vec()
    }

    /// `tests/reference/make_sentencepiece.py`.
    #[test]
    fn tokens_and_texts_are_those_of_sentencepiece() {
        for (name, compares_texts) in [("bpe", true), ("folded", false), ("unigram", true)] {
            let tokenizer = tokenizer(name, &Value::Null, &Value::Null);
            let path = fixtures().join("sentencepiece").join(name).join("expected.json");
            let expected: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            assert_eq!(
                tokenizer.get_vocab_size(true) as u64,
                expected["size"].as_u64().unwrap()
            );
            let cases = expected["cases"].as_array().unwrap();
            assert!(cases.len() > 80);
            for case in cases {
                let text = case["text"].as_str().unwrap();
                let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
                assert_eq!(ids(&tokenizer, text, false), expected, "{name}: {text:?}");
                // Unknown text is a mark of sentencepiece's own, and there is none with bytes.
                if compares_texts {
                    let decoded = tokenizer.decode(&expected, true).unwrap();
                    assert_eq!(decoded, case["decoded"].as_str().unwrap(), "{name}: {text:?}");
                }
            }
        }
    }

    #[test]
    fn special_tokens_are_those_of_the_folder() {
        let plain = tokenizer("bpe", &Value::Null, &Value::Null);
        let a = ids(&plain, "a", false);
        assert_eq!(ids(&plain, "a", true), [&[1], a.as_slice()].concat());
        assert_eq!(ids(&plain, "<s>", false), [1]);
        assert_eq!(ids(&plain, "a<|fim|>", false), [a.as_slice(), &[3]].concat());
        let settings = json!({
            "add_bos_token": false, "add_eos_token": true, "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"520": {"content": "<end>", "special": true}},
        });
        let other = tokenizer("bpe", &settings, &json!({"<pad>": 521}));
        assert_eq!(ids(&other, "a", true), [a.as_slice(), &[520]].concat());
        assert_eq!(ids(&other, "<pad>", false), [521]);
        assert_eq!(other.decode(&[a[0], 520], true).unwrap(), "a");
        // After a special token there is no prefix.
        let first = tokenizer("bpe", &json!({"legacy": false}), &Value::Null);
        let after = |tokenizer: &Tokenizer| ids(tokenizer, "<s>a", false)[1..].to_vec();
        assert_eq!(after(&plain), a);
        assert_ne!(after(&first), a);
        assert_eq!(ids(&first, "a b", false), ids(&plain, "a b", false));
        let none = tokenizer("bpe", &json!({"add_prefix_space": false}), &Value::Null);
        assert_eq!(ids(&none, "a", false), after(&first));
    }

    #[test]
    fn a_folder_without_tokenizer_json_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!TextTokenizer::is_in(folder.path()));
        std::fs::write(folder.path().join("tokenizer.model"), model("bpe")).unwrap();
        assert!(TextTokenizer::is_in(folder.path()));
        let tokenizer = TextTokenizer::open(folder.path(), 520).unwrap();
        let ids = tokenizer.encode("def add(a):\n").unwrap();
        assert_eq!((ids[0], tokenizer.added_at_end()), (1, 0));
        assert_eq!(tokenizer.decode(&ids).unwrap(), "def add(a):\n");
        let error = TextTokenizer::open(folder.path(), 519).unwrap_err().to_string();
        assert!(
            error.contains("tokenizer.model") && error.contains("another model"),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_be_used_is_refused() {
        let refusal =
            |model: &[u8], settings: Value, added: Value| tokenizer_json(model, &settings, &added).unwrap_err();
        // The form of Llama 3's original file.
        let tiktoken = refusal(b"IQ== 0\nIg== 1\nIw== 2\n", Value::Null, Value::Null);
        assert!(tiktoken.contains("not a SentencePiece model"), "{tiktoken}");
        assert!(refusal(b"", Value::Null, Value::Null).contains("no pieces"));
        let bpe = model("bpe");
        let gap = refusal(&bpe, Value::Null, json!({"<pad>": 530}));
        assert!(gap.contains("530") && gap.contains("520"), "{gap}");
        let twice = refusal(&bpe, Value::Null, json!({"<s>": 520}));
        assert!(twice.contains("both `<s>`"), "{twice}");
        let missing = refusal(&bpe, json!({"bos_token": "<begin>"}), Value::Null);
        assert!(missing.contains("<begin>"), "{missing}");
    }
}
