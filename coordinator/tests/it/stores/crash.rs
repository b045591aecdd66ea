//! SIGKILL during writes: acknowledged jobs survive, none is stored partly, and none twice.

use crate::support::daemon::Daemon;
use crate::support::postgres::{PASSWORD, Postgres};
use crate::support::{input, submission, within};
use aitk_common::control_plane::{EventBody, Submission};
use aitk_proto::client::Clients;
use aitk_proto::v1;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ROUNDS: u32 = 4;
const CLIENTS: usize = 4;

/// From the key of a submission to the acknowledged job id.
type Acknowledged = Arc<Mutex<BTreeMap<String, String>>>;

/// Submits jobs one after another until `stop`, and stops every third of them.
async fn submit_repeatedly(clients: Clients, name: String, acknowledged: Acknowledged, stop: Arc<AtomicBool>) {
    let mut jobs = clients.jobs.clone();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let key = format!("{name}-{number}");
        let submission = Submission {
            idempotency_key: Some(key.clone()),
            ..submission(&key)
        };
        // As a client does after a broken connection: repeat the request until there is an answer.
        let id = loop {
            match jobs.submit(v1::SubmitRequest::from(submission.clone())).await {
                Ok(reply) => break reply.into_inner().job_id,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        acknowledged.lock().unwrap().insert(key, id.clone());
        if number % 3 == 0 {
            let _ = jobs.stop(v1::StopJobRequest { job_id: id, now: false }).await;
        }
    }
}

async fn assert_survives_kills(daemon: &mut Daemon) {
    let clients = daemon.clients().await;
    let blobs = aitk_proto::remote_blobs::RemoteBlobs::new(&clients);
    use aitk_common::storage::BlobStore;
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let acknowledged = Acknowledged::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut running = Vec::new();
    for client in 0..CLIENTS {
        running.push(tokio::spawn(submit_repeatedly(
            clients.clone(),
            format!("c{client}"),
            acknowledged.clone(),
            stop.clone(),
        )));
    }
    for round in 0..ROUNDS {
        let before = acknowledged.lock().unwrap().len();
        // The kill comes at an arbitrary moment after this many answers.
        crate::support::eventually("submissions to go on", || async {
            (acknowledged.lock().unwrap().len() >= before + 7 + 5 * round as usize).then_some(())
        })
        .await;
        daemon.kill_and_restart().await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in running {
        within(client).await.unwrap();
    }
    daemon.kill_and_restart().await;

    let acknowledged = acknowledged.lock().unwrap().clone();
    let mut jobs = daemon.clients().await.jobs;
    let request = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    let listed = within(jobs.list(request)).await.unwrap().into_inner().jobs;
    let found: BTreeMap<String, String> = listed.iter().map(|job| (job.name.clone(), job.id.clone())).collect();
    assert_eq!(found, acknowledged, "exactly the acknowledged jobs are stored");
    assert_eq!(
        listed.len(),
        acknowledged.len(),
        "a submission that was repeated made two jobs"
    );
    for job in &listed {
        let request = v1::EventsRequest {
            job_id: job.id.clone(),
            cursor: 0,
            follow: false,
        };
        let mut stream = within(jobs.events(request)).await.unwrap().into_inner();
        let mut states = Vec::new();
        while let Some(event) = within(stream.message()).await.unwrap() {
            let event: aitk_common::control_plane::JobEvent = event.try_into().unwrap();
            assert_eq!(event.cursor, states.len() as u64 + 1, "{}: its log has a gap", job.id);
            let EventBody::State { state, .. } = event.body else {
                panic!("unexpected event: {:?}", event.body)
            };
            states.push(state.name());
        }
        let state = v1::JobState::try_from(job.state).unwrap();
        let expected: &[&str] = match state {
            v1::JobState::Queued => &["queued"],
            v1::JobState::Stopped => &["queued", "stopped"],
            other => panic!("{other:?}"),
        };
        assert_eq!(states, expected, "{}: its record and its log differ", job.id);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_survives_kills() {
    let folder = tempfile::tempdir().unwrap();
    assert_survives_kills(&mut Daemon::start(folder.path(), &[], &[]).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_survives_kills_and_the_log_has_no_password() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), &["--database", &server.url()], &[]).await;
    assert_survives_kills(&mut daemon).await;
    let log = daemon.log();
    assert!(log.contains("database loaded") && !log.contains(PASSWORD), "{log}");
}
