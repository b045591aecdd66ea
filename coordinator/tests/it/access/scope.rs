//! Access to blobs: a worker may use those that its attempts need and those that it uploaded, a submitter those that they
//! uploaded.

use super::{LONG_LEASE, audit_log, client_with_role, create_token, submit, wait_for_audit_line};
use crate::support::data_sets::{collect, data_set, put, submission_with};
use crate::support::{
    FakeWorker, TestCoordinator, checkpoint, config, eventually, held_attempt, put_checkpoint, within,
};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{Artifact, Assignment, ToCoordinator, Verdict};
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

/// Starts an upload. The test sends its parts one by one.
fn start_upload(
    clients: &Clients,
) -> (
    mpsc::Sender<v1::PutBlobRequest>,
    tokio::task::JoinHandle<Result<bool, Status>>,
) {
    let (parts, receiver) = mpsc::channel(4);
    let mut blobs = clients.blobs.clone();
    let upload = tokio::spawn(async move {
        let put = blobs.put(ReceiverStream::new(receiver)).await?;
        Ok(put.into_inner().existed)
    });
    (parts, upload)
}

async fn send_part(parts: &mpsc::Sender<v1::PutBlobRequest>, part: Part) {
    // A refused call is noticed in its answer.
    let _ = parts.send(v1::PutBlobRequest { part: Some(part) }).await;
}

fn header(hash: ContentHash, bytes: u64) -> Part {
    Part::Header(v1::BlobHeader {
        sha256: hash.to_hex(),
        bytes,
        ..Default::default()
    })
}

/// Uploads a blob without checking first whether it is in storage. Returns whether it already was.
async fn upload(clients: &Clients, data: &[u8]) -> Result<bool, Status> {
    let (parts, upload) = start_upload(clients);
    send_part(&parts, header(ContentHash::of(data), data.len() as u64)).await;
    send_part(&parts, Part::Data(data.to_vec())).await;
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
    let reply = within(clients.jobs.clone().submit(submission_with("with", snapshot))).await?;
    Ok(reply.into_inner().job_id)
}

async fn report_artifact(worker: &mut FakeWorker, work: &Assignment, hash: ContentHash) -> (Verdict, String) {
    let artifact = Artifact {
        name: "a.safetensors".into(),
        kind: "lora".into(),
        hash: Some(hash),
        bytes: 1,
        step: None,
        index: None,
        local_path: None,
    };
    let held = held_attempt(work);
    worker
        .request(|request| ToCoordinator::ArtifactReady {
            request,
            held,
            artifact,
        })
        .await
}

async fn wait_for_refusal(
    coordinator: &TestCoordinator,
    action: &str,
    who: &str,
    object: ContentHash,
) -> v1::AuditLine {
    wait_for_audit_line(&coordinator.clients, action, |line| {
        line.action == action && line.who == who && line.object == object.to_hex() && !line.done
    })
    .await
}

/// Anna's job runs on box-1, box-2 is idle, and Ben has uploaded a secret.
struct Fixture {
    coordinator: TestCoordinator,
    anna: Clients,
    one: Clients,
    two: Clients,
    worker: FakeWorker,
    idle: FakeWorker,
    work: Assignment,
    /// The data set of Anna's job: two files and their snapshot.
    data: Vec<ContentHash>,
    secret: ContentHash,
}

const SECRET: &[u8] = b"an image of ben";

