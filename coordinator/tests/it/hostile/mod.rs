//! Whoever speaks to a coordinator says anything: a real process, its memory and its files watched from outside.

mod arrays;
mod bytes;
mod jobs;
mod messages;
mod queue;
mod silence;
mod sizes;

use crate::support::daemon::Daemon;
use crate::support::{FakeWorker, held, input, job_json, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control::{JobState, JobView, Verdict};
use aitk_common::storage::BlobStore;
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_tests::processes::free_address;
use std::net::SocketAddr;

/// Numbers that a seed decides (SplitMix64, by Sebastiano Vigna).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn bytes(&mut self, count: u64) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize].clone()
    }
}

/// A coordinator that also tells its metrics.
struct Besieged {
    daemon: Daemon,
    metrics: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Besieged {
    async fn start() -> Self {
        Self::start_with(&[]).await
    }

    async fn start_with(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let metrics = free_address();
        let metrics_address = metrics.to_string();
        let mut all = vec!["--metrics-bind", metrics_address.as_str()];
        all.extend(arguments);
        let daemon = Daemon::start(folder.path(), &all, &[]).await;
        let clients = daemon.clients().await;
        let blobs = RemoteBlobs::new(&clients);
        within(blobs.put_bytes(input().id(), input().to_bytes().into()))
            .await
            .unwrap();
        Self {
            daemon,
            metrics,
            _folder: folder,
        }
    }

    /// Bytes of memory in use; none where the kernel does not say.
    fn memory(&self) -> Option<u64> {
        self.status("VmRSS:")
    }

    /// The most memory that was ever in use.
    fn peak_memory(&self) -> Option<u64> {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib << 10)
    }

    /// Files that are open; none where the kernel does not say.
    fn files(&self) -> Option<usize> {
        Some(
            std::fs::read_dir(format!("/proc/{}/fd", self.daemon.id()))
                .ok()?
                .count(),
        )
    }

    /// Connections to the coordinator's port that both sides have open; none where the kernel does not say.
    fn connections(&self) -> Option<usize> {
        const ESTABLISHED: &str = "01";
        let local = format!("0100007F:{:04X}", self.daemon.address().port());
        let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
        let rows = table.lines().filter(|row| {
            let mut columns = row.split_whitespace().skip(1);
            columns.next() == Some(&local) && columns.nth(1) == Some(ESTABLISHED)
        });
        Some(rows.count())
    }

    fn has_not_grown(&self, before: Option<u64>, by: u64) {
        if let (Some(before), Some(now)) = (before, self.memory()) {
            assert!(now <= before + by, "{before} bytes grew to {now}");
        }
    }

    /// A user who may submit, and has sent what every job of these tests reads.
    async fn submitter(&self, name: &str) -> Clients {
        let (secret, _) = crate::access::token(&self.daemon.clients().await, name, "submitter", None).await;
        let clients = connect(&self.daemon.url(), &secret, None).await.unwrap();
        crate::access::put_input(&clients).await;
        clients
    }

    /// A job goes the whole way, and nothing has panicked.
    async fn works(&self) {
        let clients = self.daemon.clients().await;
        // Alone in front of the queue.
        let request = v1::SubmitRequest {
            job_json: job_json("proof", r#""priority":1000,"labels":{"proof":"yes"}"#),
            ..v1::SubmitRequest::from(submission("proof"))
        };
        let job = within(clients.jobs.clone().submit(request))
            .await
            .unwrap()
            .into_inner()
            .job_id;
        let mut registration = FakeWorker::registration("proof", None, Vec::new());
        registration.labels.insert("proof".into(), "yes".into());
        let mut worker = FakeWorker::register(&clients, registration).await;
        let work = worker.assigned().await;
        assert_eq!(work.job.as_str(), job);
        worker.beat(&[held(&work)]).await;
        assert_eq!(worker.finish(&held(&work), Outcome::Completed).await, Verdict::Accepted);
        assert_eq!(view(&clients, &job).await.state, JobState::Completed);
        let log = self.daemon.log();
        assert!(!log.contains("panicked"), "{log}");
    }
}

async fn view(clients: &Clients, job: &str) -> JobView {
    let request = v1::GetJobRequest { job_id: job.into() };
    let view = within(clients.jobs.clone().get(request)).await.unwrap().into_inner();
    view.try_into().unwrap()
}
