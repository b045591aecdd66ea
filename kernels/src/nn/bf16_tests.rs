//! Layers whose products are of bfloat16 numbers: compared with layers in f32 whose inputs, weights and gradients are rounded before.

use super::tests::random;
use super::*;
use crate::autograd::gradients;
use crate::device::precision::{MatmulPrecision, has_bf16_products};
use crate::quant::Quantized;
use crate::testing::{compute_on_this_thread, gap, largest};
use crate::weights::Weight;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor, Var};
use std::sync::Arc;

/// Runs `f` with products of bfloat16 numbers, where the CPU has them.
fn in_bf16<R>(f: impl FnOnce() -> R) -> R {
    compute_on_this_thread();
    MatmulPrecision::Bf16.run(f)
}

/// The numbers as layers round them; in f32 where the CPU has no products of bfloat16 numbers.
fn rounded(x: &Tensor) -> Tensor {
    match has_bf16_products() {
        true => x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap(),
        false => x.clone(),
    }
}

/// A weight that stays in bfloat16.
fn stored(weight: &Tensor) -> Weight {
    let numbers = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
        .collect();
    let weight = Quantized::from_blocks("bf16", GgmlDType::BF16, &bytes, weight.dims(), DType::F32, &Device::Cpu);
    Weight::Quantized(weight.unwrap())
}

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    let (gap, size) = (gap(found, expected), largest(expected));
    assert!(gap <= 2e-6 * size.max(1.0), "{what}: {gap} of {size}");
}

fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(gap(found, expected), 0.0, "{what}");
}

/// The output of `f` for `x`, and the gradients of x and the other variables for an upstream gradient of `probe`.
fn both_passes(x: &Var, others: &[&Var], probe: &Tensor, f: impl Fn(&Tensor) -> Tensor) -> Vec<Tensor> {
    let mut y = None;
    let (_, found) = gradients(|| {
        let output = f(x.as_tensor());
        y = Some(output.detach());
        (output * probe)?.sum_all()
    })
    .unwrap();
    let gradients = std::iter::once(x).chain(others.iter().copied());
    let gradients = gradients.map(|var| found.get(var).unwrap().clone());
    y.into_iter().chain(gradients).collect()
}

/// Rows below and above the number from which a product is not transposed, odd sizes, both passes, and both kinds of weights.
#[test]
fn a_linear_layer_rounds_its_operands_in_both_passes() {
    for (rows, inputs, outputs) in [(3, 37, 21), (77, 64, 35), (161, 71, 50), (200, 600, 33)] {
        let (x, weight) = (random(1, &[rows, inputs]), random(2, &[outputs, inputs]));
        let (bias, probe) = (random(3, &[outputs]), random(4, &[rows, outputs]));
        let input = Var::from_tensor(&x).unwrap();
        let layer = |weight: Weight| Linear::from_parts(weight, Some(bias.clone()));
        let plain = layer(weight.clone().into());
        let found = in_bf16(|| both_passes(&input, &[], &probe, |x| plain.forward(x).unwrap()));

        let reference = layer(rounded(&weight).into());
        let expected = reference.forward(&rounded(&x)).unwrap();
        assert_close(&found[0], &expected, "output");
        let dx = rounded(&probe).matmul(&rounded(&weight)).unwrap();
        assert_close(&found[1], &dx, "gradient of the input");

        // Up to 64 rows of a weight that is stored in 16 bits are multiplied in f32.
        let layer = layer(stored(&weight));
        let found_stored = in_bf16(|| both_passes(&input, &[], &probe, |x| layer.forward(x).unwrap()));
        if has_bf16_products() && rows > 64 {
            assert_same(&found_stored[0], &found[0], "output of a stored weight");
            assert_same(&found_stored[1], &found[1], "gradient of a stored weight");
        } else {
            let in_f32 = both_passes(&input, &[], &probe, |x| layer.forward(x).unwrap());
            assert_same(&found_stored[0], &in_f32[0], "output of few rows");
        }
    }
}

/// What is rounded is seen in the result: a test that compares f32 with f32 would find nothing.
#[test]
fn precisions_differ_where_the_cpu_has_both() {
    let (x, weight) = (random(1, &[100, 40]), random(2, &[30, 40]));
    let layer = Linear::from_parts(weight, None);
    let (in_f32, in_bf16) = (layer.forward(&x).unwrap(), in_bf16(|| layer.forward(&x).unwrap()));
    let gap = gap(&in_f32, &in_bf16);
    match has_bf16_products() {
        true => assert!(gap > 1e-4 && gap < 0.1, "{gap}"),
        false => assert_eq!(gap, 0.0, "a CPU without the instructions computes in f32"),
    }
    let explicit = MatmulPrecision::F32.run(|| layer.forward(&x).unwrap());
    assert_same(&explicit, &in_f32, "the precision f32");
}

