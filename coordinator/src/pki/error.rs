//! Why there is no TLS.

use aitk_common::security::ca::CaError;
use std::path::PathBuf;

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The authority.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// A certificate or key that the administrator gave.
    #[error("cannot use the TLS file {}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// The library.
    #[error("TLS cannot be set up: {0}")]
    Library(String),
}
