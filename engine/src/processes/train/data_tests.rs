//! Regularisation sets, squares instead of buckets, captions that are left out.

use super::tests::{go, logs, lora, losses, spec, stop_at, trainer};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

/// With a second data set, of two other images, for regularisation.
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

fn run(process: &TrainerProcess) -> Vec<f64> {
    let (outcome, events) = go(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

#[test]
fn every_even_step_regularises_but_those_that_save() {
    let losses = |reg_weight: f64, network_weight: f64| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_regularisation(dir.path(), 8);
        // Nothing changes from step to step, so a loss shows only what its step was made of.
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
fn regularisation_leaves_the_order_of_the_training_images_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = with_regularisation(dir.path(), 5);
    process.train.lr = 0.0;
    process.save.save_every = None;
    // Every step has a generator of its own; without it only the images would tell the steps apart.
    process.train.min_denoising_steps = 500;
    process.train.max_denoising_steps = 500;
    let mut cx_events: Vec<aitk_common::attempt::ChildEvent> = Vec::new();
    let spec = spec(process.clone());
    let job = serde_json::from_value(spec.job.clone()).unwrap();
    let mut cx = super::Context {
        spec: &spec,
        job: &job,
        events: &mut cx_events,
        stop: &crate::processes::StopSignal::new(),
        log_file: Default::default(),
    };
    let mut data = super::Data::open(&process, 42, &mut cx).unwrap();
    let with: Vec<_> = (0..6).map(|step| data.turn(step, 0, &process).batch).collect();
    process.datasets.truncate(1);
    let mut data = super::Data::open(&process, 42, &mut cx).unwrap();
    let without: Vec<_> = (0..3).map(|step| data.turn(step, 0, &process).batch).collect();
    assert_eq!([&with[0], &with[2], &with[4]], [&without[0], &without[1], &without[2]]);
    assert!([1, 3, 5].iter().all(|step: &usize| with[*step].dataset == 1));
}

#[test]
fn a_regularised_run_goes_on_without_a_change() {
    let straight = tempfile::tempdir().unwrap();
    let process = with_regularisation(straight.path(), 9);
    run(&process);
    let broken = tempfile::tempdir().unwrap();
    let mut process = process;
    process.training_folder = trainer(broken.path(), 9).training_folder;
    assert_eq!(stop_at(&spec(process.clone()), 6).0, Outcome::stopped());
    run(&process);
    assert_eq!(lora(broken.path()), lora(straight.path()));
}

#[test]
fn regularisation_alone_trains_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = with_regularisation(dir.path(), 4);
    process.datasets.remove(0);
    match go(&spec(process)).0 {
        Outcome::Failed { cause, message } => {
            assert_eq!(cause, FailureCause::BadInput);
            assert!(message.contains("is_reg"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_buckets_all_images_share_batches() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 3);
    process.datasets[0].buckets = false;
    process.train.batch_size = 5;
    let (outcome, events) = go(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(
        logs(&events).contains("5 training images in 1 batches"),
        "{}",
        logs(&events)
    );
    process.datasets[0].resolution.0 = vec![500];
    match go(&spec(process)).0 {
        Outcome::Failed { message, .. } => assert!(message.contains("500 x 500"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn captions_can_be_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = with_regularisation(dir.path(), 4);
    process.train.unload_text_encoder = true;
    process.datasets[0].shuffle_tokens = false;
    process.datasets[1].shuffle_tokens = false;
    let without = run(&process);
    // The same by hand.
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
fn a_trained_text_encoder_goes_on_without_a_change() {
    let straight = tempfile::tempdir().unwrap();
    let mut process = trainer(straight.path(), 6);
    process.train.train_text_encoder = true;
    process.network.as_mut().unwrap().dropout = Some(0.1);
    let losses = run(&process);
    // Gradient checkpointing, which is on, changes nothing here either.
    let kept = tempfile::tempdir().unwrap();
    let mut resident = process.clone();
    resident.training_folder = trainer(kept.path(), 6).training_folder;
    resident.train.gradient_checkpointing = false;
    for (a, b) in run(&resident).iter().zip(&losses) {
        assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}");
    }
    let broken = tempfile::tempdir().unwrap();
    process.training_folder = trainer(broken.path(), 6).training_folder;
    assert_eq!(stop_at(&spec(process.clone()), 3).0, Outcome::stopped());
    run(&process);
    assert_eq!(lora(broken.path()), lora(straight.path()));
    let file = crate::adapters::LoraFile::open(&straight.path().join("out/tiny/tiny.safetensors")).unwrap();
    let of = |prefix: &str| file.modules.iter().filter(|m| m.stem.starts_with(prefix)).count();
    assert_eq!((of("lora_te_text_model_encoder_layers_"), of("lora_te_")), (12, 12));
    assert!(of("lora_unet_") > 20);

    process.train.train_unet = false;
    process.training_folder = Some(broken.path().join("alone").display().to_string());
    run(&process);
    let file = crate::adapters::LoraFile::open(&broken.path().join("alone/tiny/tiny.safetensors")).unwrap();
    assert!(file.modules.iter().all(|m| m.stem.starts_with("lora_te_")));
}

/// Masks for the images of `trainer`: the left half black.
fn masks(folder: &Path, left: u8) {
    std::fs::create_dir_all(folder).unwrap();
    for i in 0..5u32 {
        let (w, h) = if i < 3 { (32, 32) } else { (48, 24) };
        let mask = image::GrayImage::from_fn(w, h, |x, _| image::Luma([if x < w / 2 { left } else { 255 }]));
        mask.save(folder.join(format!("p{i}.png"))).unwrap();
    }
}

#[test]
fn masks_weigh_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("masks");
    let mut process = trainer(dir.path(), 4);
    // The squares, which are not scaled: half of a mask stays exactly half.
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
    masks(&folder, 255);
    assert_eq!(losses(&masked), plain, "white masks change nothing");
    masks(&folder, 0);
    let right = losses(&masked);
    let left = losses(&|process| {
        masked(process);
        process.datasets[0].invert_mask = true;
    });
    for ((right, left), plain) in right.iter().zip(&left).zip(&plain) {
        assert!((right - plain).abs() > 1e-4 && (left - plain).abs() > 1e-4);
        // Each half counts twice, so the halves together make two wholes.
        assert!(
            ((right + left) / 2.0 / plain - 1.0).abs() < 1e-4,
            "{right} {left} {plain}"
        );
    }
    let floor = losses(&|process| {
        masked(process);
        process.datasets[0].mask_min_value = 1.0;
    });
    assert_eq!(floor, plain, "black is as good as white");
    // An image without transparency is learned whole.
    assert_eq!(losses(&|process| process.datasets[0].alpha_mask = true), plain);

    image::GrayImage::new(10, 30).save(folder.join("p0.png")).unwrap();
    masked(&mut process);
    let _ = std::fs::remove_dir_all(dir.path().join("out"));
    match go(&spec(process)).0 {
        Outcome::Failed { message, .. } => {
            assert!(message.contains("p0.png") && message.contains("10 x 30"), "{message}")
        }
        other => panic!("{other:?}"),
    }
}
