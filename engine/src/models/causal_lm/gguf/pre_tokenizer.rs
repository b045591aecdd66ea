//! How byte-level BPE tokenizers split texts, by llama.cpp's names (`tokenizer.ggml.pre`).

use serde_json::{Value, json};

/// The regular expression of Qwen2's tokenizer.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of Llama 3's tokenizer.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The names in llama.cpp, and the rules that `tokenizer.json` has for them: a split by one expression before bytes are mapped, or digits one
/// by one, or only the rule of GPT-2 that the mapping of bytes has itself.
const SPLITS: [(&str, &str); 2] = [("qwen2", QWEN2), ("llama-bpe", LLAMA3)];
/// Rules of GPT-2, after digits were split one by one.
const STARCODER: &str = "starcoder";
/// The rules of GPT-2.
const GPT2: &str = "gpt-2";
/// Other names of llama.cpp for the same rules.
const ALIASES: [(&str, &str); 7] = [
    ("llama3", "llama-bpe"),
    ("llama-v3", "llama-bpe"),
    ("refact", STARCODER),
    ("command-r", STARCODER),
    ("smollm", STARCODER),
    ("codeshell", STARCODER),
    ("deepseek-r1-qwen", "qwen2"),
];
/// The rules of files without a name, which older programs wrote.
pub(super) const DEFAULT: &str = "default";
/// Their expressions, each of which splits the pieces of the one before again (`LLAMA_VOCAB_PRE_TYPE_DEFAULT` in llama.cpp's
/// `llama-vocab.cpp`): punctuation, the rules of GPT-2, numbers, and numbers of three digits.
const DEFAULT_SPLITS: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

/// The first of the names for the same rules.
pub(super) fn canonical(name: &str) -> &str {
    let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
    alias.map_or(name, |(_, known)| known)
}

/// The name of the rules of a `pre_tokenizer` section.
///
/// # Errors
/// What is found, if the rules have no name.
pub(super) fn name_of(section: &Value) -> Result<&'static str, String> {
    let steps: Vec<&Value> = match section.get("pretokenizers").and_then(Value::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![section],
    };
    let kind = |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let flag = |step: &Value, key: &str, default: bool| step.get(key).and_then(Value::as_bool).unwrap_or(default);
    // The mapping of bytes, and whether it splits by the rules of GPT-2 first.
    let is_bytes = |step: &Value, splits: bool| {
        kind(step) == "ByteLevel" && !flag(step, "add_prefix_space", true) && flag(step, "use_regex", true) == splits
    };
    let is_digits = |step: &Value| kind(step) == "Digits" && flag(step, "individual_digits", false);
    match steps.as_slice() {
        [bytes] if is_bytes(bytes, true) => return Ok(GPT2),
        [digits, bytes] if is_digits(digits) && is_bytes(bytes, true) => return Ok(STARCODER),
        [split, bytes] if kind(split) == "Split" && is_bytes(bytes, false) => {
            let pattern = split
                .pointer("/pattern/Regex")
                .and_then(Value::as_str)
                .unwrap_or_default();
            let is_isolated = split.get("behavior").and_then(Value::as_str) == Some("Isolated");
            let found = SPLITS.iter().find(|(_, known)| *known == pattern);
            if let Some((name, _)) = found.filter(|_| is_isolated && !flag(split, "invert", false)) {
                return Ok(name);
            }
        }
        _ => {}
    }
    let kinds: Vec<String> = steps.into_iter().map(kind).collect();
    Err(kinds.join(", "))
}

/// The `pre_tokenizer` section of the rules with this name. `None`: the name is not known.
pub(super) fn section_of(name: &str) -> Option<Value> {
    let name = canonical(name);
    let bytes = |splits: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits});
    let sequence = |steps: Value| Some(json!({"type": "Sequence", "pretokenizers": steps}));
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    if let Some((_, pattern)) = SPLITS.iter().find(|(known, _)| *known == name) {
        return sequence(json!([split(pattern), bytes(false)]));
    }
    match name {
        DEFAULT => {
            let splits = DEFAULT_SPLITS.into_iter().map(split);
            sequence(splits.chain([bytes(false)]).collect())
        }
        GPT2 => Some(bytes(true)),
        STARCODER => sequence(json!([{"type": "Digits", "individual_digits": true}, bytes(true)])),
        _ => None,
    }
}

/// The names of all known rules, for messages.
pub(super) fn known_names() -> String {
    let names: Vec<&str> = [GPT2, STARCODER]
        .into_iter()
        .chain(SPLITS.iter().map(|(name, _)| *name))
        .collect();
    names.join(", ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_without_a_name_split_punctuation_numbers_and_three_digits() {
        use std::str::FromStr;
        let json = json!({
            "version": "1.0", "pre_tokenizer": section_of(DEFAULT).unwrap(), "added_tokens": [],
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        });
        let tokenizer = tokenizers::Tokenizer::from_str(&json.to_string()).unwrap();
        let split = |text: &str| {
            let mut text = tokenizers::PreTokenizedString::from(text);
            let splitter = tokenizer.get_pre_tokenizer().unwrap();
            tokenizers::PreTokenizer::pre_tokenize(splitter, &mut text).unwrap();
            let parts = text.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
            parts
                .into_iter()
                .map(|(part, ..)| part.replace('Ġ', " "))
                .collect::<Vec<_>>()
        };
        assert_eq!(split("a ==b+1"), ["a", " ", "==", "b", "+", "1"]);
        assert_eq!(split("x 12345"), ["x", " ", "123", "45"]);
        assert_eq!(split("it's ok..."), ["it", "'", "s", " ok", "..."]);
    }

    #[test]
    fn rules_have_their_names_and_names_their_rules() {
        for name in ["gpt-2", "starcoder", "qwen2", "llama-bpe"] {
            assert_eq!(name_of(&section_of(name).unwrap()), Ok(name));
        }
        assert_eq!(section_of("refact"), section_of("starcoder"));
        assert_eq!(section_of("llama3"), section_of("llama-bpe"));
        assert_eq!(section_of("tekken"), None);
        let other = json!({"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]});
        assert_eq!(name_of(&other), Err("Metaspace".into()));
        let mut with_space = section_of("gpt-2").unwrap();
        with_space["add_prefix_space"] = json!(true);
        assert!(name_of(&with_space).is_err());
    }
}
