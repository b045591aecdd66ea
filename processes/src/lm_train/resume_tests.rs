//! Trainings of code models that are interrupted end with the bytes of those that are not.

use super::test_runs::{
    completed, config, files, logs, metric, model, refused, run_spec, sequences, spec_of, stop_at, whole_training,
    write_lines,
};
use crate::testing::fixtures;
use crate::{EventSink, StopSignal, run};
use aitk_common::attempt::{ChildEvent, Outcome};
use serde_json::json;

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

/// Stops a run when it measures the held-out loss after a step.
struct StopInValidation {
    after: u64,
    signal: StopSignal,
    events: Vec<ChildEvent>,
}

impl EventSink for StopInValidation {
    fn emit(&mut self, event: ChildEvent) {
        let is_measured = matches!(&event, ChildEvent::Phase { name } if name == "validating");
        self.after -= u64::from(is_measured && self.after > 0);
        if is_measured && self.after == 0 {
            self.signal.stop();
        }
        self.events.push(event);
    }
}

#[test]
fn a_run_that_is_stopped_while_it_measures_the_held_out_loss_measures_it_when_it_resumes() {
    let whole = tempfile::tempdir().unwrap();
    let expected = metric(&completed(&whole_training(whole.path(), true)), "val/loss");
    assert!(expected.len() > 2, "{expected:?}");
    // At the first measurement, at one in the middle, and at that of the last step.
    for after in [1, 2, expected.len() as u64] {
        let parts = tempfile::tempdir().unwrap();
        let spec = spec_of(&whole_training(parts.path(), true));
        let signal = StopSignal::new();
        let mut sink = StopInValidation {
            after,
            signal: signal.clone(),
            events: Vec::new(),
        };
        assert_eq!(run(&spec, &mut sink, &signal), Outcome::stopped());
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let found = [metric(&sink.events, "val/loss"), metric(&events, "val/loss")].concat();
        assert_eq!(found, expected, "after {after}");
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
fn a_training_whose_steps_were_raised_has_the_save_of_the_step_where_it_ended() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    model(&root.join("model"), "llama");
    write_lines(&root.join("data.jsonl"), sequences(52.0));
    for steps in [2, 3] {
        let save = json!({"save_every": 2, "dtype": "float32"});
        let lines = [
            ("network", json!({"linear": 2})),
            ("train", json!({"steps": steps})),
            ("save", save),
        ];
        completed(&config(root, &lines));
        let has_save = root.join("out/coder/coder_000000002").is_dir();
        assert_eq!(has_save, steps == 3);
    }
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
