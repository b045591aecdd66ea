//! Comparison with the fixture of `tests/reference/make_train_decorator.py`: 20 steps of a decorator of FLUX.1 with diffusers, without and
//! with classifier-free guidance.

use super::{prompts_of, reference_trainer};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::{Conditioning, FLUX, LoadOptions, Model};
use crate::optim::Param;
use crate::testing::{fixtures, gap, in_portable_mode, largest};
use crate::training::{
    ConditioningCache, LossInputs, LossOptions, MicroBatch, NoiseDraw, Objective, TrainingCfg, loss,
};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;

fn relative(found: &Tensor, expected: &Tensor) -> f32 {
    gap(found, expected) / largest(expected)
}

fn compare(name: &str, checkpointing: Checkpointing, sequential: bool) {
    let file = |path: &str| candle_core::safetensors::load(fixtures().join(path), &Device::Cpu).unwrap();
    let (inputs, fixture) = (
        file("train_flux/parity_inputs.safetensors"),
        file("train_decorator/decorator.safetensors"),
    );
    let report = std::fs::read(fixtures().join("train_decorator/decorator.json")).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    let variant = &report["variants"][name];
    let captions: Vec<String> = serde_json::from_value(report["captions"].clone()).unwrap();
    let mut options = LoadOptions::cpu();
    options.memory_options.sequential_cfg = sequential;
    let mut model = super::flux::model(&FLUX, variant, &options);
    model.set_checkpointing(checkpointing);
    assert_eq!(model.decorator_width(), Some(24));
    let var = Var::from_tensor(&fixture[&format!("start/{name}")]).unwrap();
    model.set_decorator(var.as_tensor().clone()).unwrap();
    let params = vec![Param {
        name: "weight".into(),
        var: var.clone(),
    }];
    let mut trainer = reference_trainer(params, variant);
    let cfg = variant["cfg_scale"]
        .as_f64()
        .map(|scale| TrainingCfg { scale, rescale: scale });
    let (objective, mut cache) = (super::flux::OBJECTIVE(), ConditioningCache::default());
    let guidance = variant["guidance"].as_f64().unwrap();
    for step in 0..report["steps"].as_u64().unwrap() as usize {
        let row = |key: &str| inputs[key].get(step).unwrap();
        let texts = row("captions").to_vec1::<i64>().unwrap();
        let texts: Vec<String> = texts.iter().map(|i| captions[*i as usize].clone()).collect();
        let nothing = vec![String::new(); texts.len()];
        let [texts, nothing] = [texts, nothing].map(|texts| cache.get(&prompts_of(&texts), &model).unwrap());
        let decorated = |text: &Conditioning, is_unconditional: bool| -> Result<Conditioning> {
            model.with_guidance(model.with_decorator(text.clone(), is_unconditional)?, &[guidance])
        };
        let unconditional = decorated(&nothing, true).unwrap();
        let noise_draw = NoiseDraw {
            timesteps: row("timesteps").to_dtype(DType::F32).unwrap().to_vec1().unwrap(),
            noise: vec![row("noise")],
            input_noise: Vec::new(),
            has_stepped: false,
        };
        let predict = |latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning| match cfg {
            Some(cfg) => cfg.predict(&model, latents, timesteps, [&unconditional, conditioning]),
            None => model.predict(latents, timesteps, conditioning),
        };
        if step == 0 {
            let noisy = objective.noisy(&[row("latents")], &noise_draw).unwrap();
            let times = Tensor::new(noise_draw.timesteps.clone(), &Device::Cpu).unwrap();
            let found = predict(&noisy, &times, &decorated(&texts, false).unwrap()).unwrap();
            let difference = relative(&found[0], &fixture[&format!("prediction/{name}")]);
            println!("{name}: prediction {difference:.1e}");
            assert!(difference < 1e-4, "{name}: prediction {difference:.1e}");
        }
        let forward = || -> Result<Tensor> {
            let batch = MicroBatch {
                latents: vec![row("latents")],
                noise_draw: noise_draw.clone(),
                conditioning: decorated(&texts, false)?,
                weights: vec![1.0; texts.batch()],
                weight: 1.0,
                loss_inputs: LossInputs::default(),
                mask: None,
            };
            loss(&predict, &objective, &LossOptions::default(), &batch)
        };
        trainer.accumulate(forward).unwrap();
        if step == 0 {
            let (parts, _) = trainer.state().unwrap();
            let gradient = &parts["gradients"]["weight"];
            let difference = relative(gradient, &fixture[&format!("grad/{name}")]);
            println!("{name}: gradient {difference:.1e}");
            assert!(difference < 1e-4, "{name}: gradient {difference:.1e}");
        }
        let done = trainer.finish_step(step as u64, true).unwrap();
        for (found, key) in [(done.loss, "losses"), (done.grad_norm.unwrap(), "norms")] {
            let difference = (found / variant[key][step].as_f64().unwrap() - 1.0).abs();
            assert!(difference < 1e-4, "{name}, step {step}, {key}: {difference:.1e}");
        }
    }
    let difference = relative(var.as_tensor(), &fixture[&format!("final/{name}")]);
    println!("{name}: tokens {difference:.1e}");
    assert!(difference < 1e-4, "{name}: tokens {difference:.1e}");
    // What was learned, and not only where it began.
    let start = &fixture[&format!("start/{name}")];
    let moved = gap(&fixture[&format!("final/{name}")], start);
    assert!(gap(var.as_tensor(), &fixture[&format!("final/{name}")]) < 1e-2 * moved);
}

#[test]
fn a_decorator_is_trained_as_in_the_reference() {
    compare("plain", Checkpointing::Off, false);
    compare("plain", Checkpointing::Segments { blocks: 1 }, false);
    compare("guided", Checkpointing::Off, false);
    compare("guided", Checkpointing::Segments { blocks: 1 }, true);
}

in_portable_mode! {
    a_decorator_is_trained_as_in_the_reference,
}
