//! Finding parts of models by their files.

use super::{ModelPart, ModelParts, PartFiles, PartPaths};
use crate::job::arch::ArchName;
use std::path::{Path, PathBuf};

/// A safetensors file with tensors of these names.
fn write(path: &Path, names: &[&str]) {
    let entries: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(at, name)| {
            format!(
                r#""{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{at},{}]}}"#,
                at + 1
            )
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let length = (header.len() as u64).to_le_bytes();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, [&length[..], header.as_bytes(), &vec![0; names.len()]].concat()).unwrap();
}

fn flux_parts(model: &Path, paths: &PartPaths) -> Result<ModelParts, String> {
    super::model_parts(ArchName::Flux, model, paths)
}

const TRANSFORMER: &str = "double_blocks.0.img_attn.qkv.weight";
const CLIP: &str = "text_model.encoder.layers.0.self_attn.q_proj.weight";
const T5: &str = "encoder.block.0.layer.0.SelfAttention.q.weight";
const PARTS: [ModelPart; 3] = [ModelPart::ClipL, ModelPart::T5, ModelPart::Vae];
const VAE: &str = "encoder.down.0.block.0.conv1.weight";

#[test]
fn parts_that_are_not_wanted_may_be_missing() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("flux1-dev.safetensors");
    let clip = format!("text_encoders.clip_l.transformer.{CLIP}");
    let present =
        |wanted: &[ModelPart]| super::present_parts(ArchName::Flux, &model, &PartPaths::default(), wanted).unwrap();
    write(&model, &[TRANSFORMER]);
    let found = present(&[ModelPart::ClipL]);
    assert_eq!(found.parts.get(ModelPart::ClipL), None);
    assert!(
        matches!(found.missing.as_slice(), [one] if one.contains("CLIP") && one.contains("`text_encoder`")),
        "{found:?}"
    );
    assert_eq!(present(&[]).missing, Vec::<String>::new());
    write(&model, &[TRANSFORMER, &clip]);
    let found = present(&[ModelPart::ClipL]);
    assert!(
        found.parts.get(ModelPart::ClipL).is_some() && found.missing.is_empty(),
        "{found:?}"
    );
}

#[test]
fn parts_are_found_by_their_tensors_and_missing_ones_are_named() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let model = at("models/flux1-dev.safetensors");
    write(&model, &[TRANSFORMER]);
    let none = flux_parts(&model, &PartPaths::default()).unwrap_err();
    for part in [
        "CLIP",
        "T5 text encoder",
        "VAE",
        "tokenizer of T5",
        "extras_name_or_path",
    ] {
        assert!(none.contains(part), "{none}");
    }
    let mut paths = PartPaths {
        extras: Some(at("extras")),
        ..PartPaths::default()
    };
    assert!(flux_parts(&model, &paths).unwrap_err().contains("no such file"));
    write(&at("extras/b.safetensors"), &[CLIP]);
    write(&at("extras/c.safetensors"), &[T5]);
    write(&at("extras/a.safetensors"), &[VAE]);
    write(&at("extras/d.safetensors"), &["other"]);
    std::fs::write(at("extras/spiece.model"), "x").unwrap();
    std::fs::write(at("extras/broken.safetensors"), "x").unwrap();
    let found = flux_parts(&model, &paths).unwrap();
    let named = |files: &PartFiles| files.path.file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!(
        PARTS.map(|part| named(found.get(part).unwrap())),
        ["b.safetensors", "c.safetensors", "a.safetensors"]
    );
    assert_eq!(
        (found.tokenizer(ModelPart::T5), &found.scheduler),
        (Some(at("extras").as_path()), &None)
    );
    // Two of one kind are ambiguous, unless one is given.
    write(&at("extras/t5_fp8.safetensors"), &["enc.blk.0.attn_q.weight"]);
    let two = flux_parts(&model, &paths).unwrap_err();
    assert!(
        two.contains("c.safetensors") && two.contains("te_name_or_path"),
        "{two}"
    );
    paths.text_encoder = Some(at("extras/t5_fp8.safetensors"));
    assert_eq!(
        named(flux_parts(&model, &paths).unwrap().get(ModelPart::T5).unwrap()),
        "t5_fp8.safetensors"
    );
    paths.text_encoder = Some(at("extras/a.safetensors"));
    let other = flux_parts(&model, &paths).unwrap_err();
    assert!(other.contains("is not a T5") && other.contains(VAE), "{other}");
}

