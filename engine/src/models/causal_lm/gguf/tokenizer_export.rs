//! The metadata of a tokenizer in GGUF files (`tokenizer.ggml.*`), from `tokenizer.json` or `tokenizer.model`.

use super::super::fim::FimTokens;
use super::super::scored_vocabulary::{FILE_NAME, SentencePieceModel, Token};
use super::super::tokenizer::TextTokenizer;
use super::pre_tokenizer;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::models::sentencepiece::BPE;
use crate::weights::GgufValue;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// llama.cpp's types of tokens (`LLAMA_TOKEN_TYPE_…`).
pub(super) const NORMAL: i32 = 1;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;
pub(super) const UNUSED: i32 = 5;
/// The score of an id without a token, as llama.cpp's converter writes it.
const UNUSED_SCORE: f32 = -10_000.0;

/// What a reader of the file does with a text: the keys and their values.
pub(super) fn metadata(
    folder: &Path,
    tokenizer: &TextTokenizer,
    vocab_size: usize,
    eos_token_ids: &[u32],
) -> Result<Vec<(String, GgufValue)>> {
    let is_sentencepiece = is_sentencepiece(folder)?;
    let mut out = match is_sentencepiece {
        true => sentencepiece_vocabulary(folder, tokenizer, vocab_size)?,
        false => byte_level_vocabulary(folder, tokenizer, vocab_size)?,
    };
    let mut ids = special_ids(folder, tokenizer, vocab_size)?;
    if let Some(end) = eos_token_ids.first().copied().or(tokenizer.end()) {
        ids.entry("eos").or_insert(end);
    }
    // Another token that ends a text, such as the end of a turn, or that of the model's configs where the tokenizer names another one.
    let other = eos_token_ids.iter().find(|id| Some(*id) != ids.get("eos"));
    if let Some(other) = other.copied() {
        ids.insert("eot", other);
    }
    if let Some(FimTokens {
        prefix,
        suffix,
        middle,
        end,
        ..
    }) = tokenizer.fim_tokens()
    {
        ids.extend([("fim_pre", prefix), ("fim_suf", suffix)]);
        ids.extend(middle.map(|id| ("fim_mid", id)));
        // As llama.cpp's converter: the end of a middle of Code Llama ends a text.
        if let Some(end) = end {
            ids.entry("eot").or_insert(end);
        }
    }
    let begins = begins_with(tokenizer)?;
    if let Some(id) = begins.filter(|_| is_sentencepiece) {
        // Without a name in `tokenizer_config.json` it is that of the model.
        ids.entry("bos").or_insert(id);
    }
    out.extend(
        ids.iter()
            .map(|(name, id)| (key(&format!("{name}_token_id")), GgufValue::Unsigned(*id))),
    );
    if let Some(id) = begins.filter(|id| ids.get("bos") != Some(id)) {
        return Err(EngineError::model_config(
            tokenizer.inner().1,
            format!(
                "the tokenizer begins each text with the token {id}, which is not its `bos_token`: llama.cpp would begin texts otherwise"
            ),
        ));
    }
    out.push((key("add_bos_token"), GgufValue::Flag(begins.is_some())));
    if let Some(template) = chat_template(folder)? {
        out.push(("tokenizer.chat_template".to_owned(), GgufValue::Text(template)));
    }
    Ok(out)
}

/// The template of conversations: `chat_template.jinja`, or that of `tokenizer_config.json`; of several, the one with the name `default`.
fn chat_template(folder: &Path) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        return config::read_text(&path)
            .map(Some)
            .map_err(|error| EngineError::io(&path, error));
    }
    let path = folder.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(None);
    }
    let settings = config::read_json(&path)?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Ok(match settings.get("chat_template") {
        Some(Value::Array(templates)) => templates
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| text(entry.get("template")?)),
        other => other.and_then(text),
    })
}

