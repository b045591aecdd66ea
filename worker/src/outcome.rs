//! Failed outcomes that several modules of the worker report.

use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::fsutil::FsError;
use aitk_common::storage::StorageError;

/// A failure because of a fault in aitk.
pub(crate) fn internal_failure(message: String) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Internal,
        message,
    }
}

/// A failure because of a file on this machine.
pub(crate) fn file_failure(error: &FsError) -> Outcome {
    let cause = if error.is_disk_full() {
        FailureCause::DiskFull
    } else {
        FailureCause::Machine
    };
    Outcome::Failed {
        cause,
        message: error.to_string(),
    }
}

/// A failure because of object storage.
pub(crate) fn storage_failure(what: &str, error: &StorageError) -> Outcome {
    let cause = if error.is_disk_full() {
        FailureCause::DiskFull
    } else {
        FailureCause::Storage
    };
    Outcome::Failed {
        cause,
        message: format!("{what}: {error}"),
    }
}
