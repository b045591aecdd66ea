//! Compares every sampler but `lcm` with the trajectory of diffusers (`tests/reference/make_samplers.py`). `lcm` is compared in whole pipelines.

use super::*;
use crate::rng::TorchGenerator;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::schema::SupportLevel;
use candle_core::{DType, Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::HashMap;

const CASES: &str = include_str!("../../../tests/fixtures/samplers/cases.json");
const TENSORS: &[u8] = include_bytes!("../../../tests/fixtures/samplers/trajectories.safetensors");

const SMALL_CASES: &str = include_str!("../../../tests/fixtures/samplers/small_cases.json");
const SMALL_TENSORS: &[u8] = include_bytes!("../../../tests/fixtures/samplers/small_trajectories.safetensors");

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn run(case: &Value, tensors: &HashMap<String, Tensor>) -> Result<(), String> {
    let params = SamplerParams::from_json(&case["params"]).map_err(|e| e.to_string())?;
    run_with(case, params, tensors)
}

fn run_with(case: &Value, params: SamplerParams, tensors: &HashMap<String, Tensor>) -> Result<(), String> {
    let key = case["case"].as_str().unwrap();
    let expected_steps = values(&tensors[&format!("{key}:timesteps")]);
    let expected = &tensors[&format!("{key}:samples")];
    let options = SamplerOptions {
        steps: case["steps"].as_u64().unwrap() as usize,
        eta: case.get("eta").and_then(Value::as_f64).unwrap_or(0.0),
        image_tokens: case["image_tokens"].as_u64().unwrap_or(0) as usize,
    };
    let begin = case["begin"].as_u64().unwrap() as usize;
    // The fixture's name of diffusers' class.
    let name = match case["sampler"].as_str().unwrap() {
        "flowmatch_heun" => "heun",
        other => other,
    };
    let mut sampler = build(name, &params, options).map_err(|e| e.to_string())?;
    let steps: Vec<f32> = sampler.timesteps().iter().map(|t| *t as f32).collect();
    // The levels between steps of `dpm_2_a` amplify the rounding of f32.
    let differs = |(a, b): (&f32, &f32)| (a - b).abs() > (1e-5 * b).max(1e-3);
    if steps.len() != expected_steps.len() || steps.iter().zip(&expected_steps).any(differs) {
        return Err(format!("timesteps {steps:?}, expected {expected_steps:?}"));
    }
    let mut source = NoiseSource::Shared(TorchGenerator::manual_seed(2024));
    let noise = source.randn(&[2, 1, 3, 3], DType::F32, &Device::Cpu).unwrap();
    let mut sample = if begin > 0 {
        let original: Vec<f32> = (0..18).map(|i| -1.0 + 2.0 * i as f32 / 17.0).collect();
        let original = Tensor::from_vec(original, (2, 1, 3, 3), &Device::Cpu).unwrap();
        sampler.add_noise(&original, &noise, begin).map_err(|e| e.to_string())?
    } else {
        (noise * sampler.init_noise_sigma()).unwrap()
    };
    let mut indices = begin..steps.len();
    let mut row = 0;
    let mut largest = 1f32;
    loop {
        let expected_values = values(&expected.get(row).unwrap());
        // At high noise levels a step subtracts large numbers, so the tolerance grows with the largest of them.
        largest = expected_values.iter().fold(largest, |m, x| m.max(x.abs()));
        for (i, (a, b)) in values(&sample).iter().zip(&expected_values).enumerate() {
            if (a - b).abs() > 2e-5 * largest || !a.is_finite() {
                return Err(format!("after {row} steps, value {i}: {a}, expected {b}"));
            }
        }
        row += 1;
        let Some(index) = indices.next() else { break };
        let input = sampler.scale_model_input(&sample, index).map_err(|e| e.to_string())?;
        let t = sampler.timesteps()[index];
        let output = ((input * 0.7).unwrap().tanh().unwrap() + 0.01 * t / 1000.0).unwrap();
        let step = SamplerStep {
            index,
            output: &output,
            sample: &sample,
            noise: &mut source,
            dtype: DType::F32,
        };
        sample = sampler.step(step).map_err(|e| e.to_string())?;
    }
    if row != expected.dim(0).unwrap() {
        return Err(format!("{row} samples, expected {}", expected.dim(0).unwrap()));
    }
    Ok(())
}

#[test]
fn every_trajectory_matches_diffusers() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    let tensors = safetensors::load_buffer(TENSORS, &Device::Cpu).unwrap();
    assert!(cases.len() > 150, "only {} cases", cases.len());
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            run(case, &tensors)
                .err()
                .map(|e| format!("{}: {e}", case["case"].as_str().unwrap()))
        })
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn every_small_trajectory_matches_diffusers() {
    let fixture: Value = serde_json::from_str(SMALL_CASES).unwrap();
    let all = safetensors::load_buffer(SMALL_TENSORS, &Device::Cpu).unwrap();
    let (mut timesteps, mut samples) = (0, 0);
    let mut wrong = Vec::new();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() > 35, "only {} cases", cases.len());
    for case in cases {
        let key = case["case"].as_str().unwrap();
        let count = |key: &str| case[key].as_u64().unwrap() as usize;
        let (evaluations, begin) = (count("evaluations"), count("begin"));
        let rows = evaluations - begin + 1;
        let tensors = HashMap::from([
            (
                format!("{key}:timesteps"),
                all["timesteps"].narrow(0, timesteps, evaluations).unwrap(),
            ),
            (
                format!("{key}:samples"),
                all["samples"].narrow(0, samples, rows).unwrap(),
            ),
        ]);
        (timesteps, samples) = (timesteps + evaluations, samples + rows);
        let mut params = fixture["params"].as_object().unwrap().clone();
        params.extend(case["params"].as_object().unwrap().clone());
        let params = SamplerParams::from_json(&params.into()).unwrap();
        if let Err(error) = run_with(case, params, &tensors) {
            wrong.push(format!("{key}: {error}"));
        }
    }
    assert_eq!(samples, all["samples"].dim(0).unwrap());
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_trajectory_of_flow_matching_matches_diffusers() {
    let cases = include_str!("../../../tests/fixtures/samplers/flow_cases.json");
    let cases: Vec<Value> = serde_json::from_str(cases).unwrap();
    let tensors = include_bytes!("../../../tests/fixtures/samplers/flow_trajectories.safetensors");
    let tensors = safetensors::load_buffer(tensors, &Device::Cpu).unwrap();
    let mut compared = std::collections::BTreeMap::new();
    for case in &cases {
        let params = SamplerParams {
            is_flow: true,
            even_flow_sigmas: case["sigmas"] == "pipeline",
            ..SamplerParams::from_json(&case["params"]).unwrap()
        };
        // Some cases give `mu` itself, which a pipeline never does.
        let tokens = case["image_tokens"].as_u64();
        if params.use_dynamic_shifting == Some(true) && tokens.is_none() {
            continue;
        }
        run_with(case, params, &tensors).unwrap_or_else(|error| panic!("{}: {error}", case["case"]));
        *compared.entry(case["sampler"].as_str().unwrap()).or_insert(0) += 1;
    }
    let at_least = [
        ("flowmatch", 38),
        ("flowmatch_heun", 6),
        ("dpmsolver++", 14),
        ("unipc", 18),
    ];
    for (sampler, count) in at_least {
        assert!(compared[sampler] >= count, "only {compared:?}");
    }
}

