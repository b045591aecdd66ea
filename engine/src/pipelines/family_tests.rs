//! Compares images of Stable Diffusion 2.1, XL, 3.5, FLUX.1, Chroma and Z-Image with those of diffusers
//! (`tests/reference/make_pipelines_sd21.py`, `make_pipelines_sdxl.py`, `make_lora_sdxl.py`, `make_pipelines_sd35.py`,
//! `make_pipelines_flux.py`, `make_pipelines_kontext.py`, `make_flux_files.py`, `make_pipelines_chroma.py`, `make_pipelines_zimage.py`).

use super::tests::compare_case;
use crate::adapters::load_lora;
use crate::families::chroma::{CHROMA, ChromaModel};
use crate::families::flux::FluxModel;
use crate::families::sd3::Sd3Model;
use crate::families::stable_diffusion::{SdModel, Variant};
use crate::families::zimage::{ZIMAGE, ZImageModel};
use crate::families::{FLUX, FLUX_KONTEXT, LoadOptions, Model, SD3, sd2, sdxl};
use crate::pipelines::{GenerateRequest, Pipeline, SkipLayerGuidance};
use crate::samplers::NoiseSource;
use crate::testing::{
    chroma_folder, fixtures, flux_files, in_portable_mode, sampled_cases, schnell_folder, sd35_large_folder,
    sd35_without_t5, tiny, zimage_folder,
};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::HashMap;

type Images = HashMap<String, Tensor>;

fn cases(folder: &str, file: &str) -> (Vec<Value>, Images) {
    let folder = fixtures().join(folder);
    let cases = std::fs::read(folder.join(file).with_extension("json")).unwrap();
    let images = file.replace("cases", "images");
    let images = safetensors::load(folder.join(images).with_extension("safetensors"), &Device::Cpu).unwrap();
    (serde_json::from_slice(&cases).unwrap(), images)
}

/// The model with the scheduler's values that a case replaces.
fn with_scheduler(model: &SdModel, case: &Value) -> SdModel {
    let mut model = model.clone();
    for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
        model.scheduler_config[key] = value.clone();
    }
    model
}

/// Generates every case with the model that `model_of` returns for it, and compares the images.
fn compare_all<M: Model>(folder: &str, file: &str, model_of: impl Fn(&Value) -> M) {
    let (cases, images) = cases(folder, file);
    let mut failures = Vec::new();
    let cases = sampled_cases(cases);
    let mut worst = 0;
    for case in &cases {
        match compare_case(case, &model_of(case), &images) {
            Ok((difference, _)) => worst = worst.max(difference),
            Err(error) => failures.push(error),
        }
    }
    println!("{folder}: {} cases, at most {worst} apart", cases.len());
    assert!(
        failures.is_empty(),
        "{} of {}: {failures:#?}",
        failures.len(),
        cases.len()
    );
}

/// Adds the LoRA of a case that has one.
fn add_lora(model: &mut dyn Model, case: &Value, lora: &str) {
    if let Some(strength) = case["lora"].as_f64() {
        load_lora(&mut model.parts(), &fixtures().join(lora), strength).unwrap();
    }
}

fn check(variant: &'static Variant, model: &str, folder: &str, file: &str) {
    let plain = tiny(variant, model);
    compare_all(folder, file, |case| {
        let mut model = with_scheduler(&plain, case);
        add_lora(&mut model, case, "lora_sdxl/diffusers.safetensors");
        model
    });
}

#[test]
fn stable_diffusion_2_gives_the_images_of_diffusers() {
    check(&sd2::VARIANT, "tiny_sd21", "pipelines_sd21", "cases");
}

#[test]
fn stable_diffusion_xl_gives_the_images_of_diffusers() {
    check(&sdxl::VARIANT, "tiny_sdxl", "pipelines_sdxl", "cases");
    check(&sdxl::VARIANT, "tiny_sdxl", "pipelines_sdxl", "lcm");
}

