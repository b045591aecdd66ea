//! The coordinator's disk is full: reads work, writes are refused with an error of their own kind, and waiting jobs show the
//! reason. When there is space again, everything goes on. The same when even the database has no space.

use crate::support::daemon::Daemon;
use crate::support::data_sets::put;
use crate::support::{
    FakeWorker, TIMEOUT, config, eventually, held_attempt, input, put_checkpoint, submission, within,
};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::{JobState, JobView, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_coordinator::{Config, CoordinatorHandle, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tonic::Code;

/// Starts a coordinator that reserves this many bytes of its disk for the database.
async fn start_with_reserve(dir: &Path, reserve: u64) -> (CoordinatorHandle, Clients) {
    let config = Config {
        disk_reserve: Some(reserve),
        ..config(dir, Duration::from_secs(60))
    };
    let running = start(config).await.unwrap();
    let clients = connect(&running.url(), &running.token, None).await.unwrap();
    (running, clients)
}

async fn view(clients: &Clients, job: &str) -> JobView {
    let request = v1::GetJobRequest { job_id: job.into() };
    let reply = within(clients.jobs.clone().get(request)).await.unwrap();
    reply.into_inner().try_into().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_pauses_the_queue_and_uses_up_no_retries() {
    let dir = tempfile::tempdir().unwrap();
    let (running, clients) = start_with_reserve(dir.path(), 0).await;
    let blobs = RemoteBlobs::with_budget(&clients, TIMEOUT);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let checkpoint = put_checkpoint(&blobs, 5).await;
    let submitted = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("a")))).await;
    let job = submitted.unwrap().into_inner().job_id;
    // A failure of the coordinator's storage does not count against the job's retries.
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    let failed = Outcome::Failed {
        cause: FailureCause::Storage,
        message: "no room".into(),
    };
    assert_eq!(worker.finish(&held_attempt(&work), failed).await, Verdict::Accepted);
    let after = view(&clients, &job).await;
    assert_eq!((after.state, after.failures), (JobState::Queued, 0), "{after:?}");
    drop(worker);
    within(running.shutdown()).await;

    // Reserve more than the disk has, as if it were full.
    let (running, clients) = start_with_reserve(dir.path(), 1 << 60).await;
    let _worker = FakeWorker::register(&clients, FakeWorker::registration("x", None, Vec::new())).await;
    let waiting = eventually("the reason to name the full disk", || async {
        Some(view(&clients, &job).await).filter(|view| view.reason.contains("disk is full"))
    })
    .await;
    assert_eq!(waiting.state, JobState::Queued);
    assert!(
        waiting.reason.starts_with("waits: the coordinator's disk is full (")
            && waiting.reason.contains("GiB reserved)"),
        "{}",
        waiting.reason
    );
    let blobs = RemoteBlobs::with_budget(&clients, TIMEOUT);
    let error = within(blobs.put_bytes(ContentHash::of(b"new"), b"new".as_slice().into()))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, StorageError::Full { message, .. } if message.contains("reserved for the database")),
        "{error:?}"
    );
    // Reads need no space, and the database still has its reserve.
    assert!(!within(blobs.get_bytes(checkpoint, 1 << 20)).await.unwrap().is_empty());
    let second = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("b")))).await;
    assert!(
        view(&clients, &second.unwrap().into_inner().job_id)
            .await
            .reason
            .contains("disk is full")
    );
    within(running.shutdown()).await;

    let (running, clients) = start_with_reserve(dir.path(), 0).await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("y", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    within(running.shutdown()).await;
}

