//! The certificate authority of a pool, and what it signs.
//!
//! It signs two kinds of certificate and no third: a coordinator's, good for a TLS server only, and a worker's, good for
//! a TLS client only. So a worker's certificate cannot stand in for a coordinator, nor the other way round. A worker's
//! certificate carries, as its alternative name, the worker's name, the id of its enrolment and its end; what the first
//! two mean is in the coordinator's store.
//!
//! Certificates are those of RFC 5280; keys are ECDSA over P-256, and never leave the machine that made them. A machine
//! asks with its public key, a name and a signature over both ([`CertificateRequest`]); there is no more in a request that
//! could be believed, so it needs no PKCS #10.

use crate::control::UnixMillis;
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

/// The certificate's file in the authority's folder.
pub const CERT_FILE: &str = "ca.pem";
/// The key's file in the authority's folder.
pub const KEY_FILE: &str = "ca.key";
/// How long an authority lives: ten years.
pub const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Clocks of a pool may differ by so much: a certificate is good from before it was made.
const CLOCKS: Duration = Duration::from_secs(2 * 3600);
/// An uncompressed point of P-256.
const POINT: usize = 65;
/// What a request's signature is over, before name and key: it can be of no other use.
const PURPOSE: &str = "aitk certificate request";
/// A longer file is no certificate or key.
const LONGEST_FILE: u64 = 64 << 10;
/// What begins the alternative name of a worker's certificate; name, enrolment and end follow, with colons between.
const WORKER: &str = "aitk:worker:";

/// Something about certificates that cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file could not be read or written.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// Others may read the key.
    #[error("the key {} can be read by others (mode {mode:o}); run: chmod 600 {}", path.display(), path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file does not hold what it should.
    #[error("{} cannot be used: {problem}; restore it from a copy, or remove the folder and run `aitk-coordinator init` again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// What a machine asks to be signed is no request.
    #[error("the request for a certificate cannot be used: {0}")]
    Request(String),
    /// It asks for another name than its own.
    #[error("the request asks for a certificate of {asked:?}, but this machine is {name:?}")]
    OtherName {
        /// What it asks for.
        asked: String,
        /// What it may have.
        name: UserName,
    },
    /// A name for a server that cannot stand in a certificate.
    #[error("{0:?} cannot be the name of a server: expected a host name or an IP address")]
    BadName(String),
    /// A certificate that is none of a worker.
    #[error("this is no certificate of a worker: {0}")]
    NotAWorkers(&'static str),
    /// The library failed.
    #[error("a certificate could not be made: {0}")]
    Library(String),
}

impl From<rcgen::Error> for CaError {
    fn from(error: rcgen::Error) -> Self {
        Self::Library(error.to_string())
    }
}

/// An authority: its certificate and the key it signs with.
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

/// A certificate, those above it, and its key.
pub struct ServerCertificate {
    /// DER: its own first, the authority's last.
    pub chain: Vec<Vec<u8>>,
    /// PKCS #8, DER.
    pub key: Vec<u8>,
}

/// What a worker's certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCertificate {
    /// The worker's name.
    pub name: UserName,
    /// The enrolment it belongs to; one that was renewed keeps it.
    pub enrolment: String,
    /// Its number, in hexadecimal.
    pub serial: String,
    /// No good from here on.
    pub not_after: UnixMillis,
}

/// A request that was looked at: whoever made it has the key.
pub struct CheckedRequest {
    key: Point,
    name: String,
}

/// A request for a certificate, and the key that it is for.
pub struct WorkerRequest {
    /// What is sent.
    pub request: CertificateRequest,
    /// The key, PEM.
    pub key_pem: String,
}

