//! Images that are read ahead are those that are read when they are needed.

use super::augmentation_tests::{process as augmented, random_squares};
use super::image_adapter_tests::adapter;
use super::images_ahead::ImagesAhead;
use super::kontext_tests::kontext;
use super::tests::{logs, run_spec, spec, trainer, with_run};
use crate::device::portable::portable;
use crate::testing::{gap, largest};
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::adapter::AdapterType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::train::LossTarget;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// What a batch is made of, as numbers and texts.
#[derive(Debug, PartialEq)]
struct Seen {
    numbers: Vec<Vec<f32>>,
    changes: String,
}

/// The batches of all steps of a process, and how many of them were read ahead.
fn batches(process: &TrainerProcess, reads_ahead: bool) -> (Vec<Seen>, usize) {
    let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    with_run(process, |run| {
        run.images_ahead = ImagesAhead::new(reads_ahead);
        let (mut seen, mut read_ahead) = (Vec::new(), 0);
        for step in 0..process.train.steps {
            for micro in 0..process.train.gradient_accumulation {
                read_ahead += usize::from(run.images_ahead.is_started((step, micro)));
                let inputs = run.draw_batch(step, micro).unwrap().inputs;
                let tensors = inputs.latents.iter().chain(&inputs.unaugmented).chain(&inputs.control);
                seen.push(Seen {
                    numbers: tensors.map(flat).collect(),
                    changes: format!("{:?} {:?}", inputs.crops, inputs.moves),
                });
            }
        }
        assert!(!run.images_ahead.is_started((process.train.steps, 0)));
        (seen, read_ahead)
    })
}

/// Compares the batches of a process with and without reading ahead. `expected`: how many are read ahead.
fn check(name: &str, expected: usize, make: impl Fn(&Path) -> TrainerProcess) {
    let folder = tempfile::tempdir().unwrap();
    let mut process = make(folder.path());
    process.train.steps = 4;
    process.train.gradient_accumulation = 2;
    process.datasets[0].cache_latents = false;
    process.datasets[0].cache_latents_to_disk = false;
    let (needed, none) = batches(&process, false);
    let (ahead, count) = batches(&process, true);
    assert_eq!((none, count), (0, expected), "{name}");
    assert!(needed == ahead, "{name}");
}

#[test]
fn they_are_equal() {
    let target = |target: LossTarget| {
        move |root: &Path| {
            let mut process = augmented(root, 4);
            process.train.loss_target = target;
            process
        }
    };
    // All but the first of eight micro-batches.
    check("augmentations", 7, target(LossTarget::Noise));
    check("images before their augmentations", 7, target(LossTarget::Unaugmented));
    check("random squares", 7, |root| random_squares(root, 4));
    check("control images of an adapter", 7, |root| {
        adapter(root, AdapterType::T2i, 4)
    });
    // The latents of five images, which are each other's control images, are soon known.
    check("control images drawn for each step", 5, |root| {
        let mut process = kontext(root, 4);
        process.datasets[0].control_path.0.clear();
        process.datasets[0].control_from_same_folder = true;
        process
    });
}

/// After an epoch the latents of a small data set are in memory.
#[test]
fn known_latents_need_no_images() {
    check("images that stay the same", 2, |root| trainer(root, 4));
}

#[test]
fn an_image_that_cannot_be_read_fails_the_step_that_needs_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = random_squares(folder.path(), 4);
    process.datasets[0].batch_size = Some(1);
    let message = |reads_ahead: bool| {
        with_run(&process, |run| {
            run.images_ahead = ImagesAhead::new(reads_ahead);
            let next = run.data.batch_of_step(1, 0, &process).batch;
            let path = run.data.items_of(&next).next().unwrap().path.clone();
            let aside = path.with_extension("aside");
            std::fs::rename(&path, &aside).unwrap();
            run.draw_batch(0, 0).unwrap();
            let error = run.draw_batch(1, 0).err().unwrap().to_string();
            std::fs::rename(&aside, &path).unwrap();
            error
        })
    };
    let error = message(false);
    assert!(error.contains(".png"), "{error}");
    assert_eq!(message(true), error);
}

/// A CPU reads when it needs to; portable mode does what GPUs do.
#[test]
fn gpus_read_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let process = random_squares(folder.path(), 1);
    let reads_ahead = || with_run(&process, |run| run.images_ahead.is_enabled());
    assert!(!reads_ahead() && portable(reads_ahead));
}

/// The latents in a run's cache, by the names of their files.
fn cached_latents(data: &Path) -> BTreeMap<String, Tensor> {
    let files = std::fs::read_dir(data.join("_latent_cache")).unwrap();
    let latent = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        let latent = candle_core::safetensors::load(&path, &Device::Cpu).unwrap()["latent"].clone();
        (path.file_name().unwrap().to_string_lossy().into_owned(), latent)
    };
    files.map(latent).collect()
}

#[test]
fn latents_are_cached_from_images_that_were_read_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let caches = [false, true].map(|is_portable| {
        let mut process = kontext(folder.path(), 1);
        // Twenty images: three groups.
        (process.datasets[0].flip_x, process.datasets[0].flip_y) = (true, true);
        process.datasets[0].cache_latents_to_disk = true;
        let mut spec = spec(process);
        if is_portable {
            spec.device = DeviceRef::PORTABLE_CPU;
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let found = cached_latents(&folder.path().join("data"));
        std::fs::remove_dir_all(folder.path().join("data/_latent_cache")).unwrap();
        std::fs::remove_dir_all(folder.path().join("out")).unwrap();
        found
    });
    let [needed, ahead] = &caches;
    assert_eq!(needed.len(), 40);
    assert!(needed.keys().eq(ahead.keys()));
    for (name, latent) in needed {
        let difference = gap(latent, &ahead[name]) / largest(latent);
        assert!(difference < 1e-4, "{name}: {difference:.1e}");
    }
}
