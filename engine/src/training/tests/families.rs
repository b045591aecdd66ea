//! Comparison with the fixtures of `tests/reference/make_train_families.py`: twenty steps of Stable Diffusion 2.1 and XL
//! with diffusers and peft, in float64.

use super::{constant, ddpm, largest_gap, loss_of, prompts_of, with_prefix};
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::error::Result;
use crate::families::stable_diffusion::{SdModel, Variant};
use crate::families::{ItemSize, LoadOptions, Model, sd2, sdxl};
use crate::optim::{Adam, AdamParams, Param};
use crate::rng::TorchGenerator;
use crate::samplers::{NoiseSchedule, SamplerParams};
use crate::testing::{fixtures, in_portable_mode, sampled_cases};
use crate::training::{
    ConditioningCache, LossInputs, LossOptions, MicroBatch, NoiseDraw, SnrWeighting, Trainer, TrainerOptions,
};
use crate::weights::TrainableFilter;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// A family, its tiny model, and the folder of its fixtures.
pub(super) struct Family {
    variant: &'static Variant,
    model: &'static str,
    folder: &'static str,
}

pub(super) const SD21: Family = Family {
    variant: &sd2::VARIANT,
    model: "tiny_sd21",
    folder: "train_sd21",
};
pub(super) const SDXL: Family = Family {
    variant: &sdxl::VARIANT,
    model: "tiny_sdxl",
    folder: "train_sdxl",
};

impl Family {
    pub(super) fn load(&self, options: &LoadOptions) -> SdModel {
        SdModel::load(self.variant, fixtures().join(self.model), options).unwrap()
    }

    fn tensors(&self, file: &str) -> HashMap<String, Tensor> {
        candle_core::safetensors::load(fixtures().join(self.folder).join(file), &Device::Cpu).unwrap()
    }

    fn report(&self, file: &str) -> Value {
        serde_json::from_slice(&std::fs::read(fixtures().join(self.folder).join(file)).unwrap()).unwrap()
    }

