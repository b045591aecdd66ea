//! Comparison with the fixtures of `tests/reference/make_train_lora.py`: the same twenty steps with diffusers and peft.

mod chroma;
mod decorator;
mod families;
mod features;
mod flow;
mod flux;
mod full;
mod image_adapters;
mod lycoris;
mod noise_options;
mod options;
mod paired_images;
mod portable;
mod sd35;
mod targets;
mod zimage;

use super::*;
use crate::adapters::{AdapterConfig, AdapterNetwork, Dropout};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::families::{Conditioning, Model, Prompt};
use crate::optim::{Adam, AdamParams, Ema, Param, Schedule, ScheduleParams};
use crate::rng::TorchGenerator;
use crate::samplers::{NoiseSchedule, PredictionType, SamplerParams};
use crate::testing::{fixtures, gap, in_portable_mode, tiny_sd, unet_part};
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};

fn prompts_of(texts: &[String]) -> Vec<Prompt> {
    texts.iter().map(|text| Prompt::new(text.as_str())).collect()
}

fn load(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixtures().join("train").join(name), &Device::Cpu).unwrap()
}

fn ddpm(schedule: NoiseSchedule, weighting: SnrWeighting) -> Ddpm {
    Ddpm {
        schedule,
        noise: NoiseOptions::default(),
        weighting,
    }
}

/// The loss of a model.
fn loss_of(
    model: &dyn Model,
    objective: &dyn Objective,
    options: &LossOptions,
    batch: &MicroBatch,
) -> crate::error::Result<Tensor> {
    let predict = |latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning| {
        model.predict(latents, timesteps, conditioning)
    };
    loss(&predict, objective, options, batch)
}

fn with_prefix(tensors: &HashMap<String, Tensor>, prefix: &str) -> BTreeMap<String, Tensor> {
    tensors
        .iter()
        .filter_map(|(k, v)| Some((k.strip_prefix(prefix)?.to_owned(), v.clone())))
        .collect()
}

fn largest_gap(ours: &BTreeMap<String, Tensor>, theirs: &BTreeMap<String, Tensor>) -> f64 {
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    let gaps = ours.values().zip(theirs.values()).map(|(a, b)| f64::from(gap(a, b)));
    gaps.fold(0.0, f64::max)
}

/// A schedule with the same learning rate at each of twenty steps.
fn constant(lr: f64) -> Schedule {
    let params = &serde_json::Map::new();
    Schedule::new(ScheduleParams {
        name: "constant",
        params,
        lr,
        steps: 20,
    })
    .unwrap()
}

/// The trainer of a variant of a reference: AdamW with a constant rate.
fn reference_trainer(params: Vec<Param>, variant: &serde_json::Value) -> Trainer {
    Trainer::new(TrainerOptions {
        optimizer: Box::new(Adam::new(params.clone(), AdamParams::new(true)).unwrap()),
        params,
        schedule: constant(variant["lr"].as_f64().unwrap()),
        max_grad_norm: variant["max_norm"].as_f64(),
        ema: None,
        fused_backward: false,
    })
}

