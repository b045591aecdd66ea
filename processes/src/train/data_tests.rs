//! Tests of regularisation sets, squares instead of buckets, masks, and training without captions.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use super::{image_batches, preview};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::values::{ImageSize, OneOrMany};
use aitk_common::plan::image_batches::ImageBatch;
use std::collections::BTreeMap;
use std::path::Path;

/// A run with a second data set of two images for regularisation.
fn with_regularisation(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    let folder = root.join("regularisation");
    std::fs::create_dir_all(&folder).unwrap();
    for i in 0..2u32 {
        let image = image::RgbImage::from_fn(40, 40, |x, y| {
            image::Rgb([(x * 6) as u8, (y * 3) as u8, (i * 90) as u8])
        });
        image.save(folder.join(format!("r{i}.png"))).unwrap();
        std::fs::write(folder.join(format!("r{i}.txt")), "a photo of a [trigger]").unwrap();
    }
    let mut set = process.datasets[0].clone();
    set.folder_path = Some(folder.display().to_string());
    set.is_reg = true;
    process.datasets.push(set);
    process.trigger_word = Some("zorb".into());
    process
}

#[test]
fn a_training_without_some_images_is_that_of_a_folder_without_them() {
    let trained = |excluded: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 4);
        let folder = process.datasets[0].folder_path.clone().unwrap();
        let mut names: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        names.retain(|path| path.extension().is_some_and(|ending| ending == "png"));
        names.sort();
        assert!(names.len() > 1);
        match excluded {
            true => {
                let name = names[0].file_name().unwrap().to_str().unwrap();
                process.datasets[0].excluded_images = vec![name.to_owned()];
            }
            false => std::fs::remove_file(&names[0]).unwrap(),
        }
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        (saved_lora(dir.path()), losses(&events))
    };
    assert!(trained(true) == trained(false));
}

#[test]
fn a_preview_counts_the_images_of_each_entry_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 1);
    process.datasets.push(process.datasets[0].clone());
    process.datasets.push(process.datasets[0].clone());
    process.datasets[0].excluded_images = vec!["p0.png".to_owned()];
    let captions = dir.path().join("captions.json");
    std::fs::write(&captions, r#"{"p1": {"caption": "a circle"}}"#).unwrap();
    process.datasets[2].captions_file = Some(captions.display().to_string());
    let parsed = serde_json::from_value(spec(process.clone()).job).unwrap();
    let seen = preview(&parsed, &process, &BTreeMap::new());
    assert_eq!(seen.problems, [""; 0]);
    let images: Vec<u64> = seen.datasets.iter().map(|set| set.images).collect();
    assert_eq!(images, [4, 5, 1]);
}

#[test]
fn the_largest_batches_are_those_of_the_buckets() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 1);
    let folder = dir.path().join("sizes");
    std::fs::create_dir_all(&folder).unwrap();
    for (width, height) in [(96, 32), (64, 64)] {
        let name = format!("{width}.png");
        image::RgbImage::new(width, height).save(folder.join(name)).unwrap();
    }
    let set = &mut process.datasets[0];
    set.folder_path = Some(folder.display().to_string());
    set.resolution = OneOrMany(vec![64]);
    let mut small = set.clone();
    (small.resolution, small.batch_size) = (OneOrMany(vec![32]), Some(9));
    process.datasets.push(small);
    let batch = |side: u32, images: u32| ImageBatch {
        process: 0,
        width: side,
        height: side,
        images,
    };
    let expected = [batch(32, 9), batch(64, 2)];
    let job = spec(process.clone());
    assert_eq!(image_batches(&job), expected);
    let parsed = serde_json::from_value(job.job).unwrap();
    let seen = preview(&parsed, &process, &BTreeMap::new());
    assert_eq!(seen.image_batches(0), expected, "{:?}", seen.problems);
    process.datasets[0].folder_path = Some(dir.path().join("missing").display().to_string());
    assert_eq!(image_batches(&spec(process)), []);
}

fn run(process: &TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

#[test]
fn every_even_step_uses_regularisation_images_unless_it_saves() {
    let losses = |reg_weight: f64, network_weight: f64| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_regularisation(dir.path(), 8);
        // The weights do not change, so the losses show only which images each step uses.
        process.train.lr = 0.0;
        process.train.reg_weight = reg_weight;
        process.datasets[1].loss_multiplier = network_weight;
        run(&process)
    };
    let (whole, half) = (losses(1.0, 1.0), losses(0.5, 0.5));
    for (step, (a, b)) in (1..).zip(whole.iter().zip(&half)) {
        // Step 4 and step 8 save.
        let weight = if [2, 6].contains(&step) { 0.25 } else { 1.0 };
        assert!((b / a - weight).abs() < 1e-6, "step {step}: {a} and {b}");
    }
}

