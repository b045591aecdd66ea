//! The certificate authority of a cluster.
//!
//! It signs two kinds of certificate: coordinator certificates, which are valid only for TLS servers, and worker certificates,
//! which are valid only for TLS clients. So neither can be used in place of the other. The subject alternative name of a
//! worker's certificate contains the worker's name, the id of its enrolment and the end of its validity. The coordinator's
//! store has the enrolments.
//!
//! Certificates conform to RFC 5280; keys are ECDSA over P-256 and never leave the machine that made them. A request
//! ([`CertificateRequest`]) contains a public key, a name and a signature over both. It needs no other field, so PKCS #10 is not
//! used.

use crate::control_plane::UnixMillis;
use crate::fsutil::{self, FsError};
use crate::hash::ContentHash;
use crate::id::UserName;
use crate::security::join::CertificateRequest;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber, SignatureAlgorithm, SigningKey,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use webpki::EndEntityCert;

/// The name of the certificate file in the authority's folder.
pub const CERT_FILE: &str = "ca.pem";
/// The name of the key file in the authority's folder.
pub const KEY_FILE: &str = "ca.key";
/// The validity of an authority's certificate: ten years.
pub const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);
/// The allowed clock difference between machines. Certificates are valid from this long before their creation.
const CLOCK_SKEW: Duration = Duration::from_secs(2 * 3600);
/// The length of an uncompressed P-256 point in bytes.
const POINT_BYTES: usize = 65;
/// The first line of the signed text of a request, so that the signature is valid for no other purpose.
const SIGNATURE_CONTEXT: &str = "aitk certificate request";
/// The size limit of certificate and key files.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// The prefix of the subject alternative name of a worker's certificate. Name, enrolment and end follow, separated by colons.
const WORKER_URI_PREFIX: &str = "aitk:worker:";

/// An error of the certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file could not be read or written.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// Other users can read the key.
    #[error("the key {} can be read by other users (mode {mode:o}); run: chmod 600 {}", path.display(), path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file of the authority is invalid.
    #[error("{} cannot be used: {problem}; restore it from a backup, or remove the folder and run `aitk-coordinator init` again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A certificate request is invalid.
    #[error("the certificate request is invalid: {0}")]
    Request(String),
    /// The request has a name that differs from the worker's name.
    #[error("the request is for a certificate of {requested:?}, but this machine is {:?}", .name.as_str())]
    NameMismatch {
        /// The requested name.
        requested: String,
        /// The worker's name.
        name: UserName,
    },
    /// A server name that cannot be in a certificate.
    #[error("{0:?} is not a valid server name: expected a host name or an IP address")]
    BadName(String),
    /// A certificate is not a valid worker certificate.
    #[error("this is not a worker certificate: {0}")]
    NotAWorkerCertificate(&'static str),
    /// The certificate library failed.
    #[error("a certificate could not be created: {0}")]
    Library(String),
}

impl From<rcgen::Error> for CaError {
    fn from(error: rcgen::Error) -> Self {
        Self::Library(error.to_string())
    }
}

/// A certificate authority: its certificate and its signing key.
pub struct Ca {
    pem: String,
    der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ca({})", self.hash())
    }
}

/// A server certificate with its chain and key.
pub struct ServerCertificate {
    /// The chain in DER: the server's certificate first, the authority's last.
    pub chain: Vec<Vec<u8>>,
    /// PKCS #8, DER.
    pub key: Vec<u8>,
}

/// The contents of a worker's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCertificate {
    /// The worker's name.
    pub name: UserName,
    /// The enrolment that it belongs to. Renewed certificates keep it.
    pub enrolment: String,
    /// The serial number in hexadecimal.
    pub serial: String,
    /// The end of its validity.
    pub not_after: UnixMillis,
}

/// A request whose signature was verified, so that its sender has the private key.
pub struct CheckedRequest {
    key: Point,
    name: String,
}

