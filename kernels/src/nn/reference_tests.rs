//! Compares operations with PyTorch and diffusers (`tests/reference/make_ops.py`): results and gradients, of the CPU
//! kernels in f32, and of candle's operations, which GPUs use, in f64 and, in portable mode, in f32.

use super::*;
use crate::testing::{Reference, in_portable_mode, largest};
use candle_core::{DType, Device, Tensor};

#[test]
fn norms_and_modulation_match_pytorch() {
    let reference = Reference::open();
    reference.check("rms_norm", &["x", "w"], |x| {
        RmsNorm::from_weight(x[1].clone(), 1e-6)?.forward(&x[0])
    });
    reference.check("layer_norm_plain", &["x"], |x| {
        LayerNorm::plain(12, 1e-6, x[0].dtype(), &Device::Cpu)?.forward(&x[0])
    });
    reference.check("modulate", &["x", "scale", "shift"], |x| modulate(&x[0], &x[1], &x[2]));
    reference.check("gated", &["x", "gate", "y0"], |x| gated_residual(&x[0], &x[1], &x[2]));
    reference.check("swiglu", &["hidden_states"], |x| swiglu(&x[0]));
}

#[test]
fn rotary_embeddings_match_diffusers() {
    let reference = Reference::open();
    let positions: Vec<_> = (0..6).map(|i| vec![0.0, f64::from(i / 3), f64::from(i % 3)]).collect();
    let axes = Rotary::for_axes(&positions, &[2, 4, 6], 10_000.0, RotaryPairs::Interleaved).unwrap();
    reference.check("rotary_axes", &["x"], |x| axes.forward(&x[0]));
    let halves = Rotary::for_sequence(6, 12, 500.0, RotaryPairs::Halves).unwrap();
    reference.check("rotary_halves", &["x"], |x| halves.forward(&x[0]));

    let x = reference.get("rotary_axes", "x", DType::F32);
    assert!(halves.forward(&x.narrow(1, 0, 5).unwrap()).is_err(), "five positions");
    assert!(
        halves.forward(&x.narrow(2, 0, 30).unwrap()).is_err(),
        "two and a half heads"
    );
    assert!(Rotary::for_sequence(6, 11, 500.0, RotaryPairs::Halves).is_err());
    assert!(Rotary::for_axes(&positions, &[2, 4], 500.0, RotaryPairs::Halves).is_err());
}

#[test]
fn grouped_query_attention_and_masks_match_pytorch() {
    let reference = Reference::open();
    let grouped = Attention {
        kv_heads: 2,
        ..Attention::new(4)
    };
    reference.check("attention_grouped", &["q", "k", "v"], |x| {
        grouped.forward(&x[0], &x[1], &x[2])
    });
    let causal = Attention {
        kv_heads: 1,
        causal: true,
        ..Attention::new(4)
    };
    reference.check("attention_grouped_causal", &["q", "k", "v"], |x| {
        causal.forward(&x[0], &x[1], &x[2])
    });
    let biased = |case: &str, bias: &Tensor| {
        reference.check(case, &["q", "k", "v"], |x| {
            let bias = bias.to_dtype(x[0].dtype())?;
            let attention = Attention {
                bias: Some(&bias),
                ..Attention::new(4)
            };
            attention.forward(&x[0], &x[1], &x[2])
        });
    };
    let mask = reference.get("attention_masked", "mask", DType::F32);
    biased("attention_masked", &key_bias(&mask).unwrap());
    biased(
        "attention_masked",
        &key_bias(&mask.to_dtype(DType::U32).unwrap()).unwrap(),
    );
    for which in ["heads", "images", "all"] {
        let case = format!("attention_bias_{which}");
        biased(&case, &reference.get(&case, "bias", DType::F32));
    }
}

#[test]
fn the_result_of_a_query_is_zero_if_all_keys_are_masked() {
    let reference = Reference::open();
    for dtype in [DType::F32, DType::F64] {
        let [q, k, v] = ["q", "k", "v"].map(|name| reference.get("attention_masked", name, dtype));
        let bias = key_bias(&Tensor::zeros((2, 7), DType::U8, &Device::Cpu).unwrap()).unwrap();
        let attention = Attention {
            bias: Some(&bias.to_dtype(dtype).unwrap()),
            ..Attention::new(4)
        };
        let y = attention.forward(&q, &k, &v).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(largest(&y), 0.0);
    }
}

