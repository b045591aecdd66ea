//! Uploads of data sets, and garbage collection.

use super::{submission, within};
use aitk_common::control_plane::Submission;
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobStore;
use aitk_common::storage::snapshot::{Snapshot, SnapshotFile};
use aitk_proto::client::Clients;
use aitk_proto::v1::{self, CollectGarbageReply, CollectGarbageRequest};
use std::collections::BTreeMap;
use std::time::Duration;
use tonic::Code;

/// Runs a garbage collection; waits while another one runs.
pub(crate) async fn collect(clients: &Clients, dry_run: bool) -> CollectGarbageReply {
    loop {
        match within(clients.admin.clone().collect_garbage(CollectGarbageRequest { dry_run })).await {
            Ok(reply) => return reply.into_inner(),
            // Another collection is running.
            Err(status) if status.code() == Code::Aborted => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(status) => panic!("{status}"),
        }
    }
}

/// A data set of two files: its snapshot and the files' contents.
pub(crate) fn data_set(tag: &str) -> (Snapshot, Vec<Vec<u8>>) {
    let contents = vec![format!("{tag} one").into_bytes(), format!("{tag} two").into_bytes()];
    let files = contents.iter().enumerate().map(|(number, content)| SnapshotFile {
        path: format!("{number}.txt"),
        bytes: content.len() as u64,
        sha256: ContentHash::of(content),
    });
    (Snapshot::new(files.collect(), false).unwrap(), contents)
}

/// A submission of a job that reads this snapshot.
pub(crate) fn submission_with(name: &str, snapshot: &Snapshot) -> v1::SubmitRequest {
    Submission {
        inputs: BTreeMap::from([("./data".to_owned(), snapshot.id())]),
        ..submission(name)
    }
    .into()
}

pub(crate) async fn put(blobs: &dyn BlobStore, bytes: &[u8]) -> ContentHash {
    let hash = ContentHash::of(bytes);
    within(blobs.put_bytes(hash, bytes.to_vec().into())).await.unwrap();
    hash
}
