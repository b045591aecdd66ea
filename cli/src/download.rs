//! Fetching blobs into a folder: verified, complete or absent, never outside the folder.

use crate::api::{Api, status_failure};
use crate::exit::Exit;
use crate::failure::Failure;
use aitk_common::fsutil::{self, FsError, names};
use aitk_common::hash::ContentHash;
use aitk_proto::v1::{self, get_blob_reply::Part};
use std::fs::File;
use std::io::Write;
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

/// Fetches one blob to `path`. It appears only when its length and hash are right. `progress` hears of
/// each piece, and takes back what a broken try had brought.
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
    let mut pause = Duration::from_millis(250);
    let mut tries = 1;
    loop {
        let mut brought = 0_u64;
        let outcome = try_fetch(api, hash, bytes, path, folder, |piece| {
            brought += piece;
            progress(i64::try_from(piece).unwrap_or(i64::MAX));
        })
        .await;
        match outcome {
            Err(failure) if failure.exit == Exit::Unreachable && tries < TRIES => {
                progress(-i64::try_from(brought).unwrap_or(i64::MAX));
                tracing::debug!(%failure, tries, "download broke off");
                tokio::time::sleep(pause).await;
                (tries, pause) = (tries + 1, pause * 2);
            }
            other => return other,
        }
    }
}

async fn try_fetch(
    api: &Api,
    hash: ContentHash,
    bytes: u64,
    path: &Path,
    folder: &Path,
    mut progress: impl FnMut(u64),
) -> Result<(), Failure> {
    let name = path.display();
    let broken = |why: &str| Failure::new(Exit::Unreachable, format!("{name}: the download broke off: {why}"));
    let mut blobs = api.clients().blobs;
    let refused = |status: tonic::Status| status_failure(api.server(), &status);
    let request = v1::GetBlobRequest { sha256: hash.to_hex() };
    let mut stream = blobs.get(request).await.map_err(refused)?.into_inner();
    // Others may read what the user fetches, as with any file they make.
    let mut temporary =
        fsutil::temporary_file(folder, 0o666).map_err(|error| Failure::file("write into", folder, &error))?;
    let mut hasher = HashingWriter::default();
    loop {
        let message = match tokio::time::timeout(SILENCE, stream.message()).await {
            Ok(message) => message.map_err(refused)?,
            Err(_) => return Err(broken("nothing came for a minute")),
        };
        let Some(message) = message else { break };
        match message.part {
            Some(Part::Data(data)) => {
                if hasher.bytes + data.len() as u64 > bytes {
                    return Err(Failure::failed(format!(
                        "{name}: the store sends more than the {bytes} bytes announced"
                    )));
                }
                temporary
                    .write_all(&data)
                    .map_err(|error| Failure::file("write", path, &error))?;
                hasher.add(&data);
                progress(data.len() as u64);
            }
            Some(Part::Header(_)) | None => {}
        }
    }
    if hasher.bytes < bytes {
        return Err(broken(&format!("{} of {bytes} bytes came", hasher.bytes)));
    }
    if hasher.finish() != hash {
        return Err(Failure::failed(format!(
            "{name}: what came does not have the announced hash; nothing was kept"
        ))
        .hint("the stored file is damaged: run the job's last steps again with `aitk resume`"));
    }
    temporary
        .as_file()
        .sync_all()
        .map_err(|error| Failure::file("write", path, &error))?;
    fsutil::publish(temporary, path).map_err(|error| disk(&error))
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
