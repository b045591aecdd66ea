//! A report on a data set before training: its images, captions and buckets, computed by the code that training uses.

use super::allowed_paths::AllowedPaths;
use super::bucket::BucketPlan;
use super::controls::{ControlOptions, ControlSource};
use super::dataset_options::{DatasetOptions, check_options};
use super::dataset_scan::DatasetScan;
use super::discover::is_controls_folder;
use super::item_plan::{flip_variants, plan_item};
use super::masks::{MaskOptions, MaskSource, check_mask_file};
use crate::error::{EngineError, Result};
use crate::image_io;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// How many file names a report lists of each kind.
const MAX_LISTED: usize = 5;

/// Files of one kind: how many there are, and the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Files {
    /// How many there are.
    pub count: u64,
    /// The first ones, as paths below the data set's folder; for unreadable files, the error messages.
    pub first: Vec<String>,
}

impl Files {
    fn add(&mut self, name: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.len() < MAX_LISTED {
            self.first.push(name());
        }
    }
}

/// The images of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bucket {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Images, with repeats and flipped copies.
    pub images: u64,
    /// Batches per epoch.
    pub batches: u64,
}

/// The report on one data set at one resolution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DatasetReport {
    /// The path as the config has it.
    pub path: String,
    /// Images have at most this squared pixels.
    pub resolution: u32,
    /// Whether it is a regularisation set.
    pub regularisation: bool,
    /// Images that are trained on, each counted once.
    pub images: u64,
    /// Images that cannot be read; training skips them.
    pub unreadable: Files,
    /// Images whose header can be read but whose end is missing; training fails when it loads one.
    pub cut_off: Files,
    /// Images with a caption.
    pub captioned: u64,
    /// Images without a caption.
    pub uncaptioned: Files,
    /// The default caption, which images without a caption are trained with.
    pub default_caption: Option<String>,
    /// The warning about images without a caption, if there is one.
    pub caption_warning: Option<String>,
    /// Images with fewer pixels than the resolution. They are trained at their own size, or enlarged without buckets and with `square_crop`.
    pub too_small: Files,
    /// How many files are neither images nor captions, by suffix.
    pub ignored: BTreeMap<String, u64>,
    /// Files in `_controls` folders that are not used.
    pub control_files: u64,
    /// How many images have a mask. `None`: the data set uses no masks.
    pub masks: Option<u64>,
    /// How many masks are missing, and made before the training.
    pub masks_to_make: u64,
    /// How many images have a control image. `None`: the data set has none.
    pub controls: Option<u64>,
    /// How many control images are missing, and made before the training.
    pub controls_to_make: u64,
    /// What they are called: control images, or the negative images of pairs.
    pub controls_noun: &'static str,
    /// Warnings about the control images.
    pub control_warnings: Vec<String>,
    /// How often the list of images is repeated.
    pub repeats: u64,
    /// Copies of each image: 1, or more with flips.
    pub copies: u64,
    /// Images per epoch, with repeats and copies.
    pub items: u64,
    /// Images per batch.
    pub batch_size: u64,
    /// Batches per epoch.
    pub batches: u64,
    /// The buckets, the largest first.
    pub buckets: Vec<Bucket>,
}

/// The files of a data set, independent of the resolution.
#[derive(Clone, Debug)]
pub struct DatasetContents {
    scan: DatasetScan,
    /// For each image of the scan: whether its end is missing.
    cut_off: Vec<bool>,
    /// Control images whose end is missing.
    cut_off_controls: Vec<PathBuf>,
    ignored: BTreeMap<String, u64>,
    control_files: u64,
}

impl DatasetContents {
    /// Reads headers and captions and writes nothing. An image is decoded only if its end is not found.
    ///
    /// # Errors
    /// When the folder is missing, an image is too large, or a caption is not UTF-8.
    pub fn read(options: &DatasetOptions) -> Result<Self> {
        let scan = DatasetScan::read(options, false)?;
        let cut_off = scan.images.iter().map(|file| is_cut_off(&file.path)).collect();
        // Of control images too, but not of halves, which are in the same file.
        let controls = scan
            .images
            .iter()
            .filter_map(|file| file.control.clone().filter(|path| *path != file.path));
        let cut_off_controls = controls.filter(|path| is_cut_off(path)).collect();
        let mut contents = Self {
            scan,
            cut_off,
            cut_off_controls,
            ignored: BTreeMap::new(),
            control_files: 0,
        };
        if options.path.is_dir() {
            contents.count_other_files(options);
        }
        Ok(contents)
    }

