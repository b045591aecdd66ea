//! Whole runs of full fine-tunes on the tiny model.

use super::super::save_files::files_in_save;
use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use crate::families::saved_step;
use crate::families::{LoadOptions, Model};
use crate::testing::load_sd;
use crate::testing::{fixtures, gap, sampled_cases};
use crate::weights::Index;
use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::values::OneOrMany;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) fn full(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.network = None;
    process.train.lr = 1e-4;
    process
}

/// Tensors of a U-Net in a folder, or of a file.
fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let index = Index::open(path).unwrap();
    let names: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
    let read = |name: &String| index.read(name, DType::F32, &Device::Cpu).unwrap();
    names.iter().map(|name| (name.clone(), read(name))).collect()
}

fn artifacts(events: &[ChildEvent], expected_kind: &str) -> Vec<String> {
    let name = |e: &ChildEvent| match e {
        ChildEvent::Artifact { name, kind, .. } if kind == expected_kind => Some(name.clone()),
        ChildEvent::ArtifactRemoved { name } if expected_kind == "removed" => Some(name.clone()),
        _ => None,
    };
    events.iter().filter_map(name).collect()
}

#[test]
fn a_full_finetune_is_saved_as_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = full(dir.path(), 6);
    process.train.train_text_encoder = true;
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("a full fine-tune of"), "{}", logs(&events));
    assert_eq!(
        artifacts(&events, "model"),
        ["tiny/tiny_000000004.safetensors", "tiny/tiny.safetensors"]
    );
    assert_eq!(artifacts(&events, "lora"), [""; 0]);
    // Every weight of U-Net and text encoder changed, none of the VAE's.
    let path = dir.path().join("out/tiny/tiny.safetensors");
    assert_eq!(saved_step(&path).unwrap(), Some(6));
    let trained = tensors(&path);
    let base = tensors(&fixtures().join("tiny_sd/vae"));
    let frozen = |name: &str| trained[&format!("first_stage_model.{name}")].clone();
    assert_eq!(
        gap(&frozen("encoder.conv_in.weight"), &base["encoder.conv_in.weight"]),
        0.0
    );
    for (part, old) in [
        ("unet", "model.diffusion_model.input_blocks.0.0.weight"),
        (
            "text_encoder",
            "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight",
        ),
    ] {
        let base = tensors(&fixtures().join("tiny_sd").join(part));
        let same = |t: &Tensor| t.dims() == trained[old].dims() && gap(t, &trained[old]) == 0.0;
        assert!(!base.values().any(same), "{old} did not change");
    }
}

#[test]
fn resuming_and_memory_profiles_do_not_change_the_bits() {
    let uninterrupted_dir = tempfile::tempdir().unwrap();
    let mut process = full(uninterrupted_dir.path(), 5);
    process.train.ema_config.use_ema = true;
    process.train.max_grad_norm = 0.5;
    let uninterrupted = run_spec(&spec(process.clone()));
    assert_eq!(uninterrupted.0, Outcome::Completed, "{}", logs(&uninterrupted.1));
    for profile in sampled_cases(vec![
        MemoryProfile::GpuPoor,
        MemoryProfile::CpuOnly,
        MemoryProfile::Extreme,
    ]) {
        let interrupted_dir = tempfile::tempdir().unwrap();
        let mut same = process.clone();
        let other = full(interrupted_dir.path(), 5);
        same.training_folder = other.training_folder;
        same.datasets[0].folder_path = other.datasets[0].folder_path.clone();
        let mut spec = spec(same);
        spec.profile = profile;
        let (outcome, first) = stop_at(&spec, 2);
        assert_eq!(outcome, Outcome::stopped());
        let (outcome, second) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
        let all: Vec<f64> = losses(&first).into_iter().chain(losses(&second)).collect();
        assert_eq!(all, losses(&uninterrupted.1), "{profile:?}");
        assert!(
            saved_lora(interrupted_dir.path()) == saved_lora(uninterrupted_dir.path()),
            "{profile:?}"
        );
    }
}

