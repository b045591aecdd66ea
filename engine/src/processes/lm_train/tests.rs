//! Trainings of tiny models: compared with transformers and peft (`tests/reference/make_lm.py`), interrupted, and with bad input.

use crate::models::causal_lm::byte_tokenizer::write_tokenizer;
use crate::models::causal_lm::formula_weights::{expected as decoders, formula, write_model};
use crate::processes::{EventSink, StopSignal, run};
use crate::testing::{attempt, fixtures};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::job::{Format, LoadOptions, parse};
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::step_metrics;
use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The number of steps of the reference's trainings, their context and their seed.
const STEPS: u64 = 50;

fn reference() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("lm_training.json")).unwrap()).unwrap()
}

/// Writes a tiny model, with a tokenizer if its vocabulary has room for one.
pub(super) fn model(folder: &Path, name: &str) {
    let config = decoders()["models"][name]["config"].clone();
    let vocabulary = config["vocab_size"].as_u64().unwrap() as usize;
    write_model(folder, &config);
    if vocabulary >= 260 {
        write_tokenizer(folder, vocabulary);
        let settings = json!({"eos_token": {"content": "<|endoftext|>"}});
        std::fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
    }
}

/// The token sequences of the reference.
pub(super) fn sequences(vocabulary: f32) -> Vec<Value> {
    let lengths = [5, 9, 12, 7, 16, 3, 21, 1, 8, 40, 2, 11];
    let ids = |(index, length)| {
        let numbers = formula(&format!("document {index}"), length, 1.0).into_iter();
        let ids: Vec<u32> = numbers
            .map(|number| ((number + 1.0) * (vocabulary / 2.0)) as u32)
            .collect();
        json!(ids)
    };
    (0..).zip(lengths).map(ids).collect()
}

const TEXTS: [&str; 6] = [
    "fn main() { println!(\"é\"); }",
    "let x = 1;",
    "/* ünïcödé */ struct A { b: u8 }\n",
    "a",
    "return vec![1, 2, 3].iter().sum();",
    "pub fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n",
];
const PAIRS: [(&str, &str); 5] = [
    ("fn f", "() {}"),
    ("let a =", " 4;"),
    ("// a prompt that is long", " x"),
    ("", "y = 2"),
    ("z", " = 3;"),
];

pub(super) fn write_lines(path: &Path, records: impl IntoIterator<Item = Value>) {
    let lines: Vec<String> = records.into_iter().map(|record| format!("{record}\n")).collect();
    std::fs::write(path, lines.concat()).unwrap();
}

fn write_texts(path: &Path) {
    write_lines(path, TEXTS.map(|text| json!({"text": text})));
}

/// The config of a training in a folder that has `model` and `data.jsonl`. `lines`: more keys of the process, as JSON.
pub(super) fn config(root: &Path, lines: &[(&str, Value)]) -> String {
    let mut process = json!({
        "type": "lm_trainer",
        "training_folder": root.join("out"),
        "training_seed": 7,
        "model": {"name_or_path": root.join("model"), "dtype": "float32"},
        "datasets": [{"path": root.join("data.jsonl")}],
        "context": 16,
        "logging": {"log_every": 1},
        "save": {"save_every": 0, "dtype": "float32"},
    });
    for (key, value) in lines {
        process[*key] = value.clone();
    }
    json!({"job": "extension", "config": {"name": "coder", "process": [process]}}).to_string()
}

pub(super) fn spec_of(text: &str) -> AttemptSpec {
    let job = parse(text, Format::Json, Some("a.json"), &LoadOptions::default()).unwrap();
    let unsupported = job.spec.unsupported();
    assert!(unsupported.errors.is_empty(), "{unsupported}");
    attempt(&job.spec, text)
}

pub(super) fn run_spec(spec: &AttemptSpec) -> (Outcome, Vec<ChildEvent>) {
    let mut events = Vec::new();
    let outcome = run(spec, &mut events, &StopSignal::new());
    (outcome, events)
}

pub(super) fn completed(text: &str) -> Vec<ChildEvent> {
    let (outcome, events) = run_spec(&spec_of(text));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    events
}

