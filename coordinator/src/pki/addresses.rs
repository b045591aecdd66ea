//! Names and addresses of this machine for its certificate.

use crate::config::PkiConfig;
use aitk_common::fsutil;
use aitk_common::security::ca::{CaError, is_server_name};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

/// File beside the authority with additional host names, one per line.
const FILE: &str = "hostnames";

/// Stores the names of `init --hostname` for every later start. With none, the file stays as it is.
pub(super) fn write_names(folder: &Path, names: &[String]) -> Result<(), CaError> {
    if names.is_empty() {
        return Ok(());
    }
    fsutil::create_private_dir(folder)?;
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    fsutil::write_private(&folder.join(FILE), text.as_bytes())?;
    Ok(())
}

/// Reads the stored names; none, with a warning, when the file cannot be read.
pub(super) fn read_names(folder: &Path) -> Vec<String> {
    let path = folder.join(FILE);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            tracing::warn!(path = %path.display(), %error, "the host names for the certificate cannot be read and are left out");
        }
        String::new()
    });
    text.split_whitespace().map(ToOwned::to_owned).collect()
}

/// Returns all names and addresses for the certificate of a coordinator that listens at `bind`, without duplicates.
pub(super) fn names(bind: SocketAddr, hostnames: &[String]) -> Vec<String> {
    let mut names: BTreeSet<String> = hostnames.iter().cloned().collect();
    names.insert("localhost".to_owned());
    for loopback in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        names.insert(loopback.to_string());
    }
    if let Some(host) = host_name() {
        // Users often type only the first label.
        names.extend(host.split_once('.').map(|(first, _)| first.to_owned()));
        names.insert(host);
    }
    let ip = bind.ip().to_canonical();
    if ip.is_unspecified() {
        names.extend(local_addresses().iter().map(ToString::to_string));
    } else {
        names.insert(ip.to_string());
    }
    // Host names that are not valid in a certificate are left out.
    names.into_iter().filter(|name| is_server_name(name)).collect()
}

#[cfg(unix)]
fn host_name() -> Option<String> {
    nix::unistd::gethostname().ok()?.into_string().ok()
}

#[cfg(not(unix))]
fn host_name() -> Option<String> {
    std::env::var("COMPUTERNAME").ok()
}

/// All addresses of this machine, loopback too, except link-local ones.
#[cfg(unix)]
fn local_addresses() -> Vec<IpAddr> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else {
        return Vec::new();
    };
    let addresses = all.filter_map(|interface| {
        let address = interface.address?;
        let four = address.as_sockaddr_in().map(|four| IpAddr::V4(four.ip()));
        four.or_else(|| address.as_sockaddr_in6().map(|six| IpAddr::V6(six.ip())))
    });
    // A link-local address needs the name of an interface, which a certificate cannot contain.
    let named = |ip: &IpAddr| !matches!(ip, IpAddr::V6(six) if six.is_unicast_link_local());
    addresses.filter(named).collect()
}

#[cfg(not(unix))]
fn local_addresses() -> Vec<IpAddr> {
    Vec::new()
}

/// Returns the stored and the configured host names.
pub(super) fn server_names(pki: &PkiConfig) -> Vec<String> {
    let mut names = read_names(&pki.folder);
    names.extend(pki.hostnames.iter().cloned());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_has_the_configured_names_and_those_of_the_machine() {
        let hostnames = ["gpu.lab".to_owned(), "not a name".to_owned()];
        let some = names("10.1.2.3:7420".parse().unwrap(), &hostnames);
        for name in ["gpu.lab", "localhost", "127.0.0.1", "::1", "10.1.2.3"] {
            assert!(some.iter().any(|other| other == name), "{name}: {some:?}");
        }
        assert!(!some.contains(&"not a name".to_owned()));
        let all = names("[::]:7420".parse().unwrap(), &[]);
        assert!(
            !all.iter().any(|name| name == "::" || name.starts_with("fe80:")),
            "{all:?}"
        );

        let folder = tempfile::tempdir().unwrap();
        assert!(read_names(folder.path()).is_empty());
        write_names(folder.path(), &hostnames[..1]).unwrap();
        assert_eq!(read_names(folder.path()), ["gpu.lab"]);
    }
}
