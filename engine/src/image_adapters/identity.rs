//! What the files at `adapter.name_or_path` are, if they are not of the adapter that the config asks for.

use crate::adapters::AdapterFile;
use aitk_common::job::adapter::AdapterType;
use aitk_common::model_files::{Inventory, ModelFileKind, identify, is_adapter, parse_json, weights_files};
use std::path::Path;

/// The beginning of the names of a ControlNet's tensors in its first release.
const FIRST_NAMES: &str = "control_model.";

/// Why a file or folder is not the adapter of diffusers' class `class_name`. `None`: it may be one; what its `config.json` says is checked
/// when that is read, and whether it can be read when it is opened.
pub(super) fn identity_problem(path: &Path, kind: AdapterType, class_name: &str) -> Option<String> {
    let files = Inventory::open(path);
    let has = |start: &str| {
        let mut names = files.weights.values().flat_map(|weights| weights.shapes.keys());
        names.any(|name| name.starts_with(start))
    };
    let has_class = files
        .configs
        .get("config.json")
        .is_some_and(|config| config.contains_key("_class_name"));
    let expected = format!("expected a {class_name}, because of `adapter.type: {kind}`");
    let instead = "give its folder with `config.json`, or its .safetensors file with the names of diffusers".to_owned();
    let shown = path.display();
    match identify(&files) {
        ModelFileKind::Model { family, evidence, .. } => {
            let is_whole = !path.is_dir() || path.join("model_index.json").is_file();
            let what = if is_whole {
                "a whole model"
            } else {
                "the denoiser of a model"
            };
            let instead = match subfolder(path, &files, class_name) {
                Some(folder) => format!(
                    "its {class_name} is the folder {folder}: give {}",
                    path.join(&folder).display()
                ),
                None => format!("{instead}; without this key a new one is made"),
            };
            Some(format!(
                "{shown} is {what}, {family} ({evidence}): {expected}; {instead}"
            ))
        }
        ModelFileKind::Other { what, evidence } if is_adapter(&what) => {
            Some(lora_problem(path, (&what, &evidence), &expected))
        }
        // The error about the config says it.
        ModelFileKind::Other { .. } if has_class => None,
        ModelFileKind::Other { evidence, .. } if kind == AdapterType::ControlNet && has(FIRST_NAMES) => Some(format!(
            "{shown} has the names of the first release of ControlNets ({evidence}): {expected}; {instead}"
        )),
        ModelFileKind::Other { what, .. } if kind == AdapterType::ControlNet && what == "a ControlNet" => None,
        ModelFileKind::Other { what, .. } if kind == AdapterType::T2i && what == "a T2I adapter" => None,
        ModelFileKind::Other { what, evidence } => {
            Some(format!("{shown} is {what} ({evidence}): {expected}; {instead}"))
        }
        ModelFileKind::Unknown { .. } | ModelFileKind::Pickle { .. } => None,
    }
}

/// As [`identity_problem`], for a folder whose `config.json` is that of the adapter: its weights are of a LoRA or of another network for
/// the layers of a model.
pub(super) fn weights_problem(folder: &Path, kind: AdapterType, class_name: &str) -> Option<String> {
    let files = weights_files(folder).ok()?;
    files.iter().find_map(|file| match identify(&Inventory::open(file)) {
        ModelFileKind::Other { what, evidence } if is_adapter(&what) => {
            let expected = format!(
                "expected the weights of a {class_name}, because of `adapter.type: {kind}` and of config.json beside it"
            );
            Some(lora_problem(file, (&what, &evidence), &expected))
        }
        _ => None,
    })
}

/// The message about a LoRA, or another network for the layers of a model, in the place of an adapter.
fn lora_problem(path: &Path, (what, evidence): (&str, &str), expected: &str) -> String {
    let origin = AdapterFile::open_layout(path).ok().and_then(|file| file.origin());
    let made_for = origin.map_or_else(String::new, |origin| format!(", made for {origin}"));
    format!(
        "{} is {what}{made_for} ({evidence}): {expected}; copy or download the weights of the adapter here, or name another path. A LoRA is \
         used with `model.lora_path`, and trained further with `network.pretrained_lora_path`",
        path.display()
    )
}

/// The direct subfolder of a model that is of this class.
fn subfolder(path: &Path, files: &Inventory, class_name: &str) -> Option<String> {
    let folders = files.names.iter().filter_map(|name| name.strip_suffix("/config.json"));
    let mut folders = folders.filter(|folder| {
        let text = crate::models::config::read_text(&path.join(folder).join("config.json"));
        let json = text.ok().and_then(|text| parse_json(&text).ok());
        json.is_some_and(|json| json["_class_name"] == class_name)
    });
    folders.next().map(str::to_owned)
}
