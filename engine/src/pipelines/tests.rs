//! Same seed, same image: against what diffusers draws with the tiny model (`tests/reference/make_pipelines.py`).

use super::*;
use crate::adapters::{Component, LoadedLora, load_lora};
use crate::models::sd::LoadOptions;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, largest, tiny_sd};
use candle_core::safetensors;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Most that one colour value of a pixel may differ.
const ALLOWED: u8 = 2;

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_str().unwrap().to_owned())
        .collect()
}

fn request(case: &Value) -> GenerateRequest {
    let number = |key: &str, default: f64| case.get(key).and_then(Value::as_f64).unwrap_or(default);
    GenerateRequest {
        prompts: strings(&case["prompts"]),
        negative: vec![case["negative"].as_str().unwrap().to_owned()],
        width: number("width", 0.0) as usize,
        height: number("height", 0.0) as usize,
        steps: number("steps", 0.0) as usize,
        guidance_scale: number("guidance", 0.0),
        // diffusers' image-to-image has none.
        guidance_rescale: number("guidance_rescale", 0.0),
        sampler: case["sampler"].as_str().unwrap().to_owned(),
        eta: number("eta", 0.0),
    }
}

fn draw(case: &Value, model: &SdModel, tensors: &HashMap<String, Tensor>) -> Result<Vec<RgbImage>> {
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
    let pipeline = Pipeline::new(model, &Device::Cpu, DType::F32, v_prediction)?;
    let on_step = &mut |_, _| true;
    let drawn = match case.get("image") {
        None => pipeline.text_to_image(&request(case), &mut noise, on_step)?,
        Some(size) => {
            let tensor = &tensors[&format!("input_{}x{}", size[0], size[1])];
            let (height, width, _) = tensor.dims3()?;
            let bytes = tensor.flatten_all()?.to_vec1::<u8>()?;
            let image = RgbImage::from_raw(width as u32, height as u32, bytes).unwrap();
            let strength = case["strength"].as_f64().unwrap();
            pipeline.image_to_image(&request(case), &[image], strength, &mut noise, on_step)?
        }
    };
    Ok(drawn.unwrap())
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

/// Draws a case and compares it with diffusers' image: the largest difference and how many values differ.
fn judge(case: &Value, model: &SdModel, tensors: &HashMap<String, Tensor>) -> Result<(u8, usize), String> {
    let name = case["case"].as_str().unwrap();
    let drawn = draw(case, model, tensors).map_err(|e| e.to_string());
    match drawn.and_then(|images| compare(&images, &tensors[name])) {
        Ok((difference, count)) if difference > ALLOWED => {
            Err(format!("{name}: differs by up to {difference}, {count} values"))
        }
        Ok(found) => Ok(found),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

fn adapted(lora: &Path) -> (SdModel, LoadedLora) {
    let mut model = tiny_sd();
    let mut parts: [(Component, &mut dyn crate::nn::VisitLayers); 2] = [
        (Component::Unet, &mut model.unet),
        (Component::TextEncoder, &mut model.text_encoder),
    ];
    let lora = load_lora(&mut parts, lora, 1.0).unwrap();
    (model, lora)
}

/// LoRAs that our trainer made (`processes::train::our_lora`), drawn with by diffusers
/// (`tests/reference/make_our_lora.py`, which also checks that diffusers takes every tensor).
#[test]
fn our_loras_give_the_same_images_in_diffusers() {
    let folder = fixtures().join("our_lora");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("images.safetensors"), &Device::Cpu).unwrap();
    let mut files: Vec<&str> = cases.iter().map(|case| case["file"].as_str().unwrap()).collect();
    files.dedup();
    let mut worst = 0;
    for file in &files {
        let (model, lora) = adapted(&folder.join(file));
        assert!(lora.unknown.is_empty(), "{file}: {:?}", lora.unknown);
        for case in cases.iter().filter(|case| case["file"] == **file) {
            lora.multiplier.set(case["lora"].as_f64().unwrap());
            worst = worst.max(judge(case, &model, &tensors).unwrap().0);
        }
    }
    eprintln!("{} images with {files:?}: largest difference {worst}", cases.len());
    assert!(files.len() >= 3 && cases.iter().any(|case| case["lora"] == 0.7));
}

/// alpha / rank = 16 (`tests/reference/make_strong_lora.py`): a wrong scale would show here more than anywhere. One pass at
/// full strength agrees, and so do images, wherever diffusers in float32 agrees with itself in float64.
#[test]
fn a_strong_lora_has_its_strength() {
    let folder = fixtures().join("strong_lora");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("expected.safetensors"), &Device::Cpu).unwrap();
    let (model, lora) = adapted(&folder.join("lora.safetensors"));
    assert!(lora.unknown.is_empty(), "{:?}", lora.unknown);

    let far = |ours: &Tensor, name: &str| gap(ours, &tensors[name]) / largest(&tensors[name]);
    let time = Tensor::new(&[417f32], &Device::Cpu).unwrap();
    let unet = model.unet.forward(&tensors["x"], &time, &tensors["context"]).unwrap();
    let ids = model.tokenizer.encode(&["a red circle"]).unwrap();
    let text = model.text_encoder.forward(&ids).unwrap();
    let (unet, text) = (far(&unet, "unet"), far(&text, "text"));
    println!("one pass: the U-Net differs by {unet:.1e}, the text encoder by {text:.1e}");
    assert!(unet < 1e-4 && text < 1e-5, "{unet:e} {text:e}");

    let calm: Vec<&Value> = cases.iter().filter(|case| case["itself"].as_u64() <= Some(2)).collect();
    assert!(
        calm.iter()
            .filter(|case| case["lora"].as_f64().unwrap().abs() >= 1.0)
            .count()
            >= 2
    );
    for case in calm {
        lora.multiplier.set(case["lora"].as_f64().unwrap());
        let (difference, count) = judge(case, &model, &tensors).unwrap();
        println!(
            "{}: differs by {difference} at most, {count} values at all",
            case["case"]
        );
    }
}

#[test]
fn every_image_is_that_of_diffusers() {
    let folder = fixtures().join("pipelines");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("images.safetensors"), &Device::Cpu).unwrap();
    let plain = tiny_sd();
    let (with_lora, lora) = adapted(&folder.join("lora.safetensors"));
    let judge = |case: &Value, model: &SdModel| judge(case, model, &tensors);
    let (changed, bare): (Vec<&Value>, Vec<&Value>) = cases.iter().partition(|case| case.get("lora").is_some());
    let mut results = std::thread::scope(|scope| {
        let halves = bare.chunks(bare.len().div_ceil(2));
        let threads: Vec<_> = halves
            .map(|half| scope.spawn(|| half.iter().map(|case| judge(case, &plain)).collect::<Vec<_>>()))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    // One after the other: they share the LoRA's strength.
    for case in changed {
        lora.multiplier.set(case["lora"].as_f64().unwrap());
        results.push(judge(case, &with_lora));
    }
    let wrong: Vec<&String> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    let shown = wrong.iter().map(|line| line.as_str()).collect::<Vec<_>>().join("\n");
    assert!(
        wrong.is_empty(),
        "{} of {} images differ:\n{shown}",
        wrong.len(),
        cases.len()
    );
    assert!(results.len() >= 80, "only {} cases", results.len());
    let worst = results.iter().flatten().map(|found| found.0).max().unwrap();
    let differing: usize = results.iter().flatten().map(|found| found.1).sum();
    eprintln!(
        "{} images: largest difference {worst}, {differing} values differ at all",
        cases.len()
    );
}

/// Models of other shapes and in other files than the tiny one (`tests/reference/make_odd_models.py`).
#[test]
fn models_of_other_shapes_draw_the_images_of_diffusers() {
    let folder = fixtures().join("odd_models");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = safetensors::load(folder.join("images.safetensors"), &Device::Cpu).unwrap();
    let mut wrong = Vec::new();
    for name in ["sharded", "distilled", "old"] {
        let model = SdModel::load(folder.join(name), &LoadOptions::cpu()).unwrap();
        let own: Vec<&Value> = cases.iter().filter(|case| case["model"] == name).collect();
        assert_eq!(own.len(), 4, "{name}");
        for case in own {
            let key = case["case"].as_str().unwrap();
            match compare(&draw(case, &model, &tensors).unwrap(), &tensors[key]) {
                Ok((difference, _)) if difference <= ALLOWED => {}
                other => wrong.push(format!("{key}: {other:?}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn impossible_images_are_errors() {
    let model = tiny_sd();
    let pipeline = Pipeline::new(&model, &Device::Cpu, DType::F32, false).unwrap();
    let good = GenerateRequest {
        width: 32,
        height: 32,
        steps: 2,
        sampler: "ddim".into(),
        ..GenerateRequest::default()
    };
    let complaint = |request: GenerateRequest| {
        let drawn = pipeline.text_to_image(&request, &mut NoiseSource::from_seeds(&[1]), &mut |_, _| true);
        drawn.unwrap_err().to_string()
    };
    assert!(
        complaint(GenerateRequest {
            width: 33,
            ..good.clone()
        })
        .contains("33 x 32")
    );
    assert!(
        complaint(GenerateRequest {
            height: 0,
            ..good.clone()
        })
        .contains("multiples of 8")
    );
    assert!(
        complaint(GenerateRequest {
            width: 1 << 20,
            height: 1 << 20,
            ..good.clone()
        })
        .contains("too large")
    );
    assert!(
        complaint(GenerateRequest {
            steps: 0,
            ..good.clone()
        })
        .contains("between 1 and 1000")
    );
    assert!(
        complaint(GenerateRequest {
            sampler: "magic".into(),
            ..good.clone()
        })
        .contains("unknown sampler `magic`")
    );
    assert!(
        complaint(GenerateRequest {
            prompts: vec![],
            ..good.clone()
        })
        .contains("no prompt")
    );
    let two = vec!["a".to_owned(), "b".to_owned()];
    assert!(
        complaint(GenerateRequest {
            prompts: two.clone(),
            negative: vec![String::new(); 3],
            ..good.clone()
        })
        .contains("3 negative")
    );
    let source = RgbImage::new(32, 32);
    let redraw = |images: &[RgbImage], strength: f64| {
        let drawn = pipeline.image_to_image(
            &good,
            images,
            strength,
            &mut NoiseSource::from_seeds(&[1]),
            &mut |_, _| true,
        );
        drawn.unwrap_err().to_string()
    };
    assert!(redraw(std::slice::from_ref(&source), 1.5).contains("between 0 and 1"));
    assert!(redraw(std::slice::from_ref(&source), 0.1).contains("no step"));
    assert!(redraw(&[], 0.5).contains("needs an image"));
    assert!(redraw(&[RgbImage::new(3, 3)], 0.5).contains("too small"));
}

#[test]
fn stopping_ends_between_steps() {
    let model = tiny_sd();
    let pipeline = Pipeline::new(&model, &Device::Cpu, DType::F32, false).unwrap();
    let image = GenerateRequest {
        width: 32,
        height: 32,
        steps: 5,
        sampler: "ddim".into(),
        ..GenerateRequest::default()
    };
    let mut asked = Vec::new();
    let drawn = pipeline.text_to_image(&image, &mut NoiseSource::from_seeds(&[1]), &mut |done, all| {
        asked.push((done, all));
        done < 2
    });
    assert!(drawn.unwrap().is_none());
    assert_eq!(asked, [(0, 5), (1, 5), (2, 5)]);
}

#[test]
fn open_seeds_depend_on_job_and_index_alone() {
    assert_eq!(random_seed(7, 3), random_seed(7, 3));
    assert_ne!(random_seed(7, 3), random_seed(7, 4));
    assert_ne!(random_seed(7, 3), random_seed(8, 3));
    assert!(random_seed(7, 3) <= u64::from(u32::MAX));
}
