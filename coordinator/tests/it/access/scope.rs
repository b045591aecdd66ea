//! Who sees and names which blob: a worker what its attempts need and what it sent, a submitter what they sent.

use super::{CALM, audit, line, somebody, submit, token};
use crate::support::blobs::{collect, data_set, put, wants};
use crate::support::{FakeWorker, Pool, checkpoint, config, eventually, held, put_checkpoint, within};
use aitk_common::attempt::Outcome;
use aitk_common::control::{Artifact, Assignment, ToCoordinator, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobStore;
use aitk_common::storage::snapshot::{Snapshot, SnapshotFile};
use aitk_coordinator::{Config, Retention, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_proto::v1::put_blob_request::Part;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

fn blobs(clients: &Clients) -> RemoteBlobs {
    RemoteBlobs::with_budget(clients, Duration::from_secs(5))
}

async fn has(clients: &Clients, hashes: &[ContentHash]) -> Vec<bool> {
    within(blobs(clients).has(hashes)).await.unwrap()
}

async fn fetch(clients: &Clients, hash: ContentHash) -> Result<Vec<u8>, Status> {
    let request = v1::GetBlobRequest {
        sha256: hash.to_hex(),
        offset: 0,
    };
    let mut parts = within(clients.blobs.clone().get(request)).await?.into_inner();
    let mut all = Vec::new();
    while let Some(part) = within(parts.message()).await? {
        if let Some(v1::get_blob_reply::Part::Data(data)) = part.part {
            all.extend(data);
        }
    }
    Ok(all)
}

/// An upload whose pieces a test sends when it likes.
fn upload(
    clients: &Clients,
) -> (
    mpsc::Sender<v1::PutBlobRequest>,
    tokio::task::JoinHandle<Result<bool, Status>>,
) {
    let (parts, waiting) = mpsc::channel(4);
    let mut blobs = clients.blobs.clone();
    let upload = tokio::spawn(async move {
        let put = blobs.put(ReceiverStream::new(waiting)).await?;
        Ok(put.into_inner().existed)
    });
    (parts, upload)
}

async fn part(parts: &mpsc::Sender<v1::PutBlobRequest>, part: Part) {
    // A call that was refused shows in its answer.
    let _ = parts.send(v1::PutBlobRequest { part: Some(part) }).await;
}

fn header(hash: ContentHash, bytes: u64) -> Part {
    Part::Header(v1::BlobHeader {
        sha256: hash.to_hex(),
        bytes,
        offset: 0,
    })
}

/// Sends a whole blob without asking first; whether it was there already.
async fn send(clients: &Clients, data: &[u8]) -> Result<bool, Status> {
    let (parts, upload) = upload(clients);
    part(&parts, header(ContentHash::of(data), data.len() as u64)).await;
    part(&parts, Part::Data(data.to_vec())).await;
    drop(parts);
    within(upload).await.unwrap()
}

async fn put_data_set(clients: &Clients, tag: &str) -> (Snapshot, Vec<ContentHash>) {
    let (snapshot, contents) = data_set(tag);
    let mut files = Vec::new();
    for content in &contents {
        files.push(put(&blobs(clients), content).await);
    }
    files.push(put(&blobs(clients), &snapshot.to_bytes()).await);
    (snapshot, files)
}

async fn submit_with(clients: &Clients, snapshot: &Snapshot) -> Result<String, Status> {
    let made = within(clients.jobs.clone().submit(wants("with", snapshot))).await?;
    Ok(made.into_inner().job_id)
}

async fn announce(worker: &mut FakeWorker, work: &Assignment, hash: ContentHash) -> (Verdict, String) {
    let artifact = Artifact {
        name: "a.safetensors".into(),
        kind: "lora".into(),
        hash: Some(hash),
        bytes: 1,
        step: None,
        index: None,
        local_path: None,
    };
    let held = held(work);
    worker
        .ask(|request| ToCoordinator::ArtifactReady {
            request,
            held,
            artifact,
        })
        .await
}

async fn refusal(pool: &Pool, action: &str, who: &str, object: ContentHash) -> v1::AuditLine {
    line(&pool.clients, action, |line| {
        line.action == action && line.who == who && line.object == object.to_hex() && !line.done
    })
    .await
}

/// Anna's job runs on box-1; box-2 has nothing to do; Ben has a secret.
struct Lab {
    pool: Pool,
    anna: Clients,
    one: Clients,
    two: Clients,
    worker: FakeWorker,
    idle: FakeWorker,
    work: Assignment,
    /// Two files, and their list.
    data: Vec<ContentHash>,
    secret: ContentHash,
}

const SECRET: &[u8] = b"an image of ben";

impl Lab {
    async fn start() -> Self {
        let pool = Pool::start(CALM).await;
        let anna = somebody(&pool, "anna", "submitter").await;
        let ben = somebody(&pool, "ben", "submitter").await;
        let secret = put(&blobs(&ben), SECRET).await;
        let (snapshot, data) = put_data_set(&anna, "hers").await;
        let job = submit_with(&anna, &snapshot).await.unwrap();
        let (one, two) = (
            somebody(&pool, "box-1", "worker").await,
            somebody(&pool, "box-2", "worker").await,
        );
        let mut worker = FakeWorker::register(&one, FakeWorker::registration("one", None, Vec::new())).await;
        let work = worker.assigned().await;
        assert_eq!(work.job.as_str(), job);
        let idle = FakeWorker::register(&two, FakeWorker::registration("two", None, Vec::new())).await;
        Self {
            pool,
            anna,
            one,
            two,
            worker,
            idle,
            work,
            data,
            secret,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_reads_the_inputs_of_its_attempts_and_nothing_else() {
    let lab = Lab::start().await;
    assert_eq!(has(&lab.one, &lab.data).await, [true; 3]);
    assert_eq!(fetch(&lab.one, lab.data[0]).await.unwrap(), b"hers one");
    assert!(fetch(&lab.one, lab.data[2]).await.is_ok());

    // What is there and not its own looks like what is not there.
    let absent = ContentHash::of(b"nobody has this");
    assert_eq!(has(&lab.one, &[lab.secret, absent]).await, [false, false]);
    for hash in [lab.secret, absent] {
        let error = fetch(&lab.one, hash).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert_eq!(error.message(), format!("the object storage has no blob {hash}"));
        let refused = refusal(&lab.pool, "blob.get", "box-1", hash).await;
        assert_eq!(refused.detail, "nothing that this worker runs needs it");
    }
    // One that runs nothing sees nothing, not even what another one runs.
    assert_eq!(has(&lab.two, &lab.data).await, [false; 3]);
    assert_eq!(fetch(&lab.two, lab.data[0]).await.unwrap_err().code(), Code::NotFound);
    refusal(&lab.pool, "blob.get", "box-2", lab.data[0]).await;
    // The owner of everything sees everything.
    assert_eq!(has(&lab.pool.clients, &[lab.secret, lab.data[0]]).await, [true, true]);
    drop((lab.worker, lab.idle));
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_stores_only_for_what_it_runs() {
    let mut lab = Lab::start().await;
    let error = send(&lab.two, b"junk").await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    let refused = refusal(&lab.pool, "blob.put", "box-2", ContentHash::of(b"junk")).await;
    assert_eq!(refused.detail, "this worker runs nothing");
    assert_eq!(has(&lab.pool.clients, &[ContentHash::of(b"junk")]).await, [false]);

    // What somebody else sent is taken once more, as if it were new; then it is this worker's as well.
    assert!(!send(&lab.one, SECRET).await.unwrap());
    assert!(send(&lab.one, SECRET).await.unwrap());
    assert_eq!(has(&lab.one, &[lab.secret]).await, [true]);

    let huge = ContentHash::of(b"huge");
    for bytes in [1 << 41, 1 << 63, u64::MAX] {
        let (parts, upload) = upload(&lab.one);
        part(&parts, header(huge, bytes)).await;
        let error = within(upload).await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    }
    refusal(&lab.pool, "blob.put", "box-1", huge).await;

    // An attempt that ends while it uploads stores nothing any more.
    let late = b"late";
    let (parts, upload) = upload(&lab.one);
    part(&parts, header(ContentHash::of(late), late.len() as u64)).await;
    part(&parts, Part::Data(late[..2].to_vec())).await;
    eventually("the upload to begin", || async {
        let parts = std::fs::read_dir(lab.pool.dir.path().join("transit")).unwrap();
        (parts.count() == 1).then_some(())
    })
    .await;
    let verdict = lab.worker.finish(&held(&lab.work), Outcome::Completed).await;
    assert_eq!(verdict, Verdict::Accepted);
    part(&parts, Part::Data(late[2..].to_vec())).await;
    drop(parts);
    let error = within(upload).await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    assert_eq!(has(&lab.pool.clients, &[ContentHash::of(late)]).await, [false]);
    // Nor does it read.
    assert_eq!(fetch(&lab.one, lab.data[0]).await.unwrap_err().code(), Code::NotFound);
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_makes_no_result_of_what_it_does_not_know() {
    let mut lab = Lab::start().await;
    // A result is what its job's owner may fetch: anna and her worker would get at ben's file by its hash alone.
    let (verdict, message) = announce(&mut lab.worker, &lab.work, lab.secret).await;
    assert_eq!(verdict, Verdict::Refused);
    assert_eq!(
        message,
        format!("blob {} is not in storage; upload it first", lab.secret)
    );
    let refused = refusal(&lab.pool, "blob.name", "box-1", lab.secret).await;
    assert_eq!(refused.detail, "this worker neither sent it nor needs it");
    assert_eq!(fetch(&lab.anna, lab.secret).await.unwrap_err().code(), Code::NotFound);

    // The same by a checkpoint of somebody else, and by one of its own that lists the file.
    let foreign = lab.pool.checkpoint(5).await;
    assert_eq!(lab.worker.commit(&held(&lab.work), foreign, 5).await, Verdict::Refused);
    refusal(&lab.pool, "blob.name", "box-1", foreign).await;
    let (manifest, _) = checkpoint(5);
    let file = ContentHash::of(b"weights of step 5");
    assert_eq!(file, ContentHash::of(&checkpoint(5).1));
    send(&lab.one, manifest.as_bytes()).await.unwrap();
    assert_eq!(lab.worker.commit(&held(&lab.work), foreign, 5).await, Verdict::Refused);
    refusal(&lab.pool, "blob.name", "box-1", file).await;

    // Its own, over a restart in between; and anna fetches what was announced.
    put_checkpoint(&blobs(&lab.one), 5).await;
    let lora = put(&blobs(&lab.one), b"lora").await;
    let (id, running) = (lab.worker.id.clone(), vec![held(&lab.work)]);
    drop((lab.worker, lab.idle));
    let (box_1, _) = token(&lab.pool.clients, "box-1", "worker", None).await;
    let (anna, _) = token(&lab.pool.clients, "anna", "submitter", None).await;
    let pool = lab.pool.restart().await;
    let one = connect(&pool.running.url(), &box_1, None).await.unwrap();
    let anna = connect(&pool.running.url(), &anna, None).await.unwrap();
    let mut worker = FakeWorker::register(&one, FakeWorker::registration("one", Some(id), running)).await;
    assert_eq!(worker.keep.len(), 1);
    assert_eq!(worker.commit(&held(&lab.work), foreign, 5).await, Verdict::Accepted);
    assert_eq!(announce(&mut worker, &lab.work, lora).await.0, Verdict::Accepted);
    assert_eq!(fetch(&anna, lora).await.unwrap(), b"lora");
    within(pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_worker_reads_the_checkpoint_and_the_last_one_no_more() {
    let mut lab = Lab::start().await;
    let manifest = put_checkpoint(&blobs(&lab.one), 7).await;
    let file = ContentHash::of(&checkpoint(7).1);
    assert_eq!(
        lab.worker.commit(&held(&lab.work), manifest, 7).await,
        Verdict::Accepted
    );
    assert_eq!(fetch(&lab.two, manifest).await.unwrap_err().code(), Code::NotFound);
    lab.worker
        .send(ToCoordinator::GoingAway { reason: "away".into() })
        .await;
    let stopped = lab.worker.finish(&held(&lab.work), Outcome::stopped()).await;
    assert_eq!(stopped, Verdict::Accepted);
    let work = lab.idle.assigned().await;
    assert_eq!((work.job.clone(), work.resume), (lab.work.job.clone(), Some(manifest)));
    assert_eq!(fetch(&lab.two, manifest).await.unwrap(), checkpoint(7).0.into_bytes());
    assert_eq!(fetch(&lab.two, file).await.unwrap(), checkpoint(7).1);
    assert_eq!(fetch(&lab.two, lab.data[1]).await.unwrap(), b"hers two");
    assert_eq!(fetch(&lab.one, file).await.unwrap_err().code(), Code::NotFound);
    // A file that the next checkpoint has, too, is not sent again.
    assert_eq!(has(&lab.two, &[file]).await, [true]);
    assert_eq!(lab.idle.commit(&held(&work), manifest, 8).await, Verdict::Accepted);
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submitter_names_only_what_they_sent() {
    let pool = Pool::start(CALM).await;
    let anna = somebody(&pool, "anna", "submitter").await;
    let ben = somebody(&pool, "ben", "submitter").await;
    let (hers, files) = put_data_set(&anna, "hers").await;
    let (absent, contents) = data_set("nobody's");
    submit_with(&anna, &hers).await.unwrap();
    assert_eq!(has(&anna, &files).await, [true; 3]);

    // He knows every hash of it, and learns nothing.
    assert_eq!(has(&ben, &files).await, [false; 3]);
    let refusals = [
        submit_with(&ben, &hers).await.unwrap_err(),
        submit_with(&ben, &absent).await.unwrap_err(),
    ];
    for (error, snapshot) in refusals.iter().zip([&hers, &absent]) {
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(
            error.message().contains("is not in storage; upload it first"),
            "{error}"
        );
        let refused = refusal(&pool, "job.submit", "ben", snapshot.id()).await;
        assert_eq!(refused.detail, "an input that this user has not sent");
    }
    // Nor with a list of his own making.
    let stolen = SnapshotFile {
        path: "stolen".into(),
        bytes: 8,
        sha256: files[0],
    };
    let own = Snapshot::new(vec![stolen], false).unwrap();
    put(&blobs(&ben), &own.to_bytes()).await;
    let error = submit_with(&ben, &own).await.unwrap_err();
    assert!(error.message().contains("a file of the snapshot"), "{error}");
    refusal(&pool, "job.submit", "ben", files[0]).await;
    let all = audit(&pool.clients).await;
    assert!(all.iter().all(|line| line.who != "anna" || line.done), "{all:?}");

    // Whoever has the content may use it, and it is stored once.
    let before = collect(&pool.clients, true).await.blobs;
    put_data_set(&ben, "hers").await;
    assert_eq!(collect(&pool.clients, true).await.blobs, before);
    submit_with(&ben, &hers).await.unwrap();
    submit_with(&ben, &own).await.unwrap();
    put(&blobs(&ben), &contents[0]).await;
    // A machine that is called as he is, is not he.
    let machine = somebody(&pool, "ben", "worker").await;
    assert_eq!(has(&machine, &files).await, [false; 3]);
    // Operators see everything, as before.
    let olga = somebody(&pool, "olga", "operator").await;
    submit_with(&olga, &hers).await.unwrap();

    // What was sent stays known.
    let (secret, _) = token(&pool.clients, "ben", "submitter", None).await;
    let pool = pool.restart().await;
    let ben = connect(&pool.running.url(), &secret, None).await.unwrap();
    assert_eq!(has(&ben, &files).await, [true; 3]);
    submit(&ben, "again").await.unwrap();
    within(pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_removed_is_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Config {
        retention: Retention {
            every: None,
            grace: Duration::ZERO,
            ..Retention::default()
        },
        ..config(dir.path(), CALM)
    };
    let running = start(settings).await.unwrap();
    let admin = connect(&running.url(), &running.token, None).await.unwrap();
    let (secret, _) = token(&admin, "anna", "submitter", None).await;
    let anna = connect(&running.url(), &secret, None).await.unwrap();
    let (snapshot, files) = put_data_set(&anna, "hers").await;
    assert_eq!(collect(&admin, false).await.removed, 3);
    assert_eq!(has(&anna, &files).await, [false; 3]);
    put_data_set(&admin, "hers").await;
    // That it is there again is not hers to know.
    assert_eq!(has(&anna, &files).await, [false; 3]);
    put_data_set(&anna, "hers").await;
    submit_with(&anna, &snapshot).await.unwrap();
    within(running.shutdown()).await;
}
