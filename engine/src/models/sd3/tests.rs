//! Compares the transformer with diffusers (`tests/reference/make_models_sd35.py`), with gradients.

use super::{SD3Transformer2DModel, Sd3Conditions, Sd3Config};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::models::config;
use crate::testing::{fixtures, gap, largest, names_of_tensors};
use crate::weights::{Index, TrainableFilter, Weights};
use candle_core::{DType, Device, Tensor, Var, safetensors};
use std::collections::HashMap;
use std::path::PathBuf;

const MODELS: [(&str, &str); 2] = [("medium", "tiny_sd35"), ("large", "tiny_sd35_large")];
const CASES: [&str; 4] = ["case_0", "case_1", "case_2", "case_3"];
/// The fixture has each `EVERY`th number of the gradient of a weight.
const EVERY: usize = 23;

fn tensors() -> HashMap<String, Tensor> {
    safetensors::load(fixtures().join("models/sd35.safetensors"), &Device::Cpu).unwrap()
}

fn folder(model: &str) -> PathBuf {
    fixtures().join(model).join("transformer")
}

fn config(model: &str) -> Sd3Config {
    config::read(&folder(model).join("config.json")).unwrap()
}

fn skipped(tensors: &HashMap<String, Tensor>, case: &str) -> Vec<usize> {
    let skipped = tensors[&format!("{case}/skipped")].to_vec1::<i64>().unwrap();
    skipped.into_iter().map(|index| index as usize).collect()
}

/// Checks the velocity and the gradients of a case: those of the inputs, and those of the weights that the fixture has.
fn check(name: &str, folder: PathBuf, case: &str, checkpointing: Checkpointing) {
    let tensors = tensors();
    let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
    let weights = weights.training(TrainableFilter::everything());
    let config = config::read(&folder.join("config.json")).unwrap();
    let mut model = SD3Transformer2DModel::new(&weights, &config).unwrap();
    model.checkpointing = checkpointing;
    let key = format!("{name}/{case}");
    let get = |what: &str| tensors[&format!("{key}/{what}")].clone();
    let close = |found: &Tensor, what: &str| {
        let expected = get(what);
        // Some gradients are zero: text gives no queries that are read in the last block.
        let (error, allowed) = (gap(found, &expected), 1e-4 * largest(&expected));
        assert!(error <= allowed, "{key}/{what}, {checkpointing:?}: {error} > {allowed}");
    };
    let [latents, context, pooled] = ["latents", "context", "pooled"].map(|what| Var::from_tensor(&get(what)).unwrap());
    let (_, gradients) = gradients(|| {
        let conditions = Sd3Conditions {
            text: &context,
            pooled: &pooled,
        };
        let y = model.forward(&latents, &get("timesteps"), &conditions, &skipped(&tensors, &key))?;
        close(&y, "y");
        Ok::<_, crate::error::EngineError>((y * get("probe"))?.sum_all()?)
    })
    .unwrap();
    for (input, what) in [(&latents, "d.latents"), (&context, "d.context"), (&pooled, "d.pooled")] {
        close(gradients.get(input).unwrap(), what);
    }
    let mut of_weights = 0;
    for (name, var) in weights.vars() {
        let what = format!("grad.{name}");
        if !tensors.contains_key(&format!("{key}/{what}")) {
            continue;
        }
        let values = gradients
            .get(&var)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let values: Vec<f32> = values.into_iter().step_by(EVERY).collect();
        close(&Tensor::new(values, &Device::Cpu).unwrap(), &what);
        of_weights += 1;
    }
    let expected = if case == "case_0" { weights.vars().len() } else { 0 };
    assert_eq!(of_weights, expected, "{key}");
}

#[test]
fn velocity_and_gradients_are_those_of_diffusers() {
    for (name, model) in MODELS {
        for case in CASES {
            check(name, folder(model), case, Checkpointing::Off);
        }
    }
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    for (name, model) in MODELS {
        for (case, steps) in CASES.into_iter().zip([1, 2, 1, 3]) {
            check(name, folder(model), case, Checkpointing::Segments { blocks: steps });
        }
    }
}

#[test]
fn half_precision_is_within_its_arithmetic_and_has_no_nan() {
    let tensors = tensors();
    for (name, model) in MODELS {
        for (dtype, tolerance) in [(DType::BF16, 0.06), (DType::F16, 0.01)] {
            let weights = Weights::open(folder(model), dtype, &Device::Cpu).unwrap();
            let transformer = SD3Transformer2DModel::new(&weights, &config(model)).unwrap();
            for case in CASES {
                let key = format!("{name}/{case}");
                let get = |what: &str| tensors[&format!("{key}/{what}")].clone();
                let half = |what: &str| get(what).to_dtype(dtype).unwrap();
                let (text, pooled) = (half("context"), half("pooled"));
                let conditions = Sd3Conditions {
                    text: &text,
                    pooled: &pooled,
                };
                let y = transformer.forward(
                    &half("latents"),
                    &get("timesteps"),
                    &conditions,
                    &skipped(&tensors, &key),
                );
                let y = y.unwrap().to_dtype(DType::F32).unwrap();
                let error = gap(&y, &get("y")) / largest(&get("y"));
                // The error of half precision is not zero, and NaN is not an error below the tolerance.
                assert!(error > 1e-5 && error < tolerance, "{dtype:?}, {key}: {error}");
            }
        }
    }
}

