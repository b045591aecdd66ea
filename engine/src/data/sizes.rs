//! `.aitk_size.json`: a cache of the image sizes of a data set, so that the next start need not open the images. It is
//! in the data set's folder, or in the folder that a worker provides for files computed from the data set.

use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use serde_json::{Map, Value, json};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The format version that ai-toolkit writes.
const VERSION: &str = "0.1.2";
/// The name of the cache file.
const NAME: &str = ".aitk_size.json";

/// Image sizes by relative path. An entry is valid while the file's size and modification time are unchanged.
#[derive(Clone, Debug)]
pub struct SizeCache {
    root: PathBuf,
    /// The folder of the cache file.
    folder: PathBuf,
    entries: Map<String, Value>,
    changed: bool,
}

/// `size:mtime`, with the time formatted as Python formats a float.
fn signature(path: &Path) -> Option<String> {
    let info = std::fs::metadata(path).ok()?;
    let time = info.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    Some(format!("{}:{time:?}", info.len()))
}

impl SizeCache {
    /// Reads the cache file in `folder` for the images below `root`. A damaged file, or one of another version, counts
    /// as empty.
    #[must_use]
    pub fn open(root: &Path, folder: &Path) -> Self {
        let entries = regular::read(&folder.join(NAME), MAX_TEXT_FILE_BYTES)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok())
            .and_then(|value| match value {
                Value::Object(map) if map.get("__version__").and_then(Value::as_str) == Some(VERSION) => Some(map),
                _ => None,
            })
            .unwrap_or_default();
        Self {
            root: root.to_path_buf(),
            folder: folder.to_path_buf(),
            entries,
            changed: false,
        }
    }

    fn key(&self, path: &Path) -> String {
        path.strip_prefix(&self.root)
            .unwrap_or(path)
            .to_string_lossy()
            .replace('\\', "/")
    }

    /// Width and height, if they are known and the file is unchanged.
    #[must_use]
    pub fn get(&self, path: &Path) -> Option<(u32, u32)> {
        let entry = self.entries.get(&self.key(path))?.as_array()?;
        if entry.get(2)?.as_str()? != signature(path)? {
            return None;
        }
        let side = |i: usize| u32::try_from(entry.get(i)?.as_u64()?).ok().filter(|n| *n > 0);
        Some((side(0)?, side(1)?))
    }

    /// Adds a size.
    pub fn put(&mut self, path: &Path, (width, height): (u32, u32)) {
        if let Some(signature) = signature(path) {
            self.entries.insert(self.key(path), json!([width, height, signature]));
            self.changed = true;
        }
    }

    /// Writes the file, if a size was added. An error is only logged: without the file the next start is slower,
    /// nothing else.
    pub fn save(mut self) {
        if !self.changed {
            return;
        }
        self.entries.insert("__version__".into(), VERSION.into());
        let text = Value::Object(self.entries).to_string();
        let path = self.folder.join(NAME);
        if let Err(error) = aitk_common::fsutil::write_atomic(&path, |out| out.write_all(text.as_bytes())) {
            tracing::debug!(%error, "cannot write the cache of image sizes");
        }
    }
}
