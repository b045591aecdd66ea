//! Fetching blobs into a folder: verified, complete or absent, never outside the folder.

use crate::api::{Api, status_failure};
use crate::exit::Exit;
use crate::failure::Failure;
use aitk_common::fsutil::{self, FsError, names};
use aitk_common::hash::ContentHash;
use aitk_proto::v1::{self, get_blob_reply::Part};
use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a broken download is begun again.
const TRIES: u32 = 4;
/// A stream that is silent this long is broken.
const SILENCE: Duration = Duration::from_secs(60);

/// What lies where a file is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    /// Nothing.
    No,
    /// The same content.
    Same,
    /// Another content.
    Other,
}

/// The path of an artifact below `folder`. Refuses names that could lead elsewhere, and folders below
/// `folder` that are links.
///
/// # Errors
/// When the name or what is on the disk cannot be trusted.
pub fn target(folder: &Path, name: &str) -> Result<PathBuf, Failure> {
    let path = names::below(folder, name)
        .map_err(|error| Failure::failed(format!("the coordinator names a file that is not fetched: {error}")))?;
    let mut place = folder.to_owned();
    for part in name.split('/') {
        place.push(part);
        match std::fs::symlink_metadata(&place) {
            Ok(meta) if meta.is_symlink() => {
                return Err(
                    Failure::failed(format!("{} is a link; nothing is written through it", place.display()))
                        .hint("remove the link, or choose another folder with -o"),
                );
            }
            Ok(meta) if place != path && !meta.is_dir() => {
                return Err(Failure::failed(format!(
                    "{} is in the way: it is not a folder",
                    place.display()
                )));
            }
            Ok(meta) if place == path && !meta.is_file() => {
                return Err(Failure::failed(format!(
                    "{} is in the way: it is not a file",
                    place.display()
                )));
            }
            _ => {}
        }
    }
    Ok(path)
}

/// Whether the file is there already, with which content.
///
/// # Errors
/// When it is there and cannot be read.
pub fn present(path: &Path, hash: ContentHash, bytes: u64) -> Result<Present, Failure> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Present::No),
        Err(error) => return Err(Failure::file("read", path, &error)),
    };
    let read = |error| Failure::file("read", path, &error);
    if file.metadata().map_err(read)?.len() != bytes {
        return Ok(Present::Other);
    }
    let (found, _) = ContentHash::of_reader(file).map_err(read)?;
    Ok(if found == hash { Present::Same } else { Present::Other })
}

