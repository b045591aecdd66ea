//! Why a coordinator does not accept this worker.

/// Why the coordinator does not accept this worker. Trying again does not help until somebody changes something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The token or certificate is invalid, or lacks the permission.
    #[error("the coordinator refused this worker's token or certificate: {0}")]
    Token(String),
    /// The coordinator speaks another version of the protocol, or does not understand our registration.
    #[error("the coordinator refused this worker: {0}")]
    Protocol(String),
    /// The address, the certificate or the token cannot be used at all.
    #[error("{0}")]
    Config(String),
    /// The coordinator ended this worker's session for good.
    #[error("the coordinator ended this worker's session: {0}")]
    SessionEnded(String),
}