    /// Trains twenty steps and checks the loss and the norm of each.
    pub(super) fn train(
        &self,
        model: &SdModel,
        params: Vec<Param>,
        lr: f64,
        trains_text: bool,
        (report, name): (&Value, &str),
    ) {
        let variant = &report["variants"][name];
        let inputs = self.tensors("parity_inputs.safetensors");
        let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
        let schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
        let objective = ddpm(schedule, SnrWeighting::default());
        let mut cache = ConditioningCache::default();
        let mut trainer = Trainer::new(TrainerOptions {
            optimizer: Box::new(Adam::new(params.clone(), AdamParams::new(true)).unwrap()),
            params,
            schedule: constant(lr),
            max_grad_norm: variant["max_norm"].as_f64(),
            ema: None,
            fused_backward: false,
        });
        let (mut loss_gap, mut norm_gap) = (0f64, 0f64);
        for step in 0..20 {
            let row = |key: &str| inputs[key].get(step).unwrap();
            let texts = row("captions").to_vec1::<i64>().unwrap();
            let texts: Vec<String> = texts.iter().map(|i| captions[*i as usize].clone()).collect();
            let forward = || -> Result<Tensor> {
                let conditioning = match trains_text {
                    true => ConditioningCache::encode(&texts, model)?,
                    false => cache.get(&prompts_of(&texts), model)?,
                };
                let batch = MicroBatch {
                    latents: vec![row("latents")],
                    noise_draw: NoiseDraw {
                        timesteps: row("timesteps").to_dtype(DType::F32)?.to_vec1()?,
                        noise: vec![row("noise")],
                        input_noise: Vec::new(),
                        has_stepped: false,
                    },
                    conditioning: model.with_sizes(conditioning, &sizes(inputs.get("time_ids"), step))?,
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
        println!("{} {name}: losses {loss_gap:.1e}, norms {norm_gap:.1e}", self.folder);
        assert!(
            loss_gap < 1e-4 && norm_gap < 1e-3,
            "{name}: {loss_gap:.1e} {norm_gap:.1e}"
        );
    }

    fn check_lora(&self, name: &str) {
        let report = self.report("parity.json");
        let options = &report["variants"][name];
        let list = |key: &str| -> Vec<String> { serde_json::from_value(options[key].clone()).unwrap_or_default() };
        let (mut targets, parts) = (list("targets"), list("parts"));
        let trains_text = !parts.is_empty();
        if trains_text {
            targets.extend(["self_attn", "mlp"].map(str::to_owned));
        }
        let (rank, alpha) = (
            options["rank"].as_u64().unwrap() as usize,
            options["alpha"].as_f64().unwrap(),
        );
        let config = AdapterConfig {
            rank,
            alpha,
            conv_rank: (name == "conv").then_some(rank),
            conv_alpha: alpha,
            only_if_contains: targets,
            ..AdapterConfig::default()
        };
        let mut model = self.load(&LoadOptions::cpu());
        let mut trained = model.parts();
        trained.retain(|part| part.id == "unet" || trains_text);
        let network = AdapterNetwork::attach(&config, &mut trained, &mut TorchGenerator::manual_seed(0)).unwrap();
        drop(trained);
        let start = self.tensors("parity_start.safetensors");
        let params = network.params();
        for param in &params {
            param.var.set(&start[&param.name]).unwrap();
        }
        network.handle.set_training(Some("masks"));
        self.train(&model, params.clone(), 1e-3, trains_text, (&report, name));
        let ours = params
            .iter()
            .map(|param| (param.name.clone(), param.var.as_detached_tensor()));
        let ours: BTreeMap<String, Tensor> = ours.collect();
        let theirs = with_prefix(&self.tensors(&format!("parity_{name}.safetensors")), "final/");
        let gap = largest_gap(&ours, &theirs);
        println!("{} {name}: weights {gap:.1e}", self.folder);
        assert!(gap < 1e-3, "{name}: {gap:.1e}");
    }

    fn check_full(&self, name: &str) {
        let report = self.report("full.json");
        let trains_text = report["variants"][name].get("parts").is_some();
        let text = match trains_text {
            true => TrainableFilter::everything(),
            false => TrainableFilter::Nothing,
        };
        let options = LoadOptions::cpu().training(TrainableFilter::everything(), text);
        let model = self.load(&options);
        let params: Vec<Param> = model
            .trained
            .iter()
            .map(|(name, var)| Param {
                name: name.clone(),
                var: var.clone(),
            })
            .collect();
        self.train(&model, params.clone(), 1e-4, trains_text, (&report, name));
        let every = report["every"].as_u64().unwrap() as usize;
        let kept = params.iter().map(|param| {
            let values = param.var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let values: Vec<f32> = values.into_iter().step_by(every).collect();
            (param.name.clone(), Tensor::new(values, &Device::Cpu).unwrap())
        });
        let theirs = with_prefix(&self.tensors("full.safetensors"), &format!("{name}/"));
        let gap = largest_gap(&kept.collect(), &theirs);
        println!("{} {name}: weights {gap:.1e}", self.folder);
        assert!(gap < 1e-3, "{name}: {gap:.1e}");
    }
}

fn sizes(time_ids: Option<&Tensor>, step: usize) -> Vec<ItemSize> {
    let Some(time_ids) = time_ids else { return Vec::new() };
    let rows = time_ids.get(step).unwrap().to_vec2::<f32>().unwrap();
    let size = |row: &Vec<f32>| {
        let pair = |at: usize| (row[at] as u32, row[at + 1] as u32);
        ItemSize {
            original: pair(0),
            crop: pair(2),
            target: pair(4),
        }
    };
    rows.iter().map(size).collect()
}

#[test]
fn loras_of_stable_diffusion_2_match_the_reference() {
    for name in sampled_cases(vec!["adamw", "attention", "conv", "text_encoder"]) {
        SD21.check_lora(name);
    }
}

#[test]
fn loras_of_stable_diffusion_xl_match_the_reference() {
    for name in sampled_cases(vec!["attention", "linear", "conv", "both_text_encoders"]) {
        SDXL.check_lora(name);
    }
}

#[test]
fn full_fine_tunes_of_stable_diffusion_2_match_the_reference() {
    for name in sampled_cases(vec!["unet", "everything"]) {
        SD21.check_full(name);
    }
}

#[test]
fn full_fine_tunes_of_stable_diffusion_xl_match_the_reference() {
    for name in sampled_cases(vec!["unet", "everything"]) {
        SDXL.check_full(name);
    }
}

in_portable_mode! {
    loras_of_stable_diffusion_2_match_the_reference,
    loras_of_stable_diffusion_xl_match_the_reference,
    full_fine_tunes_of_stable_diffusion_xl_match_the_reference,
}

crate::testing::with_emulated_kernels! {
    loras_of_stable_diffusion_xl_match_the_reference,
}
