//! Backup of the store of a running coordinator, and restore into an empty store.

use crate::data_folder::{self, DataFolderError};
use crate::server::DATABASE;
use crate::store::{BackupCounts, BackupError, DatabaseUrl, SqlStore, Store};
use aitk_common::control_plane::UnixMillis;
use aitk_common::fsutil;
use futures::future::BoxFuture;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Why a backup or a restore failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// Reading or writing the backup, or the database.
    #[error(transparent)]
    Backup(#[from] BackupError),
    /// The data folder.
    #[error(transparent)]
    DataFolder(#[from] DataFolderError),
    /// The backup's own file.
    #[error(transparent)]
    File(#[from] fsutil::FsError),
}

/// Writes the store in `data_dir`, or in `database`, to `file`: completely or not at all, readable only by its owner.
/// The coordinator may run at the same time. Blobs are not included.
///
/// # Errors
/// [`CopyError`]
pub fn backup<'a>(
    data_dir: &'a Path,
    database: Option<&'a DatabaseUrl>,
    file: &'a Path,
) -> BoxFuture<'a, Result<BackupCounts, CopyError>> {
    // Boxed: compiled once, in this crate.
    Box::pin(write_backup(data_dir, database, file))
}

async fn write_backup(data_dir: &Path, database: Option<&DatabaseUrl>, file: &Path) -> Result<BackupCounts, CopyError> {
    let store = match database {
        Some(url) => SqlStore::postgres_read_only(url).await,
        None => SqlStore::sqlite_read_only(&data_dir.join(DATABASE)).await,
    }
    .map_err(BackupError::from)?;
    let failed = |error| fsutil::FsError::new("write the backup", file, error);
    let temporary = fsutil::temporary_file(fsutil::folder_of(file), 0o600).map_err(failed)?;
    let mut out = BufWriter::new(temporary.as_file());
    let counts = store.backup(&mut out).await;
    store.close().await;
    let counts = counts?;
    drop(out);
    temporary.as_file().sync_all().map_err(failed)?;
    fsutil::publish(temporary, file)?;
    Ok(counts)
}

/// Restores a backup into the empty store in `data_dir`, or in `database`. No coordinator may be running on it.
///
/// # Errors
/// [`CopyError`]; nothing is changed in this case.
pub fn restore<'a>(
    data_dir: &'a Path,
    database: Option<&'a DatabaseUrl>,
    file: &'a Path,
) -> BoxFuture<'a, Result<BackupCounts, CopyError>> {
    // Boxed: compiled once, in this crate.
    Box::pin(read_backup(data_dir, database, file))
}

async fn read_backup(data_dir: &Path, database: Option<&DatabaseUrl>, file: &Path) -> Result<BackupCounts, CopyError> {
    let mut from = File::open(file).map_err(|error| fsutil::FsError::new("read the backup", file, error))?;
    let data_dir = data_folder::create(data_dir)?;
    let _lock = data_folder::lock(&data_dir)?;
    let store = match database {
        Some(url) => SqlStore::postgres(url).await,
        None => SqlStore::sqlite(&data_dir.join(DATABASE)).await,
    }
    .map_err(BackupError::from)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let counts = store.restore(&mut from, UnixMillis(0).after(now)).await;
    store.close().await;
    Ok(counts?)
}
