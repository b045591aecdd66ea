//! Calls to the coordinator about the worker's certificate: their errors, time limit and retries.

use crate::folders::FoldersError;
use aitk_common::fsutil::FsError;
use aitk_common::hash::ContentHash;
use aitk_common::security::ca::CaError;
use aitk_common::security::join::BadInvitation;
use aitk_proto::client::ConnectError;
use std::future::Future;
use std::time::Duration;
use tonic::{Code, Response, Status};

/// How long the coordinator may take for one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// How often one that cannot answer now is asked, and the wait between.
const TRIES: u32 = 5;
const BREATH: Duration = Duration::from_millis(500);

/// Why a machine did not join. Nothing was written then but the key with which it asks again.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The token is none.
    #[error(transparent)]
    Token(#[from] BadInvitation),
    /// The name is none.
    #[error("{0:?} cannot be the name of a worker: expected 1 to 64 letters, digits, '-' or '_'")]
    Name(String),
    /// Without TLS there are no certificates.
    #[error("{0} is an address without TLS; a worker joins at https://HOST:7420")]
    Plain(String),
    /// The data folder.
    #[error(transparent)]
    Folders(#[from] FoldersError),
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The coordinator said no.
    #[error("the coordinator refused: {}", .0.message())]
    Refused(Box<Status>),
    /// It took too long.
    #[error("the coordinator did not answer within {} seconds", ANSWER.as_secs())]
    Silent,
    /// It signs with another authority than the token names.
    #[error(
        "this coordinator signs with another authority (SHA-256 {theirs}) than the join token names ({ours}); is that the \
         right address?"
    )]
    OtherAuthority {
        /// What it says.
        theirs: String,
        /// What the token says.
        ours: ContentHash,
    },
    /// Its answer makes no sense.
    #[error("the coordinator answered with {0}; install the same version of aitk on both sides")]
    Odd(&'static str),
    /// A certificate or key.
    #[error(transparent)]
    Certificate(#[from] CaError),
    /// A file.
    #[error(transparent)]
    Fs(#[from] FsError),
}

impl From<Status> for JoinError {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

impl JoinError {
    /// Whether the coordinator did not accept what was shown to it.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(status) if matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied))
    }
}

/// Bounds how long something may take.
pub(crate) async fn deadline<T>(call: impl Future<Output = T>) -> Result<T, JoinError> {
    // Boxed: the generated futures are large.
    tokio::time::timeout(ANSWER, Box::pin(call))
        .await
        .map_err(|_| JoinError::Silent)
}

/// Asks until a coordinator answers that can: of several that share their work one leads, and the others say so.
pub(crate) async fn asking<T, F>(mut ask: impl FnMut() -> F) -> Result<T, JoinError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut left = TRIES;
    loop {
        left -= 1;
        match deadline(ask()).await? {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if status.code() == Code::Unavailable && left > 0 => tokio::time::sleep(BREATH).await,
            Err(status) => return Err(status.into()),
        }
    }
}
