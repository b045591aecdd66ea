//! Compares generated images with those of diffusers, on the tiny model (`tests/reference/make_pipelines.py`).

use super::*;
use crate::adapters::{LoadedAdapter, load_lora};
use crate::families::LoadOptions;
use crate::families::stable_diffusion::SdModel;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, largest, load_sd, sampled_cases, tiny_sd};
use candle_core::{Device, safetensors};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Largest allowed difference of one colour value of a pixel.
pub(super) const TOLERANCE: u8 = 2;

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_str().unwrap().to_owned())
        .collect()
}

/// The sizes of a case of SDXL that names some of them.
fn condition_size(case: &Value) -> Option<ItemSize> {
    let keys = ["original_size", "crops_coords_top_left", "target_size"];
    if keys.iter().all(|key| case.get(key).is_none()) {
        return None;
    }
    let (width, height) = match case.get("image") {
        Some(size) => (size[0].as_u64().unwrap(), size[1].as_u64().unwrap()),
        None => (case["width"].as_u64().unwrap(), case["height"].as_u64().unwrap()),
    };
    let mut size = ItemSize::whole(width as u32, height as u32);
    let pair = |key: &str| {
        case.get(key)
            .map(|pair| serde_json::from_value::<(u32, u32)>(pair.clone()).unwrap())
    };
    size.original = pair(keys[0]).unwrap_or(size.original);
    size.crop = pair(keys[1]).unwrap_or(size.crop);
    size.target = pair(keys[2]).unwrap_or(size.target);
    Some(size)
}

fn request(case: &Value) -> GenerateRequest {
    let number = |key: &str, default: f64| case.get(key).and_then(Value::as_f64).unwrap_or(default);
    GenerateRequest {
        prompts: strings(&case["prompts"]),
        prompts_2: case.get("prompts_2").map(strings).unwrap_or_default(),
        negative: case["negative"].as_str().map(str::to_owned).into_iter().collect(),
        negative_2: case["negative_2"].as_str().map(str::to_owned).into_iter().collect(),
        control: Vec::new(),
        adapter_scale: number("adapter_scale", 1.0),
        condition_size: condition_size(case),
        width: number("width", 0.0) as usize,
        height: number("height", 0.0) as usize,
        steps: number("steps", 0.0) as usize,
        guidance_scale: number("guidance", 0.0),
        true_cfg_scale: number("true_cfg_scale", 1.0),
        bypass_guidance_embedding: false,
        skip_layer_guidance: case.get("skip").map(|skip| SkipLayerGuidance {
            layers: serde_json::from_value(skip["layers"].clone()).unwrap(),
            scale: skip["scale"].as_f64().unwrap(),
            start: skip["start"].as_f64().unwrap(),
            stop: skip["stop"].as_f64().unwrap(),
        }),
        // Image-to-image of diffusers has no guidance rescale.
        guidance_rescale: number("guidance_rescale", 0.0),
        cfg_normalization: number("cfg_normalization", 0.0),
        cfg_truncation: number("cfg_truncation", 1.0),
        sampler: case["sampler"].as_str().unwrap().to_owned(),
        eta: number("eta", 0.0),
    }
}

/// The image of this size that a case starts from.
fn input_image(size: &Value, tensors: &HashMap<String, Tensor>) -> RgbImage {
    let tensor = &tensors[&format!("input_{}x{}", size[0], size[1])];
    let (height, width, _) = tensor.dims3().unwrap();
    let bytes = tensor.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    RgbImage::from_raw(width as u32, height as u32, bytes).unwrap()
}

