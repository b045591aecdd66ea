//! Sliders: their losses against `tests/reference/make_sliders.py`, and what they do to images of the demo's model.

use super::options;
use super::preview;
use super::replay_tests::{replay, replayed};
use super::tests::{images, logs, losses, run_spec, spec, stop_at, trainer};
use super::transformer_test_runs::{complete, flow_trainer};
use crate::testing::{attempt, fixtures, runs_all_cases, sampled_cases};
use aitk_common::attempt::{AttemptSpec, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::{ProcessType, TrainerProcess};
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::slider::{ReferenceDataset, SliderAnchor, SliderConfig, SliderTarget};
use aitk_common::job::values::{ImageSize, OneOrMany};
use aitk_common::job::{self, JobSpec, LoadOptions, ProcessKind};
use image::RgbImage;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const STEPS: u64 = 5;

fn target(target_class: &str, positive: &str, negative: &str, [multiplier, weight]: [f64; 2]) -> SliderTarget {
    SliderTarget {
        target_class: target_class.into(),
        positive: positive.into(),
        negative: negative.into(),
        multiplier,
        weight,
        ..SliderTarget::default()
    }
}

fn anchor(prompt: &str, multiplier: f64) -> SliderAnchor {
    SliderAnchor {
        prompt: prompt.into(),
        multiplier,
        ..SliderAnchor::default()
    }
}

/// The images of the reference, each with the next one as its negative.
pub(super) fn image_pairs(root: &Path) -> ReferenceDataset {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(replay("data"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.retain(|path| path.extension().is_some_and(|suffix| suffix != "txt"));
    paths.sort();
    let negative = root.join("negative");
    std::fs::create_dir(&negative).unwrap();
    for (own, other) in paths.iter().zip(paths.iter().cycle().skip(1)) {
        let name = Path::new(own.file_stem().unwrap()).with_extension(other.extension().unwrap());
        std::fs::copy(other, negative.join(name)).unwrap();
    }
    ReferenceDataset {
        pos_folder: Some(root.join("images").display().to_string()),
        neg_folder: Some(negative.display().to_string()),
        target_class: "a thing".into(),
        size: 64,
        network_weight: 0.5,
        pos_weight: Some(1.5),
        ..ReferenceDataset::default()
    }
}

/// The training of the reference with this name.
pub(super) fn reference(name: &str, root: &Path) -> TrainerProcess {
    let mut process = replayed(root);
    process.train.steps = STEPS;
    let samples = ["prompts", "parts"].contains(&name);
    if samples {
        process.train.max_denoising_steps = 6;
    }
    let mut slider = SliderConfig {
        positive_prompt: "a large red circle".into(),
        negative_prompt: "a small square, drawing".into(),
        target_class: "a circle".into(),
        guidance_strength: 2.5,
        anchor_strength: 0.6,
        targets: vec![
            target("a circle", "a large red circle", "blurry", [1.5, 0.7]),
            target("", "a photo of a dog", "", [-0.8, 1.3]),
        ],
        anchors: vec![anchor("a house", 0.5), anchor("a photo", 2.0)],
        resolutions: vec![ImageSize(32, 32), ImageSize(40, 24)],
        weight_jitter: 0.4,
        img_loss_weight: 0.8,
        cfg_loss_weight: 0.3,
        ..SliderConfig::default()
    };
    process.kind = match name {
        "concept" => ProcessType::ConceptSlider,
        "anchored" => {
            slider.anchor_class = Some("a house".into());
            ProcessType::ConceptSlider
        }
        "prompts" | "prompts on images" => ProcessType::Slider,
        "parts" => {
            slider.batch_full_slide = false;
            ProcessType::Slider
        }
        "pairs" => ProcessType::ImageReferenceSlider,
        _ => ProcessType::UltimateSlider,
    };
    if process.kind.uses_image_pairs() {
        slider.datasets = vec![image_pairs(root)];
    }
    if process.kind.uses_image_pairs() || samples {
        process.datasets.clear();
    }
    process.slider = Some(slider);
    process
}

#[test]
fn losses_of_sliders_match_the_reference() {
    let expected = std::fs::read(replay("sliders.json")).unwrap();
    let expected: BTreeMap<String, Vec<f64>> = serde_json::from_slice(&expected).unwrap();
    assert_eq!(expected.len(), 7);
    for (name, expected) in sampled_cases(expected.iter().collect()) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = reference(name, dir.path());
        // Encoded while training, and before.
        process.train.unload_text_encoder = name == "anchored";
        process.train.steps = if runs_all_cases() { STEPS } else { 3 };
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{name}: {}", logs(&events));
        let found = losses(&events);
        assert!(found.len() == expected.len() || !runs_all_cases() && found.len() == 3);
        for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (found / expected - 1.0).abs();
            assert!(
                difference < 2e-5,
                "{name}, step {step}: {found} for {expected}, {difference:.1e}"
            );
        }
    }
}

/// As in ai-toolkit, where `snr_gamma` is of other trainings alone.
#[test]
fn a_slider_is_weighed_by_min_snr_gamma_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = reference("prompts", dir.path());
    (process.train.min_snr_gamma, process.train.snr_gamma) = (Some(5.0), Some(4.0));
    let weighting = options::snr_weighting(&process);
    assert_eq!((weighting.min_snr_gamma, weighting.snr_gamma), (Some(5.0), None));
    process.kind = ProcessType::SdTrainer;
    assert_eq!(options::snr_weighting(&process).snr_gamma, Some(4.0));
}

