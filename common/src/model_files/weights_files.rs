//! Selects the weights files in a component's folder. The engine and the checks before it use the same selection.

use super::inventory::{is_hidden, pickle_extension};
use crate::fsutil::regular;
use crate::job::limits::MAX_TEXT_FILE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The names of weights files in diffusers and transformers, without extensions.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];

/// An error while selecting weights files.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file or folder could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// There are only pickle files, which can run code when they are opened.
    #[error("{path}: this is a pickle file, which can run code when it is opened")]
    Pickle {
        /// The first pickle file.
        path: PathBuf,
    },
    /// There are no weights, several candidates, or missing shards.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file or folder.
        path: PathBuf,
        /// The problem, and what to do.
        reason: String,
    },
}

/// Selects the weights files of `path`: the file itself, or those of a diffusers or transformers folder. A full-precision file
/// takes precedence over shards, shards over variants (`fp16` first), and safetensors over GGUF. Hidden files are ignored,
/// because macOS writes `._NAME` metadata files.
///
/// # Errors
/// When there are no weights, or the selection is ambiguous.
pub fn weights_files(path: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    if !path.is_dir() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        return match pickle_extension(&name) {
            Some(_) => Err(WeightsError::Pickle {
                path: path.to_path_buf(),
            }),
            None => Ok(vec![path.to_path_buf()]),
        };
    }
    let failed = |source| WeightsError::Io {
        path: path.to_path_buf(),
        source,
    };
    let mut listed = BTreeSet::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if let Ok(name) = entry.file_name().into_string() {
            listed.insert(name);
        }
    }
    let names: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
    let invalid = |reason: String| WeightsError::Invalid {
        path: path.to_path_buf(),
        reason,
    };
    match choose(&names) {
        WeightsSelection::File(name) => Ok(vec![path.join(name)]),
        WeightsSelection::Shards(index) => shards(&path.join(index)),
        WeightsSelection::Ambiguous(one, other) => Err(invalid(format!(
            "`{one}` and `{other}` both hold weights: leave one of them here"
        ))),
        WeightsSelection::None => Err(match names.iter().find(|name| pickle_extension(name).is_some()) {
            Some(pickle) => WeightsError::Pickle {
                path: path.join(pickle),
            },
            None => invalid(format!(
                "no weights found: expected {0}.safetensors, {0}.safetensors.index.json, model.safetensors or one .gguf file",
                STEMS[0]
            )),
        }),
    }
}

/// The tensors that the index of the shards in a folder lists, with the path of the index. `None` if the weights are one file.
///
/// # Errors
/// When the index cannot be read.
pub fn listed_tensors(path: &Path) -> Result<Option<(PathBuf, BTreeSet<String>)>, WeightsError> {
    let Ok(entries) = std::fs::read_dir(path) else {
        return Ok(None);
    };
    let listed: BTreeSet<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let names: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
    let WeightsSelection::Shards(index) = choose(&names) else {
        return Ok(None);
    };
    let index = path.join(index);
    let tensors = weight_map(&index)?.into_keys().collect();
    Ok(Some((index, tensors)))
}

/// The weights files selected in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightsSelection<'a> {
    /// One file.
    File(&'a str),
    /// The shards listed in this index.
    Shards(&'a str),
    /// Ambiguous: two candidates.
    Ambiguous(&'a str, &'a str),
    /// There are no weights.
    None,
}

/// Selects the weights among the file names of one folder.
pub(super) fn choose<'a>(names: &BTreeSet<&'a str>) -> WeightsSelection<'a> {
    let find = |name: String| names.get(name.as_str()).copied();
    for stem in STEMS {
        if let Some(file) = find(format!("{stem}.safetensors")) {
            return WeightsSelection::File(file);
        }
        if let Some(index) = find(format!("{stem}.safetensors.index.json")) {
            return WeightsSelection::Shards(index);
        }
        let variants = names
            .iter()
            .filter_map(|name| Some((variant(stem, name)? != "fp16", *name)));
        match variants.min() {
            Some((_, index)) if index.ends_with(".json") => return WeightsSelection::Shards(index),
            Some((_, file)) => return WeightsSelection::File(file),
            None => {}
        }
    }
    for ending in [".safetensors", ".gguf"] {
        let of_kind = |name: &&str| name.ends_with(ending) && !is_hidden(name);
        let mut files = names.iter().copied().filter(of_kind);
        match (files.next(), files.next()) {
            (Some(only), None) => return WeightsSelection::File(only),
            (Some(one), Some(other)) if ending == ".gguf" => return WeightsSelection::Ambiguous(one, other),
            _ => {}
        }
    }
    WeightsSelection::None
}

