//! Trainings on control images and masks that are beside the images (`datasets[].controls`).

use super::kontext_tests::{cached_controls, kontext};
use super::tests::{logs, losses, run_spec, spec, trainer};
use super::transformer_test_runs::complete;
use super::{check_control_generator, preview};
use crate::testing::fixtures;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::controls::{ControlGeneratorSource, ControlType};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::values::OneOrMany;
use std::collections::BTreeMap;
use std::path::Path;

/// Copies the files of a folder into `_controls` of the data set, as files of this type.
fn copy_beside(root: &Path, folder: &str, kind: &str) {
    let beside = root.join("data/_controls");
    std::fs::create_dir_all(&beside).unwrap();
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|suffix| suffix == "png") {
            let stem = path.file_stem().unwrap().to_string_lossy();
            std::fs::copy(&path, beside.join(format!("{stem}.{kind}.png"))).unwrap();
        }
    }
}

#[test]
fn control_images_beside_their_images_train_as_those_of_a_folder() {
    let (folder, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = losses(&complete(kontext(folder.path(), 3)));
    let mut process = kontext(beside.path(), 3);
    copy_beside(beside.path(), "controls", "pose");
    process.datasets[0].control_path = OneOrMany(Vec::new());
    process.datasets[0].controls = OneOrMany(vec!["pose".into()]);
    let found = losses(&complete(process.clone()));
    // The VAE's noise depends on the name of the file.
    let close = found.iter().zip(&expected).all(|(a, b)| (a / b - 1.0).abs() < 0.005);
    assert!(close, "{found:?}, {expected:?}");
    let cached = cached_controls(&beside.path().join("data"));
    let names: Vec<&str> = cached.keys().map(String::as_str).collect();
    assert_eq!(names, ["p0", "p1", "p2", "p3", "p4"]);

    std::fs::remove_file(beside.path().join("data/_controls/p3.pose.png")).unwrap();
    let Outcome::Failed { message, .. } = run_spec(&spec(process)).0 else {
        panic!("a control image is missing");
    };
    for part in ["1 of 5 images", "p3.png", "p3.pose.jpg", "does not have the network"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn masks_beside_their_images_train_as_those_of_a_folder() {
    let of = |change: &dyn Fn(&Path, &mut aitk_common::job::dataset::DatasetConfig)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 3);
        let masks = dir.path().join("masks");
        std::fs::create_dir(&masks).unwrap();
        for i in 0..5u32 {
            let (width, height) = if i < 3 { (32, 32) } else { (48, 24) };
            let mask = image::GrayImage::from_fn(width, height, |x, _| image::Luma([(x * 5) as u8]));
            mask.save(masks.join(format!("p{i}.png"))).unwrap();
        }
        change(dir.path(), &mut process.datasets[0]);
        losses(&complete(process))
    };
    let expected = of(&|root, set| set.mask_path = Some(root.join("masks").display().to_string()));
    let found = of(&|root, set| {
        copy_beside(root, "masks", "mask");
        set.controls = OneOrMany(vec!["mask".into()]);
    });
    assert_eq!(found, expected);
    assert_ne!(of(&|_, _| {}), expected);
}

fn network(name: &str) -> Option<String> {
    let path = fixtures().join("control_generators").join(name);
    Some(path.display().to_string())
}

/// A training on depth maps and on edges of two images, which networks make.
fn generated(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = kontext(root, steps);
    for name in ["p2", "p3", "p4"] {
        std::fs::remove_file(root.join(format!("data/{name}.png"))).unwrap();
    }
    let set = &mut process.datasets[0];
    set.control_path = OneOrMany(Vec::new());
    (set.depth_estimator, set.line_detector) = (network("depth"), network("teed.safetensors"));
    let of = |kind: &str| {
        let mut set = set.clone();
        set.controls = OneOrMany(vec![kind.into()]);
        set
    };
    process.datasets = vec![of("depth"), of("line")];
    process
}

/// The files of a folder and their bytes.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    entries
        .map(|path| (name(&path), std::fs::read(&path).unwrap()))
        .collect()
}

fn made(events: &[ChildEvent]) -> bool {
    let phase = |event: &ChildEvent| matches!(event, ChildEvent::Phase { name } if name == "making control images");
    events.iter().any(phase)
}

