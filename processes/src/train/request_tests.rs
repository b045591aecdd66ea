//! Saves and samples that a user asks a running training for.

use super::embedding_tests::{sampled, with_word};
use super::full_tests::full;
use super::slider_tests::reference;
use super::tests::{logs, losses, run_spec, saved_lora, spec, trainer};
use crate::testing::{in_own_folder, sampled_cases};
use crate::{EventSink, OutputRequests, StopSignal, run_with_requests};
use aitk_common::attempt::{AttemptSpec, ChildEvent, Outcome};
use aitk_common::job::process::TrainerProcess;
use aitk_common::requested_outputs::RequestedOutputs;
use std::path::Path;

const BOTH: RequestedOutputs = RequestedOutputs {
    save: true,
    samples: true,
};

/// Asks for outputs while steps are computed: with the metrics of a step, which are emitted before the outputs of the step are made.
struct Asking {
    requests: OutputRequests,
    /// Steps, with what is asked for.
    at: Vec<(u64, RequestedOutputs)>,
    events: Vec<ChildEvent>,
}

impl EventSink for Asking {
    fn emit(&mut self, event: ChildEvent) {
        if let ChildEvent::Metrics { step, .. } = &event {
            for (_, outputs) in self.at.iter().filter(|(at, _)| at == step) {
                self.requests.request(*outputs);
            }
        }
        self.events.push(event);
    }
}

/// Runs an attempt to its end. `before`: what is asked for before it starts.
fn run_asking(
    spec: &AttemptSpec,
    before: RequestedOutputs,
    at: &[(u64, RequestedOutputs)],
) -> (OutputRequests, Vec<ChildEvent>) {
    let requests = OutputRequests::new();
    requests.request(before);
    let mut sink = Asking {
        requests: requests.clone(),
        at: at.to_vec(),
        events: Vec::new(),
    };
    let outcome = run_with_requests(spec, &mut sink, &StopSignal::new(), &requests);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&sink.events));
    (requests, sink.events)
}

