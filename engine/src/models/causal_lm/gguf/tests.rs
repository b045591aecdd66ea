//! Exports tiny models and reads them back: the same logits, the same tokens, the same texts.

use super::super::{AttentionMask, CausalLm, CausalLmOptions, PositionKind, TextTokenizer, open_tokenizer};
use super::GgufExport;
use crate::testing::byte_tokenizer::{END, write_tokenizer};
use crate::testing::compute_on_this_thread;
use crate::testing::formula_weights::{expected, write_model};
use crate::weights::Weight;
use aitk_common::job::lm_export::LmExportType;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::path::Path;

/// The tokens that the byte tokenizer has, and unused ones.
const VOCABULARY: usize = 264;

/// The config of a tiny model that can be exported.
fn config(name: &str) -> Value {
    let mut config = expected()["models"][name]["config"].clone();
    config["vocab_size"] = json!(VOCABULARY);
    config["eos_token_id"] = json!(END);
    match name {
        "starcoder_heads" => {
            config["scale_attn_weights"] = json!(true);
            config["activation_function"] = json!("gelu_pytorch_tanh");
        }
        "starcoder2_plain" => config["hidden_act"] = json!("gelu_pytorch_tanh"),
        _ => {}
    }
    config
}

const MODELS: [&str; 8] = [
    "starcoder",
    "starcoder_heads",
    "starcoder2",
    "starcoder2_plain",
    "qwen2",
    "qwen2_windows",
    "llama",
    "llama_biases",
];

/// The logits of a text, flat.
fn logits(path: &Path) -> Vec<f32> {
    logits_of(&CausalLm::load(path, &CausalLmOptions::cpu()).unwrap())
}

fn logits_of(model: &CausalLm) -> Vec<f32> {
    let ids: Vec<u32> = (0..19).map(|i| (i * 37 + 5) % 256).collect();
    let ids = Tensor::from_vec(ids, (1, 19), &Device::Cpu).unwrap();
    let hidden = model.hidden(&ids, &AttentionMask::Causal).unwrap();
    model.logits(&hidden).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn export(folder: &Path, file: &Path, dtype: LmExportType) {
    let model = CausalLm::load(folder, &CausalLmOptions::cpu()).unwrap();
    let export = GgufExport::new(&model, folder, "tiny", dtype).unwrap();
    let tensors = model.tensors().unwrap();
    let mut out = std::fs::File::create(file).unwrap();
    export
        .write(&mut out, |name| {
            let (_, weight) = tensors.iter().find(|(known, _)| known == name).unwrap();
            Ok(weight.dense()?)
        })
        .unwrap();
}

/// A folder with a tiny Llama whose tokenizer is a SentencePiece model of the fixtures.
fn write_sentencepiece(folder: &Path, name: &str) {
    let mut config = config("llama");
    config["vocab_size"] = json!(528);
    config["eos_token_id"] = json!(2);
    write_model(folder, &config);
    let model = crate::testing::fixtures()
        .join("sentencepiece")
        .join(name)
        .join("tokenizer.model");
    std::fs::copy(model, folder.join("tokenizer.model")).unwrap();
}

#[test]
fn sentencepiece_models_make_the_same_tokens_after_export() {
    compute_on_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
    write_sentencepiece(&folder, "bpe");
    let settings = json!({"added_tokens_decoder": {"520": {"content": "<pad>", "special": true}}});
    std::fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
    export(&folder, &file, LmExportType::F32);
    let (_, before) = open_tokenizer(&folder).unwrap();
    let (config, after) = open_tokenizer(&file).unwrap();
    assert_eq!(config.eos_token_ids, [2]);
    for text in [
        "",
        " a",
        "def add(a, b):\n    return a + b\n",
        "\t刄🦀",
        "<pad>x",
        "a<|fim|>b",
    ] {
        let ids = before.encode(text).unwrap();
        assert_eq!(ids, after.encode(text).unwrap(), "{text:?}");
        assert_eq!(before.decode(&ids).unwrap(), after.decode(&ids).unwrap(), "{text:?}");
        assert_eq!(ids[0], 1);
    }
    // A tokenizer.json of the same tokens beside it changes nothing, and one of others is noticed.
    let json = folder.join("tokenizer.json");
    let text = before.inner().0.to_string(false).unwrap();
    std::fs::write(&json, &text).unwrap();
    let again = dir.path().join("b.gguf");
    export(&folder, &again, LmExportType::F32);
    assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(&again).unwrap());
    std::fs::write(&json, text.replace("<|fim|>", "<|gap|>")).unwrap();
    assert!(refusal(&folder).contains("tokenizers of different models"));
    // What llama.cpp would read otherwise.
    for name in ["unigram", "folded"] {
        let folder = dir.path().join(name);
        write_sentencepiece(&folder, name);
        let message = refusal(&folder);
        assert!(
            message.contains("tokenizer.model") && message.contains("format: hf"),
            "{message}"
        );
    }
}

