//! This worker's identity for its coordinator: the certificate from `aitk-worker join`, and its renewal.
//!
//! The identity is one file, `identity.json` in the data folder (mode 0600), which is replaced as a whole, so that
//! certificate and key always belong together. Its times are by this machine's clock, counted from the coordinator's
//! answer; so a clock that is an hour off does no harm.

use crate::join_calls::{JoinError, retry_unavailable, with_timeout};
use aitk_common::control_plane::UnixMillis;
use aitk_common::fsutil;
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::ca::{CaError, CertificateRequestWithKey, WorkerCertificate, read_private};
use aitk_proto::client::{self, Credentials, Trust};
use aitk_proto::v1;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

const IDENTITY_FILE: &str = "identity.json";
/// How often the clock is checked: a machine that slept must not miss its renewal by days.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// How often an identity that expired is read again.
const EXPIRED_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// The identity of a worker that joined.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct WorkerIdentity {
    /// The coordinator's address.
    pub server: String,
    /// The worker's name.
    pub name: UserName,
    /// The id that it registers with.
    pub worker: WorkerId,
    /// SHA-256 of the certificate of the coordinator's certificate authority.
    ca: ContentHash,
    /// Certificate authorities to trust instead (PEM), if the coordinator's certificate is from elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ca_pem: Option<String>,
    certificate: String,
    key: String,
    renew_at: UnixMillis,
    #[serde(rename = "ends")]
    expires_at: UnixMillis,
}

impl fmt::Debug for WorkerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerIdentity({} at {})", self.name, self.server)
    }
}

/// The current time by the wall clock.
pub(crate) fn wall_clock() -> UnixMillis {
    UnixMillis(0).after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

impl WorkerIdentity {
    /// Builds an identity from a join request and its answer.
    pub(crate) fn new(
        server: String,
        reply: v1::JoinReply,
        ca: ContentHash,
        ca_pem: Option<String>,
        request: CertificateRequestWithKey,
    ) -> Result<Self, JoinError> {
        let invalid = |_| JoinError::InvalidReply("an invalid name or id");
        let issued = reply.certificate.ok_or(JoinError::InvalidReply("no certificate"))?;
        let identity = Self {
            server,
            name: UserName::parse(&reply.name).map_err(invalid)?,
            worker: WorkerId::parse(&reply.worker_id).map_err(invalid)?,
            ca,
            ca_pem,
            certificate: String::new(),
            key: String::new(),
            renew_at: UnixMillis(0),
            expires_at: UnixMillis(0),
        };
        identity.with_certificate(issued, request)
    }

    /// Replaces the certificate and its key.
    fn with_certificate(
        mut self,
        issued: v1::WorkerCertificate,
        request: CertificateRequestWithKey,
    ) -> Result<Self, JoinError> {
        let read = WorkerCertificate::read_pem(&issued.certificate)?;
        if read.name != self.name {
            return Err(JoinError::InvalidReply("a certificate of another name"));
        }
        let now = wall_clock();
        self.renew_at = now.after(Duration::from_millis(issued.renew_in_ms));
        self.expires_at = now.after(Duration::from_millis(issued.ends_in_ms));
        self.certificate = issued.certificate;
        self.key = request.key_pem;
        Ok(self)
    }

    /// Reads the identity in a data folder, if there is one.
    ///
    /// # Errors
    /// If the file exists and cannot be used, or other users can read it.
    pub fn read(data_dir: &Path) -> Result<Option<Self>, CaError> {
        let path = data_dir.join(IDENTITY_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let text = read_private(&path)?;
        serde_json::from_str(&text).map(Some).map_err(|error| CaError::Damaged {
            path,
            problem: format!("{error}; remove it and run `aitk-worker join` again"),
        })
    }

    pub(crate) fn write(&self, data_dir: &Path) -> Result<(), JoinError> {
        let _lock = lock_folder(data_dir);
        self.write_locked(data_dir)
    }

    /// Writes the file. The caller has locked the folder.
    fn write_locked(&self, data_dir: &Path) -> Result<(), JoinError> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|_| JoinError::InvalidReply("an identity that cannot be serialised"))?;
        Ok(fsutil::write_private(&data_dir.join(IDENTITY_FILE), &text)?)
    }

    /// When the certificate expired; `None` while it is valid.
    #[must_use]
    pub fn expired_at(&self) -> Option<UnixMillis> {
        (wall_clock() >= self.expires_at).then_some(self.expires_at)
    }

    /// When the certificate expires.
    #[must_use]
    pub fn expires_at(&self) -> UnixMillis {
        self.expires_at
    }

    /// A message that says what to do about an expired certificate.
    pub(crate) fn rejoin_message(&self) -> String {
        format!(
            "the certificate of this worker ({}) expired before it could be renewed; join again: \
             `aitk-coordinator worker join-token` there, `aitk-worker join {} TOKEN` here",
            self.name, self.server
        )
    }

    pub(crate) fn credentials(&self) -> Credentials {
        let trust = self.ca_pem.clone().map_or(Trust::Authority(self.ca), Trust::Pem);
        Credentials::with_certificate(self.certificate.clone(), self.key.clone(), trust)
    }

    /// Requests the next certificate, for a new key, over a connection that uses this one.
    async fn renew(&self, server: &str, ca_file: Option<&Path>) -> Result<Self, JoinError> {
        let request = CertificateRequestWithKey::new(Some(&self.name))?;
        let clients = with_timeout(client::connect_with(server, self.credentials(), ca_file)).await??;
        let reply = retry_unavailable(|| {
            let mut workers = clients.workers.clone();
            let wire = v1::RenewRequest {
                request: Some(request.request.clone().into()),
            };
            async move { workers.renew(wire).await }
        })
        .await?;
        let issued = reply.certificate.ok_or(JoinError::InvalidReply("no certificate"))?;
        self.clone().with_certificate(issued, request)
    }
}

