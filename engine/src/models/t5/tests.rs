//! Compares tokens and states with transformers (`tests/reference/make_models_flux.py`).

use super::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::models::config;
use crate::testing::{fixtures, gap, largest};
use crate::weights::Weights;
use candle_core::{DType, Device, safetensors};
use serde_json::Value;

#[test]
fn tokens_are_those_of_transformers_from_either_file() {
    let folder = fixtures().join("tiny_flux/tokenizer_2");
    let alone = tempfile::tempdir().unwrap();
    std::fs::copy(folder.join("spiece.model"), alone.path().join("spiece.model")).unwrap();
    let cases = std::fs::read(fixtures().join("models/flux_tokens.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert!(cases.len() > 20);
    for folder in [folder.as_path(), alone.path()] {
        let tokenizer = T5Tokenizer::open(folder).unwrap();
        for case in &cases {
            let (text, length) = (case["text"].as_str().unwrap(), case["length"].as_u64().unwrap());
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            let found = tokenizer.encode(&[text], length as usize).unwrap();
            assert_eq!(
                found.to_vec2::<u32>().unwrap()[0],
                expected,
                "{text:?} from {}",
                folder.display()
            );
        }
    }
    std::fs::write(alone.path().join("spiece.model"), b"not a model").unwrap();
    let error = T5Tokenizer::open(alone.path()).unwrap_err().to_string();
    assert!(error.contains("spiece.model"), "{error}");
}

#[test]
fn states_are_those_of_transformers() {
    let folder = fixtures().join("tiny_flux/text_encoder_2");
    let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
    let model = T5EncoderModel::new(&weights, &config::read(&folder.join("config.json")).unwrap()).unwrap();
    let tensors = safetensors::load(fixtures().join("models/flux.safetensors"), &Device::Cpu).unwrap();
    for case in ["24", "37", "150", "empty", "unpadded"] {
        let ids = tensors[&format!("t5/{case}/ids")].to_dtype(DType::U32).unwrap();
        let expected = &tensors[&format!("t5/{case}/states")];
        let found = model.forward(&ids, None).unwrap();
        assert!(
            gap(&found, expected) < 1e-5 * largest(expected),
            "{case}: {}",
            gap(&found, expected)
        );
    }
}

/// transformers' states with the tokenizer's attention mask, of two prompts of different lengths.
#[test]
fn masked_padding_has_no_influence() {
    let folder = fixtures().join("tiny_flux/text_encoder_2");
    let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
    let model = T5EncoderModel::new(&weights, &config::read(&folder.join("config.json")).unwrap()).unwrap();
    let tensors = safetensors::load(fixtures().join("models/flux.safetensors"), &Device::Cpu).unwrap();
    let get = |name: &str| tensors[&format!("t5/masked/{name}")].clone();
    let tokenizer = T5Tokenizer::open(&fixtures().join("tiny_flux/tokenizer_2")).unwrap();
    let ids = get("ids").to_dtype(DType::U32).unwrap();
    let lengths = tokenizer.lengths(&ids).unwrap();
    let mask = get("mask").to_vec2::<i64>().unwrap();
    let expected: Vec<usize> = mask.iter().map(|mask| mask.iter().sum::<i64>() as usize).collect();
    assert_eq!((lengths.clone(), lengths[0] < lengths[1]), (expected, true));
    let (found, states) = (model.forward(&ids, Some(&lengths)).unwrap(), get("states"));
    // Also those of the padding, which Stable Diffusion 3.5 attends to.
    assert!(
        gap(&found, &states) < 1e-5 * largest(&states),
        "{}",
        gap(&found, &states)
    );
    let unmasked = model.forward(&ids, None).unwrap();
    assert!(gap(&unmasked, &states) > 1e-3 * largest(&states));
}

#[test]
fn half_precision_is_within_its_arithmetic() {
    let folder = fixtures().join("tiny_flux/text_encoder_2");
    let tensors = safetensors::load(fixtures().join("models/flux.safetensors"), &Device::Cpu).unwrap();
    let (ids, expected) = (&tensors["t5/37/ids"], &tensors["t5/37/states"]);
    for (dtype, tolerance) in [(DType::BF16, 0.06), (DType::F16, 0.01)] {
        let weights = Weights::open(&folder, dtype, &Device::Cpu).unwrap();
        let model = T5EncoderModel::new(&weights, &config::read(&folder.join("config.json")).unwrap()).unwrap();
        let found = model.forward(&ids.to_dtype(DType::U32).unwrap(), None).unwrap();
        assert_eq!(found.dtype(), dtype);
        let error = gap(&found.to_dtype(DType::F32).unwrap(), expected) / largest(expected);
        assert!(error > 1e-5 && error < tolerance, "{dtype:?}: {error}");
    }
}

#[test]
fn sizes_of_no_model_are_refused() {
    let folder = fixtures().join("tiny_flux/text_encoder_2");
    type Change = fn(&mut T5Config);
    let changes: [(Change, &str); 4] = [
        (|config| config.d_kv = usize::MAX / 2, "`num_heads times d_kv`"),
        (|config| config.d_ff = usize::MAX, "`d_ff`"),
        (
            |config| config.relative_attention_num_buckets = 2,
            "too few buckets of distances",
        ),
        // Its logarithm would be a divisor, and 0.
        (
            |config| config.relative_attention_max_distance = config.relative_attention_num_buckets / 4,
            "`relative_attention_max_distance`",
        ),
    ];
    for (change, expected) in changes {
        let mut config: T5Config = config::read(&folder.join("config.json")).unwrap();
        change(&mut config);
        let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
        let error = T5EncoderModel::new(&weights, &config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

crate::testing::in_portable_mode! {
    half_precision_is_within_its_arithmetic,
    masked_padding_has_no_influence,
    states_are_those_of_transformers,
}
