//! A data set: its pictures with their buckets and captions, and the batches of a run.

use super::bucket::{BucketPlan, plan, plan_square};
use super::caption::{CaptionRules, read_caption};
use super::discover::discover;
use super::latent_cache::{LatentKey, content_hash};
use super::masks::{Mask, MaskOptions};
use super::sizes::SizeCache;
use crate::error::{EngineError, Result};
use crate::image_io;
use crate::rng::generator_for;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What a data set section says, as far as pictures and captions go. One resolution per data set.
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
    /// Caption of a picture without one.
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
    /// Which parts of the pictures are learned. `None`: all.
    pub masks: Option<MaskOptions>,
    /// LoRA strength for these items.
    pub network_weight: f64,
    /// Loss weight of these items.
    pub loss_multiplier: f64,
    /// Keep latents in memory.
    pub cache_latents: bool,
    /// Keep latents on disk.
    pub cache_latents_to_disk: bool,
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
        }
    }
}

/// One picture as it is trained.
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

/// The pictures of one data set at one resolution.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// The options it was made with.
    pub options: DatasetOptions,
    /// Its items, repeats and flips included.
    pub items: Vec<Item>,
}

impl Dataset {
    /// Lists the pictures, reads sizes and captions, and plans the buckets. A file that is no readable picture is
    /// skipped with a warning.
    ///
    /// # Errors
    /// When the folder is missing, no picture is left, a picture is too large to decode, or a caption is not UTF-8.
    pub fn open(options: DatasetOptions, divisibility: u32, seed: u64) -> Result<(Self, Warnings)> {
        if !options.buckets && !options.resolution.is_multiple_of(divisibility.max(1)) {
            return Err(EngineError::bad_input(format!(
                "datasets: without buckets every picture becomes {side} x {side}, and the model needs a multiple of \
                 {divisibility}; change `resolution` or remove `buckets: false`",
                side = options.resolution
            )));
        }
        if let Some(masks) = &options.masks {
            masks.check()?;
        }
        let listing = discover(&options.path, options.short_captions)?;
        let mut sizes = SizeCache::open(&listing.root, options.derived.as_deref().unwrap_or(&listing.root));
        let mut warnings = Warnings::new();
        let (mut files, mut first) = (Vec::new(), None);
        for path in &listing.images {
            let size = match sizes.get(path) {
                Some(size) => size,
                None => match size_of(path) {
                    Ok(size) => {
                        sizes.put(path, size);
                        size
                    }
                    // A picture that is too large is a mistake to mend, not a stray file to pass over.
                    Err(error) if is_too_large(path) => return Err(error),
                    Err(error) => {
                        first.get_or_insert_with(|| error.to_string());
                        warnings.push(format!("{error}; the picture is skipped"));
                        continue;
                    }
                },
            };
            let caption = match listing.captions.get(path) {
                Some(text) if !text.trim().is_empty() || options.default_caption.is_none() => text.clone(),
                Some(_) => options.default_caption.clone().unwrap_or_default(),
                None => read_caption(path, &options.caption_ext, options.default_caption.as_deref())?,
            };
            files.push((path.clone(), size, caption));
        }
        sizes.save();
        if files.is_empty() {
            let hint = match first {
                Some(first) => format!(
                    "none of its {} pictures can be read (the first: {first})",
                    listing.images.len()
                ),
                None => "there is no .jpg, .jpeg, .png or .webp file in it".to_owned(),
            };
            return Err(EngineError::bad_input(format!(
                "{}: the data set is empty: {hint}",
                options.path.display()
            )));
        }

        let mut hashes: HashMap<PathBuf, String> = HashMap::new();
        let mut items = Vec::new();
        for flips in flips(options.flip_x, options.flip_y) {
            for _ in 0..options.repeats.max(1) {
                for (path, size, caption) in &files {
                    let content = match hashes.get(path) {
                        Some(hash) => hash.clone(),
                        None => {
                            let hash = content_hash(path)?;
                            hashes.insert(path.clone(), hash.clone());
                            hash
                        }
                    };
                    let plan = place(*size, &options, divisibility, seed, path);
                    items.push(Item {
                        path: path.clone(),
                        content,
                        derived: options.derived.clone(),
                        plan,
                        flip_x: flips.0,
                        flip_y: flips.1,
                        caption: caption.clone(),
                        mask: options.masks.as_ref().and_then(|masks| masks.of(path)),
                    });
                }
            }
        }
        Ok((Self { options, items }, warnings))
    }
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
fn flips(x: bool, y: bool) -> Vec<(bool, bool)> {
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

fn place(
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
