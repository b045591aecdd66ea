//! What a folder of images becomes: an entry of `datasets`.

use super::dataset_kind::DatasetKind;
use super::document::Value;
use super::epochs::{BucketOptions, CountedDataset, CountedSubset};
use super::folders::Folder;
use super::held_out::HeldOut;
use super::image_size::image_size;
use super::left_out::{hold_out, without_metadata};
use super::levels::Levels;
use super::option::size_of;
use super::report::{Import, Section, number};
use super::script::Script;
use crate::job::Finding;
use crate::job::limits::MAX_SIDE;
use serde_json::json;
use std::path::Path;

/// Images of a folder whose size is compared with the resolution.
const MAX_MEASURED: usize = 10_000;

/// What the sections of data sets need from the rest of the config.
pub(super) struct Training {
    /// `train.batch_size`.
    pub batch_size: u64,
    /// The factor of the loss.
    pub loss_factor: f64,
    /// Text is encoded before the training.
    pub caches_text: bool,
}

/// One entry of `datasets`; adds the folder to what is counted.
pub(super) fn subset_section(
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
    let kind = DatasetKind::of(levels.0[0]);
    let metadata = levels.text("metadata_file");
    if count.subsets.iter().any(|subset| subset.is_same(&path, metadata)) {
        let (option, same) = match metadata {
            Some(file) => ("metadata_file", file),
            None => ("image_dir", folder),
        };
        import.notes.push(levels.at(
            option,
            format!("`{}` is left out: it is in this data set already", same.escape_debug()),
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
    match metadata {
        Some(file) => section.insert("captions_file".into(), json!(file)),
        None => section.insert(
            "caption_ext".into(),
            json!(levels.text("caption_extension").unwrap_or(".caption")),
        ),
    };
    if let Some(class) = levels.text("class_tokens").filter(|_| kind == DatasetKind::Captions) {
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
    crops_and_caches(import, levels, kind, &mut section);
    masks(import, levels, kind, &mut section);
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
    let excluded = match is_reg || metadata.is_some() {
        true => without_metadata(import, levels, &path)?,
        false => hold_out(import, levels, (folder, &path), batch_size, held_out, &mut section)?,
    };
    let mut others = count.subsets.iter();
    if let Some(image) = others.find_map(|subset| metadata.and(subset.shared_image(&path, &excluded))) {
        let message = format!(
            "another subset of this data set has `{}` too: sd-scripts trains such images once, as the last file says; remove them from one file",
            image.display().to_string().escape_debug()
        );
        levels.error("metadata_file", message, &mut import.errors);
        return None;
    }
    size?;
    count.subsets.push(CountedSubset {
        folder: path,
        repeats: u64::try_from(repeats).unwrap_or(1),
        is_reg,
        excluded,
        metadata: metadata.map(str::to_owned),
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
            let side = levels.whole(name, 1, default, errors);
            if side > i64::from(MAX_SIDE) {
                let message = format!("expected at most {MAX_SIDE}, found {side}");
                levels.error(name, message, errors);
            }
            u32::try_from(side).unwrap_or(MAX_SIDE).min(MAX_SIDE)
        };
        let options = BucketOptions {
            resolution: (width, height),
            min: side_of("min_bucket_reso", 256, &mut import.errors),
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
        } else if width.min(height) < options.min - options.min % options.step {
            Some(contradiction("min_bucket_reso", options.min, "smaller"))
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

fn crops_and_caches(import: &mut Import<'_>, levels: &Levels<'_>, kind: DatasetKind, section: &mut Section) {
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
        if kind == DatasetKind::Masks {
            levels.error(
                "random_crop",
                "sd-scripts does not crop images with masks (conditioning_data_dir) at random: remove one of them",
                &mut import.errors,
            );
        }
        if section.contains_key("size") {
            levels.error(
                "random_crop",
                "aitk crops squares at random where there are no buckets: set enable_bucket = true, or a square resolution",
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

fn masks(import: &mut Import<'_>, levels: &Levels<'_>, kind: DatasetKind, section: &mut Section) {
    let masked = import.settings.flag("masked_loss");
    let has_min_snr = import
        .settings
        .number("min_snr_gamma")
        .is_some_and(|gamma| gamma != 0.0);
    let ignored = match import.script {
        Script::FineTune => Some("ignored: fine_tune.py does not use it"),
        Script::SdxlTrain if !masked && !has_min_snr && !import.settings.flag("debiased_estimation_loss") => {
            Some("ignored: sdxl_train.py uses it only with masked_loss, min_snr_gamma or debiased_estimation_loss")
        }
        _ => None,
    };
    // sd-scripts reads no transparency where there are masks.
    if levels.flag("alpha_mask") && kind != DatasetKind::Masks {
        match ignored {
            Some(message) => import.notes.push(levels.at("alpha_mask", message)),
            None => drop(section.insert("alpha_mask".into(), json!(true))),
        }
    }
    match levels.text("conditioning_data_dir") {
        Some(_) if import.script == Script::FineTune => {
            let message = "fine_tune.py has no masks: remove it";
            levels.error("conditioning_data_dir", message, &mut import.errors);
        }
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
