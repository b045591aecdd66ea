//! Which files of a run folder are uploaded.

use crate::failure::Failure;
use aitk_common::hub::push::{Source, Upload};
use aitk_common::step_metrics::PLOT_FILE;
use std::path::Path;

/// The number of files, at most.
const MAX_FILES: usize = 5000;
/// Folders below a saved model, at most.
const MAX_DEPTH: usize = 4;
/// The description of a repository.
pub(super) const README: &str = "README.md";
/// The folder of the samples.
pub(super) const SAMPLES: &str = "samples";
/// The file that makes a folder a model of diffusers.
const MODEL_INDEX: &str = "model_index.json";
/// The endings of sample images.
const IMAGES: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// The files of a run folder that are uploaded: saves, samples, the curve of the loss, and a README.md of the user's. Not the config
/// and the log, which name folders of this machine, not checkpoints, and nothing behind a symbolic link.
pub(super) fn files(folder: &Path) -> Result<Vec<Upload>, Failure> {
    let mut found = Vec::new();
    let mut saves = 0;
    for (name, is_folder) in entries(folder)? {
        let ending = Path::new(&name).extension().and_then(|ending| ending.to_str());
        let is_save = match is_folder {
            true => is_file(&folder.join(&name).join(MODEL_INDEX)),
            false => ending == Some("safetensors"),
        };
        saves += usize::from(is_save);
        match is_folder {
            true if is_save => add_folder(folder, &name, MAX_DEPTH, &|_| true, &mut found)?,
            true if name == SAMPLES => {
                let is_image = |name: &str| {
                    let ending = Path::new(name).extension().and_then(|ending| ending.to_str());
                    ending.is_some_and(|ending| IMAGES.contains(&ending.to_ascii_lowercase().as_str()))
                };
                add_folder(folder, &name, 0, &is_image, &mut found)?;
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

/// The first folder in a folder that has saves.
fn folder_with_saves(folder: &Path) -> Result<Option<String>, Failure> {
    let ends_with = |name: &str| {
        Path::new(name)
            .extension()
            .is_some_and(|ending| ending == "safetensors")
    };
    for (name, is_folder) in entries(folder)? {
        if is_folder
            && entries(&folder.join(&name))?
                .iter()
                .any(|(file, is_folder)| !is_folder && ends_with(file))
        {
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
    let source = Source::File(folder.join(&name));
    found.push(Upload { name, source });
    Ok(())
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
            "config.yaml",
            "log.txt",
            "metrics.jsonl",
            "loss.png",
            "optimizer.pt",
            ".aitk/checkpoints/step_1/model.safetensors",
            ".hidden.safetensors",
            "samples/1__000000500_0.jpg",
            "samples/notes.txt",
            "samples/deep/1.jpg",
            "whole/model_index.json",
            "whole/unet/model.safetensors",
            "other/model.safetensors",
            "tensorboard/events",
        ] {
            write(name);
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink("/etc/passwd", folder.join("link.safetensors")).unwrap();
        let names: Vec<String> = files(folder).unwrap().into_iter().map(|file| file.name).collect();
        assert_eq!(
            names,
            [
                "cat.safetensors",
                "cat_000000500.safetensors",
                "loss.png",
                "samples/1__000000500_0.jpg",
                "whole/model_index.json",
                "whole/unet/model.safetensors"
            ]
        );
    }
}
