//! Textual inversion, against `tests/reference/make_textual_inversion.py`.

use super::replay_tests::{replay, replayed};
use super::slider_tests::small_job;
use super::tests::{images, logs, losses, run_spec, spec, stop_at, trainer};
use crate::autograd;
use crate::error::EngineError;
use crate::families::{LoadOptions, Model, Prompt};
use crate::testing::{fixtures, load_sd, sampled_cases};
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::dtype::DType;
use aitk_common::job::embedding::EmbeddingConfig;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::values::OneOrMany;
use candle_core::{Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

fn report() -> Value {
    serde_json::from_slice(&std::fs::read(replay("textual_inversion.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

pub(super) fn with_word(mut process: TrainerProcess) -> TrainerProcess {
    process.network = None;
    process.embedding = Some(EmbeddingConfig {
        trigger: "vorx".into(),
        tokens: 3,
        init_words: "a cat".into(),
        trigger_class_name: Some("dog".into()),
        ..EmbeddingConfig::default()
    });
    process
}

/// The same training with samples at its end.
pub(super) fn sampled(mut process: TrainerProcess, prompts: &[&str]) -> TrainerProcess {
    process.train.disable_sampling = false;
    process.sample.sample_steps = 2;
    (process.sample.width, process.sample.height) = (64, 64);
    process.sample.format = "png".into();
    process.sample.walk_seed = false;
    let item = |prompt: &&str| SampleItem {
        prompt: (*prompt).into(),
        ..SampleItem::default()
    };
    process.sample.samples = prompts.iter().map(item).collect();
    process
}

/// The pixels of the samples, in their order.
fn samples(root: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(root.join("out/tiny/samples")).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort_by_key(|path| path.to_string_lossy().split("__").last().unwrap().to_owned());
    files
        .iter()
        .map(|path| image::open(path).unwrap().to_rgb8().into_raw())
        .collect()
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    let all = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    all.into_iter().collect()
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    let numbers: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    numbers.into_iter().map(f64::from).collect()
}

/// The largest difference, as a fraction of the largest number.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0, |all: f64, x| all.max(x.abs()));
    let gaps = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    gaps.fold(0.0, f64::max) / largest
}

#[test]
fn a_word_is_trained_as_in_the_reference() {
    let report = report();
    for name in sampled_cases(vec!["sd", "prior"]) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = with_word(replayed(dir.path()));
        std::fs::write(dir.path().join("images/p2.txt"), "two vorx, blurry").unwrap();
        process.datasets[0].prior_reg = name == "prior";
        // Its own rate counts.
        process.train.embedding_lr = Some(process.train.lr);
        process.train.lr = 77.0;
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let expected = numbers(&report[name]["losses"]);
        for (step, (found, expected)) in losses(&events).iter().zip(&expected).enumerate() {
            let difference = (found / expected - 1.0).abs();
            assert!(difference < 2e-5, "{name}, step {step}: {found}, not {expected}");
        }
        let saved = tensors(&dir.path().join("out/tiny/vorx.safetensors"));
        assert_eq!(saved.len(), 1);
        let vectors = flat(&saved["emb_params"]);
        let difference = difference(&vectors, &numbers(&report[name]["vectors"]));
        assert!(difference < 1e-4, "{name}: the vectors differ by {difference:.1e}");
        assert!(super::embedding_tests::difference(&vectors, &numbers(&report[name]["start"])) > 1e-3);
    }
}

#[test]
fn both_text_encoders_get_the_word_and_its_gradients() {
    let report = report();
    let mut model = load_sd(fixtures().join("tiny_sdxl"), &LoadOptions::cpu()).unwrap();
    let vectors: Vec<Var> = model
        .initial_embedding("a cat", 3)
        .unwrap()
        .iter()
        .map(|initial| Var::from_tensor(initial).unwrap())
        .collect();
    let of_vectors: Vec<Tensor> = vectors.iter().map(|var| var.as_tensor().clone()).collect();
    model.add_embedding("vorx", &of_vectors).unwrap();
    let prompts: Vec<String> = serde_json::from_value(report["sdxl"]["prompts"].clone()).unwrap();
    let prompts: Vec<Prompt> = prompts.into_iter().map(Prompt::new).collect();

    let weigh = |x: &Tensor| {
        let weights: Vec<f32> = (0..x.elem_count()).map(|i| (i as f64 * 0.7).sin() as f32).collect();
        let weights = Tensor::from_vec(weights, x.dims(), &Device::Cpu)?;
        (x * weights)?.sum_all()
    };
    let mut outputs = None;
    let (_, gradients) = autograd::gradients(|| {
        let encoded = model.encode_prompts(&prompts)?;
        let (context, pooled) = (
            encoded.get("context").unwrap().clone(),
            encoded.get("pooled").unwrap().clone(),
        );
        let loss = (weigh(&context)? + weigh(&pooled)?)?;
        outputs = Some((context, pooled));
        Ok::<_, EngineError>(loss)
    })
    .unwrap();
    let (context, pooled) = outputs.unwrap();
    let every = |x: &Tensor| {
        let rows: Vec<u32> = (0..77).step_by(9).collect();
        let columns: Vec<u32> = (0..x.dims()[2] as u32).step_by(7).collect();
        let rows = Tensor::new(rows, &Device::Cpu).unwrap();
        let columns = Tensor::new(columns, &Device::Cpu).unwrap();
        flat(&x.index_select(&rows, 1).unwrap().index_select(&columns, 2).unwrap())
    };
    let expected = &report["sdxl"];
    assert!(difference(&every(&context), &numbers(&expected["context"])) < 1e-5);
    assert!(difference(&flat(&pooled), &numbers(&expected["pooled"])) < 1e-5);
    for (index, vectors) in vectors.iter().enumerate() {
        let found = flat(gradients.get(vectors).unwrap());
        let difference = difference(&found, &numbers(&expected["gradients"][index]));
        assert!(
            difference < 1e-4,
            "encoder {index}: gradients differ by {difference:.1e}"
        );
    }
}

#[test]
fn a_word_resumes_exactly_on_every_family_and_is_in_its_samples() {
    let families = [
        (ArchName::Sd1, "tiny_sd", &["emb_params"][..]),
        (ArchName::Sd2, "tiny_sd21", &["emb_params"]),
        (ArchName::Sdxl, "tiny_sdxl", &["clip_g", "clip_l"]),
    ];
    let cases = [DType::F32, DType::BF16, DType::F16].into_iter().zip(families);
    for (dtype, (arch, model, names)) in sampled_cases(cases.collect()) {
        let job = |root: &Path, steps| {
            let mut process = with_word(trainer(root, steps));
            process.model.arch = Arch::from(arch);
            process.model.name_or_path = fixtures().join(model).display().to_string();
            process.train.dtype = dtype;
            process.train.lr = 1e-2;
            process.train.disable_sampling = false;
            process.train.skip_first_sample = true;
            process.train.ema_config.use_ema = arch == ArchName::Sd2;
            process.sample.sample_steps = 2;
            (process.sample.width, process.sample.height) = (64, 64);
            process.sample.format = "png".into();
            let prompt = |text: &str| SampleItem {
                prompt: text.into(),
                ..SampleItem::default()
            };
            process.sample.samples = vec![
                prompt("[trigger] in a house"),
                prompt("vorx in a house"),
                prompt("in a house"),
            ];
            process.sample.walk_seed = false;
            process
        };
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (outcome, events) = run_spec(&spec(job(whole.path(), 6)));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let expected = losses(&events);
        assert!(expected.iter().all(|loss| loss.is_finite()));
        let (_, first) = stop_at(&spec(job(parts.path(), 6)), 3);
        let (outcome, second) = run_spec(&spec(job(parts.path(), 6)));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
        assert_eq!([losses(&first), losses(&second)].concat(), expected);

        let of = |root: &Path| tensors(&root.join("out/tiny/vorx.safetensors"));
        let (ours, resumed) = (of(whole.path()), of(parts.path()));
        assert_eq!(ours.keys().map(String::as_str).collect::<Vec<_>>(), names);
        for (name, tensor) in &ours {
            assert_eq!(crate::testing::gap(tensor, &resumed[name]), 0.0, "{name}");
            assert_eq!(tensor.dims()[0], 3);
        }
        assert!(whole.path().join("out/tiny/vorx_000000004.safetensors").is_file());
        let pixels = samples(whole.path());
        assert_eq!(pixels.len(), 3);
        assert_eq!(pixels[0], pixels[1]);
        assert_ne!(pixels[0], pixels[2]);

        // Another training uses the word, also when its prompts are encoded before.
        for (cached, has_word) in [(false, true), (true, true), (false, false)] {
            let other = tempfile::tempdir().unwrap();
            let mut process = sampled(trainer(other.path(), 1), &["vorx in a house"]);
            (process.model, process.train.dtype) = (job(other.path(), 1).model, dtype);
            process.train.lr = 0.0;
            process.train.cache_text_embeddings = cached;
            process.train.skip_first_sample = true;
            if has_word {
                let file = whole.path().join("out/tiny/vorx.safetensors").display().to_string();
                process.model.embedding_paths = OneOrMany(vec![file]);
            }
            let (outcome, events) = run_spec(&spec(process));
            assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
            assert_eq!(
                samples(other.path())[0] == pixels[0],
                has_word,
                "{arch}, cached: {cached}"
            );
        }
    }
}

#[test]
fn another_run_continues_from_the_newest_save() {
    let dir = tempfile::tempdir().unwrap();
    let job = |steps, tokens| {
        let mut process = with_word(trainer(dir.path(), steps));
        if let Some(embedding) = &mut process.embedding {
            embedding.tokens = tokens;
        }
        spec(process)
    };
    assert_eq!(run_spec(&job(4, 3)).0, Outcome::Completed);
    let folder = dir.path().join("out/tiny");
    std::fs::remove_dir_all(folder.join(".aitk/checkpoints")).unwrap();
    let (outcome, events) = run_spec(&job(6, 3));
    assert_eq!(outcome, Outcome::Completed);
    assert!(
        logs(&events).contains("(step 4), with a fresh optimizer"),
        "{}",
        logs(&events)
    );
    assert_eq!(losses(&events).len(), 2);
    std::fs::remove_dir_all(folder.join(".aitk/checkpoints")).unwrap();
    let (outcome, _) = run_spec(&job(8, 2));
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        message.contains("this training has [[2, ") && message.contains("`tokens`"),
        "{message}"
    );
}

#[test]
fn a_run_folder_of_another_word_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let job = |steps, trigger: &str| {
        let mut process = with_word(trainer(dir.path(), steps));
        if let Some(embedding) = &mut process.embedding {
            embedding.trigger = trigger.into();
        }
        spec(process)
    };
    assert_eq!(run_spec(&job(2, "vorx")).0, Outcome::Completed);
    let (outcome, _) = run_spec(&job(4, "quux"));
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        message.starts_with("embedding.trigger: the run folder ")
            && message.contains("a checkpoint of the word `vorx`"),
        "{message}"
    );
    assert_eq!(run_spec(&job(4, "vorx")).0, Outcome::Completed);
}