#[test]
fn a_checkpoint_may_have_its_own_parts() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("flux1-dev-fp8.safetensors");
    let prefixed = |prefix: &str, name: &str| format!("{prefix}{name}");
    let names = [
        prefixed("model.diffusion_model.", TRANSFORMER),
        prefixed("text_encoders.clip_l.transformer.", CLIP),
        prefixed("text_encoders.t5xxl.transformer.", T5),
        prefixed("vae.", VAE),
    ];
    write(&model, &names.each_ref().map(String::as_str));
    let missing = flux_parts(&model, &PartPaths::default()).unwrap_err();
    assert!(
        !missing.contains("CLIP") && missing.contains("tokenizer of T5"),
        "{missing}"
    );
    let extras = root.path().join("extras");
    std::fs::create_dir_all(extras.join("tokenizer_2")).unwrap();
    std::fs::write(extras.join("tokenizer_2/tokenizer.json"), "{}").unwrap();
    let paths = PartPaths {
        extras: Some(extras),
        ..PartPaths::default()
    };
    let found = flux_parts(&model, &paths).unwrap();
    assert_eq!(
        PARTS.map(|part| found.get(part).unwrap().prefix),
        [
            "text_encoders.clip_l.transformer.",
            "text_encoders.t5xxl.transformer.",
            "vae."
        ]
    );
    assert!(PARTS.iter().all(|part| found.get(*part).unwrap().path == model));
}

#[test]
fn extras_of_another_family_are_refused_with_the_part_and_its_folder() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let model = at("flux1-dev.safetensors");
    write(&model, &[TRANSFORMER]);
    let config = |part: &str, json: &str| {
        write(&at(&format!("sd35/{part}/model.safetensors")), &["x"]);
        std::fs::write(at(&format!("sd35/{part}/config.json")), json).unwrap();
    };
    let clip = r#"{"model_type": "clip_text_model"}"#;
    config("text_encoder", clip);
    config("text_encoder_2", clip);
    config("vae", r#"{"scaling_factor": 1.5305}"#);
    std::fs::write(
        at("sd35/model_index.json"),
        r#"{"_class_name": "StableDiffusion3Pipeline"}"#,
    )
    .unwrap();
    let mut paths = PartPaths {
        extras: Some(at("sd35")),
        ..PartPaths::default()
    };
    let error = flux_parts(&model, &paths).unwrap_err();
    for text in [
        "sd35/text_encoder_2",
        "T5 text encoder",
        "clip_text_model",
        "StableDiffusion3Pipeline",
        "`model.extras_name_or_path`",
    ] {
        assert!(error.contains(text), "\"{text}\" is not in: {error}");
    }
    // With another T5, the VAE is still the wrong one.
    write(&at("t5.safetensors"), &[T5]);
    paths.text_encoder = Some(at("t5.safetensors"));
    let error = flux_parts(&model, &paths).unwrap_err();
    assert!(error.contains("sd35/vae") && error.contains("1.5305"), "{error}");
}

#[test]
fn a_folder_without_its_second_text_encoder_says_how_to_give_one() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    for part in ["transformer", "vae", "text_encoder"] {
        write(&at(&format!("{part}/model.safetensors")), &["x"]);
        std::fs::write(at(&format!("{part}/config.json")), "{}").unwrap();
    }
    std::fs::create_dir(at("tokenizer_2")).unwrap();
    std::fs::write(at("tokenizer_2/spiece.model"), "x").unwrap();
    let missing = flux_parts(root.path(), &PartPaths::default()).unwrap_err();
    assert!(
        missing.contains("without T5 text encoder (folder `text_encoder_2`")
            && missing.contains("`model.te_name_or_path`"),
        "{missing}"
    );
    write(&at("t5xxl_fp16.safetensors"), &[T5]);
    let paths = PartPaths {
        text_encoder: Some(at("t5xxl_fp16.safetensors")),
        ..PartPaths::default()
    };
    let found = flux_parts(root.path(), &paths).unwrap();
    assert_eq!(found.transformer.config, Some(at("transformer/config.json")));
    assert_eq!(found.get(ModelPart::T5).unwrap().config, None);
}

const CLIP_G: &str = "text_model.encoder.layers.12.self_attn.q_proj.weight";
const JOINT: &str = "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight";

fn sd3_parts(model: &Path, paths: &PartPaths) -> Result<ModelParts, String> {
    super::model_parts(ArchName::Sd3, model, paths)
}

