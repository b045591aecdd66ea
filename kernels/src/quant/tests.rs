use super::*;
use crate::autograd::record;
use crate::nn::{BaseLayer, Conv2d, LayerAdapter, Linear, LowRank, conv2d, linear};
use crate::rng::TorchGenerator;
use crate::testing::fixtures;
use crate::weights::Weight;
use candle_core::Var;
use std::collections::BTreeMap;

const ALL: [QType; 5] = [QType::Int8, QType::Float8, QType::Nf4, QType::Q8_0, QType::Q4K];

fn randn(seed: u64, shape: &[usize], scale: f32) -> Tensor {
    let mut values = TorchGenerator::manual_seed(seed).randn(shape.iter().product());
    values.iter_mut().for_each(|value| *value *= scale);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
    let norm = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let (found, expected) = (flat(found), flat(expected));
    assert_eq!(found.len(), expected.len());
    let difference: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
    norm(&difference) / norm(&expected)
}

/// Compares with bitsandbytes, torchao and gguf-py: `tests/reference/make_quant.py`.
#[test]
fn dequantised_weights_match_the_reference_libraries() {
    // The script draws the input from the same generator, after the weight.
    let mut generator = TorchGenerator::manual_seed(11);
    let weight: Vec<f32> = generator.randn(96 * 256).iter().map(|value| value * 0.05).collect();
    let weight = Tensor::from_vec(weight, (96, 256), &Device::Cpu).unwrap();
    let x = Tensor::from_vec(generator.randn(32 * 256), (32, 256), &Device::Cpu).unwrap();
    let y = x.matmul(&weight.t().unwrap()).unwrap();
    let errors = std::fs::read(fixtures().join("quant/errors.json")).unwrap();
    let errors: BTreeMap<String, f64> = serde_json::from_slice(&errors).unwrap();
    let expected =
        candle_core::safetensors::load(fixtures().join("quant/reference.safetensors"), &Device::Cpu).unwrap();
    for (name, theirs) in &errors {
        let qtype = QType::from_name(name).unwrap();
        let back = Quantized::quantize(&weight, qtype)
            .unwrap()
            .unwrap()
            .dequantize()
            .unwrap();
        let ours = relative_error(&x.matmul(&back.t().unwrap()).unwrap(), &y);
        assert!(ours <= theirs * 1.0001, "{name}: an error of {ours}, theirs {theirs}");
        let every_seventh: Vec<f32> = flat(&back).into_iter().step_by(7).collect();
        let every_seventh = Tensor::new(every_seventh, &Device::Cpu).unwrap();
        let difference = relative_error(&every_seventh, &expected[name]);
        assert!(difference < 1e-6, "{name}: {difference} from the reference's weights");
    }
    assert_eq!(errors.len(), 4);
}

/// With the bound and the values of llama.cpp's test of its formats (tests/test-quantize-fns.cpp).
#[test]
fn the_error_of_gguf_blocks_is_within_the_bound_of_llama_cpp() {
    let values: Vec<f32> = (0..32 * 128).map(|i| 0.1 + 2.0 * (i as f32).cos()).collect();
    let weight = Tensor::from_vec(values.clone(), (16, 256), &Device::Cpu).unwrap();
    for qtype in [QType::Q8_0, QType::Q4K] {
        let quantized = Quantized::quantize(&weight, qtype).unwrap().unwrap();
        let back = flat(&quantized.dequantize().unwrap());
        let sum: f64 = values.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let error = sum.sqrt() / values.len() as f64;
        assert!(error < 0.002, "{qtype}: {error}");
        let bytes = quantized.bytes() as f64 / values.len() as f64;
        assert!((bytes - qtype.bytes()).abs() < 1e-3, "{qtype}: {bytes}");
    }
}

