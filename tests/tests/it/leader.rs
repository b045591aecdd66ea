//! Two coordinators on one PostgreSQL, with a certificate authority of their own: the leader is killed during a training run,
//! and the run is not interrupted.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it skips"
)]

use aitk_tests::cluster::Setup;
use aitk_tests::coordinators;
use aitk_tests::eventually;
use aitk_tests::jobs::{run_undisturbed, training_config, write_dataset};
use aitk_tests::namespaces::Namespaces;
use aitk_tests::postgres::Postgres;
use std::time::Duration;

const STEPS: u32 = 24;
const SAVE_EVERY: u32 = 4;
const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn a_leader_that_dies_does_not_interrupt_an_attempt() {
    let server = match Postgres::start(false) {
        Ok(server) => server,
        Err(why) => return aitk_tests::skip::skip("postgresql", why),
    };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let undisturbed = root.join("undisturbed");
    write_dataset(&undisturbed.join("dataset"), 4);
    std::fs::write(
        undisturbed.join("job.yaml"),
        training_config("shapes", &undisturbed, STEPS, SAVE_EVERY),
    )
    .unwrap();
    run_undisturbed(&undisturbed);
    let expected = std::fs::read(undisturbed.join("shapes/shapes.safetensors")).unwrap();

    std::fs::create_dir_all(root.join("blobs")).unwrap();
    let setup = |name| Setup {
        storage: Some(format!("file://{}", root.join("blobs").display())),
        ..Setup::new(&root.join(name))
    };
    let mut clusters = coordinators::start(&server.url(), vec![setup("first"), setup("second")]);
    let (second, mut first) = (clusters.pop().unwrap(), clusters.pop().unwrap());
    coordinators::join(&second, "box", &Namespaces::Host);
    let worker = second.worker("box");
    let aitk = |arguments: &[&str]| {
        let output = second.aitk(arguments);
        output
            .status
            .success()
            .then(|| String::from_utf8(output.stdout).unwrap())
    };
    let client_folder = second.setup().folder.clone();
    write_dataset(&client_folder.join("dataset"), 4);
    std::fs::write(
        client_folder.join("job.yaml"),
        training_config("shapes", &client_folder, STEPS, SAVE_EVERY),
    )
    .unwrap();
    let id = eventually("the submission", LIMIT, &[&second.coordinator], || {
        aitk(&["submit", "job.yaml"])
    });
    let id = id.trim().to_owned();
    let wait_for_job = |what: &str, wanted: &dyn Fn(&serde_json::Value) -> bool| {
        eventually(what, LIMIT, &[&worker, &second.coordinator], || {
            // Without a leader the command fails.
            let text = aitk(&["ps", "-a", "--json"])?;
            let jobs: serde_json::Value = serde_json::from_str(&text).unwrap();
            let job = jobs["jobs"]
                .as_array()
                .unwrap()
                .iter()
                .find(|job| job["id"] == id.as_str())?
                .clone();
            wanted(&job).then_some(job)
        })
    };
    wait_for_job("a checkpoint", &|job| {
        job["checkpoint_step"].as_u64() >= Some(u64::from(SAVE_EVERY))
    });
    first.coordinator.kill();
    assert!(aitk(&["ps"]).is_some(), "a command waits for the new leader");

    let job = wait_for_job("the end", &|job| job["state"] == "completed");
    assert_eq!(job["attempts"].as_array().unwrap().len(), 1, "{job}\n{}", worker.tail());
    aitk(&["artifacts", "get", &id, "-o", "out"]).unwrap();
    let lora = std::fs::read(client_folder.join("out/shapes/shapes.safetensors")).unwrap();
    assert!(
        lora == expected,
        "the LoRA differs from that of a run without faults\n{}",
        worker.tail()
    );
}
