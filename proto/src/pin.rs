//! Verifies servers against a certificate authority that is pinned by the hash of its certificate.
//!
//! A coordinator sends its authority's certificate at the end of its chain. If its hash is the pinned one, it becomes the only
//! trusted root. Everything else is checked as usual: signatures, purpose, validity and host name.

use aitk_common::hash::ContentHash;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::sync::{Arc, Mutex, PoisonError};

/// The verification error as a message for users. Tonic reports only "invalid certificate".
#[derive(Clone, Debug, Default)]
pub(crate) struct VerificationProblem(Arc<Mutex<Option<String>>>);

impl VerificationProblem {
    fn set(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }

    pub(crate) fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A [`ServerCertVerifier`] that trusts one pinned authority.
#[derive(Debug)]
pub(crate) struct CaPinVerifier {
    ca: ContentHash,
    provider: Arc<CryptoProvider>,
    problem: VerificationProblem,
}

impl CaPinVerifier {
    pub(crate) fn new(ca: ContentHash, problem: VerificationProblem) -> Arc<Self> {
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

    fn describe(&self, error: &Error, name: &ServerName<'_>) -> String {
        let name = name.to_str();
        match error {
            Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => format!(
                "its certificate does not come from the authority that the token names (SHA-256 {}…); nothing was sent. Check \
                 the address. Otherwise somebody intercepts the connection, or the coordinator has a new authority: then ask \
                 for a new token",
                &self.ca.to_hex()[..16]
            ),
            Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => format!(
                "its certificate is not valid for {name}; use a name in the certificate, or add this one at the coordinator: \
                 aitk-coordinator --hostname {name}"
            ),
            Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
                "its certificate has expired; check the clocks of both machines".to_owned()
            }
            Error::InvalidCertificate(CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }) => {
                "its certificate is not valid yet; check the clocks of both machines".to_owned()
            }
            other => format!("its certificate cannot be accepted ({other})"),
        }
    }
}

impl ServerCertVerifier for CaPinVerifier {
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
            self.problem.set(self.describe(error, server_name));
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
