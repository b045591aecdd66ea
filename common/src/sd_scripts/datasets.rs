//! The data sets: of a data set config, or of the folders `10_name` in `train_data_dir`.

use super::dataset_kind::check_kinds;
use super::dataset_options::{DATASET, SHARED, SUBSET};
use super::document::{Entry, MAX_BYTES, Position, Table, Value, finding, parse_json, parse_toml};
use super::epochs::CountedDataset;
use super::folders::{Folder, repeats_and_class};
use super::held_out::HeldOut;
use super::levels::{Levels, find_any};
use super::option::OptionRow;
use super::report::Import;
use super::script::Script;
use super::settings::Settings;
use super::subset_section::{Training, subset_section};
use crate::fsutil::regular;
use crate::job::Finding;
use serde_json::Value as Json;
use std::path::{Path, PathBuf};

/// Data sets and folders of a config.
const MAX_SUBSETS: usize = 1000;

/// A data set with its folders.
#[derive(Default)]
pub(super) struct Dataset {
    options: Settings,
    subsets: Vec<Settings>,
}

/// The data sets of a config, and the options that they share.
#[derive(Default)]
pub(super) struct Datasets {
    general: Settings,
    datasets: Vec<Dataset>,
}

/// What becomes of the options of data set configs.
pub(super) fn rows() -> impl Iterator<Item = &'static OptionRow> {
    [SUBSET, SHARED, DATASET].into_iter().flatten()
}

/// Reads the data sets of a config. `dataset_config` is that of the command line.
pub(super) fn read(import: &mut Import<'_>, dataset_config: Option<&Path>) -> Datasets {
    let settings = import.settings;
    let path = dataset_config
        .map(Path::to_path_buf)
        .or_else(|| settings.text("dataset_config").map(PathBuf::from));
    if let Some(path) = path {
        for option in ["train_data_dir", "reg_data_dir", "in_json"] {
            if settings.is_set(option) {
                import.note(option, "ignored: there is a dataset_config");
            }
        }
        return read_config(import, &path);
    }
    if let Some(table) = import.preset_datasets.take() {
        return datasets_of(import, table, &settings.file);
    }
    if !settings.is_set("train_data_dir") {
        import.error(
            "train_data_dir",
            "the config names no images: set train_data_dir or dataset_config",
        );
        return Datasets::default();
    }
    if settings.is_set("in_json") && import.script != Script::TrainDb {
        return with_metadata(import);
    } else if settings.is_set("in_json") {
        import.note("in_json", "ignored: train_db.py does not use it");
    }
    let mut dataset = Dataset::default();
    for (option, is_reg) in [("train_data_dir", false), ("reg_data_dir", true)] {
        let Some(path) = settings.text(option) else { continue };
        dataset.subsets.extend(named_folders(import, option, path, is_reg));
    }
    Datasets {
        general: Settings::default(),
        datasets: vec![dataset],
    }
}

/// The images of `train_data_dir` with the captions of `in_json`.
fn with_metadata(import: &mut Import<'_>) -> Datasets {
    let settings = import.settings;
    if settings.is_set("reg_data_dir") {
        import.note("reg_data_dir", "ignored: there is an in_json");
    }
    let entry = |key: &str, option: &str| {
        settings.text(option).map(|text| Entry {
            key: key.to_owned(),
            value: Value::Text(text.to_owned()),
            at: settings.position(option),
        })
    };
    let table = [entry("image_dir", "train_data_dir"), entry("metadata_file", "in_json")];
    let table: Table = table.into_iter().flatten().collect();
    let subset = Settings::read(table, &settings.file, find_any, std::iter::empty(), &mut import.errors);
    Datasets {
        general: Settings::default(),
        datasets: vec![Dataset {
            options: Settings::default(),
            subsets: vec![subset],
        }],
    }
}

/// The folders `10_name` in a folder.
fn named_folders(import: &mut Import<'_>, option: &str, path: &str, is_reg: bool) -> Vec<Settings> {
    let Some(folder) = Folder::read(&import.directory.join(path)) else {
        import.error(
            option,
            format!("`{}` cannot be read as a folder here", path.escape_debug()),
        );
        return Vec::new();
    };
    let mut found = Vec::new();
    for inner in &folder.folders {
        let Some(name) = inner.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let Some((repeats, class)) = repeats_and_class(name) else {
            import.note(
                option,
                format!(
                    "the folder `{}` is left out: its name does not begin with a number of repeats, as 10_{} does",
                    name.escape_debug(),
                    name.escape_debug()
                ),
            );
            continue;
        };
        let entry = |key: &str, value| Entry {
            key: key.to_owned(),
            value,
            at: import.settings.position(option),
        };
        let table = vec![
            entry(
                "image_dir",
                Value::Text(Path::new(path).join(name).to_string_lossy().into_owned()),
            ),
            entry("num_repeats", Value::Whole(i64::from(repeats))),
            entry("is_reg", Value::Bool(is_reg)),
            entry("class_tokens", Value::Text(class.to_owned())),
        ];
        let mut errors = Vec::new();
        found.push(Settings::read(
            table,
            &import.settings.file,
            find_any,
            std::iter::empty(),
            &mut errors,
        ));
    }
    if found.is_empty() {
        let message = format!(
            "`{}` has no folder whose name begins with a number of repeats, such as 10_name; sd-scripts trains the images in such folders",
            path.escape_debug()
        );
        import.error(option, message);
    }
    found
}

