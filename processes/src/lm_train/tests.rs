//! What trainings of code models save, and what does not change them.

use super::test_runs::{
    completed, config, files, logs, metric, model, run_spec, sequences, spec_of, stop_at, whole_training, write_lines,
    write_texts,
};
use crate::testing::byte_tokenizer::write_tokenizer;
use crate::testing::formula_weights::expected as decoders;
use aitk_common::attempt::Outcome;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::step_metrics;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::fs::File;
use std::path::PathBuf;

#[test]
fn dropout_changes_the_training_and_is_the_same_with_the_same_seed() {
    let losses = |dropout: f64| {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        model(&root.join("model"), "starcoder2");
        write_texts(&root.join("data.jsonl"));
        let network = json!({"linear": 4, "dropout": dropout});
        let train = json!({"steps": 4, "lr": 0.01, "gradient_accumulation": 2});
        let events = completed(&config(root, &[("network", network), ("train", train)]));
        let adapter = std::fs::read_to_string(root.join("out/coder/coder/adapter_config.json")).unwrap();
        let adapter: Value = serde_json::from_str(&adapter).unwrap();
        assert_eq!(adapter["lora_dropout"].as_f64(), Some(dropout));
        metric(&events, "loss/loss")
    };
    let (none, half) = (losses(0.0), losses(0.5));
    assert_eq!(losses(0.5), half);
    // A new LoRA changes nothing, so the first loss has nothing to drop.
    assert_eq!(none[0], half[0]);
    assert_ne!(none[1..], half[1..]);
}

#[test]
fn saves_completions_and_held_out_losses_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let events = completed(&whole_training(root, true));
    let losses = metric(&events, "val/loss");
    let perplexities = metric(&events, "val/perplexity");
    assert!(losses.len() >= 4, "{losses:?}");
    assert!(losses.last().unwrap() < losses.first().unwrap(), "{losses:?}");
    assert!(
        losses
            .iter()
            .zip(perplexities)
            .all(|(loss, perplexity)| loss.exp() == perplexity)
    );
    let out = root.join("out/coder");
    let steps = metric(&events, "loss/loss").len() as u64;
    let mut names: Vec<String> = std::fs::read_dir(&out)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let last = (steps - 1) / 2 * 2;
    let kept = [last - 2, last].map(|step| format!("coder_{step:09}"));
    let expected = [
        ".aitk",
        "coder",
        &kept[0],
        &kept[1],
        "config.yaml",
        "log.txt",
        "loss.png",
        "metrics.jsonl",
        "samples",
    ];
    assert_eq!(names, expected);
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("coder/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(4), &json!(4.0)));
    assert!(
        config["target_modules"]
            .as_array()
            .unwrap()
            .contains(&json!("model.layers.1.mlp.c_fc"))
    );
    for step in [0, 4, steps] {
        let text = std::fs::read_to_string(out.join(format!("samples/{step:09}.jsonl"))).unwrap();
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["prompt"], &line["step"]), (&json!("fn a"), &json!(step)));
    }
    let metrics = step_metrics::read(File::open(out.join("metrics.jsonl")).unwrap()).unwrap();
    assert_eq!(metrics.len() as u64, steps);
    assert!(metrics.iter().all(|step| step.values["tokens_per_second"] > 0.0));
    // A whole model is saved with its tokenizer.
    let dir = tempfile::tempdir().unwrap();
    completed(&whole_training(dir.path(), false));
    let folder = dir.path().join("out/coder/coder");
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        assert!(folder.join(name).is_file(), "{name}");
    }
}