#[test]
fn the_guidance_embedding_of_a_slider_is_1() {
    let train = |cfg_scale: f64| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flow_trainer(dir.path(), ArchName::Flux, &fixtures().join("tiny_flux"), 2);
        process.kind = ProcessType::ConceptSlider;
        process.slider = Some(SliderConfig {
            positive_prompt: "a large circle".into(),
            negative_prompt: "a small circle".into(),
            target_class: "a circle".into(),
            ..SliderConfig::default()
        });
        process.train.cfg_scale = cfg_scale;
        losses(&complete(process))
    };
    assert_eq!(train(3.5), train(1.0));
}

#[test]
fn a_slider_that_was_stopped_ends_with_the_same_weights() {
    for name in sampled_cases(vec!["parts", "ultimate", "concept"]) {
        let weights = |stops: bool| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = reference(name, dir.path());
            process.save.save_every = Some(100);
            process.train.steps = 3;
            let spec = spec(process);
            if stops {
                let (outcome, events) = stop_at(&spec, 2);
                assert_eq!(outcome, Outcome::stopped(), "{name}: {}", logs(&events));
            }
            let (outcome, events) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{name}: {}", logs(&events));
            assert!(!logs(&events).contains("changed since"), "{name}: {}", logs(&events));
            let file =
                candle_core::safetensors::load(dir.path().join("out/tiny/tiny.safetensors"), &candle_core::Device::Cpu)
                    .unwrap();
            let tensors: BTreeMap<_, _> = file
                .into_iter()
                .map(|(name, x)| (name, x.flatten_all().unwrap().to_vec1::<f32>().unwrap()))
                .collect();
            tensors
        };
        assert_eq!(weights(true), weights(false), "{name}");
    }
}

#[test]
fn halves_of_one_image_train_as_two_images() {
    let train = |halves: bool| {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let mut process = trainer(root, 3);
        let folders = ["pairs", "positive", "negative"].map(|name| root.join(name));
        for folder in &folders {
            std::fs::create_dir(folder).unwrap();
        }
        for number in 0..3u32 {
            let image = |shift: u32| {
                RgbImage::from_fn(40, 32, |x, y| {
                    image::Rgb([(x * 6 + shift) as u8, (y * 7) as u8, (number * 80) as u8])
                })
            };
            let (negative, positive) = (image(0), image(90));
            // One column in the middle is in no half.
            let both = RgbImage::from_fn(81, 32, |x, y| match x {
                0..40 => *negative.get_pixel(x, y),
                40 => image::Rgb([0, 255, 0]),
                _ => *positive.get_pixel(x - 41, y),
            });
            let name = format!("{number}.png");
            for (folder, image) in folders.iter().zip([&both, &positive, &negative]) {
                image.save(folder.join(&name)).unwrap();
            }
        }
        let path = |folder: &PathBuf| Some(folder.display().to_string());
        let mut set = ReferenceDataset {
            size: 32,
            target_class: "a circle".into(),
            ..ReferenceDataset::default()
        };
        match halves {
            true => set.pair_folder = path(&folders[0]),
            false => (set.pos_folder, set.neg_folder) = (path(&folders[1]), path(&folders[2])),
        }
        process.kind = ProcessType::ImageReferenceSlider;
        process.datasets.clear();
        process.train.batch_size = 1;
        process.slider = Some(SliderConfig {
            datasets: vec![set],
            ..SliderConfig::default()
        });
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        losses(&events)
    };
    let (one, two) = (train(true), train(false));
    for (one, two) in one.iter().zip(&two) {
        // The noise of the autoencoder's posterior differs.
        assert!((one / two - 1.0).abs() < 3e-2, "{one} {two}");
    }
}

