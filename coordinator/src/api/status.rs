//! Converts errors to gRPC statuses.

use crate::access::AccessError;
use crate::blob_access::BlobAccessError;
use crate::scheduler_task::SchedulerStopped;
use crate::store::StoreError;
use aitk_common::error_chain::error_chain;
use aitk_common::fsutil::FsError;
use aitk_common::storage::StorageError;
use aitk_proto::{RETRY_HEADER, RETRY_LATER, RETRY_NEVER, STORAGE_FULL, STORAGE_HEADER, STORAGE_REFUSED};
use aitk_scheduler::Refusal;
use std::io;
use std::path::Path;
use tonic::Status;
use tonic::metadata::MetadataValue;

impl From<SchedulerStopped> for Status {
    fn from(stopped: SchedulerStopped) -> Self {
        Self::unavailable(stopped.to_string())
    }
}

impl From<BlobAccessError> for Status {
    fn from(error: BlobAccessError) -> Self {
        match error {
            BlobAccessError::Stopped(stopped) => stopped.into(),
            BlobAccessError::Store(error) => store_status(&error),
            BlobAccessError::Storage(error) => storage_status(&error),
        }
    }
}

/// Status of a refused request.
pub(crate) fn refusal_status(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::NotFound(_) | Refusal::UnknownWorker(_) => Status::not_found(refusal.to_string()),
        Refusal::Ambiguous { .. } | Refusal::DuplicateName { .. } => Status::invalid_argument(refusal.to_string()),
        Refusal::Conflict(_) => Status::aborted(refusal.to_string()),
        Refusal::LimitExceeded(_) => Status::resource_exhausted(refusal.to_string()),
        Refusal::DatabaseFull(_) => storage_full_status(refusal.to_string()),
    }
}

/// Status that ends a stream when its caller's token is revoked or expires.
pub(crate) fn token_ended_status() -> Status {
    Status::unauthenticated(
        "your token or certificate was revoked, or has expired; ask an administrator for another one",
    )
}

pub(crate) fn access_status(error: &AccessError) -> Status {
    match error {
        AccessError::NoToken(_) | AccessError::NoWorker(_) => Status::not_found(error.to_string()),
        AccessError::NotYours(_) | AccessError::TooManyWorkers { .. } => Status::permission_denied(error.to_string()),
        AccessError::Record(_) => Status::internal(error.to_string()),
        AccessError::Store(error) => store_status(error),
    }
}

/// Status of a store error. The details are logged and not sent to the caller.
pub(crate) fn store_status(error: &StoreError) -> Status {
    tracing::error!(error = %error_chain(error), "the store failed");
    if error.is_full() {
        let text = "the disk of the coordinator's database is full, so nothing can be changed now; try again when there is room";
        return storage_full_status(text.into());
    }
    Status::unavailable("the coordinator's database does not answer; its log says why")
}

/// Status for a full disk: marked with a header, so that clients wait and retry.
pub(crate) fn storage_full_status(text: String) -> Status {
    let mut status = Status::resource_exhausted(text);
    status
        .metadata_mut()
        .insert(STORAGE_HEADER, MetadataValue::from_static(STORAGE_FULL));
    status
}

/// Status for a storage or a disk that the coordinator cannot use until somebody mends it: marked with a header, so that clients neither
/// repeat the call at once nor take it for a refusal of what they sent. Clients of older versions take it for an outage.
pub(crate) fn storage_refused_status(text: String) -> Status {
    let mut status = Status::unavailable(text);
    status
        .metadata_mut()
        .insert(STORAGE_HEADER, MetadataValue::from_static(STORAGE_REFUSED));
    status
}

/// Status of an error in a folder on the coordinator's own disk. `action` is what the coordinator did there, as a verb phrase.
pub(super) fn local_disk_status(action: &'static str, folder: &Path, error: io::Error) -> Status {
    storage_status(&FsError::new(action, folder, error).into())
}

/// Status for a call that came at a bad moment: marked with a header, so that a worker does not take it for the refusal of what it sent.
pub(super) fn busy_status(text: String) -> Status {
    let mut status = Status::resource_exhausted(text);
    status
        .metadata_mut()
        .insert(RETRY_HEADER, MetadataValue::from_static(RETRY_LATER));
    status
}

