//! Random uploads by several senders at once: complete, broken off, cancelled, continued, too long, with wrong content, sizes and offsets. A seed
//! decides all but the order in which calls of one step arrive. After each run the invariants of [`Run::check`] hold.
//!
//!     AITK_UPLOAD_SEED=7 AITK_UPLOAD_STEPS=1000 cargo test -p aitk-coordinator --test it random_uploads -- --nocapture

#![allow(clippy::print_stdout, reason = "the seed has to be known to repeat a run")]

use crate::access::create_token;
use crate::support::{FakeWorker, TIMEOUT, config, eventually, held_attempt, input, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobStore;
use aitk_coordinator::{Config, CoordinatorHandle, Limits, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_proto::v1::put_blob_request::Part;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

/// The most bytes of one user in the storage.
const LIMIT: u64 = 1 << 20;
/// The least size with which a blob counts.
const MIN_COUNTED_BYTES: u64 = 4 << 10;
/// The most uploads that are kept for one sender.
const MAX_KEPT_PER_SENDER: usize = 8;
/// Calls of one step.
const CONCURRENT: usize = 4;

/// Numbers that follow from a seed (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// What a call sends after its header.
#[derive(Debug)]
struct Call {
    header: v1::BlobHeader,
    parts: Vec<Part>,
    /// The sender cancels the call this long after the last part, without ending the stream.
    cancelled_after: Option<Duration>,
    /// The stream ends before the call is cancelled.
    ends_first: bool,
}

/// A random call about one of the contents. `received`: what the coordinator says has arrived.
fn random_call(random: &mut Random, content: &[u8], upload: &str, received: usize) -> Call {
    let length = content.len();
    let mut header = v1::BlobHeader {
        sha256: ContentHash::of(content).to_hex(),
        bytes: length as u64,
        offset: 0,
        upload: upload.to_owned(),
    };
    let (mut start, mut end) = (0, length);
    let (mut cancelled_after, mut ends_first) = (None, false);
    let mut more = Vec::new();
    match random.below(16) {
        0..4 => {}
        // Cut off, with the end of the stream or without.
        4 | 5 => end = random.below(length + 1),
        6 | 7 => {
            end = random.below(length + 1);
            cancelled_after = Some(Duration::from_micros(random.below(5000) as u64));
        }
        // Cancelled after all data, while the blob is being stored.
        8 | 9 => {
            cancelled_after = Some(Duration::from_micros(random.below(3000) as u64));
            ends_first = true;
        }
        10 | 11 => start = received.min(length),
        12 => {
            start = random.below(length + 1);
            header.offset = start as u64 + random.below(3) as u64;
            return call(header, content, start..end, more, cancelled_after, ends_first);
        }
        // A size that is wrong, or larger than any disk.
        13 => header.bytes = *random.pick(&[0, length as u64 + 1, length as u64 / 2, 1 << 62, u64::MAX]),
        14 => more.push(Part::Data(vec![1; random.below(2000)])),
        _ => match random.below(3) {
            0 => more.push(Part::Header(header.clone())),
            1 => header.sha256 = ContentHash::of(&random.next().to_be_bytes()).to_hex(),
            _ => header.upload = "x".repeat(60 + random.below(10)),
        },
    }
    header.offset = start as u64;
    call(header, content, start..end, more, cancelled_after, ends_first)
}

fn call(
    header: v1::BlobHeader,
    content: &[u8],
    range: std::ops::Range<usize>,
    more: Vec<Part>,
    cancelled_after: Option<Duration>,
    ends_first: bool,
) -> Call {
    let data = content[range].chunks(64 << 10).map(|data| Part::Data(data.to_vec()));
    Call {
        header,
        parts: data.chain(more).collect(),
        cancelled_after,
        ends_first,
    }
}

/// Makes a call. `None`: it was cancelled.
async fn make(clients: Clients, call: Call) -> Option<Result<v1::PutBlobReply, Status>> {
    let (sender, receiver) = mpsc::channel(64);
    let mut blobs = clients.blobs.clone();
    let answer = tokio::spawn(async move { blobs.put(ReceiverStream::new(receiver)).await });
    for part in std::iter::once(Part::Header(call.header)).chain(call.parts) {
        // The call may have ended with an error.
        if sender.send(v1::PutBlobRequest { part: Some(part) }).await.is_err() {
            break;
        }
    }
    if let Some(after) = call.cancelled_after {
        let held = (!call.ends_first).then_some(sender);
        tokio::time::sleep(after).await;
        answer.abort();
        drop(held);
        return None;
    }
    drop(sender);
    Some(within(answer).await.unwrap().map(tonic::Response::into_inner))
}

/// A sender, and the contents that were acknowledged to it.
struct Sender {
    name: &'static str,
    clients: Clients,
    acknowledged: BTreeSet<usize>,
}

struct Run {
    running: CoordinatorHandle,
    admin: Clients,
    senders: Vec<Sender>,
    contents: Vec<Vec<u8>>,
    random: Random,
}

impl Run {
    async fn start(dir: &Path, seed: u64) -> Self {
        let limits = Limits {
            stored_bytes: Some(LIMIT),
            ..Limits::default()
        };
        let running = start(Config {
            limits,
            disk_reserve: Some(0),
            ..config(dir, Duration::from_secs(600))
        })
        .await
        .unwrap();
        let admin = connect(&running.url(), &running.token, None).await.unwrap();
        let mut senders = Vec::new();
        for (name, role) in [("eve", "submitter"), ("ada", "submitter"), ("machine", "worker")] {
            let (token, _) = create_token(&admin, name, role, None).await;
            let clients = connect(&running.url(), &token, None).await.unwrap();
            senders.push(Sender {
                name,
                clients,
                acknowledged: BTreeSet::new(),
            });
        }
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let sizes = [0, 1, 4095, 70_000, 200_000, 200_001, 300_000, 400_000];
        let contents = sizes.into_iter().map(|size| {
            let mut content: Vec<u8> = (0..size).map(|at| (at ^ (at >> 8)) as u8).collect();
            content
                .iter_mut()
                .take(8)
                .zip(random.next().to_be_bytes())
                .for_each(|(to, from)| *to = from);
            content
        });
        let contents = contents.collect();
        Self {
            running,
            admin,
            senders,
            contents,
            random,
        }
    }

    /// One step: calls at the same time.
    async fn step(&mut self) {
        let mut calls = Vec::new();
        for _ in 0..CONCURRENT {
            let sender = self.random.below(self.senders.len());
            let content = self.random.below(self.contents.len());
            let upload = *self.random.pick(&["u1", "u2", ""]);
            let clients = self.senders[sender].clients.clone();
            let received = received(&clients, &self.contents[content], upload).await;
            let call = random_call(&mut self.random, &self.contents[content], upload, received);
            let said = format!("{} {:?}", self.senders[sender].name, call.header);
            // A hash that was changed is of another content.
            let is_content = call.header.sha256 == ContentHash::of(&self.contents[content]).to_hex();
            calls.push((
                sender,
                is_content.then_some(content),
                said,
                tokio::spawn(make(clients, call)),
            ));
        }
        for (sender, content, said, answer) in calls {
            match within(answer).await.unwrap() {
                Some(Ok(_)) => {
                    let content = content.unwrap_or_else(|| panic!("{said}: a content that nobody sent was accepted"));
                    self.senders[sender].acknowledged.insert(content);
                }
                Some(Err(status)) => assert!(is_expected(&status), "{said}: {status:?}"),
                None => {}
            }
        }
    }

    /// 1. Each acknowledged blob is stored as it was sent.
    /// 2. Each stored blob is counted for its senders, and none has more than its limit.
    /// 3. Of unfinished uploads only those are left that can be continued.
    /// 4. What is not used up can be uploaded, so nothing stays reserved.
    async fn check(mut self, dir: &Path) {
        let blobs = RemoteBlobs::with_budget(&self.admin, TIMEOUT);
        let mut acknowledged = BTreeSet::<usize>::new();
        for sender in &self.senders {
            acknowledged.extend(&sender.acknowledged);
        }
        for at in acknowledged {
            let content = &self.contents[at];
            let stored = within(blobs.get_bytes(ContentHash::of(content), 1 << 20))
                .await
                .unwrap();
            assert!(stored == *content, "{} bytes have another content", content.len());
        }
        let transit = dir.join("transit");
        let kept = eventually("calls that were cancelled to end", || async {
            let kept = std::fs::read_dir(&transit).unwrap().count();
            (kept <= MAX_KEPT_PER_SENDER * self.senders.len()).then_some(kept)
        })
        .await;
        // Blobs that are being stored for a cancelled call are recorded a moment later.
        let counted = eventually("each stored blob to be counted", || async {
            let counted = counted(dir).await;
            let known: BTreeSet<&String> = counted.values().flat_map(BTreeMap::keys).collect();
            let of_admin = ContentHash::of(&input().to_bytes()).to_hex();
            let stored = stored(dir);
            let uncounted: Vec<_> = stored
                .iter()
                .filter(|hash| !known.contains(hash) && **hash != of_admin)
                .collect();
            uncounted.is_empty().then_some(counted)
        })
        .await;
        for (who, blobs) in &counted {
            let sum: u64 = blobs.values().map(|bytes| *bytes.max(&MIN_COUNTED_BYTES)).sum();
            let is_worker = who.contains("machine");
            assert!(is_worker || sum <= LIMIT, "{who} has {sum} bytes");
        }
        println!(
            "{kept} unfinished uploads are kept; counted: {:?}",
            counted.values().map(BTreeMap::len).collect::<Vec<_>>()
        );
        for sender in self.senders.iter().filter(|sender| sender.name != "machine") {
            let of_sender = counted
                .iter()
                .find(|(who, _)| who.contains(sender.name))
                .map(|(_, blobs)| blobs);
            let used: u64 = of_sender.map_or(0, |blobs| {
                blobs.values().map(|bytes| *bytes.max(&MIN_COUNTED_BYTES)).sum()
            });
            let rest = usize::try_from(LIMIT - used).unwrap();
            if rest > MIN_COUNTED_BYTES as usize {
                let last = vec![self.random.next() as u8; rest];
                let store = RemoteBlobs::with_budget(&sender.clients, TIMEOUT);
                within(store.put_bytes(ContentHash::of(&last), last.into()))
                    .await
                    .unwrap();
            }
        }
        within(self.running.shutdown()).await;
    }
}

/// The errors that the calls of this test may have.
fn is_expected(status: &Status) -> bool {
    let codes = [
        Code::InvalidArgument,
        Code::OutOfRange,
        Code::DataLoss,
        Code::Aborted,
        Code::ResourceExhausted,
        Code::PermissionDenied,
    ];
    codes.contains(&status.code()) || status.message().contains("another call is storing this upload")
}

async fn received(clients: &Clients, content: &[u8], upload: &str) -> usize {
    let request = v1::HasRequest {
        sha256: vec![ContentHash::of(content).to_hex()],
        upload: upload.to_owned(),
    };
    let reply = within(clients.blobs.clone().has(request)).await.unwrap().into_inner();
    assert!(reply.received <= content.len() as u64 || reply.received <= 1 << 20);
    usize::try_from(reply.received).unwrap()
}

/// The blobs in the storage.
fn stored(dir: &Path) -> Vec<String> {
    let folders = std::fs::read_dir(dir.join("storage/blobs")).unwrap().flatten();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.path()).unwrap().flatten());
    let names = files.map(|file| file.file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with('.')).collect()
}

