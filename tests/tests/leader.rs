//! Two coordinators on one PostgreSQL, with an authority of their own: the leader dies in the middle of a training run, and
//! nobody else notices.

#![allow(clippy::unwrap_used, reason = "a test may stop where it stands")]

use aitk_tests::eventually;
use aitk_tests::jobs::{draw_dataset, run_undisturbed, training};
use aitk_tests::pool::{Pool, Setup};
use aitk_tests::processes::{Process, free_address};
use aitk_tests::programs::program;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

#[allow(dead_code, reason = "it is shared with other tests")]
#[path = "../../coordinator/tests/it/support/postgres.rs"]
mod postgres;

const STEPS: u32 = 24;
const SAVE_EVERY: u32 = 4;
const LIMIT: Duration = Duration::from_secs(300);

/// As a coordinator makes it: only such a one can carry the authority's hash.
const TOKEN: &str = "aitk_0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A secret in a file of its own.
fn write_secret(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Runs a program to its end; what it says.
fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {err}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A coordinator with a folder of its own, and the token and authority of all.
fn coordinator(root: &Path, name: &str, environment: &[(String, String)]) -> Pool {
    let folder = root.join(name);
    let data = folder.join("coordinator");
    std::fs::create_dir_all(&data).unwrap();
    write_secret(&data.join("token"), TOKEN);
    let authority = root.join("first/coordinator/ca");
    if authority.exists() {
        // As an administrator copies it, with its rights.
        said(Command::new("cp").arg("-a").arg(&authority).arg(&data));
    } else {
        said(
            Command::new(program("aitk-coordinator"))
                .args(["init", "--data-dir"])
                .arg(&data),
        );
    }
    let address = free_address();
    let mut environment = environment.to_vec();
    environment.push(("AITK_ADVERTISE".into(), format!("https://{address}")));
    std::fs::create_dir_all(root.join("blobs")).unwrap();
    Pool::start_with(Setup {
        address,
        storage: Some(format!("file://{}", root.join("blobs").display())),
        environment,
        ..Setup::new(&folder)
    })
}

#[test]
fn a_leader_that_dies_does_not_interrupt_an_attempt() {
    let Some(server) = postgres::Postgres::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let quiet = root.join("undisturbed");
    draw_dataset(&quiet.join("dataset"), 4);
    std::fs::write(quiet.join("job.yaml"), training("shapes", &quiet, STEPS, SAVE_EVERY)).unwrap();
    run_undisturbed(&quiet);
    let expected = std::fs::read(quiet.join("shapes/shapes.safetensors")).unwrap();

    let environment = [("AITK_DATABASE".to_owned(), server.url())];
    let mut first = coordinator(root, "first", &environment);
    eventually("a leader", LIMIT, &[&first.coordinator], || {
        let log = first.coordinator.log_from_start().lines();
        log.iter()
            .any(|line| line.contains("this coordinator leads"))
            .then_some(())
    });
    let second = coordinator(root, "second", &environment);
    let both = format!("https://{},https://{}", first.setup().address, second.setup().address);

    // The worker joins with both addresses; whoever asks has them, too.
    let mut invite = first.command("aitk-coordinator");
    invite
        .env("AITK_SERVER", &both)
        .args(["worker", "join-token", "box", "--data-dir"]);
    let invitation = said(invite.arg(first.data_dir()));
    let (_, authority) = invitation.split_once('.').unwrap();
    let token_file = root.join("token");
    write_secret(&token_file, &format!("{TOKEN}.{authority}"));
    let mut join = second.command("aitk-worker");
    said(
        join.args(["join", &both, &invitation, "--data-dir"])
            .arg(root.join("box")),
    );
    let mut worker = second.command("aitk-worker");
    worker.env_remove("AITK_SERVER").env_remove("AITK_TOKEN_FILE");
    worker.args(["--devices", "cpu", "--data-dir"]).arg(root.join("box"));
    let worker = Process::start("box", root, &mut worker);
    let aitk = |arguments: &[&str]| {
        let mut command = second.command("aitk");
        let command = command.env("AITK_SERVER", &both).env("AITK_TOKEN_FILE", &token_file);
        let output = command.args(arguments).output().unwrap();
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
