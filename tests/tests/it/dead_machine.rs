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
use std::collections::BTreeMap;
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

    /// Waits until a worker has done this step or a later one, or the job has ended.
    fn wait_for_step(&self, step: u32, logs: &[&Process]) {
        eventually(&format!("step {step}"), LIMIT, logs, || {
            let jobs: serde_json::Value = serde_json::from_str(&self.cluster.aitk_ok(["ps", "-a", "--json"])).ok()?;
            let done = find_number(&jobs, "done").or_else(|| find_number(&jobs, "checkpoint_step"))?;
            (done >= u64::from(step)).then_some(())
        });
    }

    /// Waits for the first checkpoint and kills the worker at an arbitrary step after it; its child process must end with it.
    fn kill_after_the_first_checkpoint(&self, worker: &mut Process) {
        self.wait_for_checkpoint(SAVE_EVERY, &[worker, &self.cluster.coordinator]);
        assert!(!worker.children().is_empty(), "an attempt is a child process");
        self.kill(worker);
    }

    /// Kills a worker; its child process, if it has one, must end with it.
    fn kill(&self, worker: &mut Process) {
        let orphans = worker.children();
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

/// Random numbers of a seed.
struct Random(u64);

impl Random {
    /// A number from `from` up to and without `to`.
    fn between(&mut self, from: u32, to: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        from + u32::try_from(mixed % u64::from(to - from)).unwrap()
    }
}

fn number_in_environment(name: &str, default: u32) -> u32 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// All files that a training saved, by their paths below its run folder.
fn saved_files(run_folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for save in std::fs::read_dir(run_folder).unwrap() {
        let save = save.unwrap();
        let name = save.file_name().to_string_lossy().into_owned();
        if !name.starts_with("shapes") || !save.path().is_dir() {
            continue;
        }
        for file in std::fs::read_dir(save.path()).unwrap() {
            let file = file.unwrap();
            let path = format!("{name}/{}", file.file_name().to_string_lossy());
            files.insert(path, std::fs::read(file.path()).unwrap());
        }
    }
    files
}

/// The steps of the training that is killed several times.
const SHORT_STEPS: u32 = 12;

/// A training of this many steps with a checkpoint after every third.
fn short_code_training(name: &str, folder: &Path, _: u32, _: u32) -> String {
    code_training_config(name, folder, SHORT_STEPS, 3)
}

/// Kills workers at steps that a seed chooses, each up to 400 ms after the step, so that a kill can hit a step, a checkpoint or its upload. The
/// next worker has a folder of its own. `AITK_KILL_SEED` sets the seed, `AITK_KILLS` how many are killed.
#[test]
fn a_training_of_a_code_model_killed_at_random_steps_continues_on_other_workers_bit_for_bit() {
    let (seed, kills) = (
        number_in_environment("AITK_KILL_SEED", 1),
        number_in_environment("AITK_KILLS", 2),
    );
    let mut random = Random(u64::from(seed));
    let mut points: Vec<(u32, u32)> = (0..kills)
        .map(|_| (random.between(1, SHORT_STEPS - 2), random.between(0, 400)))
        .collect();
    points.sort_unstable();
    println!("AITK_KILL_SEED={seed} AITK_KILLS={kills}: a kill after these steps and milliseconds: {points:?}");
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    expected_weights(root, short_code_training);
    let expected = saved_files(&root.join("undisturbed/shapes"));
    assert!(
        expected.contains_key("shapes/model.safetensors"),
        "{:?}",
        expected.keys()
    );
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), root);
    let run = TestRun::start(root, &s3, short_code_training);

    for (index, (step, milliseconds)) in points.into_iter().enumerate() {
        let mut worker = run.cluster.worker(&format!("killed-{index}"));
        run.wait_for_step(step, &[&worker, &run.cluster.coordinator]);
        std::thread::sleep(Duration::from_millis(u64::from(milliseconds)));
        run.kill(&mut worker);
    }
    let last = run.cluster.worker("last");
    run.wait_for_weights(&[&last]);
    let found = saved_files(&root.join("out/shapes"));
    let differing: Vec<&String> = expected
        .keys()
        .filter(|path| found.get(*path) != expected.get(*path))
        .collect();
    assert!(
        differing.is_empty() && found.len() == expected.len(),
        "seed {seed}: {differing:?} differ from those of a run without faults, or are missing; there are {:?}\n{}",
        found.keys(),
        last.tail()
    );
}
