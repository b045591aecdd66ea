//! Whole training runs on the tiny model.

use crate::processes::{StopSignal, run};
use crate::testing::{attempt, fixtures, in_own_folder};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::job::dataset::DatasetConfig;
use aitk_common::job::dtype::DType;
use aitk_common::job::network::NetworkConfig;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::values::OneOrMany;
use aitk_common::job::{JobKind, JobSpec, Process, ProcessKind, ProcessType};
use std::path::Path;

/// Five images of two shapes, with captions.
pub(super) fn images(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for i in 0..5u32 {
        let (w, h) = if i < 3 { (32, 32) } else { (48, 24) };
        let image = image::RgbImage::from_fn(w, h, |x, y| {
            image::Rgb([(x * 5 + i * 40) as u8, (y * 7) as u8, (i * 50) as u8])
        });
        image.save(folder.join(format!("p{i}.png"))).unwrap();
        std::fs::write(folder.join(format!("p{i}.txt")), format!("a red circle, drawing {i}")).unwrap();
    }
}

pub(super) fn trainer(root: &Path, steps: u64) -> TrainerProcess {
    images(&root.join("data"));
    let mut process = TrainerProcess {
        training_folder: Some(root.join("out").display().to_string()),
        training_seed: Some(42),
        ..TrainerProcess::default()
    };
    process.model.name_or_path = fixtures().join("tiny_sd").display().to_string();
    process.network = Some(NetworkConfig {
        linear: 4,
        linear_alpha: 4.0,
        ..NetworkConfig::default()
    });
    process.train.steps = steps;
    process.train.batch_size = 2;
    process.train.lr = 1e-3;
    process.train.disable_sampling = true;
    process.save.save_every = Some(4);
    process.save.dtype = DType::F32;
    process.logging.log_every = Some(1);
    process.datasets = vec![DatasetConfig {
        folder_path: Some(root.join("data").display().to_string()),
        resolution: OneOrMany(vec![32]),
        cache_latents_to_disk: true,
        shuffle_tokens: true,
        ..DatasetConfig::default()
    }];
    process
}

pub(super) fn spec(process: TrainerProcess) -> AttemptSpec {
    let job = JobSpec {
        job: JobKind::Extension,
        name: "tiny".into(),
        meta: serde_json::Map::new(),
        process: vec![Process {
            process_type: ProcessType::SdTrainer,
            kind: ProcessKind::Train(Box::new(process)),
        }],
        cluster: Default::default(),
        config: Default::default(),
        file: None,
        positions: Default::default(),
        part: None,
        revisions: Default::default(),
    };
    attempt(&job, "job: extension # ${SECRET}\n")
}

pub(super) fn run_spec(spec: &AttemptSpec) -> (Outcome, Vec<ChildEvent>) {
    let mut events = Vec::new();
    let outcome = run(spec, &mut events, &StopSignal::new());
    (outcome, events)
}

pub(super) fn losses(events: &[ChildEvent]) -> Vec<f64> {
    let loss = |e: &ChildEvent| match e {
        ChildEvent::Metrics { values, .. } => values.get("loss/loss").copied(),
        _ => None,
    };
    events.iter().filter_map(loss).collect()
}

