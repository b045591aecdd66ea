//! `datasets[].captions_file`: the captions of the images of a folder, in a metadata file of sd-scripts.

use super::caption_tags::TagRules;
use super::discover::ImageListing;
use crate::error::{EngineError, Result};
use aitk_common::caption_metadata::CaptionMetadata;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Leaves out the images that the file does not have, and takes the captions of the others from it.
///
/// # Errors
/// When the file cannot be read, is not a file of captions, or has an image that is not in the folder.
pub(super) fn read_captions_file(path: &Path, tags: &TagRules, listing: &mut ImageListing) -> Result<()> {
    let failed = |what: String| EngineError::bad_input(format!("datasets.captions_file: {}: {what}", path.display()));
    let text = regular::read_text(path, MAX_TEXT_FILE_BYTES).map_err(|error| failed(error.to_string()))?;
    let has_lines = path.extension().is_some_and(|ending| ending == "jsonl");
    let metadata = CaptionMetadata::parse(&text, has_lines).map_err(failed)?;
    // Of images with the same name, the one with more folders in common has the text.
    let mut images: BTreeMap<usize, &PathBuf> = BTreeMap::new();
    for image in &listing.images {
        let relative = image.strip_prefix(&listing.root).unwrap_or(image);
        let Some(place) = metadata.find(relative) else { continue };
        let is_deeper = |other: &&PathBuf| image.components().count() > other.components().count();
        if images.get(&place).is_none_or(is_deeper) {
            images.insert(place, image);
        }
    }
    let missing = (0..metadata.images.len()).find(|place| !images.contains_key(place));
    if let Some(place) = missing {
        let shown: String = metadata.images[place].path.chars().take(200).collect();
        // The ending of the name may be left out.
        let stem = |place: usize| Path::new(&metadata.images[place].path).with_extension("");
        if let Some(other) = images.keys().find(|other| stem(**other) == stem(place)) {
            return Err(failed(format!(
                "`{}` and `{}` are entries for the same image: remove one of them",
                shown.escape_debug(),
                metadata.images[*other]
                    .path
                    .chars()
                    .take(200)
                    .collect::<String>()
                    .escape_debug()
            )));
        }
        return Err(failed(format!(
            "its image `{}` is not in {}: add the image, or remove it from the file",
            shown.escape_debug(),
            listing.root.display()
        )));
    }
    let caption = |place: usize| metadata.images[place].caption(tags.separator(), tags.wildcards);
    let captions: BTreeMap<PathBuf, String> = images
        .into_iter()
        .map(|(place, image)| (image.clone(), caption(place)))
        .collect();
    listing.images.retain(|image| captions.contains_key(image));
    listing.captions = captions;
    Ok(())
}
