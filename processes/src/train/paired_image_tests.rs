//! Trainings on image pairs: their losses against `tests/reference/make_image_pairs.py`, and what they do with other options.

use super::replay_tests::{replay, replayed};
use super::slider_tests::image_pairs;
use super::tests::{images, logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use super::transformer_test_runs::flow_trainer;
use crate::testing::{fixtures, runs_all_cases, sampled_cases};
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::ArchName;
use aitk_common::job::dataset::GuidanceType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::values::Float;
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: u64 = 5;

fn run(process: &TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

/// Gives a training of the images in `root/data` their pairs: the same images in other colours.
fn add_pairs(process: &mut TrainerProcess, root: &Path, guidance: GuidanceType) {
    let folder = root.join("pairs");
    images(&folder);
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|suffix| suffix == "txt") {
            std::fs::remove_file(path).unwrap();
            continue;
        }
        let mut image = image::open(&path).unwrap().to_rgb8();
        for pixel in image.pixels_mut() {
            pixel.0 = [255 - pixel.0[0], pixel.0[2], pixel.0[1]];
        }
        image.save(&path).unwrap();
    }
    process.datasets[0].unconditional_path = Some(folder.display().to_string());
    process.datasets[0].guidance_type = guidance;
}

fn with_pairs(root: &Path, steps: u64, guidance: GuidanceType) -> TrainerProcess {
    let mut process = trainer(root, steps);
    add_pairs(&mut process, root, guidance);
    process
}

#[test]
fn losses_of_image_pairs_match_the_reference() {
    let expected = std::fs::read(replay("image_pairs.json")).unwrap();
    let expected: BTreeMap<String, Vec<f64>> = serde_json::from_slice(&expected).unwrap();
    assert_eq!(expected.len(), 5);
    for (name, expected) in sampled_cases(expected.iter().collect()) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = replayed(dir.path());
        process.datasets[0].unconditional_path = image_pairs(dir.path()).neg_folder;
        process.datasets[0].guidance_type = GuidanceType::from_name(name).unwrap();
        process.datasets[0].network_weight = Float(0.8);
        process.train.steps = if runs_all_cases() { STEPS } else { 3 };
        let found = run(&process);
        assert_eq!(found.len() as u64, process.train.steps);
        for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (found / expected - 1.0).abs();
            assert!(
                difference < 1e-4,
                "{name}, step {step}: {found} for {expected}, {difference:.1e}"
            );
        }
    }
}

#[test]
fn a_run_on_image_pairs_resumes_exactly() {
    for guidance in sampled_cases(vec![GuidanceType::Targeted, GuidanceType::Polarity]) {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut first = with_pairs(whole.path(), 5, guidance);
        first.network.as_mut().unwrap().dropout = Some(0.2);
        let expected = run(&first);
        first.training_folder = Some(parts.path().join("out").display().to_string());
        let (outcome, before) = stop_at(&spec(first.clone()), 2);
        assert_eq!(outcome, Outcome::stopped());
        assert_eq!([losses(&before), run(&first)].concat(), expected);
        assert_eq!(saved_lora(parts.path()), saved_lora(whole.path()));
    }
}

#[test]
fn pairs_train_in_portable_mode_and_without_checkpointing_too() {
    let train = |guidance: GuidanceType, is_portable: bool, is_checkpointed: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_pairs(dir.path(), 3, guidance);
        process.train.gradient_checkpointing = is_checkpointed;
        let mut spec = spec(process);
        if is_portable {
            spec.device = DeviceRef::PORTABLE_CPU;
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        losses(&events)
    };
    for guidance in sampled_cases(vec![GuidanceType::Polarity, GuidanceType::Targeted]) {
        let ours = train(guidance, false, true);
        for other in [train(guidance, true, true), train(guidance, false, false)] {
            for (a, b) in ours.iter().zip(&other) {
                assert!((a / b - 1.0).abs() < 1e-3, "{guidance}: {ours:?} and {other:?}");
            }
        }
    }
}

#[test]
fn flow_models_train_on_pairs_and_other_data_sets_beside_them() {
    let train = |guidance: Option<GuidanceType>| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flow_trainer(dir.path(), ArchName::Flux, &fixtures().join("tiny_flux"), 8);
        let usual = process.datasets[0].clone();
        if let Some(guidance) = guidance {
            add_pairs(&mut process, dir.path(), guidance);
        }
        process.datasets.push(usual);
        run(&process)
    };
    let plain = train(None);
    for guidance in [GuidanceType::TargetedFlow, GuidanceType::Polarity] {
        let losses = train(Some(guidance));
        assert!(losses.iter().all(|loss| loss.is_finite()), "{guidance}: {losses:?}");
        assert_ne!(losses, plain, "{guidance}");
    }
}

#[test]
fn whole_models_and_masks_are_trained_where_a_loss_uses_them() {
    for guidance in [GuidanceType::TargetedPolarity, GuidanceType::Direct, GuidanceType::Tnt] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_pairs(dir.path(), 2, guidance);
        process.network = None;
        process.train.lr = 1e-4;
        let losses = run(&process);
        assert!(losses.iter().all(|loss| loss.is_finite()), "{guidance}: {losses:?}");
    }
    let masked = |guidance: GuidanceType, is_masked: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_pairs(dir.path(), 1, guidance);
        if is_masked {
            let masks = dir.path().join("masks");
            std::fs::create_dir(&masks).unwrap();
            for entry in std::fs::read_dir(dir.path().join("data")).unwrap() {
                let path = entry.unwrap().path();
                if let Ok((width, height)) = image::image_dimensions(&path) {
                    let mask = image::GrayImage::from_fn(width, height, |x, _| image::Luma([(x * 5) as u8]));
                    mask.save(masks.join(path.file_name().unwrap())).unwrap();
                }
            }
            process.datasets[0].mask_path = Some(masks.display().to_string());
        }
        run(&process)
    };
    assert_ne!(masked(GuidanceType::Direct, true), masked(GuidanceType::Direct, false));
    // As in ai-toolkit.
    assert_eq!(
        masked(GuidanceType::Polarity, true),
        masked(GuidanceType::Polarity, false)
    );
}

#[test]
fn what_pairs_cannot_train_is_refused() {
    let message = |guidance: GuidanceType, change: &dyn Fn(&mut TrainerProcess, &Path)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_pairs(dir.path(), 1, guidance);
        change(&mut process, dir.path());
        match run_spec(&spec(process)).0 {
            Outcome::Failed { message, .. } => message,
            other => panic!("{other:?}"),
        }
    };
    let velocity = message(GuidanceType::Direct, &|process, _| process.model.is_v_pred = true);
    assert!(velocity.contains("datasets[0].guidance_type"), "{velocity}");
    let whole = message(GuidanceType::Targeted, &|process, _| process.network = None);
    assert!(whole.contains("needs a `network`"), "{whole}");
    let missing = message(GuidanceType::Polarity, &|_, root| {
        std::fs::remove_file(root.join("pairs/p1.png")).unwrap();
    });
    for part in [
        "1 of 5 images have no paired image",
        "p1.png",
        "datasets: unconditional_path",
    ] {
        assert!(missing.contains(part), "{part} in {missing}");
    }
}
