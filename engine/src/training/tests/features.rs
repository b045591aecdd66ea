//! The loss of features: comparison with the fixtures of `tests/reference/make_feature_extractors.py`, 8 steps of FLUX.1 with a LoRA.

use super::flux::{OBJECTIVE, model};
use super::{largest_gap, loss_of, prompts_of, reference_trainer, with_prefix};
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::{FLUX, LoadOptions, Model};
use crate::models::feature_extractor::FeatureExtractor;
use crate::rng::{TorchGenerator, generator_for};
use crate::testing::{fixtures, in_portable_mode};
use crate::training::{ConditioningCache, FeatureLoss, LossInputs, LossOptions, MicroBatch, NoiseDraw};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

fn tensors(file: &str) -> HashMap<String, Tensor> {
    let path = fixtures().join(format!("{file}.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn check(name: &str, checkpointing: Checkpointing) {
    let report = std::fs::read(fixtures().join("feature_extractors/training.json")).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    let variant = &report["variants"][name];
    let config = AdapterConfig {
        rank: variant["rank"].as_u64().unwrap() as usize,
        alpha: 1.0,
        only_if_contains: serde_json::from_value(variant["targets"].clone()).unwrap(),
        ..AdapterConfig::default()
    };
    let mut model = model(&FLUX, variant, &LoadOptions::cpu());
    model.set_checkpointing(checkpointing);
    let mut trained = model.parts();
    trained.retain(|part| part.id == "transformer");
    let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
    drop(trained);
    let start = tensors("train_flux/parity_start");
    let params = network.params();
    for param in &params {
        param.var.set(&start[&param.name]).unwrap();
    }
    network.handle.set_training(Some("masks"));

    let file = if name == "version8" { "version7" } else { name };
    let mut path = fixtures().join("feature_extractors").join(file);
    if !path.is_dir() {
        path.set_extension("safetensors");
    }
    let second = match name {
        "version3" => Some("version10"),
        "version7" | "version8" => Some("version7_encoder"),
        _ => None,
    };
    let second = second.map(|name| fixtures().join(format!("feature_extractors/{name}.safetensors")));
    let extractor = FeatureExtractor::open((&path, second.as_deref()), DType::F32, &Device::Cpu).unwrap();
    let sees_pixels = extractor.sees_pixels();
    let features = FeatureLoss {
        extractor: Arc::new(extractor.with_checkpointing(checkpointing)),
        decoder: model.codec().pixel_decoder(checkpointing).filter(|_| sees_pixels),
        partial_step: name == "version8",
        weight: variant["weight"].as_f64().unwrap(),
    };
    let (inputs, images) = (
        tensors("train_flux/parity_inputs"),
        tensors("feature_extractors/images"),
    );
    let steps = &tensors("feature_extractors/steps")["steps"];
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let objective = OBJECTIVE();
    let mut cache = ConditioningCache::default();
    let mut trainer = reference_trainer(params, variant);
    let (mut loss_gap, mut norm_gap) = (0f64, 0f64);
    for step in 0..report["steps"].as_u64().unwrap() as usize {
        let row = |key: &str| inputs[key].get(step).unwrap();
        let texts = row("captions").to_vec1::<i64>().unwrap();
        let texts: Vec<String> = texts.iter().map(|i| captions[*i as usize].clone()).collect();
        let conditioning = cache.get(&prompts_of(&texts), &model).unwrap();
        let bytes = images["images"].get(step).unwrap().to_dtype(DType::F32).unwrap();
        let pixels = (bytes / 127.5).unwrap() - 1.0;
        let pixels = pixels.unwrap();
        let forward = || -> Result<Tensor> {
            let batch = MicroBatch {
                latents: vec![row("latents")],
                noise_draw: NoiseDraw {
                    timesteps: row("timesteps").to_dtype(DType::F32)?.to_vec1()?,
                    noise: vec![row("noise")],
                    input_noise: Vec::new(),
                    has_stepped: false,
                },
                conditioning: model.with_guidance(conditioning.clone(), &[1.0])?,
                weights: vec![1.0; texts.len()],
                weight: 1.0,
                loss_inputs: LossInputs {
                    features: Some(features.clone()),
                    pixels: sees_pixels.then(|| pixels.clone()),
                    feature_steps: match name {
                        "version8" => steps.get(step)?.to_vec1()?,
                        _ => Vec::new(),
                    },
                    ..LossInputs::default()
                },
                mask: None,
            };
            loss_of(&model, &objective, &LossOptions::default(), &batch)
        };
        trainer.accumulate(forward).unwrap();
        let done = trainer.finish_step(step as u64, true).unwrap();
        let relative = |found: f64, key: &str| (found / variant[key][step].as_f64().unwrap() - 1.0).abs();
        loss_gap = loss_gap.max(relative(done.loss, "losses"));
        norm_gap = norm_gap.max(relative(done.grad_norm.unwrap(), "norms"));
    }
    let theirs = with_prefix(&tensors(&format!("feature_extractors/training_{name}")), "final/");
    let gap = largest_gap(&network.tensors(DType::F32).unwrap(), &theirs);
    println!("{name}: losses {loss_gap:.1e}, norms {norm_gap:.1e}, weights {gap:.1e}");
    assert!(
        loss_gap < 1e-4 && norm_gap < 1e-3 && gap < 1e-3,
        "{name}: {loss_gap:.1e} {norm_gap:.1e} {gap:.1e}"
    );
}

fn trainings_match_the_reference() {
    for name in [
        "version1",
        "version2",
        "version10",
        "version3",
        "version4",
        "version6",
        "version7",
        "version8",
        "version9",
    ] {
        check(name, Checkpointing::Off);
    }
}

#[test]
fn trainings_with_a_loss_of_features_match_the_reference() {
    trainings_match_the_reference();
}

#[test]
fn trainings_with_gradient_checkpointing_match_the_reference() {
    check("version10", Checkpointing::Segments { blocks: 1 });
}

#[test]
fn steps_are_drawn_for_the_version_that_compares_after_them() {
    let mut network = FeatureLoss {
        extractor: Arc::new(
            FeatureExtractor::open_layout((&fixtures().join("feature_extractors/version1.safetensors"), None)).unwrap(),
        ),
        decoder: None,
        partial_step: false,
        weight: 1.0,
    };
    let draw = |network: &FeatureLoss| network.draw_steps(&mut generator_for(42, "features", 3, 1), 3);
    assert!(draw(&network).is_empty());
    network.partial_step = true;
    // Python: the generator of docs/randomness.md for `42/features/3/1`, `torch.rand(3) * 0.03 + 0.02`.
    let expected = [0.037019916, 0.032865755, 0.044961564];
    let found = draw(&network);
    let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-7);
    assert!(found.len() == 3 && close, "{found:?}");
}

in_portable_mode! {
    trainings_match_the_reference,
}
