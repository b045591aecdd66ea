//! Who this worker is to its coordinator: the certificate that `aitk-worker join` got, and its renewal.
//!
//! Everything lies in one file, `identity.json` in the data folder (mode 0600), which is replaced as a whole: certificate and
//! key always belong together. Its times are by this machine's clock, counted from the answer; so a clock that is an hour
//! off does no harm.

use crate::join::{JoinError, asking, deadline};
use aitk_common::control::UnixMillis;
use aitk_common::fsutil;
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::ca::{CaError, WorkerCertificate, WorkerRequest, read_private};
use aitk_proto::client::{self, Credentials, Trust};
use aitk_proto::v1;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

const FILE: &str = "identity.json";
/// How often the clock is looked at: a machine that slept must not miss its renewal by days.
const LOOK: Duration = Duration::from_secs(600);

/// What a worker that joined has.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Membership {
    /// The coordinator's address.
    pub server: String,
    /// What the worker is called there.
    pub name: UserName,
    /// What it registers as.
    pub worker: WorkerId,
    /// SHA-256 of the certificate of the authority that the coordinator must come from.
    ca: ContentHash,
    /// Authorities to trust instead (PEM), where the coordinator's own certificate is from elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ca_pem: Option<String>,
    certificate: String,
    key: String,
    renew_at: UnixMillis,
    ends: UnixMillis,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Membership({} at {})", self.name, self.server)
    }
}

pub(crate) fn wall() -> UnixMillis {
    UnixMillis(0).after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

impl Membership {
    /// What a coordinator's answer makes of a request.
    pub(crate) fn new(
        server: String,
        reply: v1::JoinReply,
        ca: ContentHash,
        ca_pem: Option<String>,
        request: WorkerRequest,
    ) -> Result<Self, JoinError> {
        let odd = |_| JoinError::Odd("a name or an id that is none");
        let issued = reply.certificate.ok_or(JoinError::Odd("no certificate"))?;
        let made = Self {
            server,
            name: UserName::parse(&reply.name).map_err(odd)?,
            worker: WorkerId::parse(&reply.worker_id).map_err(odd)?,
            ca,
            ca_pem,
            certificate: String::new(),
            key: String::new(),
            renew_at: UnixMillis(0),
            ends: UnixMillis(0),
        };
        made.with(issued, request)
    }

    /// The same with another certificate.
    fn with(mut self, issued: v1::WorkerCertificate, request: WorkerRequest) -> Result<Self, JoinError> {
        let read = WorkerCertificate::read_pem(&issued.certificate)?;
        if read.name != self.name {
            return Err(JoinError::Odd("a certificate of another name"));
        }
        let now = wall();
        self.renew_at = now.after(Duration::from_millis(issued.renew_in_ms));
        self.ends = now.after(Duration::from_millis(issued.ends_in_ms));
        self.certificate = issued.certificate;
        self.key = request.key_pem;
        Ok(self)
    }

    /// Reads what `join` left in a data folder, if it did.
    ///
    /// # Errors
    /// When the file is there and cannot be used, or can be read by others.
    pub fn read(data_dir: &Path) -> Result<Option<Self>, CaError> {
        let path = data_dir.join(FILE);
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
        let text = serde_json::to_vec_pretty(self).map_err(|_| JoinError::Odd("what cannot be written down"))?;
        Ok(fsutil::write_private(&data_dir.join(FILE), &text)?)
    }

    /// When the certificate ends, if that has come.
    #[must_use]
    pub fn ended(&self) -> Option<UnixMillis> {
        (wall() >= self.ends).then_some(self.ends)
    }

    /// When it ends.
    #[must_use]
    pub fn ends(&self) -> UnixMillis {
        self.ends
    }

    /// What to do when it has ended.
    pub(crate) fn join_again(&self) -> String {
        format!(
            "the certificate of this worker ({}) ended, and a renewal did not come through in time; join again: \
             `aitk-coordinator worker join-token` there, `aitk-worker join {} TOKEN` here",
            self.name, self.server
        )
    }

    pub(crate) fn credentials(&self) -> Credentials {
        let trust = self.ca_pem.clone().map_or(Trust::Authority(self.ca), Trust::Pem);
        Credentials::with_certificate(self.certificate.clone(), self.key.clone(), trust)
    }

    /// Asks for the next certificate, with a new key, over a connection with this one.
    async fn renew(&self, server: &str, ca_file: Option<&Path>) -> Result<Self, JoinError> {
        let request = WorkerRequest::new(Some(&self.name))?;
        let clients = deadline(client::connect_with(server, self.credentials(), ca_file)).await??;
        let reply = asking(|| {
            let mut workers = clients.workers.clone();
            let wire = v1::RenewRequest {
                request: Some(request.request.clone().into()),
            };
            async move { workers.renew(wire).await }
        })
        .await?;
        let issued = reply.certificate.ok_or(JoinError::Odd("no certificate"))?;
        self.clone().with(issued, request)
    }
}

/// Keeps a membership fresh.
#[derive(Debug)]
pub(crate) struct Keeper {
    data_dir: PathBuf,
    server: String,
    ca_file: Option<PathBuf>,
    now: watch::Sender<Membership>,
}

impl Keeper {
    pub(crate) fn new(data_dir: PathBuf, server: String, ca_file: Option<PathBuf>, membership: Membership) -> Self {
        Self {
            data_dir,
            server,
            ca_file,
            now: watch::Sender::new(membership),
        }
    }

    /// Takes over what `aitk-worker join` wrote meanwhile, if it did.
    pub(crate) fn reload(&self) {
        match Membership::read(&self.data_dir) {
            Ok(Some(read)) => {
                self.now.send_if_modified(|now| {
                    let newer = read.ends > now.ends && read != *now;
                    if newer {
                        *now = read;
                    }
                    newer
                });
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "the worker's certificate cannot be read again"),
        }
    }

    /// The newest, and word of newer ones.
    pub(crate) fn newest(&self) -> watch::Receiver<Membership> {
        self.now.subscribe()
    }

    /// Renews after half of the certificate's life, and again whenever that fails.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let current = self.now.borrow().clone();
            let left = current.renew_at.since(wall());
            if !left.is_zero() {
                tokio::time::sleep(left.min(LOOK)).await;
                continue;
            }
            let renewed = current.renew(&self.server, self.ca_file.as_deref()).await;
            match renewed.and_then(|renewed| renewed.write(&self.data_dir).map(|()| renewed)) {
                Ok(renewed) => {
                    tracing::info!(name = %renewed.name, "the worker's certificate was renewed");
                    self.now.send_replace(renewed);
                }
                Err(error) => {
                    tracing::warn!(%error, "the worker's certificate could not be renewed; trying again");
                    // More often the closer the end is.
                    let wait = current.ends.since(wall()) / 20;
                    tokio::time::sleep(wait.clamp(Duration::from_secs(1), LOOK)).await;
                }
            }
        }
    }
}
