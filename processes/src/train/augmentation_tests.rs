//! Tests of trainings whose images differ each time.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer, with_run};
use crate::data::PreparedImage;
use crate::rng::generator_for;
use aitk_common::attempt::Outcome;
use aitk_common::job::process::TrainerProcess;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;

/// A training whose steps differ only in their images: the weights stay, and so does the timestep.
pub(super) fn process(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.datasets[0].augments = vec!["ColorJitter".into(), "RandomEqualize".into()];
    process.datasets[0].augmentations = Some(vec![
        json!({"method": "HorizontalFlip"}),
        json!({"method": "Rotate", "params": {"limit": 20, "p": 0.8}}),
        json!({"method": "HueSaturationValue", "params": {"p": 1}}),
        json!({"method": "GaussNoise"}),
    ]);
    process.datasets[0].shuffle_augmentations = true;
    process
}

fn run(process: &TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

/// Writes black masks with a white left half for the images of `trainer`.
fn write_masks(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for i in 0..5u32 {
        let (width, height) = if i < 3 { (32, 32) } else { (48, 24) };
        let mask = image::GrayImage::from_fn(width, height, |x, _| image::Luma([if x < width / 2 { 255 } else { 0 }]));
        mask.save(folder.join(format!("p{i}.png"))).unwrap();
    }
}

#[test]
fn a_run_with_augmentations_resumes_exactly_and_caches_no_latents() {
    let uninterrupted = tempfile::tempdir().unwrap();
    let mut whole = process(uninterrupted.path(), 6);
    write_masks(&uninterrupted.path().join("masks"));
    whole.datasets[0].mask_path = Some(uninterrupted.path().join("masks").display().to_string());
    let losses = run(&whole);
    assert!(!uninterrupted.path().join("data/_latent_cache").exists());

    let interrupted = tempfile::tempdir().unwrap();
    let mut parts = whole.clone();
    parts.training_folder = trainer(interrupted.path(), 6).training_folder;
    let (outcome, first) = stop_at(&spec(parts.clone()), 3);
    assert_eq!(outcome, Outcome::stopped());
    let resumed = run(&parts);
    assert_eq!([super::tests::losses(&first), resumed].concat(), losses);
    assert_eq!(saved_lora(interrupted.path()), saved_lora(uninterrupted.path()));
}

#[test]
fn augmentations_change_the_loss_of_an_image_each_time() {
    let losses = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 4);
        process.train.lr = 0.0;
        change(&mut process);
        run(&process)
    };
    let plain = losses(&|_| {});
    let augmented = losses(&|process| process.datasets[0].augments = vec!["ColorJitter".into()]);
    assert!(
        plain.iter().zip(&augmented).all(|(a, b)| a != b),
        "{plain:?} {augmented:?}"
    );
    let seeds = [1, 2].map(|seed| {
        losses(&|process| {
            process.datasets[0].augments = vec!["ColorJitter".into()];
            process.training_seed = Some(seed);
        })
    });
    assert_ne!(seeds[0], seeds[1]);
}

#[test]
fn mistakes_in_augmentations_fail_before_the_model_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 1);
    process.datasets[0].augmentations = Some(vec![json!({"method": "Blurr"})]);
    match run_spec(&spec(process)).0 {
        Outcome::Failed { message, .. } => {
            assert!(message.contains("`Blurr`") && message.contains("CLAHE"), "{message}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn images_are_standardised_and_lose_contrast_unless_their_latents_are_cached() {
    let losses = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 3);
        process.datasets[0].cache_latents_to_disk = false;
        change(&mut process);
        run(&process)
    };
    let plain = losses(&|_| {});
    let differ = |other: &[f64]| plain.iter().zip(other).all(|(a, b)| (a / b - 1.0).abs() > 1e-5);
    let of_training = |process: &mut TrainerProcess| process.train.standardize_images = true;
    let contrast = |process: &mut TrainerProcess| process.train.img_multiplier = 0.5;
    let of_dataset = |process: &mut TrainerProcess| process.datasets[0].standardize_images = true;
    assert!(differ(&losses(&of_training)) && differ(&losses(&contrast)) && differ(&losses(&of_dataset)));
    assert_eq!(losses(&|process| process.train.img_multiplier = 1.5), plain);
    let cached = |process: &mut TrainerProcess| process.datasets[0].cache_latents = true;
    for change in [&of_training as &dyn Fn(&mut TrainerProcess), &contrast] {
        let changed = losses(&|process| {
            cached(process);
            change(process);
        });
        assert_eq!(changed, plain, "latents that are cached are those of unchanged images");
    }
    let normalised = losses(&|process| {
        cached(process);
        of_dataset(process);
    });
    assert!(differ(&normalised));
}

