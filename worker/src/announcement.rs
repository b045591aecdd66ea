//! Announcements of results that the coordinator does not know yet, saved beside their pins.
//!
//! A checkpoint is only useful together with the files that were made before it: the next attempt starts after them
//! and does not make them again. A worker that keeps a checkpoint must therefore know which of these files it
//! has not announced yet, even after it was killed.

use aitk_common::control_plane::Artifact;
use aitk_common::fsutil::{self, FsError};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest announcement that is read; real ones have some hundred bytes.
const MAX_ANNOUNCEMENT_BYTES: u64 = 1 << 20;

/// A result that is not announced yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PendingAnnouncement {
    /// A pinned file.
    Artifact(Artifact),
    /// A file of this name was removed.
    Removed(String),
}

/// The path of the announcement that belongs to a pin.
fn announcement_path(pin: &Path) -> PathBuf {
    pin.with_extension("json")
}

/// Saves the announcement for a pin. A removed file has an announcement and no pin.
pub(crate) fn write(pin: &Path, announcement: &PendingAnnouncement) -> Result<(), FsError> {
    let path = announcement_path(pin);
    let text = serde_json::to_vec(announcement).map_err(|error| FsError::new("write", &path, error.into()))?;
    fsutil::write_private(&path, &text)
}

/// Deletes a pin and its announcement: the coordinator knows the result, or it is superseded.
pub(crate) fn remove(pin: &Path) {
    // The announcement goes first: a pin without one is ignored.
    for path in [announcement_path(pin), pin.to_owned()] {
        if let Err(error) = fsutil::remove(&path) {
            tracing::warn!(%error, "a pinned file or its announcement was not removed");
        }
    }
}

/// Reads all announcements in a folder, in the order in which the results were made.
pub(crate) fn read_all(folder: &Path) -> Vec<(u64, PathBuf, PendingAnnouncement)> {
    let mut found: Vec<_> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            // The pins in the same folder are files that a child made, of any size and content.
            if path.extension()? != "json" {
                return None;
            }
            let pin = path.with_extension("");
            let mut text = Vec::new();
            File::open(&path)
                .ok()?
                .take(MAX_ANNOUNCEMENT_BYTES)
                .read_to_end(&mut text)
                .ok()?;
            Some((pin_number(&pin)?, pin, serde_json::from_slice(&text).ok()?))
        })
        .collect();
    found.sort_unstable_by_key(|(pin_number, ..)| *pin_number);
    found
}

/// The number of a pin. Later pins have larger numbers.
pub(crate) fn pin_number(pin: &Path) -> Option<u64> {
    pin.file_name()?.to_str()?.parse().ok()
}

/// Size of the files that were made before this pin and are not announced yet, in bytes.
pub(crate) fn pending_bytes_before(pin: &Path) -> u64 {
    let Some(last) = pin_number(pin) else { return 0 };
    let before = read_all(fsutil::folder_of(pin))
        .into_iter()
        .filter(|(pin_number, ..)| *pin_number < last);
    before
        .map(|(_, pin, _)| fs::metadata(pin).map_or(0, |data| data.len()))
        .sum()
}

/// Moves the announcements and files that were made before this pin into another folder.
pub(crate) fn move_before(pin: &Path, to: &Path) -> Result<(), FsError> {
    fsutil::create_dir_all(to)?;
    let Some(last) = pin_number(pin) else { return Ok(()) };
    for (pin_number, pin, _) in read_all(fsutil::folder_of(pin)) {
        if pin_number >= last {
            break;
        }
        let target = to.join(pin_number.to_string());
        if pin.exists() {
            fs::rename(&pin, &target).map_err(|error| FsError::new("keep", &pin, error))?;
        }
        let path = announcement_path(&pin);
        fs::rename(&path, announcement_path(&target)).map_err(|error| FsError::new("keep", &path, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_made_before_a_pin_move_with_it_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let (pins, kept) = (folder.path().join("pins"), folder.path().join("kept"));
        fs::create_dir(&pins).unwrap();
        let pin = |pin_number: u64| pins.join(pin_number.to_string());
        let file = |name: &str| {
            PendingAnnouncement::Artifact(Artifact {
                name: name.into(),
                kind: "lora".into(),
                hash: None,
                bytes: 4,
                step: None,
                index: None,
                local_path: None,
            })
        };
        for (pin_number, name) in [(9, "a"), (10, "b"), (13, "after")] {
            // A file of the child may look like an announcement.
            fs::write(pin(pin_number), r#"{"removed":"x"}"#).unwrap();
            write(&pin(pin_number), &file(name)).unwrap();
        }
        write(&pin(11), &PendingAnnouncement::Removed("old".into())).unwrap();
        fs::create_dir(pin(12)).unwrap();
        remove(&pin(9));
        assert_eq!(pending_bytes_before(&pin(12)), 15);
        move_before(&pin(12), &kept).unwrap();
        let found: Vec<_> = read_all(&kept)
            .into_iter()
            .map(|(_, _, announcement)| announcement)
            .collect();
        assert_eq!(found, [file("b"), PendingAnnouncement::Removed("old".into())]);
        assert_eq!(fs::read_to_string(kept.join("10")).unwrap(), r#"{"removed":"x"}"#);
        assert_eq!(
            read_all(&pins).len(),
            1,
            "later results stay; the next attempt makes them again"
        );
        remove(&kept.join("10"));
        remove(&kept.join("11"));
        assert!(fs::read_dir(&kept).unwrap().next().is_none());
    }
}