#[test]
fn files_of_words_that_cannot_be_used_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, width: usize, vectors: usize| {
        let path = dir.path().join(format!("{name}.safetensors"));
        let vectors = Tensor::ones((vectors, width), candle_core::DType::F32, &Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("emb_params", vectors)].into(), &path).unwrap();
        path.display().to_string()
    };
    let width = {
        let (outcome, _) = run_spec(&spec(with_word(trainer(dir.path(), 1))));
        assert_eq!(outcome, Outcome::Completed);
        let saved = tensors(&dir.path().join("out/tiny/vorx.safetensors"));
        saved["emb_params"].dims()[1]
    };
    let good = write("quux", width, 4);
    for (other, expected) in [
        (write("cat", width, 1), "knows the word `cat`"),
        (
            write("narrow", width / 2, 1),
            "numbers, and the text encoder has vectors of",
        ),
        (
            write("QUUX_2", width, 1),
            "`quux_2` is also how they write one of the 4 vectors of `quux`",
        ),
    ] {
        let mut process = trainer(dir.path(), 1);
        process.model.embedding_paths = OneOrMany(vec![good.clone(), other.clone()]);
        process.training_folder = Some(dir.path().join("other").display().to_string());
        let (outcome, _) = run_spec(&spec(process));
        let Outcome::Failed { cause, message } = outcome else {
            panic!("{other}: {outcome:?}");
        };
        assert_eq!(cause, aitk_common::attempt::FailureCause::BadInput, "{message}");
        assert!(
            message.starts_with(&format!("model.embedding_paths[1]: {other}: ")) && message.contains(expected),
            "{message}"
        );
    }
    // A trigger that a loaded word takes.
    for (trigger, expected) in [
        ("Quux", "another word is called `quux`"),
        ("quux_1", "`quux_1` is also how"),
    ] {
        let mut process = with_word(trainer(dir.path(), 1));
        process.model.embedding_paths = OneOrMany(vec![good.clone()]);
        process.training_folder = Some(dir.path().join(trigger).display().to_string());
        if let Some(embedding) = &mut process.embedding {
            embedding.trigger = trigger.into();
        }
        let (outcome, _) = run_spec(&spec(process));
        let Outcome::Failed { message, .. } = outcome else {
            panic!("{trigger}: {outcome:?}");
        };
        assert!(
            message.starts_with("embedding.trigger: ") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn a_word_is_trained_without_the_u_net() {
    let dir = tempfile::tempdir().unwrap();
    let file = |folder: &str, train_unet| {
        let mut process = with_word(trainer(dir.path(), 2));
        process.train.train_unet = train_unet;
        process.training_folder = Some(dir.path().join(folder).display().to_string());
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        tensors(&dir.path().join(folder).join("tiny/vorx.safetensors"))
            .values()
            .map(flat)
            .collect::<Vec<_>>()
    };
    assert_eq!(file("on", true), file("off", false));
}

#[test]
fn words_that_cannot_be_trained_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (trigger, tokens, expected) in [
        ("cat", 3, "knows the word `cat`"),
        ("a b", 3, "without blanks"),
        ("vorx", u32::MAX, "expected 1 to 75"),
        ("../vorx", 3, "embedding.trigger"),
    ] {
        let mut process = with_word(trainer(dir.path(), 2));
        if let Some(embedding) = &mut process.embedding {
            (embedding.trigger, embedding.tokens) = (trigger.into(), tokens);
        }
        let (outcome, _) = run_spec(&spec(process));
        let Outcome::Failed { message, .. } = outcome else {
            panic!("{trigger}: {outcome:?}");
        };
        assert!(message.contains(expected), "{trigger}: {message}");
    }
    let mut process = with_word(trainer(dir.path(), 2));
    process.network = trainer(dir.path(), 2).network;
    let (outcome, _) = run_spec(&spec(process));
    assert!(matches!(outcome, Outcome::Failed { .. }), "{outcome:?}");
}

#[test]
fn the_example_config_runs() {
    let text = include_str!("../../../config/examples/train_textual_inversion_sd15.yaml");
    for portable in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        images(&dir.path().join("images"));
        let text = text.replace("/path/to/", &format!("{}/", dir.path().display()));
        let mut spec = small_job(&text, dir.path(), &[]);
        if portable {
            spec.device = DeviceRef::PORTABLE_CPU;
        }
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        assert!(dir.path().join("out/my_word/vorx.safetensors").is_file());
    }
}

