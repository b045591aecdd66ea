//! Helpers for the tests of several modules.

#[path = "../../kernels/src/testing.rs"]
mod kernels;
pub(crate) mod single_files;

use crate::adapters::safetensors_bytes;
use crate::families::stable_diffusion::{SdModel, Variant};
use crate::families::{LoadOptions, Model, Part};
use crate::weights::Index;
use aitk_common::attempt::AttemptSpec;
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::job::JobSpec;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{Inventory, ModelFileKind, identify};
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{DType, Device, Tensor};
pub(crate) use kernels::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Whether a long test, for example one that trains until its effect is seen, is left out: with `AITK_CASES`, which `.ci/run` sets, it runs.
pub(crate) fn skips_long_tests() -> bool {
    let skips_long_tests = CaseShare::of_environment() == CaseShare::Eighth;
    if skips_long_tests {
        println!("left out: AITK_CASES=half runs this test");
    }
    skips_long_tests
}

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

/// An attempt of `job` on the CPU with seed 7. Paths are those of its config.
pub(crate) fn attempt(job: &JobSpec, config_text: &str) -> AttemptSpec {
    AttemptSpec {
        job_id: serde_json::from_value(json!("00000000-0000-7000-8000-000000000001")).unwrap(),
        attempt_id: serde_json::from_value(json!("00000000-0000-7000-8000-000000000002")).unwrap(),
        epoch: serde_json::from_value(json!(1)).unwrap(),
        job: serde_json::to_value(job).unwrap(),
        config_text: config_text.into(),
        config_format: "yaml".into(),
        inputs: Default::default(),
        output_root: None,
        resume_from: None,
        device: DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        },
        profile: MemoryProfile::CpuOnly,
        seed: 7,
        generated: Vec::new(),
        derived: Default::default(),
        require_sandbox: false,
        file_size_limit: None,
        memory_limit: None,
        device_memory: None,
        extension: None,
    }
}

/// The attempt with `root` as its output folder. Every input of the job is used in place.
pub(crate) fn in_own_folder(mut attempt: AttemptSpec, root: &Path) -> AttemptSpec {
    let job: JobSpec = serde_json::from_value(attempt.job.clone()).unwrap();
    for input in job.inputs() {
        let in_place = PathBuf::from(&input.config_path);
        attempt.inputs.entry(input.config_path).or_insert(in_place);
    }
    attempt.output_root = Some(root.to_owned());
    attempt
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

/// A change of a weight by its name and its number among the weights of its folder.
pub(crate) type Change = dyn Fn(&str, usize, &Tensor) -> Tensor;

/// A copy of a model folder with changed weights in these component folders. Files of other components are links.
pub(crate) fn tuned(model: &Path, components: &[&str], change: &Change) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let name = entry.unwrap().file_name();
        let source = model.join(&name).canonicalize().unwrap();
        if !components.contains(&name.to_str().unwrap()) {
            std::os::unix::fs::symlink(source, folder.path().join(name)).unwrap();
            continue;
        }
        let target = folder.path().join(&name);
        std::fs::create_dir(&target).unwrap();
        let is_target = |name: &str| {
            let is_text = target.to_str().unwrap().contains("text_encoder");
            !is_text || name.contains("self_attn.") || name.contains("mlp.")
        };
        let index = Index::open(&source).unwrap();
        let weights = index
            .tensors()
            .filter(|(name, dims)| name.ends_with(".weight") && dims.len() > 1);
        let numbers: BTreeMap<String, usize> = weights.map(|(name, _)| name.to_owned()).zip(0..).collect();
        for file in std::fs::read_dir(&source).unwrap() {
            let file = file.unwrap().path();
            let copy = target.join(file.file_name().unwrap());
            if file.extension().is_none_or(|extension| extension != "safetensors") {
                std::fs::copy(&file, copy).unwrap();
                continue;
            }
            let mut tensors: BTreeMap<_, _> = candle_core::safetensors::load(&file, &Device::Cpu)
                .unwrap()
                .into_iter()
                .collect();
            for (name, tensor) in &mut tensors {
                if let Some(number) = numbers.get(name).filter(|_| is_target(name)) {
                    *tensor = change(name, *number, &tensor.to_dtype(DType::F32).unwrap());
                }
            }
            std::fs::write(copy, safetensors_bytes(&tensors, &BTreeMap::new()).unwrap()).unwrap();
        }
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
