//! Against `tests/reference/make_train_full.py`: the model's own weights, trained for twenty steps by diffusers.

use super::{below, constant, load};
use crate::models::sd::{LoadOptions, SdModel};
use crate::optim::{Adam, AdamParams, Ema, Param};
use crate::residency::Residency;
use crate::samplers::{NoiseSchedule, SamplerParams};
use crate::testing::{fixtures, gap};
use crate::training::{Contexts, LossOptions, MicroBatch, Trainer, TrainerOptions, loss};
use crate::weights::Trained;
use candle_core::{DType, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;

/// How the twenty steps are taken.
#[derive(Clone, Copy)]
struct Way {
    fused_backward: bool,
    residency: Residency,
    averaged: bool,
}

const AT_ONCE: Way = Way {
    fused_backward: false,
    residency: Residency::Resident,
    averaged: false,
};

/// What came of them: weights (and averages), losses, norms.
#[derive(Debug, PartialEq)]
struct Outcome {
    weights: BTreeMap<String, Vec<f32>>,
    steps: Vec<(f64, f64)>,
}

fn report() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("train/full.json")).unwrap()).unwrap()
}

fn train(name: &str, way: Way, max_norm: Option<f64>) -> Outcome {
    let report = report();
    let variant = &report["variants"][name];
    let list = |key: &str| -> Vec<String> { serde_json::from_value(variant[key].clone()).unwrap_or_default() };
    let chosen = Trained::Names {
        only_if_contains: list("only"),
        ignore_if_contains: list("ignore"),
    };
    let encoder_too = list("parts").contains(&"text_encoder".to_owned());
    let of_encoder = if encoder_too { chosen.clone() } else { Trained::Nothing };
    let options = LoadOptions::cpu().training(chosen, of_encoder);
    let mut model = SdModel::load(fixtures().join("tiny_sd"), &options).unwrap();
    (model.unet.residency, model.text_encoder.residency) = (way.residency, way.residency);
    let params: Vec<Param> = model
        .trained
        .iter()
        .map(|(name, var)| Param {
            name: name.clone(),
            var: var.clone(),
        })
        .collect();
    let average = || Ema::new(params.clone(), 0.9, false, 1.0).unwrap();
    let mut trainer = Trainer::new(TrainerOptions {
        params: params.clone(),
        optimizer: Box::new(Adam::new(params.clone(), AdamParams::new(true)).unwrap()),
        schedule: constant(1e-4),
        max_grad_norm: max_norm,
        ema: way.averaged.then(average),
        fused_backward: way.fused_backward,
    });
    let inputs = load("parity_inputs.safetensors");
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
    let mut steps = Vec::new();
    for step in 0..20 {
        let row = |key: &str| inputs[key].get(step * 2).unwrap();
        let picks: Vec<i64> = row("captions").to_vec1().unwrap();
        let texts: Vec<String> = picks.iter().map(|i| captions[*i as usize].clone()).collect();
        let forward = || {
            let batch = MicroBatch {
                latents: row("latents"),
                noise: row("noise"),
                timesteps: row("timesteps").to_vec1().unwrap(),
                context: Contexts::fresh(&texts, &model.tokenizer, &model.text_encoder)?,
                weights: vec![1.0, 1.0],
                mask: None,
            };
            loss(&model.unet, &schedule, &LossOptions::default(), &batch, DType::F32)
        };
        if trainer.fused_backward() {
            trainer.apply(step as u64, forward).unwrap();
        } else {
            trainer.add(forward).unwrap();
        }
        let done = trainer.finish_step(step as u64, true).unwrap();
        steps.push((done.loss, done.grad_norm.unwrap()));
    }
    let (state, _) = trainer.state().unwrap();
    let numbers = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let kept = ["weights", "ema"]
        .into_iter()
        .filter_map(|role| Some((role, state.get(role)?)));
    let weights =
        kept.flat_map(|(role, tensors)| tensors.iter().map(move |(k, v)| (format!("{role}/{k}"), numbers(v))));
    Outcome {
        weights: weights.collect(),
        steps,
    }
}