/// Another machine's public key.
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
    /// Makes an authority in a new folder (0700), its key for its owner only (0600).
    ///
    /// # Errors
    /// [`CaError`]; one that is there already is never written over.
    pub fn create(folder: &Path, now: UnixMillis) -> Result<Self, CaError> {
        let key = KeyPair::generate()?;
        let pem = authority(&key, now).self_signed(&key)?.pem();
        fsutil::create_private_dir(folder)?;
        // The certificate is written last: a folder with one is complete.
        fsutil::write_private(&folder.join(KEY_FILE), key.serialize_pem().as_bytes())?;
        fsutil::write_private(&folder.join(CERT_FILE), pem.as_bytes())?;
        Self::open(folder)
    }

    /// Whether there is one in this folder.
    #[must_use]
    pub fn is_in(folder: &Path) -> bool {
        folder.join(CERT_FILE).exists()
    }

    /// Reads an authority from its folder.
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
        let der = first_der(&pem).ok_or_else(|| damaged(&cert_path, "it holds no certificate in PEM form".into()))?;
        {
            let der = CertificateDer::from(der.as_slice());
            let cert = EndEntityCert::try_from(&der).map_err(|e| damaged(&cert_path, e.to_string()))?;
            if cert.subject_public_key_info().as_ref() != key.subject_public_key_info() {
                return Err(damaged(&cert_path, format!("its key is not the one in {KEY_FILE}")));
            }
            // What we sign names its issuer by this.
            let own = authority_name(&key);
            if !cert.subject().windows(own.len()).any(|part| part == own.as_bytes()) {
                return Err(damaged(
                    &cert_path,
                    format!("its name is not {own:?}, which belongs to its key"),
                ));
            }
        }
        let issuer = Issuer::new(authority(&key, UnixMillis(0)), key);
        Ok(Self { pem, der, issuer })
    }

    /// SHA-256 of its certificate (DER): what tokens name it by.
    #[must_use]
    pub fn hash(&self) -> ContentHash {
        ContentHash::of(&self.der)
    }

    /// Its certificate, PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Its certificate, DER.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// A certificate, with a new key, for a coordinator that is reached under these names and addresses.
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

    /// A certificate for the worker of this name and enrolment. Of the request only the key is taken; if there is a name in
    /// it, that must be the worker's.
    ///
    /// # Errors
    /// [`CaError::OtherName`]; when the library fails.
    pub fn issue_worker(
        &self,
        request: &CheckedRequest,
        worker: &UserName,
        enrolment: &str,
        now: UnixMillis,
        life: Duration,
    ) -> Result<(String, WorkerCertificate), CaError> {
        if request.asked().is_some_and(|asked| asked != worker.as_str()) {
            return Err(CaError::OtherName {
                asked: request.name.clone(),
                name: worker.clone(),
            });
        }
        // A certificate knows whole seconds.
        let now = UnixMillis(now.0 / 1000 * 1000);
        let mut params = params(worker.as_str(), now, life);
        let uri = format!("{WORKER}{worker}:{enrolment}:{}", now.after(life).0);
        params.subject_alt_names = vec![SanType::URI(uri.as_str().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let cert = params.signed_by(&request.key, &self.issuer)?;
        let read = WorkerCertificate::read(cert.der())?;
        Ok((cert.pem(), read))
    }
}

/// What a request's signature is over.
fn signed_text(name: &str, key: &[u8]) -> Vec<u8> {
    [PURPOSE.as_bytes(), b"\n", name.as_bytes(), b"\n", key].concat()
}

impl CheckedRequest {
    /// Looks at a request.
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
        if public_key.len() != POINT {
            return bad("its key is no uncompressed point of P-256");
        }
        if !name.is_empty() && UserName::parse(&name).is_err() {
            return bad("its name is not 1 to 64 letters, digits, '-' or '_'");
        }
        let text = signed_text(&name, &public_key);
        let verified = webpki::ring::ECDSA_P256_SHA256.verify_signature(&public_key, &text, &signature);
        if verified.is_err() {
            return bad("its signature is not made with its key");
        }
        let key = Point(public_key);
        Ok(Self { key, name })
    }

    /// Which key it is for.
    #[must_use]
    pub fn key_hash(&self) -> ContentHash {
        ContentHash::of(&self.key.0)
    }

    /// The name that it asks for, if it does.
    #[must_use]
    pub fn asked(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }
}

impl WorkerRequest {
    /// A request for a certificate with a new key, of this name; without one the other side says what it is.
    ///
    /// # Errors
    /// When the library fails.
    pub fn new(worker: Option<&UserName>) -> Result<Self, CaError> {
        Self::with_key(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?, worker)
    }

