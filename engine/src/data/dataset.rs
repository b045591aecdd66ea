//! Data sets: images with their buckets and captions, and the batches of a run.

use super::allowed_paths::AllowedPaths;
use super::augment::Augmentations;
use super::augmented_control::AugmentedControlOptions;
use super::bucket::{BucketPlan, have_same_aspect_ratio, plan_bucket, plan_fixed};
use super::caption::{CaptionRules, caption_path, read_caption, read_pair_caption};
use super::captions_file::read_captions_file;
use super::controls::{ControlOptions, ControlRole};
use super::discover::discover;
use super::excluded::excluded_images;
use super::half::Half;
use super::image_statistics::ImageStatistics;
use super::latent_cache::content_hash;
use super::masks::{MaskOptions, check_mask_file};
use super::sizes::SizeCache;
use super::training_image::{Control, TrainingImage};
use crate::error::{EngineError, Result};
use crate::image_io;
use crate::rng::generator_for;
use aitk_common::job::dataset::GuidanceType;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// The options of a `datasets` entry that concern images and captions, with one resolution.
#[derive(Clone, Debug, PartialEq)]
pub struct DatasetOptions {
    /// The folder or JSON file of the data set.
    pub path: PathBuf,
    /// The folder of the caches of image sizes and latents. `None`: next to the images.
    pub derived: Option<PathBuf>,
    /// Images have at most this squared pixels.
    pub resolution: u32,
    /// Items per batch.
    pub batch_size: usize,
    /// How often the list of images is repeated.
    pub repeats: usize,
    /// Suffix of caption files, with the dot.
    pub caption_ext: String,
    /// The caption of images that have none.
    pub default_caption: Option<String>,
    /// Use `caption_short` of a JSON data set.
    pub short_captions: bool,
    /// Each image needs a short caption besides its own.
    pub needs_short_captions: bool,
    /// How captions are changed.
    pub captions: CaptionRules,
    /// The data set is a regularisation set.
    pub regularisation: bool,
    /// Use aspect buckets. Otherwise all images get one size.
    pub buckets: bool,
    /// Without buckets: width and height of every image. `None`: a square of the resolution.
    pub size: Option<(u32, u32)>,
    /// Scale and crop every image to a square of the resolution.
    pub square_crop: bool,
    /// Crop at a random position instead of the centre: once, and without buckets each time.
    pub random_crop: bool,
    /// Without buckets: scale to a random size before a random crop.
    pub random_scale: bool,
    /// Factor that images are scaled by before everything else.
    pub scale: f64,
    /// Add copies flipped left to right.
    pub flip_x: bool,
    /// Add copies flipped upside down.
    pub flip_y: bool,
    /// What the pixels of images are normalised by. `None`: they are from -1 to 1.
    pub normalization: Option<ImageStatistics>,
    /// Random changes of each image, each time.
    pub augmentations: Augmentations,
    /// Loss masks. `None`: all pixels count.
    pub masks: Option<MaskOptions>,
    /// Control images. `None`: the images are trained without them.
    pub controls: Option<ControlOptions>,
    /// The loss of an image and the control image that is its pair. `None`: the usual loss.
    pub guidance: Option<GuidanceType>,
    /// Control images that are other images of the data set, drawn each time. `None`: those of `controls`.
    pub augmented_controls: Option<AugmentedControlOptions>,
    /// Each file has two images side by side: the right half is the image, the left half its control image.
    pub side_by_side: bool,
    /// LoRA strength for the items of this data set.
    pub network_weight: f64,
    /// Loss weight of the items of this data set.
    pub loss_multiplier: f64,
    /// What the model predicts without the adapter is the target of the items.
    pub prior_target: bool,
    /// Cache latents in memory.
    pub cache_latents: bool,
    /// Cache latents on disk.
    pub cache_latents_to_disk: bool,
    /// Open no file outside the folders of the images, the masks and the control images.
    pub stay_in_folder: bool,
    /// A metadata file of sd-scripts, which has the captions, and whose images alone are trained.
    pub captions_file: Option<PathBuf>,
    /// Images that are not trained: their paths in the folder.
    pub excluded: Vec<String>,
}

