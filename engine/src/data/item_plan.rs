//! How the items of a data set are made of its images: flipped copies, buckets and crops.

use super::bucket::{BucketPlan, plan_bucket, plan_fixed};
use super::dataset_options::DatasetOptions;
use crate::rng::generator_for;
use std::path::Path;

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
