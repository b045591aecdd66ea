//! Runs and compares trainings of families with a transformer, for tests.

use super::tests::{logs, run_spec, spec, trainer};
use crate::testing::gap;
use crate::weights::Index;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sampler::SamplerName;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// A LoRA training of a family, by flow matching.
pub(super) fn flow_trainer(root: &Path, arch: ArchName, model: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.model.arch = Arch::from(arch);
    process.model.name_or_path = model.display().to_string();
    process.train.noise_scheduler = SamplerName::FlowMatch;
    process
}

/// Runs a job to its end.
pub(super) fn complete(process: TrainerProcess) -> Vec<ChildEvent> {
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    events
}

/// The tensors of a file or folder, in float32.
pub(super) fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let index = Index::open(path).unwrap();
    let names: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
    let read = |name: &String| index.read(name, DType::F32, &Device::Cpu).unwrap();
    names.iter().map(|name| (name.clone(), read(name))).collect()
}

/// Both have the same tensors, bit for bit.
pub(super) fn equal(ours: &Path, theirs: &Path) {
    let (ours, theirs) = (tensors(ours), tensors(theirs));
    assert!(ours.keys().eq(theirs.keys()));
    for (name, tensor) in &ours {
        assert_eq!(gap(tensor, &theirs[name]), 0.0, "{name}");
    }
}
