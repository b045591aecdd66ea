//! A data set: its images with their buckets and captions, and the batches of a run.

use super::bucket::{BucketPlan, plan, plan_square};
use super::caption::{CaptionRules, caption_file, read_caption};
use super::discover::discover;
use super::enclosure::Enclosure;
use super::latent_cache::{LatentKey, content_hash};
use super::masks::{Mask, MaskOptions};
use super::sizes::SizeCache;
use crate::error::{EngineError, Result};
use crate::image_io;
use crate::rng::generator_for;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What a data set section says, as far as images and captions go. One resolution per data set.
#[derive(Clone, Debug, PartialEq)]
pub struct DatasetOptions {
    /// Folder or JSON file.
    pub path: PathBuf,
    /// Where image sizes and latents are kept. `None`: beside the images.
    pub derived: Option<PathBuf>,
    /// Pixel budget: resolution squared.
    pub resolution: u32,
    /// Items per batch.
    pub batch_size: usize,
    /// How often the list of files is repeated.
    pub repeats: usize,
    /// Suffix of caption files, with its dot.
    pub caption_ext: String,
    /// Caption of an image without one.
    pub default_caption: Option<String>,
    /// Take `caption_short` of a JSON data set.
    pub short_captions: bool,
    /// What is done to captions.
    pub captions: CaptionRules,
    /// A regularisation set.
    pub regularisation: bool,
    /// Aspect buckets. Without: squares of the resolution.
    pub buckets: bool,
    /// Crop to a square.
    pub square_crop: bool,
    /// Cut at a random place instead of the centre.
    pub random_crop: bool,
    /// Scale before everything else.
    pub scale: f64,
    /// Add copies flipped left to right.
    pub flip_x: bool,
    /// Add copies flipped upside down.
    pub flip_y: bool,
    /// Which parts of the images are learned. `None`: all.
    pub masks: Option<MaskOptions>,
    /// LoRA strength for these items.
    pub network_weight: f64,
    /// Loss weight of these items.
    pub loss_multiplier: f64,
    /// Keep latents in memory.
    pub cache_latents: bool,
    /// Keep latents on disk.
    pub cache_latents_to_disk: bool,
    /// Open nothing outside of the folder of images, and of that of masks.
    pub enclosed: bool,
}

impl Default for DatasetOptions {
    /// What a section says that names a folder and nothing else.
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
            captions: CaptionRules::default(),
            regularisation: false,
            buckets: true,
            square_crop: false,
            random_crop: false,
            scale: 1.0,
            flip_x: false,
            flip_y: false,
            masks: None,
            network_weight: 1.0,
            loss_multiplier: 1.0,
            cache_latents: false,
            cache_latents_to_disk: false,
            enclosed: false,
        }
    }
}

/// One image as it is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub content: String,
    /// Where its latent is kept. `None`: beside it.
    pub derived: Option<PathBuf>,
    /// How it is scaled and cut.
    pub plan: BucketPlan,
    /// Left to right.
    pub flip_x: bool,
    /// Upside down.
    pub flip_y: bool,
    /// As read, before the caption rules.
    pub caption: String,
    /// Which parts of it are learned. `None`: all.
    pub mask: Option<Mask>,
}

impl Item {
    /// The key of its latent.
    #[must_use]
    pub fn latent_key(&self, latent_space: &str) -> LatentKey {
        LatentKey {
            filename: self.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            plan: self.plan,
            flip_x: self.flip_x,
            flip_y: self.flip_y,
            latent_space: latent_space.to_owned(),
        }
    }
}

/// What was skipped, and why.
pub type Warnings = Vec<String>;

/// An image of a data set that can be read, as its header and its caption say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// The file.
    pub path: PathBuf,
    /// Width and height as seen upright.
    pub size: (u32, u32),
    /// As read, or the default.
    pub caption: String,
    /// Whether it has a caption of its own.
    pub captioned: bool,
}

/// What the files of a data set are, before any of them is decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// The data set's folder.
    pub root: PathBuf,
    /// Images that can be read, in the order of their paths.
    pub files: Vec<Surveyed>,
    /// Images that cannot, with the reason, which names the file.
    pub unreadable: Vec<(PathBuf, String)>,
}

