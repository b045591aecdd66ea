//! Which files of a component's folder hold its weights.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Names that diffusers and transformers give to weights, without their ending.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];

/// The weights files of `path`: itself, or what a diffusers or transformers folder holds. A full-precision file
/// comes before shards, those before a variant (`fp16` before others), and safetensors before GGUF.
pub(super) fn find(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        refuse_pickle(path)?;
        return Ok(vec![path.to_path_buf()]);
    }
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(path).map_err(|e| EngineError::io(path, e))? {
        let entry = entry.map_err(|e| EngineError::io(path, e))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.insert(name);
        }
    }
    for stem in STEMS {
        if names.contains(&format!("{stem}.safetensors")) {
            return Ok(vec![path.join(format!("{stem}.safetensors"))]);
        }
        if names.contains(&format!("{stem}.safetensors.index.json")) {
            return shards(&path.join(format!("{stem}.safetensors.index.json")));
        }
        let mut variants: Vec<(String, &String)> = names
            .iter()
            .filter_map(|name| variant(stem, name).map(|variant| (variant.to_owned(), name)))
            .collect();
        variants.sort_by_key(|(variant, name)| (variant != "fp16", (*name).clone()));
        if let Some((_, name)) = variants.first() {
            let file = path.join(name);
            return if name.ends_with(".json") {
                shards(&file)
            } else {
                Ok(vec![file])
            };
        }
    }
    for ending in [".safetensors", ".gguf"] {
        let files: Vec<&String> = names.iter().filter(|name| name.ends_with(ending)).collect();
        match files.as_slice() {
            [only] => return Ok(vec![path.join(only)]),
            [one, other, ..] if ending == ".gguf" => {
                return Err(EngineError::WeightsFile {
                    path: path.to_path_buf(),
                    reason: format!("`{one}` and `{other}` both hold weights: leave one of them here"),
                });
            }
            _ => {}
        }
    }
    for name in &names {
        refuse_pickle(&path.join(name))?;
    }
    Err(EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason: format!(
            "no weights found: expected {0}.safetensors, {0}.safetensors.index.json, model.safetensors or one .gguf file",
            STEMS[0]
        ),
    })
}

/// `<stem>.fp16.safetensors` or `<stem>.safetensors.index.fp16.json` -> `fp16`.
fn variant<'a>(stem: &str, name: &'a str) -> Option<&'a str> {
    let rest = name.strip_prefix(stem)?.strip_prefix('.')?;
    let variant = match rest.strip_prefix("safetensors.index.") {
        Some(rest) => rest.strip_suffix(".json")?,
        None => rest.strip_suffix(".safetensors")?,
    };
    let shard = variant.contains("-of-");
    (!variant.contains('.') && !shard).then_some(variant)
}

/// Files named by an index.
fn shards(index: &Path) -> Result<Vec<PathBuf>> {
    let wrong = |reason: String| EngineError::WeightsFile {
        path: index.to_path_buf(),
        reason,
    };
    let text = regular::read_text(index, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(index, e))?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
    let map = json.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| wrong("it has no `weight_map`".into()))?;
    let mut names = BTreeSet::new();
    for name in map.values() {
        let name = name
            .as_str()
            .ok_or_else(|| wrong("a value of `weight_map` is not a file name".into()))?;
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(wrong(format!("`{name}` is not the name of a file in the same folder")));
        }
        names.insert(name);
    }
    let folder = index.parent().unwrap_or(Path::new("."));
    let files: Vec<PathBuf> = names.into_iter().map(|name| folder.join(name)).collect();
    if let Some(missing) = files.iter().find(|file| !file.is_file()) {
        let name = missing.file_name().unwrap_or_default().to_string_lossy();
        return Err(wrong(format!(
            "the shard `{name}` is missing: download the folder again"
        )));
    }
    Ok(files)
}

/// Pickle files are refused by name as well as by content.
pub(super) fn refuse_pickle(path: &Path) -> Result<()> {
    let ending = path
        .extension()
        .and_then(|e| e.to_str())
        .unwrap_or_default()
        .to_lowercase();
    if matches!(ending.as_str(), "ckpt" | "pt" | "pth" | "bin" | "pkl" | "pickle") {
        return Err(EngineError::Pickle {
            path: path.to_path_buf(),
        });
    }
    Ok(())
}