fn check(name: &str) {
    let variant = report()["variants"][name].clone();
    let outcome = train(name, AT_ONCE, variant["max_norm"].as_f64());
    let theirs = below(&load("full.safetensors"), &format!("{name}/"));
    let ours: Vec<_> = outcome
        .weights
        .keys()
        .map(|key| key.trim_start_matches("weights/"))
        .collect();
    let other = ours.iter().zip(theirs.keys()).find(|(ours, theirs)| *ours != theirs);
    assert!(ours.len() == theirs.len() && other.is_none(), "{name}: {other:?}");
    let mut worst = 0f32;
    for (ours, theirs) in outcome.weights.values().zip(theirs.values()) {
        let ours: Vec<f32> = ours.iter().step_by(7).copied().collect();
        let count = ours.len();
        worst = worst.max(gap(&Tensor::from_vec(ours, count, theirs.device()).unwrap(), theirs));
    }
    let mut off = 0f64;
    for (step, (loss, norm)) in outcome.steps.iter().enumerate() {
        let by = |ours: f64, key: &str| (ours / variant[key][step].as_f64().unwrap() - 1.0).abs();
        off = off.max(by(*loss, "losses")).max(by(*norm, "norms"));
    }
    println!("{name}: weights {worst:.1e}, losses and norms {off:.1e} relative");
    // A step of the optimizer is 1e-4.
    assert!(worst < 2e-5, "{name}: a weight differs by {worst:.1e}");
    assert!(off < 1e-4, "{name}: a loss or norm differs by {off:.1e}");
}

#[test]
fn a_unet_is_trained_as_the_reference_does() {
    check("unet");
}

#[test]
fn unet_and_text_encoder_are_trained_as_the_reference_does() {
    check("everything");
}

#[test]
fn chosen_parameters_are_trained_as_the_reference_does() {
    check("chosen");
}

#[test]
fn one_parameter_after_the_other_comes_to_the_same_bits() {
    for (name, averaged, max_norm) in [
        ("unet", false, None),
        ("everything", true, Some(0.05)),
        ("chosen", false, Some(1.0)),
    ] {
        for residency in [Residency::Resident, Residency::Recomputed { steps: 1 }] {
            let way = |fused_backward| Way {
                fused_backward,
                residency,
                averaged,
            };
            let same = train(name, way(true), max_norm) == train(name, way(false), max_norm);
            assert!(same, "{name}, {residency:?}");
        }
    }
}

#[test]
fn what_draws_while_it_is_trained_changes_too_and_keeps_nothing() {
    let everything = Trained::everything;
    let options = LoadOptions::cpu().training(everything(), everything());
    let model = SdModel::load(fixtures().join("tiny_sd"), &options).unwrap();
    let still = model.detach().unwrap();
    let inputs = load("parity_inputs.safetensors");
    let latents = inputs["latents"].get(0).unwrap();
    let captions = ["a red circle".to_owned(), String::new()];
    let predict = |model: &SdModel| {
        let context = Contexts::fresh(&captions, &model.tokenizer, &model.text_encoder).unwrap();
        let timesteps = Tensor::new(&[10f32, 500.0], latents.device()).unwrap();
        model.unet.forward(&latents, &timesteps, &context).unwrap()
    };
    let before = predict(&still);
    assert!(!before.track_op() && predict(&model).track_op());
    assert_eq!(gap(&before, &predict(&model)), 0.0);
    for (_, var) in &model.trained {
        var.set(&(var.as_tensor() * 1.01).unwrap()).unwrap();
    }
    let after = predict(&still);
    assert!(gap(&before, &after) > 0.0 && gap(&after, &predict(&model)) == 0.0);
    assert!(crate::testing::tiny_sd().detach().is_none());
}
