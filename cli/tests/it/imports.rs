//! Configs of sd-scripts and presets of the kohya GUI: `aitk import`, and commands that take them directly.

use crate::preflight::{TINY, images};
use crate::support::{Home, code, err, out};
use std::path::Path;

/// Configs that train tiny models, each with the YAML that it means, written by hand.
const TRAINED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/sd_scripts");

/// Writes images with captions in a folder as sd-scripts has them, and a config that trains on them.
fn training(home: &Home, more: &str) {
    images(home, "data/2_a circle", 3);
    let text = format!(
        "[model]\npretrained_model_name_or_path = \"{TINY}\"\n[train]\ntrain_data_dir = \"data\"\noutput_dir = \"by_toml\"\n\
         output_name = \"circle\"\nresolution = 32\nenable_bucket = true\nmin_bucket_reso = 16\nbucket_reso_steps = 16\n\
         caption_extension = \".txt\"\nnetwork_module = \"networks.lora\"\nnetwork_dim = 2\nlearning_rate = 1e-3\nmax_train_epochs = 1\n\
         gradient_accumulation_steps = 2\nlr_scheduler = \"linear\"\nseed = 3\n{more}"
    );
    home.write("config.toml", &text);
}

/// The tensors of a safetensors file, as bytes.
fn tensors(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].to_vec()
}

