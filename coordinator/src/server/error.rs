//! Errors of starting and running a coordinator.

use crate::access::AccessError;
use crate::data_folder::DataFolderError;
use crate::pki::PkiError;
use crate::store::StoreError;
use aitk_common::security::token::TokenError;
use aitk_common::storage::StorageError;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Why a coordinator does not start. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The network could read tokens and data.
    #[error(
        "refusing to listen on {bind} without TLS: everyone on the network could read the token and the data; \
         run `aitk-coordinator init` once, which makes a certificate authority (or give --tls-cert and --tls-key), or bind 127.0.0.1"
    )]
    Plaintext {
        /// The address.
        bind: SocketAddr,
    },
    /// The address cannot be bound.
    #[error(
        "cannot listen on {bind}; stop the program that uses this address (perhaps another coordinator), or choose another port with --bind"
    )]
    Bind {
        /// The address.
        bind: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The metrics address cannot be used.
    #[error("cannot serve metrics at {bind}: {problem}; choose another address with --metrics-bind")]
    Metrics {
        /// The address.
        bind: SocketAddr,
        /// Why.
        problem: String,
    },
    /// The data folder cannot be used, or another coordinator has it.
    #[error(transparent)]
    DataFolder(#[from] DataFolderError),
    /// A certificate, a key or the authority cannot be used.
    #[error(transparent)]
    Tls(#[from] PkiError),
    /// The lease is too short.
    #[error("a lease of {} ms is too short; workers could not renew it in time. Give at least one second", lease.as_millis())]
    Lease {
        /// The lease.
        lease: Duration,
    },
    /// An option that a cluster needs is missing.
    #[error("several coordinators share a database and an object storage: with --advertise, give {missing} as well")]
    Cluster {
        /// The missing option.
        missing: &'static str,
    },
    /// The advertised address cannot be used.
    #[error("--advertise: {0}")]
    Advertise(String),
    /// The leader has a different token or storage.
    #[error("{what} of this coordinator differs from that of {leader}, which leads: {remedy}")]
    SettingsDiffer {
        /// What differs.
        what: &'static str,
        /// Address of the leader.
        leader: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The token cannot be read or created.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The object storage cannot be opened.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The database cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A token in the database cannot be read.
    #[error("the tokens in the database cannot be read; they may have been written by a newer version")]
    Tokens(#[source] serde_json::Error),
}

impl From<AccessError> for StartError {
    fn from(error: AccessError) -> Self {
        match error {
            AccessError::Store(error) => Self::Store(error),
            AccessError::Record(error) => Self::Tokens(error),
            AccessError::NoToken(id) | AccessError::NoWorker(id) | AccessError::NotYours(id) => {
                Self::Tokens(serde::de::Error::custom(id))
            }
            AccessError::TooManyWorkers { name, .. } => Self::Tokens(serde::de::Error::custom(name)),
        }
    }
}

/// Why a running coordinator ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The database failed for too long.
    #[error("the coordinator ended because its database does not work")]
    Store(#[from] StoreError),
    /// The listener failed.
    #[error("the coordinator ended because its listener failed: {0}")]
    Serve(String),
}
