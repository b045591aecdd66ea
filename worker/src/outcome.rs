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
    Outcome::Failed {
        cause: file_cause(error),
        message: error.to_string(),
    }
}

fn file_cause(error: &FsError) -> FailureCause {
    if error.is_disk_full() {
        FailureCause::DiskFull
    } else {
        FailureCause::Machine
    }
}

/// A failure because of object storage. The cause decides whether it counts: an outage ends by itself and does not count; neither does a
/// refusal of the coordinator, which every job meets; a refusal of this worker or of this content does, because the job would otherwise be
/// tried again for ever.
pub(crate) fn storage_failure(what: &str, error: &StorageError) -> Outcome {
    let cause = match error {
        StorageError::Local(error) => file_cause(error),
        StorageError::Unavailable { .. } | StorageError::Full { .. } | StorageError::CoordinatorRefused { .. } => {
            FailureCause::Storage
        }
        // The worker was refused and not the job. While that lasts, it gets no work.
        StorageError::Unauthenticated { .. } => FailureCause::Interrupted,
        StorageError::NotFound { .. }
        | StorageError::Corrupt { .. }
        | StorageError::TooLarge { .. }
        | StorageError::Denied { .. }
        | StorageError::Address { .. }
        | StorageError::Name(_)
        | StorageError::Malformed { .. }
        | StorageError::Unsupported { .. }
        | StorageError::Failed { .. } => FailureCause::StorageRefused,
    };
    Outcome::Failed {
        cause,
        message: format!("{what}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::hash::ContentHash;
    use std::io;
    use std::time::Duration;

    fn cause(error: &StorageError) -> FailureCause {
        match storage_failure("could not store the file a", error) {
            Outcome::Failed { cause, message } => {
                assert_eq!(message, format!("could not store the file a: {error}"));
                cause
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_refusal_of_the_storage_counts_and_an_outage_does_not() {
        let (what, message) = ("store a blob", "no".to_owned());
        let hash = ContentHash::of(b"a");
        let outages = [
            StorageError::Unavailable {
                what,
                after: Duration::from_secs(9),
                message: message.clone(),
            },
            StorageError::Full {
                what,
                message: message.clone(),
            },
            StorageError::CoordinatorRefused {
                what,
                message: message.clone(),
            },
        ];
        assert!(outages.iter().all(|error| cause(error) == FailureCause::Storage));
        let refusals = [
            StorageError::Denied {
                what,
                message: message.clone(),
            },
            StorageError::Failed {
                what,
                message: message.clone(),
            },
            StorageError::NotFound { hash },
            StorageError::Corrupt {
                what: "a".to_owned(),
                expected: hash,
                found: ContentHash::of(b"b"),
            },
        ];
        assert!(
            refusals
                .iter()
                .all(|error| cause(error) == FailureCause::StorageRefused)
        );
        let refused_worker = StorageError::Unauthenticated { what, message };
        assert_eq!(cause(&refused_worker), FailureCause::Interrupted);
        let local = |code| StorageError::from(FsError::new("read", "a", io::Error::from_raw_os_error(code)));
        assert_eq!(cause(&local(nix::libc::EIO)), FailureCause::Machine);
        assert_eq!(cause(&local(nix::libc::ENOSPC)), FailureCause::DiskFull);
    }
}
