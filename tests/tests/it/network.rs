//! The link to a worker is cut, in either direction, for less and for more than a lease, and loses packets: a short
//! break has no effect; after a long one the job moves to the other worker and the first worker ends its child process. And a
//! model hub is unreachable, which does not count as a failure of the job or the device.
//!
//! In the tests that cut links, every process runs in a network namespace, which needs root and iproute2. Otherwise these tests
//! are reported as skipped.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it skips"
)]

use aitk_tests::chaos::events::Event;
use aitk_tests::cluster::{Setup, TestCluster};
use aitk_tests::eventually;
use aitk_tests::follower::Follower;
use aitk_tests::hub::{self, Hub};
use aitk_tests::jobs::{image_config, run_undisturbed, tiny_model, training_config, write_dataset};
use aitk_tests::network::{Direction, Network, SWITCH};
use aitk_tests::processes::{Process, cpu_time, is_alive};
use aitk_tests::s3::S3;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// More than any machine reaches in this test; the test stops the job.
const STEPS: u32 = 1_000_000;
const SAVE_EVERY: u32 = 10;
const LEASE: Duration = Duration::from_secs(6);
const LIMIT: Duration = Duration::from_secs(180);

struct TestRun {
    network: Network,
    cluster: TestCluster,
    workers: Vec<Process>,
    job: String,
    follower: Follower,
    _s3: S3,
}

