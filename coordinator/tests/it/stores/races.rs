//! Uploads, submissions and commits race with continuous garbage collections without a grace period, on a folder and on S3.
//! An uploader may be told that a blob is missing, and then uploads it again. But everything that an accepted request
//! references stays in storage to the end.

use crate::support::daemon::Daemon;
use crate::support::data_sets::{collect, data_set, put, submission_with};
use crate::support::{FakeWorker, held_attempt, put_checkpoint, within};
use aitk_common::control_plane::Verdict;
use aitk_common::hash::ContentHash;
use aitk_common::storage::snapshot::Snapshot;
use aitk_common::storage::{BlobStore, ObjectBlobs, Options, checkpoints, gc};
use aitk_proto::client::Clients;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{RwLock, RwLockReadGuard};
use tokio::task::JoinHandle;
use tonic::Code;

/// Longer than any race takes.
const RACE_TIMEOUT: Duration = Duration::from_secs(300);
/// Without a grace period a blob lives until the next collection, so on a slow machine an upload may never fit between two
/// of them. After this many refusals the next attempt runs without collections, and must succeed.
const MAX_REFUSALS: u32 = 3;

/// What all participants share.
#[derive(Clone)]
struct Race {
    clients: Clients,
    /// Direct access to the storage, as of a worker with the bucket's keys.
    direct: ObjectBlobs,
    /// A collection locks it for writing, an attempt that must succeed for reading.
    collection_lock: Arc<RwLock<()>>,
    removed: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Race {
    async fn collect(&self) {
        let _alone = self.collection_lock.write().await;
        let removed = collect(&self.clients, false).await.removed;
        self.removed.fetch_add(removed, Ordering::Relaxed);
    }

    /// Runs one collection after another until the race is over.
    fn start_collecting(&self) -> JoinHandle<()> {
        self.over.store(false, Ordering::Relaxed);
        let race = self.clone();
        tokio::spawn(async move {
            while !race.over.load(Ordering::Relaxed) {
                race.collect().await;
            }
        })
    }

    async fn end(&self, collecting: JoinHandle<()>) {
        self.over.store(true, Ordering::Relaxed);
        within(collecting).await.unwrap();
    }

    /// Blocks collections after [`MAX_REFUSALS`] refusals.
    async fn block_collections(&self, refusals: u32) -> Option<RwLockReadGuard<'_, ()>> {
        assert!(
            refusals <= MAX_REFUSALS,
            "refused, although nothing was removed meanwhile"
        );
        if refusals == MAX_REFUSALS {
            return Some(self.collection_lock.read().await);
        }
        None
    }

    /// Uploads the missing blobs of a data set and submits a job that reads it, until the job is accepted.
    async fn submit(&self, blobs: &dyn BlobStore, name: &str, tag: &str) -> (String, Snapshot) {
        let (snapshot, contents) = data_set(tag);
        let list = snapshot.to_bytes();
        for refusals in 0.. {
            let _blocked = self.block_collections(refusals).await;
            for content in contents.iter().map(Vec::as_slice).chain([list.as_slice()]) {
                let hash = ContentHash::of(content);
                if !within(blobs.has(&[hash])).await.unwrap()[0] {
                    put(blobs, content).await;
                }
            }
            match within(self.clients.jobs.clone().submit(submission_with(name, &snapshot))).await {
                Ok(reply) => return (reply.into_inner().job_id, snapshot),
                Err(status) => assert_eq!(status.code(), Code::FailedPrecondition, "{status}"),
            }
        }
        unreachable!("an attempt without collections is accepted or fails the test")
    }

    /// Submits a dozen jobs. Their data sets repeat, so blobs are often in storage already. Some of the jobs are stopped and
    /// removed: their data sets become garbage, possibly while they are uploaded again. Returns the other jobs.
    async fn upload(self, uploader: usize) -> Vec<(String, Snapshot)> {
        let through = RemoteBlobs::new(&self.clients);
        let blobs: &dyn BlobStore = if uploader == 0 { &self.direct } else { &through };
        let mut kept = Vec::new();
        for number in 0..12 {
            let name = format!("race-{uploader}-{number}");
            let (job_id, snapshot) = self.submit(blobs, &name, &format!("{uploader} {}", number % 5)).await;
            if number % 5 < 2 {
                let request = v1::StopJobRequest { job_id, now: true };
                within(self.clients.jobs.clone().stop(request)).await.unwrap();
                self.collect().await;
            } else {
                kept.push((job_id, snapshot));
            }
        }
        kept
    }

