//! Compares logits with transformers (`tests/reference/make_decoder.py`): two tiny models of each family.

use super::{AttentionMask, CausalLm, CausalLmConfig, CausalLmOptions, KeyValueCache};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::nn::VisitLayers;
use crate::testing::formula_weights::{expected, formula, write_model};
use crate::testing::{gap, in_portable_mode, largest};
use crate::weights::{QuantizationConfig, TrainableFilter};
use aitk_common::job::QType;
use candle_core::{D, DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A model of the fixture with what is expected of it.
struct Case {
    name: String,
    folder: tempfile::TempDir,
    value: Value,
}

impl Case {
    fn all() -> Vec<Self> {
        crate::testing::compute_on_this_thread();
        let models = expected()["models"].as_object().unwrap().clone();
        assert_eq!(models.len(), 8);
        models.into_iter().map(|(name, value)| Self::of(name, value)).collect()
    }

    fn named(name: &str) -> Self {
        Self::of(name.to_owned(), expected()["models"][name].clone())
    }

    fn of(name: String, value: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &value["config"]);
        Self { name, folder, value }
    }

    fn load(&self, dtype: DType) -> CausalLm {
        let options = CausalLmOptions {
            dtype,
            ..CausalLmOptions::cpu()
        };
        CausalLm::load(self.folder.path(), &options).unwrap()
    }

    /// Two texts, [2, 11].
    fn ids(&self) -> Tensor {
        let rows: Vec<Vec<u32>> = serde_json::from_value(self.value["ids"].clone()).unwrap();
        Tensor::new(rows, &Device::Cpu).unwrap()
    }

    fn numbers(&self, key: &str) -> Tensor {
        let numbers: Vec<f32> = serde_json::from_value(self.value[key].clone()).unwrap();
        Tensor::new(numbers, &Device::Cpu).unwrap()
    }

    /// Logits [.., vocabulary] as the fixture has them: two sums per token, flattened.
    fn sums(&self, logits: &Tensor) -> Tensor {
        let vocabulary = logits.dim(D::Minus1).unwrap();
        let probe = formula("probe", vocabulary * 2, 1.0);
        let probe = Tensor::from_vec(probe, (vocabulary, 2), &Device::Cpu).unwrap();
        let logits = logits.to_dtype(DType::F32).unwrap().reshape(((), vocabulary)).unwrap();
        logits
            .contiguous()
            .unwrap()
            .matmul(&probe)
            .unwrap()
            .flatten_all()
            .unwrap()
    }

    /// The largest error of `found` relative to the largest expected number.
    fn error(&self, found: &Tensor, key: &str) -> f32 {
        let expected = self.numbers(key);
        gap(&found.to_dtype(DType::F32).unwrap(), &expected) / largest(&expected)
    }
}

fn logits(model: &CausalLm, ids: &Tensor, mask: &AttentionMask) -> Tensor {
    model.logits(&model.hidden(ids, mask).unwrap()).unwrap()
}

/// A mask of the second text, of which only the last 6 tokens are its own.
fn left_mask() -> Tensor {
    let mut mask = vec![1u32; 22];
    mask[11..16].fill(0);
    Tensor::from_vec(mask, (2, 11), &Device::Cpu).unwrap()
}

/// The documents of the fixture's packed rows.
fn documents() -> Tensor {
    let rows = [[3, 3, 3, 3, 3, 0, 0, 0, 0, 7, 7], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2u32]];
    Tensor::new(&rows, &Device::Cpu).unwrap()
}

#[test]
fn logits_are_those_of_transformers() {
    for case in Case::all() {
        let model = case.load(DType::F32);
        let ids = case.ids();
        let alone = logits(&model, &ids, &AttentionMask::Causal);
        let error = case.error(&case.sums(&alone), "alone");
        assert!(error < 1e-4, "{}: {error}", case.name);
        let last = alone.narrow(0, 0, 1).unwrap().narrow(1, 10, 1).unwrap();
        let error = case.error(&last.flatten_all().unwrap(), "last");
        assert!(error < 1e-4, "{}, all logits of a token: {error}", case.name);

        let padded = logits(&model, &ids, &AttentionMask::Padded(left_mask()));
        let own = padded.narrow(0, 1, 1).unwrap().narrow(1, 5, 6).unwrap();
        let error = case.error(&case.sums(&own), "padded");
        assert!(error < 1e-4, "{}, padded: {error}", case.name);
        // The text that is not padded does not change.
        let error = gap(&padded.narrow(0, 0, 1).unwrap(), &alone.narrow(0, 0, 1).unwrap());
        assert!(error < 1e-4, "{}, beside a padded one: {error}", case.name);

        let packed = logits(&model, &ids, &AttentionMask::Documents(documents()));
        let error = case.error(&case.sums(&packed), "documents");
        assert!(error < 1e-4, "{}, packed: {error}", case.name);
    }
}

