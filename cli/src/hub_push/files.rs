//! Which files of a run folder are uploaded.

use crate::failure::Failure;
use aitk_common::fsutil::regular;
use aitk_common::hub::push::{Source, Upload};
use aitk_common::job::repository::is_repository;
use aitk_common::step_metrics::{METRICS_FILE, PLOT_FILE};
use std::path::Path;

/// The number of files, at most.
const MAX_FILES: usize = 5000;
/// Folders below a saved model, at most.
const MAX_DEPTH: usize = 4;
/// The config of a saved adapter, and its size in bytes, at most.
const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(super) const MAX_ADAPTER_CONFIG_BYTES: u64 = 1 << 20;
/// The description of a repository.
pub(super) const README: &str = "README.md";
/// The folder of the samples.
pub(super) const SAMPLES: &str = "samples";
/// Files that make a folder a saved model: of diffusers (whole, or the denoiser alone), and of peft.
const MODEL_FILES: [&str; 4] = [
    "model_index.json",
    "unet/config.json",
    "transformer/config.json",
    ADAPTER_CONFIG,
];
/// Weights of transformers, whole or in parts. With `config.json` beside them they make a folder a saved model.
const WEIGHTS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];
/// The endings of samples: images, and texts of code models.
const SAMPLE_EXTENSIONS: [&str; 5] = ["jpg", "jpeg", "png", "webp", "jsonl"];

/// The files of a run folder that are uploaded: saves, samples, the curve of the loss, and a README.md of the user's. Not the config
/// and the log, which name folders of this machine, not checkpoints, and nothing behind a symbolic link.
pub(super) fn files(folder: &Path) -> Result<Vec<Upload>, Failure> {
    if is_saved_model(folder) {
        return Err(
            Failure::usage(format!("{} is a save, not a run folder", folder.display()))
                .hint("push the folder above it, which has the samples too"),
        );
    }
    let mut found = Vec::new();
    let mut saves = 0;
    for (name, is_folder) in entries(folder)? {
        let ending = Path::new(&name).extension().and_then(|ending| ending.to_str());
        let is_save = match is_folder {
            true => is_saved_model(&folder.join(&name)),
            false => ending == Some("safetensors"),
        };
        saves += usize::from(is_save);
        match is_folder {
            true if is_save => add_folder(folder, &name, MAX_DEPTH, &|_| true, &mut found)?,
            true if name == SAMPLES => {
                let is_sample = |name: &str| {
                    let ending = Path::new(name).extension().and_then(|ending| ending.to_str());
                    ending.is_some_and(|ending| SAMPLE_EXTENSIONS.contains(&ending.to_ascii_lowercase().as_str()))
                };
                add_folder(folder, &name, 0, &is_sample, &mut found)?;
            }
            false if is_save || name == PLOT_FILE || name == README => add(folder, name, &mut found)?,
            _ => {}
        }
    }
    if saves == 0 {
        let hint = match folder_with_saves(folder)? {
            Some(below) => format!("{} has saves: push that folder", folder.join(below).display()),
            None => "name the run folder of a training that has saved, such as output/my_lora".to_owned(),
        };
        return Err(Failure::not_found(format!("{} has no saves to upload", folder.display())).hint(hint));
    }
    Ok(found)
}

/// Whether a folder is a saved model, and not a run folder: that may have a `config.json` too, of its job.
fn is_saved_model(folder: &Path) -> bool {
    let has = |name: &&str| is_file(&folder.join(name));
    !has(&METRICS_FILE) && (MODEL_FILES.iter().any(has) || has(&"config.json") && WEIGHTS.iter().any(has))
}

