//! The forms of operations that CUDA and Metal use: half precision, large numbers, frozen weights.

use super::*;
use crate::autograd::{gradients, record};
use crate::device::portable::{emulated_kernels, portable};
use crate::rng::TorchGenerator;
use crate::testing::{gap, largest};
use candle_core::{DType, Device, Result, Tensor, Var};

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut generator = TorchGenerator::manual_seed(seed);
    Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

/// An operation on tensors of these shapes.
struct Case {
    name: &'static str,
    shapes: &'static [&'static [usize]],
    run: fn(&[Tensor]) -> Result<Tensor>,
}

const CASES: [Case; 19] = [
    Case {
        name: "linear",
        shapes: &[&[2, 5, 24], &[12, 24], &[12]],
        run: |x| linear(&x[0], &x[1], Some(&x[2])),
    },
    Case {
        name: "conv2d",
        shapes: &[&[2, 6, 7, 9], &[4, 6, 3, 3], &[4]],
        run: |x| conv2d(&x[0], &x[1], Some(&x[2]), 1, 1),
    },
    Case {
        name: "conv2d with stride 2",
        shapes: &[&[2, 6, 7, 10], &[4, 6, 3, 3]],
        run: |x| conv2d(&x[0], &x[1], None, 2, 1),
    },
    Case {
        name: "conv1d",
        shapes: &[&[2, 6, 11], &[4, 6, 3]],
        run: |x| conv1d(&x[0], &x[1], None, 2, 1),
    },
    Case {
        name: "group norm",
        shapes: &[&[2, 8, 5, 3], &[8], &[8]],
        run: |x| norm::GroupNorm::from_tensors(x[1].clone(), x[2].clone(), 2, 1e-5).forward_silu(&x[0]),
    },
    Case {
        name: "layer norm",
        shapes: &[&[2, 5, 16], &[16], &[16]],
        run: |x| norm::LayerNorm::from_parts(x[1].clone(), x[2].clone(), 1e-5).forward(&x[0]),
    },
    Case {
        name: "RMS norm",
        shapes: &[&[2, 5, 32], &[16]],
        run: |x| RmsNorm::from_weight(x[1].clone(), 1e-6)?.forward(&x[0]),
    },
    Case {
        name: "activations",
        shapes: &[&[2, 33]],
        run: |x| silu(&gelu(&quick_gelu(&x[0])?)?),
    },
    Case {
        name: "gated activations",
        shapes: &[&[2, 5, 32]],
        run: |x| swiglu(&geglu(&x[0])?),
    },
    Case {
        name: "attention",
        shapes: &[&[2, 9, 32], &[2, 13, 16], &[2, 13, 16]],
        run: |x| {
            let attention = Attention {
                kv_heads: 2,
                ..Attention::new(4)
            };
            attention.forward(&x[0], &x[1], &x[2])
        },
    },
    Case {
        name: "upsampling to an odd size",
        shapes: &[&[1, 3, 11, 4]],
        run: |x| upsample_nearest(&x[0], 21, 7),
    },
    Case {
        name: "upsampling to twice the size",
        shapes: &[&[1, 3, 5, 4]],
        run: |x| upsample_nearest(&x[0], 10, 8),
    },
    Case {
        name: "interpolation",
        shapes: &[&[1, 3, 5, 4]],
        run: |x| interpolate(&x[0], (9, 3), Interpolation::BilinearAligned),
    },
    Case {
        name: "the largest of four",
        shapes: &[&[1, 3, 5, 4]],
        run: |x| max_pool(&x[0]),
    },
    Case {
        name: "modulation",
        shapes: &[&[2, 5, 16], &[2, 16], &[2, 16]],
        run: |x| gated_residual(&modulate(&x[0], &x[1], &x[2])?, &x[1], &x[0]),
    },
    Case {
        name: "rotary",
        shapes: &[&[2, 5, 24]],
        run: |x| Rotary::for_sequence(5, 12, 500.0, RotaryPairs::Halves)?.forward(&x[0]),
    },
    Case {
        name: "kron",
        shapes: &[&[2, 9, 8], &[3, 2], &[5, 4]],
        run: |x| kron(&x[0], &x[1], &x[2], LayerKind::Linear, 0.5),
    },
    Case {
        name: "kron as a convolution",
        shapes: &[&[2, 8, 5, 7], &[3, 2], &[2, 4, 3, 3]],
        run: |x| {
            let kind = LayerKind::Conv { stride: 2, padding: 1 };
            kron(&x[0], &x[1], &x[2], kind, 0.5)
        },
    },
    Case {
        name: "sums",
        shapes: &[&[2, 4, 6], &[2, 3, 6], &[2, 7]],
        run: |x| add_channels(&cat_channels(&x[0], &x[1])?, &x[2]),
    },
];

/// The result and the gradients of its inputs, in f32.
fn result_and_gradients(case: &Case, inputs: &[Tensor]) -> Vec<Tensor> {
    let vars: Vec<_> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let tracked: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let (y, tape) = record(|| (case.run)(&tracked)).unwrap();
    let probe = random(77, y.dims()).to_dtype(y.dtype()).unwrap();
    let found = tape.backward_from([(y.clone(), probe)]).unwrap();
    let mut all = vec![y];
    all.extend(vars.iter().map(|var| found.get(var).expect(case.name).clone()));
    for (x, gradient) in inputs.iter().zip(&all[1..]) {
        assert_eq!(
            (x.dims(), x.dtype()),
            (gradient.dims(), gradient.dtype()),
            "{}",
            case.name
        );
    }
    all.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect()
}

