//! FLUX.1 from the files that people have: names, sizes, bits, damaged files. Images of each file are compared in
//! `pipelines::family_tests` (fixtures: `tests/reference/make_flux_files.py`).

use super::{FLUX, FluxModel};
use crate::error::Result;
use crate::families::{self, LoadOptions, Model, Prompt, PromptReading, load_text_encoders};
use crate::models::flux::single_file::{config_of, with_diffusers_names};
use crate::nn::{LayerMut, VisitLayers};
use crate::rng::TorchGenerator;
use crate::testing::single_files::damaged;
use crate::testing::{fixtures, flux_files, gap, largest, names_of_tensors};
use crate::weights::{Index, TrainableFilter, Weight};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The names and shapes in a list of `tests/fixtures/models`, of lines with this first word.
fn listed(file: &str, first: &str) -> BTreeMap<String, Vec<usize>> {
    let text = names_of_tensors(file);
    let lines = text.lines().filter_map(|line| line.strip_prefix(first));
    let entry = |line: &str| {
        let (name, shape) = line.trim().split_once(' ').unwrap();
        let shape = shape.split('x').map(|side| side.parse().unwrap()).collect();
        (name.to_owned(), shape)
    };
    lines.map(entry).collect()
}

fn shapes(index: &Index) -> BTreeMap<String, Vec<usize>> {
    index
        .tensors()
        .map(|(name, shape)| (name.to_owned(), shape.to_vec()))
        .collect()
}

#[test]
fn every_tensor_of_the_full_size_file_has_its_name_and_shape() {
    let original = listed("full_size_single_file_names_flux.txt.gz", "");
    let expected = listed("full_size_names_flux.txt.gz", "transformer");
    assert_eq!((original.len(), expected.len()), (780, 1160));
    for prefix in ["", "model.diffusion_model."] {
        let named = original
            .iter()
            .map(|(name, shape)| (format!("{prefix}{name}"), shape.clone()));
        let index = with_diffusers_names(&Index::from_shapes(named)).unwrap();
        assert_eq!(shapes(&index), expected);
        let config = config_of(&index).unwrap();
        assert_eq!((config.num_layers, config.num_single_layers), (19, 38));
        assert_eq!((config.num_attention_heads, config.attention_head_dim), (24, 128));
        assert_eq!(config.axes_dims_rope, [16, 56, 56]);
        assert!(config.guidance_embeds && config.joint_attention_dim == 4096 && config.pooled_projection_dim == 768);
    }
    // Schnell has no embedding of the guidance.
    let schnell = original.iter().filter(|(name, _)| !name.starts_with("guidance_in."));
    let schnell = Index::from_shapes(schnell.map(|(name, shape)| (name.clone(), shape.clone())));
    let index = with_diffusers_names(&schnell).unwrap();
    assert_eq!(index.tensors().count(), 1156);
    assert!(!config_of(&index).unwrap().guidance_embeds);
}

fn load(model: &str, parts: PartPaths) -> FluxModel {
    let options = LoadOptions {
        parts,
        ..LoadOptions::cpu()
    };
    FluxModel::load(&FLUX, flux_files().join(model), &options).unwrap()
}

fn tiny_extras() -> PartPaths {
    PartPaths {
        extras: Some(fixtures().join("tiny_flux")),
        ..PartPaths::default()
    }
}

/// What each layer of the transformer is kept as, and its bits per weight.
fn kinds(model: &mut FluxModel) -> BTreeMap<String, (&'static str, f64)> {
    let mut kinds = BTreeMap::new();
    let mut visit = |name: &str, layer: LayerMut<'_>| -> Result<()> {
        let LayerMut::Linear(layer) = layer else { return Ok(()) };
        let kind = match &layer.weight {
            Weight::Quantized(quantized) => quantized.kind(),
            _ => "plain",
        };
        let count: usize = layer.weight.dims().iter().product();
        kinds.insert(
            name.to_owned(),
            (kind, 8.0 * layer.weight.bytes() as f64 / count as f64),
        );
        Ok(())
    };
    model.transformer.visit_layers(&mut visit).unwrap();
    kinds
}

