//! The images of a data set with their sizes and captions, before one is decoded.

use super::allowed_paths::AllowedPaths;
use super::bucket::have_same_aspect_ratio;
use super::caption::{caption_path, read_caption, read_pair_caption};
use super::captions_file::read_captions_file;
use super::control_files::ControlsBeside;
use super::controls::ControlOptions;
use super::dataset_options::DatasetOptions;
use super::discover::discover;
use super::excluded::excluded_images;
use super::item_plan::plan_item;
use super::masks::MaskOptions;
use super::sizes::SizeCache;
use crate::error::{EngineError, Result};
use crate::image_io;
use aitk_common::fsutil::regular;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Warnings about a data set: which files are skipped and why, and missing captions.
pub type Warnings = Vec<String>;

/// An image of a data set whose header and caption were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScannedImage {
    /// The image file.
    pub path: PathBuf,
    /// Width and height after EXIF rotation.
    pub size: (u32, u32),
    /// The caption as read, or else the default caption.
    pub caption: String,
    /// The short caption: `caption_short` of a JSON data set, or else the default caption of an image without an entry there.
    pub short_caption: Option<String>,
    /// Whether it has a caption file, or a caption in the JSON file, that is not blank.
    pub has_caption: bool,
    /// Its control image. `None`: the data set has none.
    pub control: Option<PathBuf>,
}

/// The images of a data set with their sizes and captions; no image is decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatasetScan {
    /// The data set's folder.
    pub root: PathBuf,
    /// What may be opened of it.
    pub allowed_paths: AllowedPaths,
    /// Images whose header can be read, in the order of their paths.
    pub images: Vec<ScannedImage>,
    /// Images that cannot be read, with an error message that names the file.
    pub unreadable: Vec<(PathBuf, String)>,
    /// Images whose control images have another aspect ratio, to which these are squeezed.
    pub squeezed: Vec<PathBuf>,
}

impl DatasetScan {
    /// Lists the images and reads their headers and captions. `for_training`: the cache of image sizes is written, and control images and
    /// masks that a network makes are there.
    ///
    /// # Errors
    /// When a folder is missing, an image is too large to decode, a caption is not UTF-8, a control image is missing or damaged, or a mask of
    /// `controls` is missing.
    pub fn read(options: &DatasetOptions, for_training: bool) -> Result<Self> {
        let mut listing = discover(&options.path, options.short_captions, options.stay_in_folder)?;
        let controls = options.controls.as_ref();
        let control_files = controls
            .map(|controls| controls.list(options.stay_in_folder, &listing.allowed_paths))
            .transpose()?;
        let mut without_control = Vec::new();
        let mut sizes = SizeCache::open(&listing.root, options.derived.as_deref().unwrap_or(&listing.root));
        let mut scan = Self {
            root: listing.root.clone(),
            allowed_paths: listing.allowed_paths.clone(),
            ..Self::default()
        };
        if let Some(file) = &options.captions_file {
            read_captions_file(file, &options.captions.tags, &mut listing)?;
        }
        let excluded = excluded_images(&options.excluded, &options.path, &listing)?;
        for path in listing.images.iter().filter(|path| !excluded.contains(*path)) {
            let size = match sizes.get(path) {
                Some(size) => size,
                None => match image_size(path) {
                    Ok(size) => {
                        sizes.put(path, size);
                        size
                    }
                    // The user should make a too large image smaller, so it is an error; other unreadable files are
                    // skipped.
                    Err(error) if is_too_large(path) => return Err(error),
                    Err(error) => {
                        scan.unreadable.push((path.clone(), error.to_string()));
                        continue;
                    }
                },
            };
            if options.side_by_side && size.0 < 2 {
                return Err(EngineError::bad_input(format!(
                    "{}: an image of {} x {} pixels has no two halves; remove it from the `pair_folder`",
                    path.display(),
                    size.0,
                    size.1
                )));
            }
            let size = match options.side_by_side {
                true => (size.0 / 2, size.1),
                false => size,
            };
            let control = match &control_files {
                Some(files) => files.find(path)?,
                None => options.side_by_side.then(|| path.clone()),
            };
            let caption_file = caption_path(path, &options.caption_ext);
            let found = match listing.captions.get(path) {
                Some(caption) => Some(caption.clone()),
                None => {
                    listing.allowed_paths.check(&caption_file)?;
                    match options.has_pairs() {
                        true => {
                            let negative = control.as_deref();
                            if let (Some(files), Some(negative)) = (&control_files, negative) {
                                files.check(&caption_path(negative, &options.caption_ext))?;
                            }
                            let images: Vec<&Path> = negative.into_iter().chain([path.as_path()]).collect();
                            read_pair_caption(&images, &options.caption_ext)?
                        }
                        false => Some(read_caption(path, &options.caption_ext, None)?),
                    }
                }
            };
            let is_caption = |text: &String| options.has_pairs() || !text.trim().is_empty();
            let has_caption = found.as_ref().is_some_and(is_caption);
            let text = found.unwrap_or_default();
            match (&control, controls) {
                (Some(control), Some(controls)) => {
                    let control_size = image_size(control)?;
                    if controls.full_size && !have_same_aspect_ratio(size, control_size) {
                        scan.squeezed.push(path.clone());
                    }
                }
                (None, Some(_)) => without_control.push(path.clone()),
                (_, None) => {}
            }
            scan.images.push(ScannedImage {
                path: path.clone(),
                size,
                caption: match &options.default_caption {
                    Some(default) if !has_caption => default.clone(),
                    _ => text,
                },
                short_caption: match listing.captions.contains_key(path) {
                    true => listing.short_captions.get(path).cloned(),
                    false => options.default_caption.clone(),
                },
                has_caption,
                control,
            });
        }
        // A training makes them before it opens the data set.
        let is_generated = controls.is_some_and(|controls| controls.generated().is_some());
        if let Some(files) = control_files.filter(|_| !(without_control.is_empty() || is_generated && !for_training)) {
            return Err(files.missing(&options.path, &without_control, scan.images.len()));
        }
        let needs_mask = |masks: &&MaskOptions| for_training || masks.generated().is_none();
        if let Some(masks) = options.masks.as_ref().filter(needs_mask) {
            let images = scan.images.iter().map(|image| image.path.as_path());
            masks.check_complete(&options.path, images, &scan.allowed_paths)?;
        }
        if for_training {
            sizes.save();
        }
        Ok(scan)
    }

