//! Downloads blobs into a folder. A file appears only when it is complete and its hash is right, and never outside the
//! folder.

use crate::api::{Api, status_failure};
use crate::exit::Exit;
use crate::failure::Failure;
use aitk_common::fsutil::{self, FsError, names};
use aitk_common::hash::ContentHash;
use aitk_proto::v1::{self, get_blob_reply::Part};
use futures::{Stream, StreamExt, TryStreamExt};
use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wildmatch::WildMatch;

/// How often a download is attempted that gets no further.
const MAX_ATTEMPTS: u32 = 4;
/// The pause before the second attempt; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// A stream without data for this long counts as broken.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// What exists at the path that a file is downloaded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingFile {
    /// No file.
    Missing,
    /// A file with the same content.
    Identical,
    /// A file with other content.
    Different,
}

/// Returns the path of an artifact below `folder`.
///
/// # Errors
/// When the name could lead outside `folder`, or a part of the path is a symbolic link or is not a folder.
pub fn target_path(folder: &Path, name: &str) -> Result<PathBuf, Failure> {
    let path = names::below(folder, name)
        .map_err(|error| Failure::failed(format!("the coordinator sent an unsafe file name: {error}")))?;
    let mut place = folder.to_owned();
    for part in name.split('/') {
        place.push(part);
        match std::fs::symlink_metadata(&place) {
            Ok(meta) if meta.is_symlink() => {
                return Err(Failure::failed(format!(
                    "{} is a symbolic link; aitk does not write through links",
                    place.display()
                ))
                .hint("remove the link, or choose another folder with -o"));
            }
            Ok(meta) if place != path && !meta.is_dir() => {
                return Err(Failure::failed(format!(
                    "{} exists and is not a folder",
                    place.display()
                )));
            }
            Ok(meta) if place == path && !meta.is_file() => {
                return Err(Failure::failed(format!("{} exists and is not a file", place.display())));
            }
            _ => {}
        }
    }
    Ok(path)
}

/// Compares an existing file with the expected length and hash.
///
/// # Errors
/// When the file exists and cannot be read.
pub fn check_existing(path: &Path, hash: ContentHash, bytes: u64) -> Result<ExistingFile, Failure> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(ExistingFile::Missing),
        Err(error) => return Err(Failure::file("read", path, &error)),
    };
    let read = |error| Failure::file("read", path, &error);
    if file.metadata().map_err(read)?.len() != bytes {
        return Ok(ExistingFile::Different);
    }
    let (found, _) = ContentHash::of_reader(file).map_err(read)?;
    Ok(if found == hash {
        ExistingFile::Identical
    } else {
        ExistingFile::Different
    })
}

/// Downloads one blob to `path`. The file appears only when its length and hash are right. Until then the data is in a
/// hidden file beside it, so that another attempt, also of a later run of the program, downloads only the rest.
/// `progress` is called with the bytes of each piece, and with a negative number when they have to be downloaded again.
///
/// # Errors
/// When the storage does not have the blob, the connection breaks too often, or the file cannot be written.
pub async fn fetch(
    api: &Api,
    hash: ContentHash,
    bytes: u64,
    path: &Path,
    mut progress: impl FnMut(i64),
) -> Result<(), Failure> {
    let folder = fsutil::folder_of(path);
    fsutil::create_dir_all(folder).map_err(|error| disk_failure(&error))?;
    let mut partial = PartialFile::open(folder, hash, bytes)?;
    progress(i64::try_from(partial.hasher.bytes).unwrap_or(i64::MAX));
    let (mut pause, mut attempt) = (FIRST_PAUSE, 1);
    let mut furthest = partial.hasher.bytes;
    loop {
        let tried = try_fetch(api, hash, bytes, path, &mut partial, &mut progress).await;
        // A large file takes hours on a slow line, and its connection may break more than once.
        if partial.hasher.bytes > furthest {
            furthest = partial.hasher.bytes;
            (pause, attempt) = (FIRST_PAUSE, 1);
        }
        match tried {
            Ok(()) => return partial.publish(path),
            Err(failure) if failure.exit == Exit::Unreachable && attempt < MAX_ATTEMPTS => {
                tracing::debug!(%failure, attempt, "download broke off");
                tokio::time::sleep(pause).await;
                (attempt, pause) = (attempt + 1, pause * 2);
            }
            Err(failure) => return Err(failure),
        }
    }
}

async fn try_fetch(
    api: &Api,
    hash: ContentHash,
    bytes: u64,
    path: &Path,
    partial: &mut PartialFile,
    progress: &mut impl FnMut(i64),
) -> Result<(), Failure> {
    let mut blobs = api.clients().blobs;
    let refused = |status: tonic::Status| status_failure(api.server(), &status);
    let request = v1::GetBlobRequest {
        sha256: hash.to_hex(),
        offset: partial.hasher.bytes,
    };
    let stream = blobs.get(request).await.map_err(refused)?.into_inner();
    let name = path.display().to_string();
    receive(stream.map_err(refused), &name, bytes, partial, progress).await?;
    if std::mem::take(&mut partial.hasher).finish() != hash {
        // The data is not part of this blob, so a later attempt must not continue with it.
        partial.restart()?;
        return Err(Failure::failed(format!(
            "{name}: the downloaded data does not have the announced hash and was deleted"
        ))
        .hint("try again; if it fails again, the stored file is damaged: run the job's last steps again with `aitk resume`"));
    }
    Ok(())
}

