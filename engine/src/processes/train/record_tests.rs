//! The recorded metrics of a run are the same with and without interruptions, also on another machine.

use super::tests::{losses, run_spec, spec, stop_at, trainer};
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
fn an_interrupted_run_has_the_metrics_and_the_plot_of_an_uninterrupted_one() {
    let uninterrupted = tempfile::tempdir().unwrap();
    let (outcome, events) = run_spec(&spec(trainer(uninterrupted.path(), 9)));
    assert_eq!(outcome, Outcome::Completed);
    let all = metrics(uninterrupted.path());
    assert_eq!(
        all.iter().map(|one| one.step).collect::<Vec<_>>(),
        (1..=9).collect::<Vec<_>>()
    );
    let reported: Vec<f64> = all.iter().filter_map(StepMetrics::loss).collect();
    assert_eq!(reported, losses(&events));
    assert!(
        all.iter()
            .all(|one| one.values["lr"] > 0.0 && !one.time.is_empty() && one.seconds.is_some())
    );
    let plots = |events: &[ChildEvent]| {
        let plot = |event: &&ChildEvent| matches!(event, ChildEvent::Artifact { kind, .. } if kind == "plot");
        events.iter().filter(plot).count()
    };
    assert_eq!(plots(&events), 3, "at the saves of steps 4 and 8, and at the end");

    // Interrupted and resumed in the same folder.
    let interrupted = tempfile::tempdir().unwrap();
    let process = trainer(interrupted.path(), 9);
    stop_at(&spec(process.clone()), 6);
    assert_eq!(metrics(interrupted.path()).len(), 6);
    assert_eq!(run_spec(&spec(process)).0, Outcome::Completed);
    let losses_of = |root: &Path| metrics(root).iter().filter_map(StepMetrics::loss).collect::<Vec<_>>();
    assert_eq!(losses_of(interrupted.path()), reported);
    assert_eq!(curve(interrupted.path()), curve(uninterrupted.path()));
    let log = std::fs::read_to_string(interrupted.path().join("out/tiny").join(LOG_FILE)).unwrap();
    for expected in [
        "step 6/9  loss ",
        "stopped after step 6",
        "resuming from step 6",
        "step 7/9  loss ",
        "completed",
    ] {
        assert!(log.contains(expected), "{expected}: {log}");
    }

    // On another machine, from an earlier checkpoint alone.
    let other = tempfile::tempdir().unwrap();
    let mut elsewhere = spec(trainer(uninterrupted.path(), 9));
    // The inputs are staged where they are, because a job that does not run in place reads only its inputs.
    let job: JobSpec = serde_json::from_value(elsewhere.job.clone()).unwrap();
    elsewhere.inputs = (job.inputs().into_iter())
        .map(|input| (input.config_path.clone(), input.config_path.into()))
        .collect();
    elsewhere.output_root = Some(other.path().join("out"));
    elsewhere.resume_from = Some(uninterrupted.path().join("out/tiny/.aitk/checkpoints/step_000000008"));
    assert_eq!(run_spec(&elsewhere).0, Outcome::Completed);
    assert_eq!(losses_of(other.path()), reported);
    assert_eq!(curve(other.path()), curve(uninterrupted.path()));
}

#[test]
fn log_every_decides_which_steps_are_emitted_but_all_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = trainer(folder.path(), 7);
    process.logging.log_every = Some(3);
    let (_, events) = run_spec(&spec(process));
    let reported: Vec<u64> = events
        .iter()
        .filter_map(|event| match event {
            ChildEvent::Metrics { step, values } => {
                assert!(values["seconds_per_step"] > 0.0);
                Some(*step)
            }
            _ => None,
        })
        .collect();
    assert_eq!(reported, [3, 6, 7]);
    assert_eq!(metrics(folder.path()).len(), 7);
}