#[test]
fn padding_at_the_end_changes_nothing() {
    let case = Case::named("starcoder2");
    let model = case.load(DType::F32);
    let ids = case.ids();
    let mask = Tensor::new(&[[1u32; 11], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]], &Device::Cpu).unwrap();
    let padded = logits(&model, &ids, &AttentionMask::Padded(mask))
        .narrow(1, 0, 6)
        .unwrap();
    let alone = logits(
        &model,
        &ids.narrow(1, 0, 6).unwrap().contiguous().unwrap(),
        &AttentionMask::Causal,
    );
    assert!(gap(&padded, &alone) < 1e-5);
}

#[test]
fn a_cache_in_steps_gives_the_whole() {
    for case in Case::all() {
        let model = case.load(DType::F32);
        let ids = case.ids();
        // The first text in pieces, the second one alone first, then both together: rows of unequal length.
        for pieces in [vec![11], vec![1; 11], vec![4, 1, 1, 3, 2], vec![7, 4]] {
            let mut cache = model.new_cache();
            let (mut start, mut states) = (0, Vec::new());
            for length in pieces {
                let part = ids.narrow(0, 0, 1).unwrap().narrow(1, start, length).unwrap();
                let part = part.contiguous().unwrap();
                states.push(model.next(&part, std::slice::from_mut(&mut cache)).unwrap());
                start += length;
            }
            assert_eq!(cache.len(), 11);
            assert!(cache.bytes() > 0 && !cache.is_empty());
            let whole = model
                .hidden(&ids, &AttentionMask::Causal)
                .unwrap()
                .narrow(0, 0, 1)
                .unwrap();
            let error = gap(&Tensor::cat(&states, 1).unwrap(), &whole) / largest(&whole);
            assert!(error < 1e-5, "{}: {error}", case.name);
        }
    }
}

#[test]
fn rows_of_unequal_length_do_not_change_one_another() {
    for case in Case::all() {
        let model = case.load(DType::F32);
        let ids = case.ids();
        let row = |row: usize, start: usize, length: usize| {
            let part = ids.narrow(0, row, 1).unwrap().narrow(1, start, length).unwrap();
            part.contiguous().unwrap()
        };
        let prefill = |row_index: usize, length: usize| {
            let mut cache = model.new_cache();
            model
                .next(&row(row_index, 0, length), std::slice::from_mut(&mut cache))
                .unwrap();
            cache
        };
        let mut alone = [prefill(0, 8), prefill(1, 3)];
        let mut together: Vec<KeyValueCache> = vec![prefill(0, 8), prefill(1, 3)];
        for step in 0..3 {
            let parts = [row(0, 8 + step, 1), row(1, 3 + step, 1)];
            let found = model.next(&Tensor::cat(&parts, 0).unwrap(), &mut together).unwrap();
            for (index, (cache, part)) in alone.iter_mut().zip(&parts).enumerate() {
                let expected = model.next(part, std::slice::from_mut(cache)).unwrap();
                let found = found.narrow(0, index, 1).unwrap();
                assert_eq!(gap(&found, &expected), 0.0, "{}, row {index}", case.name);
            }
        }
    }
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    for case in Case::all() {
        let model = case.load(DType::F32);
        let prompt = case.ids().narrow(0, 0, 1).unwrap().narrow(1, 0, 7).unwrap();
        let mut cache = model.new_cache();
        let (mut next, mut found) = (prompt.contiguous().unwrap(), Vec::new());
        for _ in 0..64 {
            let hidden = model.next(&next, std::slice::from_mut(&mut cache)).unwrap();
            let n = hidden.dim(1).unwrap();
            let logits = model
                .logits(&hidden.narrow(1, n - 1, 1).unwrap().contiguous().unwrap())
                .unwrap();
            next = logits.argmax(D::Minus1).unwrap().reshape((1, 1)).unwrap();
            found.push(next.to_vec2::<u32>().unwrap()[0][0]);
        }
        let expected: Vec<u32> = serde_json::from_value(case.value["greedy"]["1.0"].clone()).unwrap();
        assert_eq!(found, expected, "{}", case.name);
    }
}