/// The error of exporting a folder.
fn refusal(folder: &Path) -> String {
    let model = CausalLm::load(folder, &CausalLmOptions::cpu()).unwrap();
    let export = GgufExport::new(&model, folder, "tiny", LmExportType::F32);
    export.map(drop).unwrap_err().to_string()
}

#[test]
fn models_of_every_family_have_the_same_logits_after_export() {
    compute_on_this_thread();
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
        write_model(&folder, &config(name));
        write_tokenizer(&folder, VOCABULARY);
        export(&folder, &file, LmExportType::F32);
        let (before, after) = (logits(&folder), logits(&file));
        let largest = before.iter().fold(0f32, |max, value| max.max(value.abs()));
        for (a, b) in before.iter().zip(&after) {
            assert!((a - b).abs() <= 1e-5 * largest, "{name}: {a} {b}");
        }
        // A type with rounding: the numbers are close, and not the same.
        export(&folder, &file, LmExportType::Q8_0);
        let rounded = logits(&file);
        let error = before
            .iter()
            .zip(&rounded)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(error > 0.0 && error < 0.1 * largest, "{name}: {error} of {largest}");
        let (config, _) = open_tokenizer(&file).unwrap();
        let mut expected = CausalLm::load(&folder, &CausalLmOptions::cpu())
            .unwrap()
            .config()
            .clone();
        // A layer without a bias may have one of zeros.
        expected.attention_output_bias = config.attention_output_bias;
        expected.feed_forward_bias = config.feed_forward_bias;
        // Frequencies pass through quotients of f32; they were compared by their logits.
        expected.positions = config.positions.clone();
        expected.norm_eps = config.norm_eps;
        assert_eq!(config, expected, "{name}");
    }
}

/// The table of embeddings is looked up, and multiplied as the output layer, in its stored form: the same numbers as widened.
#[test]
fn a_stored_table_gives_the_logits_of_the_widened_one() {
    compute_on_this_thread();
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
        write_model(&folder, &config(name));
        write_tokenizer(&folder, VOCABULARY);
        for dtype in [LmExportType::F16, LmExportType::BF16, LmExportType::Q8_0] {
            export(&folder, &file, dtype);
            let stored = CausalLmOptions {
                keeps_stored_table: true,
                ..CausalLmOptions::cpu()
            };
            let model = CausalLm::load(&file, &stored).unwrap();
            let table = &model.tensors().unwrap()[0].1;
            assert!(matches!(table, Weight::Quantized(_)), "{name} {dtype:?}");
            let (widened, kept) = (logits(&file), logits_of(&model));
            let largest = widened.iter().fold(0f32, |max, value| max.max(value.abs()));
            for (a, b) in widened.iter().zip(&kept) {
                assert!((a - b).abs() <= 1e-5 * largest, "{name} {dtype:?}: {a} {b}");
            }
        }
    }
}

#[test]
fn an_empty_section_of_the_rotary_embedding_is_none() {
    compute_on_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
    let mut config = config("qwen2");
    config["rope_scaling"] = json!({});
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 77.0});
    write_model(&folder, &config);
    write_tokenizer(&folder, VOCABULARY);
    export(&folder, &file, LmExportType::F32);
    let (before, after) = (logits(&folder), logits(&file));
    let largest = before.iter().fold(0f32, |max, value| max.max(value.abs()));
    assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() <= 1e-5 * largest));
}

