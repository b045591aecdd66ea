//! Several coordinator processes on one PostgreSQL, which are killed (SIGKILL) and suspended (SIGSTOP).

use crate::support::daemon::Daemon;
use crate::support::postgres::Postgres;
use crate::support::{FakeWorker, eventually, held_attempt, input, put_checkpoint, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{AttemptRef, JobState, JobView, Submission, Verdict};
use aitk_common::storage::BlobStore;
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::{FORWARDED_HEADER, PROOF_HEADER, v1};
use std::path::Path;
use std::process::Command;
use tonic::{Code, Request};

const TOKEN: &str = "a-token-that-all-of-them-have";

struct Cluster {
    database: Postgres,
    dir: tempfile::TempDir,
}

impl Cluster {
    fn new() -> Option<Self> {
        let database = Postgres::start()?;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("blobs")).unwrap();
        Some(Self { database, dir })
    }

    fn storage(&self) -> String {
        format!("file://{}", self.dir.path().join("blobs").display())
    }

    async fn coordinator(&self, name: &str, lease: &str) -> Daemon {
        let dir = self.dir.path().join(name);
        write_token(&dir, TOKEN);
        let storage = self.storage();
        let arguments = [
            "--storage",
            &storage,
            "--advertise",
            "http://ADDRESS",
            "--lease-seconds",
            lease,
        ];
        Daemon::start(&dir, &arguments, &[("AITK_DATABASE", &self.database.url())]).await
    }
}

