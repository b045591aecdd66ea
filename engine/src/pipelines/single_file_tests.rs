//! Images of Stable Diffusion 3.5 and Z-Image from single files are those of their folders, bit for bit. The files are made from the folders,
//! under the names that diffusers converts.

use super::{GenerateRequest, Pipeline};
use crate::families::sd3::Sd3Model;
use crate::families::zimage::{ZIMAGE, ZImageModel};
use crate::families::{self, LoadOptions, Model, SD3};
use crate::samplers::NoiseSource;
use crate::testing::single_files::{
    RawFile, Tensors, ldm_vae, original_tensors, prefixed, read_tensors, without_weights,
};
use crate::testing::{fixtures, sd35_without_t5, zimage_folder};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor};
use image::RgbImage;
use std::os::unix::fs::symlink;
use std::path::Path;

const COMFY: &str = "model.diffusion_model.";
/// The beginnings of the names of text encoders in ComfyUI's checkpoints, and their folders.
const TEXT: [(&str, &str); 3] = [
    ("text_encoder", "text_encoders.clip_l.transformer."),
    ("text_encoder_2", "text_encoders.clip_g.transformer."),
    ("text_encoder_3", "text_encoders.t5xxl.transformer."),
];

fn images(model: &dyn Model) -> Vec<RgbImage> {
    let request = GenerateRequest {
        prompts: vec!["a red cat".into()],
        negative: vec!["blue".into()],
        width: 32,
        height: 48,
        steps: 2,
        guidance_scale: 3.0,
        sampler: "flowmatch".into(),
        ..GenerateRequest::default()
    };
    let pipeline = Pipeline::new(model, false).unwrap();
    let generated = pipeline.text_to_image(&request, &mut NoiseSource::from_seeds(&[7]), &mut |_, _| true);
    generated.unwrap().unwrap()
}

fn options(parts: &PartPaths) -> LoadOptions {
    LoadOptions {
        parts: parts.clone(),
        ..LoadOptions::cpu()
    }
}

fn sd3(path: &Path, parts: &PartPaths) -> Sd3Model {
    families::check(path, ArchName::Sd3, parts).unwrap();
    let mut model = Sd3Model::load(&SD3, path, &options(parts)).unwrap();
    model.set_max_sequence_length(24);
    model
}

fn extras(folder: &Path) -> PartPaths {
    PartPaths {
        extras: Some(folder.to_path_buf()),
        ..PartPaths::default()
    }
}

fn file(path: &Path, parts: &[(&str, &Tensors)]) {
    let mut file = RawFile::default();
    for (prefix, tensors) in parts {
        file.add(&prefixed(prefix, tensors), DType::F32);
    }
    file.write(path);
}

