//! Tokens that contain the hash of the certificate authority to trust.
//!
//! `aitk_SECRET.CA` is a user token; `aitk_join_SECRET.CA` is a join token, with which one machine joins as a worker. SECRET and
//! CA are 64 hexadecimal digits each; CA is the SHA-256 of the authority's certificate (DER). A client with such a token needs
//! no certificate file: the server's certificate chain must end in exactly that authority. Only the secret is sent.

use super::token::{Token, TokenError};
use crate::hash::ContentHash;
use std::fmt;

/// The prefix of join token secrets.
const JOIN_PREFIX: &str = "aitk_join_";
/// The prefix of all token secrets.
const TOKEN_PREFIX: &str = "aitk_";
const HEX: usize = 64;

/// A join token: a secret and the authority of the coordinator.
#[derive(Clone)]
pub struct JoinToken {
    /// The secret that is sent.
    pub secret: Token,
    /// SHA-256 of the certificate of the authority that must have issued the coordinator's certificate.
    pub ca: ContentHash,
}

/// A machine's request for a certificate. The key pair is ECDSA over P-256.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateRequest {
    /// The public key as an uncompressed point, 65 bytes.
    pub public_key: Vec<u8>,
    /// The requested name; empty: the name of the join token or machine.
    pub name: String,
    /// The signature over name and key, which proves possession of the private key.
    pub signature: Vec<u8>,
}

/// An invalid join token.
#[derive(Debug, thiserror::Error)]
pub enum JoinTokenError {
    /// The text does not have the form of a join token.
    #[error(
        "this is not a join token: expected aitk_join_…, a dot, and 64 hexadecimal digits, as `aitk-coordinator worker join-token` \
         prints it; check that it was copied completely"
    )]
    Malformed,
    /// The text is a user token.
    #[error("this is a user token, not a join token; create a join token with `aitk-coordinator worker join-token`")]
    UserToken,
    /// The secret is invalid.
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl JoinToken {
    /// Parses a join token.
    ///
    /// # Errors
    /// [`JoinTokenError`], which does not contain the text.
    pub fn parse(text: &str) -> Result<Self, JoinTokenError> {
        let (secret, ca) = split(text.trim());
        let Some(ca) = ca else {
            return Err(JoinTokenError::Malformed);
        };
        if !secret.starts_with(JOIN_PREFIX) {
            return Err(JoinTokenError::UserToken);
        }
        let secret = Token::parse(secret, "the join token")?;
        Ok(Self { secret, ca })
    }

    /// The text of the token.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}.{}", self.secret.secret(), self.ca)
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken(…, {})", self.ca)
    }
}

/// Generates a secret for a join token.
#[must_use]
pub fn new_join_secret() -> Token {
    Token::generate_with(JOIN_PREFIX)
}

/// Whether this is a join token secret.
#[must_use]
pub fn is_join_secret(text: &str) -> bool {
    text.strip_prefix(JOIN_PREFIX).is_some_and(is_hash)
}

/// Splits a token into its secret, which is sent, and the authority's hash. A token of another form is returned unchanged.
#[must_use]
pub fn split(text: &str) -> (&str, Option<ContentHash>) {
    let parts = || {
        let (secret, ca) = text.split_once('.')?;
        let random = secret
            .strip_prefix(JOIN_PREFIX)
            .or_else(|| secret.strip_prefix(TOKEN_PREFIX))?;
        let ca = ContentHash::parse(ca).ok()?;
        is_hash(random).then_some((secret, Some(ca)))
    };
    parts().unwrap_or((text, None))
}

fn is_hash(text: &str) -> bool {
    text.len() == HEX && ContentHash::parse(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip_through_text() {
        let ca = ContentHash::of(b"a certificate");
        let join = JoinToken {
            secret: new_join_secret(),
            ca,
        };
        let read = JoinToken::parse(&format!(" {}\n", join.text())).unwrap();
        assert!(read.secret.is(join.secret.secret()) && read.ca == ca);
        assert!(is_join_secret(join.secret.secret()));
        assert!(!format!("{join:?}").contains(&join.secret.secret()[12..20]));

        let user = Token::generate();
        let text = format!("{}.{ca}", user.secret());
        assert_eq!(split(&text), (user.secret(), Some(ca)));
        assert!(!is_join_secret(user.secret()));
        assert!(matches!(JoinToken::parse(&text), Err(JoinTokenError::UserToken)));
    }

    #[test]
    fn malformed_tokens_are_refused_without_repeating_them() {
        let good = JoinToken {
            secret: new_join_secret(),
            ca: ContentHash::of(b"x"),
        }
        .text();
        let cut = &good[..good.len() - 1];
        let longer = format!("{good}0");
        let swapped = good.replace('.', ":");
        let odd = good.replacen("aitk_join_", "aitk_join-", 1);
        for bad in ["", ".", "aitk_join_.", cut, &longer, &swapped, &odd, &good[1..], "ä.ö"] {
            let error = JoinToken::parse(bad).unwrap_err().to_string();
            assert!(!bad.is_ascii() || bad.len() < 20 || !error.contains(bad), "{error}");
            // `split` returns it unchanged.
            assert_eq!(split(bad), (bad, None), "{bad}");
        }
    }
}
