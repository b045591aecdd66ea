//! Whole runs in which each save merges the network into the model.

use super::merging::MERGED_ROLE;
use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use super::transformer_test_runs::{flow_trainer, tensors};
use crate::families::saved_step;
use crate::testing::{fixtures, gap, sampled_cases};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::checkpoint::Checkpoint;
use aitk_common::job::arch::ArchName;
use aitk_common::job::network::NetworkType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::save::SaveFormat;
use aitk_common::plan::profile::MemoryProfile;
use std::path::Path;

fn merging(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.train.merge_network_on_save = true;
    process.save.save_format = SaveFormat::Diffusers;
    process.save.save_every = Some(2);
    process
}

/// The first save is the model with the LoRA of a run without merges; the second one goes on from there with another LoRA.
#[test]
fn each_save_is_the_model_with_the_changes_so_far() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = merging(dir.path(), 5);
    process.train.merge_network_on_save_strength = 0.5;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(
        logs(&events).contains("step 2: the network was merged into"),
        "{}",
        logs(&events)
    );
    let out = dir.path().join("out/tiny");
    assert_eq!(saved_step(&out.join("tiny")).unwrap(), Some(5));

    let alone = tempfile::tempdir().unwrap();
    let mut same = trainer(alone.path(), 5);
    same.save.save_every = Some(2);
    let (outcome, events) = run_spec(&spec(same));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let lora = tensors(&alone.path().join("out/tiny/tiny_000000002.safetensors"));

    let base = tensors(&fixtures().join("tiny_sd/unet"));
    let saves = ["tiny_000000002", "tiny_000000004", "tiny"].map(|save| tensors(&out.join(save).join("unet")));
    let mut changed = 0;
    for (name, before) in &base {
        let stem = format!("lora_unet_{}", name.trim_end_matches(".weight").replace('.', "_"));
        let Some(down) = lora.get(&format!("{stem}.lora_down.weight")) else {
            assert_eq!(gap(before, &saves[2][name]), 0.0, "{name} has no LoRA");
            continue;
        };
        let up = &lora[&format!("{stem}.lora_up.weight")];
        let product = up
            .flatten_from(1)
            .unwrap()
            .matmul(&down.flatten_from(1).unwrap())
            .unwrap();
        // Alpha is the rank, so the change is that at the strength of the merge.
        let expected = (before + (product.reshape(before.shape()).unwrap() * 0.5).unwrap()).unwrap();
        assert!(gap(&saves[0][name], &expected) < 1e-6, "{name}");
        assert!(gap(&saves[0][name], before) > 0.0, "{name} did not change");
        for pair in saves.windows(2) {
            assert!(gap(&pair[0][name], &pair[1][name]) > 0.0, "{name} was not trained on");
        }
        changed += 1;
    }
    assert!(changed > 20, "{changed}");
}

#[test]
fn resuming_and_memory_profiles_do_not_change_the_bits() {
    for kind in sampled_cases(vec![
        NetworkType::Lora,
        NetworkType::Fullrank,
        NetworkType::Lokr,
        NetworkType::Loha,
        NetworkType::Locon,
    ]) {
        let uninterrupted_dir = tempfile::tempdir().unwrap();
        let mut process = merging(uninterrupted_dir.path(), 7);
        process.save.save_format = SaveFormat::Safetensors;
        process.save.save_every = Some(3);
        process.save.max_step_saves_to_keep = 1;
        process.train.train_text_encoder = true;
        process.network.as_mut().unwrap().kind = kind;
        let uninterrupted = run_spec(&spec(process.clone()));
        assert_eq!(uninterrupted.0, Outcome::Completed, "{}", logs(&uninterrupted.1));
        // Before the first merge, right after a merge, between two merges, and with a layout that would stream the weights.
        for (stop, profile) in [
            (1, MemoryProfile::CpuOnly),
            (3, MemoryProfile::CpuOnly),
            (5, MemoryProfile::Extreme),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut same = process.clone();
            let other = trainer(dir.path(), 7);
            same.training_folder = other.training_folder;
            same.datasets[0].folder_path = other.datasets[0].folder_path.clone();
            let mut spec = spec(same);
            spec.profile = profile;
            let (outcome, first) = stop_at(&spec, stop);
            assert_eq!(outcome, Outcome::stopped());
            let newest = Checkpoint::scan(&dir.path().join("out/tiny/.aitk/checkpoints"))
                .unwrap()
                .newest
                .unwrap();
            assert_eq!(newest.file_with_role(MERGED_ROLE).is_some(), stop >= 3, "{stop}");
            let (outcome, second) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
            let all: Vec<f64> = losses(&first).into_iter().chain(losses(&second)).collect();
            assert_eq!(all, losses(&uninterrupted.1), "{kind} {stop}");
            assert!(
                saved_lora(dir.path()) == saved_lora(uninterrupted_dir.path()),
                "{kind} {stop}"
            );
        }
    }
}

/// A run folder with saves and no checkpoint, as ai-toolkit leaves it.
#[test]
fn a_run_goes_on_from_a_saved_model() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = merging(dir.path(), 5);
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let out = dir.path().join("out/tiny");
    std::fs::remove_dir_all(out.join(".aitk")).unwrap();
    std::fs::remove_dir_all(out.join("tiny")).unwrap();
    process.train.lr = 0.0;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("tiny_000000004 (step 4)"), "{}", logs(&events));
    let (before, after) = (
        tensors(&out.join("tiny_000000004/unet")),
        tensors(&out.join("tiny/unet")),
    );
    assert!(before.iter().all(|(name, tensor)| gap(tensor, &after[name]) == 0.0));

    // Its checkpoints have merged layers, which a LoRA alone cannot use.
    process.train.merge_network_on_save = false;
    process.train.steps = 7;
    let (outcome, _) = run_spec(&spec(process));
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(cause, FailureCause::BadInput);
    assert!(message.contains("merge_network_on_save: true"), "{message}");
}

#[test]
fn a_transformer_is_saved_as_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = flow_trainer(dir.path(), ArchName::Flux, &fixtures().join("tiny_flux"), 2);
    process.train.merge_network_on_save = true;
    let (outcome, _) = run_spec(&spec(process.clone()));
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(cause, FailureCause::BadInput);
    assert!(message.contains("save.save_format: diffusers"), "{message}");
    process.save.save_format = SaveFormat::Diffusers;
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let trained = tensors(&dir.path().join("out/tiny/tiny/transformer"));
    let base = tensors(&fixtures().join("tiny_flux/transformer"));
    let changed = base.iter().filter(|(name, tensor)| gap(tensor, &trained[*name]) > 0.0);
    assert!(changed.count() > 10);
}
