//! Data sets of Hugging Face as they are on disk: a folder with Parquet or JSONL files, whose names or whose README.md say to which split each
//! belongs.
//!
//! Source: "Structure your repository" and "Data files configuration" of Hugging Face's documentation of data sets.

use super::file_list::has_ending;
use super::patterns::Patterns;
use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use aitk_common::job::yaml_to_json;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The endings of files with records.
pub(super) const RECORD_ENDINGS: [&str; 3] = ["json", "jsonl", "parquet"];
/// The longest README.md.
const MAX_README_BYTES: u64 = 4 << 20;
/// The beginnings of names of files that describe a data set.
const DESCRIBING_NAMES: [&str; 7] = [
    "readme",
    "license",
    "licence",
    "copying",
    "notice",
    "citation",
    "changelog",
];
/// Whole names of files that describe a data set.
const DESCRIBING_FILES: [&str; 4] = [
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
];
/// The endings of images, which a README.md shows.
const IMAGE_ENDINGS: [&str; 5] = ["png", "jpg", "jpeg", "gif", "svg"];
/// The words in names of files by which a split is recognised.
const TRAIN_WORDS: [&str; 2] = ["train", "training"];
const VALIDATION_WORDS: [&str; 4] = ["validation", "valid", "val", "dev"];
const TEST_WORDS: [&str; 4] = ["test", "testing", "eval", "evaluation"];
/// What to do where the choice is not clear.
const CHOOSE: &str = "choose files with `include`, such as `include: [\"data/train-*\"]`";

/// A part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// What is trained on.
    Train,
    /// On which the loss is measured: the validation split, or else the test split.
    HeldOut,
}

impl Split {
    /// The words of the splits that are taken: the first that is there.
    fn words(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Train => &[&TRAIN_WORDS],
            Self::HeldOut => &[&VALIDATION_WORDS, &TEST_WORDS],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "validation or test",
        }
    }
}

/// The files of a data set in a folder.
#[derive(Debug)]
pub(super) struct RecordFiles {
    pub(super) files: Vec<PathBuf>,
    /// Which they are, for the user.
    pub(super) note: String,
}

/// The files with records of a folder of data sets. `None`: the folder has other files than records and what describes them, such as a folder of
/// code. `files`: those of the folder, in the order of their paths. `split`: `None`: all of them.
///
/// # Errors
/// When the folder has no such split, or it is not clear which files belong to it.
pub(super) fn find_record_files(root: &Path, files: &[PathBuf], split: Option<Split>) -> Result<Option<RecordFiles>> {
    let paths: Vec<(String, &PathBuf)> = files
        .iter()
        .map(|file| {
            (
                file.strip_prefix(root)
                    .unwrap_or(file)
                    .to_string_lossy()
                    .replace('\\', "/"),
                file,
            )
        })
        .collect();
    let card = read_card(root, files)?;
    let has = |ending: &str| paths.iter().any(|(path, _)| has_ending(path, ending));
    // Beside Parquet and JSONL, files in JSON describe.
    let endings: &[&str] = match (has("parquet"), has("jsonl")) {
        (true, true) if card.is_none() => &["parquet", "jsonl"],
        (true, _) => &["parquet"],
        (false, true) => &["jsonl"],
        (false, false) if card.is_some() => &["json"],
        (false, false) => return Ok(None),
    };
    let is_record = |path: &str| endings.iter().any(|ending| has_ending(path, ending)) && !is_describing(path);
    if card.is_none() && !paths.iter().all(|(path, _)| is_record(path) || is_describing(path)) {
        return Ok(None);
    }
    let records: Vec<&(String, &PathBuf)> = match card.as_ref().is_some_and(|card| !card.configs.is_empty()) {
        // A card may name files of any of the formats.
        true => paths
            .iter()
            .filter(|(path, _)| RECORD_ENDINGS.iter().any(|ending| has_ending(path, ending)) && !is_describing(path))
            .collect(),
        false => paths.iter().filter(|(path, _)| is_record(path)).collect(),
    };
    if records.is_empty() {
        return Ok(None);
    }
    let bad = |problem: String| EngineError::bad_input(format!("{}: {problem}", root.display()));
    if let [_, _] = endings
        && split.is_some()
    {
        // They may be the same records twice.
        return Err(bad(format!(
            "it has files with records in Parquet and in JSONL: {CHOOSE}"
        )));
    }
    let names: Vec<&str> = records.iter().map(|(path, _)| path.as_str()).collect();
    let chosen = match split {
        None => names.clone(),
        Some(split) => match card.filter(|card| !card.configs.is_empty()) {
            Some(card) => card.files(&names, split).map_err(bad)?,
            None => files_by_name(&names, split).map_err(bad)?,
        },
    };
    let first = chosen.first().copied().unwrap_or_default();
    let note = format!(
        "{}: read as a data set of records: {} of its {} files with records, such as {first}{}",
        root.display(),
        chosen.len(),
        names.len(),
        match split {
            Some(split) if chosen.len() < names.len() => format!(" (split: {})", split.name()),
            _ => String::new(),
        }
    );
    let chosen: BTreeSet<&str> = chosen.into_iter().collect();
    Ok(Some(RecordFiles {
        files: records
            .iter()
            .filter(|(path, _)| chosen.contains(path.as_str()))
            .map(|(_, file)| (*file).clone())
            .collect(),
        note,
    }))
}

