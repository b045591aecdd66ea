//! Runs that are interrupted, killed or moved to another machine, and what they find in their folders.

use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use super::transformer_test_runs::tensors;
use crate::adapters::{AdapterFile, safetensors_bytes};
use crate::families::saved_step;
use crate::testing::{gap, in_own_folder};
use crate::{StopSignal, run};
use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
use aitk_common::job::network::NetworkType;
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{Device, Tensor};
use std::path::Path;

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
    impl crate::EventSink for StopInTraining {
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
    impl crate::EventSink for Watch {
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
        logs(&events).contains("step 5")
            && logs(&events).contains("fresh optimizer")
            && logs(&events).contains("optimizer.pt of ai-toolkit is not read"),
        "{}",
        logs(&events)
    );
    assert_eq!(losses(&events).len(), 3);
}

/// Of an older save only the header is read, so that damaged numbers of it do not matter. A newest save with such numbers gives way to the
/// one before it.
#[test]
fn only_the_newest_save_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 6);
    process.save.save_every = Some(2);
    process.save.max_step_saves_to_keep = 3;
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    for (damaged, resumed) in [(2, 4), (4, 2)] {
        let copy = tempfile::tempdir().unwrap();
        process.training_folder = Some(copy.path().display().to_string());
        let folder = copy.path().join("tiny");
        std::fs::create_dir(&folder).unwrap();
        for step in [2, 4] {
            let name = format!("tiny_{step:09}.safetensors");
            let path = folder.join(&name);
            std::fs::copy(dir.path().join("out/tiny").join(&name), &path).unwrap();
            if step != damaged {
                continue;
            }
            let metadata = AdapterFile::open(&path).unwrap().metadata;
            let mut saved = tensors(&path);
            let alpha = saved.iter_mut().find(|(name, _)| name.ends_with(".alpha")).unwrap().1;
            *alpha = Tensor::new(f32::INFINITY, &Device::Cpu).unwrap();
            std::fs::write(&path, safetensors_bytes(&saved, &metadata).unwrap()).unwrap();
        }
        let (_, events) = stop_at(&spec(process.clone()), 1);
        let logs = logs(&events);
        assert!(
            logs.contains(&format!("(step {resumed}), with a fresh optimizer")),
            "{logs}"
        );
        let skips = logs.contains("skipping a save that cannot be read");
        assert_eq!(skips, damaged > resumed, "{logs}");
    }
}

/// Weights that are not finite make every later loss so. A LoRA to start from that has some is refused, and a newest save with some gives way.
#[test]
fn weights_that_are_not_finite_are_not_trained_further() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 3);
    process.save.save_every = Some(1);
    process.save.max_step_saves_to_keep = 3;
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    let (copy, name) = (tempfile::tempdir().unwrap(), "tiny_000000002.safetensors");
    let folder = copy.path().join("tiny");
    std::fs::create_dir(&folder).unwrap();
    for file in ["tiny_000000001.safetensors", name] {
        std::fs::copy(dir.path().join("out/tiny").join(file), folder.join(file)).unwrap();
    }
    let path = folder.join(name);
    let metadata = AdapterFile::open(&path).unwrap().metadata;
    let mut saved = tensors(&path);
    let weight = saved
        .iter_mut()
        .find(|(name, _)| name.ends_with("lora_up.weight"))
        .unwrap()
        .1;
    *weight = (weight.ones_like().unwrap() * f64::NAN).unwrap();
    // The run below saves its own step 2 there.
    let kept = copy.path().join("kept.safetensors");
    for path in [&path, &kept] {
        std::fs::write(path, safetensors_bytes(&saved, &metadata).unwrap()).unwrap();
    }

    process.training_folder = Some(copy.path().display().to_string());
    let (_, events) = stop_at(&spec(process.clone()), 1);
    let logs = logs(&events);
    assert!(logs.contains("(step 1), with a fresh optimizer"), "{logs}");
    assert!(
        logs.contains("lora_up.weight` has numbers that are not finite"),
        "{logs}"
    );

    let other = tempfile::tempdir().unwrap();
    let mut process = trainer(other.path(), 1);
    process.network.as_mut().unwrap().pretrained_lora_path = Some(kept.display().to_string());
    let Outcome::Failed { cause, message } = run_spec(&spec(process)).0 else {
        panic!("it was trained");
    };
    assert_eq!(cause, FailureCause::BadInput);
    assert!(
        message.starts_with("network.pretrained_lora_path: ") && message.contains("not finite"),
        "{message}"
    );
}