#[test]
fn half_precision_is_within_its_arithmetic() {
    for case in Case::all() {
        for (dtype, tolerance) in [(DType::BF16, 0.12), (DType::F16, 0.02)] {
            let model = case.load(dtype);
            assert_eq!(model.dtype(), dtype);
            let found = logits(&model, &case.ids(), &AttentionMask::Causal);
            assert_eq!(found.dtype(), dtype);
            let error = case.error(&case.sums(&found), "alone");
            assert!(error > 1e-6 && error < tolerance, "{}, {dtype:?}: {error}", case.name);
        }
    }
}

#[test]
fn gradients_reach_every_tensor_with_and_without_checkpointing() {
    for case in Case::all() {
        let run = |checkpointing: Checkpointing| {
            let options = CausalLmOptions {
                trained: TrainableFilter::everything(),
                ..CausalLmOptions::cpu()
            };
            let mut model = CausalLm::load(case.folder.path(), &options).unwrap();
            model.checkpointing = checkpointing;
            let mask = AttentionMask::Documents(documents());
            let (_, found) = gradients(|| model.logits(&model.hidden(&case.ids(), &mask)?)?.sqr()?.mean_all()).unwrap();
            let vars = model.trained_variables();
            let names: BTreeSet<String> = vars.iter().map(|(name, _)| name.clone()).collect();
            let tensors: BTreeSet<String> = model.tensors().unwrap().into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, tensors, "{}", case.name);
            let gradient = |(name, var): &(String, candle_core::Var)| {
                let gradient = found
                    .get(var)
                    .unwrap_or_else(|| panic!("{name} has no gradient"))
                    .clone();
                (name.clone(), gradient)
            };
            vars.iter().map(gradient).collect::<Vec<_>>()
        };
        let whole = run(Checkpointing::Off);
        for ((name, a), (_, b)) in whole.iter().zip(run(Checkpointing::Segments { blocks: 1 })) {
            // The bias of keys shifts all scores of a query alike, so it has no gradient but rounding.
            let has_gradient = !name.contains("k_proj.bias");
            assert!(!has_gradient || largest(a) > 1e-7, "{name}");
            assert!(gap(a, &b) <= 1e-5 * largest(a).max(1.0), "{name}");
        }
    }
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let case = Case::named("qwen2_windows");
    let options = CausalLmOptions {
        trained: TrainableFilter::everything(),
        ..CausalLmOptions::cpu()
    };
    let model = CausalLm::load(case.folder.path(), &options).unwrap();
    let mask = AttentionMask::Padded(left_mask());
    let loss = || {
        model
            .logits(&model.hidden(&case.ids(), &mask)?)?
            .narrow(1, 6, 5)?
            .sqr()?
            .mean_all()
    };
    let (_, found) = gradients(loss).unwrap();
    let value = || f64::from(loss().unwrap().to_scalar::<f32>().unwrap());
    for (name, var) in model.trained_variables() {
        let direction = formula(&name, var.elem_count(), 1.0);
        let direction = Tensor::from_vec(direction, var.shape(), &Device::Cpu).unwrap();
        let slope = (found.get(&var).unwrap() * &direction).unwrap().sum_all().unwrap();
        let slope = f64::from(slope.to_scalar::<f32>().unwrap());
        let (start, step) = (var.as_tensor().copy().unwrap(), 2e-3);
        let at = |sign: f64| {
            var.set(&(&start + (&direction * (sign * step)).unwrap()).unwrap())
                .unwrap();
            value()
        };
        let measured = (at(1.0) - at(-1.0)) / (2.0 * step);
        var.set(&start).unwrap();
        assert!(
            (measured - slope).abs() < 0.02 * slope.abs().max(0.2),
            "{name}: {slope}, measured {measured}"
        );
    }
}

