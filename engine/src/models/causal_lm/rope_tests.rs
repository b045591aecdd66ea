//! Compares rotary embeddings with transformers (`tests/reference/make_rope.py`): frequencies, and logits of tiny models.

use super::rope::{BETAS, RopeScaling};
use super::{AttentionMask, CausalLm, CausalLmConfig, CausalLmOptions, PositionKind, RotaryPositions};
use crate::testing::formula_weights::{formula, write_model};
use crate::testing::{compute_on_this_thread, fixtures, gap, in_portable_mode, largest};
use candle_core::{D, Device, Tensor};
use serde_json::{Value, json};

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("rope.json")).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn rotary(config: &Value) -> RotaryPositions {
    match CausalLmConfig::from_json(config.clone()).unwrap().positions {
        PositionKind::Rotary(rotary) => rotary,
        PositionKind::Learned => panic!("{config}"),
    }
}

#[test]
fn frequencies_are_those_of_transformers() {
    let expected = expected();
    let lengths: Vec<usize> = serde_json::from_value(expected["lengths"].clone()).unwrap();
    let cases = expected["angles"].as_array().unwrap();
    assert_eq!(cases.len(), 15);
    let mut long = 0;
    for case in cases {
        let found = rotary(&case["config"]);
        let scale = case["scale"].as_f64().unwrap() as f32;
        assert!(
            (found.scale() - scale).abs() < 1e-6,
            "{}: {}",
            case["config"],
            found.scale()
        );
        for length in &lengths {
            let longer = case["longer"].get(length.to_string());
            long += usize::from(longer.is_some());
            let expected = floats(longer.unwrap_or(&case["frequencies"]));
            let frequencies = found.frequencies(*length);
            assert_eq!(frequencies.len(), expected.len());
            for (found, expected) in frequencies.iter().zip(&expected) {
                let error = (found - expected).abs() / expected;
                assert!(error < 2e-6, "{}, {length} tokens: {found} {expected}", case["config"]);
            }
        }
        let is_longer = case["longer"].as_object().is_some_and(|longer| !longer.is_empty());
        assert!(!is_longer || found.depends_on_length(), "{}", case["config"]);
    }
    assert!(long > 10);
}

/// A tiny model of the fixture.
struct Case {
    name: String,
    _folder: tempfile::TempDir,
    value: Value,
    model: CausalLm,
}

impl Case {
    fn all() -> Vec<Self> {
        compute_on_this_thread();
        let models = expected()["models"].as_object().unwrap().clone();
        let cases: Vec<Self> = models.into_iter().map(|(name, value)| Self::new(name, value)).collect();
        assert_eq!(cases.len(), 4);
        cases
    }

    fn new(name: String, value: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &value["config"]);
        let model = CausalLm::load(folder.path(), &CausalLmOptions::cpu()).unwrap();
        Self {
            name,
            _folder: folder,
            value,
            model,
        }
    }

    /// Two texts, [2, 11].
    fn ids(&self) -> Tensor {
        let rows: Vec<Vec<u32>> = serde_json::from_value(self.value["ids"].clone()).unwrap();
        Tensor::new(rows, &Device::Cpu).unwrap()
    }

    fn row(&self, row: usize, start: usize, length: usize) -> Tensor {
        let row = self.ids().narrow(0, row, 1).unwrap();
        row.narrow(1, start, length).unwrap().contiguous().unwrap()
    }

    /// Compares two sums of the logits of each token with those of the fixture.
    fn check(&self, hidden: &Tensor, key: &str) {
        let logits = self.model.logits(hidden).unwrap();
        let vocabulary = logits.dim(D::Minus1).unwrap();
        let probe = Tensor::from_vec(formula("probe", vocabulary * 2, 1.0), (vocabulary, 2), &Device::Cpu).unwrap();
        let logits = logits.reshape(((), vocabulary)).unwrap().contiguous().unwrap();
        let found = logits.matmul(&probe).unwrap().flatten_all().unwrap();
        let expected = Tensor::new(floats(&self.value[key]), &Device::Cpu).unwrap();
        let error = gap(&found, &expected) / largest(&expected);
        assert!(error < 1e-4, "{}, {key}: {error}", self.name);
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for case in Case::all() {
        let ids = case.ids();
        case.check(&case.model.hidden(&ids, &AttentionMask::Causal).unwrap(), "alone");
        // Each document of a packed row has the frequencies of its own length.
        let rows = [[3, 3, 3, 3, 3, 0, 0, 0, 0, 7, 7], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2u32]];
        let documents = AttentionMask::Documents(Tensor::new(&rows, &Device::Cpu).unwrap());
        case.check(&case.model.hidden(&ids, &documents).unwrap(), "documents");
    }
}

#[test]
fn a_padded_text_has_the_numbers_of_the_text_alone() {
    for case in Case::all() {
        let alone = case.model.hidden(&case.row(1, 5, 6), &AttentionMask::Causal).unwrap();
        let mut mask = vec![1u32; 22];
        mask[11..16].fill(0);
        let mask = AttentionMask::Padded(Tensor::from_vec(mask, (2, 11), &Device::Cpu).unwrap());
        let padded = case.model.hidden(&case.ids(), &mask).unwrap();
        let padded = padded.narrow(0, 1, 1).unwrap().narrow(1, 5, 6).unwrap();
        assert!(gap(&padded, &alone) / largest(&alone) < 1e-5, "{}", case.name);
    }
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    for case in Case::all() {
        let expected: Vec<u32> = serde_json::from_value(case.value["greedy"].clone()).unwrap();
        let (mut cache, mut next, mut found) = (case.model.new_cache(), case.row(0, 0, 5), Vec::new());
        for _ in 0..expected.len() {
            let hidden = case.model.next(&next, std::slice::from_mut(&mut cache)).unwrap();
            let last = hidden.narrow(1, hidden.dim(1).unwrap() - 1, 1).unwrap();
            let logits = case.model.logits(&last.contiguous().unwrap()).unwrap();
            next = logits.argmax(D::Minus1).unwrap().reshape((1, 1)).unwrap();
            found.push(next.to_vec2::<u32>().unwrap()[0][0]);
        }
        assert_eq!(found, expected, "{}", case.name);
    }
}

