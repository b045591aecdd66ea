//! The address at which this program and its worker reach the coordinator that it starts itself.

use crate::failure::Failure;
use aitk_common::security::server_certificate::ServerCertificate;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

/// How long all names together may take to look up. A resolver that does not answer takes this long for one name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// How many names are looked up. A certificate may have any number.
const MAX_LOOKUPS: usize = 16;

/// The host in the address of a coordinator that listens at `bind`. With TLS it is one that the certificate is valid for: the address, or
/// else `localhost`, the name of this machine, or a name of the certificate, where that leads to the coordinator.
///
/// # Errors
/// When the certificate is valid for none of them: worker and commands would refuse it.
pub(crate) async fn host_of(bind: IpAddr, certificate: Option<&Path>) -> Result<String, Failure> {
    // A coordinator that listens on all addresses is reached at loopback.
    let ip = match bind {
        ip if ip.is_unspecified() && ip.is_ipv4() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    let host = match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let Some(path) = certificate else { return Ok(host) };
    // If the file is no certificate, the coordinator says what is wrong with it.
    let Some(certificate) = ServerCertificate::read(path) else {
        return Ok(host);
    };
    if certificate.is_valid_for(&ip.to_string()) {
        return Ok(host);
    }
    let names = certificate.host_names();
    let candidates = ["localhost".to_owned(), aitk_worker::host_name()].into_iter();
    let candidates: Vec<String> = candidates
        .chain(names.iter().cloned())
        // A name with a wildcard is no host.
        .filter(|name| !name.contains('*') && certificate.is_valid_for(name))
        .collect();
    if let Some(name) = find_name(candidates, LOOKUP_TIMEOUT, |name| leads_to(name, bind)).await {
        return Ok(name);
    }
    let named = match names.first() {
        Some(_) => format!("is for {}", names.join(", ")),
        None => "has no host name".to_owned(),
    };
    let example = names.iter().find(|name| !name.contains('*'));
    let example = example.map_or("NAME", String::as_str);
    Err(Failure::failed(format!(
        "the certificate {} {named}; it is not valid for {ip}, and none of its names leads to this machine at {bind}, so the worker and the \
         commands of this machine could not connect",
        path.display()
    ))
    .hint(format!(
        "give this machine a name of the certificate, with a line in /etc/hosts: {ip} {example}"
    ))
    .hint(format!("or use a certificate that is also valid for localhost or {ip}")))
}

/// The first of these names that leads to the coordinator. Only the first names are looked up, all of them within `limit`.
async fn find_name<F: Future<Output = bool>>(
    names: Vec<String>,
    limit: Duration,
    leads_here: impl Fn(String) -> F,
) -> Option<String> {
    let find = async {
        for name in names.into_iter().take(MAX_LOOKUPS) {
            if leads_here(name.clone()).await {
                return Some(name);
            }
        }
        None
    };
    tokio::time::timeout(limit, find).await.ok().flatten()
}

/// Whether a name leads to this machine, and to a listener at this address of it.
async fn leads_to(name: String, bind: IpAddr) -> bool {
    let Ok(found) = tokio::net::lookup_host((name, 0)).await else {
        return false;
    };
    let found: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    let listens_at = |ip: &IpAddr| match bind.is_unspecified() {
        true => bind.is_ipv6() || ip.is_ipv4(),
        false => *ip == bind,
    };
    // Only an address of this machine can be bound.
    let is_here = |ip: &IpAddr| ip.is_loopback() || UdpSocket::bind((*ip, 0)).is_ok();
    found.iter().any(listens_at) && found.iter().all(is_here)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The host of a coordinator that listens at `bind`, with a certificate for these names.
    async fn host(folder: &Path, bind: &str, names: &[&str]) -> Result<String, Failure> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let path = folder.join("cert.pem");
        std::fs::write(&path, made.cert.pem()).unwrap();
        host_of(bind.parse().unwrap(), Some(&path)).await
    }

    #[tokio::test]
    async fn names_are_looked_up_for_a_limited_time_and_not_all_of_them() {
        let names: Vec<String> = (0..100).map(|index| format!("name{index}.lab")).collect();
        let looked_up = AtomicUsize::new(0);
        let none = find_name(names.clone(), LOOKUP_TIMEOUT, |_| {
            looked_up.fetch_add(1, Ordering::Relaxed);
            std::future::ready(false)
        });
        assert_eq!(none.await, None);
        assert_eq!(looked_up.load(Ordering::Relaxed), MAX_LOOKUPS);
        let short = Duration::from_millis(10);
        assert_eq!(find_name(names.clone(), short, |_| std::future::pending()).await, None);
        let third = find_name(names, LOOKUP_TIMEOUT, |name| std::future::ready(name == "name2.lab"));
        assert_eq!(third.await.as_deref(), Some("name2.lab"));
    }

    #[tokio::test]
    async fn the_certificate_is_valid_for_the_own_address() {
        let folder = tempfile::tempdir().unwrap();
        // No host has this name, so that nothing is asked for it.
        let elsewhere = "*.gpu.lab";
        for (bind, names, expected) in [
            ("127.0.0.1", vec!["127.0.0.1", "localhost"], "127.0.0.1"),
            ("0.0.0.0", vec!["127.0.0.1"], "127.0.0.1"),
            ("::", vec!["::1"], "[::1]"),
            ("127.0.0.1", vec!["localhost"], "localhost"),
            ("0.0.0.0", vec![elsewhere, "localhost"], "localhost"),
        ] {
            let found = host(folder.path(), bind, &names).await;
            assert_eq!(found.as_deref(), Ok(expected), "{bind}: {names:?}");
        }
        // `localhost` leads to 127.0.0.1, where the second coordinator does not listen.
        for (bind, name) in [("127.0.0.1", elsewhere), ("127.0.0.2", "localhost")] {
            let failure = host(folder.path(), bind, &[name]).await.unwrap_err();
            assert!(
                failure.message.contains(name) && failure.hints[0].contains(&format!("/etc/hosts: {bind} ")),
                "{failure:?}"
            );
        }
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        assert_eq!(host_of(any, None).await.as_deref(), Ok("127.0.0.1"));
        let path = folder.path().join("broken.pem");
        std::fs::write(&path, "no certificate").unwrap();
        let listener = IpAddr::from([10, 1, 2, 3]);
        assert_eq!(host_of(listener, Some(&path)).await.as_deref(), Ok("10.1.2.3"));
    }
}
