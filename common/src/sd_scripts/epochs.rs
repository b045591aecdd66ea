//! How many steps an epoch of sd-scripts has: the number of its batches, which buckets and regularisation images change.

use super::folders::Folder;
use super::image_size::image_size;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What decides the number of batches of a data set.
#[derive(Clone)]
pub(super) struct CountedDataset {
    pub batch_size: u64,
    /// Buckets, if they are on.
    pub buckets: Option<BucketOptions>,
    pub subsets: Vec<CountedSubset>,
}

/// A folder of a data set.
#[derive(Clone)]
pub(super) struct CountedSubset {
    pub folder: PathBuf,
    pub repeats: u64,
    pub is_reg: bool,
    /// Its images that are not trained.
    pub excluded: Vec<PathBuf>,
    /// Its metadata file.
    pub metadata: Option<String>,
}

impl CountedSubset {
    /// Whether sd-scripts takes a subset for this one: it has the same metadata file, or the same folder if there is none.
    pub(super) fn is_same(&self, folder: &Path, metadata: Option<&str>) -> bool {
        match (&self.metadata, metadata) {
            (None, None) => self.folder == folder,
            (ours, theirs) => ours.as_deref() == theirs,
        }
    }

    /// An image that this subset's metadata file and another one for the folder both have; `excluded` are the images that the other lacks.
    /// sd-scripts has each image of a data set once.
    pub(super) fn shared_image(&self, folder: &Path, excluded: &[PathBuf]) -> Option<PathBuf> {
        if self.metadata.is_none() || self.folder != folder {
            return None;
        }
        let images = Folder::read(folder)?.images;
        images
            .into_iter()
            .find(|image| !self.excluded.contains(image) && !excluded.contains(image))
    }
}

/// The options of buckets.
#[derive(Clone, Copy, Debug)]
pub(super) struct BucketOptions {
    pub resolution: (u32, u32),
    pub min: u32,
    pub largest: u32,
    pub step: u32,
    pub no_upscale: bool,
}

/// Counts the batches of one epoch.
///
/// # Errors
/// A message that says which folder or file cannot be read.
pub(super) fn batches(datasets: &[CountedDataset]) -> Result<u64, String> {
    let mut all = 0_u64;
    for dataset in datasets {
        all = all.saturating_add(batches_of(dataset)?);
    }
    match all {
        0 => Err("there are no images in the folders of the data sets".to_owned()),
        all => Ok(all),
    }
}

fn batches_of(dataset: &CountedDataset) -> Result<u64, String> {
    let images = repeated_images(dataset)?;
    let batch_size = dataset.batch_size.max(1);
    let Some(buckets) = dataset.buckets.filter(|_| batch_size > 1) else {
        return Ok(total(images.iter().map(|(_, repeats)| *repeats)).div_ceil(batch_size));
    };
    let resolutions = bucket_resolutions(&buckets);
    let mut counts: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (path, repeats) in images {
        let size = image_size(&path).ok_or_else(|| {
            format!(
                "the size of {} is needed to count batches, and it is not a PNG, JPEG, WebP or BMP file",
                path.display().to_string().escape_debug()
            )
        })?;
        let count = counts.entry(bucket_of(size, &buckets, &resolutions)).or_default();
        *count = count.saturating_add(repeats);
    }
    Ok(total(counts.values().map(|count| count.div_ceil(batch_size))))
}