/// Status of a storage error.
pub(crate) fn storage_status(error: &StorageError) -> Status {
    let text = error_chain(error);
    match error {
        StorageError::Full { .. } => storage_full_status(text),
        StorageError::Local(error) if error.is_disk_full() => {
            storage_full_status(format!("on the coordinator: {text}"))
        }
        StorageError::NotFound { .. } => Status::not_found(text),
        StorageError::Corrupt { .. } => Status::data_loss(text),
        StorageError::TooLarge { .. } => Status::invalid_argument(text),
        StorageError::Unavailable { .. } => Status::unavailable(text),
        StorageError::Denied { .. } | StorageError::CoordinatorRefused { .. } => storage_refused_status(text),
        StorageError::Local(_) => storage_refused_status(format!(
            "the coordinator's disk failed: {text}. The person who runs the coordinator has to check that folder and its disk"
        )),
        StorageError::Unsupported { .. } => Status::unimplemented(text),
        // Without the header, a worker takes `internal` for an outage, which never counts against a job: it would be tried again for ever.
        StorageError::Unauthenticated { .. }
        | StorageError::Address { .. }
        | StorageError::Name(_)
        | StorageError::Malformed { .. }
        | StorageError::Failed { .. } => permanent_status(text),
    }
}

/// Status for an error that the same call will have again: marked with a header, so that clients do not retry.
fn permanent_status(text: String) -> Status {
    let mut status = Status::internal(text);
    status
        .metadata_mut()
        .insert(RETRY_HEADER, MetadataValue::from_static(RETRY_NEVER));
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permanent_error_of_the_storage_is_marked_and_an_outage_is_not() {
        let (what, message) = ("store a blob", "400 Bad Request".to_owned());
        let failed = storage_status(&StorageError::Failed {
            what,
            message: message.clone(),
        });
        assert_eq!(failed.code(), tonic::Code::Internal);
        assert_eq!(failed.metadata().get(RETRY_HEADER).unwrap(), RETRY_NEVER);
        let unavailable = storage_status(&StorageError::Unavailable {
            what,
            after: std::time::Duration::from_secs(9),
            message,
        });
        assert_eq!(unavailable.code(), tonic::Code::Unavailable);
        assert!(!unavailable.metadata().contains_key(RETRY_HEADER));
    }

    #[test]
    fn an_error_of_the_coordinators_disk_says_what_failed_where_and_that_it_may_end() {
        let folder = Path::new("/srv/aitk/transit");
        let full = local_disk_status(
            "write a blob in",
            folder,
            io::Error::from_raw_os_error(nix::libc::ENOSPC),
        );
        assert_eq!(full.code(), tonic::Code::ResourceExhausted);
        assert_eq!(full.metadata().get(STORAGE_HEADER).unwrap(), STORAGE_FULL);
        for part in [
            "on the coordinator: disk full: could not write a blob in /srv/aitk/transit; free some space there",
            "No space left on device",
        ] {
            assert!(full.message().contains(part), "{part}: {}", full.message());
        }
        let failed = local_disk_status("write a blob in", folder, io::Error::from_raw_os_error(nix::libc::EIO));
        assert_eq!(failed.code(), tonic::Code::Unavailable);
        assert_eq!(failed.metadata().get(STORAGE_HEADER).unwrap(), STORAGE_REFUSED);
        for part in [
            "write a blob in /srv/aitk/transit",
            "Input/output error",
            "check that folder",
        ] {
            assert!(failed.message().contains(part), "{part}: {}", failed.message());
        }
    }

    #[test]
    fn a_storage_that_refuses_the_coordinator_does_not_refuse_the_caller() {
        let denied = storage_status(&StorageError::Denied {
            what: "store a blob",
            message: "403 Forbidden".to_owned(),
        });
        assert_eq!(denied.code(), tonic::Code::Unavailable);
        assert_eq!(denied.metadata().get(STORAGE_HEADER).unwrap(), STORAGE_REFUSED);
    }
}
