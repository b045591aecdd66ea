//! The options of a data set.

use super::augment::Augmentations;
use super::caption::CaptionRules;
use super::controls::{ControlOptions, ControlRole};
use super::image_statistics::ImageStatistics;
use super::masks::MaskOptions;
use super::same_folder_control::SameFolderControlOptions;
use crate::error::{EngineError, Result};
use aitk_common::job::dataset::GuidanceType;
use std::path::PathBuf;

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
    pub same_folder_controls: Option<SameFolderControlOptions>,
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
            same_folder_controls: None,
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
    pub(super) fn has_pairs(&self) -> bool {
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