#[test]
fn noise_schedules_match_torch_bit_for_bit() {
    let tensors = safetensors::load_buffer(TENSORS, &Device::Cpu).unwrap();
    let zero_snr = SamplerParams {
        rescale_betas_zero_snr: Some(true),
        ..SamplerParams::stable_diffusion()
    };
    let squared = SamplerParams {
        beta_schedule: Some(BetaSchedule::SquaredCosCapV2),
        ..SamplerParams::default()
    };
    for (label, params) in [
        ("sd", SamplerParams::stable_diffusion()),
        ("default", SamplerParams::default()),
        ("squaredcos", squared),
        ("zero_snr", zero_snr),
    ] {
        let schedule = NoiseSchedule::new(&params).unwrap();
        for (what, ours) in [("betas", &schedule.betas), ("alphas_cumprod", &schedule.alphas_cumprod)] {
            let theirs = values(&tensors[&format!("schedule/{label}:{what}")]);
            // torch's square root is not always the nearest float, so the rescaled schedule may differ in the last
            // bits.
            let allowed = if label == "zero_snr" { 1e-5 } else { 0.0 };
            let differ: Vec<usize> = (0..theirs.len())
                .filter(|i| (ours[*i] - theirs[*i]).abs() > allowed)
                .collect();
            assert!(
                differ.is_empty(),
                "{label}: {} {what} differ, first at {}: {} and {}",
                differ.len(),
                differ[0],
                ours[differ[0]],
                theirs[differ[0]]
            );
        }
    }
}

