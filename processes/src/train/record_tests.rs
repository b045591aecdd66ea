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

/// The events of a file, as `(step, tags)`; the first two are the version and the start.
fn event_steps(file: &Path) -> Vec<(u64, usize)> {
    let bytes = std::fs::read(file).unwrap();
    let mut rest = bytes.as_slice();
    let mut records = Vec::new();
    while !rest.is_empty() {
        let length = usize::try_from(u64::from_le_bytes(rest[..8].try_into().unwrap())).unwrap();
        records.push(&rest[12..12 + length]);
        rest = &rest[16 + length..];
    }
    let contains = |record: &[u8], text: &[u8]| record.windows(text.len()).any(|part| part == text);
    assert!(contains(records[0], b"brain.Event:2"));
    let tags: [&[u8]; 2] = [b"\x04loss", b"\x02lr"];
    (records[2..].iter())
        // The step is the second field, after nine bytes of time, and small.
        .map(|record| {
            (
                u64::from(record[10]),
                tags.iter().filter(|tag| contains(record, tag)).count(),
            )
        })
        .collect()
}

fn event_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

#[test]
fn the_metrics_are_written_for_tensorboard() {
    let root = tempfile::tempdir().unwrap();
    let mut process = trainer(root.path(), 7);
    process.log_dir = Some(root.path().join("logs").display().to_string());
    stop_at(&spec(process.clone()), 4);
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    // A run without a step to do makes no file.
    assert_eq!(run_spec(&spec(process.clone())).0, Outcome::Completed);
    let folders = event_files(&root.path().join("logs"));
    let [folder] = folders.as_slice() else {
        panic!("one folder for the interrupted and the resumed run: {folders:?}");
    };
    let name = folder.file_name().unwrap().to_str().unwrap();
    assert!(
        name.starts_with("tiny_2") && name.len() == "tiny_20260101-000000".len(),
        "{name}"
    );
    let files = event_files(folder);
    let [first, second] = files.as_slice() else {
        panic!("a file for each start: {files:?}");
    };
    let both = |steps: std::ops::RangeInclusive<u64>| steps.map(|step| (step, 2)).collect::<Vec<_>>();
    assert_eq!(event_steps(first), both(1..=4));
    assert_eq!(event_steps(second), both(1..=7), "the whole curve");

    // The attempt of a job writes into its run folder alone.
    let other = tempfile::tempdir().unwrap();
    let mut job = spec(process.clone());
    job.output_root = Some(other.path().join("out"));
    let parsed: JobSpec = serde_json::from_value(job.job.clone()).unwrap();
    job.inputs = (parsed.inputs().into_iter())
        .map(|input| (input.config_path.clone(), input.config_path.into()))
        .collect();
    let (outcome, events) = run_spec(&job);
    assert_eq!(outcome, Outcome::Completed);
    assert_eq!(event_files(&root.path().join("logs")), folders);
    let file = other.path().join("out/tiny/tensorboard/events.out.tfevents.aitk");
    assert_eq!(event_steps(&file), both(1..=7));
    let is_upload = |event: &&ChildEvent| {
        matches!(event, ChildEvent::Artifact { kind, name, .. }
            if kind == "tensorboard" && name == "tiny/tensorboard/events.out.tfevents.aitk")
    };
    assert_eq!(
        events.iter().filter(is_upload).count(),
        2,
        "at the save of step 4, and at the end"
    );

    // A folder that cannot be made is a warning, and the training goes on.
    let file = root.path().join("file");
    std::fs::write(&file, b"").unwrap();
    process.log_dir = Some(file.display().to_string());
    std::fs::remove_dir_all(root.path().join("out")).unwrap();
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed);
    let warnings = (events.iter())
        .filter(|event| matches!(event, ChildEvent::Log { message, .. } if message.contains("cannot write metrics for TensorBoard")));
    assert_eq!(warnings.count(), 1);
}
