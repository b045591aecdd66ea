//! Exports tiny models, with LoRAs and without. With `AITK_KEEP_EXPORTS=FOLDER`, `tests/reference/check_lm_exports.py` reads the files with
//! `gguf`, llama.cpp, transformers and peft.

use super::super::language_model_part::load_language_model_lora;
use crate::models::causal_lm::{AttentionMask, CausalLm, CausalLmOptions, open_tokenizer};
use crate::testing::byte_tokenizer::write_tokenizer;
use crate::testing::formula_weights::{expected, formula, write_model};
use crate::testing::{attempt, compute_on_this_thread, in_own_folder};
use crate::weights::write_tensors;
use crate::{StopSignal, run};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::{Format, LoadOptions, parse};
use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(super) const VOCABULARY: usize = 264;
/// The end of a text.
const END: u32 = 258;
const PROMPTS: [&str; 8] = [
    "fn add(a: i32",
    "def fib(n):\n",
    "12 + 34 = ",
    "#include <",
    "let mut x",
    "while",
    "struct A",
    "return",
];
/// The rank and the alpha of the test's LoRA.
const RANK: usize = 3;
const ALPHA: f64 = 6.0;

/// The config of a small model of a family, whose rows are blocks of every type.
fn config(name: &str) -> Value {
    let mut config = expected()["models"][name]["config"].clone();
    let changes = match name {
        "starcoder" | "starcoder_heads" => json!({
            "n_embd": 256, "n_inner": 512, "n_head": 4, "n_positions": 512, "scale_attn_weights": true,
            "activation_function": "gelu_pytorch_tanh",
        }),
        _ => json!({
            "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        }),
    };
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.as_object_mut().unwrap().remove("head_dim");
    config["vocab_size"] = json!(VOCABULARY);
    config["eos_token_id"] = json!(END);
    match name {
        "starcoder2" => config["sliding_window"] = json!(null),
        // Heads that together are not as wide as a token.
        "llama_biases" => config["head_dim"] = json!(48),
        "starcoder2_plain" => config["hidden_act"] = json!("gelu_pytorch_tanh"),
        _ => {}
    }
    config
}

/// Sets the vectors of tokens that are not ASCII text to zero, so that they are never the most probable ones: llama.cpp's server reports no
/// tokens that are parts of characters.
fn silence_bytes(file: &Path) {
    let mut tensors: BTreeMap<String, Tensor> = safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect();
    let is_text = |id: u32| id < 94 || [220, 256, 257].contains(&id);
    let kept: Vec<f32> = (0..VOCABULARY as u32)
        .map(|id| f32::from(u8::from(is_text(id))))
        .collect();
    let kept = Tensor::from_vec(kept, (VOCABULARY, 1), &Device::Cpu).unwrap();
    for (name, tensor) in &mut tensors {
        if ["wte.weight", "embed_tokens.weight", "lm_head.weight"]
            .iter()
            .any(|end| name.ends_with(end))
        {
            *tensor = tensor.broadcast_mul(&kept).unwrap();
        }
    }
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_tensors(&mut std::fs::File::create(file).unwrap(), &tensors, &metadata).unwrap();
}

pub(super) fn write_base(folder: &Path, name: &str) {
    write_model(folder, &config(name));
    silence_bytes(&folder.join("model.safetensors"));
    write_tokenizer(folder, VOCABULARY);
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // The special tokens follow them.
    tokenizer["model"]["vocab"]["fn"] = json!(256);
    tokenizer["model"]["vocab"]["wh"] = json!(257);
    for token in tokenizer["added_tokens"].as_array_mut().unwrap() {
        token["id"] = json!(token["id"].as_u64().unwrap() + 2);
    }
    tokenizer["model"]["merges"] = json!([["f", "n"], ["w", "h"]]);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let settings = json!({"eos_token": "<|endoftext|>"});
    std::fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
}

/// Writes a LoRA of some layers as peft has it.
fn write_lora(folder: &Path, model: &CausalLm) {
    write_lora_of(folder, model, "");
}

/// The same with other numbers for each `name_of_lora`.
fn write_lora_of(folder: &Path, model: &CausalLm, name_of_lora: &str) {
    std::fs::create_dir_all(folder).unwrap();
    let mut tensors = BTreeMap::new();
    let mut targets = Vec::new();
    for (name, weight) in model.tensors().unwrap() {
        let Some(layer) = name.strip_suffix(".weight") else {
            continue;
        };
        let is_target = ["q_proj", "down_proj", "c_attn", "mlp.c_proj"]
            .iter()
            .any(|end| layer.ends_with(end));
        if !is_target {
            continue;
        }
        targets.push(layer.to_owned());
        let [outputs, inputs] = weight.dims() else {
            panic!("{name}");
        };
        for (half, shape) in [("lora_A", [RANK, *inputs]), ("lora_B", [*outputs, RANK])] {
            let key = format!("base_model.model.{layer}.{half}.weight");
            let numbers = formula(&format!("{name_of_lora}{key}"), shape[0] * shape[1], 0.05);
            let tensor = Tensor::from_vec(numbers, &shape, &Device::Cpu).unwrap();
            tensors.insert(key, tensor);
        }
    }
    let mut file = std::fs::File::create(folder.join("adapter_model.safetensors")).unwrap();
    write_tensors(&mut file, &tensors, &BTreeMap::new()).unwrap();
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none",
        "fan_in_fan_out": false, "base_model_name_or_path": "",
    });
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Runs a job with this process in the folder `root`.
fn run_process(root: &Path, job: &str, process: &Value) -> (Outcome, Vec<ChildEvent>) {
    let text = json!({"job": job, "config": {"name": "tiny", "process": [process]}}).to_string();
    let loaded = parse(&text, Format::Json, None, &LoadOptions::default()).unwrap();
    let unsupported = loaded.spec.unsupported();
    assert!(unsupported.errors.is_empty(), "{unsupported}");
    let spec = in_own_folder(attempt(&loaded.spec, &text), root);
    let mut events = Vec::new();
    let outcome = run(&spec, &mut events, &StopSignal::new());
    (outcome, events)
}

fn process(root: &Path, model: Value, save: Value) -> Value {
    let mut process = json!({"type": "lm_export", "output_folder": root, "model": {"name_or_path": root.join("model")}, "save": save});
    for (key, value) in model.as_object().unwrap() {
        process["model"][key] = value.clone();
    }
    process
}

pub(super) fn export(root: &Path, model: Value, save: Value) -> Vec<ChildEvent> {
    let (outcome, events) = run_process(root, "mod", &process(root, model, save));
    assert_eq!(outcome, Outcome::Completed, "{events:?}");
    events
}

fn failure(root: &Path, model: Value, save: Value) -> String {
    match run_process(root, "mod", &process(root, model, save)).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    }
}

