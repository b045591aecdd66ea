//! Images that are too large for a model, which `validate` finds before a run does.

use crate::preflight::TINY;
use crate::support::{Home, code, err, out};
use std::path::Path;

/// Checks a job of the tiny Stable Diffusion 3.5, which has positions for 256 x 256 pixels. `process`: its keys, without `model`.
fn validate(home: &Home, process: &str) -> (i32, String) {
    let model = Path::new(TINY).parent().unwrap().join("tiny_sd35");
    let job = if process.contains("to_folder") {
        "generate"
    } else {
        "extension"
    };
    let text = format!(
        "job: {job}\nconfig:\n  name: images\n  process:\n    - model: {{name_or_path: {}, arch: sd3, dtype: float32}}\n{process}",
        model.display()
    );
    home.write("job.yaml", &text);
    let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
    let said = format!("{}{}", out(&output), err(&output));
    (code(&output), said.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[test]
fn images_beyond_the_positions_of_a_model_are_found_before_the_run() {
    let home = Home::new();
    home.write("prompts.txt", "a\n\nb --w 512\n");
    let image = image::RgbImage::from_fn(512, 512, |x, y| image::Rgb([(x / 2) as u8, (y / 2) as u8, 9]));
    std::fs::create_dir(home.path().join("data")).unwrap();
    image.save(home.path().join("data/a.png")).unwrap();
    home.write("data/a.txt", "a red circle");
    let generate = |side: u32, prompts: &str| {
        format!(
            "      type: to_folder\n      output_folder: out\n      generate:\n        prompts: {prompts}\n        width: {side}\n        \
             height: 64\n        sample_steps: 1\n        sampler: flowmatch\n"
        )
    };
    let train = |resolution: u32| {
        format!(
            "      type: sd_trainer\n      training_folder: out\n      network: {{type: lora, linear: 1}}\n      train: {{steps: 2, dtype: \
             float32, noise_scheduler: flowmatch}}\n      datasets:\n        - folder_path: data\n          resolution: [{resolution}]\n"
        )
    };
    let change = |resolution: u32| {
        format!(
            "      type: batch_img2img\n      output_folder: out\n      generate: {{sampler: flowmatch, sample_steps: 2}}\n      \
             datasets:\n        - folder_path: data\n          resolution: {resolution}\n"
        )
    };
    for good in [generate(256, "[a, b --h 256]"), train(256), change(256)] {
        let (exit, said) = validate(&home, &good);
        assert_eq!(exit, 0, "{good}{said}");
    }
    let limit = "is too large: the model has positions for at most 256 x 256 pixels";
    for (process, key) in [
        (
            generate(512, "[a, b --h 256 --w 64]"),
            "job.yaml:10:9: config.process[0].generate.width: an image of 512 x 64 pixels",
        ),
        (
            generate(256, "[a, b --h 512]"),
            "config.process[0].generate.prompts[1]: an image of 256 x 512 pixels",
        ),
        (
            generate(256, "prompts.txt"),
            "config.process[0].generate.prompts: prompts.txt:3: an image of 512 x 64 pixels",
        ),
        (
            train(512),
            "config.process[0].datasets[0].folder_path: data: a bucket at `resolution: 512`: an image of 512 x 512 pixels",
        ),
        (change(512), "config.process[0].datasets: an image of 512 x 512 pixels"),
    ] {
        let (exit, said) = validate(&home, &process);
        assert_eq!(exit, 1, "{said}");
        assert!(said.contains(key) && said.contains(limit), "{key} is not in\n{said}");
    }
}

/// Images with fewer pixels than the resolution keep their size, so the prediction needs the sizes of the images.
#[test]
fn the_predicted_memory_of_changed_images_follows_their_sizes() {
    let home = Home::new();
    let bytes = |data: &str, side: u32| {
        std::fs::create_dir(home.path().join(data)).unwrap();
        let image = image::RgbImage::from_pixel(side, side, image::Rgb([9, 99, 199]));
        image.save(home.path().join(data).join("a.png")).unwrap();
        home.write(&format!("{data}/a.txt"), "a red circle");
        home.write(
            "job.yaml",
            &format!(
                "job: extension\nconfig:\n  name: images\n  process:\n    - type: batch_img2img\n      output_folder: out\n      model: \
                 {{name_or_path: {TINY}, dtype: float32}}\n      generate: {{sampler: ddim, sample_steps: 2}}\n      datasets:\n        - \
                 {{folder_path: {data}, resolution: 1024}}\n"
            ),
        );
        let output = home.aitk().args(["validate", "job.yaml", "--json"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["memory"]["processor, cpu_only"].as_u64().unwrap()
    };
    let (small, large) = (bytes("small", 128), bytes("large", 1024));
    assert!(small < large, "{small} {large}");
}
