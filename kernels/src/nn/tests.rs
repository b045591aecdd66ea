//! Compares every kernel with candle's operations, and its gradients with finite differences.

use super::*;
use crate::autograd::gradients;
use crate::device::portable::is_portable;
use crate::testing::{gap, in_portable_mode, largest};
use crate::weights::{Weight, Weights};
use candle_core::{DType, Device, Tensor, Var};

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let weights = Weights::init(seed, &Device::Cpu);
    weights
        .get_with(shape, "x", crate::weights::Init::Normal(1.0))
        .unwrap()
        .detach()
}

fn close(a: &Tensor, b: &Tensor, tolerance: f32) {
    let error = gap(a, b) / largest(b).max(1e-3);
    assert!(error < tolerance, "relative error {error}");
}

/// Compares the gradients of sum(f(inputs) * probe) with those of candle's own backward pass through the same operations, and with
/// central differences along random directions.
fn check_gradients(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) {
    // The same kernels, or in portable mode two ways to compute the gradients.
    let tolerance = if is_portable() { 1e-5 } else { 1e-6 };
    check_gradients_within(tolerance, inputs, f);
}

/// [`check_gradients`], with this relative error of those of candle's backward pass.
fn check_gradients_within(tolerance: f32, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let tracked: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let probe = random(99, f(inputs).dims());
    let value = |x: &[Tensor]| {
        let y = (f(x) * &probe).unwrap().to_dtype(DType::F64).unwrap();
        y.sum_all().unwrap().to_scalar::<f64>().unwrap()
    };
    let expected = (f(&tracked) * &probe).unwrap().sum_all().unwrap().backward().unwrap();
    let (_, grads) = gradients(|| (f(&tracked) * &probe)?.sum_all()).unwrap();
    for (i, var) in vars.iter().enumerate() {
        let direction = random(200 + i as u64, inputs[i].dims());
        let grad = grads.get(var).unwrap();
        close(grad, expected.get(var).unwrap(), tolerance);
        let analytic = (grad * &direction)
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap() as f64;
        let shifted = |h: f64| {
            let mut moved = inputs.to_vec();
            moved[i] = (&inputs[i] + (&direction * h).unwrap()).unwrap();
            value(&moved)
        };
        let h = 2e-3;
        let numeric = (shifted(h) - shifted(-h)) / (2.0 * h);
        let scale = analytic.abs().max(1.0);
        assert!(
            (analytic - numeric).abs() / scale < 2e-2,
            "input {i}: {analytic} against {numeric}"
        );
    }
}

#[test]
fn convolution_equals_candles_convolution() {
    // Kernel, stride, padding, batch, input channels, size; those with 64 channels need several tiles.
    for (kernel, stride, padding, batch, in_channels, size) in [
        (3, 1, 1, 2, 3, (5, 7)),
        (3, 2, 1, 3, 4, (6, 9)),
        (3, 2, 0, 1, 2, (7, 8)),
        (1, 1, 0, 3, 5, (4, 6)),
        (1, 1, 0, 1, 5, (4, 6)),
        (5, 1, 2, 1, 2, (6, 6)),
        (3, 1, 1, 2, 64, (64, 48)),
        (3, 1, 1, 5, 64, (24, 24)),
        (3, 1, 2, 1, 1, (2, 2)),
    ] {
        let x = random(1, &[batch, in_channels, size.0, size.1]);
        let w = random(2, &[4, in_channels, kernel, kernel]);
        let bias = random(3, &[4]);
        let expected = x.conv2d(&w, padding, stride, 1, 1).unwrap();
        let expected = expected.broadcast_add(&bias.reshape((1, 4, 1, 1)).unwrap()).unwrap();
        close(&conv2d(&x, &w, Some(&bias), stride, padding).unwrap(), &expected, 1e-5);
    }
    assert!(conv2d(&random(1, &[1, 3, 4, 4]), &random(2, &[4, 2, 3, 3]), None, 1, 1).is_err());
    assert!(conv2d(&random(1, &[1, 2, 2, 2]), &random(2, &[4, 2, 5, 5]), None, 1, 1).is_err());
}