impl TestRun {
    fn start(network: Network, root: &Path) -> Self {
        let made = rcgen::generate_simple_self_signed(vec![SWITCH.to_string()]).unwrap();
        let tls = (root.join("certificate.pem"), root.join("key.pem"));
        std::fs::write(&tls.0, made.cert.pem()).unwrap();
        std::fs::write(&tls.1, made.signing_key.serialize_pem()).unwrap();
        let switch = network.switch();
        let s3 = S3::start_in(
            env!("CARGO_BIN_EXE_s3-server"),
            root,
            SocketAddr::new(SWITCH, 9000),
            &switch,
        );
        let setup = Setup::new(root).storage(s3.url(), s3.environment());
        let cluster = TestCluster::start_with(Setup {
            lease: LEASE,
            address: SocketAddr::new(SWITCH, 7420),
            tls: Some(tls),
            namespaces: switch,
            ..setup
        });
        let workers = vec![
            cluster.worker_in("link1", &network.worker_end(1)),
            cluster.worker_in("link2", &network.worker_end(2)),
        ];
        let job = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
        let follower = Follower::start(&cluster, &job);
        Self {
            network,
            cluster,
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
        vec![&self.cluster.coordinator, &self.workers[0], &self.workers[1]]
    }

    fn wait(&mut self, what: &str, matches: impl Fn(&Event) -> bool) -> Event {
        let logs = [&self.cluster.coordinator, &self.workers[0], &self.workers[1]];
        self.follower.wait(what, LIMIT, &logs, matches)
    }

    /// Waits until the newest attempt trains. Returns its id and the link of its worker.
    fn wait_for_training(&mut self) -> (String, u8) {
        self.wait_for_training_except("")
    }

    /// Like [`Self::wait_for_training`], for an attempt other than `lost`.
    fn wait_for_training_except(&mut self, lost: &str) -> (String, u8) {
        let attempt = eventually("an attempt that trains", LIMIT, &[], || {
            let attempt = self
                .follower
                .newest_attempt()
                .filter(|attempt| attempt.attempt() != lost)?;
            let is_training = |event: &Event| event.attempt() == attempt.attempt() && event.kind() == "metrics";
            self.follower.events().iter().any(is_training).then_some(attempt)
        });
        let link = if attempt.worker() == "link1" { 1 } else { 2 };
        (attempt.attempt().to_owned(), link)
    }

    fn set_links(&self, link: u8, directions: &[Direction], is_up: bool) {
        for direction in directions {
            self.network.set_link(link, *direction, is_up);
        }
    }

    /// A break that is shorter than the lease: the worker keeps training and keeps its attempt.
    fn short_break(&mut self, directions: &[Direction]) {
        let (attempt, link) = self.wait_for_training();
        let children = self.workers[usize::from(link) - 1].children();
        let used_cpu_time = |ids: &[u32]| ids.iter().map(|id| cpu_time(*id)).sum::<u64>();
        let before = used_cpu_time(&children);
        self.set_links(link, directions, false);
        std::thread::sleep(LEASE / 3);
        let during = used_cpu_time(&children) - before;
        let restored_at = Some(jiff::Timestamp::now());
        self.set_links(link, directions, true);
        assert!(
            during > 0,
            "the child used no CPU time during the break of {directions:?}"
        );
        self.wait("steps after the break", |event| {
            event.kind() == "metrics" && event.attempt() == attempt && event.time() > restored_at
        });
        assert_eq!(
            self.wait_for_training().0,
            attempt,
            "the job moved to the other worker in a break of {directions:?}"
        );
        assert_eq!(
            self.workers[usize::from(link) - 1].children(),
            children,
            "its child process was restarted"
        );
    }

    /// A break that is longer than the lease: the job goes on at the other worker, and the first one ends its child when it can be
    /// reached again.
    fn long_break(&mut self, directions: &[Direction]) {
        let (attempt, link) = self.wait_for_training();
        let worker = usize::from(link) - 1;
        let children = self.workers[worker].children();
        assert!(!children.is_empty(), "an attempt is a child process");
        self.set_links(link, directions, false);
        self.wait(
            &format!("the attempt to be lost in a break of {directions:?}"),
            |event| event.attempt() == attempt && event.is_end_of_attempt(),
        );
        let other = self.wait_for_training_except(&attempt);
        assert_ne!(other.1, link, "the job was assigned to the unreachable worker");
        self.set_links(link, directions, true);
        eventually("the child of the lost attempt to end", LIMIT, &self.logs(), || {
            children.iter().all(|id| !is_alive(*id)).then_some(())
        });
        let folder = self.cluster.worker_dir(&format!("link{link}")).join("attempts");
        eventually("the lost attempt's folder to go", LIMIT, &self.logs(), || {
            (std::fs::read_dir(&folder).ok()?.count() == 0).then_some(())
        });
        let is_of_lost_attempt = |event: &&Event| event.attempt() == attempt;
        let last = self
            .follower
            .events()
            .iter()
            .rfind(is_of_lost_attempt)
            .cloned()
            .unwrap();
        assert!(
            last.is_end_of_attempt(),
            "an event of the lost attempt came after its end: {last:?}"
        );
    }
}

/// A training config that saves every `save_every` steps and logs every step.
fn config(root: &Path, steps: u32, save_every: u32) -> String {
    let text = training_config("shapes", root, steps, save_every);
    text.replace("      train:\n", "      logging:\n        log_every: 1\n      train:\n")
}

/// The LoRA of this step from a run without faults.
fn expected_lora(root: &Path, step: u32) -> Vec<u8> {
    let folder = root.join("undisturbed");
    write_dataset(&folder.join("dataset"), 4);
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
    write_dataset(&root.join("dataset"), 4);
    std::fs::write(root.join("job.yaml"), config(&root, STEPS, SAVE_EVERY)).unwrap();
    let mut run = TestRun::start(network, &root);
    for directions in [&[Up][..], &[Down], &[Up, Down]] {
        run.short_break(directions);
    }
    for directions in [&[Up][..], &[Down], &[Up, Down]] {
        run.long_break(directions);
    }
    // Both links lose all packets for 60 of every 240 milliseconds.
    let lose_packets = |link| {
        run.network
            .lose_packets(link, Duration::from_millis(60), Duration::from_millis(240))
    };
    let loss = [lose_packets(1), lose_packets(2)];
    let done = run.checkpoint();
    eventually("two checkpoints over links that lose packets", LIMIT, &[], || {
        (run.checkpoint() >= done + 2 * SAVE_EVERY).then_some(())
    });
    run.cluster.aitk_ok(["stop", &run.job]);
    eventually("the job to stop", LIMIT, &[], || {
        let ended = |event: &Event| event.kind() == "state" && event.state() == "stopped";
        run.follower.events().iter().any(ended).then_some(())
    });
    drop(loss);
    let step = run.checkpoint();
    run.cluster.aitk_ok(["artifacts", "get", &run.job, "-o", "out"]);
    let lora = std::fs::read(root.join("out/shapes").join(save_of(step))).unwrap();
    assert!(
        lora == expected_lora(&root, step),
        "the LoRA of step {step} differs from that of a run without faults"
    );
}

#[test]
fn an_unreachable_hub_uses_no_retry_and_does_not_quarantine_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let mut hub = Hub::start(env!("CARGO_BIN_EXE_hub-server"), &root);
    let text = image_config("from_hub", &root.join("from_hub"), 1, None);
    let text = text.replace(&tiny_model().display().to_string(), hub::MODEL);
    std::fs::write(root.join("job.yaml"), text).unwrap();
    let cluster = TestCluster::start_with(Setup {
        environment: hub.environment(),
        // Any counted failure would end the job.
        retries: 0,
        ..Setup::new(&root)
    });
    let job = cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    hub.stop();
    let worker = cluster.worker("one");
    let mut follower = Follower::start(&cluster, &job);
    let failed = follower.wait("the end of an attempt", LIMIT, &[&worker], Event::is_end_of_attempt);
    assert!(failed.message().contains("could not fetch"), "{failed:?}");
    let workers = cluster.aitk_json(["workers", "--json"]);
    let device = &workers["workers"][0]["devices"][0];
    assert_eq!(
        (&device["faults"], &device["quarantined"]),
        (&0.into(), &false.into()),
        "{device}"
    );
    hub.start_again();
    let waited = cluster.aitk(["wait", &job, "--timeout", "240"]);
    let stderr = String::from_utf8_lossy(&waited.stderr);
    assert!(waited.status.success(), "{stderr}\n{}", worker.tail());
}
