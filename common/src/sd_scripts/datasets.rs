//! The data sets: of a data set config, or of the folders `10_name` in `train_data_dir`.

use super::dataset_options::{DATASET, SHARED, SUBSET};
use super::document::{Entry, MAX_BYTES, Position, Table, Value, finding, parse_json, parse_toml};
use super::epochs::{BucketOptions, CountedDataset, CountedSubset};
use super::folders::{Folder, repeats_and_class};
use super::held_out::{Captions, HeldOut, split};
use super::image_size::image_size;
use super::option::{OptionRow, size_of};
use super::report::{Import, Section, number};
use super::settings::Settings;
use crate::caption_metadata::CaptionMetadata;
use crate::fsutil::regular;
use crate::job::Finding;
use crate::job::limits::MAX_TEXT_FILE_BYTES;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};

/// Data sets and folders of a config.
const MAX_SUBSETS: usize = 1000;
/// Images of a folder whose size is compared with the resolution.
const MAX_MEASURED: usize = 10_000;

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

/// The levels in which an option of a subset is looked up, the nearest first.
struct Levels<'a>(Vec<&'a Settings>);

impl<'a> Levels<'a> {
    /// The nearest level that sets an option. The training config has other names for two of them.
    fn level(&self, name: &str) -> Option<(&'a Settings, &'static str)> {
        let last = self.0.len() - 1;
        self.0.iter().enumerate().find_map(|(index, settings)| {
            let name = match (index == last, name) {
                (true, "batch_size") => "train_batch_size",
                (true, "num_repeats") => "dataset_repeats",
                _ => find_any(name)?.name,
            };
            settings.get(name).map(|_| (*settings, name))
        })
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.level(name).and_then(|(settings, name)| settings.get(name))
    }

    fn flag(&self, name: &str) -> bool {
        matches!(self.value(name), Some(Value::Bool(true)))
    }

    fn number(&self, name: &str) -> f64 {
        self.value(name).and_then(Value::as_number).unwrap_or(0.0)
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        match self.value(name) {
            Some(Value::Text(text)) if !text.is_empty() => Some(text),
            _ => None,
        }
    }

    /// A whole number of at least `least`.
    fn whole(&self, name: &str, least: i64, default: i64, errors: &mut Vec<Finding>) -> i64 {
        match self.value(name) {
            Some(Value::Whole(number)) if *number >= least => *number,
            Some(Value::Whole(number)) => {
                self.error(
                    name,
                    format!("expected a whole number from {least}, found {number}"),
                    errors,
                );
                default
            }
            _ => default,
        }
    }

    fn error(&self, name: &str, message: impl Into<String>, errors: &mut Vec<Finding>) {
        errors.push(self.at(name, message));
    }

    fn at(&self, name: &str, message: impl Into<String>) -> Finding {
        match self.level(name) {
            Some((settings, name)) => finding(&settings.file, settings.position(name), name, message),
            None => finding(&self.0[0].file, Position::default(), name, message),
        }
    }
}

