//! Tests of short captions, and of prompts that text encoders drop.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use crate::testing::fixtures;
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::process::TrainerProcess;
use serde_json::json;
use std::path::Path;

/// A training on a JSON data set with two captions for each image, whose weights stay.
fn process(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    let entry = |i: u32| {
        let captions = json!({"caption": format!("a red circle, drawing {i}"), "caption_short": format!("circle {i}")});
        (format!("p{i}.png"), captions)
    };
    let list: serde_json::Map<String, serde_json::Value> = (0..5).map(entry).collect();
    let file = root.join("data/set.json");
    std::fs::write(&file, serde_json::to_string(&list).unwrap()).unwrap();
    let set = &mut process.datasets[0];
    set.folder_path = None;
    set.dataset_path = Some(file.display().to_string());
    set.shuffle_tokens = false;
    process.train.lr = 0.0;
    process
}

fn run(process: &TrainerProcess) -> Vec<f64> {
    run_on(None, process)
}

fn run_on(device: Option<DeviceRef>, process: &TrainerProcess) -> Vec<f64> {
    let mut spec = spec(process.clone());
    spec.device = device.unwrap_or(spec.device);
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

fn losses_of(steps: u64, change: &dyn Fn(&mut TrainerProcess)) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    let mut process = process(dir.path(), steps);
    change(&mut process);
    run(&process)
}

fn assert_close(ours: &[f64], expected: &[f64]) {
    assert_eq!(ours.len(), expected.len());
    for (ours, expected) in ours.iter().zip(expected) {
        assert!((ours / expected - 1.0).abs() < 1e-5, "{ours} {expected}");
    }
}

#[test]
fn the_loss_of_both_captions_is_the_mean_of_their_losses() {
    for device in [None, Some(DeviceRef::PORTABLE_CPU)] {
        let losses = |change: &dyn Fn(&mut TrainerProcess)| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = process(dir.path(), 3);
            change(&mut process);
            run_on(device, &process)
        };
        let long = losses(&|_| {});
        let short = losses(&|process| process.datasets[0].use_short_captions = true);
        let both = losses(&|process| process.train.short_and_long_captions = true);
        // The same images, noise and timesteps.
        let means: Vec<f64> = long
            .iter()
            .zip(&short)
            .map(|(long, short)| (long + short) / 2.0)
            .collect();
        assert!(long.iter().zip(&short).all(|(long, short)| long != short));
        assert_close(&both, &means);
    }
}

#[test]
fn masks_and_regularisation_sets_work_with_both_captions() {
    let masked = |doubles: bool, short: bool| {
        losses_of(2, &|process| {
            let file = std::path::PathBuf::from(process.datasets[0].dataset_path.clone().unwrap());
            let masks = file.with_file_name("_controls");
            std::fs::create_dir_all(&masks).unwrap();
            for i in 0..5u32 {
                let size = if i < 3 { (32, 32) } else { (48, 24) };
                let mask = image::GrayImage::from_fn(size.0, size.1, |x, _| image::Luma([(x * 5) as u8]));
                mask.save(masks.join(format!("p{i}.png"))).unwrap();
            }
            process.datasets[0].mask_path = Some(masks.display().to_string());
            process.datasets[0].use_short_captions = short;
            process.train.short_and_long_captions = doubles;
        })
    };
    let (long, short) = (masked(false, false), masked(false, true));
    let means: Vec<f64> = long
        .iter()
        .zip(&short)
        .map(|(long, short)| (long + short) / 2.0)
        .collect();
    assert_close(&masked(true, false), &means);
    // Step 2 is of regularisation images, which have one caption.
    let with_regularisation = |doubles: bool| {
        losses_of(2, &|process| {
            let mut set = process.datasets[0].clone();
            set.is_reg = true;
            process.datasets.push(set);
            process.train.short_and_long_captions = doubles;
        })
    };
    let (plain, doubled) = (with_regularisation(false), with_regularisation(true));
    assert_ne!(plain[0], doubled[0]);
    assert_eq!(plain[1], doubled[1]);
}

