//! Compares tokens and states with transformers (`tests/reference/make_models_zimage.py`).

use super::{Qwen3Config, Qwen3Model, Qwen3Tokenizer, RopeParameters};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::models::config;
use crate::testing::{fixtures, gap, in_portable_mode, largest};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::HashMap;

/// The second shape: with biases, one head of keys and values, and names without `model.`.
fn other_config() -> Qwen3Config {
    config::read(&fixtures().join("models/qwen3_other.json")).unwrap()
}

fn other_weights(dtype: DType) -> Weights {
    let index = Index::open(fixtures().join("models/qwen3.safetensors")).unwrap();
    let index = index.renamed(|name, shape| Some((name.strip_prefix("weights.")?.to_owned(), shape.to_vec())));
    Weights::from_index(index, dtype, &Device::Cpu)
}

fn tiny(dtype: DType, skipped: usize) -> Qwen3Model {
    let folder = fixtures().join("tiny_zimage/text_encoder");
    let weights = Weights::open(&folder, dtype, &Device::Cpu).unwrap();
    Qwen3Model::new(&weights, &config::read(&folder.join("config.json")).unwrap(), skipped).unwrap()
}

fn expected() -> HashMap<String, Tensor> {
    safetensors::load(fixtures().join("models/qwen3.safetensors"), &Device::Cpu).unwrap()
}

