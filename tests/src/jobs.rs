//! Job configs and data sets for the tests: the tiny SD 1.x model of the fixtures and a few synthetic images.

use crate::namespaces::Namespaces;
use crate::programs::{program, repository};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the tiny model with random weights in the fixtures.
#[must_use]
pub fn tiny_model() -> PathBuf {
    repository().join("tests/fixtures/tiny_sd")
}

/// Writes `count` small images with captions into `folder`.
///
/// # Panics
/// When the folder cannot be written.
pub fn write_dataset(folder: &Path, count: u32) {
    std::fs::create_dir_all(folder).expect("the folder can be made");
    for number in 0..count {
        let image = image::RgbImage::from_fn(64, 64, |x, y| {
            let inside = x.abs_diff(32) + y.abs_diff(32) < 8 + 3 * (number % 6);
            if inside {
                image::Rgb([220, 40, 30 * (number % 8) as u8])
            } else {
                image::Rgb([235, 235, 225])
            }
        });
        image
            .save(folder.join(format!("{number:03}.png")))
            .expect("the image can be written");
        std::fs::write(folder.join(format!("{number:03}.txt")), "a red square").expect("the caption can be written");
    }
}

/// The command `aitk run CONFIG` in `folder`. The folder is also its home directory, so files of the user who runs the tests have
/// no effect.
#[must_use]
pub fn run_command(namespaces: &Namespaces, folder: &Path, config: &str) -> Command {
    let mut command = namespaces.command(program("aitk"), folder);
    command
        .args(["run", config])
        .env("HOME", folder)
        .env("XDG_STATE_HOME", folder.join("state"));
    command
}

/// Runs `job.yaml` in `folder` to its end, without a server and without faults.
///
/// # Panics
/// When it fails.
pub fn run_undisturbed(folder: &Path) -> Output {
    run_config(folder, "job.yaml")
}

/// Like [`run_undisturbed`], for another config in `folder`.
///
/// # Panics
/// When it fails.
pub fn run_config(folder: &Path, config: &str) -> Output {
    let output = run_command(&Namespaces::Host, folder, config)
        .output()
        .expect("aitk starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Writes the config of a small code model into `folder/model`, and token sequences into `folder/tokens.jsonl`.
///
/// # Panics
/// When the folder cannot be written.
pub fn write_code_data(folder: &Path) {
    let model = folder.join("model");
    std::fs::create_dir_all(&model).expect("the folder can be made");
    let config = r#"{"model_type": "starcoder2", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": null, "eos_token_id": 0}"#;
    std::fs::write(model.join("config.json"), config).expect("the config can be written");
    let line = |number: u32| {
        let ids: Vec<u32> = (0..200 + number)
            .map(|index| (index * (number + 3)) % 251 + 1)
            .collect();
        format!("{ids:?}\n")
    };
    let lines: String = (0..32).map(line).collect();
    std::fs::write(folder.join("tokens.jsonl"), lines).expect("the tokens can be written");
}

/// A training of a new code model on the files of [`write_code_data`].
#[must_use]
pub fn code_training_config(name: &str, folder: &Path, steps: u32, save_every: u32) -> String {
    let root = folder.display();
    format!(
        r#"job: extension
config:
  name: "{name}"
  process:
    - type: lm_trainer
      training_folder: "{root}"
      training_seed: 42
      model: {{name_or_path: "{root}/model", from_config: true}}
      datasets: [{{path: "{root}/tokens.jsonl"}}]
      context: 256
      train: {{steps: {steps}, batch_size: 4, gradient_accumulation: 4, lr: 1e-3, warmup_steps: 2}}
      save: {{save_every: {save_every}, dtype: float32, max_step_saves_to_keep: 2}}
"#
    )
}

/// A training config as ai-toolkit users write it.
#[must_use]
pub fn training_config(name: &str, folder: &Path, steps: u32, save_every: u32) -> String {
    let model = tiny_model();
    format!(
        r#"---
job: extension
config:
  name: "{name}"
  process:
    - type: sd_trainer
      training_folder: "{root}"
      training_seed: 42
      trigger_word: "zorb"
      network:
        type: lora
        linear: 4
        linear_alpha: 4
      save:
        dtype: float32
        save_every: {save_every}
        max_step_saves_to_keep: 3
      datasets:
        - folder_path: "{root}/dataset"
          caption_ext: txt
          resolution: [64]
          cache_latents_to_disk: true
      train:
        batch_size: 2
        steps: {steps}
        lr: 1e-3
        optimizer: adamw
        noise_scheduler: ddpm
        dtype: fp32
      model:
        name_or_path: "{model}"
        arch: sd1
      sample:
        sampler: ddim
        sample_every: 1000000
        width: 64
        height: 64
        seed: 1
        sample_steps: 2
        guidance_scale: 4
        format: png
        prompts:
          - "a red square, [trigger]"
"#,
        root = folder.display(),
        model = model.display(),
    )
}

/// The config of [`training_config`] for the tiny FLUX.1 of the fixtures, with captions that are encoded before the transformer is
/// loaded.
///
/// # Panics
/// When that config has changed.
#[must_use]
pub fn flux_training_config(name: &str, folder: &Path, steps: u32, save_every: u32) -> String {
    let text = training_config(name, folder, steps, save_every);
    let flux = repository().join("tests/fixtures/tiny_flux");
    let (model, flux) = (tiny_model().display().to_string(), flux.display().to_string());
    let changes = [
        (model.as_str(), flux.as_str()),
        ("arch: sd1", "arch: flux"),
        (
            "noise_scheduler: ddpm",
            "noise_scheduler: flowmatch\n        timestep_type: sigmoid\n        gradient_checkpointing: true",
        ),
        (
            "cache_latents_to_disk: true",
            "cache_latents_to_disk: true\n          cache_text_embeddings: true",
        ),
        ("sampler: ddim", "sampler: flowmatch"),
    ];
    changes.into_iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from} is not in the config");
        text.replace(from, to)
    })
}

