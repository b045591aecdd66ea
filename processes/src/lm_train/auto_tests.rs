//! What a config leaves to the machine: trainings of tiny models on devices with little memory.

use super::memory_meter::tests_override;
use super::test_runs::{
    completed, config, files, logs, metric, model, run_spec, saved, sequences, spec_of, stop_at, write_lines,
};
use crate::testing::{gap, largest};
use aitk_common::attempt::{AttemptSpec, ChildEvent, DeviceMemory, Outcome};
use aitk_common::checkpoint::Checkpoint;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::plan::training_fit::{AutoKeys, TrainingFit};
use aitk_common::plan::training_memory::{StepSize, TrainingMemory};
use serde_json::{Value, json};
use std::path::Path;

const ROWS: u32 = 6;
const STEPS: u64 = 5;

/// A training with `batch_size: auto` in a folder. `keys`: other keys of the process.
fn auto_config(root: &Path, keys: &[(&str, Value)]) -> String {
    model(&root.join("model"), "starcoder2");
    write_lines(&root.join("data.jsonl"), sequences(250.0));
    let train = json!({
        "steps": STEPS, "lr": 0.01, "batch_size": "auto", "gradient_accumulation": ROWS, "gradient_checkpointing": true,
    });
    let network = json!({"linear": 4});
    let save = json!({"save_every": 2, "dtype": "float32"});
    config(
        root,
        &[&[("train", train), ("network", network), ("save", save)], keys].concat(),
    )
}

/// The attempt on a device with so much memory.
fn on_device(text: &str, budget: u64, available: u64) -> AttemptSpec {
    AttemptSpec {
        device_memory: Some(DeviceMemory { budget, available }),
        ..spec_of(text)
    }
}

/// The bytes that the planner predicts for a step.
fn predicted(spec: &AttemptSpec, change: impl FnOnce(StepSize) -> StepSize) -> u64 {
    let body = spec.job.pointer("/process/0/kind/lm_train").unwrap();
    let folder = body["model"]["name_or_path"].as_str().unwrap();
    let memory = TrainingMemory::new(body, ParameterCounts::read(Path::new(folder)).unwrap()).unwrap();
    let keys = AutoKeys::of(body);
    let planner = TrainingFit::new(keys, memory, spec.profile, spec.device.kind);
    planner.bytes(change(keys.smallest(memory.positions())))
}

/// The bytes for this many rows at a time.
fn of_rows(spec: &AttemptSpec, rows: u32) -> u64 {
    predicted(spec, |step| StepSize {
        rows,
        accumulates: rows < ROWS,
        ..step
    })
}

/// What a checkpoint of a run has of the choice.
fn stored(root: &Path) -> Value {
    let newest = Checkpoint::scan(&root.join("out/coder/.aitk/checkpoints"))
        .unwrap()
        .newest
        .unwrap();
    newest.state()["auto"].clone()
}

/// Without a correction by the memory of the process, in which other tests run.
fn unmeasured() {
    tests_override::set(Some(None));
}

