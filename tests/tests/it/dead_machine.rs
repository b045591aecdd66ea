//! A worker and the coordinator are killed, and the object storage fails. The job goes on and its result is the same, bit for
//! bit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::TestCluster;
use aitk_tests::eventually;
use aitk_tests::jobs::{
    code_training_config, flux_training_config, run_undisturbed, training_config, write_code_data, write_dataset,
};
use aitk_tests::processes::{Process, is_alive};
use aitk_tests::s3::S3;
use aitk_tests::server_fault::ServerFault;
use std::path::Path;
use std::time::Duration;

const STEPS: u32 = 24;
const SAVE_EVERY: u32 = 4;
const LIMIT: Duration = Duration::from_secs(300);

/// Writes the config of a training of a model.
type WriteConfig = fn(&str, &Path, u32, u32) -> String;

/// Writes the data of all trainings.
fn write_data(folder: &Path) {
    write_dataset(&folder.join("dataset"), 4);
    write_code_data(folder);
}

/// The weights that a training saved: a LoRA, or a code model.
fn weights_in(folder: &Path) -> Vec<u8> {
    let files = ["shapes/shapes.safetensors", "shapes/shapes/model.safetensors"].map(|name| folder.join(name));
    let saved = files.iter().find(|file| file.is_file()).unwrap();
    std::fs::read(saved).unwrap()
}

/// The weights of a run without faults, made by `aitk run`.
fn expected_weights(root: &Path, config: WriteConfig) -> Vec<u8> {
    let folder = root.join("undisturbed");
    write_data(&folder);
    std::fs::write(folder.join("job.yaml"), config("shapes", &folder, STEPS, SAVE_EVERY)).unwrap();
    run_undisturbed(&folder);
    weights_in(&folder)
}

struct TestRun {
    cluster: TestCluster,
    id: String,
    root: std::path::PathBuf,
}

impl TestRun {
    fn start(root: &Path, s3: &S3, config: WriteConfig) -> Self {
        write_data(root);
        std::fs::write(root.join("job.yaml"), config("shapes", root, STEPS, SAVE_EVERY)).unwrap();
        let cluster = TestCluster::start(root, Some(s3.url()), s3.environment());
        let id = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
        Self {
            cluster,
            id,
            root: root.to_path_buf(),
        }
    }

    /// Waits until a checkpoint of this step or a later one is committed.
    fn wait_for_checkpoint(&self, step: u32, logs: &[&Process]) {
        eventually(&format!("a checkpoint at step {step}"), LIMIT, logs, || {
            let job: serde_json::Value = serde_json::from_str(&self.cluster.aitk_ok(["ps", "-a", "--json"])).ok()?;
            let found = find_number(&job, "checkpoint_step")?;
            (found >= u64::from(step)).then_some(())
        });
    }

    /// Waits for the first checkpoint and kills the worker at an arbitrary step after it; its child process must end with it.
    fn kill_after_the_first_checkpoint(&self, worker: &mut Process) {
        self.wait_for_checkpoint(SAVE_EVERY, &[worker, &self.cluster.coordinator]);
        let orphans = worker.children();
        assert!(!orphans.is_empty(), "an attempt is a child process");
        worker.kill();
        eventually(
            "the killed worker's child to end",
            Duration::from_secs(10),
            &[worker],
            || orphans.iter().all(|id| !is_alive(*id)).then_some(()),
        );
    }

    fn wait_for_weights(&self, logs: &[&Process]) -> Vec<u8> {
        let waited = self.cluster.aitk(["wait", &self.id, "--timeout", "300"]);
        let tails: Vec<String> = logs.iter().map(|process| process.tail()).collect();
        let err = String::from_utf8_lossy(&waited.stderr);
        assert!(
            waited.status.success(),
            "{err}\n{}\n{}",
            self.cluster.coordinator.tail(),
            tails.join("\n")
        );
        self.cluster.aitk_ok(["artifacts", "get", &self.id, "-o", "out"]);
        weights_in(&self.root.join("out"))
    }
}

fn find_number(value: &serde_json::Value, key: &str) -> Option<u64> {
    match value {
        serde_json::Value::Object(map) => map
            .get(key)
            .and_then(serde_json::Value::as_u64)
            .or_else(|| map.values().find_map(|value| find_number(value, key))),
        serde_json::Value::Array(list) => list.iter().find_map(|value| find_number(value, key)),
        _ => None,
    }
}

#[test]
fn a_killed_worker_a_killed_coordinator_and_failing_storage_do_not_change_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let expected = expected_weights(root, training_config);
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), root);
    let mut run = TestRun::start(root, &s3, training_config);

    let mut first = run.cluster.worker("first");
    run.kill_after_the_first_checkpoint(&mut first);

    // The second worker, with a data folder of its own, continues from the checkpoint. Meanwhile the coordinator is killed.
    let mut second = run.cluster.worker("second");
    run.wait_for_checkpoint(2 * SAVE_EVERY, &[&second, &run.cluster.coordinator]);
    run.cluster.restart_coordinator();

    // The storage answers every request with status 500 for 30 seconds.
    s3.set_fault(ServerFault::Fail);
    std::thread::sleep(Duration::from_secs(30));
    s3.set_fault(ServerFault::None);

    let lora = run.wait_for_weights(&[&second]);
    assert!(
        lora == expected,
        "the LoRA differs from that of a run without faults\n{}",
        second.tail()
    );

    // No child process and no attempt folder is left.
    let children = second.children();
    assert_eq!(second.terminate(Duration::from_secs(20)), Some(0), "{}", second.tail());
    assert!(children.iter().all(|id| !is_alive(*id)));
    let attempts = run.root.join("second/attempts");
    let left = std::fs::read_dir(&attempts).map(Iterator::count).unwrap_or(0);
    assert_eq!(left, 0, "{} is not empty", attempts.display());
}

#[test]
fn a_training_of_flux_continues_on_another_worker_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let expected = expected_weights(root, flux_training_config);
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), root);
    let run = TestRun::start(root, &s3, flux_training_config);

    let mut first = run.cluster.worker("first");
    run.kill_after_the_first_checkpoint(&mut first);
    let second = run.cluster.worker("second");
    let lora = run.wait_for_weights(&[&second]);
    assert!(
        lora == expected,
        "the LoRA differs from that of a run without faults\n{}",
        second.tail()
    );
}

#[test]
fn a_training_of_a_code_model_continues_on_another_worker_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let expected = expected_weights(root, code_training_config);
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), root);
    let run = TestRun::start(root, &s3, code_training_config);

    let mut first = run.cluster.worker("first");
    run.kill_after_the_first_checkpoint(&mut first);
    let second = run.cluster.worker("second");
    let weights = run.wait_for_weights(&[&second]);
    assert!(
        weights == expected,
        "the model differs from that of a run without faults\n{}",
        second.tail()
    );
}
