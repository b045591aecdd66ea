//! Compares images of Stable Diffusion 2.1, XL, FLUX.1 and Z-Image with those of diffusers
//! (`tests/reference/make_pipelines_sd21.py`, `make_pipelines_sdxl.py`, `make_lora_sdxl.py`, `make_pipelines_flux.py`,
//! `make_pipelines_zimage.py`).

use super::tests::compare_case;
use crate::adapters::load_lora;
use crate::families::flux::FluxModel;
use crate::families::stable_diffusion::{SdModel, Variant};
use crate::families::zimage::ZImageModel;
use crate::families::{FLUX, LoadOptions, Model, sd2, sdxl};
use crate::testing::{chosen, fixtures, in_portable_mode, schnell_folder, tiny, zimage_folder};
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
    let cases = chosen(cases);
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
    assert_eq!((dev.max_sequence_length, schnell.max_sequence_length), (512, 256));
    compare_all("pipelines_flux", "cases", |case| {
        let mut model = match case.get("schnell") {
            Some(_) => schnell.clone(),
            None => dev.clone(),
        };
        model.max_sequence_length = case["max_sequence_length"].as_u64().unwrap() as usize;
        for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
            model.scheduler_config[key] = value.clone();
        }
        add_lora(&mut model, case, "lora_flux/diffusers.safetensors");
        model
    });
}

#[test]
fn z_image_gives_the_images_of_diffusers() {
    let load = |is_base| {
        let folder = zimage_folder(is_base);
        ZImageModel::load(folder.path(), &LoadOptions::cpu()).unwrap()
    };
    let (turbo, base) = (load(false), load(true));
    assert_eq!(turbo.max_sequence_length, 512);
    compare_all("pipelines_zimage", "cases", |case| {
        let mut model = match case.get("base") {
            Some(_) => base.clone(),
            None => turbo.clone(),
        };
        model.max_sequence_length = case["max_sequence_length"].as_u64().unwrap() as usize;
        for (key, value) in case["scheduler"].as_object().into_iter().flatten() {
            model.scheduler_config[key] = value.clone();
        }
        add_lora(&mut model, case, "pipelines_zimage/lora.safetensors");
        model
    });
}

in_portable_mode! {
    flux_gives_the_images_of_diffusers,
    stable_diffusion_2_gives_the_images_of_diffusers,
    stable_diffusion_xl_gives_the_images_of_diffusers,
    z_image_gives_the_images_of_diffusers,
}
