//! Compares a training on a device with the same training on the CPU.

use super::check_jobs::Training;
use super::report::{Comparison, ImageDifference};
use crate::failure::Failure;
use std::path::{Path, PathBuf};

/// The differences that are allowed in a dtype.
///
/// In f32 only the order of sums differs. In half precision every operation rounds (to 8 bits in bf16, 11 in f16). On
/// `cpu:portable` f32 differs from the CPU by 1e-6 and 0.00/255, f16 by 0.05 % and 0.04/255, bf16 by 0.6 % and 0.3/255.
pub(super) struct Tolerance {
    /// Largest difference of the losses, relative to the reference.
    pub loss: f64,
    /// Mean difference of the images, in units of 1/255.
    pub image: f64,
}

impl Tolerance {
    pub(super) fn of(dtype: &str) -> Self {
        match dtype {
            "bf16" => Self { loss: 0.03, image: 3.0 },
            "f16" => Self {
                loss: 0.005,
                image: 0.5,
            },
            _ => Self { loss: 1e-3, image: 0.1 },
        }
    }
}

/// Compares losses and images.
///
/// # Errors
/// When steps or images are missing, or an image cannot be read.
pub(super) fn compare(reference: &Training, training: &Training, dtype: &str) -> Result<Comparison, Failure> {
    for (what, found, expected) in [
        ("steps", training.losses.len(), reference.losses.len()),
        (
            "images before the training",
            training.before.len(),
            reference.before.len(),
        ),
        ("images after the training", training.after.len(), reference.after.len()),
    ] {
        if found != expected || found == 0 {
            return Err(Failure::failed(format!("it made {found} {what} instead of {expected}")));
        }
    }
    let losses = training.losses.iter().zip(&reference.losses);
    let loss_difference = losses.fold(0.0f64, |largest, (found, expected)| {
        largest.max(or_infinite((found - expected).abs() / expected.abs()))
    });
    let before = image_difference(&training.before, &reference.before)?;
    let after = image_difference(&training.after, &reference.after)?;
    let tolerance = Tolerance::of(dtype);
    let failures = [
        (loss_difference > tolerance.loss).then(|| {
            format!(
                "the losses of {} steps differ from the CPU's by up to {:.2} % (at most {:.1} % are expected)",
                training.losses.len(),
                100.0 * loss_difference,
                100.0 * tolerance.loss
            )
        }),
        (before.mean > tolerance.image || after.mean > tolerance.image).then(|| {
            format!(
                "its images differ from the CPU's by {:.1}/255 on average before and {:.1}/255 after the training \
                 (at most {:.1}/255 are expected)",
                before.mean, after.mean, tolerance.image
            )
        }),
    ];
    Ok(Comparison {
        loss_difference,
        image_before: before,
        image_after: after,
        failures: failures.into_iter().flatten().collect(),
    })
}

/// NaN compares as different.
fn or_infinite(difference: f64) -> f64 {
    if difference.is_nan() { f64::INFINITY } else { difference }
}

fn image_difference(found: &[PathBuf], expected: &[PathBuf]) -> Result<ImageDifference, Failure> {
    let (mut sum, mut count, mut largest) = (0u64, 0u64, 0u8);
    for (found, expected) in found.iter().zip(expected) {
        let (found, expected) = (open(found)?, open(expected)?);
        if found.dimensions() != expected.dimensions() {
            return Err(Failure::failed("its images have another size"));
        }
        for (a, b) in found.as_raw().iter().zip(expected.as_raw()) {
            let difference = a.abs_diff(*b);
            (sum, count, largest) = (sum + u64::from(difference), count + 1, largest.max(difference));
        }
    }
    Ok(ImageDifference {
        mean: sum as f64 / count.max(1) as f64,
        largest,
    })
}

fn open(path: &Path) -> Result<image::RgbImage, Failure> {
    let image =
        image::open(path).map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
    Ok(image.to_rgb8())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(folder: &Path, name: &str, value: u8) -> Vec<PathBuf> {
        let path = folder.join(name);
        image::RgbImage::from_pixel(4, 4, image::Rgb([value; 3]))
            .save(&path)
            .unwrap();
        vec![path]
    }

    #[test]
    fn differences_are_measured_and_judged() {
        let folder = tempfile::tempdir().unwrap();
        let training = |loss: f64, value: u8| Training {
            losses: vec![1.0, loss],
            before: image(folder.path(), &format!("before{value}.png"), value),
            after: image(folder.path(), &format!("after{value}.png"), value),
        };
        let reference = training(2.0, 100);
        let same = compare(&reference, &training(2.0, 100), "f32").unwrap();
        assert!(same.failures.is_empty() && same.loss_difference == 0.0, "{same:?}");
        let close = compare(&reference, &training(2.04, 103), "bf16").unwrap();
        assert!(close.failures.is_empty(), "{close:?}");
        assert_eq!(close.image_after.largest, 3);
        assert_eq!(
            compare(&reference, &training(2.08, 103), "f32").unwrap().failures.len(),
            2
        );
        let nan = compare(&reference, &training(f64::NAN, 100), "bf16").unwrap();
        assert_eq!(nan.failures.len(), 1, "{nan:?}");
        let short = Training {
            losses: vec![1.0],
            ..training(2.0, 100)
        };
        assert!(
            compare(&reference, &short, "f32")
                .unwrap_err()
                .message
                .contains("1 steps")
        );
    }
}
