//! The path of a job through real processes: submission, training on a worker, LoRA and sample images in storage.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::TestCluster;
use aitk_tests::jobs::{kontext_config, run_config, training_config, write_dataset};
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
fn a_training_takes_its_control_images_along() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_dataset(&root.join("dataset"), 4);
    std::fs::create_dir(root.join("controls")).unwrap();
    for number in 0..4u8 {
        let image = image::RgbImage::from_fn(50, 50, |x, y| image::Rgb([x as u8 * 4, 40 * number, y as u8 * 3]));
        image.save(root.join(format!("controls/{number:03}.png"))).unwrap();
    }
    std::fs::copy(root.join("controls/001.png"), root.join("before.png")).unwrap();
    std::fs::write(root.join("job.yaml"), kontext_config("pairs", root, 3)).unwrap();
    let cluster = TestCluster::start(root, None, Vec::new());
    let worker = cluster.worker("one");
    let submitted = cluster.aitk_json(["submit", "job.yaml", "--json"]);
    let inputs = submitted["inputs"].as_array().unwrap();
    for name in ["dataset", "controls", "before.png", "tiny_flux"] {
        let of_name = |input: &&serde_json::Value| input["path"].as_str().unwrap().ends_with(name);
        let input = inputs.iter().find(of_name);
        assert!(
            input.is_some_and(|input| input["sent_bytes"].as_u64().is_some()),
            "{name}: {inputs:?}"
        );
    }
    let id = submitted["job"]
        .as_str()
        .or(submitted["id"].as_str())
        .unwrap()
        .to_owned();
    let waited = cluster.aitk(["wait", &id, "--timeout", "240"]);
    assert!(
        waited.status.success(),
        "{}\n{}\n{}",
        String::from_utf8_lossy(&waited.stderr),
        cluster.aitk_ok(["logs", &id]),
        worker.tail()
    );
    cluster.aitk_ok(["artifacts", "get", &id, "-o", "out"]);
    let of_cluster = std::fs::read(root.join("out/pairs/pairs.safetensors")).unwrap();
    assert_eq!(std::fs::read_dir(root.join("out/pairs/samples")).unwrap().count(), 2);

    // The same numbers as without a cluster, where images and control images are used in place.
    run_config(root, "job.yaml");
    let in_place = std::fs::read(root.join("pairs/pairs.safetensors")).unwrap();
    let tensors = |bytes: &[u8]| -> Vec<(String, Vec<u8>)> {
        let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let mut all: Vec<(String, Vec<u8>)> = file
            .tensors()
            .into_iter()
            .map(|(name, view)| (name, view.data().to_vec()))
            .collect();
        all.sort();
        all
    };
    assert!(tensors(&of_cluster) == tensors(&in_place));
    // The folder of control images is only read.
    assert_eq!(std::fs::read_dir(root.join("controls")).unwrap().count(), 4);

    // A changed control image is another input.
    image::RgbImage::new(7, 7).save(root.join("controls/003.png")).unwrap();
    std::fs::write(root.join("job.yaml"), kontext_config("again", root, 3)).unwrap();
    let again = cluster.aitk_json(["submit", "job.yaml", "--json"]);
    let input = |submitted: &serde_json::Value, name: &str| {
        let inputs = submitted["inputs"].as_array().unwrap();
        let found = inputs
            .iter()
            .find(|input| input["path"].as_str().unwrap().ends_with(name));
        found.unwrap().clone()
    };
    let (before, after) = (input(&submitted, "controls"), input(&again, "controls"));
    assert_ne!(before["snapshot"], after["snapshot"]);
    assert!(after["sent_bytes"].as_u64().unwrap() > 0, "{after}");
    assert_eq!(
        input(&submitted, "dataset")["snapshot"],
        input(&again, "dataset")["snapshot"]
    );
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