fn run_completed(spec: &AttemptSpec) -> Vec<ChildEvent> {
    let (outcome, events) = run_spec(spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    events
}

#[test]
fn every_split_of_a_step_trains_the_same() {
    unmeasured();
    let fixed = tempfile::tempdir().unwrap();
    let train = json!({"steps": STEPS, "lr": 0.01, "batch_size": ROWS, "gradient_checkpointing": true});
    let expected_losses = metric(&completed(&auto_config(fixed.path(), &[("train", train)])), "loss/loss");
    let expected = saved(fixed.path());
    for (rows, said) in [
        (6, "all 6 rows of a step at a time"),
        (3, "3 of 6 rows at a time, 2 batches"),
        (2, "2 of 6 rows at a time, 3 batches"),
        (1, "1 of 6 rows at a time, 6 batches"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let spec = on_device(&auto_config(root.path(), &[]), 0, 0);
        let budget = of_rows(&spec, rows);
        assert!(rows == ROWS || budget < of_rows(&spec, rows + 1));
        let spec = on_device(&auto_config(root.path(), &[]), budget, budget);
        let events = run_completed(&spec);
        assert!(logs(&events).contains(said), "{}", logs(&events));
        assert_eq!(stored(root.path())["batch_size"], json!(rows));
        assert_eq!(
            metric(&events, "memory/predicted_gib"),
            [budget as f64 / f64::from(1 << 30)]
        );
        // Tokens are weighted by the step, whatever the rows of a batch are: only sums are rounded in another way.
        for (found, expected) in metric(&events, "loss/loss").iter().zip(&expected_losses) {
            assert!((found - expected).abs() < 1e-5 * expected, "{rows}: {found} {expected}");
        }
        for (name, tensor) in saved(root.path()) {
            let expected = &expected[&name];
            assert!(gap(&tensor, expected) <= 2e-4 * largest(expected), "{rows}: {name}");
        }
    }
}

#[test]
fn a_device_with_too_little_memory_is_named_and_the_smallest_choice_is_used() {
    unmeasured();
    let root = tempfile::tempdir().unwrap();
    let spec = on_device(&auto_config(root.path(), &[]), 1 << 20, 1 << 20);
    let events = run_completed(&spec);
    assert!(logs(&events).contains("1 of 6 rows at a time"), "{}", logs(&events));
    assert!(logs(&events).contains("may run out of memory"), "{}", logs(&events));
    // So is one whose memory is not known.
    let root = tempfile::tempdir().unwrap();
    let events = run_completed(&spec_of(&auto_config(root.path(), &[])));
    assert!(
        logs(&events).contains("the memory of the device is not known"),
        "{}",
        logs(&events)
    );
    assert_eq!(stored(root.path())["batch_size"], json!(1));
}

#[test]
fn a_run_that_resumes_has_the_same_batches_and_bytes() {
    // The first step takes as much more than predicted that fewer rows fit.
    let correction = |spec: &AttemptSpec| of_rows(spec, ROWS) * 2;
    for is_corrected in [false, true] {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let text = auto_config(whole.path(), &[]);
        let budget = of_rows(&spec_of(&text), ROWS);
        let taken = is_corrected.then(|| correction(&spec_of(&text)));
        tests_override::set(Some(taken));
        let expected = metric(&run_completed(&on_device(&text, budget, budget)), "loss/loss");
        let rows = stored(whole.path())["batch_size"].as_u64().unwrap();
        assert_eq!(rows < u64::from(ROWS), is_corrected, "{rows}");

        let text = auto_config(parts.path(), &[]);
        stop_at(&on_device(&text, budget, budget), 1);
        // Other attempts have no correction: the device offers a little less memory, and the steps take something else.
        tests_override::set(Some(Some(1)));
        let needed = stored(parts.path())["bytes"].as_u64().unwrap();
        stop_at(&on_device(&text, needed / 2, needed), 3);
        let events = run_completed(&on_device(&text, needed / 2, needed));
        assert!(!logs(&events).contains("changed since"), "{}", logs(&events));
        assert_eq!(metric(&events, "loss/loss"), expected[3..]);
        assert_eq!(stored(parts.path())["batch_size"], json!(rows));
        // A stop writes a checkpoint of its own.
        let saves = |root: &Path| {
            let mut saves = files(&root.join("out"));
            saves.retain(|path, _| !path.starts_with("coder/.aitk"));
            saves
        };
        let (whole, parts) = (saves(whole.path()), saves(parts.path()));
        assert_eq!(whole.keys().collect::<Vec<_>>(), parts.keys().collect::<Vec<_>>());
        for (path, bytes) in &whole {
            assert!(*bytes == parts[path], "{} differs", path.display());
        }
    }
    tests_override::set(Some(None));
}

#[test]
fn a_run_that_resumes_with_less_memory_says_that_its_batches_are_smaller() {
    unmeasured();
    let root = tempfile::tempdir().unwrap();
    let text = auto_config(root.path(), &[]);
    let (all, two) = (of_rows(&spec_of(&text), ROWS), of_rows(&spec_of(&text), 2));
    stop_at(&on_device(&text, all, all), 2);
    let events = run_completed(&on_device(&text, two, two));
    let text = logs(&events);
    assert!(
        text.contains("was trained with 6 rows at a time, for which this device has too little memory"),
        "{text}"
    );
    assert!(text.contains("2 of 6 rows at a time"), "{text}");
    assert_eq!(stored(root.path())["batch_size"], json!(2));
}

#[test]
fn the_first_step_corrects_the_choice_once() {
    let root = tempfile::tempdir().unwrap();
    let text = auto_config(root.path(), &[]);
    let (all, two) = (of_rows(&spec_of(&text), ROWS), of_rows(&spec_of(&text), 2));
    // It takes almost nothing: more rows fit from the second step on.
    tests_override::set(Some(Some(1)));
    let events = run_completed(&on_device(&text, two, two));
    let found = logs(&events);
    assert!(found.contains("auto: 2 of 6 rows at a time"), "{found}");
    assert!(
        found.contains("from the second step on: all 6 rows of a step at a time"),
        "{found}"
    );
    assert_eq!(found.matches("the first step took").count(), 1, "{found}");
    assert_eq!(stored(root.path())["batch_size"], json!(ROWS));
    // It takes what was predicted: nothing changes.
    let root = tempfile::tempdir().unwrap();
    let text = auto_config(root.path(), &[]);
    let body = spec_of(&text).job;
    let body = body.pointer("/process/0/kind/lm_train").unwrap();
    let counts = ParameterCounts::read(&root.path().join("model")).unwrap();
    let memory = TrainingMemory::new(body, counts).unwrap();
    let spec = on_device(&text, all, all);
    let step = StepSize {
        rows: ROWS,
        accumulates: false,
        ..AutoKeys::of(body).smallest(memory.positions())
    };
    tests_override::set(Some(Some(memory.first_step_bytes(
        spec.profile,
        spec.device.kind,
        step,
    ))));
    let found = logs(&run_completed(&spec));
    assert!(found.contains("the choice stays"), "{found}");
    tests_override::set(Some(None));
}

#[test]
fn gradient_checkpointing_is_used_where_memory_is_short() {
    unmeasured();
    let train = json!({
        "steps": 2, "lr": 0.01, "batch_size": 2, "gradient_accumulation": 2, "gradient_checkpointing": "auto",
    });
    let root = tempfile::tempdir().unwrap();
    let text = auto_config(root.path(), &[("train", train.clone())]);
    let spec = spec_of(&text);
    let of = |checkpointed: bool| predicted(&spec, |step| StepSize { checkpointed, ..step });
    assert!(of(true) < of(false));
    let losses: Vec<Vec<f64>> = [
        (of(false), "without gradient checkpointing:"),
        (of(true), "with gradient checkpointing:"),
    ]
    .into_iter()
    .map(|(budget, said)| {
        let root = tempfile::tempdir().unwrap();
        let text = auto_config(root.path(), &[("train", train.clone())]);
        let events = run_completed(&on_device(&text, budget, budget));
        assert!(logs(&events).contains(said), "{}", logs(&events));
        metric(&events, "loss/loss")
    })
    .collect();
    // It changes no bit.
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn a_context_is_as_long_as_memory_positions_and_documents_allow() {
    unmeasured();
    let text_of = |root: &Path| auto_config(root, &[("context", json!("auto")), ("fim_rate", json!(0.5))]);
    let root = tempfile::tempdir().unwrap();
    let spec = on_device(&text_of(root.path()), u64::MAX / 2, u64::MAX / 2);
    let events = run_completed(&spec);
    let found = logs(&events);
    let positions = ParameterCounts::read(&root.path().join("model"))
        .unwrap()
        .decoder
        .unwrap()
        .positions;
    assert!(
        found.contains(&format!(
            "context: auto: {positions} tokens. The model has no more positions"
        )),
        "{found}"
    );
    assert_eq!(stored(root.path())["context"], json!(positions), "{found}");
    // Of a model with more positions, as many as fit; and no more than the longest document needs.
    for (packing, length, tokens, said) in [
        (true, 40, 512, "512 tokens, because the longest document has 40"),
        // Rows of one document are no longer than it.
        (false, 40, 48, "48 tokens, because the longest document has 40"),
        (true, 700, 708, "708 tokens, because the longest document has 700"),
        (true, 4000, 768, "768 tokens. With 1 row at a time"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let options = [("context", json!("auto")), ("packing", json!(packing))];
        let text = auto_config(root.path(), &options);
        let path = root.path().join("model/config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["max_position_embeddings"] = json!(4096);
        std::fs::write(&path, config.to_string()).unwrap();
        let long: Vec<usize> = (0..length).map(|token| token % 250).collect();
        write_lines(&root.path().join("data.jsonl"), [json!(long), json!([1, 2, 3])]);
        let budget = match length {
            4000 => predicted(&spec_of(&text), |step| StepSize { context: 768, ..step }),
            _ => u64::MAX / 2,
        };
        let events = run_completed(&on_device(&text, budget, budget));
        assert!(logs(&events).contains(said), "{}", logs(&events));
        assert_eq!(stored(root.path())["context"], json!(tokens));
    }
    // A run that resumes has the context of its checkpoint, on any device.
    let root = tempfile::tempdir().unwrap();
    let text = text_of(root.path());
    stop_at(&on_device(&text, u64::MAX / 2, u64::MAX / 2), 2);
    let resumed = run_completed(&AttemptSpec {
        profile: MemoryProfile::Extreme,
        ..on_device(&text, 1, 1)
    });
    assert!(
        logs(&resumed).contains(&format!("context: auto: {positions} tokens, as before")),
        "{}",
        logs(&resumed)
    );
    assert!(!logs(&resumed).contains("the data changed"), "{}", logs(&resumed));
}