/// A job from the text of a config, with the training at a thousandth of its size.
pub(super) fn small_job(text: &str, root: &Path, warnings: &[&str]) -> AttemptSpec {
    let format = serde_json::from_value(serde_json::json!("yaml")).unwrap();
    let loaded = job::parse(text, format, None, &LoadOptions::default()).unwrap();
    let found: Vec<&str> = loaded.warnings.iter().map(|warning| warning.key.as_str()).collect();
    assert_eq!(found, warnings, "{text}");
    let report = loaded.spec.unsupported();
    assert!(report.errors.is_empty(), "{:?}", report.errors);
    let mut job = loaded.spec;
    let Some(ProcessKind::Train(process)) = job.process.first_mut().map(|process| &mut process.kind) else {
        panic!("not a training");
    };
    process.model.name_or_path = fixtures().join("tiny_sd").display().to_string();
    process.training_folder = Some(root.join("out").display().to_string());
    process.training_seed = Some(3);
    process.train.steps = 3;
    process.train.max_denoising_steps = 4;
    process.save.save_every = Some(2);
    process.sample.sample_every = Some(3);
    (process.sample.width, process.sample.height, process.sample.sample_steps) = (32, 32, 2);
    for sample in &mut process.sample.samples {
        (sample.width, sample.height, sample.sample_steps) = (Some(32), Some(32), Some(2));
    }
    for dataset in &mut process.datasets {
        dataset.resolution = OneOrMany(vec![32]);
    }
    if let Some(slider) = &mut process.slider {
        slider.resolutions = vec![ImageSize(32, 32)];
        for dataset in &mut slider.datasets {
            dataset.size = 32;
        }
    }
    attempt(&job, "")
}

#[test]
fn example_configs_of_sliders_run() {
    let examples = [
        include_str!("../../../config/examples/train_slider_sd15.yaml"),
        include_str!("../../../config/examples/train_concept_slider_sd15.yaml"),
        include_str!("../../../config/examples/train_image_slider_sd15.yaml"),
    ];
    let cases = examples
        .iter()
        .flat_map(|text| [false, true].map(|portable| (text, portable)));
    for (text, portable) in sampled_cases(cases.collect()) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for folder in ["images", "detailed", "plain"] {
            images(&root.join(folder));
        }
        let text = text.replace("/path/to/", &format!("{}/", root.display()));
        let mut spec = small_job(&text, root, &[]);
        let job: JobSpec = serde_json::from_value(spec.job.clone()).unwrap();
        let previewed = preview(&job, job.process[0].trainer().unwrap(), &spec.inputs);
        assert_eq!(previewed.problems, [""; 0]);
        if portable {
            spec.device = DeviceRef::PORTABLE_CPU;
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        assert_eq!(losses(&events).len(), 1, "the last step is logged");
    }
}

