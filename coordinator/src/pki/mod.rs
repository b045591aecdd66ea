//! TLS and certificates.
//!
//! With an authority, the listener always speaks TLS. It uses a certificate of its own ([`server`]), or the
//! administrator's, and requests a certificate from every client: a worker must have one of our authority; a user
//! authenticates with a token and has none. The authenticator checks identity and revocation at every call.

mod addresses;
mod certificate_renewal;
mod error;
mod listener;
mod signer;

pub use error::PkiError;
pub(crate) use signer::{Signer, wall_clock};

use crate::config::{PkiConfig, TlsFiles};
use crate::connection_limiter::ConnectionLimiter;
use aitk_common::error_chain::error_chain;
use aitk_common::hash::ContentHash;
use aitk_common::security::ca::{Ca, CaError};
use certificate_renewal::CurrentCertificate;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// TLS configuration of the listener.
pub(crate) struct Tls {
    config: Arc<ServerConfig>,
    signer: Option<Arc<Signer>>,
    renewing: Option<certificate_renewal::CertificateRenewal>,
    /// Workers on other machines must show a certificate.
    pub(crate) certificates_only: bool,
}

impl Tls {
    /// Opens the administrator's certificate, else the coordinator's own certificate authority. `None`: no TLS.
    pub(crate) fn open(
        files: Option<&TlsFiles>,
        pki: Option<&PkiConfig>,
        addr: SocketAddr,
    ) -> Result<Option<Self>, PkiError> {
        let signer = match pki {
            None => None,
            Some(pki) => Some(Arc::new(Signer {
                ca: Ca::open(&pki.folder)?,
                worker_life: pki.worker_life,
            })),
        };
        let (resolver, renewing): (Arc<dyn ResolvesServerCert>, _) = match (files, pki, &signer) {
            (Some(files), _, _) => (Arc::new(CurrentCertificate::new(read_certificate(files)?)), None),
            (None, Some(pki), Some(signer)) => {
                let renewing = certificate_renewal::CertificateRenewal::start(signer.clone(), pki, addr)?;
                (renewing.current(), Some(renewing))
            }
            _ => return Ok(None),
        };
        let library = |error: &dyn std::error::Error| PkiError::Library(error_chain(error));
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| library(&error))?;
        let builder = match &signer {
            None => builder.with_no_client_auth(),
            Some(signer) => {
                let mut roots = RootCertStore::empty();
                roots
                    .add(CertificateDer::from(signer.ca.der().to_vec()))
                    .map_err(|error| library(&error))?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .allow_unauthenticated()
                    .build()
                    .map_err(|error| library(&error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut tls = builder.with_cert_resolver(resolver);
        tls.alpn_protocols.push(b"h2".to_vec());
        let allowed = pki.is_some_and(|pki| pki.allow_worker_tokens);
        Ok(Some(Self {
            config: Arc::new(tls),
            certificates_only: signer.is_some() && !allowed,
            signer,
            renewing,
        }))
    }

    /// Returns the signer, if there is an authority.
    pub(crate) fn signer(&self) -> Option<Arc<Signer>> {
        self.signer.clone()
    }

    /// Accepts connections, and renews the certificate meanwhile.
    pub(crate) fn accept(
        self,
        limiter: ConnectionLimiter,
        listener: TcpListener,
        refused: impl Fn(SocketAddr, &str) + Send + Sync + 'static,
    ) -> (listener::Incoming, Option<JoinHandle<()>>) {
        let renewing = self.renewing.map(|renewing| tokio::spawn(renewing.run()));
        (listener::accept(limiter, listener, self.config, refused), renewing)
    }
}

/// Reads the administrator's certificate.
fn read_certificate(files: &TlsFiles) -> Result<CertifiedKey, PkiError> {
    let bad = |path: &std::path::Path, problem: String| PkiError::File {
        path: path.to_owned(),
        problem,
    };
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(|certs| certs.collect::<Result<Vec<_>, _>>())
        .map_err(|error| bad(&files.cert, error_chain(&error)))?;
    if chain.is_empty() {
        return Err(bad(&files.cert, "it holds no certificate in PEM form".into()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| bad(&files.key, error_chain(&error)))?;
    CertifiedKey::from_der(chain, key, &ring::default_provider())
        .map_err(|error| bad(&files.cert, format!("with the key {}: {error}", files.key.display())))
}

/// Result of [`init`].
#[derive(Debug)]
pub struct InitOutcome {
    /// False: the authority existed already, and nothing was changed.
    pub created: bool,
    /// SHA-256 of the authority's certificate.
    pub hash: ContentHash,
}

/// Returns the folder of the authority in a data folder.
#[must_use]
pub fn ca_folder(data_dir: &std::path::Path) -> PathBuf {
    data_dir.join("ca")
}

/// Returns the first name under which other machines reach this coordinator: of those given at its start, else of those
/// given to [`init`].
pub(crate) fn first_name(pki: &PkiConfig) -> Option<String> {
    let given = pki.hostnames.first().cloned();
    given.or_else(|| addresses::read_names(&pki.folder).into_iter().next())
}

/// Creates a certificate authority in a data folder, unless there is one.
///
/// # Errors
/// [`PkiError`]
pub fn init(data_dir: &std::path::Path, hostnames: &[String]) -> Result<InitOutcome, PkiError> {
    let folder = ca_folder(data_dir);
    if Ca::is_in(&folder) {
        let hash = Ca::open(&folder)?.hash();
        return Ok(InitOutcome { created: false, hash });
    }
    if let Some(bad) = hostnames
        .iter()
        .find(|name| !aitk_common::security::ca::is_server_name(name))
    {
        return Err(CaError::BadName(bad.clone()).into());
    }
    // Accessible only by its owner, as at the first start.
    crate::data_folder::create(data_dir).map_err(|error| PkiError::Library(error_chain(&error)))?;
    addresses::write_names(&folder, hostnames)?;
    let ca = Ca::create(&folder, wall_clock())?;
    Ok(InitOutcome {
        created: true,
        hash: ca.hash(),
    })
}