/// With `AITK_KEEP_SAVES=FOLDER`, `tests/reference/check_lm_saves.py` loads the saves with transformers and peft.
#[test]
fn trained_code_models_learn_and_saved_models_load_and_differ_from_their_base() {
    use crate::models::causal_lm::{AttentionMask, CausalLm, CausalLmOptions};
    let keep = std::env::var_os("AITK_KEEP_SAVES").map(PathBuf::from);
    for (name, lora) in [
        ("starcoder2", true),
        ("starcoder2", false),
        ("llama", true),
        ("llama_biases", false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let root = match &keep {
            Some(keep) => keep.join(format!("{name}_{}", if lora { "lora" } else { "model" })),
            None => dir.path().to_path_buf(),
        };
        std::fs::create_dir_all(&root).unwrap();
        model(&root.join("model"), name);
        let vocabulary = decoders()["models"][name]["config"]["vocab_size"].as_f64().unwrap();
        write_lines(&root.join("data.jsonl"), sequences(vocabulary as f32));
        let network = match (lora, name) {
            (false, _) => Value::Null,
            // With the embedding layer, which is the output layer too.
            (true, "llama") => json!({"linear": 4, "linear_alpha": 8, "only_if_contains": ["layers", "embed_tokens"]}),
            (true, _) => json!({"linear": 4, "linear_alpha": 8}),
        };
        let train = json!({"steps": 4, "lr": 0.01, "batch_size": 4});
        let events = completed(&config(&root, &[("network", network), ("train", train)]));
        let losses = metric(&events, "loss/loss");
        assert!(losses[3] < losses[0], "{losses:?}");
        if !lora {
            let saved = root.join("out/coder/coder");
            let model = CausalLm::load(&saved, &CausalLmOptions::cpu()).unwrap();
            let ids = Tensor::new(&[[1u32, 2, 3, 4]], &Device::Cpu).unwrap();
            let logits = model
                .logits(&model.hidden(&ids, &AttentionMask::Causal).unwrap())
                .unwrap();
            assert_eq!(logits.dims(), [1, 4, vocabulary as usize]);
            let base = CausalLm::load(&root.join("model"), &CausalLmOptions::cpu()).unwrap();
            let before = base
                .logits(&base.hidden(&ids, &AttentionMask::Causal).unwrap())
                .unwrap();
            assert!(crate::testing::gap(&logits, &before) > 0.01);
        }
    }
}

#[test]
fn memory_profiles_and_checkpointing_change_nothing() {
    for lora in [true, false] {
        let mut results = Vec::new();
        for (profile, checkpointing) in [
            (MemoryProfile::CpuOnly, true),
            (MemoryProfile::CpuOnly, false),
            (MemoryProfile::GpuPoor, true),
            (MemoryProfile::Extreme, false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            model(&dir.path().join("model"), "llama");
            write_lines(&dir.path().join("data.jsonl"), sequences(52.0));
            let network = if lora { json!({"linear": 4}) } else { Value::Null };
            let train = json!({"steps": 4, "lr": 0.01, "batch_size": 4, "gradient_checkpointing": checkpointing});
            let mut spec = spec_of(&config(dir.path(), &[("network", network), ("train", train)]));
            spec.profile = profile;
            let (outcome, events) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
            results.push((metric(&events, "loss/loss"), files(&dir.path().join("out/coder/coder"))));
        }
        for other in &results[1..] {
            assert_eq!(other.0, results[0].0);
            assert!(other.1 == results[0].1);
        }
    }
}

#[test]
fn a_lora_is_trained_on_a_quantised_model() {
    let dir = tempfile::tempdir().unwrap();
    model(&dir.path().join("model"), "starcoder2");
    write_texts(&dir.path().join("data.jsonl"));
    let losses = |quantize: Value| {
        let mut model = json!({"name_or_path": dir.path().join("model"), "dtype": "float32"});
        for (key, value) in quantize.as_object().unwrap() {
            model[key] = value.clone();
        }
        let train = json!({"steps": 8, "lr": 0.01, "batch_size": 8, "lr_scheduler": "constant"});
        let lines = [("model", model), ("network", json!({"linear": 4})), ("train", train)];
        let events = completed(&config(dir.path(), &lines));
        std::fs::remove_dir_all(dir.path().join("out")).unwrap();
        metric(&events, "loss/loss")
    };
    let exact = losses(json!({}));
    for qtype in ["nf4", "int8"] {
        let found = losses(json!({"quantize": true, "qtype": qtype}));
        assert!(found[7] < found[0] - 0.5, "{qtype}: {found:?}");
        assert!(
            (found[0] - exact[0]).abs() < 1.0 && found[0] != exact[0],
            "{qtype}: {found:?} {exact:?}"
        );
    }
}

#[test]
fn a_new_model_is_trained_from_its_config_alone() {
    let mut saves = Vec::new();
    for seed in [1, 1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        model(&root.join("model"), "llama");
        write_tokenizer(&root.join("model"), 264);
        write_texts(&root.join("data.jsonl"));
        std::fs::remove_file(root.join("model/model.safetensors")).unwrap();
        let path = root.join("model/config.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        json["vocab_size"] = 264.into();
        std::fs::write(&path, json.to_string()).unwrap();
        let text = config(
            root,
            &[
                ("network", Value::Null),
                ("training_seed", json!(seed)),
                (
                    "model",
                    json!({"name_or_path": root.join("model"), "dtype": "float32", "from_config": true}),
                ),
                ("train", json!({"steps": 8, "batch_size": 2, "lr": 0.01})),
                ("save", json!({"save_every": 3, "dtype": "float32"})),
            ],
        );
        // A stop in the middle changes nothing.
        let spec = spec_of(&text);
        if saves.len() == 1 {
            stop_at(&spec, 4);
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let losses = metric(&events, "loss/loss");
        // The first loss is that of random guesses, about the logarithm of the vocabulary.
        if saves.is_empty() {
            assert!((losses[0] - 264f64.ln()).abs() < 0.2, "{losses:?}");
            assert!(losses[7] < losses[0] - 0.5, "{losses:?}");
        }
        let folder = root.join("out/coder/coder");
        // It is a model like any other.
        crate::models::causal_lm::CausalLm::load(&folder, &crate::models::causal_lm::CausalLmOptions::cpu()).unwrap();
        saves.push(std::fs::read(folder.join("model.safetensors")).unwrap());
    }
    assert!(saves[0] == saves[1] && saves[0] != saves[2]);
}
