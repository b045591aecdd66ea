//! Aspect buckets, as in ai-toolkit (docs/randomness.md): the size that an image is scaled and cropped to.

use crate::rng::TorchGenerator;

/// How an image becomes a training image: it is scaled to `scale_to`, then cropped at `crop`.
///
/// Its `Debug` text is hashed in checkpoints and must not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BucketPlan {
    /// Width and height after cropping; the key of the bucket.
    pub bucket: (u32, u32),
    /// Width and height after scaling, never below the bucket's.
    pub scale_to: (u32, u32),
    /// Left and top edge of the crop.
    pub crop: (u32, u32),
}

/// Plans the bucket of an image of `width` x `height` (after EXIF rotation and `scale`) for a resolution and the
/// model's divisibility, cropped from the centre. `square`: every image becomes a square of the resolution, rounded down to a multiple of
/// the divisibility; smaller images are enlarged, as in ai-toolkit.
#[must_use]
pub fn plan_bucket(width: u32, height: u32, resolution: u32, divisibility: u32, square: bool) -> BucketPlan {
    let (width, height) = (width.max(1), height.max(1));
    let bucket = if square {
        let unit = divisibility.max(1);
        let side = (resolution / unit * unit).max(unit);
        (side, side)
    } else {
        bucket_size(width, height, resolution, divisibility)
    };
    cover(width, height, bucket)
}

/// Plans an image without buckets: scaled to cover a size (width and height), then cropped to it from the centre.
#[must_use]
pub fn plan_fixed(width: u32, height: u32, size: (u32, u32)) -> BucketPlan {
    cover(width.max(1), height.max(1), size)
}

/// Plans an image without buckets that is cropped to a square at a random position, and with `scaled` before that to a random size
/// between `side` and its own, as in ai-toolkit. A side that is smaller than `side` is enlarged to it.
///
/// Draws `randint(side, shorter side + 1)` if the image is scaled, and the left and the top edge of the crop.
pub(super) fn draw_square(
    (width, height): (u32, u32),
    side: u32,
    scaled: bool,
    generator: &mut TorchGenerator,
) -> BucketPlan {
    let mut number = |low: u32, high: u32| {
        let drawn = generator.randint(i64::from(low), i64::from(high) + 1, 1);
        drawn
            .first()
            .and_then(|number| u32::try_from(*number).ok())
            .unwrap_or(low)
    };
    let shorter = width.min(height);
    let size = match scaled && shorter > side {
        true => {
            let factor = f64::from(number(side, shorter)) / f64::from(shorter);
            // ai-toolkit adds 5 pixels, so that no side is below the square's.
            [width, height].map(|length| (f64::from(length + 5) * factor) as u32)
        }
        false => [width, height],
    };
    let [width, height] = size.map(|length| length.max(side));
    BucketPlan {
        bucket: (side, side),
        scale_to: (width, height),
        crop: (number(0, width - side), number(0, height - side)),
    }
}

/// Scales the image to cover the bucket and crops it from the centre.
fn cover(width: u32, height: u32, bucket: (u32, u32)) -> BucketPlan {
    let (w, h) = (f64::from(width), f64::from(height));
    let factor = (f64::from(bucket.0) / w).max(f64::from(bucket.1) / h);
    let scale_to = (
        ((w * factor).ceil() as u32).max(bucket.0),
        ((h * factor).ceil() as u32).max(bucket.1),
    );
    let crop = ((scale_to.0 - bucket.0) / 2, (scale_to.1 - bucket.1) / 2);
    BucketPlan { bucket, scale_to, crop }
}

/// The multiple of `divisibility` closest to the image's area, at most `resolution` squared pixels.
fn bucket_size(width: u32, height: u32, resolution: u32, divisibility: u32) -> (u32, u32) {
    let d = f64::from(divisibility.max(1));
    let budget = f64::from(resolution) * f64::from(resolution);
    let area = f64::from(width) * f64::from(height);
    let target = area.min(budget);
    let factor = (target / area).sqrt();
    let (w, h) = (f64::from(width) * factor / d, f64::from(height) * factor / d);
    let mut best: Option<(f64, (f64, f64))> = None;
    for cw in [w.floor(), w.ceil()] {
        for ch in [h.floor(), h.ceil()] {
            let (cw, ch) = (cw * d, ch * d);
            if cw <= 0.0 || ch <= 0.0 || cw * ch > budget {
                continue;
            }
            let error = (cw * ch - target).abs();
            if best.is_none_or(|(smallest, _)| error < smallest) {
                best = Some((error, (cw, ch)));
            }
        }
    }
    let (bw, bh) = best.map_or((d.max(w.floor() * d), d.max(h.floor() * d)), |(_, size)| size);
    (bw as u32, bh as u32)
}

