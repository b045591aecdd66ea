//! Compares a whole job, from image files to the LoRA, with `tests/reference/make_replay.py`, which computes it with
//! Pillow, diffusers and peft in float64 from the documented rules.

use super::tests::{logs, losses, run_spec, spec, trainer};
use crate::testing::{fixtures, gap, largest};
use aitk_common::attempt::Outcome;
use aitk_common::job::values::OneOrMany;
use candle_core::Device;
use serde_json::Value;
use std::path::Path;

fn replay(name: &str) -> std::path::PathBuf {
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

#[test]
fn a_whole_job_matches_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 14);
    let data = dir.path().join("images");
    std::fs::create_dir(&data).unwrap();
    for entry in std::fs::read_dir(replay("data")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, data.join(path.file_name().unwrap())).unwrap();
    }
    process.datasets[0].folder_path = Some(data.display().to_string());
    process.datasets[0].resolution = OneOrMany(vec![64]);
    process.datasets[0].shuffle_tokens = false;
    let (outcome, events) = run_spec(&spec(process));
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