/// The gradient of a trained weight is that of f32, bit for bit.
#[test]
fn gradients_of_weights_are_in_f32() {
    let (x, probe) = (random(1, &[90, 24]), random(3, &[90, 19]));
    let input = Var::from_tensor(&x).unwrap();
    let weight = Var::from_tensor(&random(2, &[19, 24])).unwrap();
    let run = || {
        both_passes(&input, &[&weight], &probe, |x| {
            linear(x, weight.as_tensor(), None).unwrap()
        })
    };
    let (found, in_f32) = (in_bf16(run), run());
    assert_same(&found[2], &in_f32[2], "linear");
    let dx = rounded(&probe).matmul(&rounded(weight.as_tensor())).unwrap();
    assert_close(&found[1], &dx, "gradient of the input");

    let (x, probe) = (random(1, &[2, 3, 9, 7]), random(3, &[2, 5, 9, 7]));
    let input = Var::from_tensor(&x).unwrap();
    let weight = Var::from_tensor(&random(2, &[5, 3, 3, 3])).unwrap();
    let run = || {
        both_passes(&input, &[&weight], &probe, |x| {
            conv2d(x, weight.as_tensor(), None, 1, 1).unwrap()
        })
    };
    let (found, in_f32) = (in_bf16(run), run());
    assert_same(&found[2], &in_f32[2], "convolution");
}

/// Kernels, strides, images of several sizes in a batch, with and without a weight that stays in 16 bits.
#[test]
fn a_convolution_rounds_its_operands_in_both_passes() {
    for (batch, [inputs, outputs], [height, width], [kernel, stride, padding]) in [
        (1, [5, 7], [11, 13], [3, 1, 1]),
        (3, [4, 33], [8, 8], [3, 1, 1]),
        (2, [20, 6], [25, 23], [3, 1, 1]),
        (2, [3, 5], [10, 9], [3, 2, 1]),
        (2, [9, 4], [6, 5], [1, 1, 0]),
    ] {
        let what = format!("{batch} of {inputs} to {outputs}, {height} x {width}, kernel {kernel}, stride {stride}");
        let x = random(1, &[batch, inputs, height, width]);
        let weight = random(2, &[outputs, inputs, kernel, kernel]);
        let layer = |weight: Weight| Conv2d {
            weight,
            bias: Some(random(3, &[outputs])),
            stride,
            padding,
            adapters: Vec::new(),
        };
        let input = Var::from_tensor(&x).unwrap();
        let reference = layer(rounded(&weight).into());
        let expected = reference.forward(&rounded(&x)).unwrap();
        let probe = random(4, expected.dims());
        // The gradient of the input is linear in that of the output.
        let in_f32 = both_passes(&input, &[], &rounded(&probe), |x| reference.forward(x).unwrap());
        for weight in [weight.clone().into(), stored(&weight)] {
            let layer = layer(weight);
            let found = in_bf16(|| both_passes(&input, &[], &probe, |x| layer.forward(x).unwrap()));
            assert_close(&found[0], &expected, &what);
            assert_close(&found[1], &in_f32[1], &what);
        }
    }
}

/// A bias that is too long was used without an error where the weight stays in bfloat16.
#[test]
fn a_convolution_with_another_bias_is_an_error_in_every_form() {
    let (x, weight) = (random(1, &[1, 3, 8, 8]), random(2, &[4, 3, 3, 3]));
    for biases in [3, 5] {
        for weight in [weight.clone().into(), stored(&weight)] {
            let layer = Conv2d {
                weight,
                bias: Some(random(3, &[biases])),
                stride: 1,
                padding: 1,
                adapters: Vec::new(),
            };
            for error in [layer.forward(&x), in_bf16(|| layer.forward(&x))].map(Result::unwrap_err) {
                let error = error.to_string();
                assert!(error.contains(&format!("the bias has {biases} elements")), "{error}");
            }
        }
    }
}

