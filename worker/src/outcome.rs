//! Failed outcomes that several modules of the worker report.

use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::fsutil::FsError;
use aitk_common::storage::StorageError;

/// An attempt that failed because of a fault in aitk.
pub(crate) fn internal(message: String) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Internal,
        message,
    }
}

pub(crate) fn local_failure(error: &FsError) -> Outcome {
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

/// How an attempt ends that storage let down.
pub(crate) fn failure(what: &str, error: &StorageError) -> Outcome {
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
