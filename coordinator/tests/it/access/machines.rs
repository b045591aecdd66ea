//! A machine's token opens that machine's place and no other.

use super::{CALM, line, somebody, token};
use crate::support::{FakeWorker, Pool, eventually, held, put_checkpoint, within};
use aitk_common::attempt::Outcome;
use aitk_common::control::{ToCoordinator, Verdict};
use aitk_proto::client::connect;
use aitk_proto::remote_blobs::RemoteBlobs;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_does_not_speak_for_another_one() {
    let pool = Pool::start(CALM).await;
    let job = pool.submit("a").await.job;
    let (one, two) = (
        somebody(&pool, "box-1", "worker").await,
        somebody(&pool, "box-2", "worker").await,
    );
    let mut worker = FakeWorker::register(&one, FakeWorker::registration("one", None, Vec::new())).await;
    let work = worker.assigned().await;
    assert_eq!(work.job, job);

    // Under its id, with what it holds: refused, and the session that is open stays open.
    let stolen = FakeWorker::registration("one", Some(worker.id.clone()), vec![held(&work)]);
    let first = ToCoordinator::Register(Box::new(stolen));
    let (_sender, mut messages) = FakeWorker::open(&two, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    assert!(error.message().contains("another machine's"), "{error}");
    let refused = line(&pool.clients, "the claim", |line| {
        line.action == "worker.join" && !line.done
    })
    .await;
    assert!(
        refused.who == "box-2" && refused.object == worker.id.as_str() && refused.detail == "it is box-1's",
        "{refused:?}"
    );
    worker.beat(&[held(&work)]).await;

    // Under its own id, with the other's attempt: that is not its attempt.
    let own = FakeWorker::registration("two", None, vec![held(&work)]);
    let mut other = FakeWorker::register(&two, own).await;
    assert!(other.keep.is_empty());
    let manifest = put_checkpoint(&RemoteBlobs::with_budget(&one, CALM), 3).await;
    assert_eq!(other.commit(&held(&work), manifest, 3).await, Verdict::Fenced);
    let forged = line(&pool.clients, "the report", |line| line.action == "worker.report").await;
    assert!(!forged.done && forged.who == "box-2", "{forged:?}");
    assert_eq!(worker.commit(&held(&work), manifest, 3).await, Verdict::Accepted);

    // Another token of the same name, as after a renewal, also after a restart.
    let (renewed, _) = token(&pool.clients, "box-1", "worker", None).await;
    let id = worker.id.clone();
    drop((worker, other));
    let pool = pool.restart().await;
    let clients = connect(&pool.running.url(), &renewed, None).await.unwrap();
    let again = FakeWorker::registration("one", Some(id.clone()), vec![held(&work)]);
    let worker = FakeWorker::register(&clients, again).await;
    assert_eq!((&worker.id, worker.keep.len()), (&id, 1));
    within(pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_has_the_first_token_is_not_pushed_aside() {
    let pool = Pool::start(CALM).await;
    let job = pool.submit("a").await.job;
    let mut worker = FakeWorker::new(&pool, "w").await;
    let work = worker.assigned().await;
    assert_eq!(work.job, job);
    let other = somebody(&pool, "box", "worker").await;
    let stolen = FakeWorker::registration("w", Some(worker.id.clone()), vec![held(&work)]);
    let first = ToCoordinator::Register(Box::new(stolen.clone()));
    let (_sender, mut messages) = FakeWorker::open(&other, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    // Not for ever: a machine that is given a token of its own keeps its id.
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.message().contains("an administrator's token"), "{error}");
    let refused = line(&pool.clients, "the claim", |line| line.action == "worker.join").await;
    assert!(!refused.done && refused.who == "box", "{refused:?}");
    worker.beat(&[held(&work)]).await;
    let manifest = pool.checkpoint(3).await;
    assert_eq!(worker.commit(&held(&work), manifest, 3).await, Verdict::Accepted);

    let id = worker.id.clone();
    drop(worker);
    let pool = pool.restart().await;
    let other = {
        let (secret, _) = token(&pool.clients, "box", "worker", None).await;
        connect(&pool.running.url(), &secret, None).await.unwrap()
    };
    // It is not connected, but its work has not ended: whoever took its place would have that.
    let first = ToCoordinator::Register(Box::new(stolen.clone()));
    let (_sender, mut messages) = FakeWorker::open(&other, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let again = FakeWorker::registration("w", Some(id.clone()), vec![held(&work)]);
    let mut worker = FakeWorker::register(&pool.clients, again).await;
    assert_eq!((&worker.id, worker.keep.len()), (&id, 1));
    worker.finish(&held(&work), Outcome::Completed).await;
    drop(worker);
    let worker = eventually("it is gone", || FakeWorker::try_register(&other, stolen.clone())).await;
    assert_eq!((&worker.id, worker.keep.len()), (&id, 0));
    within(pool.running.shutdown()).await;
}
