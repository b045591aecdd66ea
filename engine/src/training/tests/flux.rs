//! Comparison with the fixtures of `tests/reference/make_train_flux.py` and `make_train_kontext.py`: 20 steps of FLUX.1 and of FLUX.1
//! Kontext with diffusers and peft, LoRAs and full fine-tunes.

use super::{largest_gap, loss_of, prompts_of, reference_trainer, with_prefix};
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::flux::{FluxFamily, FluxModel};
use crate::families::{FLUX, FLUX_KONTEXT, LoadOptions, Model};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, in_portable_mode, sampled_cases, schnell_folder};
use crate::training::{
    ConditioningCache, FlowMatch, FlowTimesteps, FlowWeighting, LossInputs, LossOptions, MicroBatch, NoiseDraw,
    NoiseOptions, Objective,
};
use crate::weights::TrainableFilter;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// The fixtures of one family. Inputs and first weights are those of FLUX.1 for both.
struct Fixture {
    family: &'static FluxFamily,
    folder: &'static str,
}

const FLUX_STEPS: Fixture = Fixture {
    family: &FLUX,
    folder: "train_flux",
};
const KONTEXT_STEPS: Fixture = Fixture {
    family: &FLUX_KONTEXT,
    folder: "train_kontext",
};

impl Fixture {
    fn tensors(&self, file: &str) -> HashMap<String, Tensor> {
        let path = fixtures().join(format!("{}/{file}.safetensors", self.folder));
        candle_core::safetensors::load(path, &Device::Cpu).unwrap()
    }

