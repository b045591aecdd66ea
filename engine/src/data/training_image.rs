//! One training image of a data set, and its loss mask.

use super::bucket::BucketPlan;
use super::half::Half;
use super::image_statistics::ImageStatistics;
use super::latent_cache::{ControlKey, LatentKey};
use std::path::PathBuf;

/// One training image.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingImage {
    /// The image file.
    pub path: PathBuf,
    /// SHA-256 of the file, in hexadecimal.
    pub content: String,
    /// The folder of its cached latent. `None`: next to the image.
    pub derived: Option<PathBuf>,
    /// The half of the file that is the image. `None`: all of it.
    pub half: Option<Half>,
    /// Width and height of the image, after EXIF rotation and before anything else.
    pub size: (u32, u32),
    /// How it is scaled and cropped.
    pub plan: BucketPlan,
    /// What its pixels are normalised by. `None`: they are from -1 to 1.
    pub normalization: Option<ImageStatistics>,
    /// Whether its normalised pixels are limited to -1 to 1 before they are encoded.
    pub is_clamped: bool,
    /// Whether it is flipped left to right.
    pub flip_x: bool,
    /// Whether it is flipped upside down.
    pub flip_y: bool,
    /// The caption as read, before the caption rules.
    pub caption: String,
    /// The short caption as read.
    pub short_caption: Option<String>,
    /// Its loss mask. `None`: all pixels count.
    pub mask: Option<Mask>,
    /// Its control image. `None`: it is trained without one.
    pub control: Option<Control>,
}

impl TrainingImage {
    /// The cache key of its latent.
    #[must_use]
    pub fn latent_key(&self, latent_space: &str) -> LatentKey {
        LatentKey {
            filename: self.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            plan: self.plan,
            flip_x: self.flip_x,
            flip_y: self.flip_y,
            latent_space: latent_space.to_owned(),
            normalization: self.normalization.map(|statistics| statistics.name),
            is_clamped: self.is_clamped,
            control: None,
            half: self.half,
        }
    }

    /// The seed of its noise where that is the same in every epoch (`train.force_consistent_noise`): its content and its flips.
    #[must_use]
    pub fn noise_seed(&self) -> String {
        let flip = |on: bool, mark: &'static str| if on { mark } else { "" };
        format!(
            "{}{}{}",
            self.content,
            flip(self.flip_x, "_fx"),
            flip(self.flip_y, "_fy")
        )
    }

    /// The cache key of the latent of its control image.
    #[must_use]
    pub fn control_key(&self, control: &Control, latent_space: &str) -> LatentKey {
        LatentKey {
            filename: control
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            control: Some(ControlKey {
                background: control.background,
                full_size: control.full_size,
            }),
            half: control.half,
            normalization: None,
            is_clamped: false,
            ..self.latent_key(latent_space)
        }
    }
}

/// The control image of one image: what the model changes into the image, the negative end of a slider, or what the loss compares the image
/// with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// The half of the file that is the image. `None`: all of it.
    pub half: Option<Half>,
    /// The image file.
    pub path: PathBuf,
    /// SHA-256 of the file, in hexadecimal.
    pub content: String,
    /// The colour behind its transparent pixels. `None`: transparency is dropped, as of training images.
    pub background: Option<[u8; 3]>,
    /// Whether it is flipped, scaled and cropped like its image. Otherwise it is squeezed to 512 x 512, then to the size of its image.
    pub full_size: bool,
}

/// The loss mask of one image.
#[derive(Clone, Debug, PartialEq)]
pub struct Mask {
    /// The mask file, or the image itself where its alpha channel is the mask.
    pub path: PathBuf,
    /// Use the alpha channel.
    pub alpha: bool,
    /// Black counts in full instead of white.
    pub invert: bool,
    /// Loss weight of black pixels (of white ones with `invert`).
    pub min_value: f64,
}

impl Mask {
    /// A text that differs between different masks. Checkpoints store its hash, so it must not change.
    #[must_use]
    pub fn identity(&self) -> String {
        let Self {
            path,
            alpha,
            invert,
            min_value,
        } = self;
        format!("Mask {{ path: {path:?}, alpha: {alpha}, invert: {invert}, min_value: {min_value:?} }}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Run folders of earlier versions were written with this text.
    #[test]
    fn the_identity_of_a_mask_is_that_of_the_first_version() {
        let mask = Mask {
            path: PathBuf::from("/masks/a \"b\".png"),
            alpha: false,
            invert: true,
            min_value: 0.0,
        };
        assert_eq!(
            mask.identity(),
            r#"Mask { path: "/masks/a \"b\".png", alpha: false, invert: true, min_value: 0.0 }"#
        );
        assert_eq!(mask.identity(), format!("{mask:?}"));
    }
}