/// Appends the data of one call to a partial file, until it has `bytes` bytes.
async fn receive(
    messages: impl Stream<Item = Result<v1::GetBlobReply, Failure>>,
    name: &str,
    bytes: u64,
    partial: &mut PartialFile,
    progress: &mut impl FnMut(i64),
) -> Result<(), Failure> {
    let broken = |why: &str| Failure::new(Exit::Unreachable, format!("{name}: the download broke off: {why}"));
    let mut messages = std::pin::pin!(messages);
    let (mut first_offset, mut has_new_data) = (0, false);
    loop {
        let message = match tokio::time::timeout(IDLE_TIMEOUT, messages.next()).await {
            Ok(message) => message.transpose()?,
            Err(_) => return Err(broken("no data arrived for a minute")),
        };
        let Some(message) = message else { break };
        match message.part {
            Some(Part::Header(header)) => first_offset = header.offset,
            Some(Part::Data(data)) => {
                // An older coordinator ignores the offset and sends the blob from the beginning.
                if first_offset == 0 && partial.hasher.bytes > 0 && !has_new_data {
                    progress(-i64::try_from(partial.hasher.bytes).unwrap_or(i64::MAX));
                    partial.restart()?;
                }
                has_new_data = true;
                if partial.hasher.bytes + data.len() as u64 > bytes {
                    partial.restart()?;
                    return Err(Failure::failed(format!(
                        "{name}: the coordinator sent more than the announced {bytes} bytes"
                    )));
                }
                partial.add(&data)?;
                progress(i64::try_from(data.len()).unwrap_or(i64::MAX));
            }
            None => {}
        }
    }
    if partial.hasher.bytes < bytes {
        return Err(broken(&format!("{} of {bytes} bytes arrived", partial.hasher.bytes)));
    }
    Ok(())
}

/// A partly downloaded blob, in a hidden file beside its target.
struct PartialFile {
    path: PathBuf,
    file: File,
    /// The hash of the file's content so far.
    hasher: HashingWriter,
    /// The file belongs to this process alone and is removed at its end, because another process downloads the same
    /// blob.
    is_private: bool,
}

impl PartialFile {
    /// Opens what was downloaded before, or an empty file.
    fn open(folder: &Path, hash: ContentHash, bytes: u64) -> Result<Self, Failure> {
        let name = hash.to_hex();
        let shared = folder.join(format!(".{}.part", name.get(..16).unwrap_or(&name)));
        let opened = open_partial(&shared).and_then(|file| match file.try_lock() {
            Ok(()) => Ok((shared.clone(), file, false)),
            Err(std::fs::TryLockError::WouldBlock) => {
                let own = folder.join(format!(
                    ".{}.{}.part",
                    name.get(..16).unwrap_or(&name),
                    std::process::id()
                ));
                open_partial(&own).map(|file| (own, file, true))
            }
            Err(std::fs::TryLockError::Error(error)) => Err(error),
        });
        let (path, mut file, is_private) = opened.map_err(|error| Failure::file("write", &shared, &error))?;
        let mut hasher = HashingWriter::default();
        let mut piece = vec![0; 1 << 20];
        loop {
            match std::io::Read::read(&mut file, &mut piece) {
                Ok(0) => break,
                Ok(read) => hasher.add(&piece[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::file("read", &path, &error)),
            }
        }
        let mut partial = Self {
            path,
            file,
            hasher,
            is_private,
        };
        if partial.hasher.bytes > bytes {
            partial.restart()?;
        }
        Ok(partial)
    }

    fn add(&mut self, data: &[u8]) -> Result<(), Failure> {
        self.file
            .write_all(data)
            .map_err(|error| Failure::file("write", &self.path, &error))?;
        self.hasher.add(data);
        Ok(())
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.hasher = HashingWriter::default();
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|error| Failure::file("write", &self.path, &error))
    }

    /// Moves the complete file to `path`.
    fn publish(mut self, path: &Path) -> Result<(), Failure> {
        let published = self.file.sync_all().and_then(|()| std::fs::rename(&self.path, path));
        published.map_err(|error| Failure::file("write", path, &error))?;
        self.is_private = false;
        Ok(())
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // An empty file is of no use to a later attempt.
        if self.is_private || self.file.metadata().is_ok_and(|meta| meta.len() == 0) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens the partial file with the default permissions, because it becomes the downloaded file. A symbolic link is not
/// followed.
fn open_partial(path: &Path) -> std::io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)
}