#[test]
fn the_names_are_those_that_jobs_may_have() {
    let diffusion = SamplerParams::stable_diffusion();
    let flow = SamplerParams {
        is_flow: true,
        ..SamplerParams::default()
    };
    for name in SamplerName::ALL {
        for steps in [1, 2, 5] {
            let built = [&diffusion, &flow].map(|params| build(name.name(), params, SamplerOptions::with_steps(steps)));
            let works = matches!(name.status(), SupportLevel::Works);
            assert_eq!(built.iter().any(Result::is_ok), works, "{name}");
            // What the time prediction counts.
            for sampler in built.into_iter().flatten().filter(|_| *name != SamplerName::Lcm) {
                let evaluations = name.evaluations(steps as u32) as usize;
                assert_eq!(sampler.timesteps().len(), evaluations, "{name} with {steps} steps");
                let whole_steps = sampler.timesteps().len().div_ceil(sampler.evaluations_per_step());
                assert!(*name == SamplerName::Pndm || whole_steps == steps, "{name}");
            }
        }
    }
    for name in names(false).iter().chain(&names(true)) {
        assert_eq!(SamplerName::from_name(name).map(SamplerName::name), Some(*name));
    }
    let message = |name: &str| {
        build(name, &diffusion, SamplerOptions::with_steps(5))
            .err()
            .unwrap()
            .to_string()
    };
    assert!(message("heun").contains("not supported yet") && message("heun").contains("ddim"));
    assert!(message("eular").contains("unknown sampler `eular`"));
    assert!(message("k_ddim").contains("unknown"));
    assert!(message("flowmatch").contains("not one for this kind"));
}

#[test]
fn samplers_refuse_parameters_that_their_class_refuses() {
    let message = |name: &str, change: &dyn Fn(&mut SamplerParams)| {
        let mut params = SamplerParams::stable_diffusion();
        change(&mut params);
        let result = build(name, &params, SamplerOptions::with_steps(5));
        result.err().unwrap().to_string()
    };
    for name in ["dpm_2", "dpm_2_a"] {
        let error = message(name, &|params| params.prediction_type = Some(PredictionType::Sample));
        assert!(error.contains(name) && error.contains("prediction_type"), "{error}");
    }
    for (key, change) in [
        (
            "final_sigmas_type: sigma_min",
            &(|params: &mut SamplerParams| params.algorithm_type = Some("dpmsolver".into()))
                as &dyn Fn(&mut SamplerParams),
        ),
        ("algorithm_type", &|params| {
            params.algorithm_type = Some("sde-dpmsolver".into());
        }),
        ("solver_order", &|params| params.solver_order = Some(4)),
        ("solver_type", &|params| params.solver_type = Some("euler".into())),
        ("final_sigmas_type", &|params| {
            params.final_sigmas_type = Some("one".into());
        }),
    ] {
        assert!(message("dpmsingle", change).contains(key), "{key}");
    }
}

