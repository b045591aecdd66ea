//! Atomic and durable file operations.
//!
//! Every important file is written in its final folder under a name that starts with
//! [`TEMPORARY_PREFIX`], synced and renamed, and then the folder is synced: after a power cut or a SIGKILL at any
//! time either the old or the new file exists. "Disk full" is an error variant of its own, because users can fix it and
//! because another machine can run the task.

mod deep;
pub mod names;
pub mod regular;

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The prefix of the names of unfinished files and folders. [`remove_abandoned`] removes files and folders with this prefix.
pub const TEMPORARY_PREFIX: &str = ".tmp-";
/// On file systems without locks, unfinished files of this age count as abandoned.
const ABANDONED_AGE: Duration = Duration::from_secs(24 * 3600);

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// No space left, a quota, or a file size limit.
    #[error("disk full: could not {action} {path}; free some space there, or choose a folder on another disk")]
    DiskFull {
        /// The operation as a verb: `write`.
        action: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Any other failure.
    #[error("could not {action} {path}: {source}")]
    Io {
        /// The operation as a verb: `write`.
        action: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl FsError {
    /// Wraps a system error. A full disk becomes [`FsError::DiskFull`].
    #[must_use]
    pub fn new(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if is_disk_full(&source) {
            Self::DiskFull { action, path, source }
        } else {
            Self::Io { action, path, source }
        }
    }

    /// Whether the disk was full.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::DiskFull { .. })
    }

    /// The system's error.
    #[must_use]
    pub fn io(&self) -> &io::Error {
        match self {
            Self::DiskFull { source, .. } | Self::Io { source, .. } => source,
        }
    }

    /// The path of the file or folder on which the operation failed.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::DiskFull { path, .. } | Self::Io { path, .. } => path,
        }
    }
}

/// Whether an error means that the disk is full: no space, a quota, or a file size limit.
#[must_use]
pub fn is_disk_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// Writes a file atomically and durably: readers see the old or the new file, and the new one survives a power cut once this returns.
///
/// The folder must exist. The mode of a new file follows the umask.
///
/// # Errors
/// [`FsError`]; the old file is then unchanged and no temporary file remains.
pub fn write_atomic<T>(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<T>) -> Result<T, FsError> {
    write_atomic_mode(path, 0o666, write)
}

/// [`write_atomic`] for a file that only its owner may read (mode 0600).
///
/// # Errors
/// As [`write_atomic`].
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), FsError> {
    write_atomic_mode(path, 0o600, |out| out.write_all(bytes))
}

fn write_atomic_mode<T>(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<T>,
) -> Result<T, FsError> {
    let fail = |source| FsError::new("write", path, source);
    let temporary = temporary_file(folder_of(path), mode).map_err(fail)?;
    let mut out = BufWriter::with_capacity(1 << 18, temporary.as_file());
    let value = write(&mut out).map_err(fail)?;
    out.flush().map_err(fail)?;
    drop(out);
    temporary.as_file().sync_all().map_err(fail)?;
    publish(temporary, path)?;
    Ok(value)
}

/// Creates an unfinished file in `folder`. It is locked, so that [`remove_abandoned`] leaves it alone, and is removed when dropped.
///
/// # Errors
/// The system's error.
pub fn temporary_file(folder: &Path, mode: u32) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY_PREFIX);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(mode));
    }
    #[cfg(not(unix))]
    let _ = mode;
    loop {
        let file = builder.tempfile_in(folder)?;
        // On a file system without locks this fails; `remove_abandoned` then uses the age.
        let _ = file.as_file().lock();
        // `remove_abandoned` may have removed the file between its creation and the lock.
        if file.path().exists() {
            return Ok(file);
        }
    }
}

/// An unfinished folder, locked so that [`remove_abandoned`] leaves it alone. If it was not renamed, dropping removes it with its contents.
#[derive(Debug)]
pub struct TemporaryFolder {
    path: PathBuf,
    _lock: File,
}

