//! Whole trainings of FLUX.1 Kontext: control images, their cached latents, resuming, samples, and inputs that cannot be used.

use super::preview;
use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec, stop_at};
use super::transformer_test_runs::{complete, equal, flow_trainer, tensors};
use crate::adapters::AdapterFile;
use crate::testing::{fixtures, gap, in_own_folder, largest, sampled_cases};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::dataset::Rgb;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::train::TimestepType;
use aitk_common::job::values::OneOrMany;
use candle_core::Device;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A control image for each of the five images of `tests::images`, in sizes of their own.
fn control_images(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for i in 0..5u32 {
        let (width, height) = if i < 3 { (40, 40) } else { (50, 25) };
        let image = image::RgbaImage::from_fn(width, height, |x, y| {
            image::Rgba([
                (y * 6) as u8,
                (x * 4 + i * 30) as u8,
                (i * 40) as u8,
                255 - (x * 3) as u8,
            ])
        });
        image.save(folder.join(format!("p{i}.png"))).unwrap();
    }
}

pub(super) fn kontext(root: &Path, steps: u64) -> TrainerProcess {
    let mut process = flow_trainer(root, ArchName::FluxKontext, &fixtures().join("tiny_flux"), steps);
    let controls = root.join("controls");
    control_images(&controls);
    process.datasets[0].control_path = OneOrMany(vec![controls.display().to_string()]);
    process
}

fn failure(process: &TrainerProcess) -> String {
    match run_spec(&spec(process.clone())).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    }
}

/// The latents of control images in a run's cache, by the stems of the files.
pub(super) fn cached_controls(data: &Path) -> BTreeMap<String, candle_core::Tensor> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(data.join("_latent_cache")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        if header.metadata().as_ref().unwrap().contains_key("control") {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let latent = candle_core::safetensors::load(&path, &Device::Cpu).unwrap()["latent"].clone();
            found.insert(name.split('_').next().unwrap().to_owned(), latent);
        }
    }
    found
}

#[test]
fn the_latents_of_control_images_match_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let from = fixtures().join("train_kontext");
    let report: Value = serde_json::from_slice(&std::fs::read(from.join("parity.json")).unwrap()).unwrap();
    let mut process = kontext(dir.path(), 2);
    for (name, key) in [("data", "images"), ("controls", "before")] {
        std::fs::create_dir(dir.path().join(key)).unwrap();
        for entry in std::fs::read_dir(from.join(name)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, dir.path().join(key).join(path.file_name().unwrap())).unwrap();
        }
    }
    let set = &mut process.datasets[0];
    set.folder_path = Some(dir.path().join("images").display().to_string());
    set.control_path = OneOrMany(vec![dir.path().join("before").display().to_string()]);
    set.control_transparent_color = Rgb(serde_json::from_value(report["background"].clone()).unwrap());
    set.resolution = OneOrMany(vec![report["resolution"].as_u64().unwrap() as u32]);
    let events = complete(process);
    assert!(logs(&events).contains("another aspect ratio"), "{}", logs(&events));
    let found = cached_controls(&dir.path().join("images"));
    let expected = candle_core::safetensors::load(from.join("pixels.safetensors"), &Device::Cpu).unwrap();
    let mut compared = 0;
    for (name, latent) in expected {
        let Some(stem) = name.strip_prefix("latent:") else {
            continue;
        };
        let difference = gap(&found[stem], &latent) / largest(&latent);
        assert!(difference < 1e-4, "{stem}: {difference:.1e}");
        compared += 1;
    }
    assert_eq!((compared, found.len()), (5, 5));
}

#[test]
fn a_lora_resumes_exactly_and_has_the_names_of_ai_toolkit() {
    let with_options = |root: &Path| {
        let mut process = kontext(root, 6);
        process.datasets[0].flip_x = true;
        process.train.gradient_checkpointing = true;
        if let Some(network) = &mut process.network {
            network.dropout = Some(0.1);
        }
        process
    };
    let (whole, events) = check_resumption(&with_options);
    assert_eq!(losses(&events).len(), 6);
    let file = |root: &Path| root.join("out/tiny/tiny.safetensors");
    let saved = tensors(&file(whole.path()));
    assert_eq!(saved.len(), 2 * (2 * 14 + 3 * 6));
    assert!(saved.contains_key("transformer.transformer_blocks.0.attn.to_q.lora_A.weight"));
    let metadata = AdapterFile::open(&file(whole.path())).unwrap().metadata;
    assert_eq!(metadata["ss_base_model_version"], "flux.1_kontext");
}