#[test]
fn the_table_of_positions_is_not_trained_but_belongs_to_the_model() {
    let weights = Weights::open(folder("tiny_sd35"), DType::F32, &Device::Cpu).unwrap();
    let weights = weights.training(TrainableFilter::everything());
    SD3Transformer2DModel::new(&weights, &config("tiny_sd35")).unwrap();
    let requested = weights.requested_tensors().unwrap();
    assert!(requested.contains("pos_embed.pos_embed"));
    assert_eq!(weights.vars().len(), requested.tensors().count() - 1);
    // The copy for samples while training has it too.
    SD3Transformer2DModel::new(&weights.detached(), &config("tiny_sd35")).unwrap();
}

#[test]
fn images_without_positions_and_wrong_configs_are_refused() {
    let weights = Weights::open(folder("tiny_sd35"), DType::F32, &Device::Cpu).unwrap();
    let model = SD3Transformer2DModel::new(&weights, &config("tiny_sd35")).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let (text, pooled) = (zeros(&[1, 3, 44]), zeros(&[1, 36]));
    let refused = |shape: &[usize]| {
        let conditions = Sd3Conditions {
            text: &text,
            pooled: &pooled,
        };
        let time = Tensor::new(&[1f32], &Device::Cpu).unwrap();
        model
            .forward(&zeros(shape), &time, &conditions, &[])
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&[1, 16, 34, 2]).contains("17 x 1 tokens, the model has positions for 16 x 16"));
    assert!(refused(&[1, 16, 2, 36]).contains("1 x 18 tokens"));
    assert!(refused(&[1, 16, 3, 2]).contains("multiples of 2"));
    assert!(refused(&[1, 4, 2, 2]).contains("16 channels"));

    type Change = fn(&mut Sd3Config);
    let changes: [(Change, &str); 10] = [
        (|config| config.qk_norm = Some("layer_norm".into()), "qk_norm"),
        (|config| config.caption_projection_dim = 32, "caption_projection_dim"),
        (|config| config.out_channels = Some(32), "out_channels"),
        (|config| config.num_layers = 0, "num_layers"),
        (|config| config.patch_size = 0, "patch_size"),
        (|config| config.num_attention_heads = 0, "num_attention_heads"),
        (|config| config.pos_embed_max_size = usize::MAX, "pos_embed_max_size"),
        (|config| config.joint_attention_dim = usize::MAX, "joint_attention_dim"),
        (|config| config.sample_size = usize::MAX, "sample_size"),
        (
            |config| config.attention_head_dim = usize::MAX / 2,
            "attention_head_dim",
        ),
    ];
    for (change, expected) in changes {
        let mut config = config("tiny_sd35");
        change(&mut config);
        let error = SD3Transformer2DModel::new(&weights, &config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // The number of blocks, a second attention or norms that the file lacks.
    let changes: [(Change, &str); 3] = [
        (|config| config.num_layers = 4, "transformer_blocks.2.norm1_context"),
        (
            |config| config.dual_attention_layers = vec![0, 1, 2],
            "transformer_blocks.2",
        ),
        (
            |config| config.dual_attention_layers = vec![0],
            "transformer_blocks.1.norm1",
        ),
    ];
    for (change, expected) in changes {
        let mut config = config("tiny_sd35");
        change(&mut config);
        let error = SD3Transformer2DModel::new(&weights, &config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn full_size_models_have_the_names_and_shapes_of_diffusers() {
    let medium = Sd3Config {
        num_layers: 24,
        num_attention_heads: 24,
        caption_projection_dim: 1536,
        pos_embed_max_size: 384,
        dual_attention_layers: (0..13).collect(),
        qk_norm: Some("rms_norm".into()),
        ..Sd3Config::default()
    };
    let large = Sd3Config {
        num_layers: 38,
        num_attention_heads: 38,
        caption_projection_dim: 2432,
        pos_embed_max_size: 192,
        qk_norm: Some("rms_norm".into()),
        ..Sd3Config::default()
    };
    for (name, config, numbers) in [("medium", medium, 2_469_663_936), ("large", large, 8_146_280_768)] {
        let text = names_of_tensors(&format!("full_size_names_sd35_{name}.txt.gz"));
        let index = Index::from_shapes(text.lines().map(|line| {
            let (name, shape) = line.strip_prefix("transformer ").unwrap().split_once(' ').unwrap();
            (
                name.to_owned(),
                shape.split('x').map(|side| side.parse().unwrap()).collect(),
            )
        }));
        let all: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
        let count: usize = index.tensors().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(count, numbers, "{name}");
        let weights = Weights::from_index(index, DType::F32, &Device::Cpu);
        SD3Transformer2DModel::new(&weights, &config).unwrap();
        let requested = weights.requested_tensors().unwrap();
        let requested: Vec<&str> = requested.tensors().map(|(name, _)| name).collect();
        assert_eq!(requested, all, "{name}");
    }
}

crate::testing::in_portable_mode! {
    gradient_checkpointing_changes_nothing,
    half_precision_is_within_its_arithmetic_and_has_no_nan,
    velocity_and_gradients_are_those_of_diffusers,
}
