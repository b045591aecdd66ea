//! Which files of a folder have one of some licences.
//!
//! A file has the licence of the `SPDX-License-Identifier` in its first lines. Without one, it has that of the nearest folder, up to the folder of
//! the data set, that has licence files (`LICENSE`, `LICENSE-MIT`, `COPYING.txt`, …); of several files in a folder, one of the licences is enough.
//! Licence files are recognised by their text. Files for which no licence is found do not belong to the data set.

use super::license_expression::{is_satisfied, normalized};
use aitk_common::fsutil::regular;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// The lines of a file in which its licence is looked for.
const HEADER_LINES: usize = 40;
/// The longest licence file, and how many a folder may have.
const MAX_LICENSE_BYTES: u64 = 1 << 20;
const MAX_LICENSE_FILES: usize = 32;
/// What stands before the licence of a file.
const MARK: &str = "SPDX-License-Identifier:";
/// The beginnings of the names of licence files.
const NAMES: [&str; 4] = ["license", "licence", "copying", "unlicense"];
/// The endings of names of sources, which are not licence files (`license.rs`).
const TEXT_ENDINGS: [&str; 4] = ["", "md", "txt", "rst"];

/// Texts by which licences are recognised: all of a row, in small letters with single spaces.
const TEXTS: [(&str, &[&str]); 16] = [
    (
        "AGPL-3.0",
        &["gnu affero general public license version 3, 19 november 2007"],
    ),
    (
        "LGPL-3.0",
        &["gnu lesser general public license version 3, 29 june 2007"],
    ),
    (
        "LGPL-2.1",
        &["gnu lesser general public license version 2.1, february 1999"],
    ),
    ("GPL-3.0", &["gnu general public license version 3, 29 june 2007"]),
    ("GPL-2.0", &["gnu general public license version 2, june 1991"]),
    ("Apache-2.0", &["apache license version 2.0"]),
    ("Apache-2.0", &["apache license, version 2.0"]),
    ("MPL-2.0", &["mozilla public license version 2.0"]),
    ("EPL-2.0", &["eclipse public license - v 2.0"]),
    ("CC0-1.0", &["cc0 1.0 universal"]),
    (
        "Unlicense",
        &["this is free and unencumbered software released into the public domain"],
    ),
    ("BSL-1.0", &["boost software license - version 1.0"]),
    (
        "BSD-3-Clause",
        &[
            "redistribution and use in source and binary forms",
            "endorse or promote products",
        ],
    ),
    ("BSD-2-Clause", &["redistribution and use in source and binary forms"]),
    (
        "ISC",
        &["permission to use, copy, modify, and/or distribute this software for any purpose"],
    ),
    (
        "MIT",
        &[
            "permission is hereby granted, free of charge, to any person obtaining a copy",
            "without restriction",
        ],
    ),
];

/// The licence that a file has, as an expression; empty: unknown.
type License = String;

/// Chooses files by their licences.
#[derive(Debug)]
pub(super) struct LicenseFilter {
    /// Normalised identifiers.
    allowed: BTreeSet<String>,
    /// The folder of the data set.
    root: PathBuf,
    /// The licences of the licence files of folders; empty: there are no such files.
    folders: HashMap<PathBuf, Vec<License>>,
}

impl LicenseFilter {
    /// A filter for the files below a folder.
    pub(super) fn new(root: &Path, licenses: &[String]) -> Self {
        Self {
            allowed: licenses.iter().map(|license| normalized(license)).collect(),
            root: root.to_path_buf(),
            folders: HashMap::new(),
        }
    }

    /// Whether a file with this text has one of the licences; else what is known of its licence.
    pub(super) fn check(&mut self, file: &Path, text: &str) -> Result<(), String> {
        if let Some(expression) = of_header(text) {
            return match is_satisfied(&expression, &self.allowed) {
                true => Ok(()),
                false => Err(shortened(&expression)),
            };
        }
        let mut folder = file.parent();
        while let Some(here) = folder {
            let found = match self.folders.get(here) {
                Some(found) => found,
                None => self
                    .folders
                    .entry(here.to_path_buf())
                    .or_insert_with(|| of_folder(here)),
            };
            if !found.is_empty() {
                return match found.iter().any(|license| is_satisfied(license, &self.allowed)) {
                    true => Ok(()),
                    false => Err(found
                        .iter()
                        .map(|license| {
                            if license.is_empty() {
                                "an unknown licence"
                            } else {
                                license.as_str()
                            }
                        })
                        .collect::<Vec<_>>()
                        .join(" or ")),
                };
            }
            if here == self.root {
                break;
            }
            folder = here.parent();
        }
        Err("no licence found".to_owned())
    }
}

