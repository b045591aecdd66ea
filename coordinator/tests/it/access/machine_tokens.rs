//! A worker's token is only valid for that worker's own id.

use super::{LONG_LEASE, client_with_role, create_token, wait_for_audit_line};
use crate::support::{FakeWorker, TIMEOUT, TestCoordinator, eventually, held_attempt, put_checkpoint, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{ToCoordinator, Verdict};
use aitk_proto::client::connect;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_cannot_act_as_another_worker() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("a").await.job;
    let (one, two) = (
        client_with_role(&coordinator, "box-1", "worker").await,
        client_with_role(&coordinator, "box-2", "worker").await,
    );
    let mut worker = FakeWorker::register(&one, FakeWorker::registration("one", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    assert_eq!(work.job, job);

    // With the other worker's id and attempt: refused, and the open session stays open.
    let stolen = FakeWorker::registration("one", Some(worker.id.clone()), vec![held_attempt(&work)]);
    let first = ToCoordinator::Register(Box::new(stolen));
    let (_sender, mut messages) = FakeWorker::open(&two, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    assert!(error.message().contains("belongs to another machine"), "{error}");
    let refused = wait_for_audit_line(&coordinator.clients, "the refused worker id", |line| {
        line.action == "worker.join" && !line.done
    })
    .await;
    assert!(
        refused.who == "box-2" && refused.object == worker.id.as_str() && refused.detail == "it is box-1's",
        "{refused:?}"
    );
    worker.heartbeat(&[held_attempt(&work)]).await;

    // With its own id and the other worker's attempt: the attempt is not accepted.
    let own = FakeWorker::registration("two", None, vec![held_attempt(&work)]);
    let mut other = FakeWorker::register(&two, own).await;
    assert!(other.keep.is_empty());
    let manifest = put_checkpoint(&RemoteBlobs::with_budget(&one, TIMEOUT), 3).await;
    assert_eq!(other.commit(&held_attempt(&work), manifest, 3).await, Verdict::Fenced);
    let forged = wait_for_audit_line(&coordinator.clients, "the report", |line| {
        line.action == "worker.report"
    })
    .await;
    assert!(!forged.done && forged.who == "box-2", "{forged:?}");
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 3).await,
        Verdict::Accepted
    );

    // Another token with the same name, as after a renewal, keeps the worker's id, also after a restart.
    let (renewed, _) = create_token(&coordinator.clients, "box-1", "worker", None).await;
    let id = worker.id.clone();
    drop((worker, other));
    let coordinator = coordinator.restart().await;
    let clients = connect(&coordinator.running.url(), &renewed, None).await.unwrap();
    let registration = FakeWorker::registration("one", Some(id.clone()), vec![held_attempt(&work)]);
    let worker = FakeWorker::register(&clients, registration).await;
    assert_eq!((&worker.id, worker.keep.len()), (&id, 1));
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connected_worker_with_the_admin_token_keeps_its_id() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("a").await.job;
    let mut worker = FakeWorker::new(&coordinator, "w").await;
    let work = worker.next_assignment().await;
    assert_eq!(work.job, job);
    let other = client_with_role(&coordinator, "box", "worker").await;
    let stolen = FakeWorker::registration("w", Some(worker.id.clone()), vec![held_attempt(&work)]);
    let first = ToCoordinator::Register(Box::new(stolen.clone()));
    let (_sender, mut messages) = FakeWorker::open(&other, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    // Only for now: a worker that gets a token of its own keeps its id.
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.message().contains("an administrator's token"), "{error}");
    let refused = wait_for_audit_line(&coordinator.clients, "the refused worker id", |line| {
        line.action == "worker.join"
    })
    .await;
    assert!(!refused.done && refused.who == "box", "{refused:?}");
    worker.heartbeat(&[held_attempt(&work)]).await;
    let manifest = coordinator.checkpoint(3).await;
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 3).await,
        Verdict::Accepted
    );

    let id = worker.id.clone();
    drop(worker);
    let coordinator = coordinator.restart().await;
    let other = {
        let (secret, _) = create_token(&coordinator.clients, "box", "worker", None).await;
        connect(&coordinator.running.url(), &secret, None).await.unwrap()
    };
    // The worker is not connected, but its attempt has not ended, so another token cannot take its id over.
    let first = ToCoordinator::Register(Box::new(stolen.clone()));
    let (_sender, mut messages) = FakeWorker::open(&other, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let registration = FakeWorker::registration("w", Some(id.clone()), vec![held_attempt(&work)]);
    let mut worker = FakeWorker::register(&coordinator.clients, registration).await;
    assert_eq!((&worker.id, worker.keep.len()), (&id, 1));
    worker.finish(&held_attempt(&work), Outcome::Completed).await;
    drop(worker);
    let worker = eventually("the id to be free", || FakeWorker::try_register(&other, stolen.clone())).await;
    assert_eq!((&worker.id, worker.keep.len()), (&id, 0));
    within(coordinator.running.shutdown()).await;
}

/// Before, a worker that was forgotten counted toward its owner's limit for ever.
#[tokio::test(flavor = "multi_thread")]
async fn the_id_of_a_forgotten_worker_has_no_owner() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let (one, two) = (
        client_with_role(&coordinator, "box-1", "worker").await,
        client_with_role(&coordinator, "box-2", "worker").await,
    );
    let worker = FakeWorker::register(&one, FakeWorker::registration("one", None, Vec::new())).await;
    let id = worker.id.clone();
    let registration = FakeWorker::registration("one", Some(id.clone()), Vec::new());
    let forget = || async {
        let request = v1::ForgetWorkerRequest { worker: id.to_string() };
        within(coordinator.clients.jobs.clone().forget_worker(request)).await
    };
    assert_eq!(forget().await.unwrap_err().code(), Code::Aborted, "it is connected");
    assert!(FakeWorker::try_register(&two, registration.clone()).await.is_none());
    drop(worker);
    eventually("the session to close", || async { forget().await.ok() }).await;
    let worker = FakeWorker::register(&two, registration.clone()).await;
    assert_eq!(worker.id, id);
    drop(worker);
    let first = ToCoordinator::Register(Box::new(registration));
    let (_sender, mut messages) = FakeWorker::open(&one, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    within(coordinator.running.shutdown()).await;
}
