//! Renders what was found about a data set.

use crate::output::format::plural;
use aitk_engine::data::{DatasetReport, Files};

/// The largest number of buckets that are listed.
const MAX_BUCKETS: usize = 8;

fn path_and_resolution(set: &DatasetReport) -> String {
    let kind = if set.regularisation { ", regularisation" } else { "" };
    format!("{} at {}{kind}", set.path, set.resolution)
}

/// Returns the line about a data set that a run or a submission prints.
pub(super) fn dataset_summary(set: &DatasetReport) -> String {
    format!(
        "{}: {}, {} with captions, {}, {} of {} per epoch",
        path_and_resolution(set),
        plural(set.images, "image"),
        set.captioned,
        plural(set.buckets.len() as u64, "bucket"),
        batches(set.batches),
        set.batch_size
    )
}

fn batches(count: u64) -> String {
    match count {
        1 => "1 batch".to_owned(),
        count => format!("{count} batches"),
    }
}

/// Returns what in the files of a data set would make its training fail.
pub(super) fn dataset_problem(set: &DatasetReport) -> Option<String> {
    let message = with_file_names(
        "cut off (training stops at such a file; remove them, or copy them again)",
        &set.cut_off,
    );
    (set.cut_off.count > 0).then(|| format!("{}: {message}", set.path))
}

/// Returns `3 TEXT: a.png, b.png, …`.
fn with_file_names(text: &str, files: &Files) -> String {
    let more = if files.count > files.first.len() as u64 {
        ", …"
    } else {
        ""
    };
    format!("{} {text}: {}{more}", files.count, files.first.join(", "))
}

/// Returns the warnings about a data set. `brief` leaves out those that the training itself logs.
pub(super) fn dataset_warnings(set: &DatasetReport, brief: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    let path = &set.path;
    if !brief {
        warnings.extend(set.caption_warning.clone());
        warnings.extend(set.control_warnings.iter().cloned());
        if set.unreadable.count > 0 {
            warnings.push(format!(
                "{path}: {}",
                with_file_names("cannot be read and are skipped", &set.unreadable)
            ));
        }
    }
    if set.too_small.count > 0 && set.too_small.count * 10 >= set.images {
        warnings.push(format!(
            "{path}: {} of {} images have fewer pixels than the resolution {} asks for: {}",
            set.too_small.count,
            set.images,
            set.resolution,
            set.too_small.first.join(", ")
        ));
    }
    let media_extensions = [
        ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".mp4", ".mov", ".webm", ".jfif",
    ];
    let images: Vec<String> = set
        .ignored
        .iter()
        .filter(|(ending, _)| media_extensions.contains(&ending.as_str()))
        .map(|(ending, count)| format!("{count} {ending}"))
        .collect();
    if !images.is_empty() {
        warnings.push(format!(
            "{path}: {} are not used: images are .jpg, .jpeg, .png or .webp",
            images.join(", ")
        ));
    }
    warnings
}

/// What is said of control images or masks that a network makes.
fn to_make(count: u64) -> String {
    match count {
        0 => String::new(),
        count => format!(" ({count} more are made before the training)"),
    }
}

/// Returns all lines about a data set.
pub(super) fn dataset_lines(set: &DatasetReport) -> Vec<String> {
    let mut lines = vec![path_and_resolution(set)];
    let mut counts = format!("{}, {} with captions", plural(set.images, "image"), set.captioned);
    if let (Some(default), true) = (&set.default_caption, set.uncaptioned.count > 0)
        && !default.is_empty()
    {
        counts += &format!(", {} with the default caption `{default}`", set.uncaptioned.count);
    }
    if let Some(masks) = set.masks {
        counts += &format!(", {masks} with masks");
        counts += &to_make(set.masks_to_make);
    }
    if let Some(controls) = set.controls {
        counts += &format!(", {controls} with {}", set.controls_noun);
        counts += &to_make(set.controls_to_make);
    }
    lines.push(counts);
    let without_path = |message: String| {
        let rest = message.strip_prefix(&format!("{}: ", set.path)).map(str::to_owned);
        rest.unwrap_or(message)
    };
    lines.extend(dataset_problem(set).map(|problem| format!("problem: {}", without_path(problem))));
    let warnings = dataset_warnings(set, false).into_iter();
    lines.extend(warnings.map(|warning| format!("warning: {}", without_path(warning))));
    if set.too_small.count > 0 && set.too_small.count * 10 < set.images {
        lines.push(with_file_names("with fewer pixels than the resolution", &set.too_small));
    }
    let ignored: Vec<String> = set
        .ignored
        .iter()
        .map(|(ending, count)| format!("{count} {ending}"))
        .collect();
    if !ignored.is_empty() {
        lines.push(format!("not used: {}", ignored.join(", ")));
    }
    if set.control_files > 0 {
        lines.push(format!("not used: {} in _controls", plural(set.control_files, "file")));
    }
    let sizes = set
        .buckets
        .iter()
        .take(MAX_BUCKETS)
        .map(|bucket| format!("{}x{} {}", bucket.width, bucket.height, bucket.images));
    let more = match set.buckets.len().saturating_sub(MAX_BUCKETS) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    lines.push(format!("buckets: {}{more}", sizes.collect::<Vec<_>>().join(", ")));
    let copies = if set.copies > 1 {
        format!(" x {} copies with flips", set.copies)
    } else {
        String::new()
    };
    let repeats = if set.repeats > 1 {
        format!(" x {} repeats", set.repeats)
    } else {
        String::new()
    };
    lines.push(format!(
        "{}{repeats}{copies}: {} per epoch, in {} of {}",
        plural(set.images, "image"),
        set.items,
        batches(set.batches),
        set.batch_size
    ));
    lines
}
