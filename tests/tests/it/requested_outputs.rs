//! `aitk save` and `aitk sample` on a running training of real processes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::TestCluster;
use aitk_tests::jobs::{image_config, training_config, write_dataset};
use aitk_tests::processes::eventually;
use serde_json::Value;
use std::process::Output;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(240);

/// The names and steps of a job's files of a kind.
fn files(cluster: &TestCluster, id: &str, kind: &str) -> Vec<(String, u64)> {
    let listed = cluster.aitk_json(["artifacts", "ls", id, "--json"]);
    let all = listed["artifacts"].as_array().unwrap().iter();
    all.filter(|file| file["kind"] == kind)
        .map(|file| {
            (
                file["name"].as_str().unwrap().to_owned(),
                file["step"].as_u64().unwrap(),
            )
        })
        .collect()
}

fn refused(output: &Output, parts: &[&str]) {
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    for part in parts {
        assert!(message.contains(part), "\"{part}\" is not in: {message}");
    }
}

#[test]
fn a_running_training_saves_and_samples_on_request_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_dataset(&root.join("dataset"), 4);
    // It neither ends nor saves by itself.
    let config = training_config("shapes", root, 1_000_000, 1_000_000);
    std::fs::write(root.join("job.yaml"), config).unwrap();
    let cluster = TestCluster::start(root, None, Vec::new());

    let id = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    refused(&cluster.aitk(["save", &id]), &["because it is queued", "aitk explain"]);
    let worker = cluster.worker("one");
    let steps_done = || -> Option<u64> {
        let listed = cluster.aitk_json(["ps", &id, "--json"]);
        let job = &listed["jobs"][0];
        let training = job["phase"] == "training";
        job["progress"]["done"].as_u64().filter(|done| training && *done > 0)
    };
    let before = eventually("the training makes steps", LIMIT, &[&worker], steps_done);
    assert!(files(&cluster, &id, "lora").is_empty());

    assert_eq!(cluster.aitk_ok(["save", &id]).trim(), id);
    let asked: Value = cluster.aitk_json(["sample", "shapes", "--json"]);
    assert_eq!(asked["jobs"][0]["id"], id.as_str());
    let saves = eventually("the requested save", LIMIT, &[&worker], || {
        Some(files(&cluster, &id, "lora")).filter(|files| !files.is_empty())
    });
    let samples = eventually("the requested sample", LIMIT, &[&worker], || {
        let files = files(&cluster, &id, "sample");
        // One is of the start of the training.
        files.into_iter().find(|(_, step)| *step > 0)
    });
    let [(name, step)] = &saves[..] else {
        panic!("{saves:?}");
    };
    assert!(*step >= before, "{step} after {before}");
    assert_eq!(*name, format!("shapes/shapes_{step:09}.safetensors"));
    let (sample, sampled) = samples;
    assert!(sample.ends_with(&format!("__{sampled:09}_0.png")), "{sample}");
    let logs = cluster.aitk_ok(["logs", &id]);
    for line in [
        format!("saving at step {step}, as requested"),
        format!("sampling at step {sampled}, as requested"),
    ] {
        assert_eq!(logs.matches(&line).count(), 1, "{line}: {logs}");
    }
    // It goes on, and its checkpoint is committed.
    let last = (*step).max(sampled);
    eventually("the training goes on", LIMIT, &[&worker], || {
        steps_done().filter(|done| *done > last)
    });
    eventually("the checkpoint is committed", LIMIT, &[&worker], || {
        let listed = cluster.aitk_json(["ps", &id, "--json"]);
        listed["jobs"][0]["checkpoint_step"]
            .as_u64()
            .filter(|saved| saved == step)
    });
    cluster.aitk_ok(["artifacts", "get", &id, "-o", "out"]);
    let lora = std::fs::read(root.join("out").join(name)).unwrap();
    assert!(safetensors::SafeTensors::deserialize(&lora).is_ok());

    cluster.aitk_ok(["stop", &id]);
    assert_eq!(
        cluster.aitk(["wait", &id, "--timeout", "240"]).status.code(),
        Some(143),
        "{}",
        worker.tail()
    );
    refused(
        &cluster.aitk(["sample", &id]),
        &["because it is stopped", "aitk resume"],
    );

    // Jobs that do not train: one that the command line refuses, and one that the coordinator refuses.
    std::fs::write(root.join("images.yaml"), image_config("images", root, 1, None)).unwrap();
    let images = cluster.aitk_ok(["submit", "images.yaml"]).trim().to_owned();
    for command in ["save", "sample"] {
        refused(&cluster.aitk([command, &images]), &["`generate`", "only trainings"]);
    }
    assert_eq!(cluster.aitk(["save", "nobody"]).status.code(), Some(3));
}
