//! The data folder of a coordinator: creation and locking.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use url::Url;

/// Why the data folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataFolderError {
    /// It cannot be created or accessed.
    #[error("cannot use the data folder {}", path.display())]
    Unusable {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another coordinator has locked it.
    #[error("another coordinator runs on the data folder {}; stop it first, or choose another folder with --data-dir", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
}

/// How often locking the data folder is tried; with the pauses it takes half a second.
const LOCK_TRIES: u32 = 25;
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Creates the data folder if necessary, accessible only by its owner, and returns its absolute path.
pub(crate) fn create(path: &Path) -> Result<PathBuf, DataFolderError> {
    let failed = |source| DataFolderError::Unusable {
        path: path.to_owned(),
        source,
    };
    let path = std::path::absolute(path).map_err(failed)?;
    create_private(&path).map_err(failed)?;
    Ok(path)
}

/// Creates a folder that only its owner can access, unless there is one.
fn create_private(path: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt;
        builder.mode(0o700);
    }
    builder.create(path)
}

/// Locks the data folder. The system releases the lock when the process ends, however that happens.
pub(crate) fn lock(data_dir: &Path) -> Result<File, DataFolderError> {
    let failed = |source| DataFolderError::Unusable {
        path: data_dir.to_owned(),
        source,
    };
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(data_dir.join("lock"))
        .map_err(failed)?;
    // A coordinator that is just ending still holds it; so does a child process that another thread is starting, until
    // its `exec`.
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_PAUSE),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
    }
    Err(DataFolderError::InUse {
        path: data_dir.to_owned(),
    })
}

pub(crate) fn local_storage_url(data_dir: &Path) -> Result<String, DataFolderError> {
    let path = data_dir.join("storage");
    create_private(&path).map_err(|source| DataFolderError::Unusable {
        path: path.clone(),
        source,
    })?;
    Url::from_directory_path(&path)
        .map(|url| url.to_string())
        .map_err(|()| DataFolderError::Unusable {
            path,
            source: io::Error::new(io::ErrorKind::InvalidInput, "it has no address"),
        })
}

/// Empties the folder of temporary files, which may contain remains of a crash.
pub(crate) fn recreate(folder: &Path) -> Result<(), DataFolderError> {
    let failed = |source| DataFolderError::Unusable {
        path: folder.to_owned(),
        source,
    };
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    create_private(folder).map_err(failed)
}
