//! The manifest of a checkpoint: the list of its files, protected by a digest of its own text.

use super::CheckpointError;
use crate::fsutil::names;
use crate::hash::ContentHash;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// The format version that this program writes. It reads no other.
pub const FORMAT_VERSION: u64 = 1;
/// The manifest's file name.
pub const MANIFEST_NAME: &str = "manifest.json";
/// The size limit of a manifest, which describes files and the trainer's state but contains no weights.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 20;

const DIGEST_KEY: &str = ",\"digest\":\"";
const DIGEST_HEX: usize = 64;
const END: &str = "\"}\n";

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u64,
    /// The job's name, for display.
    pub job: String,
    /// Number of optimizer steps done.
    pub step: u64,
    /// Number of passes over the data done (not the epoch of an attempt).
    pub epoch: u64,
    /// The time at which it was written.
    #[serde(with = "timestamp")]
    pub created: jiff::Timestamp,
    /// The trainer's state outside the files: position in the data, seed, counters.
    pub state: serde_json::Map<String, serde_json::Value>,
    /// The files, in the order in which they were added.
    pub files: Vec<FileEntry>,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The path relative to the checkpoint's folder, with `/` between components.
    pub path: String,
    /// The hash of the content.
    pub sha256: ContentHash,
    /// The size in bytes.
    pub bytes: u64,
    /// The role for the trainer: `adapter`, `optimizer`, `ema`, ….
    pub role: String,
}

impl Manifest {
    /// Serialises to the text of `manifest.json`: one line, with the digest as the last member.
    ///
    /// # Errors
    /// When a file name is invalid or occurs twice.
    pub fn to_text(&self) -> Result<String, CheckpointError> {
        self.check_names()?;
        // Serialising plain data with string keys cannot fail. Readers would reject the empty text.
        let body = serde_json::to_string(self).unwrap_or_default();
        let digest = ContentHash::of(body.as_bytes());
        let open = body.strip_suffix('}').unwrap_or(&body);
        Ok(format!("{open}{DIGEST_KEY}{digest}{END}"))
    }

    /// Parses the text of a `manifest.json` and checks its digest. `file` is named in errors.
    ///
    /// # Errors
    /// When any bit differs from the output of [`Self::to_text`].
    pub fn from_text(bytes: &[u8], file: &Path) -> Result<Self, CheckpointError> {
        let truncated =
            || CheckpointError::damaged(file, "it does not end with its digest, so it was truncated or changed");
        let text = str::from_utf8(bytes).map_err(|_| CheckpointError::damaged(file, "it is not UTF-8 text"))?;
        let tail = DIGEST_KEY.len() + DIGEST_HEX + END.len();
        let (open, tail) = text
            .len()
            .checked_sub(tail)
            .and_then(|at| text.split_at_checked(at))
            .ok_or_else(truncated)?;
        let claimed = tail
            .strip_prefix(DIGEST_KEY)
            .and_then(|rest| rest.strip_suffix(END))
            .ok_or_else(truncated)?;
        let body = format!("{open}}}");
        if ContentHash::of(body.as_bytes()).to_hex() != claimed {
            return Err(CheckpointError::damaged(file, "its content does not match its digest"));
        }
        let bad = |error: serde_json::Error| CheckpointError::damaged(file, format!("its JSON is invalid: {error}"));
        let version: Version = serde_json::from_str(&body).map_err(bad)?;
        if version.format_version != FORMAT_VERSION {
            return Err(CheckpointError::Version {
                file: file.to_owned(),
                found: version.format_version,
            });
        }
        let manifest: Self = serde_json::from_str(&body).map_err(bad)?;
        manifest.check_names()?;
        Ok(manifest)
    }

    /// The total size of all files in bytes, without the manifest.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    fn check_names(&self) -> Result<(), CheckpointError> {
        let mut seen = HashSet::new();
        for file in &self.files {
            names::check(&file.path)?;
            // Compared without case, because macOS file systems ignore case.
            if file.path == MANIFEST_NAME || !seen.insert(file.path.to_lowercase()) {
                return Err(CheckpointError::Duplicate {
                    name: file.path.clone(),
                });
            }
        }
        Ok(())
    }
}

/// RFC 3339 text, `2026-08-01T12:00:00Z`.
mod timestamp {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(at: &jiff::Timestamp, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(at)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<jiff::Timestamp, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
struct Version {
    format_version: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            job: "ein Test \"mit\" Zeichen \u{1f600}".to_owned(),
            step: 100,
            epoch: 3,
            created: jiff::Timestamp::from_second(1_700_000_000).unwrap(),
            state: serde_json::from_str(
                r#"{"seed":18446744073709551615,"lr":1.7976931348623157e-5,"z":[1,2],"a":null}"#,
            )
            .unwrap(),
            files: vec![FileEntry {
                path: "adapter.safetensors".to_owned(),
                sha256: ContentHash::of(b"x"),
                bytes: 1,
                role: "adapter".to_owned(),
            }],
        }
    }

    #[test]
    fn floats_round_trip_exactly() {
        // An inexact JSON parser reads ...516, and a resumed run would see other settings.
        for number in [
            -7.614582000722517e-97,
            1.7976931348623157e-5,
            0.1 + 0.2,
            f64::MIN_POSITIVE,
        ] {
            let mut manifest = manifest();
            manifest.state.insert("x".to_owned(), number.into());
            let text = manifest.to_text().unwrap();
            let back = Manifest::from_text(text.as_bytes(), Path::new("manifest.json")).unwrap();
            assert_eq!(back.state["x"].as_f64().map(f64::to_bits), Some(f64::to_bits(number)));
        }
    }

    #[test]
    fn every_bit_flip_and_every_truncation_is_detected() {
        let text = manifest().to_text().unwrap().into_bytes();
        let file = Path::new("manifest.json");
        assert_eq!(Manifest::from_text(&text, file).unwrap(), manifest());
        for length in 0..text.len() {
            assert!(
                Manifest::from_text(&text[..length], file).is_err(),
                "{length} bytes of {}",
                text.len()
            );
        }
        for bit in 0..text.len() * 8 {
            let mut flipped = text.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::from_text(&flipped, file).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_format_version_is_an_error_with_that_version() {
        let mut other = manifest();
        other.format_version = 2;
        let text = other.to_text().unwrap();
        let error = Manifest::from_text(text.as_bytes(), Path::new("m")).unwrap_err();
        assert!(matches!(error, CheckpointError::Version { found: 2, .. }), "{error}");
    }

    #[test]
    fn names_that_leave_the_folder_or_collide_are_refused() {
        for path in ["../x", "/etc/passwd", "manifest.json", "ADAPTER.safetensors"] {
            let mut bad = manifest();
            bad.files.push(FileEntry {
                path: path.to_owned(),
                ..bad.files[0].clone()
            });
            assert!(bad.to_text().is_err(), "{path}");
        }
    }
}
