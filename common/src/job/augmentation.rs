//! `datasets[].augments` and `datasets[].augmentations`: random changes of images, read from their config values.
//!
//! Names, parameters and defaults are those of albumentations 1.4.15, which ai-toolkit uses.

use super::augmentation_params::Params;
pub use super::augmentation_params::{Border, Range};
use super::schema::{SupportReport, join};
use serde_json::Value;

/// The most augmentations of a data set.
const MAX_AUGMENTATIONS: usize = 32;
/// The widest blur, in pixels.
const MAX_BLUR: f64 = 199.0;
/// The most tiles of CLAHE along a side.
const MAX_TILES: f64 = 64.0;

/// What `datasets[].augments` can name.
pub const BUILT_IN: [&str; 2] = ["ColorJitter", "RandomEqualize"];

/// What `datasets[].augmentations` can name.
pub const KNOWN: [&str; 12] = [
    "HorizontalFlip",
    "VerticalFlip",
    "Rotate",
    "ShiftScaleRotate",
    "RandomBrightnessContrast",
    "HueSaturationValue",
    "ColorJitter",
    "ToGray",
    "GaussianBlur",
    "GaussNoise",
    "Sharpen",
    "CLAHE",
];

/// One entry of `augmentations`.
#[derive(Clone, Debug, PartialEq)]
pub struct Augmentation {
    /// What it changes.
    pub kind: AugmentationKind,
    /// The chance that it is applied to an image, from 0 to 1.
    pub chance: f64,
}

/// What an augmentation changes. Angles are in degrees, counter-clockwise; the others are of images of 8 bits per channel.
#[derive(Clone, Debug, PartialEq)]
pub enum AugmentationKind {
    /// Left and right are swapped.
    HorizontalFlip,
    /// Top and bottom are swapped.
    VerticalFlip,
    /// Rotation around the centre.
    Rotate {
        /// The angle.
        limit: Range,
        /// What is outside of the image.
        border: Border,
    },
    /// Rotation around the centre, scaling and shifting.
    ShiftScaleRotate {
        /// Shift to the right, as a share of the width.
        shift_x: Range,
        /// Shift down, as a share of the height.
        shift_y: Range,
        /// The factor of each side.
        scale: Range,
        /// The angle.
        rotate: Range,
        /// What is outside of the image.
        border: Border,
    },
    /// `value * (1 + contrast) + brightness * 255`.
    RandomBrightnessContrast {
        /// Added, as a share of 255 (or of the image's mean).
        brightness: Range,
        /// Added to the factor 1.
        contrast: Range,
        /// Whether the brightness is a share of 255. Otherwise: of the image's mean.
        by_max: bool,
    },
    /// Shifts of hue (0 to 180), saturation and value (0 to 255).
    HueSaturationValue {
        /// Shift of the hue.
        hue: Range,
        /// Shift of the saturation.
        saturation: Range,
        /// Shift of the value.
        value: Range,
    },
    /// Brightness, contrast, saturation and hue in a random order.
    ColorJitter {
        /// The factor of the brightness.
        brightness: Range,
        /// The factor of the contrast.
        contrast: Range,
        /// The factor of the saturation.
        saturation: Range,
        /// Shift of the hue, as a share of the circle.
        hue: Range,
    },
    /// Shades of grey.
    ToGray,
    /// Gaussian blur.
    GaussianBlur {
        /// The side of the kernel in pixels: 0 or odd.
        size: [u32; 2],
        /// The standard deviation in pixels. 0: it follows from the side.
        sigma: Range,
    },
    /// Gaussian noise.
    GaussNoise {
        /// The variance.
        variance: Range,
        /// The mean.
        mean: f64,
        /// Whether each channel has noise of its own.
        per_channel: bool,
    },
    /// Sharpening.
    Sharpen {
        /// The share of the sharpened image.
        alpha: Range,
        /// Lightness of the sharpened image.
        lightness: Range,
    },
    /// Adaptive histogram equalisation of the lightness.
    Clahe {
        /// How many times the mean a bin of the histogram may have.
        clip: Range,
        /// Tiles across and down.
        tiles: [u32; 2],
    },
}

impl AugmentationKind {
    /// Whether pixels move.
    #[must_use]
    pub fn is_spatial(&self) -> bool {
        matches!(
            self,
            Self::HorizontalFlip | Self::VerticalFlip | Self::Rotate { .. } | Self::ShiftScaleRotate { .. }
        )
    }
}

/// Reads the entries of `augmentations`.
///
/// # Errors
/// For each mistake, its key below `augmentations` (`[0].method`) and a message.
pub fn read_augmentations(entries: &[Value]) -> Result<Vec<Augmentation>, Vec<(String, String)>> {
    let mut mistakes = Vec::new();
    if entries.len() > MAX_AUGMENTATIONS {
        let message = format!("expected at most {MAX_AUGMENTATIONS} entries, found {}", entries.len());
        return Err(vec![(String::new(), message)]);
    }
    let mut all = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        all.extend(read_augmentation(&format!("[{index}]"), entry, &mut mistakes));
    }
    match mistakes.is_empty() {
        true => Ok(all),
        false => Err(mistakes),
    }
}