#[test]
fn a_run_that_was_killed_resumes_exactly_from_its_checkpoint() {
    let with_checkpoints = |root: &Path| {
        let mut process = kontext(root, 7);
        process.save.save_every = Some(2);
        process.datasets[0].cache_latents_to_disk = false;
        process
    };
    let (whole, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = losses(&complete(with_checkpoints(whole.path())));
    // SIGKILL leaves the checkpoint of the last save and nothing of the steps after it.
    let job = spec(with_checkpoints(killed.path()));
    stop_at(&job, 5);
    let checkpoints = killed.path().join("out/tiny/.aitk/checkpoints");
    for entry in std::fs::read_dir(&checkpoints).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().contains("5") {
            std::fs::remove_dir_all(path).unwrap();
        }
    }
    let (outcome, events) = run_spec(&job);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("resuming from step 4"), "{}", logs(&events));
    assert_eq!(losses(&events), expected[4..]);
    let file = |root: &Path| root.join("out/tiny/tiny.safetensors");
    equal(&file(whole.path()), &file(killed.path()));
}

#[test]
fn control_images_and_their_options_change_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let mut base = kontext(dir.path(), 2);
    base.train.lr = 0.0;
    base.save.save_every = None;
    let train = |change: &dyn Fn(&mut TrainerProcess)| {
        let mut process = base.clone();
        change(&mut process);
        let _ = std::fs::remove_dir_all(dir.path().join("out"));
        losses(&complete(process))
    };
    let whole = train(&|_| {});
    // Caches give the same numbers.
    assert_eq!(train(&|_| {}), whole);
    assert_eq!(
        train(&|process| process.datasets[0].cache_latents_to_disk = false),
        whole
    );
    let others = [
        train(&|process| process.datasets[0].control_path = OneOrMany(Vec::new())),
        train(&|process| process.datasets[0].control_transparent_color = Rgb([255, 255, 255])),
        train(&|process| process.datasets[0].full_size_control_images = false),
    ];
    for other in &others {
        assert!(
            other.iter().zip(&whole).all(|(a, b)| (a / b - 1.0).abs() > 1e-6),
            "{other:?} and {whole:?}"
        );
    }
}

/// Five images, each of whose steps has another of them as its control image.
#[test]
fn control_images_from_the_same_folder_are_drawn_each_step_and_resume_exactly() {
    let with_drawn = |root: &Path| {
        let mut process = kontext(root, 6);
        process.datasets[0].control_path = OneOrMany(Vec::new());
        process.datasets[0].control_from_same_folder = true;
        process.datasets[0].flip_x = true;
        process
    };
    let (whole, events) = check_resumption(&with_drawn);
    let expected = losses(&events);
    assert_eq!(expected.len(), 6);
    // Without them the model sees no control image.
    let mut without = with_drawn(whole.path());
    without.datasets[0].control_from_same_folder = false;
    std::fs::remove_dir_all(whole.path().join("out")).unwrap();
    let without = losses(&complete(without));
    assert!(
        without.iter().zip(&expected).all(|(a, b)| (a / b - 1.0).abs() > 1e-6),
        "{without:?} and {expected:?}"
    );
}

#[test]
fn a_changed_control_image_is_a_changed_data_set() {
    let dir = tempfile::tempdir().unwrap();
    let process = kontext(dir.path(), 4);
    let job = spec(process);
    let (outcome, _) = stop_at(&job, 2);
    assert_eq!(outcome, Outcome::stopped());
    image::RgbImage::from_pixel(40, 40, image::Rgb([9; 3]))
        .save(dir.path().join("controls/p1.png"))
        .unwrap();
    let (outcome, events) = run_spec(&job);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(
        logs(&events).contains("the data set changed since step 2"),
        "{}",
        logs(&events)
    );
    // The stale latent is not used: there are two of p1 now.
    let data = std::fs::read_dir(dir.path().join("data/_latent_cache")).unwrap();
    let of_p1 = data.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("p1_"));
    assert_eq!(of_p1.count(), 3);
}

