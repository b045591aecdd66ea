//! LoRAs that are trained on the model of a GGUF file.

use super::model_folder::write_model;
use super::test_runs::{completed, config, logs, metric, model, refused, saved, write_lines, write_texts};
use crate::models::causal_lm::{CausalLm, CausalLmOptions, GgufExport};
use crate::testing::byte_tokenizer::{END, write_tokenizer};
use crate::testing::formula_weights::{expected, write_model as write_tiny_model};
use crate::testing::{compute_on_this_thread, gap, largest};
use crate::weights::Weight;
use aitk_common::job::lm_export::LmExportType;
use candle_core::{DType, Tensor};
use serde_json::{Value, json};
use std::path::Path;

/// Writes a tiny model with a tokenizer, whose rows have whole blocks of each type of GGUF, as a folder.
fn wide_model(folder: &Path, name: &str) {
    let mut config = expected()["models"][name]["config"].clone();
    let sizes: &[(&str, u64)] = match name {
        "starcoder" => &[("n_embd", 256), ("n_inner", 512)],
        _ => &[("hidden_size", 256), ("intermediate_size", 512)],
    };
    for (key, size) in sizes {
        config[*key] = json!(size);
    }
    if config.get("head_dim").is_some() {
        config["head_dim"] = json!(256 / config["num_attention_heads"].as_u64().unwrap());
    }
    config["vocab_size"] = json!(264);
    config["eos_token_id"] = json!(END);
    write_tiny_model(folder, &config);
    write_tokenizer(folder, 264);
}

/// Writes the model of a folder as a GGUF file, and that file's numbers as another folder. Returns the types of its tensors.
fn export(root: &Path, dtype: LmExportType) -> Vec<String> {
    let folder = root.join("model");
    let base = CausalLm::load(&folder, &CausalLmOptions::cpu()).unwrap();
    let tensors = base.tensors().unwrap();
    let export = GgufExport::new(&base, &folder, "tiny", dtype).unwrap();
    let mut out = std::fs::File::create(root.join("base.gguf")).unwrap();
    export
        .write(&mut out, |name| {
            let (_, weight) = tensors.iter().find(|(known, _)| known == name).unwrap();
            Ok(weight.dense()?)
        })
        .unwrap();
    let rounded = CausalLm::load(&root.join("base.gguf"), &CausalLmOptions::cpu()).unwrap();
    std::fs::create_dir_all(root.join("rounded")).unwrap();
    let mut dense = |_: &str, weight: &Weight| Ok(weight.dense()?);
    write_model(&root.join("rounded"), &rounded, &folder, DType::F32, &mut dense).unwrap();
    export.types().into_iter().map(|(name, _)| name).collect()
}

/// Keys of a training of texts, half of them with gaps, on `base`.
fn lines(base: &Path) -> [(&'static str, Value); 4] {
    [
        ("model", json!({"name_or_path": base, "dtype": "float32"})),
        ("network", json!({"linear": 4, "linear_alpha": 8})),
        ("train", json!({"steps": 8, "lr": 1e-3, "batch_size": 2})),
        ("fim_rate", json!(0.5)),
    ]
}

#[test]
fn a_lora_trained_on_a_gguf_file_is_that_of_its_numbers() {
    compute_on_this_thread();
    for (name, dtype, stored) in [
        ("starcoder2", LmExportType::F32, "f32"),
        ("starcoder2", LmExportType::Q4K, "q4_k"),
        ("starcoder", LmExportType::Q8_0, "q8_0"),
        ("qwen2", LmExportType::F16, "f16"),
        ("qwen2", LmExportType::Q4K, "q4_k"),
        // Its queries and keys have another order of rows in the file.
        ("llama", LmExportType::Q8_0, "q8_0"),
        ("llama", LmExportType::BF16, "bf16"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        wide_model(&root.join("model"), name);
        write_texts(&root.join("data.jsonl"));
        let types = export(root, dtype);
        assert!(types.iter().any(|name| name == stored), "{name} {dtype:?}: {types:?}");
        let mut results = Vec::new();
        for base in ["rounded", "base.gguf"] {
            let events = completed(&config(root, &lines(&root.join(base))));
            results.push((metric(&events, "loss/loss"), saved(root), logs(&events)));
            std::fs::remove_dir_all(root.join("out")).unwrap();
        }
        let [(folder_losses, folder_lora, _), (losses, lora, log)] = &results[..] else {
            panic!("two runs");
        };
        // `lora_B` begins with zeros.
        let is_trained = |(key, tensor): (&String, &Tensor)| !key.contains("lora_B") || largest(tensor) > 1e-3;
        assert!(
            losses.len() == 8 && lora.iter().all(is_trained),
            "{name} {dtype:?}: {losses:?} {log}"
        );
        for (found, expected) in losses.iter().zip(folder_losses) {
            assert!(
                (found - expected).abs() < 1e-4 * expected,
                "{name} {dtype:?}: {losses:?} {folder_losses:?}"
            );
        }
        assert!(
            lora.len() >= 8 && lora.keys().eq(folder_lora.keys()),
            "{name} {dtype:?}"
        );
        for (key, tensor) in lora {
            let gap = gap(tensor, &folder_lora[key]);
            assert!(gap < 1e-3, "{name} {dtype:?} {key}: {gap}");
        }
    }
}

#[test]
fn what_needs_the_folder_of_a_model_is_refused_for_a_gguf_file() {
    compute_on_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    model(&root.join("model"), "starcoder2");
    write_lines(&root.join("data.jsonl"), [json!([1, 2, 3])]);
    export(root, LmExportType::Q8_0);
    let path = root.join("base.gguf");
    let lora = ("network", json!({"linear": 4}));
    let base = |key: &str| ("model", json!({"name_or_path": path, key: true}));
    for (lines, what) in [
        (
            vec![("model", json!({"name_or_path": path}))],
            "network: only a LoRA can be trained",
        ),
        (
            vec![base("quantize"), lora],
            "model.quantize: the layers of a GGUF file keep its bits",
        ),
        (
            vec![base("from_config")],
            "model.from_config: a new model is made from a folder",
        ),
    ] {
        let message = refused(&config(root, &lines));
        assert!(message.contains(what) && message.contains("base.gguf"), "{message}");
    }
    // A file of another format.
    let weights = json!({"name_or_path": root.join("model/model.safetensors")});
    let message = refused(&config(root, &[("model", weights)]));
    assert!(
        message.contains("model.safetensors: expected the folder of a language model"),
        "{message}"
    );
}