/// A small tmpfs. It is unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(on: &Path) -> Option<Self> {
        let mut command = Command::new("mount");
        let mounted = command
            .args(["-t", "tmpfs", "-o", "size=24m", "tmpfs"])
            .arg(on)
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(on.to_owned())),
            Ok(output) => {
                crate::skip::skip("tmpfs", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                crate::skip::skip("tmpfs", format!("`mount`: {error}"));
                None
            }
        }
    }

    /// Fills the disk. Removing the returned file frees the space again.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = File::create(&path).unwrap();
        let mut piece = vec![1_u8; 1 << 16];
        while !piece.is_empty() {
            if file.write_all(&piece).is_err() {
                piece.truncate(piece.len() / 2);
            }
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazy, because the daemon may still be exiting.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A job whose config takes about 60 kB in the database.
fn large(number: u32) -> v1::SubmitRequest {
    v1::SubmitRequest {
        config_text: format!("# {}\n", "x".repeat(60_000)),
        idempotency_key: format!("key {number}"),
        ..v1::SubmitRequest::from(submission(&format!("large{number}")))
    }
}

async fn names(clients: &Clients) -> Vec<String> {
    let request = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    let jobs = within(clients.jobs.clone().list(request))
        .await
        .unwrap()
        .into_inner()
        .jobs;
    jobs.into_iter().map(|job| job.name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_database_serves_reads_refuses_writes_and_recovers_when_there_is_space() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path()) else {
        return;
    };
    let mut daemon = Daemon::start(dir.path(), &["--disk-reserve-mib", "0"], &[]).await;
    let clients = daemon.clients().await;
    let blobs = RemoteBlobs::with_budget(&clients, TIMEOUT);
    put(&blobs, &input().to_bytes()).await;
    let first = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("runs")))).await;
    let first = first.unwrap().into_inner().job_id;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    worker.heartbeat(&[held_attempt(&work)]).await;

    let filler = disk.fill();
    // The write-ahead log may have some space left.
    let (mut acknowledged, mut refused) = (vec!["runs".to_owned()], None);
    for number in 0..400 {
        match within(clients.jobs.clone().submit(large(number))).await {
            Ok(_) => acknowledged.push(format!("large{number}")),
            Err(status) => {
                refused = Some((number, status));
                break;
            }
        }
    }
    let (number, status) = refused.expect("24 MiB do not hold them all");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    // Another write of the coordinator may have met the full disk first; then this one is not tried.
    let message = status.message();
    let is_unsure = message.contains("not stored yet") && message.contains("aitk ps");
    assert!(message.contains("database is full"), "{status}");
    assert!(is_unsure || message.contains("nothing was done"), "{status}");
    // Further changes are refused, and reads work.
    let status = within(clients.jobs.clone().submit(large(1000))).await.unwrap_err();
    assert!(status.message().contains("nothing was done"), "{status}");
    let stop = v1::StopJobRequest {
        job_id: first.clone(),
        now: false,
    };
    let status = within(clients.jobs.clone().stop(stop)).await.unwrap_err();
    assert!(status.message().contains("database is full"), "{status}");
    let listed = names(&clients).await;
    assert!(acknowledged.iter().all(|name| listed.contains(name)), "{listed:?}");
    assert_eq!(view(&clients, &first).await.state, JobState::Running);
    let refused = within(clients.jobs.clone().submit(large(0))).await;
    assert_eq!(refused.unwrap_err().code(), Code::ResourceExhausted);
    assert!(!within(blobs.get_bytes(input().id(), 1 << 20)).await.unwrap().is_empty());
    // Its worker is disconnected, and keeps its attempt until it can register again.
    while worker.next().await.is_some() {}
    let reconnect = || {
        let mut registration = FakeWorker::registration("w", Some(worker.id.clone()), vec![held_attempt(&work)]);
        registration.version = "reconnected".into();
        FakeWorker::try_register(&clients, registration)
    };
    assert!(
        reconnect().await.is_none(),
        "registrations are refused while the disk is full"
    );

    std::fs::remove_file(filler).unwrap();
    let mut worker = eventually("the worker to register", reconnect).await;
    assert_eq!(worker.keep, std::slice::from_ref(&work.attempt), "its attempt goes on");
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    // The unacknowledged submission was stored once there was space, and only once.
    let answer = within(clients.jobs.clone().submit(large(number)))
        .await
        .unwrap()
        .into_inner();
    assert!(answer.existed, "{answer:?}");
    acknowledged.push(format!("large{number}"));
    let mut listed = names(&clients).await;
    listed.sort_unstable();
    acknowledged.sort_unstable();
    assert_eq!(listed, acknowledged);
    // It is durable: acknowledged jobs survive a kill.
    within(clients.jobs.clone().submit(large(2000))).await.unwrap();
    acknowledged.push("large2000".to_owned());
    daemon.kill_and_restart().await;
    let mut listed = names(&daemon.clients().await).await;
    listed.sort_unstable();
    acknowledged.sort_unstable();
    assert_eq!(listed, acknowledged);
    let log = daemon.log();
    assert!(!log.contains("panicked"), "{log}");
    drop(daemon);
}
