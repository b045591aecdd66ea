//! Backups that are made under load and restored into either database.

use crate::support::daemon::Daemon;
use crate::support::postgres::Postgres;
use crate::support::{FakeWorker, held_attempt, input, put_checkpoint, submission, within};
use aitk_common::control_plane::{EventBody, JobEvent, Submission, Verdict};
use aitk_common::storage::BlobStore;
use aitk_coordinator::store::BackupCounts;
use aitk_coordinator::{CopyError, DataFolderError, DatabaseUrl, backup, restore};
use aitk_proto::client::Clients;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

async fn put_input(clients: &Clients) {
    let blobs = RemoteBlobs::new(clients);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
}

async fn submit(clients: &Clients, name: &str) -> String {
    let request = Submission {
        idempotency_key: Some(name.to_owned()),
        ..submission(name)
    };
    let reply = within(clients.jobs.clone().submit(v1::SubmitRequest::from(request)))
        .await
        .unwrap();
    reply.into_inner().job_id
}

async fn events(clients: &Clients, job_id: String) -> Vec<JobEvent> {
    let request = v1::EventsRequest {
        job_id,
        cursor: 0,
        follow: false,
    };
    let mut stream = within(clients.jobs.clone().events(request)).await.unwrap().into_inner();
    let mut events = Vec::new();
    while let Some(event) = within(stream.message()).await.unwrap() {
        events.push(event.try_into().unwrap());
    }
    events
}

fn arguments(database: Option<&str>) -> Vec<&str> {
    database.map_or(Vec::new(), |url| vec!["--database", url])
}

fn parse_url(database: Option<&str>) -> Option<DatabaseUrl> {
    database.map(|url| url.parse().unwrap())
}

