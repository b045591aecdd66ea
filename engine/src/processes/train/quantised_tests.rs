//! LoRAs on a base whose weights are quantised.

use super::tests::{go, logs, lora, losses, spec, stop_at, trainer};
use aitk_common::attempt::Outcome;
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

fn quantised(root: &Path, qtype: &str) -> TrainerProcess {
    let mut process = trainer(root, 12);
    process.model.quantize = true;
    process.model.qtype = qtype.into();
    process.model.qtype_te = qtype.into();
    process
}

fn train(process: TrainerProcess) -> Vec<f64> {
    let (outcome, events) = go(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

#[test]
fn a_lora_learns_on_a_quantised_base_what_it_learns_on_the_whole_one() {
    let whole = tempfile::tempdir().unwrap();
    let expected = train(trainer(whole.path(), 12));
    assert_eq!(expected.len(), 12);
    for (qtype, bound) in [("nf4", 0.1), ("qfloat8", 0.03), ("int8", 0.01), ("q8_0", 0.01)] {
        let dir = tempfile::tempdir().unwrap();
        let found = train(quantised(dir.path(), qtype));
        assert_ne!(found, expected, "{qtype}");
        for (found, expected) in found.iter().zip(&expected) {
            let apart = (found / expected - 1.0).abs();
            assert!(
                apart < bound,
                "{qtype}: a loss of {found}, {expected} on the whole base"
            );
        }
    }
}

#[test]
fn it_goes_on_bit_for_bit_where_it_stopped() {
    let (quiet, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(quantised(quiet.path(), "nf4"));
    let spec = spec(quantised(stopped.path(), "nf4"));
    let (outcome, events) = stop_at(&spec, 6);
    assert_eq!(outcome, Outcome::stopped(), "{}", logs(&events));
    assert_eq!(go(&spec).0, Outcome::Completed);
    assert!(lora(quiet.path()) == lora(stopped.path()), "the LoRAs differ");
}