/// A prompt that is computed in parts is as the whole, if its length is known; texts beside it keep theirs.
#[test]
fn parts_of_a_prompt_have_the_frequencies_of_the_whole() {
    for case in Case::all() {
        let whole = case.model.hidden(&case.ids(), &AttentionMask::Causal).unwrap();
        let in_parts = |known_length: usize| {
            let mut caches = [case.model.new_cache(), case.model.new_cache()];
            for cache in &mut caches {
                cache.set_known_length(known_length);
            }
            let parts = [(0, 4), (4, 7)].map(|(start, length)| {
                let part = case.ids().narrow(1, start, length).unwrap().contiguous().unwrap();
                case.model.next(&part, &mut caches).unwrap()
            });
            gap(&Tensor::cat(&parts, 1).unwrap(), &whole) / largest(&whole)
        };
        assert!(in_parts(11) < 1e-5, "{}", case.name);
        let depends = case.model.config().depends_on_length();
        assert_eq!(in_parts(0) > 1e-3, depends, "{}", case.name);
    }
}

/// As Qwen2.5-Coder's page says: the context is 131,072 tokens then.
#[test]
fn scaled_embeddings_make_the_context_longer() {
    let context = |section: Value| {
        let config = json!({"model_type": "qwen2", "max_position_embeddings": 32_768, "rope_scaling": section});
        CausalLmConfig::from_json(config).unwrap().max_positions
    };
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
    assert_eq!(context(yarn), 131_072);
    // A config whose `max_position_embeddings` is the longer context.
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192});
    assert_eq!(context(yarn), 32_768);
    assert_eq!(context(json!({"type": "dynamic", "factor": 2.0})), 65_536);
    assert_eq!(context(json!({"type": "linear", "factor": 2.0})), 32_768);
    assert_eq!(
        context(json!({"type": "yarn", "factor": 1e300})),
        crate::models::config::MAX_SIZE
    );
}

#[test]
fn sections_that_are_not_supported_are_refused_by_name() {
    let base = expected()["models"]["llama_yarn"]["config"].clone();
    for (section, message) in [
        (json!({"rope_type": "proportional"}), "proportional"),
        (
            json!({"rope_type": "longrope", "long_factor": [1, 1, 1, 1]}),
            "short_factor",
        ),
        (
            json!({"rope_type": "longrope", "long_factor": [1], "short_factor": [1, 1, 1, 1]}),
            "`long_factor` of the rotary embedding has 1",
        ),
        (
            json!({"rope_type": "longrope", "long_factor": [1, 1, 0, 1], "short_factor": [1, 1, 1, 1]}),
            "`long_factor` of the rotary embedding is 0",
        ),
        (json!({"rope_type": "dynamic"}), "factor"),
        (json!({"rope_type": "yarn", "factor": -1.0}), "factor"),
        (
            json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}),
            "rope_theta",
        ),
        (
            json!({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}),
            "attention_factor",
        ),
        (
            json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": -3.0}),
            "beta_fast",
        ),
        (
            json!({"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (json!({"full_attention": {"rope_type": "default"}}), "full_attention"),
        // A list is not read as the fields of the section in their order.
        (json!([10_000.0, "linear"]), "expected an object, found a list"),
        (
            json!({"rope_type": "linear", "factor": "2"}),
            "expected a number, found \"2\"",
        ),
        (json!("linear"), "expected an object, found \"linear\""),
    ] {
        for key in ["rope_parameters", "rope_scaling"] {
            let mut config = base.clone();
            config[key] = section.clone();
            let error = CausalLmConfig::from_json(config).unwrap_err();
            assert!(error.contains(message), "{section}: {error}");
        }
    }
}

/// Metadata and tables of GGUF files may have any numbers.
#[test]
fn negative_factors_are_refused() {
    let linear = |factor: f64| RotaryPositions::new(1e4, RopeScaling::Linear { factor }, 8, 64);
    let yarn = |attention_factor: f64| {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original: 16.0,
            betas: BETAS,
            truncate: true,
            attention_factor,
        };
        RotaryPositions::new(1e4, scaling, 8, 64)
    };
    let divided = |factor: f32| RotaryPositions::plain(1e4, 8).divided_by(&[1.0, factor, 1.0, 1.0]);
    assert!(linear(2.0).is_ok() && yarn(1.5).is_ok() && divided(1e30).is_ok());
    for wrong in [
        linear(-2.0),
        yarn(-1.5),
        yarn(0.0),
        divided(-3.0),
        divided(0.0),
        divided(f32::NAN),
    ] {
        assert_eq!(
            wrong.unwrap_err(),
            "the factors of the rotary embedding are not positive numbers"
        );
    }
}

in_portable_mode! {
    greedy_continuations_are_those_of_transformers,
    logits_are_those_of_transformers,
}