pub(super) fn logs(events: &[ChildEvent]) -> String {
    let line = |event: &ChildEvent| match event {
        ChildEvent::Log { message, .. } => Some(message.clone()),
        _ => None,
    };
    events.iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

pub(super) fn metric(events: &[ChildEvent], name: &str) -> Vec<f64> {
    let value = |event: &ChildEvent| match event {
        ChildEvent::Metrics { values, .. } => values.get(name).copied(),
        _ => None,
    };
    events.iter().filter_map(value).collect()
}

/// The tensors of the final save, by name.
pub(super) fn saved(root: &Path) -> BTreeMap<String, Tensor> {
    let folder = root.join("out/coder/coder");
    let file = ["adapter_model.safetensors", "model.safetensors"]
        .map(|name| folder.join(name))
        .into_iter()
        .find(|file| file.is_file());
    safetensors::load(file.unwrap(), &Device::Cpu)
        .unwrap()
        .into_iter()
        .collect()
}

fn close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance
}

/// Runs a training of the reference and compares losses, learning rates and the changes of the weights.
fn check_training(name: &str) {
    let reference = reference();
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
        "steps": STEPS,
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
    assert!(text.contains(&format!("{} documents", case["documents"])), "{text}");
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

/// Stops a run once it emitted the metrics of a step.
struct StopAt {
    step: u64,
    signal: StopSignal,
    events: Vec<ChildEvent>,
}

impl EventSink for StopAt {
    fn emit(&mut self, event: ChildEvent) {
        if matches!(&event, ChildEvent::Metrics { step, .. } if *step == self.step) {
            self.signal.stop();
        }
        self.events.push(event);
    }
}

pub(super) fn stop_at(spec: &AttemptSpec, step: u64) -> Vec<ChildEvent> {
    let signal = StopSignal::new();
    let mut sink = StopAt {
        step,
        signal: signal.clone(),
        events: Vec::new(),
    };
    assert_eq!(run(spec, &mut sink, &signal), Outcome::stopped());
    sink.events
}

/// A training of texts with samples, validation and saves.
fn whole_training(root: &Path, lora: bool) -> String {
    model(&root.join("model"), "starcoder2");
    write_texts(&root.join("data.jsonl"));
    let network = match lora {
        true => json!({"linear": 4, "dropout": 0.2}),
        false => Value::Null,
    };
    config(
        root,
        &[
            ("network", network),
            ("fim_rate", json!(0.5)),
            ("packing", json!(false)),
            ("validation", json!({"share": 0.39, "every": 3})),
            (
                "train",
                json!({"epochs": 2, "batch_size": 2, "gradient_accumulation": 2, "lr": 0.01}),
            ),
            (
                "save",
                json!({"save_every": 2, "max_step_saves_to_keep": 2, "dtype": "float32"}),
            ),
            (
                "sample",
                json!({"prompts": ["fn a"], "sample_every": 4, "max_new_tokens": 6}),
            ),
        ],
    )
}

/// All files below a folder with their bytes, without those that have times in them.
pub(super) fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                folders.push(path);
            } else if ![
                ".aitk",
                "lock",
                "manifest.json",
                "metrics.jsonl",
                "log.txt",
                "config.yaml",
                // It has the path of the base model.
                "adapter_config.json",
            ]
            .contains(&&*name)
            {
                found.insert(
                    path.strip_prefix(folder).unwrap().to_path_buf(),
                    std::fs::read(&path).unwrap(),
                );
            }
        }
    }
    found
}

#[test]
fn an_interrupted_training_ends_with_the_bytes_of_one_without_interruption() {
    for lora in [true, false] {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let events = completed(&whole_training(whole.path(), lora));
        let expected = metric(&events, "loss/loss");
        assert!(expected.len() > 8, "{}", logs(&events));
        let spec = spec_of(&whole_training(parts.path(), lora));
        // Stopped after a step without a save, then killed: the checkpoint of the stop is gone.
        stop_at(&spec, 3);
        stop_at(&spec, 7);
        let checkpoints = parts.path().join("out/coder/.aitk/checkpoints");
        std::fs::remove_dir_all(checkpoints.join("step_000000007")).unwrap();
        let (outcome, last) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&last));
        assert!(logs(&last).contains("resuming from step 6"), "{}", logs(&last));
        assert!(!logs(&last).contains("changed since"), "{}", logs(&last));
        assert_eq!(metric(&last, "loss/loss"), expected[6..]);
        let (whole, parts) = (files(&whole.path().join("out")), files(&parts.path().join("out")));
        assert_eq!(whole.keys().collect::<Vec<_>>(), parts.keys().collect::<Vec<_>>());
        for (path, bytes) in &whole {
            assert!(*bytes == parts[path], "{} differs", path.display());
        }
        // A run that is complete has nothing to do.
        let (outcome, again) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed);
        assert!(logs(&again).contains("nothing is left to do"));
    }
}

