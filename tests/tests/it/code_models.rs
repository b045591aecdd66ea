//! Trainings of code models through real processes: a universal training config runs unchanged here and on a worker, which fetches the model from
//! the hub.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::TestCluster;
use aitk_tests::hub::Hub;
use aitk_tests::jobs::{code_training_config, run_config, run_undisturbed, write_code_data};
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
