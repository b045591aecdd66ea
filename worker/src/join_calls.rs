//! Calls to the coordinator about the worker's certificate: their errors, time limit and retries.

use crate::data_folder::DataFolderError;
use aitk_common::fsutil::FsError;
use aitk_common::hash::ContentHash;
use aitk_common::security::ca::CaError;
use aitk_common::security::join::JoinTokenError;
use aitk_proto::client::ConnectError;
use std::future::Future;
use std::time::Duration;
use tonic::{Code, Response, Status};

/// How long the coordinator may take for one answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How often a request is tried while the coordinator is unavailable, and the delay between tries.
const MAX_TRIES: u32 = 5;
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Why a machine did not join, or a certificate was not renewed. A join that gets no certificate leaves the subfolders of
/// the data folder and the key for the next try, but no identity and no worker id.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The text is not a join token.
    #[error(transparent)]
    Token(#[from] JoinTokenError),
    /// The text is not a valid name.
    #[error("{0:?} cannot be the name of a worker: expected 1 to 64 letters, digits, '-' or '_'")]
    Name(String),
    /// The address has no TLS, which certificates need.
    #[error("{0} is an address without TLS; join at https://HOST:7420")]
    NoTls(String),
    /// The data folder cannot be used.
    #[error(transparent)]
    DataFolder(#[from] DataFolderError),
    /// No connection to the coordinator.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The coordinator refused the request.
    #[error("the coordinator refused: {}", .0.message())]
    Refused(Box<Status>),
    /// The coordinator did not answer in time.
    #[error("the coordinator did not answer within {} seconds", REPLY_TIMEOUT.as_secs())]
    Timeout,
    /// The coordinator has another certificate authority than the token names.
    #[error(
        "this coordinator signs with another authority (SHA-256 {theirs}) than the join token names ({ours}); check \
         the address"
    )]
    OtherAuthority {
        /// The coordinator's authority.
        theirs: String,
        /// The authority in the token.
        ours: ContentHash,
    },
    /// The coordinator's answer is invalid.
    #[error("the coordinator answered with {0}; install the same version of aitk on both sides")]
    InvalidReply(&'static str),
    /// A certificate or key is invalid.
    #[error(transparent)]
    Certificate(#[from] CaError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Fs(#[from] FsError),
}

impl From<Status> for JoinError {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

impl JoinError {
    /// Returns whether the coordinator refused the credentials.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(status) if matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied))
    }
}

/// Fails with [`JoinError::Timeout`] if a call takes longer than [`REPLY_TIMEOUT`].
pub(crate) async fn with_timeout<T>(call: impl Future<Output = T>) -> Result<T, JoinError> {
    // Boxed: the generated futures are large.
    tokio::time::timeout(REPLY_TIMEOUT, Box::pin(call))
        .await
        .map_err(|_| JoinError::Timeout)
}

/// Repeats a request while the coordinator is unavailable: of several coordinators only the leader answers.
pub(crate) async fn retry_unavailable<T, F>(mut send: impl FnMut() -> F) -> Result<T, JoinError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut left = MAX_TRIES;
    loop {
        left -= 1;
        match with_timeout(send()).await? {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if status.code() == Code::Unavailable && left > 0 => tokio::time::sleep(RETRY_DELAY).await,
            Err(status) => return Err(status.into()),
        }
    }
}