impl Default for DatasetOptions {
    /// The defaults of a `datasets` entry.
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            derived: None,
            resolution: 512,
            batch_size: 1,
            repeats: 1,
            caption_ext: ".txt".into(),
            default_caption: None,
            short_captions: false,
            needs_short_captions: false,
            captions: CaptionRules::default(),
            regularisation: false,
            buckets: true,
            size: None,
            square_crop: false,
            random_crop: false,
            random_scale: false,
            scale: 1.0,
            flip_x: false,
            flip_y: false,
            normalization: None,
            augmentations: Augmentations::default(),
            masks: None,
            controls: None,
            guidance: None,
            augmented_controls: None,
            side_by_side: false,
            network_weight: 1.0,
            loss_multiplier: 1.0,
            prior_target: false,
            cache_latents: false,
            cache_latents_to_disk: false,
            stay_in_folder: false,
            captions_file: None,
            excluded: Vec::new(),
        }
    }
}

impl DatasetOptions {
    /// Whether an image is different each time it is trained on.
    #[must_use]
    pub fn draws_images(&self) -> bool {
        !self.augmentations.is_empty() || self.draws_crops()
    }

    /// Whether another part of an image is trained on each time.
    #[must_use]
    pub fn draws_crops(&self) -> bool {
        self.random_crop && !self.buckets
    }

    /// Whether pixels of images are limited to -1 to 1 after they are normalised. ai-toolkit does so where latents are not cached, except
    /// for regularisation sets (`reduce_contrast` in `toolkit/image_utils.py`).
    #[must_use]
    pub fn clamps_normalized(&self) -> bool {
        let is_cached = self.cache_latents || self.cache_latents_to_disk;
        self.normalization.is_some() && !self.regularisation && !is_cached
    }

    /// Whether each image is the positive one of a pair of a slider.
    fn has_pairs(&self) -> bool {
        let negative = |controls: &ControlOptions| controls.role == ControlRole::Negative;
        self.side_by_side || self.controls.as_ref().is_some_and(negative)
    }

    /// Width and height of every image without buckets.
    pub(super) fn fixed_size(&self) -> (u32, u32) {
        self.size.unwrap_or((self.resolution, self.resolution))
    }

    /// A width and a height times `scale`.
    pub(super) fn scaled(&self, (width, height): (u32, u32)) -> (u32, u32) {
        let scaled = |side: u32| ((f64::from(side) * self.scale) as u32).max(1);
        (scaled(width), scaled(height))
    }
}

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
    /// Images whose header can be read, in the order of their paths.
    pub images: Vec<ScannedImage>,
    /// Images that cannot be read, with an error message that names the file.
    pub unreadable: Vec<(PathBuf, String)>,
    /// Images whose control images have another aspect ratio, to which these are squeezed.
    pub squeezed: Vec<PathBuf>,
}

