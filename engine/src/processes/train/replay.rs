//! A whole job against `tests/reference/make_replay.py`: from image files to the LoRA, by Pillow, diffusers and peft in
//! float64, which make every input again from the rules in writing.

use super::tests::{go, logs, losses, spec, trainer};
use crate::testing::{fixtures, gap, largest};
use aitk_common::attempt::Outcome;
use aitk_common::job::values::OneOrMany;
use candle_core::Device;
use serde_json::Value;
use std::path::Path;

fn replay(name: &str) -> std::path::PathBuf {
    fixtures().join("replay").join(name)
}

/// The latent of `p<i>` that the run left beside its image.
fn cached(data: &Path, stem: &str) -> candle_core::Tensor {
    let entries = std::fs::read_dir(data.join("_latent_cache")).unwrap();
    let prefix = format!("{stem}_");
    let of = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().starts_with(&prefix);
    let file = entries.map(Result::unwrap).find(of).unwrap();
    candle_core::safetensors::load(file.path(), &Device::Cpu).unwrap()["latent"].clone()
}

#[test]
fn a_job_from_images_is_the_references() {
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
    let (outcome, events) = go(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));

    let report: Value = serde_json::from_slice(&std::fs::read(replay("expected.json")).unwrap()).unwrap();
    let want = candle_core::safetensors::load(replay("expected.safetensors"), &Device::Cpu).unwrap();
    // What goes in.
    let mut images = 0;
    for (name, latent) in &want {
        let Some(stem) = name.strip_prefix("latent/") else {
            continue;
        };
        let far = gap(&cached(&data, stem), latent) / largest(latent);
        assert!(far < 1e-5, "the latent of {stem} differs by {far:.1e}");
        images += 1;
    }
    assert_eq!(images, 7);
    // What comes out.
    let want_losses: Vec<f64> = serde_json::from_value(report["losses"].clone()).unwrap();
    let got = losses(&events);
    assert_eq!(got.len(), want_losses.len());
    let far = got
        .iter()
        .zip(&want_losses)
        .map(|(a, b)| (a / b - 1.0).abs())
        .fold(0.0, f64::max);
    let lora = candle_core::safetensors::load(dir.path().join("out/tiny/tiny.safetensors"), &Device::Cpu).unwrap();
    let finals: Vec<_> = want.keys().filter(|k| k.starts_with("final/")).collect();
    assert_eq!(lora.len(), finals.len());
    let worst = lora
        .iter()
        .map(|(name, t)| gap(t, &want[&format!("final/{name}")]))
        .fold(0.0, f32::max);
    println!("losses differ by {far:.1e}, weights by {worst:.1e}");
    assert!(far < 1e-5, "a loss differs by {far:.1e}");
    assert!(worst < 1e-4, "a weight differs by {worst:.1e}");
}
