//! LoRAs of embedding layers: trainings beside peft (`tests/reference/make_lm_embeddings.py`), saves and resumption.

use super::reference_tests::check_training_of;
use super::test_runs::{
    completed, config, files, logs, metric, model, run_spec, saved, sequences, spec_of, stop_at, whole_training,
    write_lines,
};
use crate::language_model_part::load_language_model_lora;
use crate::models::causal_lm::{CausalLm, CausalLmOptions};
use crate::testing::fixtures;
use aitk_common::attempt::Outcome;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

fn reference() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("lm_embeddings.json")).unwrap()).unwrap()
}

fn check_training(name: &str) {
    let reference = reference();
    check_training_of(&reference, name, reference["steps"].as_u64().unwrap());
}

#[test]
fn a_table_that_is_the_output_layer_too() {
    check_training("a table that is the output layer too");
}

#[test]
fn a_table_of_its_own() {
    check_training("a table of its own");
}

#[test]
fn tokens_and_positions() {
    check_training("tokens and positions");
}

crate::testing::in_portable_mode!(
    a_table_that_is_the_output_layer_too,
    a_table_of_its_own,
    tokens_and_positions
);

/// Trains a LoRA of a Llama for some steps.
fn train(root: &Path, network: Value) {
    model(&root.join("model"), "llama");
    write_lines(&root.join("data.jsonl"), sequences(52.0));
    let train = json!({"steps": 2, "lr": 0.01});
    completed(&config(root, &[("network", network), ("train", train)]));
}

#[test]
fn a_save_has_the_names_of_peft_and_is_loaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    train(
        root,
        json!({"linear": 3, "only_if_contains": ["q_proj", "embed_tokens"]}),
    );
    let found = saved(root);
    let reference = reference();
    let of_peft = reference["adapters"]["tied"]["tensors"].as_object().unwrap();
    // peft saves the table of the base model too, if its name is a target.
    let expected: BTreeSet<&String> = of_peft.keys().filter(|name| !name.contains("base_layer")).collect();
    assert_eq!(found.keys().collect::<BTreeSet<_>>(), expected);
    for (name, tensor) in &found {
        let shape: Vec<usize> = serde_json::from_value(of_peft[name].clone()).unwrap();
        assert_eq!(tensor.dims(), shape, "{name}");
        let largest = tensor.abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        assert!(largest.to_scalar::<f32>().unwrap() > 0.0, "{name} is zero");
    }
    let folder = root.join("out/coder/coder");
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap();
    let layers = [
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ];
    assert_eq!(config["target_modules"], json!(layers));
    let mut model = CausalLm::load(&root.join("model"), &CausalLmOptions::cpu()).unwrap();
    let loaded = load_language_model_lora(&mut model, &folder, 1.0).unwrap();
    assert_eq!((loaded.layers, loaded.alpha_is_unknown), (3, false));
}

/// As in peft, whose `target_modules` have whole names.
#[test]
fn a_table_is_trained_only_if_its_own_name_is_there() {
    for (network, is_trained) in [
        (json!({"linear": 3}), false),
        (json!({"linear": 3, "only_if_contains": ["model."]}), false),
        (json!({"linear": 3, "only_if_contains": ["embed", "layers.0"]}), false),
        (
            json!({"linear": 3, "only_if_contains": ["layers", "embed_tokens"], "ignore_if_contains": "embed_tokens"}),
            false,
        ),
        (
            json!({"linear": 3, "only_if_contains": ["layers", "model.embed_tokens"]}),
            true,
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        train(dir.path(), network.clone());
        let found = saved(dir.path());
        let has = |part: &str| found.keys().any(|name| name.contains(part));
        assert!(has("layers.0."), "{network}");
        assert_eq!(has("embed_tokens"), is_trained, "{network}");
    }
}

#[test]
fn an_interrupted_training_ends_with_the_same_bytes() {
    let text = |root: &Path| {
        let mut job: Value = serde_json::from_str(&whole_training(root, true)).unwrap();
        job["config"]["process"][0]["network"] =
            json!({"linear": 4, "dropout": 0.2, "only_if_contains": ["self_attn", "embed_tokens"]});
        job.to_string()
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = metric(&completed(&text(whole.path())), "loss/loss");
    let spec = spec_of(&text(parts.path()));
    stop_at(&spec, 3);
    let (outcome, last) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&last));
    assert!(logs(&last).contains("resuming from step 3"), "{}", logs(&last));
    assert_eq!(metric(&last, "loss/loss"), expected[3..]);
    let (whole, parts) = (files(&whole.path().join("out")), files(&parts.path().join("out")));
    assert_eq!(whole.keys().collect::<Vec<_>>(), parts.keys().collect::<Vec<_>>());
    for (path, bytes) in &whole {
        assert!(*bytes == parts[path], "{} differs", path.display());
    }
}