#[test]
fn flux_gives_the_images_of_diffusers() {
    let folder = schnell_folder();
    let options = LoadOptions::cpu();
    let dev = FluxModel::load(&FLUX, fixtures().join("tiny_flux"), &options).unwrap();
    let schnell = FluxModel::load(&FLUX, folder.path(), &options).unwrap();
    assert_eq!(
        (dev.max_sequence_length(), schnell.max_sequence_length()),
        (Some(512), Some(256))
    );
    compare_all("pipelines_flux", "cases", |case| {
        let mut model = match case.get("schnell") {
            Some(_) => schnell.clone(),
            None => dev.clone(),
        };
        model.set_max_sequence_length(case["max_sequence_length"].as_u64().unwrap() as usize);
        for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
            model.scheduler_config[key] = value.clone();
        }
        add_lora(&mut model, case, "lora_flux/diffusers.safetensors");
        model
    });
}

/// tiny_flux as if it had been made without a guidance embedding.
fn flux_without_guidance_embedding() -> tempfile::TempDir {
    let (source, folder) = (fixtures().join("tiny_flux"), tempfile::tempdir().unwrap());
    let transformer = folder.path().join("transformer");
    std::fs::create_dir(&transformer).unwrap();
    let mut tensors = HashMap::new();
    for entry in std::fs::read_dir(source.join("transformer")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|suffix| suffix == "safetensors") {
            tensors.extend(safetensors::load(&path, &Device::Cpu).unwrap());
        }
    }
    let before = tensors.len();
    tensors.retain(|name, _| !name.contains("guidance_embedder"));
    assert_eq!(tensors.len(), before - 4);
    safetensors::save(&tensors, transformer.join("diffusion_pytorch_model.safetensors")).unwrap();
    let config = std::fs::read(source.join("transformer/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["guidance_embeds"] = false.into();
    std::fs::write(transformer.join("config.json"), config.to_string()).unwrap();
    for entry in std::fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        let target = folder.path().join(path.file_name().unwrap());
        if !target.exists() {
            std::os::unix::fs::symlink(path, target).unwrap();
        }
    }
    folder
}

/// `model.use_flux_cfg`: the images of diffusers' true CFG for a model that never had a guidance embedding, whose parity the cases of
/// `pipelines_flux` show.
#[test]
fn flux_without_its_guidance_embedding_is_guided_as_a_model_that_has_none() {
    let folder = flux_without_guidance_embedding();
    let options = LoadOptions::cpu();
    let mut with = FluxModel::load(&FLUX, fixtures().join("tiny_flux"), &options).unwrap();
    let mut without = FluxModel::load(&FLUX, folder.path(), &options).unwrap();
    with.set_max_sequence_length(32);
    without.set_max_sequence_length(32);
    let generate = |model: &FluxModel, bypass_guidance_embedding: bool, true_cfg_scale: f64, guidance_scale: f64| {
        let request = GenerateRequest {
            prompts: vec!["a red zorb".into()],
            negative: vec!["a green bird".into()],
            width: 32,
            height: 48,
            steps: 2,
            sampler: "flowmatch".into(),
            guidance_scale,
            true_cfg_scale,
            bypass_guidance_embedding,
            ..GenerateRequest::default()
        };
        let pipeline = Pipeline::new(model, false).unwrap();
        let images = pipeline.text_to_image(&request, &mut NoiseSource::from_seeds(&[7]), &mut |_, _| true);
        images.unwrap().unwrap().remove(0)
    };
    let expected = generate(&without, false, 4.0, 4.0);
    assert_eq!(generate(&with, true, 1.0, 4.0), expected);
    // The guidance embedding, the scale and the negative prompt each make another image.
    assert_ne!(generate(&with, false, 4.0, 4.0), expected);
    assert_ne!(generate(&with, true, 1.0, 2.0), expected);
    let unguided = generate(&with, true, 1.0, 1.0);
    assert_ne!(unguided, expected);
    assert_eq!(unguided, generate(&without, false, 1.0, 1.0));
}

#[test]
fn flux_kontext_gives_the_images_of_diffusers() {
    let kontext = FluxModel::load(&FLUX_KONTEXT, fixtures().join("tiny_flux"), &LoadOptions::cpu()).unwrap();
    compare_all("pipelines_kontext", "cases", |case| {
        let mut model = kontext.clone();
        model.set_max_sequence_length(case["max_sequence_length"].as_u64().unwrap() as usize);
        model
    });
}

