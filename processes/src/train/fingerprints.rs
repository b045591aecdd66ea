//! Fingerprints of the files that encode images and prompts: what they encoded is cached under them.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use aitk_common::model_files::PartPaths;
use sha2::{Digest, Sha256};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// A fingerprint of a VAE's weights: a hash of the names, sizes and samples of its files.
pub(super) fn vae_fingerprint(path: &Path) -> Result<String> {
    let inner = path.join("vae");
    let folder = if inner.is_dir() { inner } else { path.to_path_buf() };
    let mut hash = Sha256::new();
    for file in files_of(&folder, &["safetensors", "json"])? {
        add_to_fingerprint(&mut hash, &file)?;
    }
    Ok(hex::encode(&hash.finalize()[..8]))
}

/// A fingerprint of a model's text encoders: of the files of its folders `text_encoder…` and `tokenizer…`, of the configs of
/// its other parts, which can say how long a prompt may be (that of FLUX.1's transformer and of its scheduler), and of a LoRA.
/// For a single file: of the file, and of the tokenizers and the scheduler beside it. The same of each of `parts` that may have
/// text encoders.
pub(super) fn text_fingerprint(model: &Path, parts: &PartPaths, changes: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    add_text_encoders(&mut hash, model)?;
    for (key, path) in [("extras", &parts.extras), ("text encoder", &parts.text_encoder)] {
        let Some(path) = path else { continue };
        hash.update(key.as_bytes());
        for file in files_of(path, &TEXT_FILES)? {
            add_to_fingerprint(&mut hash, &file)?;
        }
        add_text_encoders(&mut hash, path)?;
    }
    for change in changes {
        for file in files_of(change, &["safetensors", "json"])? {
            add_to_fingerprint(&mut hash, &file)?;
        }
    }
    Ok(hex::encode(&hash.finalize()[..8]))
}

/// The suffixes of files that text encoders and tokenizers consist of.
const TEXT_FILES: [&str; 5] = ["safetensors", "gguf", "json", "txt", "model"];

/// Adds what [`text_fingerprint`] says of one path.
fn add_text_encoders(hash: &mut Sha256, model: &Path) -> Result<()> {
    let folder = match model.is_dir() {
        true => model.to_path_buf(),
        false => {
            add_to_fingerprint(hash, model)?;
            model.parent().unwrap_or(Path::new(".")).to_path_buf()
        }
    };
    let entries = std::fs::read_dir(&folder).map_err(|e| EngineError::io(&folder, e))?;
    let mut parts: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    parts.sort();
    for part in parts {
        let name = part.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_tokenizer = name.starts_with("tokenizer");
        if is_tokenizer || (name.starts_with("text_encoder") && model.is_dir()) {
            hash.update(name.as_bytes());
            for file in files_of(&part, &TEXT_FILES)? {
                add_to_fingerprint(hash, &file)?;
            }
            continue;
        }
        for config in ["config.json", "scheduler_config.json"].map(|file| part.join(file)) {
            if config.is_file() && (model.is_dir() || name == "scheduler") {
                hash.update(name.as_bytes());
                add_to_fingerprint(hash, &config)?;
            }
        }
    }
    Ok(())
}

/// The files of a folder with these suffixes, sorted; or the file itself.
fn files_of(path: &Path, suffixes: &[&str]) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let has_suffix = |path: &PathBuf| {
        let suffix = path.extension().and_then(|suffix| suffix.to_str());
        suffix.is_some_and(|suffix| suffixes.contains(&suffix))
    };
    let entries = std::fs::read_dir(path).map_err(|e| EngineError::io(path, e))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(has_suffix)
        .collect();
    files.sort();
    Ok(files)
}

/// Adds a file's name, size and samples.
fn add_to_fingerprint(hash: &mut Sha256, file: &Path) -> Result<()> {
    let failed = |e| EngineError::io(file, e);
    let (mut reader, _) = regular::open(file).map_err(failed)?;
    let size = reader.metadata().map_err(failed)?.len();
    hash.update(file.file_name().unwrap_or_default().as_encoded_bytes());
    hash.update(size.to_le_bytes());
    let (pieces, length) = (16, 1 << 16);
    for piece in 0..pieces {
        let at = (size / pieces) * piece;
        reader.seek(SeekFrom::Start(at)).map_err(failed)?;
        let mut bytes = Vec::new();
        (&mut reader).take(length).read_to_end(&mut bytes).map_err(failed)?;
        hash.update(&bytes);
    }
    Ok(())
}