/// Hashes data piece by piece.
#[derive(Default)]
struct HashingWriter {
    hasher: sha2::Sha256,
    bytes: u64,
}

impl HashingWriter {
    fn add(&mut self, data: &[u8]) {
        sha2::Digest::update(&mut self.hasher, data);
        self.bytes += data.len() as u64;
    }

    fn finish(self) -> ContentHash {
        ContentHash::from_digest(sha2::Digest::finalize(self.hasher).into())
    }
}

/// Converts a file system error, with a hint if the disk is full.
#[must_use]
pub fn disk_failure(error: &FsError) -> Failure {
    let failure = Failure::failed(error.to_string());
    if error.is_disk_full() {
        failure.hint("the disk is full: free some space, or choose another folder")
    } else {
        failure
    }
}

/// Whether a name matches: it equals `wanted`, is in a folder of that name, or matches it as a pattern with `*` (any
/// text) and `?` (one character).
#[must_use]
pub fn matches_pattern(name: &str, wanted: &str) -> bool {
    let wanted = wanted.trim_end_matches('/');
    name == wanted || name.strip_prefix(wanted).is_some_and(|rest| rest.starts_with('/')) || {
        let pattern = WildMatch::new(wanted);
        // A pattern without `/` is compared with the file name alone.
        let file_name = name.rsplit('/').next().unwrap_or(name);
        pattern.matches(name) || (!wanted.contains('/') && pattern.matches(file_name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_outside_the_folder_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        for bad in [
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a\\..\\x",
            "c:x",
            "",
            "a//b",
            "a\0b",
            "%2e%2e/x",
            "a/./b",
            "nul",
            "x\n",
        ] {
            assert!(target_path(&out, bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            target_path(&out, "lora/samples/1__0_0.jpg").unwrap(),
            out.join("lora/samples/1__0_0.jpg")
        );
    }

    #[cfg(unix)]
    #[test]
    fn links_below_the_folder_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        std::fs::create_dir_all(out.join("deep")).unwrap();
        std::os::unix::fs::symlink("/etc", out.join("link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", out.join("deep/file")).unwrap();
        std::fs::write(out.join("plain"), "x").unwrap();
        for bad in ["link/x", "deep/file", "plain/x", "deep"] {
            assert!(target_path(&out, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn existing_files_are_compared_by_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let hash = ContentHash::of(b"abc");
        assert_eq!(check_existing(&path, hash, 3).unwrap(), ExistingFile::Missing);
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(check_existing(&path, hash, 3).unwrap(), ExistingFile::Identical);
        std::fs::write(&path, "abd").unwrap();
        assert_eq!(check_existing(&path, hash, 3).unwrap(), ExistingFile::Different);
    }

    #[tokio::test]
    async fn data_of_a_coordinator_that_ignores_the_offset_replaces_what_was_received() {
        let dir = tempfile::tempdir().unwrap();
        let content = b"0123456789";
        let hash = ContentHash::of(content);
        let message = |part| Ok::<_, Failure>(v1::GetBlobReply { part: Some(part) });
        let header = |offset| {
            message(Part::Header(v1::BlobHeader {
                sha256: hash.to_hex(),
                bytes: 10,
                offset,
                ..Default::default()
            }))
        };
        let data = |from: usize, to: usize| message(Part::Data(content[from..to].to_vec()));
        let lost = || Err(Failure::new(Exit::Unreachable, "lost"));
        // The first call breaks; the second begins at the offset, or at the first byte.
        for (offset, received) in [(4, [4, 6, 0, 0]), (0, [4, -4, 4, 6])] {
            let mut partial = PartialFile::open(dir.path(), hash, 10).unwrap();
            let mut steps = Vec::new();
            let mut progress = |more| steps.push(more);
            let first = futures::stream::iter([header(0), data(0, 4), lost()]);
            let broken = receive(first, "a", 10, &mut partial, &mut progress).await.unwrap_err();
            assert_eq!(broken.exit, Exit::Unreachable);
            let second = match offset {
                0 => vec![header(0), data(0, 4), data(4, 10)],
                _ => vec![header(4), data(4, 10)],
            };
            let second = futures::stream::iter(second);
            receive(second, "a", 10, &mut partial, &mut progress).await.unwrap();
            steps.resize(4, 0);
            assert_eq!(steps, received);
            let target = dir.path().join("a");
            partial.publish(&target).unwrap();
            assert_eq!(std::fs::read(&target).unwrap(), content);
        }
    }

    #[test]
    fn patterns_match_names_and_folders() {
        let name = "ada/samples/1__000000005_0.jpg";
        for wanted in [name, "ada", "ada/samples/", "*.jpg", "ada/*", "1__*_?.jpg", "*"] {
            assert!(matches_pattern(name, wanted), "{wanted}");
        }
        for wanted in ["ad", "*.png", "samples/*", "?", ""] {
            assert!(!matches_pattern(name, wanted), "{wanted}");
        }
        let stars = "*a".repeat(200);
        assert!(!matches_pattern(&"a".repeat(199), &stars));
    }
}