impl Survey {
    /// Lists the images and reads their headers and captions. `remember`: sizes are kept for the next time.
    ///
    /// # Errors
    /// When the folder is missing, an image is too large to decode, or a caption is not UTF-8.
    pub fn read(options: &DatasetOptions, remember: bool) -> Result<Self> {
        let listing = discover(&options.path, options.short_captions, options.enclosed)?;
        let mut sizes = SizeCache::open(&listing.root, options.derived.as_deref().unwrap_or(&listing.root));
        let mut survey = Self {
            root: listing.root.clone(),
            ..Self::default()
        };
        for path in &listing.images {
            let size = match sizes.get(path) {
                Some(size) => size,
                None => match size_of(path) {
                    Ok(size) => {
                        sizes.put(path, size);
                        size
                    }
                    // An image that is too large is a mistake to mend, not a stray file to pass over.
                    Err(error) if is_too_large(path) => return Err(error),
                    Err(error) => {
                        survey.unreadable.push((path.clone(), error.to_string()));
                        continue;
                    }
                },
            };
            let own = match listing.captions.get(path) {
                Some(text) => text.clone(),
                None => {
                    listing.enclosure.check(&caption_file(path, &options.caption_ext))?;
                    read_caption(path, &options.caption_ext, None)?
                }
            };
            let captioned = !own.trim().is_empty();
            survey.files.push(Surveyed {
                path: path.clone(),
                size,
                caption: match &options.default_caption {
                    Some(default) if !captioned => default.clone(),
                    _ => own,
                },
                captioned,
            });
        }
        if remember {
            sizes.save();
        }
        Ok(survey)
    }

    /// Images, whether they can be read or not.
    #[must_use]
    pub fn found(&self) -> usize {
        self.files.len() + self.unreadable.len()
    }

    /// Images without a caption of their own.
    pub fn uncaptioned(&self) -> impl Iterator<Item = &Surveyed> {
        self.files.iter().filter(|file| !file.captioned)
    }

    /// What a training has to say about its data before it begins.
    fn warnings(&self, options: &DatasetOptions) -> Warnings {
        let skipped = self
            .unreadable
            .iter()
            .map(|(_, error)| format!("{error}; the image is skipped"));
        skipped.chain(self.caption_warning(options)).collect()
    }

    /// That images have no caption, which nobody should learn from the result.
    #[must_use]
    pub fn caption_warning(&self, options: &DatasetOptions) -> Option<String> {
        let missing = self.uncaptioned().count();
        if missing == 0 || options.default_caption.is_some() {
            return None;
        }
        let name = |file: &Surveyed| file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let first: Vec<String> = self.uncaptioned().take(3).map(name).collect();
        let more = if missing > first.len() { ", …" } else { "" };
        let without = match &options.captions.trigger {
            Some(trigger) if !options.regularisation => {
                format!("they are trained with the trigger word `{trigger}` alone")
            }
            _ => "they are trained with an empty prompt".to_owned(),
        };
        let other = self.other_caption_ext(options);
        let hint = other.map_or(String::new(), |ext| {
            format!("; files in {ext} lie beside them: set `caption_ext: {ext}`")
        });
        Some(format!(
            "{}: {missing} of {} images have no caption in a {} file ({}{more}): {without}{hint}",
            options.path.display(),
            self.files.len(),
            options.caption_ext,
            first.join(", "),
        ))
    }

    /// Where images have no captions: the ending of text files that lie beside them.
    fn other_caption_ext(&self, options: &DatasetOptions) -> Option<&'static str> {
        let beside = |ext: &&&str| {
            **ext != options.caption_ext
                && self
                    .uncaptioned()
                    .take(20)
                    .any(|file| caption_beside(&file.path, ext).is_file())
        };
        [".txt", ".caption", ".json", ".md"].iter().find(beside).copied()
    }
}

fn caption_beside(image: &Path, extension: &str) -> PathBuf {
    let mut name = image.file_stem().unwrap_or_default().to_os_string();
    name.push(extension);
    image.with_file_name(name)
}

/// The images of one data set at one resolution.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// The options it was made with.
    pub options: DatasetOptions,
    /// Its items, repeats and flips included.
    pub items: Vec<Item>,
}