    fn report(&self, file: &str) -> Value {
        let path = fixtures().join(format!("{}/{file}.json", self.folder));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// How many steps later the latents of `parity_inputs` are the control latents of a step. `None`: there are none.
    fn control_shift(&self) -> Option<usize> {
        self.report("parity")["shift"].as_u64().map(|shift| shift as usize)
    }
}

fn tensors(file: &str) -> HashMap<String, Tensor> {
    FLUX_STEPS.tensors(file)
}

pub(super) fn model(family: &'static FluxFamily, variant: &Value, options: &LoadOptions) -> FluxModel {
    let schnell = schnell_folder();
    let folder = match variant.get("model") {
        Some(_) => schnell.path().to_path_buf(),
        None => fixtures().join("tiny_flux"),
    };
    let mut model = FluxModel::load(family, folder, options).unwrap();
    model.set_max_sequence_length(variant["max_sequence_length"].as_u64().unwrap() as usize);
    model
}

pub(super) const OBJECTIVE: fn() -> FlowMatch = || FlowMatch {
    timesteps: FlowTimesteps::Linear,
    weighting: FlowWeighting::Even,
    noise: NoiseOptions::default(),
};

/// Trains all steps and checks the loss and the norm of each.
pub(super) fn train(model: &FluxModel, params: Vec<Param>, report: &Value, name: &str, control_shift: Option<usize>) {
    let variant = &report["variants"][name];
    let inputs = tensors("parity_inputs");
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let objective = OBJECTIVE();
    let mut cache = ConditioningCache::default();
    let mut trainer = reference_trainer(params, variant);
    let (mut loss_gap, mut norm_gap) = (0f64, 0f64);
    let steps = report["steps"].as_u64().unwrap() as usize;
    for step in 0..steps {
        let row = |key: &str| inputs[key].get(step).unwrap();
        let texts = row("captions").to_vec1::<i64>().unwrap();
        let texts: Vec<String> = texts.iter().map(|i| captions[*i as usize].clone()).collect();
        let conditioning = cache.get(&prompts_of(&texts), model).unwrap();
        let conditioning = match control_shift {
            Some(shift) => {
                let control = inputs["latents"].get((step + shift) % steps).unwrap();
                model.with_control(conditioning, &[control]).unwrap()
            }
            None => conditioning,
        };
        let guidance = variant["guidance"].as_f64().unwrap();
        let forward = || -> Result<Tensor> {
            let batch = MicroBatch {
                latents: vec![row("latents")],
                noise_draw: NoiseDraw {
                    timesteps: row("timesteps").to_dtype(DType::F32)?.to_vec1()?,
                    noise: vec![row("noise")],
                    input_noise: Vec::new(),
                    has_stepped: false,
                },
                conditioning: model.with_guidance(conditioning.clone(), &[guidance])?,
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

fn check_lora(fixture: &Fixture, name: &str, checkpointing: Checkpointing) {
    let report = fixture.report("parity");
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
    let mut model = model(fixture.family, variant, &LoadOptions::cpu());
    model.set_checkpointing(checkpointing);
    let mut trained = model.parts();
    trained.retain(|part| part.id == "transformer");
    let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
    drop(trained);
    let start = tensors(match variant.get("model") {
        Some(_) => "parity_start_schnell",
        None => "parity_start",
    });
    let params = network.params();
    for param in &params {
        param.var.set(&start[&param.name]).unwrap();
    }
    network.handle.set_training(Some("masks"));
    train(&model, params, &report, name, fixture.control_shift());
    let theirs = with_prefix(&fixture.tensors(&format!("parity_{name}")), "final/");
    let ours: BTreeMap<String, Tensor> = network.tensors(DType::F32).unwrap();
    let gap = largest_gap(&ours, &theirs);
    println!("{name}: weights {gap:.1e}");
    assert!(gap < 1e-3, "{name}: {gap:.1e}");
}

const VARIANTS: [&str; 5] = ["linear", "attention", "guidance", "text_tokens_512", "schnell"];

#[test]
fn loras_match_the_reference() {
    for name in sampled_cases(VARIANTS.to_vec()) {
        check_lora(&FLUX_STEPS, name, Checkpointing::Off);
    }
}

#[test]
fn loras_with_gradient_checkpointing_match_the_reference() {
    for name in sampled_cases(VARIANTS.to_vec()) {
        check_lora(&FLUX_STEPS, name, Checkpointing::Segments { blocks: 1 });
    }
}

fn check_full(fixture: &Fixture, name: &str, checkpointing: Checkpointing) {
    let report = fixture.report("full");
    let variant = &report["variants"][name];
    let list = |key: &str| -> Vec<String> { serde_json::from_value(variant[key].clone()).unwrap_or_default() };
    let filter = TrainableFilter::Names {
        only_if_contains: list("only"),
        ignore_if_contains: list("ignore"),
        part: None,
    };
    let options = LoadOptions::cpu().training(filter, TrainableFilter::Nothing);
    let mut model = model(fixture.family, variant, &options);
    model.set_checkpointing(checkpointing);
    let params = model.trained().iter().map(|(name, var)| Param {
        name: name.clone(),
        var: var.clone(),
    });
    let params: Vec<Param> = params.collect();
    train(&model, params.clone(), &report, name, fixture.control_shift());
    let every = report["every"].as_u64().unwrap() as usize;
    let kept = params.iter().map(|param| {
        let values = param.var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let values: Vec<f32> = values.into_iter().step_by(every).collect();
        (param.name.clone(), Tensor::new(values, &Device::Cpu).unwrap())
    });
    let theirs = with_prefix(&fixture.tensors("full"), &format!("{name}/"));
    let gap = largest_gap(&kept.collect(), &theirs);
    println!("full, {name}: weights {gap:.1e}");
    assert!(gap < 1e-3, "{name}: {gap:.1e}");
}

#[test]
fn full_fine_tunes_match_the_reference() {
    for name in sampled_cases(vec!["everything", "chosen"]) {
        check_full(&FLUX_STEPS, name, Checkpointing::Off);
        check_full(&FLUX_STEPS, name, Checkpointing::Segments { blocks: 1 });
    }
}

/// FLUX.1 Kontext: its velocity with a control image, a LoRA and a full fine-tune.
#[test]
fn kontext_matches_the_reference() {
    let report = KONTEXT_STEPS.report("parity");
    let variant = &report["variants"]["some_layers"];
    let model = model(&FLUX_KONTEXT, variant, &LoadOptions::cpu());
    let inputs = tensors("parity_inputs");
    let row = |key: &str, step: usize| inputs[key].get(step).unwrap();
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let texts = row("captions", 0).to_vec1::<i64>().unwrap();
    let texts: Vec<String> = texts.iter().map(|i| captions[*i as usize].clone()).collect();
    let noise_draw = NoiseDraw {
        timesteps: row("timesteps", 0).to_dtype(DType::F32).unwrap().to_vec1().unwrap(),
        noise: vec![row("noise", 0)],
        input_noise: Vec::new(),
        has_stepped: false,
    };
    let noisy = OBJECTIVE().noisy(&[row("latents", 0)], &noise_draw).unwrap();
    let conditioning = ConditioningCache::encode(&texts, &model).unwrap();
    let control = row("latents", KONTEXT_STEPS.control_shift().unwrap());
    let with_control = model.with_control(conditioning.clone(), &[control]).unwrap();
    let predict = |conditioning| {
        let times = Tensor::new(noise_draw.timesteps.clone(), &Device::Cpu).unwrap();
        model.predict(&noisy, &times, conditioning).unwrap().remove(0)
    };
    let expected = &KONTEXT_STEPS.tensors("parity_some_layers")["prediction"];
    let largest = crate::testing::largest(expected);
    let difference = crate::testing::gap(&predict(&with_control), expected) / largest;
    println!("prediction {difference:.1e}");
    assert!(difference < 1e-5, "{difference:.1e}");
    // Without it, the model is FLUX.1-dev.
    assert!(crate::testing::gap(&predict(&conditioning), expected) / largest > 0.01);

    for checkpointing in [Checkpointing::Off, Checkpointing::Segments { blocks: 1 }] {
        check_lora(&KONTEXT_STEPS, "some_layers", checkpointing);
        check_full(&KONTEXT_STEPS, "everything", checkpointing);
    }
}

#[test]
fn without_guidance_the_scale_has_no_effect() {
    let report = FLUX_STEPS.report("parity");
    let model = model(&FLUX, &report["variants"]["linear"], &LoadOptions::cpu());
    let text = model
        .encode_prompts(&[crate::families::Prompt::new("two zorb")])
        .unwrap();
    let latents = tensors("parity_inputs")["latents"]
        .get(0)
        .unwrap()
        .narrow(0, 0, 1)
        .unwrap();
    let predict = |conditioning| {
        let time = Tensor::new(&[400f32], &Device::Cpu).unwrap();
        model
            .predict(std::slice::from_ref(&latents), &time, &conditioning)
            .unwrap()
            .remove(0)
    };
    let at = |scale| model.with_guidance(text.clone(), &[scale]).unwrap();
    let gap = |a: &Tensor, b: &Tensor| crate::testing::gap(a, b);
    assert!(gap(&predict(at(1.0)), &predict(at(3.5))) > 1e-4);
    let without = [1.0, 3.5].map(|scale| predict(model.without_guidance(at(scale))));
    assert_eq!(gap(&without[0], &without[1]), 0.0);
    assert!(gap(&without[0], &predict(at(1.0))) > 1e-4);
}

in_portable_mode! {
    full_fine_tunes_match_the_reference,
    kontext_matches_the_reference,
    loras_match_the_reference,
    loras_with_gradient_checkpointing_match_the_reference,
}

crate::testing::with_emulated_kernels! {
    full_fine_tunes_match_the_reference,
    loras_with_gradient_checkpointing_match_the_reference,
}