/// Whether a file describes a data set, by its name.
fn is_describing(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let begins_with = |begin: &str| {
        // `license-mit`, and no `licenses.jsonl`.
        name.strip_prefix(begin)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
    };
    DESCRIBING_NAMES.iter().any(|begin| begins_with(begin))
        || DESCRIBING_FILES.contains(&name.as_str())
        || IMAGE_ENDINGS.iter().any(|ending| has_ending(&name, ending))
}

/// Whether one of the words is in a path, between characters that are not letters.
fn has_word(path: &str, words: &[&str]) -> bool {
    // The ending says nothing.
    let path = path.rsplit_once('.').map_or(path, |(path, _)| path);
    path.split(|c: char| !c.is_ascii_alphabetic())
        .any(|part| words.contains(&part))
}

/// The files of a split by their names. Where no name has the word of a split, all files are trained on.
fn files_by_name<'a>(names: &[&'a str], split: Split) -> Result<Vec<&'a str>, String> {
    for words in split.words() {
        let found: Vec<&str> = names.iter().copied().filter(|name| has_word(name, words)).collect();
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let words = [&TRAIN_WORDS[..], &VALIDATION_WORDS, &TEST_WORDS];
    match names
        .iter()
        .find(|name| words.iter().any(|words| has_word(name, words)))
    {
        None => Ok(names.to_vec()),
        Some(other) => Err(no_split(split, other)),
    }
}

fn no_split(split: Split, other: &str) -> String {
    let held_out = match split {
        Split::Train => "",
        Split::HeldOut => ", or hold out a share of the data sets with `validation.share`",
    };
    format!(
        "this data set has no {} split, and its files are of others, such as {other}: {CHOOSE}{held_out}",
        split.name()
    )
}

/// What README.md says of a data set.
struct Card {
    /// Its configs, of which each has data files.
    configs: Vec<Value>,
}

/// Reads the header of README.md in a folder. `None`: there is none, or it is not that of a data set.
fn read_card(root: &Path, files: &[PathBuf]) -> Result<Option<Card>> {
    let path = root.join("README.md");
    if !files.contains(&path) {
        return Ok(None);
    }
    let Ok(text) = regular::read_text(&path, MAX_README_BYTES) else {
        return Ok(None);
    };
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text).replace("\r\n", "\n");
    let Some(header) = text
        .strip_prefix("---\n")
        .and_then(|rest| rest.split_once("\n---").map(|(header, _)| header))
    else {
        return Ok(None);
    };
    // Other headers are no matter of a data set.
    if !header
        .lines()
        .any(|line| line.starts_with("configs:") || line.starts_with("dataset_info:"))
    {
        return Ok(None);
    }
    let json = yaml_to_json(header).map_err(|problem| {
        EngineError::bad_input(format!(
            "{}: its header cannot be read: {problem}; {CHOOSE}",
            path.display()
        ))
    })?;
    let configs = json
        .get("configs")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    Ok(Some(Card {
        configs: configs
            .into_iter()
            .filter(|config| config.get("data_files").is_some() || config.get("data_dir").is_some())
            .collect(),
    }))
}

impl Card {
    /// The config that is taken where none is named: the only one, the one that is called `default`, or the one that says so.
    fn default_config(&self) -> Result<&Value, String> {
        if let [only] = self.configs.as_slice() {
            return Ok(only);
        }
        let name = |config: &Value| config.get("config_name").and_then(Value::as_str).map(str::to_owned);
        let is_default = |config: &&Value| {
            config.get("default") == Some(&Value::Bool(true)) || name(config).as_deref() == Some("default")
        };
        self.configs.iter().find(is_default).ok_or_else(|| {
            let names: Vec<String> = self
                .configs
                .iter()
                .filter_map(name)
                .take(20)
                .map(|name| format!("`{name}`"))
                .collect();
            format!(
                "its README.md has several configs and no default: {}: {CHOOSE}",
                names.join(", ")
            )
        })
    }