fn read_augmentation(key: &str, entry: &Value, mistakes: &mut Vec<(String, String)>) -> Option<Augmentation> {
    let Some(method) = entry.get("method").and_then(Value::as_str) else {
        let message = format!(
            "expected `method: NAME` and perhaps `params`; known: {}",
            KNOWN.join(", ")
        );
        mistakes.push((key.to_owned(), message));
        return None;
    };
    if !KNOWN.contains(&method) {
        let message = format!(
            "`{method}` is not supported; these augmentations are: {}",
            KNOWN.join(", ")
        );
        mistakes.push((format!("{key}.method"), message));
        return None;
    }
    for other in entry.as_object().into_iter().flat_map(serde_json::Map::keys) {
        if !["method", "params"].contains(&other.as_str()) {
            let message = "no such key; an entry has `method` and `params`, with the parameters of the method";
            mistakes.push((format!("{key}.{other}"), message.to_owned()));
        }
    }
    let params_key = format!("{key}.params");
    let mut params = Params::new(method, &params_key, entry.get("params"), mistakes);
    let kind = read_kind(method, &mut params);
    let chance = params.number("p", 0.5, 0.0..=1.0);
    let always = params.flag("always_apply", false);
    params.finish();
    Some(Augmentation {
        kind,
        chance: if always { 1.0 } else { chance },
    })
}

fn read_kind(method: &str, params: &mut Params<'_>) -> AugmentationKind {
    match method {
        "VerticalFlip" => AugmentationKind::VerticalFlip,
        "Rotate" => AugmentationKind::Rotate {
            limit: params.symmetric("limit", [-90.0, 90.0], 360.0),
            border: params.border(),
        },
        "ShiftScaleRotate" => {
            let both = params.symmetric("shift_limit", [-0.0625, 0.0625], 1.0);
            let [low, high] = params.symmetric("scale_limit", [-0.1, 0.1], 10.0);
            // A factor of 0 would leave nothing of the image.
            params.check(
                "scale_limit",
                low > -1.0,
                &format!("expected numbers above -1, which are added to the factor 1, found {low}"),
            );
            AugmentationKind::ShiftScaleRotate {
                shift_x: params.symmetric("shift_limit_x", both, 1.0),
                shift_y: params.symmetric("shift_limit_y", both, 1.0),
                scale: [1.0 + low, 1.0 + high],
                rotate: params.symmetric("rotate_limit", [-45.0, 45.0], 360.0),
                border: params.border(),
            }
        }
        "RandomBrightnessContrast" => AugmentationKind::RandomBrightnessContrast {
            brightness: params.symmetric("brightness_limit", [-0.2, 0.2], 10.0),
            contrast: params.symmetric("contrast_limit", [-0.2, 0.2], 10.0),
            by_max: params.flag("brightness_by_max", true),
        },
        "HueSaturationValue" => AugmentationKind::HueSaturationValue {
            hue: params.symmetric("hue_shift_limit", [-20.0, 20.0], 180.0),
            saturation: params.symmetric("sat_shift_limit", [-30.0, 30.0], 255.0),
            value: params.symmetric("val_shift_limit", [-20.0, 20.0], 255.0),
        },
        "ColorJitter" => AugmentationKind::ColorJitter {
            brightness: params.around_one("brightness", [0.8, 1.2]),
            contrast: params.around_one("contrast", [0.8, 1.2]),
            saturation: params.around_one("saturation", [0.8, 1.2]),
            hue: params.symmetric("hue", [-0.5, 0.5], 0.5),
        },
        "ToGray" => AugmentationKind::ToGray,
        "GaussianBlur" => read_blur(params),
        "GaussNoise" => AugmentationKind::GaussNoise {
            variance: params.up_from_zero("var_limit", [10.0, 50.0], 65025.0),
            mean: params.number("mean", 0.0, -255.0..=255.0),
            per_channel: params.flag("per_channel", true),
        },
        "Sharpen" => AugmentationKind::Sharpen {
            alpha: params.pair("alpha", [0.2, 0.5], 0.0..=1.0),
            lightness: params.pair("lightness", [0.5, 1.0], 0.0..=100.0),
        },
        "CLAHE" => {
            let clip = params.up_from_one("clip_limit", [1.0, 4.0], 1000.0);
            let [across, down] = params.pair_in_order("tile_grid_size", [8.0, 8.0], 1.0..=MAX_TILES);
            AugmentationKind::Clahe {
                clip,
                tiles: [across as u32, down as u32],
            }
        }
        // `KNOWN` has no other.
        _ => AugmentationKind::HorizontalFlip,
    }
}

/// A blur: the largest side alone means 3 to it, or 0 to it if a standard deviation is given.
fn read_blur(params: &mut Params<'_>) -> AugmentationKind {
    let sigma = params.up_from_zero("sigma_limit", [0.0, 0.0], 100.0);
    let [low, high] = params.up_from_zero("blur_limit", [3.0, 7.0], MAX_BLUR);
    let is_size = |side: f64| side == 0.0 || side % 2.0 == 1.0;
    params.check(
        "blur_limit",
        is_size(low) && is_size(high),
        &format!("expected odd numbers of pixels up to {MAX_BLUR}, or 0, found {low} to {high}"),
    );
    let low = match low == 0.0 && sigma[0] == 0.0 {
        true => 3.0,
        false => low,
    };
    let high = high.max(low);
    AugmentationKind::GaussianBlur {
        size: [low as u32, high as u32],
        sigma,
    }
}

/// Reports names of `augments` that are not known, and mistakes of `augmentations`. `path`: the key of the data set.
pub(super) fn check_names(augments: &[String], entries: &[Value], path: &str, report: &mut SupportReport) {
    for (index, name) in augments.iter().enumerate() {
        if !BUILT_IN.contains(&name.as_str()) {
            let message = format!("`{name}` is not one of {}", BUILT_IN.join(", "));
            report.error(join(path, &format!("augments[{index}]")), message);
        }
    }
    for (key, message) in read_augmentations(entries).err().unwrap_or_default() {
        report.error(join(path, &format!("augmentations{key}")), message);
    }
}

#[cfg(test)]
#[path = "augmentation_tests.rs"]
#[allow(clippy::unwrap_used)]
mod tests;
