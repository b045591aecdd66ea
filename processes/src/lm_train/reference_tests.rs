//! Trainings of tiny models, compared with transformers and peft (`tests/reference/make_lm.py`).

use super::test_runs::{PAIRS, completed, config, logs, metric, model, saved, sequences, write_lines, write_texts};
use crate::testing::fixtures;
use crate::testing::formula_weights::{expected as decoders, formula};
use candle_core::{Device, Tensor};
use serde_json::{Value, json};

/// The number of steps of the reference's trainings, their context and their seed.
const STEPS: u64 = 50;

fn reference() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("lm_training.json")).unwrap()).unwrap()
}

fn close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance
}

/// Runs a training of the reference and compares losses, learning rates and the changes of the weights.
fn check_training(name: &str) {
    check_training_of(&reference(), name, STEPS);
}

/// Runs the training of this name of a fixture with as many steps as it has.
pub(super) fn check_training_of(reference: &Value, name: &str, steps: u64) {
    let cases = reference["trainings"].as_array().unwrap();
    let case = cases.iter().find(|case| case["name"] == name).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    model(&root.join("model"), case["model"].as_str().unwrap());
    let vocabulary = decoders()["models"][case["model"].as_str().unwrap()]["config"]["vocab_size"].clone();
    let data = root.join("data.jsonl");
    match case["data"].as_str().unwrap() {
        "tokens" => write_lines(&data, sequences(vocabulary.as_f64().unwrap() as f32)),
        "pairs" => write_lines(
            &data,
            PAIRS.map(|(prompt, completion)| json!({"prompt": prompt, "completion": completion})),
        ),
        _ => write_texts(&data),
    }
    let mut train = json!({
        "steps": steps,
        "optimizer": "adamw",
        "optimizer_params": {"eps": 1e-8, "weight_decay": case["weight_decay"]},
    });
    for key in [
        "batch_size",
        "gradient_accumulation",
        "lr",
        "lr_scheduler",
        "warmup_steps",
        "min_lr",
        "decay_steps",
    ] {
        if !case[key].is_null() {
            train[key] = case[key].clone();
        }
    }
    let mut lines = vec![("packing", case["packing"].clone())];
    if case["data"] == "fim" {
        lines.push(("fim_rate", json!(0.7)));
    }
    if let Some(base) = case["base"].as_str() {
        let model = json!({"name_or_path": root.join("model"), "dtype": "float32", "quantize": true, "qtype": base});
        lines.push(("model", model));
    }
    if let Some(filter) = case["lora"].as_array() {
        let network = json!({"type": "lora", "linear": 4, "linear_alpha": 8, "only_if_contains": filter});
        lines.push(("network", network));
    }
    // With a learning rate of 0 the weights stay what they are at first.
    let frozen = json!({"steps": 1, "lr": 0.0, "lr_scheduler": "constant"});
    completed(&config(root, &[&lines[..], &[("train", frozen)]].concat()));
    let initial = saved(root);
    std::fs::remove_dir_all(root.join("out")).unwrap();

    let events = completed(&config(root, &[&lines[..], &[("train", train)]].concat()));
    let text = logs(&events);
    assert!(text.contains(&format!("documents: {},", case["documents"])), "{text}");
    for (metric_name, key, tolerance) in [("loss/loss", "losses", 1e-4), ("learning_rate", "rates", 1e-6)] {
        let expected: Vec<f64> = serde_json::from_value(case[key].clone()).unwrap();
        let found = metric(&events, metric_name);
        assert_eq!(found.len(), expected.len());
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                close(*found, *expected, tolerance * expected.abs()),
                "{name}: {key} after step {}: {found}, expected {expected}",
                step + 1
            );
        }
    }
    let expected: Vec<f64> = serde_json::from_value(case["changes"].clone()).unwrap();
    let weights = saved(root);
    assert_eq!(2 * weights.len(), expected.len(), "{:?}", weights.keys());
    for ((tensor_name, tensor), expected) in weights.iter().zip(expected.chunks(2)) {
        let change = (tensor - &initial[tensor_name]).unwrap().flatten_all().unwrap();
        let probe = Tensor::new(formula("probe", change.elem_count(), 1.0), &Device::Cpu).unwrap();
        let sum = (&change * probe)
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        let norm = change
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap()
            .sqrt()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        for (found, expected_number) in [(sum, expected[0]), (norm, expected[1])] {
            assert!(
                close(f64::from(found), expected_number, 1e-3 * expected[1]),
                "{name}: {tensor_name}: {found}, expected {expected_number}"
            );
        }
    }
    assert!(metric(&events, "tokens_per_second").iter().all(|rate| *rate > 0.0));
    let (losses, perplexities) = (metric(&events, "loss/loss"), metric(&events, "perplexity"));
    assert!(
        losses
            .iter()
            .zip(perplexities)
            .all(|(loss, perplexity)| loss.exp() == perplexity)
    );
}

macro_rules! trainings {
    ($($test:ident: $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                check_training($name);
            }
        )*
    };
}
trainings! {
    a_lora_on_packed_rows: "LoRA, packed",
    a_whole_model_on_rows_of_one_document: "whole model, rows of one document",
    a_whole_model_on_packed_rows: "whole model, packed",
    a_lora_of_some_layers: "LoRA of some layers",
    fill_in_the_middle: "fill-in-the-middle",
    texts: "texts",
    a_lora_on_a_base_in_nf4: "LoRA on nf4",
    a_lora_on_a_base_in_int8: "LoRA on int8",
    completions_of_prompts: "completions of prompts",
}

crate::testing::in_portable_mode!(a_lora_on_packed_rows, a_lora_of_some_layers, fill_in_the_middle);