#[test]
fn attention_refuses_shapes_that_do_not_match() {
    let x = Tensor::zeros((2, 5, 24), DType::F32, &Device::Cpu).unwrap();
    let bias = Tensor::zeros((2, 3, 5, 5), DType::F32, &Device::Cpu).unwrap();
    let of = |heads, kv_heads, bias| Attention {
        kv_heads,
        bias,
        ..Attention::new(heads)
    };
    for attention in [
        of(4, 3, None),
        of(0, 0, None),
        of(4, 2, None),
        of(5, 5, None),
        of(4, 4, Some(&bias)),
    ] {
        assert!(attention.forward(&x, &x, &x).is_err(), "{attention:?}");
    }
}

#[test]
fn convolutions_match_pytorch() {
    let reference = Reference::open();
    for (stride, padding, size) in [(2, 1, "7x8"), (2, 1, "8x7"), (2, 0, "6x9"), (3, 1, "9x11")] {
        let case = format!("conv2d_{stride}_{padding}_{size}");
        reference.check(&case, &["x", "w", "b"], |x| {
            conv2d(&x[0], &x[1], Some(&x[2]), stride, padding)
        });
    }
    for (stride, padding, kernel) in [(1, 1, 3), (2, 3, 7), (3, 0, 4)] {
        let case = format!("conv1d_{stride}_{padding}_{kernel}");
        reference.check(&case, &["x", "w", "b"], |x| {
            conv1d(&x[0], &x[1], Some(&x[2]), stride, padding)
        });
    }
    for (strides, paddings, kernel) in [([1, 1], [1, 1], "33"), ([2, 2], [0, 1], "33"), ([2, 1], [1, 0], "21")] {
        let case = format!(
            "conv3d_{}{}_{}{}_{kernel}",
            strides[0], strides[1], paddings[0], paddings[1]
        );
        reference.check(&case, &["x", "w", "b"], |x| {
            conv3d(&x[0], &x[1], Some(&x[2]), strides, paddings)
        });
    }
    let x = Tensor::zeros((1, 2, 3, 4, 4), DType::F32, &Device::Cpu).unwrap();
    let w = Tensor::zeros((1, 2, 5, 3, 3), DType::F32, &Device::Cpu).unwrap();
    assert!(conv3d(&x, &w, None, [1, 1], [0, 1]).is_err(), "five taps, three frames");
}

#[test]
fn resized_images_match_pytorch() {
    let reference = Reference::open();
    for (name, size) in [("up", (9, 14)), ("down", (3, 4)), ("mixed", (8, 5))] {
        for (mode, interpolation) in [
            ("bilinear", Interpolation::Bilinear),
            ("bicubic", Interpolation::Bicubic),
            ("antialiased", Interpolation::BilinearAntialiased),
            ("aligned", Interpolation::BilinearAligned),
        ] {
            reference.check(&format!("{mode}_{name}"), &["x"], |x| {
                interpolate(&x[0], size, interpolation)
            });
        }
    }
    reference.check("max_pool", &["x"], |x| max_pool(&x[0]));
    let x = reference.get("max_pool", "x", DType::F32);
    assert!(max_pool(&x.narrow(2, 0, 1).unwrap()).is_err());
    assert!(interpolate(&x, (0, 3), Interpolation::Bilinear).is_err());
}

in_portable_mode! {
    resized_images_match_pytorch,
    norms_and_modulation_match_pytorch,
    rotary_embeddings_match_diffusers,
    grouped_query_attention_and_masks_match_pytorch,
    the_result_of_a_query_is_zero_if_all_keys_are_masked,
    attention_refuses_shapes_that_do_not_match,
    convolutions_match_pytorch,
}

crate::testing::with_emulated_kernels! {
    norms_and_modulation_match_pytorch,
    rotary_embeddings_match_diffusers,
    grouped_query_attention_and_masks_match_pytorch,
    the_result_of_a_query_is_zero_if_all_keys_are_masked,
    convolutions_match_pytorch,
}
