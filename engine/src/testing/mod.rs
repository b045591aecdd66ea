//! Helpers for the tests of several modules, of this crate and of the processes (which includes this file).

pub(crate) mod byte_tokenizer;
pub(crate) mod formula_weights;
#[path = "../../../kernels/src/testing.rs"]
mod kernels;
pub(crate) mod recipes;
pub(crate) mod single_files;

use crate::adapters::safetensors_bytes;
use crate::families::stable_diffusion::{SdModel, Variant};
use crate::families::{LoadOptions, Model, Part};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{Inventory, ModelFileKind, identify};
use candle_core::{Device, Tensor};
pub(crate) use kernels::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Whether tests that are a longer form of a short one run in full.
pub(crate) fn runs_all_cases() -> bool {
    CaseShare::of_environment() == CaseShare::All
}

/// The tiny Stable Diffusion model with random weights (`tests/reference/tiny_sd.py`).
pub(crate) fn tiny_sd() -> SdModel {
    tiny(&crate::families::sd1::VARIANT, "tiny_sd")
}

/// Loads a Stable Diffusion model of the family that its files show, with the checks of a job's model.
pub(crate) fn load_sd(path: impl AsRef<Path>, options: &LoadOptions) -> crate::error::Result<SdModel> {
    let path = path.as_ref();
    let (arch, variant) = match identify(&Inventory::open(path)) {
        ModelFileKind::Model { family, .. } if family.arch == Some(ArchName::Sd2) => {
            (ArchName::Sd2, &crate::families::sd2::VARIANT)
        }
        ModelFileKind::Model { family, .. } if family.arch == Some(ArchName::Sdxl) => {
            (ArchName::Sdxl, &crate::families::sdxl::VARIANT)
        }
        _ => (ArchName::Sd1, &crate::families::sd1::VARIANT),
    };
    let shapes_only = LoadOptions {
        loaded: crate::families::LoadedParts::Nothing,
        ..options.clone()
    };
    crate::families::load(path, arch, &shapes_only)?;
    SdModel::load(variant, path, options)
}

/// The U-Net of a model, for adapters.
pub(crate) fn unet_part(model: &mut SdModel) -> Part<'_> {
    model.parts().pop().unwrap()
}

/// The tiny model of a fixture folder.
pub(crate) fn tiny(variant: &'static Variant, folder: &str) -> SdModel {
    SdModel::load(variant, fixtures().join(folder), &LoadOptions::cpu()).unwrap()
}

/// FLUX.1 in single files (`tests/reference/make_flux_files.py`).
pub(crate) fn flux_files() -> PathBuf {
    fixtures().join("flux_files")
}

/// Copies a folder with all that is in it.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// tiny_flux with the files of tiny_flux_schnell.
pub(crate) fn schnell_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (source, parts) in [
        (
            "tiny_flux",
            &["vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"][..],
        ),
        ("tiny_flux_schnell", &["transformer", "scheduler"][..]),
    ] {
        for part in parts {
            std::os::unix::fs::symlink(fixtures().join(source).join(part), folder.path().join(part)).unwrap();
        }
    }
    let index = fixtures().join("tiny_flux/model_index.json");
    std::fs::copy(index, folder.path().join("model_index.json")).unwrap();
    folder
}

/// tiny_sd35 with the transformer and the scheduler of tiny_sd35_large.
pub(crate) fn sd35_large_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for part in std::fs::read_dir(fixtures().join("tiny_sd35")).unwrap() {
        let name = part.unwrap().file_name();
        let own = fixtures().join("tiny_sd35_large").join(&name);
        let source = match own.exists() {
            true => own,
            false => fixtures().join("tiny_sd35").join(&name),
        };
        std::os::unix::fs::symlink(source, folder.path().join(name)).unwrap();
    }
    folder
}

/// tiny_sd35 without its third text encoder.
pub(crate) fn sd35_without_t5() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for part in std::fs::read_dir(fixtures().join("tiny_sd35")).unwrap() {
        let name = part.unwrap().file_name();
        if !name.to_string_lossy().ends_with("_3") {
            std::os::unix::fs::symlink(fixtures().join("tiny_sd35").join(&name), folder.path().join(&name)).unwrap();
        }
    }
    folder
}

