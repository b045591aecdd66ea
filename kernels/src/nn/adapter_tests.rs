//! The operations that adapters compute, and layers with adapters: compared with candle's operations and with finite differences.

use super::tests::{check_gradients, check_gradients_within, close, random};
use super::*;
use crate::testing::in_portable_mode;
use crate::weights::Weight;
use candle_core::{DType, Device, Tensor};

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
    adapters_are_applied_in_order,
    channels_are_scaled_and_shifted,
    products_are_multiplied_element_by_element,
    weights_with_a_change_are_normalised_and_multiplied_with_magnitudes,
    a_layer_fused_with_its_lora_equals_the_sum_of_both,
}

crate::testing::with_emulated_kernels! {
    a_layer_fused_with_its_lora_equals_the_sum_of_both,
}
