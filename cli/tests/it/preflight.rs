//! The checks before anything is sent or trained: the family of a model, and the data sets.

use crate::support::{Home, MODEL_FILES, UNET, code, err, file_of_model, out};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;
use unicode_width::UnicodeWidthStr;

pub(crate) const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny_sd");

/// Writes images of two shapes; all but the first have a caption.
pub(crate) fn images(home: &Home, folder: &str, count: u32) {
    for i in 0..count {
        let (w, h) = if i % 3 == 0 { (48, 24) } else { (32, 32) };
        let image = image::RgbImage::from_fn(w, h, |x, y| image::Rgb([(x * 5) as u8, (y * 7) as u8, (i * 50) as u8]));
        let path = home.path().join(folder).join(format!("{i}.png"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        image.save(&path).unwrap();
        if i > 0 {
            home.write(&format!("{folder}/{i}.txt"), "a red circle");
        }
    }
}

/// Writes a training config; `more` is added to its data set.
pub(crate) fn training(home: &Home, name: &str, model: &str, steps: u64, more: &str) {
    let text = format!(
        "job: extension
config:
  name: {name}
  process:
    - type: sd_trainer
      training_folder: out
      device: cpu
      network: {{type: lora, linear: 4, linear_alpha: 4}}
      save: {{dtype: float32, save_every: 2, max_step_saves_to_keep: 1}}
      logging: {{log_every: 1}}
      datasets:
        - folder_path: data
          resolution: [32]
          {more}
      train: {{batch_size: 1, steps: {steps}, lr: 1e-3, dtype: float32, disable_sampling: true, optimizer: adamw}}
      model: {{name_or_path: {model}}}
"
    );
    home.write(&format!("{name}.yaml"), &text);
}

/// Writes a training config with paths that do not exist, and that no training opens.
fn with_unopened_paths(home: &Home, name: &str) {
    training(home, name, TINY, 10, "alpha_mask: true\n          mask_path: nix");
    let path = home.path().join(format!("{name}.yaml"));
    let text = std::fs::read_to_string(&path).unwrap();
    let with_text = "disable_sampling: true, negative_prompt: 'blurry, low quality'";
    std::fs::write(path, text.replace("disable_sampling: true", with_text)).unwrap();
}

/// Writes a safetensors file with this tensor in its header and a million bytes of weights.
fn weights(home: &Home, name: &str, tensor: &str) {
    let header = format!(r#"{{"{tensor}":{{"dtype":"F16","shape":[9216,3072],"data_offsets":[0,1000000]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + 1_000_000, 7);
    let path = home.write(name, "");
    std::fs::write(path, bytes).unwrap();
}

fn size_of(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let each = entries.map(|entry| match entry.path() {
        path if path.is_dir() => size_of(&path),
        path => path.metadata().map_or(0, |data| data.len()),
    });
    each.sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_of_another_family_is_refused_before_anything_is_sent() {
    let data = tempfile::tempdir().unwrap();
    let mut config = aitk_coordinator::Config::new(data.path());
    config.bind = "127.0.0.1:0".parse().unwrap();
    let coordinator = aitk_coordinator::start(config).await.unwrap();
    let home = Home::new();
    let aitk = async |args: &[&str]| -> Output {
        let mut command = home.aitk();
        command
            .args(args)
            .env("AITK_SERVER", coordinator.url())
            .env("AITK_TOKEN", &coordinator.token);
        tokio::task::spawn_blocking(move || command.output().unwrap())
            .await
            .unwrap()
    };
    images(&home, "data", 4);
    home.write(
        "sdxl/model_index.json",
        r#"{"_class_name":"StableDiffusionXLPipeline"}"#,
    );
    weights(
        &home,
        "sdxl/unet/model.safetensors",
        "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight",
    );
    weights(&home, "flux.safetensors", "double_blocks.0.img_attn.qkv.weight");
    weights(
        &home,
        "lora.safetensors",
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
    );
    home.write("old.ckpt", &"x".repeat(1_000_000));
    let before = size_of(data.path());
    for (model, expected) in [
        (
            "sdxl",
            "sdxl is Stable Diffusion XL: model_index.json names StableDiffusionXLPipeline",
        ),
        (
            "flux.safetensors",
            "flux.safetensors is FLUX.1: flux.safetensors has `double_blocks.0.img_attn.qkv.weight`",
        ),
        ("lora.safetensors", "lora.safetensors is a LoRA, not a base model"),
        ("old.ckpt", "old.ckpt is a pickle file"),
    ] {
        training(&home, "job", model, 10, "");
        for command in ["submit", "fit", "validate"] {
            let output = aitk(&[command, "job.yaml"]).await;
            let said = format!("{}{}", out(&output), err(&output));
            let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
            assert_eq!(code(&output), 1, "{command}: {said}");
            assert!(said.contains(expected), "{command}: {said}");
            assert!(!said.contains("would start"), "{command}: {said}");
        }
        let run = home
            .aitk()
            .args(["run", "job.yaml", "--device", "cpu"])
            .output()
            .unwrap();
        assert_eq!(code(&run), 1);
        assert!(err(&run).contains(expected), "{}", err(&run));
    }
    assert!(size_of(data.path()) < before + 500_000, "no model was uploaded");
    let jobs: serde_json::Value = serde_json::from_str(&out(&aitk(&["ps", "--json"]).await)).unwrap();
    assert_eq!(jobs["jobs"], serde_json::json!([]));

    training(&home, "job", TINY, 10, "");
    let fits = aitk(&["submit", "job.yaml", "--dry-run"]).await;
    assert_eq!(code(&fits), 0, "{}", err(&fits));
    assert!(out(&fits).contains("Stable Diffusion 1.x"), "{}", out(&fits));
    let jobs: serde_json::Value = serde_json::from_str(&out(&aitk(&["ps", "--json"]).await)).unwrap();
    assert_eq!(jobs["jobs"], serde_json::json!([]), "a dry run sends nothing");
    // What the coordinator would refuse is a problem, not something that was not checked.
    let text = std::fs::read_to_string(home.path().join("job.yaml")).unwrap();
    home.write("split.yaml", &format!("{text}\ncluster: {{split: 4}}\n"));
    let refused = aitk(&["validate", "split.yaml", "--json"]).await;
    assert_eq!(code(&refused), 1, "{}", out(&refused));
    let report: serde_json::Value = serde_json::from_str(&out(&refused)).unwrap();
    assert_eq!(report["ok"], false);
    assert!(
        report["problems"][0].as_str().unwrap().starts_with("cluster.split"),
        "{report}"
    );
    let sent = aitk(&["submit", "job.yaml"]).await;
    assert_eq!(code(&sent), 0, "{}", err(&sent));
    assert!(
        err(&sent).contains("data at 32: 4 images, 3 with captions"),
        "{}",
        err(&sent)
    );
    assert!(err(&sent).contains("1 of 4 images have no caption"), "{}", err(&sent));

    // Values that only look like paths are neither looked up nor sent.
    with_unopened_paths(&home, "text");
    let sent = aitk(&["submit", "text.yaml", "--json"]).await;
    assert_eq!(code(&sent), 0, "{}", err(&sent));
    let sent: serde_json::Value = serde_json::from_str(&out(&sent)).unwrap();
    let paths: Vec<&serde_json::Value> = sent["inputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["path"])
        .collect();
    assert_eq!(paths, [TINY, "data"]);

    // A model of the hub is pinned to its current commit.
    training(&home, "hubbed", "org/model", 10, "");
    let mut command = home.aitk();
    command
        .args(["submit", "hubbed.yaml", "--json"])
        .env("AITK_SERVER", coordinator.url())
        .env("AITK_TOKEN", &coordinator.token)
        .env("HF_ENDPOINT", hub(r#"{"_class_name": "StableDiffusionPipeline"}"#));
    let pinned = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    assert_eq!(code(&pinned), 0, "{}", err(&pinned));
    let pinned: serde_json::Value = serde_json::from_str(&out(&pinned)).unwrap();
    assert_eq!(pinned["revisions"], serde_json::json!({ "org/model": COMMIT }));
    coordinator.shutdown().await;
}

/// The commit of the hub's `main`.
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Starts a hub with one repository, `org/model`, with this `model_index.json`. It serves until the tests end.
fn hub(index: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 4096];
            let read = stream.read(&mut head).unwrap_or(0);
            let head = String::from_utf8_lossy(&head[..read]).into_owned();
            let body = if head.starts_with("GET /api/models/org/model/") {
                let siblings = MODEL_FILES.map(|name| {
                    let size = if name == "model_index.json" { index.len() } else { 2 };
                    format!(r#"{{"rfilename":"{name}","size":{size}}}"#)
                });
                format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, siblings.join(","))
            } else if head.starts_with(&format!("GET /org/model/resolve/{COMMIT}/unet/config.json")) {
                "{}".to_owned()
            } else if head.starts_with(&format!("GET /org/model/resolve/{COMMIT}/model_index.json")) {
                index.to_owned()
            } else {
                let _ = stream.write_all(b"HTTP/1.1 404 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                continue;
            };
            let head = format!(
                "HTTP/1.1 200 x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    url
}

#[test]
fn the_family_of_a_model_at_the_hub_is_recognised_from_small_files() {
    let home = Home::new();
    images(&home, "data", 4);
    training(&home, "job", "org/model", 10, "");
    let validate = |endpoint: &str| {
        let mut command = home.aitk();
        command
            .args(["validate", "job.yaml", "--json"])
            .env("HF_ENDPOINT", endpoint);
        let output = command.output().unwrap();
        let json: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
        (code(&output), json)
    };
    let (exit, flux) = validate(&hub(r#"{"_class_name": "FluxPipeline"}"#));
    assert_eq!((exit, &flux["ok"]), (1, &false.into()), "{flux}");
    assert!(
        flux["problems"][0].as_str().unwrap().contains("org/model is FLUX.1"),
        "{flux}"
    );
    let (exit, sd) = validate(&hub(r#"{"_class_name": "StableDiffusionPipeline"}"#));
    assert_eq!((exit, &sd["models"][0]["commit"]), (0, &COMMIT.into()), "{sd}");
    // An unreachable hub is not an error.
    let (exit, away) = validate("http://127.0.0.1:1");
    assert_eq!(exit, 0, "{away}");
    assert!(
        away["unchecked"][0].as_str().unwrap().contains("could not be checked"),
        "{away}"
    );
}

#[test]
fn missing_and_damaged_files_of_a_model_are_reported() {
    let home = Home::new();
    images(&home, "data", 4);
    let write_model = || home.write_model("whole", 0);
    let validate = |model: &str| {
        training(&home, "job", model, 10, "");
        let output = home
            .aitk()
            .args(["validate", "job.yaml"])
            .env("HF_ENDPOINT", "http://127.0.0.1:1")
            .output()
            .unwrap();
        let said = format!("{}{}", out(&output), err(&output));
        (code(&output), said.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    write_model();
    let (exit, said) = validate("whole");
    assert_eq!(exit, 0, "{said}");
    for name in MODEL_FILES {
        std::fs::remove_file(home.path().join("whole").join(name)).unwrap();
        let (exit, said) = validate("whole");
        let named = match name.strip_suffix(".safetensors") {
            Some(_) => format!("{}/*.safetensors", name.split('/').next().unwrap()),
            None => name.to_owned(),
        };
        assert_eq!(exit, 1, "{name}: {said}");
        assert!(said.contains("job.yaml:") && said.contains(&named), "{name}: {said}");
        write_model();
    }
    let broken = |name: &str, content: &[u8], words: &str| {
        home.write(&format!("whole/{name}"), content);
        let (exit, said) = validate("whole");
        assert_eq!(exit, 1, "{name}: {said}");
        assert!(said.contains(words) && said.contains(name), "{name}: {said}");
        write_model();
    };
    let vae = file_of_model("vae/diffusion_pytorch_model.safetensors");
    broken(
        "vae/diffusion_pytorch_model.safetensors",
        &vae[..vae.len() - 2],
        "it is cut off",
    );
    broken("text_encoder/config.json", b"{", "is not a JSON object");
    // Errors that show only when the model is built: another part's weights, and a tensor with another name.
    broken(UNET, &vae, "is missing");
    let mut unet = file_of_model(UNET);
    let at = unet.windows(14).position(|window| window == b"conv_in.weight").unwrap();
    unet[at..at + 14].copy_from_slice(b"conv_in.wright");
    broken(UNET, &unet, "conv_in.weight");
    for (model, words) in [
        ("./nix", "./nix: no such file or folder"),
        ("nix", "not the name of a repository"),
        ("~/nix", "no such file or folder"),
        ("https://huggingface.co/a/b", "is a URL"),
    ] {
        let (exit, said) = validate(model);
        assert_eq!(exit, 1, "{model}: {said}");
        assert!(said.contains("job.yaml:") && said.contains(words), "{model}: {said}");
    }
    let (exit, said) = validate("''");
    assert_ne!(exit, 0);
    assert!(said.contains("needs the path of a model"), "{said}");
    // A wrong path with two parts looks like the name of a repository.
    let (exit, said) = validate("models/nix");
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("there is no such folder here"), "{said}");
}

#[test]
fn validate_reports_the_data_in_80_columns() {
    let home = Home::new();
    images(&home, "data", 7);
    home.write("data/broken.png", "no image");
    home.write("data/moving.gif", "GIF89a");
    training(&home, "job", TINY, 21, "flip_x: true");
    let validate = |args: &[&str]| {
        let mut command = home.aitk();
        command.args(["validate", "job.yaml"]).args(args).env("COLUMNS", "80");
        command.output().unwrap()
    };
    let text = validate(&[]);
    assert_eq!(code(&text), 0, "{}{}", out(&text), err(&text));
    let shown = out(&text);
    assert!(shown.lines().all(|line| line.width() <= 80), "{shown}");
    for expected in [
        "job.yaml (job): no problems",
        "model     ",
        "7 images, 6 with captions",
        "no caption",
        "broken.png",
        "1 .gif are not used",
        "x 2 copies with flips: 14 per epoch, in 14 batches of 1",
        "21 steps, 14 per epoch: 1.5 epochs",
        "memory    predicted: ",
        "where it could run",
    ] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    let json: serde_json::Value = serde_json::from_str(&out(&validate(&["--json"]))).unwrap();
    let set = &json["trainings"][0]["data"]["datasets"][0];
    assert_eq!(
        (&set["captioned"], &set["uncaptioned"]["count"]),
        (&6.into(), &1.into()),
        "{json}"
    );
    assert_eq!(set["uncaptioned"]["first"][0], "0.png");
    assert_eq!(json["trainings"][0]["output"]["saves"], 10);

    // No caption file has this extension.
    training(&home, "job", TINY, 21, "caption_ext: caption");
    let shown = out(&validate(&[])).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        shown.contains("7 of 7 images have no caption in a .caption file"),
        "{shown}"
    );
    assert!(shown.contains("set `caption_ext: .txt`"), "{shown}");

    std::fs::remove_dir_all(home.path().join("data")).unwrap();
    let gone = validate(&[]);
    assert_eq!(code(&gone), 1, "{}", out(&gone));
    let shown = out(&gone).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        shown.contains("problem: job.yaml:12:") && shown.contains(" config.process[0].datasets[0].folder_path: "),
        "{shown}"
    );
    assert_eq!(
        code(&home.aitk().args(["validate", "nothing.yaml"]).output().unwrap()),
        3
    );
    home.write("broken.yaml", "job: extension\nconfig: [\n");
    assert_eq!(
        code(&home.aitk().args(["validate", "broken.yaml"]).output().unwrap()),
        1
    );
}

#[test]
fn validate_names_the_files_with_problems() {
    let home = Home::new();
    images(&home, "data", 3);
    let cut = home.path().join("data/1.png");
    let whole = std::fs::read(&cut).unwrap();
    std::fs::write(&cut, &whole[..whole.len() - 8]).unwrap();
    training(&home, "job", TINY, 10, "");
    let generate = format!(
        "job: generate\nconfig:\n  name: generate\n  process:\n    - type: to_folder\n      output_folder: out\n      model: \
         {{name_or_path: {TINY}}}\n      generate: {{prompts: nix.txt}}\n"
    );
    home.write("generate.yaml", &generate);
    for (config, expected) in [
        (
            "job.yaml",
            [
                "(job): 1 problem",
                "problem: 1 cut off (training stops at such a file; remove them, or copy them again): 1.png",
            ],
        ),
        (
            "generate.yaml",
            ["(generate): 1 problem", "files problem: generate.yaml:8:"],
        ),
    ] {
        let output = home.aitk().args(["validate", config]).output().unwrap();
        let said = out(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(code(&output), 1, "{said}");
        for words in expected {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
}

#[test]
fn paths_that_are_not_opened_need_not_exist() {
    let home = Home::new();
    images(&home, "data", 4);
    with_unopened_paths(&home, "job");
    let validate = || {
        let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
        (code(&output), format!("{}{}", out(&output), err(&output)))
    };
    let (exit, said) = validate();
    assert_eq!(exit, 0, "{said}");
    // A mask that is opened has to exist.
    training(&home, "job", TINY, 10, "mask_path: nix");
    let (exit, said) = validate();
    assert!(exit == 1 && said.contains("nix: no such file or folder"), "{said}");
}

#[test]
fn control_images_are_counted_and_a_missing_one_is_named() {
    const FLUX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny_flux");
    let home = Home::new();
    images(&home, "data", 4);
    images(&home, "before", 4);
    let write = |control: &str| {
        training(&home, "job", FLUX, 10, &format!("control_path: {control}"));
        let path = home.path().join("job.yaml");
        let text = std::fs::read_to_string(&path).unwrap();
        let kontext = text
            .replace("model: {", "model: {arch: flux_kontext, ")
            .replace("optimizer: adamw", "optimizer: adamw, noise_scheduler: flowmatch");
        std::fs::write(path, kontext).unwrap();
    };
    let validate = || {
        let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
        (
            code(&output),
            format!("{}{}", out(&output), err(&output))
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" "),
        )
    };
    write("before");
    let (exit, said) = validate();
    assert!(
        exit == 0 && said.contains("4 images, 3 with captions, 4 with control images"),
        "{said}"
    );
    std::fs::remove_file(home.path().join("before/2.png")).unwrap();
    let (exit, said) = validate();
    let parts = [
        "1 of 4 images have no control image",
        "data/2.png",
        "2.jpg, 2.jpeg, 2.png or 2.webp",
    ];
    assert!(exit == 1 && parts.iter().all(|part| said.contains(part)), "{said}");
    write("nix");
    let (exit, said) = validate();
    assert!(
        exit == 1 && said.contains("datasets[0].control_path") && said.contains("nix: no such file or folder"),
        "{said}"
    );
    write("before");
    let path = home.path().join("job.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("flux_kontext", "flux")).unwrap();
    let (exit, said) = validate();
    assert!(
        exit != 0 && said.contains("job.yaml:14:") && said.contains("only FLUX.1 Kontext"),
        "{said}"
    );
}

/// The message says itself what to do; that nothing is ignored is said of what a later release may support.
#[test]
fn only_what_is_not_supported_has_the_hint_that_it_is_not_ignored() {
    let home = Home::new();
    for (arch, prompt, expected, is_unsupported) in [
        ("flux_kontext", "a cat", "add the flag `--ctrl_img PATH`", false),
        (
            "flux",
            "a cat --ctrl_img a.png",
            "take control images: remove it",
            false,
        ),
        ("flux", "a cat --frames 9", "no video models yet", true),
    ] {
        let text = format!(
            "job: generate\nconfig:\n  name: x\n  process:\n    - type: to_folder\n      output_folder: out\n      model: {{name_or_path: m, \
             arch: {arch}}}\n      generate:\n        prompts: ['{prompt}']\n"
        );
        home.write("x.yaml", text.as_bytes());
        let output = home.aitk().args(["validate", "x.yaml"]).output().unwrap();
        let said = format!("{}{}", out(&output), err(&output));
        assert!(
            code(&output) == 1 && said.contains("x.yaml:9:19: ") && said.contains(expected),
            "{said}"
        );
        assert_eq!(said.contains("is not ignored"), is_unsupported, "{said}");
    }
}

#[test]
fn a_missing_pair_of_an_image_is_named() {
    let home = Home::new();
    images(&home, "data", 4);
    images(&home, "before", 4);
    training(
        &home,
        "job",
        TINY,
        10,
        "unconditional_path: before\n          guidance_type: polarity",
    );
    let validate = || {
        let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
        let said = format!("{}{}", out(&output), err(&output));
        (code(&output), said.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let (exit, said) = validate();
    assert!(exit == 0 && said.contains("4 with paired images"), "{said}");
    std::fs::remove_file(home.path().join("before/2.png")).unwrap();
    let (exit, said) = validate();
    let parts = ["1 of 4 images have no paired image", "data/2.png", "unconditional_path"];
    assert!(exit == 1 && parts.iter().all(|part| said.contains(part)), "{said}");
}

#[test]
fn validate_reports_problems_of_a_run_on_this_machine() {
    let home = Home::new();
    images(&home, "data", 3);
    training(&home, "job", TINY, 10, "");
    home.write("out", "in the way");
    let validate = |more: &[&str]| {
        let output = home.aitk().args(["validate", "job.yaml"]).args(more).output().unwrap();
        let said = out(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        (code(&output), said)
    };
    let (exit, said) = validate(&[]);
    assert_eq!(exit, 0, "another machine could run it: {said}");
    assert!(said.contains("warning for `aitk run`: job.yaml:6:"), "{said}");
    let output = home.aitk().args(["run", "job.yaml"]).output().unwrap();
    assert_eq!(code(&output), 1);
    assert!(
        err(&output).contains("is a file, and the results go into a folder"),
        "{}",
        err(&output)
    );
    std::fs::remove_file(home.path().join("out")).unwrap();
    let (_, said) = validate(&[]);
    assert!(!said.contains("warning for `aitk run`"), "{said}");
    // A number without a unit means bytes.
    let (exit, said) = validate(&["--set", "cluster.memory_budget=8"]);
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("the job will probably run out of memory"), "{said}");
}

#[test]
fn extra_bytes_in_a_file_and_a_folder_above_a_model_are_reported() {
    let home = Home::new();
    images(&home, "data", 3);
    let commit = "hub/models--o--n/snapshots/0123";
    home.write_model(commit, 0);
    training(&home, "above", "hub/models--o--n", 4, "");
    let output = home.aitk().args(["validate", "above.yaml"]).output().unwrap();
    assert_eq!(code(&output), 1);
    let said = out(&output).split_whitespace().collect::<String>();
    assert!(
        said.contains(&format!("thereisamodelin{}", home.path().join(commit).display())),
        "{said}"
    );
    training(&home, "job", commit, 4, "");
    let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", out(&output));
    let unet = home.path().join(commit).join(UNET);
    let mut bytes = std::fs::read(&unet).unwrap();
    bytes.extend([0; 100]);
    std::fs::write(&unet, bytes).unwrap();
    let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
    assert_eq!(code(&output), 1, "{}", out(&output));
    assert!(
        out(&output).contains("100 extra bytes after its end"),
        "{}",
        out(&output)
    );
}
