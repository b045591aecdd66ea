//! Runs jobs with a tiny StarCoder2 (`tests/reference/make_decoder.py`).

use crate::testing::byte_tokenizer::write_tokenizer;
use crate::testing::formula_weights::{expected, write_model};
use crate::testing::{attempt, compute_on_this_thread, in_own_folder, in_portable_mode};
use crate::{EventSink, StopSignal, run};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::{self, Format, LoadOptions};
use serde_json::Value;
use std::path::Path;

/// A folder with the model `model` and its tokenizer.
fn workspace() -> tempfile::TempDir {
    compute_on_this_thread();
    let root = tempfile::tempdir().unwrap();
    let config = expected()["models"]["starcoder2"]["config"].clone();
    write_model(&root.path().join("model"), &config);
    write_tokenizer(&root.path().join("model"), 264);
    root
}

/// Collects events, and stops after this many texts.
struct Events {
    events: Vec<ChildEvent>,
    stop: StopSignal,
    texts_until_stop: usize,
}

impl EventSink for Events {
    fn emit(&mut self, event: ChildEvent) {
        if let ChildEvent::Log { message, .. } = &event
            && message.contains(" tokens, ended by ")
        {
            self.texts_until_stop = self.texts_until_stop.saturating_sub(1);
            if self.texts_until_stop == 0 {
                self.stop.stop();
            }
        }
        self.events.push(event);
    }
}

/// Runs a job with these lines of its `generate` section.
fn run_job(root: &Path, generate: &str, texts_until_stop: usize) -> (Outcome, Vec<ChildEvent>) {
    run_model(root, "", generate, texts_until_stop)
}

