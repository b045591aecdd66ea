//! The addresses of a running coordinator, written to its data folder for local commands.

use crate::config::Config;
use crate::pki;
use aitk_common::fsutil;
use serde::{Deserialize, Serialize};
use std::net::{Ipv6Addr, SocketAddr};
use std::path::Path;

/// The file, in the data folder.
const FILE: &str = "address.json";

/// Returns the address of a coordinator with TLS that has this name or IP address. An address of IPv6 gets brackets.
#[must_use]
pub fn https_address(host: &str, port: u16) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(ip) => format!("https://[{ip}]:{port}"),
        Err(_) => format!("https://{host}:{port}"),
    }
}

/// Addresses of a coordinator for clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientAddress {
    /// For this machine.
    pub here: String,
    /// For other machines, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<String>,
}

impl ClientAddress {
    /// Returns the addresses of a coordinator with this config that listens at `addr`.
    pub(crate) fn of(config: &Config, addr: SocketAddr) -> Self {
        let tls = config.tls.is_some() || config.pki.is_some();
        let port = addr.port();
        let ip = addr.ip().to_canonical();
        let here = match (tls, ip.is_unspecified() || ip.is_loopback()) {
            // The certificate covers the machine's names and addresses, and always `localhost`.
            (true, true) => format!("https://localhost:{port}"),
            (true, false) => format!("https://{addr}"),
            (false, _) => format!("http://{addr}"),
        };
        let host = config.pki.as_ref().and_then(pki::first_name);
        let advertised = config.cluster.as_ref().map(|cluster| cluster.address.clone());
        let elsewhere = advertised
            .or_else(|| host.map(|host| https_address(&host, port)))
            .or_else(|| (!ip.is_unspecified() && !ip.is_loopback()).then(|| here.clone()));
        Self { here, elsewhere }
    }

    /// Writes the addresses to the data folder. A failure is logged only: the coordinator can run without the file.
    pub(crate) fn write(&self, data_dir: &Path) {
        let path = data_dir.join(FILE);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        if let Err(error) = fsutil::write_private(&path, &text) {
            tracing::warn!(%error, "cannot write the address file; local commands need --server");
        }
    }

    /// Reads the addresses of the coordinator that runs, or last ran, on this data folder; `None` when the file is
    /// missing or unreadable.
    #[must_use]
    pub fn read(data_dir: &Path) -> Option<Self> {
        let text = std::fs::read(data_dir.join(FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Returns the address to use on another machine, with the placeholder HOST when it is unknown.
    #[must_use]
    pub fn remote_address(&self) -> String {
        let port = self.here.rsplit(':').next().unwrap_or_default();
        self.elsewhere.clone().unwrap_or_else(|| format!("https://HOST:{port}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_command_finds_the_port_of_the_coordinator() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(ClientAddress::read(folder.path()), None);
        let config = Config::new(folder.path());
        let at = |addr: &str| ClientAddress::of(&config, addr.parse().unwrap());
        let plain = at("127.0.0.1:7431");
        assert_eq!(
            (plain.here.as_str(), plain.remote_address().as_str()),
            ("http://127.0.0.1:7431", "https://HOST:7431")
        );
        plain.write(folder.path());
        assert_eq!(ClientAddress::read(folder.path()), Some(plain));
    }

    #[test]
    fn other_machines_use_the_first_name_that_was_given() {
        let folder = tempfile::tempdir().unwrap();
        let ca = pki::ca_folder(folder.path());
        let elsewhere = |hostnames: &[&str]| {
            let config = Config {
                pki: Some(crate::config::PkiConfig {
                    hostnames: hostnames.iter().map(|name| (*name).to_owned()).collect(),
                    ..crate::config::PkiConfig::new(ca.clone())
                }),
                ..Config::new(folder.path())
            };
            ClientAddress::of(&config, "0.0.0.0:7431".parse().unwrap()).remote_address()
        };
        assert_eq!(elsewhere(&[]), "https://HOST:7431");
        pki::init(folder.path(), &["gpu.lab".to_owned(), "203.0.113.7".to_owned()]).unwrap();
        assert_eq!(elsewhere(&[]), "https://gpu.lab:7431");
        assert_eq!(elsewhere(&["fd00::5"]), "https://[fd00::5]:7431");
    }
}
