//! The example configs of ai-toolkit for FLUX.1, FLUX.1 Kontext, Flex.1 and Stable Diffusion 3.5 (`config/examples`, commit 27a03a91), with
//! their keys and values: they are read without a complaint, and run on tiny models with other paths, prompts, sizes and numbers of steps.

use super::tests::{images, logs, losses, run_spec};
use crate::families::saved_step;
use crate::testing::{attempt, fixtures, sampled_cases, schnell_folder, sd35_large_folder};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::ArchName;
use aitk_common::job::values::OneOrMany;
use aitk_common::job::{self, JobSpec, LoadOptions, Process, ProcessKind};
use std::path::Path;

const NETWORK: &str = "network: {type: lora, linear: 16, linear_alpha: 16}";
const SAVE: &str = "save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4, push_to_hub: false}";
const MODAL_SAVE: &str = "save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}";
const FULL_SAVE: &str = "save: {dtype: bf16, save_every: 250, max_step_saves_to_keep: 2, save_format: 'diffusers'}";
const CACHED: &str = "cache_latents_to_disk: true, ";
const FLUX_TRAIN: &str = "gradient_accumulation_steps: 1, optimizer: adamw8bit, lr: 1e-4";
const FLEX_TRAIN: &str = "bypass_guidance_embedding: true, gradient_accumulation: 1, optimizer: adamw8bit, lr: 1e-4";
const FULL_TRAIN: &str = "bypass_guidance_embedding: true, timestep_type: 'sigmoid', gradient_accumulation: 1, optimizer: adafactor, lr: 3e-5";
const SCHNELL: &str = "assistant_lora_path: ADAPTER, is_flux: true, quantize: true";
const FLEX: &str = "is_flux: true, quantize: true, quantize_kwargs: {exclude: ['*time_text_embed*']}";
const FULL_FLEX: &str = "is_flux: true, quantize_te: true, only_if_contains: [transformer.transformer_blocks., \
                         transformer.single_transformer_blocks.]";

/// Name, network, save, data set, train, model, and guidance scale and steps of samples.
const EXAMPLES: [(&str, [&str; 6]); 6] = [
    (
        "train_lora_flux_24gb",
        [
            NETWORK,
            SAVE,
            CACHED,
            FLUX_TRAIN,
            "is_flux: true, quantize: true",
            "guidance_scale: 4, sample_steps: 20",
        ],
    ),
    (
        "train_lora_flux_schnell_24gb",
        [
            NETWORK,
            SAVE,
            CACHED,
            FLUX_TRAIN,
            SCHNELL,
            "guidance_scale: 1, sample_steps: 4",
        ],
    ),
    (
        "modal_train_lora_flux_24gb",
        [
            NETWORK,
            MODAL_SAVE,
            CACHED,
            FLUX_TRAIN,
            "is_flux: true, quantize: true",
            "guidance_scale: 4, sample_steps: 20",
        ],
    ),
    (
        "modal_train_lora_flux_schnell_24gb",
        [
            NETWORK,
            MODAL_SAVE,
            CACHED,
            FLUX_TRAIN,
            SCHNELL,
            "guidance_scale: 1, sample_steps: 4",
        ],
    ),
    (
        "train_lora_flex_24gb",
        [
            NETWORK,
            SAVE,
            CACHED,
            FLEX_TRAIN,
            FLEX,
            "guidance_scale: 4, sample_steps: 25",
        ],
    ),
    (
        "train_full_fine_tune_flex",
        [
            "",
            FULL_SAVE,
            "",
            FULL_TRAIN,
            FULL_FLEX,
            "guidance_scale: 4, sample_steps: 25",
        ],
    ),
];

fn yaml(
    root: &Path,
    model: &Path,
    adapter: &Path,
    [network, save, cached, train, model_keys, sample]: [&str; 6],
) -> String {
    let (root, model, adapter) = (root.display(), model.display(), adapter.display().to_string());
    let model_keys = model_keys.replace("ADAPTER", &adapter);
    format!(
        "job: extension
config:
  name: my_first_lora_v1
  process:
    - type: sd_trainer
      training_folder: {root}/out
      device: cuda:0
      {network}
      {save}
      datasets:
        - {{folder_path: {root}/data, caption_ext: txt, caption_dropout_rate: 0.05, shuffle_tokens: false,
           {cached}resolution: [512, 768, 1024]}}
      train: {{batch_size: 1, steps: 2000, train_unet: true, train_text_encoder: false, gradient_checkpointing: true,
        noise_scheduler: flowmatch, ema_config: {{use_ema: true, ema_decay: 0.99}}, dtype: bf16, {train}}}
      model: {{name_or_path: {model}, {model_keys}}}
      sample: {{sampler: flowmatch, sample_every: 250, width: 1024, height: 1024, neg: '', seed: 42, walk_seed: true,
        prompts: [a red circle, a blue square], {sample}}}
meta: {{name: '[name]', version: '1.0'}}
"
    )
}

