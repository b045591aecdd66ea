//! Finds the images of a data set (docs/datasets.md).

use super::allowed_paths::AllowedPaths;
use crate::error::{EngineError, Result};
use aitk_common::fsutil::{folder_of, regular};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// The images of a data set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageListing {
    /// The data set's folder: the folder itself, or the one that the JSON file is in.
    pub root: PathBuf,
    /// Images in the order of their paths.
    pub images: Vec<PathBuf>,
    /// The captions in a JSON data set. Empty for a folder, whose captions are in files.
    pub captions: BTreeMap<PathBuf, String>,
    /// The short captions (`caption_short`) in a JSON data set, of images that have a caption there.
    pub short_captions: BTreeMap<PathBuf, String>,
    /// The paths that may be opened for it.
    pub allowed_paths: AllowedPaths,
}

/// The suffixes of images, in the order in which ai-toolkit looks for them.
pub(super) const IMAGE_SUFFIXES: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// The images in a folder of this name are not trained on, as in ai-toolkit; those in folders below it are.
pub(super) const CONTROLS_FOLDER: &str = "_controls";

/// Lists the images of a folder (recursively, without names that begin with a dot and without those in `_controls`) or of a JSON
/// file `{path: {"caption": …, "caption_short": …}}`, whose relative paths start at its own folder, or at one above it.
/// `stay_in_folder`: a path outside its own folder is an error.
///
/// # Errors
/// When the path does not exist or cannot be read, the JSON has another form, or a path is outside the folder.
pub fn discover(path: &Path, short_captions: bool, stay_in_folder: bool) -> Result<ImageListing> {
    let info = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            EngineError::bad_input(format!("{}: this data set folder does not exist", path.display()))
        }
        _ => EngineError::io(path, e),
    })?;
    let root = if info.is_dir() { path } else { folder_of(path) };
    let allowed_paths = if stay_in_folder {
        AllowedPaths::below(root)?
    } else {
        AllowedPaths::any()
    };
    if info.is_dir() {
        let mut images = Vec::new();
        walk(path, &allowed_paths, &mut images, &mut HashSet::new())?;
        images.sort();
        return Ok(ImageListing {
            root: path.to_path_buf(),
            images,
            captions: BTreeMap::new(),
            short_captions: BTreeMap::new(),
            allowed_paths,
        });
    }
    read_json_listing(path, short_captions, allowed_paths)
}

/// The position of a file's suffix among those of images. `None`: it is not an image.
pub(super) fn suffix_rank(path: &Path) -> Option<usize> {
    let suffix = path.extension()?.to_str()?.to_lowercase();
    IMAGE_SUFFIXES.iter().position(|known| *known == suffix)
}

fn is_image(path: &Path) -> bool {
    suffix_rank(path).is_some()
}

/// Whether images directly in this folder are left out.
pub(super) fn is_controls_folder(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name == CONTROLS_FOLDER)
}

fn walk(
    folder: &Path,
    allowed_paths: &AllowedPaths,
    out: &mut Vec<PathBuf>,
    visited: &mut HashSet<PathBuf>,
) -> Result<()> {
    let is_root = visited.is_empty();
    // Without this, a link to a parent folder would loop for ever.
    let canonical = std::fs::canonicalize(folder).map_err(|e| EngineError::io(folder, e))?;
    if !visited.insert(canonical) {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).map_err(|e| EngineError::io(folder, e))? {
        let entry = entry.map_err(|e| EngineError::io(folder, e))?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with('.') {
            continue;
        }
        let path = entry.path();
        allowed_paths.check(&path)?;
        if path.is_dir() {
            walk(&path, allowed_paths, out, visited)?;
        } else if is_image(&path) && (is_root || !is_controls_folder(folder)) {
            // Opening a pipe would block for ever.
            if path.exists() && !path.is_file() {
                return Err(EngineError::bad_input(format!(
                    "{}: not a regular file; remove it from the data set",
                    path.display()
                )));
            }
            out.push(path);
        }
    }
    Ok(())
}

/// The file that a JSON data set in `root` calls `name`: beside it, or else below a folder above it, because ai-toolkit reads a relative path
/// from the folder that it was started in.
fn listed_image(root: &Path, name: &str, allowed_paths: &AllowedPaths) -> PathBuf {
    let beside = match Path::new(name).is_absolute() {
        true => return PathBuf::from(name),
        false => root.join(name),
    };
    if beside.is_file() || allowed_paths.are_confined() {
        return beside;
    }
    let Ok(canonical) = std::fs::canonicalize(root) else {
        return beside;
    };
    let mut above = canonical.ancestors().skip(1).map(|folder| folder.join(name));
    above.find(|path| path.is_file()).unwrap_or(beside)
}

fn read_json_listing(path: &Path, short_captions: bool, allowed_paths: AllowedPaths) -> Result<ImageListing> {
    let error = |what: String| EngineError::bad_input(format!("{}: {what}", path.display()));
    let bytes = regular::read(path, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(path, e))?;
    let value: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| error(format!("neither a folder nor a JSON data set ({e})")))?;
    let map = value
        .as_object()
        .ok_or_else(|| error("expected an object of image paths".into()))?;
    let root = folder_of(path).to_path_buf();
    let mut out = ImageListing {
        root: root.clone(),
        allowed_paths,
        ..ImageListing::default()
    };
    for (name, entry) in map {
        out.allowed_paths.check_name(name)?;
        let image = listed_image(&root, name, &out.allowed_paths);
        let folder = Path::new(name).parent();
        if !is_image(&image) || folder.is_some_and(is_controls_folder) {
            continue;
        }
        out.allowed_paths.check(&image)?;
        if !image.is_file() {
            return Err(error(format!("\"{name}\" does not exist")));
        }
        if !entry.is_object() {
            return Err(error(format!(
                "\"{name}\": expected an object such as {{\"caption\": \"a red circle\"}}"
            )));
        }
        let text = |key: &str| entry.get(key).and_then(serde_json::Value::as_str).map(str::to_owned);
        if let (Some(short), Some(_)) = (text("caption_short"), text("caption")) {
            out.short_captions.insert(image.clone(), short);
        }
        let caption = if short_captions {
            text("caption_short").or_else(|| text("caption"))
        } else {
            text("caption")
        };
        if let Some(caption) = caption {
            out.captions.insert(image.clone(), caption);
        }
        out.images.push(image);
    }
    out.images.sort();
    Ok(out)
}
