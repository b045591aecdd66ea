//! LoRAs and DoRAs of embedding layers, attached and merged, beside peft's (`tests/reference/make_lm_embeddings.py`).

use super::super::language_model_part::load_language_model_lora;
use super::peft_tests::{assert_near, load, logits};
use super::tests::{VOCABULARY, export, largest_difference, logits_of, write_base};
use crate::models::causal_lm::CausalLm;
use crate::testing::formula_weights::{expected, formula, write_model};
use crate::testing::{compute_on_this_thread, fixtures, in_portable_mode};
use crate::weights::write_tensors;
use aitk_common::attempt::ChildEvent;
use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn adapters() -> Value {
    let path = fixtures().join("lm_embeddings.json");
    let mut reference: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    reference["adapters"].take()
}

/// Writes the folder of an adapter with tensors of these names and shapes, whose numbers are the reference's formula of their names.
fn write_adapter(folder: &Path, shapes: &Value, config: &Value) {
    let tensor = |(name, shape): (&String, &Value)| {
        let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
        let count = shape.iter().product();
        let numbers: Vec<f32> = match name.contains("magnitude") {
            true => formula(name, count, 1.0)
                .into_iter()
                .map(|number| number + 4.0)
                .collect(),
            false => formula(name, count, 0.4),
        };
        (name.clone(), Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap())
    };
    let tensors: BTreeMap<String, Tensor> = shapes.as_object().unwrap().iter().map(tensor).collect();
    std::fs::create_dir_all(folder).unwrap();
    let mut file = std::fs::File::create(folder.join("adapter_model.safetensors")).unwrap();
    write_tensors(&mut file, &tensors, &BTreeMap::new()).unwrap();
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Writes the model and the adapter of a case. Returns the tokens whose logits are compared.
fn write_case(root: &Path, case: &Value) -> Vec<u32> {
    write_model(
        &root.join("model"),
        &expected()["models"][case["model"].as_str().unwrap()]["config"],
    );
    write_adapter(&root.join("adapter"), &case["tensors"], &case["config"]);
    serde_json::from_value(case["ids"].clone()).unwrap()
}

fn expected_logits(case: &Value, strength: &str) -> Vec<f32> {
    serde_json::from_value(case["logits"][strength].clone()).unwrap()
}

#[test]
fn adapters_of_peft_are_attached_as_peft_does() {
    compute_on_this_thread();
    let adapters = adapters();
    assert_eq!(adapters.as_object().unwrap().len(), 5);
    for (name, case) in adapters.as_object().unwrap() {
        let root = tempfile::tempdir().unwrap();
        let ids = write_case(root.path(), case);
        let plain = logits(&load(&root.path().join("model")), &ids);
        for strength in ["1.0", "0.5"] {
            let expected = expected_logits(case, strength);
            let mut model = load(&root.path().join("model"));
            let adapter = root.path().join("adapter");
            let loaded = load_language_model_lora(&mut model, &adapter, strength.parse().unwrap()).unwrap();
            assert!(!loaded.alpha_is_unknown && loaded.unknown.is_empty(), "{name}");
            assert_near(&logits(&model, &ids), &expected, &format!("{name} at {strength}"));
            assert!(largest_difference(&expected, &plain) > 0.02, "{name} changes nothing");
        }
    }
}

in_portable_mode!(adapters_of_peft_are_attached_as_peft_does);

fn warnings(events: &[ChildEvent]) -> Vec<String> {
    let warning = |event: &ChildEvent| match event {
        ChildEvent::Log { level, message } if level == "warn" => Some(message.clone()),
        _ => None,
    };
    events.iter().filter_map(warning).collect()
}

/// A table that is the output layer too stays as it is there, as while the adapter is attached.
#[test]
fn a_merged_folder_has_the_logits_of_the_attached_adapter() {
    compute_on_this_thread();
    let adapters = adapters();
    for (name, case) in adapters.as_object().unwrap() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let ids = write_case(root, case);
        let is_tied = case["model"] != "llama_biases";
        for (strength, weight) in [("1.0", 1.0), ("0.5", 0.5)] {
            let model = json!({"lora_path": root.join("adapter"), "lora_weight": weight});
            let events = export(root, model, json!({"format": "hf", "dtype": "f32"}));
            let is_untied = warnings(&events)
                .iter()
                .any(|warning| warning.contains("an output layer of its own"));
            assert_eq!(is_untied, is_tied, "{name}");
            let merged = root.join("tiny-f32");
            let found = logits(&load(&merged), &ids);
            assert_near(
                &found,
                &expected_logits(case, strength),
                &format!("{name} at {strength}"),
            );
            if !is_tied {
                continue;
            }
            let config: Value = serde_json::from_slice(&std::fs::read(merged.join("config.json")).unwrap()).unwrap();
            assert_eq!(config["tie_word_embeddings"], json!(false), "{name}");
            let read = |folder: &Path, name: &str| {
                let tensors = safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
                tensors[name].flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            let table = load(&root.join("model")).embedding_name();
            assert_eq!(
                read(&merged, "lm_head.weight"),
                read(&root.join("model"), &table),
                "{name}"
            );
            assert_ne!(read(&merged, &table), read(&root.join("model"), &table), "{name}");
        }
        // Other exports of the model have one table for both.
        let events = export(root, json!({}), json!({"format": "hf", "dtype": "f32"}));
        assert!(warnings(&events).is_empty(), "{name}");
        assert_eq!(load(&root.join("tiny-f32")).config().ties_embeddings, is_tied, "{name}");
    }
}

#[test]
fn a_gguf_file_has_the_logits_of_the_attached_adapter() {
    compute_on_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_base(&root.join("model"), "llama");
    let table = "base_model.model.model.embed_tokens";
    let shapes = json!({
        format!("{table}.lora_embedding_A"): [2, VOCABULARY],
        format!("{table}.lora_embedding_B"): [256, 2],
    });
    write_adapter(
        &root.join("adapter"),
        &shapes,
        &json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4}),
    );
    export(
        root,
        json!({"lora_path": root.join("adapter")}),
        json!({"dtype": "f32"}),
    );
    let mut attached = load(&root.join("model"));
    let plain = logits_of(&attached);
    load_language_model_lora(&mut attached, &root.join("adapter"), 1.0).unwrap();
    let expected = logits_of(&attached);
    assert!(largest_difference(&expected, &plain) > 0.02);
    let merged: CausalLm = load(&root.join("tiny-f32.gguf"));
    assert!(!merged.config().ties_embeddings);
    assert!(largest_difference(&expected, &logits_of(&merged)) < 1e-4);
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_model(&root.join("model"), &expected()["models"]["llama"]["config"]);
    let table = "base_model.model.model.embed_tokens";
    let lora = json!({format!("{table}.lora_embedding_A"): [2, 52], format!("{table}.lora_embedding_B"): [32, 2]});
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    let error = |shapes: &Value| {
        write_adapter(&root.join("adapter"), shapes, &config);
        let loaded = load_language_model_lora(&mut load(&root.join("model")), &root.join("adapter"), 1.0);
        loaded.map_or_else(|error| error.to_string(), |_| "it is used".to_owned())
    };
    let with = |changes: Value| {
        let mut shapes = lora.clone();
        for (name, shape) in changes.as_object().unwrap() {
            shapes[name] = shape.clone();
        }
        error(&shapes)
    };
    // The table of the base model, of which peft saves a copy.
    assert_eq!(
        with(json!({format!("{table}.base_layer.weight"): [52, 32]})),
        "it is used"
    );
    for (found, part) in [
        (
            with(json!({format!("{table}.base_layer.weight"): [60, 32]})),
            "the vocabulary of the model that it was trained on was changed",
        ),
        (
            with(json!({"base_model.model.lm_head.base_layer.weight": [52, 32]})),
            "such as `base_model.model.lm_head.base_layer.weight`",
        ),
        (
            with(json!({format!("{table}.lora_embedding_A"): [2, 60]})),
            "a LoRA of a table [60, 32], the model has [52, 32]",
        ),
        (
            with(json!({format!("{table}.lora_embedding_A"): [3, 52]})),
            "do not fit together",
        ),
        (
            error(&json!({format!("{table}.lora_embedding_A"): [2, 52]})),
            "it has no lora_embedding_B: the file is incomplete",
        ),
        (
            error(&json!({format!("{table}.lora_A.weight"): [2, 32], format!("{table}.lora_B.weight"): [52, 2]})),
            "which is an embedding layer",
        ),
        (
            error(&json!({
                "base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A": [2, 32],
                "base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_B": [32, 2],
            })),
            "a LoRA of an embedding layer of it, and it is none",
        ),
        (
            with(json!({format!("{table}.lora_magnitude_vector"): [52]})),
            "52 magnitudes of an embedding layer with 32 features",
        ),
    ] {
        assert!(found.contains(part), "{found}");
    }
}
