//! albumentations' changes of colours. They take the first channel for red; ai-toolkit gives them blue there.

use crate::rng::TorchGenerator;
use image::RgbImage;

/// `factor * value + add`, cut off to a whole number from 0 to 255.
pub(super) fn multiply_add(mut image: RgbImage, factor: f64, add: f64) -> RgbImage {
    let table = table(|value| f64::from(value as f32 * factor as f32 + add as f32));
    image.iter_mut().for_each(|value| *value = table[usize::from(*value)]);
    image
}

/// The result for each of the 256 values, without its fraction.
fn table(result: impl Fn(f64) -> f64) -> [u8; 256] {
    std::array::from_fn(|value| result(value as f64).clamp(0.0, 255.0) as u8)
}

/// The mean of all channels of all pixels.
pub(super) fn mean(image: &RgbImage) -> f64 {
    let sum: u64 = image.iter().map(|value| u64::from(*value)).sum();
    sum as f64 / (image.len() as f64).max(1.0)
}

/// `ToGray`.
pub(super) fn to_gray(mut image: RgbImage) -> RgbImage {
    image.pixels_mut().for_each(|pixel| pixel.0 = [gray(pixel.0); 3]);
    image
}

/// OpenCV's grey, with weights of 15 bits.
fn gray([red, green, blue]: [u8; 3]) -> u8 {
    let sum = u32::from(red) * 9798 + u32::from(green) * 19235 + u32::from(blue) * 3735;
    ((sum + (1 << 14)) >> 15) as u8
}

/// Step 0 of `ColorJitter` changes the brightness, 1 the contrast, 2 the saturation and 3 the hue.
pub(super) fn jitter_step(mut image: RgbImage, step: usize, factor: f64) -> RgbImage {
    match step {
        0 => multiply_add(image, factor, 0.0),
        1 => {
            let sum: u64 = image.pixels().map(|pixel| u64::from(gray(pixel.0))).sum();
            let mean = sum as f64 / (image.pixels().len() as f64).max(1.0);
            multiply_add(image, factor, mean * (1.0 - factor))
        }
        2 => {
            for pixel in image.pixels_mut() {
                let gray = f64::from(gray(pixel.0));
                for value in &mut pixel.0 {
                    let mixed = f64::from(*value) * factor + gray * (1.0 - factor);
                    *value = mixed.round_ties_even().clamp(0.0, 255.0) as u8;
                }
            }
            image
        }
        _ => shift_hsv(image, [factor * 180.0, 0.0, 0.0]),
    }
}

/// Adds to hue (of 180 steps), saturation and value.
pub(super) fn shift_hsv(mut image: RgbImage, [hue, saturation, value]: [f64; 3]) -> RgbImage {
    if [hue, saturation, value] == [0.0; 3] {
        return image;
    }
    let hues = match hue == 0.0 {
        true => table(|step| step),
        false => table(|step| (step + hue).rem_euclid(180.0)),
    };
    let (saturations, values) = (
        table(|step| step + saturation.trunc()),
        table(|step| step + value.trunc()),
    );
    for pixel in image.pixels_mut() {
        let [h, s, v] = to_hsv(pixel.0);
        pixel.0 = from_hsv([
            hues[usize::from(h)],
            saturations[usize::from(s)],
            values[usize::from(v)],
        ]);
    }
    image
}

/// Fractional bits of OpenCV's division in its conversion to HSV.
const HSV_SHIFT: u32 = 12;

/// OpenCV's conversion to HSV: hue from 0 to 179.
fn to_hsv([red, green, blue]: [u8; 3]) -> [u8; 3] {
    let [r, g, b] = [red, green, blue].map(i32::from);
    let (value, min) = (r.max(g).max(b), r.min(g).min(b));
    let range = value - min;
    let divided = |of: f64, by: i32| match by {
        0 => 0,
        by => (of * f64::from(1 << HSV_SHIFT) / f64::from(by)).round_ties_even() as i32,
    };
    let half = 1 << (HSV_SHIFT - 1);
    let saturation = (range * divided(255.0, value) + half) >> HSV_SHIFT;
    let sixths = if value == r {
        g - b
    } else if value == g {
        b - r + 2 * range
    } else {
        r - g + 4 * range
    };
    let hue = (sixths * divided(30.0, range) + half) >> HSV_SHIFT;
    let hue = if hue < 0 { hue + 180 } else { hue };
    [hue, saturation, value].map(|number| number.clamp(0, 255) as u8)
}

/// OpenCV's conversion from HSV.
fn from_hsv([hue, saturation, value]: [u8; 3]) -> [u8; 3] {
    let sixths = f32::from(hue) * (6.0 / 180.0);
    let sector = sixths.floor();
    let rest = sixths - sector;
    let (saturation, value) = (f32::from(saturation) / 255.0, f32::from(value) / 255.0);
    let of = |share: f32| (value * (1.0 - share) * 255.0).round_ties_even().clamp(0.0, 255.0) as u8;
    let (v, p, q, t) = (
        of(0.0),
        of(saturation),
        of(saturation * rest),
        of(saturation * (1.0 - rest)),
    );
    match sector as u8 % 6 {
        0 => [v, t, p],
        1 => [q, v, p],
        2 => [p, v, t],
        3 => [p, q, v],
        4 => [t, p, v],
        _ => [v, p, q],
    }
}

/// Adds normal noise of this mean and standard deviation. Draws `randn` for each number, or for each pixel.
pub(super) fn add_noise(
    mut image: RgbImage,
    (mean, deviation): (f64, f64),
    per_channel: bool,
    generator: &mut TorchGenerator,
) -> RgbImage {
    let per_number = if per_channel { 1 } else { 3 };
    let noise = generator.randn(image.len() / per_number);
    for (values, noise) in image.chunks_mut(per_number).zip(noise) {
        for value in values {
            *value = add(*value, mean + deviation * f64::from(noise));
        }
    }
    image
}

/// Adds a number without its fraction.
pub(super) fn add(value: u8, number: f64) -> u8 {
    (f64::from(value) + number.trunc()).clamp(0.0, 255.0) as u8
}