pub(super) fn logs(events: &[ChildEvent]) -> String {
    let line = |e: &ChildEvent| match e {
        ChildEvent::Log { message, .. } => Some(message.clone()),
        _ => None,
    };
    events.iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

/// Stops a run once it emitted the metrics of a step.
struct StopAt {
    step: u64,
    signal: StopSignal,
    events: Vec<ChildEvent>,
}

impl crate::processes::EventSink for StopAt {
    fn emit(&mut self, event: ChildEvent) {
        if matches!(&event, ChildEvent::Metrics { step, .. } if *step == self.step) {
            self.signal.stop();
        }
        self.events.push(event);
    }
}

pub(super) fn stop_at(spec: &AttemptSpec, step: u64) -> (Outcome, Vec<ChildEvent>) {
    let signal = StopSignal::new();
    let mut sink = StopAt {
        step,
        signal: signal.clone(),
        events: Vec::new(),
    };
    let outcome = run(spec, &mut sink, &signal);
    (outcome, sink.events)
}

pub(super) fn saved_lora(root: &Path) -> Vec<u8> {
    std::fs::read(root.join("out/tiny/tiny.safetensors")).unwrap()
}

#[test]
fn a_run_writes_the_files_of_the_config_reference() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(trainer(dir.path(), 10));
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let out = dir.path().join("out/tiny");
    for name in [
        "config.yaml",
        "tiny.safetensors",
        "tiny_000000004.safetensors",
        "tiny_000000008.safetensors",
    ] {
        assert!(out.join(name).is_file(), "{name}");
    }
    assert_eq!(
        std::fs::read_to_string(out.join("config.yaml")).unwrap(),
        spec.config_text
    );
    assert_eq!(losses(&events).len(), 10);
    assert!(losses(&events).iter().all(|l| l.is_finite() && *l > 0.0));
    let names: Vec<&str> = events
        .iter()
        .filter_map(|e| match e {
            ChildEvent::Artifact { name, .. } => Some(name.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(
        names,
        [
            "tiny/config.yaml",
            "tiny/tiny_000000004.safetensors",
            "tiny/loss.png",
            "tiny/tiny_000000008.safetensors",
            "tiny/loss.png",
            "tiny/loss.png",
            "tiny/tiny.safetensors"
        ]
    );

    // The same job again: nothing is left to do, and nothing is written.
    let before = std::fs::metadata(out.join("tiny.safetensors"))
        .unwrap()
        .modified()
        .unwrap();
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed);
    assert!(losses(&events).is_empty() && logs(&events).contains("nothing is left"));
    assert_eq!(
        std::fs::metadata(out.join("tiny.safetensors"))
            .unwrap()
            .modified()
            .unwrap(),
        before
    );
}

#[test]
fn a_resumed_run_has_the_same_bits_as_an_uninterrupted_one() {
    let uninterrupted_dir = tempfile::tempdir().unwrap();
    let mut process = trainer(uninterrupted_dir.path(), 9);
    process.train.ema_config.use_ema = true;
    process.train.noise_offset = 0.05;
    process.network.as_mut().unwrap().dropout = Some(0.1);
    process.train.lr_scheduler_params = serde_json::json!({"num_warmup_steps": 3}).as_object().unwrap().clone();
    let uninterrupted = run_spec(&spec(process.clone()));
    assert_eq!(uninterrupted.0, Outcome::Completed, "{}", logs(&uninterrupted.1));

    for stop in [1, 5] {
        let interrupted_dir = tempfile::tempdir().unwrap();
        let mut same = process.clone();
        let other = trainer(interrupted_dir.path(), 9);
        same.training_folder = other.training_folder;
        same.datasets[0].folder_path = other.datasets[0].folder_path.clone();
        let spec = spec(same);
        let (outcome, first) = stop_at(&spec, stop);
        assert_eq!(outcome, Outcome::stopped());
        let (outcome, second) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
        assert!(!logs(&second).contains("changed"), "{}", logs(&second));
        let all: Vec<f64> = losses(&first).into_iter().chain(losses(&second)).collect();
        assert_eq!(all, losses(&uninterrupted.1));
        assert_eq!(
            saved_lora(interrupted_dir.path()),
            saved_lora(uninterrupted_dir.path()),
            "stopped at {stop}"
        );
    }
}

#[test]
fn a_stop_during_gradient_accumulation_keeps_the_gradients() {
    let uninterrupted_dir = tempfile::tempdir().unwrap();
    let mut process = trainer(uninterrupted_dir.path(), 7);
    process.train.gradient_accumulation_steps = 3;
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    let interrupted_dir = tempfile::tempdir().unwrap();
    process.training_folder = trainer(interrupted_dir.path(), 7).training_folder;
    assert_eq!(stop_at(&spec(process.clone()), 2).0, Outcome::stopped());
    assert_eq!(run_spec(&spec(process)).0, Outcome::Completed);
    assert_eq!(saved_lora(interrupted_dir.path()), saved_lora(uninterrupted_dir.path()));
}

#[test]
fn another_machine_resumes_from_a_checkpoint_alone() {
    let one = tempfile::tempdir().unwrap();
    let process = trainer(one.path(), 8);
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    let checkpoint = one.path().join("out/tiny/.aitk/checkpoints/step_000000004");
    assert!(checkpoint.is_dir());
    let two = tempfile::tempdir().unwrap();
    let mut other = in_own_folder(spec(process), &two.path().join("out"));
    other.resume_from = Some(checkpoint);
    let (outcome, events) = run_spec(&other);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert_eq!(losses(&events).len(), 4);
    assert_eq!(saved_lora(two.path()), saved_lora(one.path()));
}

#[test]
fn saves_retention_and_samples_missing_after_a_kill_are_made_on_resume() {
    use aitk_common::job::sample::SampleItem;
    let one = tempfile::tempdir().unwrap();
    let mut process = trainer(one.path(), 8);
    process.save.save_every = Some(2);
    process.save.max_step_saves_to_keep = 1;
    process.train.disable_sampling = false;
    process.sample.sample_every = Some(4);
    process.sample.width = 64;
    process.sample.height = 64;
    process.sample.sample_steps = 2;
    process.sample.samples = vec![SampleItem {
        prompt: "a circle".into(),
        ..SampleItem::default()
    }];
    assert_eq!(stop_at(&spec(process.clone()), 4).0, Outcome::stopped());
    // Another machine has only the checkpoint: the first one emitted neither removed files nor samples.
    let two = tempfile::tempdir().unwrap();
    let mut other = in_own_folder(spec(process), &two.path().join("out"));
    other.resume_from = Some(one.path().join("out/tiny/.aitk/checkpoints/step_000000004"));
    let (outcome, events) = run_spec(&other);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let removed = |name: &str| {
        let is_removal = |event: &ChildEvent| matches!(event, ChildEvent::ArtifactRemoved { name: removed_name } if removed_name == name);
        events.iter().any(is_removal)
    };
    assert!(removed("tiny/tiny_000000002.safetensors") && removed("tiny/tiny_000000004.safetensors"));
    let has_sample =
        |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, step: Some(4), .. } if kind == "sample");
    assert!(events.iter().any(has_sample));
    let saved =
        |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, step: Some(4), .. } if kind == "lora");
    assert!(events.iter().any(saved));
    // Existing samples are not sampled again.
    assert!(!run_spec(&other).1.iter().any(has_sample));
}

