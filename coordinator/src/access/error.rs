//! Errors of authentication and of changes to tokens.

use crate::store::StoreError;
use aitk_common::id::UserName;

/// Why authentication failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthenticationError {
    /// The token is unknown, revoked or expired.
    InvalidToken,
    /// Too many invalid tokens came from this address.
    TooManyFailures,
    /// The certificate is not valid, with the reason.
    Certificate(&'static str),
    /// The join token is not valid, with the reason.
    Join(&'static str),
}

/// Why an operation on tokens or workers failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccessError {
    #[error("there is no token {0:?}; `aitk-coordinator token ls` lists them")]
    NoToken(String),
    #[error("no worker {0:?} has joined; `aitk-coordinator worker certs ls` lists those that have")]
    NoWorker(String),
    #[error(
        "worker {0} belongs to another machine: its token or certificate has another name; give this worker its own \
         --data-dir, or a token with that name"
    )]
    NotYours(String),
    #[error(
        "{name} has registered as {max} workers already. A machine keeps its id in its --data-dir: keep that folder, or let \
         this machine join under another name"
    )]
    TooManyWorkers { name: UserName, max: usize },
    #[error("cannot read or write a record of a token or worker as JSON: {0}")]
    Record(serde_json::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}