/// The expressions after the marks in the first lines of a text, without the ends of comments. Those of several lines all hold.
fn of_header(text: &str) -> Option<String> {
    let mut found: Vec<&str> = Vec::new();
    for line in text.lines().take(HEADER_LINES) {
        let Some((_, line)) = line.split_once(MARK) else {
            continue;
        };
        let end = ["*/", "-->", "*)", "#}", "--}}"]
            .iter()
            .filter_map(|end| line.find(end))
            .min();
        let expression = line[..end.unwrap_or(line.len())].trim().trim_matches(['"', '\'']);
        if !expression.is_empty() && !found.contains(&expression) {
            found.push(expression);
        }
    }
    match found.as_slice() {
        [] => None,
        [only] => Some((*only).to_owned()),
        several => Some(format!("({})", several.join(") AND ("))),
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(60).collect()
}

/// The licences of the licence files in a folder.
fn of_folder(folder: &Path) -> Vec<License> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| is_license_file(path))
        .collect();
    paths.sort();
    paths.truncate(MAX_LICENSE_FILES);
    let texts = paths
        .iter()
        .filter_map(|path| regular::read_text(path, MAX_LICENSE_BYTES).ok());
    texts.map(|text| recognized(&text)).collect()
}

fn is_license_file(path: &Path) -> bool {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    // `LICENSE-2.0` has no ending that says what it is.
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    let is_text = TEXT_ENDINGS.contains(&ending) || ending.parse::<u32>().is_ok();
    is_text && NAMES.iter().any(|begin| name.starts_with(begin)) && path.is_file()
}

/// The licence that a text is, or that its header names. Empty: unknown.
fn recognized(text: &str) -> License {
    if let Some(expression) = of_header(text) {
        return expression;
    }
    let plain = text
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .to_ascii_lowercase();
    // Two licences in one file both hold.
    let mut found: Vec<&str> = Vec::new();
    for (license, parts) in TEXTS {
        // The text of the third clause is added to the others.
        let is_known = found.contains(&license) || (license == "BSD-2-Clause" && found.contains(&"BSD-3-Clause"));
        if !is_known && parts.iter().all(|part| plain.contains(part)) {
            found.push(license);
        }
    }
    found.join(" AND ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIT: &str = "MIT License\n\nCopyright (c) A\n\nPermission is hereby granted, free of charge, to any person obtaining\na copy of this \
                       software, to deal in the Software without restriction.\n";

    #[test]
    fn a_file_has_its_own_licence_or_that_of_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("data");
        for folder in ["gpl/deep", "both", "odd"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        let license = |path: &str, text: &str| std::fs::write(root.join(path), text).unwrap();
        license("LICENSE", MIT);
        license(
            "gpl/COPYING.txt",
            "GNU GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007\n",
        );
        license("both/LICENSE-MIT", MIT);
        license("both/LICENSE-APACHE", "Apache License\n Version 2.0, January 2004\n");
        license("odd/LICENSE.md", "All rights reserved.");
        license("odd/license.rs", MIT);
        let mut filter = LicenseFilter::new(&root, &["apache-2.0".to_owned(), "MIT".to_owned()]);
        let mut check = |file: &str, text: &str| filter.check(&root.join(file), text).err();
        assert_eq!(check("a.rs", "fn a() {}"), None);
        assert_eq!(check("gpl/deep/a.c", "int a;").unwrap(), "GPL-3.0");
        assert_eq!(
            check("gpl/deep/b.c", "/* SPDX-License-Identifier: MIT */\nint a;"),
            None
        );
        assert_eq!(
            check("a.c", "// SPDX-License-Identifier: GPL-2.0-only\n").unwrap(),
            "GPL-2.0-only"
        );
        let two = |second: &str| format!("// SPDX-License-Identifier: MIT\n// SPDX-License-Identifier: {second}\n");
        assert_eq!(check("a.c", &two("GPL-3.0")).unwrap(), "(MIT) AND (GPL-3.0)");
        assert_eq!(check("a.c", &two("Apache-2.0 OR GPL-3.0")), None);
        assert_eq!(check("a.c", &two("MIT")), None);
        assert_eq!(check("both/a.rs", ""), None);
        assert_eq!(check("odd/a.rs", "").unwrap(), "an unknown licence");
        // Outside the data set nothing is looked for.
        std::fs::write(dir.path().join("LICENSE"), MIT).unwrap();
        std::fs::remove_file(root.join("LICENSE")).unwrap();
        let mut filter = LicenseFilter::new(&root, &["MIT".to_owned()]);
        assert_eq!(filter.check(&root.join("a.rs"), "").unwrap_err(), "no licence found");
    }

    #[test]
    fn licence_texts_are_recognised() {
        let of = |name: &str| std::fs::read_to_string(format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert_eq!(recognized(&of("LICENSE-MIT")), "MIT");
        assert_eq!(recognized(&of("LICENSE-APACHE")), "Apache-2.0");
        assert_eq!(
            recognized(&format!("{MIT}\nApache License Version 2.0")),
            "Apache-2.0 AND MIT"
        );
        assert_eq!(
            recognized("Redistribution and use in source and binary forms, with or\nwithout modification"),
            "BSD-2-Clause"
        );
        assert_eq!(recognized("anything"), "");
    }
}
