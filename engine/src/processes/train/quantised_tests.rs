//! LoRAs on a quantised base model.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use crate::testing::chosen;
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::profile::MemoryProfile;
use std::path::Path;

const STEPS: u64 = 6;

fn quantised(root: &Path, qtype: &str) -> TrainerProcess {
    let mut process = trainer(root, STEPS);
    process.model.quantize = true;
    process.model.qtype = qtype.into();
    process.model.qtype_te = qtype.into();
    process
}

fn train(process: TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

#[test]
fn losses_on_a_quantised_base_are_close_to_those_on_the_full_one() {
    let whole = tempfile::tempdir().unwrap();
    let expected = train(trainer(whole.path(), STEPS));
    assert_eq!(expected.len() as u64, STEPS);
    for (qtype, bound) in chosen(vec![("nf4", 0.1), ("qfloat8", 0.03), ("int8", 0.01), ("q8_0", 0.01)]) {
        let dir = tempfile::tempdir().unwrap();
        let found = train(quantised(dir.path(), qtype));
        assert_ne!(found, expected, "{qtype}");
        for (found, expected) in found.iter().zip(&expected) {
            let difference = (found / expected - 1.0).abs();
            assert!(
                difference < bound,
                "{qtype}: a loss of {found}, {expected} on the full-precision base"
            );
        }
    }
}

/// On a GPU, and so in portable mode, a profile keeps a share of the quantised layers in host memory.
#[test]
fn offloaded_quantised_layers_train_the_same() {
    for qtype in chosen(vec!["q4_k", "qfloat8", "nf4", "int8"]) {
        let train = |profile: MemoryProfile| {
            let dir = tempfile::tempdir().unwrap();
            let mut spec = spec(quantised(dir.path(), qtype));
            spec.device = DeviceRef::PORTABLE_CPU;
            spec.profile = profile;
            let (outcome, events) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
            losses(&events)
        };
        let resident = train(MemoryProfile::FullGpu);
        for profile in [MemoryProfile::GpuPoor, MemoryProfile::Extreme] {
            for (found, expected) in train(profile).iter().zip(&resident) {
                assert!(
                    (found / expected - 1.0).abs() < 1e-4,
                    "{qtype}, {profile:?}: {found}, {expected}"
                );
            }
        }
    }
}

#[test]
fn a_run_on_a_quantised_base_resumes_exactly() {
    let (uninterrupted, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(quantised(uninterrupted.path(), "nf4"));
    let spec = spec(quantised(stopped.path(), "nf4"));
    let (outcome, events) = stop_at(&spec, STEPS / 2);
    assert_eq!(outcome, Outcome::stopped(), "{}", logs(&events));
    assert_eq!(run_spec(&spec).0, Outcome::Completed);
    assert!(
        saved_lora(uninterrupted.path()) == saved_lora(stopped.path()),
        "the LoRAs differ"
    );
}
