//! Whole training runs on the tiny model.

use crate::testing::{attempt, fixtures};
use crate::{OutputRequests, StopSignal, run};
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

/// Calls `f` with the run of a process.
pub(super) fn with_run<T>(process: &TrainerProcess, f: impl FnOnce(&mut super::Run<'_>) -> T) -> T {
    let spec = spec(process.clone());
    let job = serde_json::from_value(spec.job.clone()).unwrap();
    let mut events: Vec<ChildEvent> = Vec::new();
    let mut cx = super::Context {
        spec: &spec,
        job: &job,
        events: &mut events,
        stop: &StopSignal::new(),
        requests: &OutputRequests::new(),
        log_file: Default::default(),
    };
    f(&mut super::Run::prepare(process, &mut cx).unwrap().unwrap())
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

impl crate::EventSink for StopAt {
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
    let is_expected =
        |message: &str| message.contains("3 steps in a row") && message.contains("learned nothing from them");
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

/// As in ai-toolkit: the images of `first_sample` are made at the beginning in any case, and replace no others.
#[test]
fn the_first_samples_are_made_beside_those_of_the_beginning() {
    use aitk_common::job::sample::{SampleConfig, SampleItem};
    let section = |prompts: &[&str]| SampleConfig {
        width: 64,
        height: 64,
        sample_steps: 1,
        samples: prompts
            .iter()
            .map(|prompt| SampleItem {
                prompt: (*prompt).to_owned(),
                ..SampleItem::default()
            })
            .collect(),
        ..SampleConfig::default()
    };
    let with_samples = |root: &Path| {
        let mut process = trainer(root, 2);
        process.train.disable_sampling = false;
        process.sample = section(&["a circle", "a square"]);
        process.first_sample = Some(section(&["a dog"]));
        process
    };
    // The steps and the indices of the images that exist at the end: different ones, because a coordinator keeps one of each.
    let made = |process: TrainerProcess| {
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let sample = |event: &ChildEvent| match event {
            ChildEvent::Artifact {
                kind,
                path,
                step,
                index,
                ..
            } if kind == "sample" && path.is_file() => Some((step.unwrap(), index.unwrap())),
            _ => None,
        };
        events.iter().filter_map(sample).collect::<Vec<_>>()
    };
    let with = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_samples(dir.path());
        change(&mut process);
        made(process)
    };
    assert_eq!(with(&|_| {}), [(0, 2), (0, 0), (0, 1), (2, 0), (2, 1)]);
    for forces in [false, true] {
        let skipping = with(&|process| {
            process.train.skip_first_sample = true;
            process.train.force_first_sample = forces;
        });
        assert_eq!(skipping, [(0, 2), (2, 0), (2, 1)]);
    }
    let from_1 = with(&|process| process.train.start_step = Some(1));
    assert_eq!(from_1, [(0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]);

    let dir = tempfile::tempdir().unwrap();
    let mut process = with_samples(dir.path());
    assert_eq!(stop_at(&spec(process.clone()), 1).0, Outcome::stopped());
    process.train.force_first_sample = true;
    assert_eq!(made(process), [(1, 0), (1, 1), (2, 0), (2, 1)]);
}
