//! Options of loss, noise and latents: comparison with `tests/reference/make_train_options.py`.

use super::load;
use crate::autograd::gradients;
use crate::families::Conditioning;
use crate::rng::TorchGenerator;
use crate::samplers::{NoiseSchedule, SamplerParams};
use crate::testing::{fixtures, in_portable_mode, largest};
use crate::training::{
    ChannelStatistics, Ddpm, DrawInputs, FlowMatch, FlowTimesteps, FlowWeighting, GuidanceLoss, LatentOptions,
    LossInputs, LossKind, LossOptions, MicroBatch, NoiseDraw, NoiseOptions, Objective, SnrWeighting, X0Loss, loss,
};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;

fn report() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("train/options.json")).unwrap()).unwrap()
}

fn objective(case: &Value) -> Box<dyn Objective> {
    if case["flow"] == true {
        return Box::new(FlowMatch {
            timesteps: FlowTimesteps::Linear,
            weighting: match case["bell"] == true {
                true => FlowWeighting::Bell,
                false => FlowWeighting::Even,
            },
            noise: NoiseOptions::default(),
        });
    }
    let params = serde_json::json!({
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
        "prediction_type": "epsilon"
    });
    Box::new(Ddpm {
        schedule: NoiseSchedule::new(&SamplerParams::from_json(&params).unwrap()).unwrap(),
        noise: NoiseOptions::default(),
        weighting: SnrWeighting {
            min_snr_gamma: case["min_snr_gamma"].as_f64(),
            snr_gamma: None,
            debiased: false,
        },
    })
}

fn loss_options(case: &Value) -> LossOptions {
    let number = |key: &str, usual: f64| case[key].as_f64().unwrap_or(usual);
    let estimate = |key: &str| {
        case[key].as_str().map(|how| X0Loss {
            weighted: how == "weighted",
        })
    };
    LossOptions {
        kind: match case["loss_type"].as_str().unwrap() {
            "mae" => LossKind::Mae,
            "pseudo_huber" => LossKind::PseudoHuber,
            _ => LossKind::Mse,
        },
        stepped: false,
        source: false,
        norm_correction: None,
        noisy_multiplier: number("noisy_latent_multiplier", 1.0),
        match_noise_norm: case["match_noise_norm"] == true,
        prediction_scale: number("pred_scaler", 1.0),
        target_noise_multiplier: number("target_noise_multiplier", 1.0),
        signal_amplification: number("signal_amplification_strength", 0.0),
        guidance: case.get("guidance").map(|guidance| GuidanceLoss {
            cfg_zero: guidance["cfg_zero"] == true,
            by_sigma: guidance["by_sigma"] == true,
        }),
        differential_guidance: case["differential_guidance_scale"].as_f64(),
        x0: estimate("t0_loss_target"),
        spectrum: estimate("do_fft_loss"),
        diverges: case["base"].as_str().is_some_and(|base| base.contains("divergence")),
        outside_weight: number("inverted_mask_prior_multiplier", 0.0),
        deviation: case["target_norm_std_value"].as_f64(),
        max: case["max_loss"].as_f64(),
    }
}

fn losses_match_the_reference() {
    let (report, tensors) = (report(), load("options.safetensors"));
    assert_eq!(report["losses"].as_array().unwrap().len(), 60);
    for (number, case) in report["losses"].as_array().unwrap().iter().enumerate() {
        let shape: Vec<usize> = serde_json::from_value(case["shape"].clone()).unwrap();
        let mut generator = TorchGenerator::manual_seed(case["seed"].as_u64().unwrap());
        let mut random = || {
            let values = generator.randn(shape.iter().product());
            Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap()
        };
        let [prediction, latents, noise, base, unconditional] = std::array::from_fn(|_| random());
        let mut weights = || {
            let values = generator.rand(shape[0] * shape[2] * shape[3]);
            Tensor::from_vec(values, (shape[0], 1, shape[2], shape[3]), &Device::Cpu).unwrap()
        };
        let [mask, outside] = std::array::from_fn(|_| weights());
        let prediction = Var::from_tensor(&prediction).unwrap();
        let numbers = |value: &Value| -> Vec<f64> { serde_json::from_value(value.clone()).unwrap() };
        let of_base = case["base"].as_str();
        let batch = MicroBatch {
            latents: vec![latents],
            noise_draw: NoiseDraw {
                timesteps: numbers(&case["timesteps"]).iter().map(|t| *t as f32).collect(),
                noise: vec![noise],
                input_noise: Vec::new(),
                has_stepped: false,
            },
            conditioning: Conditioning::default(),
            weights: numbers(&case["weights"]),
            weight: case["weight"].as_f64().unwrap(),
            mask: (case["mask"] == true).then_some(mask),
            loss_inputs: LossInputs {
                base: of_base.map(|_| vec![base]),
                guidance_loss_prediction: case.get("guidance").map(|_| vec![unconditional]),
                guidance_scales: case
                    .get("guidance")
                    .map_or(vec![], |guidance| numbers(&guidance["scales"])),
                outside_mask: of_base.filter(|base| base.contains("outside")).map(|_| outside),
                ..LossInputs::default()
            },
        };
        let predict = |_: &[Tensor], _: &Tensor, _: &Conditioning| Ok(vec![prediction.as_tensor().clone()]);
        let forward = || loss(&predict, &*objective(case), &loss_options(case), &batch);
        let (found, found_gradients) = gradients(forward).unwrap();
        let (found, expected) = (
            f64::from(found.to_scalar::<f32>().unwrap()),
            case["loss"].as_f64().unwrap(),
        );
        // A sum of losses of both signs is rounded more than its size says.
        let difference = (found - expected).abs() / expected.abs().max(0.1);
        assert!(
            difference < 1e-4,
            "case {number}: a loss of {found}, not {expected}: {case}"
        );
        let expected = &tensors[&format!("gradient.{number}")];
        let gradient = found_gradients.get(prediction.as_tensor()).cloned();
        let gradient = gradient.unwrap_or_else(|| expected.zeros_like().unwrap());
        let difference = largest(&(&gradient - expected).unwrap()) / largest(expected).max(1e-12);
        assert!(
            difference < 1e-4,
            "case {number}: the gradient differs by {difference:.1e}: {case}"
        );
    }
}

