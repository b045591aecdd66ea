//! Writes the files of a diffusers folder: configs, tokenizer and weights.

use super::Fallible;
use aitk_engine::models::config;
use candle_core::{DType, Tensor};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

/// Words that are one token each. `zorb` is one, but is in no caption of the base model.
const WORDS: [&str; 22] = [
    "a",
    "an",
    "the",
    "of",
    "on",
    "and",
    "red",
    "green",
    "blue",
    "yellow",
    "purple",
    "orange",
    "white",
    "black",
    "gray",
    "pink",
    "circle",
    "square",
    "triangle",
    "background",
    "drawing",
    "zorb",
];

/// Writes all files of the folder except the weights. `scaling_factor` is known after the autoencoder is trained.
pub(crate) fn write_configs(folder: &Path, scaling_factor: f64) -> Fallible<()> {
    let vocab = write_tokenizer(&folder.join("tokenizer"))?;
    let (bos, eos) = (vocab - 2, vocab - 1);
    let component = |name: &str, file: &str, value: Value| write_json(&folder.join(name).join(file), &value);
    component(
        "text_encoder",
        "config.json",
        json!({
            "architectures": ["CLIPTextModel"], "model_type": "clip_text_model", "vocab_size": vocab,
            "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "projection_dim": 64,
            "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos, "torch_dtype": "float16",
        }),
    )?;
    component(
        "unet",
        "config.json",
        json!({
            "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1", "sample_size": 16,
            "in_channels": 4, "out_channels": 4, "block_out_channels": [32, 48, 64], "layers_per_block": 1,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "mid_block_type": "UNetMidBlock2DCrossAttn",
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "cross_attention_dim": 64, "attention_head_dim": 4, "norm_num_groups": 8, "norm_eps": 1e-5,
            "act_fn": "silu", "flip_sin_to_cos": true, "freq_shift": 0, "downsample_padding": 1,
            "mid_block_scale_factor": 1, "center_input_sample": false,
        }),
    )?;
    component(
        "vae",
        "config.json",
        json!({
            "_class_name": "AutoencoderKL", "_diffusers_version": "0.42.1", "sample_size": 64,
            "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": [12, 24, 32],
            "layers_per_block": 1, "norm_num_groups": 2, "mid_block_add_attention": false, "act_fn": "silu",
            "scaling_factor": scaling_factor,
            "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D"],
            "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"],
        }),
    )?;
    component(
        "scheduler",
        "scheduler_config.json",
        json!({
            "_class_name": "PNDMScheduler", "_diffusers_version": "0.42.1", "beta_start": 0.00085, "beta_end": 0.012,
            "beta_schedule": "scaled_linear", "num_train_timesteps": 1000, "prediction_type": "epsilon",
            "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1, "timestep_spacing": "leading",
            "trained_betas": null, "clip_sample": false,
        }),
    )?;
    write_json(
        &folder.join("model_index.json"),
        &json!({
            "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
            "feature_extractor": [null, null], "image_encoder": [null, null],
            "requires_safety_checker": false, "safety_checker": [null, null],
            "scheduler": ["diffusers", "PNDMScheduler"], "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"], "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        }),
    )
}

/// Reads the `config.json` of a component.
pub(crate) fn read_config<T: serde::de::DeserializeOwned>(folder: &Path, component: &str) -> Fallible<T> {
    Ok(config::read(&folder.join(component).join("config.json"))?)
}

/// Writes tensors as fp16 safetensors.
pub(crate) fn write_weights(file: &Path, tensors: &[(String, Tensor)]) -> Fallible<()> {
    let fp16 = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), tensor.to_dtype(DType::F16)?)));
    let fp16 = fp16.collect::<candle_core::Result<BTreeMap<_, _>>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = safetensors::serialize(
        fp16.iter().map(|(name, tensor)| (name.as_str(), tensor)),
        Some(metadata),
    )?;
    fs::write(file, bytes)?;
    Ok(())
}

pub(crate) fn write_json(file: &Path, value: &Value) -> Fallible<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(file, serde_json::to_string_pretty(value)? + "\n")?;
    Ok(())
}

/// The printable characters that represent bytes in the vocabularies of GPT-2 and CLIP.
fn byte_alphabet() -> Vec<char> {
    let visible: Vec<u32> = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).collect();
    let hidden = (0..256).filter(|byte| !visible.contains(byte)).count() as u32;
    let substitutes = (0..hidden).map(|i| 256 + i);
    visible
        .iter()
        .copied()
        .chain(substitutes)
        .filter_map(char::from_u32)
        .collect()
}

/// Writes a tokenizer whose tokens are all bytes, all bytes at the end of a word, and the merges for [`WORDS`]. Returns
/// the number of tokens.
fn write_tokenizer(folder: &Path) -> Fallible<usize> {
    let alphabet = byte_alphabet();
    let mut tokens: Vec<String> = alphabet.iter().map(char::to_string).collect();
    tokens.extend(alphabet.iter().map(|c| format!("{c}</w>")));
    let mut merges: Vec<(String, String)> = Vec::new();
    for word in WORDS {
        let mut parts: Vec<String> = word.chars().map(String::from).collect();
        if let Some(last) = parts.last_mut() {
            last.push_str("</w>");
        }
        while parts.len() > 1 {
            // Apply the existing merges in the order of BPE; otherwise add a merge of the first two parts.
            let rank = |i: usize| merges.iter().position(|(a, b)| *a == parts[i] && *b == parts[i + 1]);
            let position = (0..parts.len() - 1)
                .filter_map(|i| rank(i).map(|rank| (rank, i)))
                .min()
                .map(|(_, i)| i);
            let position = position.unwrap_or_else(|| {
                merges.push((parts[0].clone(), parts[1].clone()));
                0
            });
            let joined = format!("{}{}", parts[position], parts[position + 1]);
            parts.splice(position..position + 2, [joined.clone()]);
            if !tokens.contains(&joined) {
                tokens.push(joined);
            }
        }
    }
    tokens.extend(["<|startoftext|>".to_owned(), "<|endoftext|>".to_owned()]);
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), json!(id)))
        .collect();
    write_json(&folder.join("vocab.json"), &Value::Object(vocab))?;
    let lines: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}\n")).collect();
    fs::write(folder.join("merges.txt"), format!("#version: 0.2\n{}", lines.concat()))?;
    write_json(
        &folder.join("tokenizer_config.json"),
        &json!({
            "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
        }),
    )?;
    Ok(tokens.len())
}