    fn count_other_files(&mut self, options: &DatasetOptions) {
        let images = self.scan.images.iter().map(|file| &file.path);
        let unreadable = self.scan.unreadable.iter().map(|(path, _)| path);
        let known: BTreeSet<&PathBuf> = images.chain(unreadable).collect();
        let mut other = OtherFiles::default();
        other.count(&options.path, options, &known, 0);
        (self.ignored, self.control_files) = (other.ignored, other.control_files);
    }
}

/// Whether an image's end is missing. One that can be decoded is complete, however many bytes follow it: training decodes it in the
/// same way.
fn is_cut_off(path: &Path) -> bool {
    image_io::is_cut_off(path) && image_io::open_rgb(path).is_err()
}

/// Counts of files that are not trained on.
#[derive(Default)]
struct OtherFiles {
    ignored: BTreeMap<String, u64>,
    control_files: u64,
}

impl DatasetReport {
    /// Reads a data set as training does. `name` is its path as the config has it.
    ///
    /// # Errors
    /// What would fail the training: the folder is missing, no image can be read, or a caption is not UTF-8.
    pub fn read(options: &DatasetOptions, name: &str, divisibility: u32) -> Result<Self> {
        Self::from_contents(options, name, divisibility, &DatasetContents::read(options)?)
    }

    /// The report on files that were read already, for example at another resolution.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn from_contents(
        options: &DatasetOptions,
        name: &str,
        divisibility: u32,
        contents: &DatasetContents,
    ) -> Result<Self> {
        check_options(options, divisibility)?;
        let scan = &contents.scan;
        scan.check_images(options)?;
        let relative = |path: &Path| path.strip_prefix(&scan.root).unwrap_or(path).display().to_string();
        let mut report = Self {
            path: name.to_owned(),
            resolution: options.resolution,
            regularisation: options.regularisation,
            images: scan.images.len() as u64,
            default_caption: options.default_caption.clone(),
            caption_warning: scan.caption_warning(options),
            repeats: options.repeats.max(1) as u64,
            copies: flip_variants(options.flip_x, options.flip_y).len() as u64,
            batch_size: options.batch_size.max(1) as u64,
            masks: options.masks.as_ref().map(|_| 0),
            controls: options
                .controls
                .as_ref()
                .map(|_| scan.images.iter().filter(|file| file.control.is_some()).count() as u64),
            controls_to_make: match options.controls.as_ref().and_then(ControlOptions::generated) {
                Some(_) => scan.images.iter().filter(|file| file.control.is_none()).count() as u64,
                None => 0,
            },
            controls_noun: options.controls.as_ref().map_or("control images", ControlOptions::noun),
            control_warnings: scan.control_warnings(options),
            ignored: contents.ignored.clone(),
            ..Self::default()
        };
        for (_, error) in &scan.unreadable {
            report.unreadable.add(|| error.clone());
        }
        let budget = u64::from(options.resolution) * u64::from(options.resolution);
        let mut buckets: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        let allowed_masks = match &options.masks {
            Some(masks) => masks.allowed_paths(&scan.allowed_paths)?,
            None => AllowedPaths::any(),
        };
        for (file, cut_off) in scan.images.iter().zip(&contents.cut_off) {
            match file.has_caption {
                true => report.captioned += 1,
                false => report.uncaptioned.add(|| relative(&file.path)),
            }
            let scaled = |side: u32| ((f64::from(side) * options.scale) as u64).max(1);
            let (width, height) = (scaled(file.size.0), scaled(file.size.1));
            let small = match options.buckets {
                true => width.saturating_mul(height) < budget,
                false => width < u64::from(options.fixed_size().0) || height < u64::from(options.fixed_size().1),
            };
            if small {
                report
                    .too_small
                    .add(|| format!("{} ({}x{})", relative(&file.path), file.size.0, file.size.1));
            }
            if *cut_off {
                report.cut_off.add(|| relative(&file.path));
            }
            if let (Some(masks), Some(count)) = (&options.masks, &mut report.masks) {
                let mask = masks.mask_for(&file.path, &allowed_masks)?;
                *count += u64::from(mask.is_some());
                if let Some(mask) = mask.filter(|mask| !mask.alpha) {
                    check_mask_file(&mask.path, &file.path)?;
                    if is_cut_off(&mask.path) {
                        report.cut_off.add(|| relative(&mask.path));
                    }
                }
            }
            // The seed only changes the crop, not the bucket.
            let BucketPlan { bucket, .. } = plan_item(file.size, options, divisibility, 0, &file.path);
            *buckets.entry(bucket).or_default() += report.repeats * report.copies;
        }
        for path in &contents.cut_off_controls {
            report.cut_off.add(|| relative(path));
        }
        if options.masks.as_ref().and_then(MaskOptions::generated).is_some() {
            report.masks_to_make = report.images - report.masks.unwrap_or(0);
        }
        report.control_files = contents
            .control_files
            .saturating_sub(report.used_control_files(options));
        report.buckets = buckets
            .into_iter()
            .map(|((width, height), images)| Bucket {
                width,
                height,
                images,
                batches: images.div_ceil(report.batch_size),
            })
            .collect();
        report.buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.images));
        report.items = report.buckets.iter().map(|bucket| bucket.images).sum();
        report.batches = report.buckets.iter().map(|bucket| bucket.batches).sum();
        if report.images == 0 {
            return Err(EngineError::bad_input(report.no_images_message(options)));
        }
        Ok(report)
    }

    /// How many files in `_controls` folders are control images or masks of the images.
    fn used_control_files(&self, options: &DatasetOptions) -> u64 {
        let is_beside = |controls: &ControlOptions| matches!(controls.source, ControlSource::Beside(_));
        let controls = self
            .controls
            .filter(|_| options.controls.as_ref().is_some_and(is_beside));
        let masks_are_beside = options
            .masks
            .as_ref()
            .is_some_and(|masks| matches!(masks.source, MaskSource::Beside(_)));
        let masks = self.masks.filter(|_| masks_are_beside);
        controls.unwrap_or(0) + masks.unwrap_or(0)
    }

    fn no_images_message(&self, options: &DatasetOptions) -> String {
        let path = options.path.display();
        match (self.unreadable.first.first(), self.ignored.is_empty()) {
            (Some(first), _) => format!(
                "{path}: none of its {} images can be read (the first: {first})",
                self.unreadable.count
            ),
            (None, true) => format!("{path}: there is no .jpg, .jpeg, .png or .webp file in it"),
            (None, false) => format!(
                "{path}: there is no .jpg, .jpeg, .png or .webp file in it, only {}",
                format_counts(&self.ignored)
            ),
        }
    }
}