#[test]
fn weights_stay_in_the_bits_of_their_files() {
    for file in ["all_in_one_fp8.safetensors", "scaled_fp8.safetensors"] {
        let mut model = load(file, tiny_extras());
        for (name, (kind, bits)) in kinds(&mut model) {
            // 8 bits, and a scale of 32 bits for each row, of 16 weights at least.
            assert!(kind == "float8" && bits <= 10.0, "{file}: {name} {kind} {bits}");
        }
    }
    let mut model = load("transformer.gguf", tiny_extras());
    let kinds = kinds(&mut model);
    let found: std::collections::BTreeSet<&str> = kinds.values().map(|(kind, _)| *kind).collect();
    let expected = ["bf16", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    // Parts of one layer of the file keep its kind.
    let of = |name: &str| kinds[name];
    assert_eq!(
        of("transformer_blocks.0.attn.to_q"),
        of("transformer_blocks.0.attn.to_v")
    );
    assert_eq!(
        of("single_transformer_blocks.1.attn.to_q"),
        of("single_transformer_blocks.1.proj_mlp")
    );
}

#[test]
fn a_file_of_quantised_weights_is_trained_and_saved_with_diffusers_names() {
    let options = LoadOptions {
        parts: tiny_extras(),
        ..LoadOptions::cpu()
    }
    .training(TrainableFilter::everything(), TrainableFilter::Nothing);
    let mut frozen = load("transformer.gguf", tiny_extras());
    let model = FluxModel::load(&FLUX, flux_files().join("transformer.gguf"), &options).unwrap();
    let mut dense = BTreeMap::new();
    let mut visit = |name: &str, layer: LayerMut<'_>| -> Result<()> {
        if let LayerMut::Linear(layer) = layer {
            dense.insert(format!("transformer.{name}.weight"), layer.weight.dense()?);
        }
        Ok(())
    };
    frozen.transformer.visit_layers(&mut visit).unwrap();
    let mut compared = 0;
    for (name, var) in model.trained() {
        if let Some(dense) = dense.get(name) {
            assert_eq!(gap(var.as_tensor(), dense), 0.0, "{name}");
            compared += 1;
        }
    }
    assert_eq!(compared, dense.len());
    let folder = tempfile::tempdir().unwrap();
    let trained = model.trained().iter();
    let trained = trained
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect();
    let save = families::SaveOptions {
        dtype: DType::F32,
        metadata: BTreeMap::new(),
        v_prediction: false,
    };
    model
        .writer(&trained, save)
        .unwrap()
        .write_folder(folder.path())
        .unwrap();
    // The save, a folder with a transformer alone, loads with the parts from elsewhere.
    let loaded = families::load(
        folder.path(),
        ArchName::Flux,
        &LoadOptions {
            parts: tiny_extras(),
            ..LoadOptions::cpu()
        },
    );
    assert_eq!(loaded.unwrap().family().arch(), ArchName::Flux);
    let saved = Index::open(folder.path().join("transformer")).unwrap();
    let name = "transformer_blocks.1.attn.to_k.weight";
    let read = saved.read(name, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(gap(&read, &trained[&format!("transformer.{name}")]), 0.0);
    let alone = families::load(folder.path(), ArchName::Flux, &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    assert!(
        alone.contains("without CLIP") && alone.contains("extras_name_or_path"),
        "{alone}"
    );
}

#[test]
fn the_scheduler_belongs_to_the_transformer() {
    let dev = load("scaled_fp8.safetensors", tiny_extras());
    assert_eq!(dev.scheduler_config["use_dynamic_shifting"], true);
    assert_eq!(
        (dev.scheduler_config["shift"].as_f64(), dev.max_sequence_length()),
        (Some(3.0), Some(512))
    );
    // The folder's scheduler is that of dev.
    let schnell = load("schnell_bfl_f16.safetensors", tiny_extras());
    assert_eq!(schnell.scheduler_config["use_dynamic_shifting"], false);
    assert_eq!(
        (
            schnell.scheduler_config["shift"].as_f64(),
            schnell.max_sequence_length()
        ),
        (Some(1.0), Some(256))
    );
}

/// Writes a safetensors file with another header and the data of `bytes`.
fn with_header(bytes: &[u8], change: impl FnOnce(&mut Map<String, Value>)) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text, &bytes[8 + length..]].concat()
}