/// The 64 most probable tokens after a prompt, or those before the end of the text, with the prompt.
fn greedy(path: &Path, prompt: &str) -> Value {
    let model = CausalLm::load(path, &CausalLmOptions::cpu()).unwrap();
    let (_, tokenizer) = open_tokenizer(path).unwrap();
    let mut next = tokenizer.encode(prompt).unwrap();
    let prompt_ids = next.clone();
    let mut caches = [model.new_cache()];
    let mut tokens = Vec::new();
    while tokens.len() < 64 {
        let ids = Tensor::from_slice(&next, (1, next.len()), &Device::Cpu).unwrap();
        let hidden = model.next(&ids, &mut caches).unwrap();
        let last = hidden.narrow(1, next.len() - 1, 1).unwrap();
        let best = model.logits(&last).unwrap().flatten_all().unwrap().argmax(0).unwrap();
        next = vec![best.to_scalar::<u32>().unwrap()];
        if next[0] == END {
            break;
        }
        tokens.push(next[0]);
    }
    json!({"prompt": prompt, "prompt_ids": prompt_ids, "token_ids": tokens})
}

/// The completions of 64 tokens of some prompts, always the most probable token.
fn generate(root: &Path, model: &Path, lora: Option<&Path>) -> String {
    match lora {
        Some(lora) => generate_with(root, model, json!({"lora_path": lora})),
        None => generate_with(root, model, json!({})),
    }
}

