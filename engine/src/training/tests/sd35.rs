//! Comparison with the fixtures of `tests/reference/make_train_sd35.py`: twenty steps of Stable Diffusion 3.5 with diffusers and peft, LoRAs and
//! full fine-tunes.

use super::{largest_gap, loss_of, prompts_of, reference_trainer, with_prefix};
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::sd3::Sd3Model;
use crate::families::{LoadOptions, Model, SD3};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, in_portable_mode, sampled_cases, sd35_large_folder, sd35_without_t5};
use crate::training::{
    ConditioningCache, FlowMatch, FlowTimesteps, FlowWeighting, LossInputs, LossOptions, MicroBatch, NoiseDraw,
    NoiseOptions,
};
use crate::weights::TrainableFilter;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

fn tensors(file: &str) -> HashMap<String, Tensor> {
    let path = fixtures().join(format!("train_sd35/{file}.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn report(file: &str) -> Value {
    let path = fixtures().join(format!("train_sd35/{file}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn model(variant: &Value, options: &LoadOptions) -> Sd3Model {
    let (large, without_t5) = (sd35_large_folder(), sd35_without_t5());
    let folder = match (variant.get("model"), &variant["t5"]) {
        (Some(_), _) => large.path().to_path_buf(),
        (None, Value::Bool(false)) => without_t5.path().to_path_buf(),
        _ => fixtures().join("tiny_sd35"),
    };
    let mut model = Sd3Model::load(&SD3, folder, options).unwrap();
    model.set_max_sequence_length(variant["max_sequence_length"].as_u64().unwrap() as usize);
    model
}

/// Trains all steps and checks the loss and the norm of each.
fn train(model: &Sd3Model, params: Vec<Param>, report: &Value, name: &str) {
    let variant = &report["variants"][name];
    let inputs = tensors("parity_inputs");
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
    let report = report("parity");
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
    let mut model = model(variant, &LoadOptions::cpu());
    model.set_checkpointing(checkpointing);
    let mut trained = model.parts();
    trained.retain(|part| part.id == "transformer");
    let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
    drop(trained);
    let start = tensors(match variant.get("model") {
        Some(_) => "parity_start_large",
        None => "parity_start",
    });
    let params = network.params();
    for param in &params {
        param.var.set(&start[&param.name]).unwrap();
    }
    network.handle.set_training(Some("masks"));
    train(&model, params, &report, name);
    let theirs = tensors(&format!("parity_{name}")).into_iter().collect();
    let ours: BTreeMap<String, Tensor> = network.tensors(DType::F32).unwrap();
    let gap = largest_gap(&ours, &theirs);
    println!("{name}: weights {gap:.1e}");
    assert!(gap < 1e-3, "{name}: {gap:.1e}");
}

const VARIANTS: [&str; 4] = ["linear", "attention", "second_attention", "large"];

#[test]
fn loras_match_the_reference() {
    for name in sampled_cases(VARIANTS.to_vec()) {
        check_lora(name, Checkpointing::Off);
    }
}

#[test]
fn loras_with_gradient_checkpointing_match_the_reference() {
    for name in sampled_cases(VARIANTS.to_vec()) {
        check_lora(name, Checkpointing::Segments { blocks: 1 });
    }
}

#[test]
fn full_fine_tunes_match_the_reference() {
    let report = report("full");
    for (name, checkpointing) in [
        ("everything", Checkpointing::Off),
        ("chosen", Checkpointing::Segments { blocks: 1 }),
    ] {
        let variant = &report["variants"][name];
        let list = |key: &str| -> Vec<String> { serde_json::from_value(variant[key].clone()).unwrap_or_default() };
        let filter = TrainableFilter::Names {
            part: None,
            only_if_contains: list("only"),
            ignore_if_contains: list("ignore"),
        };
        let options = LoadOptions::cpu().training(filter, TrainableFilter::Nothing);
        let mut model = model(variant, &options);
        model.set_checkpointing(checkpointing);
        let params = model.trained().iter().map(|(name, var)| Param {
            name: name.clone(),
            var: var.clone(),
        });
        let params: Vec<Param> = params.collect();
        train(&model, params.clone(), &report, name);
        let every = report["every"].as_u64().unwrap() as usize;
        let kept = params.iter().map(|param| {
            let values = param.var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let values: Vec<f32> = values.into_iter().step_by(every).collect();
            (param.name.clone(), Tensor::new(values, &Device::Cpu).unwrap())
        });
        let theirs = with_prefix(&tensors("full"), &format!("{name}/"));
        let gap = largest_gap(&kept.collect(), &theirs);
        println!("full, {name}: weights {gap:.1e}");
        assert!(gap < 1e-3, "{name}: {gap:.1e}");
    }
}

in_portable_mode! {
    full_fine_tunes_match_the_reference,
    loras_match_the_reference,
    loras_with_gradient_checkpointing_match_the_reference,
}

crate::testing::with_emulated_kernels! {
    loras_match_the_reference,
}