/// The steps of the emitted files of a kind.
fn steps_of(events: &[ChildEvent], kind: &str) -> Vec<u64> {
    let step = |event: &ChildEvent| match event {
        ChildEvent::Artifact {
            kind: this,
            step: Some(step),
            ..
        } if this == kind => Some(*step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

fn removed(events: &[ChildEvent]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for event in events {
        if let ChildEvent::ArtifactRemoved { name } = event
            && !names.contains(&name.as_str())
        {
            names.push(name);
        }
    }
    names
}

fn save_file(root: &Path, step: u64) -> std::path::PathBuf {
    root.join(format!("out/tiny/tiny_{step:09}.safetensors"))
}

/// A training with everything random, and a sample at its end.
fn random_trainer(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = sampled(trainer(root, steps), &["a circle", "a square"]);
    process.train.skip_first_sample = true;
    process.train.ema_config.use_ema = true;
    process.train.noise_offset = 0.05;
    process.train.gradient_accumulation_steps = 2;
    process.network.as_mut().unwrap().dropout = Some(0.1);
    process
}

#[test]
fn a_requested_save_and_samples_are_made_once_and_do_not_change_the_training() {
    let plain = tempfile::tempdir().unwrap();
    let (outcome, without) = run_spec(&spec(random_trainer(plain.path(), 7)));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&without));
    let dir = tempfile::tempdir().unwrap();
    let (_, events) = run_asking(
        &spec(random_trainer(dir.path(), 7)),
        RequestedOutputs::default(),
        // Twice before it is made; and a save in a step that the config saves.
        &[
            (2, BOTH),
            (2, BOTH),
            (4, RequestedOutputs::SAVE),
            (6, RequestedOutputs::SAMPLES),
        ],
    );
    assert_eq!(steps_of(&without, "lora"), [4, 7]);
    assert_eq!(steps_of(&without, "sample"), [7, 7]);
    assert_eq!(steps_of(&events, "lora"), [2, 4, 7]);
    assert_eq!(steps_of(&events, "sample"), [2, 2, 6, 6, 7, 7]);
    assert!(save_file(dir.path(), 2).is_file());
    let log = logs(&events);
    for (line, count) in [
        ("saving at step 2, as requested", 1),
        ("sampling at step 2, as requested", 1),
        ("saving at step 4, as requested", 1),
        ("sampling at step 6, as requested", 1),
        ("as requested", 4),
    ] {
        assert_eq!(log.matches(line).count(), count, "{line}: {log}");
    }
    assert_eq!(losses(&events), losses(&without));
    let samples_and_saves = |root: &Path| (saved_lora(root), std::fs::read(save_file(root, 4)).unwrap());
    assert!(samples_and_saves(dir.path()) == samples_and_saves(plain.path()));

    // The save is that of the same step with `save_every`, and so is what a resume from its checkpoint ends with.
    let saved = tempfile::tempdir().unwrap();
    let mut process = random_trainer(saved.path(), 7);
    process.save.save_every = Some(2);
    assert_eq!(run_spec(&spec(process)).0, Outcome::Completed);
    let read = |root: &Path| std::fs::read(save_file(root, 2)).unwrap();
    assert!(read(dir.path()) == read(saved.path()));
}

#[test]
fn requests_of_every_kind_of_training_leave_its_weights_unchanged() {
    type Make = fn(&Path) -> TrainerProcess;
    let kinds: [(&str, Make); 4] = [
        ("model", |root| full(root, 3)),
        ("embedding", |root| with_word(trainer(root, 3))),
        ("lora", |root| reference("ultimate", root)),
        ("lora", |root| reference("parts", root)),
    ];
    for (kind, make) in sampled_cases(kinds.to_vec()) {
        let run = |at: &[(u64, RequestedOutputs)]| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = sampled(make(dir.path()), &["a circle"]);
            process.train.steps = 3;
            process.train.skip_first_sample = true;
            process.save.save_every = Some(100);
            let (_, events) = run_asking(&spec(process), RequestedOutputs::default(), at);
            let mut files: Vec<_> = std::fs::read_dir(dir.path().join("out/tiny"))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.extension().is_some_and(|suffix| suffix == "safetensors"))
                .collect();
            // The final save has the shortest name: that without a step.
            files.sort_by_key(|path| std::cmp::Reverse(path.as_os_str().len()));
            let last = files.pop().unwrap();
            (std::fs::read(last).unwrap(), files.len(), events)
        };
        let (plain, saves, _) = run(&[]);
        assert_eq!(saves, 0, "{kind}");
        let (asked, saves, events) = run(&[(1, BOTH)]);
        assert!(plain == asked, "{kind}: {}", logs(&events));
        assert_eq!(saves, 1, "{kind}");
        assert_eq!(steps_of(&events, kind), [1, 3], "{}", logs(&events));
        assert_eq!(steps_of(&events, "sample"), [1, 3], "{kind}");
    }
}

#[test]
fn a_request_before_the_first_step_waits_and_one_at_the_last_is_served_by_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = random_trainer(dir.path(), 3);
    process.save.save_every = None;
    let (requests, events) = run_asking(&spec(process), RequestedOutputs::SAVE, &[(3, BOTH)]);
    assert_eq!(steps_of(&events, "lora"), [1, 3]);
    assert_eq!(steps_of(&events, "sample"), [3, 3]);
    assert!(requests.take().is_empty());
    assert_eq!(logs(&events).matches("as requested").count(), 1, "{}", logs(&events));
    assert!(!logs(&events).contains("nothing was done"), "{}", logs(&events));
}