/// The metadata have llama.cpp's names and meaning: it multiplies `attn_factor` by `0.1 * ln(factor) + 1`.
#[test]
fn scaled_rotary_embeddings_are_the_same_after_export() {
    use super::metadata::Metadata;
    compute_on_this_thread();
    let yarn =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0});
    let mut other_yarn = yarn.clone();
    for (key, value) in [("beta_fast", 6.0), ("beta_slow", 2.0), ("attention_factor", 1.5)] {
        other_yarn[key] = json!(value);
    }
    // A head of `llama` has 16 features.
    let factors = |start: f64| (0..8).map(|pair| start + 0.25 * f64::from(pair)).collect::<Vec<f64>>();
    let longrope = json!({"rope_type": "longrope", "short_factor": factors(1.0), "long_factor": factors(1.5),
        "original_max_position_embeddings": 7});
    for (name, section, kind) in [
        ("qwen2", &yarn, "yarn"),
        ("starcoder2", &other_yarn, "yarn"),
        ("llama", &other_yarn, "yarn"),
        ("llama", &longrope, "longrope"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
        let mut config = config(name);
        config.as_object_mut().unwrap().remove("rope_scaling");
        write_model(&folder, &config);
        write_tokenizer(&folder, VOCABULARY);
        let plain = logits(&folder);
        config["rope_parameters"] = section.clone();
        write_model(&folder, &config);
        export(&folder, &file, LmExportType::F32);
        let (before, after) = (logits(&folder), logits(&file));
        let largest = before.iter().fold(0f32, |max, value| max.max(value.abs()));
        let gap = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
        assert!(gap(&before, &after) <= 1e-5, "{name} {kind}: {}", gap(&before, &after));
        assert!(gap(&before, &plain) > 1e-3, "{name} {kind}");

        let metadata = Metadata::read(&file).unwrap();
        let key = |key: &str| format!("{name}.rope.scaling.{key}");
        assert_eq!(metadata.text(&key("type")), Some(kind));
        let original = section["original_max_position_embeddings"].as_u64().unwrap() as usize;
        assert_eq!(metadata.number(&key("original_context_length")), Some(original));
        let factor = metadata.float(&key("factor"));
        // llama.cpp divides all frequencies by this key.
        assert_eq!(factor, Some(4.0).filter(|_| kind == "yarn"));
        let usual = match factor {
            Some(factor) => 0.1 * factor.ln() + 1.0,
            None => 1.0,
        };
        let found = metadata.float(&key("attn_factor")).unwrap_or(1.0) * usual;
        let model = CausalLm::load(&folder, &CausalLmOptions::cpu()).unwrap();
        let PositionKind::Rotary(rotary) = &model.config().positions else {
            panic!("{name}");
        };
        assert!(
            (found - f64::from(rotary.scale())).abs() < 1e-6,
            "{name} {kind}: {found}"
        );
        let of_llama_cpp = [
            metadata.float(&key("yarn_beta_fast")),
            metadata.float(&key("yarn_beta_slow")),
        ];
        let of_config = ["beta_fast", "beta_slow"].map(|key| section[key].as_f64());
        assert_eq!(of_llama_cpp, of_config, "{name} {kind}");
    }
}

