//! The errors of the engine.
//!
//! Each message is for the user: what failed, where, what was expected, what to do. [`EngineError::cause`] classifies
//! the error, which decides whether the attempt is retried.

use aitk_common::attempt::FailureCause;
use aitk_common::fsutil::FsError;
use std::path::{Path, PathBuf};

/// A result with an [`EngineError`].
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file could not be read or written.
    #[error("{path}: {}", io_reason(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The disk is full.
    #[error("{path}: the disk is full: free some space, then run again (nothing that was saved earlier is lost)")]
    DiskFull {
        /// The file that was being written.
        path: PathBuf,
    },
    /// A file with weights has an unknown format, or is damaged.
    #[error("{path}: {reason}")]
    WeightsFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do.
        reason: String,
    },
    /// A pickle file. It is never opened, because it can run code.
    #[error(
        "{path}: this is a pickle file (.ckpt, .pt, .bin), which can run any code when it is opened, so aitk refuses it: \
         convert it to .safetensors, or download the .safetensors file of the same model"
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A tensor that the model needs is not in the file.
    #[error("{path}: tensor `{name}` is missing{}", nearest.as_ref().map(|n| format!(" (the nearest name there is `{n}`)")).unwrap_or_default())]
    MissingTensor {
        /// The file or folder.
        path: PathBuf,
        /// The full name of the tensor.
        name: String,
        /// The most similar name in the file.
        nearest: Option<String>,
    },
    /// The shape of a tensor does not match the model's config.
    #[error(
        "{path}: tensor `{name}` has shape {found:?}, but the model's config needs {expected:?}: weights and config belong to different models"
    )]
    ShapeMismatch {
        /// The file or folder.
        path: PathBuf,
        /// The full name of the tensor.
        name: String,
        /// The shape according to the config.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A config file of a model cannot be used.
    #[error("{path}: {message}")]
    ModelConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The process was told to stop, and did so.
    #[error("stopped")]
    Stopped,
    /// The job asks for something that is not supported (yet).
    #[error("{0}")]
    Unsupported(String),
    /// The job or its inputs are wrong.
    #[error("{0}")]
    BadInput(String),
    /// A device cannot be used.
    #[error("{device}: {message}")]
    Device {
        /// `cuda:0`, `metal`, `cpu`.
        device: String,
        /// Why, and what to do.
        message: String,
    },
    /// A bug of this program.
    #[error("internal error: {0}")]
    Internal(String),
    /// An operation on tensors failed.
    #[error("{}", without_backtrace(.0))]
    Tensor(#[from] candle_core::Error),
}

/// The message of candle's error, without the backtrace that it appends when RUST_BACKTRACE is set.
fn without_backtrace(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => without_backtrace(inner),
        other => other.to_string(),
    }
}

/// The reason of a file error, and what to do about it if that is known.
fn io_reason(source: &std::io::Error) -> String {
    use std::io::ErrorKind as K;
    match source.kind() {
        K::NotFound => "no such file or folder".into(),
        K::PermissionDenied => "permission denied: change its permissions, or choose another folder".into(),
        K::ReadOnlyFilesystem => "the file system is read-only: choose another folder".into(),
        K::AlreadyExists | K::NotADirectory => {
            "a file exists where a folder is needed: move it away, or choose another folder".into()
        }
        _ => source.to_string(),
    }
}

impl EngineError {
    /// An error of reading or writing `path`. A full disk becomes [`EngineError::DiskFull`]; an [`EngineError`] inside
    /// a [`std::io::Error::other`] is returned as it is.
    #[must_use]
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        let source = match source.downcast::<Self>() {
            Ok(error) => return error,
            Err(source) => source,
        };
        match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            _ => Self::Io { path, source },
        }
    }

    /// [`EngineError::BadInput`] with this message.
    #[must_use]
    pub fn bad_input(message: impl Into<String>) -> Self {
        Self::BadInput(message.into())
    }

    /// [`EngineError::ModelConfig`] with this message.
    #[must_use]
    pub fn model_config(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::ModelConfig {
            path: path.as_ref().to_path_buf(),
            message: message.into(),
        }
    }

    /// The kind of failure, which decides whether the attempt is retried.
    #[must_use]
    pub fn cause(&self) -> FailureCause {
        match self {
            Self::DiskFull { .. } => FailureCause::DiskFull,
            Self::Io { source, .. } => match source.kind() {
                std::io::ErrorKind::OutOfMemory => FailureCause::OutOfMemory,
                std::io::ErrorKind::NotFound
                | std::io::ErrorKind::PermissionDenied
                | std::io::ErrorKind::InvalidData
                | std::io::ErrorKind::IsADirectory
                | std::io::ErrorKind::NotADirectory => FailureCause::BadInput,
                _ => FailureCause::Machine,
            },
            Self::WeightsFile { .. }
            | Self::Pickle { .. }
            | Self::MissingTensor { .. }
            | Self::ShapeMismatch { .. }
            | Self::ModelConfig { .. }
            | Self::Unsupported(_)
            | Self::Stopped
            | Self::BadInput(_) => FailureCause::BadInput,
            Self::Device { .. } => FailureCause::Machine,
            Self::Internal(_) => FailureCause::Internal,
            Self::Tensor(error) => tensor_cause(error),
        }
    }
}

impl From<FsError> for EngineError {
    fn from(error: FsError) -> Self {
        match error {
            FsError::DiskFull { path, .. } => Self::DiskFull { path },
            FsError::Io { path, source, .. } => Self::io(path, source),
        }
    }
}

/// The cause of candle's error. Drivers report errors as text, so only the text shows that memory ran out.
fn tensor_cause(error: &candle_core::Error) -> FailureCause {
    use candle_core::Error as E;
    let text = error.to_string().to_lowercase();
    if text.contains("out of memory") || text.contains("out_of_memory") || text.contains("failed to allocate") {
        return FailureCause::OutOfMemory;
    }
    match error {
        E::Cuda(_) | E::Metal(_) => FailureCause::Machine,
        E::WithBacktrace { inner, .. } => tensor_cause(inner),
        _ => FailureCause::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_cause_that_decides_about_a_retry() {
        let full = EngineError::io("out/a.safetensors", std::io::ErrorKind::StorageFull.into());
        assert_eq!(full.cause(), FailureCause::DiskFull);
        assert!(full.to_string().contains("out/a.safetensors"));
        let gone = EngineError::io("a", std::io::ErrorKind::NotFound.into());
        assert_eq!(gone.cause(), FailureCause::BadInput);
        let read_only = EngineError::io("out/a", std::io::ErrorKind::ReadOnlyFilesystem.into());
        assert!(read_only.to_string().contains("choose another folder"), "{read_only}");
        let oom = EngineError::from(candle_core::Error::Msg("CUDA_ERROR_OUT_OF_MEMORY".into()));
        assert_eq!(oom.cause(), FailureCause::OutOfMemory);
    }
}