    /// The files of a split.
    fn files<'a>(&self, names: &[&'a str], split: Split) -> Result<Vec<&'a str>, String> {
        let config = self.default_config()?;
        let folder = config.get("data_dir").and_then(Value::as_str).unwrap_or_default();
        let folder = folder.trim_start_matches("./").trim_matches('/');
        let within =
            |name: &&str| folder.is_empty() || name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        let names: Vec<&str> = names.iter().copied().filter(within).collect();
        let Some(data_files) = config.get("data_files") else {
            return files_by_name(&names, split);
        };
        let splits = splits_of(data_files)?;
        for words in split.words() {
            let patterns: Vec<&String> = splits
                .iter()
                .filter(|(name, _)| words.contains(&name.as_str()))
                .flat_map(|(_, patterns)| patterns)
                .collect();
            if patterns.is_empty() {
                continue;
            }
            let matched = matching(&names, folder, &patterns)?;
            return match matched.is_empty() {
                true => Err(format!(
                    "its README.md gives `{}` for the {} split, and no .json, .jsonl or .parquet file matches: {CHOOSE}",
                    patterns[0], words[0]
                )),
                false => Ok(matched),
            };
        }
        let other = splits.first().map_or("none", |(name, _)| name.as_str());
        Err(no_split(split, &format!("`{other}` of its README.md")))
    }
}

/// The splits of `data_files` with their patterns. Files without a split are trained on.
fn splits_of(data_files: &Value) -> Result<Vec<(String, Vec<String>)>, String> {
    let unknown = || format!("the `data_files` of its README.md are of a form that is not known: {CHOOSE}");
    let patterns = |value: &Value| match value {
        Value::String(pattern) => Ok(vec![pattern.clone()]),
        Value::Array(patterns) => patterns
            .iter()
            .map(|pattern| pattern.as_str().map(str::to_owned).ok_or_else(unknown))
            .collect(),
        _ => Err(unknown()),
    };
    let train = |patterns: Vec<String>| vec![("train".to_owned(), patterns)];
    match data_files {
        Value::String(_) => patterns(data_files).map(train),
        Value::Array(items) if items.iter().all(Value::is_string) => patterns(data_files).map(train),
        Value::Array(items) => items
            .iter()
            .map(|item| {
                let split = item.get("split").and_then(Value::as_str).ok_or_else(unknown)?;
                Ok((split.to_owned(), patterns(item.get("path").ok_or_else(unknown)?)?))
            })
            .collect(),
        Value::Object(splits) => splits
            .iter()
            .map(|(split, value)| Ok((split.clone(), patterns(value)?)))
            .collect(),
        _ => Err(unknown()),
    }
}

