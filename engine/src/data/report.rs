//! What a data set comes to, for people, before anything is trained: found, sized and bucketed by the code that training uses.

use super::bucket::BucketPlan;
use super::dataset::{DatasetOptions, Survey, check, flips, place};
use crate::error::{EngineError, Result};
use crate::image_io;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// How many names a report lists of each kind.
const NAMED: usize = 5;

/// Files of one kind: how many, and the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Files {
    /// How many there are.
    pub count: u64,
    /// The first ones, below the data set's folder; of unreadable ones with the reason.
    pub first: Vec<String>,
}

impl Files {
    fn add(&mut self, name: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.len() < NAMED {
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
    /// Images, repeats and flipped copies included.
    pub images: u64,
    /// Batches of one pass.
    pub batches: u64,
}

/// What one data set comes to at one resolution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DatasetReport {
    /// As the config has it.
    pub path: String,
    /// Pixel budget: this, squared.
    pub resolution: u32,
    /// A regularisation set.
    pub regularisation: bool,
    /// Images that are trained, each counted once.
    pub images: u64,
    /// Images that cannot be read, and are skipped.
    pub unreadable: Files,
    /// Images whose header can be read and whose end is missing: training stops at them.
    pub cut_off: Files,
    /// Images with a caption of their own.
    pub captioned: u64,
    /// Images without.
    pub uncaptioned: Files,
    /// What those are trained with: the default caption.
    pub default_caption: Option<String>,
    /// What is to be said about them, if anything.
    pub caption_warning: Option<String>,
    /// Images with fewer pixels than the resolution; they are trained at their own size, or enlarged without buckets.
    pub too_small: Files,
    /// Files that are neither images nor captions, by their ending.
    pub ignored: BTreeMap<String, u64>,
    /// Files in `_controls` folders, which are not used.
    pub control_files: u64,
    /// Images that have a mask, where masks are asked for.
    pub masks: Option<u64>,
    /// How often the list is repeated.
    pub repeats: u64,
    /// Copies of each image: 1, or more with flips.
    pub copies: u64,
    /// Images of one pass, repeats and copies included.
    pub items: u64,
    /// Images per batch.
    pub batch_size: u64,
    /// Batches of one pass.
    pub batches: u64,
    /// Sizes, the most frequent first.
    pub buckets: Vec<Bucket>,
}

/// What lies in a data set, whatever it is trained at.
#[derive(Clone, Debug)]
pub struct Contents {
    survey: Survey,
    /// Whether each of the survey's images lacks its end.
    cut_off: Vec<bool>,
    ignored: BTreeMap<String, u64>,
    control_files: u64,
}

impl Contents {
    /// Looks at the files, without keeping anything. Decoded are only those whose end is not where it is looked for.
    ///
    /// # Errors
    /// When the folder is missing, an image is too large, or a caption is no text.
    pub fn read(options: &DatasetOptions) -> Result<Self> {
        let survey = Survey::read(options, false)?;
        let cut_off = survey
            .files
            .iter()
            // What can be decoded has its end, however much lies behind it: training reads it the same way.
            .map(|file| image_io::is_cut_off(&file.path) && image_io::open_rgb(&file.path).is_err())
            .collect();
        let mut contents = Self {
            survey,
            cut_off,
            ignored: BTreeMap::new(),
            control_files: 0,
        };
        if options.path.is_dir() {
            contents.look_aside(options);
        }
        Ok(contents)
    }

    fn look_aside(&mut self, options: &DatasetOptions) {
        let images = self.survey.files.iter().map(|file| &file.path);
        let unreadable = self.survey.unreadable.iter().map(|(path, _)| path);
        let known: BTreeSet<&PathBuf> = images.chain(unreadable).collect();
        let mut aside = Aside::default();
        aside.look(&options.path, options, &known, 0);
        (self.ignored, self.control_files) = (aside.ignored, aside.control_files);
    }
}

/// Files that are not trained.
#[derive(Default)]
struct Aside {
    ignored: BTreeMap<String, u64>,
    control_files: u64,
}

impl DatasetReport {
    /// Looks at a data set as training does. `name` is its path as the config has it.
    ///
    /// # Errors
    /// What would end a training: the folder is missing, there is no image in it that can be read, a caption is no text.
    pub fn of(options: &DatasetOptions, name: &str, divisibility: u32) -> Result<Self> {
        Self::at(options, name, divisibility, &Contents::read(options)?)
    }

