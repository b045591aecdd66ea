use super::LoadOptions;
use super::stable_diffusion::SdModel;
use crate::nn::{LayerMut, VisitLayers};
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, load_sd, tiny_sd};
use crate::weights::{QuantizationConfig, Weight};
use aitk_common::job::QType;
use candle_core::{Device, Tensor};

fn randn(seed: u64, shape: &[usize]) -> Tensor {
    let values = TorchGenerator::manual_seed(seed).randn(shape.iter().product());
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The difference's norm by that of what is expected.
fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
    let norm = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    f64::from(norm(&(found - expected).unwrap()) / norm(expected))
}

/// The names of the layers that are not quantised, and the bytes of all layers.
fn plain_layers_and_bytes(model: &mut SdModel) -> (Vec<String>, usize) {
    let (mut plain, mut bytes) = (Vec::new(), 0);
    let mut visit = |name: &str, layer: LayerMut<'_>| {
        let weight = layer.weight();
        bytes += weight.bytes();
        if matches!(weight, Weight::Plain(_)) {
            plain.push(name.to_owned());
        }
        Ok(())
    };
    model.unet.visit_layers(&mut visit).unwrap();
    (plain, bytes)
}

#[test]
fn a_model_is_quantised_on_load_except_for_excluded_layers() {
    let options = LoadOptions {
        denoiser_quantization: Some(QuantizationConfig {
            qtype: QType::Int8,
            exclude: vec!["*.attn1.to_q".into()],
            adapted: None,
        }),
        ..LoadOptions::cpu()
    };
    let mut quantized = load_sd(fixtures().join("tiny_sd"), &options).unwrap();
    let mut dense = tiny_sd();
    let (plain, bytes) = plain_layers_and_bytes(&mut quantized);
    let (_, before) = plain_layers_and_bytes(&mut dense);
    assert!(plain.iter().any(|name| name == "conv_in") && plain.iter().any(|name| name == "conv_out"));
    assert!(plain.iter().any(|name| name.ends_with(".attn1.to_q")), "{plain:?}");
    let excluded = |name: &str| name.starts_with("time_embedding.") || name.ends_with(".attn1.to_q");
    assert!(
        plain.iter().all(|name| name.starts_with("conv_") || excluded(name)),
        "{plain:?}"
    );
    assert!(bytes * 2 < before, "{bytes} of {before}");
    let config = dense.unet.config();
    let (height, width) = config.sample_extent();
    let x = randn(9, &[1, config.in_channels, height, width]);
    let context = randn(10, &[1, 7, config.context_width().unwrap()]);
    let step = Tensor::new(&[500f32], &Device::Cpu).unwrap();
    let expected = dense.unet.forward(&x, &step, &context).unwrap();
    let error = relative_error(&quantized.unet.forward(&x, &step, &context).unwrap(), &expected);
    assert!(error > 0.0 && error < 0.05, "{error}");
}

crate::testing::in_portable_mode! {
    a_model_is_quantised_on_load_except_for_excluded_layers,
}
