//! Lists and hashes the files of a folder.

use super::{Snapshot, SnapshotFile, TransferProgress};
use crate::fsutil::names::{self, BadName};
use crate::fsutil::{FsError, regular};
use crate::hash::ContentHash;
use crate::storage::StorageError;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Cache folders that ai-toolkit creates next to the images. They are derived data and never uploaded.
const CACHE_FOLDERS: [&str; 3] = ["_latent_cache", "_t_e_cache", "_clip_vision_cache"];
/// The depth limit. Deeper folders are usually a loop of links.
const MAX_DEPTH: usize = 32;
/// The limit of files; see [`super::MAX_LIST_BYTES`].
const MAX_FILES: usize = 300_000;

/// A snapshot and the local paths of its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScannedSnapshot {
    /// The list.
    pub snapshot: Snapshot,
    /// One local file for each distinct content.
    pub sources: BTreeMap<ContentHash, PathBuf>,
}

/// Lists and hashes the files of a folder, or a single file. Blocking.
///
/// Hidden files and ai-toolkit's cache folders are skipped. Symbolic links are followed within the folder; a link that leaves
/// it is an error, because its target is not part of the data. A model in Hugging Face's cache consists of links to its `blobs`
/// folder, which are followed too.
///
/// # Errors
/// [`StorageError::Local`] when a file cannot be read or a link leaves the folder, [`StorageError::Name`] for a file name that a snapshot
/// cannot have, [`StorageError::Malformed`] for too many or too large files.
pub fn scan(path: &Path, progress: &mut dyn FnMut(TransferProgress)) -> Result<ScannedSnapshot, StorageError> {
    let root = fs::canonicalize(path).map_err(|error| FsError::new("read", path, error))?;
    let kind = fs::metadata(&root)
        .map_err(|error| FsError::new("read", path, error))?
        .file_type();
    if let Some(what) = regular::special_kind(kind) {
        return Err(special_file(path, what).into());
    }
    let is_file = kind.is_file();
    let mut found = Vec::new();
    if is_file {
        // The name that the user gave, not that of a link's target.
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(|| not_text(path))?;
        names::check_part(name)?;
        found.push((name.to_owned(), root));
    } else {
        let bounds = LinkBounds {
            blobs: hub_blobs_folder(&root),
            root: root.clone(),
        };
        walk(&bounds, &root, "", 0, &mut found)?;
    }
    found.sort();

    let mut done = TransferProgress {
        files_total: found.len() as u64,
        ..TransferProgress::default()
    };
    done.bytes_total = found
        .iter()
        .filter_map(|(_, file)| fs::metadata(file).ok())
        .map(|meta| meta.len())
        .sum();
    let mut files = Vec::with_capacity(found.len());
    let mut sources = BTreeMap::new();
    for (name, file) in found {
        progress(done);
        let hashed = regular::open(&file).and_then(|(file, _)| {
            ContentHash::of_reader(ReportProgress {
                file,
                done,
                progress: &mut *progress,
            })
        });
        let (sha256, bytes) = hashed.map_err(|error| FsError::new("read", &file, error))?;
        done.files += 1;
        done.bytes += bytes;
        files.push(SnapshotFile {
            path: name,
            bytes,
            sha256,
        });
        sources.entry(sha256).or_insert(file);
    }
    progress(done);
    Ok(ScannedSnapshot {
        snapshot: Snapshot::new(files, is_file)?,
        sources,
    })
}

/// Reports progress while a file is read, because a single file may be most of a model.
struct ReportProgress<'a, R> {
    file: R,
    done: TransferProgress,
    progress: &'a mut dyn FnMut(TransferProgress),
}

impl<R: Read> Read for ReportProgress<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.done.bytes += read as u64;
        (self.progress)(self.done);
        Ok(read)
    }
}

/// The folders in which link targets may be.
struct LinkBounds {
    /// The scanned folder, as a canonical path.
    root: PathBuf,
    /// The `blobs` folder of a model in Hugging Face's cache.
    blobs: Option<PathBuf>,
}

/// The `blobs` folder of `…/models--ORG--NAME/snapshots/COMMIT` in Hugging Face's cache.
fn hub_blobs_folder(root: &Path) -> Option<PathBuf> {
    let snapshots = root.parent()?;
    let repository = snapshots.parent()?;
    let is_model = repository.file_name()?.to_str()?.starts_with("models--");
    (is_model && snapshots.ends_with("snapshots")).then(|| repository.join("blobs"))
}

fn walk(
    bounds: &LinkBounds,
    folder: &Path,
    prefix: &str,
    depth: usize,
    found: &mut Vec<(String, PathBuf)>,
) -> Result<(), StorageError> {
    let fail = |error| FsError::new("read the folder", folder, error);
    for entry in fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let path = entry.path();
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b".") || CACHE_FOLDERS.iter().any(|cache| name == *cache) {
            continue;
        }
        let name = name.into_string().map_err(|_| not_text(&path))?;
        let relative = if prefix.is_empty() {
            name
        } else {
            format!("{prefix}/{name}")
        };
        names::check(&relative)?;
        let kind = entry.file_type().map_err(fail)?;
        let target = if kind.is_symlink() {
            bounds.resolve(&path, &relative)?
        } else {
            path
        };
        if target.is_dir() {
            if depth >= MAX_DEPTH {
                let reason = "it is more than 32 folders deep; check for a link that points to its own folder";
                return Err(BadName { name: relative, reason }.into());
            }
            walk(bounds, &target, &relative, depth + 1, found)?;
        } else if target.is_file() {
            if found.len() >= MAX_FILES {
                return Err(super::malformed(&format!(
                    "{} has more than {MAX_FILES} files",
                    bounds.root.display()
                )));
            }
            found.push((relative, target));
        } else {
            // An error, because users may expect the file to be part of the data.
            let kind = fs::metadata(&target)
                .map_err(|error| FsError::new("read", &target, error))?
                .file_type();
            return Err(special_file(&target, regular::special_kind(kind).unwrap_or("a special file")).into());
        }
    }
    Ok(())
}