#[test]
fn invalid_parameters_are_errors_that_name_the_key() {
    let read = |text: &str| SamplerParams::from_json(&parse_scheduler_config(text).unwrap());
    for (text, key) in [
        (r#"{"beta_start": "x"}"#, "beta_start"),
        (r#"{"beta_schedule": "wavy"}"#, "beta_schedule"),
        (r#"{"steps_offset": 1.5}"#, "steps_offset"),
        (r#"{"num_train_timesteps": 0}"#, "num_train_timesteps"),
        (r#"{"clip_sample": 1}"#, "clip_sample"),
    ] {
        assert!(read(text).unwrap_err().to_string().contains(key), "{text}");
    }
    let infinite = r#"{"lambda_min_clipped": -Infinity, "note": "NaN stays \" Infinity", "steps_offset": 1}"#;
    assert_eq!(read(infinite).unwrap().steps_offset, Some(1));
    let params = read(r#"{"thresholding": true}"#).unwrap();
    assert!(build("ddim", &params, SamplerOptions::with_steps(5)).is_err());
    for steps in [0, 1001] {
        let sd = SamplerParams::stable_diffusion();
        assert!(
            build("ddim", &sd, SamplerOptions::with_steps(steps)).is_err(),
            "{steps}"
        );
    }
    for (betas, train_steps) in [(vec![f32::NAN, 0.1], 2), (vec![0.1], 1), (vec![0.1; 5], 1000)] {
        let params = SamplerParams {
            trained_betas: Some(betas),
            num_train_timesteps: Some(train_steps),
            use_karras_sigmas: Some(true),
            ..SamplerParams::default()
        };
        for name in names(false) {
            assert!(build(name, &params, SamplerOptions::with_steps(1)).is_err(), "{name}");
        }
    }
}

#[test]
fn samplers_of_flow_matching_have_their_own_names_and_errors() {
    let params = SamplerParams {
        is_flow: true,
        ..SamplerParams::default()
    };
    let of = |name: &str, params: &SamplerParams| build(name, params, SamplerOptions::with_steps(5)).map(|_| ());
    for name in ["ddpm", "euler", "heun", "dpmsolver++", "unipc"] {
        of(name, &params).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let message = |name: &str, change: &dyn Fn(&mut SamplerParams)| {
        let mut params = params.clone();
        change(&mut params);
        of(name, &params).unwrap_err().to_string()
    };
    let plain = |name| message(name, &|_| ());
    assert!(plain("ddim").contains("not one for this kind") && plain("ddim").contains("unipc"));
    assert!(plain("magic").contains("unknown") && plain("dpmsingle").contains("not one for this kind"));
    assert!(plain("k_dpmsolver++").contains("use_karras_sigmas"));
    for (name, key, change) in [
        (
            "unipc",
            "use_beta_sigmas",
            &(|p: &mut SamplerParams| p.use_beta_sigmas = Some(true)) as &dyn Fn(&mut SamplerParams),
        ),
        ("unipc", "solver_order", &|p| p.solver_order = Some(4)),
        ("unipc", "predict_x0", &|p| p.predict_x0 = Some(false)),
        ("unipc", "solver_type", &|p| p.solver_type = Some("bh3".into())),
        ("unipc", "shift_terminal", &|p| p.shift_terminal = Some(1.0)),
        ("unipc", "flow_shift", &|p| p.flow_shift = Some(-1.0)),
        ("dpmsolver++", "flow_shift", &|p| p.flow_shift = Some(0.0)),
        ("dpmsolver++", "final_sigmas_type", &|p| {
            p.final_sigmas_type = Some("one".into())
        }),
        ("heun", "shift", &|p| p.shift = Some(f64::NAN)),
    ] {
        assert!(
            message(name, change).contains(key),
            "{name} {key}: {}",
            message(name, change)
        );
    }
    let diffusion = SamplerParams {
        flow_prediction: true,
        ..SamplerParams::stable_diffusion()
    };
    assert!(
        of("ddim", &diffusion)
            .unwrap_err()
            .to_string()
            .contains("flow_prediction")
    );
}

#[test]
fn extreme_but_valid_step_counts_never_panic() {
    let all = [false, true].map(|is_flow| names(is_flow).into_iter().map(move |name| (name, is_flow)));
    for (name, is_flow) in all.into_iter().flatten() {
        for karras in [false, true] {
            for spacing in [Spacing::Leading, Spacing::Linspace, Spacing::Trailing] {
                for steps in [1, 2, 3, 9, 10] {
                    let params = SamplerParams {
                        num_train_timesteps: Some(10),
                        timestep_spacing: Some(spacing),
                        use_karras_sigmas: Some(karras),
                        is_flow,
                        solver_order: Some(1 + steps % 3),
                        ..SamplerParams::default().with_stable_diffusion_overrides()
                    };
                    let Ok(mut sampler) = build(name, &params, SamplerOptions::with_steps(steps)) else {
                        continue;
                    };
                    let mut source = NoiseSource::from_seeds(&[1]);
                    let mut sample = Tensor::ones((1, 1, 2, 2), DType::F32, &Device::Cpu).unwrap();
                    for index in 0..sampler.timesteps().len() {
                        let output = sampler.scale_model_input(&sample, index).unwrap();
                        // A timestep outside the schedule is an error, not a panic.
                        let Ok(next) = sampler.step(SamplerStep {
                            index,
                            output: &output,
                            sample: &sample,
                            noise: &mut source,
                            dtype: DType::F32,
                        }) else {
                            break;
                        };
                        sample = next;
                    }
                }
            }
        }
    }
}