#[test]
fn control_images_that_are_missing_are_made_once() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let events = complete(generated(root, 2));
    assert!(
        made(&events) && logs(&events).contains("making 2 control images of type `line`"),
        "{}",
        logs(&events)
    );
    let beside = root.join("data/_controls");
    let first = files(&beside);
    let names: Vec<&String> = first.keys().collect();
    assert_eq!(names, ["p0.depth.jpg", "p0.line.jpg", "p1.depth.jpg", "p1.line.jpg"]);
    for (name, bytes) in &first {
        let image = image::load_from_memory(bytes).unwrap().to_luma8();
        assert_eq!(image.dimensions(), (32, 32), "{name}");
        let (least, most) = image
            .pixels()
            .fold((255, 0), |(least, most), p| (p.0[0].min(least), p.0[0].max(most)));
        assert!(most > least, "{name}: {least} to {most}");
    }

    // The next run finds them, and those of ai-toolkit.
    std::fs::remove_file(beside.join("p0.line.jpg")).unwrap();
    image::GrayImage::new(32, 32).save(beside.join("p0.line.png")).unwrap();
    let mut again = generated(root, 2);
    again.training_folder = Some(root.join("again").display().to_string());
    let events = complete(again.clone());
    assert!(!made(&events));
    assert_eq!(files(&beside)["p1.depth.jpg"], first["p1.depth.jpg"]);

    // One that was removed is made again, with the same bytes.
    std::fs::remove_file(beside.join("p0.line.png")).unwrap();
    again.training_folder = Some(root.join("third").display().to_string());
    let events = complete(again);
    assert!(
        logs(&events).contains("making 1 control images of type `line`"),
        "{}",
        logs(&events)
    );
    assert_eq!(files(&beside), first);
}

#[test]
fn control_images_are_in_the_cache_of_a_worker_or_in_the_run_folder_where_the_images_cannot_be_changed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let generated = |root: &Path| {
        let mut process = generated(root, 1);
        process.datasets.truncate(1);
        process
    };
    let process = generated(root);
    let mut job = spec(process.clone());
    let derived = root.join("derived");
    let data = process.datasets[0].folder_path.clone().unwrap();
    job.derived.insert(data, derived.clone());
    let (outcome, events) = run_spec(&job);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(!root.join("data/_controls").exists());
    assert_eq!(files(&derived.join("_controls")).len(), 2);

    // A file in the place of the folder: nothing can be written there.
    std::fs::write(root.join("data/_controls"), b"").unwrap();
    let mut process = generated(root);
    process.training_folder = Some(root.join("again").display().to_string());
    let events = complete(process.clone());
    assert!(
        logs(&events).contains("cannot be written beside this image"),
        "{}",
        logs(&events)
    );
    let cached = root.join("again/tiny/.aitk/controls");
    assert_eq!(files(&cached).len(), 2);
    process.train.steps = 2;
    assert!(!made(&complete(process)));
}

#[test]
fn masks_that_are_missing_are_made_before_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut process = trainer(root, 2);
    let set = &mut process.datasets[0];
    set.controls = OneOrMany(vec!["sapiens2_mask".into()]);
    set.matting_model = network("masks/matting.safetensors");
    let beside = root.join("data/_controls");
    std::fs::create_dir(&beside).unwrap();
    let existing = image::GrayImage::from_pixel(32, 32, image::Luma([200]));
    existing.save(beside.join("p0.sapiens2_mask.jpg")).unwrap();
    let events = complete(process.clone());
    assert!(
        logs(&events).contains("making 4 control images of type `sapiens2_mask`"),
        "{}",
        logs(&events)
    );
    let first = files(&beside);
    let names: Vec<&str> = first.keys().map(String::as_str).collect();
    let of = |i: usize, suffix: &str| format!("p{i}.sapiens2_mask.{suffix}");
    let expected = [of(0, "jpg"), of(1, "png"), of(2, "png"), of(3, "png"), of(4, "png")];
    assert_eq!(names, expected);
    for name in &names[1..] {
        let image = image::load_from_memory(&first[*name]).unwrap().to_luma8();
        assert!(image.pixels().any(|p| p.0[0] != image.get_pixel(0, 0).0[0]), "{name}");
    }
    // They are the weights of the loss.
    let found = losses(&events);
    process.training_folder = Some(root.join("again").display().to_string());
    let events = complete(process.clone());
    assert!(!made(&events));
    assert_eq!(losses(&events), found);
    process.training_folder = Some(root.join("without").display().to_string());
    process.datasets[0].controls = OneOrMany(Vec::new());
    assert_ne!(losses(&complete(process.clone())), found);

    // On a worker they are in its cache.
    let worker = tempfile::tempdir().unwrap();
    let mut process = trainer(worker.path(), 1);
    process.datasets[0].controls = OneOrMany(vec!["sapiens2_mask".into()]);
    process.datasets[0].matting_model = network("masks/matting.safetensors");
    let mut job = spec(process.clone());
    let derived = worker.path().join("derived");
    let data = process.datasets[0].folder_path.clone().unwrap();
    job.derived.insert(data, derived.clone());
    let (outcome, events) = run_spec(&job);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert_eq!(files(&derived.join("_controls")).len(), 5);

    process.datasets[0].matting_model = None;
    let Outcome::Failed { message, .. } = run_spec(&spec(process)).0 else {
        panic!("no network makes the masks");
    };
    assert!(message.contains("`matting_model` names no network"), "{message}");
}