fn write_token(dir: &Path, token: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("token"), token).unwrap();
    std::fs::set_permissions(dir.join("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Waits until this coordinator answers, as the leader or by forwarding calls to it.
async fn wait_until_ready(daemon: &Daemon) -> Clients {
    eventually(&format!("an answer from {}", daemon.url()), || async {
        // A coordinator does not listen while it changes between leader and standby.
        let clients = connect(&daemon.url(), TOKEN, None).await.ok()?;
        clients.jobs.clone().info(v1::InfoRequest {}).await.ok()?;
        Some(clients)
    })
    .await
}

async fn wait_until_leading(daemon: &Daemon) {
    eventually("a leader", || async {
        daemon.log().contains("this coordinator leads").then_some(())
    })
    .await;
}

async fn submit(clients: &Clients, name: &str) -> String {
    let request = v1::SubmitRequest::from(submission(name));
    within(clients.jobs.clone().submit(request))
        .await
        .unwrap()
        .into_inner()
        .job_id
}

async fn job(clients: &Clients, id: &str) -> Option<JobView> {
    let request = v1::GetJobRequest { job_id: id.into() };
    match within(clients.jobs.clone().get(request)).await {
        Ok(reply) => Some(reply.into_inner().try_into().unwrap()),
        Err(status) => {
            eprintln!("no answer: {status}");
            None
        }
    }
}

/// Registers the worker again with the current leader.
async fn reconnect(clients: &Clients, name: &str, worker: &FakeWorker, running: &[AttemptRef]) -> FakeWorker {
    eventually("a session with the leader", || async {
        let registration = FakeWorker::registration(name, Some(worker.id.clone()), running.to_vec());
        FakeWorker::try_register(clients, registration).await
    })
    .await
}

fn signal(daemon: &Daemon, name: &str) {
    let sent = Command::new("kill")
        .args([name, &daemon.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_and_a_running_attempt_goes_on() {
    let Some(cluster) = Cluster::new() else { return };
    let mut first = cluster.coordinator("first", "45").await;
    wait_until_leading(&first).await;
    let second = cluster.coordinator("second", "45").await;
    let (to_first, to_second) = (wait_until_ready(&first).await, wait_until_ready(&second).await);

    // A standby forwards uploads, submissions and reads.
    let blobs = RemoteBlobs::new(&to_second);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let id = submit(&to_second, "shapes").await;
    assert_eq!(job(&to_first, &id).await.unwrap().state, JobState::Queued);
    assert_eq!(job(&to_second, &id).await.unwrap().name, "shapes");
    // It refuses workers' sessions and names the leader.
    let registration = FakeWorker::registration("box", None, Vec::new());
    let first_message = aitk_common::control_plane::ToCoordinator::Register(Box::new(registration.clone()));
    let refused = FakeWorker::open(&to_second, Some(first_message)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains(&first.url()), "{}", refused.message());

    let mut worker = FakeWorker::register(&to_first, registration).await;
    let work = worker.next_assignment().await;
    let manifest = put_checkpoint(&blobs, 4).await;
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 4).await,
        Verdict::Accepted
    );

    // A client with both addresses keeps working when one coordinator dies.
    let both = format!("{},{}", first.url(), second.url());
    let to_both = connect(&both, TOKEN, None).await.unwrap();
    assert!(job(&to_both, &id).await.is_some());
    first.kill();
    let mut worker = reconnect(&to_second, "box", &worker, &[held_attempt(&work)]).await;
    assert_eq!(worker.keep, std::slice::from_ref(&work.attempt), "the attempt goes on");
    let seen = eventually("an answer with both addresses", || job(&to_both, &id)).await;
    assert_eq!((seen.state, seen.checkpoint_step), (JobState::Running, Some(4)));

    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    let seen = job(&to_second, &id).await.unwrap();
    assert_eq!((seen.state, seen.attempts.len()), (JobState::Completed, 1));

    // The first coordinator starts again as a standby, and leads again when the second one shuts down.
    let half = cluster.dir.path().join("first/transit/half.part");
    std::fs::write(&half, "of a blob").unwrap();
    first.kill_and_restart().await;
    let to_first = wait_until_ready(&first).await;
    assert!(
        !half.exists(),
        "an unfinished upload from before the kill is removed while it is a standby"
    );
    assert_eq!(job(&to_first, &id).await.unwrap().state, JobState::Completed);
    assert!(second.log().contains("this coordinator leads"));
    let times_leading = || first.log().matches("this coordinator leads").count();
    let before = times_leading();
    signal(&second, "-TERM");
    // Wait for that first: until then the second coordinator would accept a job and assign it to its worker.
    eventually("the first one to lead again", || async {
        (times_leading() > before).then_some(())
    })
    .await;
    let later = eventually("a submission", || async {
        let request = v1::SubmitRequest::from(submission("later"));
        Some(to_first.jobs.clone().submit(request).await.ok()?.into_inner().job_id)
    })
    .await;
    let seen = eventually("the later job", || job(&to_first, &later)).await;
    assert_eq!(seen.state, JobState::Queued);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_leader_changes_nothing_after_it_resumes() {
    let Some(cluster) = Cluster::new() else { return };
    let first = cluster.coordinator("first", "2").await;
    wait_until_leading(&first).await;
    let second = cluster.coordinator("second", "2").await;
    let (to_first, to_second) = (wait_until_ready(&first).await, wait_until_ready(&second).await);
    let blobs = RemoteBlobs::new(&to_first);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let early = put_checkpoint(&blobs, 4).await;
    let late = put_checkpoint(&blobs, 6).await;
    let id = submit(&to_first, "shapes").await;
    let registration = FakeWorker::registration("old", None, Vec::new());
    let mut old = FakeWorker::register(&to_first, registration).await;
    let work = old.next_assignment().await;

    signal(&first, "-STOP");
    wait_until_leading(&second).await;
    // The old worker cannot reach the new leader, so its job is assigned to another worker.
    let registration = FakeWorker::registration("new", None, Vec::new());
    let mut new = eventually("a session", || {
        FakeWorker::try_register(&to_second, registration.clone())
    })
    .await;
    // The new worker has to send heartbeats meanwhile: its lease is short, too.
    let reassigned = loop {
        match tokio::time::timeout(std::time::Duration::from_millis(300), new.next_assignment()).await {
            Ok(work) => break work,
            Err(_) => new.heartbeat(&[]).await,
        }
    };
    assert_eq!(
        (reassigned.job.clone(), reassigned.epoch.0),
        (work.job.clone(), work.epoch.0 + 1)
    );
    assert_eq!(
        new.commit(&held_attempt(&reassigned), early, 4).await,
        Verdict::Accepted
    );

    // The old worker sends a commit to the old leader, which then resumes.
    let stale_commit = async {
        let held = held_attempt(&work);
        old.send(aitk_common::control_plane::ToCoordinator::Commit {
            request: 1,
            held,
            manifest: late,
            step: 6,
        })
        .await;
        while let Some(message) = old.next().await {
            if let aitk_common::control_plane::ToWorker::Answer { verdict, .. } = message {
                return Some(verdict);
            }
        }
        None
    };
    let resume = async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        signal(&first, "-CONT");
    };
    let (verdict, ()) = tokio::join!(stale_commit, resume);
    // It cannot store anything, so it ends the session without an answer.
    assert_eq!(verdict, None);
    let seen = job(&to_second, &id).await.unwrap();
    assert_eq!((seen.checkpoint_step, seen.attempts.len()), (Some(4), 2));

    // The new worker keeps sending heartbeats meanwhile. Then the old leader is a standby and forwards calls.
    eventually("the old leader to step down", || async {
        new.heartbeat(&[held_attempt(&reassigned)]).await;
        first.log().contains("does not lead any more").then_some(())
    })
    .await;
    assert_eq!(
        new.finish(&held_attempt(&reassigned), Outcome::Completed).await,
        Verdict::Accepted
    );
    let through = wait_until_ready(&first).await;
    let other = submit(&through, "other").await;
    assert!(job(&to_second, &other).await.is_some());
    assert_eq!(job(&through, &id).await.unwrap().state, JobState::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarded_headers_are_trusted_only_with_the_proof() {
    let Some(cluster) = Cluster::new() else { return };
    let first = cluster.coordinator("first", "45").await;
    wait_until_leading(&first).await;
    let second = cluster.coordinator("second", "45").await;
    let to_second = wait_until_ready(&second).await;
    let blobs = RemoteBlobs::new(&to_second);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();

    // Jobs that run in place must come from the leader's own machine, so forwarded ones are refused.
    let in_place = Submission {
        local: true,
        ..submission("in-place")
    };
    let refused = to_second.jobs.clone().submit(v1::SubmitRequest::from(in_place)).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);

    // A client that guesses tokens cannot choose the address for which the guesses are counted.
    let guesser = connect(&first.url(), "a-token-that-is-a-guess", None).await.unwrap();
    let mut last = Code::Ok;
    for guess in 0..40 {
        let mut request = Request::new(v1::InfoRequest {});
        let from = format!("10.0.0.{guess}:1");
        request.metadata_mut().insert(FORWARDED_HEADER, from.parse().unwrap());
        request
            .metadata_mut()
            .insert(PROOF_HEADER, "a-proof-that-is-a-guess".parse().unwrap());
        last = within(guesser.jobs.clone().info(request)).await.unwrap_err().code();
    }
    assert_eq!(last, Code::ResourceExhausted);
    // A forwarded call is not forwarded again.
    let mut request = Request::new(v1::InfoRequest {});
    request
        .metadata_mut()
        .insert(FORWARDED_HEADER, "10.0.0.1:1".parse().unwrap());
    let refused = within(to_second.jobs.clone().info(request)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn coordinators_with_incompatible_settings_refuse_to_start() {
    let Some(cluster) = Cluster::new() else { return };
    let url = cluster.database.url();
    let first = cluster.coordinator("first", "45").await;
    wait_until_leading(&first).await;
    let run = |name: &str, token: &str, arguments: &[&str]| {
        let dir = cluster.dir.path().join(name);
        write_token(&dir, token);
        let output = Command::new(env!("CARGO_BIN_EXE_aitk-coordinator"))
            .args(["--bind", "127.0.0.1:0", "--data-dir"])
            .arg(&dir)
            .args(arguments)
            .env("AITK_DATABASE", &url)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let here = ["--advertise", "http://127.0.0.1:1"];
    let storage = cluster.storage();

    let (code, stderr) = run(
        "other",
        "another-token-than-theirs",
        &[&here[..], &["--storage", &storage]].concat(),
    );
    assert!(
        code == Some(1) && stderr.contains("the token") && stderr.contains(&first.url()),
        "{stderr}"
    );
    let elsewhere = format!("file://{}", cluster.dir.path().join("elsewhere").display());
    let (code, stderr) = run("other", TOKEN, &[&here[..], &["--storage", &elsewhere]].concat());
    assert!(code == Some(1) && stderr.contains("--storage"), "{stderr}");
    let (code, stderr) = run("other", TOKEN, &here);
    assert!(code == Some(2) && stderr.contains("--storage"), "{stderr}");
    let far = ["--advertise", "http://gpu.lab:7420", "--storage", &storage];
    let (code, stderr) = run("other", TOKEN, &far);
    assert!(
        code == Some(1) && stderr.contains("--advertise") && stderr.contains("TLS"),
        "{stderr}"
    );
    // One without --advertise must be the only one.
    let (code, stderr) = run("other", TOKEN, &["--storage", &storage]);
    assert!(code == Some(1) && stderr.contains("another coordinator"), "{stderr}");
}