/// The vocabulary of a byte-level BPE tokenizer.
fn byte_level_vocabulary(
    folder: &Path,
    tokenizer: &TextTokenizer,
    vocab_size: usize,
) -> Result<Vec<(String, GgufValue)>> {
    let path = folder.join("tokenizer.json");
    let json = config::read_json(&path)?;
    let refuse = |message: String| EngineError::model_config(&path, message);
    let model = json.get("model").unwrap_or(&Value::Null);
    if model.get("type").and_then(Value::as_str) != Some("BPE") {
        return Err(refuse(
            "only byte-level BPE tokenizers and SentencePiece models (`tokenizer.model`) are written to GGUF files, and this one is of another \
             type"
                .into(),
        ));
    }
    let pre = pre_tokenizer::name_of(json.get("pre_tokenizer").unwrap_or(&Value::Null)).map_err(|found| {
        refuse(format!(
            "llama.cpp has a name for each rule by which tokenizers split texts, and the rule of this tokenizer ({found}) is none of those \
             that this release knows: {}",
            pre_tokenizer::known_names()
        ))
    })?;
    let tokens = tokens(&json, tokenizer, vocab_size).map_err(refuse)?;
    let merges = merges(model).map_err(refuse)?;
    let (names, types) = tokens.into_iter().unzip();
    Ok(vec![
        (key("model"), GgufValue::Text("gpt2".into())),
        (key("pre"), GgufValue::Text(pre.into())),
        (key("tokens"), GgufValue::Texts(names)),
        (key("token_type"), GgufValue::Integers(types)),
        (key("merges"), GgufValue::Texts(merges)),
    ])
}

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// Whether the tokens of a folder are the pieces of its SentencePiece model: that of its `tokenizer.json` is not byte-level, or there is none.
fn is_sentencepiece(folder: &Path) -> Result<bool> {
    if !folder.join(FILE_NAME).is_file() {
        return Ok(false);
    }
    let path = folder.join("tokenizer.json");
    if !path.is_file() {
        return Ok(true);
    }
    let json = config::read_json(&path)?;
    Ok(json.pointer("/model/byte_fallback").and_then(Value::as_bool) == Some(true))
}

/// The vocabulary of a SentencePiece model.
fn sentencepiece_vocabulary(
    folder: &Path,
    tokenizer: &TextTokenizer,
    vocab_size: usize,
) -> Result<Vec<(String, GgufValue)>> {
    let model = SentencePieceModel::open(folder)?;
    let path = folder.join(FILE_NAME);
    let refuse = |message: String| EngineError::model_config(&path, message);
    let normalizes = model.normalizer.remove_extra_whitespaces.unwrap_or(true)
        || model
            .normalizer
            .precompiled_charsmap
            .as_ref()
            .is_some_and(|map| !map.is_empty());
    if model.trainer.model_type != Some(BPE) || !model.trainer.byte_fallback.unwrap_or(false) || normalizes {
        return Err(refuse(
            "llama.cpp reads SentencePiece models of the type BPE with byte fallback, which leave texts as they are, and this one is another: the \
             model cannot be exported as GGUF, only as `format: hf`"
                .into(),
        ));
    }
    let mut all: Vec<Token> = model.all().cloned().collect();
    for (id, token) in all.iter().enumerate() {
        let used = u32::try_from(id)
            .ok()
            .and_then(|id| tokenizer.inner().0.id_to_token(id));
        if used.as_deref() != Some(token.text.as_str()) {
            return Err(refuse(format!(
                "its token {id} is `{}`, and that of tokenizer.json is {used:?}: they are tokenizers of different models",
                token.text
            )));
        }
    }
    all.extend((all.len()..vocab_size).map(|id| Token {
        text: format!("[PAD{id}]"),
        score: UNUSED_SCORE,
        kind: UNUSED,
    }));
    let scores = all.iter().map(|token| token.score).collect();
    let types = all.iter().map(|token| token.kind).collect();
    Ok(vec![
        (key("model"), GgufValue::Text("llama".into())),
        (key("pre"), GgufValue::Text("default".into())),
        (
            key("tokens"),
            GgufValue::Texts(all.into_iter().map(|token| token.text).collect()),
        ),
        (key("scores"), GgufValue::Floats(scores)),
        (key("token_type"), GgufValue::Integers(types)),
        (key("add_space_prefix"), GgufValue::Flag(model.has_prefix())),
    ])
}