impl Dataset {
    /// Lists the images, reads sizes and captions, and plans the buckets. A file that is no readable image is
    /// skipped with a warning.
    ///
    /// # Errors
    /// When the folder is missing, no image is left, an image is too large to decode, or a caption is not UTF-8.
    pub fn open(options: DatasetOptions, divisibility: u32, seed: u64) -> Result<(Self, Warnings)> {
        check(&options, divisibility)?;
        let survey = Survey::read(&options, true)?;
        let (warnings, first) = (survey.warnings(&options), survey.unreadable.first());
        let files = &survey.files;
        if files.is_empty() {
            let hint = match first {
                Some((_, first)) => format!("none of its {} images can be read (the first: {first})", survey.found()),
                None => "there is no .jpg, .jpeg, .png or .webp file in it".to_owned(),
            };
            return Err(EngineError::bad_input(format!(
                "{}: the data set is empty: {hint}",
                options.path.display()
            )));
        }

        let masks_enclosure = match options.masks.as_ref().and_then(|masks| masks.folder.as_ref()) {
            Some(folder) if options.enclosed => Enclosure::of(folder)?,
            _ => Enclosure::none(),
        };
        let mut hashes: HashMap<PathBuf, String> = HashMap::new();
        let mut items = Vec::new();
        for flips in flips(options.flip_x, options.flip_y) {
            for _ in 0..options.repeats.max(1) {
                for Surveyed {
                    path, size, caption, ..
                } in files
                {
                    let content = match hashes.get(path) {
                        Some(hash) => hash.clone(),
                        None => {
                            let hash = content_hash(path)?;
                            hashes.insert(path.clone(), hash.clone());
                            hash
                        }
                    };
                    let plan = place(*size, &options, divisibility, seed, path);
                    let mask = options.masks.as_ref().and_then(|masks| masks.of(path));
                    if let Some(mask) = mask.as_ref().filter(|mask| !mask.alpha) {
                        masks_enclosure.check(&mask.path)?;
                    }
                    items.push(Item {
                        path: path.clone(),
                        content,
                        derived: options.derived.clone(),
                        plan,
                        flip_x: flips.0,
                        flip_y: flips.1,
                        caption: caption.clone(),
                        mask,
                    });
                }
            }
        }
        Ok((Self { options, items }, warnings))
    }
}

/// Refuses options that do not go together, before a file is looked at.
pub(super) fn check(options: &DatasetOptions, divisibility: u32) -> Result<()> {
    if !options.buckets && !options.resolution.is_multiple_of(divisibility.max(1)) {
        return Err(EngineError::bad_input(format!(
            "without `buckets` every image becomes {side} x {side}, and the model needs a multiple of \
             {divisibility}; change `resolution` or remove `buckets: false`",
            side = options.resolution
        )));
    }
    if let Some(masks) = &options.masks {
        masks.check()?;
    }
    Ok(())
}

fn size_of(path: &Path) -> Result<(u32, u32)> {
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

/// The copies of a data set: as it is, then the flipped ones.
pub(super) fn flips(x: bool, y: bool) -> Vec<(bool, bool)> {
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

pub(super) fn place(
    (width, height): (u32, u32),
    options: &DatasetOptions,
    divisibility: u32,
    seed: u64,
    path: &Path,
) -> BucketPlan {
    let scaled = |side: u32| ((f64::from(side) * options.scale) as u32).max(1);
    let (width, height) = (scaled(width), scaled(height));
    if !options.buckets {
        return plan_square(width, height, options.resolution);
    }
    let mut plan = plan(width, height, options.resolution, divisibility, options.square_crop);
    if options.random_crop {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut generator = generator_for(seed, &format!("crop/{name}"), u64::from(options.resolution), 0);
        let mut offset = |room: u32| generator.randint(0, i64::from(room) + 1, 1)[0] as u32;
        plan.crop = (
            offset(plan.scale_to.0 - plan.bucket.0),
            offset(plan.scale_to.1 - plan.bucket.1),
        );
    }
    plan
}

/// The items of one training batch: all of one data set and one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Which data set.
    pub dataset: usize,
    /// Which of its items.
    pub items: Vec<usize>,
}

/// The batches of the training sets, or of the regularisation sets. Their composition is fixed: files are shuffled inside each bucket once (`randperm` of a
/// generator of `seed/bucket/<data set>/<bucket number>`), cut, and a short last batch repeats its own items.
#[must_use]
pub fn batches(datasets: &[Dataset], seed: u64, regularisation: bool) -> Vec<Batch> {
    let mut out = Vec::new();
    let own = |dataset: &Dataset| dataset.options.regularisation == regularisation;
    for (number, dataset) in datasets.iter().enumerate().filter(|(_, dataset)| own(dataset)) {
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
        for (at, bucket) in order.iter().enumerate() {
            let items = &buckets[bucket];
            let permutation = generator_for(seed, "bucket", number as u64, at as u64).randperm(items.len());
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

/// The order of the batches in an epoch: `randperm` of a generator of `seed/epoch/<epoch>/0`, or, for regularisation
/// sets, which have epochs of their own, of `seed/reg-epoch/<epoch>/0`.
#[must_use]
pub fn epoch_order(count: usize, seed: u64, epoch: u64, regularisation: bool) -> Vec<usize> {
    let purpose = if regularisation { "reg-epoch" } else { "epoch" };
    generator_for(seed, purpose, epoch, 0)
        .randperm(count)
        .into_iter()
        .map(|i| i as usize)
        .collect()
}