fn check(path: &Path, parts: &PartPaths) -> std::result::Result<(), String> {
    families::check(path, ArchName::Flux, parts).map_err(|error| error.to_string())
}

#[test]
fn damaged_files_are_refused_with_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let parts = tiny_extras();
    let mut generator = TorchGenerator::manual_seed(11);
    let mut random = |below: usize| (generator.next_u64() % below as u64) as usize;
    let mut messages = 0;
    for file in [
        "schnell_bfl_f16.safetensors",
        "scaled_fp8.safetensors",
        "all_in_one_fp8.safetensors",
    ] {
        let bytes = std::fs::read(flux_files().join(file)).unwrap();
        for _ in 0..60 {
            let (damaged, damage) = damaged(&bytes, &mut random);
            std::fs::write(&path, damaged).unwrap();
            // Every number of the file can be read, or the error says where it cannot.
            let options = LoadOptions {
                parts: parts.clone(),
                ..LoadOptions::cpu()
            };
            let full = families::load(&path, ArchName::Flux, &options)
                .map(drop)
                .map_err(|error| error.to_string());
            if let Err(message) = full {
                assert!(message.len() < 1000, "{message}");
                assert!(message.contains("model.safetensors"), "{file}, {damage:?}: {message}");
                messages += 1;
            } else {
                let (tensor, kind) = (&damage.tensor, damage.kind);
                let unused = ["logit_scale", "scale_input"];
                let is_unused = unused.iter().any(|part| tensor.contains(part)) || tensor == "scaled_fp8";
                // A scale of another shape of one element is the same scale.
                let is_scale = tensor.ends_with("scale_weight") && (1..4).contains(&kind);
                assert!(
                    is_unused || is_scale || kind == 2 && damage.was_flat,
                    "{file}, {damage:?}: no error"
                );
            }
        }
    }
    assert!(messages > 120, "{messages}");
}

#[test]
fn a_float8_weight_without_its_scale_is_refused_where_others_have_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let without = |file: &str, scale: &str| {
        let bytes = std::fs::read(flux_files().join(file)).unwrap();
        let changed = with_header(&bytes, |header| {
            let entry = header.remove(scale).unwrap();
            header.insert("unused".to_owned(), entry);
        });
        std::fs::write(at(file), changed).unwrap();
    };
    without("scaled_fp8.safetensors", "double_blocks.1.txt_mlp.2.scale_weight");
    let error = check(&at("scaled_fp8.safetensors"), &tiny_extras()).unwrap_err();
    assert!(
        error.contains("scaled_fp8.safetensors") && error.contains("`double_blocks.1.txt_mlp.2.weight` has no scale"),
        "{error}"
    );
    without(
        "t5_scaled_fp8.safetensors",
        "encoder.block.1.layer.0.SelfAttention.k.scale_weight",
    );
    let parts = PartPaths {
        text_encoder: Some(at("t5_scaled_fp8.safetensors")),
        ..tiny_extras()
    };
    let error = check(&flux_files().join("schnell_bfl_f16.safetensors"), &parts).unwrap_err();
    assert!(
        error.contains("t5_scaled_fp8.safetensors") && error.contains("SelfAttention.k.weight` has no scale"),
        "{error}"
    );
}

#[test]
fn damaged_headers_of_gguf_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let options = LoadOptions {
        parts: tiny_extras(),
        ..LoadOptions::cpu()
    };
    let bytes = std::fs::read(flux_files().join("transformer.gguf")).unwrap();
    let mut generator = TorchGenerator::manual_seed(12);
    let mut random = |below: usize| (generator.next_u64() % below as u64) as usize;
    let mut refused = 0;
    for round in 0..60 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + random(3) {
            // The header has about 9 KB.
            damaged[random(9000)] = random(256) as u8;
        }
        if round % 5 == 0 {
            damaged.truncate(random(damaged.len()));
        }
        std::fs::write(&path, damaged).unwrap();
        if let Err(error) = families::load(&path, ArchName::Flux, &options) {
            let message = error.to_string();
            assert!(
                message.contains("model.gguf") && message.len() < 1000,
                "{round}: {message}"
            );
            refused += 1;
        }
    }
    assert!(refused > 30, "{refused}");
}