#[test]
fn the_save_of_an_interruption_is_removed_after_another_machine_resumes() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut process = trainer(one.path(), 8);
    process.save.save_every = Some(2);
    process.save.max_step_saves_to_keep = 1;
    let interrupted = in_own_folder(spec(process.clone()), &one.path().join("out"));
    let (outcome, events) = stop_at(&interrupted, 5);
    assert_eq!(outcome, Outcome::stopped(), "{}", logs(&events));
    let removed = |events: &[ChildEvent], step: u64| {
        let file = format!("tiny/tiny_{step:09}.safetensors");
        let is_removal = |event: &ChildEvent| matches!(event, ChildEvent::ArtifactRemoved { name } if *name == file);
        events.iter().any(is_removal)
    };
    // Retention counts only the saves that were due.
    assert!(removed(&events, 2) && !removed(&events, 4));
    let saved =
        |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, step: Some(5), .. } if kind == "lora");
    assert!(events.iter().any(saved), "the user who stopped the run gets its LoRA");
    let mut other = in_own_folder(spec(process), &two.path().join("out"));
    other.resume_from = Some(one.path().join("out/tiny/.aitk/checkpoints/step_000000005"));
    let (outcome, events) = run_spec(&other);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(removed(&events, 5) && removed(&events, 4) && !removed(&events, 6));
    let saved =
        |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, step: Some(6), .. } if kind == "lora");
    let newer = events.iter().position(saved).unwrap();
    assert!(!removed(&events[..newer], 5), "it is the newest save until then");
    let last_checkpoint = events
        .iter()
        .rposition(|event| matches!(event, ChildEvent::Checkpoint { .. }));
    assert!(
        removed(&events[..last_checkpoint.unwrap()], 5),
        "it is removed before the next checkpoint is committed"
    );

    // The second attempt was killed right after the checkpoint of that save, so the removal was not emitted.
    let three = tempfile::tempdir().unwrap();
    let mut third = in_own_folder(other.clone(), &three.path().join("out"));
    third.resume_from = Some(two.path().join("out/tiny/.aitk/checkpoints/step_000000006"));
    let (outcome, events) = run_spec(&third);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let newer = events.iter().position(saved).unwrap();
    assert!(!removed(&events[..newer], 5) && removed(&events, 5));
}