#[test]
fn networks_that_cannot_be_used_are_refused() {
    let refused = |change: fn(&mut TrainerProcess), expected: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = generated(dir.path(), 1);
        change(&mut process);
        let (outcome, events) = run_spec(&spec(process));
        let Outcome::Failed { message, .. } = outcome else {
            panic!("{outcome:?}");
        };
        assert!(message.contains(expected), "{message}");
        events
    };
    refused(
        |process| process.datasets[0].depth_estimator = network("teed.safetensors"),
        "datasets: depth_estimator",
    );
    refused(
        |process| process.datasets[1].line_detector = None,
        "`line_detector` names no network",
    );
    // An error in a data set comes before the first control image is made.
    let events = refused(
        |process| {
            let mut other = process.datasets[0].clone();
            other.folder_path = Some("/nowhere/at/all".into());
            process.datasets.push(other);
        },
        "/nowhere/at/all",
    );
    assert!(!made(&events));

    let check = |kind: ControlType, name: &str| {
        let path = network(name).unwrap();
        let source = ControlGeneratorSource {
            key: "datasets[1].line_detector".into(),
            kind,
            path: &path,
        };
        check_control_generator(&source, Path::new(&path)).map_err(|error| error.to_string())
    };
    check(ControlType::Line, "teed.safetensors").unwrap();
    check(ControlType::Depth, "depth").unwrap();
    check(ControlType::Mask, "masks/birefnet.safetensors").unwrap();
    check(ControlType::Sapiens2Mask, "masks/matting.safetensors").unwrap();
    let message = check(ControlType::Mask, "masks/matting.safetensors").unwrap_err();
    assert!(message.contains("a BiRefNet"), "{message}");
    let message = check(ControlType::Line, "networks.safetensors").unwrap_err();
    assert!(
        message.contains("datasets[1].line_detector") && message.contains("TEED"),
        "{message}"
    );
}

#[test]
fn a_preview_says_which_data_sets_have_all_of_their_control_images() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = kontext(dir.path(), 3);
    copy_beside(dir.path(), "controls", "depth");
    let set = &mut process.datasets[0];
    set.control_path = OneOrMany(Vec::new());
    set.controls = OneOrMany(vec!["depth".into()]);
    set.depth_estimator = Some("a/b".into());
    // A report for each resolution.
    set.resolution.0 = vec![32, 64];
    let mut lines = set.clone();
    (lines.controls, lines.line_detector) = (OneOrMany(vec!["line".into()]), Some("c/d".into()));
    let mut without_network = set.clone();
    without_network.depth_estimator = Some(String::new());
    process.datasets = vec![lines, without_network, process.datasets[0].clone()];
    let complete = |process: &TrainerProcess| {
        let job = serde_json::from_value(spec(process.clone()).job).unwrap();
        let seen = preview(&job, process, &BTreeMap::new());
        assert_eq!(seen.problems, [""; 0]);
        seen.complete_controls
    };
    assert_eq!(complete(&process), [(2, ControlType::Depth)]);
    process.datasets.remove(1);
    // A mask of each image, whose network is not needed either.
    copy_beside(dir.path(), "controls", "mask");
    let set = &mut process.datasets[1];
    (set.controls, set.background_remover) = (OneOrMany(vec!["depth".into(), "mask".into()]), Some("e/f".into()));
    assert_eq!(complete(&process), [(1, ControlType::Depth), (1, ControlType::Mask)]);
    std::fs::remove_file(dir.path().join("data/_controls/p2.mask.png")).unwrap();
    assert_eq!(complete(&process), [(1, ControlType::Depth)]);
    std::fs::remove_file(dir.path().join("data/_controls/p3.depth.png")).unwrap();
    assert_eq!(complete(&process), []);
}
