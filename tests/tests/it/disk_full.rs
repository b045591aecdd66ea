//! A disk becomes full: while a trainer saves, while a coordinator has jobs to assign, while a worker stages inputs, while results
//! are fetched. Each case gives one clear message, earlier checkpoints stay usable, and with space again the job ends with the
//! same result.
//!
//! The disks are small file systems in memory (see `aitk_tests::disks`). Without the permissions for them, the tests are
//! reported as skipped.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it skips"
)]

use aitk_common::checkpoint::Checkpoint;
use aitk_tests::chaos::events::Event;
use aitk_tests::chaos::files::Files;
use aitk_tests::cluster::{DataDisk, Setup, TestCluster};
use aitk_tests::disks::SmallDisk;
use aitk_tests::eventually;
use aitk_tests::follower::Follower;
use aitk_tests::hub::{self, Hub};
use aitk_tests::jobs::{self, run_undisturbed, tiny_model, training_config, write_dataset};
use aitk_tests::namespaces::Namespaces;
use aitk_tests::processes::Process;
use aitk_tests::server_fault::ServerFault;
use aitk_tests::skip::skip;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(180);
/// Enough that most steps are left after the first checkpoint, at step 10.
const STEPS: u32 = 60;

/// A small disk on `folder`; `None` if the test has to be skipped.
fn disk(folder: &Path, bytes: u64) -> Option<SmallDisk> {
    std::fs::create_dir_all(folder).unwrap();
    SmallDisk::mount(folder, bytes).map_err(|why| skip("tmpfs", why)).ok()
}

/// A temporary folder with a data set and a training job.
pub(crate) struct TestFolder {
    _folder: tempfile::TempDir,
    pub(crate) root: PathBuf,
}

impl TestFolder {
    pub(crate) fn new(steps: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        write_dataset(&root.join("dataset"), 4);
        let text = training_config("shapes", &root, steps, 10);
        let text = text.replace(
            &format!("training_folder: \"{}\"", root.display()),
            &format!("training_folder: \"{}/work\"", root.display()),
        );
        std::fs::write(root.join("job.yaml"), text).unwrap();
        Self { _folder: folder, root }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The files of a run with enough space.
    pub(crate) fn run_without_faults(&self) -> Files {
        run_undisturbed(&self.root);
        let files = Files::below(&self.path("work/shapes"));
        std::fs::remove_dir_all(self.path("work")).unwrap();
        files
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Temporary files and folders below a folder.
fn temporary_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b".tmp-") {
            found.push(entry.path());
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(temporary_files(&entry.path()));
        }
    }
    found
}

#[test]
fn a_trainer_that_cannot_save_keeps_its_last_checkpoint_and_resumes_from_it() {
    let folder = TestFolder::new(STEPS);
    let expected = folder.run_without_faults();
    let Some(disk) = disk(&folder.path("work"), 24 * MIB) else {
        return;
    };
    let run = disk.seen_from_here().join("shapes");
    let mut first = Process::start(
        "run",
        &folder.root,
        &mut jobs::run_command(&disk.namespaces(), &folder.root, "job.yaml"),
    );
    eventually("a checkpoint", LIMIT, &[&first], || {
        Checkpoint::newest(&run.join(".aitk/checkpoints")).ok()?
    });
    let filler = disk.fill();
    assert_ne!(
        first.wait(LIMIT),
        Some(0),
        "the run succeeded on a full disk: {}",
        first.tail()
    );
    let log = first.log();
    assert!(log.contains("the disk is full: free some space"), "{log}");
    assert!(!log.contains("panicked"), "{log}");

    let saved = Checkpoint::newest(&run.join(".aitk/checkpoints")).unwrap().unwrap();
    assert!(
        saved.step() >= 10 && saved.step() < u64::from(STEPS),
        "{}",
        saved.step()
    );
    assert_eq!(temporary_files(&run), Vec::<PathBuf>::new());

    // With space again, the same command continues from the checkpoint.
    std::fs::remove_file(filler).unwrap();
    let resumed = jobs::run_command(&disk.namespaces(), &folder.root, "job.yaml")
        .output()
        .unwrap();
    let said = stderr(&resumed);
    assert!(resumed.status.success(), "{said}");
    let repeats_step = said.contains(&format!("shapes_{:09}.safetensors", saved.step()));
    assert!(!repeats_step, "it repeated a step that the checkpoint contains: {said}");
    let differences = Files::below(&run).differences(&expected);
    assert!(differences.is_empty(), "{differences:?}");
}

