//! The kinds of data sets: with caption files, with masks, with a metadata file (`library/config_util.py` of sd-scripts).

use super::support::{base, folder, import_in, job};
use crate::job::process::TrainerProcess;
use crate::sd_scripts::Script;
use std::path::Path;

const MASKS: &str = "[[datasets.subsets]]\nimage_dir = \"cats\"\nconditioning_data_dir = \"masks\"\n";
const METADATA: &str = "[[datasets.subsets]]\nimage_dir = \"cats\"\nmetadata_file = \"meta.json\"\n";
const CAPTIONS: &str = "[[datasets.subsets]]\nimage_dir = \"more_cats\"\n";

fn imported(folder: &Path, datasets: &str, more: &str) -> Result<TrainerProcess, Vec<String>> {
    std::fs::write(folder.join("data.toml"), datasets).unwrap();
    let text = base(Script::TrainNetwork).replace("train_data_dir = \"images\"", "dataset_config = \"data.toml\"");
    match import_in(folder, &format!("{text}{more}"), None) {
        Ok(imported) => Ok(job(&imported.yaml).process[0].trainer().unwrap().clone()),
        Err(errors) => Err(errors.iter().map(ToString::to_string).collect()),
    }
}

#[test]
fn subsets_of_a_data_set_are_of_one_kind() {
    let folder = folder();
    for (datasets, expected) in [
        (
            format!("[[datasets]]\n{MASKS}{CAPTIONS}"),
            "data.toml:4:1: conditioning_data_dir: in sd-scripts, all subsets of a data set have it, or none",
        ),
        (
            format!("[[datasets]]\n{CAPTIONS}{METADATA}"),
            "data.toml:6:1: metadata_file: in sd-scripts, all subsets",
        ),
        (
            format!("[[datasets]]\n{MASKS}is_reg = true\n"),
            "data.toml:5:1: is_reg: sd-scripts stops with an error, because there is a conditioning_data_dir",
        ),
        (
            format!("[[datasets]]\nclass_tokens = \"cat\"\n{MASKS}"),
            "data.toml:2:1: class_tokens: sd-scripts stops",
        ),
        (
            format!("[[datasets]]\n{METADATA}caption_extension = \".txt\"\n"),
            "caption_extension: sd-scripts stops with an error, because there is a metadata_file",
        ),
        (
            format!("[[datasets]]\nrandom_crop = true\nenable_bucket = true\n{MASKS}"),
            "random_crop: sd-scripts does not crop images with masks",
        ),
        (
            format!("[[datasets]]\nvalidation_split = 0.5\n{MASKS}"),
            "validation_split: sd-scripts does not divide a data set with masks",
        ),
    ] {
        let errors = imported(folder.path(), &datasets, "masked_loss = true\n").unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].contains(expected),
            "{datasets}{errors:?}"
        );
    }
}

/// With masked_loss or without: to add it would not help.
#[test]
fn fine_tune_has_no_masks() {
    let folder = folder();
    std::fs::write(folder.path().join("data.toml"), format!("[[datasets]]\n{MASKS}")).unwrap();
    let text = base(Script::FineTune).replace("train_data_dir = \"images\"", "dataset_config = \"data.toml\"");
    for more in ["", "masked_loss = true\n"] {
        let errors = import_in(folder.path(), &format!("{text}{more}"), Some(Script::FineTune)).unwrap_err();
        assert!(
            errors.len() == 1
                && errors[0].key == "conditioning_data_dir"
                && errors[0].message == "fine_tune.py has no masks: remove it",
            "{more}{errors:?}"
        );
    }
}