    /// The same request once more, with the key (PEM) of an earlier one.
    ///
    /// # Errors
    /// When that is no key.
    pub fn again(key_pem: &str, worker: Option<&UserName>) -> Result<Self, CaError> {
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
    /// Reads a certificate (DER). Who signed it is another question, which TLS has asked.
    ///
    /// # Errors
    /// [`CaError::NotAWorkers`]
    pub fn read(der: &[u8]) -> Result<Self, CaError> {
        let bad = CaError::NotAWorkers;
        let der = CertificateDer::from(der);
        let cert = EndEntityCert::try_from(&der).map_err(|_| bad("it cannot be read"))?;
        let mut names = cert.valid_uri_names();
        let (Some(uri), None) = (names.next(), names.next()) else {
            return Err(bad("it has not one name"));
        };
        let parts = uri.strip_prefix(WORKER).map(|rest| rest.split(':').collect::<Vec<_>>());
        let Some([name, enrolment, end]) = parts.as_deref() else {
            return Err(bad("its name is none of a worker"));
        };
        Ok(Self {
            name: UserName::parse(name).map_err(|_| bad("its name is none of a worker"))?,
            enrolment: (*enrolment).to_owned(),
            serial: hex::encode(cert.serial()),
            not_after: UnixMillis(end.parse().map_err(|_| bad("it does not say when it ends"))?),
        })
    }

    /// Reads the first certificate of a PEM text.
    ///
    /// # Errors
    /// [`CaError::NotAWorkers`]
    pub fn read_pem(pem: &str) -> Result<Self, CaError> {
        let der = first_der(pem).ok_or(CaError::NotAWorkers("there is none in PEM form"))?;
        Self::read(&der)
    }
}

fn first_der(pem: &str) -> Option<Vec<u8>> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .ok()
        .map(|der| der.to_vec())
}

/// An authority's name follows from its key: what it signs can name it with the key alone, and two authorities of one
/// person look different in every list.
fn authority_name(key: &KeyPair) -> String {
    format!("aitk {}", &ContentHash::of(key.der_bytes()).to_hex()[..16])
}

fn authority(key: &KeyPair, now: UnixMillis) -> CertificateParams {
    let mut params = params(&authority_name(key), now, CA_LIFE);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

fn params(common: &str, now: UnixMillis, life: Duration) -> CertificateParams {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let at = |millis: u64| epoch + Duration::from_millis(millis);
    let mut params = CertificateParams::default();
    params.distinguished_name = name(common);
    params.not_before = at(now.0.saturating_sub(CLOCKS.as_millis() as u64));
    params.not_after = at(now.after(life.min(CA_LIFE)).0);
    params.serial_number = Some(SerialNumber::from_slice(uuid::Uuid::new_v4().as_bytes()));
    params.use_authority_key_identifier_extension = true;
    params
}

/// Whether a coordinator can be certified under this name.
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
    file.take(LONGEST_FILE).read_to_string(&mut text).map_err(fail)?;
    Ok(text)
}

/// Reads a file that only its owner may read.
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
    fn an_authority_is_kept_for_its_owner_alone_and_read_again() {
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
    fn a_worker_gets_its_own_name_and_no_other() {
        let (_folder, ca) = ca();
        let name = UserName::new("box-1");
        let made = WorkerRequest::new(Some(&name)).unwrap();
        let request = CheckedRequest::check(made.request.clone()).unwrap();
        assert_eq!(request.asked(), Some("box-1"));
        let (pem, read) = ca.issue_worker(&request, &name, "e1", NOW, DAY).unwrap();
        assert_eq!(read, WorkerCertificate::read_pem(&pem).unwrap());
        assert_eq!((&read.name, read.enrolment.as_str()), (&name, "e1"));
        assert_eq!(read.not_after, NOW.after(DAY));

        let other = UserName::new("box-2");
        let refused = ca.issue_worker(&request, &other, "e1", NOW, DAY);
        assert!(matches!(refused, Err(CaError::OtherName { .. })));
        let open = CheckedRequest::check(WorkerRequest::new(None).unwrap().request).unwrap();
        assert_eq!(open.asked(), None);
        let (_, read) = ca.issue_worker(&open, &other, "e2", NOW, DAY).unwrap();
        assert_eq!(read.name, other);
    }

    #[test]
    fn whoever_asks_has_the_key() {
        let good = WorkerRequest::new(Some(&UserName::new("box"))).unwrap().request;
        let others = WorkerRequest::new(Some(&UserName::new("box"))).unwrap().request;
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
    fn a_servers_certificate_is_no_workers_and_has_its_names() {
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
