//! What a run keeps of its steps is the same whether it was interrupted or not, here and elsewhere.

use super::tests::{go, losses, spec, stop_at, trainer};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::JobSpec;
use aitk_common::step_metrics::{LOG_FILE, METRICS_FILE, PLOT_FILE, StepMetrics, read};
use std::fs::File;
use std::path::Path;

fn metrics(root: &Path) -> Vec<StepMetrics> {
    read(File::open(root.join("out/tiny").join(METRICS_FILE)).unwrap()).unwrap()
}

fn curve(root: &Path) -> Vec<u8> {
    std::fs::read(root.join("out/tiny").join(PLOT_FILE)).unwrap()
}

#[test]
fn an_interrupted_run_has_the_steps_and_the_curve_of_one_that_was_not() {
    let straight = tempfile::tempdir().unwrap();
    let (outcome, events) = go(&spec(trainer(straight.path(), 9)));
    assert_eq!(outcome, Outcome::Completed);
    let whole = metrics(straight.path());
    assert_eq!(
        whole.iter().map(|one| one.step).collect::<Vec<_>>(),
        (1..=9).collect::<Vec<_>>()
    );
    let told: Vec<f64> = whole.iter().filter_map(StepMetrics::loss).collect();
    assert_eq!(told, losses(&events));
    assert!(
        whole
            .iter()
            .all(|one| one.values["lr"] > 0.0 && !one.time.is_empty() && one.seconds.is_some())
    );
    let plots = |events: &[ChildEvent]| {
        let plot = |event: &&ChildEvent| matches!(event, ChildEvent::Artifact { kind, .. } if kind == "plot");
        events.iter().filter(plot).count()
    };
    assert_eq!(plots(&events), 3, "at the saves of steps 4 and 8, and at the end");

    // Stopped within, and gone on with in the same folder.
    let broken = tempfile::tempdir().unwrap();
    let process = trainer(broken.path(), 9);
    stop_at(&spec(process.clone()), 6);
    assert_eq!(metrics(broken.path()).len(), 6);
    assert_eq!(go(&spec(process)).0, Outcome::Completed);
    let losses_of = |root: &Path| metrics(root).iter().filter_map(StepMetrics::loss).collect::<Vec<_>>();
    assert_eq!(losses_of(broken.path()), told);
    assert_eq!(curve(broken.path()), curve(straight.path()));
    let log = std::fs::read_to_string(broken.path().join("out/tiny").join(LOG_FILE)).unwrap();
    for expected in [
        "step 6/9  loss ",
        "stopped after step 6",
        "going on from step 6",
        "step 7/9  loss ",
        "completed",
    ] {
        assert!(log.contains(expected), "{expected}: {log}");
    }

    // On another machine, from an earlier checkpoint alone.
    let other = tempfile::tempdir().unwrap();
    let mut elsewhere = spec(trainer(straight.path(), 9));
    // Staged where they lie: a job that is not local reads its inputs only.
    let job: JobSpec = serde_json::from_value(elsewhere.job.clone()).unwrap();
    elsewhere.inputs = (job.inputs().into_iter())
        .map(|input| (input.config_path.clone(), input.config_path.into()))
        .collect();
    elsewhere.output_root = Some(other.path().join("out"));
    elsewhere.resume_from = Some(straight.path().join("out/tiny/.aitk/checkpoints/step_000000008"));
    assert_eq!(go(&elsewhere).0, Outcome::Completed);
    assert_eq!(losses_of(other.path()), told);
    assert_eq!(curve(other.path()), curve(straight.path()));
}

#[test]
fn log_every_decides_what_is_told_and_not_what_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = trainer(folder.path(), 7);
    process.logging.log_every = Some(3);
    let (_, events) = go(&spec(process));
    let told: Vec<u64> = events
        .iter()
        .filter_map(|event| match event {
            ChildEvent::Metrics { step, values } => {
                assert!(values["seconds_per_step"] > 0.0);
                Some(*step)
            }
            _ => None,
        })
        .collect();
    assert_eq!(told, [3, 6, 7]);
    assert_eq!(metrics(folder.path()).len(), 7);
}
