//! One text that lets somebody in: a secret, and the hash of the certificate authority to trust.
//!
//! `aitk_SECRET.CA` is a user's token, `aitk_join_SECRET.CA` lets one machine join as a worker. SECRET and CA are 64
//! hexadecimal digits each; CA is the SHA-256 of the authority's certificate (DER). Whoever has the text needs no
//! certificate file: the other side must show a chain that ends in exactly that authority. Only the secret is sent.

use super::token::{Token, TokenError};
use crate::hash::ContentHash;
use std::fmt;

/// How the secret of a join token begins.
const JOIN: &str = "aitk_join_";
/// How every secret of ours begins.
const ANY: &str = "aitk_";
const HEX: usize = 64;

/// A secret, and whom to show it to.
#[derive(Clone)]
pub struct Invitation {
    /// What is sent.
    pub secret: Token,
    /// SHA-256 of the certificate of the authority that the other side must come from.
    pub ca: ContentHash,
}

/// What a machine asks with for a certificate. Its key pair is ECDSA over P-256.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateRequest {
    /// The public key: an uncompressed point, 65 bytes.
    pub public_key: Vec<u8>,
    /// The name that it asks for; empty: whatever it may have.
    pub name: String,
    /// Made with the key, over name and key: whoever asks has the key.
    pub signature: Vec<u8>,
}

/// A text that is no join token.
#[derive(Debug, thiserror::Error)]
pub enum BadInvitation {
    /// It does not look like one.
    #[error(
        "this is no join token: expected aitk_join_…, a dot, and 64 hexadecimal digits, as `aitk-coordinator worker join-token` \
         shows it; was a part of it lost when it was copied?"
    )]
    Malformed,
    /// It is a user's.
    #[error("this is the token of a user, not a join token; `aitk-coordinator worker join-token` makes one")]
    OfUser,
    /// It cannot be read.
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl Invitation {
    /// Reads a join token.
    ///
    /// # Errors
    /// [`BadInvitation`], which never repeats the text.
    pub fn parse_join(text: &str) -> Result<Self, BadInvitation> {
        let (secret, ca) = split(text.trim());
        let Some(ca) = ca else {
            return Err(BadInvitation::Malformed);
        };
        if !secret.starts_with(JOIN) {
            return Err(BadInvitation::OfUser);
        }
        let secret = Token::parse(secret, "the join token")?;
        Ok(Self { secret, ca })
    }

    /// The whole text.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}.{}", self.secret.secret(), self.ca)
    }
}

impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Invitation(…, {})", self.ca)
    }
}

/// A new secret of a join token.
#[must_use]
pub fn join_secret() -> Token {
    Token::generate_with(JOIN)
}

/// Whether this is the secret of a join token.
#[must_use]
pub fn is_join_secret(text: &str) -> bool {
    text.strip_prefix(JOIN).is_some_and(is_hash)
}

/// The secret of a token, which is sent, and the authority that its text names. A token of another form is all secret.
#[must_use]
pub fn split(text: &str) -> (&str, Option<ContentHash>) {
    let parts = || {
        let (secret, ca) = text.split_once('.')?;
        let random = secret.strip_prefix(JOIN).or_else(|| secret.strip_prefix(ANY))?;
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
    fn a_text_is_taken_apart_as_it_was_put_together() {
        let ca = ContentHash::of(b"a certificate");
        let join = Invitation {
            secret: join_secret(),
            ca,
        };
        let read = Invitation::parse_join(&format!(" {}\n", join.text())).unwrap();
        assert!(read.secret.is(join.secret.secret()) && read.ca == ca);
        assert!(is_join_secret(join.secret.secret()));
        assert!(!format!("{join:?}").contains(&join.secret.secret()[12..20]));

        let user = Token::generate();
        let text = format!("{}.{ca}", user.secret());
        assert_eq!(split(&text), (user.secret(), Some(ca)));
        assert!(!is_join_secret(user.secret()));
        assert!(matches!(Invitation::parse_join(&text), Err(BadInvitation::OfUser)));
    }

    #[test]
    fn what_is_not_quite_one_is_refused_and_not_repeated() {
        let good = Invitation {
            secret: join_secret(),
            ca: ContentHash::of(b"x"),
        }
        .text();
        let cut = &good[..good.len() - 1];
        let longer = format!("{good}0");
        let swapped = good.replace('.', ":");
        let odd = good.replacen("aitk_join_", "aitk_join-", 1);
        for bad in ["", ".", "aitk_join_.", cut, &longer, &swapped, &odd, &good[1..], "ä.ö"] {
            let error = Invitation::parse_join(bad).unwrap_err().to_string();
            assert!(!bad.is_ascii() || bad.len() < 20 || !error.contains(bad), "{error}");
            // Whatever it is, it stays a token of its own.
            assert_eq!(split(bad), (bad, None), "{bad}");
        }
    }
}