/// tiny_zimage with the VAE of tiny_flux; for the base model with the files of tiny_zimage_base, which lacks the embedding of the
/// timestep.
pub(crate) fn zimage_folder(is_base: bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (turbo, base) = (fixtures().join("tiny_zimage"), fixtures().join("tiny_zimage_base"));
    let link = |source: &Path, part: &str| {
        std::os::unix::fs::symlink(source.join(part), folder.path().join(part)).unwrap();
    };
    link(&fixtures().join("tiny_flux"), "vae");
    for part in ["model_index.json", "text_encoder", "tokenizer"] {
        link(&turbo, part);
    }
    link(if is_base { &base } else { &turbo }, "scheduler");
    if !is_base {
        link(&turbo, "transformer");
        return folder;
    }
    std::fs::create_dir(folder.path().join("transformer")).unwrap();
    link(&turbo, "transformer/diffusion_pytorch_model-00001-of-00002.safetensors");
    for file in [
        "config.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
    ] {
        link(&base, &format!("transformer/{file}"));
    }
    folder
}

/// The tensors of tiny_chroma's transformer: formulas of their names, as in `tests/reference/tiny_chroma.py`.
pub(crate) fn chroma_tensors() -> BTreeMap<String, Tensor> {
    let shapes = std::fs::read(fixtures().join("tiny_chroma/transformer/tensors.json")).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_slice(&shapes).unwrap();
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let (scale, offset) = match shape.as_slice() {
            [_] if name.contains("norm") => (0.3, 1.0),
            [_] => (0.1, 0.0),
            _ => ((3.0 / *shape.last().unwrap() as f64).sqrt() as f32, 0.0),
        };
        let numbers = formula(&name, shape.iter().product(), scale);
        let numbers: Vec<f32> = numbers.into_iter().map(|number| number + offset).collect();
        (name, Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap())
    };
    shapes.into_iter().map(tensor).collect()
}

/// tiny_chroma with the second text encoder and the VAE of tiny_flux.
pub(crate) fn chroma_folder() -> tempfile::TempDir {
    let (folder, tiny) = (tempfile::tempdir().unwrap(), fixtures().join("tiny_chroma"));
    let link = |source: PathBuf, to: &str| std::os::unix::fs::symlink(source, folder.path().join(to)).unwrap();
    let flux = fixtures().join("tiny_flux");
    for (from, to) in [
        ("vae", "vae"),
        ("text_encoder_2", "text_encoder"),
        ("tokenizer_2", "tokenizer"),
    ] {
        link(flux.join(from), to);
    }
    link(tiny.join("model_index.json"), "model_index.json");
    link(tiny.join("scheduler"), "scheduler");
    std::fs::create_dir(folder.path().join("transformer")).unwrap();
    link(tiny.join("transformer/config.json"), "transformer/config.json");
    let weights = safetensors_bytes(&chroma_tensors(), &BTreeMap::new()).unwrap();
    let file = folder.path().join("transformer/diffusion_pytorch_model.safetensors");
    std::fs::write(file, weights).unwrap();
    folder
}

/// Makes a diffusers folder from files of `tests/fixtures/prequantised`: a text encoder, and a U-Net with the name that
/// its file gets in the folder.
pub(crate) fn quantised_folder(text_encoder: &str, unet: (&str, &str)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, prequantised) = (fixtures().join("tiny_sd"), fixtures().join("prequantised"));
    let copy = |from: PathBuf, to: &str| {
        let to = folder.path().join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(&from, &to).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    };
    for file in [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ] {
        copy(tiny.join(file), file);
    }
    for component in ["text_encoder", "unet"] {
        copy(
            prequantised.join(format!("configs/{component}/config.json")),
            &format!("{component}/config.json"),
        );
    }
    copy(prequantised.join(text_encoder), "text_encoder/model.safetensors");
    copy(prequantised.join(unet.0), &format!("unet/{}", unet.1));
    folder
}

/// A model folder that has only these files and folders of another one, as links.
pub(crate) fn parts_of(model: &Path, names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let source = model.join(name).canonicalize().unwrap();
        std::os::unix::fs::symlink(source, folder.path().join(name)).unwrap();
    }
    folder
}

/// The lines of a file in `models` of the fixtures, which is compressed if its name ends with `.gz`.
pub(crate) fn names_of_tensors(file: &str) -> String {
    let bytes = std::fs::read(fixtures().join("models").join(file)).unwrap();
    let mut text = String::new();
    match file.ends_with(".gz") {
        true => std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(bytes.as_slice()), &mut text).map(drop),
        false => std::io::Read::read_to_string(&mut bytes.as_slice(), &mut text).map(drop),
    }
    .unwrap();
    text
}