#[test]
fn gradients_of_convolution_are_correct() {
    for (kernel, stride, padding, batch, size) in [
        (3, 1, 1, 2, 5),
        (3, 2, 1, 2, 6),
        (3, 2, 0, 1, 7),
        (1, 1, 0, 3, 4),
        (3, 1, 1, 3, 40),
        (1, 2, 1, 2, 5),
        (2, 3, 2, 1, 6),
    ] {
        let inputs = [
            random(1, &[batch, 3, size, size + 1]),
            random(2, &[4, 3, kernel, kernel]),
            random(3, &[4]),
        ];
        check_gradients(&inputs, |x| conv2d(&x[0], &x[1], Some(&x[2]), stride, padding).unwrap());
    }
    // Several tiles per image and several images per tile.
    for size in [40, 12] {
        let x = Var::from_tensor(&random(1, &[3, 80, size, size])).unwrap();
        let w = Var::from_tensor(&random(2, &[8, 80, 3, 3])).unwrap();
        let probe = random(3, &[3, 8, size, size]);
        let ours = conv2d(x.as_tensor(), w.as_tensor(), None, 1, 1).unwrap();
        let ours = (ours * &probe).unwrap().sum_all().unwrap().backward().unwrap();
        let candles = x.as_tensor().conv2d(w.as_tensor(), 1, 1, 1, 1).unwrap();
        let candles = (candles * &probe).unwrap().sum_all().unwrap().backward().unwrap();
        close(ours.get(&x).unwrap(), candles.get(&x).unwrap(), 1e-5);
        close(ours.get(&w).unwrap(), candles.get(&w).unwrap(), 1e-5);
    }
}

#[test]
fn frozen_and_trained_linear_layers_agree() {
    let (w, b) = (random(2, &[6, 5]), random(3, &[6]));
    check_gradients(&[random(1, &[2, 3, 5]), w.clone(), b.clone()], |x| {
        linear(&x[0], &x[1], Some(&x[2])).unwrap()
    });
    check_gradients(&[random(1, &[2, 3, 5])], |x| linear(&x[0], &w, Some(&b)).unwrap());
    let x = random(1, &[2, 3, 5]);
    let trained = linear(&x, Var::from_tensor(&w).unwrap().as_tensor(), Some(&b)).unwrap();
    close(&linear(&x, &w, Some(&b)).unwrap(), &trained, 1e-6);
    // A transposed input is not contiguous.
    let transposed = random(1, &[2, 5, 3]).transpose(1, 2).unwrap();
    close(
        &linear(&transposed, &w, None).unwrap(),
        &linear(&transposed.contiguous().unwrap(), &w, None).unwrap(),
        1e-6,
    );
    assert!(linear(&random(1, &[2, 4]), &w, None).is_err());
}

#[test]
fn values_and_gradients_of_activations_are_correct() {
    let x = Tensor::new(&[-3f32, -0.5, 0.0, 0.7, 2.0], &Device::Cpu).unwrap();
    // torch.nn.functional.silu, gelu, gelu(approximate="tanh"), and x * sigmoid(1.702 x).
    for (activation, expected) in [
        (
            Activation::Silu,
            [-0.142277613, -0.188770339, 0.0, 0.467731416, 1.76159406],
        ),
        (
            Activation::Gelu,
            [-0.00405022502, -0.154268771, 0.0, 0.530625463, 1.95449972],
        ),
        (
            Activation::GeluTanh,
            [-0.00363743305, -0.154285997, 0.0, 0.530570149, 1.95459771],
        ),
        (
            Activation::QuickGelu,
            [-0.0180713106, -0.149611562, 0.0, 0.536893964, 1.93565857],
        ),
    ] {
        let expected = Tensor::new(&expected.map(|v: f64| v as f32), &Device::Cpu).unwrap();
        close(&activation.forward(&x).unwrap(), &expected, 1e-6);
        check_gradients(&[random(1, &[3, 7])], |x| activation.forward(&x[0]).unwrap());
    }
    check_gradients(&[random(1, &[3, 4, 10])], |x| geglu(&x[0]).unwrap());
}

