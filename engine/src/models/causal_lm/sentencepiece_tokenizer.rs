//! The tokenizer of a SentencePiece model as a `tokenizer.json`: of folders that have `tokenizer.model` alone (Llama 2, Code Llama and others), and
//! of GGUF files.

use super::super::sentencepiece::{BPE, CONTROL, NormalizerSpec, UNIGRAM, UNKNOWN, UNUSED, USER_DEFINED};
use super::scored_vocabulary::{SPACE, SentencePieceModel, Token, check_tokens, merges};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

/// The JSON of a `tokenizer.json` that makes the tokens of a SentencePiece model. Names of special tokens in a text become these tokens, as in
/// transformers.
///
/// # Errors
/// A sentence about the file.
pub(super) fn tokenizer_json(model: &SentencePieceModel) -> Result<Value, String> {
    let (trainer, normalizer) = (&model.trainer, &model.normalizer);
    let byte_fallback = trainer.byte_fallback.unwrap_or(false);
    let kind = trainer.model_type.unwrap_or(UNIGRAM);
    let of_tokens = match kind {
        BPE => bpe(&model.tokens, byte_fallback)?,
        UNIGRAM => unigram(&model.tokens, byte_fallback)?,
        other => {
            return Err(format!(
                "this SentencePiece model is of the type {other}: expected {UNIGRAM} (unigram) or {BPE} (BPE)"
            ));
        }
    };
    let flag = |key: &str| model.settings.get(key).and_then(Value::as_bool);
    let prefix = match (model.has_prefix(), flag("legacy")) {
        (false, _) => Prefix::None,
        (true, Some(false)) => Prefix::First,
        (true, _) => Prefix::Always,
    };
    // By default the first alone, as transformers' `LlamaTokenizer`.
    let begin = match flag("add_bos_token").unwrap_or(true) {
        true => model.special_token("bos_token", trainer.bos_id.unwrap_or(1))?,
        false => None,
    };
    let end = match flag("add_eos_token").unwrap_or(false) {
        true => model.special_token("eos_token", trainer.eos_id.unwrap_or(2))?,
        false => None,
    };
    let tokens: Vec<&Token> = model.all().collect();
    Ok(assembled(
        &tokens,
        of_tokens,
        normalizers(normalizer, prefix),
        prefix,
        [begin, end],
    ))
}

/// The same of the tokens of a GGUF file. `has_prefix`: whether a space is put before a text. `ends`: the tokens before and after a text.
///
/// # Errors
/// A sentence about the tokens.
pub(super) fn scored_tokenizer_json(
    tokens: &[Token],
    has_prefix: bool,
    ends: [Option<usize>; 2],
) -> Result<Value, String> {
    check_tokens(tokens.iter().filter(|token| token.kind != UNUSED))?;
    let prefix = match has_prefix {
        true => Prefix::Always,
        false => Prefix::None,
    };
    let normalizer = NormalizerSpec {
        remove_extra_whitespaces: Some(false),
        ..NormalizerSpec::default()
    };
    let all: Vec<&Token> = tokens.iter().collect();
    Ok(assembled(
        &all,
        bpe(tokens, true)?,
        normalizers(&normalizer, prefix),
        prefix,
        ends,
    ))
}

/// The place of the token for unknown text.
fn unknown(tokens: &[Token]) -> Result<usize, String> {
    let place = tokens.iter().position(|token| token.kind == UNKNOWN);
    place.ok_or_else(|| "it has no token for unknown text".to_owned())
}

fn bpe(tokens: &[Token], byte_fallback: bool) -> Result<Value, String> {
    let unknown = &tokens[unknown(tokens)?].text;
    Ok(json!({
        "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": true, "byte_fallback": byte_fallback, "ignore_merges": false, "vocab": ids(tokens), "merges": merges(tokens),
    }))
}

fn unigram(tokens: &[Token], byte_fallback: bool) -> Result<Value, String> {
    let scores: Vec<Value> = tokens.iter().map(|token| json!([token.text, token.score])).collect();
    Ok(json!({"type": "Unigram", "unk_id": unknown(tokens)?, "byte_fallback": byte_fallback, "vocab": scores}))
}

