//! Gaps as tokenizers of code models mark them (`tests/reference/make_fim.py`).

use super::{FimTokens, TextTokenizer};
use crate::testing::byte_tokenizer::write_tokenizer;
use crate::testing::fixtures;
use serde_json::{Value, json};
use std::path::Path;

fn fixture() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("fim.json")).unwrap()).unwrap()
}

fn open(folder: &Path, tokenizer: &Value) -> TextTokenizer {
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    TextTokenizer::open(folder, 64).unwrap()
}

/// As transformers 5 saves the tokenizer, and as Code Llama's repositories have it: a space before each text, added by other rules.
#[test]
fn gaps_of_code_llama_are_those_of_transformers() {
    let expected = fixture();
    let folder = tempfile::tempdir().unwrap();
    let mut of_repository = expected["tokenizer"].clone();
    of_repository["pre_tokenizer"] = json!(null);
    of_repository["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]});
    let marks: Vec<u32> = serde_json::from_value(expected["marks"].clone()).unwrap();
    for json in [&expected["tokenizer"], &of_repository] {
        let tokenizer = open(folder.path(), json);
        assert!(tokenizer.has_prefix());
        let found = tokenizer.fim_tokens().unwrap();
        let of_form = FimTokens {
            prefix: marks[0],
            suffix: marks[1],
            middle: Some(marks[2]),
            end: Some(marks[3]),
            has_separate_parts: true,
        };
        assert_eq!(found, of_form);
        for case in expected["cases"].as_array().unwrap() {
            let [prefix, suffix] = ["prefix", "suffix"].map(|key| case[key].as_str().unwrap());
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(
                tokenizer.encode_fim(prefix, suffix).unwrap(),
                ids,
                "{prefix:?} {suffix:?}"
            );
        }
    }
}

/// A byte tokenizer with these names in place of `<fim_prefix>`, `<fim_suffix>` and `<fim_middle>`.
fn with_names(folder: &Path, names: [&str; 3]) -> TextTokenizer {
    write_tokenizer(folder, 264);
    let path = folder.join("tokenizer.json");
    let mut text = std::fs::read_to_string(&path).unwrap();
    for (old, new) in ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"].into_iter().zip(names) {
        text = text.replace(old, new);
    }
    std::fs::write(path, text).unwrap();
    TextTokenizer::open(folder, 264).unwrap()
}

#[test]
fn marks_are_found_by_the_names_of_each_kind_of_models() {
    let folder = tempfile::tempdir().unwrap();
    let [p, s, m] = [257, 258, 259];
    let byte = |text: &str| with_names(folder.path(), ["x", "y", "z"]).encode(text).unwrap();
    let (prefix, suffix) = (byte("a b"), byte(" c"));
    for names in [
        ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
        ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ] {
        let tokenizer = with_names(folder.path(), names);
        let expected = [&[p][..], &prefix, &[s], &suffix, &[m]].concat();
        assert_eq!(tokenizer.encode_fim("a b", " c").unwrap(), expected, "{names:?}");
        let fim = tokenizer.fim_tokens().unwrap();
        assert_eq!((fim.prefix, fim.suffix, fim.middle, fim.end), (p, s, Some(m), None));
        assert_eq!(fim.marks(), 3);
        let spm = fim.before_middle(&prefix, &suffix, true);
        assert_eq!(spm, [&[p, s][..], &suffix, &[m], &prefix].concat());
    }
    // Codestral: the suffix is first, and there is no mark of the middle.
    let tokenizer = with_names(folder.path(), ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"]);
    let expected = [&[s][..], &suffix, &[p], &prefix].concat();
    assert_eq!(tokenizer.encode_fim("a b", " c").unwrap(), expected);
    assert_eq!(tokenizer.fim_tokens().unwrap().marks(), 2);
    let none = with_names(folder.path(), ["<fim_prefix>", "<fim_suffix>", "other"]);
    assert_eq!(none.fim_tokens(), None);
    let error = none.encode_fim("a", "b").unwrap_err().to_string();
    assert!(error.contains("[PREFIX]") && error.contains("▁<PRE>"), "{error}");
}
