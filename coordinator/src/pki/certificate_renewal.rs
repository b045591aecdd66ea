//! The coordinator's own certificate: signed at the start and renewed while it runs.

use super::addresses;
use super::error::PkiError;
use super::signer::{Signer, wall_clock};
use crate::config::PkiConfig;
use aitk_common::control_plane::UnixMillis;
use aitk_common::error_chain::error_chain;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// How often the machine's addresses are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Pause before a retry when signing failed.
const RETRY_DELAY: Duration = Duration::from_secs(60);

/// The certificate in use.
#[derive(Debug)]
pub(super) struct CurrentCertificate(RwLock<Arc<CertifiedKey>>);

impl CurrentCertificate {
    pub(super) fn new(key: CertifiedKey) -> Self {
        Self(RwLock::new(Arc::new(key)))
    }
}

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Renews the coordinator's certificate.
pub(super) struct CertificateRenewal {
    signer: Arc<Signer>,
    current: Arc<CurrentCertificate>,
    /// How long each certificate is valid.
    validity: Duration,
    addr: SocketAddr,
    hostnames: Vec<String>,
    /// The names in the current certificate.
    names: Vec<String>,
    /// When the current certificate was issued.
    issued: UnixMillis,
}

impl CertificateRenewal {
    /// Signs the first certificate.
    pub(super) fn start(signer: Arc<Signer>, pki: &PkiConfig, addr: SocketAddr) -> Result<Self, PkiError> {
        if let Some(bad) = pki
            .hostnames
            .iter()
            .find(|name| !aitk_common::security::ca::is_server_name(name))
        {
            return Err(aitk_common::security::ca::CaError::BadName(bad.clone()).into());
        }
        let hostnames = addresses::server_names(pki);
        let names = addresses::names(addr, &hostnames);
        let issued = wall_clock();
        let current = Arc::new(CurrentCertificate::new(sign(&signer, &names, issued, pki.server_life)?));
        tracing::info!(names = names.join(", "), "certificate of this coordinator");
        Ok(Self {
            signer,
            current,
            validity: pki.server_life,
            addr,
            hostnames,
            names,
            issued,
        })
    }

    pub(super) fn current(&self) -> Arc<CurrentCertificate> {
        self.current.clone()
    }

    /// Renews the certificate after two thirds of its lifetime, or when the machine's addresses change. Checks the
    /// clock often, because timers do not advance while the machine is suspended.
    pub(super) async fn run(mut self) {
        let mut wait = Duration::ZERO;
        loop {
            let due = self.issued.after(self.validity * 2 / 3);
            let left = due.since(wall_clock());
            tokio::time::sleep(left.min(CHECK_INTERVAL).max(wait)).await;
            wait = Duration::ZERO;
            let now = wall_clock();
            let names = addresses::names(self.addr, &self.hostnames);
            if now < due && names == self.names {
                continue;
            }
            match sign(&self.signer, &names, now, self.validity) {
                Ok(key) => {
                    tracing::info!(names = names.join(", "), "certificate of this coordinator renewed");
                    *self.current.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(key);
                    (self.names, self.issued) = (names, now);
                }
                Err(error) => {
                    tracing::error!(error = %error_chain(&error), "the coordinator's certificate could not be renewed");
                    wait = RETRY_DELAY;
                }
            }
        }
    }
}

fn sign(signer: &Signer, names: &[String], now: UnixMillis, validity: Duration) -> Result<CertifiedKey, PkiError> {
    let made = signer.ca.issue_server(names, now, validity)?;
    let chain = made.chain.into_iter().map(CertificateDer::from).collect();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.key));
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| PkiError::Library(error.to_string()))
}
