//! Tokens, roles and certificates.

#[cfg(feature = "pki")]
pub mod ca;
pub mod join;
pub mod role;
pub mod token;
