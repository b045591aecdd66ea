//! The certificate of a TLS server that comes from elsewhere: the names and addresses that clients may use for it.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use std::path::Path;
use webpki::EndEntityCert;

/// A certificate of a TLS server.
#[derive(Clone, Debug)]
pub struct ServerCertificate {
    der: CertificateDer<'static>,
}

impl ServerCertificate {
    /// Reads the first certificate of a PEM file; `None` if the file cannot be read or holds none.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        let der = CertificateDer::from_pem_file(path).ok()?;
        let is_certificate = EndEntityCert::try_from(&der).is_ok();
        is_certificate.then_some(Self { der })
    }

    /// Whether a client that connects to this host name or IP address accepts the certificate's names.
    #[must_use]
    pub fn is_valid_for(&self, host: &str) -> bool {
        let (Ok(name), Ok(certificate)) = (ServerName::try_from(host), EndEntityCert::try_from(&self.der)) else {
            return false;
        };
        certificate.verify_is_valid_for_subject_name(&name).is_ok()
    }

    /// Its host names, also those with a wildcard, such as `*.lab.example`. Addresses are not among them.
    #[must_use]
    pub fn host_names(&self) -> Vec<String> {
        match EndEntityCert::try_from(&self.der) {
            Ok(certificate) => certificate.valid_dns_names().map(str::to_owned).collect(),
            Err(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_valid_for_its_names_and_addresses_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cert.pem");
        assert!(ServerCertificate::read(&path).is_none());
        std::fs::write(&path, "no certificate").unwrap();
        assert!(ServerCertificate::read(&path).is_none());
        let names = ["gpu.lab", "*.farm.lab", "10.1.2.3"].map(str::to_owned);
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        std::fs::write(&path, made.cert.pem()).unwrap();
        let certificate = ServerCertificate::read(&path).unwrap();
        for (host, is_valid) in [
            ("gpu.lab", true),
            ("box.farm.lab", true),
            ("10.1.2.3", true),
            ("farm.lab", false),
            ("127.0.0.1", false),
            ("localhost", false),
            ("not a name", false),
        ] {
            assert_eq!(certificate.is_valid_for(host), is_valid, "{host}");
        }
        assert_eq!(certificate.host_names(), ["gpu.lab", "*.farm.lab"]);
    }
}
