//! Compares the transformer with diffusers (`tests/reference/make_models_zimage.py`).

use super::{ZImageConfig, ZImageTransformer2DModel};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::models::config;
use crate::testing::{fixtures, gap, in_portable_mode, largest, zimage_folder};
use crate::weights::Weights;
use candle_core::{DType, Device, Tensor, Var, safetensors};
use std::collections::HashMap;

fn open(is_base: bool, dtype: DType) -> (Weights, ZImageConfig) {
    let folder = zimage_folder(is_base);
    let folder = folder.path().join("transformer");
    let config = config::read(&folder.join("config.json")).unwrap();
    (Weights::open(&folder, dtype, &Device::Cpu).unwrap(), config)
}

fn expected() -> HashMap<String, Tensor> {
    safetensors::load(fixtures().join("models/zimage.safetensors"), &Device::Cpu).unwrap()
}

fn lengths(tensor: &Tensor) -> Vec<usize> {
    let lengths: Vec<i64> = tensor.to_vec1().unwrap();
    lengths.into_iter().map(|length| length as usize).collect()
}

#[test]
fn the_whole_transformer_gives_the_velocity_and_the_gradients_of_diffusers() {
    let tensors = expected();
    let mut weights_checked = 0;
    for (name, case, checkpointing) in [
        ("turbo", "square", Checkpointing::Off),
        ("turbo", "ragged", Checkpointing::Off),
        ("turbo", "ragged", Checkpointing::Segments { blocks: 1 }),
        ("turbo", "full", Checkpointing::Segments { blocks: 2 }),
        ("turbo", "one", Checkpointing::Off),
        ("turbo", "long", Checkpointing::Off),
        ("base", "ragged", Checkpointing::Segments { blocks: 1 }),
        ("base", "full", Checkpointing::Off),
    ] {
        let (weights, config) = open(name == "base", DType::F32);
        let weights = weights.trainable();
        let mut model = ZImageTransformer2DModel::new(&weights, &config).unwrap();
        model.checkpointing = checkpointing;
        let get = |what: &str| tensors[&format!("{name}/{case}/{what}")].clone();
        let close = |found: &Tensor, what: &str| {
            let expected = get(what);
            let error = gap(found, &expected) / largest(&expected);
            assert!(error < 1e-4, "{name}/{case}/{what}: {error}");
        };
        let variable = |what: &str| Var::from_tensor(&get(what)).unwrap();
        let (latents, context) = (variable("latents"), variable("context"));
        let (_, gradients) = gradients(|| {
            let y = model.forward(&latents, &get("timesteps"), &context, &lengths(&get("lengths")))?;
            close(&y, "y");
            Ok::<_, crate::error::EngineError>((y * get("probe"))?.sum_all()?)
        })
        .unwrap();
        close(gradients.get(&latents).unwrap(), "d.latents");
        close(gradients.get(&context).unwrap(), "d.context");
        for (weight, var) in weights.vars() {
            let key = format!("grad.{weight}");
            if tensors.contains_key(&format!("{name}/{case}/{key}")) {
                close(gradients.get(&var).unwrap(), &key);
                weights_checked += 1;
            }
        }
    }
    assert!(weights_checked >= 30, "only {weights_checked}");
}

#[test]
fn a_longer_context_than_the_captions_changes_nothing() {
    let tensors = expected();
    let (weights, config) = open(false, DType::F32);
    let model = ZImageTransformer2DModel::new(&weights, &config).unwrap();
    let get = |what: &str| tensors[&format!("turbo/ragged/{what}")].clone();
    let lengths = lengths(&get("lengths"));
    let run = |context: &Tensor| {
        model
            .forward(&get("latents"), &get("timesteps"), context, &lengths)
            .unwrap()
    };
    let plain = run(&get("context"));
    // Garbage behind the captions is not read.
    let garbage = Tensor::full(1e4f32, (2, 200, get("context").dim(2).unwrap()), &Device::Cpu).unwrap();
    let padded = Tensor::cat(&[&get("context"), &garbage], 1).unwrap();
    assert_eq!(gap(&run(&padded), &plain), 0.0);
}

