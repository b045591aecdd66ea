//! Whole jobs of Z-Image on the tiny model: a LoRA that resumes exactly, with samples while training, and a full fine-tune.

use super::tests::{logs, losses, run_spec, spec, stop_at};
use super::transformer_test_runs::{complete, flow_trainer, tensors};
use crate::adapters::AdapterFile;
use crate::families::saved_step;
use crate::testing::{gap, zimage_folder};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::save::SaveFormat;
use std::path::Path;

fn zimage(root: &Path, model: &Path, steps: u64) -> TrainerProcess {
    flow_trainer(root, ArchName::Zimage, model, steps)
}

#[test]
fn a_lora_resumes_exactly_and_has_the_names_of_ai_toolkit() {
    let model = zimage_folder(false);
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let with_samples = |root: &Path| {
        let mut process = zimage(root, model.path(), 6);
        process.train.disable_sampling = false;
        process.sample.sampler = SamplerName::UniPc;
        process.sample.samples = vec![SampleItem {
            prompt: "a red circle".into(),
            ..SampleItem::default()
        }];
        (process.sample.width, process.sample.height) = (32, 32);
        process.sample.sample_steps = 2;
        process
    };
    let events = complete(with_samples(whole.path()));
    let expected = losses(&events);
    assert!(expected.iter().all(|loss| loss.is_finite()) && expected.len() == 6);
    let samples = events
        .iter()
        .filter(|event| matches!(event, ChildEvent::Artifact { kind, .. } if kind == "sample"));
    // Before the first step, and at the end.
    assert_eq!(samples.count(), 2);
    let interrupted = spec(with_samples(parts.path()));
    let (outcome, first) = stop_at(&interrupted, 3);
    assert_eq!(outcome, Outcome::stopped());
    let (outcome, second) = run_spec(&interrupted);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
    assert_eq!([losses(&first), losses(&second)].concat(), expected);
    let file = |root: &Path| root.join("out/tiny/tiny.safetensors");
    let (ours, resumed) = (tensors(&file(whole.path())), tensors(&file(parts.path())));
    for (name, tensor) in &ours {
        assert_eq!(gap(tensor, &resumed[name]), 0.0, "{name}");
    }
    // 2 blocks of 8 layers; those of the refiners get none.
    assert_eq!(ours.len(), 2 * 2 * 8);
    for name in [
        "diffusion_model.layers.0.attention.to_q.lora_A.weight",
        "diffusion_model.layers.1.attention.to_out.0.lora_B.weight",
        "diffusion_model.layers.1.adaLN_modulation.0.lora_A.weight",
    ] {
        assert!(ours.contains_key(name), "{name} in {:?}", ours.keys());
    }
    let metadata = AdapterFile::open(&file(whole.path())).unwrap().metadata;
    assert_eq!(metadata["ss_base_model_version"], "zimage");
}

#[test]
fn a_full_fine_tune_is_saved_as_a_transformer() {
    let model = zimage_folder(false);
    let dir = tempfile::tempdir().unwrap();
    let mut process = zimage(dir.path(), model.path(), 2);
    process.network = None;
    process.save.save_format = SaveFormat::Diffusers;
    process.train.lr = 1e-3;
    complete(process);
    let save = dir.path().join("out/tiny/tiny");
    assert_eq!(saved_step(&save).unwrap(), Some(2));
    let base = tensors(&model.path().join("transformer"));
    let saved = tensors(&save.join("transformer"));
    assert!(saved.keys().eq(base.keys()));
    for (name, tensor) in &saved {
        assert!(gap(tensor, &base[name]) > 0.0, "{name} did not change");
    }
}
