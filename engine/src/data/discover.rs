//! Which images a data set has (section 10.2).

use super::enclosure::Enclosure;
use crate::error::{EngineError, Result};
use aitk_common::fsutil::{folder_of, regular};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// The data set's folder (of the JSON file, when it is one).
    pub root: PathBuf,
    /// Images in the order of their paths.
    pub images: Vec<PathBuf>,
    /// Captions of a JSON data set by image; images of a folder have caption files.
    pub captions: BTreeMap<PathBuf, String>,
    /// What may be opened for it.
    pub enclosure: Enclosure,
}

const IMAGES: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// Lists a folder (recursively, without names that begin with a dot and without `_controls`) or a JSON file
/// `{path: {"caption": …, "caption_short": …}}`, whose relative paths start at its own folder. With `enclosed`, nothing
/// outside of that folder is looked at.
///
/// # Errors
/// When the path does not exist or cannot be read, the JSON has another form, or something leads out of the folder.
pub fn discover(path: &Path, short_captions: bool, enclosed: bool) -> Result<Listing> {
    let info = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            EngineError::bad_input(format!("{}: this data set folder does not exist", path.display()))
        }
        _ => EngineError::io(path, e),
    })?;
    let root = if info.is_dir() { path } else { folder_of(path) };
    let enclosure = if enclosed {
        Enclosure::of(root)?
    } else {
        Enclosure::none()
    };
    if info.is_dir() {
        let mut images = Vec::new();
        walk(path, &enclosure, &mut images, &mut HashSet::new())?;
        images.sort();
        return Ok(Listing {
            root: path.to_path_buf(),
            images,
            captions: BTreeMap::new(),
            enclosure,
        });
    }
    from_json(path, short_captions, enclosure)
}

fn is_image(path: &Path) -> bool {
    path.extension()
        .and_then(|e| e.to_str())
        .is_some_and(|e| IMAGES.contains(&e.to_lowercase().as_str()))
}

fn walk(folder: &Path, enclosure: &Enclosure, out: &mut Vec<PathBuf>, seen: &mut HashSet<PathBuf>) -> Result<()> {
    // A link to a folder above would go on for ever.
    let real = std::fs::canonicalize(folder).map_err(|e| EngineError::io(folder, e))?;
    if !seen.insert(real) {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).map_err(|e| EngineError::io(folder, e))? {
        let entry = entry.map_err(|e| EngineError::io(folder, e))?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with('.') || name == "_controls" {
            continue;
        }
        let path = entry.path();
        enclosure.check(&path)?;
        if path.is_dir() {
            walk(&path, enclosure, out, seen)?;
        } else if is_image(&path) {
            // Opening a pipe would wait for ever.
            if path.exists() && !path.is_file() {
                return Err(EngineError::bad_input(format!(
                    "{}: this is not a file; take it out of the data set",
                    path.display()
                )));
            }
            out.push(path);
        }
    }
    Ok(())
}

fn from_json(path: &Path, short_captions: bool, enclosure: Enclosure) -> Result<Listing> {
    let wrong = |what: String| EngineError::bad_input(format!("{}: {what}", path.display()));
    let bytes = regular::read(path, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(path, e))?;
    let value: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| wrong(format!("neither a folder nor a JSON data set ({e})")))?;
    let map = value
        .as_object()
        .ok_or_else(|| wrong("expected an object of image paths".into()))?;
    let root = folder_of(path).to_path_buf();
    let mut out = Listing {
        root: root.clone(),
        enclosure,
        ..Listing::default()
    };
    for (name, entry) in map {
        out.enclosure.check_name(name)?;
        let image = if Path::new(name).is_absolute() {
            PathBuf::from(name)
        } else {
            root.join(name)
        };
        if !is_image(&image) {
            continue;
        }
        out.enclosure.check(&image)?;
        if !image.is_file() {
            return Err(wrong(format!("\"{name}\" does not exist")));
        }
        if !entry.is_object() {
            return Err(wrong(format!(
                "\"{name}\": expected an object such as {{\"caption\": \"a red circle\"}}"
            )));
        }
        let text = |key: &str| entry.get(key).and_then(serde_json::Value::as_str).map(str::to_owned);
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