/// `train_slider.example.yml` of ai-toolkit (27a03a91), with its keys and values but for paths.
#[test]
fn the_example_slider_of_ai_toolkit_runs() {
    let dir = tempfile::tempdir().unwrap();
    let text = "job: train
config:
  name: detail_slider_v1
  training_folder: output/LoRA
  device: cuda:0
  log_dir: LOG_DIR
  process:
    - type: slider
      network: {type: lierla, linear: 8, linear_alpha: 4}
      train: {noise_scheduler: ddpm, steps: 500, lr: 2e-4, gradient_checkpointing: true, train_unet: true,
        train_text_encoder: false, min_snr_gamma: 5.0, optimizer: adamw, lr_scheduler: constant, max_denoising_steps: 40,
        batch_size: 1, dtype: bf16, noise_offset: 0.0}
      model: {name_or_path: runwayml/stable-diffusion-v1-5, is_v2: false, is_v_pred: false, is_xl: false}
      save: {dtype: float16, save_every: 50, max_step_saves_to_keep: 2}
      sample: {sampler: ddpm, sample_every: 20, width: 512, height: 512, prompts: [a red circle --m -5, 'a blue square, --m 5'],
        neg: 'cartoon, fake, drawing', seed: 42, walk_seed: false, guidance_scale: 7, sample_steps: 20, network_multiplier: 1.0}
      logging: {log_every: 10, use_wandb: false, verbose: false}
      slider:
        resolutions: [[512, 512]]
        batch_full_slide: true
        targets:
          - {target_class: '', positive: 'high detail, 8k, intricate', negative: 'blurry, boring, fuzzy', weight: 1.0, shuffle: true}
meta: {name: '[name]'}
";
    let logs_folder = dir.path().join("tensorboard");
    let spec = small_job(
        &text.replace("LOG_DIR", &logs_folder.display().to_string()),
        dir.path(),
        &[],
    );
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs_folder.is_dir());
    assert!(
        dir.path()
            .join("out/detail_slider_v1/detail_slider_v1.safetensors")
            .exists()
    );
}

/// What is measured of an image of the demo's model: how much more red than blue it has, and how bright its border is.
fn measure(path: &Path) -> [f64; 2] {
    let image = image::open(path).unwrap().to_rgb8();
    let (width, height) = image.dimensions();
    let (mut redness, mut border, mut count) = (0.0, 0.0, 0.0);
    for (x, y, pixel) in image.enumerate_pixels() {
        let [red, green, blue] = pixel.0.map(f64::from);
        redness += (red - blue) / f64::from(width * height);
        if x.min(y).min(width - 1 - x).min(height - 1 - y) < 4 {
            border += (red + green + blue) / 3.0;
            count += 1.0;
        }
    }
    [redness, border / count]
}

