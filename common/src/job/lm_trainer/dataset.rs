//! `datasets[]` of a training of a code model.

use crate::job::declare::{choices, section};
use crate::job::limits::{MAX_PATTERNS, MAX_REPEATS};
use crate::job::schema::{PresentKeys, ReadContext};
use crate::job::values::OneOrMany;

choices! {
    /// What the files of a data set contain.
    pub enum LmDatasetKind("kind of data set") {
        /// By the path: `.json`, `.jsonl` and `.parquet` files are `records`, and so is a folder that is a data set of Hugging Face, of which
        /// the train split is read: Parquet or JSONL files with nothing but what describes them, or a README.md with `configs` or
        /// `dataset_info` in its header. Other files and folders are `text`.
        Auto = "auto", Works;
        /// JSON, JSONL and Parquet files of token sequences, texts, or prompts with completions.
        Records = "records", Works;
        /// Text and code files; each is a document.
        Text = "text", Works;
    }
}

section! {
    /// A data set.
    pub struct LmDatasetConfig("datasets") {
        /// A file, or a folder whose files are read in the order of their paths, with those of its folders. Names that begin with a dot are
        /// left out.
        path [required]: String = String::new(), Works, input Dataset;
        /// What the files contain.
        kind: LmDatasetKind = LmDatasetKind::Auto, Works;
        /// Folders: only files whose path below the folder matches one of these: `*.rs`, `src/**/*.py`. A pattern without `/` is for names of
        /// files. Absent: all files, of `records` those that end in `.json`, `.jsonl` or `.parquet`.
        include: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Folders: no files whose path matches one of these; wins over `include`.
        exclude: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Folders of text: only files with one of these licences, by their SPDX identifiers: `mit`, `apache-2.0`. A licence is that of the
        /// `SPDX-License-Identifier` in a file, or else of the licence files of its folder or the nearest one above it. Absent: all files.
        licenses: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Records: the name of the field that is a text to train on.
        text_column: String = "text".into(), Works;
        /// Records: the name of the field that is given and not trained on.
        prompt_column: String = "prompt".into(), Works;
        /// Records: the name of the field that follows the prompt and is trained on.
        completion_column: String = "completion".into(), Works;
        /// How often the data set is in an epoch.
        repeats: u32 = 1, Works;
    }
    finish = finish;
}

fn finish(dataset: &mut LmDatasetConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if present.has("path") && dataset.path.trim().is_empty() {
        cx.missing_at("path", "needs the path of a file or a folder");
    }
    cx.check_not_zero("repeats", dataset.repeats);
    cx.check_at_most("repeats", dataset.repeats, MAX_REPEATS);
    for (key, patterns) in [("include", &dataset.include), ("exclude", &dataset.exclude)] {
        cx.check_item_count(key, patterns.len(), MAX_PATTERNS);
        if patterns.iter().any(|pattern| pattern.trim().is_empty()) {
            cx.error_at(
                key,
                "expected patterns such as `*.rs` or `src/**/*.py`, found an empty one",
            );
        }
    }
    cx.check_item_count("licenses", dataset.licenses.len(), MAX_PATTERNS);
    let is_identifier = |name: &String| {
        let known = |c: char| c.is_ascii_alphanumeric() || "-.+".contains(c);
        !name.is_empty() && name.chars().all(known)
    };
    if let Some(wrong) = dataset.licenses.0.iter().find(|name| !is_identifier(name)) {
        let message = format!("expected identifiers of SPDX such as `mit` or `apache-2.0`, found `{wrong}`");
        cx.error_at("licenses", message);
    }
    if !dataset.licenses.0.is_empty() && dataset.kind == LmDatasetKind::Records {
        cx.error_at("licenses", "has no effect on `kind: records`: remove it");
    }
    let usual = LmDatasetConfig::default();
    let columns = [
        ("text_column", &dataset.text_column, &usual.text_column),
        ("prompt_column", &dataset.prompt_column, &usual.prompt_column),
        (
            "completion_column",
            &dataset.completion_column,
            &usual.completion_column,
        ),
    ];
    for (index, (key, column, usual)) in columns.into_iter().enumerate() {
        if column.is_empty() {
            cx.error_at(key, "expected the name of a field");
        } else if columns[..index].iter().any(|(_, other, _)| *other == column) {
            cx.error_at(
                key,
                format!("`{column}` is another column already: each needs a field of its own"),
            );
        }
        if column != usual && dataset.kind == LmDatasetKind::Text {
            cx.error_at(key, "has no effect on `kind: text`: remove it, or use `kind: records`");
        }
    }
}