/// An attempt that is stopped before its first step, or fails, removes no save of the job.
#[test]
fn the_save_of_an_interruption_is_kept_until_the_next_save() {
    struct StopInTraining(StopSignal, Vec<ChildEvent>);
    impl crate::processes::EventSink for StopInTraining {
        fn emit(&mut self, event: ChildEvent) {
            if matches!(&event, ChildEvent::Phase { name } if name == "training") {
                self.0.stop();
            }
            self.1.push(event);
        }
    }
    let removed = |events: &[ChildEvent]| -> Vec<String> {
        let name = |event: &ChildEvent| match event {
            ChildEvent::ArtifactRemoved { name } => Some(name.clone()),
            _ => None,
        };
        events.iter().filter_map(name).collect()
    };
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut process = trainer(one.path(), 6);
    process.save.max_step_saves_to_keep = 0;
    let interrupted = in_own_folder(spec(process.clone()), &one.path().join("out"));
    assert_eq!(stop_at(&interrupted, 5).0, Outcome::stopped());
    let mut other = in_own_folder(spec(process), &two.path().join("out"));
    other.resume_from = Some(one.path().join("out/tiny/.aitk/checkpoints/step_000000005"));
    let signal = StopSignal::new();
    let mut sink = StopInTraining(signal.clone(), Vec::new());
    assert_eq!(run(&other, &mut sink, &signal), Outcome::stopped());
    assert!(logs(&sink.1).contains("stopped after step 5"), "{}", logs(&sink.1));
    assert_eq!(removed(&sink.1), [""; 0]);
    let (outcome, events) = run_spec(&other);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert_eq!(removed(&events), ["tiny/tiny_000000005.safetensors"]);
}

#[test]
fn retention_does_not_count_the_save_of_an_interruption() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 6);
    process.save.save_every = Some(2);
    process.save.max_step_saves_to_keep = 1;
    let spec = in_own_folder(spec(process), &dir.path().join("out"));
    assert_eq!(stop_at(&spec, 5).0, Outcome::stopped());
    let saved = |step: u64| dir.path().join(format!("out/tiny/tiny_{step:09}.safetensors")).exists();
    assert!(!saved(2) && saved(4) && saved(5));
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(saved(4) && !saved(5), "the saves of a run without interruption");
}

