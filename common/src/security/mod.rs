//! Tokens, roles and certificates.

#[cfg(feature = "pki")]
pub mod ca;
pub mod join;
pub mod role;
#[cfg(feature = "pki")]
pub mod server_certificate;
pub mod token;