/// Locks the data folder for a moment, so that `aitk-worker join` and the renewal of a running worker do not write the identity at the same
/// time. Released on drop. On a file system without locks, nothing is locked.
fn lock_folder(data_dir: &Path) -> Option<File> {
    let folder = File::open(data_dir).ok()?;
    folder.lock().ok()?;
    Some(folder)
}

/// What a renewer does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RenewalStep {
    /// Waits, and looks again.
    Wait(Duration),
    /// Requests the next certificate.
    Renew,
    /// Waits for another identity: TLS refuses an expired certificate, so that only `aitk-worker join` helps.
    AwaitJoin,
}

impl RenewalStep {
    fn of(identity: &WorkerIdentity, now: UnixMillis) -> Self {
        let left = identity.renew_at.since(now);
        if now >= identity.expires_at {
            Self::AwaitJoin
        } else if left.is_zero() {
            Self::Renew
        } else {
            Self::Wait(left.min(CHECK_INTERVAL))
        }
    }
}

/// Renews the certificate of an identity.
#[derive(Debug)]
pub(crate) struct CertificateRenewer {
    data_dir: PathBuf,
    server: String,
    ca_file: Option<PathBuf>,
    current: watch::Sender<WorkerIdentity>,
}

impl CertificateRenewer {
    pub(crate) fn new(data_dir: PathBuf, server: String, ca_file: Option<PathBuf>, identity: WorkerIdentity) -> Self {
        Self {
            data_dir,
            server,
            ca_file,
            current: watch::Sender::new(identity),
        }
    }

    /// Loads the identity that `aitk-worker join` wrote meanwhile. It may expire earlier than the one before it: the coordinator may give
    /// certificates for a shorter time now, or the clock was ahead.
    pub(crate) fn reload(&self) {
        // The file is read and written under the lock of `current`: an older file must not replace a certificate that is renewed meanwhile.
        self.current
            .send_if_modified(|now| match WorkerIdentity::read(&self.data_dir) {
                Ok(Some(read)) if read != *now => {
                    *now = read;
                    true
                }
                Ok(_) => false,
                Err(error) => {
                    tracing::warn!(%error, "the worker's certificate cannot be read");
                    false
                }
            });
    }

    /// Writes an identity whose certificate was renewed, and makes it the current one. `before` is the one that was renewed.
    ///
    /// Returns `false` if `aitk-worker join` has written another identity meanwhile. That one stays, and is the current one.
    fn replace(&self, before: &WorkerIdentity, renewed: WorkerIdentity) -> Result<bool, JoinError> {
        let mut replaced = Ok(true);
        self.current.send_if_modified(|now| {
            let _lock = lock_folder(&self.data_dir);
            // A file that is missing or damaged is not that of a join.
            if let Ok(Some(stored)) = WorkerIdentity::read(&self.data_dir)
                && stored != *before
            {
                replaced = Ok(false);
                let is_new = stored != *now;
                *now = stored;
                return is_new;
            }
            match renewed.write_locked(&self.data_dir) {
                Ok(()) => {
                    *now = renewed;
                    true
                }
                Err(error) => {
                    replaced = Err(error);
                    false
                }
            }
        });
        replaced
    }

    /// Returns a receiver of the current identity and of newer ones.
    pub(crate) fn subscribe(&self) -> watch::Receiver<WorkerIdentity> {
        self.current.subscribe()
    }