impl Fixture {
    async fn start() -> Self {
        let coordinator = TestCoordinator::start(LONG_LEASE).await;
        let anna = client_with_role(&coordinator, "anna", "submitter").await;
        let ben = client_with_role(&coordinator, "ben", "submitter").await;
        let secret = put(&blobs(&ben), SECRET).await;
        let (snapshot, data) = put_data_set(&anna, "hers").await;
        let job = submit_with(&anna, &snapshot).await.unwrap();
        let (one, two) = (
            client_with_role(&coordinator, "box-1", "worker").await,
            client_with_role(&coordinator, "box-2", "worker").await,
        );
        let mut worker = FakeWorker::register(&one, FakeWorker::registration("one", None, Vec::new())).await;
        let work = worker.next_assignment().await;
        assert_eq!(work.job.as_str(), job);
        let idle = FakeWorker::register(&two, FakeWorker::registration("two", None, Vec::new())).await;
        Self {
            coordinator,
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
    let fixture = Fixture::start().await;
    assert_eq!(has(&fixture.one, &fixture.data).await, [true; 3]);
    assert_eq!(fetch(&fixture.one, fixture.data[0]).await.unwrap(), b"hers one");
    assert!(fetch(&fixture.one, fixture.data[2]).await.is_ok());

    // A blob that it may not access looks like one that does not exist.
    let absent = ContentHash::of(b"nobody has this");
    assert_eq!(has(&fixture.one, &[fixture.secret, absent]).await, [false, false]);
    for hash in [fixture.secret, absent] {
        let error = fetch(&fixture.one, hash).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert_eq!(error.message(), format!("the object storage has no blob {hash}"));
        let refused = wait_for_refusal(&fixture.coordinator, "blob.get", "box-1", hash).await;
        assert_eq!(refused.detail, "nothing that this worker runs needs it");
    }
    // A worker without an attempt has access to nothing, not even to another worker's inputs.
    assert_eq!(has(&fixture.two, &fixture.data).await, [false; 3]);
    assert_eq!(
        fetch(&fixture.two, fixture.data[0]).await.unwrap_err().code(),
        Code::NotFound
    );
    wait_for_refusal(&fixture.coordinator, "blob.get", "box-2", fixture.data[0]).await;
    // An administrator has access to everything.
    assert_eq!(
        has(&fixture.coordinator.clients, &[fixture.secret, fixture.data[0]]).await,
        [true, true]
    );
    drop((fixture.worker, fixture.idle));
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_may_upload_only_while_it_runs_an_attempt() {
    let mut fixture = Fixture::start().await;
    let error = upload(&fixture.two, b"junk").await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    let refused = wait_for_refusal(&fixture.coordinator, "blob.put", "box-2", ContentHash::of(b"junk")).await;
    assert_eq!(refused.detail, "this worker runs nothing");
    assert_eq!(
        has(&fixture.coordinator.clients, &[ContentHash::of(b"junk")]).await,
        [false]
    );

    // A blob that another user uploaded is accepted like a new one. From then on this worker may use it, too.
    assert!(!upload(&fixture.one, SECRET).await.unwrap());
    assert!(upload(&fixture.one, SECRET).await.unwrap());
    assert_eq!(has(&fixture.one, &[fixture.secret]).await, [true]);

    let huge = ContentHash::of(b"huge");
    for bytes in [1 << 41, 1 << 63, u64::MAX] {
        let (parts, upload) = start_upload(&fixture.one);
        send_part(&parts, header(huge, bytes)).await;
        let error = within(upload).await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    }
    wait_for_refusal(&fixture.coordinator, "blob.put", "box-1", huge).await;

    // An upload fails when its attempt ends meanwhile.
    let late = b"late";
    let (parts, upload) = start_upload(&fixture.one);
    send_part(&parts, header(ContentHash::of(late), late.len() as u64)).await;
    send_part(&parts, Part::Data(late[..2].to_vec())).await;
    eventually("the upload to begin", || async {
        let parts = std::fs::read_dir(fixture.coordinator.dir.path().join("transit")).unwrap();
        (parts.count() == 1).then_some(())
    })
    .await;
    let verdict = fixture
        .worker
        .finish(&held_attempt(&fixture.work), Outcome::Completed)
        .await;
    assert_eq!(verdict, Verdict::Accepted);
    send_part(&parts, Part::Data(late[2..].to_vec())).await;
    drop(parts);
    let error = within(upload).await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    assert_eq!(
        has(&fixture.coordinator.clients, &[ContentHash::of(late)]).await,
        [false]
    );
    // Its inputs are inaccessible then, too.
    assert_eq!(
        fetch(&fixture.one, fixture.data[0]).await.unwrap_err().code(),
        Code::NotFound
    );
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_cannot_report_blobs_that_it_has_no_access_to() {
    let mut fixture = Fixture::start().await;
    // The job's owner may fetch its artifacts. With this, anna and her worker would get ben's file by its hash alone.
    let (verdict, message) = report_artifact(&mut fixture.worker, &fixture.work, fixture.secret).await;
    assert_eq!(verdict, Verdict::Refused);
    assert_eq!(
        message,
        format!("blob {} is not in storage; upload it first", fixture.secret)
    );
    let refused = wait_for_refusal(&fixture.coordinator, "blob.name", "box-1", fixture.secret).await;
    assert_eq!(refused.detail, "this worker neither sent it nor needs it");
    assert_eq!(
        fetch(&fixture.anna, fixture.secret).await.unwrap_err().code(),
        Code::NotFound
    );

    // The same with a checkpoint of another user, and with its own checkpoint that lists another user's file.
    let foreign = fixture.coordinator.checkpoint(5).await;
    assert_eq!(
        fixture.worker.commit(&held_attempt(&fixture.work), foreign, 5).await,
        Verdict::Refused
    );
    wait_for_refusal(&fixture.coordinator, "blob.name", "box-1", foreign).await;
    let (manifest, _) = checkpoint(5);
    let file = ContentHash::of(b"weights of step 5");
    assert_eq!(file, ContentHash::of(&checkpoint(5).1));
    upload(&fixture.one, manifest.as_bytes()).await.unwrap();
    assert_eq!(
        fixture.worker.commit(&held_attempt(&fixture.work), foreign, 5).await,
        Verdict::Refused
    );
    wait_for_refusal(&fixture.coordinator, "blob.name", "box-1", file).await;

    // Its own blobs are accepted, also after a restart, and anna can fetch the artifact.
    put_checkpoint(&blobs(&fixture.one), 5).await;
    let lora = put(&blobs(&fixture.one), b"lora").await;
    let (id, running) = (fixture.worker.id.clone(), vec![held_attempt(&fixture.work)]);
    drop((fixture.worker, fixture.idle));
    let (box_1, _) = create_token(&fixture.coordinator.clients, "box-1", "worker", None).await;
    let (anna, _) = create_token(&fixture.coordinator.clients, "anna", "submitter", None).await;
    let coordinator = fixture.coordinator.restart().await;
    let one = connect(&coordinator.running.url(), &box_1, None).await.unwrap();
    let anna = connect(&coordinator.running.url(), &anna, None).await.unwrap();
    let mut worker = FakeWorker::register(&one, FakeWorker::registration("one", Some(id), running)).await;
    assert_eq!(worker.keep.len(), 1);
    assert_eq!(
        worker.commit(&held_attempt(&fixture.work), foreign, 5).await,
        Verdict::Accepted
    );
    assert_eq!(
        report_artifact(&mut worker, &fixture.work, lora).await.0,
        Verdict::Accepted
    );
    assert_eq!(fetch(&anna, lora).await.unwrap(), b"lora");
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_current_worker_can_read_the_checkpoint() {
    let mut fixture = Fixture::start().await;
    let manifest = put_checkpoint(&blobs(&fixture.one), 7).await;
    let file = ContentHash::of(&checkpoint(7).1);
    assert_eq!(
        fixture.worker.commit(&held_attempt(&fixture.work), manifest, 7).await,
        Verdict::Accepted
    );
    assert_eq!(fetch(&fixture.two, manifest).await.unwrap_err().code(), Code::NotFound);
    fixture
        .worker
        .send(ToCoordinator::GoingAway { reason: "away".into() })
        .await;
    let stopped = fixture
        .worker
        .finish(&held_attempt(&fixture.work), Outcome::stopped())
        .await;
    assert_eq!(stopped, Verdict::Accepted);
    let work = fixture.idle.next_assignment().await;
    assert_eq!(
        (work.job.clone(), work.resume),
        (fixture.work.job.clone(), Some(manifest))
    );
    assert_eq!(
        fetch(&fixture.two, manifest).await.unwrap(),
        checkpoint(7).0.into_bytes()
    );
    assert_eq!(fetch(&fixture.two, file).await.unwrap(), checkpoint(7).1);
    assert_eq!(fetch(&fixture.two, fixture.data[1]).await.unwrap(), b"hers two");
    assert_eq!(fetch(&fixture.one, file).await.unwrap_err().code(), Code::NotFound);
    // A file that the next checkpoint contains, too, need not be uploaded again.
    assert_eq!(has(&fixture.two, &[file]).await, [true]);
    assert_eq!(
        fixture.idle.commit(&held_attempt(&work), manifest, 8).await,
        Verdict::Accepted
    );
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submitter_may_only_reference_their_own_uploads() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let anna = client_with_role(&coordinator, "anna", "submitter").await;
    let ben = client_with_role(&coordinator, "ben", "submitter").await;
    let (hers, files) = put_data_set(&anna, "hers").await;
    let (absent, contents) = data_set("nobody's");
    submit_with(&anna, &hers).await.unwrap();
    assert_eq!(has(&anna, &files).await, [true; 3]);

    // Ben knows every hash, and does not learn whether the blobs are in storage.
    assert_eq!(has(&ben, &files).await, [false; 3]);
    let errors = [
        submit_with(&ben, &hers).await.unwrap_err(),
        submit_with(&ben, &absent).await.unwrap_err(),
    ];
    for (error, snapshot) in errors.iter().zip([&hers, &absent]) {
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(
            error.message().contains("is not in storage; upload it first"),
            "{error}"
        );
        let refused = wait_for_refusal(&coordinator, "job.submit", "ben", snapshot.id()).await;
        assert_eq!(refused.detail, "an input that this user has not sent");
    }
    // A snapshot of his own that lists her file does not help.
    let stolen = SnapshotFile {
        path: "stolen".into(),
        bytes: 8,
        sha256: files[0],
    };
    let own = Snapshot::new(vec![stolen], false).unwrap();
    put(&blobs(&ben), &own.to_bytes()).await;
    let error = submit_with(&ben, &own).await.unwrap_err();
    assert!(error.message().contains("a file of the snapshot"), "{error}");
    wait_for_refusal(&coordinator, "job.submit", "ben", files[0]).await;
    let all = audit_log(&coordinator.clients).await;
    assert!(all.iter().all(|line| line.who != "anna" || line.done), "{all:?}");

    // A user who uploads the same content may use it, and it is stored once.
    let before = collect(&coordinator.clients, true).await.blobs;
    put_data_set(&ben, "hers").await;
    assert_eq!(collect(&coordinator.clients, true).await.blobs, before);
    submit_with(&ben, &hers).await.unwrap();
    submit_with(&ben, &own).await.unwrap();
    put(&blobs(&ben), &contents[0]).await;
    // A worker with the same name as a user has no access to the user's uploads.
    let machine = client_with_role(&coordinator, "ben", "worker").await;
    assert_eq!(has(&machine, &files).await, [false; 3]);
    // Operators have access to everything.
    let olga = client_with_role(&coordinator, "olga", "operator").await;
    submit_with(&olga, &hers).await.unwrap();

    // Uploads stay known after a restart.
    let (secret, _) = create_token(&coordinator.clients, "ben", "submitter", None).await;
    let coordinator = coordinator.restart().await;
    let ben = connect(&coordinator.running.url(), &secret, None).await.unwrap();
    assert_eq!(has(&ben, &files).await, [true; 3]);
    submit(&ben, "again").await.unwrap();
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_blobs_have_to_be_uploaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Config {
        retention: Retention {
            every: None,
            grace: Duration::ZERO,
            ..Retention::default()
        },
        ..config(dir.path(), LONG_LEASE)
    };
    let running = start(settings).await.unwrap();
    let admin = connect(&running.url(), &running.token, None).await.unwrap();
    let (secret, _) = create_token(&admin, "anna", "submitter", None).await;
    let anna = connect(&running.url(), &secret, None).await.unwrap();
    let (snapshot, files) = put_data_set(&anna, "hers").await;
    assert_eq!(collect(&admin, false).await.removed, 3);
    assert_eq!(has(&anna, &files).await, [false; 3]);
    put_data_set(&admin, "hers").await;
    // Another user's upload does not make them available to her.
    assert_eq!(has(&anna, &files).await, [false; 3]);
    put_data_set(&anna, "hers").await;
    submit_with(&anna, &snapshot).await.unwrap();
    within(running.shutdown()).await;
}