#[test]
fn every_timestep_type_trains_and_samples_change_their_control_images() {
    for kind in sampled_cases(vec![
        TimestepType::Shift,
        TimestepType::Linear,
        TimestepType::LognormBlend,
        TimestepType::Weighted,
        TimestepType::FourStep,
        TimestepType::NextSample,
    ]) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = kontext(dir.path(), 2);
        process.train.timestep_type = kind;
        process.train.bypass_guidance_embedding = kind == TimestepType::Weighted;
        process.train.do_cfg = kind == TimestepType::Linear;
        process.train.cfg_scale = if kind == TimestepType::Linear { 2.0 } else { 1.0 };
        let samples = kind == TimestepType::Shift;
        if samples {
            let control = |index: u32| dir.path().join(format!("controls/p{index}.png")).display().to_string();
            process.train.disable_sampling = false;
            process.sample.sampler = SamplerName::FlowMatch;
            process.sample.samples = vec![
                SampleItem {
                    prompt: format!("a red circle --ctrl_img {}", control(0)),
                    ..SampleItem::default()
                },
                SampleItem {
                    prompt: "a red circle".into(),
                    ctrl_img: Some(control(3)),
                    ..SampleItem::default()
                },
            ];
            // Rounded down to multiples of 16.
            (process.sample.width, process.sample.height) = (93, 75);
            process.sample.sample_steps = 2;
            process.sample.format = "png".into();
            process.sample.walk_seed = false;
        }
        let events = complete(process);
        assert!(losses(&events).iter().all(|loss| loss.is_finite()), "{kind:?}");
        let files: Vec<PathBuf> = events
            .iter()
            .filter_map(|event| match event {
                ChildEvent::Artifact { kind, path, .. } if kind == "sample" => Some(path.clone()),
                _ => None,
            })
            .collect();
        // Before the first step, and at the end.
        assert_eq!(files.len(), if samples { 4 } else { 0 });
        if let [first, second, ..] = files.as_slice() {
            let pixels = |path: &Path| image::open(path).unwrap().into_rgb8();
            assert_eq!(pixels(first).dimensions(), (80, 64));
            // The same prompt and seed, another control image.
            assert_ne!(pixels(first).as_raw(), pixels(second).as_raw());
        }
    }
}