    /// Renews the certificate after half of its life, and retries failures until it expires.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let current = self.current.borrow().clone();
            match RenewalStep::of(&current, wall_clock()) {
                RenewalStep::Renew => {}
                RenewalStep::Wait(time) => {
                    tokio::time::sleep(time).await;
                    continue;
                }
                RenewalStep::AwaitJoin => {
                    // The session reads the file too, before it connects.
                    let mut identity = self.current.subscribe();
                    let _ = tokio::time::timeout(EXPIRED_CHECK_INTERVAL, identity.changed()).await;
                    self.reload();
                    continue;
                }
            }
            let renewed = current.renew(&self.server, self.ca_file.as_deref()).await;
            match renewed.and_then(|renewed| self.replace(&current, renewed)) {
                Ok(true) => tracing::info!(name = %current.name, "the worker's certificate was renewed"),
                Ok(false) => {
                    tracing::info!(name = %current.name, "the worker joined again during the renewal; the certificate of the join is used");
                }
                Err(error) => {
                    tracing::warn!(%error, "the worker's certificate could not be renewed; trying again");
                    // Retry more often the closer the expiry is.
                    let wait = current.expires_at.since(wall_clock()) / 20;
                    tokio::time::sleep(wait.clamp(Duration::from_secs(1), CHECK_INTERVAL)).await;
                }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    pub(crate) fn identity(certificate: &str, expires_at: u64) -> WorkerIdentity {
        WorkerIdentity {
            server: "https://server:7420".to_owned(),
            name: UserName::parse("box").unwrap(),
            worker: WorkerId::parse("w1").unwrap(),
            ca: ContentHash::of(b"ca"),
            ca_pem: None,
            certificate: certificate.to_owned(),
            key: format!("key of {certificate}"),
            renew_at: UnixMillis(expires_at / 2),
            expires_at: UnixMillis(expires_at),
        }
    }

    /// Each try would be a refused handshake, which the coordinator audits.
    #[test]
    fn an_expired_certificate_is_not_renewed() {
        let identity = identity("first", 4_000_000);
        for (now, expected) in [
            (1_900_000, RenewalStep::Wait(Duration::from_secs(100))),
            (0, RenewalStep::Wait(CHECK_INTERVAL)),
            (2_000_000, RenewalStep::Renew),
            (3_999_999, RenewalStep::Renew),
            (4_000_000, RenewalStep::AwaitJoin),
            (9_000_000, RenewalStep::AwaitJoin),
        ] {
            assert_eq!(RenewalStep::of(&identity, UnixMillis(now)), expected, "{now}");
        }
    }

    /// The one before may be revoked, so that the worker needs the new one whatever its time.
    #[test]
    fn the_identity_of_a_new_join_is_used_also_if_it_expires_earlier() {
        let dir = tempfile::tempdir().unwrap();
        let first = identity("first", 3_000_000);
        let renewer = CertificateRenewer::new(dir.path().to_owned(), first.server.clone(), None, first.clone());
        let mut current = renewer.subscribe();
        renewer.reload();
        assert_eq!(*current.borrow_and_update(), first);
        for (certificate, expires_at) in [("second", 1_000_000), ("third", 9_000_000)] {
            let joined = identity(certificate, expires_at);
            joined.write(dir.path()).unwrap();
            renewer.reload();
            assert!(current.has_changed().unwrap(), "{certificate}");
            assert_eq!(*current.borrow_and_update(), joined);
            // Nothing has changed since.
            renewer.reload();
            assert!(!current.has_changed().unwrap(), "{certificate}");
        }
    }

    /// It would lose the new identity: the coordinator may have revoked the one before, and a join token works only once.
    #[test]
    fn a_renewal_does_not_overwrite_a_join_that_was_written_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let first = identity("first", 9_000_000);
        first.write(dir.path()).unwrap();
        let renewer = CertificateRenewer::new(dir.path().to_owned(), first.server.clone(), None, first.clone());
        let mut current = renewer.subscribe();
        let (joined, renewed) = (identity("joined", 5_000_000), identity("renewed", 9_500_000));
        joined.write(dir.path()).unwrap();
        // The second time the session has loaded the new identity before the answer came.
        for is_new in [true, false] {
            assert!(!renewer.replace(&first, renewed.clone()).unwrap());
            assert_eq!(WorkerIdentity::read(dir.path()).unwrap(), Some(joined.clone()));
            assert_eq!(current.has_changed().unwrap(), is_new);
            assert_eq!(*current.borrow_and_update(), joined);
        }
        // A renewal of the new identity, and one after somebody has removed the file.
        assert!(renewer.replace(&joined, renewed.clone()).unwrap());
        assert_eq!(WorkerIdentity::read(dir.path()).unwrap(), Some(renewed.clone()));
        std::fs::remove_file(dir.path().join(IDENTITY_FILE)).unwrap();
        assert!(renewer.replace(&renewed, first.clone()).unwrap());
        assert_eq!(WorkerIdentity::read(dir.path()).unwrap(), Some(first));
    }

    #[test]
    fn a_reload_does_not_undo_a_renewal() {
        let dir = tempfile::tempdir().unwrap();
        let first = identity("first", 9_000_000);
        first.write(dir.path()).unwrap();
        let renewer = CertificateRenewer::new(dir.path().to_owned(), first.server.clone(), None, first);
        let is_done = AtomicBool::new(false);
        let mut undone = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    renewer.reload();
                    // So that the other thread gets the lock.
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            for number in 0..50 {
                let renewed = identity(&number.to_string(), 9_000_000);
                let before = renewer.current.borrow().clone();
                let is_replaced = matches!(renewer.replace(&before, renewed.clone()), Ok(true));
                undone += usize::from(!is_replaced || *renewer.current.borrow() != renewed);
            }
            is_done.store(true, Ordering::Relaxed);
        });
        assert_eq!(undone, 0);
    }
}
