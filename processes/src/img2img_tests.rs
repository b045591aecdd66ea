//! Runs whole `batch_img2img` jobs from YAML on the tiny model.

use super::tests::{images, run_spec, spec};
use super::*;
use crate::image_io;
use crate::testing::fixtures;
use aitk_common::attempt::Outcome;
use aitk_common::job::{JobSpec, ProcessKind};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

#[test]
fn img2img_uses_captions_as_prompts() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir_all(&data).unwrap();
    for (i, (width, height)) in [(64, 64), (96, 48), (70, 66)].into_iter().enumerate() {
        let image = image::RgbImage::from_fn(width, height, |x, y| image::Rgb([(x * 3) as u8, (y * 4) as u8, 99]));
        image_io::save(&image, &data.join(format!("p{i}.png")), &[]).unwrap();
        std::fs::write(data.join(format!("p{i}.txt")), "a [trigger] circle").unwrap();
    }
    let job = |strength: f64| {
        format!(
            "job: extension\nconfig:\n  name: again\n  process:\n  - type: batch_img2img\n    output_folder: {}\n    \
             copy_inputs_to: {}\n    model: {{name_or_path: {}, dtype: fp32}}\n    datasets: [{{folder_path: {}, resolution: 64}}]\n    \
             generate: {{sampler: ddim, sample_steps: 4, denoise_strength: {strength}, seed: 3, walk_seed: true, trigger_word: zorb}}\n",
            dir.path().join("out").display(),
            dir.path().join("in").display(),
            fixtures().join("tiny_sd").display(),
            data.display()
        )
    };
    let attempt = spec(&job(0.5));
    // What memory is predicted from: 96 x 48 pixels are more than 64 x 64 allow.
    let sizes: Vec<(u32, u32)> = image_batches(&attempt)
        .iter()
        .map(|batch| (batch.width, batch.height))
        .collect();
    assert_eq!(sizes, [(64, 64)]);
    // What the command line sends before there is an attempt.
    let parsed: JobSpec = serde_json::from_value(attempt.job.clone()).unwrap();
    let ProcessKind::Img2Img(process) = &parsed.process[0].kind else {
        panic!("another process")
    };
    let inputs = BTreeMap::from([(data.display().to_string(), data.clone())]);
    let before = changed_image_sizes(&parsed, process, &inputs);
    assert_eq!(
        before.iter().max_by_key(|(width, height)| width * height),
        Some(&(64, 64))
    );
    let missing = BTreeMap::from([(data.display().to_string(), dir.path().join("missing"))]);
    assert_eq!(changed_image_sizes(&parsed, process, &missing), BTreeSet::new());
    let (outcome, events) = run_spec(&attempt);
    assert_eq!(outcome, Outcome::Completed);
    let generated = images(&events);
    assert_eq!(generated.len(), 3);
    for (_, path) in &generated {
        let size = image_io::dimensions(path).unwrap();
        // The buckets of a training.
        assert!(size.0.is_multiple_of(16) && size.1.is_multiple_of(16), "{size:?}");
        let source = dir.path().join("in").join(path.file_name().unwrap());
        assert_eq!(image_io::dimensions(&source).unwrap(), size);
        let png = std::fs::read(path).unwrap();
        assert!(
            png.windows(13).any(|w| w == b"a zorb circle"),
            "the caption is the prompt"
        );
    }
    let (outcome, events) = run_spec(&spec(&job(0.1)));
    assert_eq!(outcome, Outcome::Completed);
    for (_, path) in images(&events) {
        let source = dir.path().join("in").join(path.file_name().unwrap());
        let (found, expected) = (image_io::open_rgb(&path), image_io::open_rgb(&source));
        assert_eq!(found.unwrap(), expected.unwrap(), "less than a step changes nothing");
    }
}

/// They are those of a training. The trigger word of `generate` stands for placeholders and is not added to other captions.
#[test]
fn img2img_has_the_options_of_its_data_sets() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir_all(path("data")).unwrap();
    for (name, caption) in [("p0", "a [trigger]"), ("p1", "left out"), ("p2", "a dog")] {
        let image = image::RgbImage::from_pixel(72, 64, image::Rgb([90, 9, 9]));
        image_io::save(&image, &path(&format!("data/{name}.png")), &[]).unwrap();
        std::fs::write(path(&format!("data/{name}.txt")), caption).unwrap();
    }
    let job = format!(
        "job: extension\nconfig:\n  name: again\n  process:\n  - type: batch_img2img\n    output_folder: {}\n    \
         model: {{name_or_path: {}, dtype: fp32}}\n    datasets: [{{folder_path: {}, buckets: false, size: [64, 32], \
         excluded_images: [p1.png], caption_prefix: a photo of}}]\n    \
         generate: {{sampler: ddim, sample_steps: 4, denoise_strength: 0.1, seed: 3, trigger_word: zorb}}\n",
        path("out").display(),
        fixtures().join("tiny_sd").display(),
        path("data").display()
    );
    let (outcome, events) = run_spec(&spec(&job));
    assert_eq!(outcome, Outcome::Completed);
    let made: Vec<(u32, u32, String)> = images(&events)
        .into_iter()
        .map(|(_, image)| {
            let (width, height) = image_io::dimensions(&image).unwrap();
            let prompt = std::fs::read_to_string(image.with_extension("txt")).unwrap();
            (width, height, prompt)
        })
        .collect();
    let expected = ["a photo of a zorb", "a photo of a dog"].map(|prompt| (64, 32, prompt.to_owned()));
    assert_eq!(made, expected);
}