/// Trains a slider from blue to red on the demo's model. Returns the measures at strengths -3, 0 and 3, each of several images.
fn red_slider(change: impl FnOnce(&mut TrainerProcess, &Path)) -> [[f64; 2]; 3] {
    const IMAGES: usize = 4;
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut process = trainer(root, 40);
    let demo = fixtures().join("../../config/demo");
    process.model.name_or_path = demo.join("base").display().to_string();
    process.datasets.clear();
    process.train.batch_size = 1;
    process.train.max_denoising_steps = 8;
    process.train.disable_sampling = false;
    process.train.skip_first_sample = true;
    process.train.gradient_checkpointing = false;
    process.train.lr = 1e-3;
    process.save.save_every = Some(1000);
    process.logging.log_every = Some(20);
    process.slider = Some(SliderConfig {
        targets: vec![target("a purple circle", "a red circle", "a blue circle", [3.0, 1.0])],
        positive_prompt: "a red circle".into(),
        negative_prompt: "a blue circle".into(),
        target_class: "a purple circle".into(),
        guidance_strength: 1.0,
        resolutions: vec![ImageSize(64, 64)],
        ..SliderConfig::default()
    });
    process.sample.sampler = SamplerName::Ddim;
    process.sample.sample_every = Some(1000);
    process.sample.format = "png".into();
    (process.sample.width, process.sample.height) = (64, 64);
    (process.sample.sample_steps, process.sample.guidance_scale) = (20, 4.0);
    let strengths = [-3, 0, 3];
    process.sample.samples = strengths
        .iter()
        .flat_map(|strength| (0..IMAGES).map(move |seed| format!("a purple circle --m {strength} --d {seed}")))
        .map(|prompt| SampleItem {
            prompt,
            ..SampleItem::default()
        })
        .collect();
    change(&mut process, root);
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let mut files: Vec<PathBuf> = std::fs::read_dir(root.join("out/tiny/samples"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort_by_key(|path| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        name.rsplit('_').next().unwrap().parse::<u32>().unwrap()
    });
    assert_eq!(files.len(), 3 * IMAGES);
    let measures: Vec<[f64; 2]> = files.iter().map(|path| measure(path)).collect();
    let mean = |images: &[[f64; 2]]| [0, 1].map(|at| images.iter().map(|one| one[at]).sum::<f64>() / IMAGES as f64);
    [0, 1, 2].map(|at| mean(&measures[at * IMAGES..(at + 1) * IMAGES]))
}

fn moves_red_alone(name: &str, [negative, neutral, positive]: [[f64; 2]; 3]) {
    println!(
        "{name}: redness {:.1}, {:.1}, {:.1}; border {:.1}, {:.1}, {:.1}",
        negative[0], neutral[0], positive[0], negative[1], neutral[1], positive[1]
    );
    assert!(positive[0] > neutral[0] + 5.0, "{name}: {positive:?} {neutral:?}");
    assert!(negative[0] < neutral[0] - 5.0, "{name}: {negative:?} {neutral:?}");
    for end in [negative, positive] {
        assert!(
            (end[1] - neutral[1]).abs() < 25.0,
            "{name}: the border changes, {end:?} {neutral:?}"
        );
    }
}

#[test]
fn sliders_move_their_attribute_alone() {
    if crate::testing::skips_long_tests() {
        return;
    }
    type Train = fn() -> [[f64; 2]; 3];
    let kinds: [(&str, Train); 3] = [
        ("slider", slider_of_prompts),
        ("concept_slider", concept_slider),
        ("image_reference_slider_trainer", slider_of_pairs),
    ];
    for (name, train) in kinds {
        moves_red_alone(name, train());
    }
}

fn slider_of_prompts() -> [[f64; 2]; 3] {
    red_slider(|process, _| {
        process.kind = ProcessType::Slider;
        process.train.steps = 30;
        process.train.max_denoising_steps = 6;
    })
}

fn concept_slider() -> [[f64; 2]; 3] {
    red_slider(|process, root| {
        process.train.steps = 60;
        process.kind = ProcessType::ConceptSlider;
        process.datasets = trainer(root, 1).datasets;
        process.datasets[0].folder_path = Some(fixtures().join("../../config/demo/dataset").display().to_string());
        process.datasets[0].cache_latents_to_disk = false;
        process.datasets[0].resolution = OneOrMany(vec![64]);
    })
}

fn slider_of_pairs() -> [[f64; 2]; 3] {
    red_slider(|process, root| {
        for (folder, colour) in [("red", [230, 30, 30]), ("blue", [30, 30, 230])] {
            std::fs::create_dir(root.join(folder)).unwrap();
            for number in 0..4 {
                let (x0, y0, radius) = (24 + 5 * number, 40 - 4 * number, 14 + number);
                let image = RgbImage::from_fn(64, 64, |x, y| {
                    let (x, y) = (x as i32 - x0, y as i32 - y0);
                    image::Rgb(if x * x + y * y < radius * radius {
                        colour
                    } else {
                        [255; 3]
                    })
                });
                image.save(root.join(folder).join(format!("{number}.png"))).unwrap();
            }
        }
        let folder = |name: &str| Some(root.join(name).display().to_string());
        process.kind = ProcessType::ImageReferenceSlider;
        (process.train.steps, process.train.batch_size, process.train.lr) = (120, 4, 4e-3);
        // Colours are decided at high noise levels.
        process.train.max_denoising_steps = 400;
        process.slider = Some(SliderConfig {
            datasets: vec![ReferenceDataset {
                pos_folder: folder("red"),
                neg_folder: folder("blue"),
                target_class: "a purple circle".into(),
                network_weight: 2.0,
                size: 64,
                ..ReferenceDataset::default()
            }],
            ..SliderConfig::default()
        });
    })
}