#[test]
fn gradients_of_norms_are_correct() {
    let weights = Weights::init(1, &Device::Cpu);
    let (group, layer) = (weights.pp("g"), weights.pp("l"));
    GroupNorm::new(&group, 2, 6, 1e-5).unwrap();
    LayerNorm::new(&layer, 7, 1e-5).unwrap();
    let group_norm =
        |x: &Tensor, w: &Tensor, b: &Tensor| norm::GroupNorm::from_tensors(w.clone(), b.clone(), 2, 1e-5).forward(x);
    let layer_norm =
        |x: &Tensor, w: &Tensor, b: &Tensor| norm::LayerNorm::from_parts(w.clone(), b.clone(), 1e-5).forward(x);
    let affine = |n: usize| (random(2, &[n]), random(3, &[n]));
    let (w, b) = affine(6);
    check_gradients(&[random(1, &[2, 6, 3, 4]), w, b], |x| {
        group_norm(&x[0], &x[1], &x[2]).unwrap()
    });
    let (w, b) = affine(7);
    check_gradients(&[random(1, &[2, 3, 7]), w.clone(), b.clone()], |x| {
        layer_norm(&x[0], &x[1], &x[2]).unwrap()
    });
    let x = random(1, &[2, 3, 7]);
    let one = layer_norm(&x, &w, &b).unwrap().get(1).unwrap();
    close(&one, &layer_norm(&x.get(1).unwrap(), &w, &b).unwrap(), 1e-6);
    assert!(GroupNorm::new(&group, 4, 6, 1e-5).is_err());
}

fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    heads: usize,
    scale: f64,
    causal: bool,
) -> candle_core::Result<Tensor> {
    let attention = Attention {
        scale: Some(scale),
        causal,
        ..Attention::new(heads)
    };
    attention.forward(q, k, v)
}

