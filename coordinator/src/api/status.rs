//! Which gRPC status an error becomes.

use crate::access::AccessError;
use crate::error_chain::error_chain;
use crate::runner::Gone;
use crate::scope::ScopeError;
use crate::store::StoreError;
use aitk_common::storage::StorageError;
use aitk_proto::STORAGE_HEADER;
use aitk_scheduler::Refusal;
use tonic::Status;
use tonic::metadata::MetadataValue;

impl From<Gone> for Status {
    fn from(gone: Gone) -> Self {
        Self::unavailable(gone.to_string())
    }
}

impl From<ScopeError> for Status {
    fn from(error: ScopeError) -> Self {
        match error {
            ScopeError::Gone(gone) => gone.into(),
            ScopeError::Store(error) => store_failed(&error),
            ScopeError::Storage(error) => storage_failed(&error),
        }
    }
}

/// The one place where refusals get their code.
pub(crate) fn refused(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::NotFound(_) | Refusal::NoWorker(_) => Status::not_found(refusal.to_string()),
        Refusal::Ambiguous { .. } | Refusal::SameName { .. } => Status::invalid_argument(refusal.to_string()),
        Refusal::Conflict(_) => Status::aborted(refusal.to_string()),
        Refusal::TooMuch(_) => Status::resource_exhausted(refusal.to_string()),
        Refusal::NoRoom(_) => storage_full(refusal.to_string()),
    }
}

/// What whoever has a stream open is told when their token is revoked or expires.
pub(crate) fn token_ended() -> Status {
    Status::unauthenticated(
        "your token or certificate was revoked, or has expired; ask an administrator for another one",
    )
}

pub(crate) fn access_failed(error: &AccessError) -> Status {
    match error {
        AccessError::NoToken(_) | AccessError::NoWorker(_) => Status::not_found(error.to_string()),
        AccessError::NotYours(_) | AccessError::TooManyWorkers { .. } => Status::permission_denied(error.to_string()),
        AccessError::Record(_) => Status::internal(error.to_string()),
        AccessError::Store(error) => store_failed(error),
    }
}

/// The caller hears that it is our trouble; the log hears which.
pub(crate) fn store_failed(error: &StoreError) -> Status {
    tracing::error!(error = %error_chain(error), "the store failed");
    if error.is_full() {
        let text = "the disk of the coordinator's database is full, so nothing can be changed now; try again when there is room";
        return storage_full(text.into());
    }
    Status::unavailable("the coordinator's database does not answer; its log says why")
}

/// No room for a blob: an error of its own kind, which whoever has something to store waits out.
pub(crate) fn storage_full(text: String) -> Status {
    let mut status = Status::resource_exhausted(text);
    status
        .metadata_mut()
        .insert(STORAGE_HEADER, MetadataValue::from_static("full"));
    status
}

/// The one place where storage errors get their code.
pub(crate) fn storage_failed(error: &StorageError) -> Status {
    let text = error_chain(error);
    match error {
        StorageError::Full { .. } => storage_full(text),
        StorageError::Local(error) if error.is_disk_full() => storage_full(text),
        StorageError::NotFound { .. } => Status::not_found(text),
        StorageError::Corrupt { .. } => Status::data_loss(text),
        StorageError::TooLarge { .. } => Status::invalid_argument(text),
        StorageError::Unavailable { .. } => Status::unavailable(text),
        StorageError::Denied { .. } => Status::permission_denied(text),
        StorageError::Local(_) => Status::resource_exhausted(text),
        StorageError::Unsupported { .. } => Status::unimplemented(text),
        _ => Status::internal(text),
    }
}