/// Makes a backup of the database `from` under load and restores it into `to`. `None` is SQLite in the folder.
async fn backup_and_restore_under_load(folder: &Path, from: Option<&str>, to: Option<&str>) {
    let (source, target) = (folder.join("source"), folder.join("target"));
    let mut daemon = Daemon::start(&source, &arguments(from), &[]).await;
    let clients = daemon.clients().await;
    put_input(&clients).await;
    let trained = submit(&clients, "trained").await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    assert_eq!(work.job.as_str(), trained);
    let saved = put_checkpoint(&RemoteBlobs::new(&clients), 5).await;
    assert_eq!(worker.commit(&held_attempt(&work), saved, 5).await, Verdict::Accepted);

    let acknowledged = Arc::new(Mutex::new(BTreeSet::new()));
    let stop = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = (0..3)
        .map(|client| {
            let (clients, acknowledged, stop) = (clients.clone(), acknowledged.clone(), stop.clone());
            tokio::spawn(async move {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let name = format!("c{client}-{number}");
                    submit(&clients, &name).await;
                    acknowledged.lock().unwrap().insert(name);
                }
            })
        })
        .collect();
    crate::support::eventually("some load", || async {
        (acknowledged.lock().unwrap().len() > 20).then_some(())
    })
    .await;
    let before = acknowledged.lock().unwrap().clone();
    let file = folder.join("backup");
    let counts = backup(&source, parse_url(from).as_ref(), &file).await.unwrap();
    let during = acknowledged.lock().unwrap().len();
    crate::support::eventually("the load to go on", || async {
        (acknowledged.lock().unwrap().len() > during).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for client in load {
        within(client).await.unwrap();
    }
    assert!(counts.jobs > before.len() as u64, "{counts:?}");
    daemon.kill();

    let target_url = parse_url(to);
    let restored = restore_with_retries(&target, target_url.as_ref(), &file).await.unwrap();
    assert_eq!(restored, counts);
    let twice = restore_with_retries(&target, target_url.as_ref(), &file)
        .await
        .unwrap_err();
    assert!(twice.to_string().contains("restore into an empty one"), "{twice}");

    // The blobs stay in the source's storage.
    let storage = source.join("storage");
    let mut arguments = arguments(to);
    arguments.extend(["--storage", storage.to_str().unwrap()]);
    let daemon = Daemon::start(&target, &arguments, &[]).await;
    let clients = daemon.clients().await;
    let request = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    let jobs = within(clients.jobs.clone().list(request))
        .await
        .unwrap()
        .into_inner()
        .jobs;
    let names: BTreeSet<String> = jobs.iter().map(|job| job.name.clone()).collect();
    assert_eq!((names.len(), jobs.len() as u64), (jobs.len(), counts.jobs));
    assert!(names.is_superset(&before));
    for job in jobs.iter().filter(|job| job.id != trained) {
        let log = events(&clients, job.id.clone()).await;
        assert!(
            log[0].cursor == 1 && log.is_sorted_by_key(|event| event.cursor),
            "{log:?}"
        );
        assert!(matches!(&log[1].body, EventBody::State { reason, .. } if reason.contains("restored")));
        assert!(
            log[1].cursor > 1_000_000,
            "a client that followed the job before the restore misses no new event"
        );
    }

    // The worker still runs its attempt, which is refused here. The job goes on with a higher epoch.
    let registration = FakeWorker::registration("w", Some(worker.id.clone()), vec![held_attempt(&work)]);
    let mut worker = FakeWorker::register(&clients, registration).await;
    assert!(worker.keep.is_empty());
    let reassigned = worker.next_assignment().await;
    assert_eq!(worker.commit(&held_attempt(&work), saved, 6).await, Verdict::Fenced);
    assert_eq!(
        (reassigned.job.as_str(), reassigned.resume),
        (trained.as_str(), Some(saved))
    );
    assert!(reassigned.epoch.0 > work.epoch.0 + 1_000_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_sqlite_under_load_is_restored() {
    let folder = tempfile::tempdir().unwrap();
    backup_and_restore_under_load(folder.path(), None, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_postgres_under_load_is_restored_into_sqlite() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    backup_and_restore_under_load(folder.path(), Some(&server.url()), None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_sqlite_under_load_is_restored_into_postgres() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    backup_and_restore_under_load(folder.path(), None, Some(&server.url())).await;
}

/// Calls [`restore`] until the folder's lock is free. A process that a parallel test starts inherits every open file for a
/// moment, and with it the lock.
async fn restore_with_retries(
    target: &Path,
    database: Option<&DatabaseUrl>,
    file: &Path,
) -> Result<BackupCounts, CopyError> {
    for _ in 0..100 {
        match restore(target, database, file).await {
            Err(CopyError::DataFolder(DataFolderError::InUse { .. })) => {
                tokio::time::sleep(Duration::from_millis(20)).await
            }
            other => return other,
        }
    }
    restore(target, database, file).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_backup_restores_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target, file) = (
        folder.path().join("source"),
        folder.path().join("target"),
        folder.path().join("b"),
    );
    let mut daemon = Daemon::start(&source, &[], &[]).await;
    put_input(&daemon.clients().await).await;
    for name in ["a", "b", "c"] {
        submit(&daemon.clients().await, name).await;
    }
    daemon.kill();
    backup(&source, None, &file).await.unwrap();
    let intact = std::fs::read(&file).unwrap();
    let mut damaged: Vec<Vec<u8>> = (0..intact.len())
        .step_by(97)
        .map(|end| intact[..end].to_vec())
        .collect();
    for at in (0..intact.len()).step_by(61) {
        let mut flipped = intact.clone();
        flipped[at] ^= 4;
        damaged.push(flipped);
    }
    damaged.push([&intact[..], &b"{}\n"[..]].concat());
    for bytes in damaged {
        std::fs::write(&file, &bytes).unwrap();
        let error = restore_with_retries(&target, None, &file).await.unwrap_err();
        assert!(
            matches!(error, CopyError::Backup(_)) && error.to_string().contains("nothing was restored"),
            "{error}"
        );
    }
    std::fs::write(&file, &intact).unwrap();
    assert_eq!(
        restore_with_retries(&target, None, &file).await.unwrap().jobs,
        3,
        "the damaged backups left nothing in the database"
    );
    let running = Daemon::start(&target, &[], &[]).await;
    let error = restore(&target, None, &file).await.unwrap_err();
    assert!(error.to_string().contains("another coordinator runs"), "{error}");
    drop(running);
}