/// The token that the tokenizer puts before a text.
fn begins_with(tokenizer: &TextTokenizer) -> Result<Option<u32>> {
    Ok(tokenizer.encode("")?.first().copied())
}

/// The name and the type of each id. Ids without a token are unused. The ids are those that the tokenizer uses: a file may name others for tokens
/// that are added to its vocabulary.
fn tokens(
    json: &Value,
    tokenizer: &TextTokenizer,
    vocab_size: usize,
) -> std::result::Result<Vec<(String, i32)>, String> {
    let mut tokens: Vec<(String, i32)> = (0..vocab_size).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let mut set = |name: &str, kind: i32| {
        let id = tokenizer
            .token_id(name)
            .ok_or_else(|| format!("the token `{name}` has no id"))?;
        let slot = usize::try_from(id).ok().and_then(|id| tokens.get_mut(id));
        let slot = slot.ok_or_else(|| format!("the token `{name}` has the id {id}, and the model has {vocab_size}"))?;
        *slot = (name.to_owned(), kind);
        Ok::<_, String>(())
    };
    let vocab = json.pointer("/model/vocab").and_then(Value::as_object);
    for name in vocab.ok_or("it has no `model.vocab`")?.keys() {
        set(name, NORMAL)?;
    }
    for token in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let name = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let is_special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        set(name, if is_special { CONTROL } else { USER_DEFINED })?;
    }
    Ok(tokens)
}

/// The merges, in their order: `a b`.
fn merges(model: &Value) -> std::result::Result<Vec<String>, String> {
    let list = model.get("merges").and_then(Value::as_array);
    let merge = |merge: &Value| match merge {
        Value::String(text) => Some(text.clone()),
        // Newer files have pairs, whose parts have no spaces: bytes are mapped to other characters.
        pair => Some(format!("{} {}", pair.get(0)?.as_str()?, pair.get(1)?.as_str()?)),
    };
    let all: Option<Vec<String>> = list.ok_or("it has no `model.merges`")?.iter().map(merge).collect();
    all.ok_or_else(|| "an entry of `model.merges` is not a pair of texts".to_owned())
}

/// The ids of the special tokens that `tokenizer_config.json` names, or else `config.json`.
fn special_ids(folder: &Path, tokenizer: &TextTokenizer, vocab_size: usize) -> Result<BTreeMap<&'static str, u32>> {
    let read = |name: &str| match folder.join(name) {
        path if path.is_file() => config::read_json(&path),
        _ => Ok(Value::Null),
    };
    let (names, numbers) = (read("tokenizer_config.json")?, read("config.json")?);
    let mut ids = BTreeMap::new();
    for (key, kind) in [
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ] {
        let name = match names.get(key) {
            Some(Value::String(name)) => Some(name.as_str()),
            Some(token) => token.get("content").and_then(Value::as_str),
            None => None,
        };
        let number = match numbers.get(format!("{key}_id")) {
            Some(Value::Array(ids)) => ids.first().and_then(Value::as_u64),
            other => other.and_then(Value::as_u64),
        };
        let number = number.and_then(|id| u32::try_from(id).ok());
        let id = name.and_then(|name| tokenizer.token_id(name)).or(number);
        if let Some(id) = id.filter(|id| (*id as usize) < vocab_size) {
            ids.insert(kind, id);
        }
    }
    Ok(ids)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::chat_template;
    use serde_json::{Value, json};

    #[test]
    fn the_template_of_conversations_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let settings =
            |template: Value| write("tokenizer_config.json", &json!({"chat_template": template}).to_string());
        let found = || chat_template(folder.path()).unwrap();
        assert_eq!(found(), None);
        settings(Value::Null);
        assert_eq!(found(), None);
        settings(json!("{{ a }}"));
        assert_eq!(found().as_deref(), Some("{{ a }}"));
        settings(json!([{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]));
        assert_eq!(found().as_deref(), Some("c"));
        write("chat_template.jinja", "{{ d }}\n");
        assert_eq!(found().as_deref(), Some("{{ d }}\n"));
    }
}