#[test]
fn a_run_that_started_at_a_step_resumes_where_it_was_interrupted() {
    let at_step = |root: &Path| {
        let mut process = trainer(root, 6);
        process.train.start_step = Some(1);
        process
    };
    let (whole, events) = check_resumption(&at_step);
    assert_eq!(losses(&events).len(), 5);
    // Another step is a wish to start there.
    let mut process = at_step(whole.path());
    (process.train.start_step, process.train.steps) = (Some(4), 7);
    let (_, events) = run_spec(&spec(process));
    assert_eq!(losses(&events).len(), 3);
    assert!(
        logs(&events).contains("as if they were those of step 4"),
        "{}",
        logs(&events)
    );
}

/// A checkpoint of a later step, of the training before, is neither the newest one nor that of the last step.
#[test]
fn a_run_that_started_at_an_earlier_step_resumes_from_its_own_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    process.train.start_step = Some(2);
    let (outcome, events) = stop_at(&spec(process.clone()), 3);
    assert_eq!(outcome, Outcome::stopped(), "{}", logs(&events));
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("resuming from step 3"), "{}", logs(&events));
    assert_eq!(losses(&events).len(), 5);

    // It ends at the step of a checkpoint that is there.
    process.train.start_step = Some(6);
    let (_, events) = run_spec(&spec(process.clone()));
    assert_eq!(losses(&events).len(), 2, "{}", logs(&events));
    process.train.steps = 9;
    let (_, events) = run_spec(&spec(process));
    assert_eq!(losses(&events).len(), 1, "{}", logs(&events));
}

/// Its last files say which step their weights are of, and no checkpoint says another one.
#[test]
fn a_run_whose_steps_were_lowered_ends_at_the_step_that_it_reached() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    assert_eq!(stop_at(&spec(process.clone()), 5).0, Outcome::stopped());
    process.train.steps = 3;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let out = dir.path().join("out/tiny");
    assert_eq!(saved_step(&out.join("tiny.safetensors")).unwrap(), Some(5));
    assert!(!out.join(".aitk/checkpoints/step_000000003").exists());
    process.train.steps = 8;
    let (_, events) = run_spec(&spec(process));
    assert_eq!(losses(&events).len(), 3, "{}", logs(&events));
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
    assert!(logs(&events).contains("another alpha / rank"), "{}", logs(&events));
}

#[test]
fn a_save_of_another_network_is_an_error_that_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    stop_at(&spec(process.clone()), 5);
    process.network.as_mut().unwrap().kind = NetworkType::Loha;
    let (outcome, events) = run_spec(&spec(process));
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}: {}", logs(&events));
    };
    assert_eq!(cause, FailureCause::BadInput);
    for part in [
        "has a LoRA of it, and this job trains a LoHa",
        "newest save of the run folder",
        "config.name",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

/// Neither starts a run with the weights of a checkpoint at step 0, nor one beside the checkpoints of later steps.
#[test]
fn without_a_save_a_checkpoint_that_does_not_fit_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    process.train.optimizer = OptimizerName::Adafactor;
    let (outcome, events) = stop_at(&spec(process.clone()), 3);
    assert_eq!(outcome, Outcome::stopped(), "{}", logs(&events));
    std::fs::remove_file(dir.path().join("out/tiny/tiny_000000003.safetensors")).unwrap();
    // With it the state has other tensors.
    process.train.optimizer_params.insert("beta1".into(), 0.9.into());
    let (outcome, events) = run_spec(&spec(process.clone()));
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}: {}", logs(&events));
    };
    assert_eq!(cause, FailureCause::BadInput);
    for part in [
        "checkpoint of step 3",
        "does not fit this config",
        "there is no save",
        "config.name",
    ] {
        assert!(message.contains(part), "{message}");
    }
    process.train.optimizer_params.clear();
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert_eq!(losses(&events).len(), 5);
}

#[test]
fn an_average_that_is_turned_on_later_starts_with_the_weights_of_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 8);
    stop_at(&spec(process.clone()), 3);
    let before = tensors(&dir.path().join("out/tiny/tiny_000000003.safetensors"));
    process.train.ema_config.use_ema = true;
    // The weights stay what they are.
    process.train.lr = 0.0;
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let average = tensors(&dir.path().join("out/tiny/tiny.safetensors"));
    assert!(before.keys().eq(average.keys()));
    for (name, tensor) in &before {
        assert_eq!(gap(tensor, &average[name]), 0.0, "{name}");
    }
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
