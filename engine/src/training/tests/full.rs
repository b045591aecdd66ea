//! Comparison with the fixtures of `tests/reference/make_train_full.py`: a full fine-tune of twenty steps with
//! diffusers.

use super::{constant, load, with_prefix};
use super::{ddpm, loss_of};
use crate::checkpointing::Checkpointing;
use crate::families::stable_diffusion::SdModel;
use crate::families::{LoadOptions, Model};
use crate::optim::{Adam, AdamParams, Ema, Param};
use crate::samplers::{NoiseSchedule, SamplerParams};
use crate::testing::{fixtures, gap, in_portable_mode, load_sd};
use crate::training::{
    ConditioningCache, LossInputs, LossOptions, MicroBatch, NoiseDraw, SnrWeighting, Trainer, TrainerOptions,
};
use crate::weights::TrainableFilter;
use candle_core::{DType, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;

/// How the twenty steps run.
#[derive(Clone, Copy)]
struct Variant {
    fused_backward: bool,
    checkpointing: Checkpointing,
    ema: bool,
    steps: usize,
}

const DEFAULT: Variant = Variant {
    fused_backward: false,
    checkpointing: Checkpointing::Off,
    ema: false,
    steps: 20,
};

/// The result: the weights (and EMA weights) by `role/name`, and the loss and gradient norm of each step.
#[derive(Debug, PartialEq)]
struct Outcome {
    weights: BTreeMap<String, Vec<f32>>,
    steps: Vec<(f64, f64)>,
}

fn report() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("train/full.json")).unwrap()).unwrap()
}

fn train(name: &str, variant_options: Variant, max_norm: Option<f64>) -> Outcome {
    let report = report();
    let variant = &report["variants"][name];
    let list = |key: &str| -> Vec<String> { serde_json::from_value(variant[key].clone()).unwrap_or_default() };
    let selection = TrainableFilter::Names {
        only_if_contains: list("only"),
        ignore_if_contains: list("ignore"),
        part: None,
    };
    let trains_text_encoder = list("parts").contains(&"text_encoder".to_owned());
    let encoder_selection = if trains_text_encoder {
        selection.clone()
    } else {
        TrainableFilter::Nothing
    };
    let options = LoadOptions::cpu().training(selection, encoder_selection);
    let mut model = load_sd(fixtures().join("tiny_sd"), &options).unwrap();
    model.set_checkpointing(variant_options.checkpointing);
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
        ema: variant_options.ema.then(average),
        fused_backward: variant_options.fused_backward,
    });
    let inputs = load("parity_inputs.safetensors");
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
    let mut steps = Vec::new();
    for step in 0..variant_options.steps {
        let row = |key: &str| inputs[key].get(step * 2).unwrap();
        let caption_indices: Vec<i64> = row("captions").to_vec1().unwrap();
        let texts: Vec<String> = caption_indices.iter().map(|i| captions[*i as usize].clone()).collect();
        let forward = || {
            let batch = MicroBatch {
                latents: vec![row("latents")],
                noise_draw: NoiseDraw {
                    timesteps: row("timesteps").to_dtype(DType::F32).unwrap().to_vec1().unwrap(),
                    noise: vec![row("noise")],
                    input_noise: Vec::new(),
                    has_stepped: false,
                },
                conditioning: ConditioningCache::encode(&texts, &model)?,
                weights: vec![1.0, 1.0],
                weight: 1.0,
                loss_inputs: LossInputs::default(),
                mask: None,
            };
            loss_of(
                &model,
                &ddpm(schedule.clone(), SnrWeighting::default()),
                &LossOptions::default(),
                &batch,
            )
        };
        if trainer.uses_fused_backward() {
            trainer.fused_step(step as u64, forward).unwrap();
        } else {
            trainer.accumulate(forward).unwrap();
        }
        let done = trainer.finish_step(step as u64, true).unwrap();
        steps.push((done.loss, done.grad_norm.unwrap()));
    }
    let (state, _) = trainer.state().unwrap();
    let numbers = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let roles = ["weights", "ema"]
        .into_iter()
        .filter_map(|role| Some((role, state.get(role)?)));
    let weights =
        roles.flat_map(|(role, tensors)| tensors.iter().map(move |(k, v)| (format!("{role}/{k}"), numbers(v))));
    Outcome {
        weights: weights.collect(),
        steps,
    }
}

