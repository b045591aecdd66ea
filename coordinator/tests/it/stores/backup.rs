//! Backups made under load, restored into either database.

use crate::support::daemon::Daemon;
use crate::support::postgres::Postgres;
use crate::support::{FakeWorker, held, input, put_checkpoint, submission, within};
use aitk_common::control::{EventBody, JobEvent, Submission, Verdict};
use aitk_common::storage::BlobStore;
use aitk_coordinator::store::Tally;
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
    let wanted = Submission {
        idempotency_key: Some(name.to_owned()),
        ..submission(name)
    };
    let reply = within(clients.jobs.clone().submit(v1::SubmitRequest::from(wanted)))
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

fn address(database: Option<&str>) -> Option<DatabaseUrl> {
    database.map(|url| url.parse().unwrap())
}

/// From the store of `from` to that of `to`: `None` is SQLite in the folder.
async fn under_load(folder: &Path, from: Option<&str>, to: Option<&str>) {
    let (here, there) = (folder.join("here"), folder.join("there"));
    let mut daemon = Daemon::start(&here, &arguments(from), &[]).await;
    let clients = daemon.clients().await;
    put_input(&clients).await;
    let trained = submit(&clients, "trained").await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.assigned().await;
    assert_eq!(work.job.as_str(), trained);
    let saved = put_checkpoint(&RemoteBlobs::new(&clients), 5).await;
    assert_eq!(worker.commit(&held(&work), saved, 5).await, Verdict::Accepted);

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
    let tally = backup(&here, address(from).as_ref(), &file).await.unwrap();
    let during = acknowledged.lock().unwrap().len();
    crate::support::eventually("the load to go on", || async {
        (acknowledged.lock().unwrap().len() > during).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for client in load {
        within(client).await.unwrap();
    }
    assert!(tally.jobs > before.len() as u64, "{tally:?}");
    daemon.kill();

    let to_there = address(to);
    let restored = restore_patiently(&there, to_there.as_ref(), &file).await.unwrap();
    assert_eq!(restored, tally);
    let twice = restore_patiently(&there, to_there.as_ref(), &file).await.unwrap_err();
    assert!(twice.to_string().contains("restore into an empty one"), "{twice}");

    // The blobs lie where they lay.
    let storage = here.join("storage");
    let mut arguments = arguments(to);
    arguments.extend(["--storage", storage.to_str().unwrap()]);
    let daemon = Daemon::start(&there, &arguments, &[]).await;
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
    assert_eq!((names.len(), jobs.len() as u64), (jobs.len(), tally.jobs));
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
            "who followed before does not miss what comes now"
        );
    }

    // The worker still holds its attempt; here it is refused, and the job goes on with a higher epoch.
    let registration = FakeWorker::registration("w", Some(worker.id.clone()), vec![held(&work)]);
    let mut worker = FakeWorker::register(&clients, registration).await;
    assert!(worker.keep.is_empty());
    let again = worker.assigned().await;
    assert_eq!(worker.commit(&held(&work), saved, 6).await, Verdict::Fenced);
    assert_eq!((again.job.as_str(), again.resume), (trained.as_str(), Some(saved)));
    assert!(again.epoch.0 > work.epoch.0 + 1_000_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_sqlite_under_load_is_restored() {
    let folder = tempfile::tempdir().unwrap();
    under_load(folder.path(), None, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_postgres_under_load_is_restored_into_sqlite() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    under_load(folder.path(), Some(&server.url()), None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_sqlite_under_load_is_restored_into_postgres() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    under_load(folder.path(), None, Some(&server.url())).await;
}

/// [`restore`], patient with its folder's lock: a process that a test beside this one starts holds a copy of
/// every open file for a moment.
async fn restore_patiently(there: &Path, database: Option<&DatabaseUrl>, file: &Path) -> Result<Tally, CopyError> {
    for _ in 0..100 {
        match restore(there, database, file).await {
            Err(CopyError::DataFolder(DataFolderError::InUse { .. })) => {
                tokio::time::sleep(Duration::from_millis(20)).await
            }
            other => return other,
        }
    }
    restore(there, database, file).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_backup_restores_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there, file) = (
        folder.path().join("here"),
        folder.path().join("there"),
        folder.path().join("b"),
    );
    let mut daemon = Daemon::start(&here, &[], &[]).await;
    put_input(&daemon.clients().await).await;
    for name in ["a", "b", "c"] {
        submit(&daemon.clients().await, name).await;
    }
    daemon.kill();
    backup(&here, None, &file).await.unwrap();
    let whole = std::fs::read(&file).unwrap();
    let mut damaged: Vec<Vec<u8>> = (0..whole.len()).step_by(97).map(|end| whole[..end].to_vec()).collect();
    for at in (0..whole.len()).step_by(61) {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        damaged.push(flipped);
    }
    damaged.push([&whole[..], &b"{}\n"[..]].concat());
    for bytes in damaged {
        std::fs::write(&file, &bytes).unwrap();
        let error = restore_patiently(&there, None, &file).await.unwrap_err();
        assert!(
            matches!(error, CopyError::Backup(_)) && error.to_string().contains("nothing was restored"),
            "{error}"
        );
    }
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(
        restore_patiently(&there, None, &file).await.unwrap().jobs,
        3,
        "nothing of the others was there"
    );
    let running = Daemon::start(&there, &[], &[]).await;
    let error = restore(&there, None, &file).await.unwrap_err();
    assert!(error.to_string().contains("another coordinator runs"), "{error}");
    drop(running);
}
