//! Files that are either old or new, never half.
//!
//! Every file that matters is written beside its final place under a name that starts with
//! [`TEMPORARY_PREFIX`], synced, renamed, and the folder synced: after a power cut or a SIGKILL at any
//! moment there is the old file or the new one. "Disk full" is its own error, because it is the one that
//! a person can do something about and the one for which another machine helps.

mod deep;
pub mod names;
pub mod regular;

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How names of unfinished files and folders begin. Whatever has such a name may be swept.
pub const TEMPORARY_PREFIX: &str = ".tmp-";
/// Where the file system has no locks, unfinished things of this age count as left behind.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// No space left, a quota, or a file size limit.
    #[error("disk full: could not {action} {path}; free some space there, or choose a folder on another disk")]
    DiskFull {
        /// What was tried, in words: `write`.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Any other failure.
    #[error("could not {action} {path}: {source}")]
    Io {
        /// What was tried, in words: `write`.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl FsError {
    /// Says what was tried on which file; a full disk is recognised.
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

    /// What the system said.
    #[must_use]
    pub fn io(&self) -> &io::Error {
        match self {
            Self::DiskFull { source, .. } | Self::Io { source, .. } => source,
        }
    }

    /// The file it happened on.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::DiskFull { path, .. } | Self::Io { path, .. } => path,
        }
    }
}

/// Whether an error means that there is no room: no space, a quota, or a file size limit.
#[must_use]
pub fn is_disk_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// Writes a file so that a reader sees the old one or the new one, and so that it survives a power cut once this returns.
///
/// The folder must exist. The mode of a new file follows the umask.
///
/// # Errors
/// [`FsError`], and then the old file is untouched and nothing is left beside it.
pub fn write_atomic<T>(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<T>) -> Result<T, FsError> {
    write_atomic_mode(path, 0o666, write)
}

/// [`write_atomic`] of bytes that only their owner may read (mode 0600).
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

/// An unfinished file in `folder`, locked for [`sweep`], which disappears when dropped.
///
/// # Errors
/// What the system says.
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
        // A file system without locks is no reason to fail: sweeping then goes by age.
        let _ = file.as_file().lock();
        // A sweeper may have taken the file between its creation and the lock.
        if file.path().exists() {
            return Ok(file);
        }
    }
}

/// An unfinished folder, locked for [`sweep`]. Dropped before it was renamed, it is removed with all that is in it.
#[derive(Debug)]
pub struct TemporaryFolder {
    path: PathBuf,
    _lock: File,
}

impl TemporaryFolder {
    /// Makes one in `parent`, which is created where needed. `tag` becomes part of its name.
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

    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // After it was renamed there is nothing under this name any more. Renamed before it is removed, so that work
        // that was given up, and is still busy on another thread, cannot put a file into it meanwhile.
        let _ = remove(&self.path);
    }
}

/// Gives a finished, synced temporary file its name, and syncs the folder.
///
/// # Errors
/// [`FsError`]; the temporary file is gone then.
pub fn publish(temporary: tempfile::NamedTempFile, path: &Path) -> Result<(), FsError> {
    temporary
        .persist(path)
        .map_err(|error| FsError::new("put in place", path, error.error))?;
    sync_dir(folder_of(path))
}

/// The folder in which a path lies; `.` for a bare file name.
#[must_use]
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes renames, creations and removals in a folder survive a power cut.
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

/// Creates a folder and its parents; each new one survives a power cut.
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

/// [`create_dir_all`] of a folder that only its owner may enter (mode 0700). One that is there keeps its mode.
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

/// How often a folder is removed again because work that was given up, and is still busy on another thread, put a file
/// into it after it was looked through.
const LATE_FILES: u32 = 10;

/// Removes a file or a whole folder, so that nobody sees half of it: it is renamed first.
///
/// # Errors
/// [`FsError`]. A path that does not exist is no error.
pub fn remove(path: &Path) -> Result<(), FsError> {
    let folder = folder_of(path);
    let doomed = folder.join(format!("{TEMPORARY_PREFIX}removed-{}", uuid::Uuid::new_v4().simple()));
    match fs::rename(path, &doomed) {
        Ok(()) => remove_now(&doomed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(FsError::new("remove", path, error)),
    }
}

pub(crate) fn remove_now(path: &Path) -> Result<(), FsError> {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let (mut is_opened, mut is_flat) = (false, false);
    for again in (0..LATE_FILES).rev() {
        let removed = if is_dir {
            fs::remove_dir_all(path)
        } else {
            fs::remove_file(path)
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && again > 0 => {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Folders that were made read-only keep their files until they are not.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_dir && !is_opened => {
                is_opened = true;
                make_removable(path);
            }
            Err(error) if deep::is_too_deep(&error) && is_dir && !is_flat => {
                is_flat = true;
                deep::empty(path).map_err(|error| FsError::new("remove", path, error))?;
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(FsError::new("remove", path, error)),
            _ => break,
        }
    }
    Ok(())
}

/// Gives the owner the right to change each folder of a tree. What is refused shows when it is removed.
fn make_removable(folder: &Path) {
    open_to_owner(folder);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            make_removable(&entry.path());
        }
    }
}

fn open_to_owner(folder: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let _ = fs::set_permissions(folder, fs::Permissions::from_mode(0o700));
    }
    #[cfg(not(unix))]
    let _ = folder;
}

/// Removes unfinished files and folders directly in `folder` that nobody touched for `age` and whose maker is dead,
/// in this process or another. Says how many. Safe beside living makers at any age, where the file system has locks;
/// elsewhere only things that are a day old are removed.
///
/// # Errors
/// [`FsError`] when the folder cannot be read; one entry that cannot be removed is left for the next time.
pub fn sweep(folder: &Path, age: Duration) -> Result<usize, FsError> {
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

/// When the maker of an unfinished file or folder is dead: the lock to hold while it is removed.
pub(crate) fn lock_abandoned(path: &Path) -> Option<File> {
    let handle = File::open(path).ok()?;
    let is_abandoned = match handle.try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => handle.metadata().is_ok_and(|meta| is_older(&meta, ABANDONED)),
    };
    is_abandoned.then_some(handle)
}

fn is_older(meta: &fs::Metadata, age: Duration) -> bool {
    // A clock that was set back makes things younger than new; then they wait.
    age.is_zero()
        || meta
            .modified()
            .is_ok_and(|modified| modified.elapsed().is_ok_and(|since| since >= age))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
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
    fn a_private_file_is_private_and_a_usual_one_is_not() {
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
    fn sweeping_takes_old_unfinished_things_only() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("kept"), b"x").unwrap();
        fs::write(folder.path().join(".tmp-a"), b"x").unwrap();
        fs::create_dir(folder.path().join(".tmp-b")).unwrap();
        assert_eq!(sweep(folder.path(), Duration::from_secs(3600)).unwrap(), 0);
        assert_eq!(sweep(folder.path(), Duration::ZERO).unwrap(), 2);
        assert!(folder.path().join("kept").exists());
        let (file, inner) = (
            temporary_file(folder.path(), 0o666).unwrap(),
            TemporaryFolder::new(folder.path(), "x").unwrap(),
        );
        assert_eq!(sweep(folder.path(), Duration::ZERO).unwrap(), 0, "their makers live");
        assert!(file.path().exists() && inner.path().exists());
        drop((file, inner));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(sweep(&folder.path().join("absent"), Duration::ZERO).unwrap(), 0);
    }

    #[test]
    fn removal_takes_files_folders_and_absent_paths() {
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
