//! Options of noise that sd-scripts has: comparison with `tests/reference/make_noise_options.py`.

use crate::rng::generator_from_text;
use crate::samplers::{NoiseSchedule, PredictionType, SamplerParams};
use crate::testing::fixtures;
use crate::training::{
    Ddpm, DrawInputs, FlowMatch, FlowTimesteps, FlowWeighting, LossOptions, NoiseOptions, Objective, SnrWeighting,
    draw, noisy_latents,
};
use candle_core::{Device, Tensor};
use serde_json::Value;

fn report() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("train/noise_options.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn options(case: &Value) -> NoiseOptions {
    let iterations = case["iterations"].as_u64().unwrap() as u32;
    NoiseOptions {
        multires: (iterations > 0).then_some((iterations, case["discount"].as_f64().unwrap())),
        blurred: case["blur"] == true,
        input: case["gamma"].as_f64().unwrap(),
        random_input: case["random"] == true,
        offset: case["offset"].as_f64().unwrap(),
        random_offset: case["random_offset"] == true,
        adaptive_offset: case["adaptive"].as_f64().unwrap(),
        ..NoiseOptions::default()
    }
}

fn shape(case: &Value) -> Vec<usize> {
    numbers(&case["shape"]).into_iter().map(|side| side as usize).collect()
}

#[test]
fn multires_and_input_noise_match_the_reference() {
    let report = report();
    for case in report["cases"].as_array().unwrap() {
        let dims = shape(case);
        let values = (0..dims.iter().product::<usize>())
            .map(|i| (i as f32 * 0.37).sin() * 2.0 + 0.5)
            .collect();
        let latents = [Tensor::from_vec::<_, f32>(values, dims, &Device::Cpu).unwrap()];
        let mut generator = generator_from_text(case["generator"].as_str().unwrap());
        let noise_draw = draw(&options(case), &mut generator, &DrawInputs::new(&latents)).unwrap();
        let times: Vec<f64> = noise_draw.timesteps.iter().map(|t| f64::from(*t)).collect();
        assert_eq!(times, numbers(&case["timesteps"]));
        let close = |found: &Tensor, expected: &Value| {
            let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
            for (found, expected) in found.iter().zip(numbers(expected)) {
                assert!(
                    (f64::from(*found) - expected).abs() < 2e-6,
                    "{found} {expected} in {}",
                    case["generator"]
                );
            }
        };
        close(&noise_draw.noise[0], &case["noise"]);
        assert_eq!(noise_draw.input_noise.is_empty(), case["gamma"] == 0);
        if let Some(more) = noise_draw.input_noise.first() {
            close(more, &case["input_noise"]);
        }
    }
}

fn ddpm(prediction_type: PredictionType, debiased: bool, min_snr_gamma: Option<f64>) -> Ddpm {
    let params = serde_json::json!({
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    });
    let mut schedule = NoiseSchedule::new(&SamplerParams::from_json(&params).unwrap()).unwrap();
    schedule.prediction_type = prediction_type;
    Ddpm {
        schedule,
        noise: NoiseOptions::default(),
        weighting: SnrWeighting {
            debiased,
            min_snr_gamma,
            ..SnrWeighting::default()
        },
    }
}

#[test]
fn the_debiased_estimation_matches_the_reference() {
    let report = report();
    for (name, prediction) in [
        ("epsilon", PredictionType::Epsilon),
        ("v_prediction", PredictionType::VPrediction),
    ] {
        for (t, expected) in report["debiased"][name].as_object().unwrap() {
            let t: f32 = t.parse().unwrap();
            let weight = |debiased, gamma| ddpm(prediction, debiased, gamma).loss_weight(t).unwrap();
            let found = weight(true, None);
            assert!(
                (found / expected.as_f64().unwrap() - 1.0).abs() < 1e-4,
                "{name} at {t}: {found} {expected}"
            );
            // As in sd-scripts, both weights are multiplied.
            let both = weight(true, Some(5.0)) / weight(false, Some(5.0));
            assert!((both / found - 1.0).abs() < 1e-6, "{both} {found}");
        }
    }
}

/// As in ai-toolkit.
#[test]
fn of_both_weights_the_one_without_a_cap_counts() {
    let weight = |snr_gamma, min_snr_gamma| {
        let mut objective = ddpm(PredictionType::Epsilon, false, min_snr_gamma);
        objective.weighting.snr_gamma = snr_gamma;
        [3.0, 900.0].map(|t| objective.loss_weight(t).unwrap())
    };
    let plain = weight(Some(4.0), None);
    assert_eq!(weight(Some(4.0), Some(5.0)), plain);
    assert_ne!(weight(None, Some(5.0)), plain);
}

/// The noisy latents have the noise of both, the target that of one.
#[test]
fn input_noise_is_not_in_the_target() {
    let options = NoiseOptions {
        input: 0.5,
        ..NoiseOptions::default()
    };
    let flow = FlowMatch {
        timesteps: FlowTimesteps::Linear,
        weighting: FlowWeighting::Even,
        noise: options.clone(),
    };
    let diffusion = Ddpm {
        noise: options,
        ..ddpm(PredictionType::Epsilon, false, None)
    };
    let objectives: [&dyn Objective; 2] = [&flow, &diffusion];
    for objective in objectives {
        let latents = [Tensor::randn(0f32, 1.0, (2, 4, 6, 6), &Device::Cpu).unwrap()];
        let noise_draw = objective
            .draw(&mut generator_from_text("input"), &DrawInputs::new(&latents))
            .unwrap();
        let mut plain = noise_draw.clone();
        plain.input_noise.clear();
        let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let [with, without] = [&noise_draw, &plain]
            .map(|noise_draw| noisy_latents(objective, &LossOptions::default(), &latents, noise_draw).unwrap());
        assert_ne!(values(&with[0]), values(&without[0]));
        let [target, same] = [&noise_draw, &plain].map(|noise_draw| objective.target(&latents, noise_draw).unwrap());
        assert_eq!(values(&target[0]), values(&same[0]));
    }
}