#[test]
fn gguf_files_of_other_architectures_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (architecture, tensor, says) in [
        ("llama", "blk.0.attn_q.weight", "language model"),
        ("sd1", "x", "Stable Diffusion 1.x"),
        ("sdxl", "x", "Stable Diffusion XL"),
        ("wan", "x", "Wan 2.1"),
        ("t5encoder", "enc.blk.0.attn_q.weight", "a T5 text encoder"),
    ] {
        let path = folder.path().join(format!("{architecture}.gguf"));
        std::fs::write(&path, gguf_file(architecture, tensor)).unwrap();
        let error = check(&path, &tiny_extras()).unwrap_err();
        assert!(error.contains(says) && error.contains(architecture), "{error}");
        // As a text encoder, too.
        if architecture != "t5encoder" {
            let parts = PartPaths {
                text_encoder: Some(path.clone()),
                ..tiny_extras()
            };
            let error = check(&flux_files().join("scaled_fp8.safetensors"), &parts).unwrap_err();
            assert!(error.contains("is not a T5") && error.contains(architecture), "{error}");
        }
    }
}

/// A GGUF file of this architecture with one f32 tensor of 4 numbers.
fn gguf_file(architecture: &str, tensor: &str) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    out.extend(3_u32.to_le_bytes());
    out.extend(1_u64.to_le_bytes());
    out.extend(1_u64.to_le_bytes());
    text(&mut out, "general.architecture");
    out.extend(8_u32.to_le_bytes());
    text(&mut out, architecture);
    text(&mut out, tensor);
    out.extend(1_u32.to_le_bytes());
    out.extend(4_u64.to_le_bytes());
    out.extend(0_u32.to_le_bytes());
    out.extend(0_u64.to_le_bytes());
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend([0; 16]);
    out
}