#[test]
fn only_kontext_takes_a_control_image_and_it_needs_one() {
    let load = |family| FluxModel::load(family, fixtures().join("tiny_flux"), &LoadOptions::cpu()).unwrap();
    let error_of = |model: &FluxModel, control: Vec<image::RgbImage>| {
        let request = GenerateRequest {
            width: 32,
            height: 32,
            steps: 1,
            sampler: "flowmatch".into(),
            control,
            ..GenerateRequest::default()
        };
        let pipeline = Pipeline::new(model, false).unwrap();
        let result = pipeline.text_to_image(&request, &mut NoiseSource::from_seeds(&[1]), &mut |_, _| true);
        result.unwrap_err().to_string()
    };
    let (dev, kontext) = (load(&FLUX), load(&FLUX_KONTEXT));
    let image = |width, height| vec![image::RgbImage::new(width, height)];
    let error = error_of(&dev, image(32, 32));
    assert!(error.contains("`arch: flux` takes no control image"), "{error}");
    let error = error_of(&kontext, Vec::new());
    assert!(
        error.contains("`arch: flux_kontext`") && error.contains("--ctrl_img"),
        "{error}"
    );
    let error = error_of(&kontext, image(15, 32));
    assert!(error.contains("15 x 32") && error.contains("at least 16"), "{error}");
    let error = error_of(&kontext, [image(32, 32), image(32, 32)].concat());
    assert!(
        error.contains("expected one image, or one for each of 1 prompts, found 2"),
        "{error}"
    );
}

/// From single files: names of the first release, float8, GGUF, text encoders and VAE of their own
/// (`tests/reference/make_flux_files.py`).
#[test]
fn flux_in_single_files_gives_the_images_of_diffusers() {
    let tiny = fixtures().join("tiny_flux");
    // Parts as files side by side, with the tokenizers, which no file has.
    let extras = tempfile::tempdir().unwrap();
    let links = [
        "clip_l.safetensors",
        "t5-encoder.gguf",
        "ae.safetensors",
        "text_encoder",
        "text_encoder_2",
        "vae",
    ];
    let links = links.map(|name| (flux_files().join("parts").join(name), name));
    let tokenizers = [("tokenizer", "tokenizer"), ("tokenizer_2/spiece.model", "spiece.model")];
    let tokenizers = tokenizers.map(|(from, to)| (tiny.join(from), to));
    for (from, to) in links.into_iter().chain(tokenizers) {
        std::os::unix::fs::symlink(from, extras.path().join(to)).unwrap();
    }
    compare_all("flux_files", "cases", |case| {
        let given = |key: &str| Some(flux_files().join(case["parts"][key].as_str()?));
        let options = LoadOptions {
            parts: PartPaths {
                extras: match case["parts"]["extras"] == "parts" {
                    true => Some(extras.path().to_path_buf()),
                    false => given("extras"),
                },
                text_encoder: given("text_encoder"),
                vae: None,
            },
            ..LoadOptions::cpu()
        };
        let path = given("model").unwrap();
        crate::families::check(&path, ArchName::Flux, &options.parts).unwrap();
        let mut model = FluxModel::load(&FLUX, path, &options).unwrap();
        model.set_max_sequence_length(case["max_sequence_length"].as_u64().unwrap() as usize);
        model
    });
}

#[test]
fn stable_diffusion_3_5_gives_the_images_of_diffusers() {
    let (large, without_t5) = (sd35_large_folder(), sd35_without_t5());
    let load = |folder: &std::path::Path| Sd3Model::load(&SD3, folder, &LoadOptions::cpu()).unwrap();
    let (medium, large) = (load(&fixtures().join("tiny_sd35")), load(large.path()));
    let without_t5 = load(without_t5.path());
    assert_eq!(medium.max_sequence_length(), Some(256));
    assert!(medium.has_t5() && large.has_t5() && !without_t5.has_t5());
    compare_all("pipelines_sd35", "cases", |case| {
        let mut model = match case["large"] == true {
            true => large.clone(),
            false => medium.clone(),
        };
        if case["t5"] == false {
            model.share_text_encoders(&without_t5);
        }
        model.set_max_sequence_length(case["max_sequence_length"].as_u64().unwrap() as usize);
        for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
            model.scheduler_config[key] = value.clone();
        }
        add_lora(&mut model, case, "lora_sd35/diffusers.safetensors");
        model
    });
}

