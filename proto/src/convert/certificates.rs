//! Conversions of certificate requests.

use crate::v1;
use aitk_common::security::join::CertificateRequest;

impl From<CertificateRequest> for v1::CertificateRequest {
    fn from(request: CertificateRequest) -> Self {
        Self {
            public_key: request.public_key,
            name: request.name,
            signature: request.signature,
        }
    }
}

/// The coordinator checks the contents when it signs the certificate.
impl From<v1::CertificateRequest> for CertificateRequest {
    fn from(wire: v1::CertificateRequest) -> Self {
        Self {
            public_key: wire.public_key,
            name: wire.name,
            signature: wire.signature,
        }
    }
}
