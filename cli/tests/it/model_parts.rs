//! Models whose parts come from more than one place.

use crate::preflight::TINY;
use crate::support::{Home, code, err, out};
use std::path::Path;

/// Stable Diffusion 3.5 from a file with the transformer alone: what is missing is named before anything is sent, and with the extras the job runs.
#[test]
fn a_single_file_of_stable_diffusion_3_takes_its_parts_from_elsewhere() {
    let home = Home::new();
    let tiny = Path::new(TINY).parent().unwrap().join("tiny_sd35");
    let model = tiny.join("transformer/diffusion_pytorch_model.safetensors");
    let job = |arch: &str, keys: &str| {
        let text = format!(
            "job: generate\nconfig:\n  name: images\n  process:\n    - type: to_folder\n      output_folder: out\n      model: \
             {{name_or_path: {}, arch: {arch}, dtype: float32{keys}}}\n      generate: {{prompts: [a], width: 32, height: 32, \
             sample_steps: 1, sampler: flowmatch}}\n",
            model.display()
        );
        home.write("job.yaml", &text);
    };
    let aitk = |command: &str| {
        let output = home.aitk().args([command, "job.yaml"]).output().unwrap();
        let said = format!("{}{}", out(&output), err(&output));
        (code(&output), said.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    job("sd3", "");
    let (exit, said) = aitk("validate");
    assert_eq!(exit, 1, "{said}");
    for text in [
        "Stable Diffusion 3.5 without CLIP-L",
        "without VAE",
        "`model.extras_name_or_path`",
    ] {
        assert!(said.contains(text), "{said}");
    }
    job("flux", "");
    let (exit, said) = aitk("validate");
    assert!(
        exit == 1 && said.contains("is Stable Diffusion 3") && said.contains("set `arch: sd3`"),
        "{said}"
    );
    job("sd3", &format!(", extras_name_or_path: {}", tiny.display()));
    let (exit, said) = aitk("validate");
    assert_eq!(exit, 0, "{said}");
    let (exit, said) = aitk("run");
    assert_eq!(exit, 0, "{said}");
    let images = std::fs::read_dir(home.path().join("out")).unwrap();
    let is_image = |entry: &std::fs::DirEntry| entry.path().extension().is_some_and(|end| end == "png");
    assert_eq!(images.flatten().filter(is_image).count(), 1, "{said}");
}

/// A folder of Z-Image without a VAE takes that of another model.
#[test]
fn a_folder_without_a_vae_takes_one_from_elsewhere() {
    let home = Home::new();
    let tiny = Path::new(TINY).parent().unwrap();
    let job = |keys: &str| {
        let text = format!(
            "job: generate\nconfig:\n  name: images\n  process:\n    - type: to_folder\n      output_folder: out\n      model: \
             {{name_or_path: {}, arch: zimage, dtype: float32{keys}}}\n      generate: {{prompts: [a], width: 32, height: 32, \
             sample_steps: 1, sampler: flowmatch}}\n",
            tiny.join("tiny_zimage").display()
        );
        home.write("job.yaml", &text);
    };
    let aitk = |command: &str| {
        let output = home.aitk().args([command, "job.yaml"]).output().unwrap();
        (code(&output), format!("{}{}", out(&output), err(&output)))
    };
    job("");
    let (exit, said) = aitk("validate");
    assert!(exit == 1 && said.contains("without VAE"), "{said}");
    job(&format!(", vae_path: {}", tiny.join("tiny_flux/vae").display()));
    let (exit, said) = aitk("run");
    assert_eq!(exit, 0, "{said}");
}
