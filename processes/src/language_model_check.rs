//! Checks the processes of language models before they start.

use super::context::Context;
use super::preview_spec::preview_spec;
use super::{LogFile, OutputRequests, StopSignal, lm_export, lm_generate, lm_train};
use crate::error::Result;
use aitk_common::job::{JobSpec, Process, ProcessKind};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Checks that a process of type `lm_generate`, `lm_export` or `lm_trainer` can start: its model by configs, names and shapes, its tokenizer, its prompts,
/// and its data sets as far as they can be read in ten seconds. Others are not checked. `inputs`: the local path of each path in the config.
///
/// # Errors
/// The error with which the process would end before it computes.
pub fn check_language_model(job: &JobSpec, process: &Process, inputs: &BTreeMap<String, PathBuf>) -> Result<()> {
    let spec = preview_spec(inputs)?;
    let mut events = Vec::new();
    let mut cx = Context {
        spec: &spec,
        job,
        events: &mut events,
        stop: &StopSignal::new(),
        requests: &OutputRequests::new(),
        log_file: LogFile::default(),
    };
    match &process.kind {
        ProcessKind::LmGenerate(process) => lm_generate::check(process, &cx),
        ProcessKind::LmExport(process) => lm_export::check(process, &cx),
        ProcessKind::LmTrain(process) => lm_train::check(process, &mut cx),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::check_language_model;
    use crate::testing::byte_tokenizer::write_tokenizer;
    use crate::testing::formula_weights::{expected, write_model};
    use aitk_common::job::{Format, LoadOptions, parse};
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::path::Path;

    fn check(job: &str, process: &Value) -> Result<(), String> {
        let text = json!({"job": job, "config": {"name": "check", "process": [process]}}).to_string();
        let spec = parse(&text, Format::Json, None, &LoadOptions::default()).unwrap().spec;
        let unsupported = spec.unsupported();
        assert!(unsupported.errors.is_empty(), "{unsupported}");
        let inputs: BTreeMap<_, _> = spec
            .inputs()
            .into_iter()
            .map(|input| (input.config_path.clone(), input.config_path.into()))
            .collect();
        check_language_model(&spec, &spec.process[0], &inputs).map_err(|error| error.to_string())
    }

    /// A folder with the model `model` and its tokenizer.
    fn workspace() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let config = expected()["models"]["starcoder2"]["config"].clone();
        write_model(&root.path().join("model"), &config);
        write_tokenizer(&root.path().join("model"), 264);
        root
    }

    fn generation(root: &Path, generate: Value) -> Value {
        json!({
            "type": "lm_generate", "output_folder": root, "model": {"name_or_path": root.join("model")}, "generate": generate,
        })
    }

    fn training(root: &Path, key: &str, value: Value) -> Value {
        let mut process = json!({
            "type": "lm_trainer", "training_folder": root.join("out"), "model": {"name_or_path": root.join("model")},
            "datasets": [{"path": root.join("data.jsonl")}], "context": 16, "network": {"type": "lora", "linear": 2},
        });
        process[key] = value;
        process
    }

    #[test]
    fn prompts_and_models_of_generations_are_checked() {
        let root = workspace();
        let root = root.path();
        check("generate", &generation(root, json!({"prompts": ["fn a"]}))).unwrap();
        let long = "x".repeat(100_000);
        let error = check("generate", &generation(root, json!({"prompts": [long]}))).unwrap_err();
        assert!(error.contains("the prompt has 100000 tokens"), "{error}");
        std::fs::write(root.join("bad.jsonl"), "{\"prompt\": 5}\n").unwrap();
        let error = check(
            "generate",
            &generation(root, json!({"prompts": root.join("bad.jsonl")})),
        )
        .unwrap_err();
        assert!(error.contains("bad.jsonl: line 1: expected"), "{error}");
        std::fs::write(root.join("model/config.json"), "{\"model_type\": \"mistral\"}").unwrap();
        let error = check("generate", &generation(root, json!({"prompts": ["a"]}))).unwrap_err();
        assert!(error.contains("mistral"), "{error}");
    }

    #[test]
    fn data_sets_and_networks_of_trainings_are_checked() {
        let root = workspace();
        let root = root.path();
        std::fs::write(root.join("data.jsonl"), "[1, 2, 3]\n[4, 5]\n").unwrap();
        check("extension", &training(root, "context", json!(8))).unwrap();
        let table = json!({"type": "lora", "linear": 2, "only_if_contains": ["embed_tokens"]});
        check("extension", &training(root, "network", table)).unwrap();
        let no_layer = json!({"type": "lora", "linear": 2, "only_if_contains": ["zzz"]});
        let error = check("extension", &training(root, "network", no_layer)).unwrap_err();
        assert!(error.starts_with("network: no layer is left"), "{error}");
        std::fs::write(root.join("data.jsonl"), "[1, 2]\n[1, 99999]\n").unwrap();
        let error = check("extension", &training(root, "context", json!(8))).unwrap_err();
        assert!(error.contains("data.jsonl:2") && error.contains("99999"), "{error}");
    }
}
