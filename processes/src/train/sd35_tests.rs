//! Whole jobs of Stable Diffusion 3.5 on the tiny model: a LoRA and a full fine-tune that resume exactly, samples while training.

use super::super::save_files::files_in_save;
use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec};
use super::transformer_test_runs::{complete, equal, flow_trainer, tensors};
use crate::adapters::AdapterFile;
use crate::families::{META_FILE, saved_step};
use crate::testing::{fixtures, gap};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::train::TimestepType;
use std::path::Path;

fn sd35(root: &Path, steps: u64) -> TrainerProcess {
    flow_trainer(root, ArchName::Sd3, &fixtures().join("tiny_sd35"), steps)
}

#[test]
fn a_lora_resumes_exactly_and_has_the_names_of_ai_toolkit() {
    let with_options = |root: &Path| {
        let mut process = sd35(root, 6);
        process.train.train_text_encoder = true;
        if let Some(network) = &mut process.network {
            network.linear_alpha = 2.0;
            network.dropout = Some(0.1);
        }
        process
    };
    let (whole, events) = check_resumption(&with_options);
    assert!(logs(&events).contains("linear_alpha"), "{}", logs(&events));
    assert_eq!(losses(&events).len(), 6);
    let file = |root: &Path| root.join("out/tiny/tiny.safetensors");
    let saved = tensors(&file(whole.path()));
    // The first two blocks have 18 layers, the last, which has no second attention and ends the text, has 11.
    let of_transformer = saved.keys().filter(|name| name.starts_with("transformer.")).count();
    assert_eq!(of_transformer, 2 * (18 + 18 + 11));
    for name in [
        "transformer.transformer_blocks.0.attn2.to_q.lora_A.weight",
        "transformer.transformer_blocks.2.attn.add_k_proj.lora_B.weight",
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
        "text_encoder_2.text_model.encoder.layers.0.mlp.fc1.lora_B.weight",
    ] {
        assert!(saved.contains_key(name), "{name} in {:?}", saved.keys());
    }
    assert!(!saved.keys().any(|name| name.ends_with("alpha")));
    let metadata = AdapterFile::open(&file(whole.path())).unwrap().metadata;
    assert_eq!(metadata["ss_base_model_version"], "sd_3");

    // A run that starts from a LoRA with original names and another scale has its weights.
    let dir = tempfile::tempdir().unwrap();
    let mut process = sd35(dir.path(), 1);
    process.train.lr = 0.0;
    if let Some(network) = &mut process.network {
        let start = fixtures().join("lora_sd35/sd_scripts.safetensors");
        network.linear = 2;
        network.pretrained_lora_path = Some(start.display().to_string());
    }
    complete(process);
    let saved = tensors(&file(dir.path()));
    let theirs = tensors(&fixtures().join("lora_sd35/ai_toolkit.safetensors"));
    for (name, tensor) in &theirs {
        assert!(gap(tensor, &saved[name]) < 1e-6, "{name}");
    }
}

#[test]
fn timestep_types_train_and_samples_are_generated() {
    for kind in [TimestepType::Sigmoid, TimestepType::Weighted, TimestepType::Shift] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = sd35(dir.path(), 2);
        process.train.timestep_type = kind;
        if kind == TimestepType::Shift {
            process.train.disable_sampling = false;
            process.sample.sampler = SamplerName::FlowMatch;
            process.sample.samples = vec![SampleItem {
                prompt: "a red circle".into(),
                ..SampleItem::default()
            }];
            (process.sample.width, process.sample.height) = (32, 32);
            process.sample.sample_steps = 2;
        }
        let events = complete(process);
        assert!(losses(&events).iter().all(|loss| loss.is_finite()));
        let samples = events
            .iter()
            .filter(|event| matches!(event, ChildEvent::Artifact { kind, .. } if kind == "sample"));
        // Before the first step, and at the end.
        assert_eq!(samples.count(), if kind == TimestepType::Shift { 2 } else { 0 });
    }
}

#[test]
fn a_full_fine_tune_is_saved_as_a_transformer_and_resumes_exactly() {
    let full = |root: &Path, steps: u64| {
        let mut process = sd35(root, steps);
        process.network = None;
        process.save.save_format = SaveFormat::Diffusers;
        process.train.lr = 1e-4;
        process
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = losses(&complete(full(whole.path(), 6)));
    let first = losses(&complete(full(parts.path(), 4)));
    let second = losses(&complete(full(parts.path(), 6)));
    assert_eq!([first, second].concat(), expected);
    let save = |root: &Path| root.join("out/tiny/tiny");
    let files: Vec<String> = files_in_save(&save(whole.path()))
        .iter()
        .map(|file| file.strip_prefix(save(whole.path())).unwrap().display().to_string())
        .collect();
    assert_eq!(
        files,
        [
            META_FILE,
            "transformer/config.json",
            "transformer/diffusion_pytorch_model.safetensors"
        ]
    );
    assert_eq!(saved_step(&save(whole.path())).unwrap(), Some(6));
    let transformer = |root: &Path| save(root).join("transformer");
    equal(&transformer(whole.path()), &transformer(parts.path()));
    let base = tensors(&fixtures().join("tiny_sd35/transformer"));
    // Text of the last block gives no queries that are read.
    let unused = |name: &str| name.contains("transformer_blocks.2.attn.") && name.contains("add_q");
    for (name, tensor) in tensors(&transformer(whole.path())) {
        let frozen = name == "pos_embed.pos_embed";
        let changed = gap(&tensor, &base[&name]) > 0.0;
        assert!(changed != frozen || unused(&name), "{name}");
    }
}

#[test]
fn what_cannot_be_trained_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: fn(&mut TrainerProcess), expected: &str| {
        let mut process = sd35(dir.path(), 1);
        change(&mut process);
        let (outcome, _) = run_spec(&spec(process));
        let Outcome::Failed { message, .. } = outcome else {
            panic!("{outcome:?}");
        };
        assert!(message.contains(expected), "{message}");
    };
    refused(|process| process.network = None, "save_format: diffusers");
    refused(
        |process| {
            process.network = None;
            process.train.train_text_encoder = true;
            process.save.save_format = SaveFormat::Diffusers;
        },
        "train_text_encoder",
    );
}