#[test]
fn a_quantised_layer_matches_the_dequantised_layer_forward_and_backward() {
    for qtype in ALL {
        let (weight, bias) = (randn(1, &[24, 96], 0.1), randn(2, &[24], 0.1));
        let quantized = Quantized::quantize(&weight, qtype).unwrap().unwrap();
        let back = quantized.dequantize().unwrap();
        assert!(relative_error(&back, &weight) < 0.12, "{qtype}");
        let layer = Linear::from_parts(Weight::Quantized(quantized), Some(bias.clone()));
        assert_eq!((layer.in_features(), layer.out_features()), (96, 24));
        let x = Var::from_tensor(&randn(3, &[2, 5, 96], 1.0)).unwrap();
        let compare = |found: Tensor, expected: Tensor| {
            let gradient = |y: &Tensor| y.sqr().unwrap().backward().unwrap().get(&x).unwrap().clone();
            assert!(relative_error(&found, &expected) < 1e-6, "{qtype}");
            assert!(
                relative_error(&gradient(&found), &gradient(&expected)) < 1e-6,
                "{qtype}"
            );
        };
        compare(layer.forward(&x).unwrap(), linear(&x, &back, Some(&bias)).unwrap());
    }
    for qtype in ALL {
        let (weight, bias) = (randn(4, &[8, 32, 3, 3], 0.1), randn(5, &[8], 0.1));
        let quantized = Quantized::quantize(&weight, qtype).unwrap().unwrap();
        let back = quantized.dequantize().unwrap();
        let layer = Conv2d {
            weight: Weight::Quantized(quantized),
            bias: Some(bias.clone()),
            stride: 2,
            padding: 1,
            adapters: Vec::new(),
        };
        let x = Var::from_tensor(&randn(6, &[2, 32, 7, 6], 1.0)).unwrap();
        let gradient = |y: &Tensor| y.sqr().unwrap().backward().unwrap().get(&x).unwrap().clone();
        let (found, expected) = (
            layer.forward(&x).unwrap(),
            conv2d(&x, &back, Some(&bias), 2, 1).unwrap(),
        );
        assert!(relative_error(&found, &expected) < 1e-6, "{qtype}");
        assert!(
            relative_error(&gradient(&found), &gradient(&expected)) < 1e-6,
            "{qtype}"
        );
    }
}

/// A weight in bfloat16 is widened block by block; alone, and with a LoRA whose result is added (2 rows) or which is merged
/// into the weight (40 rows).
#[test]
fn a_layer_in_bfloat16_matches_the_dequantised_layer_with_a_lora_too() {
    #[derive(Debug)]
    struct Lora(LowRank);
    impl LayerAdapter for Lora {
        fn apply(&self, _: &BaseLayer<'_>, _: &Tensor, _: Tensor) -> candle_core::Result<Tensor> {
            candle_core::bail!("the layer is fused with its LoRA")
        }
        fn low_rank(&self) -> Option<LowRank> {
            Some(self.0.clone())
        }
    }
    let halves: Vec<half::bf16> = flat(&randn(1, &[24, 96], 0.1))
        .into_iter()
        .map(half::bf16::from_f32)
        .collect();
    let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
    let weight = Quantized::from_blocks("bf16", GgmlDType::BF16, &bytes, &[24, 96], DType::F32, &Device::Cpu).unwrap();
    assert!(weight.half_bytes().unwrap().is_some());
    let (dense, bias) = (weight.dequantize().unwrap(), randn(2, &[24], 0.1));
    for (rows, has_lora) in [(2, false), (40, false), (2, true), (40, true)] {
        let x = Var::from_tensor(&randn(3, &[rows, 96], 1.0)).unwrap();
        let [down, up] = [randn(4, &[4, 96], 0.3), randn(5, &[24, 4], 0.3)].map(|t| Var::from_tensor(&t).unwrap());
        let run = |weight: Weight| {
            let mut layer = Linear::from_parts(weight, Some(bias.clone()));
            if has_lora {
                let (down, up) = (down.as_tensor().clone(), up.as_tensor().clone());
                layer.adapters.push(Arc::new(Lora(LowRank { down, up, scale: 0.7 })));
            }
            let (y, tape) = record(|| layer.forward(&x)).unwrap();
            let gradients = tape.backward(&y.sqr().unwrap()).unwrap();
            let vars = if has_lora { vec![&x, &down, &up] } else { vec![&x] };
            let gradients = vars.into_iter().map(|var| gradients.get(var).unwrap().clone());
            std::iter::once(y).chain(gradients).collect::<Vec<_>>()
        };
        for (found, expected) in run(Weight::Quantized(weight.clone()))
            .iter()
            .zip(run(dense.clone().into()))
        {
            let error = relative_error(found, &expected);
            assert!(error < 1e-6, "{rows} rows, LoRA: {has_lora}: {error:e}");
        }
    }
}

