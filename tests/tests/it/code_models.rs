//! Trainings of code models through real processes: a universal training config runs unchanged here and on a worker, which fetches the model from
//! the hub.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::TestCluster;
use aitk_tests::hub::Hub;
use aitk_tests::jobs::{code_training_config, run_command, run_config, run_undisturbed, write_code_data};
use aitk_tests::namespaces::Namespaces;
use aitk_tests::programs;
use std::path::Path;

/// A universal training config, as other trainers have it.
fn universal_config(model: &str, data: &Path, output: &Path) -> String {
    format!(
        r#"# The same on macOS (Metal), Linux (CUDA) and the CPU.
model:
  name: "coder"
  pretrained_model: "{model}"
  trust_remote_code: true
  device_map: "auto"
  torch_dtype: "auto"

quantization:
  load_in_4bit: false
  load_in_8bit: true
  bnb_4bit_compute_dtype: "float16"
  lora_enabled: true
  lora_rank: 4
  lora_alpha: 8
  lora_dropout: 0.0
  lora_target_modules: ["q_proj", "v_proj"]
  lora_bias: "none"

dataset:
  train_path: "{data}"
  context_window: 64
  target_window: 32

optimization:
  batch_size: 2
  gradient_accumulation_steps: 2
  learning_rate: 1.2e-3
  lr_scheduler: "cosine"
  warmup_steps: 1
  optimizer: "adamw"
  weight_decay: 0.08
  max_grad_norm: 0.3
  gradient_checkpointing: true

training:
  max_steps: 4
  save_steps: 2
  save_total_limit: 2
  logging_steps: 1
  seed: 42

device_backend:
  force_device: cpu
  attention_backend: "auto"

output:
  output_dir: "{output}"
  save_optimizer: false
"#,
        data = data.display(),
        output = output.display(),
    )
}

#[test]
fn a_universal_config_runs_here_and_on_a_worker_with_a_model_of_the_hub() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    // A base model: a new one after two steps.
    write_code_data(root);
    std::fs::write(root.join("job.yaml"), code_training_config("base", root, 2, 0)).unwrap();
    run_undisturbed(root);
    let hub = Hub::start(env!("CARGO_BIN_EXE_hub-server"), root);
    let repository = root.join("hub/lab/coder");
    std::fs::create_dir_all(&repository).unwrap();
    let base = root.join("base/base");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(base.join(name), repository.join(name)).unwrap();
    }
    let data = root.join("tokens.jsonl");
    let (here, there) = (root.join("here/coder"), root.join("there/coder"));

    let text = universal_config(&base.display().to_string(), &data, &here);
    std::fs::write(root.join("here.yaml"), text).unwrap();
    let ran = run_config(root, "here.yaml");
    let messages = String::from_utf8(ran.stderr).unwrap() + &String::from_utf8(ran.stdout).unwrap();
    assert_eq!(messages.matches("about PyTorch").count(), 1, "{messages}");
    assert!(
        messages.contains("here.yaml:3: ") && messages.contains("`model.device_map`"),
        "{messages}"
    );
    let adapter = |folder: &Path| std::fs::read(folder.join("coder/adapter_model.safetensors")).unwrap();
    let expected = adapter(&here);

    let text = universal_config("lab/coder", &data, &there);
    std::fs::write(root.join("there.yaml"), text).unwrap();
    let cluster = TestCluster::start(root, None, hub.environment());
    let worker = cluster.worker("one");
    let checked = cluster.aitk(["validate", "there.yaml"]);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let id = cluster.aitk_ok(["submit", "there.yaml"]).trim().to_owned();
    let waited = cluster.aitk(["wait", &id, "--timeout", "240"]);
    assert!(
        waited.status.success(),
        "{}\n{}\n{}",
        String::from_utf8_lossy(&waited.stderr),
        cluster.coordinator.tail(),
        worker.tail()
    );
    cluster.aitk_ok(["artifacts", "get", &id, "-o", "out"]);
    assert!(
        adapter(&root.join("out/coder")) == expected,
        "the LoRAs differ\n{}",
        worker.tail()
    );
}

