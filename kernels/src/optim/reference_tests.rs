//! Comparison with the fixtures of `tests/reference/make_optim8.py` (bitsandbytes, lion-pytorch, prodigyopt,
//! dadaptation, transformers, torch) and of `make_optim_toolkit.py` (ai-toolkit).

use super::blockwise::QuantMap;
use super::*;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, sampled_cases};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};
use std::collections::HashMap;

const SHAPES: [(&str, &[usize]); 4] = [
    ("w", &[64, 96]),
    ("ragged", &[70, 61]),
    ("conv", &[6, 4, 3, 3]),
    ("list", &[7]),
];
const STEPS: usize = 20;
const FIXTURES: [&str; 2] = ["optim8", "optim_toolkit"];

/// The same random tensors as `numbers(seed)` in the Python scripts.
fn numbers(seed: u64) -> Vec<Tensor> {
    let mut generator = TorchGenerator::manual_seed(seed);
    SHAPES
        .iter()
        .map(|(_, dims)| {
            let count = dims.iter().product();
            Tensor::from_vec(generator.randn(count), *dims, &Device::Cpu).unwrap()
        })
        .collect()
}

fn initial_params() -> Vec<Param> {
    let named = SHAPES.iter().zip(numbers(3));
    named
        .map(|((name, _), value)| Param {
            name: (*name).into(),
            var: Var::from_tensor(&value).unwrap(),
        })
        .collect()
}

fn gradients(k: usize, params: &[Param], pulls_to_goal: bool) -> Grads {
    let scale = 10f64.powi((k % 5) as i32 - 2);
    let noise = numbers(100 + k as u64);
    let goals = numbers(4);
    let grad = |((p, noise), goal): ((&Param, &Tensor), &Tensor)| {
        let noise = (noise * scale).unwrap();
        if !pulls_to_goal {
            return noise;
        }
        let way = (p.var.as_detached_tensor() - goal).unwrap();
        ((noise * 0.01).unwrap() + way).unwrap()
    };
    params.iter().zip(&noise).zip(&goals).map(grad).map(Some).collect()
}

struct Case {
    name: String,
    optimizer: OptimizerName,
    lr: f64,
    options: serde_json::Map<String, Value>,
    pulls_to_goal: bool,
    effective_lrs: Option<Vec<f64>>,
}

impl Case {
    fn all() -> Vec<Self> {
        let rows = FIXTURES.map(|name| {
            let text = std::fs::read(fixtures().join(format!("train/{name}.json"))).unwrap();
            serde_json::from_slice::<Vec<Value>>(&text).unwrap()
        });
        rows.iter().flatten().map(Self::of).collect()
    }

    fn of(row: &Value) -> Self {
        Self {
            name: row["name"].as_str().unwrap().into(),
            optimizer: *OptimizerName::ALL
                .iter()
                .find(|o| o.name() == row["optimizer"].as_str().unwrap())
                .unwrap(),
            lr: row["lr"].as_f64().unwrap(),
            options: row["options"].as_object().unwrap().clone(),
            pulls_to_goal: row["pull"].as_bool().unwrap(),
            effective_lrs: serde_json::from_value(row["shown"].clone()).unwrap_or_default(),
        }
    }

    fn build(&self, params: &[Param]) -> Box<dyn Optimizer> {
        build(self.optimizer, params.to_vec(), &self.options, self.lr).unwrap()
    }

    fn base_lr(&self) -> f64 {
        base_lr(self.optimizer, self.lr)
    }
}

fn reference() -> HashMap<String, Tensor> {
    let load = |name| {
        let file = fixtures().join(format!("train/{name}.safetensors"));
        candle_core::safetensors::load(file, &Device::Cpu).unwrap()
    };
    FIXTURES.into_iter().flat_map(load).collect()
}