/// `train_lora_flux_kontext_24gb`.
fn kontext_yaml(root: &Path, model: &Path) -> String {
    let (root, model) = (root.display(), model.display());
    format!(
        "job: extension
config:
  name: my_first_lora_v1
  process:
    - type: sd_trainer
      training_folder: {root}/out
      device: cuda:0
      {NETWORK}
      {SAVE}
      datasets:
        - {{folder_path: {root}/data, control_path: {root}/controls, caption_ext: txt, caption_dropout_rate: 0.05,
           shuffle_tokens: false, cache_latents_to_disk: true, resolution: [512, 768]}}
      train: {{batch_size: 1, steps: 3000, gradient_accumulation_steps: 1, train_unet: true, train_text_encoder: false,
        gradient_checkpointing: true, noise_scheduler: flowmatch, optimizer: adamw8bit, lr: 1e-4, timestep_type: weighted, dtype: bf16}}
      model: {{name_or_path: {model}, arch: flux_kontext, quantize: true}}
      sample: {{sampler: flowmatch, sample_every: 250, sample_start_step: 0, width: 1024, height: 1024, neg: '', seed: 42,
        walk_seed: true, guidance_scale: 4, sample_steps: 20,
        prompts: ['make it red  --ctrl_img {root}/controls/p1.png', 'make it blue  --ctrl_img {root}/controls/p3.png']}}
meta: {{name: '[name]', version: '1.0'}}
"
    )
}

/// `train_lora_sd35_large_24gb`.
fn sd35_large_yaml(root: &Path, model: &Path) -> String {
    let (root, model) = (root.display(), model.display());
    format!(
        "job: extension
config:
  name: my_first_lora_v1
  process:
    - type: sd_trainer
      training_folder: {root}/out
      device: cuda:0
      {NETWORK}
      {SAVE}
      datasets:
        - {{folder_path: {root}/data, caption_ext: txt, caption_dropout_rate: 0.05, shuffle_tokens: false,
           cache_latents_to_disk: true, resolution: [1024]}}
      train: {{batch_size: 1, steps: 2000, gradient_accumulation_steps: 1, train_unet: true, train_text_encoder: false,
        gradient_checkpointing: true, noise_scheduler: flowmatch, timestep_type: linear, optimizer: adamw8bit, lr: 1e-4,
        ema_config: {{use_ema: true, ema_decay: 0.99}}, dtype: bf16}}
      model: {{name_or_path: {model}, is_v3: true, quantize: true}}
      sample: {{sampler: flowmatch, sample_every: 250, sample_start_step: 0, width: 1024, height: 1024, neg: '', seed: 42,
        walk_seed: true, guidance_scale: 4, sample_steps: 25, prompts: [a red circle, a blue square]}}
meta: {{name: '[name]', version: '1.0'}}
"
    )
}

fn read(text: &str) -> JobSpec {
    let format = serde_json::from_value(serde_json::json!("yaml")).unwrap();
    let loaded = job::parse(text, format, None, &LoadOptions::default()).unwrap();
    assert_eq!(loaded.warnings, [], "{text}");
    let report = loaded.spec.unsupported();
    assert!(report.errors.is_empty(), "{:?}", report.errors);
    loaded.spec
}

/// Runs a job with fewer steps and smaller images.
fn run(mut job: JobSpec, portable: bool) -> Vec<ChildEvent> {
    let Some(Process {
        kind: ProcessKind::Train(process),
        ..
    }) = job.process.first_mut()
    else {
        panic!("not a training");
    };
    process.train.steps = 4;
    process.training_seed = Some(3);
    process.save.save_every = Some(2);
    process.sample.sample_every = Some(2);
    (process.sample.width, process.sample.height, process.sample.sample_steps) = (32, 32, 2);
    process.sample.format = "png".into();
    process.datasets[0].resolution = OneOrMany(vec![32, 48]);
    let mut spec = attempt(&job, "");
    if portable {
        spec.device = DeviceRef::PORTABLE_CPU;
    }
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    events
}

/// The samples of a step, as bytes.
fn samples(root: &Path, step: u64) -> Vec<Vec<u8>> {
    let folder = root.join("out/my_first_lora_v1/samples");
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(folder)
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let (_, name) = name.split_once("__").unwrap();
            (name.to_owned(), std::fs::read(entry.path()).unwrap())
        })
        .filter(|(name, _)| name.starts_with(&format!("{step:09}_")))
        .collect();
    files.sort();
    files.into_iter().map(|(_, bytes)| bytes).collect()
}