/// The same with these keys of `model` too.
fn generate_with(root: &Path, model: &Path, keys: Value) -> String {
    let mut model = json!({"name_or_path": model, "dtype": "float32"});
    for (key, value) in keys.as_object().unwrap() {
        model[key] = value.clone();
    }
    let process = json!({
        "type": "lm_generate", "output_folder": root, "model": model,
        "generate": {"prompts": PROMPTS, "max_new_tokens": 64, "stream": false, "batch_size": 8},
    });
    let out = root.join("texts");
    std::fs::remove_dir_all(&out).unwrap_or_default();
    std::fs::create_dir_all(&out).unwrap();
    let (outcome, events) = run_process(&out, "generate", &process);
    assert_eq!(outcome, Outcome::Completed, "{events:?}");
    std::fs::read_to_string(out.join("completions.jsonl")).unwrap()
}

fn logits(path: &Path) -> Vec<f32> {
    logits_of(&CausalLm::load(path, &CausalLmOptions::cpu()).unwrap())
}

pub(super) fn logits_of(model: &CausalLm) -> Vec<f32> {
    let ids: Vec<u32> = (0..19).map(|i| (i * 37 + 5) % 256).collect();
    let ids = Tensor::from_vec(ids, (1, 19), &Device::Cpu).unwrap();
    let hidden = model.hidden(&ids, &AttentionMask::Causal).unwrap();
    model.logits(&hidden).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub(super) fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    let max = a.iter().fold(0f32, |max, value| max.max(value.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / max
}

#[test]
fn exports_of_every_family_and_type_are_read_back() {
    compute_on_this_thread();
    let keep = std::env::var_os("AITK_KEEP_EXPORTS").map(PathBuf::from);
    for name in [
        "llama",
        "llama_biases",
        "qwen2",
        "starcoder2",
        "starcoder2_plain",
        "starcoder",
        "starcoder_heads",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let root = match &keep {
            Some(keep) => keep.join(name),
            None => dir.path().to_path_buf(),
        };
        std::fs::create_dir_all(&root).unwrap();
        write_base(&root.join("model"), name);
        let base = logits(&root.join("model"));
        // The largest difference of logits, as a share of the largest of them. Random weights make differences larger from block to block.
        for (dtype, max) in [
            ("f32", 1e-5),
            ("f16", 0.05),
            ("bf16", 0.3),
            ("q8_0", 0.5),
            ("q4_k", 1.5),
        ] {
            let events = export(&root, json!({}), json!({"dtype": dtype}));
            let artifact = events.iter().find_map(|event| match event {
                ChildEvent::Artifact { kind, name, .. } => Some((kind.clone(), name.clone())),
                _ => None,
            });
            let file = format!("tiny-{dtype}.gguf");
            assert_eq!(artifact, Some(("model".into(), file.clone())));
            let found = largest_difference(&base, &logits(&root.join(&file)));
            assert!(found <= max, "{name} {dtype}: {found}");
            if keep.is_some() {
                let lines: String = PROMPTS
                    .iter()
                    .map(|prompt| format!("{}\n", greedy(&root.join(&file), prompt)))
                    .collect();
                std::fs::write(root.join(format!("{dtype}.jsonl")), lines).unwrap();
            }
        }
        // Quantised weights stay in their bits.
        let size = |dtype: &str| {
            std::fs::metadata(root.join(format!("tiny-{dtype}.gguf")))
                .unwrap()
                .len()
        };
        assert!(size("q4_k") < size("q8_0") && size("q8_0") < size("f16") && size("f16") < size("f32"));
    }
}

#[test]
fn a_folder_that_is_no_earlier_export_is_not_replaced() {
    compute_on_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_base(&root.join("model"), "llama");
    let save = json!({"format": "hf", "dtype": "f32"});
    // The run folder of a training that has the name of the result.
    let checkpoints = root.join("tiny-f32/.aitk/checkpoints");
    std::fs::create_dir_all(&checkpoints).unwrap();
    let error = failure(root, json!({}), save.clone());
    assert!(error.contains("which is no earlier export"), "{error}");
    assert!(checkpoints.is_dir());
    std::fs::remove_dir_all(root.join("tiny-f32")).unwrap();
    // An empty folder and an earlier export are replaced.
    std::fs::create_dir(root.join("tiny-f32")).unwrap();
    for _ in 0..2 {
        export(root, json!({}), save.clone());
    }
    let exported = json!({"name_or_path": root.join("tiny-f32")});
    let error = failure(root, exported, save.clone());
    assert!(error.contains("the model or the LoRA that is exported"), "{error}");
    logits(&root.join("tiny-f32"));
    // A model beside which there is another file.
    let notes = root.join("tiny-f32/notes.txt");
    std::fs::write(&notes, "mine").unwrap();
    let error = failure(root, json!({}), save.clone());
    assert!(error.contains("which is no earlier export"), "{error}");
    std::fs::remove_file(&notes).unwrap();
    // A model beside which there is a folder, and the LoRA that is merged within it.
    let lora = root.join("tiny-f32/lora");
    write_lora(
        &lora,
        &CausalLm::load(&root.join("model"), &CausalLmOptions::cpu()).unwrap(),
    );
    let error = failure(root, json!({}), save.clone());
    assert!(error.contains("which is no earlier export"), "{error}");
    let error = failure(root, json!({"lora_path": lora}), save);
    assert!(error.contains("the model or the LoRA that is exported"), "{error}");
    assert!(lora.is_dir());
}

#[test]
fn a_lora_is_merged_into_both_formats_and_generates_the_same_texts() {
    compute_on_this_thread();
    let keep = std::env::var_os("AITK_KEEP_EXPORTS").map(PathBuf::from);
    for name in ["llama", "starcoder"] {
        let dir = tempfile::tempdir().unwrap();
        let root = match &keep {
            Some(keep) => keep.join(format!("{name}_lora")),
            None => dir.path().to_path_buf(),
        };
        std::fs::create_dir_all(&root).unwrap();
        write_base(&root.join("model"), name);
        let lora = root.join("lora");
        write_lora(
            &lora,
            &CausalLm::load(&root.join("model"), &CausalLmOptions::cpu()).unwrap(),
        );
        let with_lora = json!({"lora_path": lora});
        export(&root, with_lora.clone(), json!({"dtype": "f32"}));
        export(&root, with_lora, json!({"format": "hf", "dtype": "f32"}));
        let (base, merged) = (logits(&root.join("model")), logits(&root.join("tiny-f32")));
        let file = logits(&root.join("tiny-f32.gguf"));
        assert!(
            largest_difference(&base, &merged) > 0.05,
            "{name}: the LoRA changes nothing"
        );
        assert!(largest_difference(&merged, &file) < 1e-5, "{name}");
        let attached = generate(&root, &root.join("model"), Some(&lora));
        let of_folder = generate(&root, &root.join("tiny-f32"), None);
        assert_eq!(attached, of_folder, "{name}");
        assert_eq!(attached, generate(&root, &root.join("tiny-f32.gguf"), None), "{name}");
        assert_ne!(attached, generate(&root, &root.join("model"), None), "{name}");
        // Half of the strength is another model.
        export(
            &root,
            json!({"lora_path": lora, "lora_weight": 0.5}),
            json!({"format": "hf", "dtype": "f32"}),
        );
        let half = logits(&root.join("tiny-f32"));
        assert!(largest_difference(&half, &merged) > 0.01 && largest_difference(&half, &base) > 0.01);
        export(
            &root,
            json!({"lora_path": lora}),
            json!({"format": "hf", "dtype": "f32"}),
        );
        for copied in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
            assert!(root.join("tiny-f32").join(copied).is_file(), "{copied}");
        }
    }
}

#[test]
fn several_loras_with_strengths_are_added() {
    compute_on_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_base(&root.join("model"), "llama");
    let model = CausalLm::load(&root.join("model"), &CausalLmOptions::cpu()).unwrap();
    let [first, second] = ["first", "second"].map(|name| {
        write_lora_of(&root.join(name), &model, name);
        root.join(name)
    });
    let save = json!({"format": "hf", "dtype": "f32"});
    let exported = |model: Value| {
        export(root, model, save.clone());
        logits(&root.join("tiny-f32"))
    };
    let base = exported(json!({}));
    let both = exported(json!({"lora_path": first, "lora_weight": 0.5, "loras": [{"path": second, "weight": 2}]}));
    let listed = exported(json!({"loras": [{"path": first, "weight": 0.5}, {"path": second, "weight": 2}]}));
    assert_eq!(both, listed);
    for other in [
        json!({"loras": [{"path": first, "weight": 0.5}]}),
        json!({"loras": [{"path": second, "weight": 2}]}),
        json!({"loras": [{"path": first}, {"path": second}]}),
    ] {
        assert!(largest_difference(&exported(other.clone()), &both) > 0.01, "{other}");
    }
    // One after another they are the same sum.
    exported(json!({"loras": [{"path": first, "weight": 0.5}]}));
    let merged_once = root.join("once");
    std::fs::rename(root.join("tiny-f32"), &merged_once).unwrap();
    let mut process = process(root, json!({"lora_path": second, "lora_weight": 2}), save.clone());
    process["model"]["name_or_path"] = json!(merged_once);
    assert_eq!(run_process(root, "mod", &process).0, Outcome::Completed);
    assert!(largest_difference(&logits(&root.join("tiny-f32")), &both) < 1e-3);
    // Attached to the model they change it as merged ones do.
    let mut attached = model.clone();
    for (path, strength) in [(&first, 0.5), (&second, 2.0)] {
        load_language_model_lora(&mut attached, path, strength).unwrap();
    }
    assert!(largest_difference(&logits_of(&attached), &both) < 1e-3);
    let texts = |keys: Value| generate_with(root, &root.join("model"), keys);
    let of_list = texts(json!({"loras": [{"path": first, "weight": 0.5}, {"path": second, "weight": 2}]}));
    let of_both_keys = texts(json!({"lora_path": first, "lora_weight": 0.5, "loras": [{"path": second, "weight": 2}]}));
    assert_eq!(of_list, of_both_keys);
    for other in [
        json!({}),
        json!({"loras": [{"path": first, "weight": 0.5}]}),
        json!({"loras": [{"path": first, "weight": 2}, {"path": second, "weight": 0.5}]}),
    ] {
        assert_ne!(of_list, texts(other.clone()), "{other}");
    }
    // Opposite strengths leave the model.
    let nothing = json!([{"path": first}, {"path": first, "weight": -1}]);
    export(root, json!({"loras": nothing}), json!({"format": "hf", "dtype": "f32"}));
    assert!(largest_difference(&logits(&root.join("tiny-f32")), &base) < 1e-5);
}

#[test]
fn a_quantised_file_works_alone_and_with_a_tokenizer_beside_it() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write_base(&root.join("model"), "qwen2");
    export(root, json!({}), json!({"dtype": "q8_0"}));
    let alone = generate(root, &root.join("tiny-q8_0.gguf"), None);
    let folder = root.join("folder");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(root.join("tiny-q8_0.gguf"), folder.join("tiny.gguf")).unwrap();
    std::fs::copy(root.join("model/tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    assert_eq!(generate(root, &folder, None), alone);
}

#[test]
fn what_cannot_be_exported_is_refused_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write_base(&root.join("model"), "llama");
    let lora = root.join("lora");
    write_lora(
        &lora,
        &CausalLm::load(&root.join("model"), &CausalLmOptions::cpu()).unwrap(),
    );
    // A LoRA of another model.
    write_base(&root.join("model"), "starcoder");
    let error = failure(root, json!({"lora_path": lora}), json!({}));
    assert!(error.contains("none of its"), "{error}");
    let tokenizer = root.join("model/tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    let other = text.replace("\"use_regex\":true", "\"use_regex\":false");
    assert_ne!(other, text);
    std::fs::write(&tokenizer, other).unwrap();
    let error = failure(root, json!({}), json!({}));
    assert!(
        error.contains("tokenizer.json") && error.contains("ByteLevel"),
        "{error}"
    );
    // A folder needs no tokenizer that llama.cpp knows.
    export(root, json!({}), json!({"format": "hf"}));
    std::fs::write(&tokenizer, &text).unwrap();
    export(root, json!({}), json!({}));
    let missing =
        json!({"type": "lm_export", "output_folder": root, "model": {"name_or_path": root.join("tiny-f16.gguf")}});
    match run_process(root, "mod", &missing).0 {
        Outcome::Failed { message, .. } => assert!(message.contains("expected the folder"), "{message}"),
        other => panic!("{other:?}"),
    }
}