fn generate(case: &Value, model: &dyn Model, tensors: &HashMap<String, Tensor>) -> Result<Vec<RgbImage>> {
    let seeds: Vec<u64> = case["seeds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s.as_u64().unwrap())
        .collect();
    let mut noise = if case.get("shared").is_some() {
        NoiseSource::Shared(TorchGenerator::manual_seed(seeds[0]))
    } else {
        NoiseSource::from_seeds(&seeds)
    };
    let v_prediction = case.get("v_prediction").is_some();
    let pipeline = Pipeline::new(model, v_prediction)?;
    let on_step = &mut |_, _| true;
    let generated = match case.get("image") {
        None => {
            let mut request = request(case);
            let control = case.get("control").map(|size| input_image(size, tensors));
            request.control = control.into_iter().collect();
            pipeline.text_to_image(&request, &mut noise, on_step)?
        }
        Some(size) => {
            let image = input_image(size, tensors);
            let strength = case["strength"].as_f64().unwrap();
            let count = match case.get("image_each") {
                Some(_) => request(case).prompts.len(),
                None => 1,
            };
            pipeline.image_to_image(&request(case), &vec![image; count], strength, &mut noise, on_step)?
        }
    };
    Ok(generated.unwrap())
}

/// The largest difference and how many values differ.
fn compare(ours: &[RgbImage], theirs: &Tensor) -> Result<(u8, usize), String> {
    let (batch, height, width, _) = theirs.dims4().unwrap();
    if ours.len() != batch || ours.iter().any(|p| p.dimensions() != (width as u32, height as u32)) {
        return Err(format!(
            "{} images of {:?}, expected {:?}",
            ours.len(),
            ours[0].dimensions(),
            theirs.dims()
        ));
    }
    let theirs = theirs.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let ours = ours.iter().flat_map(|p| p.as_raw().iter().copied());
    let differences: Vec<u8> = ours
        .zip(theirs)
        .map(|(a, b)| a.abs_diff(b))
        .filter(|d| *d > 0)
        .collect();
    Ok((differences.iter().copied().max().unwrap_or(0), differences.len()))
}

/// Generates a case and compares it with diffusers' image: the largest difference and how many values differ.
pub(super) fn compare_case(
    case: &Value,
    model: &dyn Model,
    tensors: &HashMap<String, Tensor>,
) -> Result<(u8, usize), String> {
    let name = case["case"].as_str().unwrap();
    let generated = generate(case, model, tensors).map_err(|e| e.to_string());
    match generated.and_then(|images| compare(&images, &tensors[name])) {
        Ok((difference, count)) if difference > TOLERANCE => {
            Err(format!("{name}: differs by up to {difference}, {count} values"))
        }
        Ok(found) => Ok(found),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

fn model_with_lora(lora: &Path) -> (SdModel, LoadedAdapter) {
    let mut model = tiny_sd();
    let lora = load_lora(&mut model.parts(), lora, 1.0).unwrap();
    (model, lora)
}

/// diffusers generated the images with LoRAs of aitk's trainer (`processes::train::our_lora_tests`,
/// `tests/reference/make_our_lora.py`, which also checks that diffusers loads every tensor).
#[test]
fn loras_of_aitk_give_the_same_images_in_diffusers() {
    let folder = fixtures().join("our_lora");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("images.safetensors"), &Device::Cpu).unwrap();
    let mut files: Vec<&str> = cases.iter().map(|case| case["file"].as_str().unwrap()).collect();
    files.dedup();
    let mut worst = 0;
    for file in &files {
        let (model, lora) = model_with_lora(&folder.join(file));
        assert!(lora.unknown.is_empty(), "{file}: {:?}", lora.unknown);
        let own: Vec<&Value> = cases.iter().filter(|case| case["file"] == **file).collect();
        for case in sampled_cases(own) {
            lora.multiplier.set(case["lora"].as_f64().unwrap());
            worst = worst.max(compare_case(case, &model, &tensors).unwrap().0);
        }
    }
    eprintln!("{} images with {files:?}: largest difference {worst}", cases.len());
    assert!(files.len() >= 3 && cases.iter().any(|case| case["lora"] == 0.7));
}

/// A LoRA with alpha / rank = 16 (`tests/reference/make_strong_lora.py`), which would make a wrong scale visible. One
/// forward pass at full strength agrees; images agree wherever diffusers in float32 agrees with itself in float64.
#[test]
fn a_lora_with_a_large_alpha_is_scaled_as_in_diffusers() {
    let folder = fixtures().join("strong_lora");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("expected.safetensors"), &Device::Cpu).unwrap();
    let (model, lora) = model_with_lora(&folder.join("lora.safetensors"));
    assert!(lora.unknown.is_empty(), "{:?}", lora.unknown);

    let relative_difference = |ours: &Tensor, name: &str| gap(ours, &tensors[name]) / largest(&tensors[name]);
    let time = Tensor::new(&[417f32], &Device::Cpu).unwrap();
    let unet = model.unet.forward(&tensors["x"], &time, &tensors["context"]).unwrap();
    let ids = model.text_encoders[0].tokenizer.encode(&["a red circle"]).unwrap();
    let text = model.text_encoders[0].model.forward(&ids).unwrap();
    let (unet, text) = (relative_difference(&unet, "unet"), relative_difference(&text, "text"));
    println!("one forward pass: the U-Net differs by {unet:.1e}, the text encoder by {text:.1e}");
    assert!(unet < 1e-4 && text < 1e-5, "{unet:e} {text:e}");

    let stable: Vec<&Value> = cases.iter().filter(|case| case["itself"].as_u64() <= Some(2)).collect();
    assert!(
        stable
            .iter()
            .filter(|case| case["lora"].as_f64().unwrap().abs() >= 1.0)
            .count()
            >= 2
    );
    for case in sampled_cases(stable) {
        lora.multiplier.set(case["lora"].as_f64().unwrap());
        let (difference, count) = compare_case(case, &model, &tensors).unwrap();
        println!(
            "{}: differs by {difference} at most, {count} values at all",
            case["case"]
        );
    }
}

#[test]
fn every_image_matches_diffusers() {
    let folder = fixtures().join("pipelines");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("images.safetensors"), &Device::Cpu).unwrap();
    let plain = tiny_sd();
    let (with_lora, lora) = model_with_lora(&folder.join("lora.safetensors"));
    let compare_case = |case: &Value, model: &SdModel| compare_case(case, model, &tensors);
    let all = cases.len();
    let cases = sampled_cases(cases);
    let (lora_cases, plain_cases): (Vec<&Value>, Vec<&Value>) =
        cases.iter().partition(|case| case.get("lora").is_some());
    let mut results: Vec<_> = plain_cases.iter().map(|case| compare_case(case, &plain)).collect();
    for case in lora_cases {
        lora.multiplier.set(case["lora"].as_f64().unwrap());
        results.push(compare_case(case, &with_lora));
    }
    let failures: Vec<&String> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    let shown = failures.iter().map(|line| line.as_str()).collect::<Vec<_>>().join("\n");
    assert!(
        failures.is_empty(),
        "{} of {} images differ:\n{shown}",
        failures.len(),
        cases.len()
    );
    assert!(all >= 80 && results.len() == cases.len(), "only {all} cases");
    let worst = results.iter().flatten().map(|found| found.0).max().unwrap();
    let differing: usize = results.iter().flatten().map(|found| found.1).sum();
    eprintln!(
        "{} images: largest difference {worst}, {differing} values differ at all",
        cases.len()
    );
}

