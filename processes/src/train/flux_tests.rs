//! Whole jobs of FLUX.1 on the tiny model: a LoRA and a full fine-tune that resume exactly, samples while training.

use super::super::save_files::files_in_save;
use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec, stop_at};
use super::transformer_test_runs::{complete, equal, flow_trainer, tensors};
use crate::adapters::AdapterFile;
use crate::families::{META_FILE, saved_step};
use crate::testing::{fixtures, gap, sampled_cases};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::train::TimestepType;
use aitk_common::job::values::OneOrMany;
use std::path::Path;

fn flux(root: &Path, steps: u64) -> TrainerProcess {
    flow_trainer(root, ArchName::Flux, &fixtures().join("tiny_flux"), steps)
}

#[test]
fn a_lora_resumes_exactly_and_has_the_names_of_ai_toolkit() {
    let with_options = |root: &Path| {
        let mut process = flux(root, 6);
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
    // 2 double blocks of 14 layers, 3 single blocks of 6, and 2 x 6 layers of CLIP.
    let of_transformer = saved.keys().filter(|name| name.starts_with("transformer.")).count();
    assert_eq!(of_transformer, 2 * (2 * 14 + 3 * 6));
    for name in [
        "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
        "transformer.single_transformer_blocks.2.proj_out.lora_B.weight",
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
    ] {
        assert!(saved.contains_key(name), "{name} in {:?}", saved.keys());
    }
    assert!(!saved.keys().any(|name| name.ends_with("alpha")));
    let metadata = AdapterFile::open(&file(whole.path())).unwrap().metadata;
    assert_eq!(metadata["ss_base_model_version"], "flux.1");

    // A run that starts from a LoRA with original names and another scale has its weights.
    let dir = tempfile::tempdir().unwrap();
    let mut process = flux(dir.path(), 1);
    process.train.lr = 0.0;
    if let Some(network) = &mut process.network {
        let start = fixtures().join("lora_flux/sd_scripts_blocks.safetensors");
        network.pretrained_lora_path = Some(start.display().to_string());
    }
    complete(process);
    let saved = tensors(&file(dir.path()));
    let theirs = tensors(&fixtures().join("lora_flux/ai_toolkit.safetensors"));
    for (name, tensor) in &theirs {
        assert!(gap(tensor, &saved[name]) < 1e-6, "{name}");
    }
}

#[test]
fn every_timestep_type_trains_and_samples_are_generated() {
    for kind in sampled_cases(vec![
        TimestepType::Shift,
        TimestepType::Linear,
        TimestepType::LognormBlend,
        TimestepType::Weighted,
        TimestepType::FourStep,
        TimestepType::NextSample,
    ]) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flux(dir.path(), 2);
        process.train.timestep_type = kind;
        process.train.bypass_guidance_embedding = kind == TimestepType::Weighted;
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
        let mut process = flux(root, steps);
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
    let base = tensors(&fixtures().join("tiny_flux/transformer"));
    for (name, tensor) in tensors(&transformer(whole.path())) {
        assert!(gap(&tensor, &base[&name]) > 0.0, "{name} did not change");
    }

    // Without its checkpoints a run resumes from the newest save.
    std::fs::remove_dir_all(whole.path().join("out/tiny/.aitk")).unwrap();
    let events = complete(full(whole.path(), 7));
    assert!(logs(&events).contains("(step 6)"), "{}", logs(&events));

    // Only some parameters.
    let dir = tempfile::tempdir().unwrap();
    let mut process = full(dir.path(), 1);
    process.model.only_if_contains = Some(OneOrMany(vec!["single_transformer_blocks.".into()]));
    complete(process);
    for (name, tensor) in tensors(&transformer(dir.path())) {
        let changed = gap(&tensor, &base[&name]) > 0.0;
        assert_eq!(changed, name.contains("single_transformer_blocks."), "{name}");
    }
}

#[test]
fn what_cannot_be_trained_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: fn(&mut TrainerProcess), expected: &str| {
        let mut process = flux(dir.path(), 1);
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

#[test]
fn a_training_with_guidance_is_the_same_in_one_pass_or_two_and_resumes_exactly() {
    let guided = |root: &Path, change: fn(&mut TrainerProcess)| {
        let mut process = flux(root, 2);
        process.train.do_cfg = true;
        process.train.cfg_scale = 3.0;
        change(&mut process);
        process
    };
    let train = |change: fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        losses(&complete(guided(dir.path(), change)))
    };
    let plain = train(|process| process.train.do_cfg = false);
    let together = train(|_| {});
    assert!(
        together.iter().zip(&plain).all(|(a, b)| (a / b - 1.0).abs() > 1e-3),
        "{together:?} and {plain:?}"
    );
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a / b - 1.0).abs() < 1e-4);
    let in_two = train(|process| process.model.low_vram = true);
    assert!(close(&in_two, &together), "{in_two:?} and {together:?}");
    if crate::testing::skips_long_tests() {
        return;
    }
    let cached = train(|process| {
        process.datasets[0].shuffle_tokens = false;
        process.train.cache_text_embeddings = true;
    });
    assert_eq!(cached, train(|process| process.datasets[0].shuffle_tokens = false));
    let rescaled = train(|process| process.train.cfg_rescale = Some(1.5));
    assert!(!close(&rescaled, &together));

    let random: fn(&mut TrainerProcess) = |process| {
        process.train.do_random_cfg = true;
        process.train.max_cfg_scale = Some(5.0);
        process.train.train_text_encoder = true;
    };
    let expected = train(random);
    let dir = tempfile::tempdir().unwrap();
    let interrupted = spec(guided(dir.path(), random));
    let (_, first) = stop_at(&interrupted, 1);
    let (outcome, second) = run_spec(&interrupted);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
    assert_eq!([losses(&first), losses(&second)].concat(), expected);
}