    async fn assert_complete(&self, jobs: &[(String, Snapshot)]) {
        for (id, snapshot) in jobs {
            let files = gc::snapshot_files(&self.direct, snapshot.id()).await.unwrap();
            let there = self.direct.has(&files).await.unwrap();
            assert!(there.into_iter().all(|there| there), "{id} lost a file");
        }
    }

    /// A worker with direct access to the storage commits checkpoints with repeating content. Every accepted checkpoint can be
    /// fetched.
    async fn commit_checkpoints(&self) {
        let mut worker = FakeWorker::register(&self.clients, FakeWorker::registration("w", None, Vec::new())).await;
        let work = worker.next_assignment().await;
        for step in 1..=20 {
            for refusals in 0.. {
                let _blocked = self.block_collections(refusals).await;
                let manifest = put_checkpoint(&self.direct, step % 4).await;
                worker.heartbeat(&[held_attempt(&work)]).await;
                match worker.commit(&held_attempt(&work), manifest, step).await {
                    Verdict::Accepted => {
                        let manifest = checkpoints::manifest(&self.direct, manifest).await.unwrap();
                        let files: Vec<_> = manifest.files.iter().map(|file| file.sha256).collect();
                        let there = self.direct.has(&files).await.unwrap();
                        assert!(there.into_iter().all(|there| there), "step {step} lost a file");
                        break;
                    }
                    verdict => assert_eq!(
                        verdict,
                        Verdict::Refused,
                        "the checkpoint was removed before the commit"
                    ),
                }
            }
        }
    }
}

async fn race(daemon: &Daemon, direct: ObjectBlobs) {
    let race = Race {
        clients: daemon.clients().await,
        direct,
        collection_lock: Arc::default(),
        removed: Arc::default(),
        over: Arc::default(),
    };
    let collecting = race.start_collecting();
    let uploaders: Vec<_> = (0..3)
        .map(|uploader| tokio::spawn(race.clone().upload(uploader)))
        .collect();
    let mut kept = Vec::new();
    for uploader in uploaders {
        let uploaded = tokio::time::timeout(RACE_TIMEOUT, uploader).await;
        kept.extend(uploaded.expect("every uploader finishes").unwrap());
    }
    race.assert_complete(&kept).await;
    tokio::time::timeout(RACE_TIMEOUT, race.commit_checkpoints())
        .await
        .expect("every checkpoint is committed");
    race.assert_complete(&kept).await;
    race.end(collecting).await;
    assert!(
        race.removed.load(Ordering::Relaxed) > 0,
        "no collection removed anything, so there was no race"
    );
}

const ARGUMENTS: [&str; 6] = ["--gc-minutes", "0", "--gc-grace-hours", "0", "--keep-jobs-days", "0"];

#[tokio::test(flavor = "multi_thread")]
async fn collections_race_with_uploads_on_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), &ARGUMENTS, &[]).await;
    let direct = ObjectBlobs::open(folder.path().join("storage").to_str().unwrap()).unwrap();
    race(&daemon, direct).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn collections_race_with_uploads_on_s3() {
    let Some(server) = crate::s3::Server::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        ("AWS_ENDPOINT_URL", "aws_endpoint", server.endpoint()),
        ("AWS_ACCESS_KEY_ID", "aws_access_key_id", crate::s3::KEY.to_owned()),
        (
            "AWS_SECRET_ACCESS_KEY",
            "aws_secret_access_key",
            crate::s3::SECRET.to_owned(),
        ),
        ("AWS_REGION", "aws_region", "us-east-1".to_owned()),
    ];
    let environment = settings.each_ref().map(|(name, _, value)| (*name, value.as_str()));
    let mut options = Options::default();
    for (_, setting, value) in &settings {
        options.settings.insert((*setting).to_owned(), value.clone());
    }
    let arguments = [&ARGUMENTS[..], &["--storage", "s3://bucket/pool"]].concat();
    let daemon = Daemon::start(folder.path(), &arguments, &environment).await;
    race(&daemon, ObjectBlobs::open_with("s3://bucket/pool", &options).unwrap()).await;
}