/// A LoRA for schnell that changes it much.
fn training_adapter(root: &Path, schnell: &Path) -> std::path::PathBuf {
    images(&root.join("data"));
    let keys = [
        NETWORK,
        SAVE,
        CACHED,
        "optimizer: adamw, lr: 0.05",
        "is_flux: true",
        "sample_steps: 1",
    ];
    run(read(&yaml(root, schnell, schnell, keys)), false);
    root.join("out/my_first_lora_v1/my_first_lora_v1.safetensors")
}

#[test]
fn example_configs_of_ai_toolkit_run_unchanged() {
    let schnell = schnell_folder();
    let adapter_folder = tempfile::tempdir().unwrap();
    let adapter = training_adapter(adapter_folder.path(), schnell.path());
    for (name, keys) in sampled_cases(EXAMPLES.to_vec()) {
        for portable in [false, true] {
            // It is slow: a LoRA on quantised weights, and a full fine-tune in bfloat16.
            if portable && !["train_lora_flux_schnell_24gb", "train_full_fine_tune_flex"].contains(&name) {
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            images(&dir.path().join("data"));
            let model = match name.contains("schnell") {
                true => schnell.path().to_path_buf(),
                false => fixtures().join("tiny_flux"),
            };
            let job = read(&yaml(dir.path(), &model, &adapter, keys));
            assert_eq!(job.process[0].trainer().unwrap().model.arch.name, ArchName::Flux);
            let events = run(job, portable);
            assert!(losses(&events).iter().all(|loss| loss.is_finite()), "{name}");
            let folder = dir.path().join("out/my_first_lora_v1");
            let save = match name.contains("full") {
                true => folder.join("my_first_lora_v1"),
                false => folder.join("my_first_lora_v1.safetensors"),
            };
            assert!(save.exists(), "{name}");
            if name.contains("full") {
                assert_eq!(saved_step(&save).unwrap(), Some(4));
            }
            for step in [0, 2, 4] {
                assert_eq!(samples(dir.path(), step).len(), 2, "{name}, step {step}");
            }
        }
    }
}

#[test]
fn example_configs_of_other_families_run_unchanged() {
    if crate::testing::skips_long_tests() {
        return;
    }
    let sd35_large = sd35_large_folder();
    for arch in sampled_cases(vec![ArchName::FluxKontext, ArchName::Sd3]) {
        for portable in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            for folder in ["data", "controls"] {
                images(&dir.path().join(folder));
            }
            let text = match arch {
                ArchName::Sd3 => sd35_large_yaml(dir.path(), sd35_large.path()),
                _ => kontext_yaml(dir.path(), &fixtures().join("tiny_flux")),
            };
            let job = read(&text);
            assert_eq!(job.process[0].trainer().unwrap().model.arch.name, arch);
            let events = run(job, portable);
            assert!(losses(&events).iter().all(|loss| loss.is_finite()), "{arch}");
            let folder = dir.path().join("out/my_first_lora_v1");
            assert!(folder.join("my_first_lora_v1.safetensors").exists(), "{arch}");
            for step in [0, 2, 4] {
                let samples = samples(dir.path(), step);
                assert_eq!(samples.len(), 2, "{arch}, step {step}");
                assert_ne!(samples[0], samples[1], "{arch}, step {step}");
            }
        }
    }
}

#[test]
fn a_training_adapter_is_active_while_training_and_not_in_samples() {
    let schnell = schnell_folder();
    let adapter_folder = tempfile::tempdir().unwrap();
    let adapter = training_adapter(adapter_folder.path(), schnell.path());
    for quantize in ["", ", quantize: true"] {
        let [plain, assisted, inference] = ["", ", assistant_lora_path: ADAPTER", ", inference_lora_path: ADAPTER"]
            .map(|keys| {
                let dir = tempfile::tempdir().unwrap();
                images(&dir.path().join("data"));
                let model = format!("is_flux: true{quantize}{keys}");
                let keys = [
                    NETWORK,
                    SAVE,
                    CACHED,
                    FLUX_TRAIN,
                    &model,
                    "guidance_scale: 1, sample_steps: 4",
                ];
                let losses = losses(&run(read(&yaml(dir.path(), schnell.path(), &adapter, keys)), false));
                (dir, losses)
            });
        // Before the first step a LoRA changes nothing.
        let first = |(dir, _): &(tempfile::TempDir, Vec<f64>)| samples(dir.path(), 0);
        assert!(first(&plain) == first(&assisted), "the adapter is in samples");
        assert!(first(&plain) != first(&inference), "the LoRA of samples has no effect");
        assert_eq!(plain.1, inference.1);
        let change = (assisted.1[0] / plain.1[0] - 1.0).abs();
        assert!(change > 1e-3, "the adapter has no effect on the loss: {change}");
    }
}
