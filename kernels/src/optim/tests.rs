//! Comparison with the fixtures of `tests/reference/make_optim.py`.

use super::*;
use crate::testing::{fixtures, gap};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::HashMap;

fn fixture(name: &str) -> std::path::PathBuf {
    fixtures().join("train").join(name)
}

fn tensors() -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture("optim.safetensors"), &Device::Cpu).unwrap()
}

fn json() -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(fixture("optim.json")).unwrap()).unwrap()
}

fn initial_params(t: &HashMap<String, Tensor>) -> Vec<Param> {
    ["a", "b", "c"]
        .iter()
        .map(|n| Param {
            name: (*n).into(),
            var: Var::from_tensor(&t[&format!("start.{n}")].copy().unwrap()).unwrap(),
        })
        .collect()
}

fn grads(t: &HashMap<String, Tensor>, k: usize) -> Grads {
    ["a", "b", "c"]
        .iter()
        .map(|n| Some(t[&format!("grad.{k}.{n}")].clone()))
        .collect()
}

fn variants() -> [(&'static str, AdamParams); 4] {
    let w = AdamParams::new(true);
    [
        ("adamw", w),
        (
            "adamw_decay",
            AdamParams {
                weight_decay: 0.1,
                beta1: 0.8,
                beta2: 0.95,
                ..w
            },
        ),
        (
            "adam",
            AdamParams {
                weight_decay: 0.05,
                ..AdamParams::new(false)
            },
        ),
        ("clipped", w),
    ]
}

#[test]
fn twenty_steps_match_torch() {
    let t = tensors();
    let norms: Vec<f64> = serde_json::from_value(json()["norms"].clone()).unwrap();
    for (name, settings) in variants() {
        let params = initial_params(&t);
        let mut adam = Adam::new(params.clone(), settings).unwrap();
        for (k, want) in norms.iter().enumerate() {
            let mut g = grads(&t, k);
            if name == "clipped" {
                let norm = clip_grad_norm(&mut g, 1.0).unwrap();
                assert!((norm / want - 1.0).abs() < 1e-5, "{name} {k}: {norm} against {want}");
            }
            adam.step(&g, 1e-2).unwrap();
        }
        let state = adam.state().unwrap();
        for p in &params {
            let diff = gap(p.var.as_tensor(), &t[&format!("{name}.{}", p.name)]);
            assert!(diff < 2e-6, "{name}.{}: {diff}", p.name);
            for part in ["exp_avg", "exp_avg_sq"] {
                let key = format!("{}.{part}", p.name);
                let want = &t[&format!("{name}.{key}")];
                let scale: f32 = want
                    .abs()
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .max(0)
                    .unwrap()
                    .to_scalar()
                    .unwrap();
                assert!(gap(&state[&key], want) < 2e-6 * scale.max(1.0), "{name}.{key}");
            }
        }
    }
}

#[test]
fn a_restored_state_continues_bit_for_bit() {
    let t = tensors();
    let (uninterrupted, restored) = (initial_params(&t), initial_params(&t));
    let settings = AdamParams::new(true);
    let mut one = Adam::new(uninterrupted.clone(), settings).unwrap();
    let mut two = Adam::new(restored.clone(), settings).unwrap();
    for k in 0..20 {
        one.step(&grads(&t, k), 1e-2).unwrap();
        if k == 9 {
            let state = two.state().unwrap();
            two = Adam::new(restored.clone(), settings).unwrap();
            two.load_state(&state).unwrap();
        }
        two.step(&grads(&t, k), 1e-2).unwrap();
    }
    for (a, b) in uninterrupted.iter().zip(&restored) {
        assert_eq!(gap(a.var.as_tensor(), b.var.as_tensor()), 0.0);
    }
    let mut state = two.state().unwrap();
    state.remove("b.exp_avg");
    assert!(two.load_state(&state).unwrap_err().to_string().contains("b.exp_avg"));
}

#[test]
fn schedules_match_torch_and_diffusers() {
    for row in json()["schedules"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        let params = row["params"].as_object().unwrap();
        let schedule = Schedule::new(ScheduleParams {
            name,
            params,
            lr: 2e-3,
            steps: 60,
        })
        .unwrap();
        for (k, want) in row["values"].as_array().unwrap().iter().enumerate() {
            let (got, want) = (schedule.lr_at(k as u64), want.as_f64().unwrap());
            assert!(
                (got - want).abs() < 1e-9,
                "{name} {params:?} step {k}: {got} against {want}"
            );
        }
    }
}

/// `get_cosine_with_hard_restarts_schedule_with_warmup` of transformers starts a cycle at each of these steps.
#[test]
fn a_restart_after_fractions_of_steps_begins_with_the_full_rate() {
    for (steps, cycles, restart) in [(10u64, 6u64, 5u64), (18, 14, 9), (42, 18, 35), (30, 9, 10), (12, 4, 6)] {
        let period = steps as f64 / cycles as f64;
        let schedule = Schedule::new(ScheduleParams {
            name: "cosine_with_restarts",
            params: serde_json::json!({"T_0": period}).as_object().unwrap(),
            lr: 2e-3,
            steps,
        })
        .unwrap();
        let rate = schedule.lr_at(restart);
        assert!((rate - 2e-3).abs() < 1e-12, "{steps} steps, {cycles} cycles: {rate}");
    }
}

#[test]
fn unknown_names_are_errors_that_list_the_known_ones() {
    let params = serde_json::json!({"num_warmup": 3}).as_object().unwrap().clone();
    let input = ScheduleParams {
        name: "cosine",
        params: &params,
        lr: 1.0,
        steps: 10,
    };
    assert!(
        Schedule::new(input)
            .unwrap_err()
            .to_string()
            .contains("num_warmup_steps")
    );
    assert!(
        Schedule::new(ScheduleParams { name: "cosin", ..input })
            .unwrap_err()
            .to_string()
            .contains("cosine")
    );
    let error_of = |name, params: &serde_json::Map<_, _>| build(name, vec![], params, 1e-3).err().unwrap().to_string();
    assert!(error_of(OptimizerName::AutomagicExperiment, &serde_json::Map::new()).contains("adamw8bit"));
    assert!(error_of(OptimizerName::AdamW, &params).contains("betas"));
}

#[test]
fn ema_averages_the_weights_and_swaps_them() {
    let var = Var::from_tensor(&Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let param = Param {
        name: "p".into(),
        var: var.clone(),
    };
    let mut ema = Ema::new(vec![param.clone()], 0.9, false, 1.0).unwrap();
    var.set(&Tensor::ones(2, DType::F32, &Device::Cpu).unwrap()).unwrap();
    ema.update().unwrap();
    ema.update().unwrap();
    ema.swap_in().unwrap();
    let got = var.to_vec1::<f32>().unwrap();
    assert!((got[0] - 0.19).abs() < 1e-6, "{got:?}");
    ema.swap_out().unwrap();
    assert_eq!(var.to_vec1::<f32>().unwrap(), [1.0, 1.0]);
    let (state, updates) = ema.state();
    let mut other = Ema::new(vec![param], 0.9, false, 1.0).unwrap();
    other.load_state(&state, updates).unwrap();
    assert_eq!(other.state().1, 2);
}

#[test]
fn schedules_of_language_models_end_at_their_lowest_rate() {
    use aitk_common::job::lm_trainer::{LmScheduler, LmTrainConfig};
    let rates = |scheduler, decay_steps, steps: u64| -> Vec<f64> {
        let train = LmTrainConfig {
            lr_scheduler: scheduler,
            lr: 1.0,
            min_lr: if scheduler == LmScheduler::Constant { 0.0 } else { 0.2 },
            warmup_steps: 2,
            decay_steps,
            ..LmTrainConfig::default()
        };
        let schedule = Schedule::of_language_model(&train, 1.0, steps);
        let rounded = |step| (schedule.lr_at(step) * 1e4).round() / 1e4;
        (0..=steps + 1).map(rounded).collect()
    };
    assert_eq!(rates(LmScheduler::Constant, None, 4), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(
        rates(LmScheduler::Linear, None, 6),
        [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    );
    assert_eq!(rates(LmScheduler::Cosine, None, 4)[..5], [0.0, 0.5, 1.0, 0.6, 0.2]);
    // Stable for two steps after the warm-up, then down in four.
    assert_eq!(
        rates(LmScheduler::Wsd, Some(4), 8),
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    );
    // Without room for all of it, the decay begins late; a tenth of few steps is one.
    assert_eq!(rates(LmScheduler::Wsd, None, 5), [0.0, 0.5, 1.0, 1.0, 1.0, 0.2, 0.2]);
    assert!(
        rates(LmScheduler::Wsd, Some(9), 3)
            .iter()
            .all(|rate| (0.0..=1.0).contains(rate))
    );
}