#[test]
fn a_config_of_sd_scripts_trains_what_its_hand_written_yaml_does() {
    let home = Home::new();
    training(&home, "xformers = true\nno_metadata = true\n");
    home.write(
        "by_hand.yaml",
        &format!(
            "job: extension
config:
  name: circle
  process:
    - type: sd_trainer
      training_folder: by_hand
      training_seed: 3
      network:
        {{type: lora, linear: 2, linear_alpha: 1, network_kwargs: {{only_if_contains: [attentions, text_model]}}}}
      save: {{save_every: 0, max_step_saves_to_keep: 0, dtype: float32}}
      datasets:
        - {{folder_path: data/2_a circle, num_repeats: 2, resolution: 32, caption_ext: txt, default_caption: a circle, loss_multiplier: 0.5}}
      train:
        {{steps: 3, gradient_accumulation: 2, lr: 1e-3, train_text_encoder: true, gradient_checkpointing: false, disable_sampling: true,
         optimizer_params: {{eps: 1e-8, weight_decay: 0.01}}, lr_scheduler: linear, lr_scheduler_params: {{start_factor: 1, end_factor: 0}}}}
      model: {{name_or_path: \"{TINY}\"}}
"
        ),
    );
    let imported = home
        .aitk()
        .args(["import", "config.toml", "-o", "imported.yaml"])
        .output()
        .unwrap();
    assert_eq!(code(&imported), 0, "{}", err(&imported));
    assert!(err(&imported).contains("no_metadata: ignored"), "{}", err(&imported));
    let again = home
        .aitk()
        .args(["import", "config.toml", "-o", "imported.yaml"])
        .output()
        .unwrap();
    assert!(code(&again) != 0 && err(&again).contains("--force"), "{}", err(&again));

    let run = home
        .aitk()
        .args(["run", "config.toml", "by_hand.yaml", "--device", "cpu", "--no-progress"])
        .output()
        .unwrap();
    assert_eq!(code(&run), 0, "{}{}", out(&run), err(&run));
    let file = |folder: &str| tensors(&home.path().join(folder).join("circle/circle.safetensors"));
    assert!(file("by_toml") == file("by_hand"), "the LoRAs differ");

    let text = std::fs::read_to_string(home.path().join("imported.yaml")).unwrap();
    home.write("imported.yaml", &text.replace("by_toml", "by_import"));
    let run = home
        .aitk()
        .args(["run", "imported.yaml", "--device", "cpu", "--no-progress"])
        .output()
        .unwrap();
    assert_eq!(code(&run), 0, "{}{}", out(&run), err(&run));
    assert!(file("by_import") == file("by_hand"), "the LoRAs differ");
}

/// That all configs of the folder become the jobs that their YAML is, aitk-common's
/// `configs_of_tiny_models_become_their_hand_written_yaml` checks.
#[test]
fn configs_of_sd_scripts_train_what_their_hand_written_yaml_does() {
    let home = Home::new();
    for (folder, count) in [
        ("images/2_a circle", 3),
        ("reg/1_circle", 2),
        ("cats", 3),
        ("more_cats", 2),
        ("masks", 3),
    ] {
        images(&home, folder, count);
    }
    home.write("cats/2.txt", "a cat, black ||| small, on a roof, asleep");
    home.write("more_cats/1.txt", "a cat; white/grey; in the sun");
    std::os::unix::fs::symlink(Path::new(TRAINED).join(".."), home.path().join("models")).unwrap();
    let read = |name: &str| std::fs::read_to_string(Path::new(TRAINED).join(name)).unwrap();
    home.write("sd15_masked.dataset.toml", &read("sd15_masked.dataset.toml"));
    let mut configs = Vec::new();
    let trainings = [("sd15_masked", "toml"), ("flux_lora", "toml"), ("gui_lora", "json")];
    for (name, ending) in trainings {
        for (ending, folder) in [(ending, "by_import"), ("yaml", "by_hand")] {
            let file = format!("{name}.{ending}");
            // `output_dir = "output"`, `"output_dir": "output"`, `training_folder: output`.
            let text = read(&file).replace("\"output\"", &format!("\"{folder}\""));
            home.write(&file, &text.replace(": output\n", &format!(": {folder}\n")));
            configs.push(file);
        }
    }
    let run = home
        .aitk()
        .arg("run")
        .args(&configs)
        .args(["--device", "cpu", "--no-progress"])
        .output()
        .unwrap();
    assert_eq!(code(&run), 0, "{}{}", out(&run), err(&run));
    for (name, _) in trainings {
        let path = |folder: &str| home.path().join(folder).join(name);
        let weights = |folder: &str| tensors(&path(folder).join(format!("{name}.safetensors")));
        assert!(weights("by_import") == weights("by_hand"), "{name}: the LoRAs differ");
        let losses = |folder: &str| -> Vec<Vec<serde_json::Value>> {
            let text = std::fs::read_to_string(path(folder).join("metrics.jsonl")).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
            let keys = ["step", "loss", "lr"];
            lines
                .map(|line: serde_json::Value| keys.map(|key| line[key].clone()).to_vec())
                .collect()
        };
        let found = losses("by_import");
        assert!(
            found.len() >= 3 && found.iter().flatten().all(serde_json::Value::is_number),
            "{name}: {found:?}"
        );
        assert_eq!(found, losses("by_hand"), "{name}");
    }
}

#[test]
fn commands_take_configs_of_sd_scripts_and_say_what_is_wrong_with_them() {
    let home = Home::new();
    training(&home, "weighted_captions = true\n");
    for command in ["import", "validate", "run", "submit", "fit"] {
        let output = home.aitk().args([command, "config.toml"]).output().unwrap();
        assert_eq!(code(&output), 1, "{command}: {}", err(&output));
        let said = err(&output);
        assert!(
            said.contains("config.toml:19:1: weighted_captions: aitk has no weights in captions"),
            "{command}: {said}"
        );
    }
    training(&home, "no_metadata = true\n");
    let output = home
        .aitk()
        .args(["validate", "config.toml", "--set", "train.steps=7"])
        .output()
        .unwrap();
    let said = out(&output);
    assert!(
        said.contains("no_metadata: ignored") && said.contains('7'),
        "{said}{}",
        err(&output)
    );

    home.write(
        "preset.json",
        &format!(
            "{{\"LoRA_type\": \"Standard\", \"pretrained_model_name_or_path\": \"{TINY}\", \"train_data_dir\": \"data\", \
             \"output_dir\": \"out\", \"max_resolution\": \"32,32\", \"learning_rate\": 0.001, \"epoch\": 2}}"
        ),
    );
    let output = home.aitk().args(["import", "preset.json"]).output().unwrap();
    assert!(
        code(&output) == 0 && out(&output).contains("steps: 12"),
        "{}{}",
        out(&output),
        err(&output)
    );

    home.write("which.toml", "pretrained_model_name_or_path = \"my/model\"\n");
    for (arguments, exit, expected) in [
        (
            ["import", "which.toml"].as_slice(),
            1,
            "aitk run which.toml --script train_db\n",
        ),
        (&["import", "none.toml"], 3, "no such file"),
        (&["import", "none.json"], 3, "no such file"),
        (&["run", "none.toml"], 3, "no such file"),
        (
            &["import", "config.toml", "--script", "gen_img"],
            2,
            "known: train_network",
        ),
        (
            &["import", "config.toml", "--script", "flux_train_network"],
            1,
            "does not fit flux_train_network",
        ),
        (
            &["import", "config.toml", "--dataset-config", "none.toml"],
            1,
            "none.toml cannot be read",
        ),
        (&["import", "config.toml", "-o", "none/a.yaml"], 3, "no such folder"),
        (
            &["run", "config.toml", "--script", "gen_img"],
            2,
            "known: train_network",
        ),
        (
            &["submit", "config.toml", "--script", "flux_train_network"],
            1,
            "does not fit flux_train_network",
        ),
        (
            &["validate", "config.yaml", "--script", "fine_tune"],
            2,
            "--script is for configs of sd-scripts",
        ),
        (
            &["fit", "config.toml", "--script", "flux_train_network"],
            1,
            "does not fit flux_train_network",
        ),
    ] {
        let output = home.aitk().args(arguments).output().unwrap();
        assert!(
            code(&output) == exit && err(&output).contains(expected),
            "{arguments:?}: {} {}",
            code(&output),
            err(&output)
        );
    }
}
