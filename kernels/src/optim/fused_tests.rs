//! Tests of the fused steps: against candle's operations, with several numbers of threads, and with tensors that other
//! code holds.

use super::*;
use crate::device::portable::portable;
use crate::rng::TorchGenerator;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::json;
use std::collections::BTreeMap;

/// Several chunks, a short last block, four dimensions, and less than a block.
const SHAPES: [&[usize]; 5] = [&[300, 211], &[70, 61], &[6, 4, 3, 3], &[7], &[64, 64, 3, 3]];

fn numbers(seed: u64) -> Vec<Tensor> {
    let mut generator = TorchGenerator::manual_seed(seed);
    let number = |dims: &&[usize]| Tensor::from_vec(generator.randn(dims.iter().product()), *dims, &Device::Cpu);
    SHAPES.iter().map(number).collect::<Result<_, _>>().unwrap()
}

fn params() -> Vec<Param> {
    let named = numbers(1).into_iter().enumerate().map(|(i, value)| Param {
        name: i.to_string(),
        var: Var::from_tensor(&value).unwrap(),
    });
    named.collect()
}

/// Gradients towards goal weights, with noise.
fn gradients(params: &[Param], seed: u64) -> Grads {
    let goals = numbers(2);
    let pairs = params.iter().zip(goals.iter().zip(numbers(seed)));
    let grad = |(p, (goal, noise)): (&Param, (&Tensor, Tensor))| {
        let way = (p.var.as_detached_tensor() - goal).unwrap();
        Some((way + (noise * 0.1).unwrap()).unwrap())
    };
    pairs.map(grad).collect()
}

fn floats(t: &Tensor) -> Vec<f32> {
    let flat = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    flat.to_vec1().unwrap()
}

type NumbersByName = BTreeMap<String, Vec<f32>>;

fn values(state: &BTreeMap<String, Tensor>) -> NumbersByName {
    state.iter().map(|(name, t)| (name.clone(), floats(t))).collect()
}

/// Runs six steps; returns the weights and the state.
fn run(name: OptimizerName, options: &serde_json::Value) -> NumbersByName {
    let params = params();
    let options = options.as_object().unwrap();
    let lr = base_lr(name, 1e-2);
    let mut optimizer = build(name, params.clone(), options, lr).unwrap();
    for step in 0..6 {
        let mut grads = gradients(&params, 10 + step);
        clip_grad_norm(&mut grads, 5.0).unwrap();
        if step == 3 {
            grads[1] = None;
        }
        optimizer.step(&grads, lr).unwrap();
    }
    let weights = params
        .iter()
        .map(|p| (format!("weight.{}", p.name), floats(p.var.as_tensor())));
    values(&optimizer.state().unwrap()).into_iter().chain(weights).collect()
}