/// Models with other shapes and file layouts than the tiny one (`tests/reference/make_odd_models.py`).
#[test]
fn models_of_other_shapes_match_diffusers() {
    let folder = fixtures().join("odd_models");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("images.safetensors"), &Device::Cpu).unwrap();
    let mut failures = Vec::new();
    for name in ["sharded", "distilled", "old"] {
        let model = load_sd(folder.join(name), &LoadOptions::cpu()).unwrap();
        let own: Vec<&Value> = cases.iter().filter(|case| case["model"] == name).collect();
        assert_eq!(own.len(), 4, "{name}");
        for case in sampled_cases(own) {
            let key = case["case"].as_str().unwrap();
            match compare(&generate(case, &model, &tensors).unwrap(), &tensors[key]) {
                Ok((difference, _)) if difference <= TOLERANCE => {}
                other => failures.push(format!("{key}: {other:?}")),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn invalid_requests_are_errors() {
    let model = tiny_sd();
    let pipeline = Pipeline::new(&model, false).unwrap();
    let good = GenerateRequest {
        width: 32,
        height: 32,
        steps: 2,
        sampler: "ddim".into(),
        ..GenerateRequest::default()
    };
    let error_of = |request: GenerateRequest| {
        let generated = pipeline.text_to_image(&request, &mut NoiseSource::from_seeds(&[1]), &mut |_, _| true);
        generated.unwrap_err().to_string()
    };
    assert!(
        error_of(GenerateRequest {
            width: 33,
            ..good.clone()
        })
        .contains("33 x 32")
    );
    assert!(
        error_of(GenerateRequest {
            height: 0,
            ..good.clone()
        })
        .contains("multiples of 8")
    );
    assert!(
        error_of(GenerateRequest {
            width: 1 << 20,
            height: 1 << 20,
            ..good.clone()
        })
        .contains("too large")
    );
    assert!(
        error_of(GenerateRequest {
            steps: 0,
            ..good.clone()
        })
        .contains("between 1 and 1000")
    );
    assert!(
        error_of(GenerateRequest {
            sampler: "magic".into(),
            ..good.clone()
        })
        .contains("unknown sampler `magic`")
    );
    assert!(
        error_of(GenerateRequest {
            prompts: vec![],
            ..good.clone()
        })
        .contains("no prompt")
    );
    let infinite = GenerateRequest {
        guidance_scale: f64::INFINITY,
        ..good.clone()
    };
    assert!(error_of(infinite.clone()).contains("not finite"), "not a black image");
    let tolerant = Pipeline {
        refuse_non_finite: false,
        ..Pipeline::new(&model, false).unwrap()
    };
    let generated = tolerant.text_to_image(&infinite, &mut NoiseSource::from_seeds(&[1]), &mut |_, _| true);
    assert!(generated.unwrap().is_some());
    let two = vec!["a".to_owned(), "b".to_owned()];
    assert!(
        error_of(GenerateRequest {
            prompts: two.clone(),
            negative: vec![String::new(); 3],
            ..good.clone()
        })
        .contains("3 negative")
    );
    let source = RgbImage::new(32, 32);
    let img2img_error = |images: &[RgbImage], strength: f64| {
        let generated = pipeline.image_to_image(
            &good,
            images,
            strength,
            &mut NoiseSource::from_seeds(&[1]),
            &mut |_, _| true,
        );
        generated.unwrap_err().to_string()
    };
    assert!(img2img_error(std::slice::from_ref(&source), 1.5).contains("between 0 and 1"));
    let unchanged = pipeline.image_to_image(
        &good,
        std::slice::from_ref(&source),
        0.1,
        &mut NoiseSource::from_seeds(&[1]),
        &mut |_, _| true,
    );
    assert_eq!(
        unchanged.unwrap().unwrap()[0],
        source,
        "less than a step changes nothing"
    );
    assert!(img2img_error(&[], 0.5).contains("needs an image"));
    assert!(img2img_error(&[RgbImage::new(3, 3)], 0.5).contains("too small"));
}

#[test]
fn a_stop_takes_effect_between_steps() {
    let model = tiny_sd();
    let pipeline = Pipeline::new(&model, false).unwrap();
    let image = GenerateRequest {
        width: 32,
        height: 32,
        steps: 5,
        sampler: "ddim".into(),
        ..GenerateRequest::default()
    };
    let mut calls = Vec::new();
    let generated = pipeline.text_to_image(&image, &mut NoiseSource::from_seeds(&[1]), &mut |done, all| {
        calls.push((done, all));
        done < 2
    });
    assert!(generated.unwrap().is_none());
    assert_eq!(calls, [(0, 5), (1, 5), (2, 5)]);
    // In the sampling of a slider too.
    let mut noise = NoiseSource::from_seeds(&[1]);
    let sampled = pipeline.sample_partly(&image, 4, &mut noise, &mut |done, _| done < 2);
    assert!(matches!(sampled, Err(EngineError::Stopped)));
    assert!(pipeline.sample_partly(&image, 4, &mut noise, &mut |_, _| true).is_ok());
}

#[test]
fn random_seeds_depend_only_on_the_job_and_the_index() {
    assert_eq!(random_seed(7, 3), random_seed(7, 3));
    assert_ne!(random_seed(7, 3), random_seed(7, 4));
    assert_ne!(random_seed(7, 3), random_seed(8, 3));
    assert!(random_seed(7, 3) <= u64::from(u32::MAX));
}

crate::testing::in_portable_mode! {
    loras_of_aitk_give_the_same_images_in_diffusers,
    every_image_matches_diffusers,
    models_of_other_shapes_match_diffusers,
}
