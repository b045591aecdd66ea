//! What an attempt made and the coordinator does not know yet, noted beside its pins.
//!
//! A checkpoint takes its job further only together with the files that were made before it: the next attempt begins after
//! them and does not make them again. So whoever keeps a checkpoint has to know which of them are still to be announced, and
//! that after this daemon was killed as well.

use aitk_common::control::Artifact;
use aitk_common::fsutil::{self, FsError};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// A note has some hundred bytes; what is larger is none.
const NOTE_BYTES: u64 = 1 << 20;

/// Something that is still to be announced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unsent {
    /// A file, which is pinned.
    Artifact(Artifact),
    /// A file of this name is gone.
    Removed(String),
}

/// Where the note of a pin lies.
fn note_of(pin: &Path) -> PathBuf {
    pin.with_extension("json")
}

/// Notes what is pinned there; what was removed has a note and no pin.
pub(crate) fn note(pin: &Path, unsent: &Unsent) -> Result<(), FsError> {
    let path = note_of(pin);
    let text = serde_json::to_vec(unsent).map_err(|error| FsError::new("write", &path, error.into()))?;
    fsutil::write_private(&path, &text)
}

/// The coordinator knows it, or it is not needed any more.
pub(crate) fn settle(pin: &Path) {
    // The note first: a pin without one is nothing.
    for path in [note_of(pin), pin.to_owned()] {
        if let Err(error) = fsutil::remove(&path) {
            tracing::warn!(%error, "not removed");
        }
    }
}

/// What is noted in a folder, in the order in which it was made.
pub(crate) fn all(folder: &Path) -> Vec<(u64, PathBuf, Unsent)> {
    let mut found: Vec<_> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            // The pins beside them are files that a child made, of any size and content.
            if path.extension()? != "json" {
                return None;
            }
            let pin = path.with_extension("");
            let mut text = Vec::new();
            File::open(&path).ok()?.take(NOTE_BYTES).read_to_end(&mut text).ok()?;
            Some((number(&pin)?, pin, serde_json::from_slice(&text).ok()?))
        })
        .collect();
    found.sort_unstable_by_key(|(number, ..)| *number);
    found
}

/// The number of a pin: later ones have larger numbers.
pub(crate) fn number(pin: &Path) -> Option<u64> {
    pin.file_name()?.to_str()?.parse().ok()
}

/// Bytes of the files that were made before this pin and are still to be sent.
pub(crate) fn bytes_before(pin: &Path) -> u64 {
    let Some(last) = number(pin) else { return 0 };
    let before = all(fsutil::folder_of(pin))
        .into_iter()
        .filter(|(number, ..)| *number < last);
    before
        .map(|(_, pin, _)| fs::metadata(pin).map_or(0, |data| data.len()))
        .sum()
}

/// Moves what was made before this pin into another folder.
pub(crate) fn move_before(pin: &Path, to: &Path) -> Result<(), FsError> {
    fsutil::create_dir_all(to)?;
    let Some(last) = number(pin) else { return Ok(()) };
    for (number, pin, _) in all(fsutil::folder_of(pin)) {
        if number >= last {
            break;
        }
        let target = to.join(number.to_string());
        if pin.exists() {
            fs::rename(&pin, &target).map_err(|error| FsError::new("keep", &pin, error))?;
        }
        let note = note_of(&pin);
        fs::rename(&note, note_of(&target)).map_err(|error| FsError::new("keep", &note, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_before_a_pin_goes_with_it_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let (pins, kept) = (folder.path().join("pins"), folder.path().join("kept"));
        fs::create_dir(&pins).unwrap();
        let pin = |number: u64| pins.join(number.to_string());
        let file = |name: &str| {
            Unsent::Artifact(Artifact {
                name: name.into(),
                kind: "lora".into(),
                hash: None,
                bytes: 4,
                step: None,
                index: None,
                local_path: None,
            })
        };
        for (number, name) in [(9, "a"), (10, "b"), (13, "after")] {
            // What a child makes may look like a note.
            fs::write(pin(number), r#"{"removed":"x"}"#).unwrap();
            note(&pin(number), &file(name)).unwrap();
        }
        note(&pin(11), &Unsent::Removed("old".into())).unwrap();
        fs::create_dir(pin(12)).unwrap();
        settle(&pin(9));
        assert_eq!(bytes_before(&pin(12)), 15);
        move_before(&pin(12), &kept).unwrap();
        let found: Vec<_> = all(&kept).into_iter().map(|(_, _, unsent)| unsent).collect();
        assert_eq!(found, [file("b"), Unsent::Removed("old".into())]);
        assert_eq!(fs::read_to_string(kept.join("10")).unwrap(), r#"{"removed":"x"}"#);
        assert_eq!(all(&pins).len(), 1, "what came after it is made again");
        settle(&kept.join("10"));
        settle(&kept.join("11"));
        assert!(fs::read_dir(&kept).unwrap().next().is_none());
    }
}