#[test]
fn regularisation_does_not_change_the_order_of_the_training_images() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = with_regularisation(dir.path(), 5);
    process.train.lr = 0.0;
    process.save.save_every = None;
    // Each step has its own random generator; with a fixed timestep only the images differ between steps.
    process.train.min_denoising_steps = 500;
    process.train.max_denoising_steps = 500;
    let mut cx_events: Vec<aitk_common::attempt::ChildEvent> = Vec::new();
    let spec = spec(process.clone());
    let job = serde_json::from_value(spec.job.clone()).unwrap();
    let mut cx = super::Context {
        spec: &spec,
        job: &job,
        events: &mut cx_events,
        stop: &crate::StopSignal::new(),
        requests: &crate::OutputRequests::new(),
        log_file: Default::default(),
    };
    let mut data = super::TrainingData::open(&process, 42, &mut cx).unwrap();
    let with: Vec<_> = (0..6).map(|step| data.batch_of_step(step, 0, &process).batch).collect();
    process.datasets.truncate(1);
    let mut data = super::TrainingData::open(&process, 42, &mut cx).unwrap();
    let without: Vec<_> = (0..3).map(|step| data.batch_of_step(step, 0, &process).batch).collect();
    assert_eq!([&with[0], &with[2], &with[4]], [&without[0], &without[1], &without[2]]);
    assert!([1, 3, 5].iter().all(|step: &usize| with[*step].dataset == 1));
}

#[test]
fn a_run_with_regularisation_resumes_exactly() {
    let uninterrupted = tempfile::tempdir().unwrap();
    let process = with_regularisation(uninterrupted.path(), 9);
    run(&process);
    let interrupted = tempfile::tempdir().unwrap();
    let mut process = process;
    process.training_folder = trainer(interrupted.path(), 9).training_folder;
    assert_eq!(stop_at(&spec(process.clone()), 6).0, Outcome::stopped());
    run(&process);
    assert_eq!(saved_lora(interrupted.path()), saved_lora(uninterrupted.path()));
}

#[test]
fn regularisation_sets_alone_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = with_regularisation(dir.path(), 4);
    process.datasets.remove(0);
    match run_spec(&spec(process)).0 {
        Outcome::Failed { cause, message } => {
            assert_eq!(cause, FailureCause::BadInput);
            assert!(message.contains("is_reg"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_buckets_all_images_are_in_the_same_batches() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 3);
    process.datasets[0].buckets = false;
    process.train.batch_size = 5;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(
        logs(&events).contains("5 training images in 1 batch"),
        "{}",
        logs(&events)
    );
    process.datasets[0].resolution.0 = vec![500];
    match run_spec(&spec(process.clone())).0 {
        Outcome::Failed { message, .. } => assert!(message.contains("500 x 500"), "{message}"),
        other => panic!("{other:?}"),
    }
    // Images of one size that is not a square.
    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    process.datasets[0].size = Some(ImageSize(64, 32));
    process.datasets[0].cache_latents_to_disk = true;
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let cache = dir.path().join("data/_latent_cache");
    let latents: Vec<_> = std::fs::read_dir(cache)
        .unwrap()
        .map(|entry| candle_core::safetensors::load(entry.unwrap().path(), &candle_core::Device::Cpu).unwrap())
        .filter(|file| {
            let is_wide = |dims: &[usize]| dims.len() > 1 && dims[dims.len() - 1] == 2 * dims[dims.len() - 2];
            file.values().any(|latent| is_wide(latent.dims()))
        })
        .collect();
    assert_eq!(latents.len(), 5);
    process.datasets[0].size = Some(ImageSize(64, 36));
    match run_spec(&spec(process)).0 {
        Outcome::Failed { message, .. } => assert!(
            message.contains("64 x 36") && message.contains("datasets.size"),
            "{message}"
        ),
        other => panic!("{other:?}"),
    }
}

#[test]
fn training_without_captions_uses_the_trigger_word() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = with_regularisation(dir.path(), 4);
    process.train.unload_text_encoder = true;
    process.datasets[0].shuffle_tokens = false;
    process.datasets[1].shuffle_tokens = false;
    let without = run(&process);
    // The same captions, written to the files.
    std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    process.train.unload_text_encoder = false;
    for (folder, text) in [("data", "zorb"), ("regularisation", " ")] {
        for entry in std::fs::read_dir(dir.path().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "txt") {
                std::fs::write(path, text).unwrap();
            }
        }
    }
    assert_eq!(run(&process), without);
}