#[test]
fn shared_options_that_a_kind_does_not_have_are_ignored() {
    let folder = folder();
    let general = "[general]\nclass_tokens = \"cat\"\ncaption_extension = \".txt\"\n";
    let datasets = format!("{general}[[datasets]]\n{MASKS}[[datasets]]\n{METADATA}[[datasets]]\n{CAPTIONS}");
    let process = imported(folder.path(), &datasets, "masked_loss = true\nalpha_mask = true\n").unwrap();
    let found: Vec<(&str, bool, bool)> = process
        .datasets
        .iter()
        .map(|dataset| {
            (
                dataset.default_caption.as_deref().unwrap_or(""),
                dataset.alpha_mask,
                dataset.mask_path.is_some(),
            )
        })
        .collect();
    assert_eq!(found, [("", false, true), ("", true, false), ("cat", true, false)]);
}

#[test]
fn subsets_with_metadata_are_the_same_if_their_file_is() {
    let folder = folder();
    std::fs::write(folder.path().join("other.json"), r#"{"3": {"caption": "a cat"}}"#).unwrap();
    let other = METADATA.replace("meta.json", "other.json");
    let in_other_folder = other.replace("cats", "more_cats");
    let datasets = format!("[[datasets]]\n{METADATA}{in_other_folder}{METADATA}");
    let process = imported(folder.path(), &datasets, "max_train_epochs = 3\n").unwrap();
    let files: Vec<Option<&str>> = process
        .datasets
        .iter()
        .map(|dataset| dataset.captions_file.as_deref())
        .collect();
    // Two images in the first file, one in the second.
    assert_eq!(files, [Some("meta.json"), Some("other.json")]);
    assert_eq!(process.train.steps, 9);

    // An image of a data set is that of the last file that names it (`register_image` of sd-scripts).
    let errors = imported(folder.path(), &format!("[[datasets]]\n{METADATA}{other}"), "").unwrap_err();
    assert!(
        errors.len() == 1
            && errors[0].contains("data.toml:7:1: metadata_file: ")
            && errors[0].contains("remove them from one file"),
        "{errors:?}"
    );
    let datasets = format!("[[datasets]]\n{METADATA}[[datasets]]\n{other}");
    let process = imported(folder.path(), &datasets, "").unwrap();
    assert_eq!(process.datasets.len(), 2);
    std::fs::write(folder.path().join("other.json"), r#"{"1": {"caption": "a cat"}}"#).unwrap();
    let process = imported(folder.path(), &format!("[[datasets]]\n{METADATA}{other}"), "").unwrap();
    assert_eq!(process.datasets.len(), 2);
}

/// `DreamBoothDataset` repeats or leaves out regularisation images until they are as many as the others of its data set.
#[test]
fn a_data_set_of_regularisation_images_alone_is_left_out() {
    let folder = folder();
    let reg = "[[datasets.subsets]]\nimage_dir = \"reg\"\nis_reg = true\n";
    let process = imported(
        folder.path(),
        &format!("[[datasets]]\n{reg}[[datasets]]\n{CAPTIONS}{reg}"),
        "",
    )
    .unwrap();
    let found: Vec<bool> = process.datasets.iter().map(|dataset| dataset.is_reg).collect();
    assert_eq!(found, [false, true]);
    let errors = imported(folder.path(), &format!("[[datasets]]\n{reg}"), "").unwrap_err();
    assert!(
        errors[0].contains("every data set is one of regularisation images"),
        "{errors:?}"
    );
}

/// Without buckets, sd-scripts crops each image, at its own size, at another place each time.
#[test]
fn images_without_buckets_are_cropped_at_random() {
    let folder = folder();
    let datasets = format!("[[datasets]]\nrandom_crop = true\n{CAPTIONS}");
    let process = imported(folder.path(), &datasets, "").unwrap();
    assert!(process.datasets[0].random_crop && !process.datasets[0].buckets);
    let datasets = format!("[[datasets]]\nrandom_crop = true\nresolution = [512, 768]\n{CAPTIONS}");
    let errors = imported(folder.path(), &datasets, "").unwrap_err();
    assert!(
        errors.len() == 1 && errors[0].contains("random_crop: aitk crops squares"),
        "{errors:?}"
    );
}