fn check(name: &str) {
    let variant = report()["variants"][name].clone();
    let outcome = train(name, DEFAULT, variant["max_norm"].as_f64());
    let theirs = with_prefix(&load("full.safetensors"), &format!("{name}/"));
    let ours: Vec<_> = outcome
        .weights
        .keys()
        .map(|key| key.trim_start_matches("weights/"))
        .collect();
    let other = ours.iter().zip(theirs.keys()).find(|(ours, theirs)| *ours != theirs);
    assert!(ours.len() == theirs.len() && other.is_none(), "{name}: {other:?}");
    let mut largest_gap = 0f32;
    for (ours, theirs) in outcome.weights.values().zip(theirs.values()) {
        let ours: Vec<f32> = ours.iter().step_by(7).copied().collect();
        let count = ours.len();
        largest_gap = largest_gap.max(gap(&Tensor::from_vec(ours, count, theirs.device()).unwrap(), theirs));
    }
    let mut largest_error = 0f64;
    for (step, (loss, norm)) in outcome.steps.iter().enumerate() {
        let by = |ours: f64, key: &str| (ours / variant[key][step].as_f64().unwrap() - 1.0).abs();
        largest_error = largest_error.max(by(*loss, "losses")).max(by(*norm, "norms"));
    }
    println!("{name}: weights {largest_gap:.1e}, losses and norms {largest_error:.1e} relative");
    // The learning rate is 1e-4.
    assert!(largest_gap < 2e-5, "{name}: a weight differs by {largest_gap:.1e}");
    assert!(
        largest_error < 1e-4,
        "{name}: a loss or norm differs by {largest_error:.1e}"
    );
}

#[test]
fn training_the_unet_matches_the_reference() {
    check("unet");
}

#[test]
fn training_unet_and_text_encoder_matches_the_reference() {
    check("everything");
}

#[test]
fn training_selected_parameters_matches_the_reference() {
    check("chosen");
}

#[test]
fn fused_backward_gives_the_same_bits() {
    for (name, ema, max_norm) in [
        ("unet", false, None),
        ("everything", true, Some(0.05)),
        ("chosen", false, Some(1.0)),
    ] {
        for checkpointing in [Checkpointing::Off, Checkpointing::Segments { blocks: 1 }] {
            let variant_options = |fused_backward| Variant {
                fused_backward,
                checkpointing,
                ema,
                steps: 5,
            };
            let same = train(name, variant_options(true), max_norm) == train(name, variant_options(false), max_norm);
            assert!(same, "{name}, {checkpointing:?}");
        }
    }
}

#[test]
fn a_detached_model_follows_the_training_and_records_no_graph() {
    let everything = TrainableFilter::everything;
    let options = LoadOptions::cpu().training(everything(), everything());
    let model = load_sd(fixtures().join("tiny_sd"), &options).unwrap();
    let detached = model.detached().unwrap();
    let inputs = load("parity_inputs.safetensors");
    let latents = inputs["latents"].get(0).unwrap();
    let captions = ["a red circle".to_owned(), String::new()];
    let predict = |model: &SdModel| {
        let conditioning = ConditioningCache::encode(&captions, model).unwrap();
        let timesteps = Tensor::new(&[10f32, 500.0], latents.device()).unwrap();
        model
            .predict(std::slice::from_ref(&latents), &timesteps, &conditioning)
            .unwrap()
            .remove(0)
    };
    let before = predict(&detached);
    assert!(!before.track_op() && predict(&model).track_op());
    assert_eq!(gap(&before, &predict(&model)), 0.0);
    for (_, var) in &model.trained {
        var.set(&(var.as_tensor() * 1.01).unwrap()).unwrap();
    }
    let after = predict(&detached);
    assert!(gap(&before, &after) > 0.0 && gap(&after, &predict(&model)) == 0.0);
    assert!(crate::testing::tiny_sd().detached().is_none());
}

in_portable_mode! {
    training_the_unet_matches_the_reference,
    training_unet_and_text_encoder_matches_the_reference,
    training_selected_parameters_matches_the_reference,
    fused_backward_gives_the_same_bits,
}

crate::testing::with_emulated_kernels! {
    training_unet_and_text_encoder_matches_the_reference,
}
