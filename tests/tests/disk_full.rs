//! A disk runs full: while a trainer saves, while the coordinator has work to give away, while a worker brings inputs, while results are fetched. Each ends with one
//! clear message, what was saved before stays usable, and with room again the work goes on to the same result.
//!
//! The disks are small file systems in memory (see `aitk_tests::disks`); where the system grants none, the tests say
//! that they were skipped.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test may stop where it stands, and says what it skipped"
)]

use aitk_common::checkpoint::Checkpoint;
use aitk_tests::chaos::check::Files;
use aitk_tests::chaos::events::Event;
use aitk_tests::disks::SmallDisk;
use aitk_tests::eventually;
use aitk_tests::follower::Follower;
use aitk_tests::hub::{self, Hub};
use aitk_tests::jobs::{self, draw_dataset, run_undisturbed, tiny_model, training};
use aitk_tests::place::Place;
use aitk_tests::pool::{DataDisk, Pool, Setup};
use aitk_tests::processes::Process;
use aitk_tests::server_fault::ServerFault;
use aitk_tests::skip::skip;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(180);
/// Enough to have most of it left after the first checkpoint, at step 10.
const STEPS: u32 = 60;

/// A disk, or a word about why there is none.
fn disk(folder: &Path, bytes: u64) -> Option<SmallDisk> {
    std::fs::create_dir_all(folder).unwrap();
    SmallDisk::mount(folder, bytes).map_err(|why| skip("tmpfs", why)).ok()
}

/// A place for a test: its folder, a data set and a job of this many steps.
struct Scene {
    _folder: tempfile::TempDir,
    root: PathBuf,
}

impl Scene {
    fn new(steps: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        draw_dataset(&root.join("dataset"), 4);
        let text = training("shapes", &root, steps, 10);
        let text = text.replace(
            &format!("training_folder: \"{}\"", root.display()),
            &format!("training_folder: \"{}/work\"", root.display()),
        );
        std::fs::write(root.join("job.yaml"), text).unwrap();
        Self { _folder: folder, root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// What a run makes for which there is room.
    fn undisturbed(&self) -> Files {
        run_undisturbed(&self.root);
        let files = Files::below(&self.path("work/shapes"));
        std::fs::remove_dir_all(self.path("work")).unwrap();
        files
    }
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Names of files and folders that were left unfinished.
fn unfinished(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b".tmp-") {
            found.push(entry.path());
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(unfinished(&entry.path()));
        }
    }
    found
}

#[test]
fn a_trainer_that_cannot_save_leaves_the_checkpoint_before_and_goes_on_from_it() {
    let scene = Scene::new(STEPS);
    let expected = scene.undisturbed();
    let Some(disk) = disk(&scene.path("work"), 24 * MIB) else {
        return;
    };
    let run = disk.seen_from_here().join("shapes");
    let mut first = Process::start(
        "run",
        &scene.root,
        &mut jobs::run(&disk.place(), &scene.root, "job.yaml"),
    );
    eventually("a checkpoint", LIMIT, &[&first], || {
        Checkpoint::newest(&run.join(".aitk/checkpoints")).ok()?
    });
    let filler = disk.fill();
    assert_ne!(
        first.wait(LIMIT),
        Some(0),
        "it ended well without room: {}",
        first.tail()
    );
    let said = first.log();
    assert!(said.contains("the disk is full: free some space"), "{said}");
    assert!(!said.contains("panicked"), "{said}");

    let kept = Checkpoint::newest(&run.join(".aitk/checkpoints")).unwrap().unwrap();
    assert!(kept.step() >= 10 && kept.step() < u64::from(STEPS), "{}", kept.step());
    assert_eq!(unfinished(&run), Vec::<PathBuf>::new());

    // Room again: the same command goes on from there.
    std::fs::remove_file(filler).unwrap();
    let again = jobs::run(&disk.place(), &scene.root, "job.yaml").output().unwrap();
    let said = words(&again);
    assert!(again.status.success(), "{said}");
    let begins_again = said.contains(&format!("shapes_{:09}.safetensors", kept.step()));
    assert!(!begins_again, "it made what the checkpoint has already: {said}");
    let differences = Files::below(&run).differences(&expected);
    assert!(differences.is_empty(), "{differences:?}");
}

#[test]
fn a_worker_whose_disk_runs_full_gives_the_job_to_another() {
    let scene = Scene::new(STEPS);
    let expected = scene.undisturbed();
    let Some(disk) = disk(&scene.path("small"), 48 * MIB) else {
        return;
    };
    let pool = Pool::start(&scene.root, None, Vec::new());
    let small = pool.worker_in("small", &disk.place());
    let job = pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let mut follower = Follower::start(&pool, &job);
    let checkpoint = follower.wait("a checkpoint", LIMIT, &[&small], |event| event.kind() == "checkpoint");
    let filler = disk.fill();
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
        (unfinished(&seen).is_empty()).then_some(())
    });

    let large = pool.worker("large");
    let waited = pool.aitk(["wait", &job, "--timeout", "240"]);
    assert!(
        waited.status.success(),
        "{}\n{}\n{}",
        words(&waited),
        small.tail(),
        large.tail()
    );
    drop(filler);
    pool.aitk_ok(["artifacts", "get", &job, "-o", "out"]);
    let differences = Files::below(&scene.path("out/shapes")).differences(&expected);
    assert!(differences.is_empty(), "{differences:?}");
}