fn file_name(files: Option<&PartFiles>) -> String {
    let name = files.and_then(|files| files.path.file_name()).unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[test]
fn stable_diffusion_3_takes_text_encoders_from_one_place_and_works_without_t5() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let model = at("models/sd3.5_medium.safetensors");
    write(&model, &[JOINT, &format!("first_stage_model.{VAE}")]);
    let none = sd3_parts(&model, &PartPaths::default()).unwrap_err();
    for text in [
        "Stable Diffusion 3.5 without CLIP-L text encoder (folder `text_encoder`",
        "without CLIP-G text encoder (folder `text_encoder_2`",
        "`model.te_name_or_path` to a folder with them",
    ] {
        assert!(none.contains(text), "{none}");
    }
    assert!(!none.contains("T5") && !none.contains("VAE"), "{none}");
    // Files side by side: CLIP-G has more layers than CLIP-L.
    write(&at("text/g.safetensors"), &[CLIP, CLIP_G]);
    write(&at("text/l.safetensors"), &[CLIP]);
    let mut paths = PartPaths {
        text_encoder: Some(at("text")),
        ..PartPaths::default()
    };
    let found = sd3_parts(&model, &paths).unwrap();
    assert_eq!(
        [ModelPart::ClipL, ModelPart::ClipG].map(|part| file_name(found.get(part))),
        ["l.safetensors", "g.safetensors"]
    );
    assert_eq!(found.get(ModelPart::Vae).unwrap().prefix, "first_stage_model.");
    assert!(found.get(ModelPart::T5).is_none() && found.tokenizer(ModelPart::ClipL).is_none());
    // With T5 its tokenizer is needed.
    write(&at("text/t5xxl_fp16.safetensors"), &[T5]);
    let without = sd3_parts(&model, &paths).unwrap_err();
    assert!(
        without.contains("without tokenizer of T5 (folder `tokenizer_3` with tokenizer.json or spiece.model)"),
        "{without}"
    );
    std::fs::write(at("text/spiece.model"), "x").unwrap();
    let found = sd3_parts(&model, &paths).unwrap();
    assert_eq!(file_name(found.get(ModelPart::T5)), "t5xxl_fp16.safetensors");
    assert_eq!(found.tokenizer(ModelPart::T5), Some(at("text").as_path()));
    // One file of text encoders, the others in the extras.
    paths.extras = Some(at("text"));
    paths.text_encoder = Some(at("other_t5.safetensors"));
    write(&at("other_t5.safetensors"), &["enc.blk.0.attn_q.weight"]);
    let found = sd3_parts(&model, &paths).unwrap();
    assert_eq!(
        [ModelPart::ClipL, ModelPart::T5].map(|part| file_name(found.get(part))),
        ["l.safetensors", "other_t5.safetensors"]
    );
    write(&at("ae.safetensors"), &[VAE]);
    paths.text_encoder = Some(at("ae.safetensors"));
    let wrong = sd3_parts(&model, &paths).unwrap_err();
    assert!(
        wrong.contains("ae.safetensors is not a text encoder of Stable Diffusion 3.5: it has") && wrong.contains(VAE),
        "{wrong}"
    );
}

