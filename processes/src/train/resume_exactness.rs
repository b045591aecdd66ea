//! Compares interrupted trainings with uninterrupted ones, for tests.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at};
use super::transformer_test_runs::complete;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

/// A run that is stopped after three steps and continues from its checkpoint has the losses of a run without a stop and ends with its
/// bytes. Returns the folder and the events of the run without a stop. `process`: the training in a folder.
pub(super) fn check_resumption(process: &dyn Fn(&Path) -> TrainerProcess) -> (tempfile::TempDir, Vec<ChildEvent>) {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let events = complete(process(whole.path()));
    let expected = losses(&events);
    assert!(expected.iter().all(|loss| loss.is_finite()), "{expected:?}");
    let interrupted = spec(process(parts.path()));
    let (outcome, first) = stop_at(&interrupted, 3);
    assert_eq!(outcome, Outcome::stopped());
    let (outcome, second) = run_spec(&interrupted);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
    assert!(!logs(&second).contains("changed since"), "{}", logs(&second));
    assert!(!losses(&first).is_empty() && !losses(&second).is_empty());
    assert_eq!([losses(&first), losses(&second)].concat(), expected);
    assert!(saved_lora(whole.path()) == saved_lora(parts.path()));
    (whole, events)
}