#[test]
fn losses_under_random_options_match_the_reference() {
    losses_match_the_reference();
}

#[test]
fn noise_and_latents_under_random_options_match_the_reference() {
    let (report, tensors) = (report(), load("options.safetensors"));
    assert_eq!(report["noise"].as_array().unwrap().len(), 60);
    for (number, case) in report["noise"].as_array().unwrap().iter().enumerate() {
        let value = |key: &str, usual: f64| case[key].as_f64().unwrap_or(usual);
        let shape: Vec<usize> = serde_json::from_value(case["shape"].clone()).unwrap();
        let captions: Vec<String> = serde_json::from_value(case["captions"].clone()).unwrap();
        let mut generator = TorchGenerator::manual_seed(case["seed"].as_u64().unwrap());
        let values = generator.randn(shape.iter().product());
        let latents = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap();
        let of_latents = LatentOptions {
            statistics: case["standardize_latents"].as_str().map(|table| match table {
                "sdxl" => ChannelStatistics::SDXL,
                _ => ChannelStatistics::STABLE_DIFFUSION,
            }),
            multiplier: value("latent_multiplier", 1.0),
            by_deviation: case["adaptive_scaling_factor"] == true,
            zeros_for_blank: case["do_blank_stabilization"] == true,
        };
        let options = NoiseOptions {
            offset: value("noise_offset", 0.0),
            multiplier: value("noise_multiplier", 1.0),
            dynamic_offset: case["dynamic_noise_offset"] == true,
            pairing_samples: value("optimal_noise_pairing_samples", 1.0) as u32,
            consistent: case["force_consistent_noise"] == true,
            signal_correction: case["signal_correction_noise_scale"].as_f64(),
            batch_correction: case["batch_noise_correction_scale"].as_f64(),
            shift: value("random_noise_shift", 0.0),
            random_multiplier: value("random_noise_multiplier", 0.0),
            ..NoiseOptions::default()
        };
        let latents = [of_latents.standardized(latents).unwrap()];
        let seeds: Vec<String> = (0..shape[0]).map(|i| format!("image {i}")).collect();
        let inputs = DrawInputs {
            noise_seeds: &seeds,
            regularisation: case["is_reg"] == true,
            ..DrawInputs::new(&latents)
        };
        let noise = crate::training::random::draw_noise(&options, &mut generator, &inputs).unwrap();
        let [latents] = latents;
        let scaled = of_latents.scaled(latents, &captions).unwrap();
        for (what, found) in [("noise", &noise[0]), ("latents", &scaled)] {
            let expected = &tensors[&format!("{what}.{number}")];
            let difference = largest(&(found - expected).unwrap()) / largest(expected).max(1.0);
            assert!(
                difference < 1e-5,
                "case {number}: the {what} differ by {difference:.1e}: {case}"
            );
        }
    }
}

#[test]
fn noise_that_is_the_same_each_time_needs_seeds() {
    let latents = [Tensor::zeros((2, 4, 3, 3), DType::F32, &Device::Cpu).unwrap()];
    let options = NoiseOptions {
        consistent: true,
        ..NoiseOptions::default()
    };
    let mut generator = TorchGenerator::manual_seed(1);
    let inputs = DrawInputs::new(&latents);
    assert!(crate::training::random::draw_noise(&options, &mut generator, &inputs).is_err());
}

in_portable_mode! {
    losses_match_the_reference,
}