#[test]
fn a_run_that_trains_the_text_encoder_resumes_exactly() {
    let uninterrupted = tempfile::tempdir().unwrap();
    let mut process = trainer(uninterrupted.path(), 6);
    process.train.train_text_encoder = true;
    process.network.as_mut().unwrap().dropout = Some(0.1);
    let losses = run(&process);
    // Gradient checkpointing, which is on above, does not change the losses.
    let without_checkpointing = tempfile::tempdir().unwrap();
    let mut resident = process.clone();
    resident.training_folder = trainer(without_checkpointing.path(), 6).training_folder;
    resident.train.gradient_checkpointing = false;
    for (a, b) in run(&resident).iter().zip(&losses) {
        assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}");
    }
    let interrupted = tempfile::tempdir().unwrap();
    process.training_folder = trainer(interrupted.path(), 6).training_folder;
    assert_eq!(stop_at(&spec(process.clone()), 3).0, Outcome::stopped());
    run(&process);
    assert_eq!(saved_lora(interrupted.path()), saved_lora(uninterrupted.path()));
    let file = crate::adapters::AdapterFile::open(&uninterrupted.path().join("out/tiny/tiny.safetensors")).unwrap();
    let of = |prefix: &str| file.modules.iter().filter(|m| m.stem.starts_with(prefix)).count();
    assert_eq!((of("lora_te_text_model_encoder_layers_"), of("lora_te_")), (12, 12));
    assert!(of("lora_unet_") > 20);

    process.train.train_unet = false;
    process.training_folder = Some(interrupted.path().join("alone").display().to_string());
    run(&process);
    let file = crate::adapters::AdapterFile::open(&interrupted.path().join("alone/tiny/tiny.safetensors")).unwrap();
    assert!(file.modules.iter().all(|m| m.stem.starts_with("lora_te_")));
}

/// Writes masks for the images of `trainer`: the left half has the value `left`, the right half is white.
fn write_masks(folder: &Path, left: u8) {
    std::fs::create_dir_all(folder).unwrap();
    for i in 0..5u32 {
        let (w, h) = if i < 3 { (32, 32) } else { (48, 24) };
        let mask = image::GrayImage::from_fn(w, h, |x, _| image::Luma([if x < w / 2 { left } else { 255 }]));
        mask.save(folder.join(format!("p{i}.png"))).unwrap();
    }
}

#[test]
fn masks_weight_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("masks");
    let mut process = trainer(dir.path(), 4);
    // Only square images are used, which are not scaled: half of a mask is exactly half of the latent.
    for other in ["p3.png", "p4.png"] {
        std::fs::remove_file(dir.path().join("data").join(other)).unwrap();
    }
    process.train.lr = 0.0;
    process.save.save_every = None;
    let losses = |change: &dyn Fn(&mut TrainerProcess)| {
        let mut process = process.clone();
        change(&mut process);
        let _ = std::fs::remove_dir_all(dir.path().join("out"));
        run(&process)
    };
    let plain = losses(&|_| {});
    let masked = |process: &mut TrainerProcess| {
        process.datasets[0].mask_path = Some(folder.display().to_string());
    };
    write_masks(&folder, 255);
    assert_eq!(losses(&masked), plain, "white masks change nothing");
    write_masks(&folder, 0);
    let right = losses(&masked);
    let left = losses(&|process| {
        masked(process);
        process.datasets[0].invert_mask = true;
    });
    for ((right, left), plain) in right.iter().zip(&left).zip(&plain) {
        assert!((right - plain).abs() > 1e-4 && (left - plain).abs() > 1e-4);
        // Weights are 1 on average, so the mean of the halves is the whole.
        assert!(
            ((right + left) / 2.0 / plain - 1.0).abs() < 1e-4,
            "{right} {left} {plain}"
        );
    }
    let floor = losses(&|process| {
        masked(process);
        process.datasets[0].mask_min_value = 1.0;
    });
    assert_eq!(floor, plain, "with a minimum of 1 black counts as much as white");
    // All pixels of an image without an alpha channel count.
    assert_eq!(losses(&|process| process.datasets[0].alpha_mask = true), plain);

    image::GrayImage::new(10, 30).save(folder.join("p0.png")).unwrap();
    masked(&mut process);
    let _ = std::fs::remove_dir_all(dir.path().join("out"));
    match run_spec(&spec(process)).0 {
        Outcome::Failed { message, .. } => {
            assert!(message.contains("p0.png") && message.contains("10 x 30"), "{message}")
        }
        other => panic!("{other:?}"),
    }
}