#[test]
fn layers_have_the_names_of_transformers_and_saved_tensors_load_again() {
    let mut names = Vec::new();
    let mut visit = |model: &mut CausalLm| {
        names.clear();
        model
            .visit_layers(&mut |name, _| {
                names.push(name.to_owned());
                Ok(())
            })
            .unwrap();
        names[names.len() - 3..].to_vec()
    };
    assert_eq!(
        visit(&mut Case::named("starcoder").load(DType::F32)),
        [
            "transformer.h.1.attn.c_proj",
            "transformer.h.1.mlp.c_fc",
            "transformer.h.1.mlp.c_proj"
        ]
    );
    assert_eq!(
        visit(&mut Case::named("llama").load(DType::F32)),
        [
            "model.layers.1.mlp.gate_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.1.mlp.down_proj"
        ]
    );
    let case = Case::named("starcoder_heads");
    let tensors = case.load(DType::F32).tensors().unwrap();
    let names: BTreeSet<&str> = tensors.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), tensors.len());
    for name in [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ] {
        assert!(names.contains(name), "{name}");
    }
}

#[test]
fn files_without_the_prefix_are_read() {
    let case = Case::named("qwen2");
    let path = case.folder.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let tensors = tensors
        .into_iter()
        .map(|(name, tensor)| (name.replacen("model.", "", 1), tensor));
    let expected = logits(&case.load(DType::F32), &case.ids(), &AttentionMask::Causal);
    candle_core::safetensors::save(&tensors.collect(), &path).unwrap();
    let found = logits(&case.load(DType::F32), &case.ids(), &AttentionMask::Causal);
    assert_eq!(gap(&found, &expected), 0.0);
}

/// `tie_word_embeddings` ties tables that are equal; an output layer of its own in the files is used, as transformers 5 does.
#[test]
fn tied_embeddings_do_not_replace_another_output_layer() {
    let case = Case::named("llama_biases");
    assert_eq!(case.value["config"]["tie_word_embeddings"], json!(false));
    let own = logits(&case.load(DType::F32), &case.ids(), &AttentionMask::Causal);
    let mut config = case.value["config"].clone();
    config["tie_word_embeddings"] = json!(true);
    let file = case.folder.path().join("config.json");
    std::fs::write(file, config.to_string()).unwrap();
    let model = case.load(DType::F32);
    assert!(!model.config().ties_embeddings);
    assert_eq!(gap(&logits(&model, &case.ids(), &AttentionMask::Causal), &own), 0.0);
    // An equal one, and none, are the table; without the prefix too.
    let path = case.folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let model = case.load(DType::F32);
    assert!(model.config().ties_embeddings);
    let tied = logits(&model, &case.ids(), &AttentionMask::Causal);
    assert!(gap(&tied, &own) > 1e-3);
    let tensors = tensors
        .into_iter()
        .map(|(name, tensor)| (name.replacen("model.", "", 1), tensor));
    let mut tensors: std::collections::HashMap<_, _> = tensors.collect();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    assert!(case.load(DType::F32).config().ties_embeddings);
    tensors.remove("lm_head.weight");
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let found = logits(&case.load(DType::F32), &case.ids(), &AttentionMask::Causal);
    assert_eq!(gap(&found, &tied), 0.0);
}

#[test]
fn streamed_and_quantised_weights_are_near_the_plain_ones() {
    for name in ["starcoder", "qwen2_windows"] {
        let case = Case::named(name);
        let expected = logits(&case.load(DType::F32), &case.ids(), &AttentionMask::Causal);
        let found = |options: &CausalLmOptions| {
            let model = CausalLm::load(case.folder.path(), options).unwrap();
            logits(&model, &case.ids(), &AttentionMask::Causal)
        };
        let streamed = CausalLmOptions {
            streamed: 1.0,
            ..CausalLmOptions::cpu()
        };
        assert_eq!(gap(&found(&streamed), &expected), 0.0, "{name}");
        let quantised = CausalLmOptions {
            quantization: Some(QuantizationConfig {
                qtype: QType::Int8,
                exclude: Vec::new(),
                adapted: None,
            }),
            ..CausalLmOptions::cpu()
        };
        let error = gap(&found(&quantised), &expected) / largest(&expected);
        assert!(error > 1e-5 && error < 0.1, "{name}: {error}");
        let shapes = CausalLmOptions {
            shapes_only: true,
            ..CausalLmOptions::cpu()
        };
        assert!(CausalLm::load(case.folder.path(), &shapes).is_ok());
    }
}