fn read_config(import: &mut Import<'_>, path: &Path) -> Datasets {
    let file = path.display().to_string().escape_debug().to_string();
    let text = match regular::read_text(&import.directory.join(path), MAX_BYTES as u64) {
        Ok(text) => text,
        Err(error) => {
            import.error("dataset_config", format!("{file} cannot be read: {error}"));
            return Datasets::default();
        }
    };
    let parsed = match path.extension().and_then(|extension| extension.to_str()) {
        Some("json") => parse_json(&text, &file),
        _ => parse_toml(&text, &file),
    };
    match parsed {
        Ok(table) => datasets_of(import, table, &file),
        Err(error) => {
            import.errors.push(error);
            Datasets::default()
        }
    }
}

fn datasets_of(import: &mut Import<'_>, table: Table, file: &str) -> Datasets {
    let mut found = Datasets::default();
    let before = import.errors.len();
    let errors = &mut import.errors;
    for Entry { key, value, at } in table {
        match (key.as_str(), value) {
            ("general", Value::Table(table)) => found.general = read_options(table, file, &[DATASET, SHARED], errors),
            ("datasets", Value::List(items)) => {
                for item in items {
                    match item {
                        Value::Table(table) => found.datasets.push(dataset_of(table, file, errors)),
                        _ => errors.push(finding(file, at, "datasets", "expected tables: write [[datasets]]")),
                    }
                }
            }
            ("general", _) => errors.push(finding(file, at, "general", "expected a table: write [general]")),
            ("datasets", _) => errors.push(finding(
                file,
                at,
                "datasets",
                "expected a list of tables: write [[datasets]]",
            )),
            (other, _) => {
                let message = "a data set config has [general] and [[datasets]] only";
                errors.push(finding(file, at, &super::settings::shortened(other), message));
            }
        }
    }
    let subsets: usize = found.datasets.iter().map(|dataset| dataset.subsets.len()).sum();
    if subsets > MAX_SUBSETS {
        let message = format!("{subsets} subsets are more than the {MAX_SUBSETS} that a config can have");
        errors.push(finding(file, Position::default(), "datasets", message));
        found.datasets.clear();
    } else if subsets == 0 && errors.len() == before {
        let message = "there is no [[datasets.subsets]] with an image_dir";
        errors.push(finding(file, Position::default(), "datasets", message));
    }
    let all_read = errors.len() == before;
    if all_read {
        for dataset in &found.datasets {
            check_kinds(&dataset.options, &dataset.subsets, errors);
        }
    }
    let notes = &mut import.notes;
    let all = std::iter::once(&found.general).chain(
        found
            .datasets
            .iter()
            .flat_map(|dataset| std::iter::once(&dataset.options).chain(&dataset.subsets)),
    );
    for settings in all {
        settings.check_fates(find_any, None, errors, notes);
    }
    // Options that could not be read would be missing below.
    if all_read { found } else { Datasets::default() }
}

fn dataset_of(table: Table, file: &str, errors: &mut Vec<Finding>) -> Dataset {
    let (subsets, options): (Table, Table) = table.into_iter().partition(|entry| entry.key == "subsets");
    let mut dataset = Dataset {
        options: read_options(options, file, &[DATASET, SHARED], errors),
        subsets: Vec::new(),
    };
    for entry in subsets {
        let Value::List(items) = entry.value else {
            errors.push(finding(
                file,
                entry.at,
                "subsets",
                "expected a list of tables: write [[datasets.subsets]]",
            ));
            continue;
        };
        for item in items {
            match item {
                Value::Table(table) => dataset
                    .subsets
                    .push(read_options(table, file, &[SHARED, SUBSET], errors)),
                _ => errors.push(finding(
                    file,
                    entry.at,
                    "subsets",
                    "expected tables: write [[datasets.subsets]]",
                )),
            }
        }
    }
    dataset
}

fn read_options(
    table: Table,
    file: &str,
    rows: &'static [&'static [OptionRow]],
    errors: &mut Vec<Finding>,
) -> Settings {
    let all = || rows.iter().copied().flatten();
    Settings::read(
        table,
        file,
        |name| all().find(|row| row.name == name),
        all().map(|row| row.name),
        errors,
    )
}