/// A training of FLUX.1 Kontext on the images of `dataset` and the control images of `controls` below `folder`; its sample changes
/// `before.png`.
#[must_use]
pub fn kontext_config(name: &str, folder: &Path, steps: u32) -> String {
    let model = repository().join("tests/fixtures/tiny_flux");
    format!(
        r#"---
job: extension
config:
  name: "{name}"
  process:
    - type: sd_trainer
      training_folder: "{root}"
      training_seed: 42
      network: {{type: lora, linear: 4, linear_alpha: 4}}
      save: {{dtype: float32}}
      datasets:
        - {{folder_path: "{root}/dataset", control_path: "{root}/controls", caption_ext: txt, resolution: [64], cache_latents_to_disk: true}}
      train: {{batch_size: 2, steps: {steps}, lr: 1e-3, optimizer: adamw, noise_scheduler: flowmatch, dtype: fp32}}
      model: {{name_or_path: "{model}", arch: flux_kontext}}
      sample:
        sampler: flowmatch
        sample_every: 1000000
        width: 64
        height: 64
        sample_steps: 2
        format: png
        prompts: ["make it blue --ctrl_img {root}/before.png"]
"#,
        root = folder.display(),
        model = model.display(),
    )
}

/// A config that generates three prompts `repeats` times into `folder`, split into `parts` if given.
#[must_use]
pub fn image_config(name: &str, folder: &Path, repeats: u32, parts: Option<u32>) -> String {
    let split = parts.map_or(String::new(), |parts| format!("cluster:\n  split: {parts}\n"));
    format!(
        r#"---
job: generate
config:
  name: "{name}"
  process:
    - type: to_folder
      output_folder: "{folder}"
      device: cpu
      generate:
        sampler: ddim
        width: 64
        height: 64
        sample_steps: 2
        guidance_scale: 4
        seed: 7
        ext: png
        num_repeats: {repeats}
        prompts:
          - a red circle
          - a blue circle
          - a green square
      model:
        name_or_path: "{model}"
        arch: sd1
        dtype: float32
{split}"#,
        folder = folder.display(),
        model = tiny_model().display(),
    )
}
