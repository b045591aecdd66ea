//! Whole trainings of a decorator of FLUX.1: files, resuming, samples, and configs that do not fit.

use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec};
use super::transformer_test_runs::{complete, flow_trainer, tensors};
use crate::testing::{fixtures, gap};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::arch::ArchName;
use aitk_common::job::decorator::DecoratorConfig;
use aitk_common::job::dtype::DType as SaveDType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn tokens(num_tokens: u32) -> DecoratorConfig {
    DecoratorConfig {
        num_tokens,
        ..DecoratorConfig::default()
    }
}

fn decorator(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = flow_trainer(root, ArchName::Flux, &fixtures().join("tiny_flux"), steps);
    process.network = None;
    process.decorator = Some(tokens(3));
    process.train.lr = 1e-2;
    process
}

fn failure(process: &TrainerProcess) -> String {
    match run_spec(&spec(process.clone())).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    }
}

fn save(root: &Path) -> PathBuf {
    root.join("out/tiny/tiny.safetensors")
}

#[test]
fn a_decorator_resumes_exactly_and_is_saved_as_in_ai_toolkit() {
    let (whole, events) = check_resumption(&|root| {
        let mut process = decorator(root, 6);
        process.train.ema_config.use_ema = true;
        process.train.do_cfg = true;
        process.train.cfg_scale = 3.0;
        process.train.gradient_checkpointing = true;
        process
    });
    let saved = tensors(&save(whole.path()));
    assert_eq!(saved.keys().collect::<Vec<_>>(), ["weight"]);
    assert_eq!(saved["weight"].dims(), [3, 24]);
    assert!(whole.path().join("out/tiny/tiny_000000004.safetensors").is_file());
    let made = |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, .. } if kind == "decorator");
    assert_eq!(events.iter().filter(|event| made(event)).count(), 2);
    assert!(logs(&events).contains("3 tokens of 24 numbers"), "{}", logs(&events));
}

/// The text encoders are not in memory, and everything is as with them.
#[test]
fn encoded_captions_train_the_same_decorator() {
    let train = |caches: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = decorator(dir.path(), 3);
        process.train.cache_text_embeddings = caches;
        // Captions that are encoded before are built once.
        process.datasets[0].shuffle_tokens = false;
        process.save.dtype = SaveDType::F32;
        let events = complete(process);
        (losses(&events), tensors(&save(dir.path())).remove("weight").unwrap())
    };
    let (with, without) = (train(false), train(true));
    assert_eq!(with.0, without.0);
    assert_eq!(gap(&with.1, &without.1), 0.0);
}

/// Samples are made with the tokens as they are at that step.
#[test]
fn samples_have_the_tokens() {
    let samples = |lr: f64, count: Option<u32>| -> BTreeMap<u64, Vec<u8>> {
        let dir = tempfile::tempdir().unwrap();
        let mut process = decorator(dir.path(), 2);
        process.decorator = count.map(tokens);
        if count.is_none() {
            process.network = super::tests::trainer(dir.path(), 2).network;
        }
        process.train.lr = lr;
        process.train.disable_sampling = false;
        process.sample.sampler = SamplerName::FlowMatch;
        process.sample.format = "png".into();
        process.sample.samples = vec![SampleItem {
            prompt: "a red circle --d 7".into(),
            ..SampleItem::default()
        }];
        (process.sample.width, process.sample.height) = (32, 32);
        process.sample.sample_steps = 2;
        let events = complete(process);
        let image = |event: &ChildEvent| match event {
            ChildEvent::Artifact { kind, path, step, .. } if kind == "sample" => {
                let pixels = image::open(dir.path().join("out/tiny").join(path)).unwrap();
                Some((step.unwrap(), pixels.to_rgb8().into_raw()))
            }
            _ => None,
        };
        events.iter().filter_map(image).collect()
    };
    let (trained, frozen, none) = (samples(0.5, Some(3)), samples(0.0, Some(3)), samples(0.0, None));
    assert_eq!(trained.keys().copied().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(trained[&0], frozen[&0]);
    assert_eq!(frozen[&0], frozen[&2]);
    assert_ne!(trained[&2], frozen[&2]);
    // A new LoRA changes nothing.
    assert_ne!(frozen[&0], none[&0]);
}

/// Where there is no checkpoint, as after a training by ai-toolkit.
#[test]
fn a_training_goes_on_with_the_tokens_of_the_newest_save() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = decorator(dir.path(), 4);
    process.save.save_every = None;
    process.save.dtype = SaveDType::F32;
    complete(process.clone());
    let before = tensors(&save(dir.path())).remove("weight").unwrap();
    std::fs::remove_dir_all(dir.path().join("out/tiny/.aitk")).unwrap();
    process.train.steps = 5;
    let mut other = process.clone();
    other.decorator = Some(tokens(5));
    let error = failure(&other);
    assert!(
        error.contains("tiny.safetensors") && error.contains("set `decorator.num_tokens` to what it was"),
        "{error}"
    );
    process.train.lr = 0.0;
    let events = complete(process);
    let said = logs(&events);
    assert!(said.contains("(step 4), with a fresh optimizer"), "{said}");
    assert_eq!(gap(&tensors(&save(dir.path()))["weight"], &before), 0.0);
}

#[test]
fn what_does_not_fit_a_decorator_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    type Change = fn(&mut TrainerProcess);
    let cases: [(Change, &str); 4] = [
        (
            |process| process.train.train_text_encoder = true,
            "decorator: cannot be used together with `train.train_text_encoder`",
        ),
        (
            |process| process.decorator = Some(tokens(0)),
            "decorator.num_tokens: expected 1 to 512",
        ),
        (
            |process| {
                process.model.arch.name = ArchName::Sd1;
                process.model.name_or_path = fixtures().join("tiny_sd").display().to_string();
                process.train.noise_scheduler = SamplerName::Ddpm;
            },
            "decorator: its tokens follow the text of FLUX.1 (`arch: flux`), and this is `arch: sd1`",
        ),
        (
            |process| process.model.apply_t5_attn_mask = true,
            "model.apply_t5_attn_mask: cannot be used together with `decorator`",
        ),
    ];
    for (change, expected) in cases {
        let mut process = decorator(dir.path(), 2);
        change(&mut process);
        let error = failure(&process);
        assert!(error.contains(expected), "{error}");
    }
}