/// Runs a job with these lines of its `model` section too.
fn run_model(root: &Path, model: &str, generate: &str, texts_until_stop: usize) -> (Outcome, Vec<ChildEvent>) {
    let text = format!(
        "job: generate\nconfig:\n  name: texts\n  process:\n    - type: lm_generate\n      output_folder: {0}\n      model:\n        \
         name_or_path: {0}/model\n        dtype: float32\n{model}      generate:\n{generate}",
        root.display()
    );
    let loaded = job::parse(&text, Format::Yaml, None, &LoadOptions::default()).unwrap();
    assert!(loaded.spec.unsupported().errors.is_empty());
    let spec = in_own_folder(attempt(&loaded.spec, &text), root);
    let stop = StopSignal::new();
    let mut events = Events {
        events: Vec::new(),
        stop: stop.clone(),
        texts_until_stop,
    };
    let outcome = run(&spec, &mut events, &stop);
    (outcome, events.events)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn failure(root: &Path, generate: &str) -> String {
    match run_job(root, generate, usize::MAX).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn texts_and_gaps_become_lines_of_jsonl() {
    let root = workspace();
    let generate = "        prompts: ['fn add(a: i32', 'let x = ']\n        max_new_tokens: 9\n        fill:\n          - {prefix: 'if ', \
                    suffix: ' {}'}\n";
    let (outcome, events) = run_job(root.path(), generate, usize::MAX);
    assert_eq!(outcome, Outcome::Completed, "{events:?}");
    let path = root.path().join("completions.jsonl");
    let found = lines(&path);
    assert_eq!(found.len(), 3);
    assert_eq!(
        (found[0]["index"].as_u64(), found[0]["prompt"].as_str()),
        (Some(0), Some("fn add(a: i32"))
    );
    assert_eq!(
        (found[2]["prefix"].as_str(), found[2]["suffix"].as_str()),
        (Some("if "), Some(" {}"))
    );
    assert_eq!(found[2]["prompt_tokens"], 3 + 3 + 3);
    for line in &found {
        assert_eq!(
            (line["tokens"].as_u64(), line["stop_reason"].as_str()),
            (Some(9), Some("max_new_tokens"))
        );
        assert!(line["completion"].as_str().is_some_and(|text| !text.is_empty()));
    }
    let artifacts = events.iter().filter_map(|event| match event {
        ChildEvent::Artifact { kind, name, .. } => Some((kind.as_str(), name.as_str())),
        _ => None,
    });
    assert_eq!(artifacts.collect::<Vec<_>>(), [("completions", "completions.jsonl")]);
    let streamed = |number: usize| {
        let start = format!("text {number}: ");
        events
            .iter()
            .any(|event| matches!(event, ChildEvent::Log { message, .. } if message.starts_with(&start)))
    };
    assert!(streamed(0) && streamed(2));
    assert!(!root.path().join(".aitk").exists());
    // Another run keeps the first results.
    run_job(root.path(), generate, usize::MAX);
    assert_eq!(lines(&root.path().join("completions_2.jsonl")), found);
}

#[test]
fn a_stopped_run_goes_on_where_it_was() {
    let root = workspace();
    let generate = "        prompts: [a, b, c]\n        temperature: 0.8\n        seed: 3\n        num_completions: 2\n        \
                    max_new_tokens: 5\n        stream: false\n";
    assert_eq!(run_job(root.path(), generate, usize::MAX).0, Outcome::Completed);
    let whole = lines(&root.path().join("completions.jsonl"));
    assert_eq!(whole.len(), 6);
    assert_ne!(whole[0]["completion"], whole[1]["completion"]);
    let (outcome, _) = run_job(root.path(), generate, 2);
    assert_eq!(outcome, Outcome::stopped());
    let (outcome, events) = run_job(root.path(), generate, usize::MAX);
    assert_eq!(outcome, Outcome::Completed);
    let said = |text: &str| {
        let mut messages = events.iter().filter_map(|event| match event {
            ChildEvent::Log { message, .. } => Some(message),
            _ => None,
        });
        messages.any(|message| message.contains(text))
    };
    assert!(said("2 of 6 texts are already finished"), "{events:?}");
    assert_eq!(lines(&root.path().join("completions_2.jsonl")), whole);
}

#[test]
fn prompts_of_files_are_read() {
    let root = workspace();
    let path = root.path().join("tasks.jsonl");
    std::fs::write(
        &path,
        "{\"task_id\": \"T/0\", \"prompt\": \"a\\nb\"}\n{\"prefix\": \"x\", \"suffix\": \"y\"}\n",
    )
    .unwrap();
    let generate = format!("        prompts: {}\n        max_new_tokens: 2\n", path.display());
    assert_eq!(run_job(root.path(), &generate, usize::MAX).0, Outcome::Completed);
    let found = lines(&root.path().join("completions.jsonl"));
    assert_eq!(
        (found[0]["task_id"].as_str(), found[0]["prompt"].as_str()),
        (Some("T/0"), Some("a\nb"))
    );
    assert_eq!(found[1]["prefix"], "x");

    std::fs::write(&path, "{\"prompt\": 1}\n").unwrap();
    let message = failure(root.path(), &generate);
    assert!(message.contains("tasks.jsonl: line 1"), "{message}");
    std::fs::write(&path, b"\xff\xfe\n").unwrap();
    assert!(failure(root.path(), &generate).contains("not UTF-8"));
    std::fs::write(&path, "\n").unwrap();
    assert!(failure(root.path(), &generate).contains("no prompt"));
}

#[test]
fn what_does_not_fit_is_refused_before_the_weights_are_read() {
    let root = workspace();
    let model = root.path().join("model");
    let long = format!("        prompts: ['{}']\n", "x".repeat(128));
    std::fs::remove_file(model.join("model.safetensors")).unwrap();
    let message = failure(root.path(), &long);
    assert!(
        message.contains("128 tokens") && message.contains("context has 128"),
        "{message}"
    );
    let short = "        prompts: [a]\n";
    let message = failure(root.path(), short);
    assert!(message.contains("safetensors"), "{message}");
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    std::fs::write(model.join("config.json"), config.replace("264", "200")).unwrap();
    let message = failure(root.path(), short);
    assert!(message.contains("tokenizer of another model"), "{message}");
    std::fs::write(model.join("config.json"), config.replace("starcoder2", "bert")).unwrap();
    let message = failure(root.path(), short);
    assert!(message.contains("model_type: bert"), "{message}");
    std::fs::remove_file(model.join("config.json")).unwrap();
    assert!(failure(root.path(), short).contains("config.json"));
    std::fs::remove_dir_all(&model).unwrap();
    std::fs::write(&model, "no folder").unwrap();
    assert!(failure(root.path(), short).contains("or a .gguf file"));
    std::fs::remove_file(&model).unwrap();
    assert!(failure(root.path(), short).contains("folder of a language model"));
}

/// A tensor of a LoRA that belongs to no layer is not ignored: the texts would be others.
#[test]
fn an_adapter_of_other_layers_is_refused() {
    use candle_core::{DType, Device, Tensor};
    let root = workspace();
    let lora = root.path().join("lora.safetensors");
    let width = 32;
    let write = |modules: &[&str]| {
        let zeros = |shape: (usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        let tensors = modules.iter().flat_map(|module| {
            let name = |side: &str| format!("base_model.model.{module}.lora_{side}.weight");
            [(name("A"), zeros((2, width))), (name("B"), zeros((width, 2)))]
        });
        candle_core::safetensors::save(&tensors.collect(), &lora).unwrap();
    };
    let generate = "        prompts: [a]\n        max_new_tokens: 2\n";
    let run = || {
        let text = format!("        lora_path: {}\n", lora.display());
        run_model(root.path(), &text, generate, usize::MAX)
    };
    write(&["model.layers.0.self_attn.o_proj"]);
    assert!(matches!(run().0, Outcome::Completed));
    write(&["model.layers.0.self_attn.o_proj", "lm_head"]);
    match run().0 {
        Outcome::Failed { message, .. } => {
            assert!(message.contains("lm_head") && message.contains("lack"), "{message}")
        }
        other => panic!("{other:?}"),
    }
}

in_portable_mode! {
    texts_and_gaps_become_lines_of_jsonl,
}
