//! Helpers for the tests of several modules.

#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "helpers of the engine's tests, of which these tests use some"
)]
#[path = "../../../engine/src/testing/mod.rs"]
mod engine;

use crate::adapters::safetensors_bytes;
use crate::weights::Index;
use aitk_common::attempt::AttemptSpec;
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::job::JobSpec;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{DType, Device, Tensor};
pub(crate) use engine::*;
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