/// Attention with candle's operations.
fn candle_attention(q: &Tensor, k: &Tensor, v: &Tensor, heads: usize, causal: bool) -> Tensor {
    let (b, n, c) = q.dims3().unwrap();
    let m = k.dim(1).unwrap();
    let split = |x: &Tensor, l: usize| {
        x.reshape((b, l, heads, c / heads))
            .unwrap()
            .transpose(1, 2)
            .unwrap()
            .contiguous()
            .unwrap()
    };
    let mut s = (split(q, n).matmul(&split(k, m).t().unwrap()).unwrap() * 0.3).unwrap();
    if causal {
        let mask: Vec<f32> = (0..n * m)
            .map(|i| if i % m > i / m { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        s = s
            .broadcast_add(&Tensor::from_vec(mask, (n, m), &Device::Cpu).unwrap())
            .unwrap();
    }
    let y = softmax(&s).unwrap().matmul(&split(v, m)).unwrap();
    y.transpose(1, 2).unwrap().reshape((b, n, c)).unwrap()
}

#[test]
fn attention_equals_attention_with_candles_operations() {
    for (n, m, heads, causal) in [
        (5, 5, 2, true),
        (5, 7, 3, false),
        (1, 1, 1, false),
        (300, 2000, 1, false),
    ] {
        let (q, k, v) = (random(1, &[2, n, 6]), random(2, &[2, m, 6]), random(3, &[2, m, 6]));
        let ours = attention(&q, &k, &v, heads, 0.3, causal).unwrap();
        close(&ours, &candle_attention(&q, &k, &v, heads, causal), 1e-5);
    }
    for (causal, m) in [(true, 5), (false, 4)] {
        let inputs = [random(1, &[2, 5, 6]), random(2, &[2, m, 6]), random(3, &[2, m, 6])];
        check_gradients(&inputs, |x| attention(&x[0], &x[1], &x[2], 2, 0.3, causal).unwrap());
    }
    // More keys than a block of scores: the gradient is summed over blocks.
    let vars = [(1, 300), (2, 2000), (3, 2000)].map(|(s, n)| Var::from_tensor(&random(s, &[1, n, 4])).unwrap());
    let [q, k, v] = vars.each_ref().map(|v| v.as_tensor());
    let probe = random(4, &[1, 300, 4]);
    let ours = (attention(q, k, v, 2, 0.3, false).unwrap() * &probe)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    let plain = (candle_attention(q, k, v, 2, false) * &probe)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    for var in &vars {
        close(ours.get(var).unwrap(), plain.get(var).unwrap(), 1e-4);
    }
    assert!(
        attention(
            &random(1, &[2, 5, 6]),
            &random(2, &[1, 5, 6]),
            &random(3, &[1, 5, 6]),
            2,
            1.0,
            false
        )
        .is_err()
    );
}

#[test]
fn upsampling_takes_the_nearest_pixel_and_its_gradients_are_correct() {
    let x = Tensor::arange(0f32, 6f32, &Device::Cpu)
        .unwrap()
        .reshape((1, 1, 2, 3))
        .unwrap();
    let y = upsample_nearest(&x, 4, 6)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert_eq!(&y[..12], [0., 0., 1., 1., 2., 2., 0., 0., 1., 1., 2., 2.]);
    // torch.nn.functional.interpolate(x, size=(3, 5), mode="nearest")
    let y = upsample_nearest(&x, 3, 5)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert_eq!(y, [0., 0., 1., 1., 2., 0., 0., 1., 1., 2., 3., 3., 4., 4., 5.]);
    check_gradients(&[random(1, &[2, 3, 4, 5])], |x| upsample_nearest(&x[0], 7, 10).unwrap());
    // A tensor that is used twice gets the sum of both gradients.
    check_gradients(&[random(1, &[1, 2, 2, 2])], |x| {
        let up = upsample_nearest(&x[0], 4, 4).unwrap();
        (up + upsample_nearest(&(&x[0] * 2.0).unwrap(), 4, 4).unwrap()).unwrap()
    });
}

#[test]
fn products_are_multiplied_element_by_element() {
    let inputs = [random(1, &[2, 5, 3]), random(2, &[2, 3, 7])];
    let product = |index: usize| {
        inputs[0]
            .get(index)
            .unwrap()
            .matmul(&inputs[1].get(index).unwrap())
            .unwrap()
    };
    let expected = ((product(0) * product(1)).unwrap() * 0.7).unwrap();
    let forward = |x: &[Tensor]| hadamard_of_products(&x[0], &x[1], 0.7).unwrap();
    close(&forward(&inputs), &expected, 1e-6);
    check_gradients(&inputs, forward);

    let base = random(3, &[5, 7, 1, 1]);
    let forward = |x: &[Tensor]| add_hadamard_of_products(&base, &x[0], &x[1], 0.7, DType::F32).unwrap();
    let expected = (&base + expected.reshape(base.shape()).unwrap()).unwrap();
    close(&forward(&inputs), &expected, 1e-6);
    check_gradients(&inputs, forward);
    // The sum of a 16-bit weight is rounded once.
    let narrow = base.to_dtype(DType::BF16).unwrap();
    let sum = add_hadamard_of_products(&narrow, &inputs[0], &inputs[1], 0.7, DType::BF16).unwrap();
    let expected = add_hadamard_of_products(&narrow, &inputs[0], &inputs[1], 0.7, DType::F32).unwrap();
    let expected = expected.to_dtype(DType::BF16).unwrap();
    assert_eq!(sum.dims(), base.dims());
    let numbers = |t: &Tensor| {
        t.to_dtype(DType::F32)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    assert_eq!(numbers(&sum), numbers(&expected));
}

/// The formula of `apply_weight_decompose` in LyCORIS, with each form of the change.
#[test]
fn weights_with_a_change_are_normalised_and_multiplied_with_magnitudes() {
    type Case<'a> = (ChangeForm, &'a [usize], [&'a [usize]; 2]);
    let cases: [Case<'_>; 5] = [
        (ChangeForm::LowRank, &[6, 8], [&[6, 2], &[2, 8]]),
        (ChangeForm::LowRank, &[6, 4, 3, 3], [&[6, 2], &[2, 36]]),
        (ChangeForm::Hadamard, &[6, 4, 3, 3], [&[2, 6, 3], &[2, 3, 36]]),
        (ChangeForm::Kronecker, &[6, 8], [&[3, 2], &[2, 4]]),
        (ChangeForm::Kronecker, &[6, 4, 3, 3], [&[2, 2], &[3, 18]]),
    ];
    for (form, shape, [a, b]) in cases {
        let weight = random(4, shape);
        let (outputs, inputs) = (shape[0], shape[1]);
        for (axis, dropped, strength) in [(0, false, 1.0), (1, false, 0.6), (0, true, -0.5), (1, true, 1.0)] {
            let tensors = [
                random(1, a),
                random(2, b),
                (random(3, &[shape[axis]]).abs().unwrap() + 0.5).unwrap(),
            ];
            let options = Decomposition {
                form,
                scale: 0.7,
                axis,
                strength,
                dtype: DType::F32,
            };
            let kept: Vec<f32> = (0..outputs).map(|row| if row % 3 == 1 { 0.0 } else { 1.0 }).collect();
            let kept = Tensor::from_vec(kept, outputs, &Device::Cpu).unwrap();
            let kept = dropped.then_some(&kept);
            let base = Weight::Plain(weight.clone());
            let forward = |x: &[Tensor]| decomposed_weight(&base, [&x[0], &x[1]], &x[2], kept, options).unwrap();

            // Element by element, in f64.
            let numbers = |t: &Tensor| -> Vec<f64> {
                let flat = t.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
                flat.to_vec1().unwrap()
            };
            let [a, b, magnitude] = tensors.each_ref().map(numbers);
            let taps: usize = shape[2..].iter().product();
            let columns = inputs * taps;
            let change = |row: usize, column: usize| -> f64 {
                let product = |a: &[f64], b: &[f64]| -> f64 {
                    let rank = a.len() / outputs;
                    (0..rank).map(|r| a[row * rank + r] * b[r * columns + column]).sum()
                };
                match form {
                    ChangeForm::LowRank => product(&a, &b),
                    ChangeForm::Hadamard => {
                        let ((a, c), (b, d)) = (a.split_at(a.len() / 2), b.split_at(b.len() / 2));
                        product(a, b) * product(c, d)
                    }
                    ChangeForm::Kronecker => {
                        let [rows, width] = [tensors[1].dims()[0], tensors[1].dims()[1]];
                        let first_columns = tensors[0].dims()[1];
                        let first = a[row / rows * first_columns + column / width];
                        first * b[row % rows * width + column % width]
                    }
                }
            };
            let mut sums: Vec<f64> = numbers(&weight);
            for (at, sum) in sums.iter_mut().enumerate() {
                let row = at / columns;
                if !(dropped && row % 3 == 1) {
                    *sum += 0.7 * change(row, at % columns);
                }
            }
            let place = |at: usize| if axis == 0 { at / columns } else { at % columns / taps };
            let mut squares = vec![0f64; shape[axis]];
            for (at, sum) in sums.iter().enumerate() {
                squares[place(at)] += sum * sum;
            }
            let expected: Vec<f32> = sums
                .iter()
                .enumerate()
                .map(|(at, sum)| {
                    let ratio = magnitude[place(at)] / squares[place(at)].sqrt();
                    (sum * (1.0 + strength * (ratio - 1.0))) as f32
                })
                .collect();
            let expected = Tensor::from_vec(expected, shape, &Device::Cpu).unwrap();
            close(&forward(&tensors), &expected, 2e-6);
            check_gradients_within(1e-5, &tensors, forward);
        }
    }
}

#[test]
fn channels_are_scaled_and_shifted() {
    let conv = LayerKind::Conv { stride: 1, padding: 0 };
    for (kind, shape, axis) in [
        (LayerKind::Linear, vec![2, 5, 70], 2),
        (LayerKind::Linear, vec![3, 4], 1),
        (conv, vec![2, 70, 3, 5], 1),
        (conv, vec![1, 3, 1, 1], 1),
    ] {
        let channels = shape[axis];
        let inputs = [random(1, &shape), random(2, &[channels])];
        let shift = random(3, &[channels]);
        let mut broadcast = vec![1; shape.len()];
        broadcast[axis] = channels;
        for shift in [None, Some(&shift)] {
            let over = |vector: &Tensor| vector.reshape(broadcast.as_slice()).unwrap();
            let scaled = inputs[0].broadcast_mul(&over(&(&inputs[1] + 1.0).unwrap())).unwrap();
            let expected = match shift {
                Some(shift) => scaled.broadcast_add(&over(shift)).unwrap(),
                None => scaled,
            };
            close(
                &scale_channels(kind, &inputs[0], &inputs[1], shift).unwrap(),
                &expected,
                1e-6,
            );
            check_gradients(&inputs, |x| scale_channels(kind, &x[0], &x[1], shift).unwrap());
        }
        assert!(scale_channels(kind, &inputs[0], &random(2, &[channels + 1]), None).is_err());
    }
}

/// 1.003 is 1 in bfloat16, and 1.0004 in float16.
#[test]
fn a_small_scale_of_channels_is_not_lost_in_16_bits() {
    for (dtype, steps, scale) in [(DType::BF16, 128_usize, 0.003_f32), (DType::F16, 1024, 0.0004)] {
        let numbers: Vec<f32> = (steps..2 * steps).map(|i| i as f32 / steps as f32).collect();
        let x = Tensor::from_vec(numbers, (steps, 1), &Device::Cpu).unwrap();
        let scales = Tensor::new(&[scale], &Device::Cpu).unwrap();
        let y = scale_channels(LayerKind::Linear, &x.to_dtype(dtype).unwrap(), &scales, None).unwrap();
        let change = ((y.to_dtype(DType::F32).unwrap() / &x).unwrap() - 1.0).unwrap();
        let change = change.mean_all().unwrap().to_scalar::<f32>().unwrap();
        assert!((0.5 * scale..2.0 * scale).contains(&change), "{dtype:?}: {change}");
    }
}

#[test]
fn adapters_are_applied_in_order() {
    #[derive(Debug)]
    struct Add(f64);
    impl LayerAdapter for Add {
        fn apply(&self, _: &BaseLayer<'_>, x: &Tensor, base_output: Tensor) -> candle_core::Result<Tensor> {
            (base_output * 2.0)? + (x.sum_keepdim(1)?.broadcast_as((2, 3))? * self.0)?
        }
    }
    /// Replaces the output by that of the layer with twice the weight.
    #[derive(Debug)]
    struct Twice;
    impl LayerAdapter for Twice {
        fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, _: Tensor) -> candle_core::Result<Tensor> {
            assert_eq!(layer.kind, LayerKind::Linear);
            linear(x, &(layer.weight.dense()? * 2.0)?, layer.bias)
        }
    }
    let mut layer = Linear::from_parts(random(1, &[3, 4]), None);
    let x = random(2, &[2, 4]);
    let plain = layer.forward(&x).unwrap();
    layer.adapters.push(std::sync::Arc::new(Add(1.0)));
    layer.adapters.push(std::sync::Arc::new(Add(0.0)));
    let sum = x.sum_keepdim(1).unwrap().broadcast_as((2, 3)).unwrap();
    close(
        &layer.forward(&x).unwrap(),
        &((plain * 4.0).unwrap() + (sum * 2.0).unwrap()).unwrap(),
        1e-5,
    );
    let plain = Linear::from_parts(layer.weight.clone(), None).forward(&x).unwrap();
    layer.adapters.push(std::sync::Arc::new(Twice));
    close(&layer.forward(&x).unwrap(), &(plain * 2.0).unwrap(), 1e-5);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let x = Var::from_tensor(&random(1, &[2, 32, 20, 20])).unwrap();
            let w = Var::from_tensor(&random(2, &[32, 32, 3, 3])).unwrap();
            let y = conv2d(x.as_tensor(), w.as_tensor(), None, 1, 1).unwrap();
            let tokens = y.flatten_from(2).unwrap().transpose(1, 2).unwrap();
            let y = attention(&tokens, &tokens, &tokens, 4, 0.1, false).unwrap();
            let y = linear(&silu(&y).unwrap(), &random(3, &[16, 32]), None).unwrap();
            let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            [y, grads.get(&x).unwrap().clone(), grads.get(&w).unwrap().clone()]
                .map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap())
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

#[test]
fn sums_and_concatenations_equal_candles() {
    let (a, b) = (random(1, &[2, 3, 5, 4]), random(2, &[2, 3, 5, 4]));
    let (wide, shift) = (random(3, &[2, 7, 5, 4]), random(4, &[2, 3]));
    close(&add(&a, &b).unwrap(), &(&a + &b).unwrap(), 1e-7);
    close(
        &cat_channels(&a, &wide).unwrap(),
        &Tensor::cat(&[&a, &wide], 1).unwrap(),
        1e-7,
    );
    let column = shift.reshape((2, 3, 1, 1)).unwrap();
    close(
        &add_channels(&a, &shift).unwrap(),
        &a.broadcast_add(&column).unwrap(),
        1e-7,
    );
    check_gradients(&[a.clone(), b], |x| add(&x[0], &x[1]).unwrap());
    check_gradients(&[a.clone(), wide.clone()], |x| cat_channels(&x[0], &x[1]).unwrap());
    check_gradients(&[a.clone(), shift.clone()], |x| add_channels(&x[0], &x[1]).unwrap());
    // Without spatial dimensions, a channel is one number.
    check_gradients(&[random(6, &[2, 3]), shift.clone()], |x| {
        add_channels(&x[0], &x[1]).unwrap()
    });
    assert!(add(&a, &wide).is_err() && add_channels(&wide, &shift).is_err());
    assert!(cat_channels(&a, &random(5, &[2, 3, 4, 5])).is_err());
}

#[test]
fn images_and_tokens_are_converted_into_each_other() {
    let x = random(1, &[2, 5, 7, 6]);
    let tokens = to_tokens(&x).unwrap();
    let expected = x
        .flatten_from(2)
        .unwrap()
        .transpose(1, 2)
        .unwrap()
        .contiguous()
        .unwrap();
    close(&tokens, &expected, 1e-7);
    close(&to_image(&tokens, x.dims()).unwrap(), &x, 1e-7);
    check_gradients(std::slice::from_ref(&x), |x| to_tokens(&x[0]).unwrap());
    check_gradients(std::slice::from_ref(&tokens), |t| {
        to_image(&t[0], &[2, 5, 7, 6]).unwrap()
    });
    assert!(to_image(&tokens, &[2, 5, 7, 7]).is_err());
}

/// A LoRA that can be fused with its layer or applied separately.
#[derive(Debug)]
struct TestLora {
    low_rank: LowRank,
    fused: bool,
    /// Stride and padding of its convolution; `None` on a linear layer.
    conv: Option<(usize, usize)>,
}

impl LayerAdapter for TestLora {
    fn apply(&self, _: &BaseLayer<'_>, x: &Tensor, base_output: Tensor) -> candle_core::Result<Tensor> {
        let LowRank { down, up, scale } = &self.low_rank;
        let change = match self.conv {
            None => linear(&linear(x, down, None)?, up, None)?,
            Some((stride, padding)) => conv2d(&conv2d(x, down, None, stride, padding)?, up, None, 1, 0)?,
        };
        base_output + (change * *scale)?
    }

    fn low_rank(&self) -> Option<LowRank> {
        self.fused.then(|| self.low_rank.clone())
    }
}

#[test]
fn a_layer_fused_with_its_lora_equals_the_sum_of_both() {
    // With 40 rows the LoRA is merged into the weight, with 2 rows its result is added.
    for rows in [40, 2] {
        let (weight, bias) = (random(1, &[12, 9]), random(2, &[12]));
        let inputs = [random(3, &[2, rows / 2, 9]), random(4, &[4, 9]), random(5, &[12, 4])];
        let forward = |x: &[Tensor], fused: bool, twice: bool| {
            let mut layer = Linear::from_parts(weight.clone(), Some(bias.clone()));
            for _ in 0..=usize::from(twice) {
                let (down, up, scale) = (x[1].clone(), x[2].clone(), 0.7);
                let low_rank = LowRank { down, up, scale };
                let conv = None;
                layer
                    .adapters
                    .push(std::sync::Arc::new(TestLora { low_rank, fused, conv }));
            }
            layer.forward(&x[0]).unwrap()
        };
        for twice in [false, true] {
            close(&forward(&inputs, true, twice), &forward(&inputs, false, twice), 1e-5);
            check_gradients(&inputs, |x| forward(x, true, twice));
        }
    }
    for (kernel, stride, padding, size) in [(1, 1, 0, 8), (1, 1, 0, 1), (3, 1, 1, 9), (3, 2, 1, 7), (3, 2, 1, 2)] {
        let (weight, bias) = (random(1, &[6, 5, kernel, kernel]), random(2, &[6]));
        let inputs = [
            random(3, &[2, 5, size, size]),
            random(4, &[3, 5, kernel, kernel]),
            random(5, &[6, 3, 1, 1]),
        ];
        let forward = |x: &[Tensor], fused: bool| {
            let (down, up, scale) = (x[1].clone(), x[2].clone(), 0.7);
            let low_rank = LowRank { down, up, scale };
            let conv = Some((stride, padding));
            let layer = Conv2d {
                weight: weight.clone().into(),
                bias: Some(bias.clone()),
                stride,
                padding,
                adapters: vec![std::sync::Arc::new(TestLora { low_rank, fused, conv })],
            };
            layer.forward(&x[0]).unwrap()
        };
        close(&forward(&inputs, true), &forward(&inputs, false), 1e-5);
        check_gradients(&inputs, |x| forward(x, true));
    }
}

#[test]
fn a_norm_fused_with_silu_equals_the_norm_followed_by_silu() {
    for shape in [&[2, 6, 5, 7][..], &[2, 6, 1, 1], &[3, 6]] {
        let norm = |w: &Tensor, b: &Tensor| norm::GroupNorm::from_tensors(w.clone(), b.clone(), 2, 1e-5);
        let inputs = [random(1, shape), random(2, &[6]), random(3, &[6])];
        let [x, w, b] = &inputs;
        let (normalised, fused) = (norm(w, b).forward(x).unwrap(), norm(w, b).forward_silu(x).unwrap());
        close(&fused, &silu(&normalised).unwrap(), 1e-5);
        check_gradients(&inputs, |x| norm(&x[1], &x[2]).forward_silu(&x[0]).unwrap());
    }
}

/// The Kronecker product of first [a, c] and second [b, d, ..] -> [a b, c d, ..].
fn kronecker(first: &Tensor, second: &Tensor) -> Tensor {
    let ((a, c), (b, d)) = (first.dims2().unwrap(), (second.dims()[0], second.dims()[1]));
    let second = second.reshape((1, b, 1, d, ())).unwrap();
    let product = first.reshape((a, 1, c, 1, 1)).unwrap().broadcast_mul(&second).unwrap();
    let kernel = second.dims()[4];
    product.reshape((a * b, c * d, kernel)).unwrap()
}

#[test]
fn the_product_with_a_kronecker_product_equals_that_with_the_whole_matrix() {
    // Rows, the sizes of the first matrix, and of the second: few rows, and more than are summed at once.
    for (shape, [a, c], [b, d]) in [
        (&[2, 3][..], [3, 2], [4, 5]),
        (&[2, 75], [2, 3], [3, 2]),
        (&[7], [1, 4], [5, 1]),
        (&[5], [6, 1], [1, 3]),
        (&[], [2, 2], [2, 2]),
    ] {
        let (first, second) = (random(2, &[a, c]), random(3, &[b, d]));
        let x = random(1, &[shape, &[c * d]].concat());
        let weight = kronecker(&first, &second).squeeze(2).unwrap();
        let expected = (linear(&x, &weight, None).unwrap() * 0.7).unwrap();
        let found = kron(&x, &first, &second, LayerKind::Linear, 0.7).unwrap();
        assert_eq!(found.dims(), expected.dims());
        close(&found, &expected, 1e-5);
        check_gradients(&[x, first, second], |x| {
            kron(&x[0], &x[1], &x[2], LayerKind::Linear, 0.7).unwrap()
        });
    }
    for (kernel, stride, padding, batch, size) in [(3, 1, 1, 2, 5), (3, 2, 1, 2, 6), (1, 1, 0, 3, 4), (3, 1, 1, 18, 4)]
    {
        let kind = LayerKind::Conv { stride, padding };
        let (first, second) = (random(2, &[3, 2]), random(3, &[2, 4, kernel, kernel]));
        let x = random(1, &[batch, 8, size, size]);
        let weight = kronecker(&first, &second).reshape((6, 8, kernel, kernel)).unwrap();
        let expected = (conv2d(&x, &weight, None, stride, padding).unwrap() * 1.5).unwrap();
        close(&kron(&x, &first, &second, kind, 1.5).unwrap(), &expected, 1e-5);
        check_gradients(&[x, first, second], |x| kron(&x[0], &x[1], &x[2], kind, 1.5).unwrap());
    }
    let (first, second) = (random(1, &[2, 2]), random(2, &[3, 4]));
    assert!(kron(&random(3, &[5, 9]), &first, &second, LayerKind::Linear, 1.0).is_err());
}

in_portable_mode! {
    the_product_with_a_kronecker_product_equals_that_with_the_whole_matrix,
    convolution_equals_candles_convolution,
    gradients_of_convolution_are_correct,
    frozen_and_trained_linear_layers_agree,
    values_and_gradients_of_activations_are_correct,
    gradients_of_norms_are_correct,
    attention_equals_attention_with_candles_operations,
    upsampling_takes_the_nearest_pixel_and_its_gradients_are_correct,
    adapters_are_applied_in_order,
    channels_are_scaled_and_shifted,
    products_are_multiplied_element_by_element,
    weights_with_a_change_are_normalised_and_multiplied_with_magnitudes,
    sums_and_concatenations_equal_candles,
    images_and_tokens_are_converted_into_each_other,
    a_layer_fused_with_its_lora_equals_the_sum_of_both,
    a_norm_fused_with_silu_equals_the_norm_followed_by_silu,
}

crate::testing::with_emulated_kernels! {
    convolution_equals_candles_convolution,
    gradients_of_convolution_are_correct,
    frozen_and_trained_linear_layers_agree,
    values_and_gradients_of_activations_are_correct,
    gradients_of_norms_are_correct,
    attention_equals_attention_with_candles_operations,
    a_layer_fused_with_its_lora_equals_the_sum_of_both,
    a_norm_fused_with_silu_equals_the_norm_followed_by_silu,
}