/// Trains for twenty steps; returns the largest relative difference of a loss and the largest difference of a weight.
fn compare(name: &str) -> (f64, f64) {
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixtures().join("train/parity.json")).unwrap()).unwrap();
    let variant = &report["variants"][name];
    let number = |key: &str| variant.get(key).and_then(serde_json::Value::as_f64);
    let inputs = load("parity_inputs.safetensors");
    let theirs = load(&format!("parity_{name}.safetensors"));
    let has_own_start = ["conv", "text_encoder", "text_encoder_alone"].contains(&name);
    let start = with_prefix(
        &load(&format!(
            "parity_{}.safetensors",
            if has_own_start { name } else { "adamw" }
        )),
        "start/",
    );
    let parts: Vec<String> = serde_json::from_value(variant["parts"].clone()).unwrap_or(vec!["unet".into()]);
    let trains = |part: &str| parts.iter().any(|p| p == part);

    let mut model = tiny_sd();
    let attention = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net"];
    let conv = ["conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv"];
    let mut targets: Vec<String> = attention.map(String::from).to_vec();
    targets.push("lora_te.".into());
    if name == "conv" {
        targets.extend(conv.map(String::from));
    }
    let config = AdapterConfig {
        rank: 4,
        alpha: 8.0,
        conv_rank: (name == "conv").then_some(4),
        conv_alpha: 8.0,
        only_if_contains: targets,
        ..AdapterConfig::default()
    };
    let mut trained = model.parts();
    trained.retain(|part| trains(part.id));
    let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
    assert_eq!(network.covers_text_encoder(), trains("text_encoder"));
    let params = network.params();
    let new_trainer = || {
        Trainer::new(TrainerOptions {
            params: params.clone(),
            optimizer: Box::new(Adam::new(params.clone(), AdamParams::new(true)).unwrap()),
            schedule: constant(1e-3),
            max_grad_norm: number("max_norm"),
            ema: number("ema").map(|decay| Ema::new(params.clone(), decay, false, 1.0).unwrap()),
            fused_backward: false,
        })
    };
    let start: BTreeMap<_, _> = start
        .into_iter()
        .filter(|(name, _)| !name.ends_with(".alpha"))
        .collect();
    new_trainer().restore_weights(&start).unwrap();
    let mut trainer = new_trainer();
    let mut schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
    if variant["prediction"] == "v_prediction" {
        schedule.prediction_type = PredictionType::VPrediction;
    }
    let options = LossOptions {
        kind: match variant["loss"] == "mae" {
            true => LossKind::Mae,
            false => LossKind::Mse,
        },
        ..LossOptions::default()
    };
    let weighting = SnrWeighting {
        min_snr_gamma: number("min_snr_gamma"),
        snr_gamma: None,
        debiased: false,
    };
    let objective = ddpm(schedule, weighting);
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let weights: Vec<f64> = serde_json::from_value(variant["weights"].clone()).unwrap_or(vec![1.0, 1.0]);
    let mut cache = ConditioningCache::default();
    let micro = number("micro").unwrap_or(1.0) as usize;
    let mut loss_gap = 0f64;
    for step in 0..20usize {
        for j in 0..micro {
            let row = |key: &str| inputs[key].get(step * 2 + j).unwrap();
            let texts: Vec<String> = row("captions")
                .to_vec1::<i64>()
                .unwrap()
                .iter()
                .map(|i| captions[*i as usize].clone())
                .collect();
            network.handle.set_training(Some("masks"));
            let forward = || {
                let conditioning = match trains("text_encoder") {
                    true => ConditioningCache::encode(&texts, &model),
                    false => cache.get(&prompts_of(&texts), &model),
                };
                let batch = MicroBatch {
                    latents: vec![row("latents")],
                    noise_draw: NoiseDraw {
                        timesteps: row("timesteps").to_dtype(DType::F32).unwrap().to_vec1().unwrap(),
                        noise: vec![row("noise")],
                        input_noise: Vec::new(),
                        has_stepped: false,
                    },
                    conditioning: conditioning?,
                    weights: weights.clone(),
                    weight: 1.0,
                    loss_inputs: LossInputs::default(),
                    mask: variant.get("mask").map(|_| inputs["mask"].clone()),
                };
                loss_of(&model, &objective, &options, &batch)
            };
            trainer.accumulate(forward).unwrap();
        }
        let done = trainer.finish_step(step as u64, true).unwrap();
        let want = variant["losses"][step].as_f64().unwrap();
        loss_gap = loss_gap.max((done.loss / want - 1.0).abs());
        if let Some(norm) = variant["norms"][step].as_f64() {
            assert!(
                (done.grad_norm.unwrap() / norm - 1.0).abs() < 1e-3,
                "{name}: norm of step {step}"
            );
        }
    }
    let mut weight_gap = largest_gap(&network.tensors(DType::F32).unwrap(), &with_prefix(&theirs, "final/"));
    if let Some(ema) = trainer.ema() {
        ema.swap_in().unwrap();
        weight_gap = weight_gap.max(largest_gap(
            &network.tensors(DType::F32).unwrap(),
            &with_prefix(&theirs, "ema/"),
        ));
    }
    (loss_gap, weight_gap)
}

fn check(name: &str) {
    let (loss, weights) = compare(name);
    println!("{name}: loss {loss:.2e} relative, weights {weights:.2e}");
    assert!(loss < 1e-4, "{name}: the loss differs by {loss:.2e}");
    assert!(weights < 1e-3, "{name}: a weight differs by {weights:.2e}");
}

#[test]
fn adamw_matches_the_reference() {
    check("adamw");
}

#[test]
fn accumulation_matches_the_reference() {
    check("accumulation");
}

#[test]
fn clipping_matches_the_reference() {
    check("clipping");
}

#[test]
fn min_snr_matches_the_reference() {
    check("min_snr");
}

#[test]
fn ema_matches_the_reference() {
    check("ema");
}

#[test]
fn lora_on_convolutions_matches_the_reference() {
    check("conv");
}

#[test]
fn training_the_text_encoder_matches_the_reference() {
    check("text_encoder");
    check("text_encoder_alone");
}

#[test]
fn v_prediction_matches_the_reference() {
    check("v_prediction");
}

#[test]
fn loss_masks_match_the_reference() {
    check("mask");
}

#[test]
fn absolute_loss_with_item_weights_matches_the_reference() {
    check("mae");
}