/// A LoRA exists only if the checkpoint of its step exists, so a run that is killed at any moment resumes exactly.
#[test]
fn a_lora_is_written_only_after_the_checkpoint_of_its_step() {
    struct Watch(std::path::PathBuf, usize);
    impl crate::processes::EventSink for Watch {
        fn emit(&mut self, event: ChildEvent) {
            let checkpoints = self.0.join(".aitk/checkpoints");
            for step in [2u64, 4] {
                if self.0.join(format!("tiny_{step:09}.safetensors")).exists() {
                    let state = checkpoints.join(format!("step_{step:09}/manifest.json"));
                    assert!(state.is_file(), "{} at {event:?}", state.display());
                    self.1 += 1;
                }
            }
        }
    }
    let uninterrupted = tempfile::tempdir().unwrap();
    let mut process = trainer(uninterrupted.path(), 5);
    process.save.save_every = Some(2);
    let out = uninterrupted.path().join("out/tiny");
    let mut watch = Watch(out.clone(), 0);
    assert_eq!(
        run(&spec(process.clone()), &mut watch, &StopSignal::new()),
        Outcome::Completed
    );
    assert!(watch.1 > 2);

    // The run was killed between the checkpoint and the LoRA of the first save.
    let killed = tempfile::tempdir().unwrap();
    let mut process = trainer(killed.path(), 5);
    process.save.save_every = Some(2);
    assert_eq!(stop_at(&spec(process.clone()), 2).0, Outcome::stopped());
    let first = "out/tiny/tiny_000000002.safetensors";
    std::fs::remove_file(killed.path().join(first)).unwrap();
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert_eq!(losses(&events).len(), 3, "steps 3, 4 and 5");
    for name in [first, "out/tiny/tiny.safetensors"] {
        let read = |root: &Path| std::fs::read(root.join(name)).unwrap();
        assert!(read(killed.path()) == read(uninterrupted.path()), "{name} differs");
    }
}

#[test]
fn a_run_resumes_in_an_unfinished_folder_of_ai_toolkit() {
    let dir = tempfile::tempdir().unwrap();
    let process = trainer(dir.path(), 8);
    let spec = spec(process);
    let (outcome, _) = stop_at(&spec, 5);
    assert_eq!(outcome, Outcome::stopped());
    std::fs::remove_dir_all(dir.path().join("out/tiny/.aitk")).unwrap();
    std::fs::write(dir.path().join("out/tiny/optimizer.pt"), b"a pickle of torch").unwrap();
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed);
    assert!(
        logs(&events).contains("step 5") && logs(&events).contains("fresh optimizer"),
        "{}",
        logs(&events)
    );
    assert_eq!(losses(&events).len(), 3);
}

#[test]
fn a_run_that_started_at_a_step_resumes_where_it_was_interrupted() {
    let at_step = |root: &Path| {
        let mut process = trainer(root, 8);
        process.train.start_step = Some(3);
        process
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (outcome, events) = run_spec(&spec(at_step(whole.path())));
    assert_eq!(outcome, Outcome::Completed);
    let expected = losses(&events);
    assert_eq!(expected.len(), 5);
    let interrupted = spec(at_step(parts.path()));
    let (_, first) = stop_at(&interrupted, 5);
    let (outcome, second) = run_spec(&interrupted);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
    assert_eq!([losses(&first), losses(&second)].concat(), expected);
    // Another step is a wish to start there.
    let mut process = at_step(parts.path());
    (process.train.start_step, process.train.steps) = (Some(6), 9);
    let (_, events) = run_spec(&spec(process));
    assert_eq!(losses(&events).len(), 3);
}

#[test]
fn a_damaged_checkpoint_is_skipped_for_the_previous_one() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(trainer(dir.path(), 12));
    stop_at(&spec, 9);
    let interrupted_dir = dir
        .path()
        .join("out/tiny/.aitk/checkpoints/step_000000009/weights.safetensors");
    let bytes = std::fs::read(&interrupted_dir).unwrap();
    std::fs::write(&interrupted_dir, &bytes[..bytes.len() - 1]).unwrap();
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed);
    assert!(logs(&events).contains("resuming from step 8"), "{}", logs(&events));
}