/// Whether two sizes, width and height, differ only by a factor, up to 2 %.
pub(super) fn have_same_aspect_ratio((width, height): (u32, u32), (other_width, other_height): (u32, u32)) -> bool {
    let ratio = f64::from(width) * f64::from(other_height) / (f64::from(height) * f64::from(other_width));
    (0.98..1.02).contains(&ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_examples_of_the_config_reference() {
        for ((w, h, r, d), bucket, scaled) in [
            ((1920, 1080, 1024, 32), (1344, 768), (1366, 768)),
            ((1920, 1080, 512, 16), (672, 384), (683, 384)),
            ((4000, 3000, 1024, 16), (1168, 896), (1195, 897)),
            ((800, 600, 1024, 16), (800, 592), (800, 600)),
            ((640, 640, 1024, 32), (640, 640), (640, 640)),
        ] {
            let plan = plan_bucket(w, h, r, d, false);
            assert_eq!((plan.bucket, plan.scale_to), (bucket, scaled), "{w}x{h} at {r}");
            assert_eq!(plan.crop, ((scaled.0 - bucket.0) / 2, (scaled.1 - bucket.1) / 2));
        }
    }

    #[test]
    fn without_buckets_every_plan_has_one_size() {
        for ((w, h), scaled, crop) in [
            ((1920, 1080), (911, 512), (199, 0)),
            ((300, 400), (512, 683), (0, 85)),
            ((512, 512), (512, 512), (0, 0)),
        ] {
            let plan = plan_fixed(w, h, (512, 512));
            assert_eq!((plan.bucket, plan.scale_to, plan.crop), ((512, 512), scaled, crop));
        }
        let plan = plan_fixed(800, 600, (512, 768));
        assert_eq!(
            (plan.bucket, plan.scale_to, plan.crop),
            ((512, 768), (1024, 768), (256, 0))
        );
    }

    #[test]
    fn random_squares_are_inside_of_the_image_and_reach_every_scale() {
        let draws = |size, scaled| {
            let mut generator = crate::rng::generator_for(1, "test", 0, 0);
            let draw = move |_| draw_square(size, 64, scaled, &mut generator);
            (0..500).map(draw).collect::<Vec<_>>()
        };
        for plan in draws((100, 80), false) {
            assert_eq!((plan.bucket, plan.scale_to), ((64, 64), (100, 80)));
        }
        let edges: Vec<(u32, u32)> = draws((100, 80), false).iter().map(|plan| plan.crop).collect();
        let sides = |of: &dyn Fn(&(u32, u32)) -> u32| (edges.iter().map(of).min(), edges.iter().map(of).max());
        assert_eq!(sides(&|crop| crop.0), (Some(0), Some(36)));
        assert_eq!(sides(&|crop| crop.1), (Some(0), Some(16)));
        let heights: std::collections::BTreeSet<u32> =
            draws((100, 80), true).iter().map(|plan| plan.scale_to.1).collect();
        // `int((80 + 5) * side / 80)` for each side from 64 to 80.
        let expected: Vec<u32> = (64..=80).map(|side| 85 * side / 80).collect();
        assert_eq!(heights.into_iter().collect::<Vec<_>>(), expected);
        for plan in draws((100, 80), true) {
            assert!(plan.crop.0 + 64 <= plan.scale_to.0 && plan.crop.1 + 64 <= plan.scale_to.1);
        }
        assert_eq!(draws((64, 90), true)[0].scale_to, (64, 90));
    }

    #[test]
    fn extreme_image_sizes_get_a_bucket() {
        for (w, h) in [(1, 1), (1, 5000), (7, 3), (20_000, 3)] {
            let plan = plan_bucket(w, h, 512, 16, false);
            assert!(plan.bucket.0 >= 16 && plan.bucket.1 >= 16, "{plan:?}");
            assert!(
                plan.scale_to.0 >= plan.bucket.0 && plan.scale_to.1 >= plan.bucket.1,
                "{plan:?}"
            );
        }
    }

    /// As ai-toolkit's `square_crop`: the shorter side becomes the resolution, whatever it was.
    #[test]
    fn square_crops_have_the_resolution() {
        for ((w, h, r), side, scaled, crop) in [
            ((800, 600, 512), 512, (683, 512), (85, 0)),
            ((300, 400, 512), 512, (512, 683), (0, 85)),
            ((100, 100, 512), 512, (512, 512), (0, 0)),
            // Rounded down to what the model needs.
            ((100, 100, 500), 496, (496, 496), (0, 0)),
            ((100, 100, 9), 16, (16, 16), (0, 0)),
        ] {
            let plan = plan_bucket(w, h, r, 16, true);
            assert_eq!((plan.bucket, plan.scale_to, plan.crop), ((side, side), scaled, crop));
        }
    }
}