#[test]
fn every_token_that_ends_a_text_is_in_the_file() {
    let tokens = ["<|endoftext|>", "<fim_prefix>"].map(|name| json!({"eos_token": name}));
    for (of_config, file_of_tokenizer, of_tokenizer, expected) in [
        (json!(END), "tokenizer_config.json", &tokens[0], vec![END]),
        // The tokenizer names another one than the model.
        (json!(END), "tokenizer_config.json", &tokens[1], vec![END, END + 1]),
        (json!(null), "tokenizer_config.json", &tokens[1], vec![END + 1]),
        (json!(null), "special_tokens_map.json", &tokens[1], vec![END + 1]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
        let mut config = config("qwen2");
        config["eos_token_id"] = of_config;
        write_model(&folder, &config);
        write_tokenizer(&folder, VOCABULARY);
        std::fs::write(folder.join(file_of_tokenizer), of_tokenizer.to_string()).unwrap();
        export(&folder, &file, LmExportType::F32);
        let mut ends = open_tokenizer(&file).unwrap().0.eos_token_ids;
        ends.sort_unstable();
        assert_eq!(ends, expected, "{file_of_tokenizer}: {of_tokenizer}");
    }
}

#[test]
fn the_tokenizer_is_the_same_after_export() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
    write_model(&folder, &config("qwen2"));
    write_tokenizer(&folder, VOCABULARY);
    export(&folder, &file, LmExportType::F16);
    let before = TextTokenizer::open(&folder, VOCABULARY).unwrap();
    let (_, after) = open_tokenizer(&file).unwrap();
    for text in [
        "",
        "fn main() {}\n",
        "ünï ½ 日本 \u{1F600}",
        "a <fim_prefix> b<|endoftext|>",
        "  12 345\t",
    ] {
        assert_eq!(after.encode(text).unwrap(), before.encode(text).unwrap(), "{text:?}");
        let ids = before.encode(text).unwrap();
        assert_eq!(after.decode(&ids).unwrap(), before.decode(&ids).unwrap());
    }
    assert_eq!(after.fim_tokens(), before.fim_tokens());
}

#[test]
fn merges_digits_and_the_first_token_survive_the_export() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("model"), dir.path().join("a.gguf"));
    write_model(&folder, &config("qwen2"));
    write_tokenizer(&folder, VOCABULARY);
    let path = folder.join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json["pre_tokenizer"] = super::pre_tokenizer::section_of("starcoder").unwrap();
    json["model"]["vocab"]["12"] = json!(256);
    json["model"]["vocab"]["fn"] = json!(257);
    json["model"]["merges"] = json!([["1", "2"], ["f", "n"]]);
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [END + 2], "tokens": ["<|endoftext|>"]}},
    });
    std::fs::write(&path, json.to_string()).unwrap();
    let model = CausalLm::load(&folder, &CausalLmOptions::cpu()).unwrap();
    // llama.cpp puts `bos_token` before a text, and this model has none.
    let error = GgufExport::new(&model, &folder, "tiny", LmExportType::F16).unwrap_err();
    assert!(error.to_string().contains("bos_token"), "{error}");
    std::fs::write(
        folder.join("tokenizer_config.json"),
        json!({"bos_token": {"content": "<|endoftext|>"}}).to_string(),
    )
    .unwrap();
    export(&folder, &file, LmExportType::F16);
    let before = TextTokenizer::open(&folder, VOCABULARY).unwrap();
    let (_, after) = open_tokenizer(&file).unwrap();
    for text in ["fn 12", "fnfn", "x", ""] {
        assert_eq!(after.encode(text).unwrap(), before.encode(text).unwrap(), "{text:?}");
    }
    assert_eq!(after.encode("fn12").unwrap()[..2], [END + 2, 257]);
}

#[test]
fn what_llama_cpp_does_not_compute_is_refused() {
    let refused = |name: &str, key: &str, value: Value| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(name);
        config[key] = value;
        write_model(dir.path(), &config);
        write_tokenizer(dir.path(), VOCABULARY);
        let model = CausalLm::load(dir.path(), &CausalLmOptions::cpu()).unwrap();
        GgufExport::new(&model, dir.path(), "tiny", LmExportType::F16)
            .unwrap_err()
            .to_string()
    };
    for (name, key, value, message) in [
        ("starcoder2", "hidden_act", json!("gelu"), "GeluTanh"),
        ("starcoder", "scale_attn_weights", json!(false), "scale_attn_weights"),
        ("starcoder2", "head_dim", json!(6), "4 heads of 6"),
        (
            "qwen2",
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
            "llama3",
        ),
        (
            "qwen2",
            "rope_scaling",
            json!({"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1, 2]}),
            "longrope",
        ),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 2.0}),
            "dynamic",
        ),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 2.0, "truncate": false}),
            "truncate",
        ),
    ] {
        let error = refused(name, key, value);
        assert!(error.contains(message) && error.contains("config.json"), "{error}");
    }
}