/// The loss and every gradient of one micro-batch, with LoRA on all layers of the U-Net and with dropout.
fn loss_and_gradients(checkpointing: Checkpointing) -> (f32, Vec<Tensor>) {
    let mut model = tiny_sd();
    model.unet.checkpointing = checkpointing;
    let config = AdapterConfig {
        rank: 4,
        alpha: 8.0,
        conv_rank: Some(4),
        conv_alpha: 8.0,
        dropout: Dropout {
            element: 0.2,
            ..Dropout::default()
        },
        ..AdapterConfig::default()
    };
    let network = AdapterNetwork::attach(
        &config,
        &mut [unet_part(&mut model)],
        &mut TorchGenerator::manual_seed(0),
    )
    .unwrap();
    let params = network.params();
    let mut generator = TorchGenerator::manual_seed(1);
    let mut random = |shape: &[usize]| {
        let count = shape.iter().product();
        Tensor::from_vec(generator.randn(count), shape, &Device::Cpu).unwrap()
    };
    for p in &params {
        p.var.set(&(random(p.var.dims()) * 0.1).unwrap()).unwrap();
    }
    let batch = MicroBatch {
        // Odd sizes: the up blocks must restore the sizes of the down blocks.
        latents: vec![random(&[2, 4, 9, 7])],
        noise_draw: NoiseDraw {
            noise: vec![random(&[2, 4, 9, 7])],
            timesteps: vec![417.0, 30.0],
            input_noise: Vec::new(),
            has_stepped: false,
        },
        conditioning: Conditioning::default().with("context", random(&[2, 77, 32])),
        weights: vec![1.0, 0.5],
        weight: 1.0,
        loss_inputs: LossInputs::default(),
        mask: None,
    };
    network.handle.set_training(Some("masks"));
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
    let objective = ddpm(schedule, SnrWeighting::default());
    let (loss, grads) = gradients(|| loss_of(&model, &objective, &LossOptions::default(), &batch)).unwrap();
    let of = |p: &crate::optim::Param| grads.get(p.var.as_tensor()).unwrap().clone();
    (loss.to_scalar().unwrap(), params.iter().map(of).collect())
}

#[test]
fn gradient_checkpointing_changes_neither_loss_nor_gradients() {
    let norm = |t: &Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    let (loss, grads) = loss_and_gradients(Checkpointing::Off);
    assert!(grads.iter().all(|g| norm(g) > 0.0));
    for steps in [1, 2, 3, 5, 1000] {
        let (recomputed_loss, recomputed_grads) = loss_and_gradients(Checkpointing::Segments { blocks: steps });
        assert!(
            (recomputed_loss / loss - 1.0).abs() < 1e-6,
            "{steps} steps together: loss {recomputed_loss}, {loss}"
        );
        let gaps = recomputed_grads
            .iter()
            .zip(&grads)
            .map(|(a, b)| norm(&(a - b).unwrap()) / norm(b));
        let largest = gaps.fold(0f32, f32::max);
        println!("{steps} steps together: gradients differ by {largest:.1e}");
        // Recomputing sums the gradients of a tensor that several blocks read in another order.
        assert!(
            largest < 1e-5,
            "{steps} steps together: gradients differ by {largest:.1e}"
        );
    }
}

