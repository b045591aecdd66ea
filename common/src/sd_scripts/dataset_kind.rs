//! The kinds of data sets of sd-scripts (`library/config_util.py`): with caption files, with masks as well, or with a metadata file. All
//! subsets of a data set are of one kind, and each kind has options of its own.

use super::document::finding;
use super::settings::Settings;
use crate::job::Finding;

/// The kind of a subset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DatasetKind {
    /// Images with caption files.
    Captions,
    /// Images with caption files, and masks in `conditioning_data_dir`.
    Masks,
    /// Images with a metadata file.
    Metadata,
}

impl DatasetKind {
    /// The kind that the options of a subset say.
    pub(super) fn of(subset: &Settings) -> Self {
        match (subset.is_set("conditioning_data_dir"), subset.is_set("metadata_file")) {
            (true, _) => Self::Masks,
            (false, true) => Self::Metadata,
            (false, false) => Self::Captions,
        }
    }

    /// Options of a subset, or of its data set, with which sd-scripts stops.
    const fn excluded(self) -> &'static [&'static str] {
        match self {
            Self::Captions => &[],
            Self::Masks => &["is_reg", "class_tokens", "alpha_mask", "metadata_file"],
            Self::Metadata => &["is_reg", "class_tokens", "caption_extension"],
        }
    }
}

/// Reports subsets of several kinds in one data set, and options that its kind does not have. `options`: those of the data set.
pub(super) fn check_kinds(options: &Settings, subsets: &[Settings], errors: &mut Vec<Finding>) {
    for (kind, option) in [
        (DatasetKind::Masks, "conditioning_data_dir"),
        (DatasetKind::Metadata, "metadata_file"),
    ] {
        let of_kind: Vec<&Settings> = subsets
            .iter()
            .filter(|subset| DatasetKind::of(subset) == kind)
            .collect();
        let Some(first) = of_kind.first() else { continue };
        if of_kind.len() < subsets.len() {
            let message = "in sd-scripts, all subsets of a data set have it, or none: put those without it into a [[datasets]] of their own";
            errors.push(finding(&first.file, first.position(option), option, message));
        }
        for settings in of_kind.iter().copied().chain([options]) {
            for name in kind.excluded().iter().filter(|name| settings.is_set(name)) {
                let message = format!("sd-scripts stops with an error, because there is a {option}: remove it");
                errors.push(finding(&settings.file, settings.position(name), name, message));
            }
        }
    }
}