#[test]
fn each_encoder_of_sdxl_reads_its_own_caption() {
    let sdxl = |process: &mut TrainerProcess| {
        process.model.arch = Arch::from(ArchName::Sdxl);
        process.model.name_or_path = fixtures().join("tiny_sdxl").display().to_string();
    };
    let split = |process: &mut TrainerProcess| {
        sdxl(process);
        process.train.short_and_long_captions_encoder_split = true;
    };
    let (long, split_losses) = (losses_of(2, &sdxl), losses_of(2, &split));
    assert!(long.iter().zip(&split_losses).all(|(long, split)| long != split));
    // With the same caption for both, it is as without the option.
    let same = losses_of(2, &|process| {
        split(process);
        let file = process.datasets[0].dataset_path.clone().unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let mut list: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
        for captions in list.values_mut() {
            captions["caption_short"] = captions["caption"].clone();
        }
        std::fs::write(&file, serde_json::to_string(&list).unwrap()).unwrap();
    });
    assert_close(&same, &long);
}

#[test]
fn prompts_that_are_dropped_are_empty() {
    let blank = losses_of(2, &|process| {
        let file = process.datasets[0].dataset_path.clone().unwrap();
        let list: serde_json::Map<String, serde_json::Value> =
            (0..5).map(|i| (format!("p{i}.png"), json!({"caption": ""}))).collect();
        std::fs::write(&file, serde_json::to_string(&list).unwrap()).unwrap();
    });
    let always = |process: &mut TrainerProcess| {
        process.train.prompt_dropout_prob = 1.0;
        // Of both steps, so that the draws of dropped prompts do not change the loss.
        (process.train.min_denoising_steps, process.train.max_denoising_steps) = (500, 500);
    };
    let dropped = losses_of(2, &always);
    let without_captions = losses_of(2, &|process| {
        always(process);
        let file = process.datasets[0].dataset_path.clone().unwrap();
        let list: serde_json::Map<String, serde_json::Value> =
            (0..5).map(|i| (format!("p{i}.png"), json!({"caption": ""}))).collect();
        std::fs::write(&file, serde_json::to_string(&list).unwrap()).unwrap();
    });
    assert_eq!(dropped, without_captions);
    assert_ne!(dropped, blank);
    // A training of the text encoder drops them too.
    let trained = |chance: f64| {
        losses_of(2, &|process| {
            process.train.train_text_encoder = true;
            process.train.prompt_dropout_prob = chance;
        })
    };
    assert_ne!(trained(0.0), trained(1.0));
}

#[test]
fn a_run_with_both_captions_and_dropped_prompts_resumes_exactly() {
    let whole_folder = tempfile::tempdir().unwrap();
    let mut whole = process(whole_folder.path(), 6);
    whole.train.lr = 1e-3;
    whole.train.short_and_long_captions = true;
    whole.train.prompt_dropout_prob = 0.4;
    whole.datasets[0].shuffle_tokens = true;
    let losses = run(&whole);
    let parts_folder = tempfile::tempdir().unwrap();
    let mut parts = whole.clone();
    parts.training_folder = trainer(parts_folder.path(), 6).training_folder;
    let (outcome, first) = stop_at(&spec(parts.clone()), 3);
    assert_eq!(outcome, Outcome::stopped());
    let resumed = run(&parts);
    assert_eq!([super::tests::losses(&first), resumed].concat(), losses);
    assert_eq!(saved_lora(parts_folder.path()), saved_lora(whole_folder.path()));
}

#[test]
fn an_image_without_a_short_caption_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 1);
    process.train.short_and_long_captions = true;
    let message = |process: &TrainerProcess| match run_spec(&spec(process.clone())).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    };
    assert!(message(&process).contains("caption_short"));
    let job = spec(process.clone());
    let parsed = serde_json::from_value(job.job.clone()).unwrap();
    let seen = super::preview(&parsed, &process, &Default::default());
    assert!(seen.problems[0].contains("caption_short"), "{:?}", seen.problems);
    process.datasets[0].default_caption = Some("a shape".into());
    run(&process);
    process.train.cache_text_embeddings = true;
    assert!(message(&process).contains("cache_text_embeddings"));
}
