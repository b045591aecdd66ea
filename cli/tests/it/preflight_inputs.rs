//! The checks of files that a job names besides its model and its data sets: LoRAs, words of textual inversions, inputs of extensions.

use crate::preflight::{TINY, images, training};
use crate::support::{Home, code, err, out};
use std::path::Path;

/// Writes a textual inversion of this many vectors.
fn word(home: &Home, name: &str, vectors: usize, width: usize) {
    let bytes = 4 * vectors * width;
    let header =
        format!(r#"{{"emb_params":{{"dtype":"F32","shape":[{vectors},{width}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + bytes, 0);
    home.write(name, &file);
}

#[test]
fn words_that_the_model_cannot_use_are_reported_with_their_file_and_key() {
    let home = Home::new();
    images(&home, "data", 2);
    let width = {
        let config = std::fs::read(Path::new(TINY).join("text_encoder/config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        usize::try_from(config["hidden_size"].as_u64().unwrap()).unwrap()
    };
    for (name, vectors, width) in [
        ("quux", 4, width),
        ("cat", 1, width),
        ("narrow", 1, width / 2),
        ("Quux_1", 1, width),
    ] {
        word(&home, &format!("{name}.safetensors"), vectors, width);
    }
    let config = |trigger: &str, files: &str| {
        let text = format!(
            "job: extension\nconfig:\n  name: word\n  process:\n    - type: textual_inversion_trainer\n      training_folder: out\n      \
             embedding:\n        trigger: '{trigger}'\n      datasets: [{{folder_path: data, resolution: [32]}}]\n      train: \
             {{steps: 2, dtype: float32, train_unet: false}}\n      model:\n        name_or_path: {TINY}\n        embedding_paths: \
             [{files}]\n"
        );
        home.write("word.yaml", &text);
        home.aitk().args(["validate", "word.yaml"]).output().unwrap()
    };
    let good = config("vorx", "quux.safetensors");
    assert_eq!(code(&good), 0, "{}{}", out(&good), err(&good));
    for (trigger, files, expected) in [
        (
            "vorx",
            "quux.safetensors, cat.safetensors",
            "embedding_paths[1]: cat.safetensors: the text encoder knows the word `cat` already",
        ),
        (
            "vorx",
            "narrow.safetensors",
            "embedding_paths: narrow.safetensors: the word `narrow` has vectors of",
        ),
        (
            "vorx",
            "quux.safetensors, Quux_1.safetensors",
            "embedding_paths[1]: Quux_1.safetensors: prompts could not use both words: `quux_1` is also how they write one of the 4",
        ),
        (
            "QUUX",
            "quux.safetensors",
            "embedding.trigger: another word is called `quux` too",
        ),
        (
            "quux_3",
            "quux.safetensors",
            "embedding.trigger: prompts could not use both words",
        ),
    ] {
        let output = config(trigger, files);
        let shown = format!("{}{}", out(&output), err(&output))
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert_eq!(code(&output), 1, "{trigger}, {files}: {shown}");
        assert!(
            shown.contains(expected),
            "{trigger}, {files}: {expected} is not in\n{shown}"
        );
    }
}

#[test]
fn a_missing_input_of_an_extension_is_reported() {
    let home = Home::new();
    home.write(
        "job.yaml",
        "job: extension\nconfig:\n  name: x\n  training_folder: out\n  process:\n    - type: extension:py\n      inputs:\n        data: \
         nope\n",
    );
    let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
    let shown = format!("{}{}", out(&output), err(&output));
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(code(&output), 1, "{shown}");
    assert!(
        shown.contains("job.yaml:8:9: config.process[0].inputs.data: nope: no such file or folder"),
        "{shown}"
    );
}

/// What a run would stop at is an error of `validate`, with the key's line: masks, images of a validation, files of prompts.
#[test]
fn files_that_cannot_be_read_are_reported_before_the_run() {
    let home = Home::new();
    images(&home, "data", 2);
    std::fs::create_dir(home.path().join("masks")).unwrap();
    std::fs::create_dir(home.path().join("folder")).unwrap();
    home.write("binary.txt", &[b'a', 0xff, b'\n']);
    home.write("empty.txt", b"\n \n");
    home.write("flags.txt", b"a --zoom in\nb --w wide\nc --frames 9\n");
    let train = |dataset: &str, train: &str| {
        format!(
            "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n      training_folder: out\n      network: {{type: \
             lora, linear: 1}}\n      datasets:\n        - {{folder_path: data, default_caption: a, resolution: [32]{dataset}}}\n      \
             train: {{steps: 2, dtype: float32{train}}}\n      model: {{name_or_path: {TINY}}}\n"
        )
    };
    let item = |path: &str| format!(", validation_config: {{validation_items: [{{image_path: {path}, prompt: a}}]}}");
    let prompts = |path: &str| {
        format!(
            "job: generate\nconfig:\n  name: x\n  process:\n    - type: to_folder\n      output_folder: out\n      generate: {{prompts: \
             {path}, width: 32, height: 32}}\n      model: {{name_or_path: {TINY}}}\n"
        )
    };
    for (text, expected) in [
        (train(", random_triggers: folder", ""), "x.yaml:9:"),
        (
            train(", random_triggers: folder", ""),
            "datasets[0].random_triggers: folder: is a directory",
        ),
        (
            train(", random_triggers: binary.txt", ""),
            "expected a text file with one text per line",
        ),
        (train("", &item("folder")), "validation_items[0].image_path: "),
        (train("", &item("empty.txt")), "x.yaml:10:"),
        (prompts("folder"), "x.yaml:7:"),
        (prompts("binary.txt"), "generate.prompts: binary.txt: "),
        (prompts("empty.txt"), "empty.txt: there is no prompt in this file"),
        (
            prompts("flags.txt"),
            "generate.prompts: flags.txt:2: the prompt's flag `--w` expects",
        ),
        (
            prompts("flags.txt"),
            "generate.prompts: flags.txt:3: the prompt's flag `--frames`",
        ),
        (
            prompts("flags.txt"),
            "generate.prompts: flags.txt:1: `--zoom` is not a prompt flag",
        ),
    ] {
        home.write("x.yaml", &text);
        let output = home.aitk().args(["validate", "x.yaml"]).output().unwrap();
        let all = out(&output) + &err(&output);
        assert!(
            code(&output) == 1 && all.contains(expected),
            "{text}\n{all}\n{expected}"
        );
    }
    let first = std::fs::read_dir(home.path().join("data"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let mask = home.path().join("masks").join(first.path().file_stem().unwrap());
    image::RgbImage::new(40, 10).save(mask.with_extension("png")).unwrap();
    home.write("x.yaml", &train(", mask_path: masks", ""));
    let output = home.aitk().args(["validate", "x.yaml"]).output().unwrap();
    let all = out(&output) + &err(&output);
    assert!(
        code(&output) == 1 && all.contains("the mask has 40 x 10 pixels"),
        "{all}"
    );
}

#[test]
fn a_resumed_run_does_not_need_its_initial_lora() {
    let home = Home::new();
    images(&home, "data", 4);
    training(&home, "job", TINY, 10, "");
    let path = home.path().join("job.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let with_lora = "linear_alpha: 4, pretrained_lora_path: gone.safetensors";
    std::fs::write(path, text.replace("linear_alpha: 4", with_lora)).unwrap();
    let validate = || {
        let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
        let said = out(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        (code(&output), said)
    };
    let is_needed = |what: &str| {
        let (exit, said) = validate();
        assert_eq!(exit, 1, "{what}: {said}");
        assert!(said.contains("problem: job.yaml:"), "{what}: {said}");
        assert!(
            said.contains("gone.safetensors: no such file or folder"),
            "{what}: {said}"
        );
    };
    is_needed("nothing has begun");
    home.write("out/job/other_000000002.safetensors", "");
    home.write("out/job/.aitk/checkpoints/step_000000002/weights.safetensors", "");
    is_needed("another job's save, and half a checkpoint");
    for begun in [
        "out/job/job_000000002.safetensors",
        "out/job/job.safetensors",
        "out/job/.aitk/checkpoints/step_000000002/manifest.json",
    ] {
        let file = home.write(begun, "");
        let (exit, said) = validate();
        assert_eq!(exit, 0, "{begun}: {said}");
        assert!(
            said.contains("`aitk run` does not need it, because it resumes from"),
            "{begun}: {said}"
        );
        std::fs::remove_file(file).unwrap();
    }
    is_needed("all is gone");
}

#[test]
fn a_lora_that_does_not_fit_the_model_is_refused_before_anything_runs() {
    let home = Home::new();
    images(&home, "data", 4);
    let fixtures = Path::new(TINY).parent().unwrap();
    let validate = |key: &str, lora: &str| {
        training(&home, "job", TINY, 10, "");
        let path = home.path().join("job.yaml");
        let text = std::fs::read_to_string(&path).unwrap();
        let lora = fixtures.join(lora);
        let text = match key {
            "pretrained_lora_path" => text.replace(
                "linear_alpha: 4",
                &format!("linear_alpha: 4, {key}: {}", lora.display()),
            ),
            _ => text.replace("model: {", &format!("model: {{{key}: {}, ", lora.display())),
        };
        std::fs::write(path, text).unwrap();
        let output = home.aitk().args(["validate", "job.yaml"]).output().unwrap();
        (
            code(&output),
            out(&output).split_whitespace().collect::<Vec<_>>().join(" "),
        )
    };
    for key in ["pretrained_lora_path", "lora_path"] {
        for (lora, expected) in [
            (
                "lora_sdxl/ai_toolkit.safetensors",
                "it was made for Stable Diffusion XL",
            ),
            (
                "lora_flux/comfyui.safetensors",
                "it was made for FLUX.1 or a model like it",
            ),
        ] {
            let (exit, said) = validate(key, lora);
            assert_eq!(exit, 1, "{key}, {lora}: {said}");
            assert!(said.contains(expected), "{key}, {lora}: {said}");
            assert!(said.contains(&format!(".{key}")), "{key}, {lora}: {said}");
        }
        let (exit, said) = validate(key, "lora/ai_toolkit.safetensors");
        assert_eq!(exit, 0, "{key}: {said}");
    }
    // These change the denoiser alone.
    let of_text = home.path().join("text.safetensors");
    write_text_layers(&fixtures.join("lora/ai_toolkit.safetensors"), &of_text);
    let of_text = of_text.to_str().unwrap();
    for key in [
        "assistant_lora_path",
        "inference_lora_path",
        "quantize: true, accuracy_recovery_adapter",
    ] {
        let (exit, said) = validate(key, of_text);
        assert_eq!(exit, 1, "{key}: {said}");
        assert!(said.contains("layers are of text encoders"), "{key}: {said}");
        let (exit, said) = validate(key, "lora/ai_toolkit.safetensors");
        assert_eq!(exit, 0, "{key}: {said}");
    }
    let (exit, said) = validate("lora_path", of_text);
    assert_eq!(exit, 0, "{said}");
}

/// Writes a LoRA file that has the layers of text encoders of another one.
fn write_text_layers(source: &Path, target: &Path) {
    let bytes = std::fs::read(source).unwrap();
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
    let (header, numbers) = rest.split_at(length);
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let (mut kept, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, mut entry) in header.into_iter().filter(|(name, _)| name.starts_with("lora_te")) {
        let [from, to] = [0_usize, 1].map(|end| entry["data_offsets"][end].as_u64().unwrap() as usize);
        let start = data.len();
        data.extend_from_slice(&numbers[from..to]);
        entry["data_offsets"] = serde_json::json!([start, data.len()]);
        kept.insert(name, entry);
    }
    let mut header = serde_json::to_vec(&kept).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(target, [&length[..], &header, &data].concat()).unwrap();
}

/// Writes a file of tensors in float32, all numbers of which are `number`.
fn tensors(home: &Home, name: &str, shapes: &[(&str, &[usize])], number: f32) {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (tensor, shape) in shapes {
        let (start, bytes) = (end, 4 * shape.iter().product::<usize>());
        end += bytes;
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
        header.insert((*tensor).to_owned(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(number.to_le_bytes().iter().copied().cycle().take(end));
    home.write(name, &file);
}

/// Everything about the adapter to start from that its files show is one error at its key.
#[test]
fn an_adapter_to_start_from_is_checked_before_the_run() {
    const T2I: [(&str, &[usize]); 12] = [
        ("adapter.conv_in.weight", &[16, 12, 3, 3]),
        ("adapter.conv_in.bias", &[16]),
        ("adapter.body.0.resnets.0.block1.weight", &[16, 16, 3, 3]),
        ("adapter.body.0.resnets.0.block1.bias", &[16]),
        ("adapter.body.0.resnets.0.block2.weight", &[16, 16, 1, 1]),
        ("adapter.body.0.resnets.0.block2.bias", &[16]),
        ("adapter.body.1.in_conv.weight", &[32, 16, 1, 1]),
        ("adapter.body.1.in_conv.bias", &[32]),
        ("adapter.body.1.resnets.0.block1.weight", &[32, 32, 3, 3]),
        ("adapter.body.1.resnets.0.block1.bias", &[32]),
        ("adapter.body.1.resnets.0.block2.weight", &[32, 32, 1, 1]),
        ("adapter.body.1.resnets.0.block2.bias", &[32]),
    ];
    let home = Home::new();
    images(&home, "data", 2);
    images(&home, "edges", 2);
    tensors(&home, "good.safetensors", &T2I, 0.0);
    tensors(&home, "nan.safetensors", &T2I, f32::NAN);
    tensors(&home, "cut.safetensors", &T2I[..11], 0.0);
    let mut wide = T2I;
    wide[0].1 = &[16, 48, 3, 3];
    tensors(&home, "wide.safetensors", &wide, 0.0);
    let lora: [(&str, &[usize]); 1] = [("lora_unet_down_blocks_0.lora_down.weight", &[2, 2])];
    tensors(&home, "lora.safetensors", &lora, 0.0);
    home.write("junk.safetensors", b"junk");
    std::fs::create_dir(home.path().join("empty")).unwrap();
    let problems = |kind: &str, path: &str, model: &str| {
        let text = format!(
            "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n      training_folder: out\n      adapter:\n        type: \
             {kind}\n        train: true\n        channels: [16, 32]\n        downscale_factor: 2\n        num_res_blocks: 1\n        \
             name_or_path: {path}\n      datasets: [{{folder_path: data, control_path: edges, default_caption: a, resolution: [32]}}]\n      \
             train: {{steps: 2, dtype: float32, disable_sampling: true}}\n      model: {{name_or_path: {model}}}\n"
        );
        home.write("x.yaml", &text);
        let output = home.aitk().args(["validate", "--json", "x.yaml"]).output().unwrap();
        let document: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
        let problems = document["problems"].as_array().unwrap().iter();
        let problems: Vec<String> = problems.map(|problem| problem.as_str().unwrap().to_owned()).collect();
        assert_eq!(code(&output) == 0, problems.is_empty(), "{}", err(&output));
        problems
    };
    assert_eq!(problems("t2i", "good.safetensors", TINY), [""; 0]);
    for (kind, path, expected) in [
        ("t2i", "./none", "./none: no such file or folder"),
        ("t2i", "empty", "config.json"),
        ("t2i", "nan.safetensors", "not finite"),
        ("t2i", "cut.safetensors", "adapter.body.1.resnets.0.block2.bias"),
        ("t2i", "wide.safetensors", "adapter.conv_in.weight"),
        ("t2i", "lora.safetensors", "is a LoRA"),
        ("t2i", "junk.safetensors", "junk.safetensors"),
        ("t2i", TINY, "is a whole model"),
        ("control_net", TINY, "is a whole model"),
        ("control_net", "good.safetensors", "is a T2I adapter"),
        ("control_net", "./none", "./none: no such file or folder"),
    ] {
        let found = problems(kind, path, TINY);
        let [found] = found.as_slice() else {
            panic!("{kind}, {path}: {found:#?}");
        };
        assert!(
            found.contains("x.yaml:13:9: config.process[0].adapter.name_or_path: ") && found.contains(expected),
            "{kind}, {path}: {found}"
        );
    }
    // What the files show by themselves does not wait for the model.
    for (path, expected) in [("nan.safetensors", "not finite"), ("lora.safetensors", "is a LoRA")] {
        let found = problems("t2i", path, "./no_model");
        let is_said = |problem: &String| problem.contains("adapter.name_or_path: ") && problem.contains(expected);
        assert!(found.iter().any(is_said), "{path}: {found:#?}");
    }
}
