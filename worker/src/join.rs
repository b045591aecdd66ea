//! `aitk-worker join`: exchanges a join token for a certificate. The private key is created here and never leaves
//! this machine.

use crate::data_folder::{DataFolder, DataFolderError};
use crate::host::host_name;
use crate::identity::WorkerIdentity;
use crate::join_calls::{JoinError, retry_unavailable, with_timeout};
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::ca::CertificateRequestWithKey;
use aitk_common::security::join::JoinToken;
use aitk_proto::client::{self, Credentials};
use aitk_proto::v1;
use std::path::{Path, PathBuf};

/// The private key of a join that has no answer yet, in the data folder.
const KEY_FILE: &str = "join.key";

/// The inputs of a join.
#[derive(Debug)]
pub struct JoinOptions {
    /// The coordinator's address.
    pub server: String,
    /// The join token, as the coordinator printed it.
    pub token: String,
    /// The worker's name. `None`: the name in the token, or the name of this machine.
    pub name: Option<String>,
    /// A file with a certificate authority to trust instead of the token's, if the coordinator has a certificate from
    /// elsewhere (`--tls-cert`).
    pub ca_file: Option<PathBuf>,
    /// The worker's data folder.
    pub data_dir: PathBuf,
}

/// Joins, and saves the certificate in the data folder.
///
/// # Errors
/// [`JoinError`]
pub async fn join(options: JoinOptions) -> Result<WorkerIdentity, JoinError> {
    let invitation = JoinToken::parse(&options.token)?;
    let server = match options.server.trim().split_once("://") {
        Some(("https", _)) => options.server.trim().to_owned(),
        None => format!("https://{}", options.server.trim()),
        Some(_) => return Err(JoinError::NoTls(options.server)),
    };
    let name = match &options.name {
        None => None,
        Some(text) => Some(UserName::parse(text).map_err(|_| JoinError::Name(text.clone()))?),
    };
    let ca_pem = match &options.ca_file {
        None => None,
        Some(path) => Some(std::fs::read_to_string(path).map_err(|error| FsError::new("read", path, error))?),
    };
    // The lock keeps others away while the folder gets an identity. A running worker that has an identity may hold
    // it: it reads the new one.
    let data_folder = match DataFolder::open(&options.data_dir) {
        Ok(data_folder) => Some(data_folder),
        Err(DataFolderError::InUse(_)) if WorkerIdentity::read(&options.data_dir)?.is_some() => None,
        Err(error) => return Err(error.into()),
    };
    // The identity holds the worker id as well; a worker uses that one.
    let earlier = WorkerIdentity::read(&options.data_dir).ok().flatten();
    let known_id = earlier
        .map(|earlier| earlier.worker)
        .or_else(|| DataFolder::worker_id_in(&options.data_dir));
    let request = request_with_saved_key(&options.data_dir, name.as_ref())?;
    let credentials = Credentials::new(&invitation.text())?;
    let connected = with_timeout(client::connect_with(&server, credentials, options.ca_file.as_deref()));
    let clients = connected.await??;
    let message = v1::JoinRequest {
        request: Some(request.request.clone().into()),
        host: host_name(),
        worker_id: known_id.map(|id| id.to_string()).unwrap_or_default(),
    };
    let reply = retry_unavailable(|| {
        let (mut workers, message) = (clients.workers.clone(), message.clone());
        async move { workers.join(message).await }
    })
    .await?;
    if ContentHash::parse(&reply.ca_sha256).ok() != Some(invitation.ca) {
        return Err(JoinError::OtherAuthority {
            theirs: reply.ca_sha256.chars().take(64).collect(),
            ours: invitation.ca,
        });
    }
    let joined = WorkerIdentity::new(server, reply, invitation.ca, ca_pem, request)?;
    save(&joined, &options.data_dir, data_folder.as_ref())?;
    let _ = std::fs::remove_file(options.data_dir.join(KEY_FILE));
    Ok(joined)
}

/// Saves the identity, then its worker id in a data folder that no worker uses.
fn save(joined: &WorkerIdentity, data_dir: &Path, data_folder: Option<&DataFolder>) -> Result<(), JoinError> {
    // First, so that a full disk leaves no id without its identity.
    joined.write(data_dir)?;
    if let Some(data_folder) = data_folder {
        data_folder.save_worker_id(&joined.worker)?;
    }
    Ok(())
}

/// Makes a request whose key stays in the data folder until the answer has come. If the answer is lost, the next try
/// uses the same key, and the coordinator repeats its answer for a known key.
fn request_with_saved_key(data_dir: &Path, name: Option<&UserName>) -> Result<CertificateRequestWithKey, JoinError> {
    let path = data_dir.join(KEY_FILE);
    if let Ok(key) = std::fs::read_to_string(&path)
        && let Ok(request) = CertificateRequestWithKey::with_key_pem(&key, name)
    {
        return Ok(request);
    }
    let request = CertificateRequestWithKey::new(name)?;
    fsutil::write_private(&path, request.key_pem.as_bytes())?;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::tests::identity;

    #[test]
    fn no_worker_id_is_saved_without_its_identity() {
        let dir = tempfile::tempdir().unwrap();
        let data_folder = DataFolder::open(dir.path()).unwrap();
        let joined = identity("first", 4_000_000);
        // A folder of this name cannot be replaced by the file.
        std::fs::create_dir(dir.path().join("identity.json")).unwrap();
        save(&joined, dir.path(), Some(&data_folder)).unwrap_err();
        assert_eq!(DataFolder::worker_id_in(dir.path()), None);
        std::fs::remove_dir(dir.path().join("identity.json")).unwrap();
        save(&joined, dir.path(), Some(&data_folder)).unwrap();
        assert_eq!(DataFolder::worker_id_in(dir.path()), Some(joined.worker.clone()));
        assert_eq!(WorkerIdentity::read(dir.path()).unwrap(), Some(joined));
    }
}
