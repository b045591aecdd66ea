//! Bad configs and data of a training of a code model are refused with one message.

use super::test_runs::{config, model, refused, write_texts};
use crate::testing::byte_tokenizer::write_tokenizer;
use serde_json::{Value, json};

#[test]
fn bad_input_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    model(&root.join("model"), "starcoder2");
    model(&root.join("learned"), "starcoder");
    model(&root.join("llama"), "llama");
    let data = root.join("data.jsonl");
    let refused_with = |lines: &[(&str, Value)]| refused(&config(root, lines));

    for (text, place, what) in [
        (
            "[1, 2, 3]\n[4, 264]\n",
            "data.jsonl:2",
            "the token id 264 at position 1 is not in the model's vocabulary of 264",
        ),
        ("[1, -1]\n", "data.jsonl:1", "the token id -1"),
        ("[1, 99999999999999999999]\n", "data.jsonl:1", "whole numbers"),
        ("[1, 2.5]\n", "data.jsonl:1", "whole numbers"),
        (
            "{\"tokens\": \"x\"}\n",
            "data.jsonl:1",
            "`tokens`: expected a list of token ids",
        ),
        ("\n{\"body\": \"x\"}\n", "data.jsonl:2", "its fields are: `body`"),
        (
            "{\"prompt\": \"x\"}\n",
            "data.jsonl:1",
            "has `prompt` and no `completion`",
        ),
        ("{\"text\": 3}\n", "data.jsonl:1", "`text`: expected text"),
        (
            "{\"text\": \"a\", \"input_ids\": [1, 2]}\n",
            "data.jsonl:1",
            "it has `input_ids` and `text`, and only one",
        ),
        (
            "{\"text\": \"a\", \"prompt\": \"b\", \"completion\": \"c\"}\n",
            "data.jsonl:1",
            "it has `text` and `prompt`, and only one",
        ),
        ("[1, 2\n", "data.jsonl:1", "expected a JSON record on each line"),
        ("7\n", "data.jsonl:1", "expected a list of token ids or an object"),
        ("", "data.jsonl", "there is no document in it"),
        (
            "[]\n[5]\n",
            "nothing to train on",
            "documents of fewer than two tokens, or such ends of longer ones, in which nothing can be predicted, are left out: 2",
        ),
    ] {
        std::fs::write(&data, text).unwrap();
        let message = refused_with(&[]);
        assert!(message.contains(place) && message.contains(what), "{text:?}: {message}");
    }
    std::fs::write(&data, b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n").unwrap();
    let message = refused_with(&[]);
    assert!(
        message.contains("data.jsonl:2") && message.contains("not UTF-8"),
        "{message}"
    );

    let json = root.join("data.json");
    let of_json = |text: &str| {
        std::fs::write(&json, text).unwrap();
        refused_with(&[("datasets", json!([{"path": json}]))])
    };
    let message = of_json("[\n  [1, 2],\n  [3, 300]\n]\n");
    assert!(message.contains("data.json:3") && message.contains("300"), "{message}");
    assert!(of_json("[[1, 2], ").contains("data.json: expected a list of token sequences"));
    assert!(of_json("{\"sequences\": 3}").contains("a list of token sequences"));

    write_texts(&data);
    let message = refused_with(&[("datasets", json!([{"path": root.join("nothing")}]))]);
    assert!(message.contains("this data set does not exist"), "{message}");
    let message = refused_with(&[("datasets", json!([{"path": root.join("model"), "include": ["*.rs"]}]))]);
    assert!(
        message.contains("choose none of its 4 files, such as `config.json`") && message.contains("`src/**/*.py`"),
        "{message}"
    );
    std::fs::create_dir(root.join("binary")).unwrap();
    let message = refused_with(&[("datasets", json!([{"path": root.join("binary")}]))]);
    assert!(message.contains("there is no file in this folder"), "{message}");
    std::fs::write(root.join("binary/a.bin"), b"a\0b").unwrap();
    let message = refused_with(&[("datasets", json!([{"path": root.join("binary")}]))]);
    assert!(
        message.contains("none of its 1 files is UTF-8 text, such as"),
        "{message}"
    );
    let records = json!([{"path": root.join("binary"), "kind": "records"}]);
    let message = refused_with(&[("datasets", records)]);
    assert!(
        message.contains("`a.bin`, ends in .json, .jsonl or .parquet"),
        "{message}"
    );
    let message = refused_with(&[("datasets", json!([{"path": data, "include": ["*.rs"]}]))]);
    assert!(
        message.contains("`include` and `exclude` choose files of a folder"),
        "{message}"
    );
    let message = refused_with(&[("validation", json!({"share": 1e-9}))]);
    assert!(message.contains("no document is held out"), "{message}");
    let message = refused_with(&[("network", json!({"only_if_contains": ["x_proj"]}))]);
    assert!(message.contains("no layer is left to train"), "{message}");

    let other_model = |name: &str, more: &[(&str, Value)]| {
        let model = ("model", json!({"name_or_path": root.join(name), "dtype": "float32"}));
        refused(&config(root, &[&[model], more].concat()))
    };
    // Texts need a tokenizer, and so do prompts.
    let message = other_model("llama", &[]);
    assert!(
        message.contains("data.jsonl:1") && message.contains("no tokenizer.json"),
        "{message}"
    );
    let message = other_model("llama", &[("sample", json!({"prompts": ["a"]}))]);
    assert!(
        message.contains("sample.prompts") && message.contains("no tokenizer.json"),
        "{message}"
    );
    let message = other_model("learned", &[("context", json!(97))]);
    assert!(
        message.contains("context: 97 tokens are more than the 96 positions"),
        "{message}"
    );
    write_tokenizer(&root.join("llama"), 264);
    let message = other_model("llama", &[]);
    assert!(message.contains("tokenizer of another model"), "{message}");
    write_tokenizer(&root.join("llama"), 52);
    let message = other_model("llama", &[("fim_rate", json!(0.5))]);
    assert!(message.contains("fill-in-the-middle needs tokens"), "{message}");
    let long = "x".repeat(300);
    let message = refused_with(&[("sample", json!({"prompts": [long]}))]);
    assert!(message.contains("a prompt has 300 tokens"), "{message}");
}