/// The files that match patterns, which are for paths below the folder.
fn matching<'a>(names: &[&'a str], folder: &str, patterns: &[&String]) -> Result<Vec<&'a str>, String> {
    if let Some(other) = patterns
        .iter()
        .find(|pattern| pattern.contains(['[', '{']) || pattern.contains("://"))
    {
        return Err(format!(
            "its README.md has the pattern `{other}`, which is not supported: {CHOOSE}"
        ));
    }
    // With a `/` a pattern is for whole paths.
    let anchored: Vec<String> = patterns
        .iter()
        .map(|pattern| format!("/{folder}/{}", pattern.trim_start_matches("./")))
        .collect();
    let patterns = Patterns::new(&anchored);
    Ok(names.iter().copied().filter(|name| patterns.matches(name)).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The files that are found in a folder with these files. `None`: they are texts.
    fn found(files: &[&str], card: Option<&str>, split: Option<Split>) -> Result<Option<Vec<String>>, String> {
        let dir = tempfile::tempdir().unwrap();
        let mut paths: Vec<PathBuf> = files.iter().map(|file| dir.path().join(file)).collect();
        if let Some(card) = card {
            let readme = dir.path().join("README.md");
            std::fs::write(&readme, format!("---\n{card}\n---\n# About\n")).unwrap();
            paths.push(readme);
        }
        paths.sort();
        let relative = |path: &PathBuf| path.strip_prefix(dir.path()).unwrap().to_string_lossy().into_owned();
        match find_record_files(dir.path(), &paths, split) {
            Ok(found) => Ok(found.map(|found| found.files.iter().map(relative).collect())),
            Err(error) => Err(error.to_string()),
        }
    }

    const TRAIN: Option<Split> = Some(Split::Train);
    const HELD_OUT: Option<Split> = Some(Split::HeldOut);

    #[track_caller]
    fn check(files: &[&str], card: Option<&str>, split: Option<Split>, expected: &[&str]) {
        let found = found(files, card, split).unwrap().expect("a data set");
        assert_eq!(found, expected);
    }

    #[test]
    fn names_of_files_say_their_split() {
        let files = [
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/test-00000-of-00001.parquet",
            "dataset_infos.json",
            "LICENSE",
            "README.txt",
        ];
        check(&files, None, TRAIN, &files[..2]);
        check(&files, None, HELD_OUT, &files[2..3]);
        check(&files, None, None, &[files[2], files[0], files[1]]);
        check(
            &["train.jsonl", "val.jsonl", "test.jsonl"],
            None,
            TRAIN,
            &["train.jsonl"],
        );
        check(
            &["train.jsonl", "val.jsonl", "test.jsonl"],
            None,
            HELD_OUT,
            &["val.jsonl"],
        );
        check(&["train/a.jsonl", "dev/a.jsonl"], None, HELD_OUT, &["dev/a.jsonl"]);
        // No split: all are trained on.
        check(
            &["a.parquet", "retraining.parquet"],
            None,
            TRAIN,
            &["a.parquet", "retraining.parquet"],
        );
        let message = found(&["test.parquet"], None, TRAIN).unwrap_err();
        assert!(
            message.contains("no train split") && message.contains("`include`"),
            "{message}"
        );
        let message = found(&["train.parquet"], None, HELD_OUT).unwrap_err();
        assert!(message.contains("`validation.share`"), "{message}");
    }

    #[test]
    fn folders_of_texts_are_no_data_sets() {
        for files in [
            &["a.rs", "b.parquet"][..],
            &["notes.md", "a.jsonl"],
            &["a.txt", "a.jsonl"],
            &["a.json"],
            &["a.json", "README.md"],
            &["main.py"],
            &[],
        ] {
            assert_eq!(found(files, None, TRAIN), Ok(None), "{files:?}");
        }
        // The header of a model is none of a data set.
        assert_eq!(found(&["a.py", "a.jsonl"], Some("license: mit"), TRAIN), Ok(None));
    }

    #[test]
    fn a_card_says_which_files_a_split_has() {
        let files = [
            "code/a.jsonl",
            "code/b.jsonl",
            "make.py",
            "text/train-0.parquet",
            "text/test-0.parquet",
        ];
        let lists = "license: mit\nconfigs:\n- config_name: code\n  default: true\n  data_files:\n  - split: train\n    path: code/a.*\n  - \
                     split: validation\n    path:\n    - code/b.jsonl\n- config_name: text\n  data_dir: text\n";
        check(&files, Some(lists), TRAIN, &["code/a.jsonl"]);
        check(&files, Some(lists), HELD_OUT, &["code/b.jsonl"]);
        check(
            &files,
            Some("configs:\n- data_files: \"*/*.jsonl\""),
            TRAIN,
            &files[..2],
        );
        let map = "configs:\n- data_files:\n    train: [\"code/a.jsonl\", \"code/b.jsonl\"]\n    test: text/test*";
        check(&files, Some(map), TRAIN, &files[..2]);
        check(&files, Some(map), HELD_OUT, &["text/test-0.parquet"]);
        check(
            &files,
            Some("configs:\n- data_dir: text"),
            TRAIN,
            &["text/train-0.parquet"],
        );
        check(
            &files,
            Some("dataset_info:\n  features: []"),
            TRAIN,
            &["text/train-0.parquet"],
        );
        // A pattern without a folder is not for files in folders.
        for (card, expected) in [
            (
                "configs:\n- data_files: a.jsonl",
                "no .json, .jsonl or .parquet file matches",
            ),
            ("configs:\n- data_files: {test: \"**/*.jsonl\"}", "no train split"),
            ("configs:\n- data_files: code/[ab].jsonl", "not supported"),
            ("configs:\n- data_files: 3", "a form that is not known"),
            ("configs: [a: [", "header cannot be read"),
            (
                "configs:\n- {config_name: x, data_dir: a}\n- {config_name: y, data_dir: b}",
                "`x`, `y`",
            ),
        ] {
            let message = found(&files, Some(card), TRAIN).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
        // With `include` the user chooses.
        check(&files, Some(lists), None, &[files[0], files[1], files[4], files[3]]);
    }
}
