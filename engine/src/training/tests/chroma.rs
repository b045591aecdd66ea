//! Comparison with the fixtures of `tests/reference/make_train_chroma.py`: eight steps of LoRAs and of a full fine-tune of Chroma with
//! diffusers and peft.

use super::{constant, loss_of, prompts_of};
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::chroma::{CHROMA, ChromaModel};
use crate::families::{LoadOptions, Model};
use crate::optim::{Adam, AdamParams, Param};
use crate::rng::TorchGenerator;
use crate::testing::{chroma_folder, fixtures, formula, gap, in_portable_mode};
use crate::training::{
    ConditioningCache, FlowMatch, FlowTimesteps, FlowWeighting, LossInputs, LossOptions, MicroBatch, NoiseDraw,
    NoiseOptions, Trainer, TrainerOptions,
};
use crate::weights::TrainableFilter;
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;

/// The shape of the latents of a step.
const SHAPE: [usize; 4] = [2, 16, 4, 6];

fn report() -> Value {
    let report = std::fs::read(fixtures().join("train_chroma/report.json")).unwrap();
    serde_json::from_slice(&report).unwrap()
}

fn numbers(name: &str, shape: &[usize], scale: f32) -> Tensor {
    Tensor::from_vec(formula(name, shape.iter().product(), scale), shape, &Device::Cpu).unwrap()
}

/// Trains all steps, checks the loss and the norm of each, and then the trained tensors.
fn train(model: &ChromaModel, params: Vec<Param>, name: &str) {
    let report = report();
    let variant = &report["variants"][name];
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let caption_of: Vec<Vec<usize>> = serde_json::from_value(report["caption_of"].clone()).unwrap();
    let timesteps: Vec<Vec<f32>> = serde_json::from_value(report["timesteps"].clone()).unwrap();
    let objective = FlowMatch {
        timesteps: FlowTimesteps::Linear,
        weighting: FlowWeighting::Even,
        noise: NoiseOptions::default(),
    };
    let mut cache = ConditioningCache::default();
    let mut trainer = Trainer::new(TrainerOptions {
        optimizer: Box::new(Adam::new(params.clone(), AdamParams::new(true)).unwrap()),
        params: params.clone(),
        schedule: constant(report["lr"].as_f64().unwrap()),
        max_grad_norm: variant["max_norm"].as_f64(),
        ema: None,
        fused_backward: false,
    });
    let (mut loss_gap, mut norm_gap) = (0f64, 0f64);
    for (step, (indexes, timesteps)) in caption_of.iter().zip(&timesteps).enumerate() {
        let texts: Vec<String> = indexes.iter().map(|index| captions[*index].clone()).collect();
        let conditioning = cache.get(&prompts_of(&texts), model).unwrap();
        let forward = || -> Result<Tensor> {
            let batch = MicroBatch {
                latents: vec![numbers(&format!("latents.{step}"), &SHAPE, 1.7)],
                noise_draw: NoiseDraw {
                    timesteps: timesteps.clone(),
                    noise: vec![numbers(&format!("noise.{step}"), &SHAPE, 1.7)],
                    input_noise: Vec::new(),
                    has_stepped: false,
                },
                conditioning: conditioning.clone(),
                weights: vec![1.0; texts.len()],
                weight: 1.0,
                loss_inputs: LossInputs::default(),
                mask: None,
            };
            loss_of(model, &objective, &LossOptions::default(), &batch)
        };
        trainer.accumulate(forward).unwrap();
        let done = trainer.finish_step(step as u64, true).unwrap();
        let relative = |found: f64, key: &str| (found / variant[key][step].as_f64().unwrap() - 1.0).abs();
        loss_gap = loss_gap.max(relative(done.loss, "losses"));
        norm_gap = norm_gap.max(relative(done.grad_norm.unwrap(), "norms"));
    }
    let every = report["every"].as_u64().unwrap() as usize;
    let sorted: BTreeMap<String, &Param> = params.iter().map(|param| (param.name.clone(), param)).collect();
    let mut found = Vec::new();
    for param in sorted.values() {
        let values = param.var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        found.extend(values.into_iter().step_by(every));
    }
    let file = fixtures().join("train_chroma/final.safetensors");
    let expected = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let weights_gap = gap(&Tensor::new(found, &Device::Cpu).unwrap(), &expected[name]);
    println!("{name}: losses {loss_gap:.1e}, norms {norm_gap:.1e}, weights {weights_gap:.1e}");
    assert!(
        loss_gap < 1e-4 && norm_gap < 1e-3 && weights_gap < 1e-3,
        "{name}: {loss_gap:.1e} {norm_gap:.1e} {weights_gap:.1e}"
    );
}

fn model(options: &LoadOptions, checkpointing: Checkpointing) -> ChromaModel {
    let folder = chroma_folder();
    let mut model = ChromaModel::load(&CHROMA, folder.path(), options).unwrap();
    model.set_max_sequence_length(report()["max_sequence_length"].as_u64().unwrap() as usize);
    model.set_checkpointing(checkpointing);
    model
}

fn check_lora(name: &str, checkpointing: Checkpointing) {
    let report = report();
    let targets: Vec<String> = serde_json::from_value(report["variants"][name]["targets"].clone()).unwrap();
    let config = AdapterConfig {
        rank: report["rank"].as_u64().unwrap() as usize,
        // Has no effect: these LoRAs have no alpha.
        alpha: 1.0,
        conv_rank: None,
        conv_alpha: 1.0,
        only_if_contains: targets.into_iter().filter(|target| !target.is_empty()).collect(),
        ..AdapterConfig::default()
    };
    let mut model = model(&LoadOptions::cpu(), checkpointing);
    let mut trained = model.parts();
    let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
    drop(trained);
    let params = network.params();
    for param in &params {
        let shape = param.var.dims().to_vec();
        let scale = match param.name.contains("lora_A") {
            true => (3.0 / shape[1] as f64).sqrt() as f32,
            false => 0.04,
        };
        param.var.set(&numbers(&param.name, &shape, scale)).unwrap();
    }
    network.handle.set_training(Some("masks"));
    train(&model, params, name);
}

#[test]
fn loras_match_the_reference() {
    check_lora("linear", Checkpointing::Off);
    check_lora("attention", Checkpointing::Segments { blocks: 2 });
}

#[test]
fn loras_with_gradient_checkpointing_match_the_reference() {
    check_lora("linear", Checkpointing::Segments { blocks: 1 });
}

#[test]
fn a_full_fine_tune_matches_the_reference() {
    for checkpointing in [Checkpointing::Off, Checkpointing::Segments { blocks: 1 }] {
        let options = LoadOptions::cpu().training(TrainableFilter::everything(), TrainableFilter::Nothing);
        let model = model(&options, checkpointing);
        let params = model.trained().iter().map(|(name, var)| Param {
            name: name.clone(),
            var: var.clone(),
        });
        train(&model, params.collect(), "full");
    }
}

in_portable_mode! {
    a_full_fine_tune_matches_the_reference,
    loras_match_the_reference,
    loras_with_gradient_checkpointing_match_the_reference,
}

crate::testing::with_emulated_kernels! {
    a_full_fine_tune_matches_the_reference,
    loras_match_the_reference,
}
