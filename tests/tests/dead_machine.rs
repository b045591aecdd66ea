//! Machines die: a worker, the coordinator, the object store. The job goes on and its result is the same, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test may stop where it stands")]

use aitk_tests::eventually;
use aitk_tests::jobs::{draw_dataset, run_undisturbed, training};
use aitk_tests::pool::Pool;
use aitk_tests::processes::{Process, alive};
use aitk_tests::s3::S3;
use aitk_tests::server_fault::ServerFault;
use std::path::Path;
use std::time::Duration;

const STEPS: u32 = 24;
const SAVE_EVERY: u32 = 4;
const LIMIT: Duration = Duration::from_secs(300);

/// The LoRA of a run that nobody disturbed, made by `aitk run`.
fn undisturbed(root: &Path) -> Vec<u8> {
    let folder = root.join("undisturbed");
    draw_dataset(&folder.join("dataset"), 4);
    std::fs::write(folder.join("job.yaml"), training("shapes", &folder, STEPS, SAVE_EVERY)).unwrap();
    run_undisturbed(&folder);
    std::fs::read(folder.join("shapes/shapes.safetensors")).unwrap()
}

struct Scene {
    pool: Pool,
    id: String,
    root: std::path::PathBuf,
}

impl Scene {
    fn start(root: &Path, s3: &S3) -> Self {
        draw_dataset(&root.join("dataset"), 4);
        std::fs::write(root.join("job.yaml"), training("shapes", root, STEPS, SAVE_EVERY)).unwrap();
        let pool = Pool::start(root, Some(s3.url()), s3.environment());
        let id = pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
        Self {
            pool,
            id,
            root: root.to_path_buf(),
        }
    }

    /// Waits until a checkpoint of this step or a later one is committed.
    fn committed(&self, step: u32, logs: &[&Process]) {
        eventually(&format!("a checkpoint at step {step}"), LIMIT, logs, || {
            let job: serde_json::Value = serde_json::from_str(&self.pool.aitk_ok(["ps", "-a", "--json"])).ok()?;
            let found = find_number(&job, "checkpoint_step")?;
            (found >= u64::from(step)).then_some(())
        });
    }

    fn finished(&self, logs: &[&Process]) -> Vec<u8> {
        let waited = self.pool.aitk(["wait", &self.id, "--timeout", "300"]);
        let tails: Vec<String> = logs.iter().map(|process| process.tail()).collect();
        let err = String::from_utf8_lossy(&waited.stderr);
        assert!(
            waited.status.success(),
            "{err}\n{}\n{}",
            self.pool.coordinator.tail(),
            tails.join("\n")
        );
        self.pool.aitk_ok(["artifacts", "get", &self.id, "-o", "out"]);
        std::fs::read(self.root.join("out/shapes/shapes.safetensors")).unwrap()
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
fn a_killed_worker_a_killed_coordinator_and_a_failing_store_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let expected = undisturbed(root);
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), root);
    let mut scene = Scene::start(root, &s3);

    // The first worker dies with its child, at whatever step it happens to be after the first checkpoint.
    let mut first = scene.pool.worker("first");
    scene.committed(SAVE_EVERY, &[&first, &scene.pool.coordinator]);
    let orphans = first.children();
    assert!(!orphans.is_empty(), "an attempt is a child process");
    first.kill();
    eventually(
        "the dead worker's child to end",
        Duration::from_secs(10),
        &[&first],
        || orphans.iter().all(|id| !alive(*id)).then_some(()),
    );

    // The second goes on from the checkpoint, on what would be another machine. Meanwhile the coordinator dies…
    let mut second = scene.pool.worker("second");
    scene.committed(2 * SAVE_EVERY, &[&second, &scene.pool.coordinator]);
    scene.pool.restart_coordinator();

    // … and the store answers 500 for 30 seconds.
    s3.set(ServerFault::Fail);
    std::thread::sleep(Duration::from_secs(30));
    s3.set(ServerFault::None);

    let lora = scene.finished(&[&second]);
    assert!(
        lora == expected,
        "the LoRA differs from the undisturbed run's\n{}",
        second.tail()
    );

    // Nothing is left behind: no attempt folder on the worker, no half object in the store.
    let children = second.children();
    assert_eq!(second.terminate(Duration::from_secs(20)), Some(0), "{}", second.tail());
    assert!(children.iter().all(|id| !alive(*id)));
    let attempts = scene.root.join("second/attempts");
    let left = std::fs::read_dir(&attempts).map(Iterator::count).unwrap_or(0);
    assert_eq!(left, 0, "{} is not empty", attempts.display());
}
