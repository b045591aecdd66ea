//! Connects a command to the running coordinator.

use super::console::default_data_dir;
use aitk_common::error_chain::error_chain;
use aitk_common::security::ca::CERT_FILE;
use aitk_common::security::join;
use aitk_common::security::token::Token;
use aitk_coordinator::{ClientAddress, ca_folder};
use aitk_proto::client::{Clients, connect};
use clap::Args;
use std::net::IpAddr;
use std::path::PathBuf;
use tonic::Status;

/// Address and credentials of the coordinator.
#[derive(Debug, Args)]
pub(crate) struct RemoteArgs {
    /// Address of the coordinator. Default: where the one with this data folder listens.
    #[arg(long, env = "AITK_SERVER", value_name = "URL")]
    server: Option<String>,
    /// File with an administrator's token. Default: $AITK_TOKEN, $AITK_TOKEN_FILE, or `token` in the data folder.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// PEM file with the certificate authority of the coordinator.
    #[arg(long, env = "AITK_CA_FILE", value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Data folder of the coordinator, where its token lies. Default: as for the coordinator itself.
    #[arg(long, env = "AITK_COORDINATOR_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

impl RemoteArgs {
    /// Returns the coordinator's address for other machines.
    pub(crate) fn remote_address(&self) -> String {
        if let Some(server) = &self.server {
            // A loopback address means another machine there.
            if !is_loopback(server) {
                return server.clone();
            }
            let port = host_and_port(server).1.unwrap_or("7420");
            return format!("https://HOST:{port}");
        }
        let dir = self.data_dir.clone().map_or_else(default_data_dir, Ok);
        let address = dir.ok().and_then(|dir| ClientAddress::read(&dir));
        address.map_or_else(|| "https://HOST:7420".to_owned(), |address| address.remote_address())
    }

    /// Returns the address for `aitk login`. A coordinator without TLS is only reachable from its own machine.
    pub(crate) fn login_address(&self) -> String {
        let plain = match &self.server {
            Some(server) => Some(server.clone()),
            None => {
                let dir = self.data_dir.clone().map_or_else(default_data_dir, Ok);
                dir.ok()
                    .and_then(|dir| ClientAddress::read(&dir))
                    .map(|address| address.here)
            }
        };
        // Without a scheme, an address of this machine is one without TLS.
        let is_plain = |address: &String| address.starts_with("http://") || !address.contains("://");
        match plain.filter(|address| is_plain(address) && is_loopback(address)) {
            Some(address) => format!("{address} (on this machine; others need TLS, see docs/network.md)"),
            None => self.remote_address(),
        }
    }

    /// Connects to the coordinator.
    pub(crate) async fn connect(&self) -> anyhow::Result<Clients> {
        let dir = || self.data_dir.clone().map_or_else(default_data_dir, Ok);
        let token = match &self.token_file {
            Some(path) => Token::read(path)?,
            None => match Token::from_env(&|name| std::env::var(name).ok())? {
                Some(token) => token,
                None => Token::read(&dir()?.join("token")).map_err(|error| {
                    anyhow::anyhow!(
                        "no token was given, and that in the data folder cannot be used: {}; if the coordinator is a service, run \
                         the command as its user and with its folder: sudo -u aitk aitk-coordinator … --data-dir /var/lib/aitk",
                        error_chain(&error)
                    )
                })?,
            },
        };
        // The data folder contains the authority of the coordinator's certificate.
        let authority = dir()
            .ok()
            .map(|dir| ca_folder(&dir).join(CERT_FILE))
            .filter(|path| path.exists());
        let address = dir().ok().and_then(|dir| ClientAddress::read(&dir));
        let server = match (&self.server, &address, &authority) {
            (Some(server), ..) => server.as_str(),
            (None, Some(address), _) => address.here.as_str(),
            (None, None, Some(_)) => "https://localhost:7420",
            (None, None, None) => "http://127.0.0.1:7420",
        };
        let names_one = join::split(token.secret()).1.is_some();
        let ca_file = self.ca_file.as_ref().or(authority.as_ref().filter(|_| !names_one));
        Ok(connect(server, token.secret(), ca_file.map(PathBuf::as_path)).await?)
    }
}

/// The host of a coordinator's address, without the brackets of IPv6, and its port if it has one.
fn host_and_port(server: &str) -> (&str, Option<&str>) {
    let rest = server.trim();
    let rest = rest.split_once("://").map_or(rest, |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    (host, port.filter(|port| !port.is_empty()))
}

/// Whether this is an address that a machine has for itself.
fn is_loopback(server: &str) -> bool {
    let (host, _) = host_and_port(server);
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Converts a status to an error with only its message.
pub(crate) fn call_error(status: &Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_for_others_replace_only_those_of_this_machine() {
        for (server, remote, login) in [
            ("https://localhost:7421/", "https://HOST:7421", "https://HOST:7421"),
            ("https://[::1]", "https://HOST:7420", "https://HOST:7420"),
            ("http://[::1]:80", "https://HOST:80", "http://[::1]:80 (on this"),
            ("localhost:99", "https://HOST:99", "localhost:99 (on this"),
            (
                "https://localhost.lab:7420",
                "https://localhost.lab:7420",
                "https://localhost.lab:7420",
            ),
            ("gpu.lab", "gpu.lab", "gpu.lab"),
        ] {
            let args = RemoteArgs {
                server: Some(server.to_owned()),
                token_file: None,
                ca_file: None,
                data_dir: None,
            };
            assert_eq!(args.remote_address(), remote, "{server}");
            assert!(args.login_address().starts_with(login), "{}", args.login_address());
        }
    }
}
