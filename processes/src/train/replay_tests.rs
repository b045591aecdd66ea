//! Compares a whole job, from image files to the LoRA, with `tests/reference/make_replay.py`, which computes it with
//! Pillow, diffusers and peft in float64 from the documented rules.

use super::tests::{logs, losses, run_spec, spec, trainer};
use crate::testing::{fixtures, gap, largest, runs_all_cases, sampled_cases};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::train::{GuidanceLossSchedule, LossType};
use aitk_common::job::values::{FloatOrRange, OneOrMany};
use candle_core::Device;
use serde_json::Value;
use std::path::Path;

pub(super) fn replay(name: &str) -> std::path::PathBuf {
    fixtures().join("replay").join(name)
}

/// The latent of image `stem` in the run's cache.
fn cached_latent(data: &Path, stem: &str) -> candle_core::Tensor {
    let entries = std::fs::read_dir(data.join("_latent_cache")).unwrap();
    let prefix = format!("{stem}_");
    let of = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().starts_with(&prefix);
    let file = entries.map(Result::unwrap).find(of).unwrap();
    candle_core::safetensors::load(file.path(), &Device::Cpu).unwrap()["latent"].clone()
}

/// The training that the reference replays, on a copy of its images in `root/images`.
pub(super) fn replayed(root: &Path) -> TrainerProcess {
    let mut process = trainer(root, 14);
    let data = root.join("images");
    std::fs::create_dir(&data).unwrap();
    for entry in std::fs::read_dir(replay("data")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, data.join(path.file_name().unwrap())).unwrap();
    }
    process.datasets[0].folder_path = Some(data.display().to_string());
    process.datasets[0].resolution = OneOrMany(vec![64]);
    process.datasets[0].shuffle_tokens = false;
    process
}

/// The number of steps that are compared with those of a reference.
fn compared_steps() -> u64 {
    if runs_all_cases() { 14 } else { 3 }
}

/// One value of the metrics of each step.
fn values(events: &[ChildEvent], name: &str) -> Vec<f64> {
    let value = |event: &ChildEvent| match event {
        ChildEvent::Metrics { values, .. } => values.get(name).copied(),
        _ => None,
    };
    events.iter().filter_map(value).collect()
}

/// The trainings with a preservation loss, with their losses and preservation losses in each step.
fn preserving(name: &str, root: &Path) -> (TrainerProcess, [Vec<f64>; 2]) {
    let report: Value = serde_json::from_slice(&std::fs::read(replay("preservation.json")).unwrap()).unwrap();
    let numbers = |key: &str| serde_json::from_value(report[name][key].clone()).unwrap();
    let mut process = replayed(root);
    process.trigger_word = Some("zorb".into());
    let (train, multiplier) = (&mut process.train, report[name]["multiplier"].as_f64().unwrap());
    match name {
        "class" => {
            train.diff_output_preservation = true;
            train.diff_output_preservation_class = "a dog".into();
            train.diff_output_preservation_multiplier = multiplier;
        }
        _ => {
            train.blank_prompt_preservation = true;
            train.blank_prompt_preservation_multiplier = multiplier;
        }
    }
    (process, [numbers("losses"), numbers("preserved")])
}

#[test]
fn preservation_losses_match_the_reference() {
    for (name, cached) in sampled_cases(vec![("class", true), ("blank", false)]) {
        let dir = tempfile::tempdir().unwrap();
        let (mut process, [expected_losses, preserved]) = preserving(name, dir.path());
        process.train.cache_text_embeddings = cached;
        process.train.steps = compared_steps();
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let (loss, own) = (losses(&events), values(&events, "loss/preservation"));
        let normal = values(&events, "loss/normal");
        assert_eq!(loss.len() as u64, compared_steps());
        for step in 0..loss.len() {
            assert!((loss[step] - normal[step] - own[step]).abs() < 1e-6);
            let difference = (loss[step] / expected_losses[step] - 1.0).abs();
            assert!(
                difference < 1e-5,
                "{name}, step {step}: the loss differs by {difference:.1e}"
            );
            // A difference of predictions that are nearly equal: rounding counts for more.
            let difference = (own[step] - preserved[step]).abs();
            assert!(difference < 1e-5, "{name}, step {step}: off by {difference:.1e}");
        }
        assert_eq!(own[0], 0.0, "a new adapter changes nothing");
    }
}

#[test]
fn a_preserved_class_changes_less() {
    if crate::testing::skips_long_tests() {
        return;
    }
    let largest_loss = |multiplier: f64| {
        let dir = tempfile::tempdir().unwrap();
        let (mut process, _) = preserving("class", dir.path());
        process.train.diff_output_preservation_multiplier = multiplier;
        process.train.steps = 7;
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        values(&events, "loss/preservation").into_iter().fold(0.0, f64::max) / multiplier
    };
    let (hardly, much) = (largest_loss(1e-6), largest_loss(30.0));
    assert!(much < 0.5 * hardly, "{much}, not less than half of {hardly}");
}

