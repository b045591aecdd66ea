//! Data sets: images with their buckets and captions.

use super::allowed_paths::AllowedPaths;
use super::dataset_options::{DatasetOptions, check_options};
use super::dataset_scan::{DatasetScan, ScannedImage, Warnings};
use super::half::Half;
use super::item_plan::{flip_variants, plan_item};
use super::latent_cache::content_hash;
use super::masks::check_mask_file;
use super::training_image::{Control, TrainingImage};
use crate::error::{EngineError, Result};
use std::collections::HashMap;
use std::path::PathBuf;

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

        let allowed_masks = match &options.masks {
            Some(masks) => masks.allowed_paths(&scan.allowed_paths)?,
            None => AllowedPaths::any(),
        };
        if let Some(masks) = &options.masks {
            for image in images {
                let mask = masks.mask_for(&image.path, &allowed_masks)?;
                if let Some(mask) = mask.filter(|mask| !mask.alpha) {
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
                    let masks = options.masks.as_ref();
                    let mask = masks.map(|masks| masks.mask_for(path, &allowed_masks)).transpose()?;
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
                        mask: mask.flatten(),
                        control,
                    });
                }
            }
        }
        Ok((Self { options, items }, warnings))
    }
}
