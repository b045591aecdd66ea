//! Trainings with `learnable_snr_gos`.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use crate::training::LEARNED_SNR_FILE;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::process::TrainerProcess;
use serde_json::{Value, json};
use std::path::Path;

fn learning(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.train.learnable_snr_gos = true;
    process
}

fn run(process: &TrainerProcess) -> Vec<ChildEvent> {
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    events
}

fn file(root: &Path) -> std::path::PathBuf {
    root.join("out/tiny").join(LEARNED_SNR_FILE)
}

fn learned(root: &Path) -> [f64; 4] {
    let file: Value = serde_json::from_slice(&std::fs::read(file(root)).unwrap()).unwrap();
    ["offset_1", "offset_2", "scale", "gamma"].map(|name| file[name].as_f64().unwrap())
}

#[test]
fn a_run_with_learned_weights_resumes_exactly() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut process = learning(whole.path(), 6);
    let events = run(&process);
    let is_file =
        |event: &ChildEvent| matches!(event, ChildEvent::Artifact { name, .. } if name.ends_with(LEARNED_SNR_FILE));
    assert!(events.iter().any(is_file));
    process.training_folder = Some(parts.path().join("out").display().to_string());
    let (outcome, first) = stop_at(&spec(process.clone()), 3);
    assert_eq!(outcome, Outcome::stopped());
    let second = run(&process);
    assert_eq!([losses(&first), losses(&second)].concat(), losses(&events));
    assert_eq!(saved_lora(parts.path()), saved_lora(whole.path()));
    assert_eq!(learned(parts.path()), learned(whole.path()));
    // Six updates of at most about 0.01 each.
    for (found, first) in learned(whole.path()).into_iter().zip([0.0, 0.777, 4.14, 2.03]) {
        assert!(found != first && (found - first).abs() < 0.08, "{found} {first}");
    }
}

#[test]
fn learned_weights_change_the_loss_and_take_the_place_of_others() {
    let with = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 3);
        change(&mut process);
        losses(&run(&process))
    };
    let own = with(&|process| process.train.learnable_snr_gos = true);
    let both = with(&|process| {
        process.train.learnable_snr_gos = true;
        process.train.min_snr_gamma = Some(5.0);
    });
    assert_eq!(own, both);
    let plain = with(&|_| {});
    assert!(
        own.iter().zip(&plain).all(|(a, b)| (a / b - 1.0).abs() > 1e-3),
        "{own:?} {plain:?}"
    );
}

#[test]
fn numbers_of_an_earlier_run_are_read_from_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = learning(dir.path(), 1);
    let first = losses(&run(&process));
    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    std::fs::create_dir_all(dir.path().join("out/tiny")).unwrap();
    let other = json!({"offset_1": 1.0, "offset_2": 1.0, "scale": 1.0, "gamma": 0.5});
    std::fs::write(file(dir.path()), other.to_string()).unwrap();
    let events = run(&process);
    assert!(logs(&events).contains(LEARNED_SNR_FILE), "{}", logs(&events));
    assert_ne!(losses(&events), first);
    assert!((learned(dir.path())[3] - 0.5).abs() < 0.02);

    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    std::fs::create_dir_all(dir.path().join("out/tiny")).unwrap();
    std::fs::write(file(dir.path()), "{}").unwrap();
    match run_spec(&spec(process.clone())).0 {
        Outcome::Failed { message, .. } => assert!(message.contains("remove it to start anew"), "{message}"),
        other => panic!("{other:?}"),
    }
    process.train.learnable_snr_gos = false;
    run(&process);
}