#[test]
fn a_run_with_standardised_images_of_less_contrast_resumes_exactly() {
    let uninterrupted = tempfile::tempdir().unwrap();
    let mut whole = trainer(uninterrupted.path(), 5);
    whole.datasets[0].cache_latents_to_disk = false;
    whole.datasets[0].standardize_images = true;
    whole.train.standardize_images = true;
    whole.train.img_multiplier = 0.7;
    run(&whole);
    let interrupted = tempfile::tempdir().unwrap();
    let mut parts = whole.clone();
    parts.training_folder = trainer(interrupted.path(), 5).training_folder;
    assert_eq!(stop_at(&spec(parts.clone()), 2).0, Outcome::stopped());
    run(&parts);
    assert_eq!(saved_lora(interrupted.path()), saved_lora(uninterrupted.path()));
}

/// A training on random squares of images of 48 x 40 pixels.
pub(super) fn random_squares(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    for i in 0..5u32 {
        let image = image::RgbImage::from_fn(48, 40, |x, y| {
            image::Rgb([(x * 5 + i * 3) as u8, (y * 6) as u8, (i * 50) as u8])
        });
        image.save(root.join(format!("data/p{i}.png"))).unwrap();
    }
    let set = &mut process.datasets[0];
    (set.buckets, set.random_crop, set.random_scale) = (false, true, true);
    set.cache_latents_to_disk = false;
    process
}

#[test]
fn a_run_with_random_squares_resumes_exactly() {
    let uninterrupted = tempfile::tempdir().unwrap();
    let whole = random_squares(uninterrupted.path(), 6);
    let losses_with_scale = run(&whole);
    let interrupted = tempfile::tempdir().unwrap();
    let mut parts = whole.clone();
    parts.training_folder = trainer(interrupted.path(), 6).training_folder;
    assert_eq!(stop_at(&spec(parts.clone()), 3).0, Outcome::stopped());
    run(&parts);
    assert_eq!(saved_lora(interrupted.path()), saved_lora(uninterrupted.path()));

    let others = tempfile::tempdir().unwrap();
    let mut other = random_squares(others.path(), 6);
    other.datasets[0].random_scale = false;
    let without_scale = run(&other);
    std::fs::remove_dir_all(others.path().join("out")).unwrap();
    other.datasets[0].random_crop = false;
    let centred = run(&other);
    for (a, b) in [(&losses_with_scale, &without_scale), (&without_scale, &centred)] {
        assert!(a.iter().zip(b).all(|(a, b)| a != b), "{a:?} {b:?}");
    }
}

/// SDXL is conditioned on them.
#[test]
fn the_crops_of_random_squares_are_those_that_were_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let process = random_squares(dir.path(), 1);
    let mut crops = BTreeSet::new();
    with_run(&process, |run| {
        for step in 0..4 {
            let batch = run.draw_batch(step, 0).unwrap();
            let items = run.data.items_of(&batch.step_batch.batch).cloned().collect::<Vec<_>>();
            for (place, (item, size)) in items.iter().zip(run.sizes_of(&batch)).enumerate() {
                let mut generator = generator_for(42, &format!("image/{place}"), step, 0);
                let options = &run.data.datasets[0].options;
                let (left, top) = PreparedImage::load(item, options, &mut generator).unwrap().crop;
                assert_eq!(
                    (size.original, size.crop, size.target),
                    ((40, 48), (top, left), (32, 32))
                );
                crops.insert(size.crop);
            }
        }
    });
    assert!(crops.len() > 2, "{crops:?}");
}

#[test]
fn images_that_are_too_small_for_a_random_square_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = random_squares(dir.path(), 1);
    process.datasets[0].resolution.0 = vec![64];
    let job = spec(process.clone());
    let parsed = serde_json::from_value(job.job.clone()).unwrap();
    let seen = super::preview(&parsed, &process, &Default::default());
    assert!(seen.problems[0].contains("48 x 40"), "{:?}", seen.problems);
    let message = |process: TrainerProcess| match run_spec(&spec(process)).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    };
    assert!(message(process.clone()).contains("48 x 40"));
    process.datasets[0].cache_latents = true;
    assert!(message(process).contains("another part each time"));
}
