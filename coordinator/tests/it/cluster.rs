//! Several coordinators on one PostgreSQL, as processes that are killed and stopped.

use crate::support::daemon::Daemon;
use crate::support::postgres::Postgres;
use crate::support::{FakeWorker, eventually, held, input, put_checkpoint, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control::{HeldAttempt, JobState, JobView, Submission, Verdict};
use aitk_common::storage::BlobStore;
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::{FORWARDED_HEADER, PROOF_HEADER, v1};
use std::path::Path;
use std::process::Command;
use tonic::{Code, Request};

const TOKEN: &str = "a-token-that-all-of-them-have";

struct Lab {
    server: Postgres,
    dir: tempfile::TempDir,
}

impl Lab {
    fn new() -> Option<Self> {
        let server = Postgres::start()?;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("blobs")).unwrap();
        Some(Self { server, dir })
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
        Daemon::start(&dir, &arguments, &[("AITK_DATABASE", &self.server.url())]).await
    }
}

fn write_token(dir: &Path, token: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("token"), token).unwrap();
    std::fs::set_permissions(dir.join("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Waits until this coordinator answers as one that leads, or passes calls on to one.
async fn answers(daemon: &Daemon) -> Clients {
    eventually(&format!("an answer from {}", daemon.url()), || async {
        // Between leading and standing by it does not listen.
        let clients = connect(&daemon.url(), TOKEN, None).await.ok()?;
        clients.jobs.clone().info(v1::InfoRequest {}).await.ok()?;
        Some(clients)
    })
    .await
}

async fn leads(daemon: &Daemon) {
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

/// A worker that comes back to whoever leads.
async fn back(clients: &Clients, name: &str, worker: &FakeWorker, running: &[HeldAttempt]) -> FakeWorker {
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
async fn another_one_takes_over_and_what_runs_goes_on() {
    let Some(lab) = Lab::new() else { return };
    let mut first = lab.coordinator("first", "45").await;
    leads(&first).await;
    let second = lab.coordinator("second", "45").await;
    let (to_first, to_second) = (answers(&first).await, answers(&second).await);

    // Whoever stands by passes on: blobs, submissions, reads.
    let blobs = RemoteBlobs::new(&to_second);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let id = submit(&to_second, "shapes").await;
    assert_eq!(job(&to_first, &id).await.unwrap().state, JobState::Queued);
    assert_eq!(job(&to_second, &id).await.unwrap().name, "shapes");
    // But no worker's session.
    let registration = FakeWorker::registration("box", None, Vec::new());
    let first_message = aitk_common::control::ToCoordinator::Register(Box::new(registration.clone()));
    let refused = FakeWorker::open(&to_second, Some(first_message)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains(&first.url()), "{}", refused.message());

    let mut worker = FakeWorker::register(&to_first, registration).await;
    let work = worker.assigned().await;
    let manifest = put_checkpoint(&blobs, 4).await;
    assert_eq!(worker.commit(&held(&work), manifest, 4).await, Verdict::Accepted);

    // Somebody who knows both addresses asks on, whoever dies.
    let both = format!("{},{}", first.url(), second.url());
    let to_both = connect(&both, TOKEN, None).await.unwrap();
    assert!(job(&to_both, &id).await.is_some());
    first.kill();
    let mut worker = back(&to_second, "box", &worker, &[held(&work)]).await;
    assert_eq!(worker.keep, std::slice::from_ref(&work.attempt), "the attempt goes on");
    let seen = eventually("an answer with both addresses", || job(&to_both, &id)).await;
    assert_eq!((seen.state, seen.checkpoint_step), (JobState::Running, Some(4)));

    assert_eq!(worker.finish(&held(&work), Outcome::Completed).await, Verdict::Accepted);
    let seen = job(&to_second, &id).await.unwrap();
    assert_eq!((seen.state, seen.attempts.len()), (JobState::Completed, 1));

    // The first one comes back, stands by, and leads again when the second leaves in order.
    let half = lab.dir.path().join("first/transit/half.part");
    std::fs::write(&half, "of a blob").unwrap();
    first.kill_and_restart().await;
    let to_first = answers(&first).await;
    assert!(
        !half.exists(),
        "what was on its way when it died is gone before it leads"
    );
    assert_eq!(job(&to_first, &id).await.unwrap().state, JobState::Completed);
    assert!(second.log().contains("this coordinator leads"));
    let lead = || first.log().matches("this coordinator leads").count();
    let before = lead();
    signal(&second, "-TERM");
    // Not before it leads: until then the second one takes a job, and gives it to its worker.
    eventually("the first one to lead again", || async {
        (lead() > before).then_some(())
    })
    .await;
    let later = eventually("a submission", || async {
        let request = v1::SubmitRequest::from(submission("later"));
        Some(to_first.jobs.clone().submit(request).await.ok()?.into_inner().job_id)
    })
    .await;
    let seen = eventually("it", || job(&to_first, &later)).await;
    assert_eq!(seen.state, JobState::Queued);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stood_still_changes_nothing_when_it_wakes() {
    let Some(lab) = Lab::new() else { return };
    let first = lab.coordinator("first", "2").await;
    leads(&first).await;
    let second = lab.coordinator("second", "2").await;
    let (to_first, to_second) = (answers(&first).await, answers(&second).await);
    let blobs = RemoteBlobs::new(&to_first);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let early = put_checkpoint(&blobs, 4).await;
    let late = put_checkpoint(&blobs, 6).await;
    let id = submit(&to_first, "shapes").await;
    let registration = FakeWorker::registration("old", None, Vec::new());
    let mut old = FakeWorker::register(&to_first, registration).await;
    let work = old.assigned().await;

    signal(&first, "-STOP");
    leads(&second).await;
    // The old worker is not heard of; its job goes to another one.
    let registration = FakeWorker::registration("new", None, Vec::new());
    let mut new = eventually("a session", || {
        FakeWorker::try_register(&to_second, registration.clone())
    })
    .await;
    // Its lease is short too.
    let again = loop {
        match tokio::time::timeout(std::time::Duration::from_millis(300), new.assigned()).await {
            Ok(work) => break work,
            Err(_) => new.beat(&[]).await,
        }
    };
    assert_eq!((again.job.clone(), again.epoch.0), (work.job.clone(), work.epoch.0 + 1));
    assert_eq!(new.commit(&held(&again), early, 4).await, Verdict::Accepted);

    // It wakes with a worker that wants to commit, and a user who wants to submit.
    let stale = async {
        let held = held(&work);
        old.send(aitk_common::control::ToCoordinator::Commit {
            request: 1,
            held,
            manifest: late,
            step: 6,
        })
        .await;
        while let Some(message) = old.next().await {
            if let aitk_common::control::ToWorker::Answer { verdict, .. } = message {
                return Some(verdict);
            }
        }
        None
    };
    let wake = async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        signal(&first, "-CONT");
    };
    let (verdict, ()) = tokio::join!(stale, wake);
    assert_ne!(verdict, Some(Verdict::Accepted));
    let seen = job(&to_second, &id).await.unwrap();
    assert_eq!((seen.checkpoint_step, seen.attempts.len()), (Some(4), 2));

    // The new one beats on meanwhile. From then on the old one passes calls on.
    eventually("it to step down", || async {
        new.beat(&[held(&again)]).await;
        first.log().contains("does not lead any more").then_some(())
    })
    .await;
    assert_eq!(new.finish(&held(&again), Outcome::Completed).await, Verdict::Accepted);
    let through = answers(&first).await;
    let other = submit(&through, "other").await;
    assert!(job(&to_second, &other).await.is_some());
    assert_eq!(job(&through, &id).await.unwrap().state, JobState::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_passed_on_is_believed_only_with_the_proof() {
    let Some(lab) = Lab::new() else { return };
    let first = lab.coordinator("first", "45").await;
    leads(&first).await;
    let second = lab.coordinator("second", "45").await;
    let to_second = answers(&second).await;
    let blobs = RemoteBlobs::new(&to_second);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();

    // Jobs that run in place are for the leader's own machine: what came through another one did not begin there.
    let in_place = Submission {
        local: true,
        ..submission("in-place")
    };
    let refused = to_second.jobs.clone().submit(v1::SubmitRequest::from(in_place)).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);

    // Who guesses cannot choose the address that the guesses are counted for.
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
    // And a call that was passed on is not passed on again.
    let mut request = Request::new(v1::InfoRequest {});
    request
        .metadata_mut()
        .insert(FORWARDED_HEADER, "10.0.0.1:1".parse().unwrap());
    let refused = within(to_second.jobs.clone().info(request)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_do_not_fit_together_are_told() {
    let Some(lab) = Lab::new() else { return };
    let url = lab.server.url();
    let first = lab.coordinator("first", "45").await;
    leads(&first).await;
    let run = |name: &str, token: &str, arguments: &[&str]| {
        let dir = lab.dir.path().join(name);
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
    let storage = lab.storage();

    let (code, said) = run(
        "other",
        "another-token-than-theirs",
        &[&here[..], &["--storage", &storage]].concat(),
    );
    assert!(
        code == Some(1) && said.contains("the token") && said.contains(&first.url()),
        "{said}"
    );
    let elsewhere = format!("file://{}", lab.dir.path().join("elsewhere").display());
    let (code, said) = run("other", TOKEN, &[&here[..], &["--storage", &elsewhere]].concat());
    assert!(code == Some(1) && said.contains("--storage"), "{said}");
    let (code, said) = run("other", TOKEN, &here);
    assert!(code == Some(2) && said.contains("--storage"), "{said}");
    let far = ["--advertise", "http://gpu.lab:7420", "--storage", &storage];
    let (code, said) = run("other", TOKEN, &far);
    assert!(
        code == Some(1) && said.contains("--advertise") && said.contains("TLS"),
        "{said}"
    );
    // One that wants no others beside it.
    let (code, said) = run("other", TOKEN, &["--storage", &storage]);
    assert!(code == Some(1) && said.contains("another coordinator"), "{said}");
}
