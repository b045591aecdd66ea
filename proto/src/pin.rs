//! Trust in one certificate authority, known by the hash of its certificate.
//!
//! A coordinator shows its authority's certificate at the end of its chain. The one whose hash was given in advance is
//! taken as the only root, and everything else is checked as usual: signatures, purpose, dates, and the host's name.

use aitk_common::hash::ContentHash;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::sync::{Arc, Mutex, PoisonError};

/// What was wrong with a server, in words; the layers between tell it as "invalid certificate".
#[derive(Clone, Debug, Default)]
pub(crate) struct Problem(Arc<Mutex<Option<String>>>);

impl Problem {
    fn say(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }

    pub(crate) fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Pinned {
    ca: ContentHash,
    provider: Arc<CryptoProvider>,
    problem: Problem,
}

impl Pinned {
    pub(crate) fn new(ca: ContentHash, problem: Problem) -> Arc<Self> {
        Arc::new(Self {
            ca,
            provider: Arc::new(ring::default_provider()),
            problem,
        })
    }

    fn check(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let root = intermediates.iter().find(|cert| ContentHash::of(cert) == self.ca);
        let root = root.ok_or(CertificateError::UnknownIssuer)?;
        let mut roots = RootCertStore::empty();
        roots.add(root.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn words(&self, error: &Error, name: &ServerName<'_>) -> String {
        let name = name.to_str();
        match error {
            Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => format!(
                "its certificate does not come from the authority that the token names (SHA-256 {}…); nothing was sent. Is \
                 that the right address? Otherwise somebody stands in between, or the coordinator was given another \
                 authority: then ask for a new token",
                &self.ca.to_hex()[..16]
            ),
            Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => format!(
                "its certificate is not for {name}; use a name that it has, or add this one at the coordinator: \
                 aitk-coordinator --hostname {name}"
            ),
            Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
                "its certificate has expired; is the clock of one of the two machines wrong?".to_owned()
            }
            Error::InvalidCertificate(CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }) => {
                "its certificate is not valid yet; is the clock of one of the two machines wrong?".to_owned()
            }
            other => format!("its certificate cannot be accepted ({other})"),
        }
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let checked = self.check(end_entity, intermediates, server_name, ocsp_response, now);
        if let Err(error) = &checked {
            self.problem.say(self.words(error, server_name));
        }
        checked
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