/// As in ai-toolkit, so that results, sources and captions stay pairs.
#[test]
fn img2img_results_have_the_names_of_their_images() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let captions = [
        ("a/cat.png", "a cat --w 512 -- seven"),
        ("a/sub/cat.png", "a small cat"),
        ("b/Cat.png", "a third cat"),
        ("b/cat_1.png", "cat number one"),
    ];
    for (shade, (name, caption)) in (0u8..).zip(captions) {
        std::fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        let image = image::RgbImage::from_pixel(64, 64, image::Rgb([shade * 40, 9, 9]));
        image_io::save(&image, &path(name), &[]).unwrap();
        std::fs::write(path(name).with_extension("txt"), caption).unwrap();
    }
    // The result of an earlier run.
    std::fs::create_dir_all(path("out")).unwrap();
    std::fs::write(path("out/cat.png"), "old").unwrap();
    let of_process = |sets: &str| {
        format!(
            "  - type: batch_img2img\n    output_folder: {}\n    copy_inputs_to: {}\n    model: {{name_or_path: {}, dtype: fp32}}\n    \
             datasets: [{sets}]\n    generate: {{sampler: ddim, sample_steps: 4, denoise_strength: 0.1, seed: 3}}\n",
            path("out").display(),
            path("in").display(),
            fixtures().join("tiny_sd").display(),
        )
    };
    let set = |name: &str| format!("{{folder_path: {}, resolution: 64}}", path(name).display());
    let job = |processes: &str| format!("job: extension\nconfig:\n  name: again\n  process:\n{processes}");
    let both = of_process(&format!("{}, {}", set("a"), set("b")));
    let names = |folder: &str| {
        let files = std::fs::read_dir(path(folder)).unwrap();
        let mut names: Vec<String> = files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let stems = ["cat", "cat_2", "Cat_3", "cat_1"];
    let mut expected: Vec<String> = stems
        .iter()
        .flat_map(|stem| [format!("{stem}.png"), format!("{stem}.txt")])
        .collect();
    expected.sort();
    // A second run makes the same files again.
    for _ in 0..2 {
        let (outcome, events) = run_spec(&spec(&job(&both)));
        assert_eq!(outcome, Outcome::Completed);
        let made: Vec<PathBuf> = images(&events).into_iter().map(|(_, path)| path).collect();
        assert_eq!(made, stems.map(|stem| path("out").join(format!("{stem}.png"))));
        for folder in ["out", "in"] {
            assert_eq!(names(folder), expected, "{folder}");
            for (stem, (source, caption)) in stems.iter().zip(captions) {
                let image = path(folder).join(format!("{stem}.png"));
                assert_eq!(std::fs::read_to_string(image.with_extension("txt")).unwrap(), caption);
                // Less than a step changes nothing.
                assert_eq!(
                    image_io::open_rgb(&image).unwrap(),
                    image_io::open_rgb(&path(source)).unwrap()
                );
            }
        }
    }
    let png = std::fs::read(path("out/cat.png")).unwrap();
    let prompt = captions[0].1.as_bytes();
    assert!(
        png.windows(prompt.len()).any(|part| part == prompt),
        "its caption has no flags"
    );

    // Another process of the same job has a folder of its own, and images in a folder that is written to are kept.
    std::fs::remove_dir_all(path("out")).unwrap();
    std::fs::remove_dir_all(path("in")).unwrap();
    let two = of_process(&set("a")) + &of_process(&set("a"));
    assert_eq!(run_spec(&spec(&job(&two))).0, Outcome::Completed);
    assert_eq!(names("out").len(), 5);
    assert_eq!(names("out/process_1"), ["cat.png", "cat.txt", "cat_1.png", "cat_1.txt"]);
    let into_source =
        of_process(&set("b")).replace(&path("out").display().to_string(), &path("b").display().to_string());
    let before = std::fs::read(path("b/Cat.png")).unwrap();
    assert_eq!(run_spec(&spec(&job(&into_source))).0, Outcome::Completed);
    assert_eq!(std::fs::read(path("b/Cat.png")).unwrap(), before);
    assert!(path("b/Cat_2.png").is_file() && path("b/cat_1_1.txt").is_file());
}

/// Results of earlier runs are no sources, so that a second run makes the same files again.
#[test]
fn img2img_leaves_results_below_the_data_set_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir_all(path("images/sub")).unwrap();
    for name in ["images/a.png", "images/sub/b.png"] {
        let image = image::RgbImage::from_pixel(64, 64, image::Rgb([90, 9, 9]));
        image_io::save(&image, &path(name), &[]).unwrap();
        std::fs::write(path(name).with_extension("txt"), "a cat").unwrap();
    }
    let job = format!(
        "job: extension\nconfig:\n  name: again\n  process:\n  - type: batch_img2img\n    output_folder: {}\n    \
         copy_inputs_to: {}\n    model: {{name_or_path: {}, dtype: fp32}}\n    datasets: [{{folder_path: {}, resolution: 64}}]\n    \
         generate: {{sampler: ddim, sample_steps: 4, denoise_strength: 0.1, seed: 3}}\n",
        path("images/out").display(),
        path("images/sub/in").display(),
        fixtures().join("tiny_sd").display(),
        path("images").display()
    );
    for _ in 0..3 {
        let (outcome, events) = run_spec(&spec(&job));
        assert_eq!(outcome, Outcome::Completed);
        let made: Vec<PathBuf> = images(&events).into_iter().map(|(_, path)| path).collect();
        assert_eq!(made, ["a.png", "b.png"].map(|name| path("images/out").join(name)));
    }
}
