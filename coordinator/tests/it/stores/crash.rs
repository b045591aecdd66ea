//! SIGKILL during writes: what was acknowledged is there, nothing is there by halves, nothing is there twice.

use crate::support::daemon::Daemon;
use crate::support::postgres::{PASSWORD, Postgres};
use crate::support::{input, submission, within};
use aitk_common::control::{EventBody, Submission};
use aitk_proto::client::Clients;
use aitk_proto::v1;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ROUNDS: u32 = 4;
const CLIENTS: usize = 4;

/// Key of a submission -> the id that was acknowledged.
type Acknowledged = Arc<Mutex<BTreeMap<String, String>>>;

/// Submits one job after another until told to stop, and stops every third one again.
async fn submit_on(clients: Clients, name: String, acknowledged: Acknowledged, stop: Arc<AtomicBool>) {
    let mut jobs = clients.jobs.clone();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let key = format!("{name}-{number}");
        let wanted = Submission {
            idempotency_key: Some(key.clone()),
            ..submission(&key)
        };
        // As a client does whose connection broke: the same again, until there is an answer.
        let id = loop {
            match jobs.submit(v1::SubmitRequest::from(wanted.clone())).await {
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

async fn survives(daemon: &mut Daemon) {
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
        running.push(tokio::spawn(submit_on(
            clients.clone(),
            format!("c{client}"),
            acknowledged.clone(),
            stop.clone(),
        )));
    }
    for round in 0..ROUNDS {
        let before = acknowledged.lock().unwrap().len();
        // At whatever moment so many answers later is.
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
    assert_eq!(found, acknowledged, "every acknowledged job, once, and no other");
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
            let event: aitk_common::control::JobEvent = event.try_into().unwrap();
            assert_eq!(event.cursor, states.len() as u64 + 1, "{}: a gap in its log", job.id);
            let EventBody::State { state, .. } = event.body else {
                panic!("nothing else happened: {:?}", event.body)
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
    survives(&mut Daemon::start(folder.path(), &[], &[]).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_survives_kills_and_its_password_is_nowhere() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), &["--database", &server.url()], &[]).await;
    survives(&mut daemon).await;
    let log = daemon.log();
    assert!(log.contains("database loaded") && !log.contains(PASSWORD), "{log}");
}