impl LinkBounds {
    /// Resolves a link whose target is within the bounds.
    fn resolve(&self, link: &Path, relative: &str) -> Result<PathBuf, StorageError> {
        let target = fs::canonicalize(link).map_err(|error| FsError::new("follow the link", link, error))?;
        // Blobs are files directly in their folder.
        let is_blob = target.parent() == self.blobs.as_deref() && target.is_file();
        if target.starts_with(&self.root) || is_blob {
            return Ok(target);
        }
        let reason = "it is a symbolic link that leaves the folder; copy the file instead, or name its real folder";
        Err(BadName {
            name: relative.to_owned(),
            reason,
        }
        .into())
    }
}

fn special_file(path: &Path, what: &str) -> FsError {
    let reason = format!("it is {what}, which cannot be uploaded; move it out of the folder, or name another file");
    FsError::new("upload", path, io::Error::new(io::ErrorKind::InvalidData, reason))
}

fn not_text(path: &Path) -> BadName {
    BadName {
        name: path.to_string_lossy().into_owned(),
        reason: "it is not UTF-8 text",
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn names(folder: &Path) -> Result<Vec<String>, String> {
        let scanned = scan(folder, &mut |_| {}).map_err(|error| error.to_string())?;
        Ok(scanned.snapshot.files.into_iter().map(|file| file.path).collect())
    }

    /// Creates a repository in Hugging Face's cache format. Returns the folder of its commit.
    fn hub_repository(hub: &Path, name: &str) -> PathBuf {
        let commit = hub.join(name).join("snapshots/0123abcd");
        fs::create_dir_all(commit.join("unet")).unwrap();
        fs::create_dir_all(hub.join(name).join("blobs")).unwrap();
        for (blob, text) in [("aa", "{}"), ("bb", "weights")] {
            fs::write(hub.join(name).join("blobs").join(blob), text).unwrap();
        }
        symlink("../../blobs/aa", commit.join("model_index.json")).unwrap();
        symlink("../../../blobs/bb", commit.join("unet/model.safetensors")).unwrap();
        commit
    }

    #[test]
    fn a_model_in_the_hub_cache_is_scanned_with_its_blobs() {
        let place = tempfile::tempdir().unwrap();
        let commit = hub_repository(place.path(), "models--org--name");
        let expected = ["model_index.json", "unet/model.safetensors"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(names(&commit), Ok(expected.clone()));
        let scanned = scan(&commit, &mut |_| {}).unwrap();
        assert_eq!(scanned.snapshot.files[1].sha256, ContentHash::of(b"weights"));
        // A link to the folder gives the same result.
        symlink(&commit, place.path().join("newest")).unwrap();
        assert_eq!(names(&place.path().join("newest")), Ok(expected));

        let secret = place.path().join("secret");
        fs::write(&secret, "x").unwrap();
        hub_repository(place.path(), "models--org--other");
        fs::create_dir(place.path().join("models--org--name/blobs/deep")).unwrap();
        fs::write(place.path().join("models--org--name/blobs/deep/cc"), "x").unwrap();
        symlink(&secret, place.path().join("models--org--name/blobs/dd")).unwrap();
        for elsewhere in [
            "../../../secret",
            "../../../models--org--other/blobs/aa",
            "../../blobs",
            "../../blobs/deep",
            "../../blobs/deep/cc",
            "../../blobs/dd",
            "../..",
            "/etc",
        ] {
            symlink(elsewhere, commit.join("link")).unwrap();
            let refused = names(&commit).unwrap_err();
            assert!(refused.contains("leaves the folder"), "{elsewhere}: {refused}");
            fs::remove_file(commit.join("link")).unwrap();
        }
    }

    #[test]
    fn only_models_in_the_hub_cache_may_link_to_their_blobs_folder() {
        let place = tempfile::tempdir().unwrap();
        for name in ["datasets--org--name", "models", "mine"] {
            let commit = hub_repository(place.path(), name);
            assert!(names(&commit).unwrap_err().contains("leaves the folder"), "{name}");
        }
        let commit = hub_repository(place.path(), "models--org--name");
        let moved = place.path().join("models--org--name/copies");
        fs::rename(commit.parent().unwrap(), &moved).unwrap();
        assert!(
            names(&moved.join("0123abcd"))
                .unwrap_err()
                .contains("leaves the folder")
        );
        // A `blobs` folder that is a link itself is not accepted.
        let commit = hub_repository(place.path(), "models--org--linked");
        let blobs = place.path().join("models--org--linked/blobs");
        fs::rename(&blobs, place.path().join("elsewhere")).unwrap();
        symlink(place.path().join("elsewhere"), &blobs).unwrap();
        assert!(names(&commit).unwrap_err().contains("leaves the folder"));
    }
}