/// The trainings of `make_train_options.py`.
fn with_options(name: &str, root: &Path) -> TrainerProcess {
    let mut process = replayed(root);
    let train = &mut process.train;
    match name {
        "masked" => {
            train.inverted_mask_prior = true;
            train.inverted_mask_prior_multiplier = 0.7;
            process.datasets[0].mask_path = Some(replay("masks").display().to_string());
        }
        "guidance" => {
            train.do_guidance_loss = true;
            train.guidance_loss_target = FloatOrRange::Range([1.5, 4.0]);
            train.guidance_loss_schedule = GuidanceLossSchedule::Sigma;
            train.do_guidance_loss_cfg_zero = true;
            train.unconditional_prompt = "blurry".into();
            train.do_differential_guidance = true;
            train.differential_guidance_scale = 2.0;
            train.loss_type = LossType::PseudoHuber;
        }
        "divergence" => {
            train.do_prior_divergence = true;
            train.max_loss = Some(1.27);
        }
        "regularised" => {
            train.target_norm_std = true;
            train.target_norm_std_value = 0.8;
            process.datasets[0].prior_reg = true;
        }
        _ => {
            train.noise_multiplier = 1.1;
            train.dynamic_noise_offset = true;
            train.random_noise_shift = 0.1;
            train.random_noise_multiplier = 0.2;
            train.do_signal_correction_noise = true;
            train.signal_correction_noise_scale = 0.3;
            train.do_batch_noise_correction = true;
            train.batch_noise_correction_scale = 0.2;
            train.latent_multiplier = 0.9;
            train.standardize_latents = true;
        }
    }
    process
}

#[test]
fn jobs_with_options_of_the_loss_match_the_reference() {
    let report: Value = serde_json::from_slice(&std::fs::read(replay("options.json")).unwrap()).unwrap();
    // Text encoders that stay, and captions that are encoded before the training.
    let cases = [false, true].into_iter().flat_map(|cached| {
        let options = report.as_object().unwrap().iter();
        options.map(move |(name, expected)| (cached, name, expected))
    });
    for (cached, name, expected) in sampled_cases(cases.collect()) {
        let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_options(name, dir.path());
        process.train.cache_text_embeddings = cached;
        process.train.steps = compared_steps();
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let found = losses(&events);
        assert_eq!(found.len() as u64, compared_steps().min(expected.len() as u64));
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let difference = (found / expected - 1.0).abs();
            assert!(
                difference < 1e-4,
                "{name}, step {step}: a loss of {found}, not {expected}"
            );
        }
    }
}

#[test]
fn a_whole_job_matches_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("images");
    let (outcome, events) = run_spec(&spec(replayed(dir.path())));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));

    let report: Value = serde_json::from_slice(&std::fs::read(replay("expected.json")).unwrap()).unwrap();
    let expected = candle_core::safetensors::load(replay("expected.safetensors"), &Device::Cpu).unwrap();
    // Inputs.
    let mut images = 0;
    for (name, latent) in &expected {
        let Some(stem) = name.strip_prefix("latent/") else {
            continue;
        };
        let difference = gap(&cached_latent(&data, stem), latent) / largest(latent);
        assert!(difference < 1e-5, "the latent of {stem} differs by {difference:.1e}");
        images += 1;
    }
    assert_eq!(images, 7);
    // Results.
    let expected_losses: Vec<f64> = serde_json::from_value(report["losses"].clone()).unwrap();
    let found = losses(&events);
    assert_eq!(found.len(), expected_losses.len());
    let difference = found
        .iter()
        .zip(&expected_losses)
        .map(|(a, b)| (a / b - 1.0).abs())
        .fold(0.0, f64::max);
    let lora = candle_core::safetensors::load(dir.path().join("out/tiny/tiny.safetensors"), &Device::Cpu).unwrap();
    let finals: Vec<_> = expected.keys().filter(|k| k.starts_with("final/")).collect();
    assert_eq!(lora.len(), finals.len());
    let worst = lora
        .iter()
        .map(|(name, t)| gap(t, &expected[&format!("final/{name}")]))
        .fold(0.0, f32::max);
    println!("losses differ by {difference:.1e}, weights by {worst:.1e}");
    assert!(difference < 1e-5, "a loss differs by {difference:.1e}");
    assert!(worst < 1e-4, "a weight differs by {worst:.1e}");
}