/// Red minus blue in the middle of each sample of the demo's model, in its order.
fn redness(root: &Path) -> Vec<f64> {
    let middle = |pixels: Vec<u8>| {
        let of_row = |y: usize| (16..48).map(move |x| 3 * (64 * y + x));
        let places: Vec<usize> = (16..48).flat_map(of_row).collect();
        let red = |at: &usize| f64::from(pixels[*at]) - f64::from(pixels[*at + 2]);
        places.iter().map(red).sum::<f64>() / places.len() as f64
    };
    samples(root).into_iter().map(middle).collect()
}

#[test]
fn a_word_learns_what_its_images_show() {
    if crate::testing::skips_long_tests() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("red");
    std::fs::create_dir(&data).unwrap();
    for number in 0..8 {
        let (x0, y0, radius) = (28 + number % 3 * 4, 30 + number % 2 * 4, 12 + number);
        let image = image::RgbImage::from_fn(64, 64, |x, y| {
            let (x, y) = (x as i32 - x0, y as i32 - y0);
            image::Rgb(if x * x + y * y < radius * radius {
                [230, 30, 30]
            } else {
                [255; 3]
            })
        });
        image.save(data.join(format!("{number}.png"))).unwrap();
        std::fs::write(data.join(format!("{number}.txt")), "a vorx circle").unwrap();
    }
    let run = |steps| {
        let mut process = sampled(
            with_word(trainer(dir.path(), steps)),
            &["a vorx circle", "a blue circle"],
        );
        if let Some(embedding) = &mut process.embedding {
            embedding.init_words = "blue".into();
            embedding.tokens = 1;
        }
        process.model.name_or_path = fixtures().join("../../config/demo/base").display().to_string();
        process.datasets[0].folder_path = Some(data.display().to_string());
        process.datasets[0].resolution = OneOrMany(vec![64]);
        (process.train.batch_size, process.train.lr) = (4, 2e-2);
        process.sample.sample_steps = 12;
        process.sample.guidance_scale = 3.0;
        process.train.skip_first_sample = true;
        process.training_folder = Some(dir.path().join(format!("{steps}")).join("out").display().to_string());
        let (outcome, events) = run_spec(&spec(process));
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        redness(&dir.path().join(format!("{steps}")))
    };
    let (first, last) = (run(1), run(60));
    println!("{first:?} -> {last:?}");
    assert!(first[0] < -100.0 && last[0] > 100.0, "{first:?} -> {last:?}");
    assert_eq!(first[1], last[1], "the model itself is as it was");
}