#[test]
fn an_encoder_of_another_size_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let extras = folder.path().join("extras");
    std::fs::create_dir_all(extras.join("text_encoder_2")).unwrap();
    for part in ["vae", "text_encoder", "tokenizer", "tokenizer_2", "scheduler"] {
        std::os::unix::fs::symlink(fixtures().join("tiny_flux").join(part), extras.join(part)).unwrap();
    }
    let text = std::fs::read_to_string(fixtures().join("tiny_flux/text_encoder_2/config.json")).unwrap();
    let parts = PartPaths {
        extras: Some(extras.clone()),
        text_encoder: Some(flux_files().join("t5_scaled_fp8.safetensors")),
        vae: None,
    };
    // Of another inner width; of another outer width, which the transformer does not take; T5 XXL, whose config a file without one has.
    for (key, value, says) in [
        ("d_ff", 48, &["DenseReluDense", "[48, 24]", "[40, 24]"][..]),
        ("d_model", 32, &["gives 32 features, the transformer expects 24"]),
        ("", 0, &["gives 4096 features, the transformer expects 24"]),
    ] {
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config[key] = value.into();
        let file = extras.join("text_encoder_2/config.json");
        match key {
            "" => std::fs::remove_file(&file).unwrap(),
            _ => std::fs::write(&file, config.to_string()).unwrap(),
        }
        let error = check(&flux_files().join("scaled_fp8.safetensors"), &parts).unwrap_err();
        assert!(error.contains("t5_scaled_fp8.safetensors"), "{error}");
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn a_vae_is_given_as_a_file_or_a_folder() {
    let ae: PathBuf = flux_files().join("parts/ae.safetensors");
    let model = flux_files().join("scaled_fp8.safetensors");
    for vae in [
        ae.clone(),
        fixtures().join("tiny_flux/vae"),
        fixtures().join("tiny_flux"),
    ] {
        let parts = PartPaths {
            vae: Some(vae),
            ..tiny_extras()
        };
        check(&model, &parts).unwrap();
    }
    let mut loaded = load("scaled_fp8.safetensors", tiny_extras());
    let options = LoadOptions {
        parts: tiny_extras(),
        ..LoadOptions::cpu()
    };
    loaded.replace_codec(&ae, &options).unwrap();
    assert_eq!(loaded.codec_path(), Some(ae.as_path()));
    let clip = flux_files().join("parts/clip_l.safetensors");
    let error = loaded.replace_codec(&clip, &options).unwrap_err().to_string();
    assert!(error.contains("clip_l.safetensors is not a VAE"), "{error}");
}

#[test]
fn a_folder_may_hold_a_transformer_with_original_names() {
    let folder = tempfile::tempdir().unwrap();
    let transformer = folder.path().join("transformer");
    std::fs::create_dir(&transformer).unwrap();
    let config = fixtures().join("tiny_flux/transformer/config.json");
    std::fs::copy(config, transformer.join("config.json")).unwrap();
    std::fs::copy(
        flux_files().join("transformer.gguf"),
        transformer.join("flux1-dev.gguf"),
    )
    .unwrap();
    check(folder.path(), &tiny_extras()).unwrap();
}

/// `attn_masking`: zeros behind the end of each prompt, the same numbers before it.
#[test]
fn the_padding_of_prompts_becomes_zero() {
    let path = fixtures().join("tiny_flux");
    let prompts = ["a red circle", ""].map(Prompt::new);
    let context = |masks_padding: bool| {
        let options = LoadOptions {
            prompt_reading: PromptReading {
                masks_padding,
                ..PromptReading::default()
            },
            ..LoadOptions::cpu()
        };
        let encoders = load_text_encoders(&path, ArchName::Flux, &options).unwrap();
        let context = encoders.encode_prompts(&prompts).unwrap();
        context.get("context").unwrap().to_vec3::<f32>().unwrap()
    };
    let (masked, plain) = (context(true), context(false));
    let is_zero = |row: &Vec<f32>| row.iter().all(|x| *x == 0.0);
    let lengths = masked.iter().map(|rows| rows.iter().position(is_zero).unwrap());
    let lengths: Vec<usize> = lengths.collect();
    assert!(lengths[0] > 2 && lengths[1] == 1, "{lengths:?}");
    for ((masked, plain), length) in masked.iter().zip(&plain).zip(lengths) {
        assert_eq!(masked[..length], plain[..length]);
        assert!(masked[length..].iter().all(is_zero) && !plain.iter().any(is_zero));
    }
}

/// `apply_t5_attn_mask`: a prompt predicts the same in a batch with a longer one, and with less padding.
#[test]
fn the_padding_of_prompts_gets_no_attention() {
    let path = fixtures().join("tiny_flux");
    let options = LoadOptions {
        prompt_reading: PromptReading {
            masks_attention: true,
            ..PromptReading::default()
        },
        ..LoadOptions::cpu()
    };
    let mut masked = FluxModel::load(&FLUX, &path, &options).unwrap();
    let plain = FluxModel::load(&FLUX, &path, &LoadOptions::cpu()).unwrap();
    let latents = TorchGenerator::manual_seed(5).randn(16 * 16);
    let latents = Tensor::from_vec(latents, (1, 16, 4, 4), &Device::Cpu).unwrap();
    let predict = |model: &FluxModel, prompts: &[&str]| {
        let texts: Vec<Prompt> = prompts.iter().map(|text| Prompt::new(*text)).collect();
        let conditioning = model.encode_prompts(&texts).unwrap();
        let latents = Tensor::cat(&vec![&latents; texts.len()], 0).unwrap();
        let times = Tensor::full(500f32, texts.len(), &Device::Cpu).unwrap();
        model.predict(&[latents], &times, &conditioning).unwrap().remove(0)
    };
    let prompts = ["a red circle", ""];
    let both = predict(&masked, &prompts);
    let alone = prompts.map(|prompt| predict(&masked, &[prompt]));
    for (item, alone) in alone.iter().enumerate() {
        let in_batch = both.narrow(0, item, 1).unwrap();
        let difference = gap(&in_batch, alone) / largest(alone);
        assert!(difference < 1e-4, "{item}: {difference}");
    }
    let unmasked = predict(&plain, &[prompts[0]]);
    assert!(gap(&unmasked, &alone[0]) > 1e-4 * largest(&alone[0]));
    masked.set_max_sequence_length(40);
    let difference = gap(&predict(&masked, &[prompts[0]]), &alone[0]) / largest(&alone[0]);
    assert!(difference < 1e-4, "{difference}");
}