#[test]
fn after_a_change_of_rank_the_weights_are_used_with_a_fresh_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    stop_at(&spec(process.clone()), 5);
    process.network.as_mut().unwrap().linear = 6;
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("another rank"), "{}", logs(&events));
}

#[test]
fn a_resumed_run_keeps_its_random_seed() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    process.training_seed = None;
    let first = spec(process);
    stop_at(&first, 5);
    // Another `aitk run` of the same config: the coordinator chose another seed.
    let mut second = first.clone();
    second.seed = first.seed + 1;
    let (outcome, events) = run_spec(&second);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(!logs(&events).contains("changed"), "{}", logs(&events));
}

#[test]
fn changes_since_the_checkpoint_are_logged() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    stop_at(&spec(process.clone()), 5);
    process.train.ema_config.use_ema = true;
    process.training_seed = Some(43);
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let log = logs(&events);
    assert!(
        log.contains("the seed changed") && log.contains("the training settings changed"),
        "{log}"
    );
    assert!(
        log.contains("resuming from step 5, with the optimizer's state"),
        "{log}"
    );
    // With more steps the run resumes exactly at its end.
    process.train.steps = 10;
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed);
    assert_eq!(losses(&events).len(), 2);
    assert!(!logs(&events).contains("changed"), "{}", logs(&events));
}

#[test]
fn retention_keeps_the_newest_saves_and_emits_the_removed_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 9);
    process.save.save_every = Some(2);
    process.save.max_step_saves_to_keep = 2;
    let (_, events) = run_spec(&spec(process));
    let removed: Vec<&str> = events
        .iter()
        .filter_map(|e| match e {
            ChildEvent::ArtifactRemoved { name } => Some(name.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(
        removed,
        ["tiny/tiny_000000002.safetensors", "tiny/tiny_000000004.safetensors"]
    );
    let out = dir.path().join("out/tiny");
    assert!(!out.join("tiny_000000002.safetensors").exists() && out.join("tiny_000000006.safetensors").exists());
    assert!(out.join("tiny.safetensors").exists());
}

#[test]
fn a_run_without_finite_weights_fails_with_a_message() {
    // Many steps without a finite loss, and a few, which leave weights that are not finite.
    for (steps, max_grad_norm) in [(60, 0.0), (6, 1.0)] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), steps);
        process.train.lr = 1e30;
        process.train.max_grad_norm = max_grad_norm;
        let (outcome, events) = run_spec(&spec(process));
        let Outcome::Failed {
            cause: FailureCause::BadInput,
            message,
        } = outcome
        else {
            panic!("{outcome:?}");
        };
        assert!(message.contains("finite") && message.contains("train.lr"), "{message}");
        assert!((losses(&events).len() as u64) < steps);
        assert!(losses(&events).iter().all(|loss| loss.is_finite()));
        assert!(!dir.path().join("out/tiny/tiny.safetensors").exists());
    }
}

#[test]
fn non_finite_steps_fail_a_run_only_if_there_are_no_others() {
    // It is infinite in float32, and so is the noise.
    let infinite_offset = 1e300;
    let learned = tempfile::tempdir().unwrap();
    let mut process = trainer(learned.path(), 6);
    assert_eq!(stop_at(&spec(process.clone()), 5).0, Outcome::stopped());
    process.train.noise_offset = infinite_offset;
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("not a finite number"), "{}", logs(&events));

    // Steps before an interruption count.
    let nothing = tempfile::tempdir().unwrap();
    let mut process = trainer(nothing.path(), 3);
    process.train.noise_offset = infinite_offset;
    assert_eq!(stop_at(&spec(process.clone()), 1).0, Outcome::stopped());
    let (outcome, events) = run_spec(&spec(process));
    let is_expected = |message: &str| message.contains("3 steps in a row") && message.contains("nothing was learned");
    assert!(
        matches!(&outcome, Outcome::Failed { message, .. } if is_expected(message)),
        "{outcome:?}: {}",
        logs(&events)
    );
}