#[test]
fn a_job_moves_to_another_worker_when_its_workers_disk_is_full() {
    let folder = TestFolder::new(STEPS);
    let expected = folder.run_without_faults();
    let Some(disk) = disk(&folder.path("small"), 48 * MIB) else {
        return;
    };
    let cluster = TestCluster::start(&folder.root, None, Vec::new());
    let small = cluster.worker_in("small", &disk.namespaces());
    let job = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let mut follower = Follower::start(&cluster, &job);
    let checkpoint = follower.wait("a checkpoint", LIMIT, &[&small], |event| event.kind() == "checkpoint");
    let _filler = disk.fill();
    let full = follower.wait("the end of the attempt", LIMIT, &[&small], |event| {
        event.attempt() == checkpoint.attempt() && event.is_end_of_attempt()
    });
    assert_eq!(full.state(), "failed", "{full:?}");
    assert!(
        full.message().contains("disk") && full.message().contains("full"),
        "{full:?}"
    );
    let seen = disk.seen_from_here();
    eventually("the attempt's folder to go", LIMIT, &[&small], || {
        (temporary_files(&seen).is_empty()).then_some(())
    });

    let large = cluster.worker("large");
    let waited = cluster.aitk(["wait", &job, "--timeout", "240"]);
    assert!(
        waited.status.success(),
        "{}\n{}\n{}",
        stderr(&waited),
        small.tail(),
        large.tail()
    );
    cluster.aitk_ok(["artifacts", "get", &job, "-o", "out"]);
    let differences = Files::below(&folder.path("out/shapes")).differences(&expected);
    assert!(differences.is_empty(), "{differences:?}");
}

#[test]
fn a_full_cache_disk_gives_an_error_and_leaves_no_temporary_files() {
    let folder = TestFolder::new(10);
    // The model alone is larger than this disk.
    let Some(disk) = disk(&folder.path("small"), MIB / 2) else {
        return;
    };
    let cluster = TestCluster::start(&folder.root, None, Vec::new());
    let small = cluster.worker_in("small", &disk.namespaces());
    let job = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let mut follower = Follower::start(&cluster, &job);
    let full = follower.wait("the end of the attempt", LIMIT, &[&small], |event| {
        event.is_end_of_attempt()
    });
    assert!(
        full.message().contains("could not fetch the input") && full.message().contains("disk full"),
        "{full:?}"
    );
    assert_eq!(temporary_files(&disk.seen_from_here()), Vec::<PathBuf>::new());
    // The worker still runs, and with enough space it runs the job.
    disk.grow(64 * MIB);
    // The job may have failed for good meanwhile, or wait for its next attempt.
    let _ = cluster.aitk(["resume", &job]);
    let waited = cluster.aitk(["wait", &job, "--timeout", "240"]);
    assert!(waited.status.success(), "{}\n{}", stderr(&waited), small.tail());
}

