//! Runs of tiny trainings of code models, for tests.

use crate::testing::attempt;
use crate::testing::byte_tokenizer::write_tokenizer;
use crate::testing::formula_weights::{expected as decoders, formula, write_model};
use crate::{EventSink, StopSignal, run};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::job::{Format, LoadOptions, parse};
use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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

pub(super) const TEXTS: [&str; 6] = [
    "fn main() { println!(\"é\"); }",
    "let x = 1;",
    "/* ünïcödé */ struct A { b: u8 }\n",
    "a",
    "return vec![1, 2, 3].iter().sum();",
    "pub fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n",
];
pub(super) const PAIRS: [(&str, &str); 5] = [
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

pub(super) fn write_texts(path: &Path) {
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
pub(super) fn whole_training(root: &Path, lora: bool) -> String {
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

/// The message of a run that fails because of its input.
pub(super) fn refused(text: &str) -> String {
    match run_spec(&spec_of(text)).0 {
        Outcome::Failed { cause, message } => {
            assert_eq!(cause, FailureCause::BadInput, "{message}");
            message
        }
        other => panic!("{other:?}"),
    }
}