/// Universal configs as people have them for Macs, for cards of different sizes and for debugging: without and with a forced device, with the
/// settings that are advised for little memory, and with token sequences in a JSON file at a relative path.
fn configs_of_platforms() -> Vec<(&'static str, String)> {
    let config = |name: &str, data: &str, model: &str, optimization: &str, device: &str| {
        format!(
            "model:\n  pretrained_model: lab/coder\n  trust_remote_code: true\n{model}\ndataset:\n  train_path: data/{data}\n\
             {optimization}\ntraining:\n  num_epochs: 1\n  seed: 42\n  logging_steps: 1\n\ndevice_backend:\n{device}\n\
             output:\n  output_dir: models/{name}\n"
        )
    };
    let auto = "  force_device: null  # the best device\n  attention_backend: \"auto\"\n";
    let mac = "  torch_dtype: bfloat16\n";
    let lora = "  torch_dtype: auto\nquantization:\n  load_in_8bit: true\n  lora_enabled: true\n  lora_rank: 4\n  lora_alpha: 8\n";
    let mac_settings = "  context_window: 64\noptimization:\n  batch_size: 2\n  gradient_checkpointing: false\n  learning_rate: 1e-3\n";
    let card_settings = "  context_window: 128\noptimization:\n  batch_size: 4\n  gradient_checkpointing: true\n  learning_rate: 1e-3\n";
    let little = "  context_window: 32\noptimization:\n  batch_size: 1\n  gradient_accumulation_steps: 16\n  learning_rate: 1e-3\n";
    let sequences = "token_sequences.json";
    let (cuda, cpu) = (
        "  force_device: cuda\n  attention_backend: sdpa\n",
        "  force_device: \"cpu\"\n  attention_backend: native\n",
    );
    [
        ("mac", sequences, mac, mac_settings, auto),
        ("card", sequences, lora, card_settings, auto),
        ("little", sequences, lora, little, cuda),
        ("debugging", sequences, mac, mac_settings, cpu),
        // A data set of Hugging Face in Parquet.
        ("data_set", "hub", mac, card_settings, auto),
    ]
    .map(|(name, data, model, optimization, device)| (name, config(name, data, model, optimization, device)))
    .to_vec()
}

#[test]
fn universal_configs_of_every_platform_run_unchanged_on_a_machine_without_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_code_data(root);
    std::fs::write(root.join("job.yaml"), code_training_config("base", root, 2, 0)).unwrap();
    run_undisturbed(root);
    let hub = Hub::start(env!("CARGO_BIN_EXE_hub-server"), root);
    let repository = root.join("hub/lab/coder");
    std::fs::create_dir_all(&repository).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(root.join("base/base").join(name), repository.join(name)).unwrap();
    }
    std::fs::create_dir_all(root.join("data")).unwrap();
    let sequences: Vec<Vec<u32>> = (1..9)
        .map(|start| (0..48).map(|index| (index * start) % 251).collect())
        .collect();
    std::fs::write(root.join("data/token_sequences.json"), format!("{sequences:?}")).unwrap();

    std::fs::create_dir_all(root.join("data/hub/data")).unwrap();
    let parquet = programs::repository().join("tests/fixtures/parquet/ids_dictionary.parquet");
    std::fs::copy(parquet, root.join("data/hub/data/train-00000-of-00001.parquet")).unwrap();
    std::fs::write(root.join("data/hub/README.md"), "# A data set\n").unwrap();

    let cluster = TestCluster::start(root, None, hub.environment());
    let worker = cluster.worker("one");
    let mut jobs = Vec::new();
    for (name, text) in configs_of_platforms() {
        let file = format!("{name}.yaml");
        std::fs::write(root.join(&file), text).unwrap();
        // `--set` changes the device alone: the file stays as it is.
        let id = cluster.aitk_ok(["submit", &file, "--set", "cluster.device=cpu"]);
        jobs.push((name, id.trim().to_owned()));
        let mut run = run_command(&Namespaces::Host, root, &file);
        let ran = run
            .args(["--set", "cluster.device=cpu"])
            .envs(hub.environment())
            .output()
            .unwrap();
        assert!(ran.status.success(), "{name}: {}", String::from_utf8_lossy(&ran.stderr));
    }
    for (name, id) in jobs {
        let waited = cluster.aitk(["wait", &id, "--timeout", "240"]);
        assert!(
            waited.status.success(),
            "{name}: {}\n{}",
            String::from_utf8_lossy(&waited.stderr),
            worker.tail()
        );
        let out = format!("out-{name}");
        cluster.aitk_ok(["artifacts", "get", &id, "-o", &out]);
        let saved = |folder: &Path| {
            let folder = folder.join(name).join(name);
            let files = ["adapter_model.safetensors", "model.safetensors"].map(|file| folder.join(file));
            let found = files.iter().find(|file| file.is_file());
            std::fs::read(found.unwrap_or_else(|| panic!("{name}: nothing in {}", folder.display()))).unwrap()
        };
        assert!(
            saved(&root.join("models")) == saved(&root.join(&out)),
            "{name}: the results of `aitk run` and of the worker differ"
        );
    }
}
