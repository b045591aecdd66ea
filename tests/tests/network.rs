//! The line to a worker is cut, in either direction, for less and for more than a lease, and loses packets: a short
//! break changes nothing, a long one gives the attempt to the other worker and ends the child of the first. And a hub of models
//! is away: that is nobody's fault.
//!
//! Where lines are cut every process runs in a network namespace of the test's own, so this needs root and iproute2; elsewhere the test
//! says that it was skipped.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test may stop where it stands, and says what it skipped"
)]

use aitk_tests::chaos::events::Event;
use aitk_tests::eventually;
use aitk_tests::follower::Follower;
use aitk_tests::hub::{self, Hub};
use aitk_tests::jobs::{draw_dataset, images, run_undisturbed, tiny_model, training};
use aitk_tests::network::{Direction, HUB, Network};
use aitk_tests::pool::{Pool, Setup};
use aitk_tests::processes::{Process, alive, processor_time};
use aitk_tests::s3::S3;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// More than any machine does in this test: the job is stopped at its end.
const STEPS: u32 = 1_000_000;
const SAVE_EVERY: u32 = 10;
const LEASE: Duration = Duration::from_secs(6);
const LIMIT: Duration = Duration::from_secs(180);

struct Scene {
    network: Network,
    pool: Pool,
    workers: Vec<Process>,
    job: String,
    follower: Follower,
    _s3: S3,
}

impl Scene {
    fn start(network: Network, root: &Path) -> Self {
        let made = rcgen::generate_simple_self_signed(vec![HUB.to_string()]).unwrap();
        let tls = (root.join("certificate.pem"), root.join("key.pem"));
        std::fs::write(&tls.0, made.cert.pem()).unwrap();
        std::fs::write(&tls.1, made.signing_key.serialize_pem()).unwrap();
        let hub = network.hub();
        let s3 = S3::start_in(env!("CARGO_BIN_EXE_s3-server"), root, SocketAddr::new(HUB, 9000), &hub);
        let setup = Setup::new(root).storage(s3.url(), s3.environment());
        let pool = Pool::start_with(Setup {
            lease: LEASE,
            address: SocketAddr::new(HUB, 7420),
            tls: Some(tls),
            place: hub,
            ..setup
        });
        let workers = vec![
            pool.worker_in("line1", &network.end(1)),
            pool.worker_in("line2", &network.end(2)),
        ];
        let job = pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
        let follower = Follower::start(&pool, &job);
        Self {
            network,
            pool,
            workers,
            job,
            follower,
            _s3: s3,
        }
    }

    /// The step of the last committed checkpoint.
    fn checkpoint(&mut self) -> u32 {
        let commit = |event: &&Event| event.kind() == "checkpoint";
        let last = self.follower.events().iter().rfind(commit).map_or(0, Event::step);
        u32::try_from(last).unwrap()
    }

    fn logs(&self) -> Vec<&Process> {
        vec![&self.pool.coordinator, &self.workers[0], &self.workers[1]]
    }

    fn wait(&mut self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        let logs = [&self.pool.coordinator, &self.workers[0], &self.workers[1]];
        self.follower.wait(what, LIMIT, &logs, wanted)
    }

    /// The newest attempt once it trains, and the line to its worker.
    fn training(&mut self) -> (String, u8) {
        self.training_but("")
    }

    /// The same, once it is another one than this.
    fn training_but(&mut self, lost: &str) -> (String, u8) {
        let attempt = eventually("an attempt that trains", LIMIT, &[], || {
            let attempt = self.follower.attempt().filter(|attempt| attempt.attempt() != lost)?;
            let trains = |event: &Event| event.attempt() == attempt.attempt() && event.kind() == "metrics";
            self.follower.events().iter().any(trains).then_some(attempt)
        });
        let line = if attempt.worker() == "line1" { 1 } else { 2 };
        (attempt.attempt().to_owned(), line)
    }

    fn set(&self, line: u8, directions: &[Direction], whole: bool) {
        for direction in directions {
            self.network.set(line, *direction, whole);
        }
    }

    /// A break that is shorter than the lease: the worker trains on, and keeps its attempt.
    fn short_break(&mut self, directions: &[Direction]) {
        let (attempt, line) = self.training();
        let children = self.workers[usize::from(line) - 1].children();
        let worked = |ids: &[u32]| ids.iter().map(|id| processor_time(*id)).sum::<u64>();
        let before = worked(&children);
        self.set(line, directions, false);
        std::thread::sleep(LEASE / 3);
        let during = worked(&children) - before;
        let healed = Some(jiff::Timestamp::now());
        self.set(line, directions, true);
        assert!(during > 0, "it did not train during the break of {directions:?}");
        self.wait("steps after the break", |event| {
            event.kind() == "metrics" && event.attempt() == attempt && event.time() > healed
        });
        assert_eq!(
            self.training().0,
            attempt,
            "the attempt went elsewhere in a break of {directions:?}"
        );
        assert_eq!(
            self.workers[usize::from(line) - 1].children(),
            children,
            "its process was started anew"
        );
    }