#[test]
fn a_training_survives_a_full_coordinator_disk_without_using_a_retry() {
    let folder = TestFolder::new(STEPS);
    let expected = folder.run_without_faults();
    let Some(disk) = disk(&folder.path("coordinator"), 64 * MIB) else {
        return;
    };
    let hub = Hub::start(env!("CARGO_BIN_EXE_hub-server"), &folder.root);
    let text = std::fs::read_to_string(folder.path("job.yaml")).unwrap();
    let text = text.replace(&tiny_model().display().to_string(), hub::MODEL);
    std::fs::write(folder.path("job.yaml"), text).unwrap();
    let cluster = TestCluster::start_with(Setup {
        data_disk: Some(DataDisk {
            namespaces: disk.namespaces_with(&Namespaces::Host),
            seen_from_here: disk.seen_from_here(),
            reserve_mib: 16,
        }),
        environment: hub.environment(),
        // Any counted failure would end the job.
        retries: 0,
        ..Setup::new(&folder.root)
    });
    let submit = || cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let (job, second) = (submit(), submit());
    // The disk is filled after the assignment and before the training, while the worker waits for its model.
    hub.set_fault(ServerFault::Late);
    let worker = cluster.worker("one");
    let mut follower = Follower::start(&cluster, &job);
    follower.wait("the attempt", LIMIT, &[&worker], Event::is_assignment);
    let filler = disk.fill_except(12 * MIB);
    hub.set_fault(ServerFault::None);
    let warning = follower.wait("a warning of the full disk in the log", LIMIT, &[&worker], |event| {
        event.kind() == "log" && event.message().contains("could not be stored")
    });
    assert!(warning.message().contains("disk is full"), "{warning:?}");
    // The waiting job names the full disk as the reason.
    eventually("the reason of the waiting job", LIMIT, &[&worker], || {
        let shown = cluster.aitk_json(["ps", "-a", "--json"]);
        let waiting = shown["jobs"]
            .as_array()?
            .iter()
            .find(|job| job["id"] == second.as_str())?;
        let reason = waiting["reason"].as_str()?;
        reason
            .starts_with("waits: the coordinator's disk is full")
            .then_some(())
    });
    std::fs::remove_file(filler).unwrap();
    for job in [&job, &second] {
        let waited = cluster.aitk(["wait", job, "--timeout", "240"]);
        assert!(waited.status.success(), "{}\n{}", stderr(&waited), worker.tail());
        cluster.aitk_ok(["artifacts", "get", job, "-o", "out"]);
        let mut differences = Files::below(&folder.path("out/shapes")).differences(&expected);
        // It contains the name of the model, which differs from that of the undisturbed run.
        differences.retain(|difference| difference != "config.yaml has other bytes");
        assert!(differences.is_empty(), "{differences:?}");
        std::fs::remove_dir_all(folder.path("out")).unwrap();
    }
    let attempts = follower.events().iter().filter(|event| event.is_assignment()).count();
    assert_eq!(attempts, 1, "the first attempt should have gone on: {}", worker.tail());
}

#[test]
fn fetching_results_to_a_full_disk_gives_an_error_and_can_be_repeated() {
    let folder = TestFolder::new(10);
    let Some(disk) = disk(&folder.path("out"), 64 << 10) else {
        return;
    };
    let cluster = TestCluster::start(&folder.root, None, Vec::new());
    let worker = cluster.worker("one");
    let job = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let waited = cluster.aitk(["wait", &job, "--timeout", "240"]);
    assert!(waited.status.success(), "{}\n{}", stderr(&waited), worker.tail());
    let mut get = cluster.command_in("aitk", &disk.namespaces());
    get.args(["artifacts", "get", &job, "-o", "out"]);
    let full = get.output().unwrap();
    let said = stderr(&full);
    assert!(
        !full.status.success() && said.contains("disk") && said.contains("full"),
        "{said}"
    );
    assert!(
        said.contains("out/shapes"),
        "the error does not name the folder: {said}"
    );
    assert_eq!(temporary_files(&disk.seen_from_here()), Vec::<PathBuf>::new());
    disk.grow(64 * MIB);
    let fetched = get.output().unwrap();
    assert!(fetched.status.success(), "{}", stderr(&fetched));
    cluster.aitk_ok(["artifacts", "get", &job, "-o", "elsewhere"]);
    let differences = Files::below(&disk.seen_from_here()).differences(&Files::below(&folder.path("elsewhere")));
    assert!(differences.is_empty(), "{differences:?}");
}