#[test]
fn blocks_beyond_their_number_and_types_that_are_not_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config("llama"));
    write_tokenizer(dir.path(), VOCABULARY);
    let file = dir.path().join("a.gguf");
    export(dir.path(), &file, LmExportType::F32);
    assert!(CausalLm::load(&file, &CausalLmOptions::cpu()).is_ok());
    let mut bytes = std::fs::read(&file).unwrap();
    // The key is followed by the number of its type, 4, and its value.
    let key = b"llama.block_count";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    assert!(bytes[at] > 1, "{}", bytes[at]);
    bytes[at] -= 1;
    std::fs::write(&file, &bytes).unwrap();
    let error = CausalLm::load(&file, &CausalLmOptions::cpu())
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`blk.") && error.contains("`llama.block_count` is"),
        "{error}"
    );
    bytes[at] += 1;
    // After the name: the number of sides, two sides, and the type; 26 are whole numbers of 32 bits. Names and shapes alone show it too.
    let name = b"token_embd.weight";
    let kind = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 20;
    assert_eq!(bytes[kind], 0);
    bytes[kind] = 26;
    let other = dir.path().join("b.gguf");
    std::fs::write(&other, bytes).unwrap();
    let shapes_only = CausalLmOptions {
        shapes_only: true,
        ..CausalLmOptions::cpu()
    };
    let error = CausalLm::load(&other, &shapes_only).map(drop).unwrap_err().to_string();
    assert!(
        error.contains("token_embd.weight") && error.contains("supported types"),
        "{error}"
    );
}

/// As in llama.cpp, whose converter left the type out in 2023.
#[test]
fn positions_are_scaled_by_a_factor_without_its_type() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config("llama_biases"));
    write_tokenizer(dir.path(), VOCABULARY);
    let file = dir.path().join("a.gguf");
    export(dir.path(), &file, LmExportType::F32);
    let expected = logits(&file);
    let mut bytes = std::fs::read(&file).unwrap();
    let key = b"llama.rope.scaling.type";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at + key.len() - 4..at + key.len()].copy_from_slice(b"none");
    std::fs::write(&file, &bytes).unwrap();
    assert_eq!(logits(&file), expected);
}

#[test]
fn other_files_are_refused_with_a_reason() {
    use crate::weights::{GgufLayout, GgufValue};
    use candle_core::quantized::GgmlDType;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.gguf");
    let error = |arch: &str, tensor: &str| {
        let mut layout = GgufLayout::default();
        layout.set("general.architecture", GgufValue::Text(arch.into()));
        for key in [
            "embedding_length",
            "attention.head_count",
            "block_count",
            "feed_forward_length",
            "context_length",
        ] {
            layout.set(format!("{arch}.{key}"), GgufValue::Unsigned(2));
        }
        layout.set(
            format!("{arch}.attention.layer_norm_rms_epsilon"),
            GgufValue::Float(1e-5),
        );
        layout.set(format!("{arch}.attention.key_length"), GgufValue::Unsigned(2));
        layout.add(tensor, GgmlDType::F32, [3, 2]);
        let mut bytes = Vec::new();
        let zeros = Tensor::zeros((3, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
        layout.write(&mut bytes, |_| Ok(zeros.clone())).unwrap();
        std::fs::write(&file, bytes).unwrap();
        match CausalLm::load(&file, &CausalLmOptions::cpu()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{arch} {tensor}"),
        }
    };
    let found = error("mamba", "token_embd.weight");
    assert!(found.contains("`mamba`") && found.contains("`starcoder2`"), "{found}");
    let found = error("llama", "blk.0.ssm_in.weight");
    assert!(found.contains("token_embd.weight"), "{found}");
    let found = error("llama", "token_embd.weight");
    assert!(found.contains("blk.0") || found.contains("model.layers.0"), "{found}");
    std::fs::write(&file, "not a model").unwrap();
    let found = CausalLm::load(&file, &CausalLmOptions::cpu()).unwrap_err().to_string();
    assert!(found.contains("GGUF"), "{found}");
}
