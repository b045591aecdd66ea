//! `aitk-worker join`: a join token turns into a certificate. The key is made here and never leaves this machine.

use crate::folders::{Folders, FoldersError};
use crate::identity::Membership;
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::ca::{CaError, WorkerRequest};
use aitk_common::security::join::{JoinToken, JoinTokenError};
use aitk_proto::client::{self, ConnectError, Credentials};
use aitk_proto::v1;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::{Code, Response, Status};

/// How long the coordinator may take for one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// How often one that cannot answer now is asked, and the wait between.
const TRIES: u32 = 5;
const BREATH: Duration = Duration::from_millis(500);

/// The key of a join whose answer has not come yet, in the data folder.
const KEY_FILE: &str = "join.key";

/// What is needed to join.
#[derive(Debug)]
pub struct JoinOptions {
    /// The coordinator's address.
    pub server: String,
    /// The join token, as it was shown.
    pub token: String,
    /// What the worker wants to be called. None: what the token says, or the name of this machine.
    pub name: Option<String>,
    /// An authority to trust instead of the token's, where the coordinator has a certificate from elsewhere (`--tls-cert`).
    pub ca_file: Option<PathBuf>,
    /// The worker's data folder.
    pub data_dir: PathBuf,
}

/// Why a machine did not join. Nothing was written then but the key with which it asks again.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The token is none.
    #[error(transparent)]
    Token(#[from] JoinTokenError),
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

/// Joins, and keeps what that gives in the data folder.
///
/// # Errors
/// [`JoinError`]
pub async fn join(options: JoinOptions) -> Result<Membership, JoinError> {
    let invitation = JoinToken::parse(&options.token)?;
    let server = match options.server.trim().split_once("://") {
        Some(("https", _)) => options.server.trim().to_owned(),
        None => format!("https://{}", options.server.trim()),
        Some(_) => return Err(JoinError::Plain(options.server)),
    };
    let name = match &options.name {
        None => None,
        Some(text) => Some(UserName::parse(text).map_err(|_| JoinError::Name(text.clone()))?),
    };
    let ca_pem = match &options.ca_file {
        None => None,
        Some(path) => Some(std::fs::read_to_string(path).map_err(|error| FsError::new("read", path, error))?),
    };
    // Nobody else works in this folder while it gets an identity, but for a worker that has one: it reads the new one.
    let folders = match Folders::open(&options.data_dir) {
        Ok(folders) => Some(folders),
        Err(FoldersError::InUse(_)) if Membership::read(&options.data_dir)?.is_some() => None,
        Err(error) => return Err(error.into()),
    };
    // The identity says it as well, and is what a running worker goes by.
    let known = Folders::worker_id_in(&options.data_dir).or_else(|| {
        let earlier = Membership::read(&options.data_dir).ok().flatten();
        earlier.map(|earlier| earlier.worker)
    });
    let request = request_with_kept_key(&options.data_dir, name.as_ref())?;
    let credentials = Credentials::new(&invitation.text())?;
    let connected = deadline(client::connect_with(&server, credentials, options.ca_file.as_deref()));
    let clients = connected.await??;
    let wire = v1::JoinRequest {
        request: Some(request.request.clone().into()),
        host: crate::host_name(),
        worker_id: known.map(|id| id.to_string()).unwrap_or_default(),
    };
    let reply = asking(|| {
        let (mut workers, wire) = (clients.workers.clone(), wire.clone());
        async move { workers.join(wire).await }
    })
    .await?;
    if ContentHash::parse(&reply.ca_sha256).ok() != Some(invitation.ca) {
        return Err(JoinError::OtherAuthority {
            theirs: reply.ca_sha256.chars().take(64).collect(),
            ours: invitation.ca,
        });
    }
    let joined = Membership::new(server, reply, invitation.ca, ca_pem, request)?;
    if let Some(folders) = &folders {
        folders.keep_worker_id(&joined.worker)?;
    }
    joined.write(&options.data_dir)?;
    let _ = std::fs::remove_file(options.data_dir.join(KEY_FILE));
    Ok(joined)
}

/// A request whose key is kept in the data folder until the answer has come: should that be lost on its way, the next try
/// asks with the same key, and the coordinator answers a key that it knows as it did before.
fn request_with_kept_key(data_dir: &Path, name: Option<&UserName>) -> Result<WorkerRequest, JoinError> {
    let path = data_dir.join(KEY_FILE);
    if let Ok(key) = std::fs::read_to_string(&path)
        && let Ok(request) = WorkerRequest::with_key_pem(&key, name)
    {
        return Ok(request);
    }
    let request = WorkerRequest::new(name)?;
    fsutil::write_private(&path, request.key_pem.as_bytes())?;
    Ok(request)
}
