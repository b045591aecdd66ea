//! Invalid and malicious input to a real coordinator process, whose memory and open files are measured from outside.

mod arrays;
mod garbage_bytes;
mod jobs;
mod limits;
mod message_sizes;
mod messages;
mod slow_connections;

use crate::support::daemon::Daemon;
use crate::support::{FakeWorker, held_attempt, input, job_json, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{JobState, JobView, Verdict};
use aitk_common::storage::BlobStore;
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_tests::processes::free_address;
use std::net::SocketAddr;

/// A seeded random number generator (SplitMix64, by Sebastiano Vigna).
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

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }
}

/// A coordinator process with a metrics listener.
struct TestServer {
    daemon: Daemon,
    metrics: SocketAddr,
    folder: tempfile::TempDir,
}

impl TestServer {
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
            folder,
        }
    }

    /// Resident memory in bytes; `None` without `/proc`.
    fn resident_memory(&self) -> Option<u64> {
        self.proc_status("VmRSS:")
    }

    /// Peak resident memory in bytes; `None` without `/proc`.
    fn peak_memory(&self) -> Option<u64> {
        self.proc_status("VmHWM:")
    }

    fn proc_status(&self, name: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib << 10)
    }

    /// Number of open files; `None` without `/proc`.
    fn open_files(&self) -> Option<usize> {
        Some(
            std::fs::read_dir(format!("/proc/{}/fd", self.daemon.id()))
                .ok()?
                .count(),
        )
    }

    /// Number of established connections to the coordinator's port; `None` without `/proc`.
    fn established_connections(&self) -> Option<usize> {
        const ESTABLISHED: &str = "01";
        let local = format!("0100007F:{:04X}", self.daemon.address().port());
        let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
        let rows = table.lines().filter(|row| {
            let mut columns = row.split_whitespace().skip(1);
            columns.next() == Some(&local) && columns.nth(1) == Some(ESTABLISHED)
        });
        Some(rows.count())
    }

    /// Fails if resident memory grew by more than `limit` bytes since `before`.
    fn assert_memory_growth(&self, before: Option<u64>, limit: u64) {
        if let (Some(before), Some(now)) = (before, self.resident_memory()) {
            assert!(
                now <= before + limit,
                "resident memory grew from {before} to {now} bytes; at most {limit} more are allowed"
            );
        }
    }

    /// Connects a user who may submit and has uploaded the input of the test jobs.
    async fn submitter(&self, name: &str) -> Clients {
        let (secret, _) = crate::access::create_token(&self.daemon.clients().await, name, "submitter", None).await;
        let clients = connect(&self.daemon.url(), &secret, None).await.unwrap();
        crate::access::put_input(&clients).await;
        clients
    }

    /// Runs one job from submission to completion, and checks that the log contains no panic.
    async fn assert_works(&self) {
        let clients = self.daemon.clients().await;
        // First in the queue, and only this test's worker has the label.
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
        let work = worker.next_assignment().await;
        assert_eq!(work.job.as_str(), job);
        worker.heartbeat(&[held_attempt(&work)]).await;
        assert_eq!(
            worker.finish(&held_attempt(&work), Outcome::Completed).await,
            Verdict::Accepted
        );
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
