//! Why TLS cannot be set up.

use aitk_common::security::ca::CaError;
use std::path::PathBuf;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The certificate authority.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// A certificate or key file of the administrator.
    #[error("cannot use the TLS file {}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// The TLS library.
    #[error("TLS cannot be set up: {0}")]
    Library(String),
}