#[test]
fn chats_have_the_tokens_of_transformers_from_either_file() {
    let folder = fixtures().join("tiny_zimage/tokenizer");
    let old = tempfile::tempdir().unwrap();
    for file in ["vocab.json", "merges.txt", "tokenizer_config.json"] {
        std::fs::copy(folder.join(file), old.path().join(file)).unwrap();
    }
    let cases = std::fs::read(fixtures().join("models/qwen3_tokens.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert!(cases.len() > 40);
    for folder in [folder.as_path(), old.path()] {
        let tokenizer = Qwen3Tokenizer::open(folder).unwrap();
        for case in &cases {
            let (text, length) = (case["text"].as_str().unwrap(), case["length"].as_u64().unwrap());
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            let found = tokenizer.encode_chat(&[text, ""], length as usize).unwrap();
            assert_eq!(found.lengths[0], expected.len(), "{text}");
            let ids = found.ids.to_vec2::<u32>().unwrap();
            assert_eq!(&ids[0][..expected.len()], expected, "{text}, {}", folder.display());
        }
    }
}

#[test]
fn shorter_texts_are_filled_up_and_other_tokenizers_are_refused() {
    let tokenizer = Qwen3Tokenizer::open(&fixtures().join("tiny_zimage/tokenizer")).unwrap();
    let found = tokenizer
        .encode_chat(&["a", "a red circle on a blue background"], 512)
        .unwrap();
    assert!(found.lengths[0] < found.lengths[1]);
    let ids = found.ids.to_vec2::<u32>().unwrap();
    assert_eq!(ids[0].len(), found.lengths[1]);
    assert!(ids[0][found.lengths[0]..].iter().all(|id| *id == tokenizer.pad));
    assert_eq!(tokenizer.encode_chat(&[], 512).unwrap().ids.dims(), [0, 0]);

    let clip = Qwen3Tokenizer::open(&fixtures().join("tiny_flux/tokenizer")).unwrap_err();
    assert!(clip.to_string().contains("<|im_start|>"), "{clip}");
    let empty = tempfile::tempdir().unwrap();
    let missing = Qwen3Tokenizer::open(empty.path()).unwrap_err().to_string();
    assert!(missing.contains("vocab.json"), "{missing}");
}

#[test]
fn states_are_those_of_transformers() {
    let tensors = expected();
    let other = |skipped| Qwen3Model::new(&other_weights(DType::F32), &other_config(), skipped).unwrap();
    for (name, model) in [
        ("tiny/last", tiny(DType::F32, 0)),
        ("tiny/before_last", tiny(DType::F32, 1)),
        ("other/last", other(0)),
        ("other/before_last", other(1)),
    ] {
        let (shape, which) = name.split_once('/').unwrap();
        for case in ["alone", "padded", "left"] {
            let get = |what: &str| tensors[&format!("{shape}/{case}/{what}")].clone();
            let ids = get("ids").to_dtype(DType::U32).unwrap();
            let mask = get("mask").to_dtype(DType::U32).unwrap();
            let expected = get(which);
            let found = model.forward(&ids, Some(&mask)).unwrap();
            // States of padding are of no use, and differ where all keys are masked.
            let real = mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
            let kept = |x: &Tensor| x.broadcast_mul(&real).unwrap();
            let error = gap(&kept(&found), &kept(&expected)) / largest(&kept(&expected));
            assert!(error < 1e-4, "{name}, {case}: {error}");
            if case == "padded" {
                // Padding at the end changes nothing before it, with or without a mask.
                let unmasked = model.forward(&ids, None).unwrap();
                let error = gap(&kept(&unmasked), &kept(&expected)) / largest(&kept(&expected));
                assert!(error < 1e-4, "{name}, without a mask: {error}");
            }
        }
    }
}

#[test]
fn gradients_of_all_weights_are_those_of_transformers() {
    let tensors = expected();
    for checkpointing in [Checkpointing::Off, Checkpointing::Segments { blocks: 1 }] {
        let weights = other_weights(DType::F32).trainable();
        let mut model = Qwen3Model::new(&weights, &other_config(), 0).unwrap();
        model.checkpointing = checkpointing;
        let get = |what: &str| tensors[&format!("other/padded/{what}")].clone();
        let ids = get("ids").to_dtype(DType::U32).unwrap();
        let (_, found) = gradients(|| (model.forward(&ids, None)? * get("probe"))?.sum_all()).unwrap();
        let vars = weights.vars();
        assert!(vars.len() > 20);
        for (name, var) in &vars {
            let expected = get(&format!("grad.{name}"));
            let error = gap(found.get(var).unwrap(), &expected) / largest(&expected);
            assert!(error < 1e-4, "{name}: {error}");
        }
    }
}

#[test]
fn half_precision_is_within_its_arithmetic() {
    let tensors = expected();
    let ids = tensors["tiny/alone/ids"].to_dtype(DType::U32).unwrap();
    let expected = &tensors["tiny/alone/before_last"];
    for (dtype, tolerance) in [(DType::BF16, 0.06), (DType::F16, 0.01)] {
        let found = tiny(dtype, 1).forward(&ids, None).unwrap();
        assert_eq!(found.dtype(), dtype);
        let error = gap(&found.to_dtype(DType::F32).unwrap(), expected) / largest(expected);
        assert!(error > 1e-5 && error < tolerance, "{dtype:?}: {error}");
    }
}

#[test]
fn configs_of_other_models_are_refused() {
    let refused = |change: &dyn Fn(&mut Qwen3Config), skipped: usize| {
        let mut config = other_config();
        change(&mut config);
        Qwen3Model::new(&other_weights(DType::F32), &config, skipped)
            .unwrap_err()
            .to_string()
    };
    let scaled = RopeParameters {
        rope_type: Some("yarn".into()),
        ..RopeParameters::default()
    };
    assert!(refused(&|c| c.rope_parameters = Some(scaled.clone()), 0).contains("yarn"));
    assert!(refused(&|c| c.use_sliding_window = true, 0).contains("use_sliding_window"));
    assert!(refused(&|c| c.hidden_act = "relu6".into(), 0).contains("relu6"));
    assert!(refused(&|c| c.num_key_value_heads = 2, 0).contains("num_key_value_heads 2"));
    assert!(refused(&|c| c.num_key_value_heads = 0, 0).contains("num_key_value_heads 0"));
    assert!(refused(&|c| c.hidden_size = 32, 0).contains("embed_tokens"));
    assert!(refused(&|c| c.vocab_size = usize::MAX, 0).contains("`vocab_size`"));
    assert!(refused(&|c| c.head_dim = usize::MAX - 1, 0).contains("times head_dim"));
    assert!(refused(&|_| (), 9).contains("9 layers"));
    let theta = |text: &str| serde_json::from_str::<Qwen3Config>(text).unwrap().theta();
    assert_eq!(theta(r#"{"rope_theta": 1000000}"#), 1e6);
    assert_eq!(
        theta(r#"{"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}"#),
        5e3
    );
    assert_eq!(theta("{}"), 1e4);
    // transformers 4 writes the older name too.
    for scaling in [r#"{"type": "yarn"}"#, r#"{"rope_type": "yarn", "type": "yarn"}"#] {
        let scaling: RopeParameters = serde_json::from_str(scaling).unwrap();
        assert!(refused(&|c| c.rope_scaling = Some(scaling.clone()), 0).contains("yarn"));
    }
    let plain = r#"{"rope_scaling": {"rope_type": "default", "type": "default"}}"#;
    assert!(serde_json::from_str::<Qwen3Config>(plain).is_ok());
}

in_portable_mode! {
    gradients_of_all_weights_are_those_of_transformers,
    half_precision_is_within_its_arithmetic,
    states_are_those_of_transformers,
}
