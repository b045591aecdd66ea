//! The path of a job through real processes: submission, training on a worker, LoRA and sample images in storage.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::TestCluster;
use aitk_tests::jobs::{training_config, write_dataset};
use std::time::Duration;

#[test]
fn a_submitted_training_job_gives_a_lora_and_images() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_dataset(&root.join("dataset"), 4);
    std::fs::write(root.join("job.yaml"), training_config("shapes", root, 6, 3)).unwrap();
    let cluster = TestCluster::start(root, None, Vec::new());
    let mut worker = cluster.worker("one");

    let id = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    assert!(
        !id.is_empty() && !id.contains(char::is_whitespace),
        "submit prints the id alone: {id:?}"
    );
    let waited = cluster.aitk(["wait", &id, "--timeout", "240"]);
    assert!(
        waited.status.success(),
        "{}\n{}\n{}",
        String::from_utf8_lossy(&waited.stderr),
        cluster.coordinator.tail(),
        worker.tail()
    );

    cluster.aitk_ok(["artifacts", "get", &id, "-o", "out"]);
    let run = root.join("out/shapes");
    let lora = std::fs::read(run.join("shapes.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&lora).unwrap();
    assert!(
        tensors.names().iter().all(|name| name.starts_with("lora_unet_")),
        "{:?}",
        tensors.names()
    );
    assert!(
        run.join("shapes_000000003.safetensors").is_file(),
        "the step save is kept"
    );
    assert!(run.join("config.yaml").is_file(), "the config is kept");
    let images = std::fs::read_dir(run.join("samples")).unwrap().count();
    assert_eq!(images, 2, "one image before, one after the training");

    // Every command that shows the completed job works, as text and as JSON.
    let ps: serde_json::Value = serde_json::from_str(&cluster.aitk_ok(["ps", "-a", "--json"])).unwrap();
    assert!(ps.to_string().contains(&id), "{ps}");
    assert!(cluster.aitk_ok(["ps", "-a"]).contains("shapes"));
    assert!(cluster.aitk_ok(["workers"]).contains("one"));
    assert!(!cluster.aitk_ok(["logs", &id]).is_empty());
    for line in cluster
        .aitk_ok(["ps", "-a"])
        .lines()
        .chain(cluster.aitk_ok(["workers"]).lines())
    {
        assert!(line.chars().count() <= 80, "wider than 80 columns: {line}");
    }

    let code = worker.terminate(Duration::from_secs(20));
    assert_eq!(code, Some(0), "{}", worker.tail());
}

#[test]
fn the_second_submission_uploads_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_dataset(&root.join("dataset"), 4);
    std::fs::write(root.join("job.yaml"), training_config("shapes", root, 2, 100)).unwrap();
    let cluster = TestCluster::start(root, None, Vec::new());
    let submit = || {
        let submitted = cluster.aitk_json(["submit", "job.yaml", "--json"]);
        let inputs = submitted["inputs"].as_array().unwrap().clone();
        let sent = inputs.iter().map(|input| input["sent_bytes"].as_u64().unwrap());
        sent.sum::<u64>()
    };
    assert!(submit() > 0);
    let stored = count_files(&cluster.data_dir());
    assert!(stored > 0);
    // Storage is addressed by content, so the number of files alone would not show a repeated upload.
    assert_eq!(submit(), 0);
    assert_eq!(count_files(&cluster.data_dir()), stored);
    // Without a worker both jobs wait, with that reason.
    let ps = cluster.aitk_ok(["ps", "--json"]);
    assert!(ps.contains("no worker"), "{ps}");
}

fn count_files(folder: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(folder.join("storage"))
        .into_iter()
        .flatten()
        .flatten();
    let mut pending: Vec<_> = entries.map(|entry| entry.path()).collect();
    let mut files = 0;
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(std::fs::read_dir(path).unwrap().flatten().map(|entry| entry.path()));
        } else {
            files += 1;
        }
    }
    files
}