    /// The same of files that were looked at already, at another resolution, say.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn at(options: &DatasetOptions, name: &str, divisibility: u32, contents: &Contents) -> Result<Self> {
        check(options, divisibility)?;
        let survey = &contents.survey;
        let below = |path: &Path| path.strip_prefix(&survey.root).unwrap_or(path).display().to_string();
        let mut report = Self {
            path: name.to_owned(),
            resolution: options.resolution,
            regularisation: options.regularisation,
            images: survey.files.len() as u64,
            default_caption: options.default_caption.clone(),
            caption_warning: survey.caption_warning(options),
            repeats: options.repeats.max(1) as u64,
            copies: flips(options.flip_x, options.flip_y).len() as u64,
            batch_size: options.batch_size.max(1) as u64,
            masks: options.masks.as_ref().map(|_| 0),
            ignored: contents.ignored.clone(),
            control_files: contents.control_files,
            ..Self::default()
        };
        for (_, error) in &survey.unreadable {
            report.unreadable.add(|| error.clone());
        }
        let budget = u64::from(options.resolution) * u64::from(options.resolution);
        let mut buckets: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        for (file, cut_off) in survey.files.iter().zip(&contents.cut_off) {
            match file.captioned {
                true => report.captioned += 1,
                false => report.uncaptioned.add(|| below(&file.path)),
            }
            let scaled = |side: u32| ((f64::from(side) * options.scale) as u64).max(1);
            let (width, height) = (scaled(file.size.0), scaled(file.size.1));
            let small = match options.buckets {
                true => width.saturating_mul(height) < budget,
                false => width.min(height) < u64::from(options.resolution),
            };
            if small {
                report
                    .too_small
                    .add(|| format!("{} ({}x{})", below(&file.path), file.size.0, file.size.1));
            }
            if *cut_off {
                report.cut_off.add(|| below(&file.path));
            }
            if let (Some(masks), Some(count)) = (&options.masks, &mut report.masks) {
                *count += u64::from(masks.of(&file.path).is_some());
            }
            // Where an image is cut does not change its bucket.
            let BucketPlan { bucket, .. } = place(file.size, options, divisibility, 0, &file.path);
            *buckets.entry(bucket).or_default() += report.repeats * report.copies;
        }
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
            return Err(EngineError::bad_input(report.nothing_there(options)));
        }
        Ok(report)
    }

    fn nothing_there(&self, options: &DatasetOptions) -> String {
        let path = options.path.display();
        match (self.unreadable.first.first(), self.ignored.is_empty()) {
            (Some(first), _) => format!(
                "{path}: none of its {} images can be read (the first: {first})",
                self.unreadable.count
            ),
            (None, true) => format!("{path}: there is no .jpg, .jpeg, .png or .webp file in it"),
            (None, false) => format!(
                "{path}: there is no .jpg, .jpeg, .png or .webp file in it, only {}",
                counts(&self.ignored)
            ),
        }
    }
}

impl Aside {
    /// Counts the files that are not trained.
    fn look(&mut self, folder: &Path, options: &DatasetOptions, images: &BTreeSet<&PathBuf>, depth: usize) {
        // Deeper than any data set, and not for ever where a link leads upwards.
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
                match name == "_controls" {
                    true => self.control_files += std::fs::read_dir(&path).into_iter().flatten().count() as u64,
                    false if name == "_latent_cache" || name == "_t_e_cache" => {}
                    false => self.look(&path, options, images, depth + 1),
                }
                continue;
            }
            if images.contains(&path) || is_caption(&path, &name, options, images) {
                continue;
            }
            let ending = Path::new(&name)
                .extension()
                .map(|ending| ending.to_string_lossy().to_lowercase());
            *self
                .ignored
                .entry(ending.map_or("no ending".to_owned(), |ending| format!(".{ending}")))
                .or_default() += 1;
        }
    }
}

/// Whether this is the caption of an image beside it.
fn is_caption(path: &Path, name: &str, options: &DatasetOptions, images: &BTreeSet<&PathBuf>) -> bool {
    let Some(stem) = name.strip_suffix(options.caption_ext.as_str()) else {
        return false;
    };
    ["jpg", "jpeg", "png", "webp", "JPG", "JPEG", "PNG", "WEBP"]
        .iter()
        .any(|ending| images.contains(&path.with_file_name(format!("{stem}.{ending}"))))
}

/// `3 .gif, 1 .mp4`.
fn counts(files: &BTreeMap<String, u64>) -> String {
    let each: Vec<String> = files
        .iter()
        .map(|(ending, count)| format!("{count} {ending}"))
        .collect();
    each.join(", ")
}
