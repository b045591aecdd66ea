//! The draws of flow matching: comparison with the Python code of `docs/randomness.md` (`tests/reference/make_randomness.py`).

use super::load;
use crate::data::{CaptionRules, TagRules, build_caption};
use crate::samplers::SamplerParams;
use crate::testing::fixtures;
use crate::training::{
    DrawInputs, FlowMatch, FlowTimesteps, FlowWeighting, LossOptions, NoiseDraw, NoiseLevelPreference, NoiseOptions,
    Objective, batch_generator, noisy_latents, step_to,
};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;

/// Image tokens at which the shift of FLUX.1-dev is that of the fixture: `mu` 0.63.
const TOKENS: usize = 1024;

fn timesteps_of(flow: &Value) -> FlowTimesteps {
    match flow["timestep_type"].as_str().unwrap() {
        "sigmoid" => FlowTimesteps::Sigmoid(1.0),
        "linear" => FlowTimesteps::Linear,
        "lognorm_blend" => FlowTimesteps::LognormBlend,
        "two_step" => FlowTimesteps::FewSteps(2),
        "eight_step" => FlowTimesteps::FewSteps(8),
        _ => FlowTimesteps::Shift(Box::new(SamplerParams {
            use_dynamic_shifting: flow.get("mu").map(|_| true),
            shift: flow["shift"].as_f64(),
            // The family's pipeline sets it for samplers; training has the scheduler's own levels.
            even_flow_sigmas: true,
            ..SamplerParams::default()
        })),
    }
}

#[test]
fn draws_match_the_documented_python() {
    let text = std::fs::read(fixtures().join("train/randomness.json")).unwrap();
    let report: Value = serde_json::from_slice(&text).unwrap();
    let noises = load("randomness.safetensors");
    let mut count = 0;
    for (number, case) in report["cases"].as_array().unwrap().iter().enumerate() {
        let Some(flow) = case.get("flow") else { continue };
        count += 1;
        let whole = |key: &str, default: u64| case.get(key).and_then(Value::as_u64).unwrap_or(default);
        if let Some(mu) = flow["mu"].as_f64() {
            assert_eq!(mu, 0.63, "that of {TOKENS} tokens");
        }
        let objective = FlowMatch {
            timesteps: timesteps_of(flow),
            weighting: FlowWeighting::Even,
            noise: NoiseOptions {
                preference: match case["kind"].as_str() {
                    Some("content") => NoiseLevelPreference::Content,
                    Some("style") => NoiseLevelPreference::Style,
                    _ => NoiseLevelPreference::Balanced,
                },
                min_index: whole("low", 0) as u32,
                max_index: whole("high", 999) as u32,
                offset: case["noise_offset"].as_f64().unwrap_or(0.0),
                ..NoiseOptions::default()
            },
        };
        let mut generator = batch_generator(whole("seed", 0), whole("step", 0), whole("micro", 0));
        let rules = CaptionRules {
            tags: TagRules {
                shuffle: true,
                ..TagRules::default()
            },
            ..CaptionRules::default()
        };
        for caption in case["captions"].as_array().into_iter().flatten() {
            let _ = build_caption(caption.as_str().unwrap(), &rules, &mut generator);
        }
        let shape: Vec<usize> = serde_json::from_value(case["shape"].clone()).unwrap();
        let latents = [Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()];
        let inputs = DrawInputs {
            image_tokens: TOKENS,
            ..DrawInputs::new(&latents)
        };
        let noise_draw = objective.draw(&mut generator, &inputs).unwrap();
        let expected: Vec<f32> = serde_json::from_value(case["timesteps"].clone()).unwrap();
        for (ours, theirs) in noise_draw.timesteps.iter().zip(&expected) {
            assert!((ours - theirs).abs() < 1e-3, "case {number}: {ours} {theirs}");
        }
        assert_eq!(noise_draw.timesteps.len(), expected.len());
        let numbers = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (ours, theirs) = (
            numbers(&noise_draw.noise[0]),
            numbers(&noises[&format!("noise.{number}")]),
        );
        assert!(
            ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < 1e-6),
            "case {number}"
        );
    }
    assert_eq!(count, 7);
}

#[test]
fn the_velocity_leads_from_the_image_to_the_noise() {
    let objective = FlowMatch {
        timesteps: FlowTimesteps::Linear,
        weighting: FlowWeighting::Bell,
        noise: NoiseOptions::default(),
    };
    let latents = [Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap()];
    let noise_draw = NoiseDraw {
        timesteps: vec![0.0, 250.0],
        noise: vec![Tensor::new(&[[9f32, 9.0], [7.0, -4.0]], &Device::Cpu).unwrap()],
        input_noise: Vec::new(),
        has_stepped: false,
    };
    let noisy = objective.noisy(&latents, &noise_draw).unwrap().remove(0);
    assert_eq!(noisy.to_vec2::<f32>().unwrap(), [[1.0, 2.0], [4.0, 2.0]]);
    let target = objective.target(&latents, &noise_draw).unwrap().remove(0);
    assert_eq!(target.to_vec2::<f32>().unwrap(), [[8.0, 7.0], [4.0, -8.0]]);
    assert!(objective.loss_weight(500.0).unwrap() > objective.loss_weight(900.0).unwrap());
}

/// The factor of the noisy latents counts once, before the step (`timestep_type: next_sample`).
#[test]
fn noisy_latents_after_a_step_are_where_it_arrived() {
    let objective = FlowMatch {
        timesteps: FlowTimesteps::Linear,
        weighting: FlowWeighting::Even,
        noise: NoiseOptions::default(),
    };
    let options = LossOptions {
        noisy_multiplier: 0.5,
        ..LossOptions::default()
    };
    let tensor = |values: [f32; 2]| [Tensor::new(&[values], &Device::Cpu).unwrap()];
    let (latents, predicted) = (tensor([2.0, 4.0]), tensor([8.0, -8.0]));
    let noise_draw = NoiseDraw {
        timesteps: vec![750.0],
        noise: tensor([6.0, 0.0]).to_vec(),
        input_noise: Vec::new(),
        has_stepped: false,
    };
    let noisy = noisy_latents(&objective, &options, &latents, &noise_draw).unwrap();
    let stepped = step_to(&latents, &noisy, &predicted, &noise_draw, vec![500.0]).unwrap();
    let [found] = &noisy_latents(&objective, &options, &latents, &stepped).unwrap()[..] else {
        panic!("one tensor");
    };
    // (0.25 * 2 + 0.75 * 6) / 2 - 8 / 4, (0.25 * 4) / 2 + 8 / 4
    assert_eq!(found.to_vec2::<f32>().unwrap(), [[0.5, 2.5]]);
}