#[test]
fn saves_as_diffusers_folders_are_written_and_removed_completely() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = full(dir.path(), 6);
    process.save.save_format = SaveFormat::Diffusers;
    process.save.save_every = Some(2);
    process.save.max_step_saves_to_keep = 1;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let out = dir.path().join("out/tiny");
    let model = load_sd(out.join("tiny"), &LoadOptions::cpu()).unwrap();
    assert_eq!(model.default_size(), crate::testing::tiny_sd().default_size());
    assert!(!out.join("tiny_000000002").exists() && out.join("tiny_000000004").is_dir());
    let written = artifacts(&events, "model");
    let removed = artifacts(&events, "removed");
    let of = |names: &[String], save: &str| names.iter().filter(|n| n.starts_with(&format!("tiny/{save}/"))).count();
    let files = files_in_save(&out.join("tiny")).len();
    assert!(files > 8 && written.contains(&"tiny/tiny/unet/diffusion_pytorch_model.safetensors".to_owned()));
    for save in ["tiny_000000002", "tiny_000000004", "tiny"] {
        assert_eq!(of(&written, save), files, "{written:?}");
    }
    assert_eq!(
        (of(&removed, "tiny_000000002"), removed.len()),
        (files, files),
        "{removed:?}"
    );

    // A folder of another program has no checkpoint: its weights and step are used.
    std::fs::remove_dir_all(out.join(".aitk")).unwrap();
    std::fs::remove_dir_all(out.join("tiny")).unwrap();
    process.train.steps = 5;
    process.train.lr = 0.0;
    process.train.optimizer_params = serde_json::json!({"weight_decay": 0.0}).as_object().unwrap().clone();
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert_eq!(losses(&events).len(), 1, "{}", logs(&events));
    assert!(logs(&events).contains("tiny_000000004 (step 4)"), "{}", logs(&events));
    let (before, after) = (
        tensors(&out.join("tiny_000000004/unet")),
        tensors(&out.join("tiny/unet")),
    );
    assert!(before.iter().all(|(name, t)| gap(t, &after[name]) == 0.0));
}

#[test]
fn only_the_selected_parameters_are_trained() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = full(dir.path(), 2);
    process.save.save_format = SaveFormat::Diffusers;
    process.model.only_if_contains = Some(OneOrMany(vec!["attn2".into(), "conv_in".into()]));
    process.model.ignore_if_contains = Some(OneOrMany(vec!["bias".into()]));
    // A component that is trained in part is not quantised.
    process.model.quantize = true;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("not quantised"), "{}", logs(&events));
    let base = tensors(&fixtures().join("tiny_sd/unet"));
    for (name, t) in tensors(&dir.path().join("out/tiny/tiny/unet")) {
        let is_selected = (name.contains("attn2") || name.contains("conv_in")) && !name.contains("bias");
        assert_eq!(gap(&t, &base[&name]) > 0.0, is_selected, "{name}");
    }

    process.model.only_if_contains = Some(OneOrMany(vec!["no_such_layer".into()]));
    process.name = Some("other".into());
    let (outcome, _) = run_spec(&spec(process));
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(cause, FailureCause::BadInput);
    assert!(message.contains("no parameter is left to train"), "{message}");
}

#[test]
fn a_full_finetune_does_not_resume_in_the_folder_of_a_lora() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 2);
    let (outcome, _) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed);
    process.network = None;
    process.train.steps = 3;
    let (outcome, events) = run_spec(&spec(process));
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}: {}", logs(&events));
    };
    assert_eq!(cause, FailureCause::BadInput);
    for part in [
        "tiny.safetensors",
        "a LoRA",
        "newest save of the run folder",
        "config.name",
    ] {
        assert!(message.contains(part), "{message}");
    }
}
