//! Reasons why a coordinator does not accept this worker.

/// Why it is no use to go on asking the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The token or certificate is no good, or may not do this.
    #[error("the coordinator refused this worker's token or certificate: {0}")]
    Token(String),
    /// It speaks another version of the protocol, or does not understand our registration.
    #[error("the coordinator refused this worker: {0}")]
    Protocol(String),
    /// The address, the certificate or the token cannot be used at all.
    #[error("{0}")]
    Config(String),
    /// It sent us away for good.
    #[error("the coordinator sent this worker away: {0}")]
    SentAway(String),
}
