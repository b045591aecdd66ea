//! Two coordinators on one PostgreSQL, with an authority of their own: the leader dies in the middle of a training run, and
//! nobody else notices.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test may stop where it stands, and says what it skipped"
)]

use aitk_tests::eventually;
use aitk_tests::jobs::{draw_dataset, run_undisturbed, training};
use aitk_tests::members;
use aitk_tests::place::Place;
use aitk_tests::pool::Setup;
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
    let quiet = root.join("undisturbed");
    draw_dataset(&quiet.join("dataset"), 4);
    std::fs::write(quiet.join("job.yaml"), training("shapes", &quiet, STEPS, SAVE_EVERY)).unwrap();
    run_undisturbed(&quiet);
    let expected = std::fs::read(quiet.join("shapes/shapes.safetensors")).unwrap();

    std::fs::create_dir_all(root.join("blobs")).unwrap();
    let setup = |name| Setup {
        storage: Some(format!("file://{}", root.join("blobs").display())),
        ..Setup::new(&root.join(name))
    };
    let mut pools = members::start(&server.url(), vec![setup("first"), setup("second")]);
    let (second, mut first) = (pools.pop().unwrap(), pools.pop().unwrap());
    members::join(&second, "box", &Place::Here);
    let worker = second.worker("box");
    let aitk = |arguments: &[&str]| {
        let output = second.aitk(arguments);
        output
            .status
            .success()
            .then(|| String::from_utf8(output.stdout).unwrap())
    };
    let scene = second.setup().folder.clone();
    draw_dataset(&scene.join("dataset"), 4);
    std::fs::write(scene.join("job.yaml"), training("shapes", &scene, STEPS, SAVE_EVERY)).unwrap();
    let id = eventually("an id", LIMIT, &[&second.coordinator], || aitk(&["submit", "job.yaml"]));
    let id = id.trim().to_owned();
    let seen = |what: &str, wanted: &dyn Fn(&serde_json::Value) -> bool| {
        eventually(what, LIMIT, &[&worker, &second.coordinator], || {
            // While nobody leads there is no answer.
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
    seen("a checkpoint", &|job| {
        job["checkpoint_step"].as_u64() >= Some(u64::from(SAVE_EVERY))
    });
    first.coordinator.kill();
    assert!(aitk(&["ps"]).is_some(), "a command waits until somebody leads again");

    let job = seen("the end", &|job| job["state"] == "completed");
    assert_eq!(job["attempts"].as_array().unwrap().len(), 1, "{job}\n{}", worker.tail());
    aitk(&["artifacts", "get", &id, "-o", "out"]).unwrap();
    let lora = std::fs::read(scene.join("out/shapes/shapes.safetensors")).unwrap();
    assert!(
        lora == expected,
        "the LoRA differs from the undisturbed run's\n{}",
        worker.tail()
    );
}