/// The ids of tokens by their texts.
fn ids(tokens: &[Token]) -> Map<String, Value> {
    let used = tokens.iter().enumerate().filter(|(_, token)| token.kind != UNUSED);
    used.map(|(id, token)| (token.text.clone(), json!(id))).collect()
}

/// The parts of a `tokenizer.json`. `ends`: the tokens before and after a text.
fn assembled(
    tokens: &[&Token],
    model: Value,
    normalizers: Vec<Value>,
    prefix: Prefix,
    ends: [Option<usize>; 2],
) -> Value {
    let special = tokens
        .iter()
        .enumerate()
        .filter(|(_, token)| [UNKNOWN, CONTROL, USER_DEFINED].contains(&token.kind));
    let added_tokens: Vec<Value> = special
        .map(|(id, token)| {
            json!({
                "id": id, "content": token.text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": token.kind != USER_DEFINED,
            })
        })
        .collect();
    let ends = ends.map(|id| id.and_then(|id| Some((tokens.get(id)?.text.as_str(), id))));
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": pre_tokenizer(prefix),
        "post_processor": post_processor(ends),
        "decoder": {"type": "Sequence", "decoders": decoders(prefix)},
        "model": model,
    })
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

/// Puts tokens, with their ids, before and after a text.
fn post_processor([begin, end]: [Option<(&str, usize)>; 2]) -> Option<Value> {
    if begin.is_none() && end.is_none() {
        return None;
    }
    let part = |kind: &str, id: &str| json!({kind: {"id": id, "type_id": 0}});
    let special = |token: Option<(&str, usize)>| token.map(|(token, _)| part("SpecialToken", token));
    let of_text = |name: &str| {
        let parts = special(begin).into_iter().chain([part("Sequence", name)]);
        parts.chain(special(end)).collect::<Vec<Value>>()
    };
    let tokens: Map<String, Value> = [begin, end]
        .into_iter()
        .flatten()
        .map(|(token, id)| (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})))
        .collect();
    Some(json!({
        "type": "TemplateProcessing", "single": of_text("A"), "pair": ([of_text("A"), of_text("B")].concat()), "special_tokens": tokens,
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::scored_vocabulary::SentencePieceModel;
    use super::super::tokenizer::TextTokenizer;
    use super::{scored_tokenizer_json, tokenizer_json};
    use crate::testing::fixtures;
    use serde_json::{Value, json};
    use tokenizers::Tokenizer;

    fn model(name: &str) -> Vec<u8> {
        std::fs::read(fixtures().join("sentencepiece").join(name).join("tokenizer.model")).unwrap()
    }

    fn tokenizer(name: &str, settings: &Value, added: &Value) -> Tokenizer {
        let model = SentencePieceModel::read(&model(name), settings.clone(), added).unwrap();
        tokenizer_json(&model).unwrap().to_string().parse().unwrap()
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
    fn tokens_with_scores_and_types_make_the_same_tokenizer() {
        let model = SentencePieceModel::read(&model("bpe"), Value::Null, &Value::Null).unwrap();
        let of_model = tokenizer_json(&model).unwrap();
        assert_eq!(
            scored_tokenizer_json(&model.tokens, true, [Some(1), None]).unwrap(),
            of_model
        );
        // Tokens of no use are not in it.
        let mut tokens = model.tokens.clone();
        for token in tokens.iter_mut().skip(518) {
            token.kind = crate::models::sentencepiece::UNUSED;
            token.text = "[PAD]".into();
        }
        let tokenizer: Tokenizer = scored_tokenizer_json(&tokens, false, [None, Some(2)])
            .unwrap()
            .to_string()
            .parse()
            .unwrap();
        assert_eq!(tokenizer.get_vocab_size(true), 518);
        assert_eq!(ids(&tokenizer, "", true), [2]);
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
        let refusal = |model: &[u8], settings: Value, added: Value| {
            let model = SentencePieceModel::read(model, settings, &added);
            model.and_then(|model| tokenizer_json(&model)).unwrap_err()
        };
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
