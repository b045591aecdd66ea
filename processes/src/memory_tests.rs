//! A model generates the same images under every memory layout.

use super::tests::{generate_job, images, run_spec, spec};
use crate::image_io;
use crate::testing::{fixtures, quantised_folder, sampled_cases};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::plan::profile::MemoryProfile;

/// The pixels of one image, generated with these keys in the `model` section.
fn generate_pixels(model: &str, profile: MemoryProfile) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let lora = fixtures().join("pipelines/lora.safetensors");
    let yaml = generate_job(
        &dir.path().join("out"),
        &format!(", lora_path: {}{model}", lora.display()),
        "sampler: ddim, sample_steps: 4, width: 64, height: 40, neg: blurry, prompts: [a red circle --seed 3]",
    );
    let mut spec = spec(&yaml);
    spec.profile = profile;
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed);
    let image = image_io::open_rgb(&images(&events)[0].1).unwrap();
    image.into_raw()
}

#[test]
fn every_memory_layout_generates_the_same_image() {
    let expected = generate_pixels("", MemoryProfile::FullGpu);
    let layouts = MemoryProfile::ALL.map(|profile| ("", profile)).into_iter().chain([
        (", low_vram: true", MemoryProfile::FullGpu),
        (", layer_offloading: true", MemoryProfile::FullGpu),
        (
            ", layer_offloading: true, layer_offloading_transformer_percent: 0.3, layer_offloading_text_encoder_percent: 0",
            MemoryProfile::Balanced,
        ),
    ]);
    for (model, profile) in sampled_cases(layouts.collect()) {
        let found = generate_pixels(model, profile);
        let worst = found.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(
            worst <= Some(1) && found.len() == expected.len(),
            "{model} {profile:?}: {worst:?}"
        );
    }
}

/// Quantised layers stay in memory; other layers are streamed.
#[test]
fn a_quantised_model_generates_the_same_image_when_streamed() {
    let quantised = ", quantize: true, qtype: int8, quantize_te: false";
    let expected = generate_pixels(quantised, MemoryProfile::FullGpu);
    let found = generate_pixels(quantised, MemoryProfile::Extreme);
    let worst = found.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(worst <= Some(1), "{worst:?}");
}

/// A model that is quantised in its files; the log names its formats.
#[test]
fn a_model_quantised_in_its_files_generates_the_same_image_when_streamed() {
    let unets = [
        ("unet_comfy.gguf", "unet.gguf", "q"),
        ("unet_float8.safetensors", "model.safetensors", "float8"),
        ("unet_bitsandbytes.safetensors", "model.safetensors", "fp4, int8, nf4"),
    ];
    for (file, name, kinds) in sampled_cases(unets.to_vec()) {
        let folder = quantised_folder("text_bitsandbytes.safetensors", (file, name));
        let mut expected = None;
        for profile in [MemoryProfile::CpuOnly, MemoryProfile::GpuPoor, MemoryProfile::Extreme] {
            let yaml = generate_job(
                &folder.path().join(format!("out-{}", profile.name())),
                ", quantize: true, qtype: int8, qtype_te: int8",
                "sampler: ddim, sample_steps: 2, width: 32, height: 32, prompts: [a red circle --seed 3]",
            );
            let tiny = fixtures().join("tiny_sd").display().to_string();
            let mut spec = spec(&yaml.replace(&tiny, &folder.path().display().to_string()));
            spec.profile = profile;
            let (outcome, events) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{file}");
            let lines: Vec<&String> = events
                .iter()
                .filter_map(|event| match event {
                    ChildEvent::Log { message, .. } => Some(message),
                    _ => None,
                })
                .collect();
            let logged = |part: &str, kinds: &str| {
                let start = format!("the file of the {part} holds {kinds}");
                lines
                    .iter()
                    .any(|line| line.starts_with(&start) && line.contains("which are used as they are; `qtype"))
            };
            assert!(
                logged("denoiser", kinds) && logged("text encoder", "fp4, int8, nf4"),
                "{lines:?}"
            );
            let image = image_io::open_rgb(&images(&events)[0].1).unwrap().into_raw();
            let expected = expected.get_or_insert_with(|| image.clone());
            let worst = image.iter().zip(expected.iter()).map(|(a, b)| a.abs_diff(*b)).max();
            assert!(worst <= Some(1), "{file} {profile:?}: {worst:?}");
        }
    }
}