    /// The images that have no file of `beside` yet.
    ///
    /// # Errors
    /// When a file is outside of what may be opened, or an image cannot be read.
    pub fn images_without(&self, beside: &ControlsBeside) -> Result<Vec<PathBuf>> {
        let mut missing = Vec::new();
        for image in &self.images {
            if beside.find(&image.path, &self.allowed_paths)?.is_none() {
                missing.push(image.path.clone());
            }
        }
        Ok(missing)
    }

    /// Checks that no image is too small for a random crop or too large after `scale`, and that there are short captions where they
    /// are needed.
    ///
    /// # Errors
    /// When an image is smaller than the square that is cropped from it, has too many pixels after `scale`, or has no short caption.
    pub(super) fn check_images(&self, options: &DatasetOptions) -> Result<()> {
        let without = self.images.iter().find(|image| image.short_caption.is_none());
        if let Some(image) = without.filter(|_| options.needs_short_captions) {
            return Err(EngineError::bad_input(format!(
                "{}: the image has no short caption, which `train.short_and_long_captions` and \
                 `short_and_long_captions_encoder_split` need: give `dataset_path` a JSON file such as {{\"{}\": {{\"caption\": \
                 \"a red circle\", \"caption_short\": \"circle\"}}}}",
                image.path.display(),
                image.path.file_name().unwrap_or_default().to_string_lossy()
            )));
        }
        let is_too_large = |image: &&ScannedImage| {
            let (width, height) = options.scaled(image.size);
            u64::from(width) * u64::from(height) > image_io::MAX_PIXELS
        };
        if let Some(image) = self.images.iter().find(is_too_large).filter(|_| options.scale > 1.0) {
            return Err(EngineError::bad_input(format!(
                "{}: the image has {} x {} pixels, and times `scale: {}` more than the {} that are allowed: lower `scale`",
                image.path.display(),
                image.size.0,
                image.size.1,
                options.scale,
                image_io::MAX_PIXELS
            )));
        }
        let is_too_small = |image: &&ScannedImage| {
            let (width, height) = options.scaled(image.size);
            width.min(height) < options.resolution
        };
        match self.images.iter().find(is_too_small).filter(|_| options.draws_crops()) {
            Some(image) => Err(EngineError::bad_input(format!(
                "{}: the image has {} x {} pixels{}, and `random_crop` without buckets crops {side} x {side} from it: lower \
                 `resolution`, or remove the image or `random_crop`",
                image.path.display(),
                image.size.0,
                image.size.1,
                match options.scale == 1.0 {
                    true => String::new(),
                    false => format!(", times `scale: {}`", options.scale),
                },
                side = options.resolution
            ))),
            None => Ok(()),
        }
    }

    /// How many images there are, readable or not.
    #[must_use]
    pub fn image_count(&self) -> usize {
        self.images.len() + self.unreadable.len()
    }