#[test]
fn chroma_gives_the_images_of_diffusers() {
    let folder = chroma_folder();
    let plain = ChromaModel::load(&CHROMA, folder.path(), &LoadOptions::cpu()).unwrap();
    assert_eq!(plain.max_sequence_length(), Some(512));
    compare_all("pipelines_chroma", "cases", |case| {
        let mut model = plain.clone();
        model.set_max_sequence_length(case["max_sequence_length"].as_u64().unwrap() as usize);
        for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
            model.scheduler_config[key] = value.clone();
        }
        model
    });
}

#[test]
fn z_image_gives_the_images_of_diffusers() {
    let load = |is_base| {
        let folder = zimage_folder(is_base);
        ZImageModel::load(&ZIMAGE, folder.path(), &LoadOptions::cpu()).unwrap()
    };
    let (turbo, base) = (load(false), load(true));
    assert_eq!(turbo.max_sequence_length(), Some(512));
    compare_all("pipelines_zimage", "cases", |case| {
        let mut model = match case.get("base") {
            Some(_) => base.clone(),
            None => turbo.clone(),
        };
        model.set_max_sequence_length(case["max_sequence_length"].as_u64().unwrap() as usize);
        for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
            model.scheduler_config[key] = value.clone();
        }
        add_lora(&mut model, case, "pipelines_zimage/lora.safetensors");
        model
    });
}

#[test]
fn sequential_guidance_and_skipped_layers_give_the_same_images() {
    let folder = fixtures().join("tiny_sd35");
    let plain = Sd3Model::load(&SD3, &folder, &LoadOptions::cpu()).unwrap();
    let mut options = LoadOptions::cpu();
    options.memory_options.sequential_cfg = true;
    let sequential = Sd3Model::load(&SD3, &folder, &options).unwrap();
    let request = GenerateRequest {
        prompts: vec!["a cat".into(), "a dog".into()],
        width: 32,
        height: 48,
        steps: 3,
        sampler: "flowmatch".into(),
        skip_layer_guidance: Some(SkipLayerGuidance {
            layers: vec![0],
            scale: 2.8,
            start: 0.0,
            stop: 1.0,
        }),
        ..GenerateRequest::default()
    };
    let generate = |model: &Sd3Model, request: &GenerateRequest| {
        let pipeline = Pipeline::new(model, false).unwrap();
        pipeline.text_to_image(request, &mut NoiseSource::from_seeds(&[1, 2]), &mut |_, _| true)
    };
    let images = generate(&plain, &request).unwrap().unwrap();
    for (ours, theirs) in images.iter().zip(generate(&sequential, &request).unwrap().unwrap()) {
        let largest = ours
            .as_raw()
            .iter()
            .zip(theirs.as_raw())
            .map(|(a, b)| a.abs_diff(*b))
            .max();
        assert!(largest.unwrap() <= 1);
    }
    // A block that the model does not have, and a family without such blocks.
    let with_layer = |layer| GenerateRequest {
        skip_layer_guidance: request.skip_layer_guidance.clone().map(|skip| SkipLayerGuidance {
            layers: vec![layer],
            ..skip
        }),
        ..request.clone()
    };
    let error = generate(&plain, &with_layer(3)).unwrap_err().to_string();
    assert!(
        error.contains("no block 3") && error.contains("has 3 of them"),
        "{error}"
    );
    let of_sd2 = tiny(&sd2::VARIANT, "tiny_sd21");
    let pipeline = Pipeline::new(&of_sd2, false).unwrap();
    let request = GenerateRequest {
        sampler: "euler".into(),
        ..with_layer(0)
    };
    let refused = pipeline.text_to_image(&request, &mut NoiseSource::from_seeds(&[1, 2]), &mut |_, _| true);
    let error = refused.unwrap_err().to_string();
    assert!(
        error.contains("skip-layer guidance") && error.contains("`sd2` has 0"),
        "{error}"
    );
}

in_portable_mode! {
    chroma_gives_the_images_of_diffusers,
    stable_diffusion_3_5_gives_the_images_of_diffusers,
    flux_in_single_files_gives_the_images_of_diffusers,
    flux_gives_the_images_of_diffusers,
    flux_kontext_gives_the_images_of_diffusers,
    stable_diffusion_2_gives_the_images_of_diffusers,
    stable_diffusion_xl_gives_the_images_of_diffusers,
    z_image_gives_the_images_of_diffusers,
}