fn find_any(name: &str) -> Option<&'static OptionRow> {
    [DATASET, SHARED, SUBSET]
        .into_iter()
        .flatten()
        .find(|row| row.name == name)
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
        for option in ["train_data_dir", "reg_data_dir"] {
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
    if settings.is_set("in_json") {
        return with_metadata(import);
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
    if errors.len() > before {
        // Options that could not be read would be missing below.
        return Datasets::default();
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
    found
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

/// What the sections of data sets need from the rest of the config.
pub(super) struct Training {
    /// `train.batch_size`.
    pub batch_size: u64,
    /// The factor of the loss.
    pub loss_factor: f64,
    /// Text is encoded before the training.
    pub caches_text: bool,
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
        let (mut sections, mut counted) = (Vec::new(), Vec::new());
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
            for subset in &dataset.subsets {
                let levels = self.levels(import.settings, dataset, subset);
                if let Some(section) = subset_section(import, &levels, training, some_flip, &mut count, &mut held_out) {
                    sections.push(Json::Object(section));
                }
            }
            counted.push(count);
        }
        let is_trained = |section: &Json| section.get("is_reg").is_none();
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

/// One entry of `datasets`; adds the folder to what is counted.
fn subset_section(
    import: &mut Import<'_>,
    levels: &Levels<'_>,
    training: &Training,
    some_flip: bool,
    count: &mut CountedDataset,
    held_out: &mut HeldOut,
) -> Option<Section> {
    let Some(folder) = levels.text("image_dir") else {
        levels.error(
            "image_dir",
            "this subset names no folder: set image_dir",
            &mut import.errors,
        );
        return None;
    };
    let repeats = levels.whole("num_repeats", i64::MIN, 1, &mut import.errors);
    if repeats < 1 {
        import.notes.push(levels.at(
            "num_repeats",
            format!("`{}` is left out: {repeats} repeats", folder.escape_debug()),
        ));
        return None;
    }
    let path = import.directory.join(folder);
    if count.subsets.iter().any(|subset| subset.folder == path) {
        import.notes.push(levels.at(
            "image_dir",
            format!(
                "`{}` is left out: it is in this data set already",
                folder.escape_debug()
            ),
        ));
        return None;
    }
    check_folder(import, levels, folder, &path);
    let mut section = Section::new();
    section.insert("folder_path".into(), json!(folder));
    let flips = levels.flag("flip_aug");
    let balanced = if some_flip && !flips { 2 } else { 1 };
    section.insert("num_repeats".into(), json!(repeats.saturating_mul(balanced)));
    let size = resolution(import, levels, count, &mut section);
    let batch_size = u64::try_from(levels.whole("batch_size", 1, 1, &mut import.errors)).unwrap_or(1);
    count.batch_size = batch_size;
    if batch_size != training.batch_size {
        section.insert("batch_size".into(), json!(batch_size));
    }
    match levels.text("metadata_file") {
        Some(file) => section.insert("captions_file".into(), json!(file)),
        None => section.insert(
            "caption_ext".into(),
            json!(levels.text("caption_extension").unwrap_or(".caption")),
        ),
    };
    if let Some(class) = levels.text("class_tokens") {
        section.insert("default_caption".into(), json!(class));
    }
    captions(import, levels, training, &mut section);
    let is_reg = levels.flag("is_reg");
    if is_reg {
        section.insert("is_reg".into(), json!(true));
    }
    if flips {
        section.insert("flip_x".into(), json!(true));
    }
    crops_and_caches(import, levels, &mut section);
    masks(import, levels, &mut section);
    let weight = levels
        .value("network_multiplier")
        .and_then(Value::as_number)
        .unwrap_or(1.0);
    if weight != 1.0 {
        section.insert("network_weight".into(), number(weight));
    }
    if training.loss_factor != 1.0 {
        section.insert("loss_multiplier".into(), number(training.loss_factor));
    }
    let excluded = match is_reg || levels.text("metadata_file").is_some() {
        true => without_metadata(import, levels, &path)?,
        false => hold_out(import, levels, (folder, &path), batch_size, held_out, &mut section)?,
    };
    size?;
    count.subsets.push(CountedSubset {
        folder: path,
        repeats: u64::try_from(repeats).unwrap_or(1),
        is_reg,
        excluded,
    });
    Some(section)
}

/// Says what aitk trains otherwise than sd-scripts, of a folder that is on this machine.
fn check_folder(import: &mut Import<'_>, levels: &Levels<'_>, folder: &str, path: &Path) {
    let Some(found) = Folder::read(path) else { return };
    let shown = folder.escape_debug();
    let bitmaps = found.images.iter().filter(|image| {
        image
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("bmp"))
    });
    match bitmaps.count() {
        0 => {}
        count => import.notes.push(levels.at(
            "image_dir",
            format!("`{shown}` has {count} .bmp images, which aitk does not read: convert them to PNG"),
        )),
    }
    if levels.flag("enable_bucket") && !levels.flag("bucket_no_upscale") {
        let area = levels
            .value("resolution")
            .and_then(size_of)
            .map_or(0, |(width, height)| u64::from(width) * u64::from(height));
        let sizes = found
            .images
            .iter()
            .take(MAX_MEASURED)
            .filter_map(|image| image_size(image));
        let small = sizes
            .filter(|(width, height)| u64::from(*width) * u64::from(*height) < area)
            .count();
        if small > 0 {
            let message = format!(
                "{small} images of `{shown}` are smaller than the resolution: aitk trains them at their own size, sd-scripts enlarges them"
            );
            import.notes.push(levels.at("enable_bucket", message));
        }
    }
    if found.has_images_below() {
        let message = format!("`{shown}` has images in folders below it: aitk trains them too, sd-scripts does not");
        import.notes.push(levels.at("image_dir", message));
    }
}

/// `resolution` and `buckets`.
fn resolution(
    import: &mut Import<'_>,
    levels: &Levels<'_>,
    count: &mut CountedDataset,
    section: &mut Section,
) -> Option<()> {
    let Some((width, height)) = levels.value("resolution").and_then(size_of) else {
        levels.error(
            "resolution",
            "the config has no resolution: set it, for example to 512 or \"512,768\"",
            &mut import.errors,
        );
        return None;
    };
    let buckets = levels.flag("enable_bucket");
    let side = (f64::from(width) * f64::from(height)).sqrt();
    if !buckets && width != height {
        section.insert("size".into(), json!([width, height]));
    } else {
        section.insert("resolution".into(), json!([side as u32]));
    }
    section.insert("buckets".into(), json!(buckets));
    if buckets {
        let side_of = |name: &str, default: i64, errors: &mut Vec<Finding>| {
            u32::try_from(levels.whole(name, 1, default, errors)).unwrap_or(u32::MAX)
        };
        let options = BucketOptions {
            resolution: (width, height),
            least: side_of("min_bucket_reso", 256, &mut import.errors),
            largest: side_of("max_bucket_reso", 1024, &mut import.errors),
            step: side_of("bucket_reso_steps", 64, &mut import.errors),
            no_upscale: levels.flag("bucket_no_upscale"),
        };
        let largest = options
            .largest
            .checked_next_multiple_of(options.step)
            .unwrap_or(options.largest);
        let contradiction = |option: &'static str, default: u32, is: &str| match levels.value(option) {
            Some(_) => (
                option,
                format!("contradicts the resolution {width},{height}, which is {is}: sd-scripts stops with an error"),
            ),
            None => (
                "resolution",
                format!(
                    "{width},{height} is {is} than {option}, whose default is {default}: sd-scripts stops with an error; set {option}"
                ),
            ),
        };
        let problem = if width.max(height) > largest {
            Some(contradiction("max_bucket_reso", options.largest, "larger"))
        } else if width.min(height) < options.least - options.least % options.step {
            Some(contradiction("min_bucket_reso", options.least, "smaller"))
        } else {
            None
        };
        if let Some((option, message)) = problem {
            levels.error(option, message, &mut import.errors);
            return None;
        }
        count.buckets = Some(options);
    }
    Some(())
}

/// The images of a folder that its metadata file does not have.
fn without_metadata(import: &mut Import<'_>, levels: &Levels<'_>, folder: &Path) -> Option<Vec<PathBuf>> {
    let Some(file) = levels.text("metadata_file") else {
        return Some(Vec::new());
    };
    if levels.number("validation_split") > 0.0 {
        let message = "sd-scripts divides no data set with a metadata_file: remove one of them";
        levels.error("validation_split", message, &mut import.errors);
        return None;
    }
    let path = import.directory.join(file);
    let shown = file.escape_debug();
    let text = match regular::read_text(&path, MAX_TEXT_FILE_BYTES) {
        Ok(text) => text,
        Err(error) => {
            levels.error(
                "metadata_file",
                format!("`{shown}` cannot be read: {error}"),
                &mut import.errors,
            );
            return None;
        }
    };
    match CaptionMetadata::parse(&text, file.ends_with(".jsonl")) {
        Ok(metadata) => {
            let images = Folder::read(folder).map(|folder| folder.images).unwrap_or_default();
            let is_missing = |image: &PathBuf| {
                metadata
                    .find(Path::new(image.file_name().unwrap_or_default()))
                    .is_none()
            };
            Some(images.into_iter().filter(is_missing).collect())
        }
        Err(what) => {
            levels.error("metadata_file", format!("`{shown}`: {what}"), &mut import.errors);
            None
        }
    }
}

/// Divides a folder as `validation_split` says; returns the images that are not trained.
fn hold_out(
    import: &mut Import<'_>,
    levels: &Levels<'_>,
    (folder, path): (&str, &Path),
    batch_size: u64,
    held_out: &mut HeldOut,
    section: &mut Section,
) -> Option<Vec<PathBuf>> {
    // Scripts for whole models and words know it in data set configs only.
    let is_known = |settings: &Settings| import.script.trains_adapter() || !std::ptr::eq(settings, import.settings);
    if !levels
        .level("validation_split")
        .is_some_and(|(settings, _)| is_known(settings))
    {
        return Some(Vec::new());
    }
    let share = levels.number("validation_split");
    if !(0.0..=1.0).contains(&share) {
        levels.error("validation_split", "expected a share from 0 to 1", &mut import.errors);
    }
    if !(share > 0.0 && share <= 1.0) {
        return Some(Vec::new());
    }
    let shown = folder.escape_debug();
    let Some(found) = Folder::read(path) else {
        let message = format!(
            "the images in `{shown}` have to be listed for it, and this folder cannot be read: import where they are"
        );
        levels.error("validation_split", message, &mut import.errors);
        return None;
    };
    let seed = match levels.value("validation_seed") {
        Some(Value::Whole(seed)) => *seed,
        _ => {
            let message = "without validation_seed, sd-scripts divides the images anew for the validation, so that it validates images that it \
                           trains on; aitk holds them out, by seed";
            import.notes.push(levels.at("validation_split", message));
            import.settings.whole("seed").unwrap_or(0)
        }
    };
    let count = found.images.len();
    let split = split(found.images, share, seed);
    if count > 0 && split.excluded.len() == count {
        let message = format!("leaves no image of `{shown}` to train: lower it");
        levels.error("validation_split", message, &mut import.errors);
        return None;
    }
    // aitk trains no `.bmp`, so that they need not be excluded.
    let is_trained = |image: &&PathBuf| {
        image
            .extension()
            .is_some_and(|ending| !ending.eq_ignore_ascii_case("bmp"))
    };
    let names = split
        .excluded
        .iter()
        .filter(is_trained)
        .filter_map(|image| image.file_name());
    let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
    if !names.is_empty() {
        section.insert("excluded_images".into(), json!(names));
    }
    let captions = Captions {
        extension: levels.text("caption_extension").unwrap_or(".caption"),
        default: levels.text("class_tokens").unwrap_or(""),
        prefix: levels.text("caption_prefix"),
        suffix: levels.text("caption_suffix"),
    };
    let resolution = levels.value("resolution").and_then(size_of);
    let side = resolution.map_or(512.0, |(width, height)| (f64::from(width) * f64::from(height)).sqrt());
    held_out.add(folder, &split.validated, &captions, (side as u32, batch_size));
    Some(split.excluded)
}

/// Keys about captions.
fn captions(import: &mut Import<'_>, levels: &Levels<'_>, training: &Training, section: &mut Section) {
    let shuffles = levels.flag("shuffle_caption");
    let mut rates = [0.0; 2];
    for (rate, (option, key)) in rates.iter_mut().zip([
        ("caption_dropout_rate", "caption_dropout_rate"),
        ("caption_tag_dropout_rate", "token_dropout_rate"),
    ]) {
        *rate = levels.number(option);
        if !(0.0..=1.0).contains(rate) {
            levels.error(option, "expected a chance from 0 to 1", &mut import.errors);
        } else if *rate > 0.0 {
            section.insert(key.into(), number(*rate));
        }
    }
    let drops_tags = rates[1] > 0.0;
    section.insert("sd_scripts_captions".into(), json!(true));
    if shuffles {
        section.insert("shuffle_tokens".into(), json!(true));
    }
    let kept = levels.whole("keep_tokens", 0, 0, &mut import.errors);
    if kept > 0 && (shuffles || drops_tags) {
        section.insert("keep_tokens".into(), json!(kept));
        if shuffles {
            section.insert("shuffle_keeps_tokens".into(), json!(true));
        }
    }
    let mut text = |option: &str, on: bool| {
        if let Some(text) = levels.text(option).filter(|text| on && !text.is_empty()) {
            section.insert(option.into(), json!(text));
        }
    };
    text("keep_tokens_separator", shuffles || drops_tags);
    text("secondary_separator", true);
    text("caption_prefix", true);
    text("caption_suffix", true);
    let separator = levels.text("caption_separator").filter(|separator| *separator != ",");
    text("caption_separator", separator.is_some());
    if levels.flag("enable_wildcard") {
        section.insert("enable_wildcard".into(), json!(true));
    }
    let changing = [
        (shuffles, "shuffle_caption"),
        (rates[0] > 0.0, "caption_dropout_rate"),
        (drops_tags, "caption_tag_dropout_rate"),
    ];
    if let Some((_, option)) = changing.iter().find(|(on, _)| *on && training.caches_text) {
        levels.error(
            option,
            "contradicts cache_text_encoder_outputs, which needs fixed captions: remove one of them",
            &mut import.errors,
        );
    }
}

fn crops_and_caches(import: &mut Import<'_>, levels: &Levels<'_>, section: &mut Section) {
    let settings = import.settings;
    let to_disk = settings.flag("cache_latents_to_disk");
    let caches = to_disk || settings.flag("cache_latents");
    if levels.flag("random_crop") {
        if caches {
            levels.error(
                "random_crop",
                "contradicts cache_latents: remove one of them",
                &mut import.errors,
            );
        }
        if !levels.flag("enable_bucket") {
            levels.error(
                "random_crop",
                "aitk crops at random with buckets only: set enable_bucket = true",
                &mut import.errors,
            );
        }
        section.insert("random_crop".into(), json!(true));
    }
    match (to_disk, caches) {
        (true, _) => section.insert("cache_latents_to_disk".into(), json!(true)),
        (false, true) => section.insert("cache_latents".into(), json!(true)),
        (false, false) => None,
    };
}

fn masks(import: &mut Import<'_>, levels: &Levels<'_>, section: &mut Section) {
    let masked = import.settings.flag("masked_loss");
    if levels.flag("alpha_mask") {
        section.insert("alpha_mask".into(), json!(true));
    }
    match levels.text("conditioning_data_dir") {
        Some(folder) if masked => {
            section.insert("mask_path".into(), json!(folder));
        }
        Some(_) => levels.error(
            "conditioning_data_dir",
            "needs masked_loss = true in the training config",
            &mut import.errors,
        ),
        None => {}
    }
}