    /// The sizes, width and height, that the images are trained at.
    #[must_use]
    pub fn bucket_sizes(&self, options: &DatasetOptions, divisibility: u32) -> BTreeSet<(u32, u32)> {
        // The seed only changes the crop, not the bucket.
        let plans = self
            .images
            .iter()
            .map(|image| plan_item(image.size, options, divisibility, 0, &image.path));
        plans.map(|plan| plan.bucket).collect()
    }

    /// Images without a caption.
    pub fn uncaptioned(&self) -> impl Iterator<Item = &ScannedImage> {
        self.images.iter().filter(|file| !file.has_caption)
    }

    /// The warnings about the data that are logged before training.
    pub(super) fn warnings(&self, options: &DatasetOptions) -> Warnings {
        let skipped = self
            .unreadable
            .iter()
            .map(|(_, error)| format!("{error}; the image is skipped"));
        skipped
            .chain(self.caption_warning(options))
            .chain(self.control_warnings(options))
            .collect()
    }

    /// Warnings about control images that are squeezed, or that are trained on because their folder is in the data set's.
    #[must_use]
    pub fn control_warnings(&self, options: &DatasetOptions) -> Warnings {
        let mut warnings = Vec::new();
        if let Some(first) = self.squeezed.first() {
            let kind = options.controls.as_ref().map_or("control images", ControlOptions::noun);
            warnings.push(format!(
                "{}: the {kind} of {} of {} images have another aspect ratio than their images, and are squeezed to it. The first \
                 image is {}",
                options.path.display(),
                self.squeezed.len(),
                self.images.len(),
                first.display()
            ));
        }
        for folder in options.controls.iter().flat_map(ControlOptions::folders) {
            let canonical = |path: &Path| std::fs::canonicalize(path).ok();
            let is_inside = match (canonical(folder), canonical(&self.root)) {
                (Some(folder), Some(root)) => folder.starts_with(root),
                _ => false,
            };
            if is_inside && options.path.is_dir() && folder.file_name().is_none_or(|name| name != "_controls") {
                let kind = options.controls.as_ref().map_or("control images", ControlOptions::noun);
                warnings.push(format!(
                    "{}: this folder of {kind} is in the data set's folder, so its images are trained on too: move it, or call \
                     it `_controls`, which is skipped",
                    folder.display()
                ));
            }
        }
        warnings
    }

    /// A warning when images have no caption, with the caption that they are trained with.
    #[must_use]
    pub fn caption_warning(&self, options: &DatasetOptions) -> Option<String> {
        let missing = self.uncaptioned().count();
        if missing == 0 || options.default_caption.is_some() {
            return None;
        }
        let name = |file: &ScannedImage| file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let first_names: Vec<String> = self.uncaptioned().take(3).map(name).collect();
        let ellipsis = if missing > first_names.len() { ", …" } else { "" };
        let consequence = match &options.captions.trigger {
            Some(trigger) if !options.regularisation => {
                format!("they are trained with the trigger word `{trigger}` alone")
            }
            _ => "they are trained with an empty prompt".to_owned(),
        };
        let other = match &options.captions_file {
            Some(_) => None,
            None => self.other_caption_ext(options),
        };
        let hint = other.map_or(String::new(), |ext| {
            format!("; there are {ext} files next to them: set `caption_ext: {ext}`")
        });
        Some(format!(
            "{}: {missing} of {} images have no caption in {} ({}{ellipsis}): {consequence}{hint}",
            options.path.display(),
            self.images.len(),
            match &options.captions_file {
                Some(file) => file.display().to_string(),
                None => format!("a {} file", options.caption_ext),
            },
            first_names.join(", "),
        ))
    }

    /// Another suffix that caption files of images without a caption have.
    fn other_caption_ext(&self, options: &DatasetOptions) -> Option<&'static str> {
        let exists = |ext: &&&str| {
            **ext != options.caption_ext
                && self
                    .uncaptioned()
                    .take(20)
                    .any(|file| caption_path(&file.path, ext).is_file())
        };
        [".txt", ".caption", ".json", ".md"].iter().find(exists).copied()
    }
}

fn image_size(path: &Path) -> Result<(u32, u32)> {
    match std::fs::metadata(path) {
        Ok(info) if info.len() == 0 => Err(EngineError::bad_input(format!(
            "{}: the file is empty (0 bytes)",
            path.display()
        ))),
        _ => image_io::dimensions(path),
    }
}

/// Whether an image has too many pixels. One with too many bytes is not read for that.
fn is_too_large(path: &Path) -> bool {
    let can_be_read = regular::open(path).is_ok_and(|(_, bytes)| bytes <= image_io::MAX_FILE_BYTES);
    can_be_read && image::image_dimensions(path).is_ok_and(|(w, h)| u64::from(w) * u64::from(h) > image_io::MAX_PIXELS)
}