/// A certificate request and its private key.
pub struct CertificateRequestWithKey {
    /// The request to send.
    pub request: CertificateRequest,
    /// The private key in PEM.
    pub key_pem: String,
}

/// The public key of another machine.
struct Point(Vec<u8>);

impl PublicKeyData for Point {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl Ca {
    /// Creates an authority in a new folder (mode 0700), with a key that only the owner can read (mode 0600).
    ///
    /// # Errors
    /// [`CaError`].
    pub fn create(folder: &Path, now: UnixMillis) -> Result<Self, CaError> {
        let key = KeyPair::generate()?;
        let pem = authority_params(&key, now).self_signed(&key)?.pem();
        fsutil::create_private_dir(folder)?;
        // The certificate is written last, so that a folder with a certificate is complete.
        fsutil::write_private(&folder.join(KEY_FILE), key.serialize_pem().as_bytes())?;
        fsutil::write_private(&folder.join(CERT_FILE), pem.as_bytes())?;
        Self::open(folder)
    }

    /// Whether this folder contains an authority.
    #[must_use]
    pub fn is_in(folder: &Path) -> bool {
        folder.join(CERT_FILE).exists()
    }

    /// Opens the authority in a folder.
    ///
    /// # Errors
    /// [`CaError`]
    pub fn open(folder: &Path) -> Result<Self, CaError> {
        let (cert_path, key_path) = (folder.join(CERT_FILE), folder.join(KEY_FILE));
        let damaged = |path: &Path, problem: String| CaError::Damaged {
            path: path.to_owned(),
            problem,
        };
        let pem = read_file(&cert_path)?;
        let key = KeyPair::from_pem(&read_private(&key_path)?).map_err(|e| damaged(&key_path, e.to_string()))?;
        let der = first_der(&pem).ok_or_else(|| damaged(&cert_path, "it contains no PEM certificate".into()))?;
        {
            let der = CertificateDer::from(der.as_slice());
            let cert = EndEntityCert::try_from(&der).map_err(|e| damaged(&cert_path, e.to_string()))?;
            if cert.subject_public_key_info().as_ref() != key.subject_public_key_info() {
                return Err(damaged(&cert_path, format!("its key is not the one in {KEY_FILE}")));
            }
            // Signed certificates refer to the issuer by this name.
            let own = authority_name(&key);
            if !cert.subject().windows(own.len()).any(|part| part == own.as_bytes()) {
                return Err(damaged(
                    &cert_path,
                    format!("its name is not {own:?}, which belongs to its key"),
                ));
            }
        }
        let issuer = Issuer::new(authority_params(&key, UnixMillis(0)), key);
        Ok(Self { pem, der, issuer })
    }

    /// SHA-256 of its certificate (DER), which tokens contain.
    #[must_use]
    pub fn hash(&self) -> ContentHash {
        ContentHash::of(&self.der)
    }

    /// Its certificate in PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Its certificate in DER.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Issues a certificate with a new key for a coordinator with these host names and IP addresses.
    ///
    /// # Errors
    /// [`CaError::BadName`]; when the library fails.
    pub fn issue_server(
        &self,
        names: &[String],
        now: UnixMillis,
        life: Duration,
    ) -> Result<ServerCertificate, CaError> {
        let mut params = params("aitk coordinator", now, life);
        params.subject_alt_names = names.iter().map(|name| server_name(name)).collect::<Result<_, _>>()?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(ServerCertificate {
            chain: vec![cert.der().to_vec(), self.der.clone()],
            key: key.serialize_der(),
        })
    }