/// A row, or an image, has the same bits alone and in a batch, whatever the size of the batch.
#[test]
fn bits_are_the_same_alone_and_in_a_batch() {
    if !has_bf16_products() {
        return;
    }
    let (x, weight) = (random(1, &[300, 530]), random(2, &[70, 530]));
    let layer = Linear::from_parts(weight.clone(), Some(random(3, &[70])));
    let stored = Linear::from_parts(stored(&weight), layer.bias.clone());
    let whole = in_bf16(|| layer.forward(&x).unwrap());
    for rows in [1, 2, 64, 65, 160, 161] {
        let part = x.narrow(0, 0, rows).unwrap();
        let expected = whole.narrow(0, 0, rows).unwrap();
        assert_same(
            &in_bf16(|| layer.forward(&part).unwrap()),
            &expected,
            &format!("{rows} rows"),
        );
        if rows > 64 {
            let found = in_bf16(|| stored.forward(&part).unwrap());
            assert_same(&found, &expected, &format!("{rows} rows of a stored weight"));
        }
    }
    for (size, kernel) in [(8, 3), (5, 3), (30, 3), (9, 1)] {
        let images = random(1, &[5, 18, size, size]);
        let weight = random(2, &[21, 18, kernel, kernel]);
        let run = |x: &Tensor| in_bf16(|| conv2d(x, &weight, None, 1, kernel / 2).unwrap());
        let whole = run(&images);
        for (first, count) in [(0, 1), (4, 1), (1, 3)] {
            let found = run(&images.narrow(0, first, count).unwrap().contiguous().unwrap());
            let expected = whole.narrow(0, first, count).unwrap();
            assert_same(&found, &expected, &format!("{count} images of {size} x {size}"));
        }
    }
}

/// A LoRA whose change is far below the distance between two numbers of bfloat16.
#[derive(Debug)]
struct SmallLora {
    down: Tensor,
    up: Tensor,
}

impl LayerAdapter for SmallLora {
    fn low_rank(&self) -> Option<LowRank> {
        Some(LowRank {
            down: self.down.clone(),
            up: self.up.clone(),
            scale: 1.0,
        })
    }

    fn apply(&self, _: &BaseLayer<'_>, _: &Tensor, _: Tensor) -> candle_core::Result<Tensor> {
        candle_core::bail!("this LoRA is computed together with its layer")
    }
}

/// With so many rows f32 adds the change to the weight, where rounding would lose it.
#[test]
fn a_small_change_of_a_lora_is_not_rounded_away() {
    let (rows, width) = (400, 16);
    let x = Tensor::ones((rows, width), DType::F32, &Device::Cpu).unwrap();
    let weight = Tensor::ones((width, width), DType::F32, &Device::Cpu).unwrap();
    let down = Tensor::full(1e-2f32, (1, width), &Device::Cpu).unwrap();
    let up = Tensor::full(1e-2f32, (width, 1), &Device::Cpu).unwrap();
    let expected = Tensor::full(16.0f32 + 16.0 * 1e-4, (rows, width), &Device::Cpu).unwrap();

    let lora: Arc<dyn LayerAdapter> = Arc::new(SmallLora {
        down: down.clone(),
        up: up.clone(),
    });
    let mut layer = Linear::from_parts(weight.clone(), None);
    layer.adapters.push(lora);
    assert_close(&in_bf16(|| layer.forward(&x).unwrap()), &expected, "linear");

    let lora: Arc<dyn LayerAdapter> = Arc::new(SmallLora {
        down: down.reshape((1, width, 1, 1)).unwrap(),
        up: up.reshape((width, 1, 1, 1)).unwrap(),
    });
    let layer = Conv2d {
        weight: weight.reshape((width, width, 1, 1)).unwrap().into(),
        bias: None,
        stride: 1,
        padding: 0,
        adapters: vec![lora],
    };
    let images = x.reshape((1, rows, width)).unwrap().transpose(1, 2).unwrap();
    let images = images.contiguous().unwrap().reshape((1, width, 20, 20)).unwrap();
    let expected = Tensor::full(16.0f32 + 16.0 * 1e-4, (1, width, 20, 20), &Device::Cpu).unwrap();
    assert_close(&in_bf16(|| layer.forward(&images).unwrap()), &expected, "convolution");
}

/// Attention rounds its operands too, in the pass that trains as in the pass that generates, unless scores are upcast.
#[test]
fn attention_multiplies_in_bf16_unless_scores_are_upcast() {
    let [q, k, v, probe] = [1, 2, 3, 4].map(|seed| random(seed, &[2, 70, 48]));
    let attention = Attention::new(3);
    let run = |attention: Attention<'_>| attention.forward(&q, &k, &v).unwrap();
    let (in_f32, found) = (run(attention), in_bf16(|| run(attention)));
    let gap = gap(&found, &in_f32);
    match has_bf16_products() {
        true => assert!(gap > 1e-5 && gap < 0.03, "{gap}"),
        false => assert_eq!(gap, 0.0, "a CPU without the instructions computes in f32"),
    }
    let input = Var::from_tensor(&q).unwrap();
    let trained = in_bf16(|| both_passes(&input, &[], &probe, |q| attention.forward(q, &k, &v).unwrap()));
    assert_same(&trained[0], &found, "the result while training");
    let upcast = Attention {
        upcast: true,
        ..attention
    };
    assert_same(&in_bf16(|| run(upcast)), &in_f32, "upcast scores");
}