/// The recorded uploads by sender: hashes with sizes.
async fn counted(dir: &Path) -> BTreeMap<String, BTreeMap<String, u64>> {
    let file = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.join("aitk.db"));
    let database = sqlx::SqlitePool::connect_with(file).await.unwrap();
    let query = sqlx::query_as::<_, (String, String, i64)>("SELECT who, hash, bytes FROM uploads");
    let rows = query.fetch_all(&database).await.unwrap();
    database.close().await;
    let mut counted = BTreeMap::<String, BTreeMap<String, u64>>::new();
    for (who, hash, bytes) in rows {
        counted
            .entry(who)
            .or_default()
            .insert(hash, u64::try_from(bytes).unwrap());
    }
    counted
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .ok()
        .map_or(default, |text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn random_uploads_lose_nothing_and_are_counted() {
    let (seed, steps) = (number("AITK_UPLOAD_SEED", 1), number("AITK_UPLOAD_STEPS", 120));
    println!("AITK_UPLOAD_SEED={seed} AITK_UPLOAD_STEPS={steps}");
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::start(dir.path(), seed).await;
    let blobs = RemoteBlobs::with_budget(&run.admin, TIMEOUT);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    within(run.admin.jobs.clone().submit(v1::SubmitRequest::from(submission("a"))))
        .await
        .unwrap();
    // The worker may upload while it has an attempt: not at first, not at the end, and not after it was forgotten.
    for _ in 0..steps / 4 {
        run.step().await;
    }
    let machine = run.senders[2].clients.clone();
    let mut worker = FakeWorker::register(&machine, FakeWorker::registration("machine", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    for _ in 0..steps / 2 {
        run.step().await;
    }
    worker.finish(&held_attempt(&work), Outcome::Completed).await;
    drop(worker);
    for _ in 0..steps / 4 {
        run.step().await;
    }
    run.check(dir.path()).await;
}

/// Before, a blob whose call was cancelled while it was stored counted for nobody, so that a user could store more than the limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_cancelled_while_its_blob_is_stored_counts() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::start(dir.path(), 1).await;
    let eve = &run.senders[0].clients;
    for number in 0..40_u32 {
        let mut content = vec![7; 100_000];
        content[..4].copy_from_slice(&number.to_be_bytes());
        let header = v1::BlobHeader {
            sha256: ContentHash::of(&content).to_hex(),
            bytes: content.len() as u64,
            offset: 0,
            upload: String::new(),
        };
        // At another moment each time.
        let after = Some(Duration::from_micros(u64::from(number) * 100));
        let whole = 0..content.len();
        make(eve.clone(), call(header, &content, whole, Vec::new(), after, true)).await;
    }
    eventually("each stored blob to be counted", || async {
        let counted: usize = counted(dir.path()).await.values().map(BTreeMap::len).sum();
        (counted == stored(dir.path()).len() && std::fs::read_dir(dir.path().join("transit")).unwrap().count() == 0)
            .then_some(())
    })
    .await;
    let stored = stored(dir.path()).len();
    assert!(stored <= 10, "{stored} blobs of 100 kB with a limit of 1 MiB");
    within(run.running.shutdown()).await;
}