#[test]
fn a_full_fine_tune_resumes_exactly_and_every_block_learns_from_the_control_image() {
    let full = |root: &Path, steps: u64| {
        let mut process = kontext(root, steps);
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
    let transformer = |root: &Path| root.join("out/tiny/tiny/transformer");
    equal(&transformer(whole.path()), &transformer(parts.path()));
    let base = tensors(&fixtures().join("tiny_flux/transformer"));
    for (name, tensor) in tensors(&transformer(whole.path())) {
        assert!(gap(&tensor, &base[&name]) > 0.0, "{name} did not change");
    }
}

#[test]
fn buckets_batches_repeats_and_squares_train_in_portable_mode_too() {
    let dir = tempfile::tempdir().unwrap();
    let train = |portable: bool, change: &dyn Fn(&mut TrainerProcess)| {
        let mut process = kontext(dir.path(), 3);
        process.datasets[0].resolution = OneOrMany(vec![32, 48]);
        process.datasets[0].num_repeats = 2;
        process.train.cache_text_embeddings = true;
        process.datasets[0].shuffle_tokens = false;
        change(&mut process);
        let _ = std::fs::remove_dir_all(dir.path().join("out"));
        let mut spec = spec(process);
        if portable {
            spec.device = DeviceRef::PORTABLE_CPU;
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        losses(&events)
    };
    let changes: [&dyn Fn(&mut TrainerProcess); 3] = [
        &|_| {},
        &|process| process.train.gradient_accumulation = 2,
        &|process| process.datasets[0].buckets = false,
    ];
    for change in sampled_cases(changes.to_vec()) {
        let (ours, portable) = (train(false, change), train(true, change));
        for (a, b) in ours.iter().zip(&portable) {
            assert!((a / b - 1.0).abs() < 1e-4, "{ours:?} and {portable:?}");
        }
    }
}

#[test]
fn images_of_odd_sizes_train() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = kontext(dir.path(), 4);
    for (index, size) in [(17, 91), (33, 31), (90, 16), (63, 65), (200, 7)]
        .into_iter()
        .enumerate()
    {
        let path = |folder: &str| dir.path().join(folder).join(format!("p{index}.png"));
        image::RgbImage::from_pixel(size.0, size.1, image::Rgb([90; 3]))
            .save(path("data"))
            .unwrap();
        image::RgbImage::from_pixel(1 + size.1, 3, image::Rgb([30; 3]))
            .save(path("controls"))
            .unwrap();
    }
    process.train.batch_size = 3;
    process.datasets[0].resolution = OneOrMany(vec![64]);
    process.datasets[0].flip_y = true;
    process.datasets[0].random_crop = true;
    let events = complete(process);
    assert!(losses(&events).iter().all(|loss| loss.is_finite()));
    assert!(
        logs(&events).contains("of 5 images have another aspect ratio"),
        "{}",
        logs(&events)
    );
}

#[test]
fn what_cannot_be_used_is_refused_before_the_model_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let mut base = kontext(dir.path(), 2);
    // Loading it would be another error.
    base.model.name_or_path = dir.path().join("no-model").display().to_string();
    let refused = |change: &dyn Fn(&mut TrainerProcess), expected: &[&str]| {
        let mut process = base.clone();
        change(&mut process);
        let message = failure(&process);
        for part in expected {
            assert!(message.contains(part), "{part} in {message}");
        }
    };
    let sample = |prompt: &str| {
        let item = SampleItem {
            prompt: prompt.into(),
            ..SampleItem::default()
        };
        move |process: &mut TrainerProcess| {
            process.train.disable_sampling = false;
            process.sample.samples = vec![item.clone()];
        }
    };
    refused(&sample("a cat"), &["\"a cat\" has none", "--ctrl_img PATH"]);
    refused(
        &sample("a cat --ctrl_img /no/such.png"),
        &["/no/such.png: no such file"],
    );
    refused(
        &|process| {
            process.model.arch = Arch::from(ArchName::Flux);
        },
        &["control_path", "`arch: flux` takes no control images"],
    );
    refused(
        &|process| {
            sample("a cat --ctrl_img a.png")(process);
            process.model.arch = Arch::from(ArchName::Flux);
            process.datasets[0].control_path = OneOrMany(Vec::new());
        },
        &["`arch: flux` takes no control image"],
    );
    std::fs::remove_file(dir.path().join("controls/p3.png")).unwrap();
    let missing = [
        "1 of 5 images have no control image",
        "data/p3.png",
        "p3.jpg, p3.jpeg, p3.png or p3.webp",
        "/controls",
    ];
    refused(&|_| {}, &missing);
    // `aitk validate` says the same.
    let job = serde_json::from_value(spec(base.clone()).job).unwrap();
    let problems = preview(&job, &base, &BTreeMap::new()).problems;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(missing.iter().all(|part| problems[0].contains(part)), "{problems:?}");
    std::fs::write(dir.path().join("controls/p3.png"), b"no image").unwrap();
    refused(&|_| {}, &["controls/p3.png", "not an image"]);
    // The header is whole, the rest is not.
    control_images(&dir.path().join("controls"));
    let bytes = std::fs::read(dir.path().join("controls/p3.png")).unwrap();
    std::fs::write(dir.path().join("controls/p3.png"), &bytes[..bytes.len() / 2]).unwrap();
    refused(
        &|process| process.model.name_or_path = fixtures().join("tiny_flux").display().to_string(),
        &["controls/p3.png", "damaged or cut off"],
    );
}

#[test]
fn a_job_with_staged_inputs_opens_only_its_own_control_images() {
    let dir = tempfile::tempdir().unwrap();
    let process = kontext(dir.path(), 1);
    let folder = process.datasets[0].control_path[0].clone();
    let mut attempt = in_own_folder(spec(process.clone()), dir.path());
    attempt.inputs.remove(&folder);
    let message = |attempt| match run_spec(&attempt).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    };
    let refused = message(attempt.clone());
    assert!(
        refused.contains(&format!("`{folder}` is not an input of this job")),
        "{refused}"
    );
    attempt.inputs.insert(folder.clone(), folder.clone().into());
    let (outcome, events) = run_spec(&attempt);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    #[cfg(unix)]
    {
        let link = Path::new(&folder).join("p2.png");
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(dir.path().join("data/p2.png"), &link).unwrap();
        let refused = message(attempt);
        assert!(refused.contains("p2.png` is not a file of this data set"), "{refused}");
    }
}