impl TemporaryFolder {
    /// Creates an unfinished folder in `parent`, which is created if necessary. `tag` becomes part of its name.
    ///
    /// # Errors
    /// [`FsError`].
    pub fn new(parent: &Path, tag: &str) -> Result<Self, FsError> {
        create_dir_all(parent)?;
        loop {
            let path = parent.join(format!("{TEMPORARY_PREFIX}{tag}-{}", uuid::Uuid::new_v4().simple()));
            fs::create_dir(&path).map_err(|error| FsError::new("create the folder", &path, error))?;
            let lock = match File::open(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(FsError::new("open the folder", &path, error)),
            };
            let _ = lock.lock();
            if path.is_dir() {
                return Ok(Self { path, _lock: lock });
            }
        }
    }

    /// The folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // After `publish` nothing exists at this path. `remove` renames the folder first, so that cancelled work that still
        // runs on another thread cannot create files in it during the removal.
        let _ = remove(&self.path);
    }
}

/// Renames a finished, synced temporary file to `path`, and syncs the folder.
///
/// # Errors
/// [`FsError`]; the temporary file is then removed.
pub fn publish(temporary: tempfile::NamedTempFile, path: &Path) -> Result<(), FsError> {
    temporary
        .persist(path)
        .map_err(|error| FsError::new("put in place", path, error.error))?;
    sync_dir(folder_of(path))
}

/// The parent folder of a path; `.` for a bare file name.
#[must_use]
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Syncs a folder, so that renames, creations and removals in it survive a power cut.
///
/// # Errors
/// [`FsError`].
pub fn sync_dir(folder: &Path) -> Result<(), FsError> {
    #[cfg(unix)]
    File::open(folder)
        .and_then(|handle| handle.sync_all())
        .map_err(|source| FsError::new("sync the folder", folder, source))?;
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// Creates a folder and its parents durably.
///
/// # Errors
/// [`FsError`].
pub fn create_dir_all(folder: &Path) -> Result<(), FsError> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent = folder_of(folder);
    if parent != folder {
        create_dir_all(parent)?;
    }
    match fs::create_dir(folder) {
        Ok(()) => sync_dir(parent),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        Err(error) => Err(FsError::new("create the folder", folder, error)),
    }
}

/// [`create_dir_all`] for a folder that only its owner may enter (mode 0700). An existing folder keeps its mode.
///
/// # Errors
/// [`FsError`].
pub fn create_private_dir(folder: &Path) -> Result<(), FsError> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent = folder_of(folder);
    create_dir_all(parent)?;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt;
        builder.mode(0o700);
    }
    builder
        .create(folder)
        .map_err(|error| FsError::new("create the folder", folder, error))?;
    sync_dir(parent)
}

/// How often the removal of a folder is retried when cancelled work that still runs on another thread creates files in it
/// meanwhile.
const MAX_REMOVE_TRIES: u32 = 10;

/// Removes a file or a folder with its contents. It is renamed first, so that other processes never see a partial folder.
///
/// # Errors
/// [`FsError`]. A path that does not exist is not an error.
pub fn remove(path: &Path) -> Result<(), FsError> {
    let folder = folder_of(path);
    let renamed = folder.join(format!("{TEMPORARY_PREFIX}removed-{}", uuid::Uuid::new_v4().simple()));
    match fs::rename(path, &renamed) {
        Ok(()) => remove_now(&renamed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(FsError::new("remove", path, error)),
    }
}

/// [`remove`] without the rename.
pub(crate) fn remove_now(path: &Path) -> Result<(), FsError> {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let (mut made_writable, mut flattened) = (false, false);
    for tries_left in (0..MAX_REMOVE_TRIES).rev() {
        let removed = if is_dir {
            fs::remove_dir_all(path)
        } else {
            fs::remove_file(path)
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && tries_left > 0 => {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Files cannot be removed from read-only folders.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_dir && !made_writable => {
                made_writable = true;
                make_removable(path);
            }
            Err(error) if deep::is_too_deep(&error) && is_dir && !flattened => {
                flattened = true;
                deep::remove_contents(path).map_err(|error| FsError::new("remove", path, error))?;
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(FsError::new("remove", path, error)),
            _ => break,
        }
    }
    Ok(())
}

/// Makes every folder of a tree writable for its owner. Errors are ignored; the removal reports them.
fn make_removable(folder: &Path) {
    deep::make_owner_writable(folder);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            make_removable(&entry.path());
        }
    }
}

/// Removes abandoned unfinished files and folders directly in `folder`: older than `age`, and not locked by a writer in this or
/// another process. Returns their number. On file systems without locks only entries older than a day are removed.
///
/// # Errors
/// [`FsError`] when the folder cannot be read; an entry that cannot be removed is logged and left for the next call.
pub fn remove_abandoned(folder: &Path, age: Duration) -> Result<usize, FsError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(FsError::new("read the folder", folder, error)),
    };
    let mut removed = 0;
    for entry in entries.flatten() {
        if !entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(TEMPORARY_PREFIX.as_bytes())
        {
            continue;
        }
        let is_old = entry.metadata().is_ok_and(|meta| is_older(&meta, age));
        if is_old && let Some(_lock) = lock_abandoned(&entry.path()) {
            match remove_now(&entry.path()) {
                Ok(()) => removed += 1,
                Err(error) => tracing::warn!(%error, "could not remove an unfinished file"),
            }
        }
    }
    Ok(removed)
}

