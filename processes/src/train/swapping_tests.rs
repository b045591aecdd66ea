//! Trainings with `do_paramiter_swapping`.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use super::transformer_test_runs::tensors;
use crate::testing::{gap, sampled_cases};
use aitk_common::attempt::Outcome;
use aitk_common::job::optimizer::OptimizerName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::profile::MemoryProfile;
use std::path::Path;

fn swapping(root: &Path, steps: u64, optimizer: OptimizerName) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.train.optimizer = optimizer;
    process.train.do_paramiter_swapping = true;
    process.train.paramiter_swapping_factor = 0.3;
    process
}

fn run(process: &TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

#[test]
fn a_run_that_swaps_parameters_resumes_exactly() {
    for optimizer in sampled_cases(vec![OptimizerName::Adafactor, OptimizerName::Automagic]) {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut process = swapping(whole.path(), 6, optimizer);
        process.train.gradient_accumulation = 2;
        let expected = run(&process);
        process.training_folder = Some(parts.path().join("out").display().to_string());
        let (outcome, first) = stop_at(&spec(process.clone()), 3);
        assert_eq!(outcome, Outcome::stopped());
        assert_eq!([losses(&first), run(&process)].concat(), expected);
        assert_eq!(saved_lora(parts.path()), saved_lora(whole.path()));
    }
}

/// The share of the numbers of a LoRA's `lora_up` that are not zero, as which all of them start.
fn share_of_changed(root: &Path) -> f64 {
    let saved = tensors(&root.join("out/tiny/tiny.safetensors"));
    let up = || saved.iter().filter(|(name, _)| name.contains("lora_up"));
    let count = |tensors: Vec<&candle_core::Tensor>| tensors.iter().map(|t| t.elem_count()).sum::<usize>() as f64;
    let changed = up().filter(|(_, t)| gap(t, &t.zeros_like().unwrap()) != 0.0);
    count(changed.map(|(_, t)| t).collect()) / count(up().map(|(_, t)| t).collect())
}

#[test]
fn one_step_changes_no_more_than_the_share() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = swapping(dir.path(), 1, OptimizerName::Adafactor);
    run(&process);
    let one = share_of_changed(dir.path());
    assert!(one > 0.0 && one < 0.6, "{one}");
    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    process.train.steps = 8;
    run(&process);
    let eight = share_of_changed(dir.path());
    assert!(eight > one, "{one} {eight}");
    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    process.train.do_paramiter_swapping = false;
    process.train.steps = 1;
    run(&process);
    assert_eq!(share_of_changed(dir.path()), 1.0);
}

#[test]
fn a_fused_step_trains_the_same_parameters() {
    let files = [false, true].map(|fused| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = swapping(dir.path(), 3, OptimizerName::Adafactor);
        process.network = None;
        let mut spec = spec(process);
        if fused {
            spec.profile = MemoryProfile::Extreme;
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        std::fs::read(dir.path().join("out/tiny/tiny.safetensors")).unwrap()
    });
    assert_eq!(files[0], files[1]);
}

#[test]
fn what_cannot_swap_is_refused() {
    let message = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = swapping(dir.path(), 1, OptimizerName::Adafactor);
        change(&mut process);
        match run_spec(&spec(process)).0 {
            Outcome::Failed { message, .. } => message,
            other => panic!("{other:?}"),
        }
    };
    assert!(message(&|process| process.train.optimizer = OptimizerName::AdamW).contains("train.optimizer"));
    assert!(message(&|process| process.train.gradient_accumulation_steps = 2).contains("gradient_accumulation"));
    assert!(message(&|process| process.train.paramiter_swapping_factor = 1e-6).contains("nothing would be trained"));
}