#[test]
fn other_names_and_empty_sections_of_a_config_are_read_as_transformers_reads_them() {
    let models = &expected()["models"];
    let read = |config: &Value| CausalLmConfig::from_json(config.clone()).unwrap();
    let plain = models["starcoder"]["config"].clone();
    let mut renamed = plain.clone();
    let keys = renamed.as_object_mut().unwrap();
    for (old, new) in [
        ("n_positions", "max_position_embeddings"),
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
    ] {
        let value = keys.remove(old).unwrap();
        keys.insert(new.into(), value);
    }
    assert_eq!(read(&renamed), read(&plain));
    // Files may have both.
    let mut both = plain.clone();
    both["hidden_size"] = plain["n_embd"].clone();
    assert_eq!(read(&both), read(&plain));
    both["num_hidden_layers"] = json!(5);
    assert_eq!(read(&both).layers, 5);

    let mut scaled = models["llama"]["config"].clone();
    scaled["rope_parameters"] = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0});
    scaled.as_object_mut().unwrap().remove("rope_scaling");
    let mut with_empty = scaled.clone();
    with_empty["rope_scaling"] = json!({});
    assert_eq!(read(&with_empty), read(&scaled));
}

#[test]
fn configs_that_are_not_supported_are_refused_by_name() {
    let refused = |name: &str, changes: Value| {
        let mut config = expected()["models"][name]["config"].clone();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        CausalLmConfig::from_json(config).unwrap_err()
    };
    for (model, changes, expected) in [
        ("llama", json!({"model_type": "gemma"}), "model_type: gemma"),
        ("llama", json!({"model_type": null}), "model_type"),
        ("llama", json!({"rope_scaling": {"type": "su", "factor": 2}}), "su"),
        ("llama", json!({"rope_scaling": {"rope_type": "linear"}}), "factor"),
        ("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("llama", json!({"hidden_act": "relu6"}), "relu6"),
        ("llama", json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        ("llama", json!({"num_key_value_heads": 0}), "num_key_value_heads"),
        ("llama", json!({"head_dim": 9}), "9 features"),
        ("llama", json!({"vocab_size": "many"}), "vocab_size"),
        ("llama", json!({"num_hidden_layers": 100_000_000}), "layers"),
        ("llama", json!({"hidden_size": 1_u64 << 40, "head_dim": 8}), "width"),
        (
            "qwen2_windows",
            json!({"layer_types": ["full_attention"]}),
            "layer_types",
        ),
        (
            "qwen2_windows",
            json!({"layer_types": ["full_attention", "chunked", "full_attention"]}),
            "chunked",
        ),
        ("qwen2_windows", json!({"sliding_window": 0}), "sliding_window"),
        ("qwen2", json!({"is_causal": false}), "is_causal"),
        ("starcoder", json!({"is_causal": null}), "is_causal"),
        (
            "qwen2",
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "full_attention",
        ),
        ("llama", json!({"sliding_window": 32}), "sliding_window"),
        ("starcoder", json!({"sliding_window": 8}), "sliding_window"),
        ("starcoder2", json!({"attention_chunk_size": 8}), "attention_chunk_size"),
        ("starcoder", json!({"add_cross_attention": true}), "add_cross_attention"),
        ("starcoder", json!({"n_head": 0}), "n_head"),
    ] {
        let message = refused(model, changes);
        assert!(message.contains(expected), "{message}");
    }
}

/// Keys that other families have, and windows that no text is longer than.
#[test]
fn keys_without_an_effect_in_transformers_are_ignored() {
    for (model, changes) in [
        (
            "llama",
            json!({"sliding_window": null, "attention_multiplier": 0.5, "pretraining_tp": 2}),
        ),
        (
            "llama",
            json!({"sliding_window": 256, "is_causal": true, "logits_scaling": 3.0}),
        ),
        (
            "qwen2",
            json!({"attention_chunk_size": 8, "residual_multiplier": 0.5, "attention_bias": false}),
        ),
        (
            "starcoder",
            json!({"num_key_value_heads": 2, "attention_softmax_in_fp32": false}),
        ),
    ] {
        let mut config = expected()["models"][model]["config"].clone();
        let plain = CausalLmConfig::from_json(config.clone()).unwrap();
        config
            .as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        assert_eq!(CausalLmConfig::from_json(config).unwrap(), plain, "{changes}");
    }
}

#[test]
fn null_is_not_the_default_of_a_missing_key() {
    let read = |name: &str, key: &str, value: Option<Value>| {
        let mut config = expected()["models"][name]["config"].clone();
        let map = config.as_object_mut().unwrap();
        map.remove(key);
        map.extend(value.map(|value| (key.to_owned(), value)));
        CausalLmConfig::from_json(config).unwrap()
    };
    assert_eq!(read("llama", "eos_token_id", None).eos_token_ids, [2]);
    assert_eq!(
        read("llama", "eos_token_id", Some(json!([5, 7, 1000]))).eos_token_ids,
        [5, 7]
    );
    assert!(
        read("llama", "eos_token_id", Some(json!(null)))
            .eos_token_ids
            .is_empty()
    );
    let windows = |value| read("qwen2_windows", "sliding_window", value).windows;
    assert_eq!(windows(None), [None, Some(4096), Some(4096)]);
    assert_eq!(windows(Some(json!(null))), [None, None, None]);
    assert_eq!(
        read("qwen2_windows", "num_key_value_heads", Some(json!(null))).kv_heads,
        2
    );
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let case = Case::named("starcoder");
    let model = case.load(DType::F32);
    let error = |ids: &Tensor, mask: &AttentionMask| model.hidden(ids, mask).unwrap_err().to_string();
    let beyond = Tensor::new(&[[1u32, 48]], &Device::Cpu).unwrap();
    assert!(error(&beyond, &AttentionMask::Causal).contains("token id 48"));
    let long = Tensor::zeros((1, 97), DType::U32, &Device::Cpu).unwrap();
    let message = error(&long, &AttentionMask::Causal);
    assert!(
        message.contains("97 tokens") && message.contains("96 positions"),
        "{message}"
    );
    let mut cache = model.new_cache();
    assert!(model.next(&long, std::slice::from_mut(&mut cache)).is_err());
    // Documents that are shorter than the table fit, however long the row is.
    let numbers: Vec<u32> = (0..97).map(|i| i / 50).collect();
    let numbers = Tensor::from_vec(numbers, (1, 97), &Device::Cpu).unwrap();
    assert!(model.hidden(&long, &AttentionMask::Documents(numbers)).is_ok());
    assert!(error(&case.ids(), &AttentionMask::Padded(beyond)).contains("mask"));
    let none = Tensor::zeros((1, 0), DType::U32, &Device::Cpu).unwrap();
    assert!(error(&none, &AttentionMask::Causal).contains("no tokens"));

    let missing = CausalLm::load(&case.folder.path().join("none"), &CausalLmOptions::cpu()).unwrap_err();
    assert!(missing.to_string().contains("folder of a language model"), "{missing}");
    let mut config = case.value["config"].clone();
    config["vocab_size"] = json!(49);
    std::fs::write(case.folder.path().join("config.json"), config.to_string()).unwrap();
    let shape = CausalLm::load(case.folder.path(), &CausalLmOptions::cpu()).unwrap_err();
    assert!(shape.to_string().contains("transformer.wte.weight"), "{shape}");
    config["vocab_size"] = json!(48);
    config["n_layer"] = json!(3);
    std::fs::write(case.folder.path().join("config.json"), config.to_string()).unwrap();
    let missing = CausalLm::load(case.folder.path(), &CausalLmOptions::cpu()).unwrap_err();
    assert!(missing.to_string().contains("transformer.h.2."), "{missing}");
}

in_portable_mode! {
    a_cache_in_steps_gives_the_whole,
    gradients_reach_every_tensor_with_and_without_checkpointing,
    greedy_continuations_are_those_of_transformers,
    half_precision_is_within_its_arithmetic,
    logits_are_those_of_transformers,
}
