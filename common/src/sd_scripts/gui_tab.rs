//! The tabs of the kohya GUI, and what its tab for fine-tuning makes of its fields about images (`kohya_gui/finetune_gui.py`).

use super::document::{Entry, Position, Table, Value};
use super::folders::Folder;
use super::gui_fields::{Fields, Options};
use super::script::{Script, ScriptFamily};
use std::path::Path;

/// A tab whose presets are imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tab {
    Lora,
    DreamBooth,
    FineTune,
}

impl Tab {
    /// The tab of a preset; `None`: one of another tab.
    pub(super) fn of(fields: &Fields) -> Option<Self> {
        let has = |names: &[&str]| names.iter().any(|name| fields.has(name));
        if fields.get("LoRA_type").is_some() {
            return Some(Self::Lora);
        }
        // Of the tabs for LoRAs, where LoRA_type is missing, and for textual inversion.
        if has(&["LoRA_type", "network_dim", "token_string", "init_word"]) {
            return None;
        }
        match has(&[
            "image_folder",
            "train_dir",
            "dataset_repeats",
            "caption_metadata_filename",
            "use_latent_files",
        ]) {
            true => Some(Self::FineTune),
            false => Some(Self::DreamBooth),
        }
    }

    /// The script that the GUI starts.
    pub(super) const fn script(self, family: ScriptFamily) -> Script {
        match (self, family) {
            (Self::Lora, ScriptFamily::Sd) => Script::TrainNetwork,
            (Self::Lora, ScriptFamily::Sdxl) => Script::SdxlTrainNetwork,
            (Self::Lora, ScriptFamily::Flux) => Script::FluxTrainNetwork,
            (Self::Lora, ScriptFamily::Sd3) => Script::Sd3TrainNetwork,
            (Self::DreamBooth, ScriptFamily::Sd) => Script::TrainDb,
            (Self::FineTune, ScriptFamily::Sd) => Script::FineTune,
            (_, ScriptFamily::Sdxl) => Script::SdxlTrain,
            (_, ScriptFamily::Flux) => Script::FluxTrain,
            (_, ScriptFamily::Sd3) => Script::Sd3Train,
        }
    }
}

fn entry(key: &str, value: Value) -> Entry {
    Entry {
        key: key.to_owned(),
        value,
        at: Position::default(),
    }
}

/// The images of the tab for fine-tuning: a data set config of their folder, if the GUI makes the metadata file from the caption files
/// in it when the training starts, else `train_data_dir` and `in_json`.
pub(super) fn fine_tuning_data(fields: &Fields, out: &mut Options<'_>) -> Option<Table> {
    if fields.get("dataset_config").is_some() {
        return None;
    }
    out.set("enable_bucket", Value::Bool(true));
    let Some(folder) = fields.text("image_folder") else {
        out.error(
            "image_folder",
            "the preset names no images: set the folder of the images",
        );
        return None;
    };
    if !(fields.is_on("generate_caption_database") || fields.is_on("create_caption")) {
        let is_cached = fields.text("use_latent_files").is_some_and(|text| text == "Yes");
        let (field, usual) = match is_cached {
            true => ("latent_metadata_filename", "meta_lat.json"),
            false => ("caption_metadata_filename", "meta_cap.json"),
        };
        let name = fields.text(field).unwrap_or_else(|| usual.to_owned());
        let path = Path::new(&fields.text("train_dir").unwrap_or_default()).join(name);
        out.set_by("image_folder", "train_data_dir", Value::Text(folder));
        out.set_by(field, "in_json", Value::Text(path.to_string_lossy().into_owned()));
        return None;
    }
    let repeats = fields.number("dataset_repeats").max(1.0) as i64;
    let subset = vec![
        entry("image_dir", Value::Text(folder)),
        entry("num_repeats", Value::Whole(repeats)),
    ];
    let dataset = vec![entry("subsets", Value::List(vec![Value::Table(subset)]))];
    Some(vec![entry("datasets", Value::List(vec![Value::Table(dataset)]))])
}

/// `max_train_steps`, which the GUI computes from the folder if it is not set.
pub(super) fn fine_tuning_steps(fields: &Fields, directory: &Path, out: &mut Options<'_>) {
    if fields.get("dataset_config").is_some() {
        return;
    }
    let mut steps = fields.number("max_train_steps");
    if steps <= 0.0 && fields.number("max_train_epochs") > 0.0 {
        // The epochs win.
        return;
    }
    if steps <= 0.0 {
        // That it is missing is reported with the images.
        let Some(path) = fields.text("image_folder") else {
            return;
        };
        let Some(folder) = Folder::read(&directory.join(&path)) else {
            let message = format!(
                "`{}` cannot be read as a folder here, and the steps are computed from its images",
                path.escape_debug()
            );
            out.error("image_folder", message);
            return;
        };
        let is_counted = |path: &&std::path::PathBuf| {
            let ending = path.extension();
            ending.is_some_and(|ending| !ending.eq_ignore_ascii_case("bmp"))
        };
        let images = folder.images.iter().filter(is_counted).count() as f64;
        let whole = |name: &str| fields.number(name).max(1.0).floor();
        let repeated = images * whole("dataset_repeats");
        steps = repeated / whole("train_batch_size") / whole("gradient_accumulation_steps") * whole("epoch");
    }
    // The GUI takes half of the steps, because it counts flipped images twice.
    let steps = match fields.is_on("flip_aug") {
        true => (steps.ceil() / 2.0).ceil(),
        false => steps.ceil(),
    };
    match steps as i64 {
        0 => out.error("image_folder", "there are no images in the folder"),
        steps => out.set("max_train_steps", Value::Whole(steps)),
    }
}
