//! Uploads, submissions and commits race with one collection after another, none of them granting any grace: on a folder
//! and on S3. Who uploads may be told that something is missing, and then sends it again; but what was accepted has
//! everything that it names, to the end.

use crate::support::blobs::{collect, data_set, put, wants};
use crate::support::daemon::Daemon;
use crate::support::{FakeWorker, held, put_checkpoint, within};
use aitk_common::control::Verdict;
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

/// Ends a race that hangs.
const RACE: Duration = Duration::from_secs(300);
/// Without a grace period a blob lives until the next collection, so on a slow machine an upload may never fit between
/// two of them. Whoever was beaten so often has the next try for itself; that one must succeed.
const BEATEN: u32 = 3;

/// Everybody who takes part.
#[derive(Clone)]
struct Race {
    clients: Clients,
    /// The way to the storage that a worker with keys of a bucket has.
    direct: ObjectBlobs,
    /// A collection holds it alone, a try that must not be beaten holds it with others.
    calm: Arc<RwLock<()>>,
    removed: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Race {
    async fn collect(&self) {
        let _alone = self.calm.write().await;
        let removed = collect(&self.clients, false).await.removed;
        self.removed.fetch_add(removed, Ordering::Relaxed);
    }

    /// One collection after the other, until the race is over.
    fn collecting(&self) -> JoinHandle<()> {
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

    /// No collections, when it is time for that.
    async fn calm(&self, beaten: u32) -> Option<RwLockReadGuard<'_, ()>> {
        assert!(beaten <= BEATEN, "refused, although nothing was removed meanwhile");
        if beaten == BEATEN {
            return Some(self.calm.read().await);
        }
        None
    }

    /// Sends what is missing of a data set, and a job that names it, until that is accepted.
    async fn submit(&self, blobs: &dyn BlobStore, name: &str, tag: &str) -> (String, Snapshot) {
        let (snapshot, contents) = data_set(tag);
        let list = snapshot.to_bytes();
        for beaten in 0.. {
            let _calm = self.calm(beaten).await;
            for content in contents.iter().map(Vec::as_slice).chain([list.as_slice()]) {
                let hash = ContentHash::of(content);
                if !within(blobs.has(&[hash])).await.unwrap()[0] {
                    put(blobs, content).await;
                }
            }
            match within(self.clients.jobs.clone().submit(wants(name, &snapshot))).await {
                Ok(reply) => return (reply.into_inner().job_id, snapshot),
                Err(status) => assert_eq!(status.code(), Code::FailedPrecondition, "{status}"),
            }
        }
        unreachable!("a try without collections is accepted or fails the test")
    }

    /// One who submits a dozen jobs. What it reads repeats, so that "it is there already" is often the answer. Some of
    /// the jobs end again and are forgotten: what only they read is garbage, also while it is sent again.
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

    async fn complete(&self, jobs: &[(String, Snapshot)]) {
        for (id, snapshot) in jobs {
            let files = gc::snapshot_files(&self.direct, snapshot.id()).await.unwrap();
            let there = self.direct.has(&files).await.unwrap();
            assert!(there.into_iter().all(|there| there), "{id} lost a file");
        }
    }

    /// A worker with its own access to the storage commits one checkpoint after the other, the same ones again and again:
    /// what was accepted can be fetched.
    async fn commits(&self) {
        let mut worker = FakeWorker::register(&self.clients, FakeWorker::registration("w", None, Vec::new())).await;
        let work = worker.assigned().await;
        for step in 1..=20 {
            for beaten in 0.. {
                let _calm = self.calm(beaten).await;
                let manifest = put_checkpoint(&self.direct, step % 4).await;
                worker.beat(&[held(&work)]).await;
                match worker.commit(&held(&work), manifest, step).await {
                    Verdict::Accepted => {
                        let manifest = checkpoints::manifest(&self.direct, manifest).await.unwrap();
                        let files: Vec<_> = manifest.files.iter().map(|file| file.sha256).collect();
                        let there = self.direct.has(&files).await.unwrap();
                        assert!(there.into_iter().all(|there| there), "step {step} lost a file");
                        break;
                    }
                    verdict => assert_eq!(verdict, Verdict::Refused, "removed before it was named"),
                }
            }
        }
    }
}

async fn race(daemon: &Daemon, direct: ObjectBlobs) {
    let race = Race {
        clients: daemon.clients().await,
        direct,
        calm: Arc::default(),
        removed: Arc::default(),
        over: Arc::default(),
    };
    let collecting = race.collecting();
    let uploaders: Vec<_> = (0..3)
        .map(|uploader| tokio::spawn(race.clone().upload(uploader)))
        .collect();
    let mut kept = Vec::new();
    for uploader in uploaders {
        let uploaded = tokio::time::timeout(RACE, uploader).await;
        kept.extend(uploaded.expect("everybody gets through").unwrap());
    }
    race.complete(&kept).await;
    tokio::time::timeout(RACE, race.commits())
        .await
        .expect("every checkpoint gets through");
    race.complete(&kept).await;
    race.end(collecting).await;
    assert!(
        race.removed.load(Ordering::Relaxed) > 0,
        "there was nothing to race with"
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