#[test]
fn stable_diffusion_3_5_in_single_files_gives_the_images_of_its_folder() {
    let tiny = fixtures().join("tiny_sd35");
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let expected = images(&sd3(&tiny, &PartPaths::default()));
    let transformer = original_tensors("sd3", &read_tensors(&tiny.join("transformer")));
    let vae = ldm_vae(&read_tensors(&tiny.join("vae")), 4);
    let text = TEXT.map(|(part, prefix)| (prefix, read_tensors(&tiny.join(part))));
    let bare = without_weights(&tiny);

    // As Stability publishes it: transformer and VAE, with text encoders from elsewhere.
    let medium = at("sd3.5_medium.safetensors");
    file(&medium, &[(COMFY, &transformer), ("first_stage_model.", &vae)]);
    let from_extras = sd3(&medium, &extras(&tiny));
    assert!(from_extras.has_t5() && from_extras.codec_path() == Some(medium.as_path()));
    assert_eq!(images(&from_extras), expected);
    let given = PartPaths {
        text_encoder: Some(tiny.clone()),
        ..extras(bare.path())
    };
    assert_eq!(images(&sd3(&medium, &given)), expected);
    // T5 alone as a file, instead of another one of the extras.
    let t5 = at("t5xxl_fp32.safetensors");
    file(&t5, &[("", &text[2].1)]);
    let other = at("other");
    std::fs::create_dir_all(other.join("text_encoder_3")).unwrap();
    for part in [
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "tokenizer_3",
        "vae",
        "scheduler",
    ] {
        symlink(tiny.join(part), other.join(part)).unwrap();
    }
    symlink(
        tiny.join("text_encoder_3/config.json"),
        other.join("text_encoder_3/config.json"),
    )
    .unwrap();
    let halved: Tensors = text[2]
        .1
        .iter()
        .map(|(name, tensor)| (name.clone(), (tensor * 0.5).unwrap()))
        .collect();
    file(&other.join("text_encoder_3/model.safetensors"), &[("", &halved)]);
    assert_ne!(images(&sd3(&medium, &extras(&other))), expected);
    let given = PartPaths {
        text_encoder: Some(t5),
        ..extras(&other)
    };
    assert_eq!(images(&sd3(&medium, &given)), expected);

    // As ComfyUI publishes it: everything in one file, besides tokenizers and the tiny sizes.
    let whole = at("sd3.5_medium_incl_clips_t5xxl.safetensors");
    let [(l, clip_l), (g, clip_g), (t, t5)] = &text;
    file(
        &whole,
        &[
            (COMFY, &transformer),
            ("first_stage_model.", &vae),
            (l, clip_l),
            (g, clip_g),
            (t, t5),
        ],
    );
    assert_eq!(images(&sd3(&whole, &extras(bare.path()))), expected);

    // With the names of diffusers, and a VAE from elsewhere.
    let diffusers = tiny.join("transformer/diffusion_pytorch_model.safetensors");
    assert_eq!(images(&sd3(&diffusers, &extras(&tiny))), expected);
    let ae = at("ae.safetensors");
    file(&ae, &[("", &vae)]);
    let given = PartPaths {
        vae: Some(ae.clone()),
        text_encoder: Some(tiny.clone()),
        ..extras(bare.path())
    };
    assert_eq!(images(&sd3(&diffusers, &given)), expected);
    let mut replaced = sd3(&diffusers, &extras(&other));
    replaced.replace_codec(&ae, &options(&extras(bare.path()))).unwrap();
    assert_eq!(replaced.codec_path(), Some(ae.as_path()));

    // Without T5 its tokens are zeros.
    let without = sd35_without_t5();
    let expected = images(&sd3(without.path(), &PartPaths::default()));
    let from_file = sd3(&medium, &extras(without.path()));
    assert!(!from_file.has_t5());
    assert_eq!(images(&from_file), expected);
}

/// Stability's file of CLIP-L has no projection: its pooled text is not projected.
#[test]
fn clip_l_without_a_projection_has_the_identity() {
    let tiny = fixtures().join("tiny_sd35");
    let folder = tempfile::tempdir().unwrap();
    let mut clip = read_tensors(&tiny.join("text_encoder"));
    let projection = "text_projection.weight";
    let width = clip[projection].dim(0).unwrap();
    let identity = Tensor::eye(width, DType::F32, &Device::Cpu).unwrap();
    clip.insert(projection.to_owned(), identity);
    let reference = folder.path().join("reference");
    std::fs::create_dir_all(reference.join("text_encoder")).unwrap();
    for part in std::fs::read_dir(&tiny).unwrap() {
        let name = part.unwrap().file_name();
        if name != "text_encoder" {
            symlink(tiny.join(&name), reference.join(&name)).unwrap();
        }
    }
    symlink(
        tiny.join("text_encoder/config.json"),
        reference.join("text_encoder/config.json"),
    )
    .unwrap();
    file(&reference.join("text_encoder/model.safetensors"), &[("", &clip)]);
    let expected = images(&sd3(&reference, &PartPaths::default()));
    assert_ne!(images(&sd3(&tiny, &PartPaths::default())), expected);
    clip.remove(projection);
    let clip_l = folder.path().join("clip_l.safetensors");
    file(&clip_l, &[("", &clip)]);
    let given = PartPaths {
        text_encoder: Some(clip_l),
        ..PartPaths::default()
    };
    assert_eq!(images(&sd3(&reference, &given)), expected);
}