impl Datasets {
    /// The options, those of folders first.
    pub(super) fn settings(&self) -> impl Iterator<Item = &Settings> {
        let folders = self.datasets.iter().flat_map(|dataset| &dataset.subsets);
        let datasets = self.datasets.iter().map(|dataset| &dataset.options);
        folders.chain(datasets).chain([&self.general])
    }

    /// The entries of `datasets`, what decides the number of batches, and the images that are held out.
    pub(super) fn sections(
        &self,
        import: &mut Import<'_>,
        training: &Training,
    ) -> (Vec<Json>, Vec<CountedDataset>, HeldOut) {
        let (mut sections, mut counted): (Vec<Vec<Json>>, _) = (Vec::new(), Vec::new());
        let mut held_out = HeldOut::default();
        let flips: Vec<bool> = self
            .datasets
            .iter()
            .flat_map(|dataset| dataset.subsets.iter().map(move |subset| (dataset, subset)))
            .map(|(dataset, subset)| self.levels(import.settings, dataset, subset).flag("flip_aug"))
            .collect();
        // Flipped copies double the images of a data set: the others are repeated twice as often.
        let some_flip = flips.iter().any(|flip| *flip) && !flips.iter().all(|flip| *flip);
        for dataset in &self.datasets {
            let mut count = CountedDataset {
                batch_size: 1,
                buckets: None,
                subsets: Vec::new(),
            };
            let mut of_dataset = Vec::new();
            for subset in &dataset.subsets {
                let levels = self.levels(import.settings, dataset, subset);
                if let Some(section) = subset_section(import, &levels, training, some_flip, &mut count, &mut held_out) {
                    of_dataset.push(Json::Object(section));
                }
            }
            sections.push(of_dataset);
            counted.push(count);
        }
        let is_trained = |section: &Json| section.get("is_reg").is_none();
        if sections.iter().flatten().any(is_trained) {
            self.leave_out_regularisation(import, &mut sections);
        }
        self.check_buckets(import, &sections);
        let sections: Vec<Json> = sections.into_iter().flatten().collect();
        if import.errors.is_empty() && !sections.iter().any(is_trained) {
            let option = match import.settings.get("dataset_config") {
                Some(_) => "dataset_config",
                None => "train_data_dir",
            };
            import.error(
                option,
                match sections.is_empty() {
                    true => "no data set has images",
                    false => "every data set is one of regularisation images (is_reg): add one to train on",
                },
            );
        }
        (sections, counted, held_out)
    }

    /// Leaves out data sets of regularisation images alone: sd-scripts uses as many of them as there are others in their data set.
    fn leave_out_regularisation(&self, import: &mut Import<'_>, sections: &mut [Vec<Json>]) {
        for (dataset, sections) in self.datasets.iter().zip(sections) {
            let (Some(first), Some(subset)) = (sections.first(), dataset.subsets.first()) else {
                continue;
            };
            let is_reg = |section: &Json| section.get("is_reg").is_some();
            if is_reg(first) && sections.iter().all(is_reg) {
                sections.clear();
                let message = "left out, as in sd-scripts: this data set has regularisation images alone; put them beside the others";
                let note = self.levels(import.settings, dataset, subset).at("is_reg", message);
                import.notes.push(note);
            }
        }
    }

    /// Reports buckets of some data sets, but not of all.
    fn check_buckets(&self, import: &mut Import<'_>, sections: &[Vec<Json>]) {
        let has_buckets = |section: &Json| section.get("buckets") == Some(&Json::Bool(true));
        if sections.iter().flatten().all(has_buckets) {
            return;
        }
        let mut with_buckets = self.datasets.iter().zip(sections);
        let found = with_buckets.find(|(_, sections)| sections.iter().any(has_buckets));
        if let Some((dataset, subset)) = found.and_then(|(dataset, _)| Some((dataset, dataset.subsets.first()?))) {
            let message = "aitk has buckets for all data sets or for none, and another one here has none: set it for all, or for none";
            let levels = self.levels(import.settings, dataset, subset);
            levels.error("enable_bucket", message, &mut import.errors);
        }
    }

    fn levels<'a>(&'a self, training: &'a Settings, dataset: &'a Dataset, subset: &'a Settings) -> Levels<'a> {
        Levels(vec![subset, &dataset.options, &self.general, training])
    }

    /// The batch size of the first data set: `train.batch_size`.
    pub(super) fn batch_size(&self, import: &mut Import<'_>) -> u64 {
        let Some(dataset) = self.datasets.first() else { return 1 };
        let levels = Levels(vec![&dataset.options, &self.general, import.settings]);
        u64::try_from(levels.whole("batch_size", 1, 1, &mut import.errors)).unwrap_or(1)
    }
}