/// The variant in `<stem>.fp16.safetensors` or `<stem>.safetensors.index.fp16.json`: `fp16`.
fn variant<'a>(stem: &str, name: &'a str) -> Option<&'a str> {
    let rest = name.strip_prefix(stem)?.strip_prefix('.')?;
    let variant = match rest.strip_prefix("safetensors.index.") {
        Some(rest) => rest.strip_suffix(".json")?,
        None => rest.strip_suffix(".safetensors")?,
    };
    let shard = variant.contains("-of-");
    (!variant.contains('.') && !shard).then_some(variant)
}

/// Reads the names of tensors in an index, with the files that they are in.
fn weight_map(index: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    let invalid = |reason: String| WeightsError::Invalid {
        path: index.to_path_buf(),
        reason,
    };
    let text = regular::read_text(index, MAX_TEXT_FILE_BYTES).map_err(|source| WeightsError::Io {
        path: index.to_path_buf(),
        source,
    })?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| invalid(format!("not valid JSON: {e}")))?;
    let map = json.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| invalid("it has no `weight_map`".into()))?;
    let files = map.iter().map(|(tensor, file)| {
        let file = file.as_str();
        let file = file.ok_or_else(|| invalid("a value of `weight_map` is not a file name".into()))?;
        Ok((tensor.clone(), file.to_owned()))
    });
    files.collect()
}

/// Reads the paths of the shards listed in an index.
fn shards(index: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    let invalid = |reason: String| WeightsError::Invalid {
        path: index.to_path_buf(),
        reason,
    };
    let map = weight_map(index)?;
    let mut names = BTreeSet::new();
    for name in map.values() {
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_str().as_ref()) {
            return Err(invalid(format!(
                "`{name}` is not the name of a file in the same folder"
            )));
        }
        names.insert(name);
    }
    let folder = index.parent().unwrap_or(Path::new("."));
    let files: Vec<PathBuf> = names.into_iter().map(|name| folder.join(name)).collect();
    if let Some(missing) = files.iter().find(|file| !file.is_file()) {
        let name = missing.file_name().unwrap_or_default().to_string_lossy();
        let special = std::fs::metadata(missing).ok();
        if let Some(what) = special.and_then(|info| regular::special_kind(info.file_type())) {
            return Err(invalid(format!(
                "the shard `{name}` is {what}, not a file: copy the file of this name here"
            )));
        }
        return Err(invalid(format!(
            "the shard `{name}` is missing: download the folder again"
        )));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(names: &[&'a str]) -> WeightsSelection<'a> {
        choose(&names.iter().copied().collect())
    }

    #[test]
    fn a_full_precision_file_takes_precedence_and_gguf_comes_last() {
        let full = "diffusion_pytorch_model.safetensors";
        let index = "diffusion_pytorch_model.safetensors.index.json";
        let fp16 = "diffusion_pytorch_model.fp16.safetensors";
        let other = "diffusion_pytorch_model.non_ema.safetensors";
        let shard = "diffusion_pytorch_model-00001-of-00002.safetensors";
        let gguf = "unet-q4_0.gguf";
        let all = [gguf, "a.safetensors", shard, other, fp16, index, full];
        let cases: &[(&[&str], WeightsSelection<'_>)] = &[
            (&all[..], WeightsSelection::File(full)),
            (&all[..6], WeightsSelection::Shards(index)),
            (&all[..5], WeightsSelection::File(fp16)),
            (&all[..4], WeightsSelection::File(other)),
            (&all[..3], WeightsSelection::File(gguf)),
            (&all[..2], WeightsSelection::File("a.safetensors")),
            (&all[..1], WeightsSelection::File(gguf)),
            (&[], WeightsSelection::None),
            (&["a.safetensors", "b.safetensors"], WeightsSelection::None),
            (&["a.gguf", "b.gguf"], WeightsSelection::Ambiguous("a.gguf", "b.gguf")),
            (&["diffusion_pytorch_model.bin"], WeightsSelection::None),
            (
                &[
                    "model.safetensors.index.fp16.json",
                    "model.fp16-00001-of-00002.safetensors",
                ],
                WeightsSelection::Shards("model.safetensors.index.fp16.json"),
            ),
        ];
        for (names, expected) in cases {
            assert_eq!(of(names), *expected, "{names:?}");
        }
    }

    #[test]
    fn macos_metadata_files_are_ignored() {
        assert_eq!(
            of(&["._a.safetensors", "a.safetensors"]),
            WeightsSelection::File("a.safetensors")
        );
        assert_eq!(of(&["._a.gguf", "a.gguf"]), WeightsSelection::File("a.gguf"));
        assert_eq!(of(&["._a.safetensors"]), WeightsSelection::None);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("._a.gguf"), "x").unwrap();
        assert!(matches!(
            weights_files(folder.path()),
            Err(WeightsError::Invalid { .. })
        ));
        std::fs::write(folder.path().join("a.gguf"), "x").unwrap();
        assert_eq!(weights_files(folder.path()).unwrap(), [folder.path().join("a.gguf")]);
    }
}