/// Fetches one blob to `path`. It appears only when its length and hash are right. What has come before a break stays
/// beside it in a hidden file, so that another try, also of another run of the program, fetches only the rest.
/// `progress` hears of each piece, and takes back what is fetched again.
///
/// # Errors
/// When the store does not have it, the connection breaks too often, or the disk does not take it.
pub async fn fetch(
    api: &Api,
    hash: ContentHash,
    bytes: u64,
    path: &Path,
    mut progress: impl FnMut(i64),
) -> Result<(), Failure> {
    let folder = fsutil::folder_of(path);
    fsutil::create_dir_all(folder).map_err(|error| disk(&error))?;
    let mut partial = Partial::open(folder, hash, bytes)?;
    progress(i64::try_from(partial.hasher.bytes).unwrap_or(i64::MAX));
    let mut pause = Duration::from_millis(250);
    let mut tries = 1;
    loop {
        match try_fetch(api, hash, bytes, path, &mut partial, &mut progress).await {
            Ok(()) => return partial.publish(path),
            Err(failure) if failure.exit == Exit::Unreachable && tries < TRIES => {
                tracing::debug!(%failure, tries, "download broke off");
                tokio::time::sleep(pause).await;
                (tries, pause) = (tries + 1, pause * 2);
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
    partial: &mut Partial,
    progress: &mut impl FnMut(i64),
) -> Result<(), Failure> {
    let name = path.display();
    let broken = |why: &str| Failure::new(Exit::Unreachable, format!("{name}: the download broke off: {why}"));
    let mut blobs = api.clients().blobs;
    let refused = |status: tonic::Status| status_failure(api.server(), &status);
    let request = v1::GetBlobRequest {
        sha256: hash.to_hex(),
        offset: partial.hasher.bytes,
    };
    let mut stream = blobs.get(request).await.map_err(refused)?.into_inner();
    let mut begins = 0;
    loop {
        let message = match tokio::time::timeout(SILENCE, stream.message()).await {
            Ok(message) => message.map_err(refused)?,
            Err(_) => return Err(broken("nothing came for a minute")),
        };
        let Some(message) = message else { break };
        match message.part {
            Some(Part::Header(header)) => begins = header.offset,
            Some(Part::Data(data)) => {
                // An older coordinator sends all of it.
                if begins == 0 && partial.hasher.bytes > 0 && !partial.goes_on {
                    progress(-i64::try_from(partial.hasher.bytes).unwrap_or(i64::MAX));
                    partial.begin_again()?;
                }
                partial.goes_on = true;
                if partial.hasher.bytes + data.len() as u64 > bytes {
                    partial.begin_again()?;
                    return Err(Failure::failed(format!(
                        "{name}: the store sends more than the {bytes} bytes announced"
                    )));
                }
                partial.add(&data)?;
                progress(i64::try_from(data.len()).unwrap_or(i64::MAX));
            }
            None => {}
        }
    }
    partial.goes_on = false;
    if partial.hasher.bytes < bytes {
        return Err(broken(&format!("{} of {bytes} bytes came", partial.hasher.bytes)));
    }
    if std::mem::take(&mut partial.hasher).finish() != hash {
        // Whatever it is, it is no beginning of this blob.
        partial.begin_again()?;
        return Err(Failure::failed(format!(
            "{name}: what came does not have the announced hash; nothing was kept"
        ))
        .hint("try again; if that does not help, the stored file is damaged: run the job's last steps again with `aitk resume`"));
    }
    Ok(())
}

/// What has come of a blob, in a hidden file beside the place where it is to go.
struct Partial {
    path: PathBuf,
    file: File,
    /// Of all that is in the file.
    hasher: HashingWriter,
    /// Pieces of the call that runs were written.
    goes_on: bool,
    /// The file is for this program alone, and goes with it: another one fetches the same blob at the same time.
    alone: bool,
}

impl Partial {
    /// What is there of it, or an empty file.
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
        let (path, mut file, alone) = opened.map_err(|error| Failure::file("write", &shared, &error))?;
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
            goes_on: false,
            alone,
        };
        if partial.hasher.bytes > bytes {
            partial.begin_again()?;
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

    fn begin_again(&mut self) -> Result<(), Failure> {
        self.hasher = HashingWriter::default();
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|error| Failure::file("write", &self.path, &error))
    }

    /// The whole blob, under its name.
    fn publish(mut self, path: &Path) -> Result<(), Failure> {
        let published = self.file.sync_all().and_then(|()| std::fs::rename(&self.path, path));
        published.map_err(|error| Failure::file("write", path, &error))?;
        self.alone = false;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // An empty one says nothing.
        if self.alone || self.file.metadata().is_ok_and(|meta| meta.len() == 0) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Others may read what the user fetches, as with any file they make; a link in its place is not followed.
fn open_partial(path: &Path) -> std::io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)
}

/// Hashes pieces as they come.
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

/// A failure of the disk as one of ours.
#[must_use]
pub fn disk(error: &FsError) -> Failure {
    let failure = Failure::failed(error.to_string());
    if error.is_disk_full() {
        failure.hint("the disk is full: free some space, or choose another folder")
    } else {
        failure
    }
}

/// Whether a name is chosen: the name itself, a folder above it, or a pattern with `*` (any text) and `?` (one character).
#[must_use]
pub fn is_chosen(name: &str, wanted: &str) -> bool {
    let wanted = wanted.trim_end_matches('/');
    name == wanted || name.strip_prefix(wanted).is_some_and(|rest| rest.starts_with('/')) || {
        let pattern: Vec<char> = wanted.chars().collect();
        let full: Vec<char> = name.chars().collect();
        // A pattern without a folder means the file's own name.
        let last: Vec<char> = name.rsplit('/').next().unwrap_or(name).chars().collect();
        matches(&pattern, &full) || (!wanted.contains('/') && matches(&pattern, &last))
    }
}

/// Matches with one point of return, so that no pattern takes long.
fn matches(pattern: &[char], text: &[char]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                back = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == text[t] => (p, t) = (p + 1, t + 1),
            _ => match back {
                Some((star, from)) => {
                    back = Some((star, from + 1));
                    (p, t) = (star + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
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
            assert!(target(&out, bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            target(&out, "lora/samples/1__0_0.jpg").unwrap(),
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
            assert!(target(&out, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_there_already_is_known_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let hash = ContentHash::of(b"abc");
        assert_eq!(present(&path, hash, 3).unwrap(), Present::No);
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(present(&path, hash, 3).unwrap(), Present::Same);
        std::fs::write(&path, "abd").unwrap();
        assert_eq!(present(&path, hash, 3).unwrap(), Present::Other);
    }

    #[test]
    fn patterns_choose_names_and_folders() {
        let name = "ada/samples/1__000000005_0.jpg";
        for wanted in [name, "ada", "ada/samples/", "*.jpg", "ada/*", "1__*_?.jpg", "*"] {
            assert!(is_chosen(name, wanted), "{wanted}");
        }
        for wanted in ["ad", "*.png", "samples/*", "?", ""] {
            assert!(!is_chosen(name, wanted), "{wanted}");
        }
        let stars = "*a".repeat(200);
        assert!(!is_chosen(&"a".repeat(199), &stars));
    }
}