#[test]
fn large_in_a_single_file_gives_the_images_of_its_folder() {
    let large = crate::testing::sd35_large_folder();
    let expected = images(&sd3(large.path(), &PartPaths::default()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sd3.5_large.safetensors");
    let transformer = original_tensors("sd3", &read_tensors(&large.path().join("transformer")));
    file(&path, &[("", &transformer)]);
    let tiny = fixtures().join("tiny_sd35");
    assert_eq!(images(&sd3(&path, &extras(&tiny))), expected);
}

fn zimage(path: &Path, parts: &PartPaths) -> ZImageModel {
    families::check(path, ArchName::Zimage, parts).unwrap();
    ZImageModel::load(&ZIMAGE, path, &options(parts)).unwrap()
}

#[test]
fn z_image_in_single_files_gives_the_images_of_its_folder() {
    let model = zimage_folder(false);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let expected = images(&zimage(model.path(), &PartPaths::default()));
    let ours = read_tensors(&model.path().join("transformer"));
    let transformer = original_tensors("zimage", &ours);
    let vae = ldm_vae(&read_tensors(&model.path().join("vae")), 4);
    let text = read_tensors(&model.path().join("text_encoder"));
    let bare = without_weights(model.path());

    // As ComfyUI publishes it: three files, with a tokenizer and the tiny sizes from elsewhere.
    let turbo = at("z_image_turbo_bf16.safetensors");
    file(&turbo, &[("", &transformer)]);
    let (qwen, ae) = (at("qwen_3_4b.safetensors"), at("ae.safetensors"));
    let has_model = text.keys().any(|name| name.starts_with("model."));
    file(&qwen, &[(if has_model { "" } else { "model." }, &text)]);
    file(&ae, &[("", &vae)]);
    let given = PartPaths {
        text_encoder: Some(qwen.clone()),
        vae: Some(ae.clone()),
        ..extras(bare.path())
    };
    let three = zimage(&turbo, &given);
    assert_eq!(three.codec_path(), Some(ae.as_path()));
    assert_eq!(images(&three), expected);
    // Files side by side.
    for part in ["tokenizer", "scheduler"] {
        symlink(model.path().join(part), at(part)).unwrap();
    }
    for part in ["text_encoder", "vae"] {
        std::fs::create_dir(at(part)).unwrap();
        symlink(
            model.path().join(part).join("config.json"),
            at(part).join("config.json"),
        )
        .unwrap();
    }
    assert_eq!(images(&zimage(&turbo, &extras(folder.path()))), expected);
    // The text encoder's folder, and that of the model.
    for text_encoder in [model.path().join("text_encoder"), model.path().to_path_buf()] {
        let given = PartPaths {
            text_encoder: Some(text_encoder),
            vae: Some(model.path().join("vae")),
            ..extras(bare.path())
        };
        assert_eq!(images(&zimage(&turbo, &given)), expected);
    }

    // Everything in one file, with ComfyUI's prefixes.
    let whole = at("whole.safetensors");
    let qwen = "text_encoders.qwen3_4b.transformer.";
    file(&whole, &[(COMFY, &transformer), ("vae.", &vae), (qwen, &text)]);
    assert_eq!(images(&zimage(&whole, &extras(bare.path()))), expected);
    // With the names of diffusers.
    let diffusers = at("diffusers.safetensors");
    file(&diffusers, &[("", &ours)]);
    assert_eq!(images(&zimage(&diffusers, &extras(model.path()))), expected);
}
