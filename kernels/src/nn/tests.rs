//! Compares every kernel with candle's operations, and its gradients with finite differences.

use super::*;
use crate::autograd::gradients;
use crate::device::portable::is_portable;
use crate::testing::{gap, in_portable_mode, largest};
use crate::weights::Weights;
use candle_core::{DType, Device, Tensor, Var};

pub(super) fn random(seed: u64, shape: &[usize]) -> Tensor {
    let weights = Weights::init(seed, &Device::Cpu);
    weights
        .get_with(shape, "x", crate::weights::Init::Normal(1.0))
        .unwrap()
        .detach()
}

pub(super) fn close(a: &Tensor, b: &Tensor, tolerance: f32) {
    let error = gap(a, b) / largest(b).max(1e-3);
    assert!(error < tolerance, "relative error {error}");
}

/// Compares the gradients of sum(f(inputs) * probe) with those of candle's own backward pass through the same operations, and with
/// central differences along random directions.
pub(super) fn check_gradients(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) {
    // The same kernels, or in portable mode two ways to compute the gradients.
    let tolerance = if is_portable() { 1e-5 } else { 1e-6 };
    check_gradients_within(tolerance, inputs, f);
}

/// [`check_gradients`], with this relative error of those of candle's backward pass.
pub(super) fn check_gradients_within(tolerance: f32, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) {
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

in_portable_mode! {
    convolution_equals_candles_convolution,
    gradients_of_convolution_are_correct,
    frozen_and_trained_linear_layers_agree,
    values_and_gradients_of_activations_are_correct,
    gradients_of_norms_are_correct,
    attention_equals_attention_with_candles_operations,
    upsampling_takes_the_nearest_pixel_and_its_gradients_are_correct,
    sums_and_concatenations_equal_candles,
    images_and_tokens_are_converted_into_each_other,
    a_norm_fused_with_silu_equals_the_norm_followed_by_silu,
}

crate::testing::with_emulated_kernels! {
    convolution_equals_candles_convolution,
    gradients_of_convolution_are_correct,
    frozen_and_trained_linear_layers_agree,
    values_and_gradients_of_activations_are_correct,
    gradients_of_norms_are_correct,
    attention_equals_attention_with_candles_operations,
    a_norm_fused_with_silu_equals_the_norm_followed_by_silu,
}