    /// A break that is longer than the lease: the other worker goes on, and the first one ends its child once it hears of it.
    fn long_break(&mut self, directions: &[Direction]) {
        let (attempt, line) = self.training();
        let worker = usize::from(line) - 1;
        let children = self.workers[worker].children();
        assert!(!children.is_empty(), "an attempt is a child process");
        self.set(line, directions, false);
        self.wait(
            &format!("the attempt to be lost in a break of {directions:?}"),
            |event| event.attempt() == attempt && event.is_end_of_attempt(),
        );
        let other = self.training_but(&attempt);
        assert_ne!(other.1, line, "its worker cannot be reached");
        self.set(line, directions, true);
        eventually("the child of the lost attempt to end", LIMIT, &self.logs(), || {
            children.iter().all(|id| !alive(*id)).then_some(())
        });
        let folder = self.pool.worker_dir(&format!("line{line}")).join("attempts");
        eventually("the lost attempt's folder to go", LIMIT, &self.logs(), || {
            (std::fs::read_dir(&folder).ok()?.count() == 0).then_some(())
        });
        let late = |event: &&Event| event.attempt() == attempt;
        let last = self.follower.events().iter().rfind(late).cloned().unwrap();
        assert!(
            last.is_end_of_attempt(),
            "a word of the lost attempt came after its end: {last:?}"
        );
    }
}

/// The job, with a step save every `save_every` steps.
fn config(root: &Path, steps: u32, save_every: u32) -> String {
    let text = training("shapes", root, steps, save_every);
    text.replace("      train:\n", "      logging:\n        log_every: 1\n      train:\n")
}

/// The LoRA of this step, made by a run that nobody disturbed.
fn undisturbed(root: &Path, step: u32) -> Vec<u8> {
    let folder = root.join("undisturbed");
    draw_dataset(&folder.join("dataset"), 4);
    std::fs::write(folder.join("job.yaml"), config(&folder, step + 1, step)).unwrap();
    run_undisturbed(&folder);
    std::fs::read(folder.join("shapes").join(save_of(step))).unwrap()
}

fn save_of(step: u32) -> String {
    format!("shapes_{step:09}.safetensors")
}

#[test]
fn a_short_break_changes_nothing_and_a_long_one_ends_the_attempt() {
    use Direction::{Down, Up};
    let network = match Network::new(2) {
        Ok(network) => network,
        Err(why) => return aitk_tests::skip::skip("network-namespace", why),
    };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    draw_dataset(&root.join("dataset"), 4);
    std::fs::write(root.join("job.yaml"), config(&root, STEPS, SAVE_EVERY)).unwrap();
    let mut scene = Scene::start(network, &root);
    for directions in [&[Up][..], &[Down], &[Up, Down]] {
        scene.short_break(directions);
    }
    for directions in [&[Up][..], &[Down], &[Up, Down]] {
        scene.long_break(directions);
    }
    // Both lines lose packets: all those of 60 in every 240 milliseconds.
    let lossy = |line| {
        scene
            .network
            .lossy(line, Duration::from_millis(60), Duration::from_millis(240))
    };
    let loss = [lossy(1), lossy(2)];
    let done = scene.checkpoint();
    eventually("two checkpoints over lines that lose packets", LIMIT, &[], || {
        (scene.checkpoint() >= done + 2 * SAVE_EVERY).then_some(())
    });
    scene.pool.aitk_ok(["stop", &scene.job]);
    eventually("the job to stop", LIMIT, &[], || {
        let ended = |event: &Event| event.kind() == "state" && event.state() == "stopped";
        scene.follower.events().iter().any(ended).then_some(())
    });
    drop(loss);
    let step = scene.checkpoint();
    scene.pool.aitk_ok(["artifacts", "get", &scene.job, "-o", "out"]);
    let lora = std::fs::read(root.join("out/shapes").join(save_of(step))).unwrap();
    assert!(
        lora == undisturbed(&root, step),
        "the LoRA of step {step} is another one"
    );
}

#[test]
fn a_hub_that_is_away_costs_no_try_and_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let mut hub = Hub::start(env!("CARGO_BIN_EXE_hub-server"), &root);
    let text = images("hubbed", &root.join("hubbed"), 1, None);
    let text = text.replace(&tiny_model().display().to_string(), hub::MODEL);
    std::fs::write(root.join("job.yaml"), text).unwrap();
    let pool = Pool::start_with(Setup {
        environment: hub.environment(),
        // The first failure that counted would be the last.
        retries: 0,
        ..Setup::new(&root)
    });
    let job = pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    hub.go_away();
    let worker = pool.worker("one");
    let mut follower = Follower::start(&pool, &job);
    let failed = follower.wait("the end of an attempt", LIMIT, &[&worker], Event::is_end_of_attempt);
    assert!(failed.message().contains("could not fetch"), "{failed:?}");
    let workers = pool.aitk_json(["workers", "--json"]);
    let device = &workers["workers"][0]["devices"][0];
    assert_eq!(
        (&device["faults"], &device["quarantined"]),
        (&0.into(), &false.into()),
        "{device}"
    );
    hub.come_back();
    let waited = pool.aitk(["wait", &job, "--timeout", "240"]);
    let said = String::from_utf8_lossy(&waited.stderr);
    assert!(waited.status.success(), "{said}\n{}", worker.tail());
}