/// The first folder in a folder that has saves.
fn folder_with_saves(folder: &Path) -> Result<Option<String>, Failure> {
    for (name, is_folder) in entries(folder)? {
        let below = folder.join(&name);
        if !is_folder {
            continue;
        }
        let is_save = |(name, is_folder): &(String, bool)| match is_folder {
            true => is_saved_model(&below.join(name)),
            false => Path::new(name)
                .extension()
                .is_some_and(|ending| ending == "safetensors"),
        };
        if entries(&below)?.iter().any(is_save) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn add(folder: &Path, name: String, found: &mut Vec<Upload>) -> Result<(), Failure> {
    if found.len() >= MAX_FILES {
        return Err(Failure::failed(format!(
            "{} has more than {MAX_FILES} files to upload; move some samples elsewhere",
            folder.display()
        )));
    }
    let path = folder.join(&name);
    let adapter_config = match Path::new(&name).ends_with(ADAPTER_CONFIG) {
        true => without_local_base(&path)?,
        false => None,
    };
    let source = adapter_config.map_or(Source::File(path), Source::Text);
    found.push(Upload { name, source });
    Ok(())
}

/// The config of an adapter without its base model, if that is a folder of this machine. `None`: it is uploaded as it is.
fn without_local_base(path: &Path) -> Result<Option<String>, Failure> {
    let bytes = regular::read(path, MAX_ADAPTER_CONFIG_BYTES).map_err(|error| Failure::file("read", path, &error))?;
    let Ok(mut config) = serde_json::from_slice::<serde_json::Value>(&bytes) else {
        return Ok(None);
    };
    match config.get_mut("base_model_name_or_path") {
        Some(base) if base.as_str().is_some_and(|base| !is_repository(base)) => *base = serde_json::Value::Null,
        _ => return Ok(None),
    }
    Ok(Some(format!("{config:#}")))
}

fn add_folder(
    folder: &Path,
    below: &str,
    depth: usize,
    is_wanted: &dyn Fn(&str) -> bool,
    found: &mut Vec<Upload>,
) -> Result<(), Failure> {
    for (name, is_folder) in entries(&folder.join(below))? {
        let path = format!("{below}/{name}");
        match is_folder {
            true if depth > 0 => add_folder(folder, &path, depth - 1, is_wanted, found)?,
            false if is_wanted(&name) => add(folder, path, found)?,
            _ => {}
        }
    }
    Ok(())
}

/// The visible files and folders in a folder, sorted, and whether each is a folder. Symbolic links and special files are left out.
fn entries(folder: &Path) -> Result<Vec<(String, bool)>, Failure> {
    let failed = |error: std::io::Error| Failure::file("read", folder, &error);
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if !name.starts_with('.') && !name.chars().any(char::is_control) && (kind.is_file() || kind.is_dir()) {
            all.push((name, kind.is_dir()));
        }
    }
    all.sort();
    Ok(all)
}

fn is_file(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|info| info.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saves_samples_and_the_curve_are_uploaded_and_nothing_private() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let write = |name: &str| {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        };
        assert!(files(folder).unwrap_err().message.contains("no saves"));
        let above = tempfile::tempdir().unwrap();
        std::fs::create_dir(above.path().join("lora")).unwrap();
        std::fs::write(above.path().join("lora/lora.safetensors"), "x").unwrap();
        let failure = files(above.path()).unwrap_err();
        assert!(format!("{failure:?}").contains("lora has saves"), "{failure:?}");
        for name in [
            "cat.safetensors",
            "cat_000000500.safetensors",
            "config.json",
            "log.txt",
            "metrics.jsonl",
            "loss.png",
            "optimizer.pt",
            ".aitk/checkpoints/step_1/model.safetensors",
            ".hidden.safetensors",
            "samples/1__000000500_0.jpg",
            "samples/000000500.jsonl",
            "samples/notes.txt",
            "samples/deep/1.jpg",
            "whole/model_index.json",
            "whole/unet/model.safetensors",
            "tuned/transformer/config.json",
            "coder/adapter_config.json",
            "coder/adapter_model.safetensors",
            "other/model.safetensors",
            "tensorboard/events",
        ] {
            write(name);
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink("/etc/passwd", folder.join("link.safetensors")).unwrap();
        let above_of_code = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(above_of_code.path().join("run/coder")).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::write(above_of_code.path().join("run/coder").join(name), "{}").unwrap();
        }
        // The results of a job may have its config, and no metrics.
        let fetched = tempfile::tempdir().unwrap();
        for name in ["config.json", "cat.safetensors"] {
            std::fs::write(fetched.path().join(name), "{}").unwrap();
        }
        assert_eq!(files(fetched.path()).unwrap().len(), 1);
        let failure = format!("{:?}", files(above_of_code.path()).unwrap_err());
        assert!(failure.contains("run has saves"), "{failure}");
        let failure = format!("{:?}", files(&above_of_code.path().join("run/coder")).unwrap_err());
        assert!(failure.contains("is a save, not a run folder"), "{failure}");
        for (base, uploaded) in [("/home/ada/model", None), ("org/model", Some("org/model"))] {
            let config = serde_json::json!({"r": 4, "base_model_name_or_path": base});
            std::fs::write(folder.join("coder/adapter_config.json"), config.to_string()).unwrap();
            let files = files(folder).unwrap();
            let config = files
                .iter()
                .find(|file| file.name == "coder/adapter_config.json")
                .unwrap();
            let text = match &config.source {
                Source::Text(text) => text.clone(),
                Source::File(path) => std::fs::read_to_string(path).unwrap(),
            };
            let config: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(
                (config["base_model_name_or_path"].as_str(), &config["r"]),
                (uploaded, &serde_json::json!(4))
            );
        }
        let names: Vec<String> = files(folder).unwrap().into_iter().map(|file| file.name).collect();
        assert_eq!(
            names,
            [
                "cat.safetensors",
                "cat_000000500.safetensors",
                "coder/adapter_config.json",
                "coder/adapter_model.safetensors",
                "loss.png",
                "samples/000000500.jsonl",
                "samples/1__000000500_0.jpg",
                "tuned/transformer/config.json",
                "whole/model_index.json",
                "whole/unet/model.safetensors"
            ]
        );
    }
}
