//! The files below a folder.

use aitk_common::step_metrics::{LOG_FILE, METRICS_FILE};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The files of a run by name. The timestamp in an image's name is removed: `samples/__000000010_0.png`, `_3.png`.
#[derive(PartialEq, Eq)]
pub struct Files {
    files: BTreeMap<String, Vec<u8>>,
    /// The names of files that exist twice, with different timestamps.
    duplicates: Vec<String>,
}

impl Files {
    /// Reads the files below a run folder, except hidden ones and the two that contain times (metrics and log).
    ///
    /// # Panics
    /// When a file cannot be read.
    #[must_use]
    pub fn below(folder: &Path) -> Self {
        let (mut files, mut duplicates) = (BTreeMap::new(), Vec::new());
        for path in files_below(folder) {
            let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str) else {
                continue;
            };
            if name.starts_with('.') || name.ends_with(METRICS_FILE) || name.ends_with(LOG_FILE) {
                continue;
            }
            let bytes = std::fs::read(&path).expect("a result can be read");
            let name = without_timestamp(name);
            if files.insert(name.clone(), bytes).is_some() {
                duplicates.push(name);
            }
        }
        Self { files, duplicates }
    }

    /// The names of the files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Describes each difference from the expected files.
    #[must_use]
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for name in &self.duplicates {
            found.push(format!("{name} exists twice"));
        }
        for name in expected.names().filter(|name| !self.files.contains_key(*name)) {
            found.push(format!("{name} is missing"));
        }
        for (name, bytes) in &self.files {
            match expected.files.get(name) {
                None => found.push(format!("{name} is unexpected")),
                Some(other) if other != bytes => found.push(format!("{name} has other bytes")),
                Some(_) => {}
            }
        }
        found
    }
}

/// Turns `samples/1724085406830__000000010_0.png` into `samples/__000000010_0.png`.
fn without_timestamp(name: &str) -> String {
    let (folder, file) = name
        .rsplit_once('/')
        .map_or((String::new(), name), |(folder, file)| (format!("{folder}/"), file));
    let digits = file.bytes().take_while(u8::is_ascii_digit).count();
    match file.get(digits..) {
        Some(rest) if digits >= 12 && rest.starts_with('_') => format!("{folder}{rest}"),
        _ => name.to_owned(),
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.files.keys()).finish()
    }
}

pub(super) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(files_below(&path));
        } else {
            found.push(path);
        }
    }
    found
}
