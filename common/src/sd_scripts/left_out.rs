//! Images of a folder that are not trained: those that its metadata file does not have, and those that are held out.

use super::dataset_kind::DatasetKind;
use super::document::Value;
use super::folders::Folder;
use super::held_out::{Captions, HeldOut, split};
use super::levels::Levels;
use super::option::size_of;
use super::report::{Import, Section};
use crate::caption_metadata::CaptionMetadata;
use crate::fsutil::regular;
use crate::job::limits::MAX_TEXT_FILE_BYTES;
use serde_json::json;
use std::path::{Path, PathBuf};

/// The images of a folder that its metadata file does not have.
pub(super) fn without_metadata(import: &mut Import<'_>, levels: &Levels<'_>, folder: &Path) -> Option<Vec<PathBuf>> {
    let Some(file) = levels.text("metadata_file") else {
        return Some(Vec::new());
    };
    if levels.number("validation_split") > 0.0 {
        let message = "sd-scripts does not divide a data set with a metadata_file: remove one of them";
        levels.error("validation_split", message, &mut import.errors);
        return None;
    }
    let path = import.directory.join(file);
    let shown = file.escape_debug();
    let text = match regular::read_text(&path, MAX_TEXT_FILE_BYTES) {
        Ok(text) => text,
        Err(error) => {
            levels.error(
                "metadata_file",
                format!("`{shown}` cannot be read: {error}"),
                &mut import.errors,
            );
            return None;
        }
    };
    match CaptionMetadata::parse(&text, file.ends_with(".jsonl")) {
        Ok(metadata) => {
            let images = Folder::read(folder).map(|folder| folder.images).unwrap_or_default();
            let is_missing = |image: &PathBuf| {
                metadata
                    .find(Path::new(image.file_name().unwrap_or_default()))
                    .is_none()
            };
            Some(images.into_iter().filter(is_missing).collect())
        }
        Err(what) => {
            levels.error("metadata_file", format!("`{shown}`: {what}"), &mut import.errors);
            None
        }
    }
}

/// Divides a folder as `validation_split` says; returns the images that are not trained.
pub(super) fn hold_out(
    import: &mut Import<'_>,
    levels: &Levels<'_>,
    (folder, path): (&str, &Path),
    batch_size: u64,
    held_out: &mut HeldOut,
    section: &mut Section,
) -> Option<Vec<PathBuf>> {
    let share = levels.number("validation_split");
    if !(0.0..=1.0).contains(&share) {
        levels.error("validation_split", "expected a share from 0 to 1", &mut import.errors);
    }
    if !(share > 0.0 && share <= 1.0) {
        return Some(Vec::new());
    }
    if DatasetKind::of(levels.0[0]) == DatasetKind::Masks {
        let message = "sd-scripts does not divide a data set with masks (conditioning_data_dir): remove one of them";
        levels.error("validation_split", message, &mut import.errors);
        return None;
    }
    let shown = folder.escape_debug();
    let Some(found) = Folder::read(path) else {
        let message = format!(
            "the images in `{shown}` have to be listed for it, and this folder cannot be read: import where they are"
        );
        levels.error("validation_split", message, &mut import.errors);
        return None;
    };
    let seed = match levels.value("validation_seed") {
        Some(Value::Whole(seed)) => *seed,
        _ => {
            let message = match import.script.trains_adapter() {
                true => {
                    "without validation_seed, sd-scripts divides the images anew for the validation, so that it validates images that it \
                     trains on; aitk holds them out, by seed"
                }
                false => {
                    "without validation_seed, sd-scripts chooses the images by the state of its random numbers; aitk chooses them by seed"
                }
            };
            import.notes.push(levels.at("validation_split", message));
            import.settings.whole("seed").unwrap_or(0)
        }
    };
    let count = found.images.len();
    let split = split(found.images, share, seed);
    if count > 0 && split.excluded.len() == count {
        let message = format!("leaves no image of `{shown}` to train: lower it");
        levels.error("validation_split", message, &mut import.errors);
        return None;
    }
    // aitk trains no `.bmp`, so that they need not be excluded.
    let is_trained = |image: &&PathBuf| {
        image
            .extension()
            .is_some_and(|ending| !ending.eq_ignore_ascii_case("bmp"))
    };
    let names = split
        .excluded
        .iter()
        .filter(is_trained)
        .filter_map(|image| image.file_name());
    let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
    if !names.is_empty() {
        section.insert("excluded_images".into(), json!(names));
    }
    // Scripts for whole models and words hold images out, and validate none.
    if !import.script.trains_adapter() {
        return Some(split.excluded);
    }
    let captions = Captions {
        extension: levels.text("caption_extension").unwrap_or(".caption"),
        default: levels.text("class_tokens").unwrap_or(""),
        prefix: levels.text("caption_prefix"),
        suffix: levels.text("caption_suffix"),
    };
    let resolution = levels.value("resolution").and_then(size_of);
    let side = resolution.map_or(512.0, |(width, height)| (f64::from(width) * f64::from(height)).sqrt());
    held_out.add(folder, &split.validated, &captions, (side as u32, batch_size));
    Some(split.excluded)
}
