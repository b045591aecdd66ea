//! Every config of `config/examples` runs on a tiny model of its family, with other paths, sizes and numbers of steps.

use super::{StopSignal, run};
use crate::testing::byte_tokenizer::write_tokenizer;
use crate::testing::formula_weights::{expected, write_model};
use crate::testing::{
    attempt, chroma_folder, fixtures, in_own_folder, sampled_cases, sd35_large_folder, tuned, zimage_folder,
};
use crate::weights::write_tensors;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::{self, JobSpec, LoadOptions};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// The smallest size that every sampler and bucket takes.
const SIDE: u64 = 64;

/// The models that the examples name, beside those whose folder is made for the test.
const MODELS: [(&str, &str); 7] = [
    ("stable-diffusion-v1-5", "tiny_sd"),
    ("stable-diffusion-2-1", "tiny_sd21"),
    ("stable-diffusion-xl-base-1.0", "tiny_sdxl"),
    ("stable-diffusion-3.5-medium", "tiny_sd35"),
    ("FLUX.1-dev", "tiny_flux"),
    ("FLUX.1-Kontext-dev", "tiny_flux"),
    ("my_style.safetensors", "lora/ai_toolkit.safetensors"),
];

/// Makes a config quick, wherever its keys are.
fn shrink(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(shrink),
        Value::Object(map) => {
            for (key, value) in map {
                match (key.as_str(), &*value) {
                    ("steps" | "save_every" | "sample_every", Value::Number(_)) => *value = json!(2),
                    ("sample_steps", Value::Number(_)) => *value = json!(1),
                    // Of a T2I-Adapter: those of tiny_sd.
                    ("channels", Value::Array(_)) => *value = json!([16, 32]),
                    ("downscale_factor", Value::Number(_)) => *value = json!(2),
                    ("max_new_tokens", Value::Number(_)) => *value = json!(4),
                    ("width" | "height" | "size", Value::Number(_)) => *value = json!(SIDE),
                    ("max_denoising_steps", Value::Number(steps)) if steps.as_u64() < Some(999) => *value = json!(4),
                    ("resolution", Value::Array(_)) => *value = json!([SIDE]),
                    ("resolutions", Value::Array(_)) => *value = json!([[SIDE, SIDE]]),
                    ("prompt", Value::String(_)) | ("prompts", Value::Array(_)) => without_sizes(value),
                    _ => shrink(value),
                }
            }
        }
        _ => {}
    }
}

/// Removes the sizes from prompts.
fn without_sizes(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_sizes),
        Value::String(text) => {
            let mut words: Vec<&str> = text.split(' ').collect();
            while let Some(at) = words.iter().position(|word| matches!(*word, "--w" | "--h")) {
                words.drain(at..words.len().min(at + 2));
            }
            *text = words.join(" ");
        }
        other => shrink(other),
    }
}

/// The files that the examples name.
fn prepare(root: &Path) {
    for folder in ["images", "detailed", "plain", "control/images"] {
        let folder = root.join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        for (number, (width, height)) in [(1, (64, 64)), (2, (96, 48))] {
            let pixel = |x, y| image::Rgb([(x * 3) as u8, (y * 2) as u8, (number * 60) as u8]);
            let image = image::RgbImage::from_fn(width, height, pixel);
            image.save(folder.join(format!("cat{number}.jpg"))).unwrap();
            std::fs::write(folder.join(format!("cat{number}.txt")), "a red cat").unwrap();
        }
    }
    for (file, text) in [
        ("my_code/src/main.rs", "fn main() {}\n"),
        ("my_code/tool.py", "def tool():\n    return 1\n"),
        ("held_out/lib.rs", "pub fn one() -> u8 { 1 }\n"),
    ] {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    // A LoRA of one layer of the code model.
    let folder = root.join("my_coder_lora");
    std::fs::create_dir_all(&folder).unwrap();
    let half = |name: &str, shape| {
        let key = format!("base_model.model.model.layers.0.self_attn.q_proj.{name}.weight");
        (key, Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap())
    };
    let tensors = [half("lora_A", (2, 32)), half("lora_B", (32, 2))].into();
    let mut file = std::fs::File::create(folder.join("adapter_model.safetensors")).unwrap();
    write_tensors(&mut file, &tensors, &BTreeMap::new()).unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 2});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

#[test]
fn every_shipped_example_runs() {
    let (sd35_large, chroma, zimage) = (sd35_large_folder(), chroma_folder(), zimage_folder(false));
    let code_model = tempfile::tempdir().unwrap();
    write_model(code_model.path(), &expected()["models"]["starcoder2"]["config"]);
    write_tokenizer(code_model.path(), 264);
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/examples");
    let mut files: Vec<_> = std::fs::read_dir(examples)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "yaml"));
    files.sort();
    assert!(files.len() >= 24, "{files:?}");
    for path in sampled_cases(files) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        prepare(root);
        let mut text = std::fs::read_to_string(&path).unwrap();
        for (model, fixture) in MODELS {
            text = text.replace(
                &format!("/path/to/{model}"),
                &fixtures().join(fixture).display().to_string(),
            );
        }
        for (model, folder) in [
            ("stable-diffusion-3.5-large", &sd35_large),
            ("starcoder2-3b", &code_model),
            ("Chroma1-HD", &chroma),
            ("Z-Image-Turbo", &zimage),
            ("Z-Image", &zimage),
        ] {
            text = text.replace(&format!("/path/to/{model}"), &folder.path().display().to_string());
        }
        let fine_tune = tuned(&fixtures().join("tiny_sd"), &["unet", "text_encoder"], &|_, _, base| {
            (base * 1.01).unwrap()
        });
        text = text.replace(
            "/path/to/my_fine_tune.safetensors",
            &fine_tune.path().display().to_string(),
        );
        text = text.replace("/path/to/", &format!("{}/", root.display()));
        let format = serde_json::from_value(json!("yaml")).unwrap();
        let loaded = job::parse(&text, format, None, &LoadOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let report = loaded.spec.unsupported();
        assert!(report.errors.is_empty(), "{name}: {:?}", report.errors);
        let mut value = serde_json::to_value(&loaded.spec).unwrap();
        shrink(&mut value);
        let job: JobSpec = serde_json::from_value(value).unwrap();
        let spec = in_own_folder(attempt(&job, &text), root);
        let mut events = Vec::new();
        let outcome = run(&spec, &mut events, &StopSignal::new());
        let log = events.iter().filter_map(|event| match event {
            ChildEvent::Log { message, .. } => Some(message.as_str()),
            _ => None,
        });
        let log: Vec<&str> = log.collect();
        assert_eq!(outcome, Outcome::Completed, "{name}: {log:#?}");
        let made = events
            .iter()
            .filter(|event| matches!(event, ChildEvent::Artifact { .. }))
            .count();
        assert!(made > 0, "{name} made nothing");
    }
}
