//! The object storage refuses the coordinator, because its access key is wrong, while a training saves: the training goes on and keeps its results,
//! no other job starts, the reason is shown, and when the key is accepted again everything ends with the same result.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::disk_full::TestFolder;
use aitk_tests::chaos::files::Files;
use aitk_tests::cluster::{Setup, TestCluster};
use aitk_tests::eventually;
use aitk_tests::follower::Follower;
use aitk_tests::s3::S3;
use aitk_tests::server_fault::ServerFault;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(180);
const STEPS: u32 = 60;
/// What the coordinator logs.
const LOGGED: &str = "the object storage refuses this coordinator";

/// Runs two jobs, one after the other, on a worker that talks to the bucket itself (`direct`) or through the coordinator.
fn run_while_the_coordinator_is_refused(direct: bool) {
    let folder = TestFolder::new(STEPS);
    let expected = folder.run_without_faults();
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), &folder.root);
    let mut coordinator_environment = s3.environment();
    coordinator_environment.push(s3.coordinator_key());
    let cluster = TestCluster::start_with(Setup {
        storage: Some(s3.url()),
        environment: if direct { s3.environment() } else { Vec::new() },
        coordinator_environment,
        // Any counted failure would end the job.
        retries: 0,
        ..Setup::new(&folder.root)
    });
    let submit = || cluster.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let (job, second) = (submit(), submit());
    let worker = cluster.worker("one");
    let logs = [&worker, &cluster.coordinator];
    let mut follower = Follower::start(&cluster, &job);
    follower.wait("a checkpoint", LIMIT, &logs, |event| event.kind() == "checkpoint");
    s3.set_fault(ServerFault::DenyCoordinator);

    let warning = follower.wait("a warning in the job's log", LIMIT, &logs, |event| {
        event.kind() == "log" && event.message().contains("could not be stored")
    });
    for part in ["refused to", "Check the address, the access keys", "goes on"] {
        assert!(warning.message().contains(part), "{part}: {warning:?}");
    }
    eventually("the reason of the waiting job", LIMIT, &logs, || {
        let shown = cluster.aitk_json(["explain", &second, "--json"]);
        let reason = shown["summary"].as_str()?;
        let is_refusal = reason.contains("waits until the object storage accepts the coordinator again");
        (is_refusal && reason.contains("Check the address, the access keys")).then_some(())
    });
    let refused = cluster.aitk(["submit", "job.yaml"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125), "{said}");
    assert!(
        said.contains("cannot use its storage") && said.contains("access keys"),
        "{said}"
    );
    // Long enough for the end of the training. Neither side asks again and again meanwhile.
    std::thread::sleep(Duration::from_secs(15));
    let before = s3.traffic().requests;
    std::thread::sleep(Duration::from_secs(10));
    let requests = s3.traffic().requests - before;
    assert!(requests < 40, "{requests} requests in ten seconds");
    let waiting = cluster.aitk_json(["ps", "-a", "--json"]);
    assert!(
        waiting["jobs"]
            .as_array()
            .unwrap()
            .iter()
            .all(|job| job["state"] != "failed"),
        "{waiting}"
    );

    s3.set_fault(ServerFault::None);
    for job in [&job, &second] {
        let waited = cluster.aitk(["wait", job, "--timeout", "240"]);
        assert!(
            waited.status.success(),
            "{}\n{}",
            worker.tail(),
            cluster.coordinator.tail()
        );
        cluster.aitk_ok(["artifacts", "get", job, "-o", "out"]);
        let differences = Files::below(&folder.path("out/shapes")).differences(&expected);
        assert!(differences.is_empty(), "{differences:?}");
        std::fs::remove_dir_all(folder.path("out")).unwrap();
    }
    let attempts = follower.events().iter().filter(|event| event.is_assignment()).count();
    assert_eq!(attempts, 1, "the first attempt should have gone on: {}", worker.tail());
    let log = cluster.coordinator.log();
    assert_eq!(log.matches(LOGGED).count(), 1, "{log}");
    assert!(log.contains("accepts this coordinator again"), "{log}");
}

#[test]
fn a_worker_with_keys_of_its_own_keeps_its_results_while_the_coordinators_key_is_wrong() {
    run_while_the_coordinator_is_refused(true);
}

#[test]
fn a_worker_without_keys_keeps_its_results_while_the_coordinators_key_is_wrong() {
    run_while_the_coordinator_is_refused(false);
}
