//! Why a caller is not let in, or a change of tokens is not made.

use crate::store::StoreError;
use aitk_common::id::UserName;

/// Why a caller is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Not one of ours, or not any more.
    Wrong,
    /// Too many wrong ones came from there.
    TooMany,
    /// A certificate that is no good any more, and why.
    Certificate(&'static str),
    /// A join token that is no good any more, and why.
    Join(&'static str),
}

/// Why something about tokens could not be done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccessError {
    #[error("there is no token {0:?}; `aitk-coordinator token ls` lists them")]
    NoToken(String),
    #[error("no worker {0:?} has joined; `aitk-coordinator worker certs ls` lists those that have")]
    NoWorker(String),
    #[error(
        "worker {0} is another machine's, as its token or certificate has another name; let this one have its own \
         --data-dir, or give it a token of that name"
    )]
    NotYours(String),
    #[error(
        "{name} has registered as {most} workers already. A machine keeps its id in its --data-dir: keep that folder, or let \
         this machine join under another name"
    )]
    TooManyWorkers { name: UserName, most: usize },
    #[error("a token cannot be written down: {0}")]
    Record(serde_json::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}