    /// Issues a certificate for the worker of this name and enrolment. Only the key of the request is used; if the request has a
    /// name, it must be the worker's.
    ///
    /// # Errors
    /// [`CaError::NameMismatch`]; when the library fails.
    pub fn issue_worker(
        &self,
        request: &CheckedRequest,
        worker: &UserName,
        enrolment: &str,
        now: UnixMillis,
        life: Duration,
    ) -> Result<(String, WorkerCertificate), CaError> {
        if request.requested_name().is_some_and(|name| name != worker.as_str()) {
            return Err(CaError::NameMismatch {
                requested: request.name.clone(),
                name: worker.clone(),
            });
        }
        // Certificates have a resolution of one second.
        let now = UnixMillis(now.0 / 1000 * 1000);
        let mut params = params(worker.as_str(), now, life);
        let uri = format!("{WORKER_URI_PREFIX}{worker}:{enrolment}:{}", now.after(life).0);
        params.subject_alt_names = vec![SanType::URI(uri.as_str().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let cert = params.signed_by(&request.key, &self.issuer)?;
        let read = WorkerCertificate::read(cert.der())?;
        Ok((cert.pem(), read))
    }
}

/// The text that a request's signature covers.
fn signed_text(name: &str, key: &[u8]) -> Vec<u8> {
    [SIGNATURE_CONTEXT.as_bytes(), b"\n", name.as_bytes(), b"\n", key].concat()
}

impl CheckedRequest {
    /// Verifies a request.
    ///
    /// # Errors
    /// [`CaError::Request`]
    pub fn check(request: CertificateRequest) -> Result<Self, CaError> {
        let bad = |problem: &str| Err(CaError::Request(problem.to_owned()));
        let CertificateRequest {
            public_key,
            name,
            signature,
        } = request;
        if public_key.len() != POINT_BYTES {
            return bad("its key is not an uncompressed P-256 point");
        }
        if !name.is_empty() && UserName::parse(&name).is_err() {
            return bad("its name is not 1 to 64 letters, digits, '-' or '_'");
        }
        let text = signed_text(&name, &public_key);
        let verified = webpki::ring::ECDSA_P256_SHA256.verify_signature(&public_key, &text, &signature);
        if verified.is_err() {
            return bad("its signature does not match its key");
        }
        let key = Point(public_key);
        Ok(Self { key, name })
    }

    /// The hash of its public key.
    #[must_use]
    pub fn key_hash(&self) -> ContentHash {
        ContentHash::of(&self.key.0)
    }

    /// The requested name, if any.
    #[must_use]
    pub fn requested_name(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }
}

impl CertificateRequestWithKey {
    /// Creates a request with a new key. Without a name, the coordinator chooses it.
    ///
    /// # Errors
    /// When the library fails.
    pub fn new(worker: Option<&UserName>) -> Result<Self, CaError> {
        Self::with_key(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?, worker)
    }

    /// Creates a request with the key (PEM) of an earlier one.
    ///
    /// # Errors
    /// When the key is invalid.
    pub fn with_key_pem(key_pem: &str, worker: Option<&UserName>) -> Result<Self, CaError> {
        Self::with_key(
            &KeyPair::from_pem_and_sign_algo(key_pem, &PKCS_ECDSA_P256_SHA256)?,
            worker,
        )
    }

    fn with_key(key: &KeyPair, worker: Option<&UserName>) -> Result<Self, CaError> {
        let name = worker.map(ToString::to_string).unwrap_or_default();
        let public_key = key.der_bytes().to_vec();
        let signature = key.sign(&signed_text(&name, &public_key))?;
        Ok(Self {
            request: CertificateRequest {
                public_key,
                name,
                signature,
            },
            key_pem: key.serialize_pem(),
        })
    }
}

impl WorkerCertificate {
    /// Parses a worker certificate (DER). The TLS handshake has verified its issuer.
    ///
    /// # Errors
    /// [`CaError::NotAWorkerCertificate`]
    pub fn read(der: &[u8]) -> Result<Self, CaError> {
        let bad = CaError::NotAWorkerCertificate;
        let der = CertificateDer::from(der);
        let cert = EndEntityCert::try_from(&der).map_err(|_| bad("it cannot be parsed"))?;
        let mut names = cert.valid_uri_names();
        let (Some(uri), None) = (names.next(), names.next()) else {
            return Err(bad("it does not have exactly one URI as subject alternative name"));
        };
        let parts = uri
            .strip_prefix(WORKER_URI_PREFIX)
            .map(|rest| rest.split(':').collect::<Vec<_>>());
        let Some([name, enrolment, end]) = parts.as_deref() else {
            return Err(bad("its subject alternative name is not that of a worker"));
        };
        Ok(Self {
            name: UserName::parse(name).map_err(|_| bad("its subject alternative name is not that of a worker"))?,
            enrolment: (*enrolment).to_owned(),
            serial: hex::encode(cert.serial()),
            not_after: UnixMillis(
                end.parse()
                    .map_err(|_| bad("its subject alternative name has no end of validity"))?,
            ),
        })
    }

    /// Parses the first certificate of a PEM text.
    ///
    /// # Errors
    /// [`CaError::NotAWorkerCertificate`]
    pub fn read_pem(pem: &str) -> Result<Self, CaError> {
        let der = first_der(pem).ok_or(CaError::NotAWorkerCertificate("the text contains no PEM certificate"))?;
        Self::read(&der)
    }
}

fn first_der(pem: &str) -> Option<Vec<u8>> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .ok()
        .map(|der| der.to_vec())
}

/// The name of an authority, derived from its key. So it is known from the key alone, and several authorities have different
/// names.
fn authority_name(key: &KeyPair) -> String {
    format!("aitk {}", &ContentHash::of(key.der_bytes()).to_hex()[..16])
}

fn authority_params(key: &KeyPair, now: UnixMillis) -> CertificateParams {
    let mut params = params(&authority_name(key), now, CA_LIFE);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn distinguished_name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

fn params(common: &str, now: UnixMillis, life: Duration) -> CertificateParams {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let at = |millis: u64| epoch + Duration::from_millis(millis);
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished_name(common);
    params.not_before = at(now.0.saturating_sub(CLOCK_SKEW.as_millis() as u64));
    params.not_after = at(now.after(life.min(CA_LIFE)).0);
    params.serial_number = Some(SerialNumber::from_slice(uuid::Uuid::new_v4().as_bytes()));
    params.use_authority_key_identifier_extension = true;
    params
}

/// Whether a coordinator's certificate can contain this name.
#[must_use]
pub fn is_server_name(name: &str) -> bool {
    server_name(name).is_ok()
}

fn server_name(name: &str) -> Result<SanType, CaError> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let is_label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    let bad = || CaError::BadName(name.chars().take(80).collect());
    if name.len() > 253 || !name.split('.').all(is_label) {
        return Err(bad());
    }
    name.try_into().map(SanType::DnsName).map_err(|_| bad())
}

fn read_file(path: &Path) -> Result<String, CaError> {
    let fail = |error| FsError::new("read", path, error);
    let mut text = String::new();
    let file = File::open(path).map_err(fail)?;
    file.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(fail)?;
    Ok(text)
}

/// Reads a file that only its owner can read.
///
/// # Errors
/// [`CaError::Exposed`]; when it cannot be read.
pub fn read_private(path: &Path) -> Result<String, CaError> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let meta = std::fs::metadata(path).map_err(|error| FsError::new("read", path, error))?;
        let mode = meta.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(CaError::Exposed {
                path: path.to_owned(),
                mode,
            });
        }
    }
    read_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixMillis = UnixMillis(1_700_000_000_000);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn ca() -> (tempfile::TempDir, Ca) {
        let folder = tempfile::tempdir().unwrap();
        let ca = Ca::create(&folder.path().join("deep/ca"), NOW).unwrap();
        (folder, ca)
    }

    #[test]
    fn an_authority_is_private_and_can_be_opened_again() {
        let (folder, ca) = ca();
        let place = folder.path().join("deep/ca");
        assert!(Ca::is_in(&place) && !Ca::is_in(folder.path()));
        assert_eq!(Ca::open(&place).unwrap().hash(), ca.hash());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(&place), mode(&place.join(KEY_FILE))), (0o700, 0o600));
            std::fs::set_permissions(place.join(KEY_FILE), std::fs::Permissions::from_mode(0o644)).unwrap();
            let error = Ca::open(&place).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{error}");
            std::fs::set_permissions(place.join(KEY_FILE), std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        let other = Ca::create(&folder.path().join("other"), NOW).unwrap();
        assert_ne!(other.hash(), ca.hash());
        std::fs::copy(folder.path().join("other").join(CERT_FILE), place.join(CERT_FILE)).unwrap();
        let error = Ca::open(&place).unwrap_err().to_string();
        assert!(error.contains("its key is not the one"), "{error}");
        for wrong in [
            "",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "x",
        ] {
            std::fs::write(place.join(CERT_FILE), wrong).unwrap();
            assert!(matches!(Ca::open(&place), Err(CaError::Damaged { .. })), "{wrong}");
        }
    }

    #[test]
    fn a_worker_gets_a_certificate_only_for_its_own_name() {
        let (_folder, ca) = ca();
        let name = UserName::new("box-1");
        let made = CertificateRequestWithKey::new(Some(&name)).unwrap();
        let request = CheckedRequest::check(made.request.clone()).unwrap();
        assert_eq!(request.requested_name(), Some("box-1"));
        let (pem, read) = ca.issue_worker(&request, &name, "e1", NOW, DAY).unwrap();
        assert_eq!(read, WorkerCertificate::read_pem(&pem).unwrap());
        assert_eq!((&read.name, read.enrolment.as_str()), (&name, "e1"));
        assert_eq!(read.not_after, NOW.after(DAY));

        let other = UserName::new("box-2");
        let refused = ca.issue_worker(&request, &other, "e1", NOW, DAY);
        assert!(matches!(refused, Err(CaError::NameMismatch { .. })));
        let open = CheckedRequest::check(CertificateRequestWithKey::new(None).unwrap().request).unwrap();
        assert_eq!(open.requested_name(), None);
        let (_, read) = ca.issue_worker(&open, &other, "e2", NOW, DAY).unwrap();
        assert_eq!(read.name, other);
    }

    #[test]
    fn a_request_must_be_signed_with_its_key() {
        let good = CertificateRequestWithKey::new(Some(&UserName::new("box")))
            .unwrap()
            .request;
        let others = CertificateRequestWithKey::new(Some(&UserName::new("box")))
            .unwrap()
            .request;
        let change = |change: fn(&mut CertificateRequest, CertificateRequest)| {
            let mut request = good.clone();
            change(&mut request, others.clone());
            request
        };
        for bad in [
            CertificateRequest::default(),
            change(|request, _| request.name = "other".into()),
            change(|request, _| request.name = "../x".into()),
            change(|request, _| request.signature.clear()),
            change(|request, _| request.signature[8] ^= 1),
            change(|request, others| request.public_key = others.public_key),
            change(|request, others| request.signature = others.signature),
            change(|request, _| request.public_key = vec![4; 65]),
            change(|request, _| request.public_key = vec![0; 100_000]),
        ] {
            assert!(matches!(CheckedRequest::check(bad), Err(CaError::Request(_))));
        }
        assert!(CheckedRequest::check(good).is_ok());
    }

    #[test]
    fn a_server_certificate_has_its_names_and_is_not_a_worker_certificate() {
        let (_folder, ca) = ca();
        let names = ["lab.example", "10.0.0.1", "::1", "localhost"].map(String::from);
        let made = ca.issue_server(&names, NOW, DAY).unwrap();
        assert_eq!(made.chain.len(), 2);
        assert_eq!(ContentHash::of(&made.chain[1]), ca.hash());
        assert!(WorkerCertificate::read(&made.chain[0]).is_err() && WorkerCertificate::read(ca.der()).is_err());
        assert!(!made.key.is_empty());
        for bad in ["", "a b", "-.-.", "ü", "https://x", &"x".repeat(300)] {
            let refused = ca.issue_server(&[bad.to_owned()], NOW, DAY);
            assert!(matches!(refused, Err(CaError::BadName(_))), "{bad}");
        }
    }
}