#[test]
fn samples_of_a_training_without_samples_are_only_logged() {
    let dir = tempfile::tempdir().unwrap();
    let (_, events) = run_asking(
        &spec(trainer(dir.path(), 2)),
        RequestedOutputs::default(),
        &[(1, RequestedOutputs::SAMPLES)],
    );
    assert_eq!(steps_of(&events, "sample"), [0; 0]);
    assert!(logs(&events).contains("nothing is sampled"), "{}", logs(&events));
}

#[test]
fn retention_counts_requested_saves() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 9);
    process.save.max_step_saves_to_keep = 2;
    let (_, events) = run_asking(
        &spec(process),
        RequestedOutputs::default(),
        &[(2, RequestedOutputs::SAVE), (5, RequestedOutputs::SAVE)],
    );
    assert_eq!(steps_of(&events, "lora"), [2, 4, 5, 8, 9]);
    assert_eq!(
        removed(&events),
        ["tiny/tiny_000000002.safetensors", "tiny/tiny_000000004.safetensors"]
    );
    let kept: Vec<u64> = (1..9).filter(|step| save_file(dir.path(), *step).exists()).collect();
    assert_eq!(kept, [5, 8]);
}

#[test]
fn another_machine_keeps_and_counts_the_requested_saves_of_an_earlier_attempt() {
    let one = tempfile::tempdir().unwrap();
    let mut process = trainer(one.path(), 9);
    process.save.max_step_saves_to_keep = 2;
    let first = in_own_folder(spec(process.clone()), &one.path().join("out"));
    let at = [(2, RequestedOutputs::SAVE), (5, RequestedOutputs::SAVE)];
    run_asking(&first, RequestedOutputs::default(), &at);
    let checkpoint = |root: &Path, step: u64| root.join(format!("out/tiny/.aitk/checkpoints/step_{step:09}"));

    // The same, stopped after step 5: its checkpoint is that of a requested save, and not of an interruption.
    let two = tempfile::tempdir().unwrap();
    let second = in_own_folder(spec(process), &two.path().join("out"));
    let signal = StopSignal::new();
    let requests = OutputRequests::new();
    let mut sink = StopAfter {
        asking: Asking {
            requests: requests.clone(),
            at: at.to_vec(),
            events: Vec::new(),
        },
        signal: signal.clone(),
    };
    assert_eq!(
        run_with_requests(&second, &mut sink, &signal, &requests),
        Outcome::stopped()
    );
    assert_eq!(steps_of(&sink.asking.events, "lora"), [2, 4, 5]);

    let three = tempfile::tempdir().unwrap();
    let mut other = in_own_folder(second, &three.path().join("out"));
    other.resume_from = Some(checkpoint(two.path(), 5));
    let (outcome, events) = run_spec(&other);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    // The save of step 5 may have been lost with the machine, and is made again. It is removed only by retention, as that of step 4,
    // which is not on this machine.
    assert_eq!(steps_of(&events, "lora"), [5, 8, 9]);
    assert_eq!(
        removed(&events),
        ["tiny/tiny_000000002.safetensors", "tiny/tiny_000000004.safetensors"]
    );
    assert!(saved_lora(three.path()) == saved_lora(one.path()));

    // With one save to keep, that of step 5 is removed by the next one, as a save of the config would be.
    let four = tempfile::tempdir().unwrap();
    let mut process = trainer(one.path(), 9);
    process.save.max_step_saves_to_keep = 1;
    let mut other = in_own_folder(spec(process), &four.path().join("out"));
    other.resume_from = Some(checkpoint(two.path(), 5));
    let (outcome, events) = run_spec(&other);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(removed(&events).contains(&"tiny/tiny_000000005.safetensors"));
}

/// Stops a run that saved as requested at step 5.
struct StopAfter {
    asking: Asking,
    signal: StopSignal,
}

impl EventSink for StopAfter {
    fn emit(&mut self, event: ChildEvent) {
        if matches!(&event, ChildEvent::Checkpoint { step: 5, .. }) {
            self.signal.stop();
        }
        self.asking.emit(event);
    }
}