#[test]
fn a_cache_without_room_is_said_and_leaves_nothing_half() {
    let scene = Scene::new(10);
    // The model alone is larger.
    let Some(disk) = disk(&scene.path("small"), MIB / 2) else {
        return;
    };
    let pool = Pool::start(&scene.root, None, Vec::new());
    let small = pool.worker_in("small", &disk.place());
    let job = pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let mut follower = Follower::start(&pool, &job);
    let full = follower.wait("the end of the attempt", LIMIT, &[&small], |event| {
        event.is_end_of_attempt()
    });
    assert!(
        full.message().contains("could not fetch the input") && full.message().contains("disk full"),
        "{full:?}"
    );
    assert_eq!(unfinished(&disk.seen_from_here()), Vec::<PathBuf>::new());
    // The worker lives, and with room it does the job.
    disk.grow(64 * MIB);
    // It may have been given up meanwhile, or wait for its next try.
    let _ = pool.aitk(["resume", &job]);
    let waited = pool.aitk(["wait", &job, "--timeout", "240"]);
    assert!(waited.status.success(), "{}\n{}", words(&waited), small.tail());
}

#[test]
fn a_training_goes_on_while_the_coordinator_has_no_room_and_costs_no_try() {
    let scene = Scene::new(STEPS);
    let expected = scene.undisturbed();
    let Some(disk) = disk(&scene.path("coordinator"), 64 * MIB) else {
        return;
    };
    let hub = Hub::start(env!("CARGO_BIN_EXE_hub-server"), &scene.root);
    let text = std::fs::read_to_string(scene.path("job.yaml")).unwrap();
    let text = text.replace(&tiny_model().display().to_string(), hub::MODEL);
    std::fs::write(scene.path("job.yaml"), text).unwrap();
    let pool = Pool::start_with(Setup {
        data_disk: Some(DataDisk {
            place: disk.place_in(&Place::Here),
            seen_from_here: disk.seen_from_here(),
            reserve_mib: 16,
        }),
        environment: hub.environment(),
        // The first failure that counted would be the last.
        retries: 0,
        ..Setup::new(&scene.root)
    });
    let submit = || pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let (job, second) = (submit(), submit());
    // The disk fills while the worker waits for its model: before it trains, and after it was given the job.
    hub.set(ServerFault::Late);
    let worker = pool.worker("one");
    let mut follower = Follower::start(&pool, &job);
    follower.wait("the attempt", LIMIT, &[&worker], Event::is_assignment);
    let filler = disk.fill_but(12 * MIB);
    hub.set(ServerFault::None);
    let goes_on = follower.wait("the words of a job without room", LIMIT, &[&worker], |event| {
        event.kind() == "log" && event.message().contains("could not be stored")
    });
    assert!(goes_on.message().contains("disk is full"), "{goes_on:?}");
    // The queue waits, and says for what.
    eventually("the reason of a job that waits", LIMIT, &[&worker], || {
        let shown = pool.aitk_json(["ps", "-a", "--json"]);
        let waits = shown["jobs"]
            .as_array()?
            .iter()
            .find(|job| job["id"] == second.as_str())?;
        let reason = waits["reason"].as_str()?;
        reason
            .starts_with("waits: the coordinator's disk is full")
            .then_some(())
    });
    std::fs::remove_file(filler).unwrap();
    for job in [&job, &second] {
        let waited = pool.aitk(["wait", job, "--timeout", "240"]);
        assert!(waited.status.success(), "{}\n{}", words(&waited), worker.tail());
        pool.aitk_ok(["artifacts", "get", job, "-o", "out"]);
        let mut differences = Files::below(&scene.path("out/shapes")).differences(&expected);
        // It names the model, which had another name when the expected files were made.
        differences.retain(|difference| difference != "config.yaml has other bytes");
        assert!(differences.is_empty(), "{differences:?}");
        std::fs::remove_dir_all(scene.path("out")).unwrap();
    }
    let attempts = follower.events().iter().filter(|event| event.is_assignment()).count();
    assert_eq!(attempts, 1, "it went on: {}", worker.tail());
}

#[test]
fn fetching_results_onto_a_full_disk_is_said_and_goes_on_later() {
    let scene = Scene::new(10);
    let Some(disk) = disk(&scene.path("out"), 64 << 10) else {
        return;
    };
    let pool = Pool::start(&scene.root, None, Vec::new());
    let worker = pool.worker("one");
    let job = pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let waited = pool.aitk(["wait", &job, "--timeout", "240"]);
    assert!(waited.status.success(), "{}\n{}", words(&waited), worker.tail());
    let mut get = pool.command_in("aitk", &disk.place());
    get.args(["artifacts", "get", &job, "-o", "out"]);
    let full = get.output().unwrap();
    let said = words(&full);
    assert!(
        !full.status.success() && said.contains("disk") && said.contains("full"),
        "{said}"
    );
    assert!(said.contains("out/shapes"), "it says where: {said}");
    assert_eq!(unfinished(&disk.seen_from_here()), Vec::<PathBuf>::new());
    disk.grow(64 * MIB);
    let fetched = get.output().unwrap();
    assert!(fetched.status.success(), "{}", words(&fetched));
    pool.aitk_ok(["artifacts", "get", &job, "-o", "elsewhere"]);
    let differences = Files::below(&disk.seen_from_here()).differences(&Files::below(&scene.path("elsewhere")));
    assert!(differences.is_empty(), "{differences:?}");
}