#[test]
fn a_non_finite_loss_does_not_change_the_weights() {
    let var = candle_core::Var::from_tensor(&Tensor::ones(2, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let params = vec![crate::optim::Param {
        name: "p".into(),
        var: var.clone(),
    }];
    let mut trainer = Trainer::new(TrainerOptions {
        params: params.clone(),
        optimizer: Box::new(Adam::new(params, AdamParams::new(true)).unwrap()),
        schedule: constant(1e-3),
        max_grad_norm: Some(1.0),
        ema: None,
        fused_backward: false,
    });
    let of_sum = |factor: f64| (var.as_tensor().sum_all()? * factor).map_err(Into::into);
    trainer.accumulate(|| of_sum(f64::NAN)).unwrap();
    let report = trainer.finish_step(0, true).unwrap();
    assert!(report.loss.is_nan());
    assert!(trainer.weights_are_finite().unwrap());
    assert!(report.warning.unwrap().contains("step 1"));
    // A finite loss with an infinite gradient: that of the square root of 0.
    let of_root = || (var.as_tensor() - 1.0)?.sqrt()?.sum_all().map_err(Into::into);
    trainer.accumulate(of_root).unwrap();
    let report = trainer.finish_step(1, true).unwrap();
    assert_eq!((report.loss, report.grad_norm), (0.0, None));
    assert!(report.warning.unwrap().contains("step 2: the gradients are not finite"));
    assert_eq!(var.to_vec1::<f32>().unwrap(), [1.0, 1.0]);
    assert!(trainer.weights_are_finite().unwrap());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        var.set(&Tensor::new(&[1.0, bad], &Device::Cpu).unwrap()).unwrap();
        assert!(!trainer.weights_are_finite().unwrap(), "{bad}");
    }
}

#[test]
fn timesteps_are_drawn_in_the_configured_range() {
    let options = NoiseOptions {
        min_index: 100,
        max_index: 300,
        ..NoiseOptions::default()
    };
    for preference in [
        NoiseLevelPreference::Balanced,
        NoiseLevelPreference::Content,
        NoiseLevelPreference::Style,
    ] {
        let options = NoiseOptions {
            preference,
            ..options.clone()
        };
        let latents = [Tensor::zeros((64, 4, 2, 2), DType::F32, &Device::Cpu).unwrap()];
        let noise_draw = draw(&options, &mut batch_generator(1, 2, 3), &DrawInputs::new(&latents)).unwrap();
        assert!(
            noise_draw.timesteps.iter().all(|t| (699.0..=899.0).contains(t)),
            "{:?}",
            noise_draw.timesteps
        );
        let mean = f64::from(noise_draw.timesteps.iter().sum::<f32>()) / 64.0;
        match preference {
            NoiseLevelPreference::Content => assert!(mean > 820.0, "{mean}"),
            NoiseLevelPreference::Style => assert!(mean < 780.0, "{mean}"),
            NoiseLevelPreference::Balanced => {}
        }
    }
}

#[test]
fn the_documented_python_draws_the_same_numbers() {
    let text = std::fs::read(fixtures().join("train/randomness.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let noises = load("randomness.safetensors");
    for (number, case) in report["cases"].as_array().unwrap().iter().enumerate() {
        if case.get("flow").is_some() {
            continue;
        }
        let whole = |key: &str, default: u64| case.get(key).and_then(serde_json::Value::as_u64).unwrap_or(default);
        let shape: Vec<usize> = serde_json::from_value(case["shape"].clone()).unwrap();
        let options = NoiseOptions {
            preference: match case["kind"].as_str() {
                Some("content") => NoiseLevelPreference::Content,
                Some("style") => NoiseLevelPreference::Style,
                _ => NoiseLevelPreference::Balanced,
            },
            min_index: whole("low", 0) as u32,
            max_index: whole("high", 999) as u32,
            offset: case["noise_offset"].as_f64().unwrap_or(0.0),
            ..NoiseOptions::default()
        };
        let mut generator = batch_generator(whole("seed", 0), whole("step", 0), whole("micro", 0));
        let captions: Vec<String> = serde_json::from_value(case["captions"].clone()).unwrap_or_default();
        let rules = crate::data::CaptionRules {
            tags: crate::data::TagRules {
                shuffle: true,
                ..crate::data::TagRules::default()
            },
            ..Default::default()
        };
        for (caption, want) in captions.iter().zip(case["shuffled"].as_array().unwrap()) {
            assert_eq!(
                crate::data::build_caption(caption, &rules, &mut generator),
                want.as_str().unwrap()
            );
        }
        let latents = [Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()];
        let noise_draw = draw(&options, &mut generator, &DrawInputs::new(&latents)).unwrap();
        let timesteps: Vec<i64> = noise_draw.timesteps.iter().map(|t| *t as i64).collect();
        assert_eq!(serde_json::json!(timesteps), case["timesteps"]);
        let numbers = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (ours, theirs) = (
            numbers(&noise_draw.noise[0]),
            numbers(&noises[&format!("noise.{number}")]),
        );
        if options.offset == 0.0 {
            assert_eq!(ours, theirs, "case {number}");
        }
        assert!(
            ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < 1e-6),
            "case {number}"
        );
    }
    for row in report["orders"].as_array().unwrap() {
        let order = crate::data::epoch_order(13, row["seed"].as_u64().unwrap(), row["epoch"].as_u64().unwrap(), false);
        assert_eq!(serde_json::json!(order), row["order"]);
    }
}

in_portable_mode! {
    adamw_matches_the_reference,
    accumulation_matches_the_reference,
    clipping_matches_the_reference,
    min_snr_matches_the_reference,
    ema_matches_the_reference,
    lora_on_convolutions_matches_the_reference,
    training_the_text_encoder_matches_the_reference,
    v_prediction_matches_the_reference,
    loss_masks_match_the_reference,
    absolute_loss_with_item_weights_matches_the_reference,
    gradient_checkpointing_changes_neither_loss_nor_gradients,
}

crate::testing::with_emulated_kernels! {
    clipping_matches_the_reference,
    lora_on_convolutions_matches_the_reference,
    training_the_text_encoder_matches_the_reference,
    gradient_checkpointing_changes_neither_loss_nor_gradients,
}