fn cases() -> Vec<(OptimizerName, serde_json::Value)> {
    use OptimizerName::*;
    vec![
        (AdamW, json!({"weight_decay": 0.1})),
        (Adam, json!({"weight_decay": 0.1, "betas": [0.4, 0.95]})),
        (AdamW8Bit, json!({"weight_decay": 0.1})),
        (AdemaMix8Bit, json!({"t_alpha": 3, "t_beta3": 4})),
        (Lion, json!({"weight_decay": 0.1})),
        (
            Adagrad,
            json!({"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
        ),
        (Lion8Bit, json!({})),
        (Prodigy, json!({"weight_decay": 0.1, "d_coef": 2.0})),
        (
            Prodigy,
            json!({"weight_decay": 0.1, "decouple": false, "slice_p": 11, "use_bias_correction": true}),
        ),
        (Prodigy, json!({"betas": [0.0, 0.99], "safeguard_warmup": true})),
        (Prodigy8Bit, json!({"weight_decay": 0.1, "d_coef": 2.0})),
        (Automagic, json!({"weight_decay": 0.1, "lr_bump": 1e-5})),
        (Automagic, json!({"weight_decay": 0.1, "lr_bump": 1e-7})),
        (Automagic2, json!({"weight_decay": 0.1, "lr_bump": 1e-5})),
        (DAdaptation, json!({"weight_decay": 0.1})),
        (DAdaptationLion, json!({"weight_decay": 0.1})),
        (Automagic3, json!({"weight_decay": 0.1, "polarity_history": 3})),
        (
            Adafactor,
            json!({"beta1": 0.9, "weight_decay": 0.1, "scale_parameter": true}),
        ),
        (Adafactor, json!({"weight_decay": 0.1})),
    ]
}

fn in_pool<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(f)
}

#[test]
fn the_number_of_threads_does_not_change_the_result() {
    for (name, options) in crate::testing::sampled_cases(cases()) {
        let bits = |threads| {
            let result = in_pool(threads, || run(name, &options));
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            result
                .into_iter()
                .map(|(name, v)| (name, bits(v)))
                .collect::<BTreeMap<_, _>>()
        };
        let one = bits(1);
        for threads in [2, 5] {
            assert!(one == bits(threads), "{name:?} {options}: {threads} threads");
        }
    }
}

#[test]
fn fused_steps_match_tensor_operations() {
    // In 8 bits a difference in the last bit can give another code. The next test compares these optimizers, without clipping and other sums, bit for bit.
    let is_compared = |name: &OptimizerName| {
        use OptimizerName::*;
        !matches!(name, AdamW8Bit | AdemaMix8Bit | Lion8Bit)
    };
    let compared = cases().into_iter().filter(|(name, _)| is_compared(name));
    for (name, options) in crate::testing::sampled_cases(compared.collect()) {
        let tolerance = if name == OptimizerName::Prodigy8Bit { 1e-3 } else { 1e-5 };
        let (one, two) = (run(name, &options), portable(|| run(name, &options)));
        assert_eq!(one.keys().collect::<Vec<_>>(), two.keys().collect::<Vec<_>>());
        // Sums are computed in another order, so the clipping factor differs in its last bits.
        for (key, want) in two.iter().filter(|(key, _)| !key.ends_with(".codes")) {
            let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
            let gap = want
                .iter()
                .zip(&one[key])
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(
                gap <= tolerance * largest,
                "{name:?} {options} {key}: {gap:e} of {largest:e}"
            );
        }
    }
}

#[test]
fn fused_steps_without_reductions_are_bit_identical_to_tensor_operations() {
    use OptimizerName::*;
    for name in crate::testing::sampled_cases(vec![
        AdamW8Bit,
        AdamW,
        Adam,
        Adam8Bit,
        AdamW8,
        AdemaMix8Bit,
        Adagrad,
        Lion,
        Lion8Bit,
    ]) {
        let steps = || {
            let params = params();
            let options = json!({"weight_decay": 0.1});
            let mut optimizer = build(name, params.clone(), options.as_object().unwrap(), 1e-2).unwrap();
            for step in 0..6 {
                optimizer.step(&gradients(&params, 10 + step), 1e-2).unwrap();
            }
            let weights: Vec<_> = params.iter().map(|p| floats(p.var.as_tensor())).collect();
            (values(&optimizer.state().unwrap()), weights)
        };
        assert!(steps() == portable(steps), "{name:?}");
    }
}

#[test]
fn fused_ema_and_clipping_match_tensor_operations() {
    let ema = |feedback: bool, multiplier: f64| {
        let params = params();
        let mut ema = Ema::new(params.clone(), 0.9, feedback, multiplier).unwrap();
        for (param, value) in params.iter().zip(numbers(3)) {
            param.var.set(&value).unwrap();
        }
        ema.update().unwrap();
        ema.update().unwrap();
        let weights: Vec<_> = params.iter().map(|p| floats(p.var.as_tensor())).collect();
        (values(&ema.state().0), weights)
    };
    for (feedback, multiplier) in [(false, 1.0), (true, 1.0), (false, 0.99), (true, 0.99)] {
        let bits = in_pool(3, || ema(feedback, multiplier));
        assert!(
            bits == portable(|| ema(feedback, multiplier)),
            "{feedback} {multiplier}"
        );
    }
    let clip = |max_norm: f64| {
        let mut grads = gradients(&params(), 4);
        let norm = clip_grad_norm(&mut grads, max_norm).unwrap();
        (norm, grads)
    };
    let ((a, one), (b, two)) = (clip(0.5), portable(|| clip(0.5)));
    assert!(a > 1.0 && (a / b - 1.0).abs() < 1e-5, "{a} {b}");
    for (a, b) in one.iter().flatten().zip(two.iter().flatten()) {
        let gap = floats(a).into_iter().zip(floats(b)).map(|(a, b)| (a - b).abs());
        assert!(gap.fold(0.0, f32::max) < 1e-7);
    }
    // Clipping does not change a gradient that other code holds.
    let (original, mut clipped) = (gradients(&params(), 4), gradients(&params(), 4));
    clipped.clone_from(&original);
    clip_grad_norm(&mut clipped, 0.5).unwrap();
    for (a, b) in original.iter().flatten().zip(gradients(&params(), 4).iter().flatten()) {
        assert_eq!(floats(a), floats(b));
    }
}

#[test]
fn steps_do_not_change_a_saved_or_loaded_state() {
    for (name, options) in cases() {
        let params = params();
        let mut optimizer = build(name, params.clone(), options.as_object().unwrap(), 1e-2).unwrap();
        let step = |optimizer: &mut dyn Optimizer| optimizer.step(&gradients(&params, 10), 1.0).unwrap();
        step(optimizer.as_mut());
        let saved = optimizer.state().unwrap();
        let before = values(&saved);
        step(optimizer.as_mut());
        assert!(values(&saved) == before, "{name:?}: saved");
        assert!(values(&optimizer.state().unwrap()) != before, "{name:?}");
        optimizer.load_state(&saved).unwrap();
        step(optimizer.as_mut());
        assert!(values(&saved) == before, "{name:?}: loaded");
    }
    let params = params();
    let mut ema = Ema::new(params.clone(), 0.9, false, 1.0).unwrap();
    let (saved, _) = ema.state();
    let before = values(&saved);
    params[0].var.set(&params[0].var.zeros_like().unwrap()).unwrap();
    ema.update().unwrap();
    assert!(values(&saved) == before && values(&ema.state().0) != before);
    ema.load_state(&saved, 0).unwrap();
    ema.update().unwrap();
    assert!(values(&saved) == before);
}

#[test]
fn a_gradient_may_alias_the_parameter_or_be_strided() {
    let after = |grad: &dyn Fn(&Tensor) -> Tensor| {
        let params = params();
        let grads: Grads = params.iter().map(|p| Some(grad(p.var.as_tensor()))).collect();
        let none = serde_json::Map::new();
        let mut optimizer = build(OptimizerName::AdamW, params.clone(), &none, 1e-2).unwrap();
        optimizer.step(&grads, 1e-2).unwrap();
        params.iter().map(|p| floats(p.var.as_tensor())).collect::<Vec<_>>()
    };
    let copied = after(&|p| p.copy().unwrap());
    assert_eq!(after(&Tensor::detach), copied);
    let transposed = |p: &Tensor| match p.dims() {
        [_, _] => p.t().unwrap().contiguous().unwrap().t().unwrap(),
        _ => p.copy().unwrap(),
    };
    assert_eq!(after(&transposed), copied);
    let doubles = |p: &Tensor| p.to_dtype(DType::F64).unwrap();
    assert_eq!(after(&doubles), copied);
}