/// The sum; the largest number where it has no room.
fn total(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// The images of a data set with their repeats. Regularisation images are repeated, or left out, until they are as many as the
/// others.
fn repeated_images(dataset: &CountedDataset) -> Result<Vec<(PathBuf, u64)>, String> {
    let (mut train, mut reg) = (Vec::new(), Vec::new());
    for subset in dataset.subsets.iter().filter(|subset| subset.repeats > 0) {
        let folder = Folder::read(&subset.folder).ok_or_else(|| {
            format!(
                "the images in {} have to be counted for it, and this folder cannot be read: set max_train_steps, \
                 save_every_n_steps and sample_every_n_steps instead of epochs, or import where the images are",
                subset.folder.display().to_string().escape_debug()
            )
        })?;
        let trained = folder.images.into_iter().filter(|path| !subset.excluded.contains(path));
        let images = trained.map(|path| (path, subset.repeats));
        if subset.is_reg {
            reg.extend(images)
        } else {
            train.extend(images)
        }
    }
    let wanted = total(train.iter().map(|(_, repeats)| *repeats));
    let mut count = 0_u64;
    let mut used = 0;
    for (_, repeats) in &reg {
        if count >= wanted {
            break;
        }
        count = count.saturating_add(*repeats);
        used += 1;
    }
    reg.truncate(used);
    if let (Some(missing), false) = (wanted.checked_sub(count), reg.is_empty()) {
        let (each, more) = (missing / reg.len() as u64, missing % reg.len() as u64);
        for (index, (_, repeats)) in reg.iter_mut().enumerate() {
            *repeats = repeats.saturating_add(each + u64::from((index as u64) < more));
        }
    }
    train.extend(reg);
    Ok(train)
}

/// The sizes of the buckets, sorted. The options have no side above `MAX_SIDE`.
fn bucket_resolutions(options: &BucketOptions) -> Vec<(u32, u32)> {
    let step = options.step.max(1);
    let area = u64::from(options.resolution.0) * u64::from(options.resolution.1);
    let largest = options
        .largest
        .checked_next_multiple_of(step)
        .unwrap_or(options.largest);
    let min = options.min - options.min % step;
    let side = ((area as f64).sqrt() as u32) / step * step;
    let mut sizes = vec![(side, side)];
    for width in (min.max(step)..=largest).step_by(step as usize) {
        let height = u32::try_from(area / u64::from(width)).unwrap_or(u32::MAX) / step * step;
        let height = height.min(largest);
        if height >= min {
            sizes.extend([(width, height), (height, width)]);
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The bucket of an image.
fn bucket_of(size: (u32, u32), options: &BucketOptions, resolutions: &[(u32, u32)]) -> (u32, u32) {
    let ratio = f64::from(size.0) / f64::from(size.1);
    if options.no_upscale {
        return bucket_without_upscale(size, ratio, options);
    }
    if resolutions.contains(&size) {
        return size;
    }
    let error = |bucket: &(u32, u32)| (f64::from(bucket.0) / f64::from(bucket.1) - ratio).abs();
    let best = resolutions
        .iter()
        .filter(|bucket| bucket.1 > 0)
        .min_by(|a, b| error(a).total_cmp(&error(b)));
    best.copied().unwrap_or(options.resolution)
}

fn bucket_without_upscale(size: (u32, u32), ratio: f64, options: &BucketOptions) -> (u32, u32) {
    let step = options.step.max(1);
    let floor = |side: f64| {
        let side = side as u32;
        side - side % step
    };
    let rounded = |side: f64| floor(side + 0.5);
    let area = f64::from(options.resolution.0) * f64::from(options.resolution.1);
    let resized = if f64::from(size.0) * f64::from(size.1) > area {
        let width = (area * ratio).sqrt();
        let height = area / width;
        let by_width = (rounded(width), rounded(f64::from(rounded(width)) / ratio));
        let by_height = (rounded(f64::from(rounded(height)) * ratio), rounded(height));
        let error = |(width, height): (u32, u32)| (f64::from(width) / f64::from(height) - ratio).abs();
        if error(by_width) < error(by_height) {
            (f64::from(by_width.0), f64::from(by_width.0) / ratio + 0.5)
        } else {
            (f64::from(by_height.1) * ratio + 0.5, f64::from(by_height.1))
        }
    } else {
        (f64::from(size.0), f64::from(size.1))
    };
    (floor(resized.0), floor(resized.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: BucketOptions = BucketOptions {
        resolution: (512, 512),
        min: 256,
        largest: 1024,
        step: 64,
        no_upscale: false,
    };

    #[test]
    fn the_largest_sides_of_buckets_do_not_overflow() {
        let options = BucketOptions {
            largest: u32::MAX - 63,
            step: 1 << 28,
            ..OPTIONS
        };
        assert_eq!(bucket_resolutions(&options).first(), Some(&(0, 0)));
        let options = BucketOptions {
            largest: u32::MAX,
            step: 3 << 28,
            min: 0,
            ..options
        };
        assert_eq!(bucket_resolutions(&options).len(), 11);
    }

    #[test]
    fn buckets_are_those_of_sd_scripts() {
        let sizes = bucket_resolutions(&OPTIONS);
        assert_eq!(sizes.first(), Some(&(256, 832)));
        assert!(
            sizes.contains(&(512, 512))
                && sizes.contains(&(1024, 256))
                && sizes.contains(&(640, 384))
                && sizes.contains(&(384, 640))
        );
        assert_eq!(bucket_of((1000, 1000), &OPTIONS, &sizes), (512, 512));
        assert_eq!(bucket_of((1600, 1000), &OPTIONS, &sizes), (640, 384));
        let small = BucketOptions {
            no_upscale: true,
            ..OPTIONS
        };
        assert_eq!(bucket_of((300, 200), &small, &sizes), (256, 192));
        assert_eq!(bucket_of((1600, 1000), &small, &sizes), (640, 384));
    }

    #[test]
    fn regularisation_images_are_as_many_as_the_others() {
        let folder = tempfile::tempdir().unwrap();
        for (name, count) in [("train", 5), ("reg", 2)] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            for index in 0..count {
                std::fs::write(folder.path().join(name).join(format!("{index}.png")), "").unwrap();
            }
        }
        let subset = |name: &str, repeats, is_reg| CountedSubset {
            folder: folder.path().join(name),
            repeats,
            is_reg,
            excluded: Vec::new(),
            metadata: None,
        };
        let mut dataset = CountedDataset {
            batch_size: 4,
            buckets: None,
            subsets: vec![subset("train", 3, false), subset("reg", 1, true)],
        };
        assert_eq!(
            batches(std::slice::from_ref(&dataset)),
            Ok(8),
            "15 + 15 images in batches of 4"
        );
        dataset.subsets.remove(1);
        assert_eq!(batches(std::slice::from_ref(&dataset)), Ok(4));
        dataset.subsets[0].excluded = vec![folder.path().join("train/3.png"), folder.path().join("train/4.png")];
        assert_eq!(batches(std::slice::from_ref(&dataset)), Ok(3), "9 images");
        dataset.subsets[0].repeats = i64::MAX.unsigned_abs();
        dataset.subsets.push(subset("reg", u64::MAX, true));
        dataset.batch_size = 1;
        assert_eq!(batches(&[dataset.clone(), dataset.clone()]), Ok(u64::MAX), "not fewer");
        dataset.subsets[0].folder = folder.path().join("missing");
        assert!(batches(&[dataset]).unwrap_err().contains("max_train_steps"));
    }
}
