//! Which addresses may get the user's token.

use super::upload::PushError;
use reqwest::Url;
use std::net::IpAddr;

/// Checks the address of a hub: with TLS, except on this machine, and without a password of its own.
///
/// # Errors
/// [`PushError::Refused`], which does not repeat a password.
pub fn check_endpoint(endpoint: &str) -> Result<(), PushError> {
    let refused = |why: String| Err(PushError::Refused(format!("HF_ENDPOINT: {why}")));
    let url = match Url::parse(endpoint) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => url,
        _ => return refused("expected an address such as https://huggingface.co".to_owned()),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return refused("the address has a user name or a password: remove it, and set HF_TOKEN".to_owned());
    }
    if url.scheme() == "http" && !is_this_machine(&url) {
        return refused(format!(
            "{} has no TLS, so that others on the network could read the token: use https",
            shown(&url)
        ));
    }
    Ok(())
}

/// Whether an address is one of this machine.
fn is_this_machine(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address: Result<IpAddr, _> = host.trim_start_matches('[').trim_end_matches(']').parse();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// An address without path and query, which can hold a signature.
pub(super) fn shown(url: &Url) -> String {
    let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}://{}{port}", url.scheme(), url.host_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_to_addresses_with_tls_and_to_this_machine() {
        for good in [
            "https://huggingface.co",
            "https://hub.lab:8443/",
            "http://localhost:9000",
            "http://127.0.0.1:1",
            "http://[::1]:80/hub",
        ] {
            assert!(check_endpoint(good).is_ok(), "{good}");
        }
        for (bad, why) in [
            ("http://hub.lab", "http://hub.lab has no TLS"),
            ("http://10.0.0.7:9000", "has no TLS"),
            ("http://localhost.example.com", "has no TLS"),
            ("https://me:secret@hub.lab", "password"),
            ("ftp://hub.lab", "expected an address"),
            ("file:///etc", "expected an address"),
            ("hub.lab", "expected an address"),
        ] {
            let message = check_endpoint(bad).unwrap_err().to_string();
            assert!(message.contains(why) && !message.contains("secret"), "{bad}: {message}");
        }
    }
}