#[test]
fn two_runs_cannot_use_one_folder() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(trainer(dir.path(), 2));
    let own = dir.path().join("out/tiny/.aitk");
    std::fs::create_dir_all(&own).unwrap();
    let other = std::fs::File::create(own.join("lock")).unwrap();
    other.lock().unwrap();
    // The stop flag is set, so that it does not wait for the other run.
    let stop = StopSignal::new();
    stop.stop();
    let outcome = run(&spec, &mut Vec::new(), &stop);
    let is_refused = |message: &str| message.contains("another run") && message.contains("out/tiny");
    assert!(
        matches!(&outcome, Outcome::Failed { message, .. } if is_refused(message)),
        "{outcome:?}"
    );
    drop(other);
    assert_eq!(run_spec(&spec).0, Outcome::Completed);
}

#[test]
fn bad_data_is_an_error_that_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let process = trainer(dir.path(), 2);
    let data = dir.path().join("data");
    let fail = |process: TrainerProcess, parts: &[&str]| match run_spec(&spec(process)).0 {
        Outcome::Failed {
            cause: FailureCause::BadInput,
            message,
        } => {
            for part in parts {
                assert!(message.contains(part), "\"{part}\" is not in: {message}");
            }
        }
        other => panic!("{other:?}"),
    };
    std::fs::write(data.join("p0.txt"), [b'a', 0xff]).unwrap();
    fail(process.clone(), &["p0.txt", "UTF-8"]);
    std::fs::write(data.join("p0.txt"), "fine").unwrap();

    let mut missing = process.clone();
    missing.datasets[0].folder_path = Some(data.join("nowhere").display().to_string());
    fail(missing, &["nowhere", "does not exist"]);

    let empty = dir.path().join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    let mut none = process.clone();
    none.datasets[0].folder_path = Some(empty.display().to_string());
    fail(none.clone(), &["empty"]);
    std::fs::write(empty.join("zero.png"), b"").unwrap();
    fail(none, &["zero.png", "0 bytes"]);

    // One unreadable file among good ones is skipped; a truncated image is an error.
    std::fs::write(data.join("zero.png"), b"").unwrap();
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed);
    assert!(logs(&events).contains("zero.png"));
    let uninterrupted = std::fs::read(data.join("p1.png")).unwrap();
    std::fs::write(data.join("p1.png"), &uninterrupted[..uninterrupted.len() / 2]).unwrap();
    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    fail(process, &["p1.png", "cut off"]);
}

#[test]
fn samples_are_written_and_do_not_change_the_training() {
    use aitk_common::job::sample::SampleItem;
    let plain = tempfile::tempdir().unwrap();
    assert_eq!(run_spec(&spec(trainer(plain.path(), 4))).0, Outcome::Completed);
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 4);
    process.train.disable_sampling = false;
    process.trigger_word = None;
    process.sample.sample_every = Some(2);
    process.sample.width = 64;
    process.sample.height = 64;
    process.sample.sample_steps = 2;
    process.sample.format = "png".into();
    process.sample.samples = vec![
        SampleItem {
            prompt: "a circle --m 0.5".into(),
            ..SampleItem::default()
        },
        SampleItem {
            prompt: "a square".into(),
            ..SampleItem::default()
        },
    ];
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let mut steps = Vec::new();
    for event in &events {
        let ChildEvent::Artifact {
            kind,
            path,
            name,
            step,
            index,
        } = event
        else {
            continue;
        };
        if kind == "sample" {
            assert!(path.is_file() && name.starts_with("tiny/samples/"), "{name}");
            assert!(
                name.ends_with(&format!("__{:09}_{}.png", step.unwrap(), index.unwrap())),
                "{name}"
            );
            steps.push((step.unwrap(), index.unwrap()));
        }
    }
    assert_eq!(steps, [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]);
    assert_eq!(saved_lora(dir.path()), saved_lora(plain.path()));
}