#[test]
fn every_operation_works_in_every_dtype() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 0.004), (DType::BF16, 0.03)] {
        for case in &CASES {
            let inputs: Vec<_> = (1..)
                .zip(case.shapes)
                .map(|(seed, shape)| random(seed, shape))
                .collect();
            // The same numbers in both computations.
            let rounded: Vec<_> = inputs.iter().map(|x| x.to_dtype(dtype).unwrap()).collect();
            let exact: Vec<_> = rounded.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
            let expected = result_and_gradients(case, &exact);
            for (mode, found) in [
                ("portable", portable(|| result_and_gradients(case, &rounded))),
                ("kernels", emulated_kernels(|| result_and_gradients(case, &rounded))),
            ] {
                for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let error = gap(found, expected) / largest(expected);
                    assert!(
                        error < tolerance,
                        "{} in {dtype:?}, {mode}: result {which} is off by {error}",
                        case.name
                    );
                }
            }
        }
    }
}

#[test]
fn activations_have_finite_gradients_far_from_zero() {
    let x = [-60_000f32, -200.0, -90.0, -20.0, -6.6, 0.0, 6.6, 20.0, 90.0, 60_000.0];
    for activation in [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::QuickGelu,
    ] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let x = Tensor::new(&x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let var = Var::from_tensor(&x).unwrap();
            let sum = || activation.forward(&var)?.to_dtype(DType::F32)?.sum_all();
            let (_, found) = portable(|| gradients(sum)).unwrap();
            let gradient = found.get(&var).unwrap().to_dtype(DType::F32).unwrap();
            let gradient = gradient.to_vec1::<f32>().unwrap();
            for (i, gradient) in gradient.iter().enumerate() {
                let expected = [0.0, 1.0][i / 5];
                // At -6.6 to 6.6 the functions still bend.
                let tolerance = if (4..7).contains(&i) { 0.6 } else { 1e-3 };
                assert!(
                    (gradient - expected).abs() < tolerance,
                    "{activation:?} in {dtype:?}: gradient {i} is {gradient}"
                );
            }
            let by_candle = portable(sum).unwrap().backward().unwrap();
            let by_candle = by_candle.get(&var).unwrap().to_dtype(DType::F32).unwrap();
            let finite = by_candle.to_vec1::<f32>().unwrap().iter().all(|v| v.is_finite());
            assert!(
                finite || activation == Activation::GeluTanh,
                "{activation:?} in {dtype:?}: {by_candle}"
            );
        }
    }
}

#[test]
fn attention_in_f16_does_not_overflow() {
    let attend = |size: f64, upcast: bool| {
        // Products of queries and keys are 64 * size^2; scaled, an eighth of that.
        let like = Tensor::ones((1, 3, 64), DType::F32, &Device::Cpu).unwrap();
        let q = Var::from_tensor(&(&like * size).unwrap().to_dtype(DType::F16).unwrap()).unwrap();
        let v = random(1, &[1, 3, 64]).to_dtype(DType::F16).unwrap();
        let attention = Attention {
            upcast,
            ..Attention::new(1)
        };
        let sum = || attention.forward(&q, &q, &v)?.to_dtype(DType::F32)?.sum_all();
        let (sum, found) = portable(|| gradients(sum)).unwrap();
        let gradient = found.get(&q).unwrap().to_dtype(DType::F32).unwrap();
        (sum.to_scalar::<f32>().unwrap() + largest(&gradient)).is_finite()
    };
    assert!(attend(50.0, false), "160,000 before the scale, 20,000 after it");
    assert!(!attend(100.0, false) && attend(100.0, true), "80,000 after the scale");
}

#[test]
fn a_frozen_layer_is_one_step_without_a_graph() {
    portable(|| {
        let x = Var::from_tensor(&random(1, &[2, 6, 5, 4])).unwrap();
        let conv = Conv2d {
            weight: random(2, &[3, 6, 3, 3]).into(),
            bias: Some(random(3, &[3])),
            stride: 2,
            padding: 1,
            adapters: vec![],
        };
        let layer = Linear::from_parts(random(4, &[5, 3]), Some(random(5, &[5])));
        let forward = || layer.forward(&to_tokens(&conv.forward(&x)?)?);
        let (y, tape) = record(forward).unwrap();
        assert!(y.is_variable(), "a leaf: no graph behind the result is kept");
        assert_eq!(format!("{tape:?}"), "Tape(3 steps)");
        let found = tape.backward(&y).unwrap();
        let expected = forward().unwrap().backward().unwrap();
        let error = gap(found.get(&x).unwrap(), expected.get(&x).unwrap());
        assert!(error < 1e-5, "{error}");
        // Without a variable nothing is recorded.
        let (y, tape) = record(|| conv.forward(&x.detach())).unwrap();
        assert!(!y.track_op());
        assert_eq!(format!("{tape:?}"), "Tape(0 steps)");
    });
}

#[test]
fn a_result_that_shares_the_storage_of_its_input_is_copied() {
    portable(|| {
        // The transposition of one channel changes nothing.
        let x = Var::from_tensor(&random(1, &[2, 1, 3, 4])).unwrap();
        let before = x.as_tensor().copy().unwrap();
        let (y, tape) = record(|| to_tokens(&x)).unwrap();
        assert_eq!(gap(&x, &before), 0.0);
        assert_eq!(gap(&y.flatten_all().unwrap(), &before.flatten_all().unwrap()), 0.0);
        let found = tape.backward(&y).unwrap();
        assert_eq!(found.get(&x).unwrap().dims(), x.dims());
    });
}
