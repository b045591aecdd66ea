//! Comparison with the fixtures of `tests/reference/make_train_zimage.py`: twenty steps of LoRAs of Z-Image with diffusers and peft.

use super::{largest_gap, loss_of, prompts_of, reference_trainer, with_prefix};
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::zimage::{ZIMAGE, ZImageModel};
use crate::families::{LoadOptions, Model};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, in_portable_mode, zimage_folder};
use crate::training::{
    ConditioningCache, FlowMatch, FlowTimesteps, FlowWeighting, LossInputs, LossOptions, MicroBatch, NoiseDraw,
    NoiseOptions,
};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

fn tensors(file: &str) -> HashMap<String, Tensor> {
    let path = fixtures().join(format!("train_zimage/{file}.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// Trains twenty steps and checks the loss and the norm of each.
fn train(model: &ZImageModel, params: Vec<Param>, report: &Value, name: &str) {
    let variant = &report["variants"][name];
    let inputs = tensors("inputs");
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let objective = FlowMatch {
        timesteps: FlowTimesteps::Linear,
        weighting: FlowWeighting::Even,
        noise: NoiseOptions::default(),
    };
    let mut cache = ConditioningCache::default();
    let mut trainer = reference_trainer(params, variant);
    let (mut loss_gap, mut norm_gap) = (0f64, 0f64);
    for step in 0..report["steps"].as_u64().unwrap() as usize {
        let row = |key: &str| inputs[key].get(step).unwrap();
        let texts = row("captions").to_vec1::<i64>().unwrap();
        let texts: Vec<String> = texts.iter().map(|i| captions[*i as usize].clone()).collect();
        let conditioning = cache.get(&prompts_of(&texts), model).unwrap();
        let forward = || -> Result<Tensor> {
            let batch = MicroBatch {
                latents: vec![row("latents")],
                noise_draw: NoiseDraw {
                    timesteps: row("timesteps").to_dtype(DType::F32)?.to_vec1()?,
                    noise: vec![row("noise")],
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
    println!("{name}: losses {loss_gap:.1e}, norms {norm_gap:.1e}");
    assert!(
        loss_gap < 1e-4 && norm_gap < 1e-3,
        "{name}: {loss_gap:.1e} {norm_gap:.1e}"
    );
}

fn check_lora(name: &str, checkpointing: Checkpointing) {
    let report = std::fs::read(fixtures().join("train_zimage/report.json")).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    let variant = &report["variants"][name];
    let config = AdapterConfig {
        rank: variant["rank"].as_u64().unwrap() as usize,
        // Has no effect: these LoRAs have no alpha.
        alpha: 1.0,
        conv_rank: None,
        conv_alpha: 1.0,
        only_if_contains: serde_json::from_value(variant["targets"].clone()).unwrap_or_default(),
        ..AdapterConfig::default()
    };
    let folder = zimage_folder(variant["model"] == "base");
    let mut model = ZImageModel::load(&ZIMAGE, folder.path(), &LoadOptions::cpu()).unwrap();
    model.set_checkpointing(checkpointing);
    let mut trained = model.parts();
    let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
    drop(trained);
    let found = tensors(name);
    let params = network.params();
    for param in &params {
        param.var.set(&found[&format!("start/{}", param.name)]).unwrap();
    }
    network.handle.set_training(Some("masks"));
    train(&model, params, &report, name);
    let ours: BTreeMap<String, Tensor> = network.tensors(DType::F32).unwrap();
    let gap = largest_gap(&ours, &with_prefix(&found, "final/"));
    println!("{name}: weights {gap:.1e}");
    assert!(gap < 1e-3, "{name}: {gap:.1e}");
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

in_portable_mode! {
    loras_match_the_reference,
    loras_with_gradient_checkpointing_match_the_reference,
}

crate::testing::with_emulated_kernels! {
    loras_match_the_reference,
}