#[test]
fn stable_diffusion_3_takes_text_encoders_from_folders() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let model = at("sd3.5_medium.safetensors");
    write(&model, &[JOINT, &format!("first_stage_model.{VAE}")]);
    let part = |folder: &str, config: &str| {
        write(&at(&format!("{folder}/model.safetensors")), &["x"]);
        std::fs::write(at(&format!("{folder}/config.json")), config).unwrap();
    };
    let clip = |layers: u32| format!(r#"{{"model_type": "clip_text_model", "num_hidden_layers": {layers}}}"#);
    part("sd35/text_encoder", &clip(12));
    part("sd35/text_encoder_2", &clip(32));
    part("sd35/text_encoder_3", r#"{"model_type": "t5"}"#);
    let spiece = at("sd35/tokenizer_3/spiece.model");
    std::fs::create_dir_all(spiece.parent().unwrap()).unwrap();
    std::fs::write(&spiece, "x").unwrap();
    let given = |text: PathBuf| PartPaths {
        text_encoder: Some(text),
        ..PartPaths::default()
    };
    let found = sd3_parts(&model, &given(at("sd35"))).unwrap();
    assert_eq!(found.get(ModelPart::T5).unwrap().path, at("sd35/text_encoder_3"));
    assert_eq!(found.tokenizer(ModelPart::T5), spiece.parent());
    // The list of parts of the extras leaves T5 out.
    let extras = PartPaths {
        extras: Some(at("sd35")),
        ..PartPaths::default()
    };
    assert!(sd3_parts(&model, &extras).unwrap().get(ModelPart::T5).is_some());
    std::fs::write(at("sd35/model_index.json"), r#"{"text_encoder_3": [null, null]}"#).unwrap();
    assert!(sd3_parts(&model, &extras).unwrap().get(ModelPart::T5).is_none());
    // A folder of one encoder, known by its config.
    part("alone/big_g", &clip(32));
    let found = sd3_parts(
        &model,
        &PartPaths {
            text_encoder: Some(at("alone/big_g")),
            ..extras.clone()
        },
    )
    .unwrap();
    assert_eq!(found.get(ModelPart::ClipG).unwrap().path, at("alone/big_g"));
    assert_eq!(found.get(ModelPart::ClipL).unwrap().path, at("sd35/text_encoder"));
    // Text encoders of FLUX.1, whose second one is T5.
    part("flux/text_encoder", &clip(12));
    part("flux/text_encoder_2", r#"{"model_type": "t5"}"#);
    let error = sd3_parts(&model, &given(at("flux"))).unwrap_err();
    assert!(
        error.contains("flux/text_encoder_2: this is not Stable Diffusion 3.5's CLIP-G")
            && error.contains("`model_type: t5`"),
        "{error}"
    );
    std::fs::create_dir(at("empty")).unwrap();
    let error = sd3_parts(&model, &given(at("empty"))).unwrap_err();
    assert!(
        error.contains("empty is not a text encoder of Stable Diffusion 3.5"),
        "{error}"
    );
}

#[test]
fn z_image_takes_a_language_model_and_its_tokenizer() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let model = at("z_image_turbo_bf16.safetensors");
    write(&model, &["cap_embedder.1.weight"]);
    let parts = |paths: &PartPaths| super::model_parts(ArchName::Zimage, &model, paths);
    let none = parts(&PartPaths::default()).unwrap_err();
    for text in [
        "Z-Image without Qwen3 text encoder (folder `text_encoder`, or a file such as qwen_3_4b.safetensors)",
        "VAE",
        "tokenizer of Qwen3 (folder `tokenizer` with tokenizer.json, or vocab.json and merges.txt)",
        "`model.extras_name_or_path` to a folder or repository of Z-Image",
    ] {
        assert!(none.contains(text), "{none}");
    }
    write(
        &at("qwen_3_4b.safetensors"),
        &["model.layers.0.self_attn.q_norm.weight"],
    );
    write(&at("ae.safetensors"), &[VAE]);
    let mut paths = PartPaths {
        text_encoder: Some(at("qwen_3_4b.safetensors")),
        vae: Some(at("ae.safetensors")),
        extras: None,
    };
    let without = parts(&paths).unwrap_err();
    assert!(without.contains("Z-Image without tokenizer of Qwen3"), "{without}");
    std::fs::create_dir_all(at("extras/tokenizer")).unwrap();
    for file in ["vocab.json", "merges.txt"] {
        std::fs::write(at("extras/tokenizer").join(file), "x").unwrap();
    }
    paths.extras = Some(at("extras"));
    let found = parts(&paths).unwrap();
    assert_eq!(file_name(found.get(ModelPart::Qwen3)), "qwen_3_4b.safetensors");
    assert_eq!(file_name(found.get(ModelPart::Vae)), "ae.safetensors");
    assert_eq!(
        found.tokenizer(ModelPart::Qwen3),
        Some(at("extras/tokenizer").as_path())
    );
    write(&at("llama.safetensors"), &["model.layers.0.self_attn.q_proj.weight"]);
    paths.text_encoder = Some(at("llama.safetensors"));
    let error = parts(&paths).unwrap_err();
    assert!(
        error.contains("llama.safetensors is not a Qwen3 text encoder"),
        "{error}"
    );
    // A family all of whose parts are in its own files.
    let error = super::model_parts(ArchName::Sd1, &model, &paths).unwrap_err();
    assert!(error.contains("`arch: sd1` has no parts from elsewhere"), "{error}");
    let error = super::model_part(ArchName::Flux, ModelPart::Qwen3, &model, &PartPaths::default()).unwrap_err();
    assert_eq!(error, "FLUX.1 has no Qwen3 text encoder");
}
