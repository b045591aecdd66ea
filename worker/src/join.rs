//! `aitk-worker join`: a join token turns into a certificate. The key is made here and never leaves this machine.

use crate::folders::{Folders, FoldersError};
use crate::host::host_name;
use crate::identity::Membership;
use crate::join_error::{JoinError, asking, deadline};
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::ca::WorkerRequest;
use aitk_common::security::join::Invitation;
use aitk_proto::client::{self, Credentials};
use aitk_proto::v1;
use std::path::{Path, PathBuf};

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

/// Joins, and keeps what that gives in the data folder.
///
/// # Errors
/// [`JoinError`]
pub async fn join(options: JoinOptions) -> Result<Membership, JoinError> {
    let invitation = Invitation::parse_join(&options.token)?;
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
        host: host_name(),
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
        && let Ok(request) = WorkerRequest::again(&key, name)
    {
        return Ok(request);
    }
    let request = WorkerRequest::new(name)?;
    fsutil::write_private(&path, request.key_pem.as_bytes())?;
    Ok(request)
}
