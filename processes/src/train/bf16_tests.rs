//! Full fine-tunes of FLUX.1 whose weights are in bfloat16, rounded stochastically.

use super::tests::{logs, losses, run_spec, spec, stop_at, trainer};
use crate::testing::{fixtures, runs_all_cases, sampled_cases};
use crate::weights::Index;
use aitk_common::attempt::{AttemptSpec, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::dtype::DType;
use aitk_common::job::optimizer::OptimizerName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::save::SaveFormat;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// A full fine-tune of the single blocks.
fn full(root: &Path, dtype: DType, optimizer: OptimizerName, lr: f64, steps: u64) -> AttemptSpec {
    let mut process: TrainerProcess = trainer(root, steps);
    process.model.arch = Arch::from(ArchName::Flux);
    process.model.name_or_path = fixtures().join("tiny_flux").display().to_string();
    process.model.only_if_contains = Some(aitk_common::job::values::OneOrMany(vec![
        "transformer.single_transformer_blocks.".into(),
    ]));
    process.network = None;
    process.save.save_format = SaveFormat::Diffusers;
    process.train.noise_scheduler = SamplerName::FlowMatch;
    process.train.dtype = dtype;
    process.train.optimizer = optimizer;
    process.train.lr = lr;
    let mut spec = spec(process);
    // A CPU computes in float32 except in portable mode.
    spec.device = DeviceRef::PORTABLE_CPU;
    spec
}

fn complete(spec: &AttemptSpec) -> Vec<f64> {
    let (outcome, events) = run_spec(spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

fn transformer(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let index = Index::open(folder.join("transformer")).unwrap();
    let names: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
    let read = |name: &String| -> Tensor { index.read(name, candle_core::DType::F32, &Device::Cpu).unwrap() };
    let numbers = |name: &String| read(name).flatten_all().unwrap().to_vec1().unwrap();
    names.iter().map(|name| (name.clone(), numbers(name))).collect()
}

fn saved(root: &Path) -> BTreeMap<String, Vec<f32>> {
    transformer(&root.join("out/tiny/tiny"))
}

#[test]
fn a_run_in_bfloat16_resumes_exactly_and_has_losses_like_those_of_float32() {
    for (optimizer, profile) in sampled_cases(vec![
        (OptimizerName::AdamW8Bit, MemoryProfile::CpuOnly),
        (OptimizerName::Adafactor, MemoryProfile::Extreme),
    ]) {
        let steps = if runs_all_cases() { 8 } else { 3 };
        let [whole, parts, float32] = [0; 3].map(|_| tempfile::tempdir().unwrap());
        let run = |root: &Path, dtype: DType, steps: u64| {
            let mut spec = full(root, dtype, optimizer, 1e-3, steps);
            spec.profile = profile;
            spec
        };
        let expected = complete(&run(whole.path(), DType::BF16, steps));
        let interrupted = run(parts.path(), DType::BF16, steps);
        let (outcome, first) = stop_at(&interrupted, 2);
        assert_eq!(outcome, Outcome::stopped());
        let second = complete(&interrupted);
        assert_eq!([losses(&first), second].concat(), expected, "{optimizer}");
        let weights = saved(whole.path());
        assert!(weights == saved(parts.path()));
        for (name, numbers) in weights
            .iter()
            .filter(|(name, _)| name.starts_with("single_transformer_blocks."))
        {
            assert!(numbers.iter().all(|x| x.to_bits() & 0xFFFF == 0), "{name}");
        }
        let reference = complete(&run(float32.path(), DType::F32, steps));
        for (found, expected) in expected.iter().zip(&reference) {
            assert!(
                (found / expected - 1.0).abs() < 0.03,
                "{optimizer}: a loss of {found}, not {expected}"
            );
        }
    }
}

/// With updates far below the distance between two numbers of bfloat16, the weights move as in float32 on average.
#[test]
fn small_updates_are_not_lost() {
    let base = transformer(&fixtures().join("tiny_flux"));
    for optimizer in sampled_cases(vec![
        OptimizerName::AdamW8Bit,
        OptimizerName::AdamW,
        OptimizerName::Lion,
        OptimizerName::Adafactor,
        OptimizerName::Adagrad,
    ]) {
        let [bf16, float32] = [DType::BF16, DType::F32].map(|dtype| {
            let dir = tempfile::tempdir().unwrap();
            let mut spec = full(dir.path(), dtype, optimizer, 2e-5, 3);
            if optimizer == OptimizerName::Adagrad {
                spec.profile = MemoryProfile::Extreme;
            }
            complete(&spec);
            saved(dir.path())
        });
        let (mut product, mut square, mut unmoved, mut count) = (0.0, 0.0, 0, 0);
        for (name, expected) in float32
            .iter()
            .filter(|(name, _)| name.starts_with("single_transformer_blocks."))
        {
            for ((expected, found), start) in expected.iter().zip(&bf16[name]).zip(&base[name]) {
                // Weights of the fixture are not all in bfloat16.
                let rounded = half::bf16::from_f32(*start).to_f32();
                let (expected, found) = (f64::from(expected - start), f64::from(found - rounded));
                product += expected * found;
                square += expected * expected;
                count += 1;
                unmoved += u64::from(found == 0.0);
            }
        }
        let share = product / square;
        assert!(
            (share - 1.0).abs() < 0.2,
            "{optimizer}: {share} of the movement of float32"
        );
        assert!(
            unmoved * 4 > count,
            "{optimizer}: {unmoved} of {count} weights did not move"
        );
    }
}
