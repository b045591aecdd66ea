//! Each config becomes what its hand-written YAML is: equal jobs train the same, bit for bit.

use super::support::{folder, job, trained_folder};
use crate::sd_scripts::{Source, SourceFormat, import, is_preset};
use std::path::Path;

/// Compares each config of a folder with the YAML beside it; counts TOML files and presets.
fn compare(folder: &Path) -> (u32, u32) {
    let (mut toml, mut presets) = (0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let by_hand = path.with_extension("yaml");
        if !by_hand.exists() || name.ends_with(".yaml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let format = match name.ends_with(".json") {
            true => SourceFormat::GuiPreset,
            false => SourceFormat::Toml,
        };
        assert_eq!(is_preset(&text), format == SourceFormat::GuiPreset, "{name}");
        let imported = import(Source {
            text: &text,
            format,
            file: &name,
            directory: folder,
            dataset_config: None,
            script: None,
        })
        .unwrap_or_else(|errors| panic!("{name}: {errors:#?}"));
        let (ours, theirs) = (job(&imported.yaml), job(&std::fs::read_to_string(by_hand).unwrap()));
        assert_eq!(ours, theirs, "{name}:\n{}", imported.yaml);
        assert!(imported.notes.iter().all(|note| !note.message.is_empty()));
        match format {
            SourceFormat::Toml => toml += 1,
            SourceFormat::GuiPreset => presets += 1,
        }
    }
    (toml, presets)
}

#[test]
fn examples_become_their_hand_written_yaml() {
    assert_eq!(compare(folder().path()), (12, 3));
}

/// The program's test `configs_of_sd_scripts_train_what_their_hand_written_yaml_does` trains three of them.
#[test]
fn configs_of_tiny_models_become_their_hand_written_yaml() {
    assert_eq!(compare(trained_folder().path()), (10, 3));
}