/// A data set of Hugging Face in Parquet, on an interrupted run, against the same records in JSONL: the same files and held-out losses.
#[test]
fn a_training_on_parquet_that_was_interrupted_is_that_on_jsonl() {
    let fixture = |name: &str| fixtures().join("parquet").join(name);
    let mut results = Vec::new();
    for is_parquet in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        model(&root.join("model"), "starcoder2");
        let (trained, held_out) = match is_parquet {
            false => (root.join("train.jsonl"), root.join("held_out.jsonl")),
            true => (root.join("hub/train.parquet"), root.join("hub/dev.parquet")),
        };
        std::fs::create_dir_all(root.join("hub")).unwrap();
        let files_of = if is_parquet {
            ["texts_zstd_groups.parquet", "texts_delta.parquet"]
        } else {
            ["texts.jsonl"; 2]
        };
        for (from, to) in files_of.iter().zip([&trained, &held_out]) {
            std::fs::copy(fixture(from), to).unwrap();
        }
        let paths = match is_parquet {
            true => [root.join("hub"), root.join("hub")],
            false => [trained, held_out],
        };
        let text = config(
            root,
            &[
                ("network", json!({"linear": 4})),
                ("datasets", json!([{"path": paths[0], "text_column": "content"}])),
                ("validation", json!({"path": paths[1], "every": 2})),
                ("train", json!({"epochs": 3, "batch_size": 2, "lr": 0.01})),
            ],
        );
        let spec = spec_of(&text);
        let mut losses = Vec::new();
        if is_parquet {
            losses.extend(metric(&stop_at(&spec, 3), "val/loss"));
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        assert!(!logs(&events).contains("changed since"), "{}", logs(&events));
        losses.extend(metric(&events, "val/loss"));
        let mut found = files(&root.join("out"));
        // The checkpoint of the stop has no counterpart.
        found.retain(|path, _| !path.starts_with("coder/.aitk"));
        results.push((found, losses));
    }
    assert!(results[0].1.len() > 3, "{:?}", results[0].1);
    assert!(results[0].0.len() > 1, "{:?}", results[0].0.keys());
    assert!(results[0] == results[1], "{:?} {:?}", results[0].1, results[1].1);
}

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
fn saved_models_and_loras_of_code_models_have_the_logits_of_the_training() {
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
        let network = if lora {
            json!({"linear": 4, "linear_alpha": 8})
        } else {
            Value::Null
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

/// The message of a run that fails because of its input.
fn refused(text: &str) -> String {
    match run_spec(&spec_of(text)).0 {
        Outcome::Failed { cause, message } => {
            assert_eq!(cause, FailureCause::BadInput, "{message}");
            message
        }
        other => panic!("{other:?}"),
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
            "documents of fewer than two tokens, in which nothing can be predicted, are left out: 2",
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

#[test]
fn a_checkpoint_of_another_training_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    model(&root.join("model"), "llama");
    write_lines(&root.join("data.jsonl"), sequences(52.0));
    let with = |rank: u32, optimizer: &str, steps: u64| {
        let train = json!({"steps": steps, "optimizer": optimizer});
        config(root, &[("network", json!({"linear": rank})), ("train", train)])
    };
    completed(&with(2, "adamw", 2));
    let message = refused(&with(3, "adamw", 4));
    assert!(
        message.contains("checkpoint of step 2") && message.contains("shape"),
        "{message}"
    );
    let message = refused(&with(2, "lion", 4));
    assert!(message.contains("its optimizer is adamw"), "{message}");
    // More steps go on, with a message about other data.
    write_lines(&root.join("data.jsonl"), sequences(50.0));
    let events = completed(&with(2, "adamw", 4));
    assert!(
        logs(&events).contains("the data changed since step 2"),
        "{}",
        logs(&events)
    );
    assert_eq!(metric(&events, "loss/loss").len(), 2);
}