impl OtherFiles {
    /// Counts the files below `folder` that are neither images nor captions.
    fn count(&mut self, folder: &Path, options: &DatasetOptions, images: &BTreeSet<&PathBuf>, depth: usize) {
        // No data set is this deep; the limit ends loops of links.
        if depth > 32 {
            return;
        }
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(kind) = entry.file_type() else { continue };
            if name.starts_with('.') {
                continue;
            }
            let path = entry.path();
            if kind.is_dir() {
                if name != "_latent_cache" && name != "_t_e_cache" {
                    self.count(&path, options, images, depth + 1);
                }
                continue;
            }
            if depth > 0 && is_controls_folder(folder) {
                self.control_files += 1;
                continue;
            }
            if images.contains(&path) || is_caption(&path, &name, options, images) {
                continue;
            }
            let suffix = Path::new(&name)
                .extension()
                .map(|suffix| suffix.to_string_lossy().to_lowercase());
            *self
                .ignored
                .entry(suffix.map_or("no ending".to_owned(), |suffix| format!(".{suffix}")))
                .or_default() += 1;
        }
    }
}

/// Whether this is the caption file of an image next to it.
fn is_caption(path: &Path, name: &str, options: &DatasetOptions, images: &BTreeSet<&PathBuf>) -> bool {
    let Some(stem) = name.strip_suffix(options.caption_ext.as_str()) else {
        return false;
    };
    ["jpg", "jpeg", "png", "webp", "JPG", "JPEG", "PNG", "WEBP"]
        .iter()
        .any(|suffix| images.contains(&path.with_file_name(format!("{stem}.{suffix}"))))
}

/// Formats counts as `3 .gif, 1 .mp4`.
fn format_counts(files: &BTreeMap<String, u64>) -> String {
    let each: Vec<String> = files
        .iter()
        .map(|(suffix, count)| format!("{count} {suffix}"))
        .collect();
    each.join(", ")
}
