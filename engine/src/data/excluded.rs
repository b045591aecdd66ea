//! `datasets[].excluded_images`.

use super::discover::ImageListing;
use crate::error::{EngineError, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The images with these paths in a data set, which is at `path`.
///
/// # Errors
/// When one of them is not in the data set.
pub(super) fn excluded_images(excluded: &[String], path: &Path, listing: &ImageListing) -> Result<HashSet<PathBuf>> {
    let find = |name: &String| {
        let image = listing.root.join(name);
        match listing.images.binary_search(&image) {
            Ok(_) => Ok(image),
            Err(_) => Err(EngineError::bad_input(format!(
                "datasets.excluded_images: there is no image `{}` in {}",
                name.escape_debug(),
                path.display()
            ))),
        }
    };
    excluded.iter().map(find).collect()
}