fn floats(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference over the elements that the fixture stores (every seventh).
fn weight_gap(param: &Param, want: &Tensor) -> f32 {
    let got = floats(param.var.as_tensor());
    let want = floats(want);
    assert_eq!(got.len().div_ceil(7), want.len());
    let pairs = got.iter().step_by(7).zip(&want);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn quant_maps_match_bitsandbytes() {
    let want = reference();
    for (map, name) in [
        (QuantMap::signed(), "map.signed"),
        (QuantMap::unsigned(), "map.unsigned"),
    ] {
        let want = floats(&want[name]);
        assert_eq!(want.len(), 256);
        for (ours, theirs) in map.values().iter().zip(&want) {
            // torch computes the values in another order of operations, and the rounding of a decade's line affects its
            // smallest values most.
            assert!(
                (ours - theirs).abs() <= 4.0 * f32::EPSILON * theirs.abs(),
                "{name}: {ours:e} {theirs:e}"
            );
        }
    }
}

#[test]
fn twenty_steps_match_the_reference() {
    let want = reference();
    let cases = Case::all();
    assert_eq!(cases.len(), 27);
    // The form of slices compares all of them.
    let cases = match crate::device::portable::is_portable() {
        true => sampled_cases(cases),
        false => cases,
    };
    for case in cases {
        let params = initial_params();
        let mut optimizer = case.build(&params);
        // A step changes a weight by about the learning rate.
        let step_size = case
            .effective_lrs
            .as_ref()
            .map_or(case.lr, |effective_lrs| effective_lrs[STEPS - 1]) as f32;
        let mut max_gaps = [0f32; 2];
        let is_eight_bit = case.name.contains("8bit");
        for k in 0..STEPS {
            optimizer
                .step(&gradients(k, &params, case.pulls_to_goal), case.base_lr())
                .unwrap();
            if let Some(effective_lrs) = &case.effective_lrs {
                let got = optimizer.effective_lr(case.base_lr()).unwrap();
                assert!(
                    (got / effective_lrs[k] - 1.0).abs() < 1e-4,
                    "{} step {k}: {got:e} against {:e}",
                    case.name,
                    effective_lrs[k]
                );
            }
            if k == 0 || k == STEPS - 1 {
                for p in &params {
                    let gap = weight_gap(p, &want[&format!("{}.{k}.{}", case.name, p.name)]);
                    max_gaps[usize::from(k > 0)] = max_gaps[usize::from(k > 0)].max(gap);
                }
            }
        }
        println!(
            "{}: {:.1e} after one step, {:.1e} after {STEPS}; a step is {step_size:.1e}",
            case.name, max_gaps[0], max_gaps[1]
        );
        assert!(max_gaps[0] < 2e-6, "{}: {:e} after one step", case.name, max_gaps[0]);
        let allowed = if is_eight_bit {
            2e-2 * step_size
        } else {
            5e-6_f32.max(1e-3 * step_size)
        };
        assert!(max_gaps[1] < allowed, "{}: {:e}", case.name, max_gaps[1]);
        if is_eight_bit {
            check_codes(&case, optimizer.as_ref(), &want);
        }
    }
}

/// The cases above, and torch's Adam and AdamW (`tests/reference/make_optim_long.py`).
#[test]
fn two_hundred_steps_match_the_reference() {
    const STEPS: usize = 200;
    let text = std::fs::read(fixtures().join("train/optim_long.json")).unwrap();
    let rows: Vec<Value> = serde_json::from_slice(&text).unwrap();
    let file = fixtures().join("train/optim_long.safetensors");
    let want = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    assert_eq!(rows.len(), 29);
    for row in sampled_cases(rows.iter().collect()) {
        let case = Case::of(row);
        let params = initial_params();
        let mut optimizer = case.build(&params);
        for k in 0..STEPS {
            let grads = gradients(k, &params, case.pulls_to_goal);
            optimizer.step(&grads, case.base_lr()).unwrap();
        }
        if let Some(rate) = row["shown"].as_f64() {
            let got = optimizer.effective_lr(case.base_lr()).unwrap();
            assert!(
                (got / rate - 1.0).abs() < 1e-4,
                "{}: {got:e} against {rate:e}",
                case.name
            );
        }
        let got: Vec<f32> = params
            .iter()
            .flat_map(|param| floats(param.var.as_tensor()).into_iter().step_by(97))
            .collect();
        let want = floats(&want[&case.name]);
        assert_eq!(got.len(), want.len());
        let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
        println!("{}: {gap:.1e} after {STEPS} steps", case.name);
        // How far the reference ends from itself when its gradients are off by one unit in the last place.
        let sensitivity = row["sensitivity"].as_f64().unwrap() as f32;
        println!("{}: the reference is off by {sensitivity:.1e} from itself", case.name);
        // A number on the edge between two 8-bit codes takes either one, and such differences add up, as they do between two runs of the
        // reference. All others are within 1e-4.
        let allowed = match case.name.contains("8bit") {
            true => (2.0 * sensitivity).max(1e-4),
            false => 1e-4,
        };
        assert!(gap < allowed, "{}: {gap:e}", case.name);
    }
}

/// Checks the 8-bit states: the same tensors are quantised, and codes differ only for numbers close to the edge between
/// two.
fn check_codes(case: &Case, optimizer: &dyn Optimizer, want: &HashMap<String, Tensor>) {
    let state = optimizer.state().unwrap();
    let prefix = format!("{}.", case.name);
    let saved = want
        .keys()
        .filter_map(|k| k.strip_prefix(&prefix))
        .filter(|k| k.contains("exp_avg"));
    let saved: std::collections::BTreeSet<&str> = saved.collect();
    let ours = state.keys().filter(|k| k.ends_with("codes") || k.ends_with("absmax"));
    assert_eq!(
        ours.map(String::as_str).collect::<std::collections::BTreeSet<_>>(),
        saved,
        "{}",
        case.name
    );
    assert!(!saved.is_empty());
    for key in saved {
        let theirs = &want[&format!("{prefix}{key}")];
        assert_eq!(state[key].dims(), theirs.dims(), "{key}");
        if key.ends_with("absmax") {
            for (a, b) in floats(&state[key]).into_iter().zip(floats(theirs)) {
                assert!((a / b - 1.0).abs() < 1e-2, "{prefix}{key}: {a:e} {b:e}");
            }
            continue;
        }
        let bytes = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let (a, b) = (bytes(&state[key]), bytes(theirs));
        let code_gaps = || a.iter().zip(&b).map(|(a, b)| a.abs_diff(*b));
        let (differing, far) = (
            code_gaps().filter(|gap| *gap > 0).count(),
            code_gaps().filter(|gap| *gap > 2).count(),
        );
        println!(
            "{prefix}{key}: {differing} of {} codes differ, {far} by more than 2",
            a.len()
        );
        // A number that was once rounded differently can be off by more codes after the scale of its block shrinks.
        assert!(
            differing * 200 <= a.len() && far * 2000 <= a.len(),
            "{prefix}{key}: {differing} of {} differ, {far} by more than 2",
            a.len()
        );
    }
}

/// ai-toolkit's state has one scale per tensor in 8 bits. The weights here are much closer to the float32 optimizer's.
#[test]
fn eight_bit_weights_are_close_to_float32() {
    let want = reference();
    for case in Case::all() {
        let key = |saved: &str, param: &Param| format!("near.{}.{saved}.{}", case.name, param.name);
        let params = initial_params();
        if !want.contains_key(&key("float32", &params[0])) {
            continue;
        }
        let mut optimizer = case.build(&params);
        for k in 0..STEPS {
            let grads = gradients(k, &params, case.pulls_to_goal);
            optimizer.step(&grads, case.base_lr()).unwrap();
        }
        // The tensors that are large enough for 8 bits.
        for param in &params[..2] {
            let float32 = floats(&want[&key("float32", param)]);
            let distance = |other: Vec<f32>| {
                let pairs = other.iter().zip(&float32);
                pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
            };
            let ours = distance(floats(param.var.as_tensor()).into_iter().step_by(7).collect());
            let theirs = distance(floats(&want[&key("int8", param)]));
            println!(
                "{} {}: {ours:.3} away, one scale per tensor {theirs:.3}",
                case.name, param.name
            );
            assert!(ours < 0.2 * theirs, "{} {}: {ours} {theirs}", case.name, param.name);
        }
    }
}

/// Checks the bytes of state per element.
#[test]
fn the_planner_knows_every_optimizer() {
    use OptimizerName::*;
    let value = Tensor::zeros((512, 640), DType::F32, &Device::Cpu).unwrap();
    for (name, params) in [
        (Adam, json!({})),
        (AdamW, json!({})),
        (Adam8, json!({})),
        (AdamW8, json!({})),
        (Adam8Bit, json!({})),
        (AdamW8Bit, json!({})),
        (AdamW8Bit, json!({"min_8bit_size": 1000})),
        (AdamW8Bit, json!({"min_8bit_size": 1_000_000})),
        (Adagrad, json!({})),
        (Adafactor, json!({})),
        (Adafactor, json!({"beta1": null})),
        (Adafactor, json!({"beta1": 0.9})),
        (DAdaptation, json!({})),
        (DAdaptationAdam, json!({})),
        (DAdaptationLion, json!({})),
        (AdemaMix8Bit, json!({})),
        (Lion, json!({})),
        (Lion8Bit, json!({})),
        (Prodigy, json!({})),
        (Prodigy, json!({"slice_p": 11})),
        (Prodigy8Bit, json!({})),
        (Prodigy8Bit, json!({"slice_p": 11, "min_8bit_size": 1000})),
        (Automagic, json!({})),
        (Automagic2, json!({})),
        (Automagic3, json!({})),
    ] {
        let facts = aitk_common::plan::optimizers::facts(name.name(), &params);
        for (value, means) in [
            (value.clone(), Some(512.0 + 640.0)),
            (Tensor::zeros(1000, DType::F32, &Device::Cpu).unwrap(), None),
        ] {
            let param = Param {
                name: "w".into(),
                var: Var::from_tensor(&value).unwrap(),
            };
            let optimizer = build(name, vec![param], params.as_object().unwrap(), 1e-4).unwrap();
            let state = optimizer.state().unwrap();
            let bytes: usize = state.values().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum();
            let predicted = facts.state_bytes(value.elem_count() as f64, means);
            // A few scalars besides.
            assert!(
                (-1.0..128.0).contains(&(bytes as f64 - predicted)),
                "{name:?} {params}: {bytes}, {predicted} predicted"
            );
            assert_eq!(optimizer.separable(), facts.is_separable, "{name:?}");
            assert_eq!(optimizer.uses_gradient_clipping(), facts.clips, "{name:?}");
        }
    }
}

#[test]
fn every_restored_state_continues_bit_for_bit() {
    for case in Case::all() {
        let (uninterrupted, restored) = (initial_params(), initial_params());
        let (mut one, mut two) = (case.build(&uninterrupted), case.build(&restored));
        for k in 0..STEPS {
            // One parameter has no gradient in some steps.
            let grads = |params: &[Param]| {
                let mut grads = gradients(k, params, case.pulls_to_goal);
                if k % 7 == 3 {
                    grads[1] = None;
                }
                grads
            };
            one.step(&grads(&uninterrupted), case.base_lr()).unwrap();
            if k == 9 {
                // Through a safetensors file, as in a checkpoint.
                let folder = tempfile::tempdir().unwrap();
                let file = folder.path().join("optimizer.safetensors");
                let state: HashMap<String, Tensor> = two.state().unwrap().into_iter().collect();
                candle_core::safetensors::save(&state, &file).unwrap();
                let state = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
                two = case.build(&restored);
                two.load_state(&state.into_iter().collect()).unwrap();
            }
            two.step(&grads(&restored), case.base_lr()).unwrap();
        }
        for (a, b) in uninterrupted.iter().zip(&restored) {
            assert_eq!(
                floats(a.var.as_tensor()),
                floats(b.var.as_tensor()),
                "{} {}",
                case.name,
                a.name
            );
        }
        let (one, two) = (one.state().unwrap(), two.state().unwrap());
        for (name, tensor) in &one {
            let same = |t: &Tensor| floats(&t.to_dtype(DType::F32).unwrap());
            assert_eq!(same(tensor), same(&two[name]), "{} {name}", case.name);
        }
    }
}

#[test]
fn an_invalid_state_is_an_error_and_changes_nothing() {
    for case in Case::all() {
        let params = initial_params();
        let mut optimizer = case.build(&params);
        optimizer
            .step(&gradients(0, &params, case.pulls_to_goal), case.base_lr())
            .unwrap();
        let state = optimizer.state().unwrap();
        for name in state.keys() {
            let mut broken = state.clone();
            let removed = broken.remove(name).unwrap();
            let error = optimizer.load_state(&broken).unwrap_err().to_string();
            assert!(error.contains(name.as_str()), "{error}");
            broken.insert(name.clone(), Tensor::stack(&[&removed, &removed], 0).unwrap());
            assert!(optimizer.load_state(&broken).is_err(), "{} {name}", case.name);
            broken.insert(name.clone(), removed.to_dtype(DType::U32).unwrap());
            assert!(optimizer.load_state(&broken).is_err(), "{} {name}", case.name);
        }
        let mut more = state.clone();
        more.insert("another".into(), state.values().next().unwrap().clone());
        assert!(optimizer.load_state(&more).is_err());
        let after = optimizer.state().unwrap();
        for (name, tensor) in &state {
            let same = |t: &Tensor| floats(&t.to_dtype(DType::F32).unwrap());
            assert_eq!(same(tensor), same(&after[name]), "{} {name}", case.name);
        }
        assert!(optimizer.step(&vec![None], 1e-3).is_err());
    }
}

#[test]
fn base_lr_and_clipping_match_ai_toolkit() {
    let none = serde_json::Map::new();
    for (name, lr, want) in [
        (OptimizerName::Prodigy, 1e-4, 1.0),
        (OptimizerName::Prodigy, 0.5, 0.5),
        (OptimizerName::Prodigy8Bit, 1e-4, 1.0),
        (OptimizerName::Automagic, 1e-4, 1e-4),
        (OptimizerName::Automagic, 2e-3, 1e-6),
        (OptimizerName::Automagic2, 1.0, 1e-6),
        (OptimizerName::Automagic3, 1.0, 1.0),
        (OptimizerName::AdamW8Bit, 1e-4, 1e-4),
    ] {
        assert_eq!(base_lr(name, lr), want);
    }
    let clips = |name| {
        build(name, initial_params(), &none, 1e-3)
            .unwrap()
            .uses_gradient_clipping()
    };
    assert!(clips(OptimizerName::AdamW8Bit) && !clips(OptimizerName::Adafactor));
    assert!(clips(OptimizerName::Automagic) && !clips(OptimizerName::Automagic2) && !clips(OptimizerName::Automagic3));
    let traditional = serde_json::json!({"fused": false});
    let three = build(
        OptimizerName::Automagic3,
        initial_params(),
        traditional.as_object().unwrap(),
        1e-3,
    )
    .unwrap();
    assert!(three.uses_gradient_clipping());
    // A warm-up starts with a learning rate of 0: neither the weights nor `d` change.
    let params = initial_params();
    let mut prodigy = build(OptimizerName::Prodigy, params.clone(), &none, 1.0).unwrap();
    prodigy.step(&gradients(0, &params, true), 0.0).unwrap();
    assert_eq!(
        floats(params[0].var.as_tensor()),
        floats(initial_params()[0].var.as_tensor())
    );
    assert_eq!(prodigy.effective_lr(1.0).unwrap(), 1e-6);
}

/// A restored optimizer with another `lr_bump` keeps the rates, and rates that float16 cannot count are in float32.
#[test]
fn automagic_keeps_its_rates_when_lr_bump_changes() {
    let options = |bump: f64| serde_json::json!({"lr_bump": bump}).as_object().unwrap().clone();
    let params = initial_params();
    let mut one = build(OptimizerName::Automagic, params.clone(), &options(1e-6), 5e-4).unwrap();
    assert_eq!(one.effective_lr(0.0).unwrap(), 5e-4);
    one.step(&gradients(0, &params, true), 0.0).unwrap();
    for bump in [1e-6, 4e-6, 1e-8] {
        let mut other = build(OptimizerName::Automagic, params.clone(), &options(bump), 1e-5).unwrap();
        let loaded = other.load_state(&one.state().unwrap());
        if bump < 1e-7 {
            // 100,000 bumps up to the maximum rate: in float32.
            assert!(loaded.unwrap_err().to_string().contains("F16"));
            let value = other.state().unwrap().remove("w.lr").unwrap();
            assert_eq!(value.dtype(), DType::F32);
            continue;
        }
        loaded.unwrap();
        let (want, got) = (one.effective_lr(0.0).unwrap(), other.effective_lr(0.0).unwrap());
        assert!((got / want - 1.0).abs() < 1e-3, "{bump}: {got} {want}");
    }
}

crate::testing::in_portable_mode! {
    twenty_steps_match_the_reference,
    eight_bit_weights_are_close_to_float32,
}

crate::testing::with_emulated_kernels! {
    twenty_steps_match_the_reference,
}