impl DatasetScan {
    /// Lists the images and reads their headers and captions. `write_sizes`: the cache of image sizes is written.
    ///
    /// # Errors
    /// When a folder is missing, an image is too large to decode, a caption is not UTF-8, or a control image is missing or damaged.
    pub fn read(options: &DatasetOptions, write_sizes: bool) -> Result<Self> {
        let controls = options.controls.as_ref();
        let control_files = controls
            .map(|controls| controls.list(options.stay_in_folder))
            .transpose()?;
        let mut without_control = Vec::new();
        let mut listing = discover(&options.path, options.short_captions, options.stay_in_folder)?;
        let mut sizes = SizeCache::open(&listing.root, options.derived.as_deref().unwrap_or(&listing.root));
        let mut scan = Self {
            root: listing.root.clone(),
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
        if let Some(files) = control_files.filter(|_| !without_control.is_empty()) {
            return Err(files.missing(&options.path, &without_control, scan.images.len()));
        }
        if write_sizes {
            sizes.save();
        }
        Ok(scan)
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
    fn warnings(&self, options: &DatasetOptions) -> Warnings {
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
        for folder in options.controls.iter().flat_map(|controls| &controls.folders) {
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

/// The images of one data set at one resolution.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// The options it was made with.
    pub options: DatasetOptions,
    /// Its items, with repeats and flipped copies.
    pub items: Vec<TrainingImage>,
}

impl Dataset {
    /// Lists the images, reads sizes and captions, and plans the buckets. An image that cannot be read is skipped with
    /// a warning.
    ///
    /// # Errors
    /// When the folder is missing, no image can be read, an image is too large to decode, or a caption is not UTF-8.
    pub fn open(options: DatasetOptions, divisibility: u32, seed: u64) -> Result<(Self, Warnings)> {
        check_options(&options, divisibility)?;
        let scan = DatasetScan::read(&options, true)?;
        scan.check_images(&options)?;
        let (warnings, first_error) = (scan.warnings(&options), scan.unreadable.first());
        let images = &scan.images;
        if images.is_empty() {
            let hint = match first_error {
                Some((_, error)) => format!(
                    "none of its {} images can be read (the first: {error})",
                    scan.image_count()
                ),
                None => "there is no .jpg, .jpeg, .png or .webp file in it".to_owned(),
            };
            return Err(EngineError::bad_input(format!(
                "{}: the data set is empty: {hint}",
                options.path.display()
            )));
        }

        let allowed_masks = match options.masks.as_ref().and_then(|masks| masks.folder.as_ref()) {
            Some(folder) if options.stay_in_folder => AllowedPaths::below(folder)?,
            _ => AllowedPaths::any(),
        };
        if let Some(masks) = &options.masks {
            for image in images {
                if let Some(mask) = masks.mask_for(&image.path).filter(|mask| !mask.alpha) {
                    allowed_masks.check(&mask.path)?;
                    check_mask_file(&mask.path, &image.path)?;
                }
            }
        }
        let mut hashes: HashMap<PathBuf, String> = HashMap::new();
        let mut hash = |path: &PathBuf| -> Result<String> {
            if let Some(hash) = hashes.get(path) {
                return Ok(hash.clone());
            }
            let hash = content_hash(path)?;
            hashes.insert(path.clone(), hash.clone());
            Ok(hash)
        };
        let mut items = Vec::new();
        for (flip_x, flip_y) in flip_variants(options.flip_x, options.flip_y) {
            for _ in 0..options.repeats.max(1) {
                for ScannedImage {
                    path,
                    size,
                    caption,
                    short_caption,
                    control,
                    ..
                } in images
                {
                    let content = hash(path)?;
                    let control = match (control, &options.controls) {
                        (Some(path), None) => Some(Control {
                            path: path.clone(),
                            half: Some(Half::Left),
                            content: content.clone(),
                            background: None,
                            full_size: true,
                        }),
                        (Some(path), Some(controls)) => Some(Control {
                            path: path.clone(),
                            half: None,
                            content: hash(path)?,
                            background: controls.background,
                            full_size: controls.full_size,
                        }),
                        _ => None,
                    };
                    let plan = plan_item(*size, &options, divisibility, seed, path);
                    let mask = options.masks.as_ref().and_then(|masks| masks.mask_for(path));
                    items.push(TrainingImage {
                        path: path.clone(),
                        content,
                        derived: options.derived.clone(),
                        half: options.side_by_side.then_some(Half::Right),
                        size: *size,
                        plan,
                        normalization: options.normalization,
                        is_clamped: options.clamps_normalized(),
                        flip_x,
                        flip_y,
                        caption: caption.clone(),
                        short_caption: short_caption.clone(),
                        mask,
                        control,
                    });
                }
            }
        }
        Ok((Self { options, items }, warnings))
    }
}

/// Checks that the options fit together, without opening a file.
pub(super) fn check_options(options: &DatasetOptions, divisibility: u32) -> Result<()> {
    let (width, height) = options.fixed_size();
    let fits = |side: u32| side.is_multiple_of(divisibility.max(1));
    if !(options.buckets || fits(width) && fits(height)) {
        let key = match options.size {
            Some(_) => "datasets.size",
            None => "resolution",
        };
        return Err(EngineError::bad_input(format!(
            "without `buckets` every image becomes {width} x {height}, and the model needs multiples of {divisibility}; change \
             `{key}` or remove `buckets: false`"
        )));
    }
    if let Some(masks) = &options.masks {
        masks.check_folder_exists()?;
    }
    if let Some(controls) = &options.controls {
        controls.check_folders_exist()?;
    }
    Ok(())
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

fn is_too_large(path: &Path) -> bool {
    image::image_dimensions(path).is_ok_and(|(w, h)| u64::from(w) * u64::from(h) > image_io::MAX_PIXELS)
}

/// The copies of each image as (flip_x, flip_y): the original, then the flipped ones.
pub(super) fn flip_variants(x: bool, y: bool) -> Vec<(bool, bool)> {
    let mut out = vec![(false, false)];
    if x {
        out.push((true, false));
    }
    if y {
        out.push((false, true));
    }
    if x && y {
        out.push((true, true));
    }
    out
}

/// Plans the bucket and crop of one image. A random crop depends on the seed, the file name and the resolution.
pub(super) fn plan_item(
    size: (u32, u32),
    options: &DatasetOptions,
    divisibility: u32,
    seed: u64,
    path: &Path,
) -> BucketPlan {
    let (width, height) = options.scaled(size);
    if !options.buckets {
        return plan_fixed(width, height, options.fixed_size());
    }
    let mut plan = plan_bucket(width, height, options.resolution, divisibility, options.square_crop);
    // As in ai-toolkit, squares are cut from the centre.
    if options.random_crop && !options.square_crop {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut generator = generator_for(seed, &format!("crop/{name}"), u64::from(options.resolution), 0);
        let mut offset = |space: u32| generator.randint(0, i64::from(space) + 1, 1)[0] as u32;
        plan.crop = (
            offset(plan.scale_to.0 - plan.bucket.0),
            offset(plan.scale_to.1 - plan.bucket.1),
        );
    }
    plan
}

/// The items of one training batch, all of one data set and one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Index of the data set.
    pub dataset: usize,
    /// Indices of its items.
    pub items: Vec<usize>,
}

/// The batches of the training sets, or of the regularisation sets. They are the same in every epoch: items are
/// shuffled once inside each bucket (`randperm` of a generator of `seed/bucket/<data set>/<bucket number>`) and split;
/// a short last batch repeats its own items.
#[must_use]
pub fn batches(datasets: &[Dataset], seed: u64, regularisation: bool) -> Vec<Batch> {
    let mut out = Vec::new();
    let is_selected = |dataset: &Dataset| dataset.options.regularisation == regularisation;
    for (number, dataset) in datasets.iter().enumerate().filter(|(_, dataset)| is_selected(dataset)) {
        let mut order = Vec::new();
        let mut buckets: HashMap<(u32, u32), Vec<usize>> = HashMap::new();
        for (index, item) in dataset.items.iter().enumerate() {
            buckets
                .entry(item.plan.bucket)
                .or_insert_with(|| {
                    order.push(item.plan.bucket);
                    Vec::new()
                })
                .push(index);
        }
        for (position, bucket) in order.iter().enumerate() {
            let items = &buckets[bucket];
            let permutation = generator_for(seed, "bucket", number as u64, position as u64).randperm(items.len());
            let shuffled: Vec<usize> = permutation.into_iter().map(|i| items[i as usize]).collect();
            let size = dataset.options.batch_size.max(1);
            for chunk in shuffled.chunks(size) {
                let items = chunk.iter().copied().cycle().take(size).collect();
                out.push(Batch { dataset: number, items });
            }
        }
    }
    out
}

/// The order of the batches in an epoch: `randperm` of a generator of `seed/epoch/<epoch>/0`. Regularisation sets have
/// their own epochs and use `seed/reg-epoch/<epoch>/0`.
#[must_use]
pub fn epoch_order(count: usize, seed: u64, epoch: u64, regularisation: bool) -> Vec<usize> {
    let purpose = if regularisation { "reg-epoch" } else { "epoch" };
    generator_for(seed, purpose, epoch, 0)
        .randperm(count)
        .into_iter()
        .map(|i| i as usize)
        .collect()
}