#[test]
fn a_weight_that_moves_or_is_offloaded_keeps_its_bits() {
    let weight = randn(5, &[8, 512], 0.1);
    for qtype in ALL {
        let made = || Arc::into_inner(Quantized::quantize(&weight, qtype).unwrap().unwrap()).unwrap();
        let expected = flat(&made().dequantize().unwrap());
        let moved = made().to_device(&Device::Cpu).unwrap();
        let offloaded = made().offloaded_from(&Device::Cpu);
        for other in [moved, offloaded] {
            assert_eq!((other.bytes(), other.dims()), (made().bytes(), made().dims()));
            assert_eq!(flat(&other.dequantize().unwrap()), expected, "{qtype:?}");
        }
    }
}

#[test]
fn candles_operations_dequantise_to_the_same_values() {
    for (qtype, shape) in [
        (QType::Int8, [5, 33]),
        (QType::Float8, [4, 31]),
        (QType::Nf4, [7, 45]),
        (QType::Nf4, [4, 64]),
    ] {
        let quantized = Quantized::quantize(&randn(7, &shape, 0.3), qtype).unwrap().unwrap();
        let Data::Codes {
            code,
            codes,
            scales,
            per_scale,
        } = &quantized.data
        else {
            panic!("{qtype} has codes")
        };
        let composed = quantized
            .dequantize_with_candle(code, codes, scales, *per_scale)
            .unwrap();
        assert_eq!(
            flat(&composed),
            flat(&quantized.dequantize().unwrap()),
            "{qtype} {shape:?}"
        );
    }
}

#[test]
fn shapes_that_a_format_does_not_support_are_not_quantised() {
    let odd = randn(8, &[4, 33], 1.0);
    assert!(Quantized::quantize(&odd, QType::Q4K).unwrap().is_none());
    assert!(
        Quantized::quantize(&Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap(), QType::Nf4)
            .unwrap()
            .is_none()
    );
    let half = randn(8, &[4, 64], 1.0).to_dtype(DType::BF16).unwrap();
    let quantized = Quantized::quantize(&half, QType::Int8).unwrap().unwrap();
    assert_eq!(quantized.dequantize().unwrap().dtype(), DType::BF16);
}

/// Query, key and value in one tensor of a file are read as views of it.
#[test]
fn a_part_of_a_tensor_is_quantised_as_a_tensor_of_its_own() {
    let whole = randn(12, &[48, 256], 1.0);
    for qtype in ALL {
        for start in [0, 16, 32] {
            let part = whole.narrow(0, start, 16).unwrap();
            let own = part.force_contiguous().unwrap();
            let [found, expected] = [part, own].map(|weight| {
                let quantised = Quantized::quantize(&weight, qtype).unwrap().unwrap();
                flat(&quantised.dequantize().unwrap())
            });
            assert_eq!(found, expected, "{qtype} from row {start}");
        }
    }
}

crate::testing::in_portable_mode! {
    dequantised_weights_match_the_reference_libraries,
    a_quantised_layer_matches_the_dequantised_layer_forward_and_backward,
}