#[test]
fn half_precision_is_within_its_arithmetic_and_has_no_nan() {
    let tensors = expected();
    for (dtype, tolerance) in [(DType::BF16, 0.06), (DType::F16, 0.01)] {
        let (weights, config) = open(false, dtype);
        let model = ZImageTransformer2DModel::new(&weights, &config).unwrap();
        for case in ["square", "ragged", "full"] {
            let get = |what: &str| tensors[&format!("turbo/{case}/{what}")].clone();
            let half = |what: &str| get(what).to_dtype(dtype).unwrap();
            let y = model.forward(
                &half("latents"),
                &get("timesteps"),
                &half("context"),
                &lengths(&get("lengths")),
            );
            let y = y.unwrap().to_dtype(DType::F32).unwrap();
            let error = gap(&y, &get("y")) / largest(&get("y"));
            // The error of half precision is not zero, and NaN is not an error below the tolerance.
            assert!(error > 1e-5 && error < tolerance, "{dtype:?}, {case}: {error}");
        }
    }
}

#[test]
fn inputs_and_configs_that_do_not_fit_are_errors() {
    let (weights, config) = open(false, DType::F32);
    let model = ZImageTransformer2DModel::new(&weights, &config).unwrap();
    let run = |latents: (usize, usize, usize, usize), tokens: usize, lengths: &[usize]| {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        let (batch, channels, height, width) = latents;
        let times = zeros(&[batch]);
        let context = zeros(&[batch, tokens, 24]);
        let latents = zeros(&[batch, channels, height, width]);
        model.forward(&latents, &times, &context, lengths).map(|_| ())
    };
    run((1, 16, 4, 4), 3, &[3]).unwrap();
    run((1, 16, 4, 4), 0, &[0]).unwrap_err();
    let message = |result: crate::error::Result<()>| result.unwrap_err().to_string();
    assert!(message(run((1, 16, 3, 4), 3, &[3])).contains("even sides"));
    assert!(message(run((1, 4, 4, 4), 3, &[3])).contains("channels"));
    assert!(message(run((1, 16, 4, 4), 3, &[4])).contains("tokens"));
    assert!(message(run((2, 16, 4, 4), 3, &[3])).contains("2 images"));
    assert!(message(run((1, 16, 66, 4), 3, &[3])).contains("528 pixels"));
    assert!(message(run((1, 16, 4, 4), 96, &[96])).contains("96 tokens"));

    let refused = |change: &dyn Fn(&mut ZImageConfig)| {
        let mut config = config.clone();
        change(&mut config);
        ZImageTransformer2DModel::new(&weights, &config)
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&|c| c.siglip_feat_dim = Some(8)).contains("Omni"));
    assert!(refused(&|c| c.qk_norm = false).contains("qk_norm"));
    assert!(refused(&|c| c.all_patch_size = vec![1]).contains("all_patch_size"));
    assert!(refused(&|c| c.axes_dims = vec![4, 6]).contains("three numbers"));
    assert!(refused(&|c| c.axes_dims = vec![3, 7, 6]).contains("even"));
    // Widths whose sum would wrap around to the features of a head, 16.
    let half = 1_usize << (usize::BITS - 1);
    assert!(refused(&|c| c.axes_dims = vec![half, half, 16]).contains("add up"));
    assert!(refused(&|c| c.n_heads = 0).contains("heads"));
    assert!(refused(&|c| c.in_channels = usize::MAX / 2).contains("in_channels"));
    assert!(refused(&|c| c.cap_feat_dim = usize::MAX).contains("cap_feat_dim"));
    assert!(refused(&|c| c.axes_lens = vec![64, usize::MAX, 64]).contains("axes_lens"));
    assert!(refused(&|c| c.axes_lens = vec![33, 64, 64]).contains("at least 34"));
    assert!(refused(&|c| c.n_layers = 3).contains("layers.2"));
}

in_portable_mode! {
    a_longer_context_than_the_captions_changes_nothing,
    half_precision_is_within_its_arithmetic_and_has_no_nan,
    the_whole_transformer_gives_the_velocity_and_the_gradients_of_diffusers,
}