/// Locks an unfinished file or folder whose writer is dead. The caller holds the lock while it removes it. None: the writer lives.
pub(crate) fn lock_abandoned(path: &Path) -> Option<File> {
    let handle = File::open(path).ok()?;
    let is_abandoned = match handle.try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => handle.metadata().is_ok_and(|meta| is_older(&meta, ABANDONED_AGE)),
    };
    is_abandoned.then_some(handle)
}

fn is_older(meta: &fs::Metadata, age: Duration) -> bool {
    // After the clock was set back, files may have a modification time in the future; they count as young.
    age.is_zero()
        || meta
            .modified()
            .is_ok_and(|modified| modified.elapsed().is_ok_and(|since| since >= age))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write_atomic(&path, |out| out.write_all(b"old")).unwrap();
        let error = write_atomic(&path, |out| -> io::Result<()> {
            out.write_all(b"half of the new")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        })
        .unwrap_err();
        assert!(
            error.is_disk_full() && error.to_string().contains("disk full"),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn private_files_have_mode_0600_and_others_follow_the_umask() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let (private, usual) = (folder.path().join("p"), folder.path().join("u"));
        write_private(&private, b"x").unwrap();
        write_atomic(&usual, |out| out.write_all(b"x")).unwrap();
        assert_eq!(mode(&private), 0o600);
        assert_ne!(mode(&usual) & 0o600, 0);
        fs::write(folder.path().join("plain"), b"x").unwrap();
        assert_eq!(mode(&usual), mode(&folder.path().join("plain")));
    }

    #[test]
    fn only_old_unfinished_entries_without_a_live_writer_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("kept"), b"x").unwrap();
        fs::write(folder.path().join(".tmp-a"), b"x").unwrap();
        fs::create_dir(folder.path().join(".tmp-b")).unwrap();
        assert_eq!(remove_abandoned(folder.path(), Duration::from_secs(3600)).unwrap(), 0);
        assert_eq!(remove_abandoned(folder.path(), Duration::ZERO).unwrap(), 2);
        assert!(folder.path().join("kept").exists());
        let (file, inner) = (
            temporary_file(folder.path(), 0o666).unwrap(),
            TemporaryFolder::new(folder.path(), "x").unwrap(),
        );
        assert_eq!(
            remove_abandoned(folder.path(), Duration::ZERO).unwrap(),
            0,
            "their writers are alive"
        );
        assert!(file.path().exists() && inner.path().exists());
        drop((file, inner));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(
            remove_abandoned(&folder.path().join("absent"), Duration::ZERO).unwrap(),
            0
        );
    }

    #[test]
    fn remove_handles_files_folders_and_missing_paths() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        create_dir_all(&deep).unwrap();
        create_dir_all(&deep).unwrap();
        fs::write(deep.join("x"), b"x").unwrap();
        remove(&folder.path().join("a")).unwrap();
        remove(&folder.path().join("a")).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
